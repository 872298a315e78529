"""Rewards held against each other: the one primitive under every group-relative estimator.

A baseline that is a weighted mean of rewards turns an advantage into a weighted mean of *differences*,
`A_i = Σ_j w_ij (r_i − r_j) / Σ_j w_ij`. Written so, a constant group gives exactly 0 whatever its reward (0.1 three
times has no rounding residue), a large common offset cancels before anything is summed, and the self-including form
differs from the leave-one-out form in one thing alone: whether `w_ii` stands in the denominator.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size, require_same_shape
from scoregram.groups import differ_beyond_rounding, rounding_tolerance

Values = Float[Tensor, "*batch members"]
Members = Bool[Tensor, "*batch members"]
Pairs = Float[Tensor, "*batch members members"]


def admitted(
    rewards: Shaped[Tensor, "..."], observed: Tensor | None, *, at_least: int, caller: str
) -> tuple[Tensor, Tensor]:
    """Rewards in float64, 0 where unobserved, and the `(P, R)` bool of which rollouts are observed.

    A group without any observed rollout passes: all of its advantages are 0. A group with some, but fewer than
    `at_least`, does not.
    """
    require_reward_table(rewards, caller=caller)
    require_group_size(rewards, at_least=at_least, caller=caller)
    present = torch.ones_like(rewards, dtype=torch.bool) if observed is None else observed.bool()
    require_same_shape(present, rewards, name="observed", like_name="rewards", caller=caller)
    values = torch.where(present, rewards.detach(), 0).double()
    remedy = "If they are missing, pass NaN to estimate, or observed=rewards.isfinite() to this function."
    require_finite(values, name="rewards", caller=caller, remedy=remedy)
    counts = present.sum(dim=-1)  # (P,)
    short = (counts > 0) & (counts < at_least)
    if bool(short.any()):
        prompt = int(short.nonzero()[0])
        requirement = f"needs at least {at_least} observed rollouts in a group"
        remedy = "Sample more rollouts, or mark the whole group as unobserved."
        fail(caller, requirement, f"{int(counts[prompt])} in prompt {prompt}", remedy)
    return values, present


def require_reward_table(rewards: Tensor, *, caller: str) -> None:
    """Raise unless `rewards` is floating point of shape `(P, R)`."""
    if rewards.ndim != 2 or not rewards.is_floating_point():
        got = f"shape {tuple(rewards.shape)} of {rewards.dtype}"
        fail(caller, "rewards must be floating point of shape (P, R)", got, "Pass one row per prompt.")


def require_spread_options(eps: float | int, ddof: int, *, caller: str) -> None:
    """`eps >= 0` and finite, `ddof` 0 or 1."""
    if not 0 <= eps < float("inf"):
        fail(caller, "eps must be finite and not negative", eps, "Pass 0 for none; constant groups are safe without.")
    if ddof not in (0, 1):
        fail(caller, "ddof must be 0 or 1", ddof, "1 is the sample deviation (torch's default), 0 the population's.")


def everyone(members: Members) -> Pairs:
    """`(…, N, N)`: 1 where both rollouts are members, the diagonal included."""
    return (members.unsqueeze(-1) & members.unsqueeze(-2)).double()


def others(members: Members) -> Pairs:
    """`(…, N, N)`: 1 where both rollouts are members and not the same one."""
    return everyone(members) * (1 - torch.eye(members.shape[-1], dtype=torch.float64, device=members.device))


def weighted(pairs: Pairs, weights: Values) -> Pairs:
    """Pairs with weight `w_j` for the rollout compared with; equal weights where all of them are zero."""
    heavy = pairs * weights.unsqueeze(-2)
    return torch.where(heavy.sum(dim=-1, keepdim=True) > 0, heavy, pairs)


def differences(values: Values, pairs: Pairs) -> Values:
    """`Σ_j w_ij (v_i − v_j) / Σ_j w_ij`, and 0 for a rollout that is compared with nothing."""
    gaps = values.unsqueeze(-1) - values.unsqueeze(-2)  # (…, N, N)
    total = pairs.sum(dim=-1)
    return torch.where(total > 0, (pairs * gaps).sum(dim=-1) / total.clamp_min(torch.finfo(total.dtype).tiny), 0)


def flat(values: Values, pairs: Pairs, *, dtype: torch.dtype) -> Bool[Tensor, "*batch members"]:
    """Where the rewards compared with are constant up to the rounding of `dtype`, relative to their own size."""
    return ~differ_beyond_rounding(values.unsqueeze(-2), pairs > 0, rtol=rounding_tolerance(dtype))


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
    """`(v − mean) / (std + eps)` among the members with the same label; 0 where they are flat or fewer than two.

    `weights` count a value several times. `sizes` are the rewards whose rounding decides what is flat, where `values`
    are already differences of them.
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

    # From the lowest value up: a constant group is then exactly zero, whatever its value.
    raised = values - over_group(values, "amin")
    total = over_group(counts, "sum")
    deviations = raised - over_group(counts * raised, "sum") / total
    # In units of the largest deviation: the squares of 1e-200 do not vanish.
    peak = over_group(deviations.abs(), "amax")
    peak = torch.where(peak > 0, peak, 1.0)
    squares = over_group(counts * (deviations / peak).square(), "sum")
    spread = over_group(raised, "amax") > rounding_tolerance(dtype) * over_group(sizes, "amax")
    std = peak * torch.where(spread, squares / (total - ddof), 1.0).sqrt()
    return torch.where(spread, deviations / (std + eps), 0.0)


def by_group(members: Bool[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Labels that tell prompts apart and nothing else."""
    prompts = torch.arange(members.shape[0], device=members.device)
    return prompts.view(-1, *[1] * (members.ndim - 1)).expand(members.shape)


def by_group_and_step(members: Bool[Tensor, "prompts rollouts steps"]) -> Int[Tensor, "prompts rollouts steps"]:
    """Labels that tell prompts and step positions apart."""
    return by_group(members) * members.shape[-1] + torch.arange(members.shape[-1], device=members.device)
