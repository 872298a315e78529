"""What one backward pass leaves behind: per-parameter Grams and weighted gradients, gathered as they arrive.

A weight may be used several times (tied embeddings, shared layers). Its per-rollout gradient is the sum over its
uses, so the Gram can be taken only when the last use has arrived: uses are counted in the forward pass and pending
factors are flushed when their number is complete, or at the end if a use never received a gradient.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from scoregram.gram.outer import Contractor, Lookup, Use, row_gram
from scoregram.gram.sketch import Sketcher

Slot = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A region of a parameter: its id, and offset, shape and strides of the view that was used."""


def slot_of(parameter: Tensor, view: Tensor) -> Slot:
    """The region of `parameter` that `view` shows; the whole parameter if `view` is the parameter itself."""
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    return id(parameter), offset, tuple(view.shape), tuple(view.stride())


STACKED_ELEMENTS = 1 << 12
"""Largest parameter whose rows are stacked with those of others on a CPU; a GPU is spared launches at any size."""


@dataclass
class Collector:
    """Grams and weighted gradients of one measurement, by parameter."""

    rollouts: int
    groups: int
    weights: Tensor | None
    """`(M, N)` weight vectors of the training gradients, or None."""
    sketcher: Sketcher | None = None
    """Shown the uses or the rows of every parameter before they are dropped, if sketches are wanted."""
    uses: dict[Slot, int] = field(default_factory=lambda: defaultdict(int))
    pending: dict[Slot, list[Use]] = field(default_factory=lambda: defaultdict(list))
    looked_up: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Rows looked up in an embedding, by parameter."""
    regions: dict[Slot, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    contracted: set[Slot] = field(default_factory=set)
    torn: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contractor = Contractor(self.rollouts, self.groups, self.weights)

    def weigh(self, weights: Tensor) -> None:
        """Take `(M, N)` weight vectors that were not known before; nothing may have arrived yet."""
        assert not self.contractor.owners() and not self.pending and not self.rows
        self.weights = weights
        self.contractor = Contractor(self.rollouts, self.groups, weights)

    def expect(self, parameter: Tensor, view: Tensor) -> Slot:
        """Announce one more use of a region of `parameter`; called once per use, in the forward pass."""
        slot = slot_of(parameter, view)
        self.uses[slot] += 1
        self.regions[slot] = (parameter, view)
        return slot

    def expect_lookup(self, parameter: Tensor, rows: Tensor) -> Slot:
        """Announce one more use of `parameter` as an embedding, of these rows."""
        self.looked_up[id(parameter)].append(rows)
        return self.expect(parameter, parameter)

    def announced(self, parameter: Tensor) -> int:
        """Uses of a parameter announced so far."""
        return sum(count for slot, count in self.uses.items() if slot[0] == id(parameter))

    def use_arrived(self, slot: Slot, use: Use) -> None:
        """Take one use; contract as soon as the last use of the region has arrived."""
        self.pending[slot].append(use)
        if len(self.pending[slot]) == self.uses[slot]:
            self.flush(slot)

    def late_use_arrived(self, parameter: Tensor, view: Tensor, use: Use) -> None:
        """Take a use that was not announced; it waits for the end, since nobody knows how many are to come.

        If the announced uses of the region were contracted already, its cross terms with them are lost, and the
        parameter is torn: it has to be replayed.
        """
        slot = slot_of(parameter, view)
        if slot in self.contracted:
            self.torn[id(parameter)] = parameter
        self.regions[slot] = (parameter, view)
        self.uses[slot] = -1
        self.pending[slot].append(use)

    def rows_arrived(self, parameter: Tensor, rows: Tensor) -> None:
        """Add per-rollout gradients `(N, *shape)` of a small parameter."""
        known = self.rows.get(id(parameter))
        self.rows[id(parameter)] = (parameter, rows if known is None else known[1] + rows)

    def flush(self, slot: Slot) -> None:
        """Contract the pending uses of a region, and drop them."""
        self.contracted.add(slot)
        self.contract(*self.regions[slot], self.pending.pop(slot))

    def contract(self, parameter: Tensor, view: Tensor, uses: list[Use]) -> None:
        """Add the Gram and the weighted sums of the summed uses of a region."""
        if self.sketcher is not None:
            self.sketcher.add_uses(parameter, view, uses)
        rows, uses = compressed(uses)
        height = view.shape[0] if rows is None else len(rows)
        sums = self.contractor.stream(uses, height, owner=id(parameter), out_dtype=parameter.dtype)
        if sums is not None:
            self.add_sums(parameter, view, sums, rows)

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
        by_kind: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, rows in self.rows.values():
            if not rows.is_cuda and parameter.numel() > STACKED_ELEMENTS:
                self.contract_rows([(parameter, rows)])
            else:
                by_kind[parameter.shape, rows.dtype, parameter.dtype].append((parameter, rows))
        for alike in by_kind.values():
            self.contract_rows(alike)
        self.rows.clear()

    def contract_rows(self, alike: list[tuple[Tensor, Tensor]]) -> None:
        """Contract the rows `(N, *shape)` of parameters of one shape together."""
        shape = alike[0][0].shape
        parts = [rows for _, rows in alike]
        stacked = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
        stacked = stacked.reshape(len(parts), self.rollouts, -1)  # (n, N, D)
        self.contractor.keep([id(parameter) for parameter, _ in alike], row_gram(stacked, self.groups))
        if self.sketcher is not None:
            for (parameter, _), rows in zip(alike, stacked.unbind(), strict=True):
                self.sketcher.add_rows(parameter, rows)
        if self.weights is not None:
            wide = torch.promote_types(stacked.dtype, torch.float32)
            sums = (self.weights.to(wide) @ stacked.to(wide)).to(alike[0][0].dtype)  # (n, M, D)
            for (parameter, _), part in zip(alike, sums.view(*sums.shape[:2], *shape).unbind(), strict=True):
                self.add_sums(parameter, parameter, part)

    def give_up(self, parameter: Tensor) -> None:
        """Forget what is known of a parameter, pending uses included; it is to be replayed."""
        for slot in [slot for slot in self.pending if slot[0] == id(parameter)]:
            del self.pending[slot]
        self.contractor.forget(id(parameter))
        for known in (self.sums, self.rows):
            known.pop(id(parameter), None)
        if self.sketcher is not None:
            self.sketcher.forget(parameter)

    def overlapping(self) -> list[Tensor]:
        """Parameters whose uses were not added up: regions that overlap, a matrix used as a vector too, a late use."""
        by_parameter: dict[int, list[Slot]] = defaultdict(list)
        for slot in self.regions:
            by_parameter[slot[0]].append(slot)
        found = list(self.torn.values())
        for parameter_id, slots in by_parameter.items():
            parameter = self.regions[slots[0]][0]
            spans = sorted(span(slot) for slot in slots)
            apart = all(end <= start for (_, end), (start, _) in pairwise(spans))
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
