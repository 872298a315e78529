"""What dividing by the spread does to prompts: the weight each gets, and the objective that belongs to it."""

import math

from scoregram.checks import fail, require_in_range

LARGEST_GROUP = 1000
"""Above it binomial coefficients leave the range of float64."""


def standardized_weight(success: float | int, group_size: int, *, ddof: int = 0) -> float:
    """Factor by which the expected standardised update of a right-or-wrong prompt exceeds its gradient `∇p`.

    Statement: `E ĝ = w ∇p`, `w = E[sqrt(k (R-k))] / (R p (1-p))`, `k` binomial; times `sqrt((R-1)/R)` at `ddof = 1`.
    Proof: given `k` right, `(1/R) Σ A_i ψ_i` has mean `k (R-k) / (R² s) · (E[ψ | right] - E[ψ | wrong])` with
    `s = sqrt(k (R-k)) / R`; and `E[ψ | right] = ∇p / p`, `E[ψ | wrong] = -∇p / (1-p)`.
    Assumes: rewards in {0, 1}, on-policy, no `eps`; groups of one kind give no update.
    Checked by: enumeration of groups in the lab.

    Reads: `1 / sqrt(p (1-p))` for large groups; `sqrt(R-1)` as `p` tends to 0 or 1, where the limit would be infinite.
    Without the division every prompt has `(R-1)/R`. With it the weight is the same for all prompts at `R = 2` and `3`,
    and from `R = 4` on it grows as `p` leaves 1/2: prompts almost solved or almost out of reach get *more* weight.

    Example:
        >>> standardized_weight(0.5, 2)
        1.0
    """
    require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller="standardized_weight")
    if not 2 <= group_size <= LARGEST_GROUP:
        requirement = f"group_size must lie in 2…{LARGEST_GROUP}"
        fail("standardized_weight", requirement, group_size, "One rollout has no spread; very many have the limit.")
    if ddof not in (0, 1):
        fail("standardized_weight", "ddof must be 0 or 1", ddof, "1 is the sample deviation, 0 the population's.")
    # The factor p (1-p) is divided out term by term, so the ends p = 0 and p = 1 need no limit.
    total = sum(
        math.comb(group_size, k)
        * math.sqrt(k * (group_size - k))
        * success ** (k - 1)
        * (1 - success) ** (group_size - k - 1)
        for k in range(1, group_size)
    )
    return total / group_size * math.sqrt((group_size - ddof) / group_size)


def arcsine_objective(success: float | int) -> float:
    """`2 arcsin sqrt(p)`, the objective of a right-or-wrong prompt that division by the spread tends to.

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
