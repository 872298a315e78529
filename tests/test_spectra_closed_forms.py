import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.spectra import (
    expected_orthogonal_effective_rank,
    orthogonal_effective_rank,
    orthogonal_null,
    orthogonal_top1_fraction,
    spectrum_summary,
    two_row_effective_rank_from_top1,
)

SIZES = [1, 2, 3, 4, 8, 16]


@pytest.mark.parametrize(("rollouts", "right"), [(size, k) for size in SIZES for k in range(size + 1)])
def test_right_or_wrong_rewards_over_orthogonal_scores(rollouts, right):
    rewards = torch.tensor([1.0] * right + [0.0] * (rollouts - right), dtype=torch.float64)
    gram = torch.full((rollouts, rollouts), 0.3).fill_diagonal_(2.5)  # the null forgets what is off the diagonal
    null = orthogonal_null(gram, rewards - rewards.mean())
    assert orthogonal_effective_rank(right, rollouts) == pytest.approx(null.effective_rank, rel=1e-9, nan_ok=True)
    assert orthogonal_top1_fraction(right, rollouts) == pytest.approx(null.top1_fraction, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("rollouts", [2, 4, 8, 16, 1000])
def test_one_odd_rollout_stays_below_four_and_an_even_group_is_full(rollouts):
    assert orthogonal_effective_rank(1, rollouts) == 4 * (rollouts - 1) / rollouts < 4
    assert orthogonal_top1_fraction(1, rollouts) == (rollouts - 1) / rollouts
    assert orthogonal_effective_rank(rollouts // 2, rollouts) == rollouts


@pytest.mark.parametrize("rollouts", [2, 3, 4, 8])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_expectation_over_every_mixed_group(rollouts, p):
    weight = total = 0.0
    for outcome in itertools.product([0, 1], repeat=rollouts):
        right = sum(outcome)
        if 0 < right < rollouts:
            chance = p**right * (1 - p) ** (rollouts - right)
            weight += chance
            total += chance * orthogonal_effective_rank(right, rollouts)
    assert expected_orthogonal_effective_rank(p, rollouts) == pytest.approx(total / weight, rel=1e-12)


@pytest.mark.parametrize("rollouts", [2, 4, 8, 16])
def test_expectation_at_one_half_and_at_the_ends(rollouts):
    half = (rollouts - 1) / (1 - 2 ** (1 - rollouts))
    assert expected_orthogonal_effective_rank(0.5, rollouts) == pytest.approx(half, rel=1e-12)
    lone = orthogonal_effective_rank(1, rollouts)  # near the ends a mixed group has one odd rollout
    for p in (1e-12, 1e-300):
        assert expected_orthogonal_effective_rank(p, rollouts) == pytest.approx(lone, rel=1e-9)
    assert expected_orthogonal_effective_rank(1 - 1e-12, rollouts) == pytest.approx(lone, rel=1e-9)
    assert all(math.isnan(expected_orthogonal_effective_rank(p, rollouts)) for p in (0, 1))


def test_a_group_of_one_is_never_mixed():
    assert math.isnan(expected_orthogonal_effective_rank(0.5, 1))
    assert math.isnan(orthogonal_effective_rank(1, 1)) and math.isnan(orthogonal_top1_fraction(0, 1))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(-1, 1))
def test_two_rows_from_their_top1_fraction(a, b, c):
    """`σ_1σ_2` is the area `ab√(1-c²)` that the rows span, and `σ_1²+σ_2² = a²+b²`."""
    if max(a, b) > 1e-100:  # squares below that are zero in the Gram
        gram = torch.tensor([[a * a, a * b * c], [a * b * c, b * b]], dtype=torch.float64)
        measured = spectrum_summary(gram)
        closed = two_row_effective_rank_from_top1(max(measured.top1_fraction, 0.5))
        assert closed == pytest.approx(measured.effective_rank, abs=1e-6)
        assert closed == pytest.approx(1 + 2 * a * b * math.sqrt(1 - c * c) / (a * a + b * b), abs=1e-6)


def test_two_row_ends():
    assert two_row_effective_rank_from_top1(0.5) == 2
    assert two_row_effective_rank_from_top1(1) == 1


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: orthogonal_effective_rank(5, 4), "must lie in [0, 4], got 5"),
        (lambda: orthogonal_effective_rank(-1, 4), "must lie in [0, 4], got -1"),
        (lambda: orthogonal_top1_fraction(0, 0), "at least 1 rollout, got 0"),
        (lambda: expected_orthogonal_effective_rank(1.5, 4), "[0, 1], got 1.5"),
        (lambda: expected_orthogonal_effective_rank(math.nan, 4), "[0, 1], got nan"),
        (lambda: expected_orthogonal_effective_rank(0.5, 0), "at least 1 rollout, got 0"),
        (lambda: two_row_effective_rank_from_top1(0.4), "[0.5, 1], got 0.4"),
    ],
)
def test_impossible_arguments_are_refused(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)
