"""Kernels of our own on a GPU: whether they can run here, and how one is had by its name."""

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
