"""The Gram of per-rollout weight gradients `G_i = Σ_t a_it ⊗ b_it`, streamed so that no `N × p × q` block is kept.

Plain backpropagation forms `Σ_i G_i` with one matrix product; leaving out the sum over `i` costs the same number of
operations. Row chunks of `G` are made, contracted into `K_ij = ⟨G_i, G_j⟩` and into the weighted sums
`Σ_i w_i G_i` that a training step needs, and dropped.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.gram import kernels
from scoregram.machine import plain_products

CHUNK_ELEMENTS = 1 << 20
"""Elements of `G` alive at a time on a CPU: a few megabytes, so that a chunk stays in cache."""
CHUNK_ELEMENTS_CUDA = 1 << 28
"""The same on a GPU without our kernels: large, because the stock skinny products are bound by launches."""
DOT_LENGTH = 1 << 11
"""Longest dot product taken in float32 before partial sums are added in float64."""


@runtime_checkable
class Use(Protocol):
    """One use of a weight of shape `(p, q)`: able to give any rows of the per-rollout gradients `G_i`."""

    @property
    def rows(self) -> Tensor | None:
        """The rows of the weight that this use speaks of, or None for all of them in order."""
        ...

    @property
    def columns(self) -> Tensor:
        """A tensor `(N, T, q)` that shows number of rollouts, width, dtype and device."""
        ...

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:
        """Rows `start … stop-1` of every `G_i`, `(N, stop - start, q)`, added to `chunk` if there is one."""
        ...


@dataclass(frozen=True)
class Factors:
    """One use of a weight of shape `(p, q)` in a matrix product: `G_i = Σ_t a_it ⊗ b_it`."""

    a: Tensor
    """`(N, T, p)`"""
    b: Tensor
    """`(N, T, q)`"""
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
    """`(N, T)`, a row of the weight for each token; negative for tokens that do not count."""
    g: Tensor
    """`(N, T, q)`"""
    rows: Tensor
    """Sorted rows of the weight among which all ids are."""

    @property
    def columns(self) -> Tensor:  # noqa: D102
        return self.g

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:  # noqa: D102
        rollouts, _, width = self.g.shape
        inside = (self.ids >= start) & (self.ids < stop)
        place = torch.where(inside, self.ids - start, stop - start)  # one row more takes what lies outside
        owner = torch.arange(rollouts, device=place.device).unsqueeze(1).expand_as(place)
        own = self.g.new_zeros(rollouts, stop - start + 1, width)
        own.index_put_((owner, place), self.g, accumulate=True)
        return own[:, :-1] if chunk is None else chunk + own[:, :-1]

    def among_rows(self) -> "Lookup":
        """The same use with `rows` as the only rows of the weight."""
        found = torch.searchsorted(self.rows, self.ids.clamp(min=0))
        return replace(self, ids=torch.where(self.ids >= 0, found, -1))


class Contractor:
    """Contracts rows into Grams and weighted sums, in the same way for a whole measurement.

    Every Gram has an owner, any number that its caller knows it by; what belongs to one owner is added up at the end.
    """

    def __init__(self, rollouts: int, groups: int, weights: Tensor | None) -> None:
        """Take the number of rollouts, of groups of them, and the `(M, N)` weight vectors or None."""
        self.rollouts = rollouts
        self.groups = groups
        self.weights = weights
        self._owners: list[int | None] = []
        self._grams: list[Tensor] = []  # each (n, P, N/P, N/P) float64; together one for each owner
        self._partials: dict[torch.dtype, tuple[kernels.Partials, list[int | None]]] = {}

    def stream(self, uses: Sequence[Use], rows: int, *, owner: int, out_dtype: torch.dtype) -> Tensor | None:
        """Weighted sums of the per-rollout gradients of one weight, chunk by chunk over its rows; its Gram is kept.

        The uses of the weight are added *before* the Gram is taken: cross terms between uses belong to it.

        Args:
            uses: Every use of the weight; all with the same `N` and `q`. Factors come first.
            rows: The number `p` of rows.
            owner: To whom the Gram belongs.
            out_dtype: dtype of the sums.

        Returns:
            The sums `(M, p, q)`, or None if there are no weight vectors.
        """
        sample = uses[0].columns
        q = sample.shape[2]
        sums = None
        if self.weights is not None:
            sums = torch.empty(len(self.weights), rows, q, dtype=out_dtype, device=sample.device)
        step = rows_at_a_time(self.rollouts * q, sample.device)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = gradient_rows(uses, start, stop)  # (N, stop - start, q)
            self.contract(chunk.flatten(1), None if sums is None else sums[:, start:stop].flatten(1), owner=owner)
        return sums

    def contract(self, rows: Tensor, out: Tensor | None, *, owner: int) -> None:
        """Keep the Gram of rows `(N, D)`; their weighted sums are written into `out` `(M, D)`."""
        if kernels.serves(rows, out):
            self._contract_by_kernel(rows, out, owner)
            return
        if out is not None and self.weights is not None:
            wide = torch.promote_types(rows.dtype, torch.float32)
            out.copy_(self.weights.to(wide) @ rows.to(wide))
        self.keep([owner], row_gram(rows, self.groups).unsqueeze(0))

    def _contract_by_kernel(self, rows: Tensor, out: Tensor | None, owner: int) -> None:
        if rows.dtype not in self._partials:
            tile = kernels.Tile.of(self.rollouts, self.weights, rows.dtype)
            self._partials[rows.dtype] = (kernels.Partials(tile, rows.device), [])
        partials, owners = self._partials[rows.dtype]
        if partials.is_full:
            self._take(partials, owners)
        partials.add(rows, out)
        owners.append(owner)

    def _take(self, partials: kernels.Partials, owners: list[int | None]) -> None:
        if owners:
            grams = partials.take()[:, : self.rollouts, : self.rollouts]
            self.keep(owners.copy(), blocks_of(grams, self.groups))
            owners.clear()

    def keep(self, owners: Sequence[int | None], grams: Tensor) -> None:
        """Keep Grams `(n, P, N/P, N/P)` of `n` owners."""
        self._owners += owners
        self._grams.append(grams)

    def forget(self, owner: int) -> None:
        """Drop every Gram of an owner."""
        for owners in (self._owners, *(owners for _, owners in self._partials.values())):
            owners[:] = [None if other == owner else other for other in owners]

    def owners(self) -> set[int]:
        """Everybody who has a Gram."""
        kept = {*self._owners, *(owner for _, owners in self._partials.values() for owner in owners)}
        return {owner for owner in kept if owner is not None}

    def grams(self, place: Mapping[int, int], count: int) -> Tensor:
        """Sums `(count, P, N/P, N/P)` float64 on the CPU of the Grams of all owners with the same place below `count`.

        They are added where they are and brought over in one piece.
        """
        for partials, owners in self._partials.values():
            self._take(partials, owners)
        size = self.rollouts // self.groups
        if not self._grams:
            return torch.zeros(count, self.groups, size, size, dtype=torch.float64)
        grams = torch.cat(self._grams)
        index = [count if owner is None else place[owner] for owner in self._owners]  # one row more for the forgotten
        totals = grams.new_zeros(count + 1, *grams.shape[1:])
        return totals.index_add_(0, torch.tensor(index, device=grams.device), grams)[:count].cpu()


def rows_at_a_time(elements: int, device: torch.device) -> int:
    """Rows of `elements` each that a chunk holds; a multiple of 128 on a GPU, whose products want aligned operands."""
    if device.type == "cuda":
        return max(128, CHUNK_ELEMENTS_CUDA // elements // 128 * 128)
    return max(1, CHUNK_ELEMENTS // elements)


def blocks_of(grams: Tensor, groups: int) -> Tensor:
    """The blocks `(…, P, N/P, N/P)` on the diagonal of Grams `(…, N, N)`."""
    size = grams.shape[-1] // groups
    return grams.unflatten(-1, (groups, size)).unflatten(-3, (groups, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def gradient_rows(uses: Sequence[Use], start: int, stop: int) -> Tensor:
    """Rows `start … stop-1` of every `G_i`, summed over the uses: `(N, stop - start, q)`."""
    chunk = None
    for use in uses:
        chunk = use.add_to(chunk, start, stop)
    assert chunk is not None, "a weight without a use has no gradient"
    return chunk


def row_gram(rows: Tensor, groups: int = 1) -> Tensor:
    """Gram of rows `(…, N, D)` within each of `P` consecutive groups, `(…, P, N/P, N/P)` float64.

    No float32 dot product is longer than `DOT_LENGTH`: over millions of terms it would lose three digits; cut into
    blocks whose partial sums are added in float64 it keeps the precision of the rows.
    """
    if groups > 1 and rows.ndim == 2 and not rows.is_cuda:  # blocks of several groups at once would be copied first
        return torch.cat([row_gram(group) for group in rows.unflatten(0, (groups, -1))])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32)).unflatten(-2, (groups, -1))  # (…, P, R, D)
    whole = rows.shape[-1] - rows.shape[-1] % DOT_LENGTH
    rest = rows[..., whole:]
    gram = products(rest).double()
    if whole:
        blocks = rows[..., :whole].unflatten(-1, (-1, DOT_LENGTH)).movedim(-2, 0)  # (blocks, …, P, R, DOT_LENGTH)
        gram = gram + products(blocks).sum(0, dtype=torch.float64)
    return gram


def products(rows: Tensor) -> Tensor:
    """`rows @ rowsᵀ`, `(…, R, D)` to `(…, R, R)`."""
    with nullcontext() if rows.is_cuda else plain_products():
        return rows @ rows.mT
