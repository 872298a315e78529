"""Building blocks of every estimator: comparisons of rewards inside a group, and sums along a rollout.

A baseline that is a weighted mean of rewards turns an advantage into a weighted mean of *differences*,
`A_i = Σ_j w_ij (r_i − r_j) / Σ_j w_ij`. In this form a constant group gives exactly 0 whatever its reward (three
rewards of 0.1 leave no rounding residue), a large common offset cancels before anything is summed, and the
self-including form differs from the leave-one-out form only in whether `w_ii` is part of the denominator.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size, require_same_shape
from scoregram.groups import rounding_tolerance

_Inputs = ParamSpec("_Inputs")

Values = Float[Tensor, "*batch members"]
Members = Bool[Tensor, "*batch members"]
PairWeights = Float[Tensor, "*batch members members"]
Steps = Float[Tensor, "prompts rollouts steps"]
StepMask = Bool[Tensor, "prompts rollouts steps"]


REWARD_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VALUE_INPUTS = ("baselines", "greedy_rewards", "outcomes", "outcome_rewards", "values", "prefix_values")
"""Inputs of estimators that are rewards or values, like the rewards themselves."""


def floating_rewards(rewards: object, *, name: str = "rewards", caller: str) -> Tensor:
    """Rewards in floating point: integers and booleans in torch's default dtype, floating point unchanged.

    Raises:
        ScoregramError: If `rewards` is not a tensor, has another dtype, or holds an integer too large to be exact.
    """
    if not isinstance(rewards, Tensor):
        fail(caller, f"{name} must be a tensor", type(rewards).__name__, "Pass torch.as_tensor(...).")
    if rewards.dtype in REWARD_DTYPES:
        return rewards
    dtype = torch.get_default_dtype()
    if rewards.is_floating_point() or rewards.is_complex():
        fail(caller, f"{name} must be integers or one of {REWARD_DTYPES}", rewards.dtype, "Convert them to float32.")
    exact = int(2 / torch.finfo(dtype).eps)  # every integer up to this one is exact in `dtype`
    largest = max(int(rewards.max()), -int(rewards.min())) if rewards.numel() else 0
    if largest > exact:
        fail(caller, f"integer {name} must be at most {exact} to be exact in {dtype}", largest, "Pass float64.")
    return rewards.to(dtype)


def finite_estimator(fn: Callable[_Inputs, Tensor]) -> Callable[_Inputs, Tensor]:
    """Decorator that converts an estimator's rewards to floating point and raises if an advantage is not finite.

    `floating_rewards` converts the rewards and the inputs in `VALUE_INPUTS`. The advantages have the dtype of the
    converted rewards; an advantage that this dtype cannot hold is an error, never `inf` or NaN.
    """
    first = next(iter(inspect.signature(fn).parameters))

    @functools.wraps(fn)
    def checked_estimator(*args: _Inputs.args, **inputs: _Inputs.kwargs) -> Tensor:
        caller = fn.__name__
        given = dict(zip((first,), args, strict=False)) | inputs
        for name in given.keys() & {first, *VALUE_INPUTS}:
            given[name] = floating_rewards(given[name], name=name, caller=caller)
        advantages = fn(*args[1:], **given)  # type: ignore[arg-type]
        remedy = "The rewards are too large for their dtype: divide them by a constant, or pass a wider dtype."
        return require_finite(advantages, name="advantages", caller=caller, remedy=remedy)

    return checked_estimator


def require_reward_table(rewards: Tensor, *, caller: str) -> None:
    """Raise unless `rewards` has the shape `(P, R)`."""
    if rewards.ndim != 2:
        fail(caller, "rewards must have the shape (P, R)", tuple(rewards.shape), "Pass one row per prompt.")


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
    require_finite(kept.sum(), name=f"the sum of {name}", caller=caller, remedy="Divide them by a constant.")
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
    return torch.where(total > 0, (pairs * gaps).sum(dim=-1) / torch.where(total > 0, total, 1), 0)


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

    Members are constant if their spread is within the rounding of `dtype`. Each value counts `weights` times.
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
    # If differences of rewards overflow, this is False and the result is NaN: `finite_estimator` then raises.
    constant = over_group(raised, "amax") <= rounding_tolerance(dtype) * over_group(sizes, "amax")
    std = peak * torch.where(constant, 1.0, squares / (total - ddof)).sqrt()
    return torch.where(constant, 0.0, deviations / (std + eps))


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
    """`Σ_{k≥0} decay^k x_{t+k}`, where `k` counts only the steps inside the mask; 0 outside."""
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
