"""Percentile bootstrap intervals, the same on every call."""

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from scoregram.exhibits import Estimate

RESAMPLES = 1000
LEVEL = 0.95
FEWEST = 5
"""Observations below which resampling would make an interval too narrow to decide by."""
BLOCK = 2**22
"""Draws held in memory at a time."""


def mean_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of the defined values with a 95 % percentile bootstrap interval, the values being resampled.

    `nan` without a defined value; no interval for fewer than two.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Estimate(math.nan)
    return estimate(len(known), lambda drawn: known[drawn].mean(axis=-1))


def clustered_mean(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> Estimate:
    """Mean of the defined values with a 95 % percentile bootstrap interval, whole clusters being resampled.

    For values that belong together, such as groups of one prompt at several steps. `nan` without a defined value; no
    interval for fewer than two clusters.
    """
    known = np.asarray(values, dtype=np.float64)
    names = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    owner = np.array([names[name] for name in clusters], dtype=np.int64)
    defined = ~np.isnan(known)
    totals = np.bincount(owner[defined], known[defined], minlength=len(names))
    counts = np.bincount(owner[defined], minlength=len(names))
    totals, counts = totals[counts > 0], counts[counts > 0]
    if not len(counts):
        return Estimate(math.nan)
    return estimate(len(counts), lambda drawn: totals[drawn].sum(axis=-1) / counts[drawn].sum(axis=-1))


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Mean of one quantity relative to that of another, with a 95 % interval, pairs being resampled.

    `nan` where there is no pair, or where the mean below is not positive.
    """
    over, under = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if not len(over):
        return Estimate(math.nan)

    def ratio(drawn: np.ndarray) -> np.ndarray:
        base = under[drawn].mean(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(base > 0, over[drawn].mean(axis=-1) / base, math.nan)

    return estimate(len(over), ratio)


def if_enough(found: Estimate, count: int) -> Estimate:
    """An estimate as it is, or without its interval if that was resampled from fewer than `FEWEST` observations."""
    return found if count >= FEWEST else Estimate(found.value)


def estimate(count: int, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of `count` observations, with its interval.

    The ends are order statistics, since half-way to an infinite value is no number; resamples in which the statistic
    is undefined are left out.

    Args:
        count: Observations.
        statistic: Takes indices of observations `(…, count)` and gives one value for each row of them.
    """
    value = float(statistic(np.arange(count)))
    if count < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    rows = max(1, BLOCK // count)
    parts = [
        np.atleast_1d(statistic(rng.integers(count, size=(min(rows, RESAMPLES - start), count))))
        for start in range(0, RESAMPLES, rows)
    ]
    found = np.concatenate(parts)
    found = found[~np.isnan(found)]
    if not len(found):
        return Estimate(value)
    tail = (1 - LEVEL) / 2
    low = np.quantile(found, tail, method="lower")
    return Estimate(value, float(low), float(np.quantile(found, 1 - tail, method="higher")))
