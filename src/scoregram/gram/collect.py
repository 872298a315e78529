"""What one backward pass leaves behind: per-parameter Grams and weighted gradients, gathered as they arrive.

A weight may be used several times (tied embeddings, shared layers). Its per-rollout gradient is the sum over its
uses, so the Gram can be taken only when the last use has arrived: uses are counted in the forward pass and pending
factors are flushed when their number is complete, or at the end if a use never received a gradient.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scoregram.gram.outer import Lookup, Use, row_gram, stream

Slot = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A region of a parameter: its id, and offset, shape and strides of the view that was used."""


def slot_of(parameter: Tensor, view: Tensor) -> Slot:
    """The region of `parameter` that `view` shows; the whole parameter if `view` is the parameter itself."""
    offset = view.storage_offset() - parameter.storage_offset()
    return id(parameter), offset, tuple(view.shape), tuple(view.stride())


@dataclass
class Collector:
    """Grams and weighted gradients of one measurement, by parameter."""

    rollouts: int
    groups: int
    weights: Tensor | None
    """`(M, N)` weight vectors of the training gradients, or None."""
    sketch: Callable[[Tensor, list[Use] | Tensor], None] | None = None
    """Called with a parameter and its factors or rows, before they are dropped."""
    uses: dict[Slot, int] = field(default_factory=lambda: defaultdict(int))
    pending: dict[Slot, list[Use]] = field(default_factory=lambda: defaultdict(list))
    looked_up: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Ids looked up in an embedding, by parameter."""
    regions: dict[Slot, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grams: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Parameters of which some use could not be split by rollout; they are replayed."""

    def expect(self, parameter: Tensor, view: Tensor) -> Slot:
        """Announce one more use of a region of `parameter`; called once per use, in the forward pass."""
        slot = slot_of(parameter, view)
        self.uses[slot] += 1
        self.regions[slot] = (parameter, view)
        return slot

    def expect_lookup(self, parameter: Tensor, ids: Tensor) -> Slot:
        """Announce one more use of `parameter` as an embedding."""
        self.looked_up[id(parameter)].append(ids)
        return self.expect(parameter, parameter)

    def use_arrived(self, slot: Slot, use: Use) -> None:
        """Take one use; contract as soon as the last use of the region has arrived."""
        self.pending[slot].append(use)
        if len(self.pending[slot]) == self.uses[slot]:
            self.flush(slot)

    def late_use_arrived(self, parameter: Tensor, view: Tensor, use: Use) -> None:
        """Take a use that was not announced; it waits for the end, since nobody knows how many are to come."""
        slot = slot_of(parameter, view)
        self.regions[slot] = (parameter, view)
        self.uses[slot] = -1
        self.pending[slot].append(use)

    def rows_arrived(self, parameter: Tensor, rows: Tensor) -> None:
        """Add per-rollout gradients `(N, *shape)` of a small parameter."""
        rows = rows.reshape(self.rollouts, -1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        _, known = self.rows.get(id(parameter), (parameter, None))
        self.rows[id(parameter)] = (parameter, rows if known is None else known + rows)

    def flush(self, slot: Slot) -> None:
        """Contract the pending uses of a region, and drop them."""
        self.contract(*self.regions[slot], self.pending.pop(slot))

    def contract(self, parameter: Tensor, view: Tensor, uses: list[Use]) -> None:
        """Add the Gram and the weighted sums of the summed uses of a region."""
        if id(parameter) in self.given_up:
            return
        rows, uses = compressed(uses)
        if self.sketch is not None:
            self.sketch(view, uses)
        height = view.shape[0] if rows is None else len(rows)
        streamed = stream(uses, height, self.weights, groups=self.groups, out_dtype=parameter.dtype)
        self.add_gram(parameter, streamed.gram)
        if streamed.sums is not None:
            self.add_sums(parameter, view, streamed.sums, rows)

    def add_gram(self, parameter: Tensor, gram: Tensor) -> None:
        """Add a Gram `(P, R, R)` to the parameter's."""
        known = self.grams.get(id(parameter))
        self.grams[id(parameter)] = gram if known is None else known + gram

    def add_sums(self, parameter: Tensor, view: Tensor, sums: Tensor, rows: Tensor | None = None) -> None:
        """Add weighted gradients `(M, …)` to the region of the parameter that `view` shows, or to `rows` of it."""
        known = self.sums.get(id(parameter))
        is_whole = view.shape == parameter.shape and view.stride() == parameter.stride()
        if known is None and rows is None and is_whole:
            self.sums[id(parameter)] = sums
            return
        if known is None:
            known = torch.zeros(len(sums), *parameter.shape, dtype=sums.dtype, device=sums.device)
            self.sums[id(parameter)] = known
        offset = view.storage_offset() - parameter.storage_offset()
        for whole, part in zip(known, sums, strict=True):
            region = whole.as_strided(view.shape, view.stride(), whole.storage_offset() + offset)
            region.add_(part) if rows is None else region.index_add_(0, rows, part)

    def finish(self) -> None:
        """Contract whatever is left: regions of which some use got no gradient, and the rows of small parameters."""
        for slot in [slot for slot, uses in self.pending.items() if uses]:
            self.flush(slot)
        for parameter, rows in self.rows.values():
            if id(parameter) in self.given_up:
                continue
            self.add_gram(parameter, row_gram(rows, self.groups))
            if self.sketch is not None:
                self.sketch(parameter, rows)
            if self.weights is not None:
                sums = self.weights.to(rows.dtype) @ rows
                self.add_sums(parameter, parameter, sums.to(parameter.dtype).unflatten(1, parameter.shape))
        self.rows.clear()

    def give_up(self, parameter: Tensor) -> None:
        """Forget what is known of a parameter; it will be replayed one rollout at a time."""
        self.given_up.add(id(parameter))
        self.grams.pop(id(parameter), None)
        self.sums.pop(id(parameter), None)
        self.rows.pop(id(parameter), None)

    def overlapping(self) -> list[Tensor]:
        """Parameters of which two different regions overlap, or that were used both as a matrix and as a vector."""
        by_parameter: dict[int, list[Slot]] = defaultdict(list)
        for slot in self.regions:
            by_parameter[slot[0]].append(slot)
        found = []
        for parameter_id, slots in by_parameter.items():
            parameter = self.regions[slots[0]][0]
            spans = sorted(span(slot) for slot in slots)
            apart = all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
            if parameter_id in self.rows or not apart:
                found.append(parameter)
        return found


def span(slot: Slot) -> tuple[int, int]:
    """First and one past the last storage element of a region; a strided region covers what lies between."""
    _, offset, shape, stride = slot
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def compressed(uses: list[Use]) -> tuple[Tensor | None, list[Use]]:
    """The rows of the weight that the uses touch (None for all), and the uses in terms of those rows, factors first.

    An embedding touches only the rows that were looked up; a tied head that has dealt with all other rows already
    speaks of the same rows.
    """
    lookups = [use for use in uses if isinstance(use, Lookup)]
    products = [use for use in uses if not isinstance(use, Lookup)]
    if any(use.rows is None for use in products):
        return None, [*products, *lookups]
    rows = products[0].rows if products else torch.cat([use.rows for use in lookups]).unique()
    assert rows is not None
    return rows, [*products, *(use.among(rows) for use in lookups)]
