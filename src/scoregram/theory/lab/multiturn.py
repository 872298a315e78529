"""A rollout-level advantage used at every turn: the error of the advantage, and the bias of the gradient.

The advantage is `Â = Σ_h' r_h' - b` at every turn. Statement: if `E[b | rollout] = v(s_0)`, its mean given `(s_h, a_h)`
differs from `A(s_h, a_h)` by the *offset* `past rewards + v(s_h) - v(s_0)`, and yet the gradient is unbiased. Proof:
the offset is determined before `a_h` is drawn, so `E[offset · ∇ log π(a_h | s_h)] = 0`. The offset only adds variance.
Assumes rollouts sampled from the policy itself. Checked by enumeration, here.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.moments import (
    AdvantageFunction,
    UpdateMoments,
    across_prompts,
    expected_advantages,
    group_update_moments,
)
from scoregram.theory.lab.turns import CREDITS, credit_moments


def advantage_offset(truth: GroundTruth) -> Float[Tensor, " states"]:
    """`past rewards + v(s_h) - v(s_0)` of every state, the paper's eq. (23).

    Outcomes that do not end the rollout have different observations, so a history determines the rewards before it.
    """
    listing = truth.listing
    past = torch.zeros_like(truth.state_value)
    past[listing.state[listing.mask]] = truth.past_rewards[listing.mask]
    start = truth.value[torch.tensor([history[0] for history in listing.histories])]
    return past + truth.state_value - start


def conditional_error(truth: GroundTruth, credit: Float[Tensor, "listed turns"]) -> Float[Tensor, "states actions"]:
    """`E[Â_h | s_h, a_h] - A(s_h, a_h)` of the credit at every turn, by summing over the rollouts through `(s_h, a_h)`.

    Args:
        truth: The world and the policy.
        credit: `E[Â_h | rollout]` of every listed rollout and turn; `rollout_credit` gives it for a group estimator.

    Returns:
        `(S, A)`; `nan` for actions that do not exist.
    """
    listing = truth.listing
    states, actions = listing.action_mask.shape
    cell = (listing.state * actions + listing.action)[listing.mask]
    weight = truth.probability[:, None].expand_as(credit)[listing.mask]
    zeros = torch.zeros(states * actions, dtype=torch.float64)
    mean = zeros.index_add(0, cell, weight * credit[listing.mask]) / zeros.index_add(0, cell, weight)
    return mean.reshape(states, actions) - truth.advantage


def rollout_credit(
    truth: GroundTruth, advantage: AdvantageFunction, *, group_size: int
) -> Float[Tensor, "listed turns"]:
    """`E[A_i | rollout i]` at every turn, for a group estimator that reads rewards alone."""
    each = [
        expected_advantages(truth, advantage, prompt=prompt, group_size=group_size)
        for prompt in range(truth.value.numel())
    ]
    return torch.cat(each)[:, None].expand_as(truth.listing.reward)  # rollouts are listed prompt by prompt


def gradient_bias_by_turn(truth: GroundTruth, credit: Float[Tensor, "listed turns"]) -> Float[Tensor, " turns"]:
    """`|E[(Â_h - A(s_h, a_h)) ∇ log π(a_h | s_h)]|` of every turn, over prompts and rollouts."""
    weight = truth.listing.prompt_weights[truth.listing.prompt] * truth.probability
    excess = torch.where(truth.listing.mask, credit - truth.turn_advantages, 0.0)
    return torch.einsum("m,mh,mhd->hd", weight, excess, truth.turn_scores).norm(dim=-1)


@dataclass(frozen=True)
class OffsetAtTurn:
    """The offset of eq. (23) over the histories of one turn (counted from 0), over prompts and rollouts."""

    turn: int
    alive: float
    """Probability that the rollout has not ended before this turn."""
    mean: float
    """Mean over all rollouts; one that has ended stays at `G - v(s_0)`. Zero, because `past + v` is a martingale."""
    mean_alive: float
    """Mean over the rollouts still going. In general not zero if the number of turns is random or up to the policy."""
    sd: float
    """Over all rollouts; it never falls from turn to turn and never exceeds the standard deviation of the return."""
    sd_alive: float
    """Over the rollouts still going, about their own mean: the spread that enters the gradient of this turn."""
    largest: float
    """Largest `|offset|` of a state at this turn."""


def offsets_by_turn(truth: GroundTruth) -> tuple[OffsetAtTurn, ...]:
    """Mean and spread of the offset at every turn.

    The martingale argument: `E[r_h + v(s_{h+1}) | s_h] = v(s_h)`, so `past rewards + v(s_h)` keeps its mean `v(s_0)`
    and gains variance at every turn, up to `Var(G)` at the end.
    """
    listing = truth.listing
    weight = listing.prompt_weights[listing.prompt] * truth.probability  # (M,)
    offset = truth.past_rewards + truth.turn_values - truth.value[listing.prompt][:, None]  # (M, H)
    return tuple(_offset_at(turn, weight, offset[:, turn], listing.mask[:, turn]) for turn in range(offset.shape[1]))


def _offset_at(turn: int, weight: Tensor, offset: Tensor, going: Tensor) -> OffsetAtTurn:
    alive = float(weight[going].sum())
    mean = float(weight @ offset)
    mean_alive = float(weight[going] @ offset[going]) / alive
    return OffsetAtTurn(
        turn=turn,
        alive=alive,
        mean=mean,
        mean_alive=mean_alive,
        sd=math.sqrt(float(weight @ (offset - mean).square())),
        sd_alive=math.sqrt(float(weight[going] @ (offset[going] - mean_alive).square()) / alive),
        largest=float(offset[going].abs().max()),
    )


@dataclass(frozen=True)
class CreditCost:
    """One way to credit turns: the error of its advantages, the bias of its gradient, and its variance."""

    name: str
    largest_error: float
    """Largest `|E[Â_h | s_h, a_h] - A(s_h, a_h)|`."""
    formula_gap: float
    """Largest distance of that error from its formula, eq. (23) where it applies; zero up to rounding."""
    gradient_scale: float
    """`⟨E ĝ, ∇J⟩ / |∇J|²`: `1` for an unbiased update."""
    off_direction: float
    """`|E ĝ - scale · ∇J| / |∇J|`: `0` if only the scale is biased."""
    relative_bias: float
    """`|E ĝ - ∇J| / |∇J|`."""
    variance: float
    """Variance of the update from one prompt drawn by its weight, with a group of `R`."""


def credit_costs(truth: GroundTruth, *, group_size: int) -> tuple[CreditCost, ...]:
    """Group baselines compared with credit per turn, at one group size.

    The error is the offset of eq. (23) for the baseline `v(s_0)` and for the mean of the other rollouts, which is an
    independent unbiased estimate of it. The self-including mean shrinks the return too, so its error is
    `((R - 1) offset - A(s_h, a_h)) / R`. The error of reward-to-go is `v(s_h)`, and zero with the baseline `v(s_h)`.

    Raises:
        ScoregramError: If `group_size < 2`.
    """
    offset = advantage_offset(truth)[:, None]
    value = truth.state_value[:, None]
    shrunk = ((group_size - 1) * offset - truth.advantage) / group_size
    groups = {"others_mean": (leave_one_out, offset), "group_mean": (mean_centered, shrunk)}
    alone = {
        "return_minus_start_value": offset,
        "reward_to_go": value,
        "reward_to_go_minus_value": 0 * value,
        "exact_advantage": 0 * value,
    }
    rows, prompts = [], range(truth.value.numel())
    for name, (estimator, formula) in groups.items():
        credit = rollout_credit(truth, estimator, group_size=group_size)
        each = [group_update_moments(truth, estimator, prompt=p, group_size=group_size) for p in prompts]
        rows.append(_cost(name, conditional_error(truth, credit), formula, across_prompts(truth, each, prompts=1)))
    for name, formula in alone.items():
        credit = CREDITS[name].fn(truth)
        each = [credit_moments(truth, credit, prompt=p, group_size=group_size) for p in prompts]
        rows.append(_cost(name, conditional_error(truth, credit), formula, across_prompts(truth, each, prompts=1)))
    return tuple(rows)


def _cost(name: str, error: Tensor, formula: Tensor, moments: UpdateMoments) -> CreditCost:
    exists = ~error.isnan()
    scale = float(moments.expected @ moments.target / (moments.target @ moments.target))
    return CreditCost(
        name=name,
        largest_error=float(error[exists].abs().max()),
        formula_gap=float((error - formula)[exists].abs().max()),
        gradient_scale=scale,
        off_direction=float((moments.expected - scale * moments.target).norm() / moments.target.norm()),
        relative_bias=moments.relative_bias,
        variance=moments.variance,
    )
