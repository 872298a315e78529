"""Comparisons of rewards inside a group, and sums along a rollout: what every estimator is built from.

A baseline that is a weighted mean of rewards turns an advantage into a weighted mean of *differences*,
`A_i = Σ_j w_ij (r_i − r_j) / Σ_j w_ij`. In this form a constant group gives exactly 0 whatever its reward (three
rewards of 0.1 leave no rounding residue), a large common offset cancels before anything is summed, and the
self-including form differs from the leave-one-out form only in whether `w_ii` is part of the denominator.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size, require_same_shape
from scoregram.groups import rounding_tolerance

Values = Float[Tensor, "*batch members"]
Members = Bool[Tensor, "*batch members"]
PairWeights = Float[Tensor, "*batch members members"]
Steps = Float[Tensor, "prompts rollouts steps"]
StepMask = Bool[Tensor, "prompts rollouts steps"]


def require_reward_table(rewards: Tensor, *, caller: str) -> None:
    """Raise unless `rewards` is floating point of shape `(P, R)`."""
    if rewards.ndim != 2 or not rewards.is_floating_point():
        got = f"shape {tuple(rewards.shape)} of {rewards.dtype}"
        fail(caller, "rewards must be floating point of shape (P, R)", got, "Pass one row per prompt.")


def require_spread_options(eps: float | int, ddof: int, *, caller: str) -> None:
    """Raise unless `eps >= 0` is finite and `ddof` is 0 or 1."""
    if not 0 <= eps < float("inf"):
        fail(caller, "eps must be finite and not negative", eps, "Pass 0 for none; constant groups are safe with 0.")
    if ddof not in (0, 1):
        fail(caller, "ddof must be 0 or 1", ddof, "1 is the sample deviation (torch's default), 0 the population's.")


def observed_rewards(
    rewards: Shaped[Tensor, "..."], observed: Tensor | None, *, at_least: int, caller: str
) -> tuple[Tensor, Tensor]:
    """Rewards in float64, 0 where unobserved, and the `(P, R)` bool of the observed rollouts.

    A group without an observed rollout is accepted: all of its advantages are 0. A group with some, but fewer than
    `at_least`, is an error.
    """
    require_reward_table(rewards, caller=caller)
    require_group_size(rewards, at_least=at_least, caller=caller)
    members = torch.ones_like(rewards, dtype=torch.bool) if observed is None else observed.bool()
    require_same_shape(members, rewards, name="observed", like_name="rewards", caller=caller)
    values = torch.where(members, rewards.detach(), 0).double()
    remedy = "If they are missing, pass NaN to estimate, or observed=rewards.isfinite() to this function."
    require_finite(values, name="rewards", caller=caller, remedy=remedy)
    counts = members.sum(dim=-1)  # (P,)
    short = (counts > 0) & (counts < at_least)
    if bool(short.any()):
        prompt = int(short.nonzero()[0])
        requirement = f"needs at least {at_least} observed rollouts in a group"
        remedy = "Sample more rollouts, or mark the whole group as unobserved."
        fail(caller, requirement, f"{int(counts[prompt])} in prompt {prompt}", remedy)
    return values, members


def nonnegative_weights(weights: Tensor, members: Tensor, *, name: str, caller: str) -> Tensor:
    """Weights in float64, 0 where unobserved; an error if a weight is negative or not finite."""
    require_same_shape(weights, members, name=name, like_name="rewards", caller=caller)
    kept = require_finite(torch.where(members, weights.detach(), 0).double(), name=name, caller=caller)
    if bool((kept < 0).any()):
        at = tuple(int(i) for i in (kept < 0).nonzero()[0])
        fail(caller, f"{name} must not be negative", f"{float(kept[at]):g} at index {at}", "Pass 0 or more.")
    return kept


def all_pairs(members: Members) -> PairWeights:
    """`(…, N, N)`: 1 where both rollouts are members, the diagonal included."""
    return (members.unsqueeze(-1) & members.unsqueeze(-2)).double()


def other_pairs(members: Members) -> PairWeights:
    """`(…, N, N)`: 1 where both rollouts are members and differ, 0 on the diagonal."""
    return all_pairs(members) * (1 - torch.eye(members.shape[-1], dtype=torch.float64, device=members.device))


def weighted_pairs(pairs: PairWeights, weights: Values) -> PairWeights:
    """Pairs times the weight `w_j` of the other rollout `j`; a row whose weights are all zero gets equal weights."""
    heavy = pairs * weights.unsqueeze(-2)
    return torch.where(heavy.sum(dim=-1, keepdim=True) > 0, heavy, pairs)


def mean_differences(values: Values, pairs: PairWeights) -> Values:
    """`Σ_j w_ij (v_i − v_j) / Σ_j w_ij`, and 0 for a rollout without any pair."""
    gaps = values.unsqueeze(-1) - values.unsqueeze(-2)  # (…, N, N)
    total = pairs.sum(dim=-1)
    return torch.where(total > 0, (pairs * gaps).sum(dim=-1) / total.clamp_min(torch.finfo(total.dtype).tiny), 0)


def group_labels(members: Bool[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Labels that are equal within a prompt and differ between prompts."""
    prompts = torch.arange(members.shape[0], device=members.device)
    return prompts.view(-1, *[1] * (members.ndim - 1)).expand(members.shape)


