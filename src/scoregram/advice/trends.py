"""Differences, slopes and correlations over the steps of a log, with intervals that allow for dependent steps."""

import math

import numpy as np

from scoregram.advice.logs import ScalarSeries
from scoregram.bootstrap import mean_estimate, t_quantile
from scoregram.exhibits import Estimate

LEAST_STEPS = 10
"""Logged values below which a rule about a level or a trend does not decide."""


SLOPE_BLOCKS = 8
"""Blocks of steps whose means a slope goes through."""


def slope_estimate(steps: np.ndarray, values: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Slope of a line through the means of `SLOPE_BLOCKS` blocks of steps, and its 95 % t interval.

    Neighbouring steps depend on each other; means of blocks much less, so the interval is not far too narrow.
    """
    blocks = min(SLOPE_BLOCKS, len(values))
    x = np.array([part.mean() for part in np.array_split(steps, blocks)])
    y = np.array([part.mean() for part in np.array_split(values, blocks)])
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - slope * (x - x.mean())
    half = t_quantile(blocks - 2) * math.sqrt(float(rest @ rest) / (blocks - 2) / spread)
    return slope, (slope - half, slope + half)


def mean_ends(values: np.ndarray) -> np.ndarray:
    """Both ends of the interval of a mean over steps."""
    found = mean_estimate(values)
    return np.array([found.low, found.high])


def step_correlation(one: ScalarSeries, other: ScalarSeries) -> Estimate:
    """Correlation of the changes from step to step of two scalars, with Fisher's 95 % interval.

    Changes, not levels: two scalars that both rise are always correlated.
    """
    both = sorted(set(one.steps.tolist()) & set(other.steps.tolist()))
    left, right = (np.diff(series.values[np.isin(series.steps, both)]) for series in (one, other))
    if len(left) < LEAST_STEPS or not (left.std() > 0 and right.std() > 0):
        return Estimate(math.nan)
    r = float(np.clip(np.corrcoef(left, right)[0, 1], -0.999999, 0.999999))
    half = 1.96 / math.sqrt(max(len(left) / 2 - 3, 1))  # neighbouring differences share a step: half the count
    return Estimate(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
