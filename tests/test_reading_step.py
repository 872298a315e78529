"""The numbers of a step against loops over its groups, with every reward and with missing ones."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scoregram.gram import Gram
from scoregram.reading import Step, batch_records, gram_of_passes, group_records, outcomes_of, read_step
from scoregram.statistics import baseline_saving, noise_components, signal_to_noise
from tests.report_cases import step_of

PROMPTS, SIZE = 4, 4
NAN = math.nan


def scores(seed: int = 0, count: int = PROMPTS * SIZE) -> Tensor:
    return torch.randn(count, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step_with(rewards: list[list[float]], **changes) -> Step:
    """A measured step of these rewards; advantages are centred over the rollouts that have one, 0 for the others."""
    grid = torch.tensor(rewards, dtype=torch.float64)
    psi = scores(count=grid.numel())
    advantages = (grid - grid.nanmean(1, keepdim=True)).nan_to_num(0.0)
    return replace(step_of(1, grid, advantages, psi @ psi.mT), **changes)


COMPLETE = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.25, 0.5]]
MISSING = [[1.0, NAN, 0.0, 1.0], [1.0, 1.0, NAN, 1.0], [NAN, NAN, NAN, NAN], [0.5, 0.5, 0.25, 0.5]]


@pytest.mark.parametrize("rewards", [COMPLETE, MISSING])
def test_reward_scalars_are_means_over_what_was_judged(rewards):
    scalars = read_step(step_with(rewards)).scalars
    judged = [[r for r in group if not math.isnan(r)] for group in rewards]
    flat = [r for group in judged for r in group]
    assert scalars["reward"] == pytest.approx(sum(flat) / len(flat))
    spreads = [
        math.sqrt(sum((r - sum(g) / len(g)) ** 2 for r in g) / len(g)) for g in judged if g
    ]  # population deviation, group by group
    assert scalars["reward_std"] == pytest.approx(sum(spreads) / len(spreads))
    assert scalars["live_groups"] == sum(len(set(group)) > 1 for group in judged) == 2
    assert scalars["groups"] == PROMPTS
    assert scalars["groups/all_right"] == 1 / PROMPTS
    assert scalars["groups/all_wrong"] == (1 / PROMPTS if rewards is COMPLETE else 0.0)


def test_an_all_right_group_with_a_missing_reward_stays_dead():
    assert outcomes_of(torch.tensor(MISSING)) == ["live", "all right", "unjudged", "live"]
    assert outcomes_of(torch.tensor([[0.3, NAN, 0.3], [0.0, 0.0, NAN], [NAN, NAN, 2.0]])) == [
        "tied",
        "all wrong",
        "tied",
    ]


def test_noise_comes_from_the_prompts_that_have_every_reward():
    step = step_with([[1.0, 0.0, 0.0, 1.0], [1.0, NAN, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    assert step.gram is not None
    rows = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15])
    grid = step.rollouts.reward_grid[[0, 2, 3]]
    noise = noise_components(step.gram.matrix[rows][:, rows], grid)
    scalars = read_step(step).scalars
    assert scalars["gram/gradient_squared"] == pytest.approx(noise.gradient_squared)
    assert scalars["gram/snr"] == pytest.approx(signal_to_noise(noise, 3, SIZE))
    blocks = torch.stack([step.gram.matrix[4 * p : 4 * p + 4, 4 * p : 4 * p + 4] for p in (0, 2, 3)])
    assert scalars["gram/baseline_saving"] == pytest.approx(baseline_saving(blocks, grid).fraction)


def test_the_noise_of_a_step_with_missing_rewards_is_that_of_its_complete_prompts_alone():
    """As if the incomplete prompts had not been sampled, for every set of at least two complete ones."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 0.5, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
    for kept in (kept for count in (2, 3, 4) for kept in itertools.combinations(range(PROMPTS), count)):
        whole = step_with([row if p in kept else [NAN, *row[1:]] for p, row in enumerate(rewards)])
        rows = torch.tensor([p * SIZE + i for p in kept for i in range(SIZE)])
        assert whole.gram is not None
        grid = torch.tensor([rewards[p] for p in kept], dtype=torch.float64)
        alone = step_of(1, grid, grid - grid.mean(1, keepdim=True), whole.gram.matrix[rows][:, rows])
        one, other = read_step(whole).scalars, read_step(alone).scalars
        for name in ("gradient_squared", "between_prompts", "within_prompt", "snr", "noise_scale"):
            assert one[f"gram/{name}"] == pytest.approx(other[f"gram/{name}"], nan_ok=True), (name, kept)


