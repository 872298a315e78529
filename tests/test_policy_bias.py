"""The mean score under biased sampling, against sums over the vocabulary and gradients by autograd."""

import warnings

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import BiasedSamplingWarning, SamplingConfig, sample, score_mean_bias
from scoregram.policy.draw import warn_of_bias
from scoregram.rollouts import Rollouts
from tests.cases import build

PROMPTS = [[5, 9, 11], [7]]


def rollouts_of(model, **settings) -> Rollouts:
    request = {"rollouts_per_prompt": 2, "sampling": SamplingConfig(5, **settings), "stop_ids": (17,), "pad_id": 0}
    return sample(model, PROMPTS, generator=torch.Generator().manual_seed(0), **request)


def mean_score(logits: torch.Tensor, chances: torch.Tensor, temperature: float) -> torch.Tensor:
    """`Σ_a q(a) ∇_logits log π(a)`, one gradient per token of the vocabulary."""
    total = torch.zeros_like(logits)
    for token, chance in enumerate(chances.tolist()):
        leaf = logits.clone().requires_grad_()
        total += chance * torch.autograd.grad((leaf / temperature).log_softmax(0)[token], leaf)[0]
    return total


@pytest.mark.filterwarnings("ignore::scoregram.policy.BiasedSamplingWarning")
@pytest.mark.parametrize("scored", [1.0, 0.6])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str
)
def test_the_bias_is_the_mean_gradient(settings, scored):
    model = build("Llama", vocab_size=20)
    sampling, found = SamplingConfig(5, **settings), rollouts_of(model, **settings)
    bias = score_mean_bias(model, found, sampling, scored_temperature=scored)
    for row, column in found.completion_mask.nonzero().tolist():
        ids = found.input_ids[row, :column][None]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        chances = naive_behaviour(logits, sampling)
        expected = mean_score(logits, chances, scored).norm()
        torch.testing.assert_close(float(bias.logit_norm[row, column]), float(expected), atol=1e-6, rtol=1e-5)
        apart = (chances - (logits / scored).softmax(0)).abs().sum() / 2
        torch.testing.assert_close(float(bias.total_variation[row, column]), float(apart), atol=1e-6, rtol=1e-5)
    assert not bias.logit_norm[~found.completion_mask].any()


def naive_behaviour(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """One kind of truncation at a time, by sorting."""
    if sampling.temperature == 0:
        return (logits == logits.max()).double()
    chances = (logits / sampling.temperature).softmax(0)
    order = chances.argsort(descending=True)
    count = sampling.top_k or int((chances[order].cumsum(0) < sampling.top_p).sum()) + 1
    if sampling.top_p == 1 and not sampling.top_k:
        count = len(order)
    kept = torch.zeros_like(chances)
    kept[order[:count]] = chances[order[:count]]
    return kept / kept.sum()


@pytest.mark.filterwarnings("ignore::scoregram.policy.BiasedSamplingWarning")
def test_scores_at_the_sampling_temperature_have_no_bias():
    model = build("Llama")
    for temperature in (0.5, 1.0, 1.7):
        found = rollouts_of(model, temperature=temperature)
        settings = SamplingConfig(5, temperature=temperature)
        bias = score_mean_bias(model, found, settings, scored_temperature=temperature)
        assert float(bias.logit_norm.max()) < 1e-7 and float(bias.total_variation.max()) < 1e-7
    bias = score_mean_bias(model, found, settings)
    assert float(bias.logit_norm[bias.completion_mask].mean()) > 0.01


@pytest.mark.parametrize(
    "settings", [{"top_k": 4}, {"top_p": 0.9}, {"temperature": 0.7}, {"top_k": 2, "temperature": 2.0}]
)
def test_biased_sampling_is_warned_of(settings):
    with pytest.warns(BiasedSamplingWarning, match=r"E\[ψ\]"):
        rollouts_of(build("Llama"), **settings)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}])
def test_unbiased_and_greedy_sampling_are_not(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_bias(SamplingConfig(3, **settings))


def test_no_temperature_to_score_at():
    model = build("Llama")
    with pytest.raises(ScoregramError, match="scored_temperature must be positive, got 0"):
        score_mean_bias(model, rollouts_of(model), SamplingConfig(5), scored_temperature=0.0)
