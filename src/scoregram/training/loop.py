"""The training loop, top to bottom: draw, sample, reward, update and measure in one pass, write, evaluate, checkpoint.

`_train` is the whole of a run; the functions below it are its parts.

Random numbers depend only on the seed and the step, and all records of a step are on the disk before its checkpoint. So
a run that is killed at any point continues from its last checkpoint to the same numbers.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from scoregram.checks import NotFiniteError, fail
from scoregram.gram import update_sketch
from scoregram.machine import threads, without_cudnn_attention
from scoregram.policy import Policy, installed_vllm, load_policy, recompute_layers
from scoregram.reading import (
    Step,
    StepReading,
    batch_records,
    group_records,
    policy_scalars,
    read_step,
    reference_scalars,
    rollout_records,
    run_noise,
    turn_scalars,
)
from scoregram.rollouts import Rollouts
from scoregram.runs import CHECKSUMS, RunWriter, UpdateRecord, open_run, require_same_config, require_space
from scoregram.tasks import Problem, Task
from scoregram.terminal import stop_requests
from scoregram.training.checkpoint import Position, Resumable, save_checkpoint, write_failure
from scoregram.training.collect import Drafts
from scoregram.training.config import TrainConfig, is_due
from scoregram.training.control import DRAW_REMARK, Controller
from scoregram.training.credit import require_runnable
from scoregram.training.draw import DrawnRollouts, draft_scalars, draw_rollouts, one_sampling_warning
from scoregram.training.evaluate import HeldOutProblems, held_out_problems
from scoregram.training.input_source import InputSource
from scoregram.training.inputs import input_sources
from scoregram.training.preparation import (
    bytes_for_checkpoint,
    checkpoints_to_come,
    open_writer,
    require_metrics,
    training_task,
)
from scoregram.training.progress import Progress
from scoregram.training.trackers import open_trackers, require_trackers
from scoregram.training.truth import CreditObserver, truth_source
from scoregram.training.update import Reference, Updater, apply_gradient, learning_rate, make_optimizer


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    folder: Path
    """The run folder."""
    step: int
    """Last step that was done."""
    interrupted: bool
    """Whether the run was asked to stop before its last step."""
    rollouts: int = 0
    """Rollouts that were sampled for training."""


def train(
    config: TrainConfig,
    *,
    console: Console | None = None,
    on_start: Callable[[], None] | None = None,
) -> Trained:
    """Train as the config says and write the run folder.

    Args:
        config: The settings.
        console: Where progress is shown; standard output by default.
        on_start: Called once, when all settings have been checked and the run folder is open.

    Raises:
        ScoregramError: If a setting is invalid, which is checked before the first step, or a prompt is too long.
        NotFiniteError: If an advantage or a gradient is not finite and `on_not_finite` is `stop`; also with `skip` if
            the policy cannot be sampled from.
    """
    if not isinstance(config, TrainConfig):
        fail("train", "config must be a TrainConfig", type(config).__name__, "Pass TrainConfig(…).")
    require_runnable(config)
    if config.sampler == "vllm":
        installed_vllm()  # raises before the policy is loaded if vllm is not installed
    if config.resume:
        require_same_config(config.out, config.record(), config.may_differ())
        require_metrics(config.out)
    with threads(config.threads), without_cudnn_attention(), one_sampling_warning(config):
        return _train(config, console, on_start)


def _train(
    config: TrainConfig,
    console: Console | None,
    on_start: Callable[[], None] | None,
) -> Trained:
    """The run itself, from its set-up to the last step."""
    # Set up. Whatever can be wrong with the settings is found here, before the first rollout.
    task = training_task(config)
    shown = console or Console()
    policy = load_policy(config.policy, task, note=lambda line: shown.print(line, soft_wrap=True, markup=False))
    controller = Controller(config)
    learner = make_learner(config, policy, task, measures_always=controller.needs_gram)
    space = bytes_for_checkpoint(policy, learner.sources) * checkpoints_to_come(config)
    require_space(config.out, space, caller="train")
    held_out = held_out_problems(config, policy, task, learner.optimizer)
    require_trackers(config.report_to)
    resumed_parts: list[Resumable] = [*learner.sources, *([controller] if controller.is_active else [])]
    writer, position = open_writer(config, policy, learner.optimizer, resumed_parts)
    resumed = position.step if config.resume and position.step else None
    interrupted = False
    with (
        writer,
        open_trackers(config.report_to, config.out, config.record(), resume_step=resumed) as trackers,
        Progress(config.most_steps, first_step=position.step, console=console) as progress,
        stop_requests() as stop,
    ):
        if config.draw != "uniform":
            writer.write_remarks({"draw": DRAW_REMARK})
        if on_start is not None:
            on_start()
        if resumed and not (open_run(config.out).checkpoints[resumed] / CHECKSUMS).exists():
            progress.note(f"the checkpoint of step {resumed} has no {CHECKSUMS}: its files could not be checked")
        if position.step == 0 and (scalars := scalars_before_first_step(held_out, writer, progress)):
            writer.write_metrics(0, scalars)
            trackers.log(0, scalars)

        while not is_finished(config, position):
            # Draw and reward.
            began, before, number = time.perf_counter(), position, position.step + 1
            drawn = draw_rollouts(controller, policy, task, position, number)
            sampled = time.perf_counter()

            # Update, and measure in the same pass.
            attempt = attempt_step(learner, controller, drawn, before)
            position, done = attempt.position, attempt.done
            if attempt.failure is not None:
                handle_failure(learner, policy, drawn.rollouts, attempt, progress)
            updated = time.perf_counter()

            # Record the step, and measure the policy after it.
            scalars = attempt.scalars()
            if done is not None:
                scalars |= control_scalars(controller, done.step, progress) | drawn_scalars(task, drawn)
                write_records(config, policy, done, writer)
            scalars |= scalars_after_step(held_out, drawn.rollouts, before, position, writer, progress)
            scalars |= timing(int(drawn.rollouts.completion_mask.sum()), began, sampled, updated)
            writer.write_metrics(number, scalars)
            trackers.log(number, scalars)
            if done is not None:
                progress.update(number, progress_scalars(scalars))

            # Checkpoint. A run that is asked to stop ends here, and continues from here if it is resumed.
            is_last = is_finished(config, position)
            interrupted = stop.asked and not is_last
            if is_due(number, config.checkpoint_every) or (is_last and config.final_checkpoint) or interrupted:
                with writer.checkpoint(number) as folder:
                    states = [one.state() for one in resumed_parts]
                    save_checkpoint(folder, policy, learner.optimizer, position, states)
            if interrupted:
                progress.note(f"stopped after step {number}; continue with --resume")
                break
            del drawn, attempt, done  # the next step needs the memory of this one's Gram

        if config.draw == "uniform":
            noise = run_noise(open_run(config.out).metrics(), config.starting_group_size)
            trackers.log(position.step, noise.scalars())
            if noise.sentence():
                progress.note(noise.sentence())
    return Trained(config.out, position.step, interrupted, position.rollouts)


@dataclass(frozen=True)
class Learner:
    """What the updates of a step use, made once for a run."""

    config: TrainConfig
    model: Any
    """The policy's model."""
    optimizer: torch.optim.Optimizer
    updater: Updater
    """Computes gradients and Grams."""
    sources: Sequence[InputSource]
    """Supply what the estimator needs besides rewards, and learn from every step."""
    observer: CreditObserver
    """Observes true advantages and the push of the update, at recorded steps."""
    reference: Reference | None
    """The initial policy; None if nothing compares with it."""
    measures_always: bool
    """Whether every step is measured, also those that are not recorded."""


