"""The processes that train together: what they tell each other, so that all of them do the same.

Every call here is made by all processes at the same point, or by none. Whatever can fail in one of them alone is done
inside such a call: then it fails in all, and none is left waiting for the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from scoregram.checks import fail

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process and how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and warns."""
        return self.rank == 0

    def everyones(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns in each process, in order and known to all; what fails in one fails in all.

        Raises:
            ScoregramError: `make` failed in another process. Its own error is raised where it failed.
        """
        if self.count == 1:
            return [make()]
        made, failed = None, None
        try:
            made = make()
        except Exception as error:
            failed = error
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, (made, None if failed is None else f"{type(failed).__name__}: {failed}"))
        if failed is not None:
            raise failed
        for rank, (_, error) in enumerate(told):
            if error is not None:
                fail("attach", "all processes must come through", f"{error} in process {rank}", "Look there first.")
        return [made for made, _ in told]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process, known to all; what fails there fails in all."""
        return self.everyones(lambda: make() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    def summed(self, value: Tensor) -> Tensor:
        """The sum over all processes, written into `value`."""
        if self.count > 1:
            dist.all_reduce(value)
        return value


ALONE = Processes()
"""One process."""


def processes_of(trainer: Any) -> Processes:
    """The processes of a trainer, provided that each of them sees rollouts of its own.

    Raises:
        ScoregramError: For parameters that are split in a way that cannot be measured, or rollouts that are.
    """
    accelerator = trainer.accelerator
    kind = str(accelerator.distributed_type).rpartition(".")[2].upper()
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        remedy = "Train data parallel (DDP), or sharded by fully_shard (FSDP with fsdp_version 2)."
        fail("attach", "the model must be whole in every process, or sharded by FSDP2", kind, remedy)
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        fail("attach", "a sharded model must be sharded by FSDP2", "FSDP of version 1", "Set fsdp_version to 2.")
    layout = getattr(accelerator, "parallelism_config", None)
    if split := [name for name in ("tp", "cp", "sp") if getattr(layout, f"{name}_enabled", False)]:
        got = f"a parallelism_config with {', '.join(split)}"
        fail("attach", "every process must have whole rollouts of its own", got, "Use data parallelism alone.")
    if accelerator.num_processes == 1:
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        got = f"{accelerator.num_processes} processes without torch.distributed"
        fail("attach", "several processes must be connected", got, "Start them with torchrun or accelerate launch.")
    return Processes(int(accelerator.process_index), int(accelerator.num_processes))
