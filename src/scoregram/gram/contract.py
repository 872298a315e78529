"""Stage 5, contraction: per-rollout gradients `G_i = Σ_t a_it ⊗ b_it` become Grams and weighted sums, chunk by chunk.

Plain backpropagation forms `Σ_i G_i` with one matrix product; leaving out the sum over `i` costs the same number of
operations. The contractor forms chunks of rows of `G`, contracts them into `K_ij = ⟨G_i, G_j⟩` and into the weighted
sums `Σ_i w_i G_i` that a training step needs, and drops them, so no `N × p × q` block is ever held.

In half precision on a GPU a Triton kernel does the contraction (`PartialGrams`). `G` has `N` rows of millions of
elements; stock routines form `GGᵀ` and `wG` at a fifth of the memory bandwidth, the kernel forms both in one read of
`G`. It feeds the tensor cores tiles of 16 rows: with fewer rollouts, several column blocks are stacked to fill a tile,
and only the diagonal blocks of the product are kept. No float32 product is longer than 8192 columns; these products are
added in float64.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram import machine
from scoregram.machine import plain_products, power_of_two

CHUNK_ELEMENTS = 1 << 20
"""Elements of `G` held at a time on a CPU: a few megabytes, so that a chunk stays in cache."""
CHUNK_ELEMENTS_CUDA = 1 << 28
"""The same on a GPU without the kernel: large, because stock skinny products are bound by launches."""
DOT_LENGTH = 1 << 11
"""Longest dot product taken in float32 before partial sums are added in float64."""
KERNELS = "scoregram.gram.triton_kernels"
"""The module with the Triton kernels; imported at the first launch, because a CPU build of torch has no Triton."""
KERNEL_ROLLOUTS = 64
"""Largest number of rollouts that the contraction kernel takes."""
TILE_COLUMNS, TILE_BLOCKS, TILE_WARPS, TILE_STAGES = 512, 16, 2, 4
"""Best of 144 settings on an H200: 2.45 TB/s of gradients read."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as fit into the shared memory of one multiprocessor at these settings: all run at once, with equal shares."""
PARTIAL_BYTES = 1 << 25
"""Bytes of partial Grams that are held before they are summed."""

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
        """Rows `start … stop-1` of every `G_i`, `(N, stop - start, q)`, added to `chunk` unless that is None."""
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
        inside = (self.ids >= start) & (self.ids < stop)
        place = torch.where(inside, self.ids - start, stop - start)  # ids outside go to one extra row
        owner = torch.arange(rollouts, device=place.device).unsqueeze(1).expand_as(place)
        own = self.g.new_zeros(rollouts, stop - start + 1, width)
        own.index_put_((owner, place), self.g, accumulate=True)
        return own[:, :-1] if chunk is None else chunk + own[:, :-1]

    def among_rows(self) -> "Lookup":
        """This use, renumbered for the smaller weight that consists of `rows` alone."""
        place = torch.searchsorted(self.rows, self.ids.clamp(min=0))
        return replace(self, ids=torch.where(self.ids >= 0, place, -1))


# Contraction


