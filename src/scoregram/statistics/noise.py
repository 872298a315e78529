"""Signal and noise of a batch gradient: three components, their ratio to the signal, and the noise scale."""

import math
from dataclasses import dataclass

import torch

from scoregram.checks import fail
from scoregram.statistics.blocks import group_blocks, prompt_update_gram
from scoregram.statistics.moments import GroupMoments, group_moments, reward_differences
from scoregram.types import BatchGram, PromptGram, Rewards


@dataclass(frozen=True)
class NoiseComponents:
    """What the squared error of a leave-one-out batch gradient is made of, whatever the batch.

    `MSE = c1/B + c2/(B R) + c3/(B R (R-1))` for `B` independent prompts with `R` rollouts each, exactly.
    """

    gradient_squared: float
    """`|g|²` with `g = E g(X)`: the signal."""
    between_prompts: float
    """`c1 = E|g(X) - g|²`: prompts want different things; only more prompts help."""
    within_prompt: float
    """`c2 = E tr Σ_oracle(X)`: rollouts differ; more rollouts help, however they are grouped."""
    group_baseline: float
    """`c3 = E[σ²(X) tr F(X) + |g(X)|²]`: the price of estimating the baseline from the group."""


@dataclass(frozen=True)
class PromptEstimates:
    """Unbiased estimates for each prompt and each pair of prompts, from which batch estimates are averaged."""

    moments: GroupMoments
    gradient_gram: PromptGram
    """`(P, P)`: unbiased for `⟨g(x_p), g(x_q)⟩`, on the diagonal too."""


def prompt_estimates(gram: BatchGram, rewards: Rewards) -> PromptEstimates:
    """Unbiased gradient moments of every prompt, and inner products between the gradients of every two prompts.

    Off the diagonal, the inner product of two leave-one-out gradients of independent groups. On the diagonal that
    product would count the noise as signal, so there it is the U-statistic `gradient_squared`.

    Args:
        gram: `(N, N)`, `N = P·R`, rollouts ordered prompt by prompt.
        rewards: `(P, R)`.

    Raises:
        ScoregramError: If `R < 4`, or the shapes do not belong together.
    """
    prompts, size = rewards.shape if rewards.ndim == 2 else (0, 0)
    if gram.shape != (prompts * size, prompts * size):
        fail(
            "prompt_estimates",
            "needs rewards (P, R) and a Gram over all N = P·R rollouts",
            f"rewards {tuple(rewards.shape)} and a Gram {tuple(gram.shape)}",
            "Pass the whole batch, prompt by prompt.",
        )
    moments = group_moments(group_blocks(gram, max(size, 1)), rewards)
    # Leave-one-out advantages over R: r_i less the mean of the others is the mean of r_i - r_j over j ≠ i.
    weights = reward_differences(rewards.detach().double()).sum(dim=2).flatten() / (size * (size - 1))
    prompt_of = torch.arange(prompts, device=weights.device).repeat_interleave(size)
    inner = prompt_update_gram(gram, weights, prompt_of)
    return PromptEstimates(moments, inner.diagonal_scatter(moments.gradient_squared))


def noise_components(gram: BatchGram, rewards: Rewards) -> NoiseComponents:
    """Unbiased estimates of the signal `|g|²` and of `c1`, `c2`, `c3` from one batch of independent prompts.

    `|g|²` is averaged over pairs of different prompts; `c1` is half the average of `|g(x_p) - g(x_q)|²` over the
    same pairs; `c2` and `c3` are averages over prompts. Each can fall below zero when noise outweighs it; `c1`, a
    small difference between prompts seen through large noise, does so most often.

    Args:
        gram: `(N, N)`, `N = P·R`, rollouts ordered prompt by prompt.
        rewards: `(P, R)`.

    Raises:
        ScoregramError: If `R < 4` (see `moments`) or `P < 2`; one prompt says nothing about differences.
    """
    estimates = prompt_estimates(gram, rewards)
    prompts = rewards.shape[0]
    if prompts < 2:
        fail("noise_components", "needs at least 2 prompts", prompts, "Measure the Gram over more prompts.")
    moments, inner = estimates.moments, estimates.gradient_gram
    pairs = prompts * (prompts - 1)
    return NoiseComponents(
        gradient_squared=float(inner.sum() - inner.diagonal().sum()) / pairs,
        between_prompts=float(squared_distances(inner).sum()) / (2 * pairs),
        within_prompt=float(moments.oracle_trace.mean()),
        group_baseline=float((moments.variance_fisher_trace + moments.gradient_squared).mean()),
    )


def squared_distances(gram: PromptGram) -> PromptGram:
    """`G_pp + G_qq - 2 G_pq`; exactly zero on the diagonal."""
    norms = gram.diagonal()
    return norms[:, None] + norms[None, :] - 2 * gram


def batch_mse(components: NoiseComponents, prompts: int, group_size: int) -> float:
    """Expected squared error `E|ĝ - g|²` of the leave-one-out gradient of `B` prompts with `R` rollouts each.

    `c1/B + c2/(B R) + c3/(B R (R-1))`. Zero noise gives `0`; estimated components can make it negative.

    Raises:
        ScoregramError: If `B < 1` or `R < 2`.

    Example:
        >>> batch_mse(NoiseComponents(1.0, 2.0, 4.0, 8.0), prompts=2, group_size=2)
        4.0
    """
    if prompts < 1 or group_size < 2:
        got = f"{prompts} prompts with {group_size} rollouts"
        fail("batch_mse", "needs at least 1 prompt and 2 rollouts per prompt", got, "Leave-one-out needs another.")
    rollouts = prompts * group_size
    return (
        components.between_prompts / prompts
        + components.within_prompt / rollouts
        + components.group_baseline / (rollouts * (group_size - 1))
    )


def signal_to_noise(components: NoiseComponents, prompts: int, group_size: int) -> float:
    """Power of the true gradient over the power of its error in one batch: `|g|² / MSE`. Its root is in amplitudes.

    Reads: `1` the step is half noise in power; far below one the step is mostly noise; a negative value comes from
    an estimate of `|g|²` below zero, a signal that this many rollouts do not resolve. `nan` if the estimated error
    is not positive. A ratio of unbiased estimates is itself not unbiased.

    Example:
        >>> signal_to_noise(NoiseComponents(1.0, 2.0, 4.0, 8.0), prompts=2, group_size=2)
        0.25
    """
    noise = batch_mse(components, prompts, group_size)
    return components.gradient_squared / noise if noise > 0 else math.nan


def noise_scale(components: NoiseComponents, group_size: int) -> float:
    """Batch size, in rollouts, at which the error has the power of the signal: the simple noise scale.

    `tr Σ / |g|² = (c1 R + c2 + c3/(R-1)) / |g|²`, `tr Σ / N` being the error of `N` rollouts in groups of `R`; divide
    by `R` for prompts. Batches far below it average too little, far above it waste rollouts. `inf` if the estimate of
    `|g|²` is not positive: no signal was resolved. `nan` if the estimated noise is not positive.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, here with grouped rollouts.

    Example:
        >>> noise_scale(NoiseComponents(1.0, 2.0, 4.0, 8.0), group_size=2)
        16.0
    """
    per_rollout = group_size * batch_mse(components, 1, group_size)
    if not per_rollout > 0:
        return math.nan
    return per_rollout / components.gradient_squared if components.gradient_squared > 0 else math.inf