def step_labels(members: Bool[Tensor, "prompts rollouts steps"]) -> Int[Tensor, "prompts rollouts steps"]:
    """Labels that are equal for the same step of the same prompt and differ otherwise."""
    return group_labels(members) * members.shape[-1] + torch.arange(members.shape[-1], device=members.device)


def standard_scores(
    values: Float[Tensor, "*shape"],
    labels: Int[Tensor, "*shape"],
    members: Bool[Tensor, "*shape"],
    *,
    eps: float | int,
    ddof: int,
    dtype: torch.dtype,
    weights: Float[Tensor, "*shape"] | None = None,
    sizes: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """`(v − mean) / (std + eps)` among the members with the same label; 0 where they are constant or fewer than two.

    Members are constant if their spread is within the rounding of `dtype`. `weights` says how often each value counts.
    Pass the original rewards as `sizes` if `values` are already differences: rounding is relative to the rewards.
    """
    kept = values[members]
    scores = torch.zeros_like(values)
    counts = torch.ones_like(kept) if weights is None else weights[members]
    sized = (values if sizes is None else sizes)[members].abs()
    scores[members] = _labelled_scores(kept, labels[members], counts, sized, eps=eps, ddof=ddof, dtype=dtype)
    return scores


def _labelled_scores(
    values: Tensor, labels: Tensor, counts: Tensor, sizes: Tensor, *, eps: float | int, ddof: int, dtype: torch.dtype
) -> Float[Tensor, " values"]:
    names, group = labels.unique(return_inverse=True)

    def over_group(x: Tensor, how: str) -> Tensor:
        empty = torch.zeros(len(names), dtype=x.dtype, device=x.device)
        return empty.scatter_reduce(0, group, x, how, include_self=False)[group]

    # Subtract the lowest value first: a constant group is then exactly zero, whatever its value.
    raised = values - over_group(values, "amin")
    total = over_group(counts, "sum")
    deviations = raised - over_group(counts * raised, "sum") / total
    # Divide by the largest deviation before squaring: the square of 1e-200 would underflow to zero.
    peak = over_group(deviations.abs(), "amax")
    peak = torch.where(peak > 0, peak, 1.0)
    squares = over_group(counts * (deviations / peak).square(), "sum")
    spread = over_group(raised, "amax") > rounding_tolerance(dtype) * over_group(sizes, "amax")
    std = peak * torch.where(spread, squares / (total - ddof), 1.0).sqrt()
    return torch.where(spread, deviations / (std + eps), 0.0)


def masked_steps(values: Shaped[Tensor, "..."], mask: Tensor, *, name: str, caller: str, at_least: int = 1) -> Steps:
    """`values` of shape `(P, R, T)` in float64, exactly 0 outside the mask; an error if one inside is not finite."""
    if mask.ndim != 3 or mask.dtype != torch.bool or mask.shape[-1] == 0:
        got = f"shape {tuple(mask.shape)} of {mask.dtype}"
        fail(caller, "mask must be a bool of shape (P, R, steps), not empty", got, "Pass True where the policy acted.")
    require_same_shape(values, mask, name=name, like_name="mask", caller=caller)
    require_group_size(mask[..., 0], at_least=at_least, caller=caller)
    kept = torch.where(mask, values.detach(), 0).double()
    remedy = "Take rollouts without rewards out of the mask."
    return require_finite(kept, name=name, caller=caller, remedy=remedy)


def discounted_sums(rewards: Steps, mask: StepMask, *, decay: float | int) -> Steps:
    """`Σ_{k≥0} decay^k x_{t+k}` over the steps inside the mask, which skips all others without decay; 0 outside."""
    carried, columns = torch.zeros_like(rewards[..., 0]), []
    for t in reversed(range(rewards.shape[-1])):
        carried = torch.where(mask[..., t], rewards[..., t] + decay * carried, carried)
        columns.append(torch.where(mask[..., t], carried, 0.0))
    return torch.stack(columns[::-1], dim=-1)


def values_after(values: Steps, mask: StepMask) -> Steps:
    """Value at the next masked step; 0 after the last one and outside the mask."""
    carried, columns = torch.zeros_like(values[..., 0]), []
    for t in reversed(range(values.shape[-1])):
        columns.append(torch.where(mask[..., t], carried, 0.0))
        carried = torch.where(mask[..., t], values[..., t], carried)
    return torch.stack(columns[::-1], dim=-1)
