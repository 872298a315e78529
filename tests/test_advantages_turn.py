"""Turn estimators against loops over single turns, with rollouts that stop early."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram import advantages as adv
from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import ScoregramError

TURN_ROWS = sorted(name for name, row in ESTIMATORS.items() if row.level == "turn")


@st.composite
def batches(draw):
    prompts, rollouts, turns = draw(st.tuples(st.integers(1, 2), st.integers(2, 4), st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    stops = torch.randint(1, turns + 1, (prompts, rollouts, 1), generator=generator)
    mask = torch.arange(turns) < stops
    rewards = torch.randint(-4, 5, (prompts, rollouts, turns), generator=generator).double() / 4
    anchors = torch.randint(-1, 2, rewards.shape, generator=generator)
    outcomes = torch.randint(0, 3, (prompts, rollouts), generator=generator).double()
    return torch.where(mask, rewards, math.nan), mask, anchors, outcomes


def places(mask: Tensor) -> list[tuple[int, int, int]]:
    return [(int(p), int(i), int(h)) for p, i, h in mask.nonzero()]


def to_go(rewards: Tensor, p: int, i: int, h: int, gamma: float = 1.0) -> float:
    return sum(gamma**k * float(r) for k, r in enumerate(rewards[p, i, h:]) if math.isfinite(float(r)))


def z_score(x: float, pool: list[float]) -> float:
    """Position of `x` in its pool, sample deviation; 0 in a pool without spread."""
    values = torch.tensor(pool, dtype=torch.float64)
    if len(pool) < 2 or float(values.max() - values.min()) < 1e-12:
        return 0.0
    return (x - float(values.mean())) / float(values.std())


@given(batch=batches())
def test_turn_baselines_average_those_who_reached_the_turn(batch):
    rewards, mask, _, _ = batch
    mean, loo = adv.turn_mean_centered(rewards, mask=mask), adv.turn_leave_one_out(rewards, mask=mask)
    for p, i, h in places(mask):
        mine = to_go(rewards, p, i, h)
        peers = [to_go(rewards, p, j, h) for j in range(mask.shape[1]) if mask[p, j, h] and j != i]
        assert float(mean[p, i, h]) == pytest.approx(mine - (mine + sum(peers)) / (1 + len(peers)), abs=1e-12)
        assert float(loo[p, i, h]) == pytest.approx(mine - (sum(peers) / len(peers) if peers else 0.0), abs=1e-12)
    assert bool((mean[~mask] == 0).all()) and bool((loo[~mask] == 0).all())


@given(batch=batches(), lam=st.sampled_from([0, 0.5, 1.0]))
def test_turn_and_outcome_are_standardised_apart(batch, lam):
    rewards, mask, _, outcomes = batch
    result = adv.turn_and_outcome_standardized(rewards, mask=mask, outcome_rewards=outcomes, lam=lam)
    for p, i, h in places(mask):
        pool = [float(rewards[p, j, h]) for j in range(mask.shape[1]) if mask[p, j, h]]
        end = z_score(float(outcomes[p, i]), outcomes[p].tolist())
        assert float(result[p, i, h]) == pytest.approx(z_score(float(rewards[p, i, h]), pool) + lam * end, abs=1e-10)
    assert bool((result[~mask] == 0).all())


@given(batch=batches(), weight=st.sampled_from([0, 0.5, 1.0]), gamma=st.sampled_from([0.5, 1.0]))
def test_anchored_turns_are_compared_within_their_prompt(batch, weight, gamma):
    rewards, mask, anchors, _ = batch
    result = adv.episode_and_anchor_standardized(rewards, mask=mask, anchors=anchors, weight=weight, gamma=gamma)
    for p, i, h in places(mask):
        returns = [to_go(rewards, p, j, 0) for j in range(mask.shape[1])]
        pool = [to_go(rewards, *at, gamma) for at in places(mask) if at[0] == p and anchors[at] == anchors[p, i, h]]
        expected = z_score(returns[i], returns) + weight * z_score(to_go(rewards, p, i, h, gamma), pool)
        assert float(result[p, i, h]) == pytest.approx(expected, abs=1e-10)
    assert bool((result[~mask] == 0).all())


def test_anchors_that_never_repeat_leave_the_episode_alone():
    rewards = torch.tensor([[[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]]], dtype=torch.float64)
    mask = torch.ones_like(rewards).bool()
    result = adv.episode_and_anchor_standardized(rewards, mask=mask, anchors=torch.arange(6).view(1, 3, 2))
    torch.testing.assert_close(result, adv.spread_over_tokens(adv.standardized(rewards.sum(-1)), mask))


@given(batch=batches())
def test_candidates_are_standardised_within_their_turn(batch):
    rewards, mask, _, _ = batch
    result = adv.same_state_standardized(rewards, mask=mask)
    for p, i, h in places(mask):
        pool = [float(rewards[p, j, h]) for j in range(mask.shape[1]) if mask[p, j, h]]
        assert float(result[p, i, h]) == pytest.approx(z_score(float(rewards[p, i, h]), pool), abs=1e-10)
    assert bool((result[~mask] == 0).all())


def inputs_for(name: str, mask: Tensor) -> dict[str, Tensor]:
    every = {"outcome_rewards": torch.full(mask.shape[:2], 0.1), "anchors": torch.zeros(mask.shape).long()}
    return {need: every[need] for need in ESTIMATORS[name].needs}


@pytest.mark.parametrize("name", sorted(set(TURN_ROWS) - {"gigpo"}))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_equal_rollouts_get_exactly_zero(name, dtype, scale):
    rewards = torch.tensor([0.1, 0.7, 0.3], dtype=dtype).mul(scale).expand(1, 5, 3)
    mask = torch.ones(1, 5, 3).bool()
    assert bool((estimate(name, rewards, mask=mask, **inputs_for(name, mask)) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_rollouts_at_distinct_states_get_exactly_zero_from_anchors(dtype):
    rewards = torch.tensor([[[0.1, 0.2], [0.3, 0.0], [0.2, 0.1]]], dtype=dtype)  # equal returns, up to rounding
    mask = torch.ones(1, 3, 2).bool()
    result = adv.episode_and_anchor_standardized(rewards, mask=mask, anchors=torch.arange(6).view(1, 3, 2))
    assert bool((result == 0).all())


@pytest.mark.parametrize("name", TURN_ROWS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_inside_the_mask_must_be_finite(name, bad):
    mask = torch.ones(1, 2, 2).bool()
    with pytest.raises(ScoregramError, match="turn_rewards must be finite"):
        estimate(name, torch.tensor([[[1.0, bad], [0.0, 1.5]]]), mask=mask, **inputs_for(name, mask))


@pytest.mark.parametrize("name", TURN_ROWS)
def test_a_rollout_out_of_the_mask_counts_for_nothing(name):
    rewards = torch.tensor([[[1.0, 2.0], [math.nan, math.nan], [0.0, 1.5]]])
    mask, kept = rewards.isfinite(), [0, 2]
    result = estimate(name, rewards, mask=mask, **inputs_for(name, mask))
    fewer = {k: v[:, kept] for k, v in inputs_for(name, mask).items()}
    assert bool((result[0, 1] == 0).all()) and result.dtype == rewards.dtype
    torch.testing.assert_close(result[:, kept], estimate(name, rewards[:, kept], mask=mask[:, kept], **fewer))


@pytest.mark.parametrize("name", TURN_ROWS)
def test_advantages_are_constants_to_autograd(name):
    rewards = torch.tensor([[[1.0, 2.0], [0.0, 1.5], [0.5, 0.0]]]).requires_grad_()
    mask = torch.ones(1, 3, 2).bool()
    extra = inputs_for(name, mask)
    extra = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in extra.items()}
    assert not estimate(name, rewards, mask=mask, **extra).requires_grad


@pytest.mark.parametrize("name", ["mt-grpo", "gigpo"])
def test_one_rollout_with_turns_has_nothing_to_be_compared_with(name):
    mask = torch.tensor([[[True, True], [False, False]]])
    with pytest.raises(ScoregramError, match="at least 2 observed rollouts in a group, got 1 in prompt 0"):
        estimate(name, torch.zeros(1, 2, 2), mask=mask, **inputs_for(name, mask))


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_are_refused_in_words():
    mask, rewards = torch.ones(1, 2, 2).bool(), torch.zeros(1, 2, 2)
    with pytest.raises(ScoregramError, match="anchors must have the shape of mask"):
        adv.episode_and_anchor_standardized(rewards, mask=mask, anchors=torch.zeros(1, 2, 3).long())
    with pytest.raises(ScoregramError, match="outcome_rewards must have the shape"):
        adv.turn_and_outcome_standardized(rewards, mask=mask, outcome_rewards=torch.zeros(1, 3))
