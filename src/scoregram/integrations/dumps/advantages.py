"""Rewards and advantages of a dumped group."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, listed
from scoregram.integrations.dumps.config import PAPER
from scoregram.integrations.dumps.tokens import Tokenised
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards

SUPPLIED = frozenset({"lengths", "outcomes", "score_energies"})
"""What a measurement can give to an estimator besides the rewards."""


def require_estimator(name: str) -> None:
    """Raise before any work if no dump can serve this estimator."""
    rows = ESTIMATORS.items()
    able = {key for key, row in rows if row.level == "group" and set(row.needs) <= SUPPLIED and not row.couples_prompts}
    if name not in {"auto", "dump"} | able:
        remedy = "Others need more than one group."
        fail("measure --estimator", f"must be auto, dump or one of {listed(able)}", repr(name), remedy)


def group_rewards(rollouts: Sequence[Tokenised], columns: Sequence[str]) -> GroupRewards:
    """`(R,)` float64; `nan` for a rollout without a reward.

    Args:
        rollouts: Of one group.
        columns: Reward functions to sum up instead of what the dump calls the reward.

    Raises:
        ScoregramError: If no rollout of the group was given a reward by one of the functions.
    """
    dumped = [made.rollout for made in rollouts]
    for column in columns:
        if not any(column in rollout.rewards for rollout in dumped):
            names = listed({name for rollout in dumped for name in rollout.rewards}) or "none at all"
            fail(f"measure {dumped[0].where}", f"there must be a reward called {column}", names, "Check the spelling.")
    if columns:
        values = [sum(rollout.rewards.get(column, math.nan) for column in columns) for rollout in dumped]
    else:
        values = [rollout.reward for rollout in dumped]
    rewards = torch.tensor(values, dtype=torch.float64)
    return torch.where(rewards.isfinite(), rewards, torch.nan)


def group_advantages(
    rollouts: Sequence[Tokenised], rewards: GroupRewards, gram: GramMatrix, estimator: str
) -> GroupAdvantages:
    """`(R,)` float64, 0 for a rollout without one; all 0 where too few rewards are known to compare.

    An advantage that differs between the tokens of a rollout stands here as its mean over the chosen ones.

    Args:
        rollouts: Of one group.
        rewards: `(R,)`, `nan` where unknown.
        gram: `(R, R)`, for estimators that weigh rollouts by their score.
        estimator: `auto`, `dump`, or a group-level row of `ESTIMATORS`.
    """
    dumped = [dumped_advantage(made) for made in rollouts]
    if estimator == "dump" or (estimator == "auto" and not any(math.isnan(value) for value in dumped)):
        return torch.tensor(dumped, dtype=torch.float64).nan_to_num(nan=0.0)
    name = PAPER if estimator == "auto" else estimator
    observed = rewards.isfinite()
    if int(observed.sum()) < ESTIMATORS[name].min_group:
        return torch.zeros_like(rewards)
    inputs: dict[str, Tensor] = {
        "lengths": torch.tensor([[int(made.mask.sum()) for made in rollouts]]),
        "outcomes": rewards.nan_to_num(nan=0.0)[None],
        "score_energies": gram.diagonal().clamp(min=0)[None],
    }
    known = None if bool(observed.all()) else observed[None]
    return estimate(name, rewards.nan_to_num(nan=0.0)[None], observed=known, **inputs)[0]


def dumped_advantage(made: Tokenised) -> float:
    """The advantage that the dump tells for a rollout, the mean over its chosen tokens; `nan` if it tells none."""
    rollout = made.rollout
    if rollout.advantage is not None:
        return rollout.advantage
    if rollout.advantages is None:
        return math.nan
    chosen = rollout.advantages[made.mask[made.prompt_length :]]
    return float(chosen.double().mean()) if len(chosen) else math.nan
