"""The sampling distribution of the next token: how tokens are drawn from it, and how far it is from the policy."""

import warnings
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy.config import SamplingConfig
from scoregram.policy.log_probs import completion_logits
from scoregram.policy.models import evaluating
from scoregram.rollouts import Rollouts

SHORT_VOCABULARY = 2048
"""Vocabularies up to this size are searched by one cumulative sum, larger ones block by block."""
VOCABULARY_BLOCK = 256


class BiasedSamplingWarning(UserWarning):
    """Rollouts are not drawn from the policy whose scores are taken, so the scores do not average to zero."""


@dataclass(frozen=True)
class DrawnTokens:
    """One token per row."""

    token: Int[Tensor, " batch"]
    log_prob: Float[Tensor, " batch"]
    """Log-probability under the policy at the sampling temperature; at temperature 1 for greedy decoding."""
    behaviour: Float[Tensor, " batch"]
    """Log-probability under the distribution that the token was drawn from."""


def draw_tokens(
    logits: Float[Tensor, "batch vocabulary"], uniforms: Float[Tensor, " batch"], sampling: SamplingConfig
) -> DrawnTokens:
    """The token at which the cumulative distribution first exceeds the row's uniform number.

    Log-probabilities are computed in float32, or in the dtype of the logits if that is wider; sums in float64. A token
    of probability 0 is never drawn.

    Args:
        logits: `(N, V)`, of any floating dtype.
        uniforms: `(N,)` float64 from `uniform_numbers`; not read at temperature 0.
        sampling: Temperature and truncation.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        token = scores.argmax(-1)
        log_prob = _at_tokens(scores.log_softmax(-1), token)
        return DrawnTokens(token, log_prob, torch.zeros_like(log_prob))
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    log_probs = scores.log_softmax(-1)
    if not sampling.truncates:
        token = invert_cdf(log_probs.exp(), uniforms)
        log_prob = _at_tokens(log_probs, token)
        return DrawnTokens(token, log_prob, log_prob)
    kept = truncation(scores, sampling.top_k, sampling.top_p)
    behaviour = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
    token = invert_cdf(behaviour.exp(), uniforms)
    return DrawnTokens(token, _at_tokens(log_probs, token), _at_tokens(behaviour, token))


def uniform_numbers(
    *shape: int, generator: torch.Generator | None, device: torch.device | None = None
) -> Float[Tensor, "..."]:
    """Numbers in `[0, 1)` for `draw_tokens`, far enough below 1 that `u Σw`, once rounded, is less than `Σw`.

    A generator on the CPU gives the same numbers for every device.
    """
    source = torch.device("cpu") if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float64, generator=generator, device=source).mul_(1 - 2**-52).to(device)


def _at_tokens(scores: Tensor, token: Tensor) -> Tensor:
    return scores.gather(1, token[:, None])[:, 0]


def truncation(scores: Float[Tensor, "batch vocabulary"], top_k: int, top_p: float) -> Bool[Tensor, "batch vocabulary"]:
    """Which tokens may be drawn: first top-k, then top-p of the renormalised rest.

    Top-k keeps every token that scores no less than the k-th best. Top-p keeps the shortest run of tokens, from the
    most probable down, whose probabilities sum to at least `top_p`; among equals the smaller id comes first.
    """
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < scores.shape[1]:
        keep = scores >= scores.topk(top_k, dim=1).values[:, -1:]
    if top_p < 1:
        ordered, order = scores.masked_fill(~keep, -torch.inf).sort(dim=1, descending=True, stable=True)
        probabilities = ordered.softmax(1, dtype=torch.float64)
        before = probabilities.cumsum(1) - probabilities
        inside = (before < top_p) & (probabilities > 0)
        keep = torch.zeros_like(keep).scatter(1, order, inside)
    return keep


def invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose interval of the cumulative distribution contains `u`, one per row of `(N, V)` weights."""
    size = weights.shape[1]
    if size <= SHORT_VOCABULARY:
        return _first_above(weights.cumsum(1, dtype=torch.float64), uniforms)
    # One scan over a large vocabulary is slow on a GPU: find the block of tokens first, then the token in it.
    padded = F.pad(weights, (0, -size % VOCABULARY_BLOCK)) if size % VOCABULARY_BLOCK else weights
    blocks = padded.view(len(weights), ceil(size / VOCABULARY_BLOCK), VOCABULARY_BLOCK)
    ends = blocks.sum(2).cumsum(1, dtype=torch.float64)
    block = _first_above(ends, uniforms)[:, None]
    end = ends.gather(1, block)[:, 0]
    start = F.pad(ends, (1, 0)).gather(1, block)[:, 0]
    # The position of `u` in its block is again uniform in [0, 1), and is clamped as far below 1 as `u`.
    inside = ((uniforms * ends[:, -1] - start) / (end - start)).clamp(0, 1 - 2**-52)
    picked = blocks.gather(1, block[:, :, None].expand(-1, 1, VOCABULARY_BLOCK))[:, 0]
    return block[:, 0] * VOCABULARY_BLOCK + _first_above(picked.cumsum(1, dtype=torch.float64), inside)


