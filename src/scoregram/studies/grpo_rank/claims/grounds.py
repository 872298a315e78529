"""What the checks of claims share: worlds and policies, all groups of rewards, drawn groups, estimators by name.

Every check looks an estimator up through `estimator`, so that the ledger judges what the library computes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, Estimator
from scoregram.checks import lookup
from scoregram.studies.grpo_rank import PAPER_ID
from scoregram.studies.ledger import Claim, Finding
from scoregram.theory import (
    WORLDS,
    GroundTruth,
    History,
    SoftmaxPolicy,
    Transition,
    UpdateMoments,
    World,
    across_prompts,
    ground_truth,
    group_update_moments,
    listing,
    multisets,
    network_policy,
    tabular_policy,
)

EXACT = 1e-12
"""Numbers closer than this count as equal: sums over an enumeration in float64 are off by about 1e-15."""

MULTI_TURN = ("step_rewards", "user_turns", "stopping")
SINGLE_TURN = ("output_only", "output_only_binary")


def claim(
    name: str, place: str, statement: str, check: Callable[[], Finding], paper: str = PAPER_ID, restates: str = ""
) -> Claim:
    """A claim of this paper, or of another one that it builds on."""
    return Claim(name, place, statement, check, paper, restates)


@lru_cache
def ground(world: World, policy: str) -> GroundTruth:
    """Exact values of a random policy, always the same, in a world; the policy `uniform` gives all actions the same probability."""
    rows, generator = listing(world), torch.Generator().manual_seed(0)
    if policy == "network":
        return ground_truth(rows, network_policy(rows, generator=generator))
    return ground_truth(rows, tabular_policy(rows, generator=generator, scale=float(policy == "tabular")))


ONE_DECISION = World(
    "one decision", (1.0,), lambda history: 8, lambda history, action: (Transition(1.0, float(action == 0), ends=True),)
)
"""One answer out of eight, of which one is right: a single turn of a single step."""

INDEPENDENT_TURNS = World(
    "independent turns",
    (1.0,),
    lambda history: 2,
    lambda history, action: (Transition(1.0, float(action), ends=len(history) // 2 == 7),),
)
"""Eight turns, each with its own reward: `1` for action 1, whatever came before."""

REVERSAL = World(
    "reversal",
    (1.0,),
    lambda history: 2,
    lambda history, action: (
        (Transition(0.95, 0.0, 0), Transition(0.05, 0.0, 1))
        if len(history) == 1
        else (Transition(1.0, 1.0 if history[2] else -1.0, ends=True),)
    ),
)
"""Two turns: the second pays `-1` or, with a chance of 5 %, `1`; a draw at the first turn decides which."""


def estimator(name: str) -> Estimator:
    """Row of the library's table of estimators."""
    return lookup(ESTIMATORS, name, kind="estimator")


def advantages(name: str, rewards: Tensor) -> Tensor:
    """Advantages of one group `(R,)` or of many `(P, R)`, by a group estimator that needs only rewards."""
    return estimator(name).fn(rewards.reshape(-1, rewards.shape[-1])).reshape(rewards.shape)


def moments(truth: GroundTruth, name: str, *, prompt: int, group_size: int) -> UpdateMoments:
    """Exact moments of one prompt's update under a group estimator of the table."""
    row = estimator(name)
    return group_update_moments(truth, row.fn, prompt=prompt, group_size=group_size, needs=row.needs)


def batch_moments(truth: GroundTruth, name: str, *, group_size: int) -> UpdateMoments:
    """Exact moments of the update of a batch of one group, over prompts."""
    each = [moments(truth, name, prompt=prompt, group_size=group_size) for prompt in prompts_of(truth)]
    return across_prompts(truth, each, prompts=1)


def lab_world(name: str, policy: str = "network") -> GroundTruth:
    """A world of the lab under a policy with fixed random parameters."""
    return ground(WORLDS[name], policy)


def lab_worlds(*names: str) -> Iterator[GroundTruth]:
    """The named worlds of the lab, or all, each under a tabular policy and under a network that shares its parameters."""
    for name in names or WORLDS:
        for policy in ("tabular", "network"):
            yield ground(WORLDS[name], policy)


def prompts_of(truth: GroundTruth) -> range:
    """Every prompt of a world."""
    return range(truth.value.numel())


@lru_cache
def coin(success: float) -> GroundTruth:
    """One decision, right with probability `p`, by a policy with a single logit: `ψ = r - p`."""

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        return (Transition(1.0, float(action), ends=True),)

    rows = listing(World("coin", (1.0,), lambda history: 2, outcomes))

    def log_probs(parameters: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(torch.cat([-parameters, parameters]))[None]

    logit = math.log(success) - math.log1p(-success)
    return ground_truth(rows, SoftmaxPolicy(torch.tensor([logit], dtype=torch.float64), log_probs))


@lru_cache
def filler() -> GroundTruth:
    """Two tokens with one logit each: the first has no consequence, the second is right or wrong.

    The policy ignores the first token when it chooses the second, so every advantage at the first token is zero.
    Parameter 0 is the logit of the filler, parameter 1 that of the deciding token.
    """

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        return (Transition(1.0, float(action), ends=True),) if len(history) > 1 else (Transition(1.0, 0.0),)

    rows = listing(World("filler", (1.0,), lambda history: 2, outcomes))
    is_filler = torch.tensor([len(history) == 1 for history in rows.histories])

    def log_probs(parameters: Tensor) -> Tensor:
        logits = torch.where(is_filler, parameters[0], parameters[1])
        return torch.nn.functional.logsigmoid(torch.stack([-logits, logits], dim=-1))

    return ground_truth(rows, SoftmaxPolicy(torch.tensor([0.5, -0.5], dtype=torch.float64), log_probs))


@dataclass(frozen=True)
class RewardGroups:
    """Every possible group of rewards of a prompt, with its probability."""

    rewards: Tensor
    """`(C, R)`."""
    probability: Tensor
    """`(C,)`, sums to one."""

    @property
    def mixed(self) -> Tensor:
        """`(C,)` bool: whether the rewards of the group differ."""
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
    """Mixed groups drawn from the policy with a fixed seed; `distinct` draws no rollout twice."""
    rows, generator = truth.listing.of_prompt(prompt), torch.Generator().manual_seed(0)
    groups: list[DrawnGroup] = []
    while len(groups) < number:
        picked = torch.multinomial(truth.probability[rows], group_size, replacement=not distinct, generator=generator)
        returns = truth.listing.returns[rows[picked]]
        if float(returns.max()) > float(returns.min()):
            groups.append(DrawnGroup(rows[picked], returns, truth.scores[rows[picked]]))
    return groups


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference between the entries of two tensors."""
    return float((actual - expected).abs().max())
