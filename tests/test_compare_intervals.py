"""Intervals over seeds and problems: Student's, by simulation, and at the ends of what a quantity can be."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_rel

from scoregram.bootstrap import t_mean, t_quantile
from scoregram.compare.intervals import (
    bounded_interval,
    mean_over_problems,
    method_noise,
    ratio_over_seeds,
    verdict,
)
from scoregram.compare.results import MEAN_RETURN, SHARE_ENDS, MethodComparison, MethodResult
from scoregram.compare.table import accuracy_table, verdict_sentence
from scoregram.exhibits import Cell, Estimate
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


def test_the_noise_of_two_methods_is_that_of_the_paired_t_test():
    values = np.random.default_rng(0).normal(size=(2, 7)) + np.array([[0.0], [1.0]])
    low, high = ttest_rel(values[1], values[0]).confidence_interval(0.95)
    assert method_noise(values).needed_gain == pytest.approx((high - low) / 2, rel=1e-6)


def test_method_noise_by_loops():
    values = np.random.default_rng(3).normal(size=(5, 4)) + 10 * np.random.default_rng(4).normal(size=(5, 1))
    total = values.mean()
    squares = [
        (values[m, s] - np.mean(values[m]) - np.mean(values[:, s]) + total) ** 2 for m in range(5) for s in range(4)
    ]
    noise = sum(squares) / (4 * 3)
    found = method_noise(values)
    assert found.deviation == pytest.approx(math.sqrt(noise))
    assert found.needed_gain == pytest.approx(student.ppf(1 - 0.05 / 2 / 4, 12) * math.sqrt(2 * noise / 4), rel=1e-6)
    moved = method_noise(values + np.array([[5.0, -3.0, 0.0, 1.0]]))  # seeds that are harder for all methods
    assert moved.needed_gain == pytest.approx(found.needed_gain)
    for too_few in (values[:1], values[:, :1]):
        assert math.isnan(method_noise(too_few).needed_gain) and math.isnan(method_noise(too_few).deviation)


def test_some_of_many_equal_methods_survives_in_at_most_one_comparison_of_twenty():
    rng, survived, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        values = 3 * rng.normal(size=(1, 3)) + rng.normal(size=(20, 3))
        survived += bool((np.abs(values.mean(1) - values.mean(1)[0]) > method_noise(values).needed_gain).any())
    assert survived / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_one_seed_tells_nothing():
    assert verdict(mean_over_problems(np.ones((1, 50)))) == "cannot tell"


# Many methods


LEVELS = {
    "grpo": [0.80, 0.84, 0.76, 0.80],
    "far": [0.20, 0.28, 0.24, 0.16],
    "a": [0.88, 0.76, 0.84, 0.80],
    "near": [0.70, 0.74, 0.66, 0.70],  # always a tenth behind, which is less than the noise of the others
    "b": [0.72, 0.92, 0.80, 0.68],
}
"""Method → its accuracy with four seeds."""


def many_methods(levels: dict[str, list[float]]) -> MethodComparison:
    methods = [
        MethodResult(
            label,
            [
                run_of(seed, [int(place < round(200 * level)) for place in range(200)], [0.0, 0.5])
                for seed, level in enumerate(own)
            ],
        )
        for label, own in levels.items()
    ]
    setting = {"task": "toy", "rollouts": 160, "every_rollouts": 80, "batch_size": 64, "seeds": 4, "target": 0.5}
    return MethodComparison(setting, methods)


def verdicts(comparison: MethodComparison) -> list[Cell]:
    table = accuracy_table(comparison)
    return [row[table.columns.index("verdict")] for row in table.rows]


def test_a_star_marks_what_survives_the_number_of_methods():
    whole = many_methods(LEVELS)
    assert whole.needed_gain == pytest.approx(method_noise(np.array([*LEVELS.values()])).needed_gain)
    assert 0.1 < whole.needed_gain < 0.2
    assert verdicts(whole) == [None, "worse *", "cannot tell", "worse", "cannot tell"]
    needed = f"{100 * whole.needed_gain:.1f} points, the needed gain for 4 comparisons"
    assert needed in accuracy_table(whole).caption
    assert "still so after a correction for 4 comparisons: far;" in verdict_sentence(whole)
    assert "still so after a correction for 3 comparisons: none;" in verdict_sentence(
        many_methods({label: own for label, own in LEVELS.items() if label != "far"})
    )


def test_one_comparison_or_one_seed_needs_no_correction():
    whole = many_methods(LEVELS)
    pair = replace(whole, methods=whole.methods[:2])
    alone = replace(whole, methods=[replace(method, runs=method.runs[:1]) for method in whole.methods])
    headless = replace(whole, methods=[replace(whole.methods[0], runs=[]), *whole.methods[1:]])
    same = many_methods(dict.fromkeys(LEVELS, [0.5] * 4))  # runs that do not differ show no noise
    for one in (pair, alone, headless, same):
        assert math.isnan(one.needed_gain) and "needed gain" not in accuracy_table(one).caption
        assert "correction" not in verdict_sentence(one)
        assert not any(str(word).endswith("*") for word in verdicts(one))
