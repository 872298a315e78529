"""Losses that compare the policy with a reference policy: KL penalties, DPO on pairs, and AGRO.

**KL terms.** With `d = log π(a) − log π_ref(a)` for a sampled token `a ~ π(·|s)`, at a fixed context `s`:

| term | value | mean of the value | gradient `c ∇log π`, `c =` | mean of the gradient |
|---|---|---|---|---|
| `k1` | `d` | `KL(π‖π_ref)` | `1` | `0`: as a loss it only adds noise |
| `k2` | `d²/2` | `KL(π‖π_ref)` to second order only | `d` | `∇KL(π‖π_ref)`, exactly |
| `k3` | `exp(−d) − 1 + d` | `KL(π‖π_ref)` | `1 − exp(−d)` | `∇KL(π_ref‖π)`, the other direction |

Proof. `E[∇log π] = 0` gives the first. `∇KL(π‖π_ref) = E[d ∇log π] + E[∇log π]` gives the second. `E[exp(−d) ∇log π]`
is `Σ_a π_ref ∇log π = −∇KL(π_ref‖π)`, which gives the third. A good estimate of the value is thus not a good loss.

This holds for one token in its context. Summed over the tokens of a rollout, `k2` gives the sum over the sampled
contexts `s_t` of `∇KL(π(·|s_t)‖π_ref(·|s_t))`. The divergence of whole rollouts also depends on which contexts the
policy visits, and that part of its gradient is missing. To include it, put the rollout's log-ratio into the reward, or
use `consistency_variance`. Under `sequence_mean`, which divides by a length that is itself sampled, even `k1` has a
mean gradient: `E[ψ/L] = ∇E[1/L]`, so minimising it makes rollouts longer, whatever the reference is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scoregram.checks import fail, lookup, require_finite, require_in_range
from scoregram.objectives.aggregation import finite_loss, weighted_sum
from scoregram.objectives.tokens import MAX_LOG_RATIO, log_ratios, rollout_log_ratio, rollout_values
from scoregram.types import BatchRewards, LogProbs, Loss, Mask, Pairs, Rewards, TokenWeights

LEAST_STRENGTH, LARGEST_STRENGTH = float(torch.finfo(torch.float32).tiny), 1e30
"""Range of the strength `β` of the reference, in losses that compare with it and compute in float32."""


def log_ratio_term(log_ratio: Tensor) -> Tensor:
    """`k1 = d`: unbiased and of either sign as a value; as a loss it only adds noise. Elementwise."""
    return log_ratio


def half_square_term(log_ratio: Tensor) -> Tensor:
    """`k2 = d²/2`: never negative, biased as a value, with the right gradient as a loss. Elementwise."""
    return log_ratio.square() / 2


def bregman_term(log_ratio: Tensor) -> Tensor:
    """`k3 = exp(−d) − 1 + d`: unbiased and never negative as a value, the other KL direction as a loss. Elementwise.

    `d` is clamped from below at `−MAX_LOG_RATIO = −20`, where the value is `4.9e8` and float32 is close to overflow;
    below that the term is constant and its gradient zero. `expm1` keeps small `d` exact: `k3 ≈ d²/2` there.
    """
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-d).expm1() + d


@dataclass(frozen=True)
class KLTerm:
    """Estimate of `KL(π‖π_ref)` from a sampled token, with its claims. A claim that a row does not state is false."""

    fn: Callable[[Tensor], Tensor]
    """Elementwise, from the log-ratio `d` to the term."""
    formula: str
    unbiased_value: bool = False
    """The mean over the policy is `KL(π‖π_ref)`."""
    nonnegative: bool = False
    """No sample is negative."""
    zero_mean_gradient: bool = False
    """As a loss its mean gradient is zero."""
    reverse_gradient: bool = False
    """As a loss its mean gradient is `∇KL(π‖π_ref)`, the divergence that it estimates."""
    forward_gradient: bool = False
    """As a loss its mean gradient is `∇KL(π_ref‖π)`, the other direction."""


KL_TERMS = MappingProxyType(
    {
        "k1": KLTerm(log_ratio_term, "d", unbiased_value=True, zero_mean_gradient=True),
        "k2": KLTerm(half_square_term, "d²/2", nonnegative=True, reverse_gradient=True),
        "k3": KLTerm(bregman_term, "exp(−d) − 1 + d", unbiased_value=True, nonnegative=True, forward_gradient=True),
    }
)


def kl_values(log_probs: LogProbs, ref_log_probs: LogProbs, mask: Mask, *, term: str) -> LogProbs:
    """Estimate of the divergence at each completion token, `(N, T)`, and `0` elsewhere.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        ref_log_probs: `(N, T)`, a constant.
        mask: `(N, T)`, true on completion tokens.
        term: A key of `KL_TERMS`.

    Reference:
        The three estimates: Schulman 2020, "Approximating KL divergence" (note). `k3` in a loss: GRPO,
        arXiv:2402.03300.
    """
    row = lookup(KL_TERMS, term, kind="KL term")
    return row.fn(log_ratios(log_probs, ref_log_probs, mask, other="ref_log_probs", caller="kl_values"))


def kl_penalty(
    log_probs: LogProbs,
    ref_log_probs: LogProbs,
    mask: Mask,
    *,
    term: str,
    aggregation: str = "sequence_mean",
    length: float | int | None = None,
) -> Loss:
    """Aggregated estimate of the divergence from the reference. Multiply it by `β` and add it to a loss.

    `Σ_it u_it k_it`. Weight on `∇log π_it` in the update `−∇L`: `−u_it` (k1), `−u_it d_it` (k2), `−u_it (1 −
    exp(−d_it))` (k3); the table at the top of this file has their means. `term` has no default: the choice decides
    what is penalised.

    Raises:
        ScoregramError: If a completion token's log-probability is not finite under either policy; the divergence from
            a reference that gives a sampled token probability zero is infinite.
    """
    values = kl_values(log_probs, ref_log_probs, mask, term=term)
    return weighted_sum(values, mask, aggregation, length, caller="kl_penalty")


def preference_pairs(rewards: Rewards) -> Pairs:
    """Every pair of rollouts of one prompt with unequal rewards, better first, as rows of a flat batch.

    With binary rewards these are all right × wrong pairs, `k(R − k)` for a group with `k` right ones. Ties give no
    pair, so a group of equal rewards or of one rollout gives none. Rollout `j` of prompt `p` is row `p·R + j`.

    Returns:
        `(M, 2)` int64, possibly with `M = 0`.

    Example:
        >>> preference_pairs(torch.tensor([[1.0, 0.0, 0.0]])).tolist()
        [[0, 1], [0, 2]]
    """
    require_finite(rewards, name="rewards", caller="preference_pairs")
    prompt, better, worse = (rewards[:, :, None] > rewards[:, None, :]).nonzero().unbind(dim=-1)
    return torch.stack([prompt * rewards.shape[1] + better, prompt * rewards.shape[1] + worse], dim=-1)


def pair_preference(
    log_probs: LogProbs, ref_log_probs: LogProbs, mask: Mask, pairs: Pairs, *, beta: float | int = 0.1
) -> Loss:
    """Negated log-probability that the better rollout of each pair is preferred, averaged over pairs (DPO).

    `L = −(1/M) Σ_(w,l) log σ(β Δ)` with `Δ = h_w − h_l`, `h_i = log π(y_i)/π_ref(y_i)` summed over completion tokens.
    One pair gives the score `ψ_w` the weight `+(β/M) σ(−βΔ)` and `ψ_l` the same weight negated; a rollout in several
    pairs gets the sum. The weight is never clipped, is at most `β/M` per pair, and falls as the pair is learned.

    With `π = π_ref` every pair weighs `β/2M`, so a rollout gets `(β/2M)(wins − losses)`. On all pairs of binary
    rewards that is `(β R/2M)(r_i − r̄)`: exactly mean-centred REINFORCE. With other rewards it is not: wins count
    ranks, not the size of the difference.

    If a rollout of a pair has no completion tokens, the pair contributes exactly zero and counts in `M`. Without pairs,
    as in a batch of dead groups, the loss is exactly zero.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        ref_log_probs: `(N, T)`, a constant.
        mask: `(N, T)`, true on completion tokens.
        pairs: `(M, 2)` rows of the batch, better first, for example from `preference_pairs`.
        beta: Inverse temperature, `>= 0`.

    Reference:
        DPO, Rafailov et al. 2023, arXiv:2305.18290.
    """
    margin, live = _margins(log_probs, ref_log_probs, mask, pairs, beta)
    return finite_loss(-(logsigmoid(margin) * live).sum() / max(pairs.shape[0], 1), caller="pair_preference")


def pair_preference_weights(
    log_probs: LogProbs, ref_log_probs: LogProbs, mask: Mask, pairs: Pairs, *, beta: float | int = 0.1
) -> TokenWeights:
    """Weight `w_it` that `pair_preference` gives to `∇log π_it`, at every policy: `(β/M) Σ ± σ(−βΔ)` over its pairs."""
    margin, live = _margins(log_probs.detach(), ref_log_probs, mask, pairs, beta)
    per_pair = beta * (-margin).sigmoid() * live / max(pairs.shape[0], 1)
    per_rollout = torch.zeros(mask.shape[0], dtype=margin.dtype, device=margin.device)
    per_rollout = per_rollout.index_add(0, pairs[:, 0], per_pair).index_add(0, pairs[:, 1], -per_pair)
    return mask * per_rollout[:, None]


def _margins(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, pairs: Tensor, beta: float | int
) -> tuple[Tensor, Tensor]:
    """`β Δ` of each pair, and whether both its rollouts have completion tokens, both `(M,)`."""
    require_in_range(float(beta), low=0.0, high=LARGEST_STRENGTH, name="beta", caller="pair_preference")
    h = rollout_log_ratio(log_ratios(log_probs, ref_log_probs, mask, other="ref_log_probs", caller="pair_preference"))
    _require_pairs(pairs, rollouts=mask.shape[0])
    better, worse = pairs.unbind(dim=-1)
    return beta * (h[better] - h[worse]), mask.any(dim=-1)[pairs].all(dim=-1)


def _require_pairs(pairs: Tensor, *, rollouts: int) -> None:
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        fail("pair_preference", "pairs must be (M, 2)", tuple(pairs.shape), "Pass rows (better, worse).")
    wrong = ((pairs < 0) | (pairs >= rollouts)).any(dim=-1) | (pairs[:, 0] == pairs[:, 1])
    if bool(wrong.any()):
        m = int(wrong.nonzero()[0])
        got = f"{pairs[m].tolist()} at index {m}"
        fail("pair_preference", f"a pair must be two different rows of {rollouts} rollouts", got, "Check the indices.")


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
    """Half the within-group variance of the KL-regularised reward, averaged over groups (AGRO).

    The regularised reward is `v_i = r_i − β log(π(y_i)/π_ref(y_i))`. At the optimum of `E[r] − β KL(π‖π_ref)` it is the
    same for every rollout of a prompt, whichever policy sampled it, so the optimum minimises this loss under any
    sampling distribution. `L = (1/P) Σ_p (1/2m) Σ_i (v_i − v̄)²` over the `n` rollouts of each group, with `m = n − 1`
    (`leave_one_out`, the unbiased variance: `Σ_i (v_i − v̄)²/(n−1)` is the mean of `(v_i − v̄)(v_i − v̄_{−i})`) or
    `m = n` (full, smaller by `(n−1)/n`). Top-k and top-p exclude rollouts, and the loss says nothing of their
    probability.

    Weight on `∇log π_it`, at every policy: `β (v_i − v̄)/(P m)`, that is `(β/N)(v_i − v̄_{−i})` for leave-one-out:
    RLOO on the regularised reward, times `β`. Proof: `∂v_i = −β ∂log π(y_i)`, and `Σ_i (v_i − v̄) = 0` removes the
    derivative of the mean. On-policy, `E[∇L] = −β ∇(E[r] − β KL(π‖π_ref))` for leave-one-out, and `(n−1)/n` of that
    for full; `∇L` treats the sampling distribution as fixed.

    This estimator is ours: we have not verified the weights of the published one. The square of the leave-one-out
    deviation, another possible reading of the paper, would be `n/(n−1)` times larger.

    A rollout without completion tokens is left out of its group and its reward is not read. A group with fewer than
    two rollouts left contributes exactly zero (one rollout has no variance). `P` counts every group.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        ref_log_probs: `(N, T)`, a constant.
        rewards: `(N,)`, a constant. Rollouts of one prompt are adjacent.
        mask: `(N, T)`, true on completion tokens.
        group_size: `R >= 2`, dividing `N`.
        beta: Strength of the regularisation, `> 0`; at `0` the loss would not depend on the policy.
        leave_one_out: `m = n − 1` if true, `m = n` otherwise.

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
    require_in_range(float(beta), low=LEAST_STRENGTH, high=LARGEST_STRENGTH, name="beta", caller=caller)
    log_ratio = log_ratios(log_probs, ref_log_probs, mask, other="ref_log_probs", caller=caller)
    if group_size < 2 or mask.shape[0] % group_size:
        got = f"group_size {group_size} for {mask.shape[0]} rollouts"
        fail(caller, "group_size must be at least 2 and divide N", got, "Pass whole groups, one after another.")
    r = rollout_values(rewards, mask, name="rewards", caller=caller).to(log_ratio.dtype)
    v = r - beta * rollout_log_ratio(log_ratio)
    return v.view(-1, group_size), mask.any(dim=-1).view(-1, group_size)


def _deviation(v: Tensor, kept: Tensor, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """`v_i − v̄` for the kept rollouts and `0` for the others, `(P, R)`; the normaliser `m`, at least one, `(P,)`."""
    count = kept.sum(dim=-1)  # (P,)
    mean = (v * kept).sum(dim=-1) / count.clamp(min=1)
    deviation = (v - mean[:, None]) * kept
    return deviation, (count - int(leave_one_out)).clamp(min=1).to(v.dtype)
