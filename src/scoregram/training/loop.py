"""The training loop, top to bottom: draw, sample, reward, update and measure in one pass, write, evaluate, keep.

Everything random is a function of the seed and the step, and everything a step leaves behind is on the disk before its
checkpoint is: a run that is killed anywhere goes on from its last checkpoint to the same numbers.
"""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import NotFiniteError, fail
from scoregram.policy import Policy, load_policy, recompute_layers
from scoregram.runs import RunWriter, open_run, require_space
from scoregram.tasks import Problem, Task, load_task
from scoregram.training.checkpoint import Position, load_checkpoint, save_checkpoint
from scoregram.training.collecting import Collected, collect, greedy_rewards, joined, mixed, refuse_long
from scoregram.training.config import TrainConfig
from scoregram.training.credit import needs, require_method
from scoregram.training.evaluating import evaluate, evaluation_records
from scoregram.training.failures import write_failure
from scoregram.training.optimizing import apply_gradient, learning_rate, make_optimizer
from scoregram.training.order import drawn_problems, generator
from scoregram.training.probing import probe
from scoregram.training.progress import Progress
from scoregram.training.readings import over_groups, reward_reading, step_reading
from scoregram.training.recording import batch_record, group_records, rollout_records, statistics_of
from scoregram.training.reference import Reference
from scoregram.training.trackers import open_trackers, require_trackers
from scoregram.training.update import Gradient, Updater


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    folder: Path
    step: int
    """Last step that was done."""
    interrupted: bool


def train(config: TrainConfig, *, console: Console | None = None) -> Trained:
    """Train as the config says, into its run folder.

    Raises:
        ScoregramError: For anything that cannot work, before work is lost; NotFiniteError when a number of a step is
            not finite and the config says to stop.
    """
    require_method(config.chosen, group_size=config.group_size, kl=config.kl)
    if config.threads:
        torch.set_num_threads(config.threads)
    task = load_task(config.task, seed=config.seed, reward=config.reward)
    policy = load_policy(config.policy, task)
    if config.gradient_checkpointing:
        recompute_layers(policy.model, caller="train --gradient-checkpointing")
    optimizer = make_optimizer(policy.model, config)
    sampling = config.sampling(task.max_new_tokens)
    updater = Updater(
        model=policy.model,
        method=config.chosen,
        temperature=config.temperature,
        length=sampling.max_new_tokens,
        rollouts_per_pass=config.micro_batch_size,
        computing=policy.computing,
        beta=config.beta,
        kl=config.kl,
        group_size=None if config.between_prompts else config.group_size,
    )
    reference = Reference(updater) if config.beta > 0 else None
    require_space(config.out, bytes_for_checkpoint(policy) * checkpoints_on_disk(config))
    tests = task.test[: config.eval_problems]
    probes = task.test[-config.probe_problems :] if config.probe_every else []
    for problems in (tests, probes):
        refuse_long([policy.encode_prompt(task.prompt(problem)) for problem in problems], problems, sampling, policy)
    require_trackers(config.report_to)
    writer, position = opened(config, policy, optimizer)
    resumed = position.step if config.resume and position.step else None
    interrupted = False
    with (
        writer,
        open_trackers(config.report_to, config.out, config.record(), resume_step=resumed) as trackers,
        Progress(config.steps, first_step=position.step, console=console) as progress,
        stop_requests() as stop,
    ):
        if position.step == 0 and (config.eval_every or config.probe_every):
            scalars: dict[str, Any] = {}
            if config.eval_every:
                began = time.perf_counter()
                scalars |= evaluated(config, policy, task, tests, writer, 0)
                scalars["time/eval"] = time.perf_counter() - began
                progress.note(f"step 0: test accuracy {scalars['eval/accuracy']:.3f}")
            if config.probe_every:
                began = time.perf_counter()
                scalars |= probed(config, policy, task, probes, writer, 0)
                scalars["time/probe"] = time.perf_counter() - began
            writer.write_metrics(0, scalars)
            trackers.log(0, scalars)

        for step in range(position.step + 1, config.steps + 1):
            began = time.perf_counter()
            # draw and reward
            collected, position = draw(config, policy, task, position, step)
            sampled = time.perf_counter()

            # update, and measure in the same pass
            measure = is_due(step, config.measure_every)
            rate = learning_rate(step, config)
            try:
                gradient, scalars = update(
                    config, policy, task, updater, optimizer, reference, collected, rate, measure
                )
            except NotFiniteError as error:
                where = write_failure(config.out, step, policy, collected, error)
                optimizer.zero_grad(set_to_none=True)
                if config.on_not_finite == "stop":
                    raise NotFiniteError(f"step {step}: {error} The step is kept in {where}.") from error
                progress.note(f"step {step} was passed over: {error}")
                writer.write_metrics(step, {"skipped": 1})
                continue
            updated = time.perf_counter()

            # write what it was made of
            if measure:
                records = group_records(step, collected, gradient, **config.recording())
                scalars |= over_groups(statistics_of(records))
                writer.write_groups(step, records)
            if is_due(step, config.batches_every):
                writer.write_batches(step, batch_record(step, collected, gradient))
            if is_due(step, config.probe_every):
                scalars |= probed(config, policy, task, probes, writer, step)
            if is_due(step, config.rollouts_every):
                writer.write_rollouts(step, rollout_records(step, policy, collected, gradient))
            if is_due(step, config.eval_every) or (step == config.steps and config.eval_every):
                scalars |= evaluated(config, policy, task, tests, writer, step)
                progress.note(f"step {step}: test accuracy {scalars['eval/accuracy']:.3f}")
            scalars |= timing(collected.tokens, began, sampled, updated)
            writer.write_metrics(step, scalars)
            trackers.log(step, scalars)
            progress.update(step, shown(scalars))

            # keep
            interrupted = stop.asked and step < config.steps
            is_last = step == config.steps and config.final_checkpoint
            if is_due(step, config.checkpoint_every) or is_last or interrupted:
                with writer.checkpoint(step) as folder:
                    save_checkpoint(folder, policy, optimizer, position)
            if interrupted:
                progress.note(f"stopped after step {step}; go on with --resume")
                break
    return Trained(config.out, position.step, interrupted)


