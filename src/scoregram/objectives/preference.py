"""Preferences between rollouts of one group: pairs from rewards, and the DPO loss on them."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scoregram.checks import fail, require_finite, require_in_range
from scoregram.objectives.aggregation import finite_loss
from scoregram.objectives.ratio import rollout_log_ratio
from scoregram.objectives.tokens import log_ratios
from scoregram.types import LogProbs, Loss, Mask, Pairs, Rewards, TokenWeights


def preference_pairs(rewards: Rewards) -> Pairs:
    """Every pair of rollouts of one prompt with unequal rewards, better first, as rows of a flat batch.

    With binary rewards: all right × wrong pairs, `k(R − k)` of a group with `k` right ones. Ties give no pair, so a
    group of equal rewards or of one rollout gives none. Rollout `j` of prompt `p` is row `p·R + j`.

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
    Weight of one pair on the scores: `+(β/M) σ(−βΔ)` on `ψ_w`, the same negated on `ψ_l`; a rollout in several pairs
    gets the sum. It is never clipped, is bounded by `β/M` a pair, and fades as the pair is learnt.

    With `π = π_ref` every pair weighs `β/2M`, so a rollout gets `(β/2M)(wins − losses)`. On all pairs of binary
    rewards that is `(β R/2M)(r_i − r̄)`: exactly mean-centred REINFORCE. With other rewards it is not: wins count
    ranks, not sizes.

    A pair with a rollout without completion tokens contributes exactly zero and keeps its place in `M`. Without pairs
    the loss is exactly zero, as of a batch in which every group is dead.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        ref_log_probs: `(N, T)`, a constant.
        mask: `(N, T)`, true on completion tokens.
        pairs: `(M, 2)` rows of the batch, better first; from `preference_pairs` or given.
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
    require_in_range(float(beta), low=0.0, high=1e30, name="beta", caller="pair_preference")
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
