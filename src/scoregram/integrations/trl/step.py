"""From an observed step of the trainer to a `Step`, its numbers and its records in the run folder."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.checks import fail
from scoregram.distributed import Processes
from scoregram.exhibits import Cell, Estimate
from scoregram.gram import update_sketch
from scoregram.integrations.trl.generation import Generation, tokenizer_of
from scoregram.integrations.trl.separate_pass import CheckedGram, measure_separately
from scoregram.integrations.trl.step_fusion import FusedSteps
from scoregram.integrations.trl.support import (
    MAY_CHANGE_WHEN_ATTACHED_AGAIN,
    Settings,
    loss_scale,
    memory_limit,
    unwrapped_model,
)
from scoregram.integrations.trl.window import EVEN, ObservedStep, Window, observed_step, reason_not_measured, step_slice
from scoregram.reading import (
    CHECK_COLUMN,
    CHECK_ERROR,
    CHECK_ROLLOUTS,
    STEP_NAMES,
    GroupReading,
    RunNoise,
    Step,
    batch_records,
    group_records,
    read_step,
    rollout_records,
    rollout_scalars,
)
from scoregram.runs import (
    CHECK_PASSED,
    LOSS_KIND,
    LayerPrecision,
    RolloutRecord,
    RunWriter,
    UpdateRecord,
    beside_foreign,
    needs_gram,
    open_run,
    own_name,
    require_same_config,
)

UNEVEN = "the loss weights the tokens of a rollout differently (KL term, clipping, masks); mode='loss' is exact there"
"""A cause of a failed self-check."""

FAILED_PREFIX = own_name("failed/")
"""Prefix, in the trainer's log, of Gram scalars of steps whose self-check failed: no logger may average them in."""

POOLED_PREFIX = own_name("run/")
"""Prefix, in the trainer's log, of what is pooled over the measured steps so far."""
CHECKS_IN_LOG: Mapping[str, Callable[[list[float]], float]] = {CHECK_ERROR: max, CHECK_PASSED: min, CHECK_ROLLOUTS: sum}
"""Scalar of the self-check → its value in the trainer's log, from the steps measured since the last line: the largest
error, 0 if one step failed, all compared rollouts. TRL would log the mean."""

HEADLINE_SCALARS: Mapping[str, str] = {
    "reward": "mean reward",
    "live_groups": "live groups",
    "groups": "of groups",
    "gram/largest_share": "largest share of one rollout",
    "gram/snr": "signal to noise, leave-one-out",
    "gram/noise_scale": "noise scale, in rollouts",
    "group/effective_rank": "effective rank of a group",
    "group/effective_rank_orthogonal": "  null: orthogonal scores",
    "check/relative_error": "self-check: relative error",
}
"""Scalars that `print(attachment)` shows, and their labels."""


@dataclass(frozen=True)
class MeasuredStep:
    """The numbers of a measured step, and whether they can be trusted."""

    step: int
    scalars: dict[str, float]
    error: float
    """Relative error of the self-check; `nan` if there was no gradient to compare with."""
    passed: bool
    """Whether the error is within the tolerance."""
    notes: tuple[str, ...]
    """Remarks of the Gram engine, such as dropout that it switched off."""
    details: Step | None = field(default=None, repr=False)
    """Rollouts and Gram; only in the first process, until they are written."""
    groups: Sequence[GroupReading] = field(default=(), repr=False)
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
        UNEVEN: settings.mode == "scores" and unevenness > EVEN,
        "an entropy bonus: its gradient does not go through log-probabilities": bool(
            getattr(trainer, "_entropy_bonus_enabled", False)
        ),
        "the auxiliary loss of a router": bool(getattr(trainer, "aux_loss_enabled", False)),
    }
    return [*(cause for cause, holds in facts.items() if holds), *settings.low_precision]


def printed_cell(cell: Cell, is_withheld: bool) -> str:
    """A number of `print(attachment)`; `–` if it is undefined, or pooled over too few steps to have an interval."""
    value = cell.value if isinstance(cell, Estimate) and not math.isnan(cell.low) else cell
    if not isinstance(value, float) or math.isnan(value):
        return "failed" if is_withheld else "–"
    return f"{value:.3g}"


def add_to_log(metrics: MutableMapping[str, list[Any]], measured: MeasuredStep, pooled: RunNoise) -> None:
    """Add a measured step to the metrics that the trainer logs next; it logs the mean of every list.

    Ratios such as the noise scale of one step are left out: a mean of those that are finite is biased. What is `pooled`
    over the measured steps so far is logged in their place, once it has intervals.
    """
    for name, value in measured.scalars.items():
        if name in STEP_NAMES or not math.isfinite(value):
            continue
        is_failed = not measured.passed and needs_gram(name)
        key = FAILED_PREFIX + name if is_failed else own_name(name)
        values = [*metrics.get(key, ()), float(value)]
        metrics[key] = [CHECKS_IN_LOG[name](values)] if name in CHECKS_IN_LOG else values
    for outdated in [name for name in metrics if name.startswith(POOLED_PREFIX)]:
        del metrics[outdated]
    if pooled.is_conclusive:
        metrics.update({own_name(name): [value] for name, value in pooled.scalars().items()})


