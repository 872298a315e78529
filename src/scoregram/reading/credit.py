"""Metrics of a step's credit: its agreement with true advantages, and which tokens the update changed.

Credit is the advantage that a method gave to a token; push is the change of its log-probability by the update.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scoregram.statistics import credit_fidelity


@dataclass(frozen=True, eq=False, kw_only=True)
class CreditTruth:
    """True advantages of the tokens of a step under the policy that sampled them, or estimates of them.

    A unit is a token, or a segment of tokens or a turn where values are known only at their ends.
    """

    unit_of: Int[Tensor, "batch tokens"]
    """`(N, T)` unit of each completion token, `0 … M-1`; -1 for tokens that are left out."""
    advantages: Float[Tensor, " units"]
    """`(M,)` float64: gain in value over the unit."""
    variances: Float[Tensor, " units"] | None = None
    """`(M,)` variance of each advantage if it is an estimate; None if it is exact."""
    rollouts: int = 0
    """Rollouts sampled to estimate the advantages: a cost of measuring, not of the method."""
    agreement: float = math.nan
    """Share of the rollouts whose reward equals the value after their last token; `nan` if it does by definition."""

    def by_unit(self, tokens: Float[Tensor, "batch tokens"]) -> Float[Tensor, " units"]:
        """`(M,)` float64: mean over the tokens of each unit."""
        known = self.unit_of >= 0
        units, values = self.unit_of[known], tokens.double().cpu()[known]
        zeros = torch.zeros(len(self.advantages), dtype=torch.float64)
        counts = zeros.scatter_add(0, units, torch.ones_like(values))
        return zeros.scatter_add(0, units, values) / counts.clamp(min=1)


def credit_scalars(truth: CreditTruth, credit: Float[Tensor, "batch tokens"]) -> dict[str, float]:
    """The scalars `credit/…` of a step whose true advantages are known.

    Args:
        truth: True advantages.
        credit: `(N, T)` advantage that the method gave to each token.
    """
    found = credit_fidelity(truth.by_unit(credit), truth.advantages, variances=truth.variances)
    scalars = {"credit/correlation": found.correlation, "credit/error": found.error}
    if truth.variances is None:
        scalars |= {"credit/filler_share": found.filler_share, "credit/filler_tokens": found.filler_tokens}
        return scalars | {"credit/truth_agreement": truth.agreement}
    deviation = float(truth.variances.mean().sqrt()) if len(truth.variances) else math.nan
    return scalars | {"credit/truth_error": deviation, "credit/truth_rollouts": truth.rollouts}


def push_scalars(truth: CreditTruth | None, push: Float[Tensor, "batch tokens"], mask: Tensor) -> dict[str, float]:
    """The scalars `push/…` of a step: how much the update changed the log-probabilities of the step's tokens.

    Args:
        truth: True advantages, None if they are not known.
        push: `(N, T)` log-probability after the update minus that before it.
        mask: `(N, T)` completion tokens.
    """
    moved = push[mask].double().abs()
    scalars = {"push/size": float(moved.mean()) if len(moved) else math.nan}
    if truth is None:
        return scalars
    found = credit_fidelity(truth.by_unit(push), truth.advantages, variances=truth.variances)
    scalars["push/correlation"] = found.correlation
    return scalars | ({"push/filler_share": found.filler_share} if truth.variances is None else {})
