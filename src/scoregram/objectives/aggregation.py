"""How a loss averages over tokens of unequal rollouts, as the weight `u_it` that each token gets.

Every objective of this room is `L = −Σ_it u_it · surrogate_it`, and on-policy it moves the policy by `−∇L = Σ_it u_it
A_it ∇log π_it`. The aggregation is therefore a second, silent set of advantages: `sequence_mean` divides the
advantage of a long rollout by its length, the others do not.

`N` counts every row of the batch, `L_i` the completion tokens of rollout `i`. A rollout without completion tokens keeps
its place in `N` and gets no weight, so it contributes exactly zero; a batch without completion tokens has a loss of
exactly zero with a gradient of exactly zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from scoregram.checks import fail, lookup, require_finite
from scoregram.types import Loss, Mask, TokenWeights


@dataclass(frozen=True)
class Aggregation:
    """One way to average over tokens, and what it claims."""

    fn: Callable[[Tensor, float | None], Tensor]
    """From the lengths `(N,)` and the constant length to the weight of a token of each rollout, `(N,)`."""
    formula: str
    """The weight `u_it` of a completion token."""
    used_by: str
    """Where this convention is met."""
    equal_tokens: bool
    """Every completion token of a batch gets the same weight, whatever the lengths."""
    equal_rollouts: bool
    """Every rollout with completion tokens gets the same total weight, whatever the lengths."""
    couples_rollouts: bool
    """The weight of a token depends on the lengths of other rollouts, so on how a batch is split."""
    needs_length: bool
    """The constant `length` must be given."""


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
        "token_sum": Aggregation(
            _per_rollout,
            "1/N",
            "the policy gradient itself, RLOO, LUSPO",
            equal_tokens=True,
            equal_rollouts=False,
            couples_rollouts=False,
            needs_length=False,
        ),
        "sequence_mean": Aggregation(
            _per_token_of_its_rollout,
            "1/(N L_i)",
            "GRPO, GSPO",
            equal_tokens=False,
            equal_rollouts=True,
            couples_rollouts=False,
            needs_length=False,
        ),
        "constant": Aggregation(
            _per_constant,
            "1/(N L)",
            "Dr. GRPO",
            equal_tokens=True,
            equal_rollouts=False,
            couples_rollouts=False,
            needs_length=True,
        ),
        "token_mean": Aggregation(
            _per_token_of_the_batch,
            "1/Σ_j L_j",
            "DAPO, CISPO",
            equal_tokens=True,
            equal_rollouts=False,
            couples_rollouts=True,
            needs_length=False,
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
        length: The constant `L` of `"constant"`, usually the longest completion allowed; refused by the others, which
            would ignore it.
        dtype: Of the result.

    Raises:
        ScoregramError: If the name is unknown, if `length` is missing, not positive, or given where it is not used.

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
    """`Σ_it u_it values_it`, where `values` is `0` or anything finite outside the mask; an error if it overflows."""
    return finite_loss(
        (token_weights(mask, aggregation, length=length, dtype=values.dtype) * values).sum(), caller=caller
    )


def finite_loss(loss: Loss, *, caller: str) -> Loss:
    """`loss` unchanged, provided that it did not overflow."""
    remedy = "Inputs are finite but too large; look for log-probabilities of tokens masked out of the vocabulary."
    return require_finite(loss, name="the loss", caller=caller, remedy=remedy)
