"""Where parameters meet activations: every such operation of a forward pass, seen and replaced by an exact rule.

A `TorchFunctionMode` sees every torch operation without touching the model. Tensors fall into three kinds:
*activations* (they depend on the rollouts), tensors on the *parameters'* side (they require gradients and depend on no
rollout: the parameters and what is derived from them alone), and constants. An operation that mixes the first two is
where a parameter's per-rollout gradient arises:

- a matrix product or an embedding lookup becomes an autograd function that hands its factors to the collector instead
  of returning a weight gradient;
- anything else on a small tensor runs once per rollout under vmap (`leaves`);
- whatever cannot be split runs as it is. Autograd then gives that parameter an ordinary gradient, which is how the
  engine learns that it has to be replayed one rollout at a time. Nothing can be missed: a parameter that received
  neither factors, nor rows, nor an ordinary gradient did not take part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from scoregram.gram.collect import Collector, Slot
from scoregram.gram.layout import Layout
from scoregram.gram.leaves import Leaves, per_rollout
from scoregram.gram.outer import Factors, Lookup, Use

MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
DROPOUTS = {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
CASTS = {Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as}
PICKS = {Tensor.__getitem__, torch.index_select, Tensor.index_select}


class DropoutOff(TorchFunctionMode):
    """Runs a model without its dropout, in whatever mode it is, and remembers whether any was active."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(  # noqa: D105
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return self.without_dropout(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            args, kwargs = self.undropped_attention(args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation as it is."""
        return func(*args, **kwargs)

    def without_dropout(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input of a dropout."""
        bound = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        self.dropped |= bool(bound.get("p", 0.5)) and bool(bound.get("training", bound.get("train", True)))
        return bound["input"]

    def undropped_attention(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an attention with its dropout at zero (the fifth argument, or `dropout_p`)."""
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self.dropped |= bool(rate)
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, kwargs | {"dropout_p": 0.0}


class Interceptor(DropoutOff):
    """The mode under which one forward and backward pass is measured."""

    def __init__(self, parameters: list[Tensor], layout: Layout, collector: Collector, seeds: list[Tensor]) -> None:
        super().__init__()
        self.layout = layout
        self.collector = collector
        self.leaves = Leaves(layout)
        self.recording = True
        """False during the backward pass, when checkpointed layers run once more."""
        self.head: Tensor | None = None
        """The head's weight, if its product is to be captured instead of computed."""
        self.captured: tuple[Tensor, Tensor, Tensor | None] | None = None
        """Input, first-position output and bias of the head's product."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._derived = WeakTensorKeyDictionary()
        self._casts = WeakTensorKeyDictionary()
        self._carriers = WeakTensorKeyDictionary()
        for seed in seeds:
            self._carriers[seed] = None

    # kinds of tensors

    def is_parameter_side(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients and depends on parameters alone."""
        return tensor.requires_grad and (id(tensor) in self._parameters or tensor in self._derived)

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the rollouts."""
        return tensor in self._carriers or (tensor.requires_grad and not self.is_parameter_side(tensor))

    def owner_of(self, tensor: Tensor) -> Tensor | None:
        """Owners of the first axis of an activation, where they were carried along; else None."""
        return self._carriers.get(tensor)

    # operations

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, by a rule if it is one where parameters meet activations."""
        tensors = list(tensors_in(args, kwargs))
        if func is Tensor.__getitem__ and self.is_parameter_side(args[0]) and is_choice(args[1]):
            tensors = [args[0]]  # which expert is a discrete choice; its weights stay on the parameters' side
        activations = [tensor for tensor in tensors if self.is_activation(tensor)]
        parameters = [tensor for tensor in tensors if self.is_parameter_side(tensor)]
        if activations and parameters and torch.is_grad_enabled():
            result = self.meet(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if activations:
            self.mark_activations(result, func, args, activations)
        elif parameters:
            self.mark_derived(result, func, parameters)
        return result

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in which a parameter meets activations."""
        result = None
        if func is F.linear:
            result = self.linear(*args, **kwargs)
        elif func is F.embedding:
            result = self.embedding(*args, **kwargs)
        elif func in MATMULS and len(args) == 2:
            result = self.product(args[0], args[1], None)
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            result = self.product(args[1], args[2], args[0])
        if result is None and not is_in_place(func):
            result = self.once_per_rollout(func, args, kwargs)
        return func(*args, **kwargs) if result is None else result

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
        """`x Wᵀ + b`."""
        if self.head is not None and weight is self.head and self.recording:
            first = F.linear(input[:, :1], weight, bias).detach()
            self.captured = (input, first, bias)
            return first
        return self._streamed(input, weight, bias, transposed=False)

    def product(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x W + b` with a weight stored as (in, out)."""
        if right.ndim != 2 or not self.is_activation(left) or self.is_activation(right):
            return None
        return self._streamed(left, right, bias, transposed=True)

    def _streamed(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor | None:
        """The product through `Streamed`, or None if there is no rule for these arguments."""
        if not self.is_activation(x) or self.is_activation(weight) or weight.ndim != 2:
            return None
        if bias is not None and self.is_activation(bias):
            return None
        owner = self.owner_of(x)
        if owner is None and self.layout.owners(x.shape[0]) is None:
            return None
        source = self.source_of(weight) if self.is_parameter_side(weight) else None
        if self.is_parameter_side(weight) and source is None:
            return None
        parameter_bias = bias is not None and self.is_parameter_side(bias)
        if parameter_bias and bias is not None and id(bias) not in self._parameters:
            return None
        x, low_weight, low_bias = under_autocast(x, weight, bias)
        call = Call(self, owner, transposed, source, bias if parameter_bias else None)
        if self.recording and source is not None:
            call.slot = self.collector.expect(*source)
        return StreamedProduct.apply(x, weight, low_weight, bias, low_bias, call)

    def embedding(
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        """Rows of an embedding; the padding row, if there is one, receives no gradient."""
        unusual = max_norm is not None or scale_grad_by_freq or sparse
        if unusual or id(weight) not in self._parameters or input.ndim < 1:
            return None
        if input.shape[0] != self.layout.rollouts:
            return None
        counted = input if padding_idx is None else torch.where(input == padding_idx % len(weight), -1, input)
        call = Call(self, None, False, (weight, weight), None)
        if self.recording:
            call.slot = self.collector.expect_lookup(weight, counted)
        return StreamedLookup.apply(input, counted, weight, call)

    def once_per_rollout(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any operation on small parameter-side tensors, one copy of them per rollout; None if it cannot be split."""
        tensors = list(tensors_in(args, kwargs))
        if any(self.owner_of(tensor) is not None for tensor in tensors if self.is_activation(tensor)):
            return None
        if not all(self.leaves.accepts(tensor) for tensor in tensors if self.is_parameter_side(tensor)):
            return None
        made = len(self.leaves.made)
        result = per_rollout(
            func,
            args,
            kwargs,
            layout=self.layout,
            leaf_of=lambda t: self.leaves.of(t) if self.is_parameter_side(t) else None,
            carries=self.is_activation,
        )
        if result is None:  # nothing will flow into leaves made for this call alone
            del self.leaves.made[made:]
        return result

    # bookkeeping

    def source_of(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Parameter and region behind a weight: itself, a view of it, or a cast of one of these."""
        weight = self._casts.get(weight, weight)
        if id(weight) in self._parameters:
            return weight, weight
        base = weight._base
        return (base, weight) if base is not None and id(base) in self._parameters else None

    def mark_activations(
        self, result: Any, func: Callable[..., Any], args: tuple[Any, ...], activations: list[Tensor]
    ) -> None:
        """Results of an operation on activations are activations; owners are carried along with the first axis."""
        owners = [owner for tensor in activations if (owner := self.owner_of(tensor)) is not None]
        picked = self.picked_owner(func, args)
        for tensor in tensors_in((result,), {}):
            if tensor in self._carriers:
                continue
            owner = picked
            if owner is None:
                owner = next((o for o in owners if tensor.ndim and len(o) == tensor.shape[0]), None)
            self._carriers[tensor] = owner

    def picked_owner(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
        """Owners after rows were picked out of activations by an index along the first axis."""
        if func not in PICKS or not isinstance(args[0], Tensor):
            return None
        source, index = args[0], args[-1]
        if isinstance(index, tuple):
            index = index[0] if index else None
        if not isinstance(index, Tensor) or index.ndim != 1 or (func is not Tensor.__getitem__ and args[1] != 0):
            return None
        owner = self.owner_of(source)
        owner = self.layout.owners(source.shape[0]) if owner is None else owner
        return None if owner is None else owner[index.to(owner.device)]

    def mark_derived(self, result: Any, func: Callable[..., Any], parameters: list[Tensor]) -> None:
        """Results of an operation on parameters alone are on the parameters' side."""
        for tensor in tensors_in((result,), {}):
            if tensor.requires_grad and id(tensor) not in self._parameters:
                self._derived[tensor] = True
                if func in CASTS and tensor.shape == parameters[0].shape:
                    self._casts[tensor] = self._casts.get(parameters[0], parameters[0])


@dataclass
class Call:
    """What one intercepted operation has to remember for its backward pass."""

    interceptor: Interceptor
    owner: Tensor | None
    transposed: bool
    source: tuple[Tensor, Tensor] | None
    """Parameter and region of the weight, None if the weight is not trained."""
    bias: Tensor | None
    """The bias, None if it is not trained."""
    slot: Slot | None = None
    """Where the use was announced; None for an operation first seen when a layer was run again in the backward pass."""

    def blocks(self, value: Tensor) -> Tensor:
        """Rows of a tensor, one block per rollout."""
        blocks = self.interceptor.layout.blocks(value, self.owner)
        assert blocks is not None, "owners were checked in the forward pass"
        return blocks

    def deliver(self, use: Use) -> None:
        """Hand a use of the weight to the collector."""
        collector = self.interceptor.collector
        if self.slot is not None:
            collector.use_arrived(self.slot, use)
        elif self.source is not None:
            collector.late_use_arrived(*self.source, use)


class StreamedProduct(torch.autograd.Function):
    """`x Wᵀ + b` (or `x W + b`) whose backward pass gives its factors to the collector, and the weight nothing."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        low_weight: Tensor,
        bias: Tensor | None,
        low_bias: Tensor | None,
        call: Call,
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, low_weight)
        return F.linear(x, low_weight.mT if call.transposed else low_weight, low_bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight = ctx.saved_tensors
        call: Call = ctx.call
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = g @ (weight.mT if call.transposed else weight)
        if call.source is not None or call.bias is not None:
            rows_g = call.blocks(g)
            if call.source is not None:
                rows_x = call.blocks(x)
                call.deliver(Factors(rows_x, rows_g) if call.transposed else Factors(rows_g, rows_x))
            if call.bias is not None:
                wide = torch.promote_types(rows_g.dtype, torch.float32)
                call.interceptor.collector.rows_arrived(call.bias, rows_g.sum(1, dtype=wide))
        return grad_x, None, None, None, None, None


class StreamedLookup(torch.autograd.Function):
    """Rows of an embedding, whose backward pass gives ids and gradients to the collector."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, counted: Tensor, weight: Tensor, call: Call) -> Tensor:  # noqa: D102
        ctx.call = call
        ctx.save_for_backward(counted)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:  # noqa: D102
        (counted,) = ctx.saved_tensors
        call: Call = ctx.call
        rollouts = call.interceptor.layout.rollouts
        call.deliver(Lookup(counted.reshape(rollouts, -1), g.reshape(rollouts, -1, g.shape[-1])))
        return None, None, None, None


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of a matrix product as autocast would hand them to it."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight.detach(), None if bias is None else bias.detach()
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of an operation, lists and tuples of them included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value), {})


def is_choice(index: Any) -> bool:
    """Whether an index is one whole number held in a tensor."""
    return isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point()


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether an operation writes into its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
