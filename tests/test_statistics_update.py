"""Update, conflict and held-out effect, each against the scores themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.statistics import (
    cosine_matrix,
    group_blocks,
    held_out_effect,
    prompt_conflict,
    prompt_shares,
    prompt_update_gram,
    rollout_shares,
    update_coherence,
    update_norm,
)


def scores_and_weights(rollouts: int, parameters: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rollouts, parameters, generator=generator, dtype=torch.float64)
    return scores, torch.randn(rollouts, generator=generator, dtype=torch.float64)


batches = st.builds(scores_and_weights, st.integers(1, 7), st.integers(1, 5), st.integers(0, 10_000))


@given(batch=batches, scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_norm_coherence_and_shares_match_the_update_itself(batch, scale):
    scores, weights = batch
    weights = weights * scale
    gram, pulls = scores @ scores.T, weights[:, None] * scores
    update = pulls.sum(dim=0)
    assert update_norm(gram, weights) == pytest.approx(float(update.norm()), rel=1e-6)
    energy = float((pulls**2).sum())
    assert update_coherence(gram, weights) == pytest.approx(float(update @ update) / (len(weights) * energy), rel=1e-6)
    torch.testing.assert_close(rollout_shares(gram, weights), pulls @ update / (update @ update), rtol=1e-6, atol=1e-9)


@given(batch=batches)
def test_cosines_match_the_definition(batch):
    scores, _ = batch
    cosines = cosine_matrix(scores @ scores.T)
    for i, a in enumerate(scores):
        for j, b in enumerate(scores):
            assert float(cosines[i, j]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-12)


def test_a_zero_score_has_no_direction():
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]).double()
    cosines = cosine_matrix(scores @ scores.T)
    assert bool(cosines[1].isnan().all()) and bool(cosines[:, 1].isnan().all())


@pytest.mark.parametrize("weights", [torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])])
def test_no_update_has_no_shares(weights):
    gram = torch.ones(3, 3)  # one score three times: weights that sum to zero cancel
    assert update_norm(gram, weights) == 0
    assert bool(rollout_shares(gram, weights).isnan().all())
    assert bool(prompt_shares(gram, weights, torch.tensor([0, 0, 2])).isnan().all())


def test_shares_of_what_only_rounding_leaves_are_undefined():
    gram, weights = torch.ones(3, 3), torch.tensor([0.1, 0.2, -0.3])  # float32: the weights sum to a rest, not to zero
    assert float(weights.double().sum()) ** 2 > 0
    assert bool(rollout_shares(gram, weights).isnan().all())
    assert float(rollout_shares(gram, weights, rtol=0.0).sum()) == pytest.approx(1)


def test_readings_at_the_extremes():
    same, apart = torch.ones(4, 4), torch.eye(4)
    assert update_coherence(same, torch.ones(4)) == 1
    assert update_coherence(apart, torch.ones(4)) == 1 / 4
    assert update_coherence(same, torch.tensor([1.0, -1.0, 1.0, -1.0])) == 0
    assert math.isnan(update_coherence(same, torch.zeros(4)))


def test_rounding_below_zero_is_zero_and_more_is_an_error():
    nearly = torch.tensor([[1.0, 1.0 + 1e-8], [1.0 + 1e-8, 1.0]]).double()
    against = torch.tensor([1.0, -1.0])
    assert update_norm(nearly, against) == 0
    with pytest.raises(ScoregramError, match="wᵀKw must not be negative"):
        update_norm(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), against)
    with pytest.raises(ScoregramError, match="cosines must lie"):
        cosine_matrix(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))


@given(batch=batches, data=st.data())
def test_prompts_match_their_own_updates(batch, data):
    scores, weights = batch
    prompt_of = torch.tensor([data.draw(st.integers(0, len(weights) - 1)) for _ in weights])
    gram, pulls = scores @ scores.T, weights[:, None] * scores
    updates = torch.stack([pulls[prompt_of == p].sum(dim=0) for p in range(int(prompt_of.max()) + 1)])
    torch.testing.assert_close(
        prompt_update_gram(gram, weights, prompt_of), updates @ updates.T, rtol=1e-10, atol=1e-12
    )
    whole = updates.sum(dim=0)
    shares = prompt_shares(gram, weights, prompt_of)
    torch.testing.assert_close(shares, updates @ whole / (whole @ whole), rtol=1e-6, atol=1e-9)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-9)

    conflict = prompt_conflict(gram, weights, prompt_of)
    pulling = [u for u in updates if float(u.norm()) > 0]
    pairs = [(float(a @ b), float(a.norm() * b.norm())) for i, a in enumerate(pulling) for b in pulling[:i]]
    if pairs:
        assert conflict.conflicting == pytest.approx(sum(ab < 0 for ab, _ in pairs) / len(pairs))
    else:
        assert math.isnan(conflict.conflicting)
    gained = sum(float(u @ u) for u in pulling) + 2 * sum(max(ab, 0.0) for ab, _ in pairs)
    assert gained * (1 - conflict.cancelled) == pytest.approx(float(whole @ whole), rel=1e-6, abs=1e-9)
    assert 0 <= conflict.cancelled <= 1


def test_opposed_equal_prompts_annul_each_other():
    gram, prompt_of = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([0, 1])
    conflict = prompt_conflict(gram, torch.ones(2), prompt_of)
    assert (conflict.conflicting, conflict.cancelled) == (1, 1)
    assert float(conflict.cosines[0, 1]) == -1
    assert math.isnan(prompt_conflict(gram, torch.zeros(2), prompt_of).cancelled)


def test_a_prompt_that_cancels_inside_does_not_pull():
    scores = torch.tensor([[0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [1.0, 2.0], [-2.0, 1.0]]).double()
    weights = torch.tensor([0.1, 0.2, -0.3, 1.0, 1.0])  # float32: 0.1 + 0.2 - 0.3 is not quite zero
    conflict = prompt_conflict(scores @ scores.T, weights, torch.tensor([0, 0, 0, 1, 2]))
    assert bool(conflict.cosines[0].isnan().all())
    assert conflict.conflicting == 0 and conflict.cancelled == 0  # the two that are left are orthogonal


def test_held_out_effect_is_the_first_order_change_of_an_exact_objective():
    """A softmax over four rollouts: held-out expected rewards before and after a small step."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    theta = torch.randn(3, generator=generator, dtype=torch.float64)
    rewards = torch.randn(2, 4, generator=generator, dtype=torch.float64)  # two held-out prompts, one policy

    def expected_rewards(parameters: torch.Tensor) -> torch.Tensor:
        return rewards @ torch.softmax(features @ parameters, dim=0)

    chances = torch.softmax(features @ theta, dim=0)
    scores = features - chances @ features  # ∇ log softmax of each rollout
    weights = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=torch.float64)
    held = scores.repeat(2, 1)
    effect = held_out_effect(
        held @ scores.T,
        weights,
        (rewards * chances).flatten(),  # Σ_j p_j r_j ψ_j is the gradient, exactly
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        learning_rate=2,
    )
    step, h = 2 * weights @ scores, 1e-5
    slope = (expected_rewards(theta + h * step) - expected_rewards(theta - h * step)) / (2 * h)
    torch.testing.assert_close(effect.per_prompt, slope, rtol=1e-7, atol=1e-9)
    assert effect.total == pytest.approx(float(slope.sum()), rel=1e-7)
    assert effect.helped == float((slope > 0).double().mean())


