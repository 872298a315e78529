"""What a measurement changes about a model while it runs, and how it is put back, also after an exception."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module once, by its first path, parents before children; `named_modules` without its nested generators."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        prefix = path and path + "."
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        stack.extend(reversed(children))
    return found


def trained_parameters(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Every parameter that requires gradients once, by its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{path}.{name}" if path else name] = parameter
    return found


@contextmanager
def left_as_it_was(modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> Iterator[None]:
    """The model prepared for a measurement inside, and exactly as it was outside, random state included."""
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(parameters[0].device))
        stack.enter_context(gradients_put_aside(parameters))
        stack.enter_context(checkpointing_without_reentry(modules))
        stack.enter_context(experts_one_by_one(modules))
        yield


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside are drawn again outside."""
    saved = random_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved[1], device)


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the random generators that a forward pass would draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def gradients_put_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """`.grad` empty inside: what appears there tells which parameters the rules have not seen."""
    saved = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, saved, strict=True):
            parameter.grad = grad


@contextmanager
def checkpointing_without_reentry(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpointed layers run again through saved-tensor hooks, not through a nested backward pass.

    A nested pass cannot be asked for the gradients of chosen parameters, which `replay` needs.
    """
    name = "_gradient_checkpointing_func"
    found = [module for module in modules if name in module.__dict__]
    with attributes(found, name, lambda module: partial(checkpoint, use_reentrant=False)):
        yield


@contextmanager
def experts_one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Mixtures of experts multiply one expert at a time: the products that the rules know."""
    name = "_experts_implementation_internal"
    configs = {id(config): config for module in modules if (config := module.__dict__.get("config")) is not None}
    found = [config for config in configs.values() if name in vars(config)]
    with attributes(found, name, lambda config: "eager"):
        yield


@contextmanager
def in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules that are in training mode evaluate inside, but for those that checkpoint only when they train."""
    found = [
        module
        for module in modules
        if module.__dict__["training"] and not module.__dict__.get("gradient_checkpointing", False)
    ]
    with attributes(found, "training", lambda module: False):
        yield


@contextmanager
def attributes(owners: Sequence[Any], name: str, value: Callable[[Any], object]) -> Iterator[None]:
    """Attribute `name` of each owner set inside; outside as it was, absent included."""
    absent = object()
    saved = [vars(owner).get(name, absent) for owner in owners]
    for owner in owners:
        vars(owner)[name] = value(owner)
    try:
        yield
    finally:
        for owner, was in zip(owners, saved, strict=True):
            if was is absent:
                del vars(owner)[name]
            else:
                vars(owner)[name] = was
