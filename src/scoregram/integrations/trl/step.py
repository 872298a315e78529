"""One step of the trainer, measured: which rows, with which weights, in how many passes, and what came of it."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.gram import measure_gram
from scoregram.integrations.trl.generation import Generation, Laid, laid_out, together
from scoregram.integrations.trl.measuring import (
    AsTheTrainerCalls,
    Beside,
    counts_distances,
    likely_causes,
    measure_beside,
    rollout_weights,
)
from scoregram.integrations.trl.memory import SHARE, free_bytes, passes_within
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


def measure_step(
    trainer: Any, window: Window, generations: Sequence[Generation], settings: Settings
) -> StepReading | None:
    """Measure the step whose gradient is in `.grad`; None, with a word, if that is not possible."""
    is_loss = settings.mode == "loss"
    if not generations:
        return passed_over(window.step, "no rollouts of it were seen")
    if any(generation.has_pictures for generation in generations):
        return passed_over(window.step, "its prompts have images, which a measurement cannot give to the model")
    if is_loss and not window.is_caught:
        return passed_over(window.step, "the trainer's loss did not go through its log-probabilities")
    model = trainer.accelerator.unwrap_model(trainer.model)
    scale = loss_scale(trainer)
    whole = [torch.arange(generation.size) for generation in generations]
    rows = Rows(generations, [window.chosen(generation).cpu() for generation in generations] if is_loss else whole)
    derivatives = [window.coefficients(generation, scale) for generation in generations]
    parts = [
        laid_out(generation, c if is_loss else None, compact=counts_distances(model))
        for generation, c in zip(generations, derivatives, strict=True)
    ]
    laid = together(
        [part.at(chosen.to(part.input_ids.device)) for part, chosen in zip(parts, rows.chosen, strict=True)]
    )
    means, unevenness = mean_derivatives(rows, generations, derivatives)
    if not window.is_caught:
        means = -rows.advantages / len(means)  # the likeliest weights; there is nothing to check them with
    weights = torch.ones_like(means) if is_loss else means
    limit = free_bytes(model) * SHARE if settings.memory_gb is None else settings.memory_gb * 1e9
    passes = passes_within(limit, model, rows.bounds, laid.input_ids.shape[1])
    if passes is None:
        return passed_over(window.step, f"one group alone would take more than {limit / 1e9:.3g} GB by estimate")
    beside = measure_beside(
        model,
        laid,
        weights=weights,
        passes=passes,
        temperature=float(trainer.temperature),
        precision=trainer.accelerator.autocast(),
        scale=scale,
    )
    if not window.is_caught:
        beside = Beside(beside.measured, beside.log_probs, math.nan)
    passed = judge(trainer, window.step, beside, unevenness, settings)
    return reading_of(trainer, window.step, rows, laid, beside, -means, passed, settings)


def mean_derivatives(
    rows: Rows, generations: Sequence[Generation], derivatives: Sequence[Tensor]
) -> tuple[Tensor, float]:
    """`(n,)` mean derivative of each row over its tokens, and how uneven it is within rows."""
    found = [rollout_weights(c, g.loss_mask) for c, g in zip(derivatives, generations, strict=True)]
    return rows.of([mean.cpu() for mean, _ in found]), max(uneven for _, uneven in found)


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
    scalars |= {"check/relative_error": beside.error, "check/passed": float(passed)}
    rollouts: list[RolloutRecord] = []
    if settings.keep_rollouts:
        log_probs = [row[mask] for row, mask in zip(beside.log_probs, laid.completion_mask, strict=True)]
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


def energies_of(trainer: Any, generation: Generation) -> Tensor:
    """`(N,)` squared norms of the scores, for the baselines that need them: a pass of its own at every generation."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    is_relative = counts_distances(model)
    laid = laid_out(generation, None, compact=is_relative)
    counted = model if is_relative else AsTheTrainerCalls(model)
    with trainer.accelerator.autocast():
        gram = measure_gram(
            counted,
            laid.input_ids,
            laid.completion_mask,
            laid.attention_mask,
            group_size=generation.group_size,
            temperature=float(trainer.temperature),
        )
    return gram.matrix.diagonal()


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


def passed_over(step: int, reason: str) -> None:
    """Say why a step is not measured."""
    warnings.warn(f"scoregram: step {step} was not measured: {reason}.", stacklevel=5)
