"""From the numbers of single groups to those of an estimator, each with a 95 % interval.

`what_if` has one value per group for each product of updates and each metric of a spectrum. A number of the run is a
function of their means, mostly a ratio. Its interval comes from the jackknife: one unit is left out at a time, which
turns a smooth function of means into one value per unit, and those are treated as independent. Ratios get Fieller's
interval of these values, as `noise()` has it; the variance gets a t interval of its logarithm, and the cosine with the
update that was taken one of its Fisher transform. Both are skewed otherwise.

The units are steps, as in `noise()`: groups of one step share its policy, and some estimators couple them. With fewer
than `FEWEST` steps the units are groups, and the interval is about the policies of these steps.
`results/false-findings` has the simulated coverage.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scoregram.bootstrap import FEWEST, fieller_ratio, t_quantile
from scoregram.exhibits import Estimate

FEW_GROUPS = 20
"""With fewer groups than this no interval is given: they are too few to know how much groups differ."""
FEW_ALONE = 40
"""The same where groups are the units, because there are fewer than `FEWEST` steps."""
NEARLY_ONE = 1 - 1e-12
"""Cosines above this are 1: their Fisher transform is infinite there, and rounding hides the difference."""
UNKNOWN = Estimate(math.nan)

Means = Mapping[str, np.ndarray]
"""Column of `GroupNumbers` → its mean; `groups` → 1, since the mean is over units that may differ in size."""
OfMeans = Callable[[Means], np.ndarray]


@dataclass(frozen=True, eq=False)
class GroupNumbers:
    """What the numbers of one estimator are pooled from: one value per group."""

    steps: np.ndarray
    signal: np.ndarray
    noise: np.ndarray
    across: np.ndarray
    """Product of its update and that of the reference, from disjoint parts."""
    reference_signal: np.ndarray
    reference_noise: np.ndarray
    with_taken: np.ndarray
    """Product of the update of the whole group and the one that the run took."""
    squared: np.ndarray
    taken_squared: np.ndarray
    spectrum: Mapping[str, np.ndarray]
    """Metrics of live groups and their nulls; `nan` for the others."""
    is_blind: bool = False
    """Whether in parts, but not in whole groups, the estimator is a multiple of the reference: parts of two rollouts
    cannot tell them apart, so they say nothing about its efficiency."""

    def columns(self) -> dict[str, np.ndarray]:
        """The products by name."""
        return {name: value for name, value in vars(self).items() if name not in ("steps", "spectrum", "is_blind")}

    def part(self, groups: slice) -> "GroupNumbers":
        """Those of some groups."""
        own = {name: value[groups] for name, value in self.columns().items()}
        spectrum = {name: value[groups] for name, value in self.spectrum.items()}
        return GroupNumbers(self.steps[groups], **own, spectrum=spectrum, is_blind=self.is_blind)


@dataclass(frozen=True, kw_only=True)
class PooledNumbers:
    """The numbers of one estimator; those that compare it with the reference are not yet withheld."""

    variance: Estimate
    bias: Estimate
    snr: Estimate
    reference_snr: Estimate
    efficiency: Estimate
    direction: Estimate
    taken: Estimate
    spectrum: Mapping[str, Estimate]

    @property
    def is_resolved(self) -> bool:
        """Whether the intervals of the signal to noise of both exclude 0, so that they can be compared."""
        return self.snr.low > 0 and self.reference_snr.low > 0


def unit_of(steps: Sequence[int] | np.ndarray) -> str:
    """What the intervals are over: `steps`, `groups`, or empty if there are too few of both for an interval.

    Args:
        steps: Of every group.

    Example:
        >>> unit_of([1, 2, 3, 4, 5] * 4), unit_of([1] * 40), unit_of([1] * 20)
        ('steps', 'groups', '')
    """
    if len(set(np.asarray(steps).tolist())) >= FEWEST:
        return "steps" if len(steps) >= FEW_GROUPS else ""
    return "groups" if len(steps) >= FEW_ALONE else ""


def pooled_numbers(numbers: GroupNumbers) -> PooledNumbers:
    """Every number of an estimator, with its interval."""
    units = Units(numbers.steps, numbers.columns())
    return PooledNumbers(
        variance=units.positive(lambda of: of["noise"], lambda of: of["groups"]),
        bias=units.ratio(
            lambda of: of["signal"] - 2 * of["across"] + of["reference_signal"], lambda of: of["reference_signal"]
        ),
        snr=units.ratio(lambda of: of["signal"], lambda of: of["noise"]),
        reference_snr=units.ratio(lambda of: of["reference_signal"], lambda of: of["reference_noise"]),
        efficiency=units.ratio(
            lambda of: of["signal"] * of["reference_noise"], lambda of: of["reference_signal"] * of["noise"]
        ),
        direction=units.ratio(
            lambda of: of["across"],
            lambda of: np.sqrt(np.maximum(of["signal"], 0) * np.maximum(of["reference_signal"], 0)),
        ),
        taken=units.cosine("with_taken", "squared", "taken_squared"),
        spectrum={name: mean_of_live(numbers.steps, values) for name, values in numbers.spectrum.items()},
    )


def mean_of_live(steps: np.ndarray, values: np.ndarray) -> Estimate:
    """Mean of the values that are not `nan`; its interval includes that the number of these is random."""
    live = ~np.isnan(values)
    units = Units(steps, {"value": np.where(live, values, 0.0), "live": live.astype(float)})
    return units.ratio(lambda of: of["value"], lambda of: of["live"])


class Units:
    """Sums of columns over the units of intervals, and functions of their means."""

    def __init__(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        unit = unit_of(steps)
        own = np.unique(steps, return_inverse=True)[1] if unit == "steps" else np.arange(len(steps))
        self.has_interval = bool(unit)
        given = {**columns, "groups": np.ones(len(steps))}
        self.sums = {name: np.bincount(own, values) for name, values in given.items()}
        self.count = len(self.sums["groups"])

    def _jackknifed(self, statistic: OfMeans) -> tuple[float, np.ndarray]:
        """A function of means, and its pseudo-value for every unit: `n f - (n - 1) f(without the unit)`."""
        n = self.count
        total = {name: sums.sum(keepdims=True) for name, sums in self.sums.items()}
        value = statistic({name: sums / n for name, sums in total.items()})  # (1,)
        if n < 2:
            return float(value[0]), value
        without = statistic({name: (total[name] - sums) / (n - 1) for name, sums in self.sums.items()})  # (n,)
        return float(value[0]), n * value - (n - 1) * without

    def ratio(self, above: OfMeans, below: OfMeans) -> Estimate:
        """`above / below` of the means, with Fieller's interval of the pseudo-values; `nan` unless `below > 0`."""
        (top, tops), (bottom, bottoms) = self._jackknifed(above), self._jackknifed(below)
        if not bottom > 0:
            return UNKNOWN
        found = fieller_ratio(tops, bottoms) if self.has_interval else UNKNOWN
        return Estimate(top / bottom, found.low, found.high)

    def positive(self, above: OfMeans, below: OfMeans) -> Estimate:
        """`above / below`, with a t interval of its logarithm; else as `ratio` has it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            log, logs = self._jackknifed(lambda of: np.log(above(of) / below(of)))
        if not np.isfinite(logs).all():
            return self.ratio(above, below)
        half = self._half(logs)
        return Estimate(math.exp(log), math.exp(log - half), math.exp(log + half))

    def cosine(self, product: str, first: str, second: str) -> Estimate:
        """`product / √(first · second)`, at most 1, with a t interval of its Fisher transform `artanh`."""

        def transformed(of: Means) -> np.ndarray:
            cosine = of[product] / np.sqrt(of[first] * of[second])
            return np.arctanh(np.clip(cosine, -NEARLY_ONE, NEARLY_ONE))

        with np.errstate(divide="ignore", invalid="ignore"):
            angle, angles = self._jackknifed(transformed)
        half, value = self._half(angles), math.tanh(angle)
        if value >= math.tanh(math.atanh(NEARLY_ONE)):
            return Estimate(1.0, 1.0, 1.0) if self.has_interval else Estimate(1.0)
        return Estimate(value, math.tanh(angle - half), math.tanh(angle + half))

    def _half(self, values: np.ndarray) -> float:
        """Half the width of the t interval of a mean; `nan` without an interval."""
        if not self.has_interval:
            return math.nan
        return t_quantile(self.count - 1) * float(values.std(ddof=1)) / math.sqrt(self.count)
