"""Choose a token from logits by one uniform number, and say how probable it was."""

from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.policy.config import SamplingConfig

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

    Log-probabilities are computed in float32, or in the dtype of the logits if that is wider; sums in float64. A token
    of probability 0 is never drawn.

    Args:
        logits: `(N, V)`, of any floating dtype.
        uniforms: `(N,)` float64 of `uniform_numbers`; not read at temperature 0.
        sampling: Temperature and truncation.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        token = scores.argmax(-1)
        log_prob = chosen(scores.log_softmax(-1), token)
        return Drawn(token, log_prob, torch.zeros_like(log_prob))
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    log_probs = scores.log_softmax(-1)
    if not sampling.truncates:
        token = invert(log_probs.exp(), uniforms)
        log_prob = chosen(log_probs, token)
        return Drawn(token, log_prob, log_prob)
    kept = truncation(scores, sampling.top_k, sampling.top_p)
    behaviour = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
    token = invert(behaviour.exp(), uniforms)
    return Drawn(token, chosen(log_probs, token), chosen(behaviour, token))


def uniform_numbers(
    *shape: int, generator: torch.Generator | None, device: torch.device | None = None
) -> Float[Tensor, "..."]:
    """Numbers in `[0, 1)` for `draw`, far enough below 1 that their product with any sum is below that sum.

    The same on every device for a generator on the CPU.
    """
    source = torch.device("cpu") if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float64, generator=generator, device=source).mul_(1 - 2**-52).to(device)


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


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose share of the cumulative distribution `u` falls into, one per row of `(N, V)` weights."""
    size = weights.shape[1]
    if size <= SHORT:
        return first_above(weights.cumsum(1, dtype=torch.float64), uniforms)
    padded = F.pad(weights, (0, -size % BLOCK)) if size % BLOCK else weights
    return invert_blocks(padded.view(len(weights), ceil(size / BLOCK), BLOCK), uniforms)


def invert_blocks(blocks: Tensor, uniforms: Tensor) -> Tensor:
    """The same over `(N, blocks, size)` weights: first the block, then the place in it.

    One scan over a long vocabulary would be slow on a GPU.
    """
    ends = blocks.sum(2).cumsum(1, dtype=torch.float64)
    block = first_above(ends, uniforms)[:, None]
    end = ends.gather(1, block)[:, 0]
    start = F.pad(ends, (1, 0)).gather(1, block)[:, 0]
    # where in its block the uniform number points, itself uniform in [0, 1), and short of 1 by as much as before
    inside = ((uniforms * ends[:, -1] - start) / (end - start)).clamp(0, 1 - 2**-52)
    picked = blocks.gather(1, block[:, :, None].expand(-1, 1, blocks.shape[2]))[:, 0]
    return block[:, 0] * blocks.shape[2] + first_above(picked.cumsum(1, dtype=torch.float64), inside)


def first_above(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """First index at which each row of `(N, V)` sums exceeds the given share of the last; a share of weight ends there.

    Rows that are no numbers give the last index.
    """
    targets = (uniforms * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)
