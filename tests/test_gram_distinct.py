"""Equal rollouts go through the model once, and nothing about the numbers tells."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from scoregram.checks import NotFiniteError
from scoregram.gram import Sketch, backward_with_gram, measure_gram
from tests.cases import ARCHITECTURES, KeepDouble, Rollouts, rollouts
from tests.naive import score_rows

REPEATED = torch.tensor([0, 1, 0, 0, 2, 2, 4, 1])
"""Two groups of four: the first holds two different rollouts, the second three, one of which is in the first too."""


@functools.cache
def model_of(name: str) -> Any:
    return ARCHITECTURES[name]()


def repeated(order: Tensor = REPEATED) -> Rollouts:
    """Five rollouts, some of them several times."""
    few = rollouts()
    return Rollouts(few.input_ids[order], few.completion_mask[order], few.attention_mask[order])


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Rows of every pass through the Llama that is tested here, after its first measurement, which also checks it."""
    counts: list[int] = []
    measure_gram(model_of("llama-tied"), *rollouts().arguments)
    handle = model_of("llama-tied").register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield counts
    handle.remove()


@pytest.mark.parametrize(("group_size", "rows"), [(None, 4), (4, 6)])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_repeated_rollouts_match_the_definition(name, group_size, rows, seen):
    model, batch = model_of(name), repeated()
    weights = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    with KeepDouble():
        naive = score_rows(model, *batch.arguments)
        seen.clear()
        gram = backward_with_gram(model, *batch.arguments, weights=weights, group_size=group_size)
    assert name != "llama-tied" or seen == [rows]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    expected = naive @ naive.T
    if group_size is not None:
        group = torch.arange(8) // group_size
        expected[group[:, None] != group] = torch.nan
    close: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11 * float(expected.nan_to_num().abs().max())}
    torch.testing.assert_close(gram.matrix, expected, equal_nan=True, **close)
    torch.testing.assert_close(sum(gram.by_layer.values()), gram.matrix, equal_nan=True)
    torch.testing.assert_close(flat, weights @ naive, rtol=1e-10, atol=1e-10)


def test_everything_else_is_there_for_every_rollout(seen):
    model, batch, sketch = model_of("llama-tied"), repeated(), Sketch(features=64, seed=3)
    gram = measure_gram(model, *batch.arguments, sketch=sketch)
    few = measure_gram(model, *rollouts().arguments, sketch=sketch)
    assert seen == [4, 5]
    assert gram.sketch is not None and few.sketch is not None
    torch.testing.assert_close(gram.log_probs, few.log_probs[REPEATED])
    torch.testing.assert_close(gram.sketch, few.sketch[REPEATED])


def test_verification_and_packed_rollouts_see_all_of_them():
    model, batch = model_of("llama-tied"), repeated()
    whole = measure_gram(model, *batch.arguments, verify=True)
    real = batch.attention_mask.bool()
    owners = torch.arange(8)[:, None].expand_as(real)[real][None]
    packed = measure_gram(model, batch.input_ids[real][None], batch.completion_mask[real][None], rollout_ids=owners)
    torch.testing.assert_close(packed.matrix, whole.matrix)
    torch.testing.assert_close(packed.log_probs[0], whole.log_probs[real])


def test_several_weight_vectors_are_added_up_for_equal_rollouts():
    model, batch = model_of("llama-tied"), repeated()
    vectors = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = score_rows(model, *batch.arguments)
    factors = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    backward_with_gram(model, *batch.arguments, weights=vectors, combine=lambda gram: factors * len(gram.matrix))
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(flat, 8 * factors @ vectors @ rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["input_ids", "completion_mask", "coefficients"])
def test_what_differs_anywhere_is_measured_for_itself(part, seen):
    batch = repeated(torch.tensor([0, 0, 0]))
    coefficients = torch.ones(3, 11, dtype=torch.float64)
    if part == "input_ids":
        batch.input_ids[1, 5] += 1
    elif part == "completion_mask":
        batch.completion_mask[1, 5] = False
    else:
        coefficients[1, 5] = 0.5
    gram = measure_gram(model_of("llama-tied"), *batch.arguments, coefficients=coefficients)
    assert seen == [2]
    assert gram.matrix[0, 0] == gram.matrix[0, 2] != gram.matrix[0, 1]


def test_all_rollouts_with_a_broken_text_are_named():
    batch = repeated(torch.tensor([0, 1, 0, 2]))
    coefficients = torch.ones(4, 11, dtype=torch.float64)
    coefficients[[0, 2]] = 1e300  # the squared norm overflows
    with pytest.raises(NotFiniteError, match=r"nan or inf for rollout 0, 2 in"):
        measure_gram(model_of("llama-tied"), *batch.arguments, coefficients=coefficients)


def test_rollouts_whose_attention_masks_alone_differ_have_scores_of_their_own():
    model, batch = ARCHITECTURES["llama"](), rollouts()
    ids, mask, attention = batch.input_ids[:1].repeat(2, 1), batch.completion_mask[:1].repeat(2, 1), torch.ones(2, 11)
    attention[1, 0] = 0
    gram = measure_gram(model, ids, mask, attention, keep_padding=True).matrix
    assert not torch.allclose(gram[0], gram[1])
