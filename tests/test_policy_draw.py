"""Choosing a token by one uniform number, against sums over a list."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scoregram.policy import draw as drawing
from scoregram.policy.config import SamplingConfig
from scoregram.policy.draw import draw_tokens, invert_cdf, truncation, uniform_numbers


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_token(weights: list[float], uniform: float) -> int:
    """The first token at which the running sum exceeds the share `uniform` of the whole."""
    target, so_far = uniform * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        so_far += weight
        if so_far > target:
            return token
    raise AssertionError("a uniform number below 1 falls into some share")


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 255, 256, 257, 1000, 2048, 2049, 5000])
def test_a_token_is_drawn_by_its_share(vocabulary):
    weights = logits_of(40, vocabulary).softmax(1)
    uniforms = uniform_numbers(40, generator=torch.Generator().manual_seed(1))
    expected = [naive_token(row, u) for row, u in zip(weights.tolist(), uniforms.tolist(), strict=True)]
    assert invert_cdf(weights, uniforms).tolist() == expected


@pytest.mark.parametrize("short", [0, 10_000])
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0, 3.0]), min_size=1, max_size=600),
    uniform=st.sampled_from([0.0, 2**-53, 0.5, 1 - 2**-53]),
)
def test_a_token_without_weight_is_never_drawn(short, weights, uniform):
    if not any(weights):
        return
    before, drawing.SHORT_VOCABULARY = drawing.SHORT_VOCABULARY, short
    try:
        token = int(invert_cdf(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64) * (1 - 2**-52)))
    finally:
        drawing.SHORT_VOCABULARY = before
    assert weights[token] > 0
    if uniform == 0:
        assert token == next(index for index, weight in enumerate(weights) if weight > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probabilities_are_exact_for_the_logits_given(dtype, temperature):
    logits = logits_of(16, 300).to(dtype)
    uniforms = uniform_numbers(16, generator=torch.Generator().manual_seed(2))
    found = draw_tokens(logits, uniforms, SamplingConfig(1, temperature=temperature))
    exact = (logits.double() / temperature).log_softmax(1).gather(1, found.token[:, None])[:, 0]
    torch.testing.assert_close(found.log_prob.double(), exact, rtol=1e-5, atol=1e-5)
    assert found.behaviour is found.log_prob


def test_greedy_takes_the_best_and_had_no_choice():
    logits = logits_of(8, 50)
    found = draw_tokens(logits, torch.zeros(8, dtype=torch.float64), SamplingConfig(1, temperature=0.0))
    assert found.token.tolist() == logits.argmax(1).tolist()
    torch.testing.assert_close(found.log_prob, logits.log_softmax(1).amax(1))
    assert not found.behaviour.any()


def naive_kept(scores: list[float], top_k: int, top_p: float) -> set[int]:
    """Top-k with ties, then the shortest run of the rest that holds `top_p` of its probability."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if top_k:
        ranked = [token for token in ranked if scores[token] >= scores[ranked[min(top_k, len(ranked)) - 1]]]
    weights = {token: math.exp(scores[token] - scores[ranked[0]]) for token in ranked}
    if top_p == 1:
        return set(ranked)
    whole = math.fsum(weights.values())
    for size in range(1, len(ranked) + 1):
        if math.fsum(weights[token] for token in ranked[:size]) >= top_p * whole * (1 - 1e-12):
            return set(ranked[:size])
    return set(ranked)


@given(
    scores=st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
)
@example(scores=[0.0, 0.0], top_k=0, top_p=0.5)
def test_truncation_keeps_what_its_definition_keeps(scores, top_k, top_p):
    kept = truncation(torch.tensor([scores], dtype=torch.float64), top_k, top_p)[0]
    assert set(kept.nonzero()[:, 0].tolist()) == naive_kept(scores, top_k, top_p)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}])
def test_truncated_draws_know_both_probabilities(settings):
    sampling = SamplingConfig(1, **settings)
    logits = logits_of(64, 20)
    found = draw_tokens(logits, uniform_numbers(64, generator=torch.Generator().manual_seed(3)), sampling)
    scores = logits / sampling.temperature
    for row in range(64):
        kept = naive_kept(scores[row].tolist(), sampling.top_k, sampling.top_p)
        token = int(found.token[row])
        assert token in kept
        inside = torch.logsumexp(scores[row, sorted(kept)], 0)
        torch.testing.assert_close(found.behaviour[row], scores[row, token] - inside)
        torch.testing.assert_close(found.log_prob[row], scores[row, token] - torch.logsumexp(scores[row], 0))


def test_uniform_numbers_come_from_the_generator_alone():
    state = torch.random.get_rng_state()
    first, again = (uniform_numbers(3, 4, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again) and first.dtype == torch.float64
    assert torch.equal(state, torch.random.get_rng_state())
    assert float(first.min()) >= 0 and float(first.max()) < 1
