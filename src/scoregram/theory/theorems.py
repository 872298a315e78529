"""Small theorems about group-relative updates, each a function: *Statement*, *Proof*, *Assumes*, *Checked by*.

Notation: `R` rollouts of one prompt, i.i.d. from the policy; rewards `r_i` with mean `V` and variance `σ²`; scores
`ψ_i` with `E ψ = 0`, `F = E[ψψᵀ]`, `g = ∇V = E[ψ r]`; advantages `A_i = r_i - r̄`; update `ĝ = (1/R) Σ A_i ψ_i`.

Three parts: the update of one group and its rank; the weight that dividing by the standard deviation gives to each
prompt; and the leave-one-out update as an average over pairs, with the kernel `h(1, 2) = (ψ_1 - ψ_2)(r_1 - r_2) / 2`.
The exact errors that follow from the third part are in `scoregram.statistics`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import (
    fail,
    require_finite,
    require_gram,
    require_group_size,
    require_in_range,
    require_same_shape,
)
from scoregram.spectra import orthogonal_top1_fraction
from scoregram.statistics import GroupMoments, NoiseComponents, right_chances
from scoregram.theory.lab.exact import GroundTruth
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards, PerPrompt, Scores

_LARGEST_GROUP = 1000
"""Binomial coefficients of larger groups overflow float64."""


def group_mean_scale(group_size: int) -> float:
    """Factor on the expected gradient if a rollout is part of its own baseline: `(R-1)/R`.

    Statement:
        `E ĝ = (R-1)/R · ∇V`: the right direction, too short by `1/R`.

    Proof:
        `E[ψ_i r_j] = E[ψ_i] E[r_j] = 0` for `j ≠ i`, so only the part `r_i / R` of `r̄` is correlated with `ψ_i`:
        `E[A_i ψ_i] = (1 - 1/R) g`.

    Assumes:
        Independent rollouts of the policy itself.

    Checked by:
        Enumeration of all groups in every world of the lab.

    Example:
        >>> group_mean_scale(2)
        0.5
    """
    _require_rollouts(group_size, caller="group_mean_scale")
    return (group_size - 1) / group_size


def advantage_covariance(reward_variance: float | int, group_size: int) -> Float[Tensor, "{group_size} {group_size}"]:
    """Covariance matrix of the mean-centred advantages of a group: `σ² (I - 11ᵀ/R)`.

    Statement:
        `Var(A_i) = σ² (R-1)/R` and `Cov(A_i, A_j) = -σ²/R`.

    Proof:
        `A = C r` with the projector `C = I - 11ᵀ/R`, and `Cov(C r) = σ² C Cᵀ = σ² C`.

    Assumes:
        Uncorrelated rewards of one variance; no division by the group's standard deviation.

    Checked by:
        Enumeration of all groups in every world of the lab.
    """
    _require_rollouts(group_size, caller="advantage_covariance")
    require_in_range(float(reward_variance), low=0.0, high=math.inf, name="σ²", caller="advantage_covariance")
    return reward_variance * (torch.eye(group_size, dtype=torch.float64) - 1 / group_size)


def contrast_weight(right: int, group_size: int) -> float:
    """Length of the update of a right-or-wrong group, in units of `ψ̄₊ - ψ̄₋`: `k(R-k)/R²`.

    Statement:
        With `k` of `R` rollouts right, `ĝ = k(R-k)/R² · (ψ̄₊ - ψ̄₋)`, with `ψ̄₊`, `ψ̄₋` the mean scores of the right
        and of the wrong ones.

    Proof:
        `A` is `(R-k)/R` on the right and `-k/R` on the wrong ones: `Σ A_i ψ_i = (R-k)/R · k ψ̄₊ - k/R · (R-k) ψ̄₋`.

    Assumes:
        Rewards in {0, 1}, the mean of the group as baseline. Nothing about the scores.

    Checked by:
        Every mixed group of up to eight rollouts drawn from the lab.

    Example:
        >>> contrast_weight(2, 4)
        0.25
    """
    _require_rollouts(group_size, caller="contrast_weight")
    if not 0 <= right <= group_size:
        fail("contrast_weight", f"right rollouts must lie in [0, {group_size}]", right, "Count within one group.")
    return right * (group_size - right) / group_size**2


def largest_stacked_rank(advantages: GroupAdvantages) -> int:
    """Largest possible rank of the matrix with rows `A_i ψ_i`: the number of nonzero advantages.

    Statement:
        `rank G <= #{i : A_i ≠ 0}`, with equality if those scores are linearly independent. In a mixed right-or-wrong
        group that is `R`: advantages that sum to zero do not lower the rank. `R - 1` bounds the span of the centred
        scores `ψ_i - ψ̄`, which contains `Σ A_i ψ_i` if `Σ A_i = 0`.

    Proof:
        `G = diag(A) Ψ`; a zero row adds nothing, and scaling the others does not change their rank. `1ᵀA = 0` does not
        imply `1ᵀG = 0`: `1ᵀG = Σ A_i ψ_i = R ĝ`.

    Checked by:
        Eigenvalues, for independent scores and for the groups of the lab.
    """
    return int((require_finite(advantages, name="advantages", caller="largest_stacked_rank") != 0).sum())


def update_norm_bound(gram: GramMatrix, rewards: GroupRewards) -> float:
    """Upper bound on the length of one group's update: `s √(λ_max(K)/R)`, `s` the group's own reward deviation.

    Statement:
        `|ĝ| <= s √(λ_max(K)/R)` with `s² = (1/R) Σ (r_i - r̄)²`. So, given the scores, the update is at most
        proportional to the spread of the rewards *in this group*; there is no such lower bound.

    Proof:
        `|ĝ|² = AᵀKA / R² <= λ_max(K) |A|² / R²`, and `|A|² = R s²`.

    Assumes:
        `A_i = r_i - r̄`. For advantages divided by `s`, the bound does not depend on the spread.

    Checked by:
        Random groups; equality if `A` is the first eigenvector of `K`.
    """
    k = require_gram(gram, caller="update_norm_bound")
    require_same_shape(rewards, k[0], name="rewards", like_name="one row of the Gram", caller="update_norm_bound")
    r = require_finite(rewards.double(), name="rewards", caller="update_norm_bound")
    strongest = float(torch.linalg.eigvalsh(k)[-1].clamp(min=0))
    return float((r - r.mean()).square().mean().sqrt()) * math.sqrt(strongest / len(r))


def gradient_norm_bound(reward_variance: float | int, fisher: Float[Tensor, "parameters parameters"]) -> float:
    """Upper bound on the length of a prompt's true gradient: `σ √λ_max(F)`.

    Statement:
        `|∇V| <= σ √λ_max(F)`.

    Proof:
        For a unit vector `u`, `uᵀ∇V = E[(uᵀψ)(r - V)] <= σ √(uᵀFu)` by Cauchy and Schwarz.

    Checked by:
        Every prompt of every world of the lab.
    """
    require_in_range(float(reward_variance), low=0.0, high=math.inf, name="σ²", caller="gradient_norm_bound")
    strongest = float(torch.linalg.eigvalsh(fisher.double())[-1].clamp(min=0))
    return math.sqrt(float(reward_variance) * strongest)


def energy_return_covariance(truth: GroundTruth) -> Float[Tensor, " prompts"]:
    """Exact `Cov(|ψ|², r)` of every prompt: the value is the best constant baseline exactly if it is zero.

    Statement:
        `b* - V = Cov(|ψ|², r) / E|ψ|²`, where `b* = E[|ψ|² r] / E|ψ|²` minimises the variance of `ψ (r - b)` over
        constants `b`. Using `V` instead adds `Cov(|ψ|², r)² / (R E|ψ|²)` to the variance.

    Proof:
        `E|ψ (r - b)|²` is a parabola in `b` with its minimum at `b*`, and `E[ψ (r - b)] = g` does not depend on `b`.

    Checked by:
        The exact `b*` of every prompt of the lab, and the exact variance at `V` and at `b*`.
    """
    weight = torch.nn.functional.one_hot(truth.listing.prompt).double().mT * truth.probability  # (P, M)
    energy, centred = truth.score_energies, truth.listing.returns - truth.value[truth.listing.prompt]
    return weight @ (energy * centred)


def expected_orthogonal_top1_fraction(success: float | int, group_size: int) -> float:
    """Mean top-1 fraction of mixed groups if scores were orthogonal and equally long, so that only `|A|` matters.

    `Σ_k C(R,k) p^k (1-p)^(R-k) · max(k, R-k)/(R min(k, R-k))` over mixed `k`, divided by the chance of a mixed group.
    Reads: `1/2` at `R = 2`; tends to `(R-1)/R` as `p` nears `0` or `1`; `nan` there and for `R = 1`. It is not
    monotone in `R`: at `p = 1/2` it is larger for four rollouts than for two, and smallest for eight.

    Example:
        >>> expected_orthogonal_top1_fraction(0.5, 2)
        0.5
    """
    _require_rollouts(group_size, caller="expected_orthogonal_top1_fraction")
    caller = "expected_orthogonal_top1_fraction"
    p = require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller=caller)
    mixed = dict(enumerate(right_chances(p, group_size)[1:-1], start=1))
    total = math.fsum(mixed.values())
    if total == 0:
        return math.nan
    return math.fsum(w * orthogonal_top1_fraction(k, group_size) for k, w in mixed.items()) / total


def most_energy_outside_top_two(top1_fraction: float | int, effective_rank: float | int, max_rank: int) -> float:
    """Largest share of energy that can lie outside the two strongest directions, given `f` and an effective rank.

    Statement:
        With `e_1 = f` and second energy `y`, the spectrum of least effective rank puts the rest into as few entries
        `y` as possible. That rank falls as `y` grows, so the smallest `y` that still reaches the given effective rank
        leaves the most energy, `1 - f - y`, outside the first two.

    Proof:
        At fixed `f` the concentrated spectrum majorises all others with `e_2 = y`, and a larger `y` majorises a smaller
        one; the effective rank is Schur-concave.

    Reads: `0` the rows lie in a plane; `nan` if no spectrum with this `f` has so small an effective rank.

    Checked by:
        Random spectra, which never have more, and the extremal one, which has exactly this.

    Raises:
        ScoregramError: If `f` lies outside `[1/m, 1]`.
    """
    caller = "most_energy_outside_top_two"
    if max_rank < 2:
        fail(caller, "needs at least two directions", max_rank, "Pass the number of nonzero rows.")
    name = f"the top-1 fraction of at most {max_rank} directions"
    f = require_in_range(float(top1_fraction), low=1 / max_rank, high=1.0, name=name, caller=caller)
    low, high = (1 - f) / (max_rank - 1), min(f, 1 - f)  # second energy: evenly spread, and as large as it can be
    if high <= 0:
        return 0.0 if effective_rank >= 1 else math.nan
    if _least_effective_rank(f, high) > effective_rank + 1e-9:  # √(1 - f) carries this much rounding
        return math.nan
    if _least_effective_rank(f, low) <= effective_rank:
        return 1 - f - low
    for _ in range(100):  # bisection; the rank falls with y
        middle = (low + high) / 2
        low, high = (middle, high) if _least_effective_rank(f, middle) > effective_rank else (low, middle)
    return 1 - f - high


def standardized_weight(success: float | int, group_size: int, *, ddof: int = 0) -> float:
    """Ratio of the expected standardised update of a right-or-wrong prompt to its gradient `∇p`.

    Statement: `E ĝ = w ∇p`, `w = E[sqrt(k (R-k))] / (R p (1-p))`, `k` binomial; times `sqrt((R-1)/R)` at `ddof = 1`.
    Proof: given `k` right, `(1/R) Σ A_i ψ_i` has mean `k (R-k) / (R² s) · (E[ψ | right] - E[ψ | wrong])` with
    `s = sqrt(k (R-k)) / R`; and `E[ψ | right] = ∇p / p`, `E[ψ | wrong] = -∇p / (1-p)`.
    Assumes: rewards in {0, 1}, on-policy, no `eps`; all-right and all-wrong groups give no update.
    Checked by: enumeration of groups in the lab.

    Reads: `1 / sqrt(p (1-p))` for large groups; `sqrt(R-1)` as `p` tends to 0 or 1, where that limit is infinite.
    Without division by the standard deviation every prompt has the weight `(R-1)/R`. With it the weight is the same for
    all prompts at `R = 2` and `3`.
    From `R = 4` on it grows as `p` moves away from 1/2: prompts that are almost always or almost never solved get
    *more* weight.

    Example:
        >>> standardized_weight(0.5, 2)
        1.0
    """
    require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller="standardized_weight")
    if not 2 <= group_size <= _LARGEST_GROUP:
        requirement = f"group_size must lie in 2…{_LARGEST_GROUP}"
        remedy = "One rollout has no spread; for very many use the limit 1 / sqrt(p (1-p))."
        fail("standardized_weight", requirement, group_size, remedy)
    if ddof not in (0, 1):
        fail("standardized_weight", "ddof must be 0 or 1", ddof, "1 is the sample deviation, 0 the population's.")
    # Dividing each term by p (1-p) avoids 0/0 at p = 0 and p = 1.
    total = sum(
        math.comb(group_size, k)
        * math.sqrt(k * (group_size - k))
        * success ** (k - 1)
        * (1 - success) ** (group_size - k - 1)
        for k in range(1, group_size)
    )
    return total / group_size * math.sqrt((group_size - ddof) / group_size)


def arcsine_objective(success: float | int) -> float:
    """`2 arcsin sqrt(p)`: the objective whose gradient the standardised update of a right-or-wrong prompt tends to.

    Statement: its derivative is `1 / sqrt(p (1-p))`, the limit of `standardized_weight` for large groups.
    Proof: differentiate.
    Assumes: as `standardized_weight`.
    Checked by: finite differences, and the enumeration behind `standardized_weight`.

    Reference:
        arXiv:2603.01162, Proposition 13, which credits arXiv:2510.13651.

    Example:
        >>> arcsine_objective(1.0) == math.pi
        True
    """
    require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller="arcsine_objective")
    return 2 * math.asin(math.sqrt(success))


def pair_kernels(scores: Scores, rewards: GroupRewards) -> Float[Tensor, "rollouts rollouts parameters"]:
    """`h_ij = (ψ_i - ψ_j)(r_i - r_j) / 2` of every pair of rollouts; zero on the diagonal."""
    require_same_shape(rewards, scores[:, 0], name="rewards", like_name="the rows of scores", caller="pair_kernels")
    return (scores[:, None] - scores[None]) * (rewards[:, None] - rewards[None])[..., None] / 2


def pair_average(scores: Scores, rewards: GroupRewards) -> Float[Tensor, " parameters"]:
    """Average of the kernel over all pairs of different rollouts: the leave-one-out update.

    Statement: `(R choose 2)⁻¹ Σ_{i<j} h_ij = (1/R) Σ_i (r_i - mean_{j≠i} r_j) ψ_i`.
    Proof: `Σ_{i≠j} (ψ_i - ψ_j)(r_i - r_j) = 2 Σ_i ψ_i Σ_{j≠i} (r_i - r_j)`; divide by `2 R (R-1)`.
    Assumes: nothing; it is algebra.
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
    Checked by: the mean over all second rollouts.
    """
    rows = truth.listing.of_prompt(prompt)
    centred = truth.listing.returns[rows] - truth.value[prompt]
    return truth.scores[rows] * centred[:, None] + truth.gradient[prompt]


def exact_moments(truth: GroundTruth) -> GroupMoments:
    """Exact gradient moments of every prompt, which `statistics.group_moments` estimates."""
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
    """Exact `|∇J|²`, `c1`, `c2`, `c3` of a world, which `statistics.noise_components` estimates."""
    return NoiseComponents(
        gradient_squared=float(truth.objective_gradient.square().sum()),
        between_prompts=truth.c1,
        within_prompt=truth.c2,
        group_baseline=truth.c3,
    )


def group_size_to_beat_vanilla(moments: GroupMoments) -> PerPrompt:
    """Group size of each prompt above which leave-one-out has less error than no baseline.

    Statement: `MSE_LOO < MSE_vanilla` exactly if `R > 1 + (σ² tr F + |g|²) / (E|ψ r|² - E|ψ (r-V)|²)`; the
    denominator is `V (2 b* - V) tr F`, and `V² tr F` if `Cov(|ψ|², r) = 0`.
    Proof: `R (MSE_vanilla - MSE_LOO)` is the denominator minus the numerator over `R - 1`.
    Assumes: on-policy, one step, no division by the spread.
    Checked by: enumeration of groups on both sides.

    Returns:
        `(P,)`, float64; `inf` where the denominator is not positive (`V` and `b* - V/2` have opposite signs): no group
        is large enough. Never below one.
    """
    saved = moments.raw_square - moments.gradient_squared - moments.oracle_trace
    added = moments.variance_fisher_trace + moments.gradient_squared
    return torch.where(saved > 0, 1 + added / saved, math.inf)


def _least_effective_rank(f: float, second: float) -> float:
    """`(√f + n √y + √rest)²`: the least effective rank with `e_1 = f`, `e_2 = y`."""
    whole = math.floor((1 - f) / second * (1 + 1e-12))
    rest = max(0.0, 1 - f - whole * second)
    return (math.sqrt(f) + whole * math.sqrt(second) + math.sqrt(rest)) ** 2


def _require_rollouts(group_size: int, *, caller: str) -> None:
    if group_size < 1:
        fail(caller, "needs at least 1 rollout", group_size, "Pass the group size R.")
