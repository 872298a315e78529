"""Stage 2, the model: surveyed once, prepared for a measurement, and put back exactly as it was.

`survey` walks over the modules and lists what a measurement needs. `prepared_model` is the `with` block in which one
runs. `ModuleFacts` keeps what one measurement learned about a module for the next one.

**Several processes.** `DistributedDataParallel` wraps a whole model: the model inside is measured, and no process
communicates. `fully_shard` (FSDP2) leaves a part of every parameter on each process. Outside a pass a module holds that
part, a `DTensor`; during a pass it holds the gathered parameter, the same object every time, whose memory is freed in
between. A measurement identifies a sharded parameter by its gathered form, so everything else works as on one process.
Three things differ:

- FSDP takes every ordinary gradient away and averages it over the processes. Scores belong to the rollouts of one
  process, so their gradients are hidden from it (`plain_passes.run_backward`).
- The head is applied outside the forward pass, and the logits that the model gets in its place have no gradient, so
  FSDP would not gather the modules around the head for the backward pass. They are gathered before it.
- Gathering is a collective operation, so every process must run the same passes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scoregram.checks import fail

# Facts that outlive a measurement


@dataclass
class ModuleFacts:
    """What earlier measurements learned about one module; a whole model is a module too."""

    needs_wide_pass: bool = False
    """Of a model: a pass that observes only the modules that own parameters missed a use of one."""
    axes: dict[Any, Any] = field(default_factory=dict)
    """Of a model: the operations whose activations have the rollouts on their first axis (`axis.Axes`)."""
    probed: set[bool] = field(default_factory=set)
    """Of a model: the kinds of passes, narrow or not, that `axes` was learned for."""
    broadcast_axes: int | None = None
    """Of a norm-like module, which only broadcasts its parameters: the number of axes of its input."""
    gathered: list[tuple[Tensor, Tensor]] | None = None
    """Of a module with `fully_shard`: pairs (sharded, gathered) of all parameters that it manages."""


_FACTS: WeakKeyDictionary[nn.Module, ModuleFacts] = WeakKeyDictionary()
"""Keyed weakly and per module: the facts die with the module, and no fact keeps another module alive."""


def facts_of(module: nn.Module) -> ModuleFacts:
    """The facts about a module, to read or to change."""
    facts = _FACTS.get(module)
    if facts is None:
        facts = _FACTS[module] = ModuleFacts()
    return facts


# Models spread over processes


@dataclass(frozen=True)
class Shards:
    """The sharded part of a model; empty for a model in one process."""

    modules: Sequence[Any] = ()
    """Modules with `fully_shard`, the outermost first."""
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """This process's part of every trained parameter, by name."""
    whole: dict[int, Tensor] = field(default_factory=dict)
    """The gathered form of every parameter, frozen ones included, by the id of this process's part."""

    @contextmanager
    def resharded_afterwards(self) -> Iterator[None]:
        """Every parameter is sharded again after the block, also after an exception."""
        try:
            yield
        except BaseException:
            self.reset_pass()
            raise
        finally:
            for module in self.modules:
                module.reshard()

    def reset_pass(self) -> None:
        """Clear FSDP's record of a forward pass whose backward pass will not follow."""
        for module in self.modules[:1]:
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()

    def discard_pass(self) -> None:
        """Shard every parameter again after a forward pass without a backward pass."""
        self.reset_pass()
        for module in self.modules:
            module.reshard()

    def gather_around(self, inner: Callable[[], nn.Module]) -> None:
        """Gather the parameters of the sharded modules around `inner()`; the backward pass frees them."""
        for module in self.modules:
            if any(part is inner() for part in module.modules()):
                module.unshard()

    def largest_count(self, count: int) -> int:
        """The largest `count` among the processes; `count` itself for a model in one process."""
        if not self.modules:
            return count
        largest = torch.tensor(count, device=next(iter(self.sharded.values())).device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)


def model_inside(model: nn.Module) -> nn.Module:
    """The model without the wrappers of `torch.compile` and `DistributedDataParallel`."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model_inside(model.module)
    return getattr(model, "_orig_mod", model)


def averages_gradients(model: nn.Module) -> bool:
    """Whether gradients of a model are averaged over processes: data parallel or sharded."""
    return isinstance(model, nn.parallel.DistributedDataParallel) or bool(sharded_modules(model_inside(model)))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules with `fully_shard`, the outermost first; their parameters are sharded when this returns.

    Raises:
        ScoregramError: For the older `FullyShardedDataParallel`, which flattens parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported, so nothing is sharded
        return []
    modules: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            modules.append(module)
            modules[-1].reshard()
        elif isinstance(module, fsdp.FullyShardedDataParallel):
            got = f"FullyShardedDataParallel around {name or 'the model'}"
            fail("measure_gram", "parameters must be whole, or sharded one by one", got, "Use fully_shard (FSDP2).")
    return modules


def shards_of(modules: Sequence[Any], parameters: dict[str, Tensor]) -> Shards:
    """The sharded part of a model; replaces sharded parameters in `parameters` by their gathered forms.

    Raises:
        ScoregramError: If a gathered parameter is still a `DTensor`, as with tensor parallelism.
    """
    whole_of = {id(part): whole for module in modules for part, whole in gathered_parameters(module)}
    shards = Shards(modules, dict(parameters) if modules else {}, whole_of)
    for name, parameter in parameters.items():
        whole = whole_of.get(id(parameter), parameter)
        if is_distributed(whole):
            got = f"{name} with placements {getattr(whole, 'placements', '')}"
            fail("measure_gram", "gathered parameters must be whole", got, "Measure without tensor parallelism.")
        parameters[name] = whole
    return shards


def gathered_parameters(module: Any) -> list[tuple[Tensor, Tensor]]:
    """Pairs (sharded, gathered) of the parameters that one sharded module manages; gathers them the first time."""
    held = [(owner, name, part) for owner in module.modules() for name, part in owner._parameters.items()]
    facts = facts_of(module)
    known = facts.gathered
    # FSDP makes new sharded parameters when a model is moved or loaded; then the pairs are stale.
    if known is None or {id(part) for part, _ in known} - {id(part) for _, _, part in held}:
        module.unshard()
        pairs = [(part, owner._parameters[name]) for owner, name, part in held if part is not None]
        known = [(part, whole) for part, whole in pairs if whole is not part]
        module.reshard()
        facts.gathered = known
    return known


def is_distributed(parameter: Tensor) -> bool:
    """Whether a parameter is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def local_part(parameter: Tensor) -> Tensor:
    """This process's part of a sharded parameter; a whole one as it is."""
    return parameter.to_local() if is_distributed(parameter) else parameter  # pyright: ignore[reportAttributeAccessIssue]


