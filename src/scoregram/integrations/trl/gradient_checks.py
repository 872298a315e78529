"""Comparisons of the self-check: measured rows and their sum against gradients of the trainer, and against the Gram."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def relative_error(ours: Iterable[Tensor | None], theirs: Sequence[Tensor | None], scale: float = 1.0) -> float:
    """`|ours − theirs / scale| / |theirs / scale|` over all parameters; 0 if both vanish, `nan` without `theirs`."""
    if all(grad is None for grad in theirs):
        return math.nan
    apart, sizes = [], []  # scalars on the devices of the gradients: reading each would wait for the device
    for own, their in zip(ours, theirs, strict=True):
        if their is not None:
            sizes.append(square(their) / scale**2)
        if own is None and their is not None:
            apart.append(square(their) / scale**2)
        elif own is not None:
            apart.append(square(own if their is None else own - their.to(own.dtype) / scale))
    size, distance = added_up(sizes), added_up(apart)
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return math.sqrt(distance / size)


def squared_norm(values: Iterable[Tensor]) -> float:
    """`|v|²` of a vector that is given in parts, added up in float64; few launches for many parts."""
    parts = [value.detach() for value in values]
    norms = torch._foreach_norm(parts, 2.0, torch.float64) if parts else ()  # pyright: ignore[reportPrivateImportUsage]
    return added_up(norms, power=2)


def square(value: Tensor) -> Tensor:
    """`|v|²`, a float64 scalar."""
    return torch.linalg.vector_norm(value.detach(), dtype=torch.float64) ** 2


def added_up(scalars: Sequence[Tensor], power: int = 1) -> float:
    """The sum of powers of scalars on any device; waits for the device once."""
    if not scalars:
        return 0.0
    return float((torch.stack([scalar.to(scalars[0].device) for scalar in scalars]) ** power).sum())


# the two checks of a fused step


def norm_error(gradient: Sequence[Tensor], gram: Tensor, weights: Tensor) -> float:
    """`|ĝ|²` of a fused gradient `ĝ = Σ_j w_j ψ_j` against `wᵀKw`, relative to the sum of the terms' absolute values.

    Args:
        gradient: `ĝ`, one tensor for each parameter that the pass used.
        gram: `(N, N)`.
        weights: `(N,)`.
    """
    terms = update_terms(gram, weights)
    size = float(terms.abs().sum())
    return abs(squared_norm(gradient) - float(terms.sum())) / size if size else 0.0


def fused_row_error(
    sums: Sequence[Tensor | None], theirs: Sequence[Tensor], gram: Tensor, weights: Tensor, index: int
) -> float:
    """Error of one row of a fused gradient `ĝ = Σ_j w_j ψ_j`, given the part `g_i` of the trainer's own gradient.

    The larger of two: `|w_i ψ_i − g_i| / |g_i|` over all parameters; and `⟨ĝ, g_i⟩` against `Σ_j w_i w_j K_ij`,
    relative to the sum of the terms' absolute values (0 if all terms are 0). So the row is compared with the trainer's
    own pass, and the whole gradient with row and Gram.

    Args:
        sums: For each parameter `(2, …)`: the sum with weights `w`, and `ψ_i`; None if the pass did not use it.
        theirs: For each parameter its part of `g_i`.
        gram: `(N, N)`.
        weights: `(N,)`.
        index: The rollout `i`.
    """
    scale = float(weights[index])
    apart = relative_error([None if both is None else both[1] * scale for both in sums], theirs)
    pairs = [(both[0], grad) for both, grad in zip(sums, theirs, strict=True) if both is not None]
    products = [torch.sum(own * their.to(own.dtype), dtype=torch.float64) for own, their in pairs]
    terms = update_terms(gram, weights)[index]
    size = float(terms.abs().sum())
    return max(apart, abs(added_up(products) - float(terms.sum())) / size if size else 0.0)


def update_terms(gram: Tensor, weights: Tensor) -> Tensor:
    """`w_i K_ij w_j`, float64 on the CPU."""
    w = weights.double().cpu()
    return w[:, None] * gram * w
