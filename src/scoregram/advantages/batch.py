"""Advantages and selections that look past one group: whitening over the batch, keeping only mixed groups.

Shapes, missing rewards and dtypes as in `scoregram.advantages.group`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scoregram.advantages.comparisons import (
    admitted,
    by_group,
    differences,
    everyone,
    require_reward_table,
    require_spread_options,
    standard_scores,
)
from scoregram.advantages.group import require_weights
from scoregram.checks import fail, require_same_shape
from scoregram.groups import live_groups
from scoregram.types import Advantages, Observed, PerRollout, Rewards


def batch_whitened(
    rewards: Rewards,
    *,
    lengths: PerRollout,
    observed: Observed | None = None,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> Advantages:
    """Reward in units of the whole batch's standard deviation, from the batch's mean, both counted by token.

    `A_i = (r_i − m) / (s + eps)` with `m = Σ ℓ_j r_j / Σ ℓ_j` and `s² = Σ ℓ_j (r_j − m)² / (Σ ℓ_j − ddof)` over all
    rollouts of all prompts: the whitening of the token-wise tiled rewards, in which a long rollout counts more. With
    `γ = 1` and a reward at the last token this is the estimator's token form. A batch whose rewards are all equal
    gives exactly 0; a constant group inside a varied batch does not, and is not meant to. A rollout without tokens has
    no say and gets 0.

    Raises:
        ScoregramError: If the batch has fewer than two observed rollouts, or no tokens.

    Reference:
        REINFORCE++. Hu et al. 2025, arXiv:2501.03262.
    """
    caller = "batch_whitened"
    require_spread_options(eps, ddof, caller=caller)
    values, members = admitted(rewards, observed, at_least=1, caller=caller)
    counts = _token_counts(lengths, members, caller=caller)
    return _whitened(values, values, counts, eps=eps, ddof=ddof, dtype=rewards.dtype)


def centered_batch_whitened(
    rewards: Rewards,
    *,
    lengths: PerRollout,
    observed: Observed | None = None,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> Advantages:
    """Reward minus its group's mean, then whitened over the batch by token.

    `batch_whitened` of `mean_centered`. When lengths differ the batch mean of the centred rewards is not zero, so a
    constant group inside a varied batch gets that small common offset instead of 0.

    Raises:
        ScoregramError: If a group has one observed rollout, or the batch has no tokens.

    Reference:
        REINFORCE++-baseline. Hu et al. 2025, arXiv:2501.03262.
    """
    caller = "centered_batch_whitened"
    require_spread_options(eps, ddof, caller=caller)
    values, members = admitted(rewards, observed, at_least=2, caller=caller)
    counts = _token_counts(lengths, members, caller=caller)
    centered = differences(values, everyone(members))
    return _whitened(centered, values, counts, eps=eps, ddof=ddof, dtype=rewards.dtype)


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
    require_reward_table(rewards, caller="mixed_groups")
    if observed is not None:
        require_same_shape(observed, rewards, name="observed", like_name="rewards", caller="mixed_groups")
        rewards = torch.where(observed.bool(), rewards, torch.nan)
    return live_groups(rewards, caller="mixed_groups")


def mixed_groups_standardized(
    rewards: Rewards,
    *,
    outcomes: Rewards,
    observed: Observed | None = None,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> Advantages:
    """Standardised reward in the groups whose outcomes are mixed, 0 in all others.

    `outcomes` is what the selection looks at (right or wrong); `rewards` is what the advantage is made of and may be
    shaped, by `overlong_penalty` for one. A group that is wrong throughout gets 0 even though its shaped rewards
    differ. Refilling the batch with other prompts until it holds `P` mixed groups is the trainer's part; it reweights
    prompts by `1 / P(mixed)` and leaves the direction within each prompt alone.

    Raises:
        ScoregramError: If a group has one observed rollout.

    Reference:
        DAPO. Yu et al. 2025, arXiv:2503.14476.
    """
    caller = "mixed_groups_standardized"
    require_spread_options(eps, ddof, caller=caller)
    values, members = admitted(rewards, observed, at_least=2, caller=caller)
    kept = mixed_groups(outcomes, observed=members).unsqueeze(-1)  # (P, 1)
    scores = standard_scores(values, by_group(members), members, eps=eps, ddof=ddof, dtype=rewards.dtype)
    return torch.where(kept, scores, 0.0).to(rewards.dtype)


def overlong_penalty(lengths: PerRollout, *, limit: int, margin: int) -> Float[Tensor, "prompts rollouts"]:
    """What a rollout loses for coming close to the length limit, to be added to its reward.

    `0` up to `limit − margin` tokens, then falling linearly, `−1` at `limit` and beyond.

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
        fail(
            "overlong_penalty", "needs 0 < margin <= limit", got, "Pass the limit in tokens and the width of the slope."
        )
    kept = require_weights(
        lengths, torch.ones_like(lengths, dtype=torch.bool), name="lengths", caller="overlong_penalty"
    )
    slope = (limit - margin - kept) / margin
    return slope.clamp(-1.0, 0.0).to(lengths.dtype if lengths.is_floating_point() else torch.float32)


def _token_counts(lengths: Tensor, members: Tensor, *, caller: str) -> Tensor:
    weights = require_weights(lengths, members, name="lengths", caller=caller)
    if int((weights > 0).sum()) < 2 or float(weights.sum()) <= 1:
        got = f"{int((weights > 0).sum())} with {float(weights.sum()):g} tokens"
        fail(caller, "needs at least two observed rollouts with tokens in the batch", got, "Pass a larger batch.")
    return weights


def _whitened(
    values: Tensor, rewards: Tensor, counts: Tensor, *, eps: float | int, ddof: int, dtype: torch.dtype
) -> Tensor:
    one_batch = torch.zeros_like(values, dtype=torch.long)
    scores = standard_scores(
        values, one_batch, counts > 0, eps=eps, ddof=ddof, dtype=dtype, weights=counts, sizes=rewards
    )
    return scores.to(dtype)
