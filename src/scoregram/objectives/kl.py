"""Estimates of the divergence from a reference policy, and what each does as a loss.

With `d = log π(a) − log π_ref(a)` for a sampled token `a ~ π(·|s)`, and everything at a fixed context `s`:

| term | value | mean of the value | gradient `c ∇log π`, `c =` | mean of the gradient |
|---|---|---|---|---|
| `k1` | `d` | `KL(π‖π_ref)` | `1` | `0`: as a loss it does nothing but add noise |
| `k2` | `d²/2` | `KL(π‖π_ref)` to second order only | `d` | `∇KL(π‖π_ref)`, exactly |
| `k3` | `exp(−d) − 1 + d` | `KL(π‖π_ref)` | `1 − exp(−d)` | `∇KL(π_ref‖π)`, the other direction |

Proof. `E[∇log π] = 0` gives the first. `∇KL(π‖π_ref) = E[d ∇log π] + E[∇log π]` gives the second. `E[exp(−d) ∇log π]`
is `Σ_a π_ref ∇log π = −∇KL(π_ref‖π)`, which gives the third. A good estimate of the value is thus not a good loss.

All of this is for one token in its context. Summed over the tokens of a rollout, `k2` gives the sum over the sampled
contexts `s_t` of `∇KL(π(·|s_t)‖π_ref(·|s_t))`. The divergence of whole rollouts depends on which contexts the policy
visits, too, and that part of its gradient is missing. To get it, put the rollout's log-ratio into the reward, or use
`regularised.consistency_variance`. Under `sequence_mean`, which divides by a length that is itself sampled, even `k1`
has a mean gradient: `E[ψ/L] = ∇E[1/L]`, so descending on it makes rollouts longer, whatever the reference is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from scoregram.checks import lookup
from scoregram.objectives.aggregation import weighted_sum
from scoregram.objectives.ratio import MAX_LOG_RATIO
from scoregram.objectives.tokens import log_ratios
from scoregram.types import LogProbs, Loss, Mask


def log_ratio_term(log_ratio: Tensor) -> Tensor:
    """`k1 = d`: unbiased for the divergence, of either sign, useless as a loss. Elementwise."""
    return log_ratio


def half_square_term(log_ratio: Tensor) -> Tensor:
    """`k2 = d²/2`: never negative, biased as a value, the right gradient as a loss. Elementwise."""
    return log_ratio.square() / 2


def bregman_term(log_ratio: Tensor) -> Tensor:
    """`k3 = exp(−d) − 1 + d`: unbiased and never negative as a value, the other direction as a loss. Elementwise.

    `d` is clamped from below at `−MAX_LOG_RATIO = −20`, where the value is `4.9e8` and float32 will soon overflow;
    beyond that the term is constant and its gradient zero. `expm1` keeps small `d` exact: `k3 ≈ d²/2` there.
    """
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-d).expm1() + d


@dataclass(frozen=True)
class KLTerm:
    """One estimate of `KL(π‖π_ref)` from a sampled token, and what it claims."""

    fn: Callable[[Tensor], Tensor]
    """Elementwise, from the log-ratio `d` to the term."""
    formula: str
    unbiased_value: bool
    """The mean over the policy is `KL(π‖π_ref)`."""
    nonnegative: bool
    """No sample is below zero."""
    zero_mean_gradient: bool
    """As a loss it has no effect in the mean."""
    reverse_gradient: bool
    """As a loss its mean gradient is `∇KL(π‖π_ref)`, the divergence that it is named after."""
    forward_gradient: bool
    """As a loss its mean gradient is `∇KL(π_ref‖π)`, the other direction."""


KL_TERMS = MappingProxyType(
    {
        "k1": KLTerm(
            log_ratio_term,
            "d",
            unbiased_value=True,
            nonnegative=False,
            zero_mean_gradient=True,
            reverse_gradient=False,
            forward_gradient=False,
        ),
        "k2": KLTerm(
            half_square_term,
            "d²/2",
            unbiased_value=False,
            nonnegative=True,
            zero_mean_gradient=False,
            reverse_gradient=True,
            forward_gradient=False,
        ),
        "k3": KLTerm(
            bregman_term,
            "exp(−d) − 1 + d",
            unbiased_value=True,
            nonnegative=True,
            zero_mean_gradient=False,
            reverse_gradient=False,
            forward_gradient=True,
        ),
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
    """Aggregated estimate of the divergence from the reference, to be added to a loss times `β`.

    `Σ_it u_it k_it`. Weight on `∇log π_it` in the update `−∇L`: `−u_it` (k1), `−u_it d_it` (k2), `−u_it (1 −
    exp(−d_it))` (k3); the table above says what that is in the mean. `term` has no default: the choice decides what
    is penalised.

    Raises:
        ScoregramError: If a completion token's log-probability is not finite under either policy; a reference that
        gives a
            sampled token probability zero has an infinite divergence.
    """
    values = kl_values(log_probs, ref_log_probs, mask, term=term)
    return weighted_sum(values, mask, aggregation, length, caller="kl_penalty")
