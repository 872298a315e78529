"""Signal and noise of a batch gradient, and the number of rollouts per prompt that has the least error.

Three noise components give the error of a leave-one-out gradient at every batch size and group size; they are
estimated without bias from one Gram. From them follow the signal-to-noise ratio, the noise scale and the best group
size for a fixed number of rollouts.
"""

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size
from scoregram.statistics.moments import GroupMoments, group_blocks, group_moments, reward_differences
from scoregram.statistics.update import prompt_update_gram
from scoregram.types import BatchGram, BatchRewards, BatchWeights, PerPrompt, PromptGram, PromptOf, Rewards


@dataclass(frozen=True)
class NoiseComponents:
    """Components of the squared error of a leave-one-out batch gradient; they do not depend on the batch size.

    `MSE = c1/B + c2/(B R) + c3/(B R (R-1))` for `B` independent prompts with `R` rollouts each, exactly.
    """

    gradient_squared: float
    """`|g|²` with `g = E g(X)`: the signal."""
    between_prompts: float
    """`c1 = E|g(X) - g|²`: the prompts' gradients differ; only more prompts help."""
    within_prompt: float
    """`c2 = E tr Σ_oracle(X)`: rollouts differ; more rollouts help, however they are grouped."""
    group_baseline: float
    """`c3 = E[σ²(X) tr F(X) + |g(X)|²]`: the noise of a baseline estimated from the group."""


@dataclass(frozen=True)
class PromptEstimates:
    """Unbiased estimates for each prompt and each pair of prompts; batch estimates are averages of them."""

    moments: GroupMoments
    gradient_gram: PromptGram
    """`(P, P)`: unbiased for `⟨g(x_p), g(x_q)⟩`, on the diagonal too."""


