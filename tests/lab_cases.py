"""Worlds with a policy each, and slow references for the lab that walk the world itself: no listing, no types."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from scoregram.theory.lab.exact import GroundTruth, ground_truth
from scoregram.theory.lab.worlds import (
    WORLDS,
    History,
    Listing,
    SoftmaxPolicy,
    World,
    listing,
    network_policy,
    tabular_policy,
)

CASES = [(world, kind) for world in WORLDS for kind in ("tabular", "network")]


@dataclass(frozen=True)
class Case:
    """A world and a policy in it."""

    world: World
    listing: Listing
    policy: SoftmaxPolicy
    truth: GroundTruth


def close(actual: object, expected: object, *, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@lru_cache
def case(world: str, kind: str, seed: int = 0) -> Case:
    rows = listing(WORLDS[world])
    make = {"tabular": tabular_policy, "network": network_policy}[kind]
    policy = make(rows, generator=torch.Generator().manual_seed(seed))
    return Case(WORLDS[world], rows, policy, ground_truth(rows, policy))


@dataclass(frozen=True)
class Walked:
    """One rollout met by walking."""

    log_prob: Tensor
    """Of its actions; differentiable."""
    chance: float
    rewards: list[float]
    path: list[tuple[History, int]]


def walks(case: Case, prompt: int, theta: Tensor) -> list[Walked]:
    """Every rollout of a prompt, by recursion on the world."""
    row_of = {history: row for row, history in enumerate(case.listing.histories)}
    log_probs = case.policy.log_probs(theta)

    def grow(history: History, so_far: Walked) -> Iterator[Walked]:
        for action in range(case.world.actions(history)):
            for outcome in case.world.outcomes(history, action):
                longer = Walked(
                    so_far.log_prob + log_probs[row_of[history], action],
                    so_far.chance * outcome.probability,
                    [*so_far.rewards, outcome.reward],
                    [*so_far.path, (history, action)],
                )
                if outcome.ends:
                    yield longer
                else:
                    yield from grow((*history, action, outcome.observation), longer)

    return list(grow((prompt,), Walked(torch.zeros((), dtype=torch.float64), 1.0, [], [])))


def walked_objective(case: Case, theta: Tensor) -> Tensor:
    """J by walking; differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, weight in enumerate(case.world.prompt_weights):
        for walk in walks(case, prompt, theta):
            total = total + weight * walk.chance * walk.log_prob.exp() * sum(walk.rewards)
    return total


@dataclass(frozen=True)
class Drawn:
    """A rollout as an estimator and its update see it."""

    probability: float
    rewards: list[float]
    score: Tensor
    turn_scores: list[Tensor]


@lru_cache
def drawn(case_key: tuple[str, str], prompt: int) -> list[Drawn]:
    """Every rollout with its probability and its scores, one backward pass per turn."""
    at = case(*case_key)
    theta = at.policy.parameters.clone().requires_grad_()
    log_probs = at.policy.log_probs(theta)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}
    rows = []
    for walk in walks(at, prompt, theta.detach()):
        turns = [torch.autograd.grad(log_probs[row_of[h], a], theta, retain_graph=True)[0] for h, a in walk.path]
        probability = walk.chance * float(walk.log_prob.exp())
        rows.append(Drawn(probability, walk.rewards, torch.stack(turns).sum(dim=0), turns))
    return rows


def ordered_groups(rollouts: list[Drawn], group_size: int) -> Iterator[tuple[float, tuple[Drawn, ...]]]:
    """All `M^R` ordered groups with their probability."""
    for group in product(rollouts, repeat=group_size):
        probability = 1.0
        for rollout in group:
            probability *= rollout.probability
        yield probability, group


def averaged(updates: list[tuple[float, Tensor]], target: Tensor) -> tuple[Tensor, float, float]:
    """Mean vector, variance and mean squared error of weighted updates, by their definition."""
    mean = sum((p * u for p, u in updates), torch.zeros_like(target))
    variance = sum(p * float((u - mean).square().sum()) for p, u in updates)
    return mean, variance, sum(p * float((u - target).square().sum()) for p, u in updates)
