"""Comparisons that cannot work: refused before the first run, or at the first evaluation that shows it."""

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


def test_a_target_that_is_no_accuracy_costs_its_column_alone(policy, tmp_path):
    """A user's reward may be any number, so 0s and 1s do not show what it may be; another target needs no new run."""
    config = small(policy, tmp_path / "aimed", target=80.0, methods="grpo", seeds=1)
    said = StringIO()
    assert compare_methods(config, console=Console(file=said, width=300)) == 0
    assert "The target 80.0 is no accuracy (write 0.8 for 80 %)" in said.getvalue()
    metrics = tmp_path / "aimed/runs/grpo/seed-0/metrics.jsonl"
    before = metrics.read_bytes()
    said = StringIO()
    assert compare_methods(replace(config, target=0.5), console=Console(file=said, width=300)) == 0
    assert "rollouts to 50 %" in said.getvalue() and metrics.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", "ppo:estimator=gea:critic_updates=4"], "train --estimator: the name must be one of"),
        (
            ["--methods", "grpo", "--estimator", "gea", "--prefix-rollouts", "8"],
            "train --estimator: the name must be one of",
        ),
        (
            ["--methods", "grpo", "--objective", "grop", "--beta", "0.1", "--kl", "k2"],
            "train --objective: the name must be one of",
        ),
    ],
)
def test_a_misspelt_name_beside_an_option_that_depends_on_it_is_a_sentence(options, says, tmp_path, capsys):
    assert cli.main(["compare", *options, "--rollouts", "64", "--out", str(tmp_path / "none")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "none").exists()
