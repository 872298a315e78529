"""Changes over a series whose neighbours depend on each other."""

import math

import numpy as np
import pytest

from scoregram.bootstrap import MOST_PERSISTENT, autocorrelation, change_over_thirds


def test_the_change_of_a_line_is_exact():
    found = change_over_thirds(np.arange(9.0) * 2)  # means of 14 and 2
    assert (found.value, found.low, found.high) == pytest.approx((12, 12, 12))
    assert math.isnan(change_over_thirds(np.arange(5.0)).low)


def test_the_autocorrelation_is_that_of_neighbours():
    """By hand: neighbours of opposite signs; a square wave, of whose 19 products 11 are +1 and 8 are -1."""
    assert autocorrelation(np.array([1.0, -1.0] * 10)) == 0
    wave = np.array([1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, 1, 1.0])
    assert autocorrelation(wave) == pytest.approx((20 * 3 / 20 + 2) / 16)
    assert autocorrelation(np.repeat([1.0, -1.0, 1.0], 20)) == MOST_PERSISTENT
    assert autocorrelation(np.zeros(9)) == 0


@pytest.mark.parametrize(("memory", "least"), [(0.0, 0.95), (0.3, 0.95), (0.5, 0.93)])
def test_a_change_covers_also_where_values_drift(memory, least):
    """Noise around a line of slope 1/40 per value: thirds of 20 differ by 1. The allowance ends at 0.5."""
    rng, held, runs = np.random.default_rng(2), 0, 600
    for _ in range(runs):
        noise = rng.normal(0, 1, 60)
        for place in range(1, 60):
            noise[place] = memory * noise[place - 1] + math.sqrt(1 - memory**2) * noise[place]
        found = change_over_thirds(np.arange(60) / 40 + noise)
        held += found.low <= 1 <= found.high
    assert held / runs > least - 3 * math.sqrt(0.95 * 0.05 / runs), held / runs
