"""How many rollouts per prompt: exact errors at every group size, and the best split of a rollout budget."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import fail, require_in_range
from scoregram.statistics.moments import GroupMoments
from scoregram.statistics.noise import NoiseComponents, prompt_estimates, squared_distances
from scoregram.types import BatchGram, PerPrompt, Rewards


@dataclass(frozen=True)
class OptimalGroupSize:
    """Group size with the least error at a fixed number of rollouts."""

    exact: float
    """`1 + sqrt(c3/c1)`, minimum of the exact error; `inf` if `c1 <= 0 < c3`, `nan` if neither is positive."""
    asymptotic: float
    """`sqrt(c3/c1)`, the form that replaces `R - 1` by `R` in the error; always one less."""
    integer: int | None
    """The best whole number of rollouts, at least 2; `None` where `exact` is not finite."""


@dataclass(frozen=True)
class GroupSizeInterval:
    """Bootstrap interval of the optimal group size."""

    low: float
    high: float
    level: float
    """Share of resamples that the interval covers."""
    resamples: int
    fraction_unbounded: float
    """Share of resamples with `c1 <= 0`, where larger is always better as far as these prompts tell."""
    fraction_undefined: float
    """Share of resamples with neither `c1` nor `c3` positive; left out of the interval."""


def leave_one_out_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Error `E|ĝ - g|²` of a prompt's gradient with the mean of the other rollouts as baseline, exactly.

    `tr Σ_oracle / R + (σ² tr F + |g|²) / (R (R-1))`. The estimate is the average over pairs of
    `h_ij = (ψ_i - ψ_j)(r_i - r_j)/2`.
    Around its mean, `h_ij` is `(q_i + q_j)/2 + e_ij` with `q_i = ψ_i (r_i - V) - g` and
    `e_ij = -[ψ_i (r_j - V) + ψ_j (r_i - V)]/2`, uncorrelated with every `q`. The `q` average to the oracle's error, of
    variance `tr Σ_oracle / R`; the `R (R-1)/2` terms `e_ij` are uncorrelated with each other, of variance
    `(σ² tr F + |g|²)/2` each. On-policy, one gradient step, no division by the standard deviation.

    Raises:
        ScoregramError: If `R < 2`.
    """
    _require_rollouts(group_size, at_least=2, caller="leave_one_out_mse")
    pair_noise = moments.variance_fisher_trace + moments.gradient_squared
    return moments.oracle_trace / group_size + pair_noise / (group_size * (group_size - 1))


def mean_baseline_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Error of a prompt's gradient with the mean of the whole group, itself included, as baseline, exactly.

    `((R-1)/R)² MSE_LOO + |g|²/R²`: this estimate is `(R-1)/R` times the leave-one-out one, so it is too short by
    `|g|/R` and its noise shrinks alike. The learning rate undoes the scale: compare it by signal-to-noise, not by MSE.
    At `R = 1` the estimate is zero and its error is `|g|²`.
    """
    _require_rollouts(group_size, at_least=1, caller="mean_baseline_mse")
    bias = moments.gradient_squared / group_size**2
    if group_size == 1:
        return bias
    return ((group_size - 1) / group_size) ** 2 * leave_one_out_mse(moments, group_size) + bias


def vanilla_mse(moments: GroupMoments, group_size: int) -> PerPrompt:
    """Error of a prompt's gradient without a baseline, exactly: `(E|ψ r|² - |g|²) / R`.

    Unbiased, and the only one of the three that changes when all rewards are shifted. At small `R` it can beat
    leave-one-out, whose baseline is then noisy.
    """
    _require_rollouts(group_size, at_least=1, caller="vanilla_mse")
    return (moments.raw_square - moments.gradient_squared) / group_size


def mse_curve(components: NoiseComponents, rollouts: int, group_sizes: Tensor) -> Tensor:
    """Error of the batch gradient at each group size, the number of rollouts `N` being fixed.

    `(c1 R + c2 + c3/(R-1)) / N`: larger groups leave fewer prompts, smaller groups a noisier baseline. `N/R` is the
    number of prompts and is not rounded, so the curve is smooth; keep to divisors of `N` to have it exact.

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


