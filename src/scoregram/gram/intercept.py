"""Stage 3, interception: every operation in which a parameter meets activations runs by an exact rule.

A `TorchFunctionMode` intercepts torch operations without changing the model. Intercepting all of them costs host time,
and nearly every parameter is used only by the module that owns it. So a *narrow* pass puts the mode around those
modules alone. If that missed something, a *wide* pass puts it around the whole model.

Tensors are of three kinds: *activations* depend on the rollouts; *parameter-side* tensors require gradients and depend
on no rollout (the parameters, and tensors derived from them alone); all others are constants. A per-rollout gradient
arises where an operation mixes the first two:

- a matrix product or an embedding lookup becomes an operation of `collect`, which gives its factors to the collector
  instead of returning a weight gradient;
- any other operation on a small parameter-side tensor runs with one copy of it per rollout (`leaves`);
- an operation that cannot be split by rollout runs unchanged. Autograd then writes the parameter's `.grad`, and the
  engine replays that parameter, one rollout at a time. So no parameter is missed: one that received neither factors,
  nor rows, nor a `.grad`, was not used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.gram.axis import Axes, FirstAxis, Observations, OperationKey
from scoregram.gram.batch import Batch, RolloutLayout
from scoregram.gram.collect import (
    Collector,
    Destination,
    StreamedLookup,
    StreamedProduct,
    WeightUse,
    has_saved_tensor_hooks,
    hooked_product,
    under_autocast,
)
from scoregram.gram.leaves import (
    LAYER_NORMS,
    Leaves,
    ParameterWatch,
    TensorKinds,
    class_path,
    forward_with_copies,
    is_of_transformers,
    is_plain_view,
    layer_norm_with_copies,
    run_per_rollout,
)
from scoregram.gram.marks import (
    ACTIVATION,
    Activation,
    Derived,
    has_hooks,
    known_terms,
    low_rank_terms,
    mark_of,
    set_mark,
    stack_entry,
    uncast,
)
from scoregram.gram.model import facts_of
from scoregram.gram.operations import (
    BROADCASTS,
    CASTS,
    CONCATENATIONS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    ROW_SELECTIONS,
    SIGNATURES,
    SPLITS,
    is_in_place,
    is_same_memory,
    is_scalar_index,
    operation_name,
    positional_arguments,
    tensors_in,
)
from scoregram.gram.plain_passes import DropoutOff
from scoregram.gram.undo import Undo


@dataclass(frozen=True)
class CapturedHead:
    """The operands of the head's product; the model does not compute that product."""

    hidden: Tensor
    """`(N, T, h)`"""
    first_logits: Tensor
    """`(N, 1, V)` logits of the first position, detached: what the model received instead of the product."""
    bias: Tensor | None