# One walk over the modules


@dataclass(frozen=True)
class Survey:
    """The modules of a model, listed by what a measurement does with them."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Every parameter that requires gradients, once, by its first name; of a sharded one, its gathered form."""
    owners: list[nn.Module] = field(default_factory=list)
    """Modules that own such parameters."""
    in_training: list[nn.Module] = field(default_factory=list)
    """Modules in training mode, except those that checkpoint: they do so only in training mode."""
    checkpointing: list[nn.Module] = field(default_factory=list)
    """Modules that hold a checkpointing function."""
    configs: dict[int, Any] = field(default_factory=dict)
    """Configurations of the modules, each once, by id."""
    dropping: list[nn.Module] = field(default_factory=list)
    """Modules with active dropout."""
    shards: Shards = field(default_factory=Shards)
    """The part of the model that is sharded over several processes."""


PURE_CONTAINERS = frozenset({nn.ModuleDict, nn.ModuleList, nn.Identity, nn.Sequential})
"""Modules that only hold others; with adapters most modules are of these types, and skipping them saves host time."""


def survey(model: nn.Module) -> Survey:
    """The survey of a model, from one walk over its modules, parents before children."""
    listed = Survey()
    sharded = sharded_modules(model)
    seen: set[int] = set()
    named: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        state = module.__dict__
        if type(module) not in PURE_CONTAINERS or state["_parameters"]:
            list_module(listed, prefix, module, named)
        children = state["_modules"]
        if children:
            stack += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]
    return replace(listed, shards=shards_of(sharded, listed.parameters))


def list_module(listed: Survey, prefix: str, module: nn.Module, named: set[int]) -> None:
    """Add one module to a survey; `named` holds the ids of the parameters that have a name already."""
    state = module.__dict__
    trained = {name: p for name, p in state["_parameters"].items() if p is not None and p.requires_grad}
    for name, parameter in trained.items():
        if id(parameter) not in named:
            named.add(id(parameter))
            listed.parameters[prefix + name] = parameter
    if trained:
        listed.owners.append(module)
    if state["training"]:
        if not state.get("gradient_checkpointing", False):
            listed.in_training.append(module)
        if has_dropout_rate(module):
            listed.dropping.append(module)
    if "_gradient_checkpointing_func" in state:
        listed.checkpointing.append(module)
    if (config := state.get("config")) is not None:
        listed.configs[id(config)] = config


def has_dropout_rate(module: nn.Module) -> bool:
    """Whether a module has a positive dropout rate: a dropout layer, or an attention with its own."""
    name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "attention_dropout"
    rate = module.__dict__.get(name, 0.0)
    return isinstance(rate, float) and rate > 0


# Prepared inside a block, as before outside it


@contextmanager
def prepared_model(model: Survey) -> Iterator[None]:
    """The model prepared for a measurement inside the block, and exactly as before outside, random state included."""
    parameters = list(model.parameters.values())
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(parameters[0].device))
        stack.enter_context(gradients_put_aside([*parameters, *model.shards.sharded.values()]))
        stack.enter_context(model.shards.resharded_afterwards())
        # Recompute checkpointed layers through saved-tensor hooks: a nested backward pass would accumulate gradients on
        # its own, out of reach of `plain_passes`.
        name = "_gradient_checkpointing_func"
        stack.enter_context(attributes(model.checkpointing, name, lambda _: partial(checkpoint, use_reentrant=False)))
        # Let mixtures multiply one expert at a time: plain products, which the interceptor knows.
        name = "_experts_implementation_internal"
        mixtures = [config for config in model.configs.values() if name in vars(config)]
        stack.enter_context(attributes(mixtures, name, lambda _: "eager"))
        yield


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """The random generators continue after the block as if it had drawn nothing."""
    saved = random_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved[1], device)


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the random generators that a forward pass on `device` would draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def gradients_put_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """`.grad` is None inside the block and as before outside it.

    A gradient that appears inside then proves that some use of its parameter was not intercepted.
    """
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
def in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules that are in training mode into evaluation mode inside the block, and back after it."""
    states = [module.__dict__ for module in modules]  # `module.training = …` costs more host time
    for state in states:
        state["training"] = False
    try:
        yield
    finally:
        for state in states:
            state["training"] = True


@contextmanager
def attributes(owners: Sequence[Any], name: str, value: Callable[[Any], object]) -> Iterator[None]:
    """Attribute `name` of each owner is `value(owner)` inside the block; outside it is as before, or absent."""
    absent = object()
    saved = [vars(owner).get(name, absent) for owner in owners]
    for owner in owners:
        vars(owner)[name] = value(owner)
    try:
        yield
    finally:
        for owner, before in zip(owners, saved, strict=True):
            if before is absent:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before
