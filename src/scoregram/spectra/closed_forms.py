"""Spectra that need no eigenvalues: right-or-wrong rewards over orthogonal scores, and any two rows.

`k` of `R` rollouts are right, the advantage is the reward minus the group's mean: `A_i = (R-k)/R` for the right ones
and `-k/R` for the others. With orthogonal scores of equal norm the singular values are `|A_i|`, so even without any
structure in the gradients the effective rank depends on how even the group is, and on nothing else.
"""

import math

from scoregram.checks import fail, require_in_range


def orthogonal_effective_rank(right: int, rollouts: int) -> float:
    """Effective rank of `k` right among `R` orthogonal, equally long scores under the mean baseline.

    `4k(R-k)/R`. Reads: `R` in an even group, `4(R-1)/R < 4` when a single rollout differs, however large the group;
    `nan` when all are right or all wrong, where no rollout pulls.

    Raises:
        ScoregramError: If not `0 <= right <= rollouts` with at least one rollout.

    Example:
        >>> [orthogonal_effective_rank(k, 8) for k in (1, 2, 4)]
        [3.5, 6.0, 8.0]
    """
    _require_count(right, rollouts, caller="orthogonal_effective_rank")
    return 4 * right * (rollouts - right) / rollouts if 0 < right < rollouts else math.nan


def orthogonal_top1_fraction(right: int, rollouts: int) -> float:
    """Top-1 fraction of `k` right among `R` orthogonal, equally long scores under the mean baseline.

    `max(k, R-k) / (R min(k, R-k))`. Reads: `1/R` in an even group, `(R-1)/R` when a single rollout differs; `nan` when
    all are right or all wrong.

    Raises:
        ScoregramError: If not `0 <= right <= rollouts` with at least one rollout.
    """
    _require_count(right, rollouts, caller="orthogonal_top1_fraction")
    fewer = min(right, rollouts - right)
    return (rollouts - fewer) / (rollouts * fewer) if fewer else math.nan


def expected_orthogonal_effective_rank(success_rate: float | int, rollouts: int) -> float:
    """Mean of `orthogonal_effective_rank` over the mixed groups of a prompt solved with probability `p`.

    `4(R-1)p(1-p) / (1 - p^R - (1-p)^R)`: groups that are all right or all wrong add nothing to `E[k(R-k)] =
    R(R-1)p(1-p)` and are left out by the denominator. Reads: largest at `p = 1/2`, where it is `(R-1)/(1 - 2^(1-R))`;
    falls to `4(R-1)/R` as `p` nears `0` or `1`; `nan` there and for `R = 1`, where no group is mixed.

    Raises:
        ScoregramError: If `p` is outside `[0, 1]` or there is no rollout.

    Example:
        >>> expected_orthogonal_effective_rank(0.5, 2)
        2.0
    """
    caller = "expected_orthogonal_effective_rank"
    rare = float(require_in_range(float(success_rate), low=0.0, high=1.0, name="the success rate", caller=caller))
    _require_count(0, rollouts, caller=caller)
    rare = min(rare, 1 - rare)
    if rare == 0 or rollouts == 1:
        return math.nan
    mixed = -math.expm1(rollouts * math.log1p(-rare)) - rare**rollouts  # 1 - (1-p)^R would cancel for small p
    return 4 * (rollouts - 1) * rare * (1 - rare) / mixed


def two_row_effective_rank(first_norm: float | int, second_norm: float | int, cosine: float | int) -> float:
    """Effective rank of two rows of norms `a`, `b` and cosine `c`.

    `1 + 2ab√(1-c²) / (a²+b²)`, because `σ_1σ_2` is the area the rows span and `σ_1²+σ_2² = a²+b²`. Reads: `1` parallel
    rows or one of them zero, `2` orthogonal rows of equal norm, `nan` both zero.

    Raises:
        ScoregramError: If a norm is negative or not finite, or the cosine is outside `[-1, 1]`.

    Example:
        >>> two_row_effective_rank(1.0, 1.0, 0.6)
        1.8
    """
    caller = "two_row_effective_rank"
    a, b = float(first_norm), float(second_norm)
    for norm in (a, b):
        if not (math.isfinite(norm) and norm >= 0):
            fail(caller, "a norm must be finite and not negative", norm, "Pass |A_i| √K_ii.")
    c = require_in_range(float(cosine), low=-1.0, high=1.0, name="the cosine", caller=caller)
    if a == b == 0:
        return math.nan
    ratio = min(a, b) / max(a, b)  # squares of the norms themselves may overflow
    return 1 + 2 * ratio * math.sqrt((1 - c) * (1 + c)) / (1 + ratio**2)


def two_row_effective_rank_from_top1(top1_fraction: float | int) -> float:
    """Effective rank of any two rows whose top-1 fraction is `f`: at `R = 2` the one number fixes the other.

    `1 + 2√(f(1-f))`. Reads: `1` at `f = 1`, `2` at `f = 1/2`.

    Raises:
        ScoregramError: If `f` is outside `[1/2, 1]`.

    Example:
        >>> two_row_effective_rank_from_top1(0.5)
        2.0
    """
    caller = "two_row_effective_rank_from_top1"
    f = require_in_range(float(top1_fraction), low=0.5, high=1.0, name="the top-1 fraction of two rows", caller=caller)
    return 1 + 2 * math.sqrt(f * (1 - f))


def _require_count(right: int, rollouts: int, *, caller: str) -> None:
    if rollouts < 1:
        fail(caller, "needs at least 1 rollout", rollouts, "Pass the group size R.")
    if not 0 <= right <= rollouts:
        fail(caller, f"the number of right rollouts must lie in [0, {rollouts}]", right, "Count them within one group.")
