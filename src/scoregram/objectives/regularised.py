"""A loss that the KL-regularised optimum minimises under any sampling law: the variance of a regularised reward."""

import torch
from torch import Tensor

from scoregram.checks import fail, require_in_range
from scoregram.objectives.aggregation import finite_loss
from scoregram.objectives.ratio import rollout_log_ratio
from scoregram.objectives.tokens import log_ratios, rollout_values
from scoregram.types import BatchRewards, LogProbs, Loss, Mask, TokenWeights


def consistency_variance(
    log_probs: LogProbs,
    ref_log_probs: LogProbs,
    rewards: BatchRewards,
    mask: Mask,
    *,
    group_size: int,
    beta: float | int,
    leave_one_out: bool = True,
) -> Loss:
    """Half the variance within a group of reward minus `β` times the log-ratio to the reference, averaged over groups.

    `v_i = r_i − β log(π(y_i)/π_ref(y_i))`; at the optimum of `E[r] − β KL(π‖π_ref)` it is the same for every rollout
    of a prompt, whoever sampled it. `L = (1/P) Σ_p (1/2m) Σ_i (v_i − v̄)²`, with `m = n − 1` (`leave_one_out`, the
    unbiased variance: `Σ_i (v_i − v̄)²/(n−1)` is the mean of `(v_i − v̄)(v_i − v̄_{−i})`) or `m = n` (full, smaller
    by `(n−1)/n`).

    Weight on `∇log π_it`, at every policy: `β (v_i − v̄)/(P m)`, that is `(β/N)(v_i − v̄_{−i})` for leave-one-out:
    RLOO on the regularised reward, times `β`. Proof: `∂v_i = −β ∂log π(y_i)`, and `Σ_i (v_i − v̄) = 0` removes the
    derivative of the mean. On-policy its mean is `∇L = −β ∇(E[r] − β KL(π‖π_ref))` for leave-one-out, and `(n−1)/n`
    of that for full; the derivative of the sampling law is not part of it.

    This estimator is ours: the published one's weights were not verified. The square of the leave-one-out deviation,
    another reading, would be `n/(n−1)` too large.

    A rollout without completion tokens is left out of its group, its reward unread; a group with fewer than two
    rollouts left contributes exactly zero (one rollout has no variance). `P` counts every group.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        ref_log_probs: `(N, T)`, a constant.
        rewards: `(N,)`, a constant. Rollouts of one prompt are neighbours.
        mask: `(N, T)`, true on completion tokens.
        group_size: `R >= 2`, dividing `N`.
        beta: Strength of the regularisation, `> 0`; at `0` the loss would not depend on the policy.
        leave_one_out: Which normalisation, see above.

    Reference:
        AGRO, Tang, Cohen, Zhang, Valko, Munos 2025, arXiv:2503.19612.
    """
    v, kept = _regularised_rewards(log_probs, ref_log_probs, rewards, mask, group_size, beta)
    deviation, normaliser = _deviation(v, kept, leave_one_out)
    per_group = deviation.square().sum(dim=-1) / (2 * normaliser)  # (P,)
    return finite_loss(per_group.mean(), caller="consistency_variance")


def consistency_weights(
    log_probs: LogProbs,
    ref_log_probs: LogProbs,
    rewards: BatchRewards,
    mask: Mask,
    *,
    group_size: int,
    beta: float | int,
    leave_one_out: bool = True,
) -> TokenWeights:
    """Weight `w_it` that `consistency_variance` gives to `∇log π_it`, at every policy: `β (v_i − v̄)/(P m)`."""
    v, kept = _regularised_rewards(log_probs.detach(), ref_log_probs, rewards, mask, group_size, beta)
    deviation, normaliser = _deviation(v, kept, leave_one_out)
    per_rollout = beta * deviation / (normaliser[:, None] * v.shape[0])  # (P, R)
    return mask * per_rollout.flatten()[:, None]


def _regularised_rewards(
    log_probs: Tensor, ref_log_probs: Tensor, rewards: Tensor, mask: Tensor, group_size: int, beta: float | int
) -> tuple[Tensor, Tensor]:
    """`v` and which rollouts have completion tokens, both `(P, R)`."""
    caller = "consistency_variance"
    require_in_range(
        float(beta),
        low=torch.finfo(torch.float32).tiny,
        high=1e30,
        name="beta",
        caller=caller,
        remedy="Choose beta > 0.",
    )
    log_ratio = log_ratios(log_probs, ref_log_probs, mask, other="ref_log_probs", caller=caller)
    if group_size < 2 or mask.shape[0] % group_size:
        got = f"group_size {group_size} for {mask.shape[0]} rollouts"
        fail(caller, "group_size must be at least 2 and divide N", got, "Pass whole groups, neighbours in the batch.")
    r = rollout_values(rewards, mask, name="rewards", caller=caller).to(log_ratio.dtype)
    v = r - beta * rollout_log_ratio(log_ratio)
    return v.view(-1, group_size), mask.any(dim=-1).view(-1, group_size)


def _deviation(v: Tensor, kept: Tensor, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """`v_i − v̄` over the kept rollouts and `0` elsewhere, `(P, R)`; the normaliser `m`, at least one, `(P,)`."""
    count = kept.sum(dim=-1)  # (P,)
    mean = (v * kept).sum(dim=-1) / count.clamp(min=1)
    deviation = (v - mean[:, None]) * kept
    return deviation, (count - int(leave_one_out)).clamp(min=1).to(v.dtype)
