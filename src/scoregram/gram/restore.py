"""What a measurement changes about a model while it runs, and how it is put back, also after an exception."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """The model prepared for a measurement inside, and exactly as it was outside."""
    with ExitStack() as stack:
        stack.enter_context(gradients_put_aside(model))
        stack.enter_context(checkpointing_without_reentry(model))
        stack.enter_context(experts_one_by_one(model))
        yield


@contextmanager
def gradients_put_aside(model: nn.Module) -> Iterator[None]:
    """`.grad` empty inside: what appears there tells which parameters the rules have not seen."""
    saved = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in saved:
            parameter.grad = grad


@contextmanager
def checkpointing_without_reentry(model: nn.Module) -> Iterator[None]:
    """Checkpointed layers run again through saved-tensor hooks, not through a nested backward pass.

    A nested pass cannot be asked for the gradients of chosen parameters, which `replay` needs.
    """
    name = "_gradient_checkpointing_func"
    saved = [(module, vars(module)[name]) for module in model.modules() if name in vars(module)]
    for module, _ in saved:
        setattr(module, name, partial(checkpoint, use_reentrant=False))
    try:
        yield
    finally:
        for module, function in saved:
            setattr(module, name, function)


@contextmanager
def experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """Mixtures of experts multiply one expert at a time: the products that the rules know."""
    name = "_experts_implementation_internal"
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    saved = [(config, vars(config)[name]) for config in configs.values() if name in vars(config)]
    for config, _ in saved:
        setattr(config, name, "eager")
    try:
        yield
    finally:
        for config, implementation in saved:
            setattr(config, name, implementation)
