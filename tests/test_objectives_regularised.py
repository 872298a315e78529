import itertools
import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.objectives import consistency_variance, consistency_weights, token_coefficients

MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, True]] * 2)
REWARDS = torch.tensor([0.0, 1.0, 0.3, 2.0, -1.0, 0.5], dtype=torch.float64)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref = -3 * torch.rand(2, *MASK.shape, dtype=torch.float64, generator=generator)
    return log_probs, ref


def naive(log_probs, ref, rewards, mask, group_size, beta, leave_one_out):
    """Rollout by rollout; leave-one-out as the product of the two deviations."""
    groups = [range(start, start + group_size) for start in range(0, len(rewards), group_size)]
    total = 0.0
    for group in groups:
        kept = [i for i in group if mask[i].any()]
        v = {i: float(rewards[i]) - beta * float((log_probs[i] - ref[i])[mask[i]].sum()) for i in kept}
        if len(kept) < 2:
            continue
        mean = sum(v.values()) / len(kept)
        for i in kept:
            others = sum(v[j] for j in kept if j != i) / (len(kept) - 1)
            total += (v[i] - mean) * (v[i] - (others if leave_one_out else mean)) / (2 * len(kept) * len(groups))
    return total


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("empty", [(), (1,), (0, 1), (0, 1, 2)])
def test_value_gradient_and_weight_match_the_definition(leave_one_out, empty):
    log_probs, ref = batch()
    mask = MASK.clone()
    mask[list(empty)] = False
    rewards = REWARDS.clone()
    rewards[list(empty)] = math.nan  # unread
    settings = {"group_size": 3, "beta": 0.4, "leave_one_out": leave_one_out}
    variable = log_probs.clone().requires_grad_()
    loss = consistency_variance(variable, ref, rewards, mask, **settings)
    assert float(loss.detach()) == pytest.approx(naive(log_probs, ref, rewards, mask, *settings.values()), rel=1e-13)
    coefficients = token_coefficients(loss, variable)
    stated = consistency_weights(log_probs, ref, rewards, mask, **settings)
    torch.testing.assert_close(-coefficients, stated, rtol=1e-12, atol=1e-15)
    for i, t in itertools.product(*map(range, mask.shape)):
        nudge = torch.zeros_like(log_probs)
        nudge[i, t] = 1e-6
        up, down = (naive(log_probs + s * nudge, ref, rewards, mask, *settings.values()) for s in (1, -1))
        assert float(coefficients[i, t]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def regularised_gradient(logits, ref, reward, beta):
    p = logits.softmax(-1)
    objective = (p * (reward - beta * (p.log() - ref))).sum()
    (result,) = torch.autograd.grad(objective, logits)
    return result


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("group_size", [2, 3])
def test_on_policy_the_mean_gradient_is_the_regularised_policy_gradient(group_size, leave_one_out):
    """Over every group of a four-action policy the mean of `∇L` is `−β ∇(E r − β KL)`, or `(R−1)/R` of it if full."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_()
    ref = torch.randn(4, dtype=torch.float64, generator=generator).log_softmax(-1)
    reward, beta = torch.randn(4, dtype=torch.float64, generator=generator), 0.7
    log_p = logits.log_softmax(-1)
    mean = torch.zeros(4, dtype=torch.float64)
    for actions in itertools.product(range(4), repeat=group_size):
        a = torch.tensor(actions)
        everything = torch.ones(group_size, 1, dtype=torch.bool)
        settings = {"group_size": group_size, "beta": beta, "leave_one_out": leave_one_out}
        loss = consistency_variance(log_p[a][:, None], ref[a][:, None], reward[a], everything, **settings)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        mean += log_p.detach()[a].sum().exp() * gradient
    scale = 1.0 if leave_one_out else (group_size - 1) / group_size
    expected = -beta * scale * regularised_gradient(logits, ref, reward, beta)
    torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-14)


def test_the_regularised_optimum_has_no_loss_whoever_sampled():
    """At `π* ∝ π_ref exp(r/β)` every `v_i` is the same, so the loss and its gradient vanish on any group at all."""
    ref = torch.tensor([-1.0, -0.5, -2.0, -3.0], dtype=torch.float64).log_softmax(-1)
    reward, beta = torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=torch.float64), 0.3
    best = (ref + reward / beta).log_softmax(-1)
    for actions in itertools.product(range(4), repeat=3):
        a = torch.tensor(actions)
        variable = best[a][:, None].clone().requires_grad_()
        everything = torch.ones(3, 1, dtype=torch.bool)
        loss = consistency_variance(variable, ref[a][:, None], reward[a], everything, group_size=3, beta=beta)
        assert float(loss.detach()) < 1e-28
        assert float(token_coefficients(loss, variable).abs().max()) < 1e-14


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"group_size": 1, "beta": 0.1}, "group_size 1 for 6 rollouts"),
        ({"group_size": 4, "beta": 0.1}, "group_size 4 for 6 rollouts"),
        ({"group_size": 3, "beta": 0.0}, "beta must lie in"),
        ({"group_size": 3, "beta": -1}, "beta must lie in"),
        ({"group_size": 3, "beta": math.nan}, "beta must lie in"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, part):
    with pytest.raises(ScoregramError, match=part):
        consistency_variance(*batch(), REWARDS, MASK, **settings)


def test_a_missing_reward_is_an_error_that_names_the_rollout():
    rewards = REWARDS.clone()
    rewards[4] = math.nan
    with pytest.raises(ScoregramError, match=r"rewards must be finite, got nan at index \(4,\)"):
        consistency_variance(*batch(), rewards, MASK, group_size=3, beta=0.1)
