"""Stage 3b, small parameters: one copy per rollout, so that autograd itself returns the per-rollout gradients.

A norm's weight, a bias, a scale or a convolution kernel meets the activations in some operation. The interceptor
replaces it there by its *leaf*, a tensor `(N, *shape)` with one copy per rollout, by broadcasting or under
`torch.vmap`. The gradient of the leaf has one row per rollout, summed over every use. A tensor that is derived from
parameters (`1 + w`, `-exp(a)`) gets a leaf in the same way; after the backward pass its rows are pulled back to the
parameters.

Most modules that own a small parameter are norms: they scale their input and do nothing else with it. Intercepting
every operation of a norm costs more host time than the norm itself. So a module of transformers without children is
watched once. If it only cast, shifted or scaled its parameters by numbers and then broadcast them against its input, it
runs from then on without interception, with the copies in place of its parameters (`forward_with_copies`). A layer norm
uses its weight inside a fused operation instead; `LAYER_NORMS` lists the classes that do this. Any other module may
behave differently at the next call, for example at another length, so it is intercepted every time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from scoregram.gram.batch import RolloutLayout
from scoregram.gram.marks import has_hooks
from scoregram.gram.model import facts_of
from scoregram.gram.operations import BROADCASTS, CASTS

KEPT_ELEMENTS = 1 << 17
"""Largest `N · numel` of a weight in a matrix product that gets a leaf; the factors of larger ones are streamed."""
KEPT_ELEMENTS_CUDA = 3 << 19
"""The same on a GPU, where a leaf saves host time."""
MOST_LEAF_ELEMENTS = 1 << 26
"""Largest `N · numel` of any parameter that gets a leaf."""
COPY_SAFE_READS = {
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_cuda", "is_leaf", "layout")
}
"""Attributes that are the same for a parameter and for its copies; its shape is not."""
LAYER_NORMS = MappingProxyType(
    {
        "torch.nn.modules.normalization.LayerNorm": 0.0,
        "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P": 1.0,
    }
)
"""Layer norms by class, and the number that each adds to its weight."""

# Leaves


@dataclass
class Leaves:
    """One leaf `(N, *shape)` for every parameter-side tensor that met the activations."""

    layout: RolloutLayout
    leaf_of: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Pairs (tensor, its leaf), by the tensor's id and whether the leaf is transposed.

    The tensor is referenced here, so that no other tensor can get its id.
    """

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough to be held once per rollout."""
        return tensor.numel() * self.layout.rollouts <= MOST_LEAF_ELEMENTS

    def prefers(self, weight: Tensor) -> bool:
        """Whether a weight in a matrix product is so small that a leaf is better than streamed factors."""
        return weight.numel() * self.layout.rollouts <= (KEPT_ELEMENTS_CUDA if weight.is_cuda else KEPT_ELEMENTS)

    def of(self, tensor: Tensor, *, transposed: bool = False) -> Tensor:
        """The leaf of `tensor`, created at the first call; its copies share their memory, not their gradients."""
        key = (id(tensor), transposed)
        if key not in self.leaf_of:
            value = tensor.detach()  # gradients end at the leaf, so `.grad` of the parameter stays None
            value = value.mT if transposed else value
            self.leaf_of[key] = (tensor, value.expand(self.layout.rollouts, *value.shape).requires_grad_())
        return self.leaf_of[key][1]

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (parameter, its per-rollout gradient `(N, *shape)`) after the backward pass."""
        derived = []
        wholes: dict[int, tuple[Tensor, Tensor]] = {}
        for (_, transposed), (tensor, leaf) in self.leaf_of.items():
            if leaf.grad is None:
                continue
            rows = leaf.grad.mT if transposed else leaf.grad
            base = tensor._base
            if tensor.is_leaf:
                yield tensor, rows
            elif base is not None and base.is_contiguous() and is_plain_view(tensor):
                # A part of a parameter, such as the bias of one expert: all parts are added to one tensor of rows.
                if id(base) not in wholes:
                    wholes[id(base)] = base, rows.new_zeros(len(rows), *base.shape)
                add_to_region(wholes[id(base)][1], base, tensor, rows)
            else:
                derived.append((tensor, rows))
        yield from wholes.values()
        yield from pulled_back_rows(derived)


def add_to_region(wholes: Tensor, parameter: Tensor, view: Tensor, rows: Tensor) -> None:
    """Add rows `(N, …)` to the region of `(N, *shape)` that `view` shows of `parameter`."""
    offset = view.storage_offset() - parameter.storage_offset()
    strides = (parameter.numel(), *view.stride())
    wholes.as_strided((len(wholes), *view.shape), strides, offset).add_(rows)


