"""Token estimators against loops over single tokens, with gaps in the mask and garbage outside it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram import advantages as adv
from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import ScoregramError

TOKEN_ROWS = sorted(name for name, row in ESTIMATORS.items() if row.level == "token")


@st.composite
def batches(draw):
    shape = draw(st.tuples(st.integers(1, 2), st.integers(2, 3), st.integers(2, 6)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, :, 0] = True
    mask[:, :, 1] = True
    picks = lambda: torch.randint(-4, 5, shape, generator=generator).double() / 4  # noqa: E731
    return picks(), mask, picks(), (torch.rand(shape, generator=generator) < 0.4) & mask


def with_garbage(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, math.nan)


def each_rollout(mask: Tensor):
    for p in range(mask.shape[0]):
        for i in range(mask.shape[1]):
            yield p, i, mask[p, i].nonzero().flatten().tolist()


@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_generalized_advantage_is_the_sum_of_decayed_differences(batch, gamma, lam):
    rewards, mask, values, _ = batch
    expected = torch.zeros_like(rewards)
    for p, i, on in each_rollout(mask):
        r, v = rewards[p, i, on].tolist(), [*values[p, i, on].tolist(), 0.0]
        for k in range(len(on)):
            later = range(k, len(on))
            expected[p, i, on[k]] = sum((gamma * lam) ** (m - k) * (r[m] + gamma * v[m + 1] - v[m]) for m in later)
    masked = with_garbage(rewards, mask), with_garbage(values, mask)
    actual = adv.generalized_advantage(masked[0], mask=mask, values=masked[1], gamma=gamma, lam=lam)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_generalized_advantage_decays_by_95_percent_a_token_unless_told_otherwise():
    rewards = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    mask, values = torch.ones(1, 2, 3).bool(), torch.zeros(1, 2, 3, dtype=torch.float64)
    actual = estimate("gae", rewards, mask=mask, values=values)
    assert actual[0, 0].tolist() == pytest.approx([0.95**2, 0.95, 1.0], rel=1e-14)


@given(batch=batches(), ddof=st.integers(0, 1), eps=st.sampled_from([0.0, 0.1]))
def test_whitened_advantages_are_standardised_over_every_token_of_the_batch(batch, ddof, eps):
    rewards, mask, values, _ = batch
    plain = adv.generalized_advantage(rewards, mask=mask, values=values, gamma=0.9, lam=0.5)
    among = plain[mask].tolist()
    mean = sum(among) / len(among)
    spread = math.sqrt(sum((a - mean) ** 2 for a in among) / (len(among) - ddof))
    expected = torch.zeros_like(rewards)
    for p, i, on in each_rollout(mask):
        for t in on:
            expected[p, i, t] = (float(plain[p, i, t]) - mean) / (spread + eps) if spread > 1e-12 else 0.0
    masked = with_garbage(rewards, mask), with_garbage(values, mask)
    options = {"gamma": 0.9, "lam": 0.5, "eps": eps, "ddof": ddof}
    actual = adv.whitened_generalized_advantage(masked[0], mask=mask, values=masked[1], **options)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@given(batch=batches())
def test_whitening_of_trl_and_verl_differs_by_its_1e_8_alone(batch):
    rewards, mask, values, _ = batch
    plain = adv.generalized_advantage(rewards, mask=mask, values=values)[mask]
    if float(plain.var()) < 1e-3:
        return
    theirs = (plain - plain.mean()) * torch.rsqrt(plain.var() + 1e-8)
    torch.testing.assert_close(
        estimate("gae-whitened", rewards, mask=mask, values=values)[mask], theirs, rtol=1e-5, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_equal_advantages_and_single_tokens_are_whitened_to_zero(scale, dtype):
    """A critic that is wrong by the same amount everywhere, or by rounding, leaves nothing to scale up to 1."""
    mask = torch.tensor([[[True, False, True], [True, True, True]]])
    rewards = torch.zeros(1, 2, 3, dtype=dtype)
    rewards[..., -1] = 0.1 * scale
    values = torch.full((1, 2, 3), 0.3 * scale, dtype=dtype)
    assert bool((adv.whitened_generalized_advantage(rewards, mask=mask, values=values, lam=1.0) == 0).all())
    known = torch.full_like(values, 0.1 * scale)
    known[0, 0] = torch.nextafter(known[0, 0], torch.tensor(math.inf, dtype=dtype))
    assert bool((adv.whitened_generalized_advantage(rewards, mask=mask, values=known, lam=1.0) == 0).all())
    alone = torch.tensor([[[False, True, False], [False, False, False]]])
    assert bool((adv.whitened_generalized_advantage(rewards, mask=alone, values=values) == 0).all())
    assert bool((adv.whitened_generalized_advantage(rewards, mask=alone & False, values=values) == 0).all())


@given(batch=batches())
def test_monte_carlo_critic_is_reward_to_go_minus_value(batch):
    rewards, mask, values, _ = batch
    expected = torch.zeros_like(rewards)
    for p, i, on in each_rollout(mask):
        for k, t in enumerate(on):
            expected[p, i, t] = rewards[p, i, on[k:]].sum() - values[p, i, t]
    torch.testing.assert_close(adv.monte_carlo_critic(rewards, mask=mask, values=values), expected)


@given(batch=batches())
def test_prefix_values_telescope(batch):
    rewards, mask, values, _ = batch
    result = adv.prefix_value_differences(rewards, mask=mask, prefix_values=with_garbage(values, mask))
    for p, i, on in each_rollout(mask):
        v = [*values[p, i, on].tolist(), 0.0]
        for k, t in enumerate(on):
            assert float(result[p, i, t]) == pytest.approx(float(rewards[p, i, t]) + v[k + 1] - v[k], abs=1e-12)
        assert float(result[p, i].sum()) == pytest.approx(float(rewards[p, i, on].sum()) - v[0], abs=1e-12)


@given(batch=batches())
def test_segments_share_the_gain_between_their_ends(batch):
    rewards, mask, values, starts = batch
    read = torch.where(starts, values, math.nan)  # nothing but starts, and the first token, may be read
    expected = torch.zeros_like(rewards)
    for p, i, on in each_rollout(mask):
        read[p, i, on[0]] = values[p, i, on[0]]
        cuts = [k for k, t in enumerate(on) if k == 0 or bool(starts[p, i, t])]
        for begin, end in zip(cuts, [*cuts[1:], len(on)], strict=True):
            after = float(values[p, i, on[end]]) if end < len(on) else 0.0
            gain = float(rewards[p, i, on[begin:end]].sum()) + after - float(values[p, i, on[begin]])
            expected[p, i, on[begin:end]] = gain
    result = adv.segment_value_differences(
        with_garbage(rewards, mask), mask=mask, prefix_values=read, segment_starts=starts
    )
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@given(batch=batches())
def test_segments_of_one_token_are_prefix_values(batch):
    rewards, mask, values, _ = batch
    torch.testing.assert_close(
        adv.segment_value_differences(rewards, mask=mask, prefix_values=values, segment_starts=mask),
        adv.prefix_value_differences(rewards, mask=mask, prefix_values=values),
    )


@given(batch=batches(), ddof=st.integers(0, 1))
def test_process_rewards_are_pooled_over_the_group_and_summed_forward(batch, ddof):
    rewards, mask, _, ends = batch
    ends = ends | (mask & (mask.cumsum(-1) == 1))  # at least one step in every rollout
    expected = torch.zeros_like(rewards)
    for p in range(len(rewards)):
        pooled = rewards[p][ends[p]]
        std = pooled.std(correction=ddof)
        for i in range(rewards.shape[1]):
            for t in mask[p, i].nonzero().flatten().tolist():
                later = [rewards[p, i, k] for k in range(t, rewards.shape[2]) if ends[p, i, k]]
                if float(std) > 1e-12:
                    expected[p, i, t] = sum(float((r - pooled.mean()) / std) for r in later)
    actual = adv.process_rewards_to_go(torch.where(ends, rewards, math.nan), mask=mask, step_ends=ends, ddof=ddof)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_equal_step_rewards_give_exactly_zero(scale):
    mask = torch.ones(1, 3, 5).bool()
    rewards = torch.full((1, 3, 5), 0.1 * scale, dtype=torch.float64)
    assert bool((adv.process_rewards_to_go(rewards, mask=mask, step_ends=mask) == 0).all())


def test_uniform_credit_is_zero_outside_the_mask():
    mask = torch.tensor([[[True, False, True], [False, False, False]]])
    spread = adv.spread_over_tokens(torch.tensor([[2.0, 3.0]]), mask)
    assert spread.tolist() == [[[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]]


@given(batch=batches(), alone=st.booleans())
def test_path_energies_weigh_the_rewards_to_go_of_the_same_token(batch, alone):
    rewards, mask, drawn, _ = batch
    energies = drawn.square()
    name = "path_energy_weighted_leave_one_out" if alone else "path_energy_weighted"
    found = getattr(adv, name)(with_garbage(rewards, mask), mask=mask, path_energies=with_garbage(energies, mask))
    expected = torch.zeros_like(rewards)
    for p, i, tokens in each_rollout(mask):
        for k, t in enumerate(tokens):
            to_go, weights = [], []
            for j in range(mask.shape[1]):
                own = mask[p, j].nonzero().flatten().tolist()
                if len(own) > k and not (alone and j == i):
                    to_go.append(float(sum(rewards[p, j, s] for s in own[k:])))
                    weights.append(float(energies[p, j, own[k]]))
            weights = weights if sum(weights) > 0 else [1.0] * len(weights)
            level = sum(w * g for w, g in zip(weights, to_go, strict=True)) / sum(weights) if weights else 0.0
            expected[p, i, t] = float(sum(rewards[p, i, s] for s in tokens[k:])) - level
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_tokens_of_the_longest_rollout_alone():
    """Advantage 0 beside no other rollout; from the others alone there is no baseline, as in verl's default."""
    rewards, mask = torch.zeros(1, 3, 4), torch.tensor([[[True] * 4, [True, True, False, False], [True] + [False] * 3]])
    rewards[0, 0, 3], energies = 1.0, torch.ones(1, 3, 4)
    own = estimate("optimal-token", rewards, mask=mask, path_energies=energies)
    assert own[0, 0].tolist() == pytest.approx([2 / 3, 0.5, 0, 0], rel=1e-6)
    alone = estimate("optimal-token-loo", rewards, mask=mask, path_energies=energies)
    assert alone[0, 0].tolist() == [1, 1, 1, 1]


