"""What a measurement changes about a model while it runs, and how it is put back, also after an exception."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scoregram.gram.survey import Survey


@contextmanager
def left_as_it_was(model: Survey) -> Iterator[None]:
    """The model prepared for a measurement inside, and exactly as it was outside, random state included."""
    parameters = list(model.parameters.values())
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(parameters[0].device))
        stack.enter_context(gradients_put_aside([*parameters, *model.shards.sharded.values()]))
        stack.enter_context(model.shards.put_back())
        stack.enter_context(checkpointing_without_reentry(model.checkpointing))
        stack.enter_context(experts_one_by_one(model.configs.values()))
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
    saved = [(parameter, grad) for parameter in parameters if (grad := parameter.grad) is not None]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        for parameter, grad in saved:
            parameter.grad = grad


@contextmanager
def checkpointing_without_reentry(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpointed layers run again through saved-tensor hooks, not through a nested backward pass.

    A nested pass cannot be asked for the gradients of chosen parameters, which `replay` needs.
    """
    with attributes(modules, "_gradient_checkpointing_func", lambda module: partial(checkpoint, use_reentrant=False)):
        yield


@contextmanager
def experts_one_by_one(configs: Iterable[Any]) -> Iterator[None]:
    """Mixtures of experts multiply one expert at a time: the products that the rules know."""
    name = "_experts_implementation_internal"
    found = [config for config in configs if name in vars(config)]
    with attributes(found, name, lambda config: "eager"):
        yield


@contextmanager
def in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules that are in training mode evaluate inside."""
    insides = [module.__dict__ for module in modules]
    for inside in insides:
        inside["training"] = False
    try:
        yield
    finally:
        for inside in insides:
            inside["training"] = True


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
