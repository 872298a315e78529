"""Contraction (stage 5) on a GPU: one kernel launch for the half-precision gradients of several parameters.

Each of the `N` rows of `G` is the gradient of one rollout, with millions of elements. The Gram is `GGᵀ`; the weighted
sums are `wG`, for `M` weight vectors with one coefficient per rollout. PyTorch's matrix products form both at a fifth
of the memory bandwidth; a Triton kernel forms both in one read of `G`. The tensor cores need tiles of at least 16 rows.
With fewer rollouts, the kernel stacks several column blocks in a tile and keeps only the diagonal blocks of the
product. No float32 product is longer than 8192 columns; these products are added in float64. With more than 64 rollouts
in a group, a second kernel multiplies pairs of tiles of 128 rows; the Gram is symmetric, so each pair is formed once.
The rows of several tiles each have their own weighted sums, which are added afterwards. With many weight vectors, or in
float16, a third kernel forms the weighted sums.

A launch takes longer on the host than the work for a small parameter takes on the GPU. So the gradients of several
parameters wait side by side in a `Slab` `(N, columns)`, and one launch contracts all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram import machine
from scoregram.machine import power_of_two

KERNELS = "scoregram.gram.triton_kernels"
"""The module with the Triton kernels; imported at the first launch, because a CPU build of torch has no Triton."""
SLAB_ELEMENTS = 1 << 28
"""Elements of a slab, and of a chunk of one large parameter: half a gigabyte."""
SEGMENT_ALIGNMENT = 64
"""Each parameter in a slab has a multiple of this many elements, so that all of them are aligned in memory."""
FUSED_VECTORS = 16
"""Rows of a tile of weights: the Gram's kernel forms the sums of at most this many vectors.

The kernel for pairs of tiles takes a vector and its rounding error as two rows, so it forms half as many.
"""
TILE_ROWS, TILE_COLUMNS, TILE_BLOCKS, TILE_WARPS, TILE_STAGES = 64, 128, 16, 4, 4
"""Best of 25 settings on an H200: 3.5 TB/s of gradients read for 32 and 64 rollouts, 3.1 for 8."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs that fit into the shared memory of one multiprocessor at these settings, so that all run at once."""
PRODUCT_LENGTH = 1 << 13
"""Columns of one float32 product of two tiles; these products are added in float64."""
PAIR_ROWS, PAIR_COLUMNS, PAIR_WARPS, PAIR_STAGES = 128, 128, 8, 3
"""Best of 14 settings on an H200: 520 TFLOP/s for 256 rollouts, counting the whole Gram."""
SUM_COLUMNS = 1 << 10
"""Columns that one program of the kernel for weighted sums reads."""


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels support a tensor: half precision, on a GPU, with Triton."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and machine.can_launch()


