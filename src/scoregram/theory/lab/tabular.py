"""Discounted worlds with few states that may go on forever: values and occupancies by linear solves.

The trees of `worlds` list every rollout, so they must end. The policy gradient theorem is stated for discounted worlds
that need not end. With few states, every expectation over their rollouts is the solution of a small linear system, so
it is exact too. A policy is a table `(S, A)` whose rows sum to one. Every function is differentiable.

The five worlds of `companions` are built on these functions.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import fail

PolicyTable = Float[Tensor, "states actions"]
PerState = Float[Tensor, " states"]
PerStateAction = Float[Tensor, "states actions"]


@dataclass(frozen=True)
class TabularWorld:
    """States, actions, transitions, rewards, a start and a discount."""

    transition: Float[Tensor, "states actions states"]
    """`P(s' | s, a)`. A row may sum to less than one; the rest is the probability that the rollout ends."""
    reward: PerStateAction
    """Expected reward of an action in a state."""
    start: PerState
    """Probability of each first state; sums to one."""
    discount: float
    """`γ`. It may be 1 only where every rollout ends."""

    def __post_init__(self) -> None:
        chances = self.transition.detach()
        least, most = float(chances.min()), float(chances.sum(dim=-1).max())
        if not (least >= 0 and most <= 1 + 1e-12):
            got = f"entries from {least:g} and rows that sum to {most:g}"
            fail("TabularWorld", "rows of the transition must be probabilities", got, "Normalise them.")
        if abs(float(self.start.sum()) - 1) > 1e-12 or float(self.start.min()) < 0:
            fail("TabularWorld", "the start must be a distribution", self.start.tolist(), "Normalise it.")
        if not 0 <= self.discount <= 1:
            fail("TabularWorld", "the discount must lie in [0, 1]", self.discount, "Choose a value inside the range.")


def state_values(world: TabularWorld, policy: PolicyTable) -> PerState:
    """`v(s) = E[Σ_t γ^t r_t | s_0 = s]`, the solution of `v = r_π + γ P_π v`."""
    rewards = (policy * world.reward).sum(dim=-1)  # (S,): r_π
    return torch.linalg.solve(_without_successors(world, policy), rewards)


def action_values(world: TabularWorld, policy: PolicyTable) -> PerStateAction:
    """`q(s, a) = r(s, a) + γ Σ_s' P(s' | s, a) v(s')`."""
    return world.reward + world.discount * world.transition @ state_values(world, policy)


def tabular_advantages(world: TabularWorld, policy: PolicyTable) -> PerStateAction:
    """`A(s, a) = q(s, a) - v(s)`; its mean under the policy is zero in every state."""
    return action_values(world, policy) - state_values(world, policy)[:, None]


def tabular_objective(world: TabularWorld, policy: PolicyTable) -> Float[Tensor, ""]:
    """`J = E[Σ_t γ^t r_t]` from the start."""
    return world.start @ state_values(world, policy)


def occupancy(world: TabularWorld, policy: PolicyTable) -> PerStateAction:
    """`λ(s, a) = Σ_t γ^t P(s_t = s, a_t = a)`, the discounted number of visits.

    `J = Σ λ r`. Papers often multiply it by `1 - γ`, so that it sums to one where no rollout ends.
    """
    visits = torch.linalg.solve(_without_successors(world, policy).mT, world.start)  # (S,): d = start + γ P_πᵀ d
    return visits[:, None] * policy


def direct_gradient(world: TabularWorld, policy: PolicyTable) -> PerStateAction:
    """`∂J/∂π(a|s) = d(s) q(s, a)`, the policy gradient where the parameters are the probabilities themselves."""
    return occupancy(world, policy).sum(dim=-1, keepdim=True) * action_values(world, policy)


def logit_gradient(world: TabularWorld, policy: PolicyTable) -> PerStateAction:
    """`∂J/∂θ(s, a) = λ(s, a) A(s, a)` for one logit per state and action: eq. (4) of arXiv:2606.29238.

    `λ` contains the `γ^t` of the equation.
    """
    return occupancy(world, policy) * tabular_advantages(world, policy)


def _without_successors(world: TabularWorld, policy: Tensor) -> Tensor:
    """`I - γ P_π`, `(S, S)`."""
    step = torch.einsum("sa,saz->sz", policy, world.transition)
    return torch.eye(len(policy), dtype=policy.dtype) - world.discount * step
