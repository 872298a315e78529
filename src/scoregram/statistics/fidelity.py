"""How well credit agrees with true advantages, and how much of it falls on tokens that change nothing.

Credit is the advantage that a method gave to a token. The true advantage is `V(prefix with it) − V(prefix before it)`,
where `V` is the expected reward if the policy continues a prefix. Credit that equals it gives an unbiased gradient, and
contains no noise from later tokens.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from scoregram.checks import require_finite

FILLER = 0.01
"""A token is filler if it changes the expected reward by at most this: `|true advantage| ≤ 0.01`."""

Credits = Float[Tensor, " tokens"]


@dataclass(frozen=True)
class CreditFidelity:
    """Agreement between credit and true advantages."""

    correlation: float
    """Pearson correlation: 1 for credit that is a positive multiple of the true advantages plus a constant, 0 for
    unrelated credit; `nan` if either does not vary."""
    error: float
    """Root mean square of credit minus true advantage, in units of reward."""
    filler_share: float
    """`Σ_filler |c| / Σ |c|`: 0 if no filler gets credit; `filler_tokens` if all tokens get credit of one size. `nan`
    if no token has credit, or if true advantages are estimates."""
    filler_tokens: float
    """Share of tokens that are filler; `nan` if true advantages are estimates."""


def credit_fidelity(
    credit: Credits, truth: Credits, *, variances: Credits | None = None, filler: float = FILLER
) -> CreditFidelity:
    """Agreement of credit with true advantages, given exactly or by unbiased estimates.

    Noise in the estimates adds its variance `s²` to squared errors and to the variance of the truth. Both are
    corrected: `error² = mean (c − a)² − mean s²` and `correlation = cov(c, a) / (sd(c) √(var(a) − mean s²))`. The noise
    must be independent of the credit. It hides which advantages are near 0, so both filler numbers are `nan` for
    estimates.

    Args:
        credit: `(M,)`, one for each token, or for each segment.
        truth: `(M,)` true advantages or estimates of them.
        variances: `(M,)` variance of each estimate; None if the advantages are exact.
        filler: Largest true advantage, in absolute value, of filler.

    Raises:
        ScoregramError: If a credit or a true advantage is not finite.

    Example:
        >>> from torch import tensor
        >>> credit_fidelity(tensor([1.0, 1.0, 1.0, 1.0]), tensor([0.5, 0.0, 0.0, 0.0])).filler_share
        0.75
    """
    for name, values in {"credit": credit, "truth": truth}.items():
        require_finite(values, name=name, caller="credit_fidelity")
    if not len(credit):
        return CreditFidelity(math.nan, math.nan, math.nan, math.nan)
    c, a = credit.double(), truth.double()
    noise = 0.0 if variances is None else float(variances.double().mean())
    square = float((c - a).square().mean()) - noise
    spread = float(c.var(correction=0)), float(a.var(correction=0)) - noise
    covariance = float(((c - c.mean()) * (a - a.mean())).mean())
    is_filler, total = a.abs() <= filler, float(c.abs().sum())
    return CreditFidelity(
        correlation=covariance / math.sqrt(spread[0] * spread[1]) if min(spread) > 0 else math.nan,
        error=math.sqrt(max(square, 0.0)),
        filler_share=float(c[is_filler].abs().sum()) / total if total > 0 and variances is None else math.nan,
        filler_tokens=float(is_filler.double().mean()) if variances is None else math.nan,
    )
