"""Moments of updates whose credit differs from turn to turn: `ĝ = (1/R) Σ_i Σ_h A_ih ∇ log π(a_ih | s_ih)`.

There are three kinds of credit. Credit that depends only on its own rollout needs no group: rollouts are independent,
so the variance of one is divided by `R`. Credit that depends on the whole group is enumerated over multisets of types,
as in `moments`: rollouts are of one type if every reward and every input of every turn are equal. Credit estimated from
fresh rollouts (Monte-Carlo prefix values) adds independent noise whose variance is known exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import fail, listed, require_finite, require_same_shape
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.moments import GROUPS_LIMIT, UpdateMoments, in_blocks, multisets


@dataclass(frozen=True)
class Credit:
    """A rule for the credit of each turn from its own rollout."""

    fn: Callable[[GroundTruth], Tensor]
    """Returns `(M, H)`, one credit per listed rollout and turn; entries without a turn are ignored."""
    needs_values: bool
    """Whether it uses exact values, which no trainer has."""


def total_return(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """The return, at every turn: REINFORCE."""
    return truth.listing.returns[:, None].expand_as(truth.listing.reward)


def return_minus_start_value(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """`G - v(s_0)` at every turn: a group baseline estimates `v(s_0)`."""
    return total_return(truth) - truth.value[truth.listing.prompt][:, None]


def reward_to_go(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """`Σ_{h' ≥ h} r_h'`: only the rewards that the action can still change."""
    return truth.reward_to_go


def reward_to_go_minus_value(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """`Σ_{h' ≥ h} r_h' - v(s_h)`: an exact baseline for every state."""
    return truth.reward_to_go - truth.turn_values


def temporal_difference(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """`r_h + v(s_{h+1}) - v(s_h)` with exact values; its mean given `(s_h, a_h)` is `A(s_h, a_h)`."""
    after = torch.nn.functional.pad(truth.turn_values[:, 1:], (0, 1))
    return truth.listing.reward + after - truth.turn_values


def exact_advantage(truth: GroundTruth) -> Float[Tensor, "listed turns"]:
    """`A(s_h, a_h)` itself: the only noise left is that of the sampled states and actions."""
    return truth.turn_advantages


CREDITS = MappingProxyType(
    {
        "total_return": Credit(total_return, needs_values=False),
        "return_minus_start_value": Credit(return_minus_start_value, needs_values=True),
        "reward_to_go": Credit(reward_to_go, needs_values=False),
        "reward_to_go_minus_value": Credit(reward_to_go_minus_value, needs_values=True),
        "temporal_difference": Credit(temporal_difference, needs_values=True),
        "exact_advantage": Credit(exact_advantage, needs_values=True),
    }
)
"""Credit that depends only on its own rollout; every row gives an unbiased update."""


def credit_moments(
    truth: GroundTruth, credit: Float[Tensor, "listed turns"], *, prompt: int, group_size: int
) -> UpdateMoments:
    """Moments of the mean of `R` independent `Σ_h credit_h ∇ log π(a_h | s_h)`, for one prompt."""
    require_same_shape(credit, truth.listing.reward, name="credit", like_name="the rewards", caller="credit_moments")
    _positive(group_size, "credit_moments")
    rows = truth.listing.of_prompt(prompt)
    pulls = _pulls(truth, credit)[rows]  # (M', D)
    weight = truth.probability[rows]
    expected = weight @ pulls
    variance = float(weight @ (pulls - expected).square().sum(dim=-1)) / group_size
    return UpdateMoments(expected, truth.gradient[prompt], variance)


def prefix_value_moments(truth: GroundTruth, *, prompt: int, group_size: int, rollouts_per_state: int) -> UpdateMoments:
    """Moments with `A_h = r_h + V̂(s_{h+1}) - V̂(s_h)`, each `V̂` the mean return of `K` fresh rollouts from its state.

    The estimates are unbiased and independent of the rollout's future, so the update is unbiased. It is the update with
    exact temporal differences plus the noise `Σ_h (V̂ - v)(s_h) (ψ_{h-1} - ψ_h)`, hence the extra variance
    `E Σ_h Var(G | s_h) / K · |ψ_{h-1} - ψ_h|²` per rollout, with `ψ_h` the score of turn `h` and `ψ_{-1} = 0`. No
    estimate is shared between rollouts of the group.

    Reference:
        VinePPO. Kazemnejad et al. 2024, arXiv:2410.01679.
    """
    _positive(rollouts_per_state, "prefix_value_moments")
    exact = credit_moments(truth, temporal_difference(truth), prompt=prompt, group_size=group_size)
    rows, scores = truth.listing.of_prompt(prompt), truth.turn_scores
    before = torch.nn.functional.pad(scores[:, :-1], (0, 0, 1, 0))  # (M, H, D): ψ_{h-1}
    leverage = (before - scores).square().sum(dim=-1)  # (M, H)
    noise = torch.where(truth.listing.mask, truth.state_variance[truth.listing.state] * leverage, 0.0).sum(dim=-1)
    added = float(truth.probability[rows] @ noise[rows]) / (rollouts_per_state * group_size)
    return UpdateMoments(exact.expected, exact.target, exact.variance + added)


STEP_INPUTS: MappingProxyType[str, Callable[[GroundTruth], Tensor]] = MappingProxyType(
    {
        "mask": lambda truth: truth.listing.mask,
        "values": lambda truth: truth.turn_values,
        "prefix_values": lambda truth: truth.turn_values,
        "anchors": lambda truth: truth.listing.state,
        "step_ends": lambda truth: truth.listing.mask,
        "segment_starts": lambda truth: truth.listing.mask & (torch.arange(truth.listing.mask.shape[1]) % 2 == 0),
        "outcome_rewards": lambda truth: truth.listing.returns,
        "path_energies": lambda truth: truth.turn_scores.cumsum(dim=1).square().sum(dim=-1) * truth.listing.mask,
        "token_features": lambda truth: truth.turn_scores,
    }
)
"""Inputs of an estimator for turns or tokens besides the rewards. Values and prefix values are exact, every decision
is one step, a segment is two steps, the outcome of a rollout is its return, and energies and gradients are exact."""


def turn_moments(
    truth: GroundTruth,
    advantage: Callable[..., Tensor],
    *,
    prompt: int,
    group_size: int,
    needs: tuple[str, ...] = (),
    couples_prompts: bool = False,
    groups_limit: int = GROUPS_LIMIT,
) -> UpdateMoments:
    """Exact moments for an estimator that gives every turn its own advantage and compares the whole group.

    Args:
        truth: The world and the policy.
        advantage: Maps `(P, R, H)` turn rewards, and the needs as keyword arguments, to `(P, R, H)` advantages. The
            order of the rollouts in a group must not matter.
        prompt: Row of `truth.gradient` to compare with.
        group_size: `R`.
        needs: Names in `STEP_INPUTS`.
        couples_prompts: Whether `advantage` mixes prompts. If so it gets one group at a time.
        groups_limit: Largest number of groups to enumerate.

    Raises:
        ScoregramError: If there are too many groups to enumerate, a need is unknown, or advantages are not finite.
    """
    for name in needs:
        if name not in STEP_INPUTS:
            known = listed(STEP_INPUTS)
            fail("turn_moments", f"needs must be among {known}", repr(name), "The lab supplies no others.")
    rows = truth.listing.of_prompt(prompt)
    type_of, first = _types(truth, rows, needs)
    groups = multisets(len(first), group_size, limit=groups_limit)
    shown = first[groups.members]  # (C, R): for each member, a rollout of its type
    inputs = {name: STEP_INPUTS[name](truth)[shown] for name in needs}
    credit = in_blocks(advantage, truth.listing.reward[shown], inputs, one_by_one=couples_prompts)  # (C, R, H)
    credit = torch.where(truth.listing.mask[shown], credit, 0.0)
    require_finite(credit, name="advantages", caller="turn_moments")
    centre, spread, type_probability = _turn_scores_by_type(truth, rows, type_of)
    given_types = _summed(credit, groups.members, centre) / group_size  # (C, D)
    noise = torch.einsum("crh,crhk,crk->c", credit, spread[groups.members], credit) / group_size**2
    probability = groups.probability(type_probability)
    expected = probability @ given_types
    between = (given_types - expected).square().sum(dim=-1)
    return UpdateMoments(expected, truth.gradient[prompt], float(probability @ (noise + between)))


def _types(truth: GroundTruth, rows: Tensor, needs: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Type of every rollout of a prompt, and the first rollout of every type."""
    inputs = [truth.listing.reward, truth.listing.mask, *(STEP_INPUTS[name](truth) for name in needs)]
    seen = torch.cat([values[rows].double().reshape(len(rows), -1) for values in inputs], dim=1)
    kinds, type_of = seen.unique(dim=0, return_inverse=True)
    first = torch.stack([(type_of == kind).nonzero()[0, 0] for kind in range(len(kinds))])
    return type_of, rows[first]


