"""Run-time checks of every annotation in scoregram, as cheap as the annotation allows.

Under pytest, jaxtyping's import hook decorates every function of the package with `jaxtyping.jaxtyped`. That decorator
binds the arguments to the signature and checks them twice in every call, which was half of the suite's time.
`checked` does the same checks once: beartype checks arguments and return value, and axis names are shared between them
within one call; the `__init__` of a dataclass is such a function. `matches` is the comparison of a tensor with a shape
that jaxtyping makes, without its copies. Shapes that refer to an argument (`"{group_size}"`), and names of classes in
quotes other than that of the method's own class, go to jaxtyping. Triton kernels are left as they are.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch


def install() -> None:
    """Replace jaxtyping's decorator, if its import hook is installed; scoregram must not be imported yet."""
    if not any(type(finder).__name__ == "_JaxtypingFinder" for finder in sys.meta_path):
        return
    assert "scoregram" not in sys.modules
    package: Any = import_module("jaxtyping")
    package.jaxtyped = functools.partial(checked, jaxtyped=package.jaxtyped)
    package._array_types._MetaAbstractArray.__instancecheck__ = matches
    hook = package._import_hook
    hook._JaxtypingLoader.exec_module = execute_module
    hook._JaxtypingFinder.should_instrument = functools.partialmethod(
        should_check, of_package=hook._JaxtypingFinder.should_instrument
    )


def should_check(finder: Any, module_name: str, *, of_package: Callable[..., bool]) -> bool:
    """Whether the functions of a module are checked: all of the package but the Triton kernels.

    `triton.jit` compiles the source of a function and looks its names up in `__globals__`. Those of a checking wrapper
    are the wrapper's, which have no `tl`.
    """
    return not module_name.endswith(".triton_kernels") and of_package(finder, module_name)


def execute_module(loader: Any, module: Any) -> None:
    """Load the bytecode of a module of scoregram under jaxtyping's name for it, then run the module.

    jaxtyping keeps its name for bytecode files in force while the module runs, so that everything which the module
    imports, torch and transformers included, would be compiled again.
    """
    from jaxtyping import _import_hook as hook

    name = functools.partial(hook._optimized_cache_from_source, loader._typechecker.get_hash())
    with patch("importlib._bootstrap_external.cache_from_source", name):
        code = loader.get_code(module.__name__)
    exec(code, module.__dict__)


def checked(fn: Any = None, *, typechecker: Any, jaxtyped: Callable[..., Any]) -> Any:
    """`jaxtyped(fn, typechecker=typechecker)`, with every check made once."""
    if fn is None:
        return functools.partial(checked, typechecker=typechecker, jaxtyped=jaxtyped)
    if inspect.isclass(fn):
        return with_checked_fields(fn, typechecker=typechecker, jaxtyped=jaxtyped)
    if not inspect.isfunction(fn) or inspect.iscoroutinefunction(fn):
        return jaxtyped(fn, typechecker=typechecker)
    parts = [part for annotation in fn.__annotations__.values() for part in parts_of(annotation)]
    shapes = [str(part.dim_str) for part in parts if hasattr(part, "dim_str")]
    own_class = fn.__qualname__.rpartition(".")[0]
    quoted = {part for part in parts if isinstance(part, str)}
    if quoted - {own_class} or any("{" in shape for shape in shapes):
        return jaxtyped(fn, typechecker=typechecker)
    checked_fn = with_checked_types(fn, typechecker)
    return with_axis_names(fn, checked_fn) if shapes else without_axis_names(fn, checked_fn)


def with_checked_fields(cls: type, *, typechecker: Any, jaxtyped: Callable[..., Any]) -> type:
    """The class; if it is a dataclass, its `__init__` checks the fields, unless it inherits one that does."""
    init: Any = cls.__init__
    if dataclasses.is_dataclass(cls) and init.__globals__["__name__"] not in (__name__, jaxtyped.__module__):
        cls.__init__ = checked(init, typechecker=typechecker, jaxtyped=jaxtyped)
    return cls


CHECKS_OF_INNER_FUNCTIONS: dict[CodeType, tuple[dict[str, Any], Any]] = {}
"""Code of a function inside a function → its annotations, and the function with checks when it was last decorated."""


def with_checked_types(fn: Any, typechecker: Any) -> Any:
    """`typechecker(fn)`, once for a function inside a function, which every call of the outer one defines again.

    The next definition with the same code and equal annotations gets a copy that calls itself.
    """
    if inspect.isgeneratorfunction(fn):
        return calling(fn, typechecker(without_yield(fn)))
    if "<locals>" not in fn.__qualname__ or fn.__defaults__ or fn.__kwdefaults__:
        return typechecker(fn)
    annotations, decorated = CHECKS_OF_INNER_FUNCTIONS.get(fn.__code__, ({}, fn))
    if decorated is fn or annotations != fn.__annotations__:
        decorated = typechecker(fn)
        if "__beartype_func" in (decorated.__kwdefaults__ or {}):
            CHECKS_OF_INNER_FUNCTIONS[fn.__code__] = fn.__annotations__, decorated
        return decorated
    return calling(fn, decorated)


