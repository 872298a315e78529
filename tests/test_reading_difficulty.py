"""How hard prompts are: chance by enumeration, and chances of a second visit and live shares by integration."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.reading import (
    OutcomeCounts,
    RunReading,
    StoredGroup,
    SuccessLaw,
    group_size_for,
    last_outcomes,
    pairs_exceed_chance,
    step_stretches,
)
from scoregram.reading.difficulty import joined_outcomes
from scoregram.reading.group import GROUPS_IN_A_STRETCH, with_rewards
from scoregram.runs import GroupRecord
from tests.reading_cases import run_of


def counts(groups: int, size: int, right: int, wrong: int = 0, solved: int = 0) -> OutcomeCounts:
    return OutcomeCounts(groups=groups, size=size, right=right, all_wrong=wrong, all_right=solved)


def numbers_by_enumeration(groups: int, size: int, right: int, mark: int) -> list[int]:
    """How many groups are all `mark`, for every arrangement of the right rollouts."""
    places = range(groups * size)
    found = []
    for chosen in itertools.combinations(places, right):
        marks = [int(place in chosen) for place in places]
        found.append(sum(all(one == mark for one in marks[i * size : (i + 1) * size]) for i in range(groups)))
    return found


@pytest.mark.parametrize(
    ("groups", "size", "right"), [(3, 3, 2), (4, 2, 3), (2, 4, 1), (4, 3, 9), (3, 2, 0), (1, 4, 2)]
)
@pytest.mark.parametrize(("kind", "mark"), [("all wrong", 0), ("all right", 1)])
def test_chance_is_that_of_all_arrangements(groups, size, right, kind, mark):
    numbers = numbers_by_enumeration(groups, size, right, mark)
    mean = Fraction(sum(numbers), len(numbers))
    assert counts(groups, size, right).chance_share(kind) * groups == pytest.approx(float(mean))
    variance = float(Fraction(sum(n * n for n in numbers), len(numbers)) - mean**2)
    for number in range(groups + 1):
        field = {"all wrong": "wrong", "all right": "solved"}[kind]
        exceeds = counts(groups, size, right, **{field: number}).exceeds_chance(kind)
        assert exceeds == (variance > 1e-12 and number - 0.5 - float(mean) > 1.645 * math.sqrt(variance))


def test_equally_hard_prompts_rarely_exceed_chance_and_different_ones_do():
    rng = np.random.default_rng(0)

    def share(rates: np.ndarray, runs: int = 400) -> float:
        exceeding = 0
        for _ in range(runs):
            right = rng.binomial(8, rng.permutation(rates))
            made = counts(len(right), 8, int(right.sum()), wrong=int((right == 0).sum()))
            exceeding += made.exceeds_chance("all wrong")
        return exceeding / runs

    assert share(np.full(100, 0.06)) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert share(np.repeat([0.0, 0.2], 50)) > 0.9


def test_a_success_rate_that_rises_does_not_look_like_prompts_that_differ():
    """All prompts of a step are equally hard, while the rate goes from 10 to 30 %: the test errs in 5 % at most."""
    rng, runs, exceeding, pooled = np.random.default_rng(1), 200, 0, 0
    stored = run_of("11110000")
    stored = replace(stored, groups=[StoredGroup(replace(group.record, step=90)) for group in stored.groups])
    for _ in range(runs):
        right = rng.binomial(8, np.broadcast_to(np.linspace(0.1, 0.3, 30)[:, None], (30, 4)))
        lines = [
            {"step": step, "groups": 4, "reward": row.mean() / 8}
            | {"groups/all_wrong": (row == 0).mean(), "groups/all_right": (row == 8).mean()}
            for step, row in enumerate(np.concatenate([right] * 3), start=1)
        ]
        found = last_outcomes(replace(stored, lines=lines))
        assert found is not None and found.groups == 120 and found.right == right.sum()
        assert [part.groups for part in found.stretches] == [8] * 15
        exceeding += found.exceeds_chance("all wrong")
        pooled += replace(found, stretches=()).exceeds_chance("all wrong")
    assert exceeding / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs) < pooled / runs


def test_different_prompts_are_found_within_stretches():
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(15):
        right = rng.binomial(8, rng.permutation(np.repeat([0.0, 0.2], 4)))
        parts.append(counts(8, 8, int(right.sum()), wrong=int((right == 0).sum())))
    whole = replace(joined_outcomes(parts), stretches=tuple(parts))
    assert whole.exceeds_chance("all wrong")
    mean = sum(part.groups * part.chance_share("all wrong") for part in parts) / whole.groups
    assert whole.chance_share("all wrong") == pytest.approx(mean)
    assert whole.dead_chance_share == whole.chance_share("all wrong") + whole.chance_share("all right")


def test_outcomes_are_those_of_every_logged_step():
    line = {"groups": 4, "groups/all_wrong": 0.5, "groups/all_right": 0.25, "reward": 0.375}
    run = run_of("1111", "0000", "1000", "1000", lines=line)
    assert last_outcomes(run) == counts(4, 4, 6, wrong=2, solved=1)
    assert last_outcomes(run_of("1111", "0002", lines=line)) is None  # graded rewards
    assert last_outcomes(run_of("1111", "000", lines=line)) is None  # groups of two sizes
    assert last_outcomes(run_of("1111", "0000")) is None  # nothing logged


@pytest.mark.parametrize("groups", [[3], [3, 3], [3, 3, 3, 3], [8, 8, 3], [3] * 7, [9, 2, 9, 1], [8] * 4])
def test_stretches_hold_every_step_once_in_order(groups):
    steps = [counts(count, 4, place) for place, count in enumerate(groups)]
    parts = [steps[part] for part in step_stretches(groups)]
    assert [step for part in parts for step in part] == steps
    assert len(parts) == 1 or all(sum(step.groups for step in part) >= GROUPS_IN_A_STRETCH for part in parts)


# The law of success rates, and dead groups by chance, within stretches of steps


def live_by_integration(a: float, b: float, size: int) -> float:
    """`E[1 - p^R - (1-p)^R]` for `p ~ Beta(a, b)`, by the midpoint rule."""
    points = (np.arange(200_000) + 0.5) / 200_000
    density = points ** (a - 1) * (1 - points) ** (b - 1)
    return float((density * (1 - points**size - (1 - points) ** size)).sum() / density.sum())


@pytest.mark.parametrize(("a", "b"), [(2.0, 3.0), (1.0, 8.0), (5.0, 1.5)])
def test_live_shares_under_a_beta_law(a, b):
    law = SuccessLaw(a / (a + b), a + b)
    for size in (2, 8, 32):
        assert law.live_share(size) == pytest.approx(live_by_integration(a, b, size), abs=1e-4)
    size = group_size_for(law)
    assert size is None or law.live_share(size - 1) < 0.8 <= law.live_share(size)


def test_the_law_is_that_of_the_prompts():
    """Counts drawn from a known law give it back, also where most groups are dead."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.4, 5.6, 20_000)
    counts = [(int(right), 8) for right in rng.binomial(8, rates)]
    law = SuccessLaw.of(counts)
    assert law is not None and law.mean == pytest.approx(0.4 / 6, abs=0.003)
    assert law.concentration == pytest.approx(6, rel=0.1)
    dead = sum(right in (0, 8) for right, _ in counts) / len(counts)
    assert law.live_share(8) == pytest.approx(1 - dead, abs=0.01)
    assert law.live_share(32) <= 1 - (1 - law.live_share(8)) ** 4  # whatever the law of the prompts
    assert law.live_share(32) == pytest.approx(np.mean(1 - rates**32 - (1 - rates) ** 32), abs=0.01)


