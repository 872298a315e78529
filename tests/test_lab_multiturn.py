import math

import pytest
import torch

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.theory.lab.multiturn import (
    advantage_offset,
    conditional_error,
    credit_costs,
    gradient_bias_by_turn,
    offsets_by_turn,
    rollout_credit,
)
from scoregram.theory.lab.turns import CREDITS
from tests.lab_cases import CASES, case, close, drawn, ordered_groups, walks

FIXED_LENGTH = ("step_rewards", "user_turns")


@pytest.mark.parametrize("key", CASES)
def test_offset_is_past_rewards_plus_the_change_of_value(key):
    at = case(*key)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}
    offset = advantage_offset(at.truth)
    for prompt in range(at.truth.value.numel()):
        for walk in walks(at, prompt, at.policy.parameters):
            for h, (history, _) in enumerate(walk.path):
                change = at.truth.state_value[row_of[history]] - at.truth.state_value[row_of[(prompt,)]]
                close(float(offset[row_of[history]]), sum(walk.rewards[:h]) + float(change))


@pytest.mark.parametrize("key", CASES)
def test_conditional_error_of_the_advantage_is_equation_23(key):
    """For v(s_0) itself, and for the mean of the others, which is an independent unbiased estimate of it."""
    truth = case(*key).truth
    offset = advantage_offset(truth)[:, None].expand_as(truth.advantage)
    exists = truth.listing.action_mask
    for credit in (
        CREDITS["return_minus_start_value"].fn(truth),
        rollout_credit(truth, leave_one_out, group_size=2),
        rollout_credit(truth, leave_one_out, group_size=5),
    ):
        error = conditional_error(truth, credit)
        assert torch.equal(~error.isnan(), exists)
        close(error[exists], offset[exists])
    assert float(offset[exists].abs().max()) > 0.1  # and it is no small thing


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("key", CASES)
def test_the_self_including_mean_shrinks_the_error_and_takes_part_of_the_advantage(key, size):
    truth = case(*key).truth
    exists = truth.listing.action_mask
    error = conditional_error(truth, rollout_credit(truth, mean_centered, group_size=size))
    formula = ((size - 1) * advantage_offset(truth)[:, None] - truth.advantage) / size
    close(error[exists], formula[exists])


@pytest.mark.parametrize("kind", ["tabular", "network"])
def test_conditional_error_matches_all_ordered_groups(kind):
    """E[r_i - mean of the group | s_h, a_h] of the first rollout, by listing every group that it can stand in."""
    key, prompt, size = ("stopping", kind), 0, 2
    at = case(*key)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}
    paths = {id(d): w.path for d, w in zip(drawn(key, prompt), walks(at, prompt, at.policy.parameters), strict=True)}
    mass, total = {}, {}
    for probability, group in ordered_groups(drawn(key, prompt), size):
        returns = [sum(rollout.rewards) for rollout in group]
        for cell in paths[id(group[0])]:
            mass[cell] = mass.get(cell, 0.0) + probability
            total[cell] = total.get(cell, 0.0) + probability * (returns[0] - sum(returns) / size)
    error = conditional_error(at.truth, rollout_credit(at.truth, mean_centered, group_size=size))
    for (history, action), weight in mass.items():
        wanted = total[history, action] / weight - float(at.truth.advantage[row_of[history], action])
        close(float(error[row_of[history], action]), wanted)


@pytest.mark.parametrize("key", CASES)
def test_the_gradient_has_no_bias_at_any_turn(key):
    truth = case(*key).truth
    for credit in (
        CREDITS["return_minus_start_value"].fn(truth),
        CREDITS["total_return"].fn(truth),
        rollout_credit(truth, leave_one_out, group_size=3),
    ):
        bias = gradient_bias_by_turn(truth, credit)
        close(bias, torch.zeros_like(bias))


@pytest.mark.parametrize("key", CASES)
def test_a_baseline_that_sees_the_action_does_bias_a_turn(key):
    truth = case(*key).truth
    assert float(gradient_bias_by_turn(truth, rollout_credit(truth, mean_centered, group_size=2)).max()) > 1e-3


@pytest.mark.parametrize("key", CASES)
def test_offset_is_a_martingale(key):
    truth = case(*key).truth
    turns = offsets_by_turn(truth)
    close([turn.mean for turn in turns], [0.0] * len(turns))
    spreads = [turn.sd for turn in turns]
    assert spreads == sorted(spreads) and spreads[-1] > 0
    close(spreads[0], 0.0)
    within = float(truth.listing.prompt_weights @ truth.reward_variance)
    assert spreads[-1] <= math.sqrt(within) + 1e-12


@pytest.mark.parametrize("key", CASES)
def test_mean_over_the_rollouts_still_going_is_zero_only_at_fixed_length(key):
    turns = offsets_by_turn(case(*key).truth)
    if key[0] in FIXED_LENGTH:
        close([turn.alive for turn in turns], [1.0] * len(turns))
        close([turn.mean_alive for turn in turns], [0.0] * len(turns))
    else:
        assert turns[-1].alive < 1 and abs(turns[-1].mean_alive) > 1e-3


@pytest.mark.parametrize("key", CASES)
def test_offsets_by_turn_match_the_states_of_the_turn(key):
    truth = case(*key).truth
    offset, prompts = advantage_offset(truth), [history[0] for history in truth.listing.histories]
    weight = truth.listing.prompt_weights[prompts] * truth.reach
    depth = torch.tensor([len(history) // 2 for history in truth.listing.histories])
    for turn in offsets_by_turn(truth):
        here = depth == turn.turn
        alive = float(weight[here].sum())
        mean = float(weight[here] @ offset[here]) / alive
        close(turn.alive, alive)
        close(turn.mean_alive, mean)
        close(turn.sd_alive, math.sqrt(float(weight[here] @ (offset[here] - mean).square()) / alive), atol=1e-8)
        close(turn.largest, float(offset[here].abs().max()))


@pytest.mark.parametrize("key", CASES)
def test_costs_of_credit(key):
    size = 4
    rows = {row.name: row for row in credit_costs(case(*key).truth, group_size=size)}
    close([row.formula_gap for row in rows.values()], [0.0] * len(rows))
    close([row.off_direction for row in rows.values()], [0.0] * len(rows))
    scales = [(size - 1) / size if name == "group_mean" else 1.0 for name in rows]
    close([row.gradient_scale for row in rows.values()], scales)
    close([row.relative_bias for row in rows.values()], [1 - scale for scale in scales])
    close(rows["reward_to_go_minus_value"].largest_error, 0.0)
    # The price of not knowing the state is variance.
    assert rows["others_mean"].variance > rows["return_minus_start_value"].variance
    assert rows["return_minus_start_value"].variance > rows["reward_to_go_minus_value"].variance
    assert rows["reward_to_go_minus_value"].variance > rows["exact_advantage"].variance
