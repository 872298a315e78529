"""Triton kernels for the two skinny products and the softmax gradient, in half precision on a GPU.

The per-rollout gradients `G` of a weight are `N` rows of millions of elements. Stock routines form `GGᵀ` and `wG` at a
fifth of the memory's speed; here both are formed in one read of `G`. A tile of `16` rows feeds the tensor cores: with
fewer rollouts several column blocks are stacked to fill it, and only the diagonal blocks of the product are kept.
No product in float32 is longer than 8192 columns; they are added in float64. `outer` holds the plain twins.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoregram import machine
from scoregram.machine import power_of_two

MOST_ROLLOUTS = 64
COLUMNS, BLOCKS, WARPS, STAGES = 512, 16, 2, 4
"""Best of 144 settings on an H200: 2.45 TB/s of gradients read."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as the shared memory of one multiprocessor holds at these settings: all run at once, with equal shares."""
PARTIAL_BYTES = 1 << 25
"""Partial Grams that wait to be added up together."""


def kernel(name: str) -> Any:
    """A kernel of this room by its name."""
    return machine.kernel("scoregram.gram.triton_kernels", name)


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is of the kind the kernels are made for."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and machine.can_launch()


def serves(rows: Tensor, out: Tensor | None) -> bool:
    """Whether the kernel takes these rows: half precision on a GPU, few enough of them, sums in the same dtype."""
    return (
        is_half_on_gpu(rows)
        and rows.stride(1) == 1
        and len(rows) <= MOST_ROLLOUTS
        and (out is None or out.dtype == rows.dtype)
    )


@dataclass(frozen=True)
class Tile:
    """How rollouts are laid out in a tile: `padded` rows for each of `stack` column blocks, and the weights so."""

    padded: int
    stack: int
    high: Tensor | None
    """`(TILE, TILE)` block-diagonal weights in half precision,"""
    low: Tensor | None
    """and what that rounding lost, so that no digit of a weight is missing."""

    @staticmethod
    def of(rollouts: int, weights: Tensor | None, dtype: torch.dtype) -> "Tile":
        """The tile for some rollouts and weight vectors `(M, N)`."""
        padded = max(2, power_of_two(rollouts), 0 if weights is None else power_of_two(len(weights)))
        stack = max(1, 16 // padded)
        if weights is None:
            return Tile(padded, stack, None, None)
        block = torch.zeros(padded, padded, dtype=torch.float32, device=weights.device)
        block[: weights.shape[0], : weights.shape[1]] = weights
        whole = torch.block_diag(*[block] * stack)
        high = whole.to(dtype)
        return Tile(padded, stack, high, (whole - high).to(dtype))


class Partials:
    """Grams of one row matrix after another, one partial Gram a program, added up many at a time."""

    def __init__(self, tile: Tile, device: torch.device) -> None:
        """Take the tile of all the matrices to come."""
        self.tile = tile
        self.programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._size = tile.padded * tile.stack
        slots = max(1, PARTIAL_BYTES // (8 * self.programs * self._size**2))
        self._waiting = torch.empty(slots, self.programs, self._size, self._size, dtype=torch.float64, device=device)
        self._used = 0

    @property
    def is_full(self) -> bool:
        """Whether `take` has to be called before the next matrix."""
        return self._used == len(self._waiting)

    def add(self, rows: Tensor, out: Tensor | None) -> None:
        """Launch `GGᵀ` of rows `(N, D)`, and `wG` written into `out` `(M, D)`, from one read."""
        rollouts, width = rows.shape
        tile, size = self.tile, self._size
        columns = max(64, COLUMNS * 16 // size)  # tiles of one size, whatever the number of rollouts
        partial = self._waiting[self._used]
        self._used += 1
        kernel("gram_and_sums")[(self.programs,)](
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
            BLOCKS=BLOCKS,
            num_warps=WARPS if size <= 32 else 2 * WARPS,
            num_stages=STAGES,
        )

    def take(self) -> Tensor:
        """Grams `(n, padded, padded)` of the matrices added since the last time, in order."""
        summed = self._waiting[: self._used].sum(1)
        self._used = 0
        return unfolded(summed, self.tile)


def unfolded(folded: Tensor, tile: Tile) -> Tensor:
    """The sums of the diagonal blocks of products of whole tiles `(n, TILE, TILE)`: `(n, padded, padded)`."""
    blocks = folded.unflatten(1, (tile.stack, tile.padded)).unflatten(3, (tile.stack, tile.padded))
    return blocks.diagonal(dim1=1, dim2=3).sum(-1)


def softmax_gradient_(logits: Tensor, tokens: Tensor, factors: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Turn logits `(n, V)` into `f (onehot - softmax(logits / τ))` in place.

    Returns:
        Log-probability of each token and the log-normaliser, both `(n,)` float32.
    """
    log_probs, normaliser = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    kernel("softmax_gradient")[(len(logits),)](
        logits, tokens, factors, log_probs, normaliser, logits.shape[1], 1.0 / temperature, BLOCK=8192, num_warps=16
    )
    return log_probs, normaliser


def logit_gradient_(
    logits: Tensor, first: int, tokens: Tensor, factors: Tensor, normaliser: Tensor, temperature: float
) -> None:
    """Turn some columns of the logits, `first …`, into `f (onehot - softmax)` in place, the normaliser being known.

    Args:
        logits: `(n, columns)`, contiguous.
        first: The vocabulary row of the first column.
        tokens: `(n,)` like the rest.
        factors: `f`.
        normaliser: Log-normaliser of `logits / τ` over the whole vocabulary.
        temperature: `τ`.
    """
    width = logits.shape[1]
    kernel("logit_gradient")[(len(logits), -(-width // 4096))](
        logits, tokens, factors, normaliser, width, first, 1.0 / temperature, BLOCK=4096, num_warps=8
    )
