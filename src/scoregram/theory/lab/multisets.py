"""All groups of a given size, up to the order of their rollouts."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations_with_replacement

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from scoregram.checks import fail

GROUPS_LIMIT = 200_000
"""Largest number of multisets that will be enumerated unless told otherwise."""


@dataclass(frozen=True)
class Multisets:
    """The `C = (K+R-1 choose R)` ways to draw `R` times from `K` types when the order does not matter."""

    members: Int[Tensor, "multisets rollouts"]
    """Type of every member, ascending."""
    counts: Int[Tensor, "multisets types"]
    """How often each type is drawn."""
    orders: Float[Tensor, " multisets"]
    """`R! / Π n_τ!`, the number of ordered groups that are this multiset."""

    def probability(self, of_type: Float[Tensor, " types"]) -> Float[Tensor, " multisets"]:
        """Multinomial probability of each multiset when types are drawn independently; sums to one."""
        return self.orders * of_type.pow(self.counts).prod(dim=-1)


@lru_cache(maxsize=16)
def multisets(types: int, group_size: int, *, limit: int = GROUPS_LIMIT) -> Multisets:
    """Every multiset of `group_size` out of `types`.

    Raises:
        ScoregramError: If there are more than `limit`, or one of the two numbers is not positive.

    Example:
        >>> multisets(2, 2).counts.tolist(), multisets(2, 2).orders.tolist()
        ([[2, 0], [1, 1], [0, 2]], [1.0, 2.0, 1.0])
    """
    if min(types, group_size) < 1:
        fail("multisets", "types and group size must be positive", (types, group_size), "Pass at least one of each.")
    number = math.comb(types + group_size - 1, group_size)
    if number > limit:
        got = f"{number} groups of {group_size} rollouts of {types} types"
        fail("multisets", f"at most {limit} groups are enumerated", got, "Use a smaller group or world.")
    flat = chain.from_iterable(combinations_with_replacement(range(types), group_size))
    members = torch.from_numpy(np.fromiter(flat, dtype=np.int64, count=number * group_size).reshape(number, group_size))
    counts = torch.zeros(number, types, dtype=torch.int64).scatter_add(1, members, torch.ones_like(members))
    # Each factorial is rounded once, so the multinomial is right to a few ulp; logarithms would lose three digits.
    factorial = torch.tensor([float(math.factorial(n)) for n in range(group_size + 1)], dtype=torch.float64)
    orders = torch.full((number,), factorial[-1].item(), dtype=torch.float64)
    for column in counts.T:
        orders = orders / factorial[column]
    return Multisets(members, counts, orders)
