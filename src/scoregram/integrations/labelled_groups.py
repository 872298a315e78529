"""Advantages of our table for a flat batch whose rollouts carry the name of their group.

verl and SkyRL hand an estimator `(N, T)` rewards, a mask and a label for each rollout; groups may differ in size and
lie scattered. Here they are laid out as `(P, R)` with the empty places unobserved, which every group-level estimator
understands, and the result is laid back.
"""

from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, require_finite, require_same_shape

SUPPLIED = frozenset({"lengths", "outcomes"})
"""What such a batch can give to an estimator besides the rewards; outcomes are the rewards themselves."""

SERVED = tuple(name for name, row in ESTIMATORS.items() if row.level == "group" and set(row.needs) <= SUPPLIED)
"""Rows of `ESTIMATORS` that a labelled batch can serve."""


def token_advantages(
    name: str,
    token_rewards: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    labels: Any,
    *,
    left_out: int = 0,
) -> Float[Tensor, "batch tokens"]:
    """The advantage of its rollout on every token of the mask, 0 elsewhere.

    The reward of a rollout is the sum of its token rewards, its length the number of its masked tokens. A group that
    is smaller than the estimator needs has nothing to be compared with: its advantages are 0, and it takes no part in
    statistics over the batch.

    Args:
        name: One of `SERVED`.
        token_rewards: `(N, T)`.
        mask: `(N, T)`, not 0 for the tokens that the policy chose.
        labels: `N` names of groups, a list or an array; rollouts of a group need not be neighbours.
        left_out: So many rollouts at the end are padding: advantage 0, and no part in any statistic.

    Returns:
        `(N, T)`, dtype and device of `token_rewards`.

    Raises:
        ScoregramError: If shapes or the number of labels do not match, or a reward is not finite.

    Example:
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0], [1, 0]])
        >>> token_advantages("rloo", rewards, mask, ["a", "b", "a"])
        tensor([[ 1.,  1.],
                [ 0.,  0.],
                [-1., -0.]])
    """
    caller = f"scoregram-{name}"
    require_same_shape(mask, token_rewards, name="response_mask", like_name="token_level_rewards", caller=caller)
    rewards, lengths = token_rewards.sum(dim=-1), (mask != 0).sum(dim=-1)  # (N,)
    require_finite(rewards[: len(rewards) - left_out], name="rewards", caller=caller)  # NaN would count as missing
    places, shape = seats(labels, len(rewards), rewards.device, caller=caller)
    observed = torch.zeros(shape, dtype=torch.bool, device=rewards.device)
    observed.view(-1)[places[: len(rewards) - left_out]] = True
    observed &= observed.sum(dim=-1, keepdim=True) >= ESTIMATORS[name].min_group
    if not bool(observed.any()):
        return torch.zeros_like(token_rewards)
    grid = laid_out(rewards, places, shape)
    known = None if bool(observed.all()) else observed
    advantages = estimate(name, grid, lengths=laid_out(lengths, places, shape), outcomes=grid, observed=known)
    return advantages.view(-1)[places].unsqueeze(-1) * (mask != 0)


def seats(labels: Any, count: int, device: torch.device, *, caller: str) -> tuple[Tensor, tuple[int, int]]:
    """Place of each rollout in `(P, R)`, row by row, and that shape; `R` is the largest group."""
    if labels is None:
        fail(caller, "every rollout needs the name of its group", "none", "Let the trainer pass its uid.")
    names = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(names) != count:
        fail(caller, f"there must be {count} names of groups, one for each rollout", len(names), "Pass one for each.")
    rows: dict[Hashable, int] = {}
    sizes: list[int] = []
    where: list[tuple[int, int]] = []
    for name in names:
        row = rows.setdefault(name, len(rows))
        sizes += [0] * (row == len(sizes))
        where.append((row, sizes[row]))
        sizes[row] += 1
    widest = max(sizes, default=0)
    places = torch.tensor([row * widest + column for row, column in where], dtype=torch.long, device=device)
    return places, (len(sizes), widest)


def laid_out(values: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """`(P, R)` from `(N,)`, 0 where nobody sits."""
    grid = torch.zeros(shape, dtype=values.dtype, device=values.device)
    grid.view(-1)[places] = values.detach()
    return grid