def test_blocks_are_the_groups_own_grams():
    scores, _ = scores_and_weights(6, 4, 0)
    blocks = group_blocks(scores @ scores.T, 3)
    for block, group in zip(blocks, (scores[:3], scores[3:]), strict=True):
        torch.testing.assert_close(block, group @ group.T)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: update_norm(torch.eye(2), torch.ones(3)), "one weight for each of 2"),
        (lambda: update_norm(torch.eye(2), torch.tensor([1.0, math.nan])), "weights must be finite"),
        (lambda: update_norm(torch.full((2, 2), math.inf), torch.ones(2)), "the Gram must be finite"),
        (lambda: update_coherence(torch.zeros(0, 0), torch.zeros(0)), "not empty"),
        (lambda: prompt_shares(torch.eye(2), torch.ones(2), torch.tensor([0, 7])), "0 … 1, got 0 … 7"),
        (lambda: prompt_shares(torch.eye(2), torch.ones(2), torch.tensor([-1, 0])), "got -1 … 0"),
        (lambda: prompt_conflict(torch.eye(2), torch.ones(2), torch.tensor([0])), "one prompt for each of 2"),
        (lambda: group_blocks(torch.eye(5), 2), "multiple of the group size"),
        (lambda: group_blocks(torch.eye(4), 0), "multiple of the group size"),
        (
            lambda: held_out_effect(torch.zeros(0, 2), torch.ones(2), torch.ones(0), torch.zeros(0).long()),
            "held-out rollout",
        ),
        (lambda: held_out_effect(torch.ones(1, 2), torch.ones(1), torch.ones(1), torch.tensor([0])), "each of 2"),
        (lambda: held_out_effect(torch.ones(1, 2), torch.ones(2), torch.ones(2), torch.tensor([0])), "each of 1"),
        (
            lambda: held_out_effect(
                torch.ones(1, 2), torch.ones(2), torch.ones(1), torch.tensor([0]), learning_rate=math.nan
            ),
            "learning_rate must be finite",
        ),
    ],
)
def test_errors_say_what_was_received(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)


def test_inputs_are_left_alone():
    scores, weights = scores_and_weights(4, 3, 1)
    gram, before = scores @ scores.T, weights.clone()
    kept = gram.clone()
    prompt_of = torch.tensor([0, 0, 1, 1])
    prompt_conflict(gram, weights, prompt_of)
    rollout_shares(gram, weights)
    assert torch.equal(gram, kept) and torch.equal(weights, before)
