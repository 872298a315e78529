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


MOST_PERSISTENT = 0.5
"""Largest autocorrelation that is allowed for: with more, a score that falls and levels off would count as drift."""


def autocorrelation(residuals: np.ndarray) -> float:
    """Correlation of neighbouring residuals of a straight line, corrected for their number, from 0 to 0.5.

    The residuals of `n` values with autocorrelation `ρ` have `ρ - (2 + 4ρ)/n` on average, since the line follows the
    values; hence `(n ρ̂ + 2) / (n - 4)`. 0 for a perfect line.
    """
    count, power = len(residuals), float(residuals @ residuals)
    found = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0
    return float(np.clip((count * found + 2) / (count - 4), 0.0, MOST_PERSISTENT)) if power > 0 else 0.0


def change_over_thirds(values: np.ndarray) -> Estimate:
    """Mean of the last third minus mean of the first, with a 95 % interval that allows for values that drift.

    The error is that of noise around a straight line in which neighbours have the autocorrelation `ρ`:
    `t_{n-2} s √(2/m) √((1+ρ)/(1-ρ))` with the residual deviation `s` and thirds of `m` values. Without `ρ` a drift that
    comes and goes would look like a change. No interval below six values.
    """
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