class Contractor:
    """Contracts per-rollout gradients into Grams, which it keeps, and weighted sums, which it returns.

    Every Gram has an owner, any integer that identifies a parameter to the caller. Grams stay on the device, unsummed,
    until `grams` is called: only then does a measurement wait for the device.
    """

    def __init__(self, rollouts: int, groups: int, weights: Tensor | None) -> None:
        """Take the number of rollouts and of groups, and the `(M, N)` weight vectors or None."""
        self.rollouts = rollouts
        self.groups = groups
        self.weights = weights
        self._owners: list[int | None] = []
        self._grams: list[Tensor] = []  # each (n, P, N/P, N/P) float64; together one Gram for each owner
        self._partials: dict[torch.dtype, tuple[PartialGrams, list[int | None]]] = {}

    def stream(self, uses: Sequence[Use], rows: int, *, owner: int, out_dtype: torch.dtype) -> Tensor | None:
        """Weighted sums of the per-rollout gradients of one weight, chunk by chunk over its rows; keeps its Gram.

        All uses of the weight (`p` rows) are added *before* the Gram is taken, so it includes their cross terms.
        The sums are `(M, p, q)`, or None if there are no weight vectors.
        """
        sample = uses[0].columns
        q = sample.shape[2]
        sums = None
        if self.weights is not None:
            sums = torch.empty(len(self.weights), rows, q, dtype=out_dtype, device=sample.device)
        step = rows_at_a_time(self.rollouts * q, sample.device)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = uses[0].add_to(None, start, stop)  # (N, stop - start, q)
            for use in uses[1:]:
                chunk = use.add_to(chunk, start, stop)
            self.contract(chunk.flatten(1), None if sums is None else sums[:, start:stop].flatten(1), owner=owner)
        return sums

    def contract(self, rows: Tensor, out: Tensor | None, *, owner: int) -> None:
        """Keep the Gram of rows `(N, D)`, and write their weighted sums into `out` `(M, D)`."""
        if suits_kernel(rows, out):
            self._contract_by_kernel(rows, out, owner)
            return
        if out is not None and self.weights is not None:
            wide = torch.promote_types(rows.dtype, torch.float32)
            out.copy_(self.weights.to(wide) @ rows.to(wide))
        self.keep([owner], row_gram(rows, self.groups).unsqueeze(0))

    def _contract_by_kernel(self, rows: Tensor, out: Tensor | None, owner: int) -> None:
        if rows.dtype not in self._partials:
            tile = Tile.of(self.rollouts, self.weights, rows.dtype)
            self._partials[rows.dtype] = (PartialGrams(tile, rows.device), [])
        partials, owners = self._partials[rows.dtype]
        if partials.is_full:
            self._sum_partials(partials, owners)
        partials.add(rows, out)
        owners.append(owner)

    def _sum_partials(self, partials: "PartialGrams", owners: list[int | None]) -> None:
        if owners:
            grams = partials.take()[:, : self.rollouts, : self.rollouts]
            self.keep(owners.copy(), blocks_within_groups(grams, self.groups))
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
        """Every owner of a Gram."""
        kept = {*self._owners, *(owner for _, owners in self._partials.values() for owner in owners)}
        return {owner for owner in kept if owner is not None}

    def grams(self, place: Mapping[int, int], count: int) -> Tensor:
        """`(count, P, N/P, N/P)` float64 on the CPU: for each place, the sum of the Grams of all owners mapped to it.

        The Grams are added on the device and copied in one piece.
        """
        for partials, owners in self._partials.values():
            self._sum_partials(partials, owners)
        size = self.rollouts // self.groups
        if not self._grams:
            return torch.zeros(count, self.groups, size, size, dtype=torch.float64)
        grams = torch.cat(self._grams)
        index = [count if owner is None else place[owner] for owner in self._owners]  # forgotten ones to one extra row
        totals = grams.new_zeros(count + 1, *grams.shape[1:])
        return totals.index_add_(0, torch.tensor(index, device=grams.device), grams)[:count].cpu()


