"""Stage 3, operations: the torch functions that the rules of interception name, and what their arguments are."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

MATRIX_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
PRODUCTS = {*MATRIX_PRODUCTS, torch.bmm, Tensor.bmm}
"""Products of two matrices or of two stacks of matrices."""
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
BROADCASTS = {
    *(*SUMS, *SCALINGS, torch.sub, torch.div, Tensor.sub, Tensor.div),
    *(Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__),
}
CASTS = {Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as}
TRANSPOSES = {torch.transpose, Tensor.transpose}
STACK_TRANSPOSE: Any = Tensor.mT.__get__  # pyright: ignore[reportAttributeAccessIssue]
MATRIX_TRANSPOSES = {torch.t, Tensor.t, Tensor.T.__get__}  # pyright: ignore[reportAttributeAccessIssue]
"""Transposes of a matrix alone: `.T` reverses all axes of a stack."""
ROW_SELECTIONS = {Tensor.__getitem__, torch.index_select, Tensor.index_select}
SPLITS = {torch.split, Tensor.split, torch.chunk, Tensor.chunk}
CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.embedding: ("input", "weight", "padding_idx"),
    torch.matmul: ("input", "other"),
    torch.mm: ("input", "mat2"),
    torch.addmm: ("input", "mat1", "mat2"),
    torch.index_select: ("input", "dim", "index"),
    Tensor.matmul: ("self", "other"),
    Tensor.mm: ("self", "mat2"),
    Tensor.index_select: ("self", "dim", "index"),
}
"""Names of the first arguments of operations with a rule; they may be given as keywords."""


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of an operation, also inside lists and tuples."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value), {})


def positional_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the keywords among `names` moved to their positions."""
    rest = dict(kwargs)
    for name in names[len(args) :]:
        if name not in rest:
            break
        args = (*args, rest.pop(name))
    return args, rest


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors show the same memory in the same shape."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.dtype == other.dtype


def operation_name(func: Callable[..., Any]) -> str:
    """The name of an operation."""
    return getattr(func, "__name__", "")


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether an operation writes into its first argument."""
    name = operation_name(func)
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def is_scalar_index(index: Any) -> bool:
    """Whether an index is one integer, as a number or as a tensor."""
    if isinstance(index, Tensor):
        return index.ndim == 0 and not index.is_floating_point() and index.dtype is not torch.bool
    return isinstance(index, int) and not isinstance(index, bool)
