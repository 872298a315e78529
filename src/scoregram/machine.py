"""Settings of the machine that several packages share: Triton kernels on a GPU, threads and BLAS on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from scoregram.errors import fail

MOST_THREADS = 1024
"""CPU threads that a user may ask for: the process crashes if the system cannot start as many as requested."""


@cache
def can_launch() -> bool:
    """Whether Triton kernels can run on this machine: torch sees a GPU and Triton is installed."""
    return torch.cuda.is_available() and find_spec("triton") is not None


@cache
def kernel(module: str, name: str) -> Any:
    """A Triton kernel by its module and name, imported at its first launch: CPU builds of torch lack Triton."""
    return getattr(import_module(module), name)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """A block in which torch's attention does not use cuDNN, whose gradient can be `nan` if there is a mask.

    In cuDNN 9.19 (torch 2.11) that of the queries is `nan` if the number of tokens is 64 modulo 128 and all scores of
    a query are far below 0, as in Qwen2.5 (https://github.com/pytorch/pytorch/issues/196678). torch takes its other
    kernels instead.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """A block in which torch uses `count` CPU threads; 0 or None leaves the number as it is.

    The order of a sum depends on the number of threads, so a fixed number gives the same bits on every machine. On tiny
    tensors one thread is also faster than several. The previous number is restored when the block ends, on an exception
    too.

    Raises:
        ScoregramError: If `count` is above `MOST_THREADS`.
    """
    if (count or 0) > MOST_THREADS:
        fail("threads", f"must be at most {MOST_THREADS}", count, "Choose about as many as the machine has cores.")
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        # Code inside the block may set the number as well, so it is restored even if `count` left it as it was.
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def plain_products() -> Iterator[None]:
    """A block in which BLAS computes matrix products on the CPU, not oneDNN.

    On some processors torch uses oneDNN for 16 rows and more, which takes three times as long for few rows and many
    columns. The switch applies to all threads of the process. Only a block that found oneDNN on turns it on again: of
    two blocks that overlap in two threads, the one that ends last may have begun while it was off.
    """
    before = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        if before:
            torch._C._set_mkldnn_enabled(True)