def prompt_estimates(gram: BatchGram, rewards: Rewards) -> PromptEstimates:
    """Unbiased gradient moments of every prompt, and inner products between the gradients of every two prompts.

    Off the diagonal, an entry is the inner product of two leave-one-out gradients of independent groups. On the
    diagonal that product would count noise as signal; there the entry is the U-statistic `gradient_squared`.
    Rollouts must be ordered prompt by prompt.

    Raises:
        ScoregramError: If `R < 4`, or the shapes do not match.
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
    prompt_of = torch.arange(prompts, device=rewards.device).repeat_interleave(size)
    return _with_gradient_gram(moments, gram, leave_one_out_weights(rewards).flatten(), prompt_of)


def unequal_prompt_estimates(gram: BatchGram, flat_rewards: BatchRewards, prompt_of: PromptOf) -> PromptEstimates:
    """As `prompt_estimates`, for groups that may differ in size.

    The sizes must not depend on the rollouts: a group whose rollouts were dropped by their rewards is not a sample of
    its prompt.

    Args:
        gram: `(N, N)`.
        flat_rewards: `(N,)`.
        prompt_of: `(N,)`, the prompt of each rollout, `0 … P-1` in ascending order.

    Raises:
        ScoregramError: If a group has fewer than 4 rollouts, or the shapes do not match.
    """
    if (
        gram.shape != (len(flat_rewards), len(flat_rewards))
        or prompt_of.shape != flat_rewards.shape
        or bool((prompt_of.diff() < 0).any())
    ):
        got = f"a Gram {tuple(gram.shape)}, rewards {tuple(flat_rewards.shape)} and prompts {tuple(prompt_of.shape)}"
        fail("unequal_prompt_estimates", "needs a Gram (N, N), rewards (N,) and ascending prompts", got, "Sort them.")
    sizes = torch.bincount(prompt_of)
    stops = sizes.cumsum(0)
    columns = torch.full((len(GROUP_MOMENTS), len(sizes)), torch.nan, dtype=torch.float64, device=gram.device)
    weights = torch.zeros(len(flat_rewards), dtype=torch.float64, device=gram.device)
    for size in sizes.unique().tolist():
        prompts = (sizes == size).nonzero().squeeze(1)
        rows = (stops - size)[prompts][:, None] + torch.arange(size, device=stops.device)  # (p, R)
        moments = group_moments(gram[rows[:, :, None], rows[:, None, :]], flat_rewards[rows])
        columns[:, prompts] = torch.stack([getattr(moments, name) for name in GROUP_MOMENTS])
        weights[rows] = leave_one_out_weights(flat_rewards[rows])
    return _with_gradient_gram(GroupMoments(*columns), gram, weights, prompt_of)


GROUP_MOMENTS = tuple(one.name for one in fields(GroupMoments))


def leave_one_out_weights(rewards: Rewards) -> Rewards:
    """`(P, R)` in float64: leave-one-out advantages over `R`, the weights of the scores in a prompt's gradient.

    `r_i` minus the mean of the others is the mean of `r_i - r_j` over `j ≠ i`, exactly zero for equal rewards.

    Raises:
        ScoregramError: If `R < 2`; there is no other rollout. If a reward is not finite.
    """
    caller = "leave_one_out_weights"
    size = require_group_size(rewards, at_least=2, caller=caller)
    known = require_finite(rewards.detach().double(), name="rewards", caller=caller)
    return reward_differences(known).sum(dim=2) / (size * (size - 1))


def _with_gradient_gram(
    moments: GroupMoments, gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf
) -> PromptEstimates:
    inner = prompt_update_gram(gram, weights, prompt_of)
    return PromptEstimates(moments, inner.diagonal_scatter(moments.gradient_squared))


def noise_components(gram: BatchGram, rewards: Rewards) -> NoiseComponents:
    """Unbiased estimates of the signal `|g|²` and of `c1`, `c2`, `c3` from one batch of independent prompts.

    `|g|²` is averaged over pairs of different prompts; `c1` is half the average of `|g(x_p) - g(x_q)|²` over the
    same pairs; `c2` and `c3` are averages over prompts. Each can be negative if the noise is larger than the quantity.
    This happens most often to `c1`, a small difference between prompts under large noise.

    Raises:
        ScoregramError: If `R < 4` (see `moments`) or `P < 2`; one prompt has no differences.
    """
    return components_of_estimates(prompt_estimates(gram, rewards), caller="noise_components")


def components_of_estimates(
    estimates: PromptEstimates,
    *,
    same_pass: Bool[Tensor, "prompts prompts"] | None = None,
    caller: str = "components_of_estimates",
) -> NoiseComponents:
    """The averages over prompts and pairs of prompts that `noise_components` describes.

    Args:
        estimates: Of each prompt and pair.
        same_pass: `(P, P)`, symmetric: the pairs to average over, such as prompts measured in the same pass; None for
            all. Without bias if it does not depend on the rollouts.
        caller: Name for error messages.

    Raises:
        ScoregramError: If there is no pair.
    """
    moments, inner = estimates.moments, estimates.gradient_gram
    prompts = len(inner)
    if prompts < 2:
        fail(caller, "needs at least 2 prompts", prompts, "Measure the Gram over more prompts.")
    others = ~torch.eye(prompts, dtype=torch.bool, device=inner.device)
    chosen = others if same_pass is None else others & same_pass.to(inner.device)
    pairs = int(chosen.sum())
    if not pairs:
        fail(caller, "needs at least 2 prompts together", "none", "Measure two prompts in one pass.")
    return NoiseComponents(
        gradient_squared=float(inner[chosen].sum()) / pairs,
        between_prompts=float(_squared_distances(inner)[chosen].sum()) / (2 * pairs),
        within_prompt=float(moments.oracle_trace.mean()),
        group_baseline=float((moments.variance_fisher_trace + moments.gradient_squared).mean()),
    )


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
        fail("batch_mse", "needs at least 1 prompt and 2 rollouts per prompt", got, "Leave-one-out needs two.")
    rollouts = prompts * group_size
    return (
        components.between_prompts / prompts
        + components.within_prompt / rollouts
        + components.group_baseline / (rollouts * (group_size - 1))
    )


def signal_to_noise(components: NoiseComponents, prompts: int, group_size: int) -> float:
    """Power of the true gradient over the power of its error in one batch: `|g|² / MSE`. Its root is a ratio of norms.

    Reads: `1` half of the step's power is noise; far below one the step is mostly noise; negative the estimate of
    `|g|²` is below zero, so this many rollouts do not resolve the signal; `nan` the estimated error is not positive.
    A ratio of unbiased estimates is not itself unbiased.

    Example:
        >>> signal_to_noise(NoiseComponents(1.0, 2.0, 4.0, 8.0), prompts=2, group_size=2)
        0.25
    """
    noise = batch_mse(components, prompts, group_size)
    return components.gradient_squared / noise if noise > 0 else math.nan


def noise_scale(components: NoiseComponents, group_size: int) -> float:
    """Batch size, in rollouts, at which the error has the power of the signal: the simple noise scale.

    `tr Σ / |g|² = (c1 R + c2 + c3/(R-1)) / |g|²`; `tr Σ / N` is the error of `N` rollouts in groups of `R`. Divide
    by `R` for a number of prompts. The gradient of a batch far below it is mostly noise; a batch far above it wastes
    rollouts. `inf` if the estimate
    of `|g|²` is not positive: no signal was resolved. `nan` if the estimated noise is not positive.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, here for grouped rollouts.

    Example:
        >>> noise_scale(NoiseComponents(1.0, 2.0, 4.0, 8.0), group_size=2)
        16.0
    """
    per_rollout = group_size * batch_mse(components, 1, group_size)
    if not per_rollout > 0:
        return math.nan
    return per_rollout / components.gradient_squared if components.gradient_squared > 0 else math.inf


def leave_one_out_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Exact error `E|ĝ - g|²` of a prompt's gradient with the mean of the other rollouts as baseline.

    `tr Σ_oracle / R + (σ² tr F + |g|²) / (R (R-1))`. The gradient is the average over pairs of
    `h_ij = (ψ_i - ψ_j)(r_i - r_j)/2`. Around its mean, `h_ij` is `(q_i + q_j)/2 + e_ij` with
    `q_i = ψ_i (r_i - V) - g` and `e_ij = -[ψ_i (r_j - V) + ψ_j (r_i - V)]/2`, uncorrelated with every `q`. The mean of
    the `q` is the error if `V` were known, of variance `tr Σ_oracle / R`; the `R (R-1)/2` terms `e_ij` are
    uncorrelated with each other, of variance `(σ² tr F + |g|²)/2` each. Holds on-policy, for one gradient step,
    without division by the standard deviation.

    Raises:
        ScoregramError: If `R < 2`.
    """
    _require_rollouts(group_size, at_least=2, caller="leave_one_out_mse")
    pair_noise = moments.variance_fisher_trace + moments.gradient_squared
    return moments.oracle_trace / group_size + pair_noise / (group_size * (group_size - 1))


