"""One advantage per turn: credit between the turns of a rollout.

Every function takes `turn_rewards` of shape `(P, R, H)` and a `mask`, `True` at the turns a rollout reached. Values
outside the mask are never read and get advantage exactly 0. `eps` is added to every deviation; `ddof` is 1 for the
sample deviation, 0 for the population's. Arithmetic is float64; the result has the dtype of `turn_rewards`.

**Stopping.** If the policy decides how many turns to take, the number of rollouts that reach turn `h` is random, and a
baseline from turn `h` can bias the update. A baseline from the *other* rollouts alone is unbiased, even if it averages
only those that reached the turn: it does not depend on rollout `i`. A mean that includes rollout `i` shrinks turn `h`
by `E[(n_h − 1)/n_h]`, most at the turns that few rollouts reach. Dropping the turns that no other rollout reached
shrinks them too. Each turn then has its own factor, and the direction of the update is wrong.
`turn_leave_one_out` is the unbiased form, `turn_mean_centered` the common one.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scoregram.advantages.comparisons import (
    all_pairs,
    discounted_sums,
    finite_estimator,
    group_labels,
    masked_steps,
    mean_differences,
    observed_rewards,
    other_pairs,
    require_spread_options,
    standard_scores,
    step_labels,
)
from scoregram.checks import require_in_range, require_same_shape
from scoregram.types import Rewards, TurnAdvantages, TurnMask, TurnRewards


@finite_estimator
def turn_mean_centered(turn_rewards: TurnRewards, *, mask: TurnMask) -> TurnAdvantages:
    """Reward-to-go minus its mean over the rollouts that reached the same turn, this one included.

    `A_ih = G_ih − (1/n_h) Σ_{j reached h} G_jh`, `G_ih = Σ_{k≥h} r_ik`. Sums to zero within each turn; 0 for a rollout
    alone at its turn. If the policy decides when to stop, the direction of the update is biased too (see the module).

    Raises:
        ScoregramError: If `R < 2`.
    """
    to_go = _to_go(turn_rewards, mask, caller="turn_mean_centered")
    return mean_differences(to_go.mT, all_pairs(mask.mT)).mT.to(turn_rewards.dtype)


@finite_estimator
def turn_leave_one_out(turn_rewards: TurnRewards, *, mask: TurnMask) -> TurnAdvantages:
    """Reward-to-go minus its mean over the *other* rollouts that reached the same turn.

    `A_ih = G_ih − mean_{j≠i, j reached h} G_jh`, and `A_ih = G_ih` where no other rollout reached the turn: a baseline
    of 0 keeps the update unbiased, while dropping the turn would not. Because of this fallback, rows need not sum to
    zero, and a constant added to all rewards changes the result.

    Raises:
        ScoregramError: If `R < 2`.
    """
    to_go = _to_go(turn_rewards, mask, caller="turn_leave_one_out")
    alone = mask & (mask.sum(dim=1, keepdim=True) == 1)
    return torch.where(alone, to_go, mean_differences(to_go.mT, other_pairs(mask.mT)).mT).to(turn_rewards.dtype)


@finite_estimator
def turn_and_outcome_standardized(
    turn_rewards: TurnRewards,
    *,
    mask: TurnMask,
    outcome_rewards: Rewards,
    lam: float | int = 1.0,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> TurnAdvantages:
    """Standardised reward of the turn plus `lam` times the standardised outcome of the rollout.

    `A_ih = z(r_ih) + λ z(o_i)`; `z(r_ih)` standardises over the rollouts that reached turn `h` (0 where constant or
    alone), `z(o_i)` over the group. There is no sum over later turns: a turn is credited with its own reward and with
    the outcome. With turn rewards at the first of two turns only, this is the paper's two-turn form at `λ = 1`.

    Args:
        turn_rewards: `(P, R, H)`.
        mask: `(P, R, H)` bool. A rollout that reached no turn is left out of the outcome's statistics too.
        outcome_rewards: `(P, R)`, not included in the turn rewards.
        lam: `λ`, weight of the outcome.
        eps: Added to both deviations.
        ddof: 1 for the sample deviation, 0 for the population's.

    Raises:
        ScoregramError: If a group has one rollout with turns.

    Reference:
        MT-GRPO. Zeng et al. 2025, arXiv:2505.11821.
    """
    caller = "turn_and_outcome_standardized"
    require_spread_options(eps, ddof, caller=caller)
    rewards = masked_steps(turn_rewards, mask, name="turn_rewards", caller=caller, at_least=2)
    require_same_shape(outcome_rewards, rewards[..., 0], name="outcome_rewards", like_name="the groups", caller=caller)
    turns = step_labels(mask)
    own = standard_scores(rewards, turns, mask, eps=eps, ddof=ddof, dtype=turn_rewards.dtype)
    end = _standardized_by_group(outcome_rewards, mask, eps=eps, ddof=ddof, caller=caller)
    return torch.where(mask, own + lam * end, 0.0).to(turn_rewards.dtype)


@finite_estimator
def episode_and_anchor_standardized(
    turn_rewards: TurnRewards,
    *,
    mask: TurnMask,
    anchors: Int[Tensor, "prompts rollouts turns"],
    weight: float | int = 1.0,
    gamma: float | int = 1.0,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> TurnAdvantages:
    """Standardised return of the rollout plus `weight` times its standardised reward-to-go among equal states.

    `A_ih = z(Σ_k r_ik) + w z(Σ_{k≥h} γ^{k−h} r_ik)`; the second `z` standardises over all turns, of any rollout of the
    prompt, with the same anchor id. A turn whose anchor occurs once gets 0 for that part, so the estimator is GRPO
    where no state repeats.

    Args:
        turn_rewards: `(P, R, H)`.
        mask: `(P, R, H)` bool.
        anchors: `(P, R, H)` integers; equal ids in one prompt mean the same observation. Ids of different prompts are
            not compared.
        weight: `w`, weight of the anchor part.
        gamma: Discount of the reward-to-go.
        eps: Added to both deviations.
        ddof: 1 for the sample deviation, 0 for the population's.

    Raises:
        ScoregramError: If a group has one rollout with turns.

    Reference:
        GiGPO. Feng et al. 2025, arXiv:2505.10978.
    """
    caller = "episode_and_anchor_standardized"
    require_spread_options(eps, ddof, caller=caller)
    require_in_range(gamma, low=0.0, high=1.0, name="gamma", caller=caller)
    rewards = masked_steps(turn_rewards, mask, name="turn_rewards", caller=caller, at_least=2)
    require_same_shape(anchors, mask, name="anchors", like_name="mask", caller=caller)
    returns = rewards.sum(dim=-1).to(turn_rewards.dtype)  # the dtype that decides what counts as rounding
    episode = _standardized_by_group(returns, mask, eps=eps, ddof=ddof, caller=caller)
    to_go = discounted_sums(rewards, mask, decay=gamma)
    states = _anchor_labels(anchors)
    among_equals = standard_scores(to_go, states, mask, eps=eps, ddof=ddof, dtype=turn_rewards.dtype)
    return torch.where(mask, episode + weight * among_equals, 0.0).to(turn_rewards.dtype)


@finite_estimator
def same_state_standardized(
    turn_rewards: TurnRewards, *, mask: TurnMask, eps: float | int = 0.0, ddof: int = 1
) -> TurnAdvantages:
    """Reward of a candidate turn, standardised over the candidates sampled from the same history.

    Here `R` counts the candidates of a turn, not rollouts: at each turn of one base rollout, `R` candidate turns are
    drawn from the same history. `A_ih = (r_ih − mean_h) / (std_h + eps)`. A turn with one candidate, or with equal
    rewards, gets 0.

    The formula of TL-GRPO is not public; this definition is ours. It credits a turn with its own reward and ignores
    its effect on later turns, so it follows the gradient of the return only if turns do not depend on each other.
    Pass the candidates' whole reward-to-go, if you have it, to remove that part of the bias.

    Raises:
        ScoregramError: If `R < 2`.

    Reference:
        After TL-GRPO, arXiv:2601.16480.
    """
    caller = "same_state_standardized"
    require_spread_options(eps, ddof, caller=caller)
    rewards = masked_steps(turn_rewards, mask, name="turn_rewards", caller=caller, at_least=2)
    turns = step_labels(mask)
    scores = standard_scores(rewards, turns, mask, eps=eps, ddof=ddof, dtype=turn_rewards.dtype)
    return scores.to(turn_rewards.dtype)


def _to_go(turn_rewards: Tensor, mask: Tensor, *, caller: str) -> Tensor:
    rewards = masked_steps(turn_rewards, mask, name="turn_rewards", caller=caller, at_least=2)
    return discounted_sums(rewards, mask, decay=1.0)


def _standardized_by_group(
    values: Tensor, mask: Tensor, *, eps: float | int, ddof: int, caller: str
) -> Float[Tensor, "prompts rollouts 1"]:
    rewards, members = observed_rewards(values, mask.any(dim=-1), at_least=2, caller=caller)
    scores = standard_scores(rewards, group_labels(members), members, eps=eps, ddof=ddof, dtype=values.dtype)
    return scores.unsqueeze(-1)


def _anchor_labels(anchors: Tensor) -> Int[Tensor, "prompts rollouts turns"]:
    """Anchor ids, renumbered so that equal ids of different prompts differ."""
    names, ids = anchors.unique(return_inverse=True)
    return group_labels(anchors.bool()) * len(names) + ids
