"""Stage 2, the model: survey its modules, prepare it for a measurement, and restore it exactly.

`MeasuredModel.in_use` does this: `claim` raises if another measurement is using the model, `survey` walks
over the modules and lists what a measurement needs, `prepare_model` changes the model, and an `Undo` restores it.
`ModuleFacts` stores what one measurement learned about a module for the next one.

**Several processes.** `DistributedDataParallel` wraps a whole model: the engine measures the model inside, and the
processes do not communicate. `fully_shard` (FSDP2) leaves one shard of every parameter on each process. Between passes
a module holds its shard, a `DTensor`; during a pass it holds the gathered parameter. This is the same tensor object
every time; FSDP frees its memory between passes. A measurement identifies a sharded parameter by its gathered tensor,
so the rest of the engine works as on one process. Three things differ:

- After the backward pass of a layer, FSDP takes every `.grad` and averages it over the processes. Scores belong to the
  rollouts of one process, so `plain_passes.run_backward` takes their gradients first.
- `head` applies the head outside the model, and the logits that the model returns have no gradient. So FSDP would not
  gather the modules around the head for the backward pass; `Shards.gather_around` gathers them.
- Gathering is a collective operation, so every process must run the same passes.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scoregram.checks import fail
from scoregram.distributed import ALONE, Processes
from scoregram.gram.undo import SAVED_BUFFER_BYTES, Undo, buffers_of

# Facts that outlive a measurement


@dataclass
class ModuleFacts:
    """What earlier measurements learned about one module; a whole model is a module too."""

    needs_wide_pass: bool = False
    """Of a model: a narrow pass did not suffice; measurements start with a wide pass."""
    needs_plain_passes: bool = False
    """Of a model: it fails under interception, but runs without."""
    needs_training: bool = False
    """Of a model: it fails in evaluation mode, but runs in training mode; dropout is off in both."""
    axes: dict[Any, Any] = field(default_factory=dict)
    """Of a model: which operations have activations whose first axis runs over the rollouts (`axis.Axes`)."""
    probed: set[bool] = field(default_factory=set)
    """Of a model: the kinds of passes that `axes` was learned for: True for narrow, False for wide."""
    ignores_padding: bool = False
    """Of a model: its log-probabilities were the same with and without padding (`padding_dependence`)."""
    broadcast_axes: int | None = None
    """Of a module that only broadcasts its parameters, such as a norm: the rank (`ndim`) of its input."""
    gathered: list[tuple[Tensor, Tensor]] | None = None
    """Of a module with `fully_shard`: pairs (sharded, gathered) of all parameters that it manages."""


_FACTS: WeakKeyDictionary[nn.Module, ModuleFacts] = WeakKeyDictionary()
"""Keyed weakly and per module: the facts die with the module, and no fact keeps another module alive."""


def facts_of(module: nn.Module) -> ModuleFacts:
    """The facts about a module; the caller may change them."""
    facts = _FACTS.get(module)
    if facts is None:
        facts = _FACTS[module] = ModuleFacts()
    return facts


# Distributed models


@dataclass(frozen=True)
class Shards:
    """The sharded part of a model; empty for a model in one process."""

    modules: Sequence[Any] = ()
    """Modules with `fully_shard`, the outermost first."""
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """This process's shard of every trainable parameter, by name."""
    whole: dict[int, Tensor] = field(default_factory=dict)
    """The gathered tensor of every parameter, frozen ones included, by the id of this process's shard."""

    @contextmanager
    def resharded_afterwards(self) -> Iterator[None]:
        """A block after which every parameter is sharded again, also after an exception."""
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

    def gather_around(self, inner: nn.Module | None) -> None:
        """Gather the parameters of the sharded modules that contain `inner`; the backward pass frees them."""
        for module in self.modules:
            if any(part is inner for part in module.modules()):
                module.unshard()

    def largest_count(self, count: int) -> int:
        """The largest `count` among the processes; `count` itself for a model in one process."""
        if not self.modules:
            return count
        largest = torch.tensor(count, device=next(iter(self.sharded.values())).device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def in_any_process(self, condition: bool) -> bool:
        """Whether a condition holds in any process: a pass that one process must make needs all of them.

        Decisions that depend on the data of one process, such as an operation that only its rollouts reach, go through
        here, so that all processes make the same passes. `condition` itself for a model in one process.
        """
        return bool(self.largest_count(int(condition)))


def model_inside(model: nn.Module) -> nn.Module:
    """The model without the wrappers of `torch.compile` and `DistributedDataParallel`."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model_inside(model.module)
    return getattr(model, "_orig_mod", model)


def averages_gradients(model: nn.Module) -> bool:
    """Whether gradients are averaged over processes: the model is data parallel or sharded."""
    return isinstance(model, nn.parallel.DistributedDataParallel) or bool(sharded_modules(model_inside(model)))


def sharding_processes(model: nn.Module) -> Processes:
    """The processes that hold the shards of a model; this one alone if it is not sharded."""
    if not sharded_modules(model):
        return ALONE
    return Processes(torch.distributed.get_rank(), torch.distributed.get_world_size())


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules with `fully_shard`, the outermost first; shards their parameters if these are gathered.

    Raises:
        ScoregramError: For the older `FullyShardedDataParallel`, which flattens parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():  # nothing can be sharded
        return []
    modules: list[Any] = []
    for module in modules_inside(model):
        if isinstance(module, fsdp.FSDPModule):
            modules.append(module)
            modules[-1].reshard()
        elif isinstance(module, fsdp.FullyShardedDataParallel):
            name = next(name for name, other in model.named_modules() if other is module)
            got = f"FullyShardedDataParallel around {name or 'the model'}"
            fail("measure_gram", "parameters must not be flattened", got, "Use fully_shard (FSDP2).")
    return modules


def modules_inside(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, itself first, parents before children; `model.modules()` in a third of the host time."""
    modules: dict[int, nn.Module] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules.values())


