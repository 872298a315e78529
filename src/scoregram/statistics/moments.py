r"""Unbiased estimates of a prompt's gradient moments, from its own block of the Gram and its rewards.

Setting. The rollouts of a prompt are independent draws `(ψ, r)` with `E ψ = 0` (on-policy, temperature one, nothing
truncated). Then `g = E[ψ r]` is the gradient of the expected reward `V = E r`, `σ² = Var r`, `tr F = E|ψ|²`.

Each estimate is the complete U-statistic of its kernel: the average over *all* ordered tuples of different rollouts.
It is exactly unbiased, and the group need not be split. Inclusion–exclusion turns the average over tuples into one
weight per entry of K, `⟨K, W(r)⟩`. Hence each estimate is linear in K (additive over layers), unchanged by a shift of
all rewards, and of degree two in their scale.

| quantity | kernel | rollouts |
|---|---|---|
| `tr F` | `K_11` | 1 |
| `E|ψ r|²` | `K_11 r_1²` (depends on the shift) | 1 |
| `|E ψ|²` | `K_12` | 2 |
| `σ² tr F` | `K_11 (r_2 - r_3)² / 2` | 3 |
| `E|ψ (r - V)|²` | `K_11 (r_1 - r_2)(r_1 - r_3)` | 3 |
| `|g|²` | `⟨h_12, h_34⟩`, `h_ij = (ψ_i - ψ_j)(r_i - r_j) / 2` | 4 |
| `tr Σ_oracle` | `E|ψ (r - V)|²` minus `|g|²` | 4 |

An unbiased estimate of a non-negative quantity can be negative if the noise is larger than the quantity. Negative
estimates are not clipped: clipping would bias every average over prompts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite, require_gram, require_grams, require_group_size
from scoregram.types import BatchGram, GroupGrams, PerPrompt, Rewards


@dataclass(frozen=True)
class GroupMoments:
    """Second-order moments of each prompt's gradient; one number per prompt, estimated or exact."""

    gradient_squared: PerPrompt
    """`|g(x)|²`, squared norm of the prompt's policy gradient."""
    fisher_trace: PerPrompt
    """`tr F(x) = E|ψ|²`."""
    variance_fisher_trace: PerPrompt
    """`σ²(x) tr F(x)`."""
    oracle_trace: PerPrompt
    """`tr Σ_oracle(x)`, variance of one rollout's gradient `ψ (r - V)` if the value `V` were known."""
    raw_square: PerPrompt
    """`E|ψ r|²`, second moment of one rollout's gradient without a baseline."""
    mean_score_squared: PerPrompt
    """`|E ψ|²`, zero on-policy. Well above zero over many prompts, it shows truncated or tempered sampling or a stale
    policy."""