def make_learner(config: TrainConfig, policy: Policy, task: Task, *, measures_always: bool) -> Learner:
    """The learner of a run, its policy as it was loaded.

    Raises:
        ScoregramError: If task, policy and settings do not give what the method needs.
    """
    if config.gradient_checkpointing:
        recompute_layers(policy.model, caller="train --gradient-checkpointing")
    optimizer = make_optimizer(policy.model, config)
    updater = Updater(
        model=policy.model,
        method=config.chosen_method,
        temperature=config.temperature,
        length=config.sampling(task.max_new_tokens).max_new_tokens * task.max_turns,
        rollouts_per_pass=config.micro_batch_size,
        computing=policy.computing,
        beta=config.reference_strength,
        kl=config.kl,
        group_size=None if config.between_prompts else config.starting_group_size,
    )
    return Learner(
        config=config,
        model=policy.model,
        optimizer=optimizer,
        updater=updater,
        sources=input_sources(config.chosen_method, config, policy, task),
        observer=CreditObserver(updater, truth_source(config, policy, task), config.push),
        reference=Reference(updater, new_adapters=config.lora_rank > 0) if config.reference_strength > 0 else None,
        measures_always=measures_always,
    )


@dataclass(frozen=True)
class UpdatedStep:
    """A step after its updates."""

    step: Step
    reading: StepReading
    scalars: dict[str, Any]
    is_recorded: bool
    updates: int
    """Updates that were made: fewer than `inner_updates` after a failure."""
    failure: NotFiniteError | None
    """What ended the updates early."""
    update_records: Sequence[UpdateRecord]
    """The sketch of the gradient of the first update; empty unless the step is recorded."""