class Interceptor(DropoutOff):
    """The `TorchFunctionMode` of one forward and backward pass."""

    def __init__(self, parameters: Mapping[str, Tensor], batch: Batch, collector: Collector, axes: Axes) -> None:
        """Take the trainable parameters, the batch that enters the model, the collector, and the known axes."""
        super().__init__()
        self.input_ids = batch.input_ids
        # computed before the pass: it waits for the device
        self.vocabulary = batch.input_ids.unique() if batch.static is None else batch.static.vocabulary
        self.layout = RolloutLayout(batch.rollouts, batch.input_ids.shape[1])
        self.collector = collector
        self.leaves = Leaves(self.layout)
        self.announcing = True
        """Whether uses are announced; False in the backward pass, when checkpointed layers run again."""
        self.head: Tensor | None = None
        """The head's weight, if its product is captured instead of computed."""
        self.captured: CapturedHead | None = None
        self.captures = 0
        """Number of products with the head's weight; if there are several, the weight is not only the head."""
        self.watch = ParameterWatch()
        """How the running module uses its parameters."""
        self.axes = axes
        self.unknown: set[OperationKey] = set()
        """Operations that are not in `axes`, or had another number of entries per rollout."""
        self.observations: Observations | None = None
        """First axes of activations in a probe pass, which splits no operation by rollout; None in other passes."""
        self._observed: dict[OperationKey, Tensor] = {}
        self._leading: set[tuple[OperationKey, int]] = set()
        """Operations with the first length at which `leads` was true: the answer is the same for the whole pass."""
        self._module_names: dict[int, str | None] = {}
        self._parameters = {id(parameter): name for name, parameter in parameters.items()}
        self._undo = Undo()
        """Removes the marks of a narrow pass."""
        for tensor in (batch.input_ids, batch.attention_mask):
            set_mark(tensor, ACTIVATION)

    # A narrow pass: module by module

    def intercept_modules(self, owners: Sequence[nn.Module], undo: Undo) -> None:
        """Intercept the forward pass of these modules, and nothing else, until `undo` restores them."""
        self._undo = undo
        for module in owners:
            undo.set_attribute(module, "forward", self.intercepted_forward(module))

    def intercepted_forward(self, module: nn.Module) -> Callable[..., Any]:
        """A forward function for `module`; plain linear layers and known norms need no mode around them."""
        if self.observations is not None or "forward" in vars(module):
            return partial(self.run_module, module, module.forward)  # a user replaced it: the class says nothing
        if type(module) is nn.Linear:
            return partial(self.run_linear_layer, module)
        is_known = facts_of(module).broadcast_axes is not None and is_of_transformers(module)
        if class_path(module) in LAYER_NORMS or is_known:
            return partial(self.run_norm, module, module.forward)
        return partial(self.run_module, module, module.forward)

    def run_norm(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward pass of a module that only scales and shifts by its parameters."""
        result = None
        is_usual = len(args) == 1 and not kwargs and torch.is_grad_enabled()
        if is_usual and self.owner_of(args[0]) is None and self.leads_module(module, args[0]):
            shift = LAYER_NORMS.get(class_path(module))
            if shift is not None:
                result = layer_norm_with_copies(module, shift, args[0], self.leaves)
            else:
                result = forward_with_copies(module, forward, args[0], self.leaves)
        return self.run_module(module, forward, *args, **kwargs) if result is None else result

    def run_linear_layer(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
        """Forward pass of a plain linear layer: these take most of the host time, so the usual case has a shortcut."""
        weight, bias = module.weight, module.bias
        with torch._C.DisableTorchFunction():  # the rule is applied here, not by a mode
            if weight is self.head and self.announcing:
                return self.capture_head(input, weight, bias)
            result = None
            if torch.is_grad_enabled():
                if not input.requires_grad:
                    self.mark_inputs((input,))
                owner = self.owner_of(input)
                if owner is None and not self.leads_module(module, input):
                    pass
                elif owner is None and input.ndim == 3 and bias is None and id(weight) in self._parameters:
                    result = self._usual_product(input, weight)
                else:
                    result = self._streamed_product(input, weight, bias, transposed=False)
                if owner is not None and result is not None:
                    set_mark(result, Activation(owner))
            return F.linear(input, weight, bias) if result is None else result

    def _usual_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x Wᵀ` with a trained weight and one block of tokens per rollout."""
        if self.gets_leaf(weight):
            return self._product_with_leaf(x, weight, None, transposed=False)
        x, low_weight, _ = under_autocast(x, weight, None)
        destinations = (Destination(weight, weight),)
        self.announce(destinations)
        use = WeightUse(self.layout, self.collector, None, False, destinations, None)
        if x.requires_grad and not has_saved_tensor_hooks():  # a hook needs a result that requires gradients
            return hooked_product(x, low_weight, use)
        return StreamedProduct.apply(x, weight, low_weight, None, None, use)

    def run_module(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward pass of any other module, under the mode."""
        self.mark_inputs(tensors_in(args, kwargs))
        self.watch = ParameterWatch()
        with self:
            result = forward(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            if self.observations is not None:
                self.leads_module(module, args[0])
            elif torch.is_grad_enabled():
                self.watch.remember(module, args[0])
        return result

    def mark_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Mark the inputs of a module as activations: a narrow pass has not seen the operations before it."""
        for tensor in tensors:
            if not tensor.requires_grad and mark_of(tensor) is None:
                # a buffer of the model may be among them, so the mark must be removed afterwards
                self._undo.operations.append((vars(tensor).pop, "_scoregram", None))
                set_mark(tensor, ACTIVATION)

    # The first axis of an activation

    def leads(self, key: OperationKey, value: Tensor) -> bool:
        """Whether the first axis of an activation without owners is known to run over the rollouts; `key` names it."""
        first = value.shape[0] if value.ndim else 0
        if (key, first) in self._leading:
            return True
        if self.observations is not None:
            if self._observed.get(key) is not value:  # a loop over experts selects from the same tensor again and again
                self.observations.setdefault(key, []).append(FirstAxis.of(value))
                self._observed[key] = value
            return False
        known = self.axes.get(key)
        if known is None:
            self.unknown.add(key)
            return False
        entries = self.layout.entries(value)
        if any(each.fits(entries, self.layout.tokens) for each in known):
            self._leading.add((key, first))
            return True
        if known:
            self.unknown.add(key)
        return False

    def observes_products(self) -> bool:
        """Whether rules apply: gradients are enabled, or a probe pass looks into a checkpointed layer."""
        return torch.is_grad_enabled() or self.observations is not None

    def leads_module(self, module: nn.Module, value: Tensor) -> bool:
        """`leads` for the only input of a module that owns parameters."""
        if id(module) not in self._module_names:  # the interceptor lives no longer than the model, so ids stay unique
            names = (self._parameters.get(id(parameter)) for parameter in module._parameters.values())
            self._module_names[id(module)] = next(filter(None, names), None)
        return self.leads(("module", self._module_names[id(module)], value.ndim), value)

    def leads_operation(self, func: Callable[..., Any], tensors: list[Tensor]) -> bool:
        """`leads` for all activations without owners in an operation on parameter-side tensors."""
        names = self.names_of(tensors)
        free = [tensor for tensor in tensors if self.is_activation(tensor) and self.owner_of(tensor) is None]
        answers = [self.leads((operation_name(func), names, tensor.ndim), tensor) for tensor in free]
        return all(answers)

    def names_of(self, tensors: Iterable[Tensor]) -> tuple[str, ...]:
        """The names of the parameters that these tensors depend on."""
        names: dict[str, None] = {}
        for tensor in tensors:
            mark = mark_of(tensor)
            if isinstance(mark, Derived):
                names |= dict.fromkeys(mark.names)
            elif id(tensor) in self._parameters:
                names[self._parameters[id(tensor)]] = None
        return tuple(names)

    # Kinds of tensors

    def is_parameter_side(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients and depends on parameters alone."""
        if not tensor.requires_grad and self.observations is None:
            return False
        return id(tensor) in self._parameters or type(mark_of(tensor)) is Derived

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the rollouts."""
        if type(mark_of(tensor)) is Activation:
            return True
        # A tensor that autograd saved and unpacked has lost its mark, but still requires gradients.
        return tensor.requires_grad and not self.is_parameter_side(tensor)

    def owner_of(self, tensor: Tensor) -> Tensor | None:
        """Owners of the entries of an activation's first axis, or None if it is not marked with them."""
        mark = mark_of(tensor)
        return mark.owner if isinstance(mark, Activation) else None

    def gets_leaf(self, weight: Tensor) -> bool:
        """Whether a weight gets a leaf: it is small, and not an embedding (whose lookups are streamed)."""
        return self.leaves.prefers(weight) and not self.collector.is_embedding(weight)

    # One operation under the mode

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; by a rule if a parameter meets activations in it."""
        if kwargs and func in SIGNATURES:
            args, kwargs = positional_arguments(SIGNATURES[func], args, kwargs)
        if func is F.linear and self.head is not None and self.announcing and args[1] is self.head:
            return self.capture_head(*args, **kwargs)
        if func is F.embedding and args[0].ndim == 2 and len(args[0]) == 1 and self.is_activation(args[0]):
            expanded = args[0].expand(self.layout.rollouts, -1)  # positions that all rollouts share: a lookup for each
            set_mark(expanded, ACTIVATION)
            args = (expanded, *args[1:])
        tensors = list(tensors_in(args, kwargs))
        is_choice = func is Tensor.__getitem__ and is_scalar_index(args[1])
        if (is_choice or func is Tensor.type_as) and self.is_parameter_side(args[0]):
            # The choice of an expert is discrete, and `type_as` reads a dtype: the result stays on the parameter side.
            tensors = [args[0]]
        parameters, meets = [], False
        for tensor in tensors:
            if self.is_parameter_side(tensor):
                parameters.append(tensor)
            else:
                meets = meets or tensor.requires_grad or type(mark_of(tensor)) is Activation
        result = None
        if meets and parameters and self.observes_products():
            result = self.run_by_rule(func, args, kwargs, tensors)
        elif parameters and not meets:
            result = self.repeated_rule(func, args, kwargs)
            meets = result is not None
        result = func(*args, **kwargs) if result is None else result
        if parameters:
            self.watch.see_operation(func, tensors, result, meets=meets)
        if meets:
            self.mark_activations(result, func, args, tensors)
        elif parameters:
            self.mark_derived(result, func, args, kwargs, parameters)
        return result

    def read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read an attribute; the watch notes reads from a parameter, because a copy may return another value."""
        if self.is_parameter_side(args[0]):
            self.watch.see_read(func)
        return super().read(func, args)

    def capture_head(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Keep the head's operands, and return only the logits of the first position."""
        first = F.linear(input[:, :1], weight, bias).detach()
        self.captured = CapturedHead(input, first, bias)
        self.captures += 1
        return first

    def run_by_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """The result of an operation in which a parameter meets activations; None if no rule covers it."""
        if not self.leads_operation(func, tensors):
            is_stacked = func in PRODUCTS and len(args) == 2 and not kwargs
            return self.stacked_rule(func, *args) if is_stacked else None
        result = None
        if func is F.linear:
            result = self.linear_rule(*args, **kwargs)
        elif func is F.embedding:
            result = self.embedding_rule(*args, **kwargs)
        elif func in MATRIX_PRODUCTS and len(args) == 2:
            result = self.product_rule(args[0], args[1], None)
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            result = self.product_rule(args[1], args[2], args[0])
        if result is None and not is_in_place(func):
            result = self.per_rollout_rule(func, args, kwargs)
        return result

    # Rules: each returns None if it does not cover the arguments

    def linear_rule(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
        """`x Wᵀ + b`."""
        return self._streamed_product(input, weight, bias, transposed=False)

    def product_rule(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x W + b` with a weight stored as (in, out)."""
        if right.ndim != 2 or not self.is_activation(left) or self.is_activation(right):
            return None
        return self._streamed_product(left, right, bias, transposed=True)

    def _streamed_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor | None:
        """`x Wᵀ + b`, or `x W + b` if `transposed`, whose backward pass gives the factors to the collector."""
        if not self.is_activation(x) or self.is_activation(weight) or weight.ndim != 2:
            return None
        if bias is not None and self.is_activation(bias):
            return None
        owner = self.owner_of(x)
        destinations = self.destinations_of(weight)
        if self.is_parameter_side(weight) and not destinations:
            return None  # a derived weight: factors cannot be pulled back to its parameters
        trains_bias = bias is not None and self.is_parameter_side(bias)
        if bias is not None and trains_bias and id(bias) not in self._parameters:  # a derived bias: added after
            product = self._streamed_product(x, weight, None, transposed=transposed)
            if product is None:
                return None
            set_mark(product, Activation(self.owner_of(x)))
            added = self.per_rollout_rule(torch.add, (product, bias), {})
            return product + bias if added is None else added
        is_parameter = len(destinations) == 1 and destinations[0].is_parameter
        if is_parameter and owner is None and self.gets_leaf(destinations[0].parameter):
            return self._product_with_leaf(x, weight, bias, transposed=transposed)
        x, low_weight, low_bias = under_autocast(x, weight, bias)
        self.announce(destinations)
        use = WeightUse(self.layout, self.collector, owner, transposed, destinations, bias if trains_bias else None)
        return StreamedProduct.apply(x, weight, low_weight, bias, low_bias, use)

    def stacked_rule(self, func: Callable[..., Any], left: Tensor, right: Tensor) -> Tensor | None:
        """`(E, n, q) × (E, q, p)`: every expert's weight times the rows of all tokens, one product per expert."""
        if left.ndim != 3 or right.ndim != 3 or not self.is_activation(left) or not self.is_parameter_side(right):
            return None
        weights = [stack_entry(right, place) for place in range(len(right))]
        key = (operation_name(func), self.names_of([right]), "stacked")
        answers = [self.leads(key, rows) for rows in left.unbind()]
        if not all(answers) or not all(self.destinations_of(weight) for weight in weights):
            return None
        products = []
        for rows, weight in zip(left.unbind(), weights, strict=True):
            set_mark(rows, ACTIVATION)
            products.append(self._streamed_product(rows, weight, None, transposed=True))
        return torch.stack(products)

    def announce(self, destinations: Iterable[Destination]) -> None:
        """Announce one use of every tensor behind a weight, unless this is the backward pass."""
        if self.announcing:
            for each in destinations:
                each.region = self.collector.expect(each.parameter, each.view)

    def _product_with_leaf(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """The product with one copy of a small weight per rollout: autograd returns the rows, in less host time."""
        leaf = self.leaves.of(weight, transposed=not transposed)  # (N, in, out)
        is_block = x.ndim == 3 and x.shape[0] == self.layout.rollouts
        out = torch.bmm(x if is_block else x.reshape(self.layout.rollouts, -1, x.shape[-1]), leaf)
        if bias is not None:
            out = out + (self.leaves.of(bias).unsqueeze(1) if self.is_parameter_side(bias) else bias)
        return out if is_block else out.view(*x.shape[:-1], out.shape[-1])

    def embedding_rule(
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        """Rows of an embedding; the padding row, if there is one, receives no gradient.

        Positions `(1, T)` are the same for all rollouts; `run` has expanded them to one row per rollout.
        """
        is_unusual = max_norm is not None or scale_grad_by_freq or sparse  # each of them changes weight or gradient
        if is_unusual or id(weight) not in self._parameters or input.ndim < 1:
            return None
        counted = input if padding_idx is None else torch.where(input == padding_idx % len(weight), -1, input)
        # The unique token ids are known from before the pass; a model may look up something else, such as positions.
        rows = self.vocabulary if is_same_memory(input, self.input_ids) else input.unique()
        destination = Destination(weight, weight)
        if self.announcing:
            destination.region = self.collector.expect_lookup(weight, rows)
        use = WeightUse(self.layout, self.collector, None, False, (destination,), None)
        return StreamedLookup.apply(input, counted, rows, weight, use)

    def per_rollout_rule(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any operation on small parameter-side tensors, with one copy of them per rollout."""
        tensors = list(tensors_in(args, kwargs))
        if not all(self.leaves.accepts(tensor) for tensor in tensors if self.is_parameter_side(tensor)):
            return None
        if any(self.owner_of(tensor) is not None for tensor in tensors if self.is_activation(tensor)):
            return self.selected_rows_rule(func, args) if len(args) == 2 and not kwargs else None
        kinds = TensorKinds(
            self.layout, lambda t: self.leaves.of(t) if self.is_parameter_side(t) else None, self.is_activation
        )
        return run_per_rollout(func, args, kwargs, kinds)

    def selected_rows_rule(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Selected rows and a parameter that is broadcast over them, such as the bias of an expert."""
        x, side = args if isinstance(args[0], Tensor) and self.is_activation(args[0]) else args[::-1]
        owner = self.owner_of(x) if isinstance(x, Tensor) else None
        if owner is None or func not in BROADCASTS or not isinstance(side, Tensor) or side.ndim >= x.ndim:
            return None  # rows that were selected have no rollout axis to run over
        copies = self.leaves.of(side)[owner.to(side.device)]  # (n, *shape)
        copies = copies.view(len(owner), *[1] * (x.ndim - copies.ndim), *side.shape)
        return func(x, copies) if x is args[0] else func(copies, x)

    def repeated_rule(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A parameter that is repeated for every rollout: expanded, or looked up at positions of each rollout."""
        if func not in (Tensor.expand, F.embedding) or not self.observes_products():
            return None
        key = (operation_name(func), self.names_of(tensors_in(args, kwargs)), "repeated")
        if func is F.embedding:
            is_repeated = not self.is_parameter_side(args[0]) and self.leads(key, args[0])
            return self.embedding_rule(*args, **kwargs) if is_repeated else None
        source, result = args[0], func(*args, **kwargs)
        if not self.leads(key, result) or len(result) != self.layout.rollouts or not self.leaves.accepts(source):
            return None
        if source.ndim == result.ndim and len(source) != 1:
            return None
        leaf = self.leaves.of(source)
        leaf = leaf.squeeze(1) if source.ndim == result.ndim else leaf
        return leaf.view(len(leaf), *[1] * (result.ndim - leaf.ndim), *leaf.shape[1:]).expand(result.shape)

    # Marks of results

    def destinations_of(self, weight: Tensor) -> tuple[Destination, ...]:
        """The trained tensors that the gradient of a weight goes to; empty for a constant, or if they are not known."""
        if not self.is_parameter_side(weight):
            return ()
        source = self.source_of(weight)
        if source is not None:
            return (Destination(*source),)
        found: list[Destination] = []
        for term in known_terms(weight):
            left, right = self.source_of(term.left), self.source_of(term.right)
            if (term.left.requires_grad and left is None) or (term.right.requires_grad and right is None):
                return ()
            if left is not None:
                found.append(Destination(*left, to_b=term.scale * term.right.detach().mT))
            if right is not None:
                found.append(Destination(*right, to_a=term.scale * term.left.detach()))
        return tuple(found)

    def source_of(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Parameter and region behind a weight: the parameter itself, a view of it, or a cast of one of these."""
        weight = uncast(weight)
        if id(weight) in self._parameters:
            return weight, weight
        base = weight._base
        if base is None or id(base) not in self._parameters or not is_plain_view(weight):
            return None
        return base, weight

    def mark_activations(
        self, result: Any, func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
    ) -> None:
        """Mark the results of an operation on activations; owners stay with the first axis."""
        if args and result is args[0]:
            return  # an in-place operation: its first argument has its mark already
        owners = [owner for tensor in tensors if (owner := self.owner_of(tensor)) is not None]
        if func in SPLITS and owners and sum(map(len, result)) == len(owners[0]):
            for part, owner in zip(result, owners[0].split([len(part) for part in result]), strict=True):
                set_mark(part, Activation(owner))
            return
        if func in CONCATENATIONS and len(owners) == len(tensors) and len(result) == sum(map(len, owners)):
            set_mark(result, Activation(torch.cat(owners)))
            return
        selected = self.selected_owner(func, args) if func in ROW_SELECTIONS else None
        for tensor in tensors_in((result,), {}):
            if selected is not None:
                set_mark(tensor, Activation(selected))
            elif owners:
                owner = next((o for o in owners if tensor.ndim and len(o) == tensor.shape[0]), None)
                set_mark(tensor, Activation(owner))
            else:
                set_mark(tensor, ACTIVATION)

    def selected_owner(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
        """Owners of rows that an index along the first axis selected from activations, as a mixture of experts does."""
        source, index = args[0], args[-1]
        if isinstance(index, tuple):
            index = index[0] if index else None
        if not isinstance(index, Tensor) or index.ndim != 1 or (func is not Tensor.__getitem__ and args[1] != 0):
            return None
        owner = self.owner_of(source)
        key = (operation_name(func), tuple(source.shape[1:]), source.ndim)
        if owner is None and self.observes_products() and self.leads(key, source):
            owner = self.layout.owners(source)
        return None if owner is None else owner.to(index.device)[index]

    def mark_derived(
        self,
        result: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[Tensor],
    ) -> None:
        """Mark the results of an operation on parameters alone as parameter-side."""
        if func in CASTS and result is args[0]:
            return  # nothing was cast: the mark stays, and a tensor is never marked as the cast of itself
        terms = low_rank_terms(func, args, kwargs, self.is_parameter_side)
        is_hooked = any(map(has_hooks, parameters))
        for tensor in tensors_in((result,), {}):
            # A view of a parameter that was taken under `no_grad` requires gradients, but is a leaf: it passes none on.
            # A probe pass also looks into checkpointed layers, where nothing requires gradients yet.
            has_gradient = not tensor.is_leaf or (self.observations is not None and not torch.is_grad_enabled())
            if has_gradient and id(tensor) not in self._parameters:
                # a cast of a cast leads back to the parameter, so that a product with it can still be streamed
                is_cast = func in CASTS and tensor.shape == parameters[0].shape
                origin = uncast(parameters[0]) if is_cast else None
                set_mark(tensor, Derived(origin, self.names_of(parameters), terms, tensor._version, is_hooked))
