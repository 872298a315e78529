"""What users read of a training: the measured steps, how far they can be trusted, and what they show together."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from scoregram.exhibits import Cell, Estimate, Table
from scoregram.integrations.trl.step import MeasuredStep, SkippedStep
from scoregram.reading import CHECK_ROLLOUTS, STEP_NAMES, RunNoise, Trust, run_noise
from scoregram.runs import needs_gram

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


class MeasuredSteps:
    """The measured steps of a training so far; also the steps that were skipped, and errors in measurements."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.readings: list[MeasuredStep] = []
        self.skipped: list[SkippedStep] = []
        self.failures: list[str] = []

    @contextmanager
    def errors_as_warnings(self) -> Iterator[None]:
        """Turn errors in a measurement into warnings, each given once, so that the training goes on."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            is_new = message not in self.failures
            self.failures.append(message)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            if is_new:
                text = f"scoregram: a measurement failed and was skipped; the training goes on. {message}"
                warnings.warn(text, stacklevel=4)

    @property
    def numbers(self) -> str:
        """Numbers of the measured steps as text, `none` if there is none."""
        return ", ".join(str(reading.step) for reading in self.readings) or "none"

    @property
    def trust(self) -> Trust:
        """How far the measured numbers can be trusted: how many self-checks passed, and the worst error."""
        return Trust(
            measured=len(self.readings),
            errors={reading.step: reading.error for reading in self.readings},
            failed=frozenset(reading.step for reading in self.readings if not reading.passed),
            norm_only=frozenset(reading.step for reading in self.readings if not reading.scalars[CHECK_ROLLOUTS]),
        )

    def noise(self) -> RunNoise:
        """Signal, noise scale, best group size and what `optimal-loo` would save, pooled over measured steps."""
        lines = [{"step": reading.step, **reading.scalars} for reading in self.readings]
        return run_noise(lines, int(self.trainer.num_generations), failed=self.trust.failed)

    def summary(self) -> Table:
        """The measured scalars: first, last, and the mean where every measured step defines them.

        Signal to noise, noise scale, best group size and saving have `noise()` in place of a mean: ratios are pooled.

        Numbers from the Gram of a step whose self-check failed are withheld; `readings` has them, with `passed`.
        """
        names = dict.fromkeys(name for reading in self.readings for name in reading.scalars)
        pooled = self.noise()
        rows: list[tuple[Cell, ...]] = []
        for name in names:
            values = [
                math.nan if needs_gram(name) and not reading.passed else float(reading.scalars.get(name, math.nan))
                for reading in self.readings
            ]
            # a mean over only the steps that define a number would be biased by that selection
            mean = sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
            over_run = getattr(pooled, STEP_NAMES[name]) if name in STEP_NAMES else mean
            rows.append((name, values[0], values[-1], over_run))
        return Table(
            id="trl",
            title=f"Measured steps of {type(self.trainer).__name__}",
            caption=f"Steps {self.numbers}. {' '.join(self.trust.sentences())} A number is undefined where "
            "every advantage is zero, or where a step has too few rollouts for it; a mean is given only where every "
            "step defines the number and no self-check failed. Signal to noise, noise scale, best group size and the "
            "saving of a baseline are ratios of means over the last third of the measured steps.",
            columns=("scalar", "first", "last", "mean"),
            rows=tuple(rows),
        )

    def text(self) -> str:
        """The main rows of `summary()`, one line each, after what was not measured and why."""
        trainer = type(self.trainer).__name__
        if not self.readings:
            return "\n".join([f"{trainer}: no step was measured", *self._reasons_not_measured()])
        rows = {str(row[0]): row[1:] for row in self.summary().rows}
        lines = [
            f"{trainer}, measured steps {self.numbers}",
            *self.trust.sentences(),
            *self._reasons_not_measured(),
            f"{'':<36}" + "".join(f"{name:>10}" for name in ("first", "last", "mean")),
        ]
        passed = (self.readings[0].passed, self.readings[-1].passed, True)
        for name in [name for name in HEADLINE_SCALARS if name in rows]:
            withheld = [needs_gram(name) and not is_passed for is_passed in passed]
            cells = map(printed_cell, rows[name], withheld)
            lines.append(f"{HEADLINE_SCALARS[name]:<36}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join(lines)

    def _reasons_not_measured(self) -> Iterator[str]:
        """Sentences on steps that were skipped or whose measurement failed; none if there was no such step."""
        if self.skipped:
            last = self.skipped[-1]
            yield f"Steps not measured: {len(self.skipped)}. The last one is step {last.step}, because {last.reason}."
        if self.failures:
            yield f"Measurements that failed: {len(self.failures)}. The last error is {self.failures[-1]}"


def printed_cell(cell: Cell, is_withheld: bool) -> str:
    """A number of `print(attachment)`; `–` if it is undefined, or pooled over too few steps to have an interval."""
    value = cell.value if isinstance(cell, Estimate) and not math.isnan(cell.low) else cell
    if not isinstance(value, float) or math.isnan(value):
        return "failed" if is_withheld else "–"
    return f"{value:.3g}"
