"""Stage 5, contraction: per-rollout gradients `G_i = Σ_t a_it ⊗ b_it` become Grams and weighted sums, chunk by chunk.

Plain backpropagation forms `Σ_i G_i` with one matrix product; leaving out the sum over `i` costs the same number of
operations. The contractor forms chunks of rows of `G`, contracts them into `K_ij = ⟨G_i, G_j⟩` and into the weighted
sums `Σ_i w_i G_i` that a training step needs, and drops them, so no `N × p × q` block is ever held.

In half precision on a GPU the kernels of `slab` do the contraction, for several weights at once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.gram.slab import (
    SEGMENT_ALIGNMENT,
    SLAB_ELEMENTS,
    HalfContractor,
    Segment,
    Slab,
    is_half_on_gpu,
    slab_columns,
)
from scoregram.machine import plain_products

CHUNK_ELEMENTS = 1 << 20
"""Elements of `G` held at a time on a CPU: a few megabytes, so that a chunk stays in cache."""
DOT_LENGTH = 1 << 11
"""Longest dot product taken in float32 before partial sums are added in float64."""

# Uses of a weight


@runtime_checkable
class Use(Protocol):
    """One use of a weight of shape `(p, q)`: gives any rows of the per-rollout gradients `G_i`."""

    @property
    def rows(self) -> Tensor | None:
        """The rows of the weight that this use covers, or None for all of them in order."""
        ...

    @property
    def columns(self) -> Tensor:
        """A tensor `(N, T, q)` with the number of rollouts, the width, dtype and device of this use."""
        ...

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:
        """Rows `start … stop-1` of every `G_i`, `(N, stop - start, q)`, added to `chunk` unless that is None.

        The chunk may be overwritten. Its dtype stays: that of the first use.
        """
        ...


@dataclass(frozen=True)
class Factors:
    """One use of a weight of shape `(p, q)` in a matrix product: `G_i = Σ_t a_it ⊗ b_it`."""

    a: Tensor  # (N, T, p)
    b: Tensor  # (N, T, q)
    rows: Tensor | None = None

    @property
    def columns(self) -> Tensor:  # noqa: D102
        return self.b

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:  # noqa: D102
        left = self.a[:, :, start:stop].mT
        return torch.bmm(left, self.b) if chunk is None else torch.baddbmm(chunk, left, self.b)


@dataclass(frozen=True)
class Lookup:
    """One use of a weight of shape `(p, q)` as an embedding: row `ids_it` of `G_i` receives `g_it`."""

    ids: Tensor
    """`(N, T)`, a row of the weight for each token; negative for tokens that receive no gradient."""
    g: Tensor  # (N, T, q)
    rows: Tensor
    """Sorted rows of the weight that include all ids."""

    @property
    def columns(self) -> Tensor:  # noqa: D102
        return self.g

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:  # noqa: D102
        rollouts, _, width = self.g.shape
        if chunk is None:
            chunk = self.g.new_zeros(rollouts, stop - start, width)
        inside = (self.ids >= start) & (self.ids < stop)
        place = (self.ids - start).clamp(0, stop - start - 1)  # ids outside add zero to the first or the last row
        owner = torch.arange(rollouts, device=place.device).unsqueeze(1).expand_as(place)
        values = torch.where(inside.unsqueeze(2), self.g, 0.0).to(chunk.dtype)
        return chunk.index_put_((owner, place), values, accumulate=True)

    def among_rows(self) -> "Lookup":
        """This use, renumbered for the smaller weight that consists of `rows` alone."""
        place = torch.searchsorted(self.rows, self.ids.clamp(min=0))
        return replace(self, ids=torch.where(self.ids >= 0, place, -1))


# Contraction


class Contractor:
    """Contracts per-rollout gradients into Grams, which it keeps, and weighted sums, which it returns.

    Every Gram has an owner, any integer that identifies a parameter to the caller. Grams stay on the device.
    """

    def __init__(self, rollouts: int, groups: int, weights: Tensor | None) -> None:
        """Take the number of rollouts and of groups, and the `(M, N)` weight vectors or None."""
        self.rollouts = rollouts
        self.groups = groups
        self.weights = weights
        self._owners: list[int | None] = []
        self._grams: list[Tensor] = []  # each (n, P, N/P, N/P) float64; together one Gram for each owner
        self._halves: dict[torch.dtype, HalfContractor] = {}
        self._slabs: dict[tuple[torch.dtype, torch.dtype], Slab] = {}
        self._index: Tensor | None = None
        """The place of every Gram: a CUDA graph reads it by its address, so it must outlive the graph."""

    def stream(
        self,
        uses: Sequence[Use],
        rows: int,
        *,
        owner: int,
        out_dtype: torch.dtype,
        receive: Callable[[Tensor], None],
        root: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """Contract the per-rollout gradients of one weight, chunk by chunk over its rows; keeps its Gram.

        All uses of the weight (`p` rows) are added *before* the Gram is taken, so it includes their cross terms.
        `receive` gets the weighted sums `(M, p, q)`, if there are weight vectors: now, or when `flush` is called.
        With a preconditioner, `root(start, stop)` is `√D` of those rows, and the Gram is that of `√D G`; there are no
        weight vectors then.
        """
        assert root is None or self.weights is None, "the sums are of plain gradients"
        first, sample = uses[0], uses[0].columns
        q = sample.shape[2]
        if root is None and len(uses) == 1 and isinstance(first, Factors) and self.suits_slab(rows, sample):
            slab = self.slab(sample, out_dtype)
            space = slab.reserve(rows, q, owner, receive)
            torch.bmm(first.a.mT, first.b, out=space)
            return
        sums = None
        if self.weights is not None:
            sums = torch.empty(len(self.weights), rows, q, dtype=out_dtype, device=sample.device)
        step = rows_at_a_time(self.rollouts * q, sample.device)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = first.add_to(None, start, stop)  # (N, stop - start, q)
            for use in uses[1:]:
                chunk = use.add_to(chunk, start, stop)
            if root is not None:
                chunk = scaled_(chunk, root(start, stop))
            self.contract(chunk.flatten(1), None if sums is None else sums[:, start:stop].flatten(1), owner=owner)
        if sums is not None:
            receive(sums)

    def contract(self, rows: Tensor, out: Tensor | None, *, owner: int) -> None:
        """Keep the Gram of rows `(N, D)`, and write their weighted sums into `out` `(M, D)`."""
        if is_half_on_gpu(rows) and rows.stride(1) == 1:
            self.half(rows).contract(rows, out, (Segment(0, rows.shape[1]),), [owner])
            return
        if out is not None and self.weights is not None:
            out.copy_(weighted_sums(self.weights, rows))
        self.keep([owner], row_gram(rows, self.groups).unsqueeze(0))

    # In half precision on a GPU

    def suits_slab(self, rows: int, sample: Tensor) -> bool:
        """Whether a weight of `rows` rows can wait in a slab: the kernels take it, it fits, and it is aligned."""
        width = rows * sample.shape[2]
        return is_half_on_gpu(sample) and width <= slab_columns(self.rollouts) and width % SEGMENT_ALIGNMENT == 0

    def half(self, sample: Tensor) -> HalfContractor:
        """The contractor for rows of the dtype and device of `sample`."""
        if sample.dtype not in self._halves:
            given = (self.rollouts, self.groups, self.weights, sample.dtype, sample.device)
            self._halves[sample.dtype] = HalfContractor(*given)
        return self._halves[sample.dtype]

    def slab(self, sample: Tensor, out_dtype: torch.dtype) -> Slab:
        """The slab for gradients of the dtype and device of `sample`, with weighted sums in `out_dtype`."""
        key = sample.dtype, out_dtype
        if key not in self._slabs:
            memory = sample.new_empty(self.rollouts, slab_columns(self.rollouts))
            self._slabs[key] = Slab(self.half(sample), memory, out_dtype)
        return self._slabs[key]

    def flush(self) -> None:
        """Contract the weights that wait in slabs."""
        for slab in self._slabs.values():
            slab.flush()

    # Grams

    def keep(self, owners: Sequence[int | None], grams: Tensor) -> None:
        """Keep Grams `(n, P, N/P, N/P)` of `n` owners."""
        self._owners += owners
        self._grams.append(grams)

    def forget(self, owner: int) -> None:
        """Drop every Gram of an owner."""
        self.flush()
        for owners in (self._owners, *(half.owners for half in self._halves.values())):
            owners[:] = [None if other == owner else other for other in owners]

    def owners(self) -> set[int]:
        """Every owner of a Gram."""
        self.flush()
        kept = {*self._owners, *(owner for half in self._halves.values() for owner in half.owners)}
        return {owner for owner in kept if owner is not None}

    def grams(self, place: Mapping[int, int], count: int) -> Tensor:
        """`(count, P, N/P, N/P)` float64: for each place, the sum of the Grams of all owners mapped to it."""
        self.flush()
        for half in self._halves.values():
            self.keep(*half.take())
        self._slabs.clear()  # frees their memory
        size = self.rollouts // self.groups
        if not self._grams:
            return torch.zeros(count, self.groups, size, size, dtype=torch.float64)
        grams = torch.cat(self._grams)
        index = [count if owner is None else place[owner] for owner in self._owners]  # forgotten ones to one extra row
        self._index = device_index(tuple(index), grams.device)
        totals = grams.new_zeros(count + 1, *grams.shape[1:])
        return totals.index_add_(0, self._index, grams)[:count]


@lru_cache(maxsize=64)
def device_index(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Integers on a device; copied once, because a CUDA graph cannot capture a copy from the host."""
    return torch.tensor(values, device=device)


