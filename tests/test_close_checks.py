"""The quick comparison of tensors accepts what torch's own accepts, and nothing else."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests import close_checks

BY_TORCH = torch.testing.assert_close.keywords["by_torch"]  # pyright: ignore[reportFunctionMemberAccess]
VALUES: list[Any] = [
    torch.tensor([1.0, -2.0]),
    torch.tensor([1.0 + 1e-6, -2.0]),
    torch.tensor([1.001, -2.0]),
    torch.tensor([1.0, math.nan]),
    torch.tensor([math.inf, -2.0]),
    torch.tensor([-math.inf, -2.0]),
    torch.tensor([0.0, 1e-6]),
    torch.tensor([1.0, -2.0], dtype=torch.float64),
    torch.tensor([1.001, -2.0], dtype=torch.float64),
    torch.tensor([1.001, -2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    torch.tensor([1, -2]),
    torch.tensor([True, False]),
    torch.tensor([[1.0, -2.0]]),
    torch.tensor([1.0 + 1j, -2.0]),
    torch.tensor(1.0),
    torch.empty(0),
    torch.tensor([1.0, -2.0]).to_sparse(),
    torch.nn.Parameter(torch.tensor([1.0, -2.0])),
    [1.0, -2.0],
    1.0,
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"rtol": 0, "atol": 0},
    {"rtol": 1e-2, "atol": 0.0},
    {"rtol": 0.0, "atol": 1e-5},
    {"rtol": 1e-2},
    {"equal_nan": True},
    {"check_dtype": False},
]


def refusal(check: Any, *values: Any, **options: Any) -> str:
    """What a comparison raises; "" if it raises nothing."""
    try:
        check(*values, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_answer_is_that_of_torch(options):
    for pair in itertools.product(VALUES, repeat=2):
        assert refusal(torch.testing.assert_close, *pair, **options) == refusal(BY_TORCH, *pair, **options)


def test_close_tensors_take_the_quick_way_and_others_do_not():
    asked = []
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
    close_checks.quick(a, a.clone(), by_torch=lambda *values: asked.append(values))
    assert asked == []
    close_checks.quick(a, b, by_torch=lambda *values: asked.append(values))
    assert asked == [(a, b)]
