"""Missing rewards and live groups: the one definition of each.

A reward that is missing is NaN; a rollout that has a reward is *judged*. A group is *live* if the rewards of its
judged rollouts differ by more than rounding; the standardised advantages of any other group are zero.
"""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from scoregram.checks import ROUNDING_STEPS, require_finite, require_group_size
from scoregram.types import PromptMask, Rewards


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Relative spread that rounding alone can cause: `ROUNDING_STEPS` machine epsilons of `dtype`."""
    return ROUNDING_STEPS * torch.finfo(dtype).eps


def judged_rollouts(rewards: Shaped[Tensor, "..."], *, name: str = "rewards", caller: str) -> Shaped[Tensor, "..."]:
    """Mask of the rollouts that have a reward: `False` where the reward is NaN.

    Raises:
        ScoregramError: If a reward is infinite.
    """
    judged = ~rewards.isnan()
    remedy = "Pass NaN where a reward is missing."
    require_finite(torch.where(judged, rewards.detach(), 0), name=name, caller=caller, remedy=remedy)
    return judged


def differ_beyond_rounding(
    values: Float[Tensor, "*batch members"], members: Bool[Tensor, "*others members"], *, rtol: float
) -> Shaped[Tensor, "..."]:
    """`max − min > rtol · max|v|` over the members of the last axis; `False` where fewer than two are members."""
    top = torch.where(members, values, -torch.inf).amax(dim=-1)
    low = torch.where(members, values, torch.inf).amin(dim=-1)
    size = torch.where(members, values.abs(), 0).amax(dim=-1)
    return top - low > rtol * size


def live_groups(rewards: Rewards, *, rtol: float | None = None, caller: str = "live_groups") -> PromptMask:
    """Mask of the groups whose judged rollouts have different rewards.

    `max − min > rtol · max|r|` over the rewards that are not NaN. A group with one judged rollout, or with none, is
    not live.

    Args:
        rewards: `(P, R)`, NaN where a reward is missing.
        rtol: Default: `rounding_tolerance` of the dtype of `rewards`. A relative spread of 1e-6 counts.
        caller: The function that an error message names.

    Raises:
        ScoregramError: If a reward is infinite, or the groups are empty.

    Example:
        >>> live_groups(torch.tensor([[1.0, 0.0], [0.1, 0.1], [1.0, torch.nan]]))
        tensor([ True, False, False])
    """
    require_group_size(rewards, at_least=1, caller=caller)
    judged = judged_rollouts(rewards, caller=caller)
    tolerance = rounding_tolerance(rewards.dtype) if rtol is None else rtol
    return differ_beyond_rounding(rewards.detach().double(), judged, rtol=tolerance)