def test_the_update_is_that_of_the_weights():
    step = step_with(MISSING)
    psi = scores()
    update = step.weights @ psi
    scalars = read_step(step).scalars
    assert scalars["gram/update_norm"] == pytest.approx(float(update.norm()))
    shares = (step.weights[:, None] * psi) @ update / update.square().sum()
    assert scalars["gram/largest_share"] == pytest.approx(float(shares.max()))


def test_means_over_groups_leave_out_what_is_undefined():
    reading = read_step(step_with(COMPLETE))
    ranks = [group.effective_rank for group in reading.groups]
    assert [math.isnan(rank) for rank in ranks] == [False, True, True, False]
    assert reading.scalars["group/effective_rank"] == pytest.approx((ranks[0] + ranks[3]) / 2)


def test_rows_of_a_loss_carry_their_weights():
    step = step_with(COMPLETE, kind="loss")
    assert step.gram is not None
    scalars = read_step(step).scalars
    assert scalars["gram/update_norm"] == pytest.approx(float(step.gram.matrix.sum().sqrt()))
    assert "gram/snr" not in scalars and "live_groups" not in scalars  # defined through scores and whole groups


def test_blocks_alone_leave_the_rest_undefined():
    step = step_with(COMPLETE)
    assert step.gram is not None
    same = step.rollouts.group_ids[:, None] == step.rollouts.group_ids
    blocks = replace(step, gram=replace(step.gram, matrix=torch.where(same, step.gram.matrix, NAN)))
    whole, partial = read_step(step).scalars, read_step(blocks).scalars
    assert whole.keys() == partial.keys() and batch_records(blocks) == [] and len(batch_records(step)) == 1
    undefined = {name for name, value in partial.items() if math.isnan(value)}
    assert {"gram/update_norm", "gram/snr", "gram/conflicting_prompts"} <= undefined
    known = {name: value for name, value in partial.items() if name not in undefined}
    assert known == {name: pytest.approx(whole[name]) for name in known}


def test_groups_of_different_sizes():
    psi = scores(count=6)
    step = step_of(
        1, torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64), torch.ones(2, 3), psi @ psi.mT
    )
    uneven = replace(step, rollouts=replace(step.rollouts, group_ids=torch.tensor([0, 0, 0, 0, 1, 1])))
    reading = read_step(uneven)
    assert len(reading.groups) == 2 and reading.scalars["live_groups"] == 2
    assert math.isnan(reading.scalars["gram/snr"]) and not math.isnan(reading.scalars["gram/update_norm"])
    assert [len(record.rewards) for record in group_records(uneven, reading.groups)] == [4, 2]


def test_a_step_that_was_not_measured_has_rewards_only():
    reading = read_step(replace(step_with(COMPLETE), gram=None))
    assert reading.groups == () and not any(name.startswith(("gram/", "group/")) for name in reading.scalars)


def test_passes_become_one_gram_with_nan_between_them():
    parts = [
        Gram(torch.full((n, n), float(n)), {"a": torch.ones(n, n)}, torch.zeros(n, 3), notes=("x",)) for n in (2, 1)
    ]
    parts[1] = replace(parts[1], by_layer={"a": torch.ones(1, 1), "b": torch.ones(1, 1)})
    whole = gram_of_passes(parts)
    assert whole.matrix.shape == (3, 3) and whole.notes == ("x",) and whole.log_probs.shape == (3, 3)
    assert whole.matrix.isnan().tolist() == [[False, False, True], [False, False, True], [True, True, False]]
    assert whole.by_layer["b"][:2, :2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert gram_of_passes(parts[:1]) is parts[0]