def draw(config: TrainConfig, policy: Policy, task: Task, position: Position, step: int) -> tuple[Collected, Position]:
    """The groups of a step, and the position after it.

    With dynamic sampling, further prompts are drawn until the step is full of groups whose rewards differ, or the
    rounds are used up; a step in which no group differs keeps its first round, and its update is zero.
    """
    sampling = config.sampling(task.max_new_tokens)
    rounds = config.dynamic_rounds if config.chosen.dynamic_sampling else 1
    stream = generator(config.seed, "rollouts", step)
    problems, parts, found = position.problems, [], 0
    for _ in range(rounds):
        chosen = drawn_problems(task.train, problems, config.prompts, config.seed)
        problems += len(chosen)
        parts.append(collect(policy, task, chosen, group_size=config.group_size, sampling=sampling, generator=stream))
        found += int(mixed(parts[-1]).sum())
        if found >= config.prompts:
            break
    after = Position(step, problems)
    if not config.chosen.dynamic_sampling or found == 0:
        return parts[0], after
    everything = joined(parts, policy.pad_id)
    alive = mixed(everything)
    first = alive & (alive.cumsum(0) <= config.prompts)
    return everything.kept(first), after


def update(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    updater: Updater,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    collected: Collected,
    rate: float,
    measure: bool,
) -> tuple[Gradient, dict[str, Any]]:
    """Update the policy on the rollouts of a step; its scalars."""
    greedy = None
    if "greedy_rewards" in needs(config.chosen.estimator):
        greedy = greedy_rewards(policy, task, collected.problems, config.sampling(task.max_new_tokens))
    known = None if reference is None else reference.log_probs(collected)
    gradient = updater.first(collected, measure=measure, greedy=greedy, reference=known)
    norm = apply_gradient(optimizer, policy.model, rate, config.max_grad_norm)
    loss = gradient.loss
    for _ in range(config.inner_updates - 1):
        loss = updater.again(collected, gradient, reference=known)
        apply_gradient(optimizer, policy.model, rate, config.max_grad_norm)
    mask = collected.rollouts.completion_mask
    gap = (gradient.log_probs - collected.rollouts.log_probs)[mask].abs()
    scalars: dict[str, Any] = reward_reading(collected.rewards, gradient.advantages)
    scalars |= {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": rate,
        "length": float(collected.lengths.double().mean()),
        "finished": float(collected.rollouts.finished.double().mean()),
        "token_log_prob": float(gradient.log_probs[mask].double().mean()) if bool(mask.any()) else math.nan,
        "sampler_gap": float(gap.max()) if bool(mask.any()) else math.nan,
    }
    if gradient.measured is not None:
        scalars |= step_reading(gradient.measured.matrix, gradient.weights.double(), collected.rewards)
    return gradient, scalars


