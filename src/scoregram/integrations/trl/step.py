"""One step of the trainer, measured: which rows, with which weights, in how many passes, and what came of it."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.gram import measure_gram
from scoregram.integrations.trl.fusing import Fusing
from scoregram.integrations.trl.gathering import Part, dealt, gathered, laid_together, part_of
from scoregram.integrations.trl.generation import Generation, Laid, together
from scoregram.integrations.trl.measuring import (
    AsTheTrainerCalls,
    Beside,
    counts_distances,
    likely_causes,
    measure_beside,
)
from scoregram.integrations.trl.memory import SHARE, free_bytes, passes_within
from scoregram.integrations.trl.processes import ALONE, Processes
from scoregram.integrations.trl.recording import (
    LOSS,
    Rows,
    batch_records,
    group_records,
    rollout_records,
    scalars_of,
)
from scoregram.integrations.trl.settings import Settings
from scoregram.integrations.trl.window import Window
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord


@dataclass(frozen=True)
class StepReading:
    """A measured step."""

    step: int
    scalars: dict[str, float]
    error: float
    """Relative error of the self-check; `nan` if there was nothing to compare with."""
    passed: bool
    """Whether the error is within the tolerance."""
    notes: tuple[str, ...]
    groups: Sequence[GroupRecord] = field(default=(), repr=False)
    batches: Sequence[BatchRecord] = field(default=(), repr=False)
    rollouts: Sequence[RolloutRecord] = field(default=(), repr=False)

    @property
    def bare(self) -> "StepReading":
        """The same without its records."""
        return replace(self, groups=(), batches=(), rollouts=())

    def with_scalars(self, more: Mapping[str, float]) -> "StepReading":
        """The same with more scalars."""
        return replace(self, scalars={**self.scalars, **more})


def measure_step(
    trainer: Any,
    window: Window,
    generations_of: Callable[[Window], Sequence[Generation]],
    settings: Settings,
    processes: Processes = ALONE,
    fusing: Fusing | None = None,
) -> StepReading | None:
    """Measure the step whose gradient is in `.grad`; None, with a word, if that is not possible.

    All processes call it together. Each measures whole groups, wherever their rollouts were made, and the first one
    makes the records; scalars, error and notes are the same in all.

    Args:
        trainer: The trainer.
        window: The step, as this process saw it.
        generations_of: The generations of the step, as this process has them.
        settings: What was asked for.
        processes: Those that train together.
        fusing: Has the measurement of a step that was fused, and hears of the comparison of one that was not.
    """
    began = time.perf_counter()
    is_loss = settings.mode == "loss"
    model = trainer.accelerator.unwrap_model(trainer.model)
    scale = loss_scale(trainer)
    parts = processes.everyones(
        lambda: part_of(
            generations_of(window),
            window,
            scale=scale,
            limit=memory_limit(model, settings, processes),
            processes=processes.count,
            only_chosen=is_loss,
        )
    )
    if (reason := reason_against(parts, is_loss=is_loss)) is not None:
        return passed_over(window.step, reason, processes)
    found = gathered(parts)
    rows = Rows([one.generation for one in found], [one.chosen for one in found])
    batches = [one.laid(with_derivatives=is_loss, compact=counts_distances(model)) for one in found]
    laid = together(
        [batch.at(chosen.to(batch.input_ids.device)) for batch, chosen in zip(batches, rows.chosen, strict=True)]
    ).on(trainer.accelerator.device)
    derivatives = [one.mean_derivatives() for one in found]
    means, unevenness = rows.of([mean for mean, _ in derivatives]), max(uneven for _, uneven in derivatives)
    is_caught = all(part.is_caught for part in parts)
    if not is_caught:
        means = -rows.advantages / len(means)  # the likeliest weights; there is nothing to check them with
    step = None if fusing is None else fusing.step
    if step is not None and step.ours is not None:
        (generation,) = rows.generations
        order = step.batch.rows[:, 1].argsort().cpu()
        counted = generation.loss_mask[rows.chosen[0].to(generation.loss_mask.device)]
        beside = step.ours.beside(order, counted, laid)
        began -= step.ours.seconds
    else:
        beside = measured_beside(trainer, model, laid, rows.bounds, means, parts, settings, processes)
        if isinstance(beside, str):
            return passed_over(window.step, beside, processes)
        if not is_caught:
            beside = replace(beside, error=math.nan)
        if fusing is not None:
            fusing.compared(beside.error, unevenness, pulls=bool(means.any()))
    made: list[StepReading] = []

    def read() -> StepReading:
        passed = judge(trainer, window.step, beside, unevenness, settings)
        reading = reading_of(trainer, window.step, rows, laid, beside, -means, passed, settings)
        made.append(reading.with_scalars({"time/measure": time.perf_counter() - began}))
        return made[0].bare

    told = processes.from_first(read)
    return made[0] if made else told


def measured_beside(
    trainer: Any,
    model: nn.Module,
    laid: Laid,
    bounds: Sequence[int],
    means: Tensor,
    parts: Sequence[Part],
    settings: Settings,
    processes: Processes,
) -> Beside | str:
    """A measurement by passes of its own, or why there is no room for one."""
    limit = min(part.limit for part in parts)
    shares = dealt(bounds, processes.count, between_prompts=settings.between_prompts)
    plans = [passes_within(limit, model, share, laid.input_ids.shape[1]) for share in shares]
    if any(plan is None for plan in plans):
        return f"one group alone would take more than {limit / 1e9:.3g} GB by estimate"
    return measure_beside(
        model,
        laid,
        weights=torch.ones_like(means) if settings.mode == "loss" else means,
        plans=[plan for plan in plans if plan is not None],
        temperature=float(trainer.temperature),
        precision=trainer.accelerator.autocast(),
        scale=loss_scale(trainer),
        processes=processes,
    )


def reason_against(parts: Sequence[Part], *, is_loss: bool) -> str | None:
    """Why a step cannot be measured, None if it can."""
    slices = [one for part in parts for one in part.slices]
    if not slices:
        return "no rollouts of it were seen"
    if any(one.has_pictures for one in slices):
        return "its prompts have images, which a measurement cannot give to the model"
    if is_loss and not all(part.is_caught for part in parts):
        return "the trainer's loss did not go through its log-probabilities"
    return None


def memory_limit(model: nn.Module, settings: Settings, processes: Processes) -> float:
    """Bytes that a measurement may take in this process."""
    if settings.memory_gb is not None:
        return settings.memory_gb * 1e9
    return free_bytes(model, processes.count) * SHARE


def judge(trainer: Any, step: int, beside: Beside, unevenness: float, settings: Settings) -> bool:
    """Whether the self-check is within the tolerance; a warning with the likely cause if not."""
    if math.isnan(beside.error):
        warnings.warn(f"scoregram: step {step} could not be checked against the trainer's gradient.", stacklevel=5)
        return False
    if beside.error <= settings.tolerance:
        return True
    causes = likely_causes(trainer, beside.measured.notes, unevenness, settings.mode)
    likely = "; ".join(causes) or "unknown, please report it with the trainer's arguments"
    warnings.warn(
        f"scoregram: at step {step} the measured rows differ from the trainer's gradient by {beside.error:.2g} "
        f"(tolerance {settings.tolerance:g}). Likely cause: {likely}. The measurement is marked.",
        stacklevel=5,
    )
    return False


def reading_of(
    trainer: Any, step: int, rows: Rows, laid: Laid, beside: Beside, weights: Tensor, passed: bool, settings: Settings
) -> StepReading:
    """Scalars and records of a measured step."""
    kind = LOSS if settings.mode == "loss" else "train"
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    measured = beside.measured
    groups = group_records(step, rows, measured, passed, kind, tokenizer)
    pulls = torch.ones_like(weights) if kind == LOSS else weights
    scalars = scalars_of(rows, measured, pulls, groups, kind)
    checked = {"check/relative_error": beside.error, "check/passed": float(passed), "check/rollouts": beside.rollouts}
    scalars |= checked
    rollouts: list[RolloutRecord] = []
    if settings.keep_rollouts:
        log_probs = [row[mask] for row, mask in zip(beside.log_probs, laid.completion_mask.cpu(), strict=True)]
        rollouts = rollout_records(step, rows, log_probs, tokenizer, stop_ids(trainer, tokenizer), kind)
    return StepReading(
        step=step,
        scalars=scalars,
        error=beside.error,
        passed=passed,
        notes=measured.notes,
        groups=groups,
        batches=batch_records(step, rows, measured, pulls, kind),
        rollouts=rollouts,
    )


def energies_of(trainer: Any, whole: Generation, slices: Sequence[Generation], processes: Processes = ALONE) -> Tensor:
    """`(N,)` squared norms of the scores, for the baselines that need them: a pass of its own at every generation.

    Each process measures its share of the groups, or the first group once more if there are too few.

    Args:
        trainer: The trainer.
        whole: The generation.
        slices: The same as each process has it.
        processes: Those that train together.
    """
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    is_relative = counts_distances(model)
    laid = laid_together(slices, None, compact=is_relative).on(trainer.accelerator.device)
    counted = model if is_relative else AsTheTrainerCalls(model)
    size = whole.group_size
    bounds = list(range(0, whole.size + 1, size))
    share = dealt(bounds, processes.count, between_prompts=False)[processes.rank]
    own = len(share) > 1
    part = laid.at(slice(share[0], share[-1]) if own else slice(0, size))

    def diagonal() -> Tensor:
        with trainer.accelerator.autocast():
            gram = measure_gram(
                counted,
                part.input_ids,
                part.completion_mask,
                part.attention_mask,
                group_size=size,
                temperature=float(trainer.temperature),
            )
        return gram.matrix.diagonal() if own else gram.matrix.new_zeros(0)

    return torch.cat(processes.everyones(diagonal))


def loss_scale(trainer: Any) -> float:
    """What the loss was multiplied with before the backward pass, against underflow in float16."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def stop_ids(trainer: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a rollout."""
    config = getattr(trainer.model, "generation_config", None)
    found: set[int] = set()
    for value in (
        getattr(trainer, "eos_token_ids", None),
        getattr(trainer, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if value is not None:
            found |= set(value) if isinstance(value, list | tuple | set) else {int(value)}
    return found


def passed_over(step: int, reason: str, processes: Processes) -> None:
    """Say why a step is not measured."""
    if processes.is_first:
        warnings.warn(f"scoregram: step {step} was not measured: {reason}.", stacklevel=5)
