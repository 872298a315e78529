"""Intervals over seeds and problems: Student's, by simulation, and at the ends of what a quantity can be."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from scoregram.bootstrap import t_mean, t_quantile
from scoregram.compare.intervals import bounded_interval, mean_over_problems, ratio_over_seeds, verdict
from scoregram.compare.results import MEAN_RETURN, SHARE_ENDS, MethodResult
from scoregram.exhibits import Estimate
from tests.compare_cases import run_of


@pytest.mark.parametrize("degrees", [1, 2, 3, 9, 200])
def test_the_quantile_is_that_of_student(degrees):
    assert t_quantile(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=1e-6)


def test_the_interval_of_a_mean_over_seeds_is_students():
    values = [0.5, 0.7, 0.9]
    half = student.ppf(0.975, 2) * 0.2 / math.sqrt(3)
    found = t_mean([*values, math.nan])
    assert (found.value, found.low, found.high) == pytest.approx((0.7, 0.7 - half, 0.7 + half), rel=1e-6)
    assert math.isnan(t_mean([0.5]).low) and math.isnan(t_mean([]).value)


def test_a_ratio_of_sums():
    assert ratio_over_seeds([1.0, 2.0], [2.0, 4.0]) == Estimate(0.5, 0.5, 0.5)
    assert math.isnan(ratio_over_seeds([1.0], [0.0]).value)


@pytest.mark.parametrize("of_seed", [0.0, 0.5, 2.0])
def test_the_interval_over_seeds_and_problems_covers(of_seed):
    """Seed and problem effects of known size, three seeds: the true mean is inside at least 93 of 100 times."""
    rng, inside, trials = np.random.default_rng(1), 0, 1000
    for _ in range(trials):
        values = of_seed * rng.normal(size=(3, 1)) + rng.normal(size=(1, 50)) + rng.normal(size=(3, 50))
        found = mean_over_problems(values)
        inside += found.low <= 0 <= found.high
    assert inside / trials >= 0.93  # three standard errors below 0.95 would be 0.93


def test_an_interval_ends_where_the_quantity_does():
    """Three runs that differ much: whole t intervals hold negative rollouts and minutes, and 124 points of accuracy."""
    sizes, shares = (10.0, 10.0, 900.0), (0.1, 0.1, 0.9)
    logged = [
        {"rollouts": size, "time/step": 60 * size, "credit/filler_share": share}
        for size, share in zip(sizes, shares, strict=True)
    ]
    runs = [run_of(seed, [0] * 4, [0.0, 1.0], **line) for seed, line in enumerate(logged)]
    method, whole = MethodResult("one", runs), t_mean(sizes)
    assert whole.low < 0
    for found in (method.rollouts_to(1.0), method.minutes()):
        assert found == Estimate(whole.value, 0.0, whole.high)
    share = t_mean(shares)
    assert share.low < 0 and share.high > 1
    assert method.mean("credit/filler_share", SHARE_ENDS) == Estimate(share.value, 0.0, 1.0)
    seeds = ([1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1])
    right = MethodResult("right", [run_of(seed, row, [0.0, 0.5]) for seed, row in enumerate(seeds)])
    points = mean_over_problems(np.array(seeds))
    assert points.high > 1.2
    assert right.gain_over(method) == Estimate(points.value, points.low, 1.0)
    assert right.gain_over(method, MEAN_RETURN) == points  # a return has no ends


def test_a_cut_interval_covers_as_often_as_the_whole_one():
    """Times of three seeds: nothing that is cut off can be the mean."""
    rng = np.random.default_rng(2)
    found = [t_mean(list(rng.exponential(size=3))) for _ in range(1000)]
    cut = [bounded_interval(one, 0.0, math.inf) for one in found]
    assert sum(one.low < 0 for one in found) > 300 and all(one.low >= 0 for one in cut)
    assert [one.low <= 1 <= one.high for one in found] == [one.low <= 1 <= one.high for one in cut]
    beyond = bounded_interval(Estimate(1.1, 0.8, 1.4), -1.0, 1.0)  # a correlation that is corrected for noise
    assert beyond == Estimate(1.1, 0.8, 1.1)
    assert math.isnan(bounded_interval(Estimate(0.5), 0.0, 1.0).low)


def test_one_seed_tells_nothing():
    assert verdict(mean_over_problems(np.ones((1, 50)))) == "cannot tell"