def inputs_for(name: str, mask: Tensor) -> dict[str, Tensor]:
    every = {
        "values": torch.zeros(mask.shape),
        "prefix_values": torch.zeros(mask.shape),
        "segment_starts": mask,
        "step_ends": mask,
        "path_energies": torch.ones(mask.shape),
        "token_features": torch.arange(mask.numel() * 2.0).view(*mask.shape, 2).sin(),
    }
    return {need: every[need] for need in ESTIMATORS[name].needs}


@pytest.mark.parametrize("name", TOKEN_ROWS)
def test_a_rollout_out_of_the_mask_gets_zero_and_counts_for_nothing(name):
    rewards = torch.tensor([[[1.0, 2.0], [math.nan, math.nan], [0.0, 1.5]]])
    mask = rewards.isfinite()
    result = estimate(name, rewards, mask=mask, **inputs_for(name, mask))
    kept = [0, 2]
    assert bool((result[0, 1] == 0).all()) and result.dtype == rewards.dtype
    fewer = {k: v[:, kept] for k, v in inputs_for(name, mask).items()}
    torch.testing.assert_close(result[:, kept], estimate(name, rewards[:, kept], mask=mask[:, kept], **fewer))


@pytest.mark.parametrize("name", TOKEN_ROWS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_inside_the_mask_must_be_finite(name, bad):
    rewards = torch.tensor([[[1.0, bad], [0.0, 1.5]]])
    mask = torch.ones(1, 2, 2).bool()
    with pytest.raises(ScoregramError, match="token_rewards must be finite"):
        estimate(name, rewards, mask=mask, **inputs_for(name, mask))


@pytest.mark.parametrize("name", TOKEN_ROWS)
def test_advantages_are_constants_to_autograd(name):
    rewards = torch.tensor([[[1.0, 2.0], [0.0, 1.5], [0.5, 0.0]]]).requires_grad_()
    mask = torch.ones(1, 3, 2).bool()
    extra = inputs_for(name, mask)
    extra = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in extra.items()}
    assert not estimate(name, rewards, mask=mask, **extra).requires_grad