def _first_above(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """First index at which a row of `(N, V)` cumulative sums exceeds `u` times its total; the last for a row of NaN."""
    targets = (uniforms * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)


def warn_of_bias(sampling: SamplingConfig) -> None:
    """Warn if the scores of rollouts drawn with these settings do not average to zero.

    `E[∇ log π] = 0` holds for rollouts drawn from `π` itself. Sampling at temperature `τ` draws from `π_τ`, whose own
    scores do average to zero: taking scores at the same temperature removes the bias. Under top-k or top-p no
    temperature does. Greedy rollouts give no warning: they serve evaluation and baselines, and are not scored.
    """
    if sampling.truncates:
        warnings.warn(
            "sample: top-k and top-p exclude tokens that the policy would draw. Scores do not average to zero "
            "(E[ψ] ≠ 0) and policy gradients are biased; score_mean_bias measures by how much.",
            BiasedSamplingWarning,
            stacklevel=3,
        )
    elif sampling.temperature not in (0, 1):
        warnings.warn(
            f"sample: at temperature {sampling.temperature:g} scores average to zero (E[ψ] = 0) only if they are taken "
            f"at temperature {sampling.temperature:g} too; those of the policy at temperature 1 do not.",
            BiasedSamplingWarning,
            stacklevel=3,
        )


@dataclass(frozen=True)
class ScoreBias:
    """The mean score at every completion position of given rollouts; 0 outside completions."""

    total_variation: Float[Tensor, "batch tokens"]
    """`½ Σ_a |q(a) - π(a)|`, in [0, 1]: the probability that the drawn token is not the one the policy would draw."""
    logit_norm: Float[Tensor, "batch tokens"]
    """`|E_q[∇_logits log π]| = |q - π| / τ`: norm of the mean score with respect to the logits; 0 without bias."""
    completion_mask: Bool[Tensor, "batch tokens"]


def score_mean_bias(
    model: Any, rollouts: Rollouts, sampling: SamplingConfig, *, scored_temperature: float = 1.0
) -> ScoreBias:
    """The size of the mean score at every position of given rollouts, computed exactly, without sampling.

    A token drawn from `q` (tempered by `sampling`, then truncated) and scored under `π = softmax(logits / τ)` has the
    mean score `E_q[∇_logits log π(a)] = (q - π) / τ` with respect to the logits, in float32 or wider. It is zero at
    every position if and only if `q = π`: no truncation, and the same temperature for sampling and scoring. The
    gradient with respect to the parameters is this vector times the Jacobian of the logits.

    Args:
        model: A causal language model.
        rollouts: Their completion positions are evaluated.
        sampling: How tokens are drawn; temperature 0 puts all of `q` on the most probable token.
        scored_temperature: `τ`, the temperature at which scores are taken.

    Raises:
        ScoregramError: If `scored_temperature` is not positive.
    """
    if not scored_temperature > 0:
        fail("score_mean_bias", "scored_temperature must be positive", scored_temperature, "Pass 1 for the policy.")
    ids, mask = rollouts.input_ids, rollouts.completion_mask
    variation, norm = (torch.zeros(ids.shape, device=ids.device) for _ in range(2))
    with evaluating(model):
        for row in range(len(ids)):  # one row at a time: distributions over the whole vocabulary are large
            here = slice(row, row + 1)
            logits = completion_logits(model, ids[here], rollouts.attention_mask[here], mask[here])
            difference = _sampling_probabilities(logits, sampling) - (logits / scored_temperature).softmax(1)
            variation[row, mask[row]] = difference.abs().sum(1).float() / 2
            norm[row, mask[row]] = difference.norm(dim=1).float() / scored_temperature
    return ScoreBias(variation, norm, mask)


def _sampling_probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """`(n, V)` probabilities with which tokens are drawn."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
    scores = logits / sampling.temperature
    return scores.masked_fill(~truncation(scores, sampling.top_k, sampling.top_p), -torch.inf).softmax(1)
