"""Exact values, gradients and variances of a policy in a world: sums over all rollouts, without sampling."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import require_finite
from scoregram.theory.lab.worlds import Listing, SoftmaxPolicy


@dataclass(frozen=True)
class GroundTruth:
    """Everything about one policy in one world, in float64. `M` listed rollouts, `S` states, `P` prompts.

    Expectations with a prompt axis are conditional on the prompt; those without are over prompts as well.
    """

    listing: Listing
    probability: Float[Tensor, " listed"]
    """Probability of each rollout given its prompt; sums to one for every prompt."""
    log_probs: Float[Tensor, "states actions"]
    turn_scores: Float[Tensor, "listed turns parameters"]
    """`∇ log π(a_h | s_h)`; zero where there is no turn."""
    scores: Float[Tensor, "listed parameters"]
    """`ψ = Σ_h ∇ log π(a_h | s_h)`."""
    reach: Float[Tensor, " states"]
    """Probability of reaching each state, given its prompt."""
    state_value: Float[Tensor, " states"]
    """`v(s) = E[Σ_{h' ≥ h} r_h' | s_h = s]`."""
    state_variance: Float[Tensor, " states"]
    """`Var(Σ_{h' ≥ h} r_h' | s_h = s)`."""
    action_value: Float[Tensor, "states actions"]
    """`q(s, a)`; `nan` for actions that do not exist."""
    advantage: Float[Tensor, "states actions"]
    """`A(s, a) = q(s, a) - v(s)`; `nan` for actions that do not exist."""
    value: Float[Tensor, " prompts"]
    """`V = E[G]`, the objective of each prompt."""
    reward_variance: Float[Tensor, " prompts"]
    """`σ² = Var(G)`."""
    gradient: Float[Tensor, "prompts parameters"]
    """`g = ∇V = E[ψ G]`."""
    fisher: Float[Tensor, "prompts parameters parameters"]
    """`F = E[ψψᵀ]`."""
    optimal_baseline: Float[Tensor, " prompts"]
    """`b* = E[|ψ|² G] / E|ψ|²`, the constant baseline of least variance; `nan` where the score is always zero."""
    oracle_covariance: Float[Tensor, "prompts parameters parameters"]
    """`Σ = Cov(ψ (G - V))`."""

    @property
    def score_energies(self) -> Float[Tensor, " listed"]:
        """`|ψ|²` of every rollout."""
        return self.scores.square().sum(dim=-1)

    @property
    def reward_to_go(self) -> Float[Tensor, "listed turns"]:
        """`Σ_{h' ≥ h} r_h'` along every rollout; zero after its end."""
        return _reward_to_go(self.listing)

    @property
    def past_rewards(self) -> Float[Tensor, "listed turns"]:
        """`Σ_{h' < h} r_h'` along every rollout; the return after its end."""
        return self.listing.returns[:, None] - self.reward_to_go

    @property
    def turn_values(self) -> Float[Tensor, "listed turns"]:
        """`v(s_h)` along every rollout; zero after its end."""
        return torch.where(self.listing.mask, self.state_value[self.listing.state], 0.0)

    @property
    def turn_advantages(self) -> Float[Tensor, "listed turns"]:
        """`A(s_h, a_h)` along every rollout; zero after its end."""
        taken = self.advantage[self.listing.state, self.listing.action]
        return torch.where(self.listing.mask, taken, 0.0)

    @property
    def fisher_trace(self) -> Float[Tensor, " prompts"]:
        """`tr F = E|ψ|²`."""
        return self.fisher.diagonal(dim1=-2, dim2=-1).sum(dim=-1)

    @property
    def objective(self) -> float:
        """`J`, the expected return over prompts and rollouts."""
        return float(self.listing.prompt_weights @ self.value)

    @property
    def objective_gradient(self) -> Float[Tensor, " parameters"]:
        """`∇J`, the mean of the prompts' gradients."""
        return self.listing.prompt_weights @ self.gradient

    @property
    def c1(self) -> float:
        """`E |g(X) - ∇J|²`, the variance of the gradient between prompts."""
        apart = (self.gradient - self.objective_gradient).square().sum(dim=-1)  # (P,)
        return float(self.listing.prompt_weights @ apart)

    @property
    def c2(self) -> float:
        """`E tr Σ(X)`, the variance of one rollout's gradient with the exact value as baseline."""
        return float(self.listing.prompt_weights @ self.oracle_covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1))

    @property
    def c3(self) -> float:
        """`E[σ² tr F + |g|²]`, the noise that a leave-one-out baseline adds."""
        added = self.reward_variance * self.fisher_trace + self.gradient.square().sum(dim=-1)
        return float(self.listing.prompt_weights @ added)


