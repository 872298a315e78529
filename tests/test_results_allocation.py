"""Allocation, influence, credit, calibration: tables follow from the stored files; slopes against autograd."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import load_task
from tests.training_cases import JUDGE, save_policy

pytestmark = pytest.mark.slow  # runs in `make test-results`

PREDICTED = ("plain", "preconditioned", "first_order")
RESULTS = Path(__file__).parent.parent / "results"


def module(folder: str, name: str) -> ModuleType:
    title = f"{folder}_{name}"
    spec = importlib.util.spec_from_file_location(title, RESULTS / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[title] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("folder", ["allocation", "influence", "credit", "calibration"])
def test_every_table_of_the_page_is_computed_from_the_files(folder):
    tables = module(folder, "summarise")
    for path in getattr(tables, "PAGES", [RESULTS / folder / "README.md"]):
        page = path.read_text(encoding="utf-8")
        assert tables.filled(page) == page


def test_efficiency_and_direction_follow_from_products_of_gradients(monkeypatch):
    """Two seeds. `ĝ = 2 g + b` with `|g|² = 1`, `b ⊥ g` of squared norm 3, and noise of power 8, against noise of 1."""
    tables = module("credit", "summarise")
    row = {"cross": 4.0 + 3.0, "own": 4.0 + 3.0 + 8.0, "with_oracle": 2.0, "oracle": 1.0}
    first = {"cross": 1.0, "own": 1.0 + 1.0, "with_oracle": 1.0, "oracle": 1.0}
    fixed = {
        name: {"fixed": {seed: {"products": own} for seed in "01"}} for name, own in (("x", row), (tables.FIRST, first))
    }
    monkeypatch.setattr(tables, "stored", lambda: {"runs": {"4": fixed}, "setting": {}})
    assert tables.efficiency("4", "x").value == pytest.approx(2.0**2 / 8)
    assert tables.direction("4", "x").value == pytest.approx(2 / 7**0.5)


def test_area_and_last_are_read_at_the_budget(monkeypatch):
    tables = module("credit", "summarise")
    monkeypatch.setattr(tables, "stored", lambda: {"setting": {"shared": {"rollouts": 100}}})
    run = {"evaluations": [[0, 0.0, 0.0], [50, 0.4, 0.0], [150, 0.8, 0.0]]}  # 0.6 at the budget
    assert tables.last(run) == pytest.approx(60) and tables.area(run) == pytest.approx(100 * (0.2 + 0.5) / 2)


def test_slopes_are_products_with_the_score_of_each_solution(tmp_path):
    run, task = module("influence", "run"), load_task("arithmetic:3", seed=0, reward=JUDGE)
    policy = load_policy(PolicyConfig(model=str(save_policy(tmp_path)), prompt="plain"), task)
    held, weights = run.held_out_solutions(policy, task, 3), list(policy.model.parameters())
    direction = torch.randn(sum(w.numel() for w in weights), generator=torch.Generator().manual_seed(0))
    (found,) = held.slopes(policy, [direction])
    for value, slope in zip(held.log_probs(policy), found, strict=True):
        gradient = torch.autograd.grad(value, weights, retain_graph=True)
        expected = torch.cat([part.flatten() for part in gradient]) @ direction
        assert float(slope.detach()) == pytest.approx(float(expected), rel=1e-3)


def test_the_change_of_a_reward_follows_from_that_of_its_logarithm():
    """From a chance of 1/2 to 3/4; a predicted change of 0.4 in the logarithm is 0.2 in the chance."""
    one = {"start": np.log([[0.5]]), "realised": np.log([[1.5]])}
    found = module("influence", "summarise").as_reward(one | dict.fromkeys(PREDICTED, np.array([[0.4]])))
    assert found["realised"] == pytest.approx(0.25) and found["plain"] == pytest.approx(0.2)


def evaluated(*rewards: float) -> dict[str, object]:
    """A run that was evaluated at 0, 100, 200, … rollouts."""
    return {"evaluations": [[100 * place, reward, 0.0] for place, reward in enumerate(rewards)]}


def test_the_area_ends_at_the_budget():
    tables = module("allocation", "summarise")
    run = evaluated(0.0, 0.4, 0.8)  # the last evaluation is 50 rollouts after the budget
    assert tables.area(run, 150) == pytest.approx((100 * 0.2 + 50 * 0.5) / 150)
    assert tables.start(run, 150) == 0.0


def test_rules_are_compared_by_seed_with_the_fixed_sizes(monkeypatch):
    tables = module("allocation", "summarise")
    ends = {"R = 2": (0.1, 0.3), "R = 4": (0.2, 0.4), "R = 8": (0.6, 0.8), "R = 16": (0.3, 0.1), "auto": (0.9, 0.9)}
    runs = {name: {str(s): evaluated(0.1, 0.1 + end) for s, end in enumerate(both)} for name, both in ends.items()}
    runs["auto"]["2"] = evaluated(0.0, 9.0)  # a seed that the others lack
    monkeypatch.setattr(tables, "stored_runs", lambda: {"task": {"setting": {"rollouts": 100}, "runs": runs}})
    assert tables.best_fixed("task") == "R = 8"
    share = tables.best_share("task", "auto")  # differences 0.3 and 0.1 in the end, half of that in the area
    assert share.value == pytest.approx(1.8 / 1.4)
    half = 12.706 * 0.1 / 0.7  # t quantile with one degree of freedom · standard error of the mean · mean gain
    assert (share.low, share.high) == pytest.approx((1.8 / 1.4 - half, 1.8 / 1.4 + half), rel=1e-4)
    found = tables.relative_gains(["task"])  # fixed sizes gain 0.15 and 0.2 on average: half of 0.3 and 0.4
    assert found["auto"] == pytest.approx([0.45 / 0.15, 0.45 / 0.2])
    assert "| auto | 55.0; 1.29 [-0.53, 3.10] |" in tables.area_table(["task"])
    assert "| R = 8 | 45.0; 1 |" in tables.area_table(["task"])
    rows = tables.pooled_table(["task"]).splitlines()
    assert rows[0].startswith("| rule, 2 pairs") and rows[-1].startswith("| auto | 2.62 [") and "| 0.62 [" in rows[-1]


def test_the_gain_of_a_real_model_is_that_of_its_last_evaluation(monkeypatch):
    tables = module("allocation", "summarise")
    ends = {"R = 4": (0.3, 0.3), "R = 8": (0.5, 0.5), "auto": (0.5, 0.3)}
    runs = {
        name: {str(s): {**evaluated(0.1, end), "steps": 5} for s, end in enumerate(both)} for name, both in ends.items()
    }
    monkeypatch.setattr(tables, "stored_runs", lambda: {"task": {"setting": {"rollouts": 100}, "runs": runs}})
    *_, four, eight, auto = tables.final_table("task").splitlines()
    assert four == "| R = 4 | 5 | 30.0 | 0.0 | 20.0 [20.0, 20.0] | -20.0 [-20.0, -20.0] | 0.50 [0.50, 0.50] |"
    assert eight == "| R = 8 | 5 | 50.0 | 0.0 | 40.0 [40.0, 40.0] |  | 1 |"
    assert auto.startswith("| auto | 5 | 40.0 | 0.0 | 30.0 [") and "| -10.0 [" in auto and "| 0.75 [" in auto


def test_runs_of_a_record_are_not_trained_again(tmp_path, monkeypatch):
    queue, missing = module("allocation", "run"), []
    known = json.loads((RESULTS / "allocation" / "gsm8k.json").read_text(encoding="utf-8"))
    del known["gsm8k"]["runs"]["R = 16"]["1"]
    config = queue.comparison_config("gsm8k", tmp_path, seeds=2, rows=["R = 4", "R = 16"])
    monkeypatch.setattr(queue, "run_in_processes", lambda runs, *_, **__: missing.extend(runs))
    queue.train_missing({"gsm8k": config}, 1, known=known)
    assert [(run.group_size, run.seed) for run in missing] == [(16, 1)]  # the record has the others
    assert queue.task_record("gsm8k", config, known)["runs"] == known["gsm8k"]["runs"]
    known["gsm8k"]["setting"]["learning_rate"] = 1.0
    with pytest.raises(SystemExit, match="gsm8k: the record has other settings"):
        queue.task_record("gsm8k", config, known)
