"""Dead groups and effective rollouts, against counting and against enumeration of all binary groups."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.advantages import estimate, mixed_groups, standardized
from scoregram.checks import ScoregramError
from scoregram.groups import live_groups
from scoregram.statistics import (
    effective_fraction,
    effective_fraction_bound,
    effective_probability,
    expected_success_given_mixed,
    group_outcomes,
    mixed_probability,
    right_chances,
)


def binary_groups(success: float, size: int):
    for group in product([0.0, 1.0], repeat=size):
        right = int(sum(group))
        yield success**right * (1 - success) ** (size - right), torch.tensor([group], dtype=torch.float64)


def test_each_group_is_of_exactly_one_kind():
    rewards = torch.tensor([[1.0] * 3, [0.0] * 3, [0.1] * 3, [1.0, 0.0, 1.0], [math.nan] * 3])
    outcomes = group_outcomes(rewards)
    kinds = torch.stack([outcomes.all_right, outcomes.all_wrong, outcomes.tied, outcomes.alive, outcomes.unjudged])
    assert torch.equal(kinds, torch.eye(5, dtype=torch.bool))
    assert outcomes.fraction_alive == 0.2


def kind_by_hand(group: tuple[float, ...]) -> str:
    judged = [r for r in group if not math.isnan(r)]
    if not judged:
        return "unjudged"
    if len(set(judged)) > 1:
        return "alive"
    return {1.0: "all_right", 0.0: "all_wrong"}.get(judged[0], "tied")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_group_with_missing_rewards_is_what_the_loop_says(size):
    """All groups over right, wrong, another value and missing."""
    groups = list(product([1.0, 0.0, 0.1, math.nan], repeat=size))
    rewards = torch.tensor(groups, dtype=torch.float64)
    outcomes = group_outcomes(rewards)
    for kind in ("alive", "all_right", "all_wrong", "tied", "unjudged"):
        assert getattr(outcomes, kind).tolist() == [kind_by_hand(group) == kind for group in groups]
    assert torch.equal(outcomes.alive, mixed_groups(rewards))
    assert torch.equal(outcomes.alive, mixed_groups(rewards.nan_to_num(7.0), observed=~rewards.isnan()))
    assert torch.equal(outcomes.alive, estimate("grpo", rewards).any(dim=1))


def test_an_all_right_group_with_one_missing_reward_is_all_right():
    outcomes = group_outcomes(torch.tensor([[1.0, 1.0, math.nan, 1.0], [math.nan, 0.0, 0.0, math.nan]]))
    assert outcomes.all_right.tolist() == [True, False]
    assert outcomes.all_wrong.tolist() == [False, True]
    assert not outcomes.alive.any() and not outcomes.unjudged.any()


@given(
    group=st.lists(st.one_of(st.just(math.nan), st.floats(-1e3, 1e3)), min_size=1, max_size=6),
    steps=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_live_is_a_spread_beyond_rounding_among_the_judged(group, steps, dtype):
    """`max − min > rtol · max|r|` over what is not NaN, in exact arithmetic, for spreads down to rounding."""
    rewards = torch.tensor([[*group, math.nan, group[0] * (1 + steps * torch.finfo(dtype).eps)]], dtype=dtype)
    judged = [Fraction(r) for r in rewards[0].double().tolist() if not math.isnan(r)]
    spread = max(judged) - min(judged) if judged else Fraction(0)
    live = bool(judged) and spread > Fraction(4 * torch.finfo(dtype).eps) * max(map(abs, judged))
    assert bool(live_groups(rewards)) == bool(mixed_groups(rewards)) == bool(group_outcomes(rewards).alive) == live


def test_the_tolerance_of_a_live_group_can_be_set():
    rewards = torch.tensor([[1.0, 0.5, math.nan], [1.0, 0.25, 0.5]])
    assert live_groups(rewards, rtol=0.5).tolist() == group_outcomes(rewards, rtol=0.5).alive.tolist() == [False, True]


@given(
    spread=st.booleans(), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]), level=st.sampled_from([0.1, 1 / 3, 0.7, -2.0])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_spread_and_a_small_spread_is_one(dtype, spread, scale, level):
    rewards = (torch.full((1, 5), level, dtype=dtype) * scale).clone()
    rewards[0, 0] *= 1 + 1e-3 if spread else 1 + torch.finfo(dtype).eps
    assert bool(group_outcomes(rewards).alive[0]) == spread


def test_other_conventions_of_right_and_wrong():
    outcomes = group_outcomes(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]), right=1, wrong=-1)
    assert outcomes.all_right.tolist() == [True, False, False]
    assert outcomes.all_wrong.tolist() == [False, True, False]
    assert outcomes.tied.tolist() == [False, False, True]


def test_a_group_of_one_is_dead_and_no_group_has_no_fraction():
    assert group_outcomes(torch.tensor([[0.5]])).tied.tolist() == [True]
    assert math.isnan(group_outcomes(torch.zeros(0, 4)).fraction_alive)
    assert math.isnan(effective_fraction(torch.zeros(0, 4), epsilon=0.1))


@pytest.mark.parametrize("success", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chances_match_the_list_of_all_groups(success, size):
    mixed = sum(chance for chance, r in binary_groups(success, size) if 0 < float(r.sum()) < size)
    assert mixed_probability(success, size) == pytest.approx(mixed, abs=1e-14)
    for epsilon in (0, 0.1, 1 / size, 1 - 1 / size, 0.5):
        exact = sum(
            chance * effective_fraction(r - r.mean(), epsilon=epsilon) for chance, r in binary_groups(success, size)
        )
        assert effective_probability(success, size, epsilon=epsilon) == pytest.approx(exact, abs=1e-14)
        if epsilon:
            bound = effective_fraction_bound(success * (1 - success), size, epsilon=epsilon)
            assert exact <= bound + 1e-14
    if size > 1:
        share = sum(chance * float(r.mean()) for chance, r in binary_groups(success, size) if 0 < r.sum() < size)
        assert expected_success_given_mixed(success, size) == pytest.approx(share / mixed, abs=1e-13)


def test_the_bound_is_chebyshev_on_the_variance_of_a_centred_reward():
    """`(R-1)σ²/(Rε²)` is `Var(A)/ε²`, the variance of the advantage taken from the list."""
    for size in (1, 2, 4):
        second = sum(chance * float((r - r.mean())[0, 0] ** 2) for chance, r in binary_groups(0.3, size))
        assert effective_fraction_bound(0.3 * 0.7, size, epsilon=0.2) == pytest.approx(second / 0.04, rel=1e-12)


@pytest.mark.parametrize("size", [7, 10, 100])
def test_a_threshold_on_a_multiple_of_one_over_r_is_strict(size):
    """At `ε = j/R` the advantages `±j/R` are not effective, whatever `j/R` rounds to."""
    for j in range(1, size):
        p = Fraction(1, 2)
        exact = sum(
            math.comb(size, k) * p**size * Fraction(k * (size - k > j) + (size - k) * (k > j), size)
            for k in range(size + 1)
        )
        assert effective_probability(0.5, size, epsilon=j / size) == pytest.approx(float(exact), rel=1e-9)
    assert effective_fraction(torch.tensor([[1 - 0.7, 0.0]], dtype=torch.float64), epsilon=0.3) == 0
    assert effective_fraction(torch.tensor([[1.0]]) - torch.tensor([[0.7]]), epsilon=0.3) == 0


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("rare", [Fraction(1, 10**12), Fraction(1, 10**300)])
def test_rare_outcomes_keep_their_digits(size, rare):
    mixed = 1 - rare**size - (1 - rare) ** size
    share = (rare - rare**size) / mixed
    assert mixed_probability(float(rare), size) == pytest.approx(float(mixed), rel=1e-12, abs=0)
    assert expected_success_given_mixed(float(rare), size) == pytest.approx(float(share), rel=1e-12, abs=0)


def test_ends_of_the_chance_of_success():
    assert mixed_probability(0, 8) == 0 and mixed_probability(1, 8) == 0
    assert math.isnan(expected_success_given_mixed(0, 8)) and math.isnan(expected_success_given_mixed(1, 8))
    assert effective_probability(1, 8, epsilon=0) == 0
    assert expected_success_given_mixed(0.9, 8) + expected_success_given_mixed(0.1, 8) == pytest.approx(1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: group_outcomes(torch.zeros(2, 0)), "at least 1 rollout"),
        (lambda: group_outcomes(torch.tensor([[1.0, -math.inf]])), "rewards must be finite"),
        (lambda: group_outcomes(torch.tensor([[math.nan, math.inf]])), "got inf at index (0, 1)"),
        (lambda: group_outcomes(torch.ones(1, 2), right=1, wrong=1), "two finite rewards"),
        (lambda: group_outcomes(torch.ones(1, 2), right=math.nan), "two finite rewards"),
        (lambda: effective_fraction(torch.tensor([[math.nan]]), epsilon=0.1), "advantages must be finite"),
        (lambda: effective_fraction(torch.ones(1, 1), epsilon=-0.1), "not negative, got -0.1"),
        (lambda: effective_fraction_bound(0.25, 4, epsilon=0), "positive, got 0"),
        (lambda: effective_fraction_bound(-0.25, 4, epsilon=0.1), "reward_variance"),
        (lambda: effective_fraction_bound(0.25, 0, epsilon=0.1), "at least 1, got 0"),
        (lambda: effective_probability(1.5, 4, epsilon=0.1), "chance of success"),
        (lambda: effective_probability(0.5, 4, epsilon=math.nan), "epsilon must be finite"),
        (lambda: mixed_probability(math.nan, 4), "chance of success"),
        (lambda: expected_success_given_mixed(0.5, 1), "at least 2, got 1"),
    ],
)
def test_errors_say_what_was_received(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("steps", range(9))
def test_a_group_is_dead_exactly_where_its_advantages_are_zero(dtype, scale, steps):
    """One idea of a constant group: what counts as dead here gets no advantage there."""
    top = torch.tensor(scale, dtype=dtype)
    low = top * (1 - steps * torch.finfo(dtype).eps)
    rewards = torch.stack([top, low, top])[None]
    alive = bool(group_outcomes(rewards).alive)
    assert alive == bool(mixed_groups(rewards)) == bool(standardized(rewards).any())
    assert alive == (float(top) - float(low) > 4 * torch.finfo(dtype).eps * float(top))


@pytest.mark.parametrize("p", [0.0, 1e-300, 0.01, 0.3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("size", [1, 2, 7, 60])
def test_chances_are_those_of_the_binomial_law(p, size):
    wanted = [float(math.comb(size, k) * Fraction(p) ** k * (1 - Fraction(p)) ** (size - k)) for k in range(size + 1)]
    assert right_chances(p, size) == pytest.approx(wanted, rel=1e-12, abs=0)


def test_chances_of_a_group_beyond_the_range_of_binomial_coefficients():
    chances = right_chances(0.3, 5000)
    assert math.fsum(chances) == pytest.approx(1, rel=1e-14)
    assert math.fsum(k * chance for k, chance in enumerate(chances)) == pytest.approx(1500, rel=1e-12)
    assert effective_probability(0.3, 5000, epsilon=0.5) == pytest.approx(0.3, rel=1e-12)  # the right ones alone
