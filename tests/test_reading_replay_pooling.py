"""Intervals of `what_if`, unit by unit: what is left out, what the interval is over, and where there is none."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from scoregram.exhibits import Estimate
from scoregram.reading.replay_pooling import GroupNumbers, mean_of_live, pooled_numbers, unit_of

NAMES = (
    *("signal", "noise", "across", "reference_signal", "reference_noise"),
    *("with_taken", "squared", "taken_squared"),
)
Row = dict[str, float]


def drawn(steps: list[int], seed: int = 0) -> GroupNumbers:
    """Numbers with a clear signal; groups of one step share a factor."""
    rng = np.random.default_rng(seed)
    factor = np.exp(0.3 * rng.normal(size=max(steps) + 1))[steps]
    means = np.array([2.0, 3.0, 1.8, 2.5, 3.5, 4.0, 5.0, 6.0])
    values = (means + 0.5 * rng.normal(size=(len(steps), 8))) * factor[:, None]
    ranks = np.where(rng.random(len(steps)) < 0.3, np.nan, rng.uniform(1, 4, size=len(steps)))
    return GroupNumbers(np.array(steps), *values.T, spectrum={"effective_rank": ranks})


def rows_of(numbers: GroupNumbers) -> list[Row]:
    columns = numbers.columns()
    return [{name: float(columns[name][place]) for name in NAMES} for place in range(len(numbers.steps))]


def mean(rows: list[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


ABOVE: dict[str, Callable[[Callable[[str], float]], float]] = {
    "bias": lambda m: m("signal") - 2 * m("across") + m("reference_signal"),
    "snr": lambda m: m("signal"),
    "efficiency": lambda m: m("signal") * m("reference_noise"),
    "direction": lambda m: m("across"),
}
BELOW: dict[str, Callable[[Callable[[str], float]], float]] = {
    "bias": lambda m: m("reference_signal"),
    "snr": lambda m: m("noise"),
    "efficiency": lambda m: m("reference_signal") * m("noise"),
    "direction": lambda m: math.sqrt(m("signal") * m("reference_signal")),
}


def units_of(numbers: GroupNumbers, unit: str) -> list[list[Row]]:
    rows = rows_of(numbers)
    if unit == "groups":
        return [[row] for row in rows]
    return [
        [row for row, own in zip(rows, numbers.steps.tolist(), strict=True) if own == step]
        for step in sorted(set(numbers.steps.tolist()))
    ]


def left_out(units: list[list[Row]], function: Callable[[list[Row]], float]) -> list[float]:
    """Pseudo-values: what the function of all rows has over that of the rows without one unit."""
    count, whole = len(units), function([row for unit in units for row in unit])
    found = []
    for skipped in range(count):
        rest = [row for place, unit in enumerate(units) if place != skipped for row in unit]
        found.append(count * whole - (count - 1) * function(rest))
    return found


SHAPES = {
    "steps": [step for step in range(8) for _ in range(4)],
    "groups": [step for step in (1, 2) for _ in range(25)],
}


@pytest.mark.parametrize("unit", SHAPES)
@pytest.mark.parametrize("name", ABOVE)
def test_a_ratio_has_fiellers_interval_of_pseudo_values(name, unit):
    """Its ends are the ratios at which the mean of `above - ratio · below` is just significant; equal units."""
    numbers = drawn(SHAPES[unit])
    units = units_of(numbers, unit)
    above, below = (
        np.array(left_out(units, lambda rows, part=part: part(lambda column: mean(rows, column))))
        for part in (ABOVE[name], BELOW[name])
    )
    found: Estimate = getattr(pooled_numbers(numbers), name)
    rows = rows_of(numbers)
    exact = ABOVE[name](lambda column: mean(rows, column)) / BELOW[name](lambda column: mean(rows, column))
    assert found.value == pytest.approx(exact) and found.low < found.value < found.high
    for end in (found.low, found.high):
        rest = above - end * below
        statistic = abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(len(rest)))
        assert statistic == pytest.approx(student.ppf(0.975, len(rest) - 1), rel=1e-5)


@pytest.mark.parametrize("unit", SHAPES)
@pytest.mark.parametrize("name", ["variance", "taken"])
def test_variance_and_cosine_have_t_intervals_of_their_transforms(name, unit):
    numbers = drawn(SHAPES[unit])
    units = units_of(numbers, unit)

    def transformed(rows: list[Row]) -> float:
        if name == "variance":
            return math.log(mean(rows, "noise"))
        cosine = mean(rows, "with_taken") / math.sqrt(mean(rows, "squared") * mean(rows, "taken_squared"))
        return math.atanh(cosine)

    back = math.exp if name == "variance" else math.tanh
    values, whole = np.array(left_out(units, transformed)), transformed(rows_of(numbers))
    half = student.ppf(0.975, len(units) - 1) * values.std(ddof=1) / math.sqrt(len(units))
    found: Estimate = getattr(pooled_numbers(numbers), name)
    assert (found.value, found.low, found.high) == pytest.approx(
        (back(whole), back(whole - half), back(whole + half)), rel=1e-5
    )


def test_a_metric_is_averaged_over_live_groups_alone():
    steps = [step for step in range(10) for _ in range(3)]
    numbers = drawn(steps)
    found = pooled_numbers(numbers).spectrum["effective_rank"]
    known = [value for value in numbers.spectrum["effective_rank"].tolist() if value == value]
    assert found.value == pytest.approx(sum(known) / len(known)) and found.low < found.value < found.high
    assert math.isnan(mean_of_live(np.arange(30), np.full(30, np.nan)).value)


@pytest.mark.parametrize(
    ("steps", "unit"),
    [
        ([step for step in range(5) for _ in range(4)], "steps"),
        ([step for step in range(5) for _ in range(3)], ""),
        ([step for step in range(4) for _ in range(10)], "groups"),
        ([step for step in range(4) for _ in range(9)], ""),
        ([3] * 40, "groups"),
        ([3], ""),
    ],
)
def test_the_units_are_steps_if_there_are_five_and_else_groups_if_there_are_forty(steps, unit):
    assert unit_of(steps) == unit
    found = pooled_numbers(drawn(steps))
    intervals = [found.variance, found.snr, found.bias, found.efficiency, found.direction, found.taken]
    assert all(math.isnan(one.low) == (not unit) and not math.isnan(one.value) for one in intervals)


def test_groups_that_share_a_step_widen_the_interval_of_the_variance():
    """The factor of a step moves all of its groups together: single groups would pretend to be independent."""
    steps = [step for step in range(10) for _ in range(8)]
    numbers = drawn(steps)
    apart = replace(numbers, steps=np.arange(80))
    together, single = (pooled_numbers(one).variance for one in (numbers, apart))
    assert together.value == pytest.approx(single.value)
    assert together.high - together.low > 1.5 * (single.high - single.low)


def test_a_noise_that_is_not_positive_gives_no_signal_to_noise():
    numbers = drawn(SHAPES["steps"])
    found = pooled_numbers(replace(numbers, noise=-numbers.noise))
    assert math.isnan(found.snr.value) and found.variance.high < 0 and not found.is_resolved