def mean_baseline_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Exact error of a prompt's gradient with the mean of the whole group, itself included, as baseline.

    `((R-1)/R)² MSE_LOO + |g|²/R²`: this gradient is `(R-1)/R` times the leave-one-out one, so it is too short by
    `|g|/R` and its noise shrinks by the same factor. The learning rate can undo the scale, so compare the two by
    signal-to-noise, not by MSE. At `R = 1` the gradient is zero and its error is `|g|²`.
    """
    _require_rollouts(group_size, at_least=1, caller="mean_baseline_mse")
    bias = moments.gradient_squared / group_size**2
    if group_size == 1:
        return bias
    return ((group_size - 1) / group_size) ** 2 * leave_one_out_mse(moments, group_size) + bias


def vanilla_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Exact error of a prompt's gradient without a baseline: `(E|ψ r|² - |g|²) / R`.

    Unbiased, and the only one of the three that changes if all rewards are shifted. At small `R` it can be below the
    error of leave-one-out, whose baseline is then noisy.
    """
    _require_rollouts(group_size, at_least=1, caller="vanilla_mse")
    return (moments.raw_square - moments.gradient_squared) / group_size


def mse_curve(components: NoiseComponents, rollouts: int, group_sizes: Tensor) -> Tensor:
    """Error of the batch gradient at each group size, for a fixed number of rollouts `N`.

    `(c1 R + c2 + c3/(R-1)) / N`: larger groups leave fewer prompts, smaller groups have a noisier baseline. The number
    of prompts `N/R` is not rounded, so the curve is smooth; it is exact where `R` divides `N`.

    Args:
        components: From `noise_components`, or exact.
        rollouts: `N`.
        group_sizes: Any shape, every entry at least 2.

    Returns:
        Shape of `group_sizes`, float64.

    Example:
        >>> mse_curve(NoiseComponents(1.0, 1.0, 0.0, 4.0), 12, torch.tensor([2, 3, 4])) * 12
        tensor([6.0000, 5.0000, 5.3333], dtype=torch.float64)
    """
    if rollouts < 1:
        fail("mse_curve", "needs at least 1 rollout", rollouts, "Pass the number of rollouts per step.")
    size = group_sizes.detach().double()
    if size.numel() and not float(size.min()) >= 2:
        fail("mse_curve", "group sizes must be at least 2", float(size.min()), "Leave-one-out needs another rollout.")
    c1, c2, c3 = components.between_prompts, components.within_prompt, components.group_baseline
    return (c1 * size + c2 + c3 / (size - 1)) / rollouts


