"""`results/fidelity`: the pages follow from the sums, and the sums from credit and truth."""

import importlib.util
import json
import math
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from scoregram.reading import CreditTruth, Step, read_step
from scoregram.statistics import credit_fidelity
from scoregram.tasks import Task
from scoregram.training import METHODS, TrainConfig, loop, train
from tests.training_cases import config_for, save_policy
from tests.turn_cases import ECHO

pytestmark = pytest.mark.slow  # runs in `make test-results`

FOLDER = Path(__file__).parent.parent / "results" / "fidelity"


@cache
def script(name: str) -> ModuleType:
    title = f"fidelity_{name}"
    spec = importlib.util.spec_from_file_location(title, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_table_of_the_pages_is_computed_from_the_file():
    tables = script("summarise")
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert tables.filled(page) == page, "run python results/fidelity/summarise.py --write"
    shown = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"<!-- {mark}: begin -->" in shown for mark, _ in tables.tables())


def test_every_method_has_a_row_or_a_reason():
    for records in script("summarise").stored().values():
        assert [record["seed"] for record in records] == list(range(len(records)))
        for record in records:
            rows = [name for names in record["methods"].values() for name in names]
            assert len(rows) == len(set(rows)) and not set(rows) & set(record["left_out"])
            assert set(rows) | set(record["left_out"]) <= set(METHODS)
            clusters = len(record["truth"])
            assert all(len(lines) == clusters for lines in record["credit"].values())


def made_up(units: int = 12) -> tuple[CreditTruth, torch.Tensor, torch.Tensor]:
    """Six rollouts of two units of two tokens, and credit for their tokens."""
    draw = torch.Generator().manual_seed(0)
    unit_of = torch.arange(units).view(6, 2).repeat_interleave(2, dim=1)
    unit_of = torch.cat([torch.full((6, 1), -1), unit_of], dim=1)
    values = torch.randn(2, units, generator=draw, dtype=torch.float64)
    truth = CreditTruth(unit_of=unit_of, advantages=values[0], variances=0.1 * values[1].square())
    return truth, torch.randn(unit_of.shape, generator=draw, dtype=torch.float64), torch.arange(6) // 3


def test_sums_over_clusters_give_the_correlation_and_error_of_all_units():
    tables, (truth, credit, clusters) = script("summarise"), made_up()
    found = script("run").sums(truth, {"x": credit}, clusters)
    assert [line[0] for line in found["truth"]] == [6.0, 6.0]
    table = tables.sums(found, "x")
    expected = credit_fidelity(truth.by_unit(credit), truth.advantages, variances=truth.variances)
    assert tables.correlation(table) == pytest.approx(expected.correlation, rel=1e-5)
    assert tables.error(table) == pytest.approx(expected.error, rel=1e-5)
    zero = credit_fidelity(torch.zeros(12), truth.advantages, variances=truth.variances)
    assert tables.advantage_size(table) == pytest.approx(zero.error, rel=1e-5)
    c = truth.by_unit(credit)
    scales = [credit_fidelity(k * c, truth.advantages, variances=truth.variances).error for k in np.arange(-2, 2, 1e-3)]
    assert tables.explained(table) == pytest.approx(100 * (1 - (min(scales) / zero.error) ** 2), rel=1e-4)


def test_credit_that_is_the_truth_has_no_error():
    tables, (truth, _, clusters) = script("summarise"), made_up()
    exact = CreditTruth(unit_of=truth.unit_of, advantages=truth.advantages)
    credit = torch.where(truth.unit_of >= 0, truth.advantages[truth.unit_of.clamp(min=0)], 0.0)
    table = tables.sums(script("run").sums(exact, {"x": credit}, clusters), "x")
    assert tables.correlation(table) == pytest.approx(1)
    assert tables.error(table) < 1e-3 and tables.explained(table) == pytest.approx(100)  # sums have seven digits
    assert math.isnan(tables.correlation(tables.sums(script("run").sums(exact, {"x": 0 * credit}, clusters), "x")))


def test_the_jackknife_of_a_mean_is_its_standard_error(monkeypatch):
    """Every cluster has one unit, so that the error of a credit of 0 is a root mean square over clusters."""
    tables = script("summarise")
    values = np.array([0.5, -1.0, 2.0, 0.25])
    record = {
        "truth": [[1.0, v, v * v, 0.0] for v in values],
        "credit": {"x": [[0.0, 0.0, 0.0]] * 4, "y": [[0.0] * 3] * 4},
    }
    monkeypatch.setattr(tables, "stored", lambda: {"one": [record]})
    found = tables.estimate("one", "x", lambda table: float(table[:, 1].sum() / table[:, 0].sum()))
    assert found.value == pytest.approx(values.mean())
    half = 3.182446 * values.std(ddof=1) / 2  # t quantile with three degrees of freedom
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=1e-5)


def echo(seed: int) -> Task:
    """The task of `turn_cases`, as `--task python:…` loads it."""
    return ECHO