def trainable_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that require gradients, each once, in the order of `model.parameters()` but faster."""
    found = {id(p): p for module in modules_inside(model) for p in module._parameters.values() if p is not None}
    return [parameter for parameter in found.values() if parameter.requires_grad]


def shards_of(modules: Sequence[Any], parameters: dict[str, Tensor]) -> Shards:
    """The sharded part of a model; replaces every sharded parameter in `parameters` by its gathered tensor.

    Raises:
        ScoregramError: If a gathered parameter is still a `DTensor`, as with tensor parallelism.
    """
    whole_of = {id(part): whole for module in modules for part, whole in gathered_parameters(module)}
    shards = Shards(modules, dict(parameters) if modules else {}, whole_of)
    for name, parameter in parameters.items():
        whole = whole_of.get(id(parameter), parameter)
        if is_distributed(whole):
            got = f"{name} with placements {getattr(whole, 'placements', '')}"
            fail("measure_gram", "gathered parameters must not be DTensors", got, "Measure without tensor parallelism.")
        parameters[name] = whole
    return shards


def gathered_parameters(module: Any) -> list[tuple[Tensor, Tensor]]:
    """Pairs (sharded, gathered) of the parameters that one sharded module manages; gathers them the first time."""
    held_parameters = [(owner, name, part) for owner in module.modules() for name, part in owner._parameters.items()]
    facts = facts_of(module)
    known_pairs = facts.gathered
    # FSDP makes new sharded parameters when a model is moved or loaded; then the pairs are stale.
    if known_pairs is None or {id(part) for part, _ in known_pairs} - {id(part) for _, _, part in held_parameters}:
        module.unshard()
        pairs = [(part, owner._parameters[name]) for owner, name, part in held_parameters if part is not None]
        known_pairs = [(part, whole) for part, whole in pairs if whole is not part]
        module.reshard()
        facts.gathered = known_pairs
    return known_pairs


def is_distributed(parameter: Tensor) -> bool:
    """Whether a parameter is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def local_part(parameter: Tensor) -> Tensor:
    """This process's shard of a parameter; the parameter itself if it is not sharded."""
    return parameter.to_local() if is_distributed(parameter) else parameter  # pyright: ignore[reportAttributeAccessIssue]


