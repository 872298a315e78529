"""Stage 3, marks: what an intermediate tensor depends on, and which products of parameters a derived weight contains.

The interceptor marks the result of every operation. An `Activation` depends on the rollouts. A `Derived` tensor depends
on parameters alone: a view, a cast, `1 + w`, or a weight that the model computes from several parameters.

One kind of computed weight can be measured without forming its gradient. PEFT's LoRA on fused experts
(`target_parameters`) adds a product of two small matrices to the weights `(E, p, q)` of all experts, and the model
multiplies by one expert of the sum, so the adapters themselves never meet an activation. Let the weight of one expert
be `W + s L R`, with the per-rollout gradients `G_i = Σ_t a_it ⊗ b_it`. By the chain rule

    dL_i = s G_i Rᵀ = Σ_t a_it ⊗ (s R b_it),        dR_i = s Lᵀ G_i = Σ_t (s Lᵀ a_it) ⊗ b_it,

so the gradients of `L` `(p, r)` and `R` `(r, q)` have factors too. `LowRankTerm` is such a term `s L R`;
`low_rank_terms` follows the terms from the parameters to the weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from scoregram.gram.operations import (
    CASTS,
    MATRIX_TRANSPOSES,
    PRODUCTS,
    SCALINGS,
    STACK_TRANSPOSE,
    SUMS,
    TRANSPOSES,
    is_scalar_index,
)


@dataclass(frozen=True)
class LowRankTerm:
    """A term `s L R` of a derived weight `(p, q)`, or of a stack `(E, p, q)` of such weights.

    `L` and `R` are parameters, views of parameters, or constants.
    """

    left: Tensor  # (p, r) or (E, p, r)
    right: Tensor  # (r, q) or (E, r, q)
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return *self.left.shape[:-1], self.right.shape[-1]

    @property
    def transposed(self) -> "LowRankTerm":
        """The transposed term, `s Rᵀ Lᵀ`."""
        return replace(self, left=self.right.mT, right=self.left.mT)

    def at(self, index: Any) -> "LowRankTerm":
        """The term of one weight of a stack; an index of None makes a stack of one weight."""
        return replace(self, left=self.left[index], right=self.right[index])

    def scaled(self, factor: float) -> "LowRankTerm":
        """The term times a number."""
        return replace(self, scale=self.scale * factor)


Terms = tuple[LowRankTerm, ...]


@dataclass(frozen=True)
class Activation:
    """Mark of a tensor that depends on the rollouts."""

    owner: Tensor | None = None
    """Rollout of every entry of the first axis, if that is no longer the batch axis."""


@dataclass(frozen=True)
class Derived:
    """Mark of a tensor that depends on parameters alone."""

    cast_of: Tensor | None = None
    """The tensor that this one is a cast of, or None."""
    names: tuple[str, ...] = ()
    """Names of the parameters that it depends on."""
    terms: Terms = ()
    """The terms that it is the sum of, up to a constant; empty if it is not such a sum."""
    version: int = 0
    """Its version (`Tensor._version`) when it was marked: a change in place makes `cast_of` and `terms` wrong."""
    is_hooked: bool = False
    """Whether a backward hook is on a tensor that it was computed from."""


ACTIVATION = Activation()


def set_mark(tensor: Tensor, mark: Activation | Derived) -> None:
    """Mark an intermediate tensor; the mark lives as long as the tensor. Parameters are never marked."""
    tensor._scoregram = mark  # pyright: ignore[reportAttributeAccessIssue]


def mark_of(tensor: Tensor) -> Activation | Derived | None:
    """The mark of a tensor, or None."""
    return getattr(tensor, "_scoregram", None)


def derived_mark(tensor: Any) -> Derived | None:
    """The mark of a derived tensor; None if the tensor was changed in place since, or has hooks."""
    mark = mark_of(tensor) if isinstance(tensor, Tensor) else None
    if not isinstance(mark, Derived) or mark.version != tensor._version or has_hooks(tensor):
        return None
    return mark


def has_hooks(tensor: Tensor) -> bool:
    """Whether a backward hook is on a derived tensor, or on one that it was computed from.

    A hook may change the gradient, so autograd has to compute the gradients of the parameters behind this tensor.
    """
    mark = mark_of(tensor)
    return bool(tensor._backward_hooks) or (isinstance(mark, Derived) and mark.is_hooked)


def uncast(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a cast of, or `tensor` itself."""
    mark = derived_mark(tensor)
    return tensor if mark is None or mark.cast_of is None else mark.cast_of


def stack_entry(weights: Tensor, place: int) -> Tensor:
    """One weight `(p, q)` of a parameter-side stack `(E, p, q)`, marked as indexing would mark it."""
    weight, origin = weights[place], uncast(weights)
    cast_of = None if origin is weights else origin[place]
    terms = tuple(term.at(place) for term in known_terms(weights))
    set_mark(weight, Derived(cast_of, terms=terms, version=weight._version, is_hooked=has_hooks(weights)))
    return weight