def calling(fn: Any, decorated: Any) -> Any:
    """The checks of a function that beartype decorated, around another function with the same annotations.

    beartype writes and compiles a function that takes the one to call as the default of a keyword, and returns the
    function itself if there is nothing to check.
    """
    if "__beartype_func" not in (decorated.__kwdefaults__ or {}):
        return fn
    copy = FunctionType(decorated.__code__, decorated.__globals__, fn.__name__)
    copy.__kwdefaults__ = {**decorated.__kwdefaults__, "__beartype_func": fn}
    return copy


def without_yield(fn: Any) -> Any:
    """A generator function that looks like a function returning an iterator, to be decorated and never called.

    beartype checks the arguments of a generator function at the first `next`, jaxtyping at the call.
    """
    code = fn.__code__.replace(co_flags=fn.__code__.co_flags & ~inspect.CO_GENERATOR)
    plain = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    plain.__kwdefaults__ = fn.__kwdefaults__
    return functools.update_wrapper(plain, fn, updated=())


def parts_of(annotation: Any) -> Iterator[Any]:
    """An annotation and everything within its brackets, unless these are the values of a `Literal`."""
    yield annotation
    if get_origin(annotation) is Literal:
        return
    for inner in annotation if isinstance(annotation, list | tuple) else get_args(annotation):
        yield from parts_of(inner)


def matches(shape: Any, value: Any) -> bool:
    """`isinstance(value, shape)`: by jaxtyping, unless the shape is of tensors and made of names.

    jaxtyping copies the known lengths before it changes them. Here they change once all of the shape is right.
    """
    axes = named_axes(shape)
    if axes is None or not isinstance(value, shape.array_type):
        return shape.__instancecheck_str__(value) == ""
    names, sequence, place = axes
    sizes = value.shape
    more = len(sizes) - len(names)  # length of the sequence of axes
    if not has_dtype(shape, value.dtype) or more < 0 or (more and sequence is None):
        return False
    from jaxtyping._storage import get_shape_memo

    lengths, sequences, *_ = get_shape_memo()
    inner = ()
    if sequence is not None:
        inner, sizes = sizes[place : place + more], sizes[:place] + sizes[place + more :]
        can_broadcast, known = sequences.get(sequence, (False, inner))
        if can_broadcast:
            return shape.__instancecheck_str__(value) == ""
        if known != inner:
            return False
    found = {}
    for name, length in zip(names, sizes, strict=True):
        if lengths.get(name, length) != length or found.setdefault(name, length) != length:
            return False
    lengths.update(found)
    if sequence:
        sequences[sequence] = (False, inner)
    return True


@functools.cache
def named_axes(shape: Any) -> tuple[tuple[str, ...], str | None, int] | None:
    """Names of the single axes; name of the sequence of axes, "" for `...`, None without one; its place among the axes.

    None if an axis is fixed, optional or computed, or the array no tensor.
    """
    from jaxtyping._array_types import _anonymous_variadic_dim, _NamedDim, _NamedVariadicDim
    from torch import Tensor

    axes = list(getattr(shape, "dims", [None]))
    place, sequence = getattr(shape, "index_variadic", None), None
    if place is not None:
        axis = axes.pop(place)
        if axis is not _anonymous_variadic_dim and (type(axis) is not _NamedVariadicDim or is_special(axis)):
            return None
        sequence = "" if axis is _anonymous_variadic_dim else axis.name
    if shape.array_type is not Tensor or any(type(axis) is not _NamedDim or is_special(axis) for axis in axes):
        return None
    return tuple(axis.name for axis in axes), sequence, place or 0


def is_special(axis: Any) -> bool:
    """Whether a named axis may be broadcast or differs between the leaves of a tree."""
    return axis.broadcastable or axis.treepath


@functools.cache
def has_dtype(shape: Any, dtype: Any) -> bool:
    """Whether a tensor of this dtype can have the shape, asked of jaxtyping with an empty one."""
    import torch

    return shape.dtype[torch.Tensor, "..."].__instancecheck_str__(torch.empty(0, dtype=dtype)) == ""


def with_axis_names(fn: Callable[..., Any], checked_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function in whose calls an axis name has one length; unchecked while `jaxtyping_disable` is set."""
    from jaxtyping import config
    from jaxtyping._storage import pop_shape_memo, push_shape_memo

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return fn(*args, **kwargs)
        push_shape_memo({})
        try:
            return checked_fn(*args, **kwargs)
        finally:
            pop_shape_memo()

    return call


def without_axis_names(fn: Callable[..., Any], checked_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose annotations have no shapes; unchecked while `jaxtyping_disable` is set."""
    from jaxtyping import config

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return (fn if config.jaxtyping_disable else checked_fn)(*args, **kwargs)

    return call
