"""The one batch type: rows stay with their groups, whatever is selected, concatenated or missing."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.gram import backward_with_gram, measure_gram
from scoregram.rollouts import Rollouts, concatenated_rollouts, group_passes, micro_batches
from tests.cases import build


def rollouts_of(sizes: list[int], tokens: int = 6, first: int = 0) -> Rollouts:
    """Groups of these sizes; row `i` has `i % 3 + 1` completion tokens after two of prompt, all ids distinct."""
    count = sum(sizes)
    lengths = torch.arange(count) % 3 + 1
    place = torch.arange(tokens)
    return Rollouts(
        input_ids=first + torch.arange(count * tokens).view(count, tokens),
        attention_mask=place < 2 + lengths[:, None],
        completion_mask=(place >= 2) & (place < 2 + lengths[:, None]),
        prompt_lengths=torch.full((count,), 2),
        group_ids=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        prompt_names=[f"p{i}" for i in range(len(sizes))],
        prompts=[f"text {i}" for i in range(len(sizes))],
        answers=[f"answer {i}" for i in range(len(sizes))],
        completions=[f"c{i}" for i in range(count)],
        rewards=torch.arange(count, dtype=torch.float64),
        reward_parts={"f": -torch.arange(count, dtype=torch.float64)},
        log_probs=torch.arange(count * tokens).view(count, tokens).double(),
        finished=torch.arange(count) % 2 == 0,
    )


def test_a_batch_without_rewards_has_missing_ones():
    bare = rollouts_of([2, 1])
    empty = Rollouts(
        **{name: getattr(bare, name) for name in ("input_ids", "attention_mask", "completion_mask")},
        prompt_lengths=bare.prompt_lengths,
        group_ids=bare.group_ids,
    )
    assert empty.rewards.shape == (3,) and bool(empty.rewards.isnan().all()) and empty.rewards.dtype == torch.float64


def test_groups_must_be_adjacent():
    whole = rollouts_of([1, 1])
    with pytest.raises(ScoregramError, match=r"group_ids must ascend, got \[1, 0\]. Put the rollouts of a prompt"):
        Rollouts(
            input_ids=whole.input_ids,
            attention_mask=whole.attention_mask,
            completion_mask=whole.completion_mask,
            prompt_lengths=whole.prompt_lengths,
            group_ids=torch.tensor([1, 0]),
        )


def test_values_by_group():
    even, uneven = rollouts_of([2, 2]), rollouts_of([3, 1])
    assert even.group_size == 2 and even.reward_grid.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert uneven.group_size is None and uneven.group_sizes == [3, 1]
    assert uneven.by_group(uneven.rewards, fill=-1.0).tolist() == [[0.0, 1.0, 2.0], [3.0, -1.0, -1.0]]
    assert [math.isnan(value) for value in uneven.reward_grid[1].tolist()] == [False, True, True]
    assert uneven.group_slices() == [slice(0, 3), slice(3, 4)]


def test_tokens_without_padding_on_either_side():
    batch = rollouts_of([2])
    assert batch.token_ids() == [[0, 1, 2], [6, 7, 8, 9]] and batch.completion_ids() == [[2], [8, 9]]
    left = Rollouts(
        input_ids=torch.tensor([[9, 9, 5, 6, 7]]),
        attention_mask=torch.tensor([[False, False, True, True, True]]),
        completion_mask=torch.tensor([[False, False, False, True, True]]),
        prompt_lengths=torch.tensor([1]),
        group_ids=torch.tensor([0]),
    )
    assert left.token_ids() == [[5, 6, 7]] and left.completion_ids() == [[6, 7]]


def test_a_rollout_that_is_masked_out_keeps_its_length():
    batch = rollouts_of([3])
    masked = Rollouts(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        completion_mask=batch.completion_mask & torch.tensor([[True], [True], [False]]),
        prompt_lengths=batch.prompt_lengths,
        group_ids=batch.group_ids,
    )
    assert masked.lengths.tolist() == batch.lengths.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4], [1, 3], [4], []])
def test_selected_rows_keep_everything_that_is_theirs(kept):
    batch = rollouts_of([2, 2, 1])
    part = batch.select(torch.isin(torch.arange(5), torch.tensor(kept, dtype=torch.int64)))
    groups = [batch.group_ids[row].item() for row in kept]
    assert part.count == len(kept)
    assert part.token_ids() == [batch.token_ids()[row] for row in kept]
    assert part.rewards.tolist() == [float(row) for row in kept]
    assert part.reward_parts["f"].tolist() == [-float(row) for row in kept]
    assert list(part.completions) == [f"c{row}" for row in kept]
    assert [part.prompt_names[group] for group in part.group_ids.tolist()] == [f"p{group}" for group in groups]
    assert len(part.prompt_names) == len(set(groups))
    assert [part.answers[group] for group in part.group_ids.tolist()] == [f"answer {group}" for group in groups]
    assert not kept or bool(part.attention_mask[:, -1].any())  # no column that is padding for all


def test_concatenated_batches_are_padded_and_numbered_on():
    one, other = rollouts_of([2, 1]), rollouts_of([1, 1], tokens=8, first=1000)
    both = concatenated_rollouts([one, other], pad_id=7)
    assert both.group_ids.tolist() == [0, 0, 1, 2, 3] and both.prompt_names == ["p0", "p1", "p0", "p1"]
    assert both.token_ids() == one.token_ids() + other.token_ids()
    assert both.input_ids[0, -2:].tolist() == [7, 7] and both.log_probs is not None
    assert both.log_probs[0, -2:].tolist() == [0.0, 0.0] and both.rewards.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert concatenated_rollouts([one], pad_id=7) is one
    assert both.answers == ["answer 0", "answer 1", "answer 0", "answer 1"]
    unknown = replace(other, answers=())
    assert concatenated_rollouts([one, unknown], pad_id=7).answers == ["answer 0", "answer 1", None, None]
    assert not concatenated_rollouts([unknown, unknown], pad_id=7).answers


def test_a_gram_is_measured_of_rollouts_as_of_their_tensors():
    model = build("Llama")
    batch = replace(rollouts_of([2, 1]), input_ids=rollouts_of([2, 1]).input_ids % 50)
    apart = measure_gram(model, batch.input_ids, batch.completion_mask, batch.attention_mask)
    assert torch.equal(measure_gram(model, batch).matrix, apart.matrix)
    weights = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    assert torch.equal(backward_with_gram(model, batch, weights=weights).matrix, apart.matrix)
    with pytest.raises(ScoregramError, match="a Rollouts must come without masks, got a Rollouts and a mask"):
        measure_gram(model, batch, batch.completion_mask)
    with pytest.raises(ScoregramError, match="token ids need a completion_mask"):
        measure_gram(model, batch.input_ids)


@pytest.mark.parametrize("most", [0, 1, 5, 8, 100])
def test_passes_hold_whole_groups_in_order_as_many_as_fit(most):
    sizes = [4, 2, 3, 8, 1, 1]
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    passes = [owner[here] for here in group_passes(sizes, most)]
    assert [group for part in passes for group in part] == owner
    assert sum(len(set(part)) for part in passes) == len(sizes)  # no group is in two passes
    for part, following in pairwise(passes):
        assert len(part) <= most or len(set(part)) == 1
        assert len(part) + sizes[following[0]] > most  # the next group would not fit
    assert most or len(passes) == 1


@given(count=st.integers(0, 20), size=st.integers(0, 25))
def test_micro_batches_hold_every_row_once_in_order(count, size):
    rows = list(range(count))
    parts = [rows[here] for here in micro_batches(count, size)]
    assert [row for part in parts for row in part] == rows
    assert all(len(part) == (size or count) for part in parts[:-1])
    assert all(0 < len(part) <= (size or count) for part in parts)
