"""Models spread over several processes: what to measure of them, and their parameters while these are gathered.

`DistributedDataParallel` wraps a whole model: the model inside is measured, and nothing is sent. `fully_shard` (FSDP2)
leaves a part of every parameter on each process. Outside a pass a module holds that part, a `DTensor`; while it runs,
it holds a gathered parameter in its place: the same object every time, whose memory is given back in between. A
measurement knows a sharded parameter by its gathered form, so that everything else works as on one process. Three
things are different:

- A sharded model takes every ordinary gradient away and averages it over the processes. Scores belong to the rollouts
  of one process, so their gradients are kept from it (`backward.run_backward`).
- The head is applied outside the forward pass, and what the model returns in its place has no gradient: the modules
  around the head would not be gathered again for the backward pass. They are gathered before.
- Gathering is done by all processes together, so each of them must run the same passes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scoregram.checks import fail

GATHERED: WeakKeyDictionary[nn.Module, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()
"""Pairs (sharded, gathered) of all parameters that a sharded module manages."""


@dataclass(frozen=True)
class Shards:
    """The sharded part of a model; empty for a model in one piece."""

    modules: Sequence[Any] = ()
    """Modules on which `fully_shard` was called, the outermost first."""
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """The part of every trained parameter that lies here, by name."""
    whole: dict[int, Tensor] = field(default_factory=dict)
    """The gathered form of every parameter, frozen ones too, by the id of the part that lies here."""

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Every parameter sharded outside, also after an exception."""
        try:
            yield
        except BaseException:
            self.begin_again()
            raise
        finally:
            for module in self.modules:
                module.reshard()

    def begin_again(self) -> None:
        """Forget a pass that did not come to its end."""
        for module in self.modules[:1]:
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()

    def gather_around(self, inner: Callable[[], nn.Module]) -> None:
        """Gather the parameters of the sharded modules around `inner()`; the backward pass gives them back."""
        for module in self.modules:
            if any(part is inner() for part in module.modules()):
                module.unshard()

    def most(self, count: int) -> int:
        """The largest `count` among the processes; `count` itself for a model in one piece."""
        if not self.modules:
            return count
        largest = torch.tensor(count, device=next(iter(self.sharded.values())).device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)


def model_inside(model: nn.Module) -> nn.Module:
    """The model without what `torch.compile` and `DistributedDataParallel` put around it."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model_inside(model.module)
    return getattr(model, "_orig_mod", model)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules on which `fully_shard` was called, the outermost first, with their parameters sharded.

    Raises:
        ScoregramError: For modules in which the older `FullyShardedDataParallel` has flattened the parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody can have sharded anything
        return []
    found: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            found.append(module)
            found[-1].reshard()
        elif isinstance(module, fsdp.FullyShardedDataParallel):
            got = f"FullyShardedDataParallel around {name or 'the model'}"
            fail("measure_gram", "parameters must be whole, or sharded one by one", got, "Use fully_shard (FSDP2).")
    return found


def shards_of(modules: Sequence[Any], parameters: dict[str, Tensor]) -> Shards:
    """The sharded part of a model; in `parameters`, sharded ones are replaced by their gathered forms.

    Raises:
        ScoregramError: If a parameter is not whole when gathered, as with tensor parallelism.
    """
    gathered = {id(part): whole for module in modules for part, whole in gathered_in(module)}
    shards = Shards(modules, dict(parameters) if modules else {}, gathered)
    for name, parameter in parameters.items():
        whole = gathered.get(id(parameter), parameter)
        if is_distributed(whole):
            got = f"{name} with placements {getattr(whole, 'placements', '')}"
            fail("measure_gram", "gathered parameters must be whole", got, "Measure without tensor parallelism.")
        parameters[name] = whole
    return shards


def gathered_in(module: Any) -> list[tuple[Tensor, Tensor]]:
    """Pairs (sharded, gathered) of the parameters that one sharded module manages; gathered for that if need be."""
    held = [(owner, name, part) for owner in module.modules() for name, part in owner._parameters.items()]
    known = GATHERED.get(module)
    if known is None or {id(part) for part, _ in known} - {id(part) for _, _, part in held}:
        module.unshard()
        pairs = [(part, owner._parameters[name]) for owner, name, part in held if part is not None]
        known = [(part, whole) for part, whole in pairs if whole is not part]
        module.reshard()
        GATHERED[module] = known
    return known


def is_distributed(parameter: Tensor) -> bool:
    """Whether a parameter is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def here(parameter: Tensor) -> Tensor:
    """The part of a parameter that lies in this process; a whole one as it is."""
    return parameter.to_local() if is_distributed(parameter) else parameter  # pyright: ignore[reportAttributeAccessIssue]


def is_spread(model: nn.Module) -> bool:
    """Whether gradients of a model are averaged over processes: data parallel or sharded."""
    return isinstance(model, nn.parallel.DistributedDataParallel) or bool(sharded_modules(model_inside(model)))
