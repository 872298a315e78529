"""95 % intervals: the percentile bootstrap from a fixed seed, t intervals, and intervals of ratios and differences.

The same values give the same interval.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np

from scoregram.exhibits import Estimate

RESAMPLES = 1000
LEVEL = 0.95
FEWEST = 5
"""Fewer observations than this give an interval that is too narrow to decide by."""
NORMAL_FROM = 4000
"""With more values than this, the mean is treated as normally distributed."""
NORMAL_QUANTILE = 1.959963984540054
"""`P(|Z| ≤ z) = 0.95`."""
MOST_PERSISTENT = 0.5
"""Largest autocorrelation that is allowed for: with more, a score that falls and levels off would count as drift."""
_DRAWS_IN_MEMORY = 2**22
GRID = 200_001


_Name = TypeVar("_Name", bound=Hashable)


def mean_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of the values that are not `nan`, with a 95 % percentile bootstrap interval over values.

    `nan` if all values are; no interval for fewer than two.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Estimate(math.nan)
    return bootstrap_estimate(len(known), lambda drawn: known[drawn].mean(axis=-1))


def mean_of_many(values: Sequence[float] | np.ndarray) -> Estimate:
    """As `mean_estimate`, but with the interval `± 1.96 s/√n` for more than 4,000 values.

    At that size it differs from the bootstrap's by less than the error of 1,000 resamples, and takes no time.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if len(known) <= NORMAL_FROM:
        return mean_estimate(known)
    mean, half = float(known.mean()), NORMAL_QUANTILE * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Estimate(mean, mean - half, mean + half)