def update_policy(
    learner: Learner,
    number: int,
    rollouts: Rollouts,
    problems: Sequence[Problem],
    inputs: dict[str, torch.Tensor],
    *,
    is_recorded: bool,
) -> UpdatedStep:
    """Make the `inner_updates` of a step. The first that is not finite ends them.

    Args:
        learner: Its optimiser changes the weights of its model.
        number: Number of the step.
        rollouts: Its rollouts.
        problems: The problem of every group.
        inputs: What the estimator needs besides the rollouts, and the weights of the prompts.
        is_recorded: Whether the step is measured and its groups are written.

    Raises:
        NotFiniteError: If the very first update is not finite; the weights are as they were.
    """
    config, rate = learner.config, learning_rate(number, learner.config)
    seen = learner.observer.before(number, rollouts, problems) if is_recorded else None
    known = None if learner.reference is None else learner.reference.log_probs(rollouts)
    measure = is_recorded or learner.measures_always
    step, loss = learner.updater.first(number, rollouts, measure=measure, inputs=inputs, reference=known)
    sketch = update_sketch(learner.model) if is_recorded else None
    norm = apply_gradient(learner.optimizer, learner.model, rate, config.max_grad_norm)
    updates, clipped, failure = 1, math.nan, None
    try:
        while updates < config.inner_updates:
            # the loss stays that of the first update
            _, clipped = learner.updater.further_update(step, reference=known)
            apply_gradient(learner.optimizer, learner.model, rate, config.max_grad_norm)
            updates += 1
    except NotFiniteError as error:
        failure = error
    step = step if seen is None else learner.observer.after(step, seen)
    reading = read_step(step)
    scalars = reading.scalars | {"loss": loss, "grad_norm": norm, "learning_rate": rate} | policy_scalars(step)
    scalars |= reference_scalars(step, known) | ({} if math.isnan(clipped) else {"clipped_tokens": clipped})
    for source in learner.sources:
        try:
            scalars |= source.learn(rollouts)
        except NotFiniteError as error:
            failure = failure or error
    update_records = [] if sketch is None else [UpdateRecord(step=number, sketch=sketch)]
    return UpdatedStep(step, reading, scalars, is_recorded, updates, failure, update_records)


