"""The baseline that minimises the variance of the gradient, and the variance that its estimate saves."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size, require_same_shape
from scoregram.statistics.moments import group_moments, require_blocks
from scoregram.types import GroupGrams, PerPrompt, PerRollout, Rewards


@dataclass(frozen=True)
class BaselineSaving:
    """Variance of each prompt's gradient that `optimal-loo` saves over `rloo` at this `R`."""

    per_prompt: PerPrompt
    """`(P,)`: variance saved; negative where it costs more to estimate the baseline than the baseline saves, and where
    noise is larger than the saving."""
    variance: PerPrompt
    """`(P,)`: variance of the gradient with `rloo`."""
    fraction: float
    """Saved variance over the variance with `rloo`, pooled over prompts; `nan` if that is zero."""


def optimal_baseline(squared_norms: PerRollout, rewards: Rewards) -> PerPrompt:
    """Mean reward of each group weighted by squared score norms: the variance-minimising constant baseline.

    `b = Σ K_ii r_i / Σ K_ii`, an estimate of `b* = E[|ψ|² r] / E|ψ|²`, which minimises `E|ψ (r - b)|²`. `b*` is the
    value `V` exactly if `Cov(|ψ|², r) = 0`. `b` lies between the least and the largest reward. Subtracted from the
    rewards of its own group it biases the gradient; the estimator `optimal-loo` leaves the rollout itself out.

    Args:
        squared_norms: `(P, R)`. `K_ii`, the diagonal of each group's Gram.
        rewards: `(P, R)`.

    Returns:
        `(P,)`, float64. `nan` where all scores are zero: no baseline matters there.

    Reference:
        Weaver and Tao 2001; Greensmith et al. 2004.

    Example:
        >>> optimal_baseline(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.7500], dtype=torch.float64)
    """
    caller = "optimal_baseline"
    require_group_size(rewards, at_least=1, caller=caller)
    require_same_shape(squared_norms, rewards, name="squared_norms", like_name="rewards", caller=caller)
    n = require_finite(squared_norms.detach().double(), name="squared_norms", caller=caller)
    if bool((n < 0).any()):
        fail(caller, "squared norms must not be negative", float(n.min()), "Pass the diagonal of a Gram.")
    r = require_finite(rewards.detach().double(), name="rewards", caller=caller)
    start = r[:, :1]  # the mean is taken around the first reward: equal rewards are reproduced exactly
    return start[:, 0] + (n * (r - start)).sum(dim=-1) / n.sum(dim=-1)  # 0/0 is nan: no weight at all


def excess_variance(baseline: Tensor, optimal: Tensor, fisher_trace: Tensor, group_size: int) -> Tensor:
    """Exact variance that a constant baseline `b` adds over the best one: `(b - b*)² tr F / R`.

    `E|ψ (r - b)|²` is a parabola in `b` with curvature `2 tr F` and its minimum at `b*`.

    Args:
        baseline: `b`, any shape; for the value, `V`.
        optimal: `b*`.
        fisher_trace: `tr F = E|ψ|²`.
        group_size: Rollouts averaged, `R >= 1`.
    """
    if group_size < 1:
        fail("excess_variance", "group_size must be at least 1", group_size, "Pass the number of rollouts averaged.")
    return (baseline - optimal).square() * fisher_trace / group_size


def baseline_saving(blocks: GroupGrams, rewards: Rewards) -> BaselineSaving:
    """Variance that `optimal-loo` saves over `rloo` in each prompt's gradient at this `R`: what a change would bring.

    Both subtract a mean reward of the other rollouts, `optimal-loo` one that is weighted by squared score norms. Both
    are unbiased, so what one saves is `E|ĝ_rloo|² - E|ĝ_opt|²`, with what it costs to estimate either baseline. The
    estimate is unbiased if `E ψ = 0`: with advantages `A_i`, and `A_ij` those of rollout `i` if `j` were left out too,

        `R² Var ĝ = E[Σ_i K_ii A_i² + Σ_{i≠j} K_ij (A_i A_j - A_ij A_ji)] - R |g|²`,

    because `A_ij` and `A_ji` depend on neither `ψ_j` nor `ψ_i`, so `E[K_ij A_ij A_ji] = |g|²`. Subtracting that product
    removes most of the noise between rollouts. The best *constant* baseline saves `Cov(|ψ|², r)² / (R tr F)` over the
    value `V`. No unbiased estimate of that exists (it is no polynomial of the law), and a group must estimate its
    baseline anyway: in groups of 4 that can cost as much as it saves.
    Reads: `fraction` about `0` the mean is as good; `0.2` a fifth of the variance within prompts would be saved.

    Raises:
        ScoregramError: If `R < 4`.
    """
    k, r = require_blocks(blocks, rewards, at_least=4, caller="baseline_saving")
    size, norms = r.shape[1], k.diagonal(dim1=1, dim2=2)  # (P, R)
    saved = _spread_of_gradient(k, r, torch.ones_like(norms)) - _spread_of_gradient(k, r, norms.clamp(min=0))
    moments = group_moments(k, r)
    estimated = (moments.variance_fisher_trace + moments.gradient_squared) / (size - 1)
    variance = (moments.oracle_trace + estimated) / size
    total = float(variance.sum())
    fraction = float(saved.sum()) / total if total > 0 else math.nan
    return BaselineSaving(per_prompt=saved, variance=variance, fraction=fraction)


def _spread_of_gradient(k: Tensor, rewards: Tensor, weights: Tensor) -> Tensor:
    """`(P,)`: unbiased estimate of `Var ĝ + |g|²/R`, with the weighted mean reward of the others as baseline."""
    size = rewards.shape[1]
    others = 1 - torch.eye(size, dtype=k.dtype, device=k.device)
    r = rewards - rewards[:, :1]  # of no effect on advantages; constant rewards then give exactly zero
    single = r - _mean_of_others(weights, r, torch.ones_like(others[0]))  # (P, R)
    # Row i: rollout i is left out as well. Sums over the others, because one K_ii may dominate.
    baselines = [_mean_of_others(weights * others[i], r, others[i]) for i in range(size)]
    pairs = r[:, :, None] - torch.stack(baselines, dim=1)  # (P, R, R): row i, advantages of i without j
    between = single[:, :, None] * single[:, None, :] - pairs * pairs.mT
    own = (k.diagonal(dim1=1, dim2=2) * single.square()).sum(dim=1)
    return (own + (k * others * between).sum(dim=(1, 2))) / size**2


def _mean_of_others(weights: Tensor, values: Tensor, members: Tensor) -> Tensor:
    """`(P, R)`: weighted mean over the members other than each rollout; unweighted if their weights are all zero."""
    others = 1 - torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
    total = weights @ others
    plain = (values * members) @ others / (members @ others)
    return torch.where(total > 0, (weights * values) @ others / total, plain)
