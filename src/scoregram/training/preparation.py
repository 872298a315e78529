"""What a run checks and opens before its first step: its task, the space on the disk, the run folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scoregram.checks import fail
from scoregram.policy import Policy, weights_sha256
from scoregram.runs import METRICS, RunWriter, environment, last_scalar, open_run
from scoregram.tasks import Problem, Task, load_task
from scoregram.training.checkpoint import Position, Resumable, load_checkpoint
from scoregram.training.config import TrainConfig, control_option, is_due
from scoregram.training.critic import Critic
from scoregram.training.evaluate import require_test_problems
from scoregram.training.inputs import InputSource, require_inputs
from scoregram.training.prefix_values import EXACT_TRUTH_REMEDY, exact_task_obstacle, fail_exact

START_HASH = "start_sha256"
"""Key of a run's environment: `weights_sha256` of the policy before the first step."""


def training_task(config: TrainConfig) -> Task:
    """The task with the turns and the training problems that the config asks for.

    Raises:
        ScoregramError: If a setting does not fit the task.
    """
    task = load_task(config.task, seed=config.seed, reward=config.reward, step_scores=config.step_scores)
    return fitted_task(config, task)


def fitted_task(config: TrainConfig, task: Task) -> Task:
    """A loaded task with the turns and the training problems that the config asks for.

    Raises:
        ScoregramError: If a setting does not fit the task.
    """
    require_fit(config, task)
    task = replace(task, max_turns=config.max_turns or task.max_turns)
    return replace(task, train=first_problems(task, config.train_problems)) if config.train_problems else task


def require_fit(config: TrainConfig, task: Task) -> None:
    """Raise, before a model is loaded, if a setting and the task exclude each other."""
    if config.step_scores is not None and task.environment is not None:
        fail("train --step-scores", "needs a task of one turn", task.name, "Leave it out.")
    require_inputs(config.chosen_method, config, task)
    require_test_problems(config, task)
    if config.credit_truth == "exact" and (obstacle := exact_task_obstacle(config, task)) is not None:
        fail_exact("credit-truth", obstacle, EXACT_TRUTH_REMEDY)
    if config.max_turns and task.environment is None:
        fail("train --max-turns", "needs a task with an environment", task.name, "Leave it out.")
    if config.chosen_method.drafts and task.environment is not None:
        remedy = "Choose another method."
        fail("train --method", f"the drafts of {config.method} need a task of one turn", task.name, remedy)
    for control in config.controls:
        if control != "group_size" and task.environment is not None:
            remedy = "Leave it out, or choose another task."
            fail(control_option(control), "needs a task of one turn", task.name, remedy)
    if config.credit_truth == "sampled" and config.chosen_method.branches and task.environment is not None:
        got = f"{config.method}, whose rollouts are candidates for one turn without the reply to it"
        fail("train --credit-truth", "sampled values of turns need whole episodes", got, "Leave it out.")


def first_problems(task: Task, count: int) -> Sequence[Problem]:
    """The first problems of the training split, which `--train-problems` asks for."""
    if count > len(task.train):
        fail("train --train-problems", f"{task.name} has {len(task.train)} training problems", count, "Lower it.")
    return task.train[:count]


def require_metrics(folder: Path) -> None:
    """Raise if a run that is resumed lost metrics of steps before its checkpoint: they would be missing for good."""
    latest, last = open_run(folder).latest_checkpoint, last_scalar(folder, "step")
    if latest is not None and last < latest[0]:
        requirement = f"{folder / METRICS} must have every step up to the checkpoint of step {latest[0]}"
        remedy = f"Restore it from a copy, or delete {folder} to train the run again."
        got = f"a file that ends at step {last}" if last else "a file without a step"
        fail("train", requirement, got if (folder / METRICS).exists() else "no such file", remedy)


def open_writer(
    config: TrainConfig, policy: Policy, optimizer: torch.optim.Optimizer, parts: Sequence[Resumable]
) -> tuple[RunWriter, Position]:
    """The writer of the run folder, and the position of the run."""
    settings: dict[str, Any] = {"layers": config.layers, "keep_checkpoints": config.keep_checkpoints or None}
    if config.keep_evidence:
        known = open_run(config.out).environment.get(START_HASH) if config.resume else None
        settings["environment"] = environment() | {START_HASH: known or weights_sha256(policy.model)}
    if not config.resume:
        writer = RunWriter.create(
            config.out, config.record(), overwrite=config.overwrite, caller="train --out", **settings
        )
        return writer, Position(0, 0)
    latest = open_run(config.out).latest_checkpoint
    position = Position(0, 0) if latest is None else load_checkpoint(latest[1], policy, optimizer, parts)
    if not position.rollouts:  # a checkpoint of an older version
        position = replace(position, rollouts=position.problems * config.starting_group_size)
    if position.step > config.steps and not config.rollouts:
        fail(
            "train --resume", f"steps must be at least {position.step}, which are done", config.steps, "Raise --steps."
        )
    kept = position.step if latest is not None else -1
    writer = RunWriter.resume(config.out, kept, config=config.record(), may_differ=config.may_differ(), **settings)
    return writer, position


def checkpoints_to_come(config: TrainConfig) -> int:
    """Number of checkpoints that need free disk space, besides those that a resumed run already has.

    A new checkpoint is complete before the oldest one is removed, so `keep_checkpoints` needs space for one more.
    """
    every, done = config.checkpoint_every, len(open_run(config.out).checkpoints) if config.resume else 0
    written = config.most_steps // every if every else 0
    if config.final_checkpoint and not is_due(config.most_steps, every):
        written += 1
    most = min(written, config.keep_checkpoints + 1) if config.keep_checkpoints else written
    return max(most - done, min(most, 1))


def bytes_for_checkpoint(policy: Policy, sources: Sequence[InputSource] = ()) -> int:
    """Bytes of the weights of policy and critic, and of two optimiser moments for each that is trained.

    The base of adapters is frozen and not part of a checkpoint.
    """
    models = [policy.model, *(source.model for source in sources if isinstance(source, Critic))]
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
    saved = [] if hasattr(policy.model, "peft_config") else frozen
    return sum(3 * one.numel() * one.element_size() for one in trained) + sum(
        one.numel() * one.element_size() for one in saved
    )