@pytest.mark.parametrize(
    ("counts", "live"),
    [
        ([(0, 4), (0, 4)], 0.0),  # never solved
        ([(0, 4), (4, 4)], 0.0),  # each always or never
        ([(2, 4), (2, 4)], 7 / 8),  # less spread than chance: all alike
        ([(1, 1), (0, 1)], None),  # one rollout says nothing about spread
        ([], None),
    ],
)
def test_laws_at_the_edges(counts, live):
    law = SuccessLaw.of(counts)
    assert live == (None if law is None else pytest.approx(law.live_share(4)))


def test_prompts_seen_twice_count_once():
    assert run_of("1000", "0000", "1111", prompts=["a", "a", "b"]).success_rates() == [1 / 8, 1.0]
    assert run_of("1000", "2000").success_rates() == []  # neither right nor wrong


@pytest.mark.parametrize(("a", "b", "size"), [(0.5, 3.0, 4), (2.0, 2.0, 8), (1.0, 9.0, 8), (6.0, 1.0, 3)])
@pytest.mark.parametrize("left_out", ["all wrong", "all right", "all wrong or all right"])
def test_a_second_visit_of_kept_prompts_by_integration(a, b, size, left_out):
    points = (np.arange(400_000) + 0.5) / 400_000
    density = points ** (a - 1) * (1 - points) ** (b - 1)
    right, wrong = points**size, (1 - points) ** size
    kept = 1 - right * ("all right" in left_out) - wrong * ("all wrong" in left_out)
    again = float((density * kept * (1 - right - wrong)).sum() / (density * kept).sum())
    law = SuccessLaw(a / (a + b), a + b)
    assert law.live_if_kept(size, left_out) == pytest.approx(again, abs=2e-3)


