"""The parts of the TRL integration that need no TRL."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scoregram.integrations
import scoregram.integrations.trl as integration
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.integrations.trl.custom_advantages import own_advantages
from scoregram.integrations.trl.fused_step import FusedStep
from scoregram.integrations.trl.generation import (
    Generation,
    expected_answers,
    merged_generation,
    trl_rows,
)
from scoregram.integrations.trl.gradient_checks import relative_error
from scoregram.integrations.trl.separate_pass import (
    bytes_of_pass,
    pass_inputs,
    passes_within,
    process_bounds,
)
from scoregram.integrations.trl.summary import printed_cell
from scoregram.integrations.trl.support import version_numbers
from scoregram.integrations.trl.window import (
    MicroBatch,
    Window,
    observed_step,
    rollout_weights,
    row_keys,
    step_slice,
)
from scoregram.reading import Step, read_step, rollout_scalars
from scoregram.rollouts import Rollouts
from tests.test_layering import loaded_after

PROMPT_MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]])
COMPLETION_MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
"""The last rollout is masked out; three tokens of it were sampled."""
REWARDS = (1.0, 0.0, 0.0, math.nan)


def generation(
    serial: int = 0,
    rewards: tuple[float, ...] = REWARDS,
    *,
    moves_padding: bool = True,
    rows: slice = slice(0, 4),
    prompt: slice = slice(0, 3),
    completion: slice = slice(0, 3),
) -> Generation:
    """Two groups of two: prompts of 3 and 1 tokens, completions of 2, 1, 3 and 0 counted tokens.

    `rows`, `prompt` and `completion` cut out what one process has, padded as its own rollouts need it.
    """
    output = {
        "prompt_ids": (torch.arange(1, 13).view(4, 3) * PROMPT_MASK)[rows, prompt],
        "prompt_mask": PROMPT_MASK[rows, prompt],
        "completion_ids": torch.arange(21, 33).view(4, 3)[rows, completion],
        "completion_mask": COMPLETION_MASK[rows, completion],
    }
    loss_mask, groups = output["completion_mask"].bool(), torch.arange(4)[rows] // 2
    lengths = torch.tensor([2, 1, 3, 3])[rows]
    columns, rollouts = trl_rows(output, loss_mask, lengths, group_ids=groups - groups[0], moves_padding=moves_padding)
    made = Generation(
        serial=serial,
        policy_step=0,
        group_size=2,
        rollouts=replace(
            rollouts,
            rewards=torch.tensor(rewards, dtype=torch.float64)[rows],
            reward_parts={"f": torch.arange(4.0)[rows]},
            prompt_names=[["a", "b"][group] for group in groups.unique().tolist()],
            answers=[["7", None][group] for group in groups.unique().tolist()],
        ),
        columns=columns,
        **output,  # pyright: ignore[reportArgumentType]
        loss_mask=loss_mask,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5])[rows],
    )
    behaviour = made.in_rows(torch.arange(12.0).view(4, 3)[rows, completion])
    return replace(made, rollouts=replace(made.rollouts, behaviour_log_probs=behaviour))


def test_compact_rows_hold_the_same_tokens_in_order():
    coefficients = torch.arange(12.0).view(4, 3)
    made = {moved: generation(moves_padding=moved) for moved in (False, True)}
    padded, compact = (made[moved].rollouts for moved in (False, True))
    assert padded.input_ids.shape == (4, 6) and compact.input_ids.shape == (4, 5)
    values = {moved: one.in_rows(coefficients) for moved, one in made.items()}
    for row in range(4):
        here, there = (rollouts.attention_mask[row] for rollouts in (padded, compact))
        assert torch.equal(padded.input_ids[row][here], compact.input_ids[row][there])
        assert torch.equal(padded.completion_mask[row][here], compact.completion_mask[row][there])
        assert torch.equal(values[False][row][here], values[True][row][there])
        assert there.int().diff().le(0).all(), "padding is on the right"
        assert torch.equal(values[True][row][compact.completion_mask[row]], coefficients[row][COMPLETION_MASK[row] > 0])
        assert not values[True][row][~compact.completion_mask[row]].any()


def test_expected_answers_come_from_the_dataset():
    rollouts = generation().rollouts
    rows = [{"prompt": "x", "solution": "long", "answer": value} for value in (7, 7, ["no", "text"], ["no", "text"])]
    assert expected_answers(rows, rollouts) == ["7", None]
    assert expected_answers([{"prompt": "x", "ground_truth": f"g{row}"} for row in range(4)], rollouts) == ["g0", "g2"]
    assert expected_answers([{"prompt": "x"}] * 4, rollouts) == []


def test_slices_of_processes_are_merged():
    made = generation()
    first = generation(rows=slice(0, 1), completion=slice(0, 2))
    rest = generation(rows=slice(1, 4))
    whole = merged_generation([first, rest])
    for name in ("prompt_ids", "prompt_mask", "completion_mask", "loss_mask", "advantages"):
        assert torch.equal(getattr(whole, name), getattr(made, name))
    assert torch.equal(whole.completion_ids * whole.completion_mask, made.completion_ids * made.completion_mask)
    assert_same_rollouts(whole.rollouts, made.rollouts)
    short = generation(rows=slice(2, 4), prompt=slice(2, 3))
    whole = merged_generation([generation(rows=slice(0, 2), completion=slice(0, 2)), short])
    assert_same_rollouts(whole.rollouts, made.rollouts)
    values = torch.arange(12.0).view(4, 3)
    assert torch.equal(whole.in_rows(values) * whole.rollouts.attention_mask, made.in_rows(values))
    with pytest.raises(ScoregramError, match="must hold whole groups of 2, got 3 rollouts"):
        merged_generation([rest])


def assert_same_rollouts(one: Rollouts, other: Rollouts) -> None:
    assert one.token_ids() == other.token_ids() and one.prompt_names == other.prompt_names == ["a", "b"]
    assert one.answers == other.answers == ["7", None]
    assert one.group_ids.tolist() == other.group_ids.tolist() == [0, 0, 1, 1]
    assert torch.equal(one.reward_parts["f"], other.reward_parts["f"])
    torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=0, equal_nan=True)
    assert one.behaviour_log_probs is not None and other.behaviour_log_probs is not None
    for row in range(4):
        a, b = (rollouts.attention_mask[row] for rollouts in (one, other))
        assert torch.equal(one.behaviour_log_probs[row][a], other.behaviour_log_probs[row][b])


def trainer_with(*, relative_positions: bool) -> Any:
    """As much of a trainer as decides where padding may be."""
    model: Any = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(rope_theta=1e4 if relative_positions else None)
    return SimpleNamespace(
        model=model, temperature=1.0, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped, device="cpu")
    )


def test_padding_of_a_slice_stays_where_positions_depend_on_it():
    slices = [
        generation(rows=slice(0, 2), completion=slice(0, 2), moves_padding=False),
        generation(rows=slice(2, 4), prompt=slice(2, 3), moves_padding=False),
    ]
    rollouts = merged_generation(slices).rollouts
    inputs = pass_inputs(trainer_with(relative_positions=False), rollouts)
    assert inputs.input_ids.shape == (4, 5)
    assert inputs.attention_mask[2:].int().tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert rollouts.attention_mask[3].int().tolist() == [1, 1, 1, 1, 0], "what was sampled stays in the rollouts"


def test_a_pass_leaves_out_what_the_trainer_masks():
    whole = generation(rewards=(1.0, 0.0, 0.0, 1.0))
    trainer = trainer_with(relative_positions=True)
    inputs = pass_inputs(trainer, whole.rollouts, chosen=torch.arange(4) != 0)
    assert inputs.attention_mask.sum(1).tolist() == [4, 4, 1] and inputs.input_ids.shape == (3, 5)
    assert torch.equal(inputs.coefficients, inputs.completion_mask.double())
    only_masked = whole.rollouts.select(torch.arange(4) == 3)
    assert pass_inputs(trainer, only_masked).input_ids.shape == (1, 1)


def test_a_step_that_processes_saw_differently_is_refused():
    window = Window(step=1)
    parts = [
        step_slice([generation(serial)], window, scale=1.0, limit=1.0, processes=2, is_loss=False) for serial in (0, 1)
    ]
    with pytest.raises(ScoregramError, match=r"same generations, got \[\[0\], \[1\]\]"):
        observed_step(1, parts)


def test_derivatives_are_those_of_the_mean_over_processes():
    made, window = generation(), Window(step=1)
    batch = MicroBatch(row_keys(made)[:2])
    batch.add_gradient(torch.ones(2, 3))
    window.batches.append(batch)
    part = step_slice([made], window, scale=4.0, limit=1.0, processes=2, is_loss=True)
    assert part.chosen[0].tolist() == [True, True, False, False]
    assert torch.equal(part.coefficients[0][:2], made.rollouts.completion_mask[:2].double() / 8)
    assert part.weights[0].tolist() == [1 / 8, 1 / 8, 0, 0] and part.unevenness == 0


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_group_is_dealt_to_one_process(processes):
    bounds = [0, 4, 6, 12]
    shares = process_bounds(bounds, processes, between_prompts=False)
    assert len(shares) == processes
    assert [pair for share in shares for pair in pairwise(share)] == list(pairwise(bounds))
    whole = process_bounds(bounds, processes, between_prompts=True)
    assert whole[0] == bounds and all(share == [0] for share in whole[1:])


def test_lengths_of_masked_rollouts_are_those_of_what_was_sampled():
    made = generation()
    assert made.rollouts.lengths.tolist() == [2, 1, 3, 3]
    zeros = torch.zeros(4, dtype=torch.float64)
    scalars = rollout_scalars(Step(number=1, rollouts=made.rollouts, advantages=zeros, weights=zeros))
    assert scalars == {"masked_out": 1 / 4, "without_reward": 1 / 4, "length": 9 / 4}


def test_a_window_puts_the_derivatives_back_in_order():
    first, second = generation(4), generation(5)
    window = Window(step=1)
    rows = torch.cat([row_keys(first), row_keys(second)])
    derivative = torch.arange(1.0, 25.0).view(8, 3)
    for places in torch.tensor([[7, 0, 3, 2], [1, 5, 4, 6]]):
        batch = MicroBatch(rows[places])
        batch.add_gradient(derivative[places])
        window.batches.append(batch)
    assert window.has_derivatives and window.serials == [4, 5]
    for made, own in ((first, derivative[:4]), (second, derivative[4:])):
        assert torch.equal(window.derivatives(made, scale=2.0), own.double() / 2 * made.loss_mask)
    window.batches.pop()
    assert window.rows_of(first).tolist() == [0, 2, 3] and window.rows_of(second).tolist() == [3]
    part = step_slice([first, second], window, scale=2.0, limit=1.0, processes=1, is_loss=True)
    observed = observed_step(1, [part])
    assert observed.group_bounds == [0, 1, 3, 4] and observed.rollouts.prompt_names == ["a", "b", "b"]
    assert observed.rollouts.token_ids() == [first.rollouts.token_ids()[row] for row in (0, 2, 3)] + [
        second.rollouts.token_ids()[3]
    ]
    assert observed.advantages.tolist() == [1.0, 0.5, -0.5, -0.5]
    assert observed.coefficients is not None
    assert torch.equal(observed.coefficients[0, 3:5], derivative[0, :2].double() / 2)


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
    monkeypatch.setattr(
        "scoregram.integrations.trl.separate_pass.bytes_of_pass", lambda model, rollouts, tokens, **_: rollouts
    )
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


def test_a_rollout_without_a_reward_takes_no_part_in_what_a_step_reads():
    """An all-right group with a missing reward is dead, as it is in a run of our own trainer."""
    nan = math.nan
    rollouts = generation(rewards=(1.0, nan, nan, nan)).rollouts
    zeros = torch.zeros(4, dtype=torch.float64)
    scalars = read_step(Step(number=1, rollouts=rollouts, advantages=zeros, weights=zeros)).scalars
    assert (scalars["reward"], scalars["live_groups"], scalars["groups/all_right"]) == (1.0, 0, 0.5)


def test_advantages_from_the_table_leave_out_what_has_no_reward():
    made = generation(rewards=(1.0, 0.0, 0.5, math.nan))
    assert own_advantages("mean", made, None).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert own_advantages(lambda g: g.loss_mask.double(), made, None).shape == (4, 3)
    with pytest.raises(ScoregramError, match="advantages must be finite"):
        own_advantages(lambda g: g.rewards, made, None)


@pytest.mark.parametrize(("older", "newer"), [("1.9.2", "1.16.0"), ("0.29.1", "1.0.0"), ("1.16.0", "1.17.0.dev0")])
def test_versions_are_compared_by_number(older, newer):
    assert version_numbers(older) < version_numbers(newer)


def test_importing_the_integration_loads_nothing_heavy():
    assert loaded_after("import scoregram.integrations.trl as trl; dir(trl)") == set()
    names = {"attach", "Attachment", "NEWEST_TESTED", "OLDEST_TESTED", "replayed_recommendations"}
    assert names == set(dir(integration))
    assert integration.attach is scoregram.integrations.attach


def test_a_pooled_number_without_an_interval_is_not_printed():
    assert printed_cell(Estimate(1.5), is_withheld=False) == "–"
    assert printed_cell(Estimate(1.5, 1.0, 2.0), is_withheld=False) == "1.5"
    assert printed_cell(math.nan, is_withheld=False) == "–"
    assert printed_cell(math.nan, is_withheld=True) == "failed"


def test_the_rollout_that_is_compared_counts_in_the_update():
    step: Any = SimpleNamespace(generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1e-6, -1.0, 0.0, 0.02, 0.009])
    assert {FusedStep.random_rollout(step, weights) for _ in range(50)} == {1, 3}
    assert FusedStep.random_rollout(step, torch.zeros(3)) is None