ZEROS, FULL = torch.zeros(1, 2, 2), torch.ones(1, 2, 2).bool()
HALF = torch.tensor([[[True, False], [True, False]]])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adv.generalized_advantage(ZEROS, mask=FULL, values=ZEROS, lam=1.5), "lam must lie in"),
        (lambda: adv.generalized_advantage(ZEROS, mask=FULL, values=ZEROS, gamma=math.nan), "gamma must lie in"),
        (lambda: adv.generalized_advantage(ZEROS, mask=FULL, values=ZEROS / 0), "values must be finite"),
        (lambda: adv.whitened_generalized_advantage(ZEROS, mask=FULL, values=ZEROS, eps=-1.0), "eps must be finite"),
        (lambda: adv.whitened_generalized_advantage(ZEROS, mask=FULL, values=ZEROS, ddof=2), "ddof must be 0 or 1"),
        (lambda: adv.generalized_advantage(ZEROS, mask=FULL.long(), values=ZEROS), "mask must be a bool"),
        (lambda: adv.monte_carlo_critic(ZEROS[..., :0], mask=FULL[..., :0], values=ZEROS[..., :0]), "not empty"),
        (lambda: adv.monte_carlo_critic(ZEROS, mask=FULL, values=ZEROS[..., :1]), "values must have the shape of mask"),
        (
            lambda: adv.segment_value_differences(ZEROS, mask=HALF, prefix_values=ZEROS, segment_starts=FULL),
            r"segment_starts must lie inside the mask, got True at index \(0, 0, 1\)",
        ),
        (lambda: adv.process_rewards_to_go(ZEROS, mask=HALF, step_ends=FULL), "step_ends must lie inside"),
        (
            lambda: adv.process_rewards_to_go(ZEROS, mask=FULL, step_ends=FULL & (torch.arange(4).view(1, 2, 2) == 1)),
            "two step rewards in a group, got 1 in prompt 0",
        ),
        (lambda: adv.spread_over_tokens(torch.zeros(1, 3), FULL), "advantages must have the shape"),
    ],
)
def test_refusals_say_what_was_received(call, message):
    with pytest.raises(ScoregramError, match=message):
        call()
