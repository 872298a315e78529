"""Signal and noise of a run: one answer for every caller, pooled over its measured steps.

Terminal, trackers, `attach(…).summary()`, page and API all call `run_noise` on the scalars of the steps. A quantity
is a ratio of means over steps, never a mean of ratios: the estimate of `|g|²` of one step is often negative, and a mean
over only the steps where it is positive is biased.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from scoregram.bootstrap import FEWEST, LEVEL, fieller_ratio, if_enough
from scoregram.checks import fail
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading.group_sizes import GROUP_SIZE
from scoregram.statistics import NoiseComponents, batch_mse

MEASURED = "gram/score_norm"
"""Scalar that every step with measured scores has."""
COMPONENTS = ("gram/gradient_squared", "gram/between_prompts", "gram/within_prompt", "gram/group_baseline")
"""Scalars of a step that are the fields of `NoiseComponents`, in their order."""
SAVING = ("gram/optimal_loo_saved", "gram/rloo_variance")
"""Scalars of a step whose ratio is what `optimal-loo` saves. Older folders have `gram/saved_variance` in their place:
what the best constant baseline would save, estimated too low. It is not read."""
UNKNOWN_NOISE = Estimate(math.nan)


@dataclass(frozen=True, kw_only=True)
class RunNoise:
    """Signal and noise of a third of a run's measured steps; `nan` where the run does not have the numbers.

    Intervals are Fieller's, with steps as the units; fewer than 5 steps give none, and then nothing is concluded.
    """

    steps: int
    """Steps that were pooled."""
    first_step: int = 0
    last_step: int = 0
    group_size: int = 0
    """Rollouts per prompt of the last step."""
    prompts: float = math.nan
    """Mean number of prompts per step that have every reward; noise is estimated from these."""
    components: NoiseComponents | None = None
    """Means over the steps."""
    snr: Estimate = UNKNOWN_NOISE
    """`|g|² / MSE` of a step's own number of prompts. Negative: no signal was resolved."""
    noise_scale: Estimate = UNKNOWN_NOISE
    """Rollouts at which error and signal have equal power. `inf`: no signal was resolved."""
    best_group_size: Estimate = UNKNOWN_NOISE
    """`1 + sqrt(c3/c1)`, at least 2: the least error at a fixed number of rollouts. `inf`: prompts do not differ."""
    baseline_saving: Estimate = UNKNOWN_NOISE
    """Share of the variance within prompts that `optimal-loo` saves over `rloo` at this group size, with the cost of
    estimating its baseline. Negative: it costs more than it saves."""

    @property
    def is_conclusive(self) -> bool:
        """Whether there are enough steps for intervals."""
        return self.steps >= FEWEST

    def scalars(self) -> dict[str, float]:
        """`run/NAME` → value, with `_low` and `_high` for the interval, for trackers; undefined ones are left out."""
        found = {}
        for name in POOLED:
            estimate: Estimate = getattr(self, name)
            ends = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
            found |= {f"run/{name}{end}": value for end, value in ends.items() if math.isfinite(value)}
        return found

    def sentence(self) -> str:
        """All numbers in one line; empty if none is known."""
        known = {POOLED[name]: cell_text(getattr(self, name)) for name in POOLED}
        parts = [f"{label} {text}" for label, text in known.items() if text != "–"]
        if not parts:
            return ""
        few = "" if self.is_conclusive else f": fewer than {FEWEST}, too few for a conclusion"
        where = f"{self.steps} measured steps from {self.first_step} to {self.last_step}{few}"
        return f"{', '.join(parts)} ({where})"


POOLED: Mapping[str, str] = {
    "snr": "signal to noise",
    "noise_scale": "noise scale in rollouts",
    "best_group_size": "best group size",
    "baseline_saving": "variance saved by optimal-loo",
}
"""Pooled quantities of `RunNoise` and their labels. A step's own values are `gram/NAME`, except where renamed."""
STEP_NAMES: Mapping[str, str] = {f"gram/{name}": name for name in POOLED} | {
    "gram/optimal_group_size": "best_group_size"
}
"""Scalar of one step → the pooled quantity of the run that it estimates."""


def noise_scalars(components: NoiseComponents, prompts: int) -> dict[str, float | int]:
    """The noise of a step as scalars of its line, and the number of prompts that it was estimated from.

    For steps whose groups differ in size by a decision made before they were sampled; `step_scalars` has the others.
    """
    return dict(zip(COMPONENTS, astuple(components), strict=True)) | {"gram/complete_prompts": prompts}


def step_components(scalars: Mapping[str, Any]) -> NoiseComponents | None:
    """The noise of one step, from its scalars; None if they do not define it."""
    values = [float(scalars.get(name, math.nan)) for name in COMPONENTS]
    return None if any(map(math.isnan, values)) else NoiseComponents(*values)


