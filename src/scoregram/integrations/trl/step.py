"""From an observed step of the trainer to a `Step`, its numbers, and whether they can be trusted."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.distributed import Processes
from scoregram.gram import update_sketch
from scoregram.integrations.trl.generation import Generation, tokenizer_of
from scoregram.integrations.trl.separate_pass import CheckedGram, measure_separately
from scoregram.integrations.trl.step_fusion import FusedSteps
from scoregram.integrations.trl.support import Settings, loss_scale, memory_limit, unwrapped_model
from scoregram.integrations.trl.window import (
    EVENNESS_TOLERANCE,
    ObservedStep,
    Window,
    observed_step,
    reason_not_measured,
    step_slice,
)
from scoregram.reading import (
    CHECK_COLUMN,
    CHECK_ERROR,
    CHECK_ROLLOUTS,
    GroupReading,
    Step,
    read_step,
    rollout_scalars,
)
from scoregram.runs import CHECK_PASSED, LOSS_KIND

UNEVEN = "the loss weights the tokens of a rollout differently (KL term, clipping, masks); mode='loss' is exact there"
"""A cause of a failed self-check."""


@dataclass(frozen=True)
class MeasuredStep:
    """The numbers of a measured step, and whether they can be trusted."""

    step: int
    """Number of the step, counted from 1."""
    scalars: dict[str, float]
    """By name, those of the self-check included; `nan` where a number is undefined."""
    error: float
    """Relative error of the self-check; `nan` if there was no gradient to compare with."""
    passed: bool
    """Whether the error is within the tolerance."""
    notes: tuple[str, ...]
    """Remarks of the Gram engine, such as dropout that it switched off."""
    details: Step | None = field(default=None, repr=False)
    """Rollouts and Gram; only in the first process, until they are written."""
    groups: Sequence[GroupReading] = field(default=(), repr=False)
    """The reading of every group, like `details`; empty without them."""
    sketch: Tensor | None = field(default=None, repr=False)
    """Sketch of the trainer's gradient, like `details`; None where parameters are sharded or no folder is written."""

    @property
    def bare(self) -> "MeasuredStep":
        """The same without rollouts, Gram and sketch."""
        return replace(self, details=None, groups=(), sketch=None)


@dataclass(frozen=True)
class SkippedStep:
    """A step at which a measurement was due and could not be made."""

    step: int
    reason: str
    """A clause without a full stop."""


def measure_step(
    trainer: Any,
    window: Window,
    generations_of: Callable[[Window], Sequence[Generation]],
    settings: Settings,
    processes: Processes,
    fused: FusedSteps,
) -> MeasuredStep | SkippedStep:
    """Measure the step whose gradient is in `.grad`; warns if that is not possible.

    All processes call it together. Scalars, error and notes are the same in all; the first one has the details too.
    `fused` has the result of a step that was fused; for any other step it notes whether the gradients agreed.
    """
    began = time.perf_counter()
    is_loss = settings.mode == "loss"
    model = unwrapped_model(trainer)
    parts = processes.gather(
        lambda: step_slice(
            generations_of(window),
            window,
            scale=loss_scale(trainer),
            limit=memory_limit(model, settings, processes),
            processes=processes.count,
            is_loss=is_loss,
        )
    )
    if (reason := reason_not_measured(parts, is_loss=is_loss)) is not None:
        return _skip(window.step, reason, processes)
    observed = observed_step(window.step, parts)
    checked = fused.measured(parts[processes.rank])
    if checked is None:
        checked = measure_separately(trainer, observed, settings, processes)
        if checked is None:
            limit = f"{observed.memory_limit / 1e9:.3g} GB"
            return _skip(window.step, f"one group alone would take more than {limit} by estimate", processes)
        causes = likely_causes(trainer, checked.gram.notes, observed.unevenness, settings)
        has_gradient = bool(observed.weights.any())
        fused.note_full_check(checked.error, observed.unevenness, has_gradient=has_gradient, causes=causes)
    made: list[MeasuredStep] = []

    def read() -> MeasuredStep:
        passed = check_passes(trainer, observed, checked, settings)
        details = trl_step(trainer, observed, checked, passed, settings)
        reading = read_step(details)
        sketch = update_sketch(model, scale=loss_scale(trainer)) if settings.keep_sketches else None
        scalars = reading.scalars | rollout_scalars(details)
        scalars |= {CHECK_ERROR: checked.error, CHECK_PASSED: float(passed)}
        scalars |= {CHECK_ROLLOUTS: checked.rollouts, "time/measure": time.perf_counter() - began + checked.seconds}
        notes = checked.gram.notes
        made.append(MeasuredStep(window.step, scalars, checked.error, passed, notes, details, reading.groups, sketch))
        return made[0].bare

    everywhere = processes.from_first(read)
    return made[0] if made else everywhere


