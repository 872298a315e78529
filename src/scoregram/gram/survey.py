"""What there is to know of a model before it is measured, found in one walk over its modules."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from scoregram.gram.sharding import Shards, sharded_modules, shards_of


@dataclass(frozen=True)
class Survey:
    """The modules of a model by what a measurement does with them."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Every parameter that requires gradients once, by its first name; of a sharded one, its gathered form."""
    owners: list[nn.Module] = field(default_factory=list)
    """Modules that own such parameters."""
    in_training: list[nn.Module] = field(default_factory=list)
    """Modules in training mode, but for those that checkpoint only when they train."""
    checkpointing: list[nn.Module] = field(default_factory=list)
    """Modules that hold a function for checkpointing."""
    configs: dict[int, Any] = field(default_factory=dict)
    """Configurations of the modules, each once, by id."""
    dropping: list[nn.Module] = field(default_factory=list)
    """Modules that drop activations in the mode they are in."""
    shards: Shards = field(default_factory=Shards)
    """What is sharded over several processes."""


HOLDERS = frozenset({nn.ModuleDict, nn.ModuleList, nn.Identity, nn.Sequential})
"""Modules that hold others and do nothing of their own; with adapters most modules are of these."""


def survey(model: nn.Module) -> Survey:
    """Walk over every module once, parents before children."""
    found = Survey()
    spread = sharded_modules(model)
    seen: set[int] = set()
    known: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inside = module.__dict__
        if type(module) not in HOLDERS or inside["_parameters"]:
            note_module(found, prefix, module, known)
        children = inside["_modules"]
        if children:
            stack += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]
    return replace(found, shards=shards_of(spread, found.parameters))


def note_module(found: Survey, prefix: str, module: nn.Module, known: set[int]) -> None:
    """Note everything about one module."""
    inside = module.__dict__
    if inside["_parameters"]:
        note_parameters(found, prefix, module, known)
    if inside["training"]:
        if not inside.get("gradient_checkpointing", False):
            found.in_training.append(module)
        if drops(module):
            found.dropping.append(module)
    if "_gradient_checkpointing_func" in inside:
        found.checkpointing.append(module)
    if (config := inside.get("config")) is not None:
        found.configs[id(config)] = config


def note_parameters(found: Survey, prefix: str, module: nn.Module, known: set[int]) -> None:
    """Note the trained parameters that a module owns; `known` holds the ids of those that have a name already."""
    owns = False
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.requires_grad:
            continue
        owns = True
        if id(parameter) not in known:
            known.add(id(parameter))
            found.parameters[prefix + name] = parameter
    if owns:
        found.owners.append(module)


def drops(module: nn.Module) -> bool:
    """Whether a module has a rate at which it drops activations: a dropout layer, or an attention with its own."""
    name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "attention_dropout"
    rate = module.__dict__.get(name, 0.0)
    return isinstance(rate, float) and rate > 0
