"""Backward passes inside whatever modes are active.

`torch.autograd.backward` and `grad` are themselves operations that a mode sees, and while a mode deals with an
operation it is off: checkpointed layers would run again unseen, with their dropout. So the engine is called without
that detour.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def run_backward(tensor: Tensor, grad: Tensor) -> None:
    """Add the gradients of `⟨tensor, grad⟩` to `.grad` of all leaves."""
    _engine_run_backward((tensor,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradient of a scalar for each of all the parameters it may depend on, whose `.grad` is empty before and after.

    Asked for the gradients of chosen parameters, autograd goes only where they are inputs, and passes by layers that
    are checkpointed through a nested backward pass. So everything is accumulated, and taken away again.
    """
    run_backward(total, torch.ones_like(total))
    found = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found
