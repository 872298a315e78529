"""The group advantage as other trainers write it, with their `eps`, their `ddof` and their degenerate cases.

"The GRPO advantage" is not one number: the same rewards give different advantages in different trainers. These
functions reproduce each one's arithmetic, except that a group whose rewards are equal gives exactly 0, never a
rounding residue divided by a tiny deviation. Shapes, missing rewards and dtypes as in `scoregram.advantages.group`.
"""

import torch
from torch import Tensor

from scoregram.advantages.comparisons import admitted, by_group, differences, flat, others, standard_scores
from scoregram.advantages.group import mean_centered, standardized
from scoregram.types import Advantages, Observed, Rewards


def trl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """TRL's GRPO advantage: `(r − mean) / (std + 1e-4)`, sample deviation; unscored rollouts get 0.

    The `1e-4` is in units of reward: rewards spread over less than about 1e-3 are visibly damped.
    """
    return standardized(rewards, observed=observed, eps=1e-4, ddof=1)


def verl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """Verl's GRPO advantage: `(r − mean) / (std + 1e-6)`, sample deviation.

    A group of one takes mean 0 and deviation 1, so its advantage is the reward itself over `1 + 1e-6`: not zero.
    """
    values, members = admitted(rewards, observed, at_least=1, caller="verl_standardized")
    scores = standard_scores(values, by_group(members), members, eps=1e-6, ddof=1, dtype=rewards.dtype)
    alone = members & (members.sum(dim=-1, keepdim=True) == 1)
    return torch.where(alone, values / (1 + 1e-6), scores).to(rewards.dtype)


def openrlhf_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """OpenRLHF's `group_norm` advantage: `(r − mean) / (std + 1e-9)`, sample deviation (torch's default)."""
    return standardized(rewards, observed=observed, eps=1e-9, ddof=1)


def prime_rl_centered(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """prime-rl's default advantage: the reward minus the group's mean, without a deviation."""
    return mean_centered(rewards, observed=observed)


def nemo_rl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """NeMo-RL's default advantage: mean *and* deviation are those of the other rollouts.

    `A_i = (r_i − m_{−i}) / (s_{−i} + 1e-6)` where `s_{−i} > 0`, and `r_i − m_{−i}` where the others are constant
    (always, in a group of two). Both statistics are blind to rollout `i`, so the expected update of one prompt is
    `E[1/s]` times its gradient: the direction is exact, the length is not. Rows do not sum to zero, and the one
    deviant of an otherwise constant group keeps its raw difference while the others are divided.

    Here the others count as constant when their spread is within rounding, so no residue is ever divided by.

    Raises:
        ScoregramError: If a group has one observed rollout.
    """
    values, members = admitted(rewards, observed, at_least=2, caller="nemo_rl_standardized")
    pairs = others(members)
    advantages = differences(values, pairs)
    constant = flat(values, pairs, dtype=rewards.dtype)
    std = torch.where(constant, 1.0, _deviation_of_others(values, pairs, advantages))
    return torch.where(constant, advantages, advantages / (std + 1e-6)).to(rewards.dtype)


def _deviation_of_others(values: Tensor, pairs: Tensor, advantages: Tensor) -> Tensor:
    """Sample deviation, for each rollout, of the others it is paired with."""
    level = (values - advantages).unsqueeze(-1)  # (P, R, 1): mean of the others
    squares = (pairs * (values.unsqueeze(-2) - level).square()).sum(dim=-1)
    return (squares / (pairs.sum(dim=-1) - 1).clamp_min(1)).sqrt()