def is_plain_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a parameter whose gradient is part of the parameter's."""
    base = tensor._base
    return base is not None and base.is_leaf and not overlaps_itself(tensor) and not has_hooks(tensor)


def overlaps_itself(view: Tensor) -> bool:
    """Whether several elements of a view may share one place in memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def pulled_back_rows(derived: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-rollout gradients of the parameters behind derived tensors, from the rows of the derived tensors."""
    if not derived:
        return
    tensors = [tensor for tensor, _ in derived]
    parameters = list({id(p): p for tensor in tensors for p in parameters_behind(tensor)}.values())
    rows = [rows for _, rows in derived]
    try:
        pulled_rows = torch.autograd.grad(
            tensors, parameters, rows, allow_unused=True, is_grads_batched=True, retain_graph=True
        )
    except RuntimeError:  # some operation has no batching rule: one rollout after another
        each = [
            torch.autograd.grad(tensors, parameters, list(row), allow_unused=True, retain_graph=True)
            for row in zip(*(r.unbind() for r in rows), strict=True)
        ]
        pulled_rows = [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]
    yield from ((parameter, rows) for parameter, rows in zip(parameters, pulled_rows, strict=True) if rows is not None)


def parameters_behind(tensor: Tensor) -> list[Tensor]:
    """The leaves of the autograd graph of `tensor`."""
    leaves: dict[int, Tensor] = {}
    seen: set[object] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        stack.extend(parent for parent, _ in node.next_functions)
    return list(leaves.values())


# One operation with a copy of its parameters per rollout


@dataclass(frozen=True)
class TensorKinds:
    """What the interceptor knows about the tensors among an operation's arguments."""

    layout: RolloutLayout
    leaf_of: Callable[[Tensor], Tensor | None]
    """The leaf `(N, …)` of a parameter-side tensor, None for any other tensor."""
    is_activation: Callable[[Tensor], bool]


def run_per_rollout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kinds: TensorKinds) -> Any:
    """The result of an operation in which every parameter-side tensor is replaced by one copy per rollout.

    It equals the result of the plain call. None if the operation cannot be split by rollout: an activation has no
    rollout axis, or vmap has no rule for the operation.
    """
    if func is F.layer_norm:
        given = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
        x, shape, weight, bias = given["input"], given["normalized_shape"], given.get("weight"), given.get("bias")
        result = layer_norm_per_rollout(x, shape, weight, bias, given.get("eps", 1e-5), kinds)
        if result is not None:
            return result
    if func in BROADCASTS and len(args) == 2 and not kwargs:
        aligned = [
            aligned_leaf(kinds.leaf_of(a), b, kinds.layout) if isinstance(a, Tensor) else a
            for a, b in (args, args[::-1])
        ]
        sides = [a if leaf is None else leaf for a, leaf in zip(args, aligned, strict=True)]
        if sum(leaf is not None for leaf in aligned) == 1:
            return func(*sides)
    return run_under_vmap(func, args, kwargs, kinds)


def aligned_leaf(leaf: Tensor | None, other: Any, layout: RolloutLayout) -> Tensor | None:
    """A leaf `(N, *shape)` shaped to broadcast against activations `(N, …, *shape)`; None if it does not fit them."""
    if leaf is None or not isinstance(other, Tensor) or other.ndim < leaf.ndim or other.shape[0] != layout.rollouts:
        return None
    return leaf.view(leaf.shape[0], *[1] * (other.ndim - leaf.ndim), *leaf.shape[1:])


def layer_norm_per_rollout(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kinds: TensorKinds,
    shift: float = 0.0,
) -> Tensor | None:
    """A layer norm without weight and bias, then `weight + shift` and bias by broadcasting, one copy per rollout."""
    sides: list[Tensor | None] = []
    for side in (weight, bias):
        leaf = None if side is None else kinds.leaf_of(side)
        sides.append(side if leaf is None else aligned_leaf(leaf, x, kinds.layout))
        if leaf is not None and sides[-1] is None:
            return None
    scale, offset = sides
    normed = F.layer_norm(x, normalized_shape, None, None, eps)
    if scale is None:
        return normed if offset is None else normed + offset
    scale = scale + shift if shift else scale
    return normed * scale if offset is None else torch.addcmul(offset, normed, scale)


@dataclass(frozen=True)
class _BatchedArgument:
    """Placeholder in an operation's arguments for one of the tensors that vmap runs over."""

    index: int


class _NoRolloutAxisError(Exception):
    """The first axis of an activation does not run over the rollouts or their tokens."""


