"""Stage 4, collection: products and lookups give their factors to the collector, and the weight gets no gradient.

The `Collector` has one `ParameterState` per parameter. A weight may be used several times (tied embeddings, shared
layers). Its per-rollout gradient is the sum over its uses, so its Gram can be taken only when the last use has arrived.
The forward pass announces every use, and the backward pass delivers it. When all uses of a region (the part of the
parameter that one view covers) have arrived, the collector contracts them and drops them. If one of them never receives
a gradient, the region is contracted after the backward pass.

`StreamedProduct`, `hooked_product` and `StreamedLookup` are the autograd operations that deliver uses: they pass the
gradient on to their input, and give the factors `(x, g)` of the weight's per-rollout gradients to the collector.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.gram.batch import RolloutLayout
from scoregram.gram.contract import Contractor, Factors, Lookup, Use, row_gram, scaled_, weighted_sums
from scoregram.gram.kept import KeptRows
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.sketch import Sketcher

STACKED_ELEMENTS = 1 << 12
"""Largest parameter whose rows are stacked with those of others on a CPU; on a GPU all are, to save launches."""

# Per-parameter state


@dataclass
class RegionUses:
    """The uses of one region of a parameter: the whole parameter, or the part that one view covers."""

    parameter: Tensor
    view: Tensor
    expected: int | None = 0
    """Number of uses that the forward pass announced; None if a use arrived that it did not announce."""
    pending: list[Use] = field(default_factory=list)
    """Uses that have arrived and wait for the others."""
    arrival: int = 0
    """Number of the arrival (`Collector.next_arrival`) of the first pending use."""
    is_contracted: bool = False

    def storage_span(self) -> tuple[int, int]:
        """First and one past the last storage element; a strided region includes the elements in between."""
        offset = region_key(self.parameter, self.view)[0]
        return offset, offset + 1 + sum((n - 1) * step for n, step in self.steps())

    def steps(self) -> list[tuple[int, int]]:
        """Size and stride of every axis of the view that has more than one entry."""
        return [(n, step) for n, step in zip(self.view.shape, self.view.stride(), strict=True) if n > 1]


def may_overlap(regions: Sequence[RegionUses]) -> bool:
    """Whether some of these regions may share an element of their parameter.

    The columns of one expert in a LoRA matrix lie between those of the others: every stride is a multiple of the number
    of experts. Two regions whose offsets differ modulo a common divisor of all strides share nothing; of the others the
    spans are compared.
    """
    divisor = math.gcd(*(step for region in regions for _, step in region.steps())) or 1
    spans = [region.storage_span() for region in regions]
    ordered = sorted((start % divisor, start, end) for start, end in spans)
    return any(left[0] == right[0] and left[2] > right[1] for left, right in pairwise(ordered))


RegionKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view in its parameter."""


def region_key(parameter: Tensor, view: Tensor) -> RegionKey:
    """The region of `parameter` that `view` shows."""
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    return offset, tuple(view.shape), tuple(view.stride())


