"""The checks that every other test relies on: a wrong shape or type in a call of scoregram is an error."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int
from jaxtyping._storage import get_shape_memo, pop_shape_memo, push_shape_memo
from torch import Tensor

import scoregram
from scoregram.advantages import leave_one_out
from scoregram.exhibits import Estimate
from scoregram.statistics import update_coherence
from scoregram.theory.theorems import advantage_covariance
from tests.shape_checks import CHECKS_OF_INNER_FUNCTIONS, checked, matches, named_axes

Rows = Float[Tensor, "rows columns"]
Square = Float[Tensor, "rows rows"]
WRONG: Any = [["one"]]


def decorated(fn):
    import beartype
    import jaxtyping
    from jaxtyping import _decorator

    assert jaxtyping.jaxtyped is not _decorator.jaxtyped  # the hook calls ours
    return checked(fn, typechecker=beartype.beartype, jaxtyped=_decorator.jaxtyped)


def test_functions_of_the_package_are_checked():
    with pytest.raises(Exception, match="leave_one_out"):
        leave_one_out(torch.ones(4))  # one axis too few
    with pytest.raises(Exception, match="leave_one_out"):
        leave_one_out(WRONG)
    with pytest.raises(Exception, match="update_coherence"):
        update_coherence(torch.eye(3), torch.ones(4))  # each is right alone
    with pytest.raises(Exception, match="Estimate"):
        Estimate(WRONG)
    assert advantage_covariance(1.0, 4).shape == (4, 4)


def test_every_module_but_those_of_kernels_is_checked():
    """`triton.jit` needs the function itself: on a GPU every launch fails if a kernel is wrapped."""
    source = Path(scoregram.__file__).parent
    modules = [".".join(("scoregram", *p.relative_to(source).with_suffix("").parts)) for p in source.rglob("*.py")]
    kernels = [name for name in modules if "@triton.jit" in Path(loader_of(name).path).read_text(encoding="utf-8")]
    plain = [name for name in modules if type(loader_of(name)) is SourceFileLoader]
    assert sorted(plain) == sorted(kernels) != []


def loader_of(module: str) -> Any:
    spec = find_spec(module.removesuffix(".__init__"))
    assert spec is not None
    return spec.loader


def test_an_axis_name_has_one_length_within_a_call():
    def transposed(x: Rows, y: Rows) -> Float[Tensor, "columns rows"]:
        return y.mT if len(x) < 5 else y

    x = torch.ones(2, 3)
    assert decorated(transposed)(x, x).shape == (3, 2)
    assert decorated(transposed)(x.mT, x.mT).shape == (2, 3)  # the next call begins anew
    with pytest.raises(Exception, match="transposed"):
        decorated(transposed)(x, torch.ones(2, 4))
    with pytest.raises(Exception, match="transposed"):
        decorated(transposed)(torch.ones(6, 3), torch.ones(6, 3))  # only the return value is wrong


def test_a_call_within_a_call_has_axes_of_its_own():
    def inner(x: Rows) -> Square:
        return x @ x.mT

    def outer(x: Rows) -> Square:
        return decorated(inner)(x.mT)[:2, :2]

    assert decorated(outer)(torch.ones(2, 3)).shape == (2, 2)
    with pytest.raises(Exception, match="outer"):
        decorated(outer)(torch.ones(1, 3))


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
KINDS: list[Any] = [Float, Int, Bool]
HINTS: list[Any] = [
    kind[Tensor, axes]
    for kind in KINDS
    for axes in (
        "",
        " a",
        "a b",
        "a a",
        "b a",
        "a b a",
        "a 2",
        "#a b",
        "*a",
        "a ...",
        "_ b",
        "...",
        "*c a",
        "a *c b",
        "*#c a",
        "*c 2",
    )
]


@given(
    shapes=st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_tensor_matches_a_shape_as_jaxtyping_has_it(shapes, dtype, data):
    """The answers for several tensors in one call, and the lengths that are known after each."""
    hints = [data.draw(st.sampled_from(HINTS)) for _ in shapes]
    values = [torch.ones(shape).to(dtype) for shape in shapes]
    assert_same_answers(hints, values)


def assert_same_answers(hints: list[Any], values: list[Tensor]) -> None:
    answers = []
    for check in (matches, lambda hint, value: hint.__instancecheck_str__(value) == ""):
        push_shape_memo({})
        pairs = zip(hints, values, strict=True)
        answers.append([(check(hint, value), *map(dict, get_shape_memo()[:2])) for hint, value in pairs])
        pop_shape_memo()
    assert answers[0] == answers[1]


def test_sequences_of_axes_match_as_jaxtyping_has_it():
    """Every two hints with a sequence of axes, on every two shapes with at most two axes."""
    hints: list[Any] = [Float[Tensor, axes] for axes in ("...", "*c", "*#c", "*c a", "a *c", "a *#c b", "a *c b")]
    values = [torch.ones(shape) for shape in ((), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2))]
    for pair in itertools.product(hints, repeat=2):
        for shapes in itertools.product(values, repeat=2):
            assert_same_answers(list(pair), list(shapes))


def test_jaxtyping_asks_our_comparison():
    tensors: Any = Rows
    arrays: Any = Float[np.ndarray, " rows"]
    assert type(tensors).__instancecheck__ is matches and named_axes(tensors) == (("rows", "columns"), None, 0)
    assert not isinstance([[1.0]], tensors) and isinstance(torch.nn.Parameter(torch.ones(1, 1)), tensors)
    assert named_axes(arrays) is None and isinstance(np.ones(2), arrays)


def test_shapes_inside_other_types_share_the_names():
    def first(xs: list[Rows], square: Square | None = None) -> tuple[Rows, int]:
        return xs[0], 1

    assert decorated(first)([torch.ones(2, 3)], torch.ones(2, 2))[1] == 1
    assert decorated(first)([torch.ones(2, 3)])[1] == 1
    with pytest.raises(Exception, match="first"):
        decorated(first)([torch.ones(2, 3)], torch.ones(3, 3))
    with pytest.raises(Exception, match="first"):
        decorated(first)([torch.ones(3)])


def test_functions_without_shapes_generators_and_shapes_of_arguments():
    def count(x: int) -> int:
        return x if x else WRONG

    def counted(x: int):
        yield x

    def square(n: int, wrong: int = 0) -> Float[Tensor, "{n} {n}"]:
        return torch.ones(n, n + wrong)

    assert decorated(count)(1) == 1 and list(decorated(counted)(2)) == [2] and decorated(square)(3).shape == (3, 3)
    for call in (
        lambda: decorated(count)("one"),
        lambda: decorated(count)(0),
        lambda: decorated(counted)("one"),
        lambda: decorated(square)(3, 1),
    ):
        with pytest.raises(Exception, match=r"type|hint"):
            call()


def test_a_generator_is_checked_when_it_is_called():
    def rows(x: Rows, square: Square, *, count: int = 1) -> Iterator[Tensor]:
        yield from x[:count]

    def no_iterator(x: int):
        yield x

    no_iterator.__annotations__["return"] = int
    made = decorated(rows)(torch.ones(2, 3), torch.ones(2, 2), count=2)
    assert len(list(made)) == 2 and len(list(decorated(rows)(torch.ones(2, 3), torch.ones(2, 2)))) == 1
    with pytest.raises(Exception, match=r"rows\(\) parameter square"):
        decorated(rows)(torch.ones(2, 3), torch.ones(3, 3))  # each is right alone
    with pytest.raises(Exception, match=r"rows\(\) parameter count"):
        decorated(rows)(torch.ones(2, 3), torch.ones(2, 2), count="one")
    with pytest.raises(Exception, match=r"no_iterator\(\) return"):
        decorated(no_iterator)(1)


class Node:
    """A class whose methods are annotated with its own name, which is not defined yet."""

    def other(self, x: Rows, side: Literal["left", "right"]) -> "Node":  # noqa: D102
        return self if side == "left" else WRONG


def test_a_class_named_in_quotes_and_literals():
    other = decorated(Node.other)
    assert other(Node(), torch.ones(1, 1), "left") and other.__globals__["__name__"] == "tests.shape_checks"
    for side in ("right", "up"):
        with pytest.raises(Exception, match=r"Node.other\(\) (return|parameter side)"):
            other(Node(), torch.ones(1, 1), side)
    with pytest.raises(Exception, match=r"Node.other\(\) parameter x"):
        other(Node(), torch.ones(1), "left")


def test_a_function_that_is_defined_again_is_checked_and_is_itself():
    def adder(step: int, hint: type = int):
        def add(x):
            return x + step if x else WRONG

        add.__annotations__ = {"x": hint, "return": hint}
        return decorated(add)

    adders = [adder(step) for step in range(3)]
    assert [add(1) for add in adders] == [1, 2, 3]
    assert adders[0].__wrapped__.__code__ in CHECKS_OF_INNER_FUNCTIONS
    for add in adders:
        with pytest.raises(Exception, match=r"add\(\) parameter x='one'"):
            add("one")
        with pytest.raises(Exception, match=r"add\(\) return"):
            add(0)
    assert adder(1, float)(1.5) == 2.5  # other annotations, other checks
    with pytest.raises(Exception, match=r"add\(\) parameter x='one'"):
        adder(1, float)("one")
    with pytest.raises(Exception, match=r"add\(\) parameter x=1.5"):
        adder(1)(1.5)


def test_fields_of_dataclasses_are_checked():
    @dataclass(frozen=True)
    class Table:
        rows: Rows
        square: Square
        names: list[str] = field(default_factory=list)
        count: int = 0

    @dataclass(frozen=True)
    class Longer(Table):
        more: str = ""

    class Inherits(Table):
        pass

    for cls in (Table, Longer, Inherits):
        assert decorated(cls) is cls and not decorated(cls)(torch.ones(2, 3), torch.ones(2, 2)).names
        init = cls.__init__
        assert decorated(cls).__init__ is init  # wrapped once
        with pytest.raises(Exception, match="square"):
            cls(torch.ones(2, 3), torch.ones(3, 3))  # each is right alone
        with pytest.raises(Exception, match="names"):
            cls(torch.ones(2, 3), torch.ones(2, 2), WRONG)
        with pytest.raises(Exception, match="count"):
            cls(torch.ones(2, 3), torch.ones(2, 2), count=WRONG)
    with pytest.raises(Exception, match="more"):
        Longer(torch.ones(2, 3), torch.ones(2, 2), more=WRONG)


def test_nothing_is_checked_where_a_test_turns_checks_off(unchecked_shapes):
    def count(x: int) -> Rows:
        return WRONG

    def named(x: int) -> str:
        return WRONG

    assert decorated(count)("one") is decorated(named)("one") is WRONG