def clustered_mean(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> Estimate:
    """Mean of the values that are not `nan`, with a 95 % percentile bootstrap interval over whole clusters.

    Use it for dependent values, such as groups of one prompt at several steps. `nan` if all values are; no interval for
    fewer than two clusters.
    """
    _, totals, counts = _cluster_totals(values, clusters)
    if not len(counts):
        return Estimate(math.nan)
    return bootstrap_estimate(len(counts), lambda drawn: totals[drawn].sum(axis=-1) / counts[drawn].sum(axis=-1))


def nested_mean(values: Sequence[float] | np.ndarray, nests: Sequence[tuple[Hashable, Hashable]]) -> Estimate:
    """Mean of the values that are not `nan`, with a 95 % percentile bootstrap interval over nested clusters.

    Use it for values of several runs: whole runs are resampled, then the clusters (prompts) inside each drawn run. The
    interval covers what differs from run to run, which resampling prompts alone leaves out. `nan` if all values are; no
    interval for fewer than two clusters.

    Args:
        values: The values.
        nests: Run, and cluster inside the run, of each value.
    """
    nested, totals, counts = _cluster_totals(values, nests)
    if not len(counts):
        return Estimate(math.nan)
    runs = [run for run, _ in nested]
    return nested_estimate(runs, lambda weights: (weights @ totals) / (weights @ counts))


def _cluster_totals(
    values: Sequence[float] | np.ndarray, clusters: Sequence[_Name]
) -> tuple[list[_Name], np.ndarray, np.ndarray]:
    """Names of the clusters with a value that is not `nan`, and the sum and the number of such values in each."""
    known = np.asarray(values, dtype=np.float64)
    names = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    owner = np.array([names[name] for name in clusters], dtype=np.int64)
    defined = ~np.isnan(known)
    totals = np.bincount(owner[defined], known[defined], minlength=len(names))
    counts = np.bincount(owner[defined], minlength=len(names))
    return [name for name, count in zip(names, counts, strict=True) if count], totals[counts > 0], counts[counts > 0]


def nested_estimate(runs: Sequence[Hashable], statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of weighted observations, with a 95 % percentile bootstrap interval over runs and their observations.

    Args:
        runs: Run of each observation.
        statistic: Maps weights of the observations `(…, count)` to one value per row. All weights 1: the estimate;
            otherwise a weight is the number of times that an observation was drawn.
    """
    value = float(statistic(np.ones(len(runs))))
    if len(runs) < 2:
        return Estimate(value)
    return _with_interval(value, statistic(nested_weights(runs)))


def nested_weights(runs: Sequence[Hashable]) -> np.ndarray:
    """`(RESAMPLES, count)`: how often each observation is drawn; runs are resampled, then observations within runs."""
    members = [np.flatnonzero([run == other for other in runs]) for run in dict.fromkeys(runs)]
    rng, weights = np.random.default_rng(0), np.zeros((RESAMPLES, len(runs)))
    for _ in members:  # as many runs are drawn as there are
        chosen = rng.integers(len(members), size=RESAMPLES)
        for place, inside in enumerate(members):
            rows = np.flatnonzero(chosen == place)
            drawn = inside[rng.integers(len(inside), size=(len(rows), len(inside)))]
            np.add.at(weights, (rows[:, None], drawn), 1)
    return weights


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Mean of `above` divided by the mean of `below`, with a 95 % percentile bootstrap interval over pairs.

    `nan` without a pair, or if the mean of `below` is not positive.
    """
    over, under = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if not len(over):
        return Estimate(math.nan)

    def ratio(drawn: np.ndarray) -> np.ndarray:
        base = under[drawn].mean(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(base > 0, over[drawn].mean(axis=-1) / base, math.nan)

    return bootstrap_estimate(len(over), ratio)


def if_enough(estimated: Estimate, count: int) -> Estimate:
    """The estimate, without its interval if `count`, the number of observations, is below `FEWEST`."""
    return estimated if count >= FEWEST else Estimate(estimated.value)


def bootstrap_estimate(count: int, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of `count` observations with its 95 % percentile bootstrap interval; no interval for fewer than two.

    Resamples in which the statistic is `nan` are left out. The ends of the interval are order statistics:
    interpolation towards an infinite value would give `nan`.

    Args:
        count: Number of observations.
        statistic: Maps indices of observations `(…, count)` to one value per row.
    """
    value = float(statistic(np.arange(count)))
    if count < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    rows = max(1, _DRAWS_IN_MEMORY // count)
    parts = [
        np.atleast_1d(statistic(rng.integers(count, size=(min(rows, RESAMPLES - start), count))))
        for start in range(0, RESAMPLES, rows)
    ]
    return _with_interval(value, np.concatenate(parts))


def _with_interval(value: float, resampled: np.ndarray) -> Estimate:
    """The value, between the quantiles of the resampled statistic that are not `nan`."""
    resampled = resampled[~np.isnan(resampled)]
    if not len(resampled):
        return Estimate(value)
    tail = (1 - LEVEL) / 2
    low = np.quantile(resampled, tail, method="lower")
    return Estimate(value, float(low), float(np.quantile(resampled, 1 - tail, method="higher")))


@cache
def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """`t` with `P(|T| ≤ t) = level` for Student's distribution.

    With `t = √n tan θ` the density is `cos^(n-1) θ`, which is integrated numerically.

    Example:
        >>> round(t_quantile(2), 2), round(t_quantile(1000), 2)
        (4.3, 1.96)
    """
    angles = np.linspace(0.0, math.pi / 2, GRID)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(float(np.interp(level, below / below[-1], angles)))


def fieller_ratio(
    above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray, *, level: float = LEVEL
) -> Estimate:
    """Mean of `above` divided by the mean of `below`, with Fieller's interval over pairs, at 95 % by default.

    The interval holds every ratio `ρ` for which the mean of `above - ρ · below` is not significantly different from 0
    by a t test. It stays right where `below` is noisy, which a percentile bootstrap and an error bar around the ratio
    do not. If `below` is not significantly positive, every ratio is possible: the ends are infinite. `nan` without a
    pair or if the mean of `below` is not positive; no interval for fewer than `FEWEST` pairs.

    Reference:
        Fieller 1954, doi:10.1111/j.2517-6161.1954.tb00159.x.

    Example:
        >>> fieller_ratio([1.0, 1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0])
        Estimate(value=0.5, low=0.5, high=0.5)
    """
    over, under = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    count = len(over)
    if not count or not under.mean() > 0:
        return Estimate(math.nan)
    value = float(over.mean() / under.mean())
    if count < FEWEST:
        return Estimate(value)
    scale = t_quantile(count - 1, level) ** 2 / count
    (over_var, shared), (_, under_var) = np.cov(over, under)
    # mean(above - ρ below)² <= t² var(above - ρ below)/n, as the quadratic a ρ² - 2 b ρ + c <= 0
    a = float(under.mean() ** 2 - scale * under_var)
    b = float(over.mean() * under.mean() - scale * shared)
    c = float(over.mean() ** 2 - scale * over_var)
    if a <= 0:
        return Estimate(value, -math.inf, math.inf)
    half = math.sqrt(max(b * b - a * c, 0.0))
    return Estimate(value, (b - half) / a, (b + half) / a)


def t_mean(values: Sequence[float] | np.ndarray, *, tests: int = 1) -> Estimate:
    """Mean of the values that are not `nan` with its t interval, `± t √(s²/n)`.

    Use it for a handful of values, such as one per seed, where a bootstrap interval is far too narrow. `nan` without a
    value; no interval for one.

    Args:
        values: The values.
        tests: Number of means that are compared with something at once. The level is `1 - 0.05/tests` (Bonferroni), so
            all of their intervals are right with a probability of 95 %.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if len(known) < 2:
        return Estimate(float(known[0]) if len(known) else math.nan)
    quantile = t_quantile(len(known) - 1, 1 - (1 - LEVEL) / tests)
    mean, half = float(known.mean()), quantile * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Estimate(mean, mean - half, mean + half)


def line_change(values: Sequence[float] | np.ndarray) -> Estimate:
    """Change along the least-squares line from the first value to the last, with its t interval.

    With slope `b` and residual variance `s²` over `n - 2` degrees of freedom it is `(n - 1)(b ± t √(s²/Σ(x - x̄)²))`.
    For a few values in order, such as six logged rewards, whose thirds are too small to compare. `nan` below three.
    """
    known = np.asarray(values, dtype=np.float64)
    if len(known) < 3:
        return Estimate(math.nan)
    x = np.arange(len(known)) - (len(known) - 1) / 2
    slope = float(x @ known / (x @ x))
    residuals = known - known.mean() - slope * x
    error = math.sqrt(float(residuals @ residuals) / (len(known) - 2) / float(x @ x))
    change, half = (len(known) - 1) * slope, (len(known) - 1) * t_quantile(len(known) - 2) * error
    return Estimate(change, change - half, change + half)


def autocorrelation(residuals: np.ndarray) -> float:
    """Correlation of neighbouring residuals of a straight line, corrected for their number, from 0 to 0.5.

    The residuals of `n` values with autocorrelation `ρ` have `ρ - (2 + 4ρ)/n` on average, since the line follows the
    values; hence `(n ρ̂ + 2) / (n - 4)`. 0 for a perfect line.
    """
    count, power = len(residuals), float(residuals @ residuals)
    found = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0
    return float(np.clip((count * found + 2) / (count - 4), 0.0, MOST_PERSISTENT)) if power > 0 else 0.0


def change_over_thirds(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of the last third minus mean of the first, with a 95 % interval that allows for values that drift.

    The error is that of noise around a straight line in which neighbours have the autocorrelation `ρ`:
    `t_{n-2} s √(2/m) √((1+ρ)/(1-ρ))` with the residual deviation `s` and thirds of `m` values. Without `ρ` a drift that
    comes and goes would look like a change. No interval below six values.
    """
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    size = math.ceil(count / 3)
    value = float(values[-size:].mean() - values[:size].mean())
    if count < 6:
        return Estimate(value)
    x = np.arange(count) - (count - 1) / 2
    residuals = values - values.mean() - float(x @ values / (x @ x)) * x
    rho = autocorrelation(residuals)
    error = math.sqrt(float(residuals @ residuals) / (count - 2) * 2 / size * (1 + rho) / (1 - rho))
    half = t_quantile(count - 2) * error
    return Estimate(value, value - half, value + half)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """`one − other` of two independent estimates, with an interval from theirs (the method MOVER).

    `low = d − √((one − one.low)² + (other.high − other)²)`, and `high` likewise. For intervals of the form `± z σ` this
    is `± z √(σ₁² + σ₂²)`. No interval unless both have one; `nan` unless both values are finite.

    Reference:
        Zou & Donner 2008, doi:10.1002/sim.3095.
    """
    if not (math.isfinite(one.value) and math.isfinite(other.value)):
        return Estimate(math.nan)
    gap = one.value - other.value
    if any(math.isnan(end) for each in (one, other) for end in (each.low, each.high)):
        return Estimate(gap)
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(gap, gap - below, gap + above)


def binomial_tail(least: int, count: int, chance: float) -> float:
    """Probability of `least` or more successes in `count` draws.

    Example:
        >>> binomial_tail(2, 2, 0.5), binomial_tail(0, 5, 0.1)
        (0.25, 1.0)
    """
    terms = (
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(k + 1)
            - math.lgamma(count - k + 1)
            + k * math.log(chance)
            + (count - k) * math.log1p(-chance)
        )
        for k in range(least, count + 1)
    )
    return 1.0 if least <= 0 or chance >= 1 else math.fsum(terms)
