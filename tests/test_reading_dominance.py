"""Shares of prompts in the update, against the update itself; their null against a loop over rollouts."""

import math
from dataclasses import replace

import pytest
import torch

from scoregram.reading import SHARE_COLUMN, StoredGroup, group_records, read_run, read_step, returning_prompts
from scoregram.reading.dominance import step_shares
from scoregram.runs import GroupRecord
from tests.report_cases import step_of, write_run
from tests.test_reading_step import COMPLETE, step_with


def shared_group(name: str, step: int, advantages: list[float], share: float) -> StoredGroup:
    values = torch.tensor(advantages, dtype=torch.float64)
    record = GroupRecord(
        step=step,
        prompt_id=name,
        rewards=values,
        lengths=torch.ones(len(values)).long(),
        advantages=values,
        statistics={SHARE_COLUMN: share},
    )
    return StoredGroup(record)


@pytest.mark.parametrize("kind", ["train", "loss"])
def test_the_share_of_a_group_is_the_projection_of_its_gradient_on_the_update(kind):
    generator = torch.Generator().manual_seed(0)
    psi = torch.randn(16, 9, dtype=torch.float64, generator=generator)
    rewards = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    step = step_of(1, rewards, rewards - rewards.mean(1, keepdim=True), psi @ psi.mT, kind=kind)
    weights = torch.ones(16, dtype=torch.float64) if kind == "loss" else step.weights
    updates = (weights[:, None] * psi).reshape(4, 4, 9).sum(1)
    expected = (updates @ updates.sum(0) / updates.sum(0).square().sum()).tolist()
    reading = read_step(step)
    shares = [StoredGroup(record).update_share for record in group_records(step, reading.groups)]
    assert shares == pytest.approx(expected)
    assert reading.scalars["gram/largest_prompt_share"] == pytest.approx(max(expected))


def test_no_share_without_the_gram_of_a_whole_step_that_trained_the_policy():
    step = step_with(COMPLETE)
    assert step.gram is not None
    same = step.rollouts.group_ids[:, None] == step.rollouts.group_ids
    blocks = replace(step, gram=replace(step.gram, matrix=torch.where(same, step.gram.matrix, math.nan)))
    readings = read_step(step).groups
    assert all(SHARE_COLUMN in record.statistics for record in group_records(step, readings))
    for one, is_whole in ((blocks, True), (replace(step, kind="fixed"), True), (step, False)):
        records = group_records(one, readings, is_whole_step=is_whole)
        assert all(math.isnan(StoredGroup(record).update_share) for record in records)


def test_shares_survive_the_run_folder(tmp_path):
    write_run(tmp_path / "run", steps=3)
    run = read_run(tmp_path / "run")
    for step in (1, 2, 3):
        shares = [group.update_share for group in run.groups if group.record.step == step]
        (line,) = (line for line in run.lines if line["step"] == step and "reward" in line)
        assert sum(shares) == pytest.approx(1) and max(shares) == pytest.approx(line["gram/largest_prompt_share"])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_the_null_knows_dead_groups_and_no_scale(scale):
    """`Σ A²` of advantages whose range, with 0, has width 1: by hand for one right of four, two of four, and none."""
    one, two, none, shifted = (
        shared_group("p", 1, [scale * value for value in values], 0.0).advantage_power
        for values in ([0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4, [2.0] * 4)
    )
    assert (one, two, none, shifted) == pytest.approx((0.75, 1.0, 0.0, 4.0))


def test_prompts_of_a_step_come_in_the_order_of_their_shares():
    half = [0.5, -0.5]
    live = [shared_group(name, 1, half, share) for name, share in (("a", 0.2), ("b", 1.3), ("c", -0.5))]
    dead = shared_group("d", 1, [0.0, 0.0], 0.0)
    (found,) = step_shares([*live, dead])
    assert [one.group.record.prompt_id for one in found.prompts] == ["b", "a", "c"]
    assert found.share == 1.0 and found.null == pytest.approx(1 / 3)  # of the live ones; a share counts up to 1
    assert step_shares([*live[:2], dead]) == []  # of two live prompts one has half by chance
    unknown = shared_group("e", 1, half, math.nan)
    assert step_shares([*live, unknown]) == []


def test_of_many_prompts_a_few_count_together():
    groups = [shared_group(f"p/{place}", 1, [0.5, -0.5], 0.4 if place < 2 else 0.2 / 30) for place in range(32)]
    (found,) = step_shares(groups)
    assert len(found.few) == 2 and found.share == pytest.approx(0.8) and found.null == pytest.approx(2 / 32)


def test_prompts_that_come_back_have_a_share_for_each_visit(tmp_path):
    write_run(tmp_path / "run", steps=12, rewards=lambda s, p, g: torch.tensor([1.0, 0.0, float(p), 0.5]).double())
    run = read_run(tmp_path / "run")
    found = returning_prompts(run)
    assert {name: len(shares) for name, shares in found.items()} == {"p/0": 12, "p/1": 12, "p/2": 12}
    assert returning_prompts(replace(run, groups=[g for g in run.groups if g.record.step < 5])) == {}
