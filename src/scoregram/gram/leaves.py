"""Small parameters: one leaf per rollout.

A norm's weight, a bias, a scale or a convolution kernel meets the activations in some operation. Run that operation
through `torch.vmap` with one copy of the parameter per rollout, and autograd itself returns the per-rollout gradients,
summed over every use. What meets the activations may also be derived from parameters (`1 + w`, `-exp(a)`): then the
derived tensor gets the leaf, and its rows are pulled back to the parameters at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_map

from scoregram.gram.layout import Layout

BROADCASTS = {
    *(torch.mul, torch.add, torch.sub, torch.div),
    *(Tensor.mul, Tensor.add, Tensor.sub, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__add__),
    *(Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__),
}
KEPT_ELEMENTS = 1 << 17
"""Largest `N · numel` of a weight in a matrix product that takes this route rather than being streamed."""
KEPT_ELEMENTS_CUDA = 3 << 19
"""The same on a GPU, where the route spares host time."""
MOST_ELEMENTS = 1 << 26
"""Largest `N · numel` for which a parameter gets one leaf per rollout."""


@dataclass
class Leaves:
    """One leaf `(N, *shape)` for every tensor on the parameters' side that met the activations."""

    layout: Layout
    made: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Pairs (tensor, its leaf), by the tensor's id and whether the leaf is transposed.

    Held here, a tensor cannot leave its id to another.
    """

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough to be held once per rollout."""
        return tensor.numel() * self.layout.rollouts <= MOST_ELEMENTS

    def keeps(self, weight: Tensor) -> bool:
        """Whether the per-rollout gradients of a weight are small enough to be kept to the end."""
        return weight.numel() * self.layout.rollouts <= (KEPT_ELEMENTS_CUDA if weight.is_cuda else KEPT_ELEMENTS)

    def of(self, tensor: Tensor, *, transposed: bool = False) -> Tensor:
        """The leaf of `tensor`, made when first asked for: its copies share their values, not their gradients."""
        key = (id(tensor), transposed)
        if key not in self.made:
            value = tensor.detach()
            value = value.mT if transposed else value
            self.made[key] = (tensor, value.expand(self.layout.rollouts, *value.shape).requires_grad_())
        return self.made[key][1]

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (parameter, its per-rollout gradient `(N, *shape)`) after the backward pass."""
        derived = []
        for (_, transposed), (tensor, leaf) in self.made.items():
            if leaf.grad is None:
                continue
            rows = leaf.grad.mT if transposed else leaf.grad
            if tensor.is_leaf:
                yield tensor, rows
            else:
                derived.append((tensor, rows))
        yield from pulled_back(derived)


def pulled_back(derived: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-rollout gradients of the parameters behind derived tensors, from those of the tensors themselves."""
    if not derived:
        return
    tensors = [tensor for tensor, _ in derived]
    parameters = list({id(p): p for tensor in tensors for p in parameters_behind(tensor)}.values())
    rows = [rows for _, rows in derived]
    try:
        pulled = torch.autograd.grad(
            tensors, parameters, rows, allow_unused=True, is_grads_batched=True, retain_graph=True
        )
    except RuntimeError:  # some operation cannot be batched: one rollout after another
        each = [
            torch.autograd.grad(tensors, parameters, list(row), allow_unused=True, retain_graph=True)
            for row in zip(*(r.unbind() for r in rows), strict=True)
        ]
        pulled = [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]
    yield from ((parameter, rows) for parameter, rows in zip(parameters, pulled, strict=True) if rows is not None)


def parameters_behind(tensor: Tensor) -> list[Tensor]:
    """The leaves of the autograd graph of `tensor`."""
    found: dict[int, Tensor] = {}
    seen: set[object] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        stack.extend(parent for parent, _ in node.next_functions)
    return list(found.values())


