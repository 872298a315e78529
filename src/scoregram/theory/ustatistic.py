"""The leave-one-out update as an average over pairs of rollouts, and what follows for its error, exactly.

Setting: rollouts `(ψ, r)` of one prompt, independent, `E ψ = 0`, `g = E[ψ r]`, `V = E r`. The kernel of a pair is
`h(1, 2) = (ψ_1 - ψ_2)(r_1 - r_2) / 2`. The exact errors themselves are in `scoregram.statistics.group_size`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import require_group_size, require_same_shape
from scoregram.statistics import GroupMoments, NoiseComponents
from scoregram.theory.lab.exact import GroundTruth
from scoregram.types import GroupRewards, PerPrompt, Scores


def pair_kernels(scores: Scores, rewards: GroupRewards) -> Float[Tensor, "rollouts rollouts parameters"]:
    """`h_ij = (ψ_i - ψ_j)(r_i - r_j) / 2` of every pair of rollouts; zero on the diagonal."""
    require_same_shape(rewards, scores[:, 0], name="rewards", like_name="the rows of scores", caller="pair_kernels")
    return (scores[:, None] - scores[None]) * (rewards[:, None] - rewards[None])[..., None] / 2


def pair_average(scores: Scores, rewards: GroupRewards) -> Float[Tensor, " parameters"]:
    """Average of the kernel over all pairs of different rollouts: the leave-one-out update.

    Statement: `(R choose 2)⁻¹ Σ_{i<j} h_ij = (1/R) Σ_i (r_i - mean_{j≠i} r_j) ψ_i`.
    Proof: `Σ_{i≠j} (ψ_i - ψ_j)(r_i - r_j) = 2 Σ_i ψ_i Σ_{j≠i} (r_i - r_j)`; divide by `2 R (R-1)`.
    Assumes: nothing, it is algebra.
    Checked by: every group of small worlds.

    Raises:
        ScoregramError: If `R < 2`; there is no pair.

    Reference:
        arXiv:2603.01162, Lemma 1.
    """
    size = require_group_size(rewards, at_least=2, caller="pair_average")
    return pair_kernels(scores, rewards).sum(dim=(0, 1)) / (size * (size - 1))


def kernel_projection(truth: GroundTruth, prompt: int) -> Float[Tensor, "chosen parameters"]:
    """Twice the mean of the kernel given one of its two rollouts, for every rollout of the prompt.

    Statement: `2 E[h(1, 2) | 1] = ψ_1 (r_1 - V) + g`.
    Proof: `E[(ψ_1 - ψ_2)(r_1 - r_2) | 1] = ψ_1 r_1 - ψ_1 V - 0 + g`, using `E ψ_2 = 0`.
    Assumes: rollouts from the policy itself.
    Checked by: the mean over the list of second rollouts.
    """
    rows = truth.listing.of_prompt(prompt)
    centred = truth.listing.returns[rows] - truth.value[prompt]
    return truth.scores[rows] * centred[:, None] + truth.gradient[prompt]


def exact_moments(truth: GroundTruth) -> GroupMoments:
    """Gradient moments of every prompt, exact where `statistics.group_moments` estimates them."""
    given = torch.nn.functional.one_hot(truth.listing.prompt, truth.value.numel()).double().mT  # (P, M)
    weight = given * truth.probability
    gradient_squared = truth.gradient.square().sum(dim=-1)
    return GroupMoments(
        gradient_squared=gradient_squared,
        fisher_trace=truth.fisher_trace,
        variance_fisher_trace=truth.reward_variance * truth.fisher_trace,
        oracle_trace=truth.oracle_covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1),
        raw_square=weight @ (truth.score_energies * truth.listing.returns.square()),
        mean_score_squared=(weight @ truth.scores).square().sum(dim=-1),
    )


def exact_components(truth: GroundTruth) -> NoiseComponents:
    """`|∇J|²`, `c1`, `c2`, `c3` of a world, exact where `statistics.noise_components` estimates them."""
    return NoiseComponents(
        gradient_squared=float(truth.objective_gradient.square().sum()),
        between_prompts=truth.c1,
        within_prompt=truth.c2,
        group_baseline=truth.c3,
    )


def group_size_to_beat_vanilla(moments: GroupMoments) -> PerPrompt:
    """Group size above which leave-one-out has less error than no baseline at all, for every prompt.

    Statement: `MSE_LOO < MSE_vanilla` exactly if `R > 1 + (σ² tr F + |g|²) / (E|ψ r|² - E|ψ (r-V)|²)`; the
    denominator is `V (2 b* - V) tr F`, and `V² tr F` if `Cov(|ψ|², r) = 0`.
    Proof: `R (MSE_vanilla - MSE_LOO)` is the denominator less the numerator over `R - 1`.
    Assumes: on-policy, one step, no division by the spread.
    Checked by: enumeration of groups on both sides.

    Returns:
        `(P,)`, float64; `inf` where the denominator is not positive (`b*` on the far side of `V/2`): no group is large
        enough. Never below one.
    """
    saved = moments.raw_square - moments.gradient_squared - moments.oracle_trace
    added = moments.variance_fisher_trace + moments.gradient_squared
    return torch.where(saved > 0, 1 + added / saved, math.inf)
