"""What is kept of an attached training, and the advice that follows from it.

A measured step goes to the trainer's own metrics and to the run folder, next to what the trainer logs. The rules of
`scoregram advise` read the run folder, or the trainer's log if there is none. No other file of this integration imports
`scoregram.advice`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from scoregram.advice import SEVERITIES, advise, advise_log, run_log
from scoregram.advice import Diagnosis as Diagnosis
from scoregram.advice import RunFinding as RunFinding
from scoregram.advice import Severity as Severity
from scoregram.checks import fail
from scoregram.integrations.trl.step import MeasuredStep
from scoregram.integrations.trl.support import MAY_CHANGE_WHEN_ATTACHED_AGAIN
from scoregram.reading import (
    CHECK_ERROR,
    CHECK_ROLLOUTS,
    STEP_NAMES,
    RunNoise,
    batch_records,
    group_records,
    rollout_records,
)
from scoregram.runs import (
    CHECK_PASSED,
    CONFIG_FILE,
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

FAILED_PREFIX = own_name("failed/")
"""Prefix, in the trainer's log, of Gram scalars of steps whose self-check failed: no logger may average them in."""

POOLED_PREFIX = own_name("run/")
"""Prefix, in the trainer's log, of what is pooled over the measured steps so far."""
CHECKS_IN_LOG: Mapping[str, Callable[[list[float]], float]] = {CHECK_ERROR: max, CHECK_PASSED: min, CHECK_ROLLOUTS: sum}
"""Scalar of the self-check → its value in the trainer's log, from the steps measured since the last line: the largest
error, 0 if one step failed, all compared rollouts. TRL would log the mean."""


# the trainer's metrics


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


# the run folder


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


class RunFolder:
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

    def add_scalars(self, step: int, scalars: Mapping[str, float | int]) -> None:
        """Add scalars of ours to the line of a step."""
        self._begin_line(step)
        self._ours |= scalars

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
        """Write the pending line if it is that of an earlier step."""
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


# the trainer's log, and advice


def halting_severity(halt_on: str | None) -> Severity | None:
    """The severity from which on a finding stops the training; None: no finding does.

    Raises:
        ScoregramError: If `halt_on` is not a severity.
    """
    if halt_on is None:
        return None
    for severity in SEVERITIES:
        if severity == halt_on:
            return severity
    return fail(
        "attach", f"halt_on must be one of {', '.join(SEVERITIES)}", repr(halt_on), "None never stops a training."
    )


class TrainerLog:
    """What the trainer logged, and what the rules of `scoregram advise` find in it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.lines: list[dict[str, Any]] = []
        """What the trainer logged, a mapping with `step` for each time."""

    def advice(self, folder: RunFolder | None) -> Diagnosis:
        """What is wrong with the training, from the run folder if it has begun, Grams included; else from the log."""
        if folder is not None and (folder.path / CONFIG_FILE).exists():
            return advise(folder.path)
        return self._log_advice()

    def halting_finding(self, severity: Severity) -> RunFinding | None:
        """The worst finding in the log, if it is at least this severe."""
        found = self._log_advice()
        return found.findings[0] if found.reaches(severity) else None

    def _log_advice(self) -> Diagnosis:
        """What the rules for logs find; they need no Gram."""
        settings = {"num_iterations": getattr(self.trainer, "num_iterations", None)}
        return advise_log(run_log(type(self.trainer).__name__, self.lines, settings))