def test_a_second_visit_at_the_edges():
    assert SuccessLaw(0.5, math.inf).live_if_kept(4, "all wrong") == 7 / 8  # an earlier visit says nothing
    always_or_never = SuccessLaw(0.5, 0.0)
    assert always_or_never.live_if_kept(4, "all wrong") == 0  # those that are always solved are kept
    assert math.isnan(always_or_never.live_if_kept(4, "all wrong or all right"))  # none is kept


def test_larger_groups_are_live_more_often_but_fewer_in_a_step():
    """At equal rollouts `L(2R) / 2R ≤ L(R) / R` from R = 3 on, whatever the success rate."""
    for mean, concentration, size in itertools.product(
        (0.01, 0.1, 0.5, 0.9), (0.5, 2.0, 20.0, math.inf), (3, 4, 8, 16)
    ):
        law = SuccessLaw(mean, concentration)
        assert law.live_share(size) <= law.live_share(2 * size) <= 2 * law.live_share(size) + 1e-12


@pytest.mark.parametrize(
    ("sizes", "right"), [((3, 3, 3), 4), ((4, 4), 3), ((2, 3, 5), 6), ((2, 2, 2, 2), 4), ((5, 4), 1)]
)
def test_right_pairs_by_chance_are_those_of_all_arrangements(sizes, right):
    places, ends = range(sum(sizes)), np.cumsum([0, *sizes])
    made = []
    for chosen in itertools.combinations(places, right):
        marks = [int(place in chosen) for place in places]
        made.append([sum(marks[start:stop]) for start, stop in itertools.pairwise(ends)])
    numbers = [sum(math.comb(one, 2) for one in counts) for counts in made]
    mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
    for counts_of_prompts, number in zip(made, numbers, strict=True):
        stretch = list(zip(counts_of_prompts, sizes, strict=True))
        for times in (1, 3):  # means and variances of stretches add up
            beyond = times * (number - mean) - 0.5 > 1.751 * math.sqrt(times) * deviation
            assert pairs_exceed_chance([stretch] * times) == (deviation > 0 and beyond)


