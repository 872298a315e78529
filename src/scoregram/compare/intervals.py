"""95 % intervals over seeds, and over seeds and problems, for as few as two seeds.

The percentile bootstrap of three seeds is far too narrow. These are t intervals with one degree of freedom less than
there are seeds; `bootstrap.t_mean` is the mean of one value per seed. Over seeds and problems, the variance is
clustered by both. A t interval knows no bounds, so `bounded_interval` cuts it off at values that the quantity cannot
exceed. `method_noise` says how far one of many methods must be from the first.

Reference:
    Cameron, Gelbach & Miller 2011, doi:10.1198/jbes.2010.07136: `V = V_seeds + V_problems − V_cells`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scoregram.bootstrap import LEVEL, t_quantile
from scoregram.exhibits import Estimate

BETTER, WORSE, UNRESOLVED = "better", "worse", "cannot tell"
"""The verdicts on a difference."""


def ratio_over_seeds(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """`Σ above / Σ below` over seeds, with a t interval from the seeds' residuals `above − ratio · below`.

    `nan` without a seed, or if `Σ below` is not positive; no interval for one seed.
    """
    over, under = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    count = len(over)
    if not count or not under.sum() > 0:
        return Estimate(math.nan)
    ratio = float(over.sum() / under.sum())
    if count < 2:
        return Estimate(ratio)
    residuals = (over - ratio * under) / under.mean()
    half = t_quantile(count - 1) * math.sqrt(float(residuals @ residuals) / (count * (count - 1)))
    return Estimate(ratio, ratio - half, ratio + half)


def mean_over_problems(values: np.ndarray) -> Estimate:
    """Mean of `(seeds, problems)` values; its interval accounts for the choice of seeds and of problems.

    The problems are the same for every seed. The variance is `V_seeds + V_problems − V_cells`, at least the larger of
    the first two. No interval for one seed or one problem.
    """
    seeds, problems = values.shape
    mean = float(values.mean()) if values.size else math.nan
    if seeds < 2 or problems < 2:
        return Estimate(mean)
    rest = values - mean
    by_seed, by_problem = rest.mean(axis=1), rest.mean(axis=0)
    of_seeds = float(by_seed @ by_seed) / (seeds * (seeds - 1))
    of_problems = float(by_problem @ by_problem) / (problems * (problems - 1))
    of_cells = float((rest * rest).sum()) / (values.size * (values.size - 1))
    variance = max(of_seeds + of_problems - of_cells, of_seeds, of_problems)
    half = t_quantile(seeds - 1) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True)
class MethodNoise:
    """How much runs of one method differ, from the runs of all methods."""

    deviation: float
    """Standard deviation of one run, once the means of its method and of its seed are subtracted."""
    needed_gain: float
    """Least difference to the first method that survives a correction for the number of methods."""


def method_noise(values: np.ndarray) -> MethodNoise:
    """The noise of one run, pooled over `(methods, seeds)` values, and the gain that it makes necessary.

    Methods and seeds add, the rest is noise: `s² = Σ (y_ms − ȳ_m − ȳ_s + ȳ)² / ((M−1)(S−1))`. The difference of two
    methods has the variance `2 s²/S`, and `needed gain = t √(2 s²/S)` with `(M−1)(S−1)` degrees of freedom, at a level
    of `1 − 0.05/(M−1)` (Bonferroni): if all methods are equal, one of them is farther from the first with a
    probability of at most 5 %. All methods lend their seeds to one estimate, which takes the noise as equal for each.
    With two methods it is the half width of the paired t interval. `nan` for fewer than two methods or seeds.
    """
    methods, seeds = values.shape
    degrees = (methods - 1) * (seeds - 1)
    if degrees < 1:
        return MethodNoise(math.nan, math.nan)
    rest = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0, keepdims=True) + values.mean()
    noise = float((rest * rest).sum()) / degrees
    quantile = t_quantile(degrees, 1 - (1 - LEVEL) / (methods - 1))
    return MethodNoise(math.sqrt(noise), quantile * math.sqrt(2 * noise / seeds))


def bounded_interval(estimate: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its interval cut off at `least` and `most`, the ends of what the quantity can be.

    The quantity itself is never beyond an end, so the cut interval covers it exactly as often as the whole one. The
    estimate does not change; where noise carries it beyond an end, the interval reaches to it.

    Example:
        >>> bounded_interval(Estimate(3.0, -2.0, 8.0), 0.0, math.inf)  # minutes
        Estimate(value=3.0, low=0.0, high=8.0)
    """
    if math.isnan(estimate.low) or math.isnan(estimate.high):  # one seed: there is no interval
        return estimate
    low = min(max(estimate.low, least), most, estimate.value)
    high = max(min(estimate.high, most), least, estimate.value)
    return Estimate(estimate.value, low, high)


def verdict(difference: Estimate) -> str:
    """`better` or `worse` if the interval excludes 0; otherwise, and without an interval, `cannot tell`.

    Example:
        >>> verdict(Estimate(0.1, 0.02, 0.18)), verdict(Estimate(0.1, -0.1, 0.3)), verdict(Estimate(0.1))
        ('better', 'cannot tell', 'cannot tell')
    """
    if difference.low > 0:
        return BETTER
    return WORSE if difference.high < 0 else UNRESOLVED
