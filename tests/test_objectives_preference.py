import itertools
import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.objectives import pair_preference, pair_preference_weights, preference_pairs, token_coefficients

MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [False, True, True]])
PAIRS = torch.tensor([[0, 1], [0, 2], [3, 2]])


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref = -3 * torch.rand(2, *MASK.shape, dtype=torch.float64, generator=generator)
    return log_probs, ref


def naive(log_probs, ref, mask, pairs, beta):
    h = [float((log_probs[i] - ref[i])[mask[i]].sum()) for i in range(len(mask))]
    live = [(w, loser) for w, loser in pairs.tolist() if mask[w].any() and mask[loser].any()]
    return sum(math.log1p(math.exp(-beta * (h[w] - h[loser]))) for w, loser in live) / len(pairs)


@pytest.mark.parametrize("beta", [0.1, 2])
@pytest.mark.parametrize("empty", [(), (1,), (0, 3)])
def test_value_gradient_and_weight_match_the_definition(beta, empty):
    log_probs, ref = batch()
    mask = MASK.clone()
    mask[list(empty)] = False
    variable = log_probs.clone().requires_grad_()
    loss = pair_preference(variable, ref, mask, PAIRS, beta=beta)
    assert float(loss.detach()) == pytest.approx(naive(log_probs, ref, mask, PAIRS, beta), rel=1e-13)
    coefficients = token_coefficients(loss, variable)
    stated = pair_preference_weights(log_probs, ref, mask, PAIRS, beta=beta)
    torch.testing.assert_close(-coefficients, stated, rtol=1e-12, atol=1e-15)
    for i, t in itertools.product(*map(range, mask.shape)):
        nudge = torch.zeros_like(log_probs)
        nudge[i, t] = 1e-6
        up, down = (naive(log_probs + s * nudge, ref, mask, PAIRS, beta) for s in (1, -1))
        assert float(coefficients[i, t]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_one_pair_gives_equal_and_opposite_weights():
    """`±β σ(−βΔ)` on every token of the better and the worse, zero on the rest."""
    log_probs, ref = batch()
    beta = 0.5
    variable = log_probs.clone().requires_grad_()
    coefficients = token_coefficients(pair_preference(variable, ref, MASK, torch.tensor([[2, 0]]), beta=beta), variable)
    h = ((log_probs - ref) * MASK).sum(-1)
    weight = beta / (1 + math.exp(beta * float(h[2] - h[0])))
    expected = MASK * torch.tensor([-weight, 0.0, weight, 0.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close(-coefficients, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rewards", list(itertools.product([0.0, 1.0], repeat=4)))
def test_pairs_are_all_right_times_wrong(rewards):
    right = [i for i in range(4) if rewards[i] == 1]
    wrong = [i for i in range(4) if rewards[i] == 0]
    expected = [[p * 4 + i, p * 4 + j] for p in range(2) for i in right for j in wrong]
    assert sorted(preference_pairs(torch.tensor([rewards, rewards])).tolist()) == sorted(expected)


def test_pairs_of_graded_rewards_leave_out_ties():
    assert preference_pairs(torch.tensor([[0.5, 0.5, 2.0]])).tolist() == [[2, 0], [2, 1]]
    assert preference_pairs(torch.tensor([[1.0]])).tolist() == []


@pytest.mark.parametrize("rewards", [r for r in itertools.product([0.0, 1.0], repeat=4) if 0 < sum(r) < 4])
def test_at_the_reference_binary_pairs_are_mean_centred_reinforce(rewards):
    r = torch.tensor([rewards], dtype=torch.float64)
    pairs = preference_pairs(r)
    variable = batch()[0].requires_grad_()
    coefficients = token_coefficients(pair_preference(variable, variable, MASK, pairs, beta=0.3), variable)
    advantages = (r - r.mean()).flatten()
    expected = 0.3 * 4 / (2 * len(pairs)) * advantages[:, None] * MASK
    torch.testing.assert_close(-coefficients, expected, rtol=1e-12, atol=1e-15)


def test_without_pairs_the_loss_is_zero():
    log_probs, ref = batch()
    variable = log_probs.requires_grad_()
    loss = pair_preference(variable, ref, MASK, preference_pairs(torch.ones(1, 4)))
    assert float(loss.detach()) == 0
    assert bool((token_coefficients(loss, variable) == 0).all())


@pytest.mark.parametrize(("drift", "value"), [(-990.0, 99.0), (990.0, 0.0)])
def test_huge_margins_stay_exact(drift, value):
    log_probs = torch.tensor([[-1000 + max(drift, 0)], [-1000 - min(drift, 0)]], requires_grad=True)
    loss = pair_preference(
        log_probs, torch.tensor([[-1000.0], [-1000.0]]), torch.ones(2, 1, dtype=torch.bool), PAIRS[:1]
    )
    assert float(loss.detach()) == pytest.approx(value, abs=1e-30)
    assert token_coefficients(loss, log_probs).flatten().tolist() == pytest.approx(
        [-0.1, 0.1] if value else [0.0, 0.0], rel=1e-7, abs=1e-30
    )


@pytest.mark.parametrize(
    ("pairs", "part"),
    [
        (torch.tensor([[0, 1], [0, 4]]), r"got \[0, 4\] at index 1"),
        (torch.tensor([[-1, 1]]), r"got \[-1, 1\]"),
        (torch.tensor([[2, 2]]), r"got \[2, 2\]"),
    ],
)
def test_pairs_that_mean_nothing_are_refused(pairs, part):
    with pytest.raises(ScoregramError, match=part):
        pair_preference(*batch(), MASK, pairs)


@pytest.mark.usefixtures("unchecked_shapes")
def test_pairs_of_a_wrong_shape_are_refused():
    with pytest.raises(ScoregramError, match=r"pairs must be \(M, 2\), got \(3,\)"):
        pair_preference(*batch(), MASK, torch.tensor([0, 1, 2]))


def test_rewards_and_beta_must_be_numbers():
    with pytest.raises(ScoregramError, match="rewards must be finite"):
        preference_pairs(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(ScoregramError, match="beta must lie in"):
        pair_preference(*batch(), MASK, PAIRS, beta=math.nan)
