"""Who owns which row: from the tensors a model computes to one block of rows per rollout.

A model sees `N` sequences of `T` tokens, one rollout each. Its tensors carry the rollouts in their first axis, as `N`
sequences or as `N · T` tokens; a mixture of experts picks tokens out of the latter, and then the owner of every row
has to be carried along.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`N` rollouts of `T` tokens."""

    rollouts: int
    tokens: int

    def tells(self, value: Tensor) -> bool:
        """Whether the first axis of a tensor is that of the rollouts, or of all their tokens."""
        return value.ndim > 0 and value.shape[0] in (self.rollouts, self.rollouts * self.tokens)

    def owners(self, leading: int) -> Tensor | None:
        """Rollout of every entry of a first axis of size `leading`; None if nobody can tell."""
        if leading == self.rollouts:
            return torch.arange(self.rollouts)
        if leading == self.rollouts * self.tokens:
            return torch.arange(self.rollouts).repeat_interleave(self.tokens)
        return None

    def blocks(self, value: Tensor, owner: Tensor | None = None) -> Tensor | None:
        """`value` `(first, …, f)` as `(N, S, f)`, the rows of each rollout in its block.

        `owner` names the rollout of each entry of the first axis; without it the first axis must be `N` or `N · T`,
        and None is returned if it is neither.
        """
        if owner is None:
            if not self.tells(value):
                return None
            return value.reshape(self.rollouts, -1, value.shape[-1])
        rows = value.reshape(-1, value.shape[-1])
        owner = owner.to(rows.device).repeat_interleave(len(rows) // max(len(owner), 1))
        return gathered(rows, owner, self.rollouts)


def gathered(rows: Tensor, owner: Tensor, rollouts: int) -> Tensor:
    """Rows `(n, f)` sorted into blocks `(N, S, f)` by their owner in `0 … N-1`, zeros behind the shorter ones."""
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=rollouts)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=rows.device) - starts[owner[order]]
    blocks = rows.new_zeros(rollouts, max(int(counts.max()), 1), rows.shape[1])
    blocks[owner[order], place] = rows[order]
    return blocks