def run_under_vmap(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kinds: TensorKinds) -> Any:
    """The result of any operation, by vmap over rollouts; None if it cannot be split."""
    batched: list[Tensor] = []
    entries: set[int] = set()

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = kinds.leaf_of(value)
        if leaf is None and not kinds.is_activation(value):
            return value
        batched.append(with_rollout_axis(value, kinds.layout) if leaf is None else leaf)
        if leaf is None:
            entries.add(batched[-1].shape[1])
        return _BatchedArgument(len(batched) - 1)

    try:
        split_args, split_kwargs = tree_map(replaced, (args, kwargs))
    except _NoRolloutAxisError:
        return None
    if len(entries) != 1:  # activations with `N` and with `N · T` rows: the result's first axis is unknown
        return None

    def run_one_rollout(*tensors: Tensor) -> Any:
        call_args, call_kwargs = tree_map(
            lambda value: tensors[value.index] if isinstance(value, _BatchedArgument) else value,
            (split_args, split_kwargs),
        )
        return func(*call_args, **call_kwargs)

    try:
        result = torch.vmap(run_one_rollout)(*batched)
    except (RuntimeError, ValueError, NotImplementedError):  # vmap has no rule for the operation
        return None
    results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    if any(value.ndim < 2 or value.shape[1] not in entries for value in results):
        return None  # the operation changed the first axis
    return tree_map(lambda value: value.flatten(0, 1) if isinstance(value, Tensor) else value, result)


def with_rollout_axis(value: Tensor, layout: RolloutLayout) -> Tensor:
    """Activations with the rollout as a new first axis: `(N, 1, …)` from `(N, …)`, `(N, T, …)` from `(N·T, …)`."""
    entries = layout.entries(value)
    if not entries:
        raise _NoRolloutAxisError
    return value.unflatten(0, (layout.rollouts, entries))


# Norms without interception


@dataclass
class ParameterWatch:
    """How a module used its parameters while it ran under interception."""

    only_broadcasts: bool = True
    axes: set[int] = field(default_factory=set)
    """Ranks (`ndim`) of the activations that the parameters were broadcast against."""

    def see_operation(self, func: Callable[..., Any], tensors: list[Tensor], result: Any, *, meets: bool) -> None:
        """Note an operation on a parameter; `meets` says whether activations take part."""
        # An operation that changes the shape may mix elements, and would treat the copies' extra axis differently.
        kept_shape = isinstance(result, Tensor) and result.shape == max(tensors, key=Tensor.dim).shape
        if not kept_shape or func not in (BROADCASTS if meets else BROADCASTS | CASTS):
            self.only_broadcasts = False
        elif meets:
            self.axes.add(result.ndim)

    def see_read(self, func: Callable[..., Any]) -> None:
        """Note that the module read an attribute of a parameter."""
        self.only_broadcasts &= func in COPY_SAFE_READS

    def remember(self, module: nn.Module, x: Tensor) -> None:
        """Remember a childless module that only broadcast its parameters against tensors of its input's rank."""
        if self.only_broadcasts and self.axes == {x.ndim} and not module._modules and is_of_transformers(module):
            facts_of(module).broadcast_axes = x.ndim


def forward_with_copies(module: nn.Module, forward: Callable[..., Any], x: Tensor, leaves: Leaves) -> Any:
    """The forward pass of a broadcasting module, with one copy of each trainable parameter per rollout.

    None if the copies do not fit the input, or its rank is not that of the watched call.
    """
    if x.ndim != facts_of(module).broadcast_axes or x.shape[0] != leaves.layout.rollouts:
        return None
    trained = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
    copies = {name: aligned_leaf(leaves.of(parameter), x, leaves.layout) for name, parameter in trained.items()}
    if any(copy is None for copy in copies.values()):
        return None
    state = module.__dict__
    state.update(copies)  # Python finds these before the registered parameters of the same names
    try:
        return forward(x)
    finally:
        for name in copies:
            del state[name]


def layer_norm_with_copies(module: Any, shift: float, x: Tensor, leaves: Leaves) -> Tensor | None:
    """The forward pass of a layer norm with copies of its parameters; None if it must be intercepted instead."""
    weight = module.weight
    if weight is None or torch.is_autocast_enabled(x.device.type):
        return None
    kinds = TensorKinds(leaves.layout, lambda t: leaves.of(t) if t.requires_grad else None, lambda t: t is x)
    return layer_norm_per_rollout(x, module.normalized_shape, weight, module.bias, module.eps, kinds, shift)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether transformers defines the forward function of a module's class: it does the same at every call."""
    return type(module).forward.__module__.startswith("transformers.")


def class_path(module: nn.Module) -> str:
    """Module and name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
