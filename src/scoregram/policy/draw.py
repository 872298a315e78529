"""Choose a token from logits by one uniform number, and say how probable it was."""

from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.policy.config import SamplingConfig

BELOW_ONE = 1 - 2**-52
"""Largest factor by which a positive float64 surely becomes smaller."""
SHORT = 2048
"""Vocabularies up to this size are searched in one go, longer ones block by block."""
BLOCK = 256


@dataclass(frozen=True)
class Drawn:
    """One token per row."""

    token: Int[Tensor, " batch"]
    log_prob: Float[Tensor, " batch"]
    """Under the policy at the sampling temperature; at temperature 1 for greedy choice."""
    behaviour: Float[Tensor, " batch"]
    """Under what it was drawn from."""


def draw(
    logits: Float[Tensor, "batch vocabulary"], uniforms: Float[Tensor, " batch"], sampling: SamplingConfig
) -> Drawn:
    """The token at which the cumulative distribution first exceeds the row's uniform number.

    Log-probabilities are computed in float32, or in the dtype of the logits if that is wider.

    Args:
        logits: `(N, V)`, of any floating dtype.
        uniforms: `(N,)` float64 in `[0, 1)`; read by no one at temperature 0.
        sampling: Temperature and truncation.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        token = scores.argmax(-1)
        log_prob = chosen(scores, token) - scores.logsumexp(-1)
        return Drawn(token, log_prob, torch.zeros_like(log_prob))
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if not sampling.truncates:
        token, log_normaliser = invert(scores, uniforms)
        log_prob = chosen(scores, token) - log_normaliser
        return Drawn(token, log_prob, log_prob)
    kept = scores.masked_fill(~truncation(scores, sampling.top_k, sampling.top_p), -torch.inf)
    token, log_normaliser = invert(kept, uniforms)
    score = chosen(scores, token)
    return Drawn(token, score - scores.logsumexp(-1), score - log_normaliser)


def chosen(scores: Tensor, token: Tensor) -> Tensor:
    """The score of one token per row."""
    return scores.gather(1, token[:, None])[:, 0]


def truncation(scores: Float[Tensor, "batch vocabulary"], top_k: int, top_p: float) -> Bool[Tensor, "batch vocabulary"]:
    """Which tokens may be drawn: first top-k, then top-p of what is left, renormalised.

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


def invert(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The token whose share of the cumulative distribution `u` falls into, and `log Σ exp(scores)`, per row.

    Sums run in float64, and a token of probability 0 is never returned.
    """
    highest = scores.amax(1, keepdim=True)
    weights = (scores - highest).exp_()
    size = scores.shape[1]
    if size <= SHORT:
        token, total = first_above(weights.cumsum(1, dtype=torch.float64), uniforms)
    else:
        padded = F.pad(weights, (0, -size % BLOCK)) if size % BLOCK else weights
        token, total = invert_blocks(padded.view(len(scores), ceil(size / BLOCK), BLOCK), uniforms)
    return token, highest[:, 0] + total.log().to(scores.dtype)


def invert_blocks(blocks: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index into each row of `(N, blocks, size)` weights, and the row's sum.

    First the block, then the place in it: one scan over a long vocabulary would be slow on a GPU.
    """
    cumulative = F.pad(blocks.sum(2).cumsum(1, dtype=torch.float64), (1, 0))
    block, total = first_above(cumulative[:, 1:].contiguous(), uniforms)
    start, end = (cumulative.gather(1, (block + shift)[:, None])[:, 0] for shift in (0, 1))
    # where in its block the uniform number points, itself uniform in [0, 1)
    inside = ((uniforms * BELOW_ONE * total - start) / (end - start)).clamp(0, 1)
    picked = blocks.gather(1, block[:, None, None].expand(-1, 1, blocks.shape[2]))[:, 0]
    place, _ = first_above(picked.cumsum(1, dtype=torch.float64), inside)
    return block * blocks.shape[2] + place, total


def first_above(cumulative: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """First index at which each row of `(N, V)` exceeds the given share of its last entry, and that entry."""
    total = cumulative[:, -1]
    # below the total after rounding too, so that an entry above it exists, and the first of them has weight
    target = (uniforms * BELOW_ONE * total)[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp(max=cumulative.shape[1] - 1), total  # beyond the end only where weights are not numbers
