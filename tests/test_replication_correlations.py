"""Correlations and intervals of the exhibits against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scoregram.studies.grpo_rank.cause_exhibits import share_explained, spearman
from scoregram.studies.grpo_rank.learning_exhibits import over_seeds


def test_a_share_is_one_for_an_exact_prediction_up_to_a_factor():
    measured = np.log([1.5, 2.0, 3.0])
    assert share_explained(measured, measured + math.log(2)) == pytest.approx(1)
    assert share_explained(measured, np.zeros(3)) == pytest.approx(0)
    assert share_explained(measured, -measured) == pytest.approx(-3)
    assert math.isnan(share_explained(np.ones(3), measured))


@given(
    pairs=st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30),
    gap=st.booleans(),
)
def test_spearman_is_that_of_scipy_over_defined_pairs(pairs, gap):
    x, y = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = spearman([*x, math.nan, 1.0] if gap else x, [*y, 1.0, math.nan] if gap else y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found.value)
        return
    assert found.value == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)
    if len(pairs) >= 5:
        assert -1 - 1e-12 <= found.low <= found.high <= 1 + 1e-12
    else:
        assert math.isnan(found.low)


def test_spearman_of_too_little_is_undefined():
    for x, y in (([], []), ([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0, math.nan], [1.0, 2.0, 3.0])):
        assert math.isnan(spearman(x, y).value)


def test_a_difference_between_strata_is_no_correlation():
    x, y = [1.0, 2.0, 3.0, 11.0, 12.0, 13.0], [3.0, 2.0, 1.0, 13.0, 12.0, 11.0]
    assert spearman(x, y).value > 0
    assert spearman(x, y, strata=[0, 0, 0, 1, 1, 1]).value == pytest.approx(-1)


def test_clusters_are_resampled_whole():
    rng = np.random.default_rng(0)
    x = rng.normal(size=12)
    y = x + rng.normal(size=12)
    names = [place for place in range(12) for _ in range(20)]
    copied = spearman(np.repeat(x, 20).tolist(), np.repeat(y, 20).tolist(), clusters=names)
    alone, naive = spearman(x.tolist(), y.tolist()), spearman(np.repeat(x, 20).tolist(), np.repeat(y, 20).tolist())
    assert copied.value == pytest.approx(alone.value)
    assert copied.high - copied.low == pytest.approx(alone.high - alone.low, rel=0.02)
    assert naive.high - naive.low < (alone.high - alone.low) / 2
    few = spearman(x.tolist(), y.tolist(), clusters=[place % 4 for place in range(12)])
    assert few.value == pytest.approx(alone.value) and math.isnan(few.low)


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda v: np.ptp(v) > 1e-6))
def test_over_seeds_is_students_interval(values):
    found = over_seeds(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_seeds_that_agree_to_the_last_problem_say_nothing_of_their_spread():
    for values in ([0.985, 0.985], [0.3, 0.1 + 0.2]):
        found = over_seeds(values)
        assert found.value == pytest.approx(values[0]) and math.isnan(found.low) and math.isnan(found.high)


def test_an_interval_ends_where_values_do():
    found = over_seeds([0.98, 0.99], least=0.0, most=1.0)
    assert found.low == pytest.approx(0.985 - 12.706 * 0.005, abs=1e-4) and found.high == 1
    assert over_seeds([0.01, 0.02], least=0.0, most=1.0).low == 0


def test_over_seeds_without_seeds():
    (one, low, high) = vars(over_seeds([0.5])).values()
    assert one == 0.5 and math.isnan(low) and math.isnan(high)
    assert math.isnan(over_seeds([]).value)
