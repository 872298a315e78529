"""What is true of group-relative updates in place of what is often said: small theorems, each a function.

Notation: `R` rollouts of one prompt, i.i.d. from the policy; rewards `r_i` with mean `V` and variance `σ²`; scores
`ψ_i` with `E ψ = 0`, `F = E[ψψᵀ]`, `g = ∇V = E[ψ r]`; advantages `A_i = r_i - r̄`; update `ĝ = (1/R) Σ A_i ψ_i`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import fail, require_finite, require_gram, require_in_range, require_same_shape
from scoregram.spectra import orthogonal_top1_fraction
from scoregram.statistics import right_chances
from scoregram.theory.lab.exact import GroundTruth
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards


def group_mean_scale(group_size: int) -> float:
    """How much of the gradient is left in the mean when a rollout is part of its own baseline: `(R-1)/R`.

    Statement:
        `E ĝ = (R-1)/R · ∇V`: the right direction, too short by `1/R`.

    Proof:
        `E[ψ_i r_j] = E[ψ_i] E[r_j] = 0` for `j ≠ i`, so of `r̄` only `r_i / R` meets `ψ_i`: `E[A_i ψ_i] = (1 - 1/R) g`.

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
    """How long the update of a right-or-wrong group is, in units of `ψ̄₊ - ψ̄₋`: `k(R-k)/R²`.

    Statement:
        With `k` of `R` rollouts right, `ĝ = k(R-k)/R² · (ψ̄₊ - ψ̄₋)`, the bars being means over right and wrong ones.

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
    """Largest possible rank of the stack with rows `A_i ψ_i`: the number of nonzero advantages.

    Statement:
        `rank G <= #{i : A_i ≠ 0}`, with equality when those scores are linearly independent. In a mixed right-or-wrong
        group that is `R`: advantages that sum to zero do not cost a rank. What `R - 1` bounds is the span of the
        centred scores `ψ_i - ψ̄`, in which `Σ A_i ψ_i` lies when `Σ A_i = 0`.

    Proof:
        `G = diag(A) Ψ`; a zero row adds nothing, scaling the others does not change their rank. `1ᵀA = 0` is not
        `1ᵀG = 0`: `1ᵀG = Σ A_i ψ_i = R ĝ`.

    Checked by:
        Eigenvalues, for independent scores and for the groups of the lab.
    """
    return int((require_finite(advantages, name="advantages", caller="largest_stacked_rank") != 0).sum())


def update_norm_bound(gram: GramMatrix, rewards: GroupRewards) -> float:
    """Upper bound on the length of one group's update: `s √(λ_max(K)/R)`, `s` the group's own reward deviation.

    Statement:
        `|ĝ| <= s √(λ_max(K)/R)` with `s² = (1/R) Σ (r_i - r̄)²`. So the update is at most proportional to the spread of
        the rewards *in this group*, given the scores; there is no lower bound of the kind.

    Proof:
        `|ĝ|² = AᵀKA / R² <= λ_max(K) |A|² / R²`, and `|A|² = R s²`.

    Assumes:
        `A_i = r_i - r̄`. Divided by `s`, the bound has no spread left in it.

    Checked by:
        Random groups; equality when `A` is the first eigenvector of `K`.
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
    """Exact `Cov(|ψ|², r)` of every prompt: zero is the condition for the value to be the best constant baseline.

    Statement:
        `b* - V = Cov(|ψ|², r) / E|ψ|²`, where `b* = E[|ψ|² r] / E|ψ|²` minimises the variance of `ψ (r - b)` over
        constants `b`. Using `V` instead costs `Cov(|ψ|², r)² / (R E|ψ|²)` in variance.

    Proof:
        `E|ψ (r - b)|²` is a parabola in `b` with bottom `b*`, and the mean `E[ψ (r - b)] = g` does not depend on `b`.

    Checked by:
        The exact `b*` of every prompt of the lab, and the exact variance at `V` and at `b*`.
    """
    weight = torch.nn.functional.one_hot(truth.listing.prompt).double().mT * truth.probability  # (P, M)
    energy, centred = truth.score_energies, truth.listing.returns - truth.value[truth.listing.prompt]
    return weight @ (energy * centred)


def expected_orthogonal_top1_fraction(success: float | int, group_size: int) -> float:
    """Mean top-1 fraction of mixed groups if scores were orthogonal and equally long: what `|A|` alone would give.

    `Σ_k C(R,k) p^k (1-p)^(R-k) · max(k, R-k)/(R min(k, R-k))` over mixed `k`, divided by the chance of a mixed group.
    Reads: `1/2` at `R = 2`; tends to `(R-1)/R` as `p` nears `0` or `1`; `nan` there and for `R = 1`. It is not
    monotone in `R`: at `p = 1/2` four rollouts have more of it than two, and eight have least.

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
        `y` as it takes. That rank falls as `y` grows, so the smallest `y` that still meets the given effective rank
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


def _least_effective_rank(f: float, second: float) -> float:
    """`(√f + n √y + √rest)²`: the least effective rank with `e_1 = f`, `e_2 = y`."""
    whole = math.floor((1 - f) / second * (1 + 1e-12))
    rest = max(0.0, 1 - f - whole * second)
    return (math.sqrt(f) + whole * math.sqrt(second) + math.sqrt(rest)) ** 2


def _require_rollouts(group_size: int, *, caller: str) -> None:
    if group_size < 1:
        fail(caller, "needs at least 1 rollout", group_size, "Pass the group size R.")