def _skip(step: int, reason: str, processes: Processes) -> SkippedStep:
    """Warn that a step is not measured."""
    if processes.is_first:
        warnings.warn(f"scoregram: step {step} was not measured: {reason}.", stacklevel=5)
    return SkippedStep(step, reason)


def trl_step(trainer: Any, observed: ObservedStep, checked: CheckedGram, passed: bool, settings: Settings) -> Step:
    """The step as scoregram's common `Step`, with the texts of its rollouts."""
    tokenizer, rollouts = tokenizer_of(trainer), observed.rollouts
    tokens, lengths = rollouts.token_ids(), rollouts.prompt_lengths.tolist()
    log_probs, width = checked.gram.log_probs, rollouts.input_ids.shape[1]
    starts = observed.group_bounds[:-1]
    texts = [tokenizer.decode(tokens[row][: lengths[row]], skip_special_tokens=False) for row in starts]
    completions: list[str] = []
    if settings.keep_rollouts:
        completions = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rollouts.completion_ids()]
    return Step(
        number=observed.number,
        rollouts=replace(rollouts, prompts=texts, completions=completions),
        advantages=observed.advantages,
        weights=-observed.weights,
        gram=checked.gram,
        kind=LOSS_KIND if settings.mode == "loss" else "train",
        log_probs=F.pad(log_probs, (0, max(width - log_probs.shape[1], 0)))[:, :width],
        token_advantages=observed.token_advantages,
        group_marks=[{CHECK_COLUMN: float(passed)}] * len(starts),
    )


def check_passes(trainer: Any, observed: ObservedStep, checked: CheckedGram, settings: Settings) -> bool:
    """Whether the self-check is within the tolerance; warns with the likely cause if not."""
    step = observed.number
    if math.isnan(checked.error):
        text = f"scoregram: step {step} could not be checked against the trainer's gradient. check/passed is 0."
        warnings.warn(text, stacklevel=5)
        return False
    if checked.error <= settings.tolerance:
        return True
    causes = likely_causes(trainer, checked.gram.notes, observed.unevenness, settings)
    if causes == [UNEVEN] and settings.uneven_term is not None:
        return False  # `attach` has warned of it
    likely = "; ".join(causes) or "unknown, please report it with the arguments of the trainer"
    warnings.warn(
        f"scoregram: at step {step} the measured rows differ from the trainer's gradient by {checked.error:.2g} "
        f"(tolerance {settings.tolerance:g}). Likely cause: {likely}. check/passed is 0.",
        stacklevel=5,
    )
    return False


def likely_causes(trainer: Any, notes: Sequence[str], unevenness: float, settings: Settings) -> list[str]:
    """Reasons why the rows may not add up to the trainer's gradient, the likeliest first."""
    facts: Mapping[str, bool] = {
        "active dropout: the trainer's pass drops activations, the measurement does not": any(
            "dropout" in note for note in notes
        ),
        UNEVEN: settings.mode == "scores" and unevenness > EVENNESS_TOLERANCE,
        "an entropy bonus: its gradient does not go through log-probabilities": bool(
            getattr(trainer, "_entropy_bonus_enabled", False)
        ),
        "the auxiliary loss of a router": bool(getattr(trainer, "aux_loss_enabled", False)),
    }
    return [*(cause for cause, holds in facts.items() if holds), *settings.low_precision]
