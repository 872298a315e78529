"""Where parameters meet activations: every such operation of a forward pass, seen and replaced by an exact rule.

A `TorchFunctionMode` sees every torch operation without touching the model. Seeing all of them costs host time, and
nearly always a parameter is used by the module that owns it: so the mode is first put around those modules alone
(`narrowed`), and around the whole model only where that did not suffice. Tensors fall into three kinds:
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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.gram.collect import Collector
from scoregram.gram.dropout import DropoutOff
from scoregram.gram.layout import Layout
from scoregram.gram.leaves import Leaves, per_rollout
from scoregram.gram.marks import ACTIVATION, Activation, Derived, mark, mark_of
from scoregram.gram.norms import BROADCASTING, CASTS, LAYER_NORMS, Watch, class_path, layer_norm, with_copies
from scoregram.gram.restore import attributes
from scoregram.gram.streamed import (
    Call,
    StreamedLookup,
    StreamedProduct,
    has_saved_tensor_hooks,
    hooked_product,
    under_autocast,
)

MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
PICKS = {Tensor.__getitem__, torch.index_select, Tensor.index_select}


class Interceptor(DropoutOff):
    """The mode under which one forward and backward pass is measured."""

    def __init__(
        self, parameters: list[Tensor], layout: Layout, collector: Collector, input_ids: Tensor, *others: Tensor
    ) -> None:
        """Take the trained parameters, and the tensors that the model is given, the token ids first."""
        super().__init__()
        self.input_ids = input_ids
        self.vocabulary = input_ids.unique()  # before the pass: asked for later it would wait for the device
        self.layout = layout
        self.collector = collector
        self.leaves = Leaves(layout)
        self.recording = True
        """False during the backward pass, when checkpointed layers run once more."""
        self.head: Tensor | None = None
        """The head's weight, if its product is to be captured instead of computed."""
        self.captured: tuple[Tensor, Tensor, Tensor | None] | None = None
        """Input, first-position output and bias of the head's product."""
        self.watch = Watch()
        """What the module that runs does with its parameters."""
        self.captures = 0
        """How often that weight was multiplied with; more than once means that it is more than the head."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._marked_inputs: list[Any] = []
        for given in (input_ids, *others):
            mark(given, ACTIVATION)

    @contextmanager
    def narrowed(self, owners: Sequence[nn.Module]) -> Iterator[None]:
        """The forward pass of every module that owns trained parameters seen inside, and nothing else."""
        try:
            with attributes(owners, "forward", self.seen_forward):
                yield
        finally:
            while self._marked_inputs:  # a buffer may be among them
                del self._marked_inputs.pop()._scoregram

    def seen_forward(self, module: nn.Module) -> Callable[..., Any]:
        """A forward pass of `module` that is seen; that of plain layers and known norms needs no mode for that."""
        if "forward" in vars(module):  # somebody else has changed what it does
            return partial(self.layer, module, module.forward)
        if type(module) is nn.Linear:
            return partial(self.linear_layer, module)
        if class_path(module) in LAYER_NORMS or module in BROADCASTING:
            return partial(self.norm, module, module.forward)
        return partial(self.layer, module, module.forward)

    def norm(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward pass of a module that only scales and shifts by its parameters."""
        result = None
        if len(args) == 1 and not kwargs and torch.is_grad_enabled():
            shift = LAYER_NORMS.get(class_path(module))
            if shift is not None:
                result = layer_norm(module, shift, args[0], self.leaves)
            elif module in BROADCASTING:
                result = with_copies(module, forward, args[0], self.leaves)
        return self.layer(module, forward, *args, **kwargs) if result is None else result

    def linear_layer(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
        """Forward pass of a plain linear layer: the usual case without the questions that any product has to answer."""
        weight, bias = module.weight, module.bias
        with torch._C.DisableTorchFunction():
            if weight is self.head and self.recording:
                return self.capture(input, weight, bias)
            result = None
            if torch.is_grad_enabled():
                if not input.requires_grad:
                    self.mark_inputs((input,))
                is_usual = input.ndim == 3 and input.shape[0] == self.layout.rollouts and id(weight) in self._parameters
                if is_usual and bias is None and self.owner_of(input) is None:
                    result = self._usual_product(input, weight)
                else:
                    result = self._streamed(input, weight, bias, transposed=False)
            return F.linear(input, weight, bias) if result is None else result

    def _usual_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x Wᵀ` with a trained weight and one block of tokens per rollout."""
        if self.keeps(weight):
            return self._leafed(x, weight, None, transposed=False)
        x, low_weight, _ = under_autocast(x, weight, None)
        slot = self.collector.expect(weight, weight) if self.recording else None
        call = Call(self.layout, self.collector, None, False, (weight, weight), None, slot)
        if x.requires_grad and not has_saved_tensor_hooks():
            return hooked_product(x, low_weight, call)
        return StreamedProduct.apply(x, weight, low_weight, None, None, call)

    def layer(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward pass of any other module, under the mode."""
        self.mark_inputs(tensors_in(args, kwargs))
        self.watch = Watch()
        with self:
            result = forward(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and torch.is_grad_enabled():
            self.watch.remember(module, args[0])
        return result

    def mark_inputs(self, tensors: Iterable[Tensor]) -> None:
        """What a module is given depends on the rollouts."""
        for tensor in tensors:
            if not tensor.requires_grad and mark_of(tensor) is None:
                mark(tensor, ACTIVATION)
                self._marked_inputs.append(tensor)

    # kinds of tensors

    def is_parameter_side(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients and depends on parameters alone."""
        if not tensor.requires_grad:
            return False
        return id(tensor) in self._parameters or type(mark_of(tensor)) is Derived

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the rollouts; marks get lost where autograd saves and unpacks a tensor."""
        if type(mark_of(tensor)) is Activation:
            return True
        return tensor.requires_grad and not self.is_parameter_side(tensor)

    def owner_of(self, tensor: Tensor) -> Tensor | None:
        """Owners of the first axis of an activation, where they were carried along; else None."""
        known = mark_of(tensor)
        return known.owner if isinstance(known, Activation) else None

    # operations

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, by a rule if it is one where parameters meet activations."""
        if func is F.linear and self.head is not None and self.recording and args[1] is self.head:
            return self.capture(*args, **kwargs)
        tensors = list(tensors_in(args, kwargs))
        if func is Tensor.__getitem__ and is_choice(args[1]) and self.is_parameter_side(args[0]):
            tensors = [args[0]]  # which expert is a discrete choice; its weights stay on the parameters' side
        parameters, meets = [], False
        for tensor in tensors:
            if self.is_parameter_side(tensor):
                parameters.append(tensor)
            else:
                meets = meets or tensor.requires_grad or type(mark_of(tensor)) is Activation
        if meets and parameters and torch.is_grad_enabled():
            result = self.meet(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if parameters:
            self.watch.saw(func, tensors, result, meets=meets)
        if meets:
            self.mark_activations(result, func, args, tensors)
        elif parameters:
            self.mark_derived(result, func, parameters)
        return result

    def read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read an attribute; of a parameter, the shape is not that of its copies."""
        if self.is_parameter_side(args[0]):
            self.watch.read(func)
        return super().read(func, args)

    def capture(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Keep the input of the head, and give the model the logits of the first position to go on with."""
        first = F.linear(input[:, :1], weight, bias).detach()
        self.captured = (input, first, bias)
        self.captures += 1
        return first

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
        if owner is None and not self.layout.tells(x):
            return None
        source = self.source_of(weight) if self.is_parameter_side(weight) else None
        if self.is_parameter_side(weight) and source is None:
            return None
        parameter_bias = bias is not None and self.is_parameter_side(bias)
        if parameter_bias and bias is not None and id(bias) not in self._parameters:
            return None
        if source is not None and source[0] is source[1] and owner is None and self.keeps(source[0]):
            return self._leafed(x, weight, bias, transposed=transposed)
        x, low_weight, low_bias = under_autocast(x, weight, bias)
        call = Call(self.layout, self.collector, owner, transposed, source, bias if parameter_bias else None)
        if self.recording and source is not None:
            call.slot = self.collector.expect(*source)
        return StreamedProduct.apply(x, weight, low_weight, bias, low_bias, call)

    def keeps(self, weight: Tensor) -> bool:
        """Whether a weight takes one leaf per rollout: it is small, and not an embedding, whose rows are streamed."""
        return self.leaves.keeps(weight) and id(weight) not in self.collector.looked_up

    def _leafed(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """The product with one copy of a small weight per rollout: autograd returns the rows, at less host time."""
        leaf = self.leaves.of(weight, transposed=not transposed)  # (N, in, out)
        is_block = x.ndim == 3 and x.shape[0] == self.layout.rollouts
        out = torch.bmm(x if is_block else x.reshape(self.layout.rollouts, -1, x.shape[-1]), leaf)
        if bias is not None:
            out = out + (self.leaves.of(bias).unsqueeze(1) if self.is_parameter_side(bias) else bias)
        return out if is_block else out.view(*x.shape[:-1], out.shape[-1])

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
        rows = self.vocabulary if is_all_of(input, self.input_ids) else input.unique()
        call = Call(self.layout, self.collector, None, False, (weight, weight), None)
        if self.recording:
            call.slot = self.collector.expect_lookup(weight, rows)
        return StreamedLookup.apply(input, counted, rows, weight, call)

    def once_per_rollout(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any operation on small parameter-side tensors, one copy of them per rollout; None if it cannot be split."""
        tensors = list(tensors_in(args, kwargs))
        if any(self.owner_of(tensor) is not None for tensor in tensors if self.is_activation(tensor)):
            return None
        if not all(self.leaves.accepts(tensor) for tensor in tensors if self.is_parameter_side(tensor)):
            return None
        return per_rollout(
            func,
            args,
            kwargs,
            layout=self.layout,
            leaf_of=lambda t: self.leaves.of(t) if self.is_parameter_side(t) else None,
            carries=self.is_activation,
        )

    # bookkeeping

    def source_of(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Parameter and region behind a weight: itself, a view of it, or a cast of one of these."""
        known = mark_of(weight)
        if isinstance(known, Derived) and known.cast_of is not None:
            weight = known.cast_of
        if id(weight) in self._parameters:
            return weight, weight
        base = weight._base
        return (base, weight) if base is not None and id(base) in self._parameters else None

    def mark_activations(
        self, result: Any, func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
    ) -> None:
        """Results of an operation on activations are activations; owners are carried along with the first axis."""
        if result is args[0]:
            return  # written in place, and marked when it was made
        owners = [owner for tensor in tensors if (owner := self.owner_of(tensor)) is not None]
        picked = self.picked_owner(func, args) if func in PICKS else None
        for tensor in tensors_in((result,), {}):
            if picked is not None:
                mark(tensor, Activation(picked))
            elif owners:
                owner = next((o for o in owners if tensor.ndim and len(o) == tensor.shape[0]), None)
                mark(tensor, Activation(owner))
            else:
                mark(tensor, ACTIVATION)

    def picked_owner(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
        """Owners after rows were picked out of activations by an index along the first axis."""
        source, index = args[0], args[-1]
        if isinstance(index, tuple):
            index = index[0] if index else None
        if not isinstance(index, Tensor) or index.ndim != 1 or (func is not Tensor.__getitem__ and args[1] != 0):
            return None
        owner = self.owner_of(source)
        owner = self.layout.owners(source.shape[0]) if owner is None else owner
        return None if owner is None else owner.to(index.device)[index]

    def mark_derived(self, result: Any, func: Callable[..., Any], parameters: list[Tensor]) -> None:
        """Results of an operation on parameters alone are on the parameters' side."""
        for tensor in tensors_in((result,), {}):
            if tensor.requires_grad and id(tensor) not in self._parameters:
                known = mark_of(parameters[0])
                origin = known.cast_of if isinstance(known, Derived) and known.cast_of is not None else parameters[0]
                is_cast = func in CASTS and tensor.shape == parameters[0].shape
                mark(tensor, Derived(origin if is_cast else None))


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of an operation, lists and tuples of them included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value), {})


def is_all_of(tensor: Tensor, whole: Tensor) -> bool:
    """Whether two tensors show the same memory in the same shape."""
    return tensor.data_ptr() == whole.data_ptr() and tensor.shape == whole.shape and tensor.dtype == whole.dtype


def is_choice(index: Any) -> bool:
    """Whether an index is one whole number held in a tensor."""
    return isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point()


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether an operation writes into its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
