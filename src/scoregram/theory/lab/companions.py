"""Five methods related to GRPO: for each, a small world and the quantity that defines the method.

1. Classes as actions (GRPO-RM, arXiv:2511.15256): the group is the whole set of outputs; nothing is sampled.
2. An environment that changes with the deployed policy (performative policy gradient, arXiv:2512.20576).
3. Policies for growing horizons with an entropy bonus (Matryoshka policy gradient, arXiv:2303.12785).
4. A utility of the occupancy (general utilities, arXiv:2410.04108), with pass@k as the useful case.
5. The best policy of a class that lacks the optimal one (agnostic policy learning, arXiv:2507.04406).

The definitions follow the abstracts of the papers; a docstring says where a definition is ours. `scoregram claims`
checks the statements of these papers with them.

The trees of `worlds` list every rollout, so they must end. Methods 2 to 5 are stated for discounted worlds that need
not end: a `TabularWorld`. With few states, every expectation over its rollouts is the solution of a small linear
system, so it is exact too. A policy is a table `(S, A)` whose rows sum to one. Every function is differentiable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import fail
from scoregram.theory.lab.worlds import History, Listing, SoftmaxPolicy, Transition, World

PolicyTable = Float[Tensor, "states actions"]
PerState = Float[Tensor, " states"]
PerStateAction = Float[Tensor, "states actions"]


# Discounted worlds with few states, which may go on forever: values and occupancies by linear solves.


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


Deployment = Callable[[Tensor], TabularWorld]
"""Policy → the world it meets once it is deployed."""
Utility = Callable[[Tensor], Tensor]
"""Occupancy `(S, A)` → utility, a differentiable scalar."""


# 1. Classes as actions.

EMBEDDINGS = ((1.0, 0.0), (0.5, 1.0), (-1.0, 0.5), (0.0, -1.0))
"""Four images, each embedded in two dimensions. Image `i` belongs to class `i mod 3`."""


def classes() -> World:
    """Every prompt is an image, every action one of three classes; the right class pays `1`."""

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        return (Transition(1.0, float(action == history[0] % 3), ends=True),)

    weight = 1 / len(EMBEDDINGS)
    return World("classes", (weight,) * len(EMBEDDINGS), lambda history: 3, outcomes)


def embedding_policy(listing: Listing, *, generator: torch.Generator) -> SoftmaxPolicy:
    """A linear head on the embedding of the image: `logits = W x`, with `W` drawn from `N(0, 1)`."""
    x = torch.tensor([EMBEDDINGS[history[0]] for history in listing.histories], dtype=torch.float64)  # (S, 2)
    head = torch.randn(3 * x.shape[1], dtype=torch.float64, generator=generator)
    return SoftmaxPolicy(head, lambda parameters: (x @ parameters.reshape(3, -1).mT).log_softmax(dim=-1))


def output_set_update(
    scores: Float[Tensor, "listed parameters"],
    rewards: Float[Tensor, " listed"],
    weights: Float[Tensor, " listed"],
) -> Float[Tensor, " parameters"]:
    """`Σ_y w_y (r_y - Σ_z w_z r_z) ψ_y`: the update of a prompt whose group is the whole output set. The form is ours.

    With `w = π` it is the exact gradient. With equal weights every output counts as one rollout.
    """
    return (weights * (rewards - weights @ rewards)) @ scores


# 2. An environment that changes with the deployed policy.


def weary_user(policy: PolicyTable, *, weariness: float = 0.5) -> TabularWorld:
    """A user, neutral or pleased, who tires of what the policy does often. Two actions, `γ = 1/2`, no end.

    `P(pleased | s, a) = base(s, a) - weariness · π(a|s) / 2`, and an action pays `base(s, a) - weariness · π(a|s)`.
    Action 0 has the higher base in both states. With `weariness = 0` the world does not depend on the policy.
    """
    base = torch.tensor([[0.75, 0.5], [1.0, 0.5]], dtype=torch.float64)
    pleased = base - weariness * policy / 2  # (S, A)
    start = torch.tensor([0.5, 0.5], dtype=torch.float64)
    return TabularWorld(torch.stack([1 - pleased, pleased], dim=-1), base - weariness * policy, start, 0.5)


def performative_difference(deploy: Deployment, policy: PolicyTable, other: PolicyTable) -> float:
    """Right-hand side of the performative performance difference lemma, for `J(π in its world) - J(π' in its world)`.

    `Σ_{s,a} λ(s, a) [A'(s, a) + r(s, a) - r'(s, a) + γ (P - P')ᵀ v]`. `λ` is the occupancy of `π` in the world of `π'`,
    `A'` the advantage of `π'` in its own world, `v` the value of `π` in its own world.
    """
    world, before = deploy(policy), deploy(other)
    shift = world.transition - before.transition
    answer = world.reward - before.reward + world.discount * shift @ state_values(world, policy)
    return float((occupancy(before, policy) * (tabular_advantages(before, other) + answer)).sum())


@dataclass(frozen=True)
class PerformativeGradient:
    """The gradient of a deployed policy's objective, split into the parts of the policy and of the environment."""

    policy: PerStateAction
    """The environment is held fixed: the ordinary policy gradient."""
    answer: PerStateAction
    """The policy is held fixed and the environment changes: `E Σ_t γ^t [∇r + γ ∇Pᵀ v]`."""

    @property
    def total(self) -> PerStateAction:
        """`∇_θ J(π_θ in its own world)`."""
        return self.policy + self.answer


