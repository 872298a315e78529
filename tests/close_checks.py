"""`torch.testing.assert_close` without its machinery where two tensors are close: a tenth of its time.

It builds a tree of comparisons before it compares, about 0.3 ms a call. `quick` accepts two plain tensors of one
floating dtype, shape and device if `torch.allclose` does, which is the same inequality. Everything else, every failure
among it, goes to torch, which also writes the message.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances


def install() -> None:
    """Replace `torch.testing.assert_close`, before a test module imports it."""
    torch.testing.assert_close = functools.partial(quick, by_torch=torch.testing.assert_close)


def quick(actual: Any, expected: Any, *, by_torch: Callable[..., None], **options: Any) -> None:
    """`assert_close(actual, expected, **options)`."""
    if options.keys() <= {"rtol", "atol"} and are_comparable(actual, expected):
        rtol, atol = options.get("rtol"), options.get("atol")
        if rtol is None and atol is None:
            rtol, atol = default_tolerances(actual, expected)
        if rtol is not None and atol is not None and torch.allclose(actual, expected, rtol=rtol, atol=atol):
            return
    __tracebackhide__ = True
    by_torch(actual, expected, **options)


def are_comparable(actual: Any, expected: Any) -> bool:
    """Whether both are dense tensors on the CPU with one shape and one floating dtype."""
    return (
        type(actual) is Tensor
        and type(expected) is Tensor
        and actual.shape == expected.shape
        and actual.dtype is expected.dtype
        and actual.dtype.is_floating_point
        and actual.device.type == expected.device.type == "cpu"
        and actual.layout is expected.layout is torch.strided
    )
