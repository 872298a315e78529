import math

import pytest
import torch

from scoregram.checks import (
    ScoregramError,
    lookup,
    require_finite,
    require_gram,
    require_grams,
    require_group_size,
    require_in_range,
    require_same_shape,
)


def test_one_error_class_with_a_stdlib_parent():
    assert issubclass(ScoregramError, ValueError)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: require_group_size(torch.zeros(3, 1), at_least=2, caller="f"), ["f: needs", "group of 1", "Sample"]),
        (lambda: require_finite(torch.tensor([1.0, math.nan]), name="r", caller="f"), ["r must be finite", "(1,)"]),
        (lambda: require_finite(torch.tensor([math.inf]), name="r", caller="f"), ["inf at index (0,)"]),
        (
            lambda: require_same_shape(torch.zeros(2), torch.zeros(3), name="a", like_name="b", caller="f"),
            ["a must have the shape of b (3,)", "(2,)"],
        ),
        (lambda: require_in_range(math.nan, low=0.0, high=1.0, name="p", caller="f"), ["p must lie in [0, 1]", "nan"]),
        (lambda: require_gram(torch.zeros(2, 3), caller="f"), ["square", "(2, 3)"]),
        (lambda: require_gram(torch.zeros(0, 0), caller="f"), ["not empty"]),
        (lambda: require_gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), caller="f"), ["symmetric", "2"]),
        (lambda: require_gram(torch.tensor([[-1.0]]), caller="f"), ["negative", "K[0,0] = -1"]),
        (lambda: lookup({"a": 1, "b": 2}, "c", kind="thing"), ["one of a, b", "'c'"]),
    ],
)
def test_message_says_what_was_received_and_what_to_do(call, parts):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_what_passes_comes_back_unchanged():
    values = torch.tensor([[1.0, 2.0]])
    assert require_finite(values, name="r", caller="f") is values
    large = torch.tensor([3e38, 3e38])  # finite, though their sum is not
    assert require_finite(large, name="r", caller="f") is large
    assert require_group_size(values, at_least=2, caller="f") == 2
    gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    torch.testing.assert_close(require_gram(gram, caller="f"), gram.double())


@pytest.mark.parametrize(
    "bad",
    [torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.eye(2) / 0, -torch.eye(2)],
)
def test_a_stack_of_grams_is_checked_like_each_of_them(bad):
    good = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float32)
    assert require_grams(good[None], caller="f").tolist() == [good.tolist()]
    with pytest.raises(ScoregramError) as alone:
        require_gram(bad, caller="f")
    with pytest.raises(ScoregramError) as among:
        require_grams(torch.stack([good, bad, good]), caller="f")
    assert str(among.value) == str(alone.value)