def performative_gradient(deploy: Deployment, logits: PerStateAction) -> PerformativeGradient:
    """Gradient of `J(π_θ in its own world)` with one logit per state and action, as the lemma gives it for `π' → π`."""
    theta = logits.detach().clone().requires_grad_()
    policy = theta.softmax(dim=-1)
    world = deploy(policy)
    fixed = deploy(policy.detach())
    visits, value = occupancy(fixed, policy.detach()), state_values(fixed, policy.detach())
    answer = (visits * (world.reward + world.discount * world.transition @ value)).sum()
    return PerformativeGradient(
        policy=logit_gradient(fixed, policy.detach()), answer=torch.autograd.grad(answer, theta)[0]
    )


# 3. Growing horizons with an entropy bonus.


def loop() -> TabularWorld:
    """Three states in a ring, no end, `γ = 3/4`: action 0 moves on three times in four, action 1 stays and is paid."""
    forward = torch.eye(3, dtype=torch.float64).roll(1, dims=1) * 0.75 + torch.eye(3, dtype=torch.float64) * 0.25
    transition = torch.stack([forward, torch.eye(3, dtype=torch.float64)], dim=1)  # (S, A, S)
    reward = torch.tensor([[0.0, 0.25], [0.0, 0.25], [0.0, 1.0]], dtype=torch.float64)
    return TabularWorld(transition, reward, torch.full((3,), 1 / 3, dtype=torch.float64), 0.75)


@dataclass(frozen=True)
class HorizonPolicies:
    """One policy for every number of remaining steps, `1 … n`, and the regularised values they earn together."""

    policies: Float[Tensor, "horizon states actions"]
    """Row `i` acts when `i + 1` steps remain."""
    values: Float[Tensor, "horizon states"]
    """`V_i(s)` with `i + 1` steps remaining: rewards minus `τ log(π/π̄)`."""


def regularised_values(
    world: TabularWorld, policies: Float[Tensor, "horizon states actions"], *, temperature: float
) -> HorizonPolicies:
    """Values of nested policies: act by `π_n` once, then by `π_{n-1}`, and so on. The reference `π̄` is uniform.

    `V_i(s) = Σ_a π_i(a|s) [Q_i(s, a) - τ log(π_i(a|s)/π̄)]` with `Q_i = r + γ P V_{i-1}` and `V_0 = 0`.
    """
    after, values = torch.zeros_like(world.start), []
    for policy in policies:
        bonus = temperature * (policy.log() + math.log(policy.shape[-1]))  # τ log(π/π̄)
        after = (policy * (_one_step(world, after) - bonus)).sum(dim=-1)
        values.append(after)
    return HorizonPolicies(policies, torch.stack(values))


def matryoshka_optimum(world: TabularWorld, horizon: int, *, temperature: float) -> HorizonPolicies:
    """The optimal nested policies: `π_i(a|s) = π̄ exp(Q_i(s, a)/τ) / Z`, from one step upwards.

    Raises:
        ScoregramError: If the horizon or the temperature is not positive.
    """
    if horizon < 1 or temperature <= 0:
        fail("matryoshka_optimum", "horizon and temperature must be positive", (horizon, temperature), "Raise them.")
    after, policies, values = torch.zeros_like(world.start), [], []
    for _ in range(horizon):
        scaled = _one_step(world, after) / temperature
        policies.append(scaled.softmax(dim=-1))
        after = temperature * (scaled.logsumexp(dim=-1) - math.log(scaled.shape[-1]))
        values.append(after)
    return HorizonPolicies(torch.stack(policies), torch.stack(values))


def matryoshka_gap(
    world: TabularWorld, policies: Float[Tensor, "horizon states actions"], *, temperature: float
) -> PerState:
    """`V*_n - V_n = τ E Σ_t γ^t KL(π_{n-t}(·|s_t) ‖ π*_{n-t}(·|s_t))` from every state, by the divergences alone.

    It is zero for the optimal policies only, so the optimum is unique.
    """
    best = matryoshka_optimum(world, len(policies), temperature=temperature).policies
    gap = torch.zeros_like(world.start)
    for policy, optimal in zip(policies, best, strict=True):
        divergence = (policy * (policy / optimal).log()).sum(dim=-1)
        onward = torch.einsum("sa,saz,z->s", policy, world.transition, gap)
        gap = temperature * divergence + world.discount * onward
    return gap


