"""What tokens and turns share: rewards along a rollout, under a mask, and the sums of what is still to come."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from scoregram.checks import fail, require_finite, require_group_size, require_same_shape

Steps = Float[Tensor, "prompts rollouts steps"]
StepMask = Bool[Tensor, "prompts rollouts steps"]


def admitted_steps(
    values: Shaped[Tensor, "..."], mask: Tensor, *, name: str, caller: str, at_least: int = 1
) -> Float[Tensor, "prompts rollouts steps"]:
    """`values` of shape `(P, R, T)` in float64, exactly 0 outside the mask, provided that they are finite inside it."""
    if mask.ndim != 3 or mask.dtype != torch.bool or mask.shape[-1] == 0:
        got = f"shape {tuple(mask.shape)} of {mask.dtype}"
        fail(caller, "mask must be a bool of shape (P, R, steps), not empty", got, "Pass True where the policy acted.")
    require_same_shape(values, mask, name=name, like_name="mask", caller=caller)
    require_group_size(mask[..., 0], at_least=at_least, caller=caller)
    kept = torch.where(mask, values.detach(), 0).double()
    remedy = "Take rollouts without rewards out of the mask."
    return require_finite(kept, name=name, caller=caller, remedy=remedy)


def discounted_sums(rewards: Steps, mask: StepMask, *, decay: float | int) -> Steps:
    """`Σ_{k≥0} decay^k x_{t+k}` along the masked steps, 0 outside the mask; steps outside neither count nor decay."""
    carried, columns = torch.zeros_like(rewards[..., 0]), []
    for t in reversed(range(rewards.shape[-1])):
        carried = torch.where(mask[..., t], rewards[..., t] + decay * carried, carried)
        columns.append(torch.where(mask[..., t], carried, 0.0))
    return torch.stack(columns[::-1], dim=-1)


def values_after(values: Steps, mask: StepMask) -> Steps:
    """Value at the next masked step, 0 after the last one and outside the mask."""
    carried, columns = torch.zeros_like(values[..., 0]), []
    for t in reversed(range(values.shape[-1])):
        columns.append(torch.where(mask[..., t], carried, 0.0))
        carried = torch.where(mask[..., t], values[..., t], carried)
    return torch.stack(columns[::-1], dim=-1)