@dataclass
class ParameterState:
    """Everything that one pass collects about a parameter."""

    parameter: Tensor
    """Referenced, so that no other tensor can get its id."""
    regions: dict[RegionKey, RegionUses] = field(default_factory=dict)
    lookups: list[Tensor] = field(default_factory=list)
    """Rows looked up in it as an embedding, one tensor per announced lookup."""
    whole: RegionUses | None = None
    """The region of the whole parameter, which is also in `regions`; kept apart because most uses are of it."""
    rows: Tensor | None = None
    """`(N, *shape)` per-rollout gradients of a small parameter, summed over the uses that have arrived."""
    rows_arrival: int = 0
    """Number of the arrival of the first rows."""
    sums: Tensor | None = None
    """`(M, *shape)` weighted sums of the per-rollout gradients."""
    late_arrival: int | None = None
    """Number of the first use that arrived after its region had been contracted; its cross terms are lost."""

    def region(self, view: Tensor) -> RegionUses:
        """The uses of the region that `view` shows."""
        if view is self.parameter and self.whole is not None:
            return self.whole
        key = region_key(self.parameter, view)
        region = self.regions.setdefault(key, RegionUses(self.parameter, view))
        if view is self.parameter:
            self.whole = region
        return region

    @property
    def announced(self) -> int:
        """Uses announced so far, over all regions."""
        return sum(region.expected or 0 for region in self.regions.values())

    @property
    def is_incomplete(self) -> bool:
        """Whether uses were contracted separately although their gradients had to be added first.

        This happens if regions overlap, if the parameter has both factors and rows, or if an unannounced use came too
        late.
        """
        if not self.regions:
            return False
        if self.rows is not None or self.late_arrival is not None:
            return True
        return may_overlap([*self.regions.values()])

    def add_sums(self, view: Tensor, sums: Tensor, rows: Tensor | None = None) -> None:
        """Add weighted gradients `(M, …)` to the region that `view` shows, or only to `rows` of that region."""
        parameter = self.parameter
        is_whole = view.shape == parameter.shape and view.stride() == parameter.stride()
        if self.sums is None and rows is None and is_whole:
            self.sums = sums
            return
        if self.sums is None:
            self.sums = torch.zeros(len(sums), *parameter.shape, dtype=sums.dtype, device=sums.device)
        offset = view.storage_offset() - parameter.storage_offset()
        for whole, part in zip(self.sums, sums, strict=True):
            region = whole.as_strided(view.shape, view.stride(), whole.storage_offset() + offset)
            region.add_(part) if rows is None else region.index_add_(0, rows, part)


