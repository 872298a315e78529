"""95 % intervals over seeds, and over seeds and problems, for as few as two seeds.

The percentile bootstrap of three seeds is far too narrow. These are t intervals with one degree of freedom less than
there are seeds; `bootstrap.t_mean` is the mean of one value per seed. Over seeds and problems, the variance is
clustered by both. A t interval knows no bounds, so `bounded_interval` cuts it off at values that the quantity cannot
exceed.

Reference:
    Cameron, Gelbach & Miller 2011, doi:10.1198/jbes.2010.07136: `V = V_seeds + V_problems − V_cells`.
"""

import math
from collections.abc import Sequence

import numpy as np

from scoregram.bootstrap import t_quantile
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