PHASES = ("first", "last")
"""Thirds of a run's measured steps."""


def last_third_size(measured: int) -> int:
    """Steps in a third of the measured ones, rounded up.

    Example:
        >>> [last_third_size(measured) for measured in (0, 1, 12, 13)]
        [0, 1, 4, 5]
    """
    return math.ceil(measured / 3)


def phase_lines(lines: Iterable[Mapping[str, Any]], phase: str = "last") -> list[Mapping[str, Any]]:
    """Scalars of the first or the last third of the steps with measured scores, rounded up.

    Example:
        >>> lines = [{"step": step, MEASURED: 1.0} for step in range(6)]
        >>> [[line["step"] for line in phase_lines(lines, phase)] for phase in ("first", "last")]
        [[0, 1], [4, 5]]
    """
    if phase not in PHASES:
        fail("noise", f"phase must be one of {', '.join(PHASES)}", repr(phase), "Check the spelling.")
    measured = [line for line in lines if MEASURED in line]
    count = last_third_size(len(measured))
    return measured[:count] if phase == "first" else measured[len(measured) - count :]


def run_noise(
    lines: Iterable[Mapping[str, Any]],
    group_size: int | None,
    *,
    failed: Iterable[int] = (),
    phase: str = "last",
    level: float = LEVEL,
) -> RunNoise:
    """Signal, noise, best group size and saving of a third of a run, from the scalars of its steps.

    Args:
        lines: One mapping per step with `step`, as in `metrics.jsonl`.
        group_size: Rollouts per prompt of steps that did not log `control/group_size` themselves; None or below 4 gives
            no numbers.
        failed: Steps whose self-check failed. If one is in this third, nothing is concluded from the others: they
            would be a selection.
        phase: The third; what a run should change next follows from the last one.
        level: Probability with which an interval holds the truth.
    """
    pooled = [{GROUP_SIZE: group_size or 0, **line} for line in phase_lines(lines, phase)]
    size = int(pooled[-1][GROUP_SIZE]) if pooled else group_size or 0
    doubtful = set(failed)
    if size < 4 or not pooled or any(int(line["step"]) in doubtful for line in pooled):
        return RunNoise(steps=0, group_size=size)
    rows = _columns(pooled, (*COMPONENTS, "gram/complete_prompts", GROUP_SIZE))
    saved = _columns(pooled, SAVING)
    steps = [int(line["step"]) for line in pooled]
    common: dict[str, Any] = {"first_step": steps[0], "last_step": steps[-1], "group_size": size}
    saving = fieller_ratio(*saved.T, level=level)
    if not len(rows):
        return RunNoise(steps=len(saved), baseline_saving=saving, **common)
    parts = [NoiseComponents(*row[:4]) for row in rows.tolist()]
    signal = rows[:, 0]
    shapes = [(one, max(1, int(row[4])), int(row[5])) for one, row in zip(parts, rows, strict=True)]
    error = np.array([batch_mse(one, prompts, rollouts) for one, prompts, rollouts in shapes])
    per_rollout = np.array([rollouts * batch_mse(one, 1, rollouts) for one, _, rollouts in shapes])
    return RunNoise(
        steps=len(rows),
        prompts=float(rows[:, 4].mean()),
        components=NoiseComponents(*rows[:, :4].mean(axis=0).tolist()),
        snr=fieller_ratio(signal, error, level=level),
        noise_scale=_inverted(signal, per_rollout, level),
        best_group_size=_group_size_estimate(rows[:, 1], rows[:, 3], level),
        baseline_saving=saving,
        **common,
    )


def _columns(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> np.ndarray:
    """`(steps, names)`: the lines that define every name."""
    rows = [[float(line.get(name, math.nan)) for name in names] for line in lines]
    kept = [row for row in rows if not any(map(math.isnan, row))]
    return np.array(kept, dtype=np.float64).reshape(-1, len(names))


def _inverted(above: np.ndarray, below: np.ndarray, level: float) -> Estimate:
    """`mean(below) / mean(above)`: `inf` where `above` is not positive. Its interval is that of the inverse ratio."""
    ratio = fieller_ratio(above, below, level=level)

    def inverse(value: float) -> float:
        return math.nan if math.isnan(value) else 1 / value if value > 0 else math.inf

    return if_enough(Estimate(inverse(ratio.value), inverse(ratio.high), inverse(ratio.low)), len(above))


def _group_size_estimate(c1: np.ndarray, c3: np.ndarray, level: float) -> Estimate:
    """`1 + sqrt(c3/c1)`, at least 2, with the interval of `c3/c1`."""
    ratio = _inverted(c1, c3, level)

    def size(value: float) -> float:
        return math.nan if math.isnan(value) else max(2.0, 1 + math.sqrt(value))

    return Estimate(size(ratio.value), size(ratio.low), size(ratio.high))