# One walk over the modules


@dataclass(frozen=True)
class Survey:
    """The modules of a model, listed by what a measurement does with them."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Every trainable parameter once, by its first name; for a sharded one, the gathered tensor."""
    owners: list[nn.Module] = field(default_factory=list)
    """Modules that own trainable parameters."""
    in_training: list[nn.Module] = field(default_factory=list)
    """Modules in training mode, except those with gradient checkpointing, which is off in evaluation mode."""
    checkpointing: list[nn.Module] = field(default_factory=list)
    """Modules that have a checkpointing function."""
    configs: dict[int, Any] = field(default_factory=dict)
    """The configs of the modules, each once, by id."""
    dropping: list[nn.Module] = field(default_factory=list)
    """Modules with active dropout."""
    shards: Shards = field(default_factory=Shards)
    """The part of the model that is sharded over several processes."""


PURE_CONTAINERS = frozenset({nn.ModuleDict, nn.ModuleList, nn.Identity, nn.Sequential})
"""Modules that only hold others. With adapters most modules are of these types; skipping them saves host time."""


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
    """Add one module to a survey; `named` has the ids of the parameters that already have a name."""
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
    """Whether a module has a positive dropout rate: a dropout layer, or an attention with its own rate."""
    name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "attention_dropout"
    rate = module.__dict__.get(name, 0.0)
    return isinstance(rate, float) and rate > 0


# A model in use

LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config settings that make a model change its logits after the head's product."""


_IN_USE: dict[Undo, tuple[int, frozenset[int]]] = {}
"""For every running measurement, oldest first: its thread, and the ids of its modules and trainable parameters."""