def _one_step(world: TabularWorld, after: Tensor) -> Tensor:
    """`r + γ P V`, `(S, A)`."""
    return world.reward + world.discount * world.transition @ after


# 4. A utility of the occupancy.


def prompts_with_answers(weights: Sequence[float], answers: int) -> TabularWorld:
    """One decision per prompt among `answers` answers, then the end; answer 0 is right and pays `1`."""
    start = torch.tensor(weights, dtype=torch.float64)
    reward = torch.zeros(len(start), answers, dtype=torch.float64)
    reward[:, 0] = 1.0
    transition = torch.zeros(len(start), answers, len(start), dtype=torch.float64)
    return TabularWorld(transition, reward, start, 1.0)


def pass_at_k_utility(world: TabularWorld, draws: int) -> Utility:
    """`Σ_x w_x [1 - (1 - p_x)^k]` as a function of the occupancy, `p_x = λ(x, right) / w_x`: concave for every `k`."""
    return lambda visits: world.start @ (1 - (1 - visits[:, 0] / world.start) ** draws)


def pass_every_utility(world: TabularWorld, draws: int) -> Utility:
    """`Σ_x w_x p_x^k`, all `k` draws right: convex from `k = 2` on, the case that concavity excludes."""
    return lambda visits: world.start @ (visits[:, 0] / world.start) ** draws


def utility_reward(utility: Utility, visits: PerStateAction) -> PerStateAction:
    """`∂F/∂λ(s, a)`, the reward whose ordinary policy gradient is that of the utility `F`."""
    at = visits.detach().clone().requires_grad_()
    return torch.autograd.grad(utility(at), at)[0]


def utility_gradient(world: TabularWorld, policy: PolicyTable, utility: Utility) -> PerStateAction:
    """`∂F(λ_π)/∂π(a|s)`: the direct policy gradient with `∂F/∂λ` in the place of the reward."""
    return direct_gradient(_paying(world, utility_reward(utility, occupancy(world, policy))), policy)


def stationarity(gradient: PerStateAction, policy: PolicyTable) -> float:
    """`max_π' ⟨gradient, π' - π⟩` over all policies: zero exactly where no first-order change improves."""
    return float((gradient.amax(dim=-1) - (gradient * policy).sum(dim=-1)).sum())


def _paying(world: TabularWorld, reward: Tensor) -> TabularWorld:
    return TabularWorld(world.transition, reward, world.start, world.discount)


# 5. The best policy of a class.


def two_steps(pays: tuple[tuple[float, float], tuple[float, float]]) -> TabularWorld:
    """Two decisions between two actions, `γ = 1/2`; `pays[a][b]` is the reward of `a` first and `b` second.

    State 0 is the first step, states 1 and 2 the second one after action 0 and 1.
    """
    transition = torch.zeros(3, 2, 3, dtype=torch.float64)
    transition[0, 0, 1] = transition[0, 1, 2] = 1.0
    reward = torch.tensor([(0.0, 0.0), *pays], dtype=torch.float64)
    return TabularWorld(transition, reward, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), 0.5)


ALTERNATION = two_steps(((0.0, 1.0), (0.0, 0.0)))
"""Pays `1` for action 0, then action 1."""
REPETITION = two_steps(((1.0, 0.0), (0.0, 2.0)))
"""Pays `1` for action 0 twice and `2` for action 1 twice."""


def blind_policy(first: float) -> PolicyTable:
    """The policies of the class: action 0 with the same probability in every state, because they see none of them.

    The class is convex. It contains no policy that does one thing first and another one second.
    """
    return torch.tensor([[first, 1 - first]] * 3, dtype=torch.float64)


def blind_slope(world: TabularWorld, first: float) -> float:
    """Derivative of `J` along the class: the direct gradient, summed over states."""
    by_action = direct_gradient(world, blind_policy(first)).sum(dim=0)
    return float(by_action[0] - by_action[1])


def blind_stationarity(world: TabularWorld, first: float) -> float:
    """`max_π' ⟨∇J, π' - π⟩` over the class alone; the condition of gradient dominance compares the gap with it."""
    slope = blind_slope(world, first)
    return max(slope * (1 - first), -slope * first)


def conservative_iteration(world: TabularWorld, first: float, *, rate: float, steps: int) -> float:
    """Conservative policy iteration inside the class: step `t` moves by `rate/(t+1)` to the best policy (Frank-Wolfe).

    Returns:
        The probability of action 0 after `steps` steps.
    """
    for step in range(steps):
        target = 1.0 if blind_slope(world, first) > 0 else 0.0
        first += rate / (step + 1) * (target - first)
    return first
