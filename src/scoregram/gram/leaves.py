"""Small parameters: one leaf per rollout.

A norm's weight, a bias, a scale or a convolution kernel meets the activations in some operation. Run that operation
through `torch.vmap` with one copy of the parameter per rollout, and autograd itself returns the per-rollout gradients,
summed over every use. What meets the activations may also be derived from parameters (`1 + w`, `-exp(a)`): then the
derived tensor gets the leaf, and its rows are pulled back to the parameters at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from scoregram.gram.layout import Layout

MOST_ELEMENTS = 1 << 26
"""Largest `N · numel` for which a parameter gets one leaf per rollout."""


@dataclass
class Leaves:
    """One leaf `(N, *shape)` for every tensor on the parameters' side that met the activations."""

    layout: Layout
    known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pairs (tensor, its leaf)."""

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough to be held once per rollout."""
        return tensor.numel() * self.layout.rollouts <= MOST_ELEMENTS

    def of(self, tensor: Tensor) -> Tensor:
        """The leaf of `tensor`, made when first asked for."""
        leaf = self.known.get(tensor)
        if leaf is None:
            # contiguous and its own storage: autograd writes one gradient per rollout
            leaf = tensor.detach().expand(self.layout.rollouts, *tensor.shape).contiguous().requires_grad_()
            self.known[tensor] = leaf
            self.made.append((tensor, leaf))
        return leaf

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (parameter, its per-rollout gradient `(N, *shape)`) after the backward pass."""
        for tensor, leaf in self.made:
            if leaf.grad is None:
                continue
            if tensor.is_leaf:
                yield tensor, leaf.grad
            else:
                yield from pulled_back(tensor, leaf.grad)


def pulled_back(tensor: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-rollout gradients of the parameters behind a derived tensor, from those of the tensor itself."""
    parameters = parameters_behind(tensor)
    pulled = [
        torch.autograd.grad(tensor, parameters, row, retain_graph=True, allow_unused=True) for row in rows.unbind()
    ]
    for parameter, column in zip(parameters, zip(*pulled, strict=True), strict=True):
        if all(row is not None for row in column):
            yield parameter, torch.stack(column)


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
    func: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    layout: Layout,
    leaf_of: Callable[[Tensor], Tensor | None],
    carries: Callable[[Tensor], bool],
) -> object | None:
    """`func(*args, **kwargs)` with every parameter-side tensor replaced by its own copy for each rollout.

    Args:
        leaf_of: The leaf `(N, …)` of a parameter-side tensor, None for any other tensor.
        carries: Whether a tensor carries activations.

    Returns:
        The result as the plain call would have given it, or None if the operation cannot be split by rollout: no
        batch axis can be told, or vmap knows no rule for it.
    """
    slots: list[Tensor] = []
    flat: list[bool] = []

    def split(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        leaf = leaf_of(value)
        if leaf is not None:
            slots.append(leaf)
        elif carries(value):
            block = by_rollout(value, layout)
            slots.append(block)
            flat.append(value.shape[0] != layout.rollouts)
        else:
            return value
        return Slot(len(slots) - 1)

    try:
        split_args, split_kwargs = tree_map(split, (args, kwargs))
    except CannotSplitError:
        return None
    if len(set(flat)) != 1:
        return None

    def one(*tensors: Tensor) -> object:
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
