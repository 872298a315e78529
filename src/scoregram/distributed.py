"""The processes of one job, and the collective calls in which they exchange results and errors.

All processes make each call here at the same point, or none of them does. Work that can fail in one process alone runs
inside such a call: then it fails in all of them, and no process waits for the others forever.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from scoregram.checks import ScoregramError, fail

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Size up to which tensors are sent together, as in `DistributedDataParallel`."""


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and warns."""
        return self.rank == 0

    def each(self, make: Callable[[], T]) -> T:
        """The result of `make` in this process; every process calls it, and an error in one is an error in all.

        Raises:
            ScoregramError: If `make` failed in another process. The process in which it failed raises its own error.
        """
        if self.count == 1:
            return make()
        try:
            made = make()
        except Exception as error:
            self._raise_together(error)
            raise
        self._raise_together(None)
        return made

    def gather(self, make: Callable[[], T], *, only_first: bool = False) -> list[T]:
        """The result of `make` in each process, in the order of their ranks; an error in one is an error in all.

        Args:
            make: Called in every process. Its result is pickled if there are several.
            only_first: Send the results to the first process alone; the others return an empty list.

        Raises:
            ScoregramError: If `make` failed in another process. The process in which it failed raises its own error.
        """
        made = self.each(make)
        if self.count == 1:
            return [made]
        results: list[Any] = [None] * self.count
        if only_first:
            dist.gather_object(made, results if self.is_first else None, dst=0)
            return results if self.is_first else []
        dist.all_gather_object(results, made)
        return results

    def from_first(self, make: Callable[[], T]) -> T:
        """The result of `make` in the first process, the only one that calls it; an error there is an error in all."""
        if self.count == 1:
            return make()
        made, error = None, None
        if self.is_first:
            try:
                made = make()
            except Exception as raised:
                error = raised
        self._raise_together(error)
        result: list[Any] = [made]
        dist.broadcast_object_list(result, src=0)
        return result[0]

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes, written into `value`."""
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes; small ones are sent together.

        Every process passes tensors of the same shapes and dtypes in the same order. As in `DistributedDataParallel`,
        they are divided by the number of processes before they are added, in their own dtype.
        """
        if self.count == 1:
            return
        for bucket in _buckets(tensors):
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.sum(flat.div_(self.count))
            if alone:
                continue
            for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process."""
        if self.count == 1:
            return flag
        flags: list[Any] = [None] * self.count
        dist.all_gather_object(flags, flag)
        return any(flags)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise in all processes if one has an error: its own error there, a `ScoregramError` elsewhere."""
        mine = None
        if error is not None:
            mine = (isinstance(error, ScoregramError), str(error), type(error).__name__)
        errors: list[Any] = [None] * self.count
        dist.all_gather_object(errors, mine)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is None:
                continue
            is_ours, message, kind = other
            if is_ours:  # it says what to do already
                raise ScoregramError(message)
            got = f"{kind}: {message} in process {rank}"
            fail("several processes", "every process must finish its part", got, f"Read the log of process {rank}.")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to `BUCKET_BYTES` together, or a larger one alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        kinds = {(one.dtype, one.device) for one in (*bucket, tensor)}
        if bucket and (len(kinds) > 1 or sum(one.nbytes for one in (*bucket, tensor)) > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


ALONE = Processes()
"""One process."""


@contextmanager
def all_processes() -> Iterator[Processes]:
    """The processes that are connected already, or those that `torchrun` started, connected within the block.

    This process alone if there are neither.
    """
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        dist.init_process_group()
        try:
            yield Processes(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield ALONE
