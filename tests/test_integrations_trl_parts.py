"""The parts of the TRL integration that need no TRL."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.integrations.trl.estimating import own_advantages
from scoregram.integrations.trl.gathering import dealt, gathered, laid_together, merged, part_of
from scoregram.integrations.trl.generation import Generation, laid_out, together
from scoregram.integrations.trl.measuring import relative_error, rollout_weights
from scoregram.integrations.trl.memory import bytes_of_pass, passes_within
from scoregram.integrations.trl.names import order
from scoregram.integrations.trl.recording import Rows, judged
from scoregram.integrations.trl.window import MicroBatch, Window, rows_of


def generation(serial: int = 0, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, math.nan)) -> Generation:
    """Two groups of two: prompts of 3 and 1 tokens, completions of 2, 1, 3 and 0 counted tokens."""
    prompt_mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]])
    completion_mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    return Generation(
        serial=serial,
        policy_step=0,
        group_size=2,
        prompt_ids=torch.arange(1, 13).view(4, 3) * prompt_mask,
        prompt_mask=prompt_mask,
        completion_ids=torch.arange(21, 33).view(4, 3) * completion_mask,
        completion_mask=completion_mask,
        loss_mask=completion_mask.bool(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        by_function={},
        sampled=[[21, 22], [24], [27, 28, 29], [30, 31, 32]],
        prompt_names=["a", "a", "b", "b"],
        behaviour=None,
        has_pictures=False,
    )


def test_compact_rows_hold_the_same_tokens_in_order():
    made = generation()
    coefficients = torch.arange(12.0).view(4, 3)
    padded, compact = (laid_out(made, coefficients, compact=compact) for compact in (False, True))
    assert padded.input_ids.shape == (4, 6) and compact.input_ids.shape == (4, 5)
    for row in range(4):
        here, there = (laid.attention_mask[row].bool() for laid in (padded, compact))
        assert torch.equal(padded.input_ids[row][here], compact.input_ids[row][there])
        assert torch.equal(padded.completion_mask[row][here], compact.completion_mask[row][there])
        assert torch.equal(padded.coefficients[row][here], compact.coefficients[row][there])
        assert there.int().diff().le(0).all(), "padding is on the right"
    both = together([compact, padded])
    assert both.input_ids.shape == (8, 6) and torch.equal(both.input_ids[4:], padded.input_ids)


def cut(made: Generation, rows: slice, prompt: slice, completion: slice) -> Generation:
    """What one process has of a generation, padded as its own rollouts need it."""
    return replace(
        made,
        prompt_ids=made.prompt_ids[rows, prompt],
        prompt_mask=made.prompt_mask[rows, prompt],
        completion_ids=made.completion_ids[rows, completion],
        completion_mask=made.completion_mask[rows, completion],
        loss_mask=made.loss_mask[rows, completion],
        advantages=made.advantages[rows],
        rewards=made.rewards[rows],
        by_function={name: values[rows] for name, values in made.by_function.items()},
        sampled=made.sampled[rows],
        prompt_names=made.prompt_names[rows],
        behaviour=None if made.behaviour is None else made.behaviour[rows, completion],
    )


def test_slices_of_processes_are_put_together_again():
    made = replace(generation(), by_function={"f": torch.arange(4.0)}, behaviour=torch.arange(12.0).view(4, 3))
    first = cut(made, slice(0, 1), slice(0, 3), slice(0, 2))
    rest = cut(made, slice(1, 4), slice(0, 3), slice(0, 3))
    whole = merged([first, rest])
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "loss_mask", "advantages"):
        assert torch.equal(getattr(whole, name), getattr(made, name))
    assert torch.equal(whole.by_function["f"], made.by_function["f"])
    assert whole.behaviour is not None and made.behaviour is not None
    assert torch.equal(whole.behaviour * whole.loss_mask, made.behaviour * made.loss_mask)
    assert (whole.sampled, whole.prompt_names) == (made.sampled, made.prompt_names)
    short = cut(made, slice(2, 4), slice(2, 3), slice(0, 3))
    whole = merged([cut(made, slice(0, 2), slice(0, 3), slice(0, 2)), short])
    assert [whole.prompt_of(row) for row in range(4)] == [made.prompt_of(row) for row in range(4)]
    with pytest.raises(ScoregramError, match="must hold whole groups of 2, got 3 rollouts"):
        merged([rest])


def test_padding_of_a_slice_stays_where_positions_depend_on_it():
    made = generation()
    slices = [cut(made, slice(0, 2), slice(0, 3), slice(0, 2)), cut(made, slice(2, 4), slice(2, 3), slice(0, 3))]
    laid = laid_together(slices, None, compact=False)
    assert laid.input_ids.shape == (4, 5)
    assert laid.attention_mask[2:].tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_a_step_that_processes_saw_differently_is_refused():
    window = Window(step=1)
    parts = [
        part_of([generation(serial)], window, scale=1.0, limit=1.0, processes=2, only_chosen=False) for serial in (0, 1)
    ]
    with pytest.raises(ScoregramError, match=r"same generations, got \[\[0\], \[1\]\]"):
        gathered(parts)


def test_derivatives_are_those_of_the_mean_over_processes():
    made, window = generation(), Window(step=1)
    batch = MicroBatch(rows_of(made)[:2])
    batch.catch(torch.ones(2, 3))
    window.batches.append(batch)
    part = part_of([made], window, scale=4.0, limit=1.0, processes=2, only_chosen=True)
    assert part.chosen[0].tolist() == [True, True, False, False]
    assert torch.equal(part.derivatives[0][:2], made.loss_mask[:2].double() / 8)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_group_is_dealt_to_one_process(processes):
    bounds = [0, 4, 6, 12]
    shares = dealt(bounds, processes, between_prompts=False)
    assert len(shares) == processes
    assert [pair for share in shares for pair in pairwise(share)] == list(pairwise(bounds))
    whole = dealt(bounds, processes, between_prompts=True)
    assert whole[0] == bounds and all(share == [0] for share in whole[1:])


def test_lengths_of_masked_rollouts_are_those_of_what_was_sampled():
    made = generation()
    assert made.token_lengths.tolist() == [2, 1, 3, 3]
    assert made.masked_out.tolist() == [False, False, False, True]


def test_a_window_puts_the_derivatives_back_in_order():
    first, second = generation(4), generation(5)
    window = Window(step=1)
    rows = torch.cat([rows_of(first), rows_of(second)])
    derivative = torch.arange(1.0, 25.0).view(8, 3)
    for places in torch.tensor([[7, 0, 3, 2], [1, 5, 4, 6]]):
        batch = MicroBatch(rows[places])
        batch.catch(derivative[places])
        window.batches.append(batch)
    assert window.is_caught and window.serials == [4, 5]
    for made, own in ((first, derivative[:4]), (second, derivative[4:])):
        assert torch.equal(window.coefficients(made, scale=2.0), own.double() / 2 * made.loss_mask)
    window.batches.pop()
    assert window.chosen(first).tolist() == [0, 2, 3] and window.chosen(second).tolist() == [3]
    parts = Rows([first, second], [window.chosen(first), window.chosen(second)])
    assert parts.bounds == [0, 1, 3, 4] and parts.names == ["a", "b", "b", "b"]


def test_even_derivatives_are_weights_of_scores():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    even = torch.tensor([[2.0, 2.0, 9.0], [-1.0, 0.0, 0.0]])
    mean, unevenness = rollout_weights(even, mask)
    assert mean.tolist() == [2.0, -1.0] and unevenness == 0
    mean, unevenness = rollout_weights(torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]]), mask)
    assert mean.tolist() == [2.0, 0.0]
    assert unevenness == pytest.approx(math.sqrt(2 / 10))


def test_relative_error_is_that_of_the_whole_vector():
    ours = [torch.tensor([3.0, 0.0]), None, torch.tensor([1.0])]
    theirs = [torch.tensor([6.0, 8.0]), torch.tensor([2.0]), None]
    own, other = torch.tensor([3.0, 0.0, 0.0, 1.0]), torch.tensor([3.0, 4.0, 1.0, 0.0])
    assert relative_error(ours, theirs, scale=2.0) == pytest.approx(float((own - other).norm() / other.norm()))
    assert math.isnan(relative_error(ours, [None, None, None]))
    assert relative_error([torch.zeros(2)], [torch.zeros(2)]) == 0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == math.inf


def test_passes_hold_as_many_groups_as_fit(monkeypatch):
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr("scoregram.integrations.trl.memory.bytes_of_pass", lambda model, rollouts, tokens: rollouts)
    bounds = [0, 4, 6, 12, 16]
    assert passes_within(16.0, model, bounds, 8) == [slice(0, 16)]
    assert passes_within(10.0, model, bounds, 8) == [slice(0, 6), slice(6, 16)]
    assert passes_within(6.0, model, bounds, 8) == [slice(0, 6), slice(6, 12), slice(12, 16)]
    assert passes_within(5.0, model, bounds, 8) is None
    assert passes_within(10.0, model, bounds[1:], 8) == [slice(4, 12), slice(12, 16)]
    assert passes_within(1.0, model, [4], 8) == []


def test_the_estimate_grows_with_rollouts_and_tokens_and_shrinks_with_checkpointing():
    from tests.training_cases import SMALL, untrained

    model = untrained(SMALL, 0)
    assert bytes_of_pass(model, 8, 16) < bytes_of_pass(model, 16, 16) < bytes_of_pass(model, 16, 64)
    before = bytes_of_pass(model, 64, 64)
    model.gradient_checkpointing_enable()
    assert bytes_of_pass(model, 64, 64) < before


def test_a_rollout_without_a_reward_is_neither_better_nor_worse():
    rewards = torch.tensor([[1.0, torch.nan, 0.0], [torch.nan, torch.nan, torch.nan]], dtype=torch.float64)
    assert judged(rewards).tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_advantages_from_the_table_leave_out_what_has_no_reward():
    made = generation(rewards=(1.0, 0.0, 0.5, math.nan))
    assert own_advantages("mean", made, None).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert own_advantages(lambda g: g.loss_mask.double(), made, None).shape == (4, 3)
    with pytest.raises(ScoregramError, match="advantages must be finite"):
        own_advantages(lambda g: g.rewards, made, None)


@pytest.mark.parametrize(("older", "newer"), [("1.9.2", "1.16.0"), ("0.29.1", "1.0.0"), ("1.16.0", "1.17.0.dev0")])
def test_versions_are_compared_by_number(older, newer):
    assert order(older) < order(newer)
