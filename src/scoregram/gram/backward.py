"""Backward passes inside whatever modes are active.

`torch.autograd.backward` and `grad` are themselves operations that a mode sees, and while a mode deals with an
operation it is off: checkpointed layers would run again unseen, with their dropout. So the engine is called without
that detour.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def run_backward(tensor: Tensor, grad: Tensor, kept: Sequence[Tensor] = ()) -> None:
    """Add the gradients of `⟨tensor, grad⟩` to `.grad` of all leaves; those of `kept` are kept from other hands."""
    with kept_gradients(kept):
        _engine_run_backward((tensor,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def kept_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients that arrive inside are in `.grad` outside, whoever looks there in between.

    A sharded model would take them away at the end of each layer's pass, and average them over the processes.
    """
    arrived: dict[int, tuple[Tensor, Tensor]] = {}

    def take(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:  # a rule may have had nothing to give
            before = arrived.get(id(parameter))
            arrived[id(parameter)] = parameter, grad if before is None else before[1] + grad

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in arrived.values():
            parameter.grad = grad


def gradients(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradient of a scalar for each of all the parameters it may depend on, whose `.grad` is empty before and after.

    Asked for the gradients of chosen parameters, autograd goes only where they are inputs, and passes by layers that
    are checkpointed through a nested backward pass. So everything is accumulated, and taken away again.
    """
    run_backward(total, torch.ones_like(total), parameters)
    found = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found