def per_rollout(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    layout: Layout,
    leaf_of: Callable[[Tensor], Tensor | None],
    carries: Callable[[Tensor], bool],
) -> Any:
    """An operation with every parameter-side tensor among its arguments replaced by its own copy for each rollout.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its named arguments.
        layout: Where the rollouts are in the activations.
        leaf_of: The leaf `(N, …)` of a parameter-side tensor, None for any other tensor.
        carries: Whether a tensor carries activations.

    Returns:
        The result as the plain call would have given it, or None if the operation cannot be split by rollout: no
        batch axis can be told, or vmap knows no rule for it.
    """
    if func is F.layer_norm:
        result = affine_after(F.layer_norm, args, kwargs, leaf_of, layout)
        if result is not None:
            return result
    if func in BROADCASTS and len(args) == 2 and not kwargs:
        aligned = [aligned_leaf(leaf_of(a), b, layout) if isinstance(a, Tensor) else a for a, b in (args, args[::-1])]
        sides = [a if leaf is None else leaf for a, leaf in zip(args, aligned, strict=True)]
        if sum(leaf is not None for leaf in aligned) == 1:
            return func(*sides)
    return vmapped(func, args, kwargs, layout=layout, leaf_of=leaf_of, carries=carries)


def aligned_leaf(leaf: Tensor | None, other: Any, layout: Layout) -> Tensor | None:
    """A leaf `(N, *shape)` shaped to broadcast against activations `(N, …, *shape)`; None if it is not that simple."""
    if leaf is None or not isinstance(other, Tensor) or other.ndim < leaf.ndim or other.shape[0] != layout.rollouts:
        return None
    return leaf.view(leaf.shape[0], *[1] * (other.ndim - leaf.ndim), *leaf.shape[1:])


def affine_after(
    func: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaf_of: Callable[[Tensor], Tensor | None],
    layout: Layout,
) -> Tensor | None:
    """A norm without weight and bias, which are applied after it, one copy of them per rollout."""
    named = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
    x, weight, bias = named["input"], named.pop("weight", None), named.pop("bias", None)
    copies = [
        None if side is None or (leaf := leaf_of(side)) is None else aligned_leaf(leaf, x, layout)
        for side in (weight, bias)
    ]
    trained = [side is not None and leaf_of(side) is not None for side in (weight, bias)]
    if any(wanted and copy is None for wanted, copy in zip(trained, copies, strict=True)):
        return None
    scale, shift = (side if copy is None else copy for side, copy in zip((weight, bias), copies, strict=True))
    normed = func(**named)
    if scale is None:
        return normed if shift is None else normed + shift
    return normed * scale if shift is None else torch.addcmul(shift, normed, scale)


def vmapped(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    layout: Layout,
    leaf_of: Callable[[Tensor], Tensor | None],
    carries: Callable[[Tensor], bool],
) -> Any:
    """Any operation, by vmap over rollouts; None if it cannot be split."""
    slots: list[Tensor] = []
    flat: set[bool] = set()

    def split(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = leaf_of(value)
        if leaf is None and not carries(value):
            return value
        slots.append(by_rollout(value, layout) if leaf is None else leaf)
        if leaf is None:
            flat.add(value.shape[0] != layout.rollouts)
        return Slot(len(slots) - 1)

    try:
        split_args, split_kwargs = tree_map(split, (args, kwargs))
    except CannotSplitError:
        return None
    if len(flat) != 1:
        return None

    def one(*tensors: Tensor) -> Any:
        call_args, call_kwargs = tree_map(
            lambda value: tensors[value.index] if isinstance(value, Slot) else value, (split_args, split_kwargs)
        )
        return func(*call_args, **call_kwargs)

    try:
        result = torch.vmap(one)(*slots)
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return tree_map(lambda value: value.flatten(0, 1) if isinstance(value, Tensor) else value, result)


@dataclass(frozen=True)
class Slot:
    """Place of a batched tensor among the arguments."""

    index: int


class CannotSplitError(Exception):
    """No batch axis can be told."""


def by_rollout(value: Tensor, layout: Layout) -> Tensor:
    """Activations with the rollout as a new first axis: `(N, 1, …)` from `(N, …)`, `(N, T, …)` from `(N·T, …)`."""
    if value.ndim and value.shape[0] == layout.rollouts:
        return value.unsqueeze(1)
    if value.ndim and value.shape[0] == layout.rollouts * layout.tokens:
        return value.unflatten(0, (layout.rollouts, layout.tokens))
    raise CannotSplitError
