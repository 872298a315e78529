"""Advantages reweighted by the geometry of gradients: which rollouts and tokens pull in the same direction.

`score_grams` are inner products of one vector per rollout, `K_ij = ⟨ψ_i, ψ_j⟩`: exact scores, or a proxy of them. The
functions read inner products alone, so a rotation of the vectors changes nothing. What the papers leave open is said at
each function. All three change the direction of the expected update.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.advantages.comparisons import (
    finite_estimator,
    group_labels,
    masked_steps,
    observed_rewards,
    other_pairs,
    standard_scores,
)
from scoregram.checks import fail, require_finite, require_in_range, require_same_shape
from scoregram.types import Advantages, GroupGrams, Observed, Rewards, TokenAdvantages, TokenMask, TokenValues

TokenFeatures = Float[Tensor, "prompts rollouts tokens features"]

SHARED = 0.5
"""Eigenvalues of at least this share of the largest one belong to the shared subspace."""
LEAST_VARIANCE = 1e-8
"""Floor of the variance of margins, as in the authors' code."""


@finite_estimator
def residual_amplified(
    rewards: Rewards, *, score_grams: GroupGrams, observed: Observed | None = None, strength: float | int = 1.0
) -> Advantages:
    """Standardised rewards whose part outside the dominant shared directions is amplified where rollouts cancel.

    With the standardised rewards `a` and the projection `Π` on the eigenvectors of `K` whose eigenvalues are at least
    half the largest, `A = Πa + (1 + s κ)(a − Πa)`. The cancellation `κ = 1 − |Σ a_i ψ_i| / Σ |a_i| |ψ_i|` is 0 if all
    rollouts pull the same way and 1 if they cancel. Orthogonal scores of equal norm leave `a` unchanged.

    Args:
        rewards: `(P, R)`.
        score_grams: `(P, R, R)`. Gram of every group, positive semidefinite.
        observed: `(P, R)` bool.
        strength: `s`, from 0 (the standardised rewards).

    Reference:
        SALT. Chang et al. 2026, arXiv:2606.05800: from its abstract. The threshold, `κ` and `s` are ours.

    Example:
        >>> grams = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]]])
        >>> residual_amplified(torch.tensor([[1.0, 0.0, 0.5]]), score_grams=grams)
        tensor([[ 2., -2.,  0.]])
    """
    caller = "residual_amplified"
    require_in_range(strength, low=0.0, high=float("inf"), name="strength", caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    grams = _member_grams(score_grams, members, caller=caller)
    scores = standard_scores(values, group_labels(members), members, eps=0.0, ddof=1, dtype=rewards.dtype)
    sizes, vectors = torch.linalg.eigh(grams)  # (P, R), (P, R, R)
    is_shared = sizes >= SHARED * sizes[..., -1:]
    within = torch.einsum("prk,psk,ps->pr", vectors * is_shared.unsqueeze(-2), vectors, scores)
    amplified = within + (1 + strength * _cancellation(grams, scores)).unsqueeze(-1) * (scores - within)
    return torch.where(members, amplified, 0.0).to(rewards.dtype)


@finite_estimator
def novelty_scaled(
    rewards: Rewards, *, score_grams: GroupGrams, observed: Observed | None = None, strength: float | int = 0.5
) -> Advantages:
    """Rewards scaled up where a rollout's gradient is new to its group, then standardised.

    `ν_i = 1 − mean_{j≠i} cos²(ψ_i, ψ_j)` is 1 for a direction orthogonal to all others and 0 for one that all share.
    The reward becomes `r_i (1 + s (2ν_i − 1))`, within `1 ± s` times `r_i`, and is standardised in its group. Equal
    rewards other than 0 still differ by novelty. A zero score is orthogonal to all.

    Args:
        rewards: `(P, R)`.
        score_grams: `(P, R, R)`. Gram of every group.
        observed: `(P, R)` bool.
        strength: `s`, in `[0, 1]`; 0 gives the standardised rewards.

    Reference:
        G2RL. Liang et al. 2025, arXiv:2512.15687: bounded multiplicative scaling by novelty within the group is from
        its abstract; `ν`, the bound and `s` are ours.

    Example:
        >>> grams = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
        >>> novelty_scaled(torch.tensor([[1.0, 1.0, 1.0]]), score_grams=grams)
        tensor([[-0.5774, -0.5774,  1.1547]])
    """
    caller = "novelty_scaled"
    require_in_range(strength, low=0.0, high=1.0, name="strength", caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    grams = _member_grams(score_grams, members, caller=caller)
    scaled = values * (1 + strength * (2 * _novelty(grams, members) - 1))
    scores = standard_scores(scaled, group_labels(members), members, eps=0.0, ddof=1, dtype=rewards.dtype, sizes=values)
    return scores.to(rewards.dtype)


@finite_estimator
def discriminative_tokens(
    token_rewards: TokenValues,
    *,
    mask: TokenMask,
    token_features: TokenFeatures,
    lowest: float | int = 0.8,
    highest: float | int = 1.2,
) -> TokenAdvantages:
    """Standardised rewards, larger at tokens whose gradient tells good rollouts from bad ones.

    Rollouts with a positive and with a negative standardised reward `a_i` are two sides with the centroids
    `μ = Σ |a_i| v_it / Σ |a_i|` of token gradients `v_it`. The margin of a token is how much closer it is to the
    centroid of its own side, `m = |v − μ_other|² − |v − μ_own|²`, and `γ` the deviation of margins on its side. One
    refinement weights every token by `σ(m/γ)` in new centroids. With the margins to these, `A_it` is proportional to
    `a_i (lo + (hi − lo) σ(m/γ))`. Weights have the mean 1 over the tokens of the batch; where `a_i = 0` they are `lo`.

    Args:
        token_rewards: `(P, R, T)`.
        mask: `(P, R, T)` bool.
        token_features: `(P, R, T, F)`. `v_it`, or any vectors with the same inner products.
        lowest: `lo`, weight of a token on the wrong side, positive.
        highest: `hi`, weight of a token far on its own side, at least `lo`.

    Reference:
        DelTA. Zhang, Wu, Lin 2026, arXiv:2605.21467; the formulas and 0.8, 1.2 are those of the authors' code.
    """
    caller = "discriminative_tokens"
    if not 0 < lowest <= highest < float("inf"):
        fail(caller, "needs 0 < lowest <= highest", (lowest, highest), "Pass the bounds of the weights.")
    rewards = masked_steps(token_rewards, mask, name="token_rewards", caller=caller, at_least=2)
    require_same_shape(token_features[..., 0], mask, name="token_features", like_name="mask", caller=caller)
    features = torch.where(mask.unsqueeze(-1), token_features.detach(), 0).double()[mask]  # (M, F)
    require_finite(features, name="token_features", caller=caller)
    members = mask.any(dim=-1)
    scores = standard_scores(
        rewards.sum(-1), group_labels(members), members, eps=0.0, ddof=1, dtype=token_rewards.dtype
    )
    credit = scores.unsqueeze(-1).expand(mask.shape)[mask]  # (M,)
    weights = lowest + (highest - lowest) * _side_shares(features, credit)
    advantages = torch.zeros_like(rewards)
    advantages[mask] = credit * weights / weights.mean() if len(weights) else credit
    return advantages.to(token_rewards.dtype)


def _side_shares(features: Tensor, credit: Tensor) -> Tensor:
    """`(M,)` `σ(m/γ)` with refined centroids; 0 for a token without credit."""
    amounts = credit.abs()
    first = _margins(features, credit, amounts)
    spread = torch.zeros_like(credit)
    for side in (credit > 0, credit < 0):
        if bool(side.any()):
            spread[side] = first[side].var(correction=0).clamp_min(LEAST_VARIANCE).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    refined = _margins(features, credit, amounts * torch.sigmoid(first / spread))
    return torch.where(credit != 0, torch.sigmoid(refined / spread), 0.0)


def _margins(features: Tensor, credit: Tensor, amounts: Tensor) -> Tensor:
    """`(M,)` squared distance to the centroid of the other side minus that to the token's own side."""
    own, other = torch.sign(credit), []
    for sign in (1.0, -1.0):
        weights = torch.where(own == sign, amounts, 0.0)
        total = weights.sum()
        centroid = weights @ features / torch.where(total > 0, total, 1.0)
        other.append((features - centroid).square().sum(-1))
    return own * (other[1] - other[0])


def _member_grams(grams: Tensor, members: Tensor, *, caller: str) -> Tensor:
    """Grams in float64, 0 in the rows and columns of unobserved rollouts."""
    require_same_shape(grams[..., 0], members, name="score_grams", like_name="rewards", caller=caller)
    pairs = members.unsqueeze(-1) & members.unsqueeze(-2)
    kept = require_finite(torch.where(pairs, grams.detach(), 0).double(), name="score_grams", caller=caller)
    energies = kept.diagonal(dim1=-2, dim2=-1)
    if bool((energies < 0).any()):
        at = tuple(int(i) for i in (energies < 0).nonzero()[0])
        fail(caller, "the diagonal of score_grams must not be negative", f"{float(energies[at]):g} at {at}", "Pass K.")
    return (kept + kept.mT) / 2


def _cancellation(grams: Tensor, scores: Tensor) -> Tensor:
    """`(P,)` `1 − |Σ a_i ψ_i| / Σ |a_i| |ψ_i|`, in `[0, 1]`; 0 if nothing pulls."""
    pulls = (scores.abs() * grams.diagonal(dim1=-2, dim2=-1).sqrt()).sum(-1)
    length = torch.einsum("pr,prs,ps->p", scores, grams, scores).clamp_min(0).sqrt()
    return torch.where(pulls > 0, 1 - length / torch.where(pulls > 0, pulls, 1.0), 0.0).clamp(0, 1)


def _novelty(grams: Tensor, members: Tensor) -> Tensor:
    """`(P, R)` `1 − mean_{j≠i} cos²`, in `[0, 1]`; 1 for a zero score and for a rollout alone in its group."""
    norms = grams.diagonal(dim1=-2, dim2=-1).sqrt()
    safe = torch.where(norms > 0, norms, 1.0)  # the row of a zero score is zero already
    squares = (grams / safe.unsqueeze(-1) / safe.unsqueeze(-2)).square().clamp(0, 1)
    pairs = other_pairs(members)
    count = pairs.sum(-1)
    return 1 - (pairs * squares).sum(-1) / torch.where(count > 0, count, 1.0)