# Low-rank terms


def low_rank_terms(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_parameter_side: Callable[[Tensor], bool]
) -> Terms:
    """The terms of the result of an operation on parameter-side tensors and constants.

    Empty if the result is not a constant plus a sum of terms `s L R`.
    """
    if func in PRODUCTS and not kwargs:
        return of_product(*args)
    if func in (torch.baddbmm, torch.addmm) and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
        return of_sum_and_product(*args, **kwargs, is_parameter_side=is_parameter_side)
    if func is torch.einsum:
        return of_einsum(*args)
    if func in SUMS and len(args) == 2 and not kwargs:
        return of_sum(*args, is_parameter_side=is_parameter_side)
    if func in SCALINGS and len(args) == 2 and not kwargs:
        number, tensor = args if isinstance(args[0], Real) else args[::-1]
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        return tuple(term.scaled(float(number)) for term in known_terms(tensor)) if is_number else ()
    if not args or not is_termwise_operation(func, args):
        return ()
    return tuple(of_one_weight(func, args, term) for term in known_terms(args[0]))


def known_terms(tensor: Any) -> Terms:
    """The terms of a tensor; empty if it is not known to be a sum of terms."""
    mark = derived_mark(tensor)
    return () if mark is None else mark.terms


def of_product(left: Any, right: Any) -> Terms:
    """The only term of the product of two matrices, or of two stacks of matrices; empty if an axis is broadcast."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.ndim not in (2, 3):
        return ()
    is_plain = left.shape[:-2] == right.shape[:-2] and left.ndim == right.ndim and left.shape[-1] == right.shape[-2]
    return (LowRankTerm(uncast(left), uncast(right)),) if is_plain else ()


def of_sum_and_product(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float | int = 1,
    alpha: float | int = 1,
    is_parameter_side: Callable[[Tensor], bool],
) -> Terms:
    """The terms of `beta · added + alpha · left right`."""
    if is_parameter_side(added) and not known_terms(added):
        return ()
    old = [term.scaled(float(beta)) for term in known_terms(added)]
    new = [term.scaled(float(alpha)) for term in of_product(left, right)]
    return of_whole_sum([*old, *new], (*left.shape[:-1], right.shape[-1]))


def of_sum(first: Any, second: Any, *, is_parameter_side: Callable[[Tensor], bool]) -> Terms:
    """The terms of a sum of two tensors."""
    sides = [side for side in (first, second) if isinstance(side, Tensor)]
    if any(is_parameter_side(side) and not known_terms(side) for side in sides):
        return ()
    terms = [term for side in sides for term in known_terms(side)]
    return of_whole_sum(terms, torch.broadcast_shapes(*(side.shape for side in sides)))


def of_whole_sum(terms: Sequence[LowRankTerm], shape: Sequence[int]) -> Terms:
    """The terms of a sum of this shape; empty if one of them was broadcast.

    A matrix that is added to a stack of one becomes a stack.
    """
    if len(shape) == 3:
        terms = [term.at(None) if term.left.ndim == 2 else term for term in terms]
    return tuple(terms) if all(term.shape == tuple(shape) for term in terms) else ()


def of_einsum(equation: Any, *operands: Any) -> Terms:
    """The only term of an einsum that is a product of two stacks of matrices, such as `"ore,eri->eio"`."""
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(each, Tensor) for each in operands):
        return ()
    inputs, _, output = equation.replace(" ", "").partition("->")
    names = dict(zip(inputs.split(","), operands, strict=False))
    if len(output) != 3 or len(names) != 2 or any(len({*name}) != 3 or len(name) != 3 for name in names):
        return ()
    stack, row, column = output
    first, second = names if row in next(iter(names)) else reversed(names)
    rank = "".join({*first} - {*output})
    if {*first} != {stack, row, rank} or {*second} != {stack, rank, column} or not rank:
        return ()
    left = uncast(names[first]).permute([first.index(axis) for axis in (stack, row, rank)])
    right = uncast(names[second]).permute([second.index(axis) for axis in (stack, rank, column)])
    return of_product(left, right)


def is_termwise_operation(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether an operation casts, transposes or selects whole matrices, so that it does the same to each term."""
    if func in CASTS or func == STACK_TRANSPOSE:
        return True
    if func in MATRIX_TRANSPOSES:
        return args[0].ndim == 2
    if func in TRANSPOSES and len(args) == 3:
        return {axis % args[0].ndim for axis in args[1:]} == {args[0].ndim - 2, args[0].ndim - 1}
    return func is Tensor.__getitem__ and args[0].ndim == 3 and is_scalar_index(args[1])


def of_one_weight(func: Callable[..., Any], args: tuple[Any, ...], term: LowRankTerm) -> LowRankTerm:
    """A term after an operation that `is_termwise_operation` covers."""
    if func in CASTS:
        return term
    return term.at(args[1]) if func is Tensor.__getitem__ else term.transposed