def require_folder_options(out: str | Path | None, layers: str, *, overwrite: bool, resume: bool) -> None:
    """Raise for options of the run folder that are wrong, exclude each other, or have no folder."""
    if layers not in get_args(LayerPrecision):
        choices = ", ".join(get_args(LayerPrecision))
        fail("attach", f"layers must be one of {choices}", repr(layers), "Check the spelling.")
    asked = [f"{name}=True" for name, is_asked in (("overwrite", overwrite), ("resume", resume)) if is_asked]
    if len(asked) == 2:
        fail("attach", "overwrite=True and resume=True exclude each other", "both", "Leave out one of them.")
    if asked and out is None:
        fail("attach", f"{asked[0]} needs out, the run folder", "out=None", "Pass out, or leave it out.")


class Folder:
    """The run folder of an attached trainer: one line of metrics per step, the trainer's own metrics included.

    A line is written when the next step begins, because the trainer logs its metrics after the measurement.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], *, layers: LayerPrecision, overwrite: bool, resume: bool
    ) -> None:
        self.path = path
        self.config = config
        self.layers: LayerPrecision = layers
        self._writer: RunWriter | None = None
        self._step = -1
        self._ours: dict[str, float] = {}
        self._foreign: dict[str, float] = {}
        """Scalars of the line that is not written yet, that of `_step`: ours, and the trainer's."""
        self._foreign_names: set[str] = set()
        """Names of all scalars of the trainer so far."""
        self._last = -1
        if resume:
            # raises now if there is no run or another one; the step to resume from is known when the training begins
            require_same_config(path, config, MAY_CHANGE_WHEN_ATTACHED_AGAIN, caller="attach")
        else:
            self._writer = RunWriter.create(path, config, overwrite=overwrite, layers=layers, caller="attach")

    def begin(self, step: int) -> None:
        """Begin to write: training starts after `step`, and later steps of a resumed run are removed."""
        if self._writer is None:
            self._require_resumable(step)
            changeable = MAY_CHANGE_WHEN_ATTACHED_AGAIN
            self._writer = RunWriter.resume(
                self.path, step, config=self.config, may_differ=changeable, layers=self.layers
            )
        self._last = max(self._last, step)

    def _require_resumable(self, step: int) -> None:
        """Raise if a training from the beginning would remove every step of the run that it was to continue."""
        if step == 0 and (stored := open_run(self.path).metrics()):
            got = f"a training from the beginning, which would remove steps {stored[0]['step']} to {stored[-1]['step']}"
            remedy = "Pass resume_from_checkpoint to train, or overwrite=True in place of resume=True to attach."
            fail("attach", f"resume=True continues the run in {self.path} after a checkpoint", got, remedy)

    def write(self, measured: MeasuredStep, *, keep_rollouts: bool, foreign_names: Iterable[str] = ()) -> None:
        """Write the records of a measured step; `foreign_names` are those of the trainer's own scalars."""
        step = measured.details
        if self._writer is None or step is None:
            return
        self._writer.write_groups(step.number, group_records(step, measured.groups))
        self._writer.write_batches(step.number, batch_records(step))
        if measured.sketch is not None:
            self._writer.write_updates(step.number, [UpdateRecord(step=step.number, sketch=measured.sketch)])
        self._writer.write_rollouts(step.number, _with_masks(rollout_records(step)) if keep_rollouts else [])
        self._foreign_names |= set(foreign_names)
        self._begin_line(step.number)
        self._ours |= measured.scalars

    def add_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Add what the trainer logged to the line of a step."""
        self._begin_line(step)
        self._foreign |= {
            name: value
            for name, value in logs.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }
        self._foreign_names |= self._foreign.keys()

    def _begin_line(self, step: int) -> None:
        if step != self._step:
            self.flush()
            self._step = step

    def flush(self) -> None:
        """Write the pending line of metrics."""
        ours, self._ours, foreign, self._foreign = self._ours, {}, self._foreign, {}
        if self._writer is None or self._step <= self._last or not (ours or foreign):
            return
        self._last = self._step
        self._writer.write_metrics(self._step, beside_foreign(ours, foreign, self._foreign_names))

    def close(self) -> None:
        """Write what is pending and close the folder."""
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.close()


def _with_masks(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """The same records with an explicit completion mask in each."""
    return [
        record
        if record.completion_mask is not None
        else replace(record, completion_mask=torch.arange(len(record.token_ids)) >= record.prompt_length)
        for record in records
    ]