class MeasuredModel:
    """The model that is measured, without wrappers, and what the engine knows about it."""

    survey: Survey
    """Taken when the model is first in use; before, another measurement may have changed the model."""
    modules: Sequence[nn.Module] = ()
    """All modules, listed when the model is first claimed."""
    undo: Undo
    """Restores the model at the end of the `in_use` block."""
    large_buffers: Sequence[tuple[Tensor, int]] = ()
    """The buffers whose values are not restored, with their version counters when the model was first in use."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            remedy = "Load it, for example with AutoModelForCausalLM.from_pretrained."
            fail("measure_gram", "model must be a torch module", type(model).__name__, remedy)
        self.model = model_inside(model)
        self.facts = facts_of(self.model)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters, by name."""
        return self.survey.parameters

    @contextmanager
    def in_use(self, undo: Undo) -> Iterator[None]:
        """A block in which the model is prepared and no other measurement can use it; `undo` restores it."""
        self.undo = undo
        self.claim(undo)
        if not hasattr(self, "survey"):
            self.survey = survey(self.model)
            if not self.parameters:
                fail(
                    "measure_gram",
                    "the model needs trainable parameters",
                    "none that requires gradients",
                    "Set requires_grad on the parameters to train.",
                )
            require_one_device(self.parameters)
            large = [buffer for buffer in buffers_of(self.modules) if buffer.nbytes > SAVED_BUFFER_BYTES]
            self.large_buffers = [(buffer, buffer._version) for buffer in large]
        with self.survey.shards.resharded_afterwards():
            prepare_model(self.survey, self.modules, undo)
            if self.facts.needs_training:
                self.set_training(True)
            yield

    def claim(self, undo: Undo) -> None:
        """Claim the modules of the model for one measurement until the end of its `undo` block.

        Raises:
            ScoregramError: If a running measurement uses one of the modules or trainable parameters.
        """
        self.modules = self.modules or modules_inside(self.model)
        own = {id(module) for module in self.modules}
        own.update(id(p) for m in self.modules for p in m._parameters.values() if p is not None and p.requires_grad)
        undo.operations.append((_IN_USE.pop, undo, None))
        _IN_USE[undo] = threading.get_ident(), frozenset(own)  # one dict operation, so threads need no lock
        for other, (thread, used) in list(_IN_USE.items()):
            if other is undo:  # later measurements check against this one
                break
            if not used.isdisjoint(own):
                inside = thread == threading.get_ident()
                fail(
                    "measure_gram",
                    "a module or trainable parameter can be in one measurement at a time",
                    "a call from inside another measurement's forward or backward pass"
                    if inside
                    else "a second thread",
                    "Wait for the other measurement, or measure a deep copy of the model.",
                )

    def set_training(self, training: bool) -> None:
        """Set the modules that the caller had in training mode to training or to evaluation mode."""
        for module in self.survey.in_training:
            vars(module)["training"] = training

    def changed_buffers(self) -> list[str]:
        """Names of the large buffers that the model has changed in place since it was first in use."""
        changed = {id(buffer) for buffer, version in self.large_buffers if buffer._version != version}
        return [name for name, buffer in self.model.named_buffers() if id(buffer) in changed] if changed else []

    def head(self) -> nn.Module | None:
        """The output head, or None."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return head if isinstance(head, nn.Module) else None

    def capturable_head(self) -> Tensor | None:
        """The weight of the output head; None if that is not linear, or if the config changes the logits after it."""
        head = self.head()
        config = getattr(self.model, "config", None)
        if not isinstance(head, nn.Linear) or any(getattr(config, name, None) for name in LOGIT_SETTINGS):
            return None
        return self.survey.shards.whole.get(id(head.weight), head.weight)


def require_one_device(parameters: Mapping[str, Tensor]) -> None:
    """Raise unless all trainable parameters are on one device: their Grams are added there."""
    first_on: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        first_on.setdefault(parameter.device, name)
    if len(first_on) > 1:
        got = " and ".join(f"{name} on {device}" for device, name in first_on.items())
        remedy = "Move the model to one device, or freeze the parameters elsewhere."
        fail("measure_gram", "trainable parameters must be on one device", got, remedy)


def prepare_model(listed: Survey, modules: Sequence[nn.Module], undo: Undo) -> None:
    """Prepare a model for a measurement; `undo` restores it exactly, including the random state."""
    parameters = list(listed.parameters.values())
    device = parameters[0].device
    undo.keep_random_state(device)
    undo.put_gradients_aside([*parameters, *listed.shards.sharded.values()])
    undo.keep_modules(modules)
    for hooks in [p._backward_hooks for p in parameters if p._backward_hooks]:  # they may change the gradient
        undo.operations.append((hooks.update, dict(hooks)))
        hooks.clear()
    undo.keep_torch_state(device)  # listed last, so called first: a mode left behind would see all other operations
    torch.set_grad_enabled(True)
    # In training mode, a batch norm would mix rollouts, and a spectral norm would change its weight in every pass.
    for module in listed.in_training:
        vars(module)["training"] = False
    # Non-reentrant checkpointing: the reentrant kind gives no gradient to the parameters of a layer whose input
    # requires none, as behind a frozen embedding.
    for module in listed.checkpointing:
        vars(module)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
    # Eager mixtures of experts multiply by one expert at a time, in plain products that the interceptor has a rule for.
    copies = {key: with_eager_experts(config) for key, config in listed.configs.items()}
    for module in modules:
        config = copies.get(id(vars(module).get("config")))
        if config is not None:
            vars(module)["config"] = config


def with_eager_experts(config: Any) -> Any:
    """A copy of a config with eager experts; None if the config is eager already or has no such setting.

    A copy, because other models may share the config.
    """
    name = "_experts_implementation_internal"
    if vars(config).get(name) in (None, "eager"):
        return None
    changed = object.__new__(type(config))
    vars(changed).update(vars(config) | {name: "eager"})
    return changed