@dataclass(frozen=True)
class StepAttempt:
    """A step after the attempt to update the policy with it."""

    position: Position
    """Position after the step; a step without an update counts too."""
    extra_rollouts: int | None
    """Rollouts that the step took on top of those it trains on; None if no source samples any."""
    done: UpdatedStep | None
    """None if not even the first update was made: the step is skipped."""
    failure: NotFiniteError | None
    """What ended the updates early, or prevented all of them."""

    def scalars(self) -> dict[str, Any]:
        """Rollouts so far, and the scalars of the updates; `skipped` if there was none."""
        extra = {} if self.extra_rollouts is None else {"credit/extra_rollouts": self.extra_rollouts}
        return (
            {"rollouts": self.position.rollouts} | extra | ({"skipped": 1} if self.done is None else self.done.scalars)
        )


def attempt_step(learner: Learner, controller: Controller, drawn: DrawnRollouts, before: Position) -> StepAttempt:
    """Update the policy with the rollouts of a step, and measure them if a measurement is due.

    An input, an advantage or a gradient that is not finite ends the attempt; the weights are those of the last update
    that was made.
    """
    config, position, extra = learner.config, drawn.position, None
    counted: list[Any] = [*drawn.drafts]
    try:
        inputs: dict[str, Tensor] = {}
        try:
            for source in learner.sources:
                inputs |= source.inputs(position.step, drawn.rollouts, drawn.problems)
                counted.append(source)
        finally:
            extra = extra_rollouts(counted)
            position = replace(position, rollouts=position.rollouts + (extra or 0))
        inputs |= controller.inputs(drawn.problems)
        is_recorded = is_due_at(config, config.measure_every, before, position)
        done = update_policy(learner, position.step, drawn.rollouts, drawn.problems, inputs, is_recorded=is_recorded)
    except NotFiniteError as error:
        return StepAttempt(position, extra, None, error)
    return StepAttempt(position, extra, done, done.failure)


def handle_failure(
    learner: Learner, policy: Policy, rollouts: Rollouts, attempt: StepAttempt, progress: Progress
) -> None:
    """Save a step that failed; then stop the run, or note what it left out, as `on_not_finite` says.

    Raises:
        NotFiniteError: If the run is to stop.
    """
    config, number, failure = learner.config, attempt.position.step, attempt.failure
    assert failure is not None
    where = write_failure(config.out, number, policy, rollouts, failure)
    learner.optimizer.zero_grad(set_to_none=True)
    if config.on_not_finite == "stop":
        raise NotFiniteError(f"step {number}: {failure} The step is saved in {where}.") from failure
    made = None if attempt.done is None else attempt.done.updates
    what = "was skipped" if made is None else f"ended after {made} of {config.inner_updates} updates"
    progress.note(f"step {number} {what}: {failure}")


def write_records(config: TrainConfig, policy: Policy, done: UpdatedStep, writer: RunWriter) -> None:
    """Write what is due of a step: groups and sketch of the gradient, the Gram of the batch, rollouts by token."""
    number = done.step.number
    if done.is_recorded:
        writer.write_groups(number, group_records(done.step, done.reading.groups, **config.recording()))
        writer.write_updates(number, done.update_records)
    if is_due(number, config.batches_every):
        writer.write_batches(number, batch_records(done.step))
    if is_due(number, config.rollouts_every):
        writer.write_rollouts(number, rollout_records(done.step, policy.decode))


def scalars_before_first_step(held_out: HeldOutProblems, writer: RunWriter, progress: Progress) -> dict[str, Any]:
    """Scalars of the policy that a run starts from; empty for a run without evaluations and probes."""
    scalars: dict[str, Any] = {}
    if held_out.are_evaluated:
        began = time.perf_counter()
        scalars |= held_out.evaluation_scalars(writer, 0)
        scalars["time/eval"] = time.perf_counter() - began
        note_accuracy(0, scalars, progress)
    if held_out.config.probe_every:
        began = time.perf_counter()
        scalars |= held_out.probe_scalars(writer, 0)
        scalars["time/probe"] = time.perf_counter() - began
    return {"rollouts": 0} | scalars if scalars else {}