def ground_truth(listing: Listing, policy: SoftmaxPolicy) -> GroundTruth:
    """Every exact quantity of `policy` on the listed world.

    `p(rollout) = chance · Π_h π(a_h | s_h)`. Expectations are sums over all rollouts, scores come from the Jacobian of
    the log-probabilities, and the value of a state is the mean over the rollouts through it.

    Raises:
        ScoregramError: If the policy gives a listed action no probability, or a parameter is not finite.
    """
    theta = require_finite(policy.parameters.double(), name="the parameters", caller="ground_truth")
    log_probs = policy.log_probs(theta)
    taken = torch.where(listing.mask, log_probs[listing.state, listing.action], 0.0)  # (M, H)
    require_finite(taken, name="log-probabilities", caller="ground_truth", remedy="Use logits that are less extreme.")
    probability = listing.chance * taken.sum(dim=-1).exp()
    turn_scores = _turn_scores(listing, policy, theta)
    returns = listing.returns
    per_prompt = _per_prompt(listing, probability, turn_scores.sum(dim=1), returns)
    return GroundTruth(
        listing=listing,
        probability=probability,
        log_probs=log_probs.detach(),
        turn_scores=turn_scores,
        scores=turn_scores.sum(dim=1),
        **_per_state(listing, probability),
        **per_prompt,
    )


def _turn_scores(listing: Listing, policy: SoftmaxPolicy, theta: Tensor) -> Tensor:
    # One backward pass per row: `torch.func` would be faster here, but importing it takes seconds.
    jacobian = torch.autograd.functional.jacobian(policy.log_probs, theta)  # (S, A, D)
    assert isinstance(jacobian, Tensor)
    taken = jacobian[listing.state, listing.action]  # (M, H, D)
    return torch.where(listing.mask[..., None], taken, 0.0)


def _reward_to_go(listing: Listing) -> Tensor:
    return listing.reward.flip(-1).cumsum(dim=-1).flip(-1)


def _per_state(listing: Listing, probability: Tensor) -> dict[str, Tensor]:
    states, actions = listing.action_mask.shape
    cell = (listing.state * actions + listing.action)[listing.mask]  # one entry per turn that exists
    weight = probability[:, None].expand_as(listing.reward)[listing.mask]
    to_go = _reward_to_go(listing)[listing.mask]

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(states * actions, dtype=torch.float64).index_add(0, cell, values).reshape(states, actions)

    visits, total = summed(weight), summed(weight * to_go)
    reach = visits.sum(dim=-1)
    value = total.sum(dim=-1) / reach
    deviation = to_go - value[cell // actions]
    action_value = torch.where(listing.action_mask, total / visits, torch.nan)
    return {
        "reach": reach,
        "state_value": value,
        "state_variance": summed(weight * deviation.square()).sum(dim=-1) / reach,
        "action_value": action_value,
        "advantage": action_value - value[:, None],
    }


def _per_prompt(listing: Listing, probability: Tensor, scores: Tensor, returns: Tensor) -> dict[str, Tensor]:
    given = torch.nn.functional.one_hot(listing.prompt, listing.prompt_weights.numel()).double().mT  # (P, M)
    weight = given * probability  # (P, M): rows sum to one
    value = weight @ returns
    centred = returns - value[listing.prompt]
    gradient = weight @ (scores * centred[:, None])  # E[ψ] = 0, so centring changes only the rounding
    energy = scores.square().sum(dim=-1)
    oracle = scores * centred[:, None] - gradient[listing.prompt]  # (M, D)
    return {
        "value": value,
        "reward_variance": weight @ centred.square(),
        "gradient": gradient,
        "fisher": torch.einsum("pm,md,me->pde", weight, scores, scores),
        "optimal_baseline": (weight @ (energy * returns)) / (weight @ energy),
        "oracle_covariance": torch.einsum("pm,md,me->pde", weight, oracle, oracle),
    }
