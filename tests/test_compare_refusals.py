"""Comparisons that cannot work: refused before the first run, or at the first evaluation that shows it."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.compare import cells as cells_module
from scoregram.compare import compare_methods
from scoregram.training import Trained
from tests.test_compare import QUIET, small
from tests.training_cases import save_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def test_a_method_that_the_task_excludes_is_refused_before_the_first_run(policy, tmp_path, monkeypatch):
    def trained(*_: Any, **__: Any) -> Trained:
        raise AssertionError("a run was trained")

    monkeypatch.setattr(cells_module, "run_or_explain", trained)
    for changes, says in (
        (
            {"methods": "grpo,vineppo", "task": "calculator", "reward": None},
            "compare --methods vineppo: train --method: vineppo needs",
        ),
        (
            {"methods": "grpo,pass-at-k:best_of=9"},
            "compare --methods pass-at-k:best_of=9: train --best-of: must be at m",
        ),
        ({"target": 80.0, "reward": None}, "the rewards of arithmetic-compositions:3 are 0 or 1, got 80. Write 0.8"),
        ({"target": 0.0, "reward": None}, "must be an accuracy above 0 and at most 1, .* got 0"),
    ):
        with pytest.raises(ScoregramError, match=says):
            compare_methods(small(policy, tmp_path / "none", **changes), console=QUIET)
        assert not (tmp_path / "none").exists()


def test_a_target_that_is_no_accuracy_ends_runs_at_the_first_evaluation_that_shows_it(policy, tmp_path, capsys):
    folder, said = tmp_path / "aimed", Console(file=StringIO(), width=200)
    config = small(policy, folder, target=80.0, methods="grpo", seeds=1)  # a user's reward may be any number
    assert compare_methods(config, console=said) == 1
    assert "--target: must be an accuracy above 0" in said.file.getvalue()  # type: ignore[union-attr]
    assert not (folder / "runs/grpo/seed-0/metrics.jsonl").read_text()
    assert compare_methods(replace(config, target=0.5), console=QUIET) == 0
    setting = json.loads((folder / "compare.json").read_text()) | {"target": 80.0}
    (folder / "compare.json").write_text(json.dumps(setting))
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "The target 80.0 is no accuracy" in (tmp_path / "page.html").read_text()


def test_rewards_that_are_all_0_do_not_decide_whether_a_target_is_an_accuracy():
    for undecided in ([0.0, 0.0], [0.0, 0.5, 1.0], [math.nan], [0.0, 2.0]):
        cells_module.refuse_binary_rewards(80.0, undecided)
    with pytest.raises(ScoregramError, match="the rewards of the test rollouts are 0 or 1, got 80"):
        cells_module.refuse_binary_rewards(80.0, [0.0, 1.0, math.nan])
