import math

import numpy as np
import pytest

from scoregram.bootstrap import RESAMPLES, clustered_mean, mean_estimate, nested_mean, nested_weights


def test_clusters_of_one_are_plain_values():
    values = np.random.default_rng(0).normal(size=40)
    assert clustered_mean(values, list(range(40))) == mean_estimate(values)


def test_values_that_repeat_one_cluster_tell_nothing_new():
    values = np.random.default_rng(1).normal(size=30)
    once = mean_estimate(values)
    repeated = clustered_mean(np.repeat(values, 5), [place // 5 for place in range(150)])
    assert repeated.value == pytest.approx(once.value)
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))


def test_undefined_values_are_left_out():
    found = clustered_mean([1.0, math.nan, 3.0], ["a", "a", "b"])
    assert found.value == 2.0 and (found.low, found.high) == (1.0, 3.0)
    assert math.isnan(clustered_mean([math.nan], ["a"]).value)
    assert math.isnan(clustered_mean([1.0, 2.0], ["a", "a"]).low)


def test_whole_runs_are_drawn_and_then_clusters_inside_them():
    weights = nested_weights(["a", "a", "b", "b", "b"])
    assert weights.shape == (RESAMPLES, 5)
    runs = np.stack([weights[:, :2].sum(1) / 2, weights[:, 2:].sum(1) / 3], axis=1)
    assert (runs == runs.round()).all() and (runs.sum(1) == 2).all()  # each run a whole number of times, two in all
    assert set(runs[:, 0]) == {0, 1, 2} and len({tuple(row) for row in weights}) > 20


def test_an_interval_covers_what_differs_from_run_to_run():
    """Runs at 0, 1 and 2 with next to no spread inside: the standard error is that of three runs, not of 300 values."""
    noise = np.random.default_rng(0).normal(scale=1e-3, size=300)
    values, runs = np.repeat([0.0, 1.0, 2.0], 100) + noise, np.repeat([0, 1, 2], 100).tolist()
    found = nested_mean(values, [(run, place) for place, run in enumerate(runs)])
    assert found.value == pytest.approx(values.mean(), rel=1e-14)  # sums differ in their last bit between processors
    assert found.low < 0.1 and found.high > 1.9
    alone = clustered_mean(values, list(range(300)))
    assert alone.high - alone.low < 0.3
    one = nested_mean(values[:100], [(0, place) for place in range(100)])  # a single run: the spread inside it
    assert 0 < one.high - one.low < 1e-3
    assert math.isnan(nested_mean([math.nan], [(0, 0)]).value) and math.isnan(nested_mean([1.0], [(0, 0)]).low)
