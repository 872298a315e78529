"""The Gram of per-rollout weight gradients `G_i = Σ_t a_it ⊗ b_it`, streamed so that no `N × p × q` block is kept.

Plain backpropagation forms `Σ_i G_i` with one matrix product; leaving out the sum over `i` costs the same number of
operations. Row chunks of `G` are made, contracted into `K_ij = ⟨G_i, G_j⟩` and into the weighted sums
`Σ_i w_i G_i` that a training step needs, and dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Elements of `G` alive at a time on a CPU: a few megabytes, so that a chunk stays in cache."""
CHUNK_ELEMENTS_CUDA = 1 << 28
"""The same on a GPU without our kernels: large, because the stock skinny products are bound by launches."""
DOT_LENGTH = 1 << 13
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

    @property
    def rows(self) -> Tensor:  # noqa: D102
        return self.ids[self.ids >= 0].unique()

    @property
    def columns(self) -> Tensor:  # noqa: D102
        return self.g

    def add_to(self, chunk: Tensor | None, start: int, stop: int) -> Tensor:  # noqa: D102
        if chunk is None:
            chunk = self.g.new_zeros(len(self.g), stop - start, self.g.shape[2])
        rollout, token = ((self.ids >= start) & (self.ids < stop)).nonzero(as_tuple=True)
        place = (rollout, self.ids[rollout, token] - start)
        wide = torch.promote_types(chunk.dtype, self.g.dtype)  # they differ under autocast
        return chunk.to(wide).index_put_(place, self.g[rollout, token].to(wide), accumulate=True)

    def among(self, rows: Tensor) -> "Lookup":
        """The same use with `rows` (sorted) as the only rows of the weight."""
        found = torch.searchsorted(rows, self.ids.clamp(min=0))
        return Lookup(torch.where(self.ids >= 0, found, -1), self.g)


@dataclass(frozen=True)
class Streamed:
    """What streaming over the rows of a weight leaves behind."""

    gram: Tensor
    """`(P, N/P, N/P)` float64: inner products within each of `P` consecutive groups."""
    sums: Tensor | None
    """`(M, p, q)`: `Σ_i w_i G_i` for each of `M` weight vectors, or None if none was asked for."""


def stream(
    uses: Sequence[Use],
    rows: int,
    weights: Tensor | None = None,
    *,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Streamed:
    """Gram and weighted sums of the per-rollout gradients of one weight, chunk by chunk over its rows.

    The uses of the weight are added *before* the Gram is taken: cross terms between uses belong to it.

    Args:
        uses: Every use of the weight; all with the same `N` and `q`. Factors come first.
        rows: The number `p` of rows.
        weights: `(M, N)`, or None.
        groups: Take inner products only within each of this many consecutive groups of rollouts.
        out_dtype: dtype of the sums; that of the gradients by default.
    """
    sample = uses[0].columns
    rollouts, _, q = sample.shape
    gram = torch.zeros(groups, rollouts // groups, rollouts // groups, dtype=torch.float64, device=sample.device)
    sums = None
    if weights is not None:
        sums = torch.empty(len(weights), rows, q, dtype=out_dtype or sample.dtype, device=sample.device)
    budget = CHUNK_ELEMENTS_CUDA if sample.device.type == "cuda" else CHUNK_ELEMENTS
    step = max(1, budget // (rollouts * q))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        chunk = gradient_rows(uses, start, stop)  # (N, stop - start, q)
        gram += row_gram(chunk.flatten(1), groups)
        if sums is not None and weights is not None:
            sums[:, start:stop] = weighted_sums(chunk, weights)
    return Streamed(gram, sums)


def gradient_rows(uses: Sequence[Use], start: int, stop: int) -> Tensor:
    """Rows `start … stop-1` of every `G_i`, summed over the uses: `(N, stop - start, q)`."""
    chunk = None
    for use in uses:
        chunk = use.add_to(chunk, start, stop)
    assert chunk is not None, "a weight without a use has no gradient"
    return chunk


def weighted_sums(chunk: Tensor, weights: Tensor) -> Tensor:
    """`Σ_i w_mi G_i` for every weight vector: `(M, rows, q)`, accumulated in at least float32."""
    wide = torch.promote_types(chunk.dtype, torch.float32)
    if chunk.dtype == wide:
        return (weights.to(wide) @ chunk.flatten(1)).unflatten(1, chunk.shape[1:])
    return torch.einsum("mi,irq->mrq", weights.to(wide), chunk.to(wide))


def row_gram(rows: Tensor, groups: int = 1) -> Tensor:
    """Gram of rows `(N, D)` within each of `P` consecutive groups, `(P, N/P, N/P)` float64.

    No float32 dot product is longer than `DOT_LENGTH`: over millions of terms it would lose three digits; cut into
    blocks whose partial sums are added in float64 it keeps the precision of the rows.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32)).unflatten(0, (groups, -1))  # (P, R, D)
    whole = rows.shape[2] - rows.shape[2] % DOT_LENGTH
    rest = rows[:, :, whole:]
    gram = (rest @ rest.mT).double()
    if whole:
        blocks = rows[:, :, :whole].unflatten(2, (-1, DOT_LENGTH)).movedim(2, 0)  # (blocks, P, R, DOT_LENGTH)
        gram = gram + (blocks @ blocks.mT).sum(0, dtype=torch.float64)
    return gram