def optimal_group_size(components: NoiseComponents) -> OptimalGroupSize:
    """Group size that minimises the exact error at a fixed number of rollouts: `1 + sqrt(c3/c1)`.

    It depends on neither the number of rollouts nor `c2`. From exact moments it is at least 2, since
    `c3 >= E|g(X)|² >= c1`; estimates may disobey, and a negative estimate of `c3` is taken as zero. If `c1 <= 0` no
    difference between prompts was resolved and the optimum is `inf`: as large as you like, as far as this batch tells.

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


def optimal_group_size_interval(
    gram: BatchGram,
    rewards: Rewards,
    *,
    generator: torch.Generator,
    resamples: int = 2000,
    level: float = 0.9,
) -> GroupSizeInterval:
    """Percentile bootstrap interval of `1 + sqrt(c3/c1)`, resampling prompts with all their rollouts.

    A prompt drawn twice meets itself: its inner product with itself is then the unbiased `|g(x)|²`, not the squared
    norm of its noisy gradient, which would swell `|g|²` by the noise. As for any resampled variance, `c1` is smaller
    by `(P-1)/P` on average, so with few prompts the interval leans to large `R`. An end may be `inf`; both are `nan`
    if every resample is undefined (all groups dead).

    Args:
        gram: `(N, N)`, `N = P·R`, rollouts ordered prompt by prompt.
        rewards: `(P, R)`.
        generator: Source of the resamples; the same state gives the same interval.
        resamples: Number of resamples, at least 1.
        level: Coverage aimed at, in `[0, 1]`.

    Raises:
        ScoregramError: If `R < 4` or `P < 2`.
    """
    caller = "optimal_group_size_interval"
    require_in_range(level, low=0.0, high=1.0, name="level", caller=caller)
    if resamples < 1:
        fail(caller, "resamples must be at least 1", resamples, "Some thousand give a steady interval.")
    estimates = prompt_estimates(gram, rewards)
    prompts = rewards.shape[0]
    if prompts < 2:
        fail(caller, "needs at least 2 prompts", prompts, "Measure the Gram over more prompts.")
    drawn = torch.randint(prompts, (resamples, prompts), generator=generator, device=generator.device).to(gram.device)
    counts = torch.zeros(resamples, prompts, dtype=torch.float64, device=gram.device)
    counts = counts.scatter_add(1, drawn, torch.ones_like(drawn, dtype=torch.float64))  # (resamples, P)
    distances = squared_distances(estimates.gradient_gram)
    c1 = torch.einsum("sp,pq,sq->s", counts, distances, counts) / (2 * prompts * (prompts - 1))
    c3 = counts @ (estimates.moments.variance_fisher_trace + estimates.moments.gradient_squared) / prompts
    return _percentiles(1 + _root_ratio(c1, c3), level, fraction_unbounded=float((c1 <= 0).double().mean()))


def _percentiles(optima: Tensor, level: float, *, fraction_unbounded: float) -> GroupSizeInterval:
    """Order statistics that cover `level`; no interpolation, since half-way to `inf` is no number."""
    known = optima[~optima.isnan()].sort().values
    tail = (1 - level) / 2
    low, high = math.nan, math.nan
    if known.numel():
        last = known.numel() - 1
        low, high = float(known[math.floor(tail * last)]), float(known[math.ceil((1 - tail) * last)])
    undefined = 1 - known.numel() / optima.numel()
    return GroupSizeInterval(low, high, level, optima.numel(), fraction_unbounded, undefined)


def _root_ratio(c1: Tensor, c3: Tensor) -> Tensor:
    """`sqrt(c3/c1)` with a negative `c3` as zero; `inf` where `c1 <= 0 < c3`, `nan` where neither is positive."""
    ratio = torch.where(c1 > 0, c3.clamp(min=0.0) / c1, math.inf).sqrt()
    return ratio.masked_fill((c1 <= 0) & (c3 <= 0) | c1.isnan() | c3.isnan(), math.nan)


def _require_rollouts(group_size: int, *, at_least: int, caller: str) -> None:
    if group_size < at_least:
        fail(caller, f"group_size must be at least {at_least}", group_size, "Sample more rollouts per prompt.")
