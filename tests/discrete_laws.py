"""Small discrete laws of (score, reward): every group can be listed, so every expectation is a finite sum."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import factorial, prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Law:
    """A prompt with a handful of possible rollouts."""

    chances: Tensor  # (outcomes,)
    scores: Tensor  # (outcomes, D)
    rewards: Tensor  # (outcomes,)

    def mean(self, values: Tensor) -> Tensor:
        """`E[values]`, `values` one per outcome."""
        return torch.einsum("o,o...->...", self.chances, values)

    @property
    def value(self) -> Tensor:
        """`V = E r`."""
        return self.mean(self.rewards)

    @property
    def variance(self) -> Tensor:
        """`σ² = Var r`."""
        return self.mean((self.rewards - self.value) ** 2)

    @property
    def gradient(self) -> Tensor:
        """`Cov(ψ, r)`, which is `E[ψ r]` where `E ψ = 0`."""
        return self.mean(self.scores * (self.rewards - self.value)[:, None])

    @property
    def fisher_trace(self) -> Tensor:
        """`tr F = E|ψ|²`."""
        return self.mean((self.scores**2).sum(dim=1))

    @property
    def oracle_trace(self) -> Tensor:
        """`tr Cov(ψ (r - V))`."""
        errors = self.scores * (self.rewards - self.value)[:, None] - self.gradient
        return self.mean((errors**2).sum(dim=1))

    def groups(self, size: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Every group of `size` rollouts: its chance, scores `(R, D)` and rewards `(R,)`."""
        for picks in product(range(len(self.chances)), repeat=size):
            index = torch.tensor(picks)
            yield float(self.chances[index].prod()), self.scores[index], self.rewards[index]

    def unordered_groups(self, size: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """As `groups`, one order of each: for what is known not to depend on the order."""
        for picks in combinations_with_replacement(range(len(self.chances)), size):
            index = torch.tensor(picks)
            orders = factorial(size) // prod(factorial(picks.count(outcome)) for outcome in set(picks))
            yield orders * float(self.chances[index].prod()), self.scores[index], self.rewards[index]


def law(seed: int, *, outcomes: int = 3, parameters: int = 2, on_policy: bool = True) -> Law:
    """A generic law; `on_policy` removes the mean score."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(outcomes, generator=generator, dtype=torch.float64) + 0.2
    chances = chances / chances.sum()
    scores = torch.randn(outcomes, parameters, generator=generator, dtype=torch.float64)
    if on_policy:
        scores = scores - chances @ scores
    return Law(chances, scores, torch.randn(outcomes, generator=generator, dtype=torch.float64) + 1)