@cache
def resident_programs(device: torch.device) -> int:
    """Programs of the Gram's kernel that run at once on a GPU."""
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def blocks_within_groups(grams: Tensor, groups: int) -> Tensor:
    """The blocks `(…, P, N/P, N/P)` on the diagonal of Grams `(…, N, N)`."""
    size = grams.shape[-1] // groups
    return grams.unflatten(-1, (groups, size)).unflatten(-3, (groups, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@dataclass(frozen=True)
class Segment:
    """The columns `start … start + width - 1` of a slab: the gradients of one parameter."""

    start: int
    width: int


# Contraction of half-precision rows


@dataclass(frozen=True)
class Tile:
    """Layout of rows in a tile of the kernel: `padded` rows for each of `stack` column blocks."""

    span: int
    """Rows of `G` in one tile."""
    padded: int
    stack: int
    held_vectors: int
    """Weight vectors, rounded up to a power of two."""

    @staticmethod
    def of(span: int, vectors: int) -> "Tile":
        """The tile for `span` rows and at most `FUSED_VECTORS` weight vectors; a column block fits either."""
        padded = max(2, power_of_two(span), power_of_two(vectors))
        return Tile(span, padded, max(1, TILE_ROWS // padded), power_of_two(vectors))

    @property
    def size(self) -> int:
        """Rows of the tile."""
        return self.padded * self.stack

    @property
    def vectors(self) -> int:
        """Rows for the weight vectors in each column block, at least `FUSED_VECTORS` in all."""
        return max(FUSED_VECTORS // self.stack, self.held_vectors)

    def stacked_weights(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights `(M, N)` of each span on a block diagonal, and their rounding errors.

        `(2, spans, vectors · stack, size)`.
        """
        parts = weights.split(self.span, 1)
        block = torch.zeros(len(parts), self.vectors, self.padded, dtype=torch.float32, device=weights.device)
        for span, part in enumerate(parts):
            block[span, : part.shape[0], : part.shape[1]] = part
        places = torch.eye(self.stack, device=weights.device)
        whole = places[:, None, :, None] * block[:, None, :, None, :]  # (spans, stack, vectors, stack, padded)
        return rounded_with_errors(whole.flatten(3).flatten(1, 2), dtype)

    def unstacked(self, products: Tensor) -> Tensor:
        """Grams `(…, span, span)` from products of tiles `(…, size, size)`."""
        # Only the diagonal blocks multiply a column block with itself.
        grams = blocks_within_groups(products, self.stack).sum(-3)
        return grams[..., : self.span, : self.span]


def columns_for_pairs(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights `(M, N)` and their rounding errors as `2M` columns of `(N, FUSED_VECTORS)`; the others are zero."""
    columns = rounded_with_errors(weights.float(), dtype).flatten(0, 1).t()  # (N, 2M)
    return F.pad(columns, (0, FUSED_VECTORS - columns.shape[1])).contiguous()


def rounded_with_errors(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in half precision and their rounding errors, `(2, …)`. The errors make up for bfloat16's few digits.

    In float16 small errors would underflow.
    """
    high = weights.to(dtype)
    return torch.stack([high, (weights - high).to(dtype)])


@dataclass(frozen=True)
class Shares:
    """The columns `first … end - 1` that each program of a launch reads; all of them belong to one segment."""

    first: Tensor
    """`(programs,)` int64"""
    end: Tensor
    per_segment: Tensor
    """`(segments,)` number of programs for each segment, in order."""

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(segments: tuple[Segment, ...], unit: int, programs: int, device: torch.device) -> "Shares":
        """Equal shares in multiples of `unit` columns, for at most `programs` programs or one for each segment."""
        units = [-(-segment.width // unit) for segment in segments]
        share = -(-sum(units) // max(programs, len(units)))
        while sum(-(-count // share) for count in units) > max(programs, len(units)):
            share += max(1, share // 16)
        first, end, per_segment = [], [], []
        for segment in segments:
            stop = segment.start + segment.width
            starts = range(segment.start, stop, share * unit)
            first += starts
            end += [min(start + share * unit, stop) for start in starts]
            per_segment.append(len(starts))
        return Shares(*(torch.tensor(values, device=device) for values in (first, end, per_segment)))


def segment_sums(products: Tensor, shares: Shares) -> Tensor:
    """Products `(programs, …)` of a launch, added up by segment: `(segments, …)`."""
    if len(shares.per_segment) == 1:
        return products.sum(0, keepdim=True)
    # `unsafe` only leaves out checks that wait for the device
    sums = torch.segment_reduce(products.flatten(1), "sum", lengths=shares.per_segment, unsafe=True)
    return sums.view(len(sums), *products.shape[1:])


@dataclass(frozen=True)
class TilePairs:
    """Pairs of tiles of `PAIR_ROWS` rows whose products make up the Grams of groups with many rollouts.

    The Gram is symmetric, so a pair appears once, with the upper tile on the left.
    """

    groups: int
    size: int
    """Rollouts in a group."""
    left: Tensor  # (pairs,) first row of the left tile
    right: Tensor  # (pairs,) first row of the right tile
    limit: Tensor  # (pairs,) end of the group that both belong to
    own_tile: Tensor
    """`(pairs,)` number of the tile, counted over all groups, in pairs of a tile with itself; -1 in the others."""
    place: Tensor
    """`(pairs,)` place of each pair among the `P · tiles²` tiles of the Grams."""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(rollouts: int, groups: int, device: torch.device) -> "TilePairs":
        """The pairs within `groups` groups."""
        size = rollouts // groups
        tiles = -(-size // PAIR_ROWS)
        upper = [(i, j) for i in range(tiles) for j in range(i, tiles)]
        left, right, limit, own_tile = ([] for _ in range(4))
        for group, start in enumerate(range(0, rollouts, size)):
            left += [start + i * PAIR_ROWS for i, _ in upper]
            right += [start + j * PAIR_ROWS for _, j in upper]
            limit += [start + size] * len(upper)
            own_tile += [group * tiles + i if i == j else -1 for i, j in upper]
        place = [(group * tiles + i) * tiles + j for group in range(groups) for i, j in upper]
        values = (left, right, limit, own_tile, place)
        return TilePairs(groups, size, *(torch.tensor(value, device=device) for value in values))

    @property
    def count(self) -> int:
        """Number of pairs."""
        return len(self.left)

    @property
    def tiles(self) -> int:
        """Number of tiles of all groups."""
        return self.groups * -(-self.size // PAIR_ROWS)

    def assembled(self, products: Tensor) -> Tensor:
        """Grams `(n, P, N/P, N/P)` from products of pairs `(n, pairs, tile, tile)`."""
        tiles = -(-self.size // PAIR_ROWS)
        grid = products.new_zeros(len(products), self.groups * tiles**2, PAIR_ROWS, PAIR_ROWS)
        grid = grid.index_copy_(1, self.place, products).unflatten(1, (self.groups, tiles, tiles))
        whole = grid.transpose(3, 4).reshape(len(products), self.groups, tiles * PAIR_ROWS, tiles * PAIR_ROWS)
        upper = whole[:, :, : self.size, : self.size].triu()
        return upper + upper.triu(1).mT


def fuses_sums(weights: Tensor | None, most: int, dtype: torch.dtype) -> bool:
    """Whether the kernel of the Gram forms the weighted sums too, for at most `most` weight vectors `(M, N)`.

    It takes weights in the dtype of the rows, and in float16 small ones would underflow.
    """
    return weights is not None and len(weights) <= most and dtype == torch.bfloat16


class HalfContractor:
    """Grams and weighted sums of half-precision rows on a GPU. The Grams stay on the device until `take` returns them.

    All calls have rows of the same `N` rollouts in `P` groups, of one dtype and on one device.
    """

    def __init__(
        self, rollouts: int, groups: int, weights: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the number of rollouts and of groups, and the `(M, N)` weight vectors or None."""
        self.rollouts, self.groups, self.weights = rollouts, groups, weights
        self.tile: Tile | None = None
        """The tile of the Gram's kernel; None if `pairs` of tiles form the Gram."""
        self._fused: Tensor | None = None
        """Weight vectors and their rounding errors for the kernel of the Gram; None if another one forms the sums."""
        size = rollouts // groups
        if size <= TILE_ROWS:
            fused = weights if fuses_sums(weights, FUSED_VECTORS, dtype) else None
            self.tile = Tile.of(min(rollouts, TILE_ROWS // size * size), 0 if fused is None else len(fused))
            self._fused = None if fused is None else self.tile.stacked_weights(fused, dtype)
        elif weights is not None and fuses_sums(weights, FUSED_VECTORS // 2, dtype):
            self._fused = columns_for_pairs(weights, dtype)
        self.pairs = TilePairs.of(rollouts, groups, device)
        self._device = device
        self._transposed = None if weights is None else weights.float().t().contiguous()
        self._programs = resident_programs(device)
        self._products: list[Tensor] = []
        self.shares: list[Shares] = []
        """The shares of all launches: a CUDA graph reads them by their addresses, so they must outlive it."""
        self.owners: list[int | None] = []
        """Id of the parameter, for each Gram that waits for `take`."""

    def contract(
        self, rows: Tensor, out: Tensor | None, segments: tuple[Segment, ...], owners: Sequence[int | None]
    ) -> None:
        """Keep the Gram of each segment of rows `(N, D)`, and write the weighted sums into `out` `(M, D)`."""
        self.owners += owners
        fused = None
        if out is not None and self._fused is None:
            self.launch_sums(rows, out)
        elif out is not None:
            fused = self.parts_of_sums(out)
        if self.tile is not None:
            self._products.append(self.launch(self.tile, rows, fused, segments))
        else:
            self._products.append(self.launch_pairs(self.pairs, rows, fused, segments))
        if out is not None and fused is not None and len(fused) > 1:
            out.copy_(fused.sum(0))

    def parts_of_sums(self, out: Tensor) -> Tensor:
        """`(parts, M, D)`: memory for weighted sums whose total over the parts goes into `out` `(M, D)`.

        Each span of rows has one part, and each tile in pairs has two: of the weights and of their rounding errors. A
        single part is `out` itself.
        """
        parts = 2 * self.pairs.tiles if self.tile is None else -(-self.rollouts // self.tile.span)
        if parts == 1:
            return out.unsqueeze(0)
        return torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)

    def launch(self, tile: Tile, rows: Tensor, sums: Tensor | None, segments: tuple[Segment, ...]) -> Tensor:
        """Products of tiles `(n, spans, size, size)` of `n` segments; the kernel fills `sums` `(spans, M, D)`."""
        shares = Shares.of(segments, TILE_COLUMNS * tile.stack, self._programs, rows.device)
        self.shares.append(shares)
        programs, spans = len(shares.first), -(-self.rollouts // tile.span)
        partial = torch.empty(spans, programs, tile.size, tile.size, dtype=torch.float64, device=rows.device)
        high, low = (partial, partial) if self._fused is None else self._fused  # without sums the kernel reads neither
        machine.kernel(KERNELS, "gram_and_sums_kernel")[(programs, spans)](
            rows,
            rows if sums is None else sums,
            high,
            low,
            partial,
            shares.first,
            shares.end,
            rows.stride(0),
            0 if sums is None else sums.stride(1),
            self.rollouts,
            COUNT=0 if sums is None else sums.shape[1],
            SPAN=tile.span,
            PADDED=tile.padded,
            VECTORS=tile.vectors,
            STACK=tile.stack,
            COLUMNS=TILE_COLUMNS,
            BLOCKS=TILE_BLOCKS,
            ALIGNED=all((segment.start + segment.width) % 16 == 0 for segment in segments),
            num_warps=TILE_WARPS,
            num_stages=TILE_STAGES,
        )
        return segment_sums(partial.transpose(0, 1), shares)

    def launch_sums(self, rows: Tensor, out: Tensor) -> None:
        """Write the weighted sums of rows `(N, D)` into `out` `(M, D)`."""
        width = rows.shape[1]
        machine.kernel(KERNELS, "weighted_sums_kernel")[(-(-width // SUM_COLUMNS),)](
            rows,
            self._transposed,
            out,
            width,
            rows.stride(0),
            out.stride(0),
            self.rollouts,
            COUNT=len(out),
            VECTORS=power_of_two(len(out)),
            COLUMNS=SUM_COLUMNS,
        )

    def launch_pairs(
        self, pairs: "TilePairs", rows: Tensor, sums: Tensor | None, segments: tuple[Segment, ...]
    ) -> Tensor:
        """Products of pairs of tiles `(n, pairs, tile, tile)` of `n` segments, float64.

        The kernel fills `sums` `(2 · tiles, M, D)`.
        """
        units = sum(-(-segment.width // PRODUCT_LENGTH) for segment in segments)
        shares = Shares.of(segments, PRODUCT_LENGTH, units, rows.device)
        self.shares.append(shares)
        size = (len(shares.first), pairs.count, PAIR_ROWS, PAIR_ROWS)
        products = torch.empty(size, dtype=torch.float32, device=rows.device)
        machine.kernel(KERNELS, "tile_products_kernel")[(pairs.count, len(shares.first))](
            rows,
            rows if self._fused is None else self._fused,  # without sums the kernel reads no weights
            products,
            products if sums is None else sums,
            shares.first,
            shares.end,
            pairs.left,
            pairs.right,
            pairs.limit,
            pairs.own_tile,
            rows.stride(0),
            0 if sums is None else sums.stride(1),
            COUNT=0 if sums is None else 2 * sums.shape[1],
            VECTORS=FUSED_VECTORS,
            TILE=PAIR_ROWS,
            COLUMNS=PAIR_COLUMNS,
            ALIGNED=all((segment.start + segment.width) % 16 == 0 for segment in segments),
            num_warps=PAIR_WARPS,
            num_stages=PAIR_STAGES,
        )
        return segment_sums(products.double(), shares)

    def take(self) -> tuple[list[int | None], Tensor]:
        """Owners and Grams `(n, P, N/P, N/P)` of the segments contracted since the last call, in order."""
        size = self.rollouts // self.groups
        owners, self.owners = self.owners, []
        if not owners:
            return owners, torch.zeros(0, self.groups, size, size, dtype=torch.float64, device=self._device)
        products, self._products = torch.cat(self._products), []
        if self.tile is None:
            return owners, self.pairs.assembled(products)
        grams = self.tile.unstacked(products)  # (n, spans, span, span)
        return owners, blocks_within_groups(grams, self.tile.span // size).flatten(1, 2)[:, : self.groups]


# Several weights side by side


class Slab:
    """Per-rollout gradients `(N, p, q)` of several parameters, side by side, until one launch contracts them."""

    def __init__(self, contractor: HalfContractor, rows: Tensor, out_dtype: torch.dtype) -> None:
        """Take the contractor, memory `(N, columns)`, and the dtype of weighted sums."""
        self.contractor = contractor
        self.rows = rows
        self.out_dtype = out_dtype
        self._used = 0
        self._waiting: list[tuple[int, int, int, Callable[[Tensor], None]]] = []  # p, q, owner, receiver of the sums

    def reserve(self, p: int, q: int, owner: int, receive: Callable[[Tensor], None]) -> Tensor:
        """Space `(N, p, q)` for the gradients of one parameter; flushes the slab first if they do not fit.

        `p · q` is a multiple of `SEGMENT_ALIGNMENT` and at most the columns of the slab. If there are weight vectors,
        `flush` calls `receive` with the weighted sums `(M, p, q)`.
        """
        if self._used + p * q > self.rows.shape[1]:
            self.flush()
        start = self._used
        self._used += p * q
        self._waiting.append((p, q, owner, receive))
        return self.rows.as_strided((len(self.rows), p, q), (self.rows.stride(0), q, 1), start)

    def flush(self) -> None:
        """Contract the gradients in the slab, in order, and empty it."""
        if not self._waiting:
            return
        waiting, used = self._waiting, self._used
        self._waiting, self._used = [], 0
        ends = list(accumulate(p * q for p, q, _, _ in waiting))
        segments = tuple(Segment(end - p * q, p * q) for end, (p, q, _, _) in zip(ends, waiting, strict=True))
        weights, sums = self.contractor.weights, None
        if weights is not None:
            sums = self.rows.new_empty(len(weights), used, dtype=self.out_dtype)
        self.contractor.contract(self.rows[:, :used], sums, segments, [owner for _, _, owner, _ in waiting])
        if sums is not None:
            for part, (p, q, _, receive) in zip(sums.split([s.width for s in segments], 1), waiting, strict=True):
                receive(part.unflatten(1, (p, q)))


def slab_columns(rollouts: int) -> int:
    """Columns of a slab for a number of rollouts."""
    return SLAB_ELEMENTS // rollouts // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT
