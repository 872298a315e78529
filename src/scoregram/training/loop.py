"""The training loop, top to bottom: draw, sample, reward, update and measure in one pass, write, evaluate, checkpoint.

Random numbers depend only on the seed and the step, and all records of a step are on the disk before its checkpoint. So
a run that is killed at any point continues from its last checkpoint to the same numbers.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from scoregram.checks import NotFiniteError, fail
from scoregram.gram import update_sketch
from scoregram.machine import threads
from scoregram.objectives import kl_penalty
from scoregram.policy import (
    BiasedSamplingWarning,
    Policy,
    installed_vllm,
    load_policy,
    recompute_layers,
    weights_sha256,
)
from scoregram.reading import (
    Step,
    StepReading,
    batch_records,
    group_records,
    outcomes_of,
    read_step,
    rollout_records,
    run_noise,
    turn_scalars,
)
from scoregram.rollouts import Rollouts, concatenated_rollouts
from scoregram.runs import CHECKSUMS, RunWriter, UpdateRecord, environment, open_run, require_same_config, require_space
from scoregram.tasks import Problem, Task, load_task
from scoregram.terminal import stop_requests
from scoregram.training.checkpoint import Position, Resumable, load_checkpoint, save_checkpoint, write_failure
from scoregram.training.collect import (
    Drafts,
    best_drafts,
    collect,
    collect_branches,
    drawn_problems,
    refuse_long_prompts,
    rescored,
    seeded_generator,
)
from scoregram.training.config import TrainConfig, control_option
from scoregram.training.control import Controller
from scoregram.training.credit import require_runnable
from scoregram.training.critic import Critic
from scoregram.training.evaluate import evaluate, evaluation_records, run_probe
from scoregram.training.inputs import InputSource, input_sources
from scoregram.training.progress import Progress
from scoregram.training.trackers import open_trackers, require_trackers
from scoregram.training.truth import CreditObserver, truth_source
from scoregram.training.update import Reference, Updater, apply_gradient, learning_rate, make_optimizer

START_HASH = "start_sha256"
"""Key of a run's environment: `weights_sha256` of the policy before the first step."""


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    folder: Path
    step: int
    """Last step that was done."""
    interrupted: bool
    rollouts: int = 0
    """Rollouts that were sampled for training."""


def train(
    config: TrainConfig, *, console: Console | None = None, on_start: Callable[[], None] | None = None
) -> Trained:
    """Train as the config says and write the run folder.

    Args:
        config: The settings.
        console: Where progress is shown; standard output by default.
        on_start: Called once, when all settings have been checked and the run folder is open.

    Raises:
        ScoregramError: If a setting is invalid, which is checked before the first step, or a prompt is too long.
        NotFiniteError: If an advantage or a gradient is not finite and `on_not_finite` is `stop`.
    """
    require_runnable(config)
    if config.sampler == "vllm":
        installed_vllm()  # raises before the policy is loaded if vllm is not installed
    if config.resume:
        require_same_config(config.out, config.record(), config.may_differ())
    with threads(config.threads):
        return _train(config, console, on_start)


def _train(config: TrainConfig, console: Console | None, on_start: Callable[[], None] | None) -> Trained:
    task = load_task(config.task, seed=config.seed, reward=config.reward)
    require_turns(config, task)
    task = replace(task, max_turns=config.max_turns or task.max_turns)
    if config.train_problems:
        task = replace(task, train=first_problems(task, config.train_problems))
    policy = load_policy(config.policy, task)
    if config.gradient_checkpointing:
        recompute_layers(policy.model, caller="train --gradient-checkpointing")
    optimizer = make_optimizer(policy.model, config)
    sampling = config.sampling(task.max_new_tokens)
    updater = Updater(
        model=policy.model,
        method=config.chosen,
        temperature=config.temperature,
        length=sampling.max_new_tokens * task.max_turns,
        rollouts_per_pass=config.micro_batch_size,
        computing=policy.computing,
        beta=config.reference_strength,
        kl=config.kl,
        group_size=None if config.between_prompts else config.starting_group_size,
    )
    sources = input_sources(config.chosen, config, policy, task)
    controller = Controller(config)
    resumed_parts: list[Resumable] = [*sources, controller] if controller.is_active else [*sources]
    observer = CreditObserver(updater, truth_source(config, policy, task), config.push)
    reference = Reference(updater, new_adapters=config.lora_rank > 0) if config.reference_strength > 0 else None
    require_space(config.out, bytes_for_checkpoint(policy, sources) * checkpoints_to_come(config), caller="train")
    tests = task.test[: config.eval_problems]
    probes = task.test[-config.probe_problems :] if config.probe_every else []
    for problems in (tests, probes):
        prompts = [policy.encode_prompt(task.prompt(problem)) for problem in problems]
        refuse_long_prompts(prompts, problems, sampling, policy)
    require_trackers(config.report_to)
    writer, position = open_writer(config, policy, optimizer, resumed_parts)
    resumed = position.step if config.resume and position.step else None
    learner = Learner(config, policy.model, optimizer, updater, sources, observer, reference, controller.needs_gram)
    evaluates = config.eval_every > 0 or config.every_rollouts > 0
    interrupted = False
    with (
        writer,
        open_trackers(config.report_to, config.out, config.record(), resume_step=resumed) as trackers,
        Progress(config.most_steps, first_step=position.step, console=console) as progress,
        stop_requests() as stop,
    ):
        if on_start is not None:
            on_start()
        if resumed and not (open_run(config.out).checkpoints[resumed] / CHECKSUMS).exists():
            progress.note(f"the checkpoint of step {resumed} has no {CHECKSUMS}: its files could not be checked")
        if position.step == 0 and (evaluates or config.probe_every):
            scalars: dict[str, Any] = {"rollouts": 0}
            if evaluates:
                began = time.perf_counter()
                scalars |= evaluation_scalars(config, policy, task, tests, writer, 0)
                scalars["time/eval"] = time.perf_counter() - began
                progress.note(f"step 0: test accuracy {scalars['eval/accuracy']:.3f}")
            if config.probe_every:
                began = time.perf_counter()
                scalars |= probe_scalars(config, policy, task, probes, writer, 0)
                scalars["time/probe"] = time.perf_counter() - began
            writer.write_metrics(0, scalars)
            trackers.log(0, scalars)

        while not is_finished(config, position):
            began, before, number = time.perf_counter(), position, position.step + 1
            # draw and reward
            drawn = draw_rollouts(controller, policy, task, position, number)
            rollouts, problems, position = drawn.rollouts, drawn.problems, drawn.position
            sampled = time.perf_counter()

            # update, and measure in the same pass
            done, extra, failure = None, None, None
            try:
                inputs = {n: v for source in sources for n, v in source.inputs(number, rollouts, problems).items()}
                inputs |= controller.inputs(problems)
                extra = extra_rollouts([*sources, *drawn.drafts])
                position = replace(position, rollouts=position.rollouts + (extra or 0))
                is_recorded = is_due_at(config, config.measure_every, before, position)
                done = update_policy(learner, number, rollouts, problems, inputs, is_recorded=is_recorded)
                failure = done.failure
            except NotFiniteError as error:
                failure = error
            if failure is not None:
                where = write_failure(config.out, number, policy, rollouts, failure)
                optimizer.zero_grad(set_to_none=True)
                if config.on_not_finite == "stop":
                    raise NotFiniteError(f"step {number}: {failure} The step is saved in {where}.") from failure
                what = (
                    "was skipped" if done is None else f"ended after {done.updates} of {config.inner_updates} updates"
                )
                progress.note(f"step {number} {what}: {failure}")
            updated = time.perf_counter()

            # write the records
            scalars = {"rollouts": position.rollouts} | ({} if extra is None else {"credit/extra_rollouts": extra})
            if done is None:
                scalars["skipped"] = 1
            else:
                decided, decision = controller.learn(done.step)
                scalars |= done.scalars | decided | task_scalars(task, problems, rollouts) | turn_scalars(rollouts)
                scalars |= draft_scalars(drawn.drafts)
                if decision is not None:
                    progress.note(f"step {number}: {decision}")
                if done.is_recorded:
                    writer.write_groups(number, group_records(done.step, done.reading.groups, **config.recording()))
                    writer.write_updates(number, done.update_records)
                if is_due(number, config.batches_every):
                    writer.write_batches(number, batch_records(done.step))
                if is_due(number, config.rollouts_every):
                    writer.write_rollouts(number, rollout_records(done.step, policy.decode))
            is_last = is_finished(config, position)
            if is_due(number, config.probe_every):
                scalars |= probe_scalars(config, policy, task, probes, writer, number, rollouts)
            if is_due_at(config, config.eval_every, before, position) or (is_last and evaluates):
                scalars |= evaluation_scalars(config, policy, task, tests, writer, number)
                progress.note(f"step {number}: test accuracy {scalars['eval/accuracy']:.3f}")
            scalars |= timing(int(rollouts.completion_mask.sum()), began, sampled, updated)
            writer.write_metrics(number, scalars)
            trackers.log(number, scalars)
            if done is not None:
                progress.update(number, progress_scalars(scalars))

            # checkpoint
            interrupted = stop.asked and not is_last
            if is_due(number, config.checkpoint_every) or (is_last and config.final_checkpoint) or interrupted:
                with writer.checkpoint(number) as folder:
                    save_checkpoint(folder, policy, optimizer, position, [one.state() for one in resumed_parts])
            if interrupted:
                progress.note(f"stopped after step {number}; continue with --resume")
                break
        noise = run_noise(open_run(config.out).metrics(), controller.sizes.group_size)
        trackers.log(position.step, noise.scalars())
        if noise.sentence():
            progress.note(noise.sentence())
    return Trained(config.out, position.step, interrupted, position.rollouts)