class Collector:
    """Collects the uses of every parameter in one pass, and contracts them to Grams and weighted sums."""

    def __init__(
        self,
        rollouts: int,
        groups: int,
        weights: Tensor | None,
        sketcher: Sketcher | None = None,
        kept: KeptRows | None = None,
        diagonal: Diagonal | None = None,
    ) -> None:
        """Take the number of rollouts and of groups, and the `(M, N)` weight vectors or None.

        A sketcher gets the uses or the rows of every parameter before they are dropped. `kept` gets them instead of
        being contracted: the pass then has no Gram of its own. With the diagonal `D` of a preconditioner, Grams are
        `⟨ψ_i, D ψ_j⟩`; there are no weights and no sketcher then.
        """
        self.rollouts = rollouts
        self.groups = groups
        self.sketcher = sketcher
        self.kept = kept
        self.diagonal = diagonal
        self.states: dict[int, ParameterState] = {}
        self._arrivals = 0
        self.set_weights(weights)

    def set_weights(self, weights: Tensor | None) -> None:
        """Take `(M, N)` weight vectors; nothing may have arrived yet."""
        assert not self._arrivals
        self.weights = weights
        self.contractor = Contractor(self.rollouts, self.groups, weights)

    def state(self, parameter: Tensor) -> ParameterState:
        """The state of a parameter."""
        if id(parameter) not in self.states:
            self.states[id(parameter)] = ParameterState(parameter)
        return self.states[id(parameter)]

    def next_arrival(self) -> int:
        """The number of the next arrival; Grams of a layer are added in this order, because it decides the rounding."""
        self._arrivals += 1
        return self._arrivals

    # forward pass

    def expect(self, parameter: Tensor, view: Tensor) -> RegionUses:
        """Announce one more use of a region of `parameter`; called once per use, in the forward pass."""
        region = self.state(parameter).region(view)
        if region.expected is not None:
            region.expected += 1
        return region

    def expect_lookup(self, parameter: Tensor, rows: Tensor) -> RegionUses:
        """Announce one more use of `parameter` as an embedding, of these rows."""
        self.state(parameter).lookups.append(rows)
        return self.expect(parameter, parameter)

    def is_embedding(self, parameter: Tensor) -> bool:
        """Whether a lookup in `parameter` was announced."""
        return id(parameter) in self.states and bool(self.states[id(parameter)].lookups)

    # backward pass

    def use_arrived(self, region: RegionUses, use: Use) -> None:
        """Take one use, and contract the region if this was the last."""
        if not region.pending:
            region.arrival = self.next_arrival()
        region.pending.append(use)
        if len(region.pending) == region.expected:
            self.contract_pending(region)

    def late_use_arrived(self, parameter: Tensor, view: Tensor, use: Use) -> None:
        """Take a use that was not announced: it first ran when a nested backward pass recomputed its layer.

        It is contracted at the end of the backward pass, because the number of such uses is unknown until then. If the
        announced uses of the region are contracted already, the cross terms are lost and the parameter is replayed.
        """
        state = self.state(parameter)
        region = state.region(view)
        if region.is_contracted and state.late_arrival is None:
            state.late_arrival = self.next_arrival()
        region.expected = None
        self.use_arrived(region, use)

    def rows_arrived(self, parameter: Tensor, rows: Tensor) -> None:
        """Add per-rollout gradients `(N, *shape)` of a small parameter."""
        state = self.state(parameter)
        if state.rows is None:
            state.rows_arrival = self.next_arrival()
        state.rows = rows if state.rows is None else state.rows + rows

    def contract_pending(self, region: RegionUses) -> None:
        """Contract the pending uses of a region, and drop them."""
        uses, region.pending, region.is_contracted = region.pending, [], True
        self.contract(region.parameter, region.view, uses)

    def contract(self, parameter: Tensor, view: Tensor, uses: list[Use]) -> None:
        """Add up the uses of a region, and contract the sum to its Gram and weighted sums; gradients are disabled."""
        if self.sketcher is not None:  # before rows are renumbered: a sketch is of the whole parameter
            self.sketcher.add_uses(parameter, view, uses)
        rows, uses = in_touched_rows(uses)
        if self.kept is not None:
            self.kept.add_uses(parameter, view, rows, uses)
            return
        height = view.shape[0] if rows is None else len(rows)
        add_sums = partial(self.state(parameter).add_sums, view, rows=rows)
        root = None if self.diagonal is None else partial(self.diagonal.root, parameter, view, rows)
        self.contractor.stream(
            uses, height, owner=id(parameter), out_dtype=parameter.dtype, receive=add_sums, root=root
        )

    # after the backward pass

    def incomplete(self) -> list[Tensor]:
        """Parameters to replay, because their uses were not added before contraction."""
        incomplete = [state for state in self.states.values() if state.is_incomplete]
        # Lost cross terms first, in the order of arrival; the sort is stable.
        incomplete.sort(key=lambda state: math.inf if state.late_arrival is None else state.late_arrival)
        return [state.parameter for state in incomplete]

    def forget(self, parameter: Tensor) -> None:
        """Drop everything about a parameter, pending uses included, before it is replayed."""
        self.states.pop(id(parameter), None)
        self.contractor.forget(id(parameter))
        for other in (self.sketcher, self.kept):
            if other is not None:
                other.forget(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Contract the rest: regions with uses that came late or got no gradient, and rows of small parameters."""
        regions = [region for state in self.states.values() for region in state.regions.values() if region.pending]
        for region in sorted(regions, key=lambda region: region.arrival):
            self.contract_pending(region)
        # Norms and biases of many layers have one shape: stacked, they take one product instead of one per layer.
        alike: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[ParameterState]] = defaultdict(list)
        for state in sorted(self.states.values(), key=lambda state: state.rows_arrival):
            if state.rows is None:
                continue
            if not state.rows.is_cuda and state.parameter.numel() > STACKED_ELEMENTS:
                self.contract_rows([state])
            else:
                alike[state.parameter.shape, state.rows.dtype, state.parameter.dtype].append(state)
        for states in alike.values():
            self.contract_rows(states)
        self.contractor.flush()

    def contract_rows(self, alike: list[ParameterState]) -> None:
        """Contract the rows `(N, *shape)` of parameters of one shape in one batched product, and drop them."""
        shape = alike[0].parameter.shape
        parts = [state.rows for state in alike if state.rows is not None]
        stacked = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
        stacked = stacked.reshape(len(parts), self.rollouts, -1)  # (n, N, D)
        if self.kept is not None:
            for state, rows in zip(alike, stacked.unbind(), strict=True):
                state.rows = None
                self.kept.add_rows(state.parameter, rows)
            return
        grams_of = stacked
        if self.diagonal is not None:
            roots = torch.stack([self.diagonal.flat_root(state.parameter) for state in alike])  # (n, D)
            grams_of = scaled_(stacked.clone(), roots.unsqueeze(1))
        self.contractor.keep([id(state.parameter) for state in alike], row_gram(grams_of, self.groups))
        for state, rows in zip(alike, stacked.unbind(), strict=True):
            state.rows = None
            if self.sketcher is not None:
                self.sketcher.add_rows(state.parameter, rows)
        if self.weights is not None:
            sums = weighted_sums(self.weights, stacked).to(alike[0].parameter.dtype)  # (n, M, D)
            for state, part in zip(alike, sums.view(*sums.shape[:2], *shape).unbind(), strict=True):
                state.add_sums(state.parameter, part)

    def take_sums(self, parameter: Tensor) -> Tensor | None:
        """The weighted sums `(M, *shape)` of a parameter, which the state then drops; None if it was not used."""
        state = self.states.get(id(parameter))
        if state is None:
            return None
        sums, state.sums = state.sums, None
        return sums


def in_touched_rows(uses: list[Use]) -> tuple[Tensor | None, list[Use]]:
    """The rows of the weight that the uses touch (None for all), and the uses renumbered to those rows, products first.

    An embedding touches only the rows that were looked up. A tied head covers the same rows, because
    `Pass.collect_head` has contracted its other rows.
    """
    if len(uses) == 1 and uses[0].rows is None:
        return None, uses
    lookups = [use for use in uses if isinstance(use, Lookup)]
    products = [use for use in uses if not isinstance(use, Lookup)]
    if any(use.rows is None for use in products):
        return None, [*products, *lookups]
    rows = products[0].rows if products else lookups[0].rows
    assert rows is not None
    if not products and len(lookups) > 1:
        rows = torch.cat([use.rows for use in lookups]).unique()
    return rows, [*products, *(replace(use, rows=rows).among_rows() for use in lookups)]


# Autograd operations that deliver uses


@dataclass
class Destination:
    """A trained tensor behind a weight, and its share of the weight's gradient `Σ_t a_t ⊗ b_t`.

    The weight itself, or a region of a parameter, takes `(a, b)`. If the weight contains a term `s L R`, then `L` takes
    `(a, s R b)` and `R` takes `(s Lᵀ a, b)` (`marks`).
    """

    parameter: Tensor
    view: Tensor
    """The region of the parameter."""
    to_a: Tensor | None = None
    """`(p, r)` matrix `s L` that the rows `a` are multiplied by, or None."""
    to_b: Tensor | None = None
    """`(q, r)` matrix `s Rᵀ` that the rows `b` are multiplied by, or None."""
    region: RegionUses | None = None
    """Where the use was announced; None if the operation first ran when its layer was recomputed."""

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is the whole parameter itself."""
        return self.view is self.parameter and self.to_a is None and self.to_b is None

    def factors(self, a: Tensor, b: Tensor) -> Factors:
        """This tensor's factors, from those of the weight: `(N, T, p)` and `(N, T, q)`."""
        a = a if self.to_a is None else a @ self.to_a.to(a.dtype)
        b = b if self.to_b is None else b @ self.to_b.to(b.dtype)
        return Factors(a, b)

    def take(self, use: Use, collector: Collector) -> None:
        """Give a use of this tensor to the collector."""
        if self.region is not None:
            collector.use_arrived(self.region, use)
        else:
            collector.late_use_arrived(self.parameter, self.view, use)


@dataclass(frozen=True)
class WeightUse:
    """What one intercepted operation remembers for its backward pass."""

    layout: RolloutLayout
    collector: Collector
    owner: Tensor | None
    """Rollout of every entry of the first axis, if that is no longer the batch axis."""
    transposed: bool
    """Whether the weight is stored as (in, out)."""
    destinations: tuple[Destination, ...]
    """The trained tensors behind the weight; empty if it is not trained."""
    bias: Tensor | None
    """The bias, None if it is not trained."""

    def blocks(self, value: Tensor) -> Tensor:
        """Rows of a tensor, one block per rollout."""
        return self.layout.blocks(value, self.owner)

    def collect(self, x: Tensor, g: Tensor) -> None:
        """Give the factors and the bias rows of a product to the collector."""
        if not self.destinations and self.bias is None:
            return
        rows_g = self.blocks(g)
        if self.destinations:
            rows_x = self.blocks(x)
            a, b = (rows_x, rows_g) if self.transposed else (rows_g, rows_x)
            for destination in self.destinations:
                destination.take(destination.factors(a, b), self.collector)
        if self.bias is not None:
            wide = torch.promote_types(rows_g.dtype, torch.float32)
            self.collector.rows_arrived(self.bias, rows_g.sum(1, dtype=wide))


class StreamedProduct(torch.autograd.Function):
    """`x Wᵀ + b` (or `x W + b`); its backward pass gives factors to the collector, and no gradient to the weight.

    `weight` and `bias` are arguments so that the result requires gradients even if `x` does not; the product is taken
    with `low_weight` and `low_bias`, which are detached and in the dtype of autocast.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        low_weight: Tensor,
        bias: Tensor | None,
        low_bias: Tensor | None,
        use: WeightUse,
    ) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, low_weight)
        product = F.linear(x, low_weight.mT if use.transposed else low_weight, low_bias)
        # With a bias, `F.linear` returns a view, and autograd forbids in-place changes of a custom function's view.
        return product if product._base is None else torch.ops.aten._unsafe_view(product, product.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (g,) = grad_outputs
        # Unpacking may recompute a checkpointed layer. That must be intercepted, so it is outside the block below.
        x, weight = ctx.saved_tensors
        use: WeightUse = ctx.use
        grad_x = None
        with torch._C.DisableTorchFunction():
            if ctx.needs_input_grad[0]:
                grad_x = g @ (weight.mT if use.transposed else weight)
            use.collect(x, g)
        return grad_x, None, None, None, None, None


def hooked_product(x: Tensor, weight: Tensor, use: WeightUse) -> Tensor:
    """`x Wᵀ` with a hook on the result instead of `StreamedProduct.backward`: the same in less host time.

    The hook holds the input until the gradient arrives. Under checkpointing it would keep the input alive from the
    forward pass on, so there `StreamedProduct` is used, which saves the input through autograd.
    """
    product = F.linear(x, weight)
    held_input = [x.detach()]

    def collect_factors(g: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            use.collect(held_input.pop(), g)

    product.register_hook(collect_factors)
    return product


def has_saved_tensor_hooks() -> bool:
    """Whether hooks decide what is saved for the backward pass, as under checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]


class StreamedLookup(torch.autograd.Function):
    """Rows of an embedding; the backward pass gives ids and gradients to the collector, and none to the weight."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, counted: Tensor, rows: Tensor, weight: Tensor, use: WeightUse) -> Tensor:  # noqa: D102
        ctx.use = use
        ctx.save_for_backward(counted, rows)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:  # noqa: D102
        (g,) = grad_outputs
        counted, rows = ctx.saved_tensors
        use: WeightUse = ctx.use
        rollouts = use.layout.rollouts
        with torch._C.DisableTorchFunction():
            lookup = Lookup(counted.reshape(rollouts, -1), g.reshape(rollouts, -1, g.shape[-1]), rows)
            use.destinations[0].take(lookup, use.collector)
        return None, None, None, None, None


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of a matrix product in the dtype that autocast gives them; weight and bias detached."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight.detach(), None if bias is None else bias.detach()
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