def rows_at_a_time(elements: int, device: torch.device) -> int:
    """Number of rows in a chunk, for rows of `elements` elements each."""
    if device.type == "cuda":  # a multiple of 128: products of aligned operands are faster
        return max(128, SLAB_ELEMENTS // elements // 128 * 128)
    return max(1, CHUNK_ELEMENTS // elements)


def weighted_sums(weights: Tensor, rows: Tensor) -> Tensor:
    """`(…, M, D)` sums of rows `(…, N, D)` with weights `(M, N)`, in float32 or wider, whatever autocast says."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        return weights.to(wide) @ rows.to(wide)


def scaled_(rows: Tensor, root: Tensor) -> Tensor:
    """Rows `(…, D)` times `root`, which broadcasts, in float32 or wider: half precision holds too few powers of ten.

    The rows may be overwritten. In float32 the kernels for half precision do not apply.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide).mul_(root.to(wide))


def row_gram(rows: Tensor, groups: int = 1) -> Tensor:
    """Gram of rows `(…, N, D)` within each of `P` consecutive groups, `(…, P, N/P, N/P)` float64.

    No float32 dot product is longer than `DOT_LENGTH`: over millions of terms it would lose three digits. Blocks of
    that length, added in float64, keep the precision of the rows.
    """
    if groups > 1 and rows.ndim == 2 and not rows.is_cuda:  # a batched product would copy the blocks first
        return torch.cat([row_gram(group) for group in rows.unflatten(0, (groups, -1))])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32)).unflatten(-2, (groups, -1))  # (…, P, R, D)
    whole = rows.shape[-1] - rows.shape[-1] % DOT_LENGTH
    rest = rows[..., whole:]
    gram = row_products(rest).double()
    if whole:
        blocks = rows[..., :whole].unflatten(-1, (-1, DOT_LENGTH)).movedim(-2, 0)  # (blocks, …, P, R, DOT_LENGTH)
        gram = gram + row_products(blocks).sum(0, dtype=torch.float64)
    return gram


def row_products(rows: Tensor) -> Tensor:
    """`rows @ rowsᵀ`, `(…, R, D)` to `(…, R, R)`, in the dtype of the rows, whatever autocast says."""
    with torch.autocast(rows.device.type, enabled=False), nullcontext() if rows.is_cuda else plain_products():
        return rows @ rows.mT
