"""What several rooms ask of the machine: kernels of our own on a GPU, threads and plain products on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def can_launch() -> bool:
    """Whether kernels can run here at all."""
    return torch.cuda.is_available() and find_spec("triton") is not None


@cache
def kernel(module: str, name: str) -> Any:
    """A kernel by its module and name; a CPU build of torch comes without Triton, so they are loaded when launched."""
    return getattr(import_module(module), name)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads inside the block, whatever the machine has.

    Sums over several depend on how many there are, and over tiny tensors they wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def plain_products() -> Iterator[None]:
    """Matrix products on a CPU by BLAS inside the block.

    torch hands those of 16 rows and more to oneDNN on some processors, which takes three times as long for few rows of
    many columns. The switch is one for all threads of the process.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
