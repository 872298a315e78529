"""Reweighting by gradient geometry against loops over explicit vectors; the library reads inner products alone."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram.advantages import discriminative_tokens, novelty_scaled, residual_amplified
from scoregram.checks import ScoregramError
from tests.naive import discriminative_tokens_by_hand

Vectors = list[list[float]]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def standard(values: list[float]) -> list[float]:
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / spread if spread > 1e-12 else 0.0 for v in values]


def novelty_by_hand(rewards: list[float], vectors: Vectors, strength: float) -> list[float]:
    scaled = []
    for i, own in enumerate(vectors):
        cosines = [
            dot(own, other) / math.sqrt(dot(own, own) * dot(other, other)) for j, other in enumerate(vectors) if j != i
        ]
        novelty = 1 - statistics.fmean([c * c for c in cosines])
        scaled.append(rewards[i] * (1 - strength + 2 * strength * novelty))
    return standard(scaled)


def amplified_by_hand(rewards: list[float], vectors: Vectors, strength: float) -> list[float]:
    """Shared directions from the singular vectors of the stacked scores, not from their Gram."""
    a = standard(rewards)
    stacked = torch.tensor(vectors, dtype=torch.float64)
    left, sizes, _ = torch.linalg.svd(stacked)
    shared = [0.0] * len(a)
    for k in range(len(a)):
        energy = float(sizes[k]) ** 2 if k < len(sizes) else 0.0
        if energy >= float(sizes[0]) ** 2 / 2:
            column = left[:, k].tolist()
            shared = [s + dot(column, a) * c for s, c in zip(shared, column, strict=True)]
    update = [dot(a, [v[d] for v in vectors]) for d in range(len(vectors[0]))]
    pulls = math.fsum(abs(x) * math.sqrt(dot(v, v)) for x, v in zip(a, vectors, strict=True))
    cancelled = 1 - math.sqrt(dot(update, update)) / pulls if pulls > 0 else 0.0
    return [s + (1 + strength * cancelled) * (x - s) for s, x in zip(shared, a, strict=True)]


@pytest.mark.parametrize(
    ("fn", "by_hand"), [(residual_amplified, amplified_by_hand), (novelty_scaled, novelty_by_hand)]
)
@given(size=st.integers(2, 5), seed=st.integers(0, 99), strength=st.sampled_from([0.0, 0.5, 1.0]))
def test_group_advantages_equal_the_formula_over_vectors(fn, by_hand, size, seed, strength):
    vectors, rewards = drawn(seed, 2, size, 4), drawn(seed + 1, 2, size).sign()
    found = fn(rewards, score_grams=vectors @ vectors.mT, strength=strength)
    expected = [by_hand(r.tolist(), v.tolist(), strength) for r, v in zip(rewards, vectors, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9)


@given(prompts=st.integers(1, 2), size=st.integers(2, 4), seed=st.integers(0, 99))
def test_token_advantages_equal_the_formula_over_vectors(prompts, size, seed):
    mask = drawn(seed, prompts, size, 3) > -0.8
    mask[..., 0] = True
    rewards, features = drawn(seed + 1, *mask.shape).round(), drawn(seed + 2, *mask.shape, 4)
    garbage = torch.where(mask, rewards, math.nan)
    found = discriminative_tokens(garbage, mask=mask, token_features=features)
    torch.testing.assert_close(found, discriminative_tokens_by_hand(rewards, mask, features), rtol=1e-7, atol=1e-9)


def test_vectors_with_the_same_inner_products_give_the_same_credit():
    """So the exact form may pass any root of the Gram of the tokens in place of the gradients themselves."""
    mask, rewards, features = torch.ones(1, 3, 2).bool(), drawn(0, 1, 3, 2), drawn(1, 1, 3, 2, 9)
    flat = features.view(6, 9)
    sizes, vectors = torch.linalg.eigh(flat @ flat.mT)
    root = (vectors * sizes.clamp_min(0).sqrt()).view(1, 3, 2, 6)
    plain, rotated = (discriminative_tokens(rewards, mask=mask, token_features=v) for v in (features, root))
    torch.testing.assert_close(plain, rotated, rtol=1e-8, atol=1e-10)


def test_a_token_that_both_sides_share_gets_less_credit_than_one_that_tells_them_apart():
    features = torch.tensor([[[[1.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [0.0, -3.0]]]])  # shared token, telling token
    rewards = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    found = discriminative_tokens(rewards, mask=torch.ones(1, 2, 2).bool(), token_features=features)
    assert bool((found[..., 1].abs() > found[..., 0].abs()).all())


def test_orthogonal_scores_of_equal_norm_leave_the_standardised_rewards():
    rewards, grams = torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.eye(4).unsqueeze(0)
    for fn in (residual_amplified, novelty_scaled):
        torch.testing.assert_close(
            fn(rewards, score_grams=grams)[0], torch.tensor([0.8660, -0.8660, -0.8660, 0.8660]), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (residual_amplified, {"strength": -1.0}, "strength must lie in"),
        (novelty_scaled, {"strength": 1.5}, "strength must lie in"),
        (residual_amplified, {"score_grams": torch.full((1, 2, 2), math.nan)}, "score_grams must be finite"),
        (novelty_scaled, {"score_grams": -torch.eye(2).unsqueeze(0)}, "must not be negative"),
    ],
)
def test_wrong_values_are_named(fn, options, said):
    with pytest.raises(ScoregramError, match=said):
        fn(torch.tensor([[1.0, 0.0]]), **{"score_grams": torch.eye(2).unsqueeze(0), **options})


def test_bounds_of_token_weights_are_checked():
    mask, features = torch.ones(1, 2, 1).bool(), torch.ones(1, 2, 1, 1)
    with pytest.raises(ScoregramError, match="0 < lowest <= highest"):
        discriminative_tokens(torch.zeros(1, 2, 1), mask=mask, token_features=features, lowest=1.3)
