import math

import numpy as np
import pytest

from scoregram.bootstrap import clustered_mean, mean_estimate


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
