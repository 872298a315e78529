"""Tools of the checks: estimators by name, worlds made for one question, all groups of rewards, drawn groups.

Every check reaches an estimator through `estimator`, so that the ledger judges what the library really computes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, Estimator
from scoregram.checks import lookup
from scoregram.theory.claims.grounds import EXACT as EXACT
from scoregram.theory.claims.grounds import ground, grounds
from scoregram.theory.lab.exact import GroundTruth, ground_truth
from scoregram.theory.lab.moments import UpdateMoments, across_prompts, multisets
from scoregram.theory.lab.moments import group_update_moments as group_moments
from scoregram.theory.lab.worlds import WORLDS, History, World, listing
from scoregram.theory.lab.worlds import SoftmaxPolicy as Policy
from scoregram.theory.lab.worlds import Transition as Outcome


def estimator(name: str) -> Estimator:
    """Row of the table of estimators."""
    return lookup(ESTIMATORS, name, kind="estimator")


def advantages(name: str, rewards: Tensor) -> Tensor:
    """Advantages of one group `(R,)` or of many `(P, R)`, by a group estimator that sees rewards alone."""
    return estimator(name).fn(rewards.reshape(-1, rewards.shape[-1])).reshape(rewards.shape)


def moments(truth: GroundTruth, name: str, *, prompt: int, group_size: int) -> UpdateMoments:
    """Exact moments of one prompt's update by a group estimator of the table."""
    row = estimator(name)
    return group_moments(truth, row.fn, prompt=prompt, group_size=group_size, needs=row.needs)


def batch_moments(truth: GroundTruth, name: str, *, group_size: int) -> UpdateMoments:
    """The same over prompts, one group a batch."""
    each = [moments(truth, name, prompt=prompt, group_size=group_size) for prompt in range(truth.value.numel())]
    return across_prompts(truth, each, prompts=1)


def lab_world(name: str, policy: str = "network") -> GroundTruth:
    """A world of the lab under a policy with fixed random parameters."""
    return ground(WORLDS[name], policy)


def lab_worlds(*names: str) -> Iterator[GroundTruth]:
    """The named worlds, or all of them, under a tabular and a network policy each."""
    return grounds(*(names or WORLDS))


@lru_cache
def coin(success: float) -> GroundTruth:
    """One decision, right with probability `p`, by a policy with a single logit: `ψ = r - p`."""

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        return (Outcome(1.0, float(action), ends=True),)

    rows = listing(World("coin", (1.0,), lambda history: 2, outcomes))

    def log_probs(parameters: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(torch.cat([-parameters, parameters]))[None]

    logit = math.log(success) - math.log1p(-success)
    return ground_truth(rows, Policy(torch.tensor([logit], dtype=torch.float64), log_probs))


@lru_cache
def filler() -> GroundTruth:
    """Two tokens, the first without any consequence, the second right or wrong, a logit for each.

    The policy ignores the first token when it chooses the second, so every advantage at the first token is zero.
    Parameter 0 belongs to the filler, parameter 1 to the token that decides.
    """

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        return (Outcome(1.0, float(action), ends=True),) if len(history) > 1 else (Outcome(1.0, 0.0),)

    rows = listing(World("filler", (1.0,), lambda history: 2, outcomes))
    is_filler = torch.tensor([len(history) == 1 for history in rows.histories])

    def log_probs(parameters: Tensor) -> Tensor:
        logits = torch.where(is_filler, parameters[0], parameters[1])
        return torch.nn.functional.logsigmoid(torch.stack([-logits, logits], dim=-1))

    return ground_truth(rows, Policy(torch.tensor([0.5, -0.5], dtype=torch.float64), log_probs))


@dataclass(frozen=True)
class RewardGroups:
    """Every group of rewards a prompt can give, with its probability."""

    rewards: Tensor
    """`(C, R)`."""
    probability: Tensor
    """`(C,)`, sums to one."""

    @property
    def mixed(self) -> Tensor:
        """`(C,)` bool: the rewards of the group differ."""
        return self.rewards.amax(dim=-1) > self.rewards.amin(dim=-1)

    def mean(self, values: Tensor) -> float:
        """Expectation of one number per group."""
        return float(self.probability @ values.double())


def reward_groups(truth: GroundTruth, prompt: int, group_size: int) -> RewardGroups:
    """All groups of `R` rewards of one prompt, up to their order."""
    rows = truth.listing.of_prompt(prompt)
    values, which = truth.listing.returns[rows].unique(return_inverse=True)
    of_value = torch.zeros_like(values).index_add(0, which, truth.probability[rows])
    groups = multisets(len(values), group_size)
    return RewardGroups(values[groups.members], groups.probability(of_value))


def binary_group(right: int, group_size: int) -> Tensor:
    """`k` rewards of 1, then `R - k` of 0."""
    return torch.tensor([1.0] * right + [0.0] * (group_size - right), dtype=torch.float64)


@dataclass(frozen=True)
class DrawnGroup:
    """Rollouts of one prompt, drawn from its policy."""

    rows: Tensor
    """Rows of the listing, `(R,)`."""
    rewards: Tensor
    scores: Tensor
    """`(R, D)`."""

    @property
    def gram(self) -> Tensor:
        """`K`, `(R, R)`."""
        return self.scores @ self.scores.mT


def drawn_groups(
    truth: GroundTruth, *, prompt: int, group_size: int, number: int, distinct: bool = False
) -> list[DrawnGroup]:
    """Mixed groups drawn from the policy with a fixed seed; without repeated rollouts if `distinct`."""
    rows, generator = truth.listing.of_prompt(prompt), torch.Generator().manual_seed(0)
    groups: list[DrawnGroup] = []
    while len(groups) < number:
        picked = torch.multinomial(truth.probability[rows], group_size, replacement=not distinct, generator=generator)
        returns = truth.listing.returns[rows[picked]]
        if float(returns.max()) > float(returns.min()):
            groups.append(DrawnGroup(rows[picked], returns, truth.scores[rows[picked]]))
    return groups


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest distance between the entries of two tensors."""
    return float((actual - expected).abs().max())