def _turn_scores_by_type(truth: GroundTruth, rows: Tensor, type_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean `(K, H, D)` of the turn scores of each type, their covariance `(K, H, H)`, the types' probability `(K,)`."""
    types, (_, turns, parameters) = int(type_of.max()) + 1, truth.turn_scores.shape
    probability = torch.zeros(types, dtype=torch.float64).index_add(0, type_of, truth.probability[rows])
    within = (truth.probability[rows] / probability[type_of])[:, None, None]  # given the type
    scores = truth.turn_scores[rows]
    centre = torch.zeros(types, turns, parameters, dtype=torch.float64).index_add(0, type_of, within * scores)
    apart = scores - centre[type_of]
    products = torch.einsum("mhd,mkd->mhk", apart, apart)
    spread = torch.zeros(types, turns, turns, dtype=torch.float64).index_add(0, type_of, within * products)
    return centre, spread, probability


def _summed(credit: Tensor, members: Tensor, centre: Tensor) -> Tensor:
    """`Σ_i Σ_h A_ih μ_h(τ_i)` of every group, `(C, D)`; credit is first summed by type to save memory."""
    types, turns, _ = centre.shape
    where = members[..., None].expand_as(credit)
    by_type = torch.zeros(len(members), types, turns, dtype=torch.float64).scatter_add(1, where, credit)
    return by_type.flatten(1) @ centre.flatten(0, 1)


def _pulls(truth: GroundTruth, credit: Tensor) -> Tensor:
    credit = torch.where(truth.listing.mask, credit, 0.0)
    require_finite(credit, name="credit", caller="credit_moments")
    return torch.einsum("mh,mhd->md", credit, truth.turn_scores)


def _positive(number: int, caller: str) -> None:
    if number < 1:
        fail(caller, "needs at least one rollout", number, "Pass a positive number.")