def evaluated(
    config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], writer: RunWriter, step: int
) -> Mapping[str, float]:
    """Evaluate on the test problems and write what was found; its scalars."""
    sampling, stream = config.sampling(task.max_new_tokens), generator(config.seed, "test", step)
    found = evaluate(policy, task, problems, sampling, samples=config.eval_samples, generator=stream)
    writer.write_groups(step, evaluation_records(step, problems, found))
    return found.scalars()


def probed(
    config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], writer: RunWriter, step: int
) -> Mapping[str, float]:
    """Probe the fixed problems and write what was found; its scalars."""
    found = probe(config, policy, task, problems, step)
    writer.write_groups(step, found.groups)
    writer.write_batches(step, found.batches)
    return found.scalars


def opened(config: TrainConfig, policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[RunWriter, Position]:
    """The writer of the run folder and where the run stands."""
    settings: dict[str, Any] = {"layers": config.layers, "keep_checkpoints": config.keep_checkpoints or None}
    if not config.resume:
        writer = RunWriter.create(config.out, config.record(), overwrite=config.overwrite, **settings)
        return writer, Position(0, 0)
    latest = open_run(config.out).latest_checkpoint
    position = Position(0, 0) if latest is None else load_checkpoint(latest[1], policy, optimizer)
    if position.step > config.steps:
        fail("train --resume", f"steps must be at least {position.step}", config.steps, "The run has come further.")
    kept = position.step if latest is not None else -1
    writer = RunWriter.resume(config.out, kept, config=config.record(), may_differ=config.may_differ(), **settings)
    return writer, position


@dataclass
class StopRequest:
    """Whether somebody pressed Ctrl-C, or asked the process to end."""

    asked: bool = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C or SIGTERM lets the step end; the second one ends it at once."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals do not arrive
        before = {}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens at this one; 0 is never."""
    return every > 0 and step % every == 0


def checkpoints_on_disk(config: TrainConfig) -> int:
    """Most checkpoints that must fit on the disk: one is written before the one that it replaces is removed."""
    return 2 if config.checkpoint_every else int(config.final_checkpoint)


def bytes_for_checkpoint(policy: Policy) -> int:
    """Weights, and two moments of what is trained."""
    parameters = list(policy.model.parameters())
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else 1) for p in parameters)


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


def shown(scalars: dict[str, Any]) -> dict[str, Any]:
    """What the progress line shows."""
    return {
        "reward": scalars["reward"],
        "live_groups": scalars["live_groups"],
        "groups": scalars["groups"],
        "effective_rank": scalars.get("group/effective_rank"),
        "effective_rank_null": scalars.get("group/effective_rank_orthogonal"),
        "tokens_per_second": scalars["time/tokens_per_second"],
    }
