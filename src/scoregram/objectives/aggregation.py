"""The weight `u_it` that a loss gives each token when it averages over rollouts of unequal length.

Every objective here is `L = −Σ_it u_it · surrogate_it`, and on-policy its update is `−∇L = Σ_it u_it A_it
∇log π_it`. The aggregation therefore rescales the advantages: `sequence_mean` divides the advantage of a
long rollout by its length, the others do not.

`N` counts every row of the batch, `L_i` the completion tokens of rollout `i`. A rollout without completion tokens
counts in `N`, gets no weight and contributes exactly zero. A batch without completion tokens has a loss and a gradient
of exactly zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from scoregram.checks import fail, lookup, require_finite
from scoregram.types import LogProbs, Loss, Mask, TokenWeights


@dataclass(frozen=True)
class Aggregation:
    """One way to average over tokens, and its claims. A claim that a row does not state is false."""

    fn: Callable[[Tensor, float | None], Tensor]
    """`fn(lengths, length)`: `(N,)`, weight of each token of a rollout, from the lengths `(N,)` and the constant."""
    formula: str
    """The weight `u_it` of a completion token."""
    used_by: str
    """Methods that average in this way."""
    equal_tokens: bool = False
    """Every completion token of a batch gets the same weight, for any lengths."""
    equal_rollouts: bool = False
    """Every rollout with completion tokens gets the same total weight, for any lengths."""
    couples_rollouts: bool = False
    """The weight of a token depends on the lengths of other rollouts, hence on how the batch is split."""
    needs_length: bool = False
    """It requires the constant `length`."""


def _per_rollout(lengths: Tensor, _: float | None) -> Tensor:
    return torch.ones_like(lengths) / lengths.numel()


def _per_token_of_its_rollout(lengths: Tensor, _: float | None) -> Tensor:
    return 1 / (lengths.numel() * lengths.clamp(min=1))


def _per_constant(lengths: Tensor, length: float | None) -> Tensor:
    if length is None or not 0 < length < float("inf"):
        fail("constant", "length must be a positive number", length, "Pass the longest completion allowed.")
    return torch.ones_like(lengths) / (lengths.numel() * length)


def _per_token_of_the_batch(lengths: Tensor, _: float | None) -> Tensor:
    return torch.ones_like(lengths) / lengths.sum().clamp(min=1)


AGGREGATIONS = MappingProxyType(
    {
        "token_sum": Aggregation(_per_rollout, "1/N", "the policy gradient itself, RLOO, LUSPO", equal_tokens=True),
        "sequence_mean": Aggregation(_per_token_of_its_rollout, "1/(N L_i)", "GRPO, GSPO", equal_rollouts=True),
        "constant": Aggregation(_per_constant, "1/(N L)", "Dr. GRPO", equal_tokens=True, needs_length=True),
        "token_mean": Aggregation(
            _per_token_of_the_batch, "1/Σ_j L_j", "DAPO, CISPO", equal_tokens=True, couples_rollouts=True
        ),
    }
)


def token_weights(
    mask: Mask, aggregation: str, *, length: float | int | None = None, dtype: torch.dtype = torch.float64
) -> TokenWeights:
    """Weight `u_it` that an aggregation gives to each token, `0` outside the mask.

    Args:
        mask: `(N, T)`, true on completion tokens.
        aggregation: A key of `AGGREGATIONS`.
        length: The constant `L` of `"constant"`, usually the longest completion allowed; an error with any other
            aggregation.
        dtype: Of the result.

    Raises:
        ScoregramError: If the name is unknown, or `length` is missing, not positive, or given but not used.

    Example:
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> token_weights(mask, "token_mean")
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.0000, 0.0000]], dtype=torch.float64)
        >>> token_weights(mask, "sequence_mean")[:, 0]
        tensor([0.1667, 0.5000], dtype=torch.float64)
    """
    row = lookup(AGGREGATIONS, aggregation, kind="aggregation")
    if length is not None and not row.needs_length:
        fail("token_weights", f"{aggregation} takes no length", length, "Drop it or choose aggregation='constant'.")
    lengths = mask.sum(dim=-1).to(dtype)
    per_rollout = row.fn(lengths, None if length is None else float(length))  # (N,)
    return mask * per_rollout[:, None]


def weighted_sum(values: Tensor, mask: Mask, aggregation: str, length: float | int | None, *, caller: str) -> Loss:
    """`Σ_it u_it values_it`, where `values` is finite outside the mask too; an error if the sum overflows."""
    weights = token_weights(mask, aggregation, length=length, dtype=values.dtype)
    return finite_loss((weights * values).sum(), caller=caller)


def finite_loss(loss: Loss, *, caller: str) -> Loss:
    """`loss` unchanged; an error if it overflowed."""
    remedy = "Inputs are finite but too large; look for log-probabilities of tokens masked out of the vocabulary."
    return require_finite(loss, name="the loss", caller=caller, remedy=remedy)


def token_coefficients(loss: Loss, log_probs: LogProbs) -> LogProbs:
    """Coefficient `c_it = ∂L/∂log π_it` of each token in the gradient of a loss, by automatic differentiation.

    `∇L = Σ_it c_it ∇log π_it`, for any loss that depends on the policy through `log_probs` alone: clipped, off-policy,
    with a KL term, or from another library. The update is `−∇L`, so the weight that a loss gives to a token is `−c_it`.
    The Gram of the actual loss is the Gram of `Σ_t c_it ∇log π_it`. Zero for a token that is outside the mask, clipped,
    or has advantage zero.

    Args:
        loss: A scalar that depends on `log_probs`.
        log_probs: `(N, T)`; a leaf with `requires_grad`, or an intermediate of the graph.

    Returns:
        `(N, T)`, dtype of `log_probs`, detached. The autograd graph is kept and no `.grad` is modified.

    Raises:
        ScoregramError: If `loss` is not a scalar, does not depend on `log_probs`, or has a gradient that is not finite.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> token_coefficients((log_probs * torch.tensor([[3.0, 0.5]])).sum(), log_probs)
        tensor([[3.0000, 0.5000]])
    """
    if loss.numel() != 1:
        fail("token_coefficients", "loss must be a scalar", f"shape {tuple(loss.shape)}", "Aggregate it first.")
    if not (loss.requires_grad and log_probs.requires_grad):
        got = f"requires_grad {loss.requires_grad} for loss and {log_probs.requires_grad} for log_probs"
        remedy = "Compute the loss from log_probs with gradients on."
        fail("token_coefficients", "loss must be differentiable in log_probs", got, remedy)
    (coefficients,) = torch.autograd.grad(loss, log_probs, retain_graph=True, allow_unused=True)
    if coefficients is None:
        remedy = "Pass the tensor from which the loss was computed, not a copy."
        fail("token_coefficients", "loss must depend on log_probs", "a loss that does not", remedy)
    return require_finite(coefficients, name="the gradient of the loss", caller="token_coefficients")