def rows_at_a_time(elements: int, device: torch.device) -> int:
    """Number of rows in a chunk, for rows of `elements` elements each."""
    if device.type == "cuda":  # a multiple of 128: products of aligned operands are faster
        return max(128, CHUNK_ELEMENTS_CUDA // elements // 128 * 128)
    return max(1, CHUNK_ELEMENTS // elements)


def blocks_within_groups(grams: Tensor, groups: int) -> Tensor:
    """The blocks `(…, P, N/P, N/P)` on the diagonal of Grams `(…, N, N)`."""
    size = grams.shape[-1] // groups
    return grams.unflatten(-1, (groups, size)).unflatten(-3, (groups, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


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
    """`rows @ rowsᵀ`, `(…, R, D)` to `(…, R, R)`."""
    with nullcontext() if rows.is_cuda else plain_products():
        return rows @ rows.mT


# Contraction by the Triton kernel


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels can take a tensor: half precision, on a GPU, with Triton."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and machine.can_launch()


def suits_kernel(rows: Tensor, out: Tensor | None) -> bool:
    """Whether the kernel can contract these rows: half precision on a GPU, few rollouts, sums in bfloat16 if any.

    The kernel takes the weights of sums in the dtype of the rows, and in float16 the small ones would underflow.
    """
    return (
        is_half_on_gpu(rows)
        and rows.stride(1) == 1
        and len(rows) <= KERNEL_ROLLOUTS
        and (out is None or out.dtype == rows.dtype == torch.bfloat16)
    )


@dataclass(frozen=True)
class Tile:
    """Layout of the rollouts in a tile, `padded` rows for each of `stack` column blocks, and the weights in it."""

    padded: int
    stack: int
    high: Tensor | None
    """`(TILE, TILE)` block-diagonal weights in half precision."""
    low: Tensor | None
    """The rounding error of `high`: `high + low` has every digit of the weights."""

    @staticmethod
    def of(rollouts: int, weights: Tensor | None, dtype: torch.dtype) -> "Tile":
        """The tile for a number of rollouts and weight vectors `(M, N)`."""
        padded = max(2, power_of_two(rollouts), 0 if weights is None else power_of_two(len(weights)))
        stack = max(1, 16 // padded)
        if weights is None:
            return Tile(padded, stack, None, None)
        block = torch.zeros(padded, padded, dtype=torch.float32, device=weights.device)
        block[: weights.shape[0], : weights.shape[1]] = weights
        whole = torch.block_diag(*[block] * stack)
        high = whole.to(dtype)
        return Tile(padded, stack, high, (whole - high).to(dtype))


class PartialGrams:
    """Grams of several row matrices: the kernel writes one partial Gram per program, and many are summed at once."""

    def __init__(self, tile: Tile, device: torch.device) -> None:
        """Take the tile that all matrices share."""
        self.tile = tile
        self.programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._size = tile.padded * tile.stack
        slots = max(1, PARTIAL_BYTES // (8 * self.programs * self._size**2))
        self._buffer = torch.empty(slots, self.programs, self._size, self._size, dtype=torch.float64, device=device)
        self._used = 0

    @property
    def is_full(self) -> bool:
        """Whether `take` must be called before the next matrix."""
        return self._used == len(self._buffer)

    def add(self, rows: Tensor, out: Tensor | None) -> None:
        """Launch the kernel that reads rows `(N, D)` once, forms `GGᵀ`, and writes `wG` into `out` `(M, D)`."""
        rollouts, width = rows.shape
        tile, size = self.tile, self._size
        columns = max(64, TILE_COLUMNS * 16 // size)  # tiles of one size, whatever the number of rollouts
        partial = self._buffer[self._used]
        self._used += 1
        # Without weights the kernel reads none of the pointers that `rows` and `partial` stand in for.
        machine.kernel(KERNELS, "gram_and_sums_kernel")[(self.programs,)](
            rows,
            rows if out is None else out,
            partial if tile.high is None else tile.high,
            partial if tile.low is None else tile.low,
            partial,
            width,
            rows.stride(0),
            width if out is None else out.stride(0),
            rollouts,
            -(-width // (columns * tile.stack * self.programs)),
            COUNT=0 if out is None else len(out),
            PADDED=tile.padded,
            STACK=tile.stack,
            TILE=size,
            COLUMNS=columns,
            BLOCKS=TILE_BLOCKS,
            num_warps=TILE_WARPS if size <= 32 else 2 * TILE_WARPS,
            num_stages=TILE_STAGES,
        )

    def take(self) -> Tensor:
        """Grams `(n, padded, padded)` of the matrices added since the last call, in order."""
        products = self._buffer[: self._used].sum(1)  # (n, TILE, TILE)
        self._used = 0
        # Only the diagonal blocks multiply a column block with itself.
        stacked = (self.tile.stack, self.tile.padded)
        return products.unflatten(1, stacked).unflatten(3, stacked).diagonal(dim1=1, dim2=3).sum(-1)
