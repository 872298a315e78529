"""The processes that measure one dump together, started by `torchrun` or alone.

Each reads the whole dump and measures its share of the groups; the first one writes. They go in rounds of as many units
as there are processes, so that they stay together: a model that is sharded over them needs all of them for every pass.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from scoregram.checks import ScoregramError, fail
from scoregram.policy import Policy, PolicyConfig, chosen_device

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process and how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process; an error there is an error in all."""
        if self.count == 1:
            return make()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = make()
            except ScoregramError as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise ScoregramError(told[1])
        return told[0]

    def gathered(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns in each process, in the first one; nothing in others. An error in one is one in all."""
        if self.count == 1:
            return [make()]
        made, error = None, None
        try:
            made = make()
        except ScoregramError as refused:
            error = str(refused)
        errors: list[Any] = [None] * self.count
        dist.all_gather_object(errors, error)
        for message in errors:
            if message is not None:
                raise ScoregramError(message)
        gathered: list[Any] = [None] * self.count
        dist.gather_object(made, gathered if self.is_first else None, dst=0)
        return gathered if self.is_first else []

    def any(self, flag: bool) -> bool:
        """Whether a flag is up in some process."""
        if self.count == 1:
            return flag
        flags: list[Any] = [None] * self.count
        dist.all_gather_object(flags, flag)
        return any(flags)

    def here(self, config: PolicyConfig) -> PolicyConfig:
        """The settings with the device of this process: of several GPUs, the one that `torchrun` has numbered it by."""
        if self.count == 1 or config.device not in ("auto", "cuda") or not torch.cuda.is_available():
            return config
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank))}"
        torch.cuda.set_device(chosen_device(device))
        return replace(config, device=device)


@contextmanager
def all_processes() -> Iterator[Processes]:
    """The processes that `torchrun` has started, or those that are connected already; else this one alone."""
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        dist.init_process_group()
        try:
            yield Processes(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield Processes()


def sharded_policy(load: Callable[[PolicyConfig], Policy], config: PolicyConfig, processes: Processes) -> Policy:
    """The policy with its parameters sharded over all processes, layer by layer.

    It is read into the memory of the host whole, by every process, and only its shards go to the device.

    Raises:
        ScoregramError: If there is one process only.
    """
    if processes.count == 1:
        remedy = "Start it with torchrun --nproc-per-node N."
        fail("measure --fsdp", "a model is sharded over several processes", "one process", remedy)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = chosen_device(config.device)
    policy = load(replace(config, device="cpu"))
    mesh = init_device_mesh(device.type, (processes.count,))
    blocks = set(getattr(policy.model, "_no_split_modules", None) or ())
    for module in policy.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(policy.model, mesh=mesh)
    return policy
