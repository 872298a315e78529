"""Advantages and filters that work on a whole batch: whitening over the batch, keeping only live groups.

Shapes, missing rewards and dtypes as in `scoregram.advantages.group`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.advantages.comparisons import (
    all_pairs,
    finite_estimator,
    floating_rewards,
    group_labels,
    mean_differences,
    nonnegative_weights,
    observed_rewards,
    require_reward_table,
    require_spread_options,
    standard_scores,
)
from scoregram.checks import fail, require_same_shape
from scoregram.groups import live_groups
from scoregram.types import Advantages, Observed, PerRollout, Rewards


@finite_estimator
def batch_whitened(
    rewards: Rewards,
    *,
    lengths: PerRollout,
    observed: Observed | None = None,
    batches: Int[Tensor, " prompts"] | None = None,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> Advantages:
    """Reward minus the batch mean, divided by the batch's standard deviation; both are taken over tokens.

    `A_i = (r_i − m) / (s + eps)` with `m = Σ ℓ_j r_j / Σ ℓ_j` and `s² = Σ ℓ_j (r_j − m)² / (Σ ℓ_j − ddof)` over all
    rollouts of all prompts. This whitens the reward repeated on every token, so a long rollout counts more; it is the
    paper's token form with `γ = 1` and the reward at the last token. A batch whose rewards are all equal gives exactly
    0; a constant group inside a varied batch does not. A rollout without tokens does not count and gets 0. `batches`
    holds a number for each prompt: prompts with the same number are one batch. Without it, all prompts are.

    Raises:
        ScoregramError: If fewer than two observed rollouts of the batch have tokens.

    Reference:
        REINFORCE++. Hu et al. 2025, arXiv:2501.03262.
    """
    caller = "batch_whitened"
    require_spread_options(eps, ddof, caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=1, caller=caller)
    counts = _token_counts(lengths, members, caller=caller)
    labels = _batch_labels(members, batches)
    return _whitened(values, values, counts, labels, eps=eps, ddof=ddof, dtype=rewards.dtype)


@finite_estimator
def centered_batch_whitened(
    rewards: Rewards,
    *,
    lengths: PerRollout,
    observed: Observed | None = None,
    batches: Int[Tensor, " prompts"] | None = None,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> Advantages:
    """Reward minus its group's mean, then whitened over the batch by token.

    `batch_whitened` of `mean_centered`. If lengths differ, the batch mean of the centred rewards is not zero, and a
    constant group inside a varied batch gets that small common offset instead of 0. `batches` as in `batch_whitened`.

    Raises:
        ScoregramError: If a group has one observed rollout, or fewer than two observed rollouts have tokens.

    Reference:
        REINFORCE++-baseline. Hu et al. 2025, arXiv:2501.03262.
    """
    caller = "centered_batch_whitened"
    require_spread_options(eps, ddof, caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    counts = _token_counts(lengths, members, caller=caller)
    centered = mean_differences(values, all_pairs(members))
    labels = _batch_labels(members, batches)
    return _whitened(centered, values, counts, labels, eps=eps, ddof=ddof, dtype=rewards.dtype)


def mixed_groups(rewards: Rewards, *, observed: Observed | None = None) -> Bool[Tensor, " prompts"]:
    """Mask of the live groups, whose rewards differ by more than rounding: the groups that DAPO keeps.

    `max − min > rtol · max|r|` over the rewards that are not missing (`scoregram.groups.live_groups`). A group in
    which one rollout or none has a reward is not mixed. For right-or-wrong rewards: `0 < #right < R`.

    Args:
        rewards: `(P, R)`, NaN where a reward is missing.
        observed: `(P, R)` bool. `False` has the same meaning as a reward of NaN.

    Reference:
        DAPO, dynamic sampling. Yu et al. 2025, arXiv:2503.14476.

    Example:
        >>> mixed_groups(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([ True, False])
    """
    rewards = floating_rewards(rewards, caller="mixed_groups")
    require_reward_table(rewards, caller="mixed_groups")
    if observed is not None:
        require_same_shape(observed, rewards, name="observed", like_name="rewards", caller="mixed_groups")
        rewards = torch.where(observed.bool(), rewards, torch.nan)
    return live_groups(rewards, caller="mixed_groups")


@finite_estimator
def mixed_groups_standardized(
    rewards: Rewards, *, outcomes: Rewards, observed: Observed | None = None, eps: float | int = 0.0, ddof: int = 1
) -> Advantages:
    """Standardised reward in the groups whose outcomes are mixed, 0 in all others.

    The selection uses `outcomes` (right or wrong); the advantage uses `rewards`, which may be shaped, for example by
    `overlong_penalty`. An all-wrong group gets 0 even if its shaped rewards differ. DAPO also refills the batch with
    other prompts until it holds `P` mixed groups, which is left to the trainer. Refilling reweights prompts by
    `1 / P(mixed)` and does not change the direction within a prompt.

    Reference:
        DAPO. Yu et al. 2025, arXiv:2503.14476.
    """
    caller = "mixed_groups_standardized"
    require_spread_options(eps, ddof, caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    kept = mixed_groups(outcomes, observed=members).unsqueeze(-1)  # (P, 1)
    scores = standard_scores(values, group_labels(members), members, eps=eps, ddof=ddof, dtype=rewards.dtype)
    return torch.where(kept, scores, 0.0).to(rewards.dtype)


def overlong_penalty(lengths: PerRollout, *, limit: int, margin: int) -> Float[Tensor, "prompts rollouts"]:
    """Penalty for a rollout close to the length limit, to be added to its reward.

    `0` up to `limit − margin` tokens, then a linear fall to `−1` at `limit`, and `−1` beyond.

    Returns:
        `(P, R)` in float32, or in the dtype of `lengths` where that is floating point.

    Reference:
        DAPO, soft overlong punishment. Yu et al. 2025, arXiv:2503.14476.

    Example:
        >>> overlong_penalty(torch.tensor([[80, 90, 100, 130]]), limit=100, margin=20)
        tensor([[ 0.0000, -0.5000, -1.0000, -1.0000]])
    """
    if not 0 < margin <= limit:
        got = f"margin {margin} and limit {limit}"
        remedy = "Pass the limit in tokens and the width of the slope."
        fail("overlong_penalty", "needs 0 < margin <= limit", got, remedy)
    everyone = torch.ones_like(lengths, dtype=torch.bool)
    kept = nonnegative_weights(lengths, everyone, name="lengths", caller="overlong_penalty")
    slope = (limit - margin - kept) / margin
    return slope.clamp(-1.0, 0.0).to(lengths.dtype if lengths.is_floating_point() else torch.float32)


def _token_counts(lengths: Tensor, members: Tensor, *, caller: str) -> Tensor:
    weights = nonnegative_weights(lengths, members, name="lengths", caller=caller)
    if int((weights > 0).sum()) < 2 or float(weights.sum()) <= 1:
        got = f"{int((weights > 0).sum())} rollouts with {float(weights.sum()):g} tokens in all"
        fail(caller, "needs at least two observed rollouts with tokens in the batch", got, "Pass a larger batch.")
    return weights


def _batch_labels(members: Tensor, batches: Tensor | None) -> Tensor:
    """`(P, R)`: the batch of every rollout."""
    if batches is None:
        return torch.zeros_like(members, dtype=torch.long)
    require_same_shape(batches, members[:, 0], name="batches", like_name="one number per prompt", caller="batches")
    return batches.to(members.device)[:, None].expand(members.shape)


def _whitened(
    values: Tensor, rewards: Tensor, counts: Tensor, labels: Tensor, *, eps: float | int, ddof: int, dtype: torch.dtype
) -> Tensor:
    scores = standard_scores(values, labels, counts > 0, eps=eps, ddof=ddof, dtype=dtype, weights=counts, sizes=rewards)
    return scores.to(dtype)