@dataclass(frozen=True)
class Learner:
    """What the updates of a step use, made once for a run."""

    config: TrainConfig
    model: Any
    optimizer: torch.optim.Optimizer
    updater: Updater
    sources: Sequence[InputSource]
    observer: CreditObserver
    reference: Reference | None
    measures_always: bool
    """Whether every step is measured, also those that are not recorded."""


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
    """Make the updates of a step. The first that is not finite ends them.

    Raises:
        NotFiniteError: If that is the very first; the weights are as they were.
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
            loss, clipped = learner.updater.again(step, reference=known)
            apply_gradient(learner.optimizer, learner.model, rate, config.max_grad_norm)
            updates += 1
    except NotFiniteError as error:
        failure = error
    step = step if seen is None else learner.observer.after(step, seen)
    reading = read_step(step)
    scalars = reading.scalars | {"loss": loss, "grad_norm": norm, "learning_rate": rate} | policy_scalars(step)
    scalars |= reference_scalars(step, known) | ({} if math.isnan(clipped) else {"clipped_tokens": clipped})
    for source in learner.sources:
        scalars |= source.learn(rollouts)
    update_records = [] if sketch is None else [UpdateRecord(step=number, sketch=sketch)]
    return UpdatedStep(step, reading, scalars, is_recorded, updates, failure, update_records)


@dataclass(frozen=True)
class DrawnRollouts:
    """The groups of a step."""

    rollouts: Rollouts
    problems: Sequence[Problem]
    position: Position
    """Position after the step."""
    drafts: Sequence[Drafts]
    """The drafts that the rollouts refine, round by round; empty for a method without drafts."""


def require_turns(config: TrainConfig, task: Task) -> None:
    """Raise if a setting and the number of turns of a task exclude each other."""
    if config.max_turns and task.environment is None:
        fail("train --max-turns", "needs a task with an environment", task.name, "Leave it out.")
    if config.chosen.drafts and task.environment is not None:
        remedy = "Choose another method."
        fail("train --method", f"the drafts of {config.method} need a task of one turn", task.name, remedy)
    for control in config.controls:
        if control != "group_size" and task.environment is not None:
            remedy = "Leave it out, or choose another task."
            fail(control_option(control), "needs a task of one turn", task.name, remedy)
    if config.credit_truth == "sampled" and task.environment is not None:
        fail("train --credit-truth", "sampled values need a task of one turn", task.name, "Leave it out.")


def draw_rollouts(controller: Controller, policy: Policy, task: Task, position: Position, number: int) -> DrawnRollouts:
    """The groups of a step, their problems, and the position after it.

    With dynamic sampling, further prompts are drawn until the step is full of live groups or the rounds are used up; a
    step without a live group keeps its first round, and its update is zero. With branches, each turn of an episode has
    a group of its own; together they cost as many turns as a group of whole episodes, and count as one.
    """
    config = controller.config
    rounds = config.dynamic_rounds if config.chosen.dynamic_sampling else 1
    stream, draft_stream = (seeded_generator(config.seed, purpose, number) for purpose in ("rollouts", "drafts"))
    drafts: list[Drafts] = []
    request: dict[str, Any] = {
        "group_size": config.starting_group_size,
        "sampling": config.behaviour(task.max_new_tokens),
        "generator": stream,
    }
    drawn: list[Problem] = []
    parts: list[Rollouts] = []
    live: list[bool] = []

    def after() -> Position:
        return Position(
            number, position.problems + len(drawn), position.rollouts + len(drawn) * config.starting_group_size
        )

    if config.chosen.branches:
        drawn = drawn_problems(task.train, position.problems, config.prompts, config.seed)
        rollouts, owners = collect_branches(policy, task, drawn, **request)
        return DrawnRollouts(rollouts, owners, after(), drafts)
    for _ in range(rounds):
        if config.draw == "measured":
            problems = controller.drawn_problems(task.train, number)
        else:
            problems = drawn_problems(task.train, position.problems + len(drawn), config.prompts, config.seed)
        drawn += problems
        request["group_size"] = controller.rollouts_of(problems)
        texts = None
        if config.chosen.drafts:
            drafts.append(
                best_drafts(
                    policy,
                    task,
                    problems,
                    count=config.drafts,
                    sampling=request["sampling"],
                    generator=draft_stream,
                )
            )
            texts = drafts[-1].refinement_prompts([task.prompt(p) for p in problems], config.draft_format)
        with warnings.catch_warnings():
            if config.sampling_temperature:  # the loss takes rollouts of any policy, so there is no bias to warn of
                warnings.simplefilter("ignore", BiasedSamplingWarning)
            part = collect(policy, task, problems, **request, texts=texts)
        if config.sampling_temperature:
            part = rescored(policy, part, config.temperature, config.micro_batch_size)
        parts.append(part)
        live += [outcome == "live" for outcome in outcomes_of(parts[-1].reward_grid)]
        if sum(live) >= config.prompts:
            break
    if not config.chosen.dynamic_sampling or not any(live):
        return DrawnRollouts(parts[0], drawn[: config.prompts], after(), drafts)
    places = [place for place, is_live in enumerate(live) if is_live][: config.prompts]
    everything = concatenated_rollouts(parts, policy.pad_id)
    kept = torch.isin(everything.group_ids, torch.tensor(places))
    return DrawnRollouts(everything.select(kept), [drawn[place] for place in places], after(), drafts)


def first_problems(task: Task, count: int) -> Sequence[Problem]:
    """The first problems of the training split, which `--train-problems` asks for."""
    if count > len(task.train):
        fail("train --train-problems", f"{task.name} has {len(task.train)} training problems", count, "Lower it.")
    return task.train[:count]


def task_scalars(task: Task, problems: Sequence[Problem], rollouts: Rollouts) -> dict[str, float]:
    """The scalars `task/…` of a step, from a task that has some."""
    if task.scalars is None:
        return {}
    each = [problems[group] for group in rollouts.group_ids.tolist()]
    return {f"task/{name}": value for name, value in task.scalars(each, rollouts.completions).items()}


def draft_scalars(drafts: Sequence[Drafts]) -> dict[str, float]:
    """The mean reward of the best drafts of a step, all rounds together; nothing without drafts."""
    rewards = torch.tensor([reward for part in drafts for reward in part.rewards], dtype=torch.float64)
    return {"credit/draft_reward": float(rewards.nanmean())} if drafts else {}


def policy_scalars(step: Step) -> dict[str, float]:
    """Scalars of the policy's tokens: length, share of finished rollouts, log-probability, gap to the sampler's."""
    rollouts, log_probs = step.rollouts, step.log_probs
    assert log_probs is not None and rollouts.log_probs is not None and rollouts.finished is not None
    mask = rollouts.completion_mask
    gap = (log_probs - rollouts.log_probs)[mask].abs()
    return {
        "length": float(rollouts.lengths.double().mean()),
        "finished": float(rollouts.finished.double().mean()),
        "token_log_prob": float(log_probs[mask].double().mean()) if bool(mask.any()) else math.nan,
        "sampler_gap": float(gap.max()) if bool(mask.any()) else math.nan,
    }


def reference_scalars(step: Step, reference: Tensor | None) -> dict[str, float]:
    """`kl`: mean over tokens of the k3 estimate of the KL divergence from the reference; empty without a reference."""
    if reference is None or step.log_probs is None:
        return {}
    mask = step.rollouts.completion_mask
    return {"kl": float(kl_penalty(step.log_probs, reference, mask, term="k3", aggregation="token_mean"))}


def evaluation_scalars(
    config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], writer: RunWriter, step: int
) -> Mapping[str, float]:
    """Evaluate on the test problems, and on those of each held-out split; returns the scalars `eval/…`."""
    sampling, scalars = config.sampling(task.max_new_tokens), {}
    for split, tested in {"": problems, **task.held_out}.items():
        tested = tested[: config.eval_problems]
        stream = seeded_generator(config.seed, f"test {split}".strip(), step)
        evaluation = evaluate(policy, task, tested, sampling, samples=config.eval_samples, generator=stream)
        kept = {"keep_greedy": config.keep_evidence, "split": split}
        writer.write_groups(step, evaluation_records(step, tested, evaluation, **kept))
        scalars |= evaluation.scalars(split)
    return scalars


def probe_scalars(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    writer: RunWriter,
    step: int,
    trained: Rollouts | None = None,
) -> Mapping[str, float]:
    """Measure the fixed problems and write their groups; returns the scalars `probe/…`."""
    result = run_probe(config, policy, task, problems, step, trained)
    writer.write_groups(step, result.groups)
    writer.write_batches(step, result.batches)
    return result.scalars


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


def is_due(step: int, every: int) -> bool:
    """Whether an action with the period `every` is due at this step; 0 means never."""
    return every > 0 and step % every == 0


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


def timing(tokens: int, began: float, sampled: float, updated: float) -> dict[str, float]:
    """Where the time of a step went; the only metrics that differ between runs of one seed."""
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