@pytest.mark.parametrize("task", ["echo", "letters"])
def test_a_measurement_sees_the_rollouts_of_a_run_and_gives_the_credit_of_its_trainer(task, tmp_path, monkeypatch):
    """The first step of a training run with the same seed: its rewards, its number of units, the credit of its step."""
    run, tables, policy = script("run"), script("summarise"), save_policy(tmp_path / "policy")
    options: dict[str, Any] = {"credit_truth": "sampled", "truth_rollouts": 4}
    if task == "echo":
        options |= {"task": f"python:{__name__}:echo", "reward": None, "max_new_tokens": 0}
    else:
        options |= {"segments": "even", "segment_tokens": 2}
    config = config_for(policy, tmp_path / "unused", **options)
    run.measure("x", run.Setting(config.task, options, run.SLOW), config, 2, tmp_path, 0.0)
    record = json.loads((tmp_path / "x-seed-0.json").read_text(encoding="utf-8"))
    assert record["steps"] == 2 and len(record["truth"]) == 2 and record["facts"]["rollouts"] == [12, 12]
    assert ("vineppo" in record["left_out"]) == (task == "echo")
    for method in ("grpo", "dpo", "turn-rloo" if task == "echo" else "optimal-token"):
        row = next(first for first, names in record["methods"].items() if method in names)
        steps: list[Step] = []
        monkeypatch.setattr(loop, "read_step", lambda step, steps=steps: steps.append(step) or read_step(step))
        train(config_for(policy, tmp_path / method, **options, method=method, steps=1, eval_every=0))
        (step,) = steps
        assert step.truth is not None
        credit = step.truth.by_unit(step.credit)
        units, _, _, _, c, cc, _ = tables.sums(record, row)[0]
        assert (units, c, cc) == pytest.approx(
            (len(credit), float(credit.sum()), float(credit.square().sum())), abs=1e-4
        )
        assert cc > 0 and record["facts"]["reward"][0] == pytest.approx(float(step.rollouts.rewards.sum()))
        assert record["facts"]["truth_rollouts"][0] == step.truth.rollouts


def test_prompts_are_measured_one_after_the_other_with_sums_of_their_own(tmp_path):
    run, policy = script("run"), save_policy(tmp_path / "policy")
    options: dict[str, Any] = {"credit_truth": "sampled", "truth_rollouts": 4, "segments": "even", "segment_tokens": 2}
    config: TrainConfig = config_for(policy, tmp_path / "unused", **options)
    run.measure("whole", run.Setting(config.task, options, run.SLOW), config, 1, tmp_path, 0.0)
    run.measure("parts", run.Setting(config.task, options, run.SLOW, prompts_at_once=1), config, 1, tmp_path, 0.0)
    whole, parts = (json.loads((tmp_path / f"{n}-seed-0.json").read_text(encoding="utf-8")) for n in ("whole", "parts"))
    assert len(whole["truth"]) == 1 and len(parts["truth"]) == 3
    for row in ("grpo", "optimal-token"):  # the credit is that of the whole step; the truth has other fresh rollouts
        totals = [np.array(one["credit"][row]).sum(0)[:2] for one in (whole, parts)]
        assert totals[0].tolist() == pytest.approx(totals[1].tolist(), rel=1e-5, abs=1e-6)


def test_the_error_of_a_turn_is_its_mean_and_its_deviation_without_the_noise_of_its_estimate():
    """Three steps of one turn with errors 1, 3, 5, each known up to a variance of 1/2; returns 0, 2, 4."""
    summarise = script("summarise")
    errors, returns = np.array([1.0, 3.0, 5.0]), np.array([0.0, 2.0, 4.0])
    ones = np.ones(3)
    table = np.stack([ones, errors, errors**2, ones / 2, ones, returns, returns**2], axis=1)
    assert summarise.offset_mean(table) == 3 and summarise.going(table) == 100
    assert summarise.offset_deviation(table) == pytest.approx(math.sqrt(errors.var() - 0.5))
    assert summarise.offset_share(table) == pytest.approx(math.sqrt((errors.var() - 0.5) / returns.var()))
    found = summarise.jackknifed(table, summarise.offset_mean)
    assert found.value == 3 and found.high - 3 == pytest.approx(4.302652729911275 * errors.std(ddof=1) / math.sqrt(3))


def test_the_measured_errors_begin_at_0_and_episodes_end_on_the_way():
    steps = json.loads((FOLDER / "turn-offset.json").read_text())["stopping"]
    for step in steps:
        reached = [step[str(turn)][0] for turn in range(4) if str(turn) in step]
        assert step["0"] == [32, 0, 0, 0] and step["returns"][0] == 32 and reached == sorted(reached, reverse=True)


def test_the_error_of_a_turn_is_the_past_and_the_change_of_the_value(tmp_path, monkeypatch):
    """With values that a test gives: the error at a turn is what was paid before it plus `v(s_h) − v(s_0)`."""
    offsets = script("turn_offset")
    config = config_for(save_policy(tmp_path / "policy"), tmp_path, reward=None, max_new_tokens=3)
    task = ECHO
    policy = offsets.load_policy(config.policy, task)
    truth = offsets.TurnTruth(policy, task, config.sampling(task.max_new_tokens), config)
    seen: dict[str, Any] = {}

    def values(number, histories, problems):
        """The value of a history is the number of its turns."""
        seen["histories"] = histories
        return torch.tensor([[len(one.turns)] * 4 for one in histories], dtype=torch.float64)

    def kept(*args, **given):
        seen["rollouts"] = collect(*args, **given)
        return seen["rollouts"]

    collect = offsets.collect
    monkeypatch.setattr(truth, "returns", values)
    monkeypatch.setattr(offsets, "collect", kept)
    found = offsets.turn_sums(1, config, truth)
    paid = seen["rollouts"].turn_rewards.double()
    reached = seen["rollouts"].turn_mask
    assert reached[:, 1].any() and bool(paid.any())
    for turn in range(reached.shape[1]):
        expected = (paid[:, :turn].sum(1) + turn)[reached[:, turn]]
        sums = [len(expected), float(expected.sum()), float(expected.square().sum())]
        assert found[str(turn)][:3] == pytest.approx(sums, rel=1e-6)
        assert found[str(turn)][3] == 0  # equal values have no noise