def scalars_after_step(
    held_out: HeldOutProblems,
    trained: Rollouts,
    before: Position,
    after: Position,
    writer: RunWriter,
    progress: Progress,
) -> dict[str, Any]:
    """Scalars of a probe and an evaluation after a step, where they are due; an evaluation also after the last step."""
    config = held_out.config
    scalars: dict[str, Any] = {}
    if is_due(after.step, config.probe_every):
        scalars |= held_out.probe_scalars(writer, after.step, trained)
    is_final = held_out.are_evaluated and is_finished(config, after)
    if is_final or is_due_at(config, config.eval_every, before, after):
        scalars |= held_out.evaluation_scalars(writer, after.step)
        note_accuracy(after.step, scalars, progress)
    return scalars


def note_accuracy(number: int, scalars: Mapping[str, Any], progress: Progress) -> None:
    """Print the result of an evaluation."""
    accuracy = scalars["eval/accuracy"]
    shown = "–, no test rollout has a reward" if math.isnan(accuracy) else f"{accuracy:.3f}"
    progress.note(f"step {number}: test accuracy {shown}")


def control_scalars(controller: Controller, step: Step, progress: Progress) -> dict[str, float | int]:
    """The scalars `control/…` after the controller has learned from a step; a change of the group size is printed."""
    scalars, decision = controller.learn(step)
    if decision is not None:
        progress.note(f"step {step.number}: {decision}")
    return scalars


def drawn_scalars(task: Task, drawn: DrawnRollouts) -> dict[str, float]:
    """Scalars of the rollouts of a step: those of the task, of turns, and of drafts."""
    of_task = task_scalars(task, drawn.problems, drawn.rollouts)
    return of_task | turn_scalars(drawn.episodes) | draft_scalars(drawn.drafts)


def task_scalars(task: Task, problems: Sequence[Problem], rollouts: Rollouts) -> dict[str, float]:
    """The scalars `task/…` of a step, from a task that has some."""
    if task.scalars is None:
        return {}
    each = [problems[group] for group in rollouts.group_ids.tolist()]
    return {f"task/{name}": value for name, value in task.scalars(each, rollouts.completions).items()}


def is_finished(config: TrainConfig, position: Position) -> bool:
    """Whether the run has done its steps, or sampled its budget of rollouts; the last step may exceed the budget."""
    return position.rollouts >= config.rollouts if config.rollouts else position.step >= config.steps


def extra_rollouts(sources: Sequence[InputSource | Drafts]) -> int | None:
    """Rollouts that the step took on top of those it trains on; None if no source samples any."""
    counts = [source.extra_rollouts for source in sources if source.extra_rollouts is not None]
    return sum(counts) if counts else None


def is_due_at(config: TrainConfig, every: int, before: Position, after: Position) -> bool:
    """Whether a measurement or an evaluation is due at this step, by steps or by rollouts as the config says."""
    if config.every_rollouts:
        return after.rollouts // config.every_rollouts > before.rollouts // config.every_rollouts
    return is_due(after.step, every)


def timing(tokens: int, began: float, sampled: float, updated: float) -> dict[str, float]:
    """Where the time of a step went, in seconds; the only metrics that differ between runs of one seed.

    `time/rest` is the time of records, probes and evaluations; that of the checkpoint is in no step.
    """
    now = time.perf_counter()
    return {
        "time/sample": sampled - began,
        "time/update": updated - sampled,
        "time/rest": now - updated,
        "time/step": now - began,
        "time/tokens_per_second": tokens / (now - began),
    }


def progress_scalars(scalars: dict[str, Any]) -> dict[str, Any]:
    """The scalars that the progress line shows."""
    return {
        "reward": scalars["reward"],
        "live_groups": scalars["live_groups"],
        "groups": scalars["groups"],
        "effective_rank": scalars.get("group/effective_rank"),
        "effective_rank_null": scalars.get("group/effective_rank_orthogonal"),
        "tokens_per_second": scalars["time/tokens_per_second"],
    }
