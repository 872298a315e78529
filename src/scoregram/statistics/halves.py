"""Signal and noise of any estimator from groups that were sampled once: disjoint parts of a group are independent.

An estimator's update from a group `S` of `r` rollouts is `ĝ_S = (1/r) Σ_{i∈S} A_i(S) ψ_i`. `ψ_i` is the score of
rollout `i`, and the advantages depend on the rollouts of `S` alone. Two disjoint parts `S` and `S'` of a larger group
are independent, so their updates are independent samples of one random variable `ĝ`. For every estimator therefore

    E⟨ĝ_S, ĝ_S'⟩ = |E ĝ|²        E|ĝ_S|² = |E ĝ|² + tr Cov ĝ

The products on the left-hand sides are bilinear forms of the group's Gram. For two estimators with updates `ĝ` and `ĥ`,
`E⟨ĝ_S, ĥ_S'⟩ = ⟨E ĝ, E ĥ⟩`. A group of `R` rollouts has two disjoint parts for every `r ≤ R/2`.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scoregram.checks import fail, require_finite
from scoregram.types import GroupGrams

MOST_SPLITS = 64
"""Most splits of a group that are averaged; if a group has more, this many are drawn at random."""


@lru_cache(maxsize=64)
def disjoint_parts(rollouts: int, size: int) -> Int[Tensor, "splits 2 size"]:
    """Pairs of disjoint parts of `size` out of `rollouts`: every pair once, or `MOST_SPLITS` drawn with a fixed seed.

    Raises:
        ScoregramError: If two parts do not fit.

    Example:
        >>> disjoint_parts(3, 1).tolist()
        [[[0], [1]], [[0], [2]], [[1], [2]]]
    """
    if size < 1 or 2 * size > rollouts:
        got = f"two parts of {size} from {rollouts} rollouts"
        fail("disjoint_parts", "two parts must fit into a group", got, "Choose at most half of the group.")
    found = []
    for first in combinations(range(rollouts), size):
        rest = [place for place in range(first[0] + 1, rollouts) if place not in first]
        found += [[list(first), list(second)] for second in combinations(rest, size)]
        if len(found) > MOST_SPLITS:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.stack([torch.randperm(rollouts, generator=generator) for _ in range(MOST_SPLITS)])
            return drawn[:, : 2 * size].unflatten(1, (2, size))
    return torch.tensor(found)


@dataclass(frozen=True)
class SplitProducts:
    """Inner products of the updates from disjoint parts of each group, averaged over the splits."""

    across: Float[Tensor, "estimators estimators prompts"]
    """Unbiased for `⟨E ĝ_a, E ĝ_b⟩`; averaged over which of the two parts estimator `a` sees, hence symmetric."""
    squared: Float[Tensor, "estimators prompts"]
    """Unbiased for `E|ĝ_a|²`."""

    @property
    def signal(self) -> Float[Tensor, "estimators prompts"]:
        """Unbiased for `|E ĝ_a|²`; negative by chance where the signal is small."""
        return self.across.diagonal().T

    @property
    def noise(self) -> Float[Tensor, "estimators prompts"]:
        """Unbiased for `tr Cov ĝ_a`."""
        return self.squared - self.signal


def split_products(
    grams: GroupGrams,
    advantages: Float[Tensor, "estimators prompts splits 2 size"],
    parts: Int[Tensor, "splits 2 size"],
) -> SplitProducts:
    """Products of the updates `ĝ = (1/r) Σ A_i ψ_i` of several estimators from disjoint parts of every group.

    Args:
        grams: `(P, R, R)`.
        advantages: `(E, P, K, 2, r)`: advantages of each estimator in both parts of each of `K` splits.
        parts: `(K, 2, r)`, from `disjoint_parts`.

    Raises:
        ScoregramError: If a Gram or an advantage is not finite.

    Example:
        Two rollouts, one in each part: the signal is the off-diagonal element of the Gram.

        >>> gram = torch.tensor([[[4.0, 1.0], [1.0, 9.0]]], dtype=torch.float64)
        >>> found = split_products(gram, torch.ones(1, 1, 1, 2, 1, dtype=torch.float64), disjoint_parts(2, 1))
        >>> found.signal.item(), found.squared.item(), found.noise.item()
        (1.0, 6.5, 5.5)
    """
    require_finite(grams, name="grams", caller="split_products")
    require_finite(advantages, name="advantages", caller="split_products")
    estimators, prompts, splits, _, size = advantages.shape
    spread = torch.zeros(estimators, prompts, splits, 2, grams.shape[-1], dtype=grams.dtype)
    spread.scatter_(-1, parts.expand(estimators, prompts, -1, -1, -1), advantages.to(grams.dtype) / size)
    times_gram = torch.einsum("epksi,pij->epksj", spread, grams)
    squared = (times_gram * spread).sum(-1).mean(dim=(2, 3))
    across = torch.einsum("epki,fpki->efp", times_gram[..., 0, :], spread[..., 1, :]) / splits
    return SplitProducts((across + across.transpose(0, 1)) / 2, squared)