def group_blocks(gram: BatchGram, group_size: int) -> GroupGrams:
    """Diagonal blocks of a batch Gram: the Gram of each prompt's own group.

    Rollouts must be ordered prompt by prompt: rollout `i` belongs to prompt `i // R`.

    Returns:
        `(P, R, R)`, float64.

    Raises:
        ScoregramError: If `N` is not a multiple of `group_size`, or `gram` is not a Gram.

    Example:
        >>> group_blocks(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), 2)[1]
        tensor([[3., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    k = require_gram(gram, caller="group_blocks")
    if group_size < 1 or k.shape[0] % group_size:
        fail(
            "group_blocks",
            "the number of rollouts must be a multiple of the group size",
            f"{k.shape[0]} rollouts and group_size {group_size}",
            "Pass the rollouts of whole groups, prompt by prompt.",
        )
    prompts = k.shape[0] // group_size
    blocks = k.reshape(prompts, group_size, prompts, group_size)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()  # (P, R, R)


def group_moments(blocks: GroupGrams, rewards: Rewards) -> GroupMoments:
    """Unbiased estimates of every gradient moment of each prompt, from its own rollouts alone.

    `gradient_squared` estimates `|Cov(ψ, r)|²` even if `E ψ ≠ 0`; the other estimates are right only if `E ψ = 0`.
    Constant rewards give zero for all but `fisher_trace`, `raw_square` and `mean_score_squared`. `group_blocks` cuts
    the blocks out of a batch Gram.

    Raises:
        ScoregramError: If `R < 4`; `|g|²` needs two disjoint pairs of rollouts.
    """
    k, r = require_blocks(blocks, rewards, at_least=4, caller="group_moments")
    norms = k.diagonal(dim1=1, dim2=2)  # (P, R)
    size = r.shape[1]
    gradient_squared = (k * covariance_weights(r)).sum(dim=(1, 2))
    return GroupMoments(
        gradient_squared=gradient_squared,
        fisher_trace=norms.mean(dim=1),
        variance_fisher_trace=(norms * _variance_of_others(r)).mean(dim=1),
        oracle_trace=(norms * _squared_deviation(r)).mean(dim=1) - gradient_squared,
        raw_square=(norms * r.square()).mean(dim=1),
        mean_score_squared=(k.sum(dim=(1, 2)) - norms.sum(dim=1)) / (size * (size - 1)),
    )


def covariance_weights(rewards: Tensor) -> Tensor:
    """`(P, R, R)` weights `W` with `E⟨K, W⟩ = |Cov(ψ, r)|²`, for any distribution of `(ψ, r)`; `R >= 4`.

    By the symmetry of `h` the average of `⟨h_ij, h_kl⟩` over four different rollouts is that of
    `(r_i - r_j)(r_k - r_l) K_ik`. For fixed `i ≠ k`, the sum over all `j ≠ l` outside `{i, k}` is the product of the
    two single sums minus the terms with `j = l`.

    Raises:
        ScoregramError: If `R < 4`, or a reward is not finite.
    """
    size = require_group_size(rewards, at_least=4, caller="covariance_weights")
    d = reward_differences(require_finite(rewards, name="rewards", caller="covariance_weights"))  # (P, R, R)
    to_others = d.sum(dim=2)
    weights = (to_others[:, :, None] - d) * (to_others[:, None, :] + d) - d @ d.mT
    apart = ~torch.eye(size, dtype=torch.bool, device=rewards.device)
    return weights * apart / (size * (size - 1) * (size - 2) * (size - 3))


def reward_differences(rewards: Tensor) -> Tensor:
    """`(P, R, R)`: `r_i - r_j`. Exactly zero between equal rewards; subtracting a mean first would leave a residue."""
    return rewards[:, :, None] - rewards[:, None, :]


def require_blocks(blocks: Tensor, rewards: Tensor, *, at_least: int, caller: str) -> tuple[Tensor, Tensor]:
    """Gram blocks `(P, R, R)` and rewards `(P, R)` in float64; an error unless finite, symmetric and of one shape."""
    group_size = require_group_size(rewards, at_least=at_least, caller=caller)
    if rewards.ndim != 2 or rewards.shape[0] == 0 or blocks.shape != (*rewards.shape, group_size):
        fail(
            caller,
            "needs rewards (P, R) and Gram blocks (P, R, R) of at least one prompt",
            f"rewards {tuple(rewards.shape)} and blocks {tuple(blocks.shape)}",
            "Cut a batch Gram with group_blocks.",
        )
    r = require_finite(rewards.detach().double(), name="rewards", caller=caller)
    return require_grams(blocks, caller=caller), r


def _variance_of_others(rewards: Tensor) -> Tensor:
    """`(P, R)`: unbiased reward variance of the group without rollout `i`, hence independent of `ψ_i`."""
    size = rewards.shape[1]
    squares = reward_differences(rewards).square().sum(dim=2)  # (P, R)
    return (squares.sum(dim=1, keepdim=True) / 2 - squares) / ((size - 1) * (size - 2))


def _squared_deviation(rewards: Tensor) -> Tensor:
    """`(P, R)`: average of `(r_i - r_j)(r_i - r_k)` over different others `j, k`; `(r_i - V)²` in expectation."""
    size = rewards.shape[1]
    d = reward_differences(rewards)
    return (d.sum(dim=2).square() - d.square().sum(dim=2)) / ((size - 1) * (size - 2))
