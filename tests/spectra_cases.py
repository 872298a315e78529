"""Strategies and slow references for the spectra tests. The references import torch only and build every row."""

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def spectra(draw, *, min_values: int = 1, max_values: int = 8) -> Tensor:
    """Singular values with zeros, ties and magnitudes far apart; never all zero."""
    value = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-4, 1.0))
    values = draw(st.lists(value, min_size=min_values, max_size=max_values).filter(any))
    return torch.tensor(values, dtype=torch.float64) * draw(st.sampled_from([1e-6, 1.0, 1e6]))


@st.composite
def groups(draw, *, min_rollouts: int = 1, max_rollouts: int = 6) -> tuple[Tensor, Tensor]:
    """Scores `(R, D)` and advantages `(R,)`: fewer parameters than rollouts, duplicates and zero rows included."""
    rollouts = draw(st.integers(min_rollouts, max_rollouts))
    parameters = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(rollouts, parameters, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["distinct", "duplicate", "zero score", "shared mean"]))
    if kind == "duplicate":
        scores[0] = scores[-1]
    if kind == "zero score":
        scores[0] = 0
    if kind == "shared mean":
        scores = scores + 3
    weight = st.one_of(st.sampled_from([0.0, 0.5, -0.5, 1.0]), st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3))
    advantages = torch.tensor(draw(st.lists(weight, min_size=rollouts, max_size=rollouts)), dtype=torch.float64)
    return scores * draw(st.sampled_from([1e-3, 1.0, 1e3])), advantages * draw(st.sampled_from([1e-6, 1.0, 1e6]))


def stacked_singular_values(scores: Tensor, advantages: Tensor, *, centred: bool) -> Tensor:
    """Singular values of the matrix itself, one row per rollout, padded with zeros to `R`."""
    rows = torch.stack([a * score for a, score in zip(advantages, scores, strict=True)])
    if centred:
        mean = sum(rows[i] for i in range(len(rows))) / len(rows)
        rows = torch.stack([row - mean for row in rows])
    found = torch.linalg.svdvals(rows)
    return torch.cat([found, found.new_zeros(len(rows) - len(found))])


def majorises(first: list[int], second: list[int]) -> bool:
    """Whether the `k` largest of `first` hold at least as much as those of `second`, for every `k`; equal totals."""
    if sum(first) != sum(second) or len(first) != len(second):
        return False
    one, other = sorted(first, reverse=True), sorted(second, reverse=True)
    return all(sum(one[:k]) >= sum(other[:k]) for k in range(len(one)))


def partitions(total: int, largest: int | None = None) -> list[list[int]]:
    """Every way to write `total` as a sum of falling whole numbers."""
    if total == 0:
        return [[]]
    top = min(total, largest or total)
    return [[first, *rest] for first in range(top, 0, -1) for rest in partitions(total - first, first)]