def test_the_spread_is_that_within_stretches():
    """Against pairs of rollouts, one by one: of one prompt, and of different prompts of the same stretch."""
    rng = np.random.default_rng(0)
    marks = [[rng.integers(0, 2, size=8) * (place % 2) for place in range(prompts)] for prompts in (4, 3, 5)]
    spread = mixed = 0.0
    for part in marks:
        same = [a * b for one in part for a, b in itertools.permutations(one.tolist(), 2)]
        apart = [a * b for one, other in itertools.permutations(part, 2) for a in one for b in other]
        mean = np.concatenate(part).mean()
        spread += len(part) / 12 * (np.mean(same) - np.mean(apart))
        mixed += len(part) / 12 * (mean - np.mean(same))
    law = SuccessLaw.of(*([(int(one.sum()), 8) for one in part] for part in marks))
    assert law is not None and law.concentration == pytest.approx(mixed / spread)
    assert law.mean == pytest.approx(np.concatenate([one for part in marks for one in part]).mean())


def run_with_rates(rng: np.random.Generator, rates: np.ndarray, size: int = 8) -> RunReading:
    """A run whose last third has a row of `rates` for each step: a group of `size` for each rate, of a new prompt."""
    steps, groups = rates.shape
    rewards = (rng.random((steps, groups, size)) < rates[..., None]).astype(float)
    records = [
        GroupRecord(
            step=2 * steps + step + 1,
            prompt_id=f"p/{step}/{place}",
            rewards=torch.tensor(rewards[step, place]),
            lengths=torch.ones(size).long(),
            advantages=torch.zeros(size, dtype=torch.float64),
        )
        for step in range(steps)
        for place in range(groups)
    ]
    lines = [{"step": step, "reward": 0.5} for step in range(1, 3 * steps + 1)]
    return RunReading({}, (), lines, with_rewards([StoredGroup(record) for record in records]))


def shares_that_differ(rates: np.ndarray, runs: int, seed: int, *, mixed: bool = False) -> dict[str, float]:
    """Share of runs in which prompts seem to differ: by the law, by the share of dead groups, and by both if pooled."""
    rng, found = np.random.default_rng(seed), dict.fromkeys(("law", "dead", "law, pooled", "dead, pooled"), 0)
    for _ in range(runs):
        run = run_with_rates(rng, rates * rng.choice([0.1, 1.9], size=rates.shape) if mixed else rates)
        law, dead, counts_of_prompts = SuccessLaw.of(*run.success_stretches()), run.summary.dead, run.success_counts()
        assert law is not None and len(run.last_groups) == rates.size == len(counts_of_prompts)
        rate = sum(right for right, _ in counts_of_prompts) / (8 * rates.size)
        found["law"] += math.isfinite(law.concentration)
        found["law, pooled"] += pairs_exceed_chance([counts_of_prompts])
        found["dead"] += dead.low > run.summary.equally_hard_dead
        found["dead, pooled"] += dead.low > rate**8 + (1 - rate) ** 8
    return {name: count / runs for name, count in found.items()}


def test_law_and_dead_groups_do_not_take_a_rising_rate_for_a_difference():
    """Prompts of a step are equally hard, while the rate goes from 5 to 45 %: each errs in 5 % at most."""
    rates = np.broadcast_to(np.linspace(0.05, 0.45, 30)[:, None], (30, 4))
    runs = 150
    found = shares_that_differ(rates, runs, seed=0)
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert found["law"] < most < found["law, pooled"] and found["dead"] < most < found["dead, pooled"], found


def test_law_and_dead_groups_find_prompts_that_differ_while_the_rate_rises():
    rates = np.broadcast_to(np.linspace(0.05, 0.45, 30)[:, None], (30, 4))
    found = shares_that_differ(rates, 20, seed=1, mixed=True)
    assert found["law"] == found["dead"] == 1, found


def test_kinds_of_groups_that_do_not_exist_are_refused():
    with pytest.raises(ScoregramError, match=r"left_out must be one of all wrong, .*, got equal"):
        SuccessLaw(0.5, 2.0).live_if_kept(8, "equal")
    with pytest.raises(KeyError, match="tied"):
        OutcomeCounts(groups=2, size=4, right=4, all_wrong=0, all_right=0).chance_share("tied")