@dataclass(frozen=True)
class OptimalGroupSize:
    """Group size with the least error at a fixed number of rollouts."""

    exact: float
    """`1 + sqrt(c3/c1)`, which minimises the exact error; `inf` if `c1 <= 0 < c3`, `nan` if neither is positive."""
    asymptotic: float
    """`sqrt(c3/c1)`, the form that replaces `R - 1` by `R` in the error; always one less."""
    integer: int | None
    """The best whole number of rollouts, at least 2; `None` where `exact` is not finite."""


def optimal_group_size(components: NoiseComponents) -> OptimalGroupSize:
    """Group size that minimises the exact error at a fixed number of rollouts: `1 + sqrt(c3/c1)`.

    It depends on neither the number of rollouts nor `c2`. From exact moments it is at least 2, since
    `c3 >= E|g(X)|² >= c1`. Estimates can give less than 2; a negative estimate of `c3` counts as zero. If `c1 <= 0`,
    the batch resolves no difference between prompts and the optimum is `inf`: any larger group is better.

    Reference:
        arXiv:2603.01162, Theorem 7, gives `sqrt(c3/c1)` from an error bound with `R²` in place of `R (R-1)`.

    Example:
        >>> optimal_group_size(NoiseComponents(1.0, 1.0, 0.0, 9.0))
        OptimalGroupSize(exact=4.0, asymptotic=3.0, integer=4)
    """
    c1, c3 = components.between_prompts, components.group_baseline
    asymptotic = float(_root_ratio(*torch.tensor([c1, c3], dtype=torch.float64)))
    if not math.isfinite(asymptotic):
        return OptimalGroupSize(asymptotic, asymptotic, None)
    lower = max(2, math.floor(1 + asymptotic))
    # c1 R + c3/(R-1) grows by c1 - c3/(R(R-1)) from R to R+1.
    integer = lower if c1 * lower * (lower - 1) >= c3 else lower + 1
    return OptimalGroupSize(1 + asymptotic, asymptotic, integer)


def _root_ratio(c1: Tensor, c3: Tensor) -> Tensor:
    """`sqrt(c3/c1)`, a negative `c3` counting as zero; `inf` where `c1 <= 0 < c3`, `nan` where neither is positive."""
    ratio = torch.where(c1 > 0, c3.clamp(min=0.0) / c1, math.inf).sqrt()
    return ratio.masked_fill((c1 <= 0) & (c3 <= 0) | c1.isnan() | c3.isnan(), math.nan)


def _squared_distances(gram: PromptGram) -> PromptGram:
    """`G_pp + G_qq - 2 G_pq`; exactly zero on the diagonal."""
    norms = gram.diagonal()
    return norms[:, None] + norms[None, :] - 2 * gram


def _require_rollouts(group_size: int, *, at_least: int, caller: str) -> None:
    if group_size < at_least:
        fail(caller, f"group_size must be at least {at_least}", group_size, "Sample more rollouts per prompt.")
