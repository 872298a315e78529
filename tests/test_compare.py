"""Methods at equal rollouts: options, intervals by simulation, numbers from hand-made runs, and whole comparisons."""

import csv
import io
import json
import math
import shutil
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.compare import CompareConfig, compare_methods, is_comparison, write_comparison_report
from scoregram.compare import cells as cells_module
from scoregram.compare.config import method_choice
from scoregram.compare.results import MEAN_RETURN, MethodComparison, MethodResult, RunResult
from scoregram.compare.table import (
    accuracy_figure,
    accuracy_table,
    csv_text,
    markdown_text,
    update_table,
    verdict_sentence,
)
from scoregram.exhibits import Table, from_plain
from scoregram.reading import GREEDY_TEST, RunReading, read_run
from scoregram.runs import open_run
from scoregram.statistics import update_power
from scoregram.training import TrainConfig, Trained
from tests.compare_cases import run_of
from tests.training_cases import JUDGE, save_policy, without_times

QUIET = Console(file=StringIO(), width=200)


# Options


def test_every_run_has_the_shared_settings_and_its_own_options():
    config = CompareConfig(methods="grpo, vineppo:prefix_rollouts=2:segments=even", rollouts=500, learning_rate=0.5)
    first, second = (config.run_config(choice, seed=3) for choice in config.choices)
    assert (first.method, first.seed, first.learning_rate, first.every_rollouts) == ("grpo", 3, 0.5, 50)
    assert (second.prefix_rollouts, second.segments, second.rollouts) == (2, "even", 500)
    assert first.out != second.out and first.out.is_relative_to(config.out)
    own = {"method", "out", "prefix_rollouts", "segments"}
    for field in fields(TrainConfig):
        if field.name not in own:
            assert getattr(first, field.name) == getattr(second, field.name)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": ""}, "compare --methods: must name some of"),
        ({"methods": "grpo,grop"}, "compare --methods: the name must be one of .*, got 'grop'. Did you mean 'grpo'"),
        ({"methods": "grpo,grpo"}, "compare --methods: must name each method once"),
        ({"methods": "grpo:learning_rate"}, "an option of grpo must be OPTION=VALUE"),
        ({"methods": "grpo:speed=3"}, "an option of grpo must be OPTION=VALUE"),
        (
            {"methods": "grpo:max_new_tokens=3"},
            "max_new_tokens belongs to the whole comparison",
        ),  # tests sample with it
        ({"methods": "grpo:train-problems=2"}, "train_problems belongs to the whole comparison"),
        ({"methods": "grpo,grpo:beta=0"}, "once, got grpo and grpo:beta=0, which have the same settings"),
        ({"methods": "rloo,grpo:learning_rate=nan"}, "compare --methods grpo:learning_rate=nan: train --learning-rate"),
        ({"methods": "grpo:seed=3"}, "seed belongs to the whole comparison and must not be an option of grpo"),
        ({"methods": "grpo:reward=my:chance"}, "reward belongs to the whole comparison"),
        ({"methods": "grpo:keep-evidence=false"}, "keep_evidence belongs to the whole comparison"),
        ({"keep_evidence": False}, "keep_evidence must be true: accuracies come from stored test rollouts"),
        ({"methods": "grpo:learning_rate=fast"}, "grpo:learning_rate must be a number, got 'fast'"),
        ({"methods": "grpo:autocast=maybe"}, "grpo:autocast must be true or false, got 'maybe'"),
        ({"methods": "vineppo:segments=lines"}, "vineppo:segments must be one of steps, unlikely, even"),
        ({"methods": "grpo:adam_betas=0.9"}, "grpo:adam_betas must be the same for all methods"),
        ({"seeds": 0}, "compare --seeds: must be at least 1"),
        ({"rollouts": 0}, "compare --rollouts: must be at least 1"),
        ({"jobs": -1}, "compare --jobs: must be at least 0"),
        ({"target": math.inf}, "compare --target: must be finite"),
    ],
)
def test_comparisons_that_cannot_work_are_refused(changes, says):
    with pytest.raises(ScoregramError, match=says):
        CompareConfig(**changes)


def test_options_are_read_as_on_the_command_line():
    chosen = method_choice("grpo:learning-rate=3e-4:baseline=0.5:dynamic_rounds=2:push=false:estimator=rloo")
    assert chosen.options == {
        "learning_rate": 3e-4,
        "baseline": 0.5,
        "dynamic_rounds": 2,
        "push": False,
        "estimator": "rloo",
    }
    assert method_choice("grpo:draft_format=a:b:beta=0.1").options == {"draft_format": "a:b", "beta": 0.1}
    assert "/" not in method_choice("grpo:draft_format=a/b").folder and ":" not in chosen.folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": "reinforce,rloo", "group_size": 1}, "rloo needs at least 2 rollouts"),
        (
            {"methods": "agro,ppo", "sampling_temperature": 1.5},
            "train --sampling-temperature: needs a loss for rollouts",
        ),
        ({"methods": "rloo,ppo", "allocate": "measured"}, "train --allocate: needs one advantage per rollout"),
    ],
)
def test_a_method_that_the_settings_exclude_is_said_before_any_run(changes, says, tmp_path):
    with pytest.raises(ScoregramError, match=says):
        compare_methods(CompareConfig(out=tmp_path, **changes), console=QUIET)
    assert not list(tmp_path.iterdir())


def test_runs_share_the_cores_unless_each_takes_all(monkeypatch):
    monkeypatch.setattr(cells_module, "available_cores", lambda: 8)
    found = {n: cells_module.default_jobs(CompareConfig(threads=n, device="cpu")) for n in (0, 1, 2, 16)}
    assert found == {0: 1, 1: 8, 2: 4, 16: 1}


# Signal and noise of an update


def test_signal_and_noise_are_right_on_average_over_every_batch():
    """Prompts whose update is one of three vectors: all 27 batches of three prompts, two rollouts each."""
    choices = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    weights, prompt_of = torch.tensor([0.5, 0.5] * 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2])
    found, updates = [], []
    for batch in product(choices, repeat=3):
        scores = torch.stack([row for one in batch for row in (one * 1.5, one * 0.5)])  # they average to the choice
        found.append(update_power(scores @ scores.T, weights, prompt_of))
        updates.append(torch.stack(batch).sum(0))
    stacked = torch.stack(updates)
    mean = stacked.mean(0)
    assert np.mean([one.signal for one in found]) == pytest.approx(float(mean @ mean))
    assert np.mean([one.noise for one in found]) == pytest.approx(float((stacked - mean).square().sum(1).mean()))
    one = update_power(torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), torch.tensor([0, 0]))
    assert math.isnan(one.signal) and math.isnan(one.noise)


# Tables of hand-made runs


def hand_made() -> MethodComparison:
    grpo = [run_of(seed, [1, 1, 0, 0], [0.0, 0.25, 0.5]) for seed in range(3)]
    better = [run_of(seed, [1, 1, 1, 0], [0.0, 0.5, 0.75], **{"credit/correlation": 0.5}) for seed in range(3)]
    mixed = [run_of(seed, [1, seed % 2, 0, 0], [0.0, 0.25, 0.5 * (seed > 0)]) for seed in range(3)]
    setting = {"task": "toy", "rollouts": 160, "every_rollouts": 80, "batch_size": 64, "seeds": 3, "target": 0.5}
    rows = {"grpo": grpo, "better": better, "mixed": mixed}
    return MethodComparison(setting, [MethodResult(label, runs) for label, runs in rows.items()])


def column(table: Table, name: str) -> list[Any]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_the_accuracy_table_by_hand():
    table = accuracy_table(hand_made())
    assert [cell.value for cell in column(table, "accuracy")] == pytest.approx([50, 75, 100 / 3])
    gains = column(table, "points over grpo")
    assert gains[0] is None and gains[1].value == 25 and gains[2].value == pytest.approx(-50 / 3)
    assert column(table, "verdict") == [None, "cannot tell", "cannot tell"]  # one problem of four decides
    to_half = column(table, "rollouts to 50 %")
    assert (to_half[0].value, to_half[1].value, to_half[2]) == (160, 80, "2 of 3 seeds")
    assert column(table, "steps") == [2, 2, 2] and column(table, "minutes")[0].value == 1
    assert column(table, "extra rollouts, %") == pytest.approx([20.0] * 3)  # 160 sampled, 2 · 64 trained on


@pytest.mark.parametrize(
    ("lines", "trained"),
    [
        ([{"groups": 4, "rollouts": 32}, {"groups": 3, "rollouts": 96}], 32 + 24),  # dropped groups
        ([{"groups": 4, "rollouts": 32}, {"skipped": 1, "rollouts": 64}, {"groups": 4, "rollouts": 96}], 32 + 32),
        ([{"groups": 4, "rollouts": 32}, {"skipped": 1, "groups": 4, "rollouts": 64}], 32),
        ([{"groups": 4, "rollouts": 32}, {"groups": 8, "control/group_size": 4, "rollouts": 64}], 32 + 32),
        ([{"groups": 12, "rollouts": 32}], 32),  # a group for each of three turns: they count as one
    ],
)
def test_rollouts_that_were_trained_on_by_hand(lines, trained):
    numbered: list[dict[str, Any]] = [{"step": place, **line} for place, line in enumerate(lines, start=1)]
    start = {"step": 0, "rollouts": 0, "eval/accuracy": 0.0}
    run = RunResult(0, RunReading(config={"group_size": 8}, notes=(), lines=[start, *numbered], groups=[]))
    assert run.trained == trained
    extra = MethodResult("one", [run, run]).extra().value
    assert extra == pytest.approx(1 - trained / lines[-1]["rollouts"])


def test_one_seed_decides_nothing_and_a_start_that_solves_nothing_is_no_target():
    whole = hand_made()
    alone = replace(whole, methods=[replace(method, runs=method.runs[:1]) for method in whole.methods])
    assert verdict_sentence(alone).startswith(
        "With 160 rollouts, 3 seeds: one seed cannot tell grpo from better (+25.0 points), mixed (-25.0 points)"
    )
    wrong = MethodResult("grpo", [run_of(seed, [0, 0], [0.0, 0.0, 0.0]) for seed in range(3)])
    missed = MethodComparison({**whole.setting, "target": None}, [wrong])
    assert not any("rollouts to" in name for name in accuracy_table(missed).columns)


def test_a_seed_without_a_measurement_is_left_out_of_signal_and_noise():
    (first, *_), unmeasured = hand_made().methods, {"gram/update_signal": math.nan, "gram/update_noise": math.nan}
    runs = [*first.runs, run_of(3, [1, 1, 0, 0], [0.0, 0.25, 0.5], **unmeasured)]
    found, known = MethodResult("grpo", runs), MethodResult("grpo", list(first.runs))
    assert found.signal_to_noise() == known.signal_to_noise() and known.signal_to_noise().value == 0.5
    assert math.isnan(MethodResult("grpo", runs[3:]).signal_to_noise().value)


def test_a_method_without_a_finished_run_is_named():
    whole = hand_made()
    grpo, better, mixed = whole.methods
    lost = replace(whole, methods=[grpo, replace(better, runs=[]), mixed])
    assert (
        "no significant difference to grpo for mixed (-16.7 points); better has no run with 160 rollouts."
        in verdict_sentence(lost)
    )
    setting = {**whole.setting, "target": None}
    headless = MethodComparison(setting, [replace(grpo, runs=[]), better, replace(mixed, runs=[])])
    assert verdict_sentence(headless).endswith("3 seeds: grpo, mixed have no run with 160 rollouts.")
    table = accuracy_table(headless)
    assert column(table, "method") == ["better"] and not any("nan" in name for name in table.columns)


def test_the_caption_says_what_is_missing_and_what_an_interval_without_width_means():
    whole = hand_made()
    grpo, better, mixed = whole.methods
    assert "Missing" not in accuracy_table(whole).caption and "seeds that both" not in accuracy_table(whole).caption
    uneven = accuracy_table(
        replace(whole, methods=[grpo, replace(better, runs=better.runs[:2]), replace(mixed, runs=[])])
    )
    assert uneven.caption.endswith(
        "Differences use the seeds that both methods have. Missing: better has 2 of 3 seeds, mixed has no run with 160 "
        "rollouts."
    )
    flat = MethodComparison(
        whole.setting, [MethodResult("grpo", [run_of(seed, [1, 1, 1, 1], [0.0, 1.0, 1.0]) for seed in range(3)])]
    )
    assert "An interval without width" in accuracy_table(flat).caption
    assert "An interval without width" not in accuracy_table(replace(whole, methods=[better])).caption


def test_a_target_is_checked_where_the_outcome_is_known():
    def aiming(comparison: MethodComparison, target: float) -> Table:
        return accuracy_table(MethodComparison({**comparison.setting, "target": target}, comparison.methods))

    for wrong in (80.0, 0.0, -1.0):  # all runs are done: the page says it, and has all other columns
        table = aiming(hand_made(), wrong)
        assert f"The target {wrong} is no accuracy" in table.caption and len(table.columns) == 8
        assert not any(name.startswith("rollouts to") for name in table.columns)
    assert "no accuracy" not in aiming(hand_made(), 0.935).caption
    assert "rollouts to 93.5 %" in aiming(hand_made(), 0.935).columns
    for target in (2.5, -0.25):  # returns may be any number
        assert f"rollouts to {target:.3g}" in {name.rstrip("0") for name in aiming(returns_by_hand(), target).columns}


def test_rollouts_to_an_accuracy_lie_between_evaluations():
    run = run_of(0, [1], [0.2, 0.4, 0.8])
    assert run.rollouts_to(0.6) == pytest.approx(120) and run.rollouts_to(0.1) == 0 and run.rollouts_to(0.9) == math.inf
    assert run.outcome_at([40.0, 120.0]).tolist() == pytest.approx([0.3, 0.6])


def returns_by_hand() -> MethodComparison:
    """Two methods on a game whose returns are never 1: 0.25 and -0.5 against 0.5 and 0.25 on two problems."""

    def run(seed: int, rewards: list[float]) -> RunResult:
        lines: list[dict[str, Any]] = [
            {"step": step, "rollouts": 80 * step, "eval/accuracy": 0.0, "eval/reward": value, "reward": 0.0}
            for step, value in enumerate([-0.25, 0.0, sum(rewards) / 2])
        ]
        tests = {GREEDY_TEST: {2: {f"p{place}": reward for place, reward in enumerate(rewards)}}}
        return RunResult(seed, RunReading(config={}, notes=(), lines=lines, groups=[], tests=tests))

    rows = {"first": [0.25, -0.5], "second": [0.5, 0.25]}
    setting = {"task": "game", "rollouts": 160, "every_rollouts": 80, "batch_size": 80, "seeds": 3, "target": 0.125}
    return MethodComparison(
        setting, [MethodResult(name, [run(seed, rewards) for seed in range(3)]) for name, rewards in rows.items()]
    )


def test_returns_that_are_never_1_rank_methods_by_their_mean():
    comparison = returns_by_hand()
    table = accuracy_table(comparison)
    assert "accuracies in %" in table.caption and table.title.startswith("Mean return after 160 rollouts on game")
    assert [cell.value for cell in column(table, "mean return")] == [-0.125, 0.375]
    assert column(table, "return over first")[1].value == 0.5  # (0.25 + 0.75) / 2
    assert [cell.value for cell in column(table, "accuracy")] == [0, 0]
    first, second = column(table, "rollouts to 0.125")
    assert first == "0 of 3 seeds" and second.value == pytest.approx(80 + 80 / 3)  # from 0 to 0.375, a third of the way
    assert "second (+0.500 return)" in verdict_sentence(comparison)
    assert accuracy_figure(comparison).series[1].y == (-0.25, 0.0, 0.375)


def test_a_problem_without_a_reward_counts_as_wrong_and_has_no_return():
    run = returns_by_hand().methods[0].runs[0]
    lost = RunResult(0, replace(run.run, tests={GREEDY_TEST: {2: {"a": math.nan, "b": 1.0}}}))
    assert lost.outcomes() == {"a": 0.0, "b": 1.0} and not lost.is_graded
    assert lost.outcomes(outcome=MEAN_RETURN) == {"b": 1.0}


def test_the_update_columns_and_the_summary_of_a_run_have_the_same_steps(made):
    """The last third: what a step before it measured changes no column."""
    path = next(iter(sorted(made.rglob("grpo/seed-0/config.yaml")))).parent
    run = read_run(open_run(path))
    summary = run.summary
    assert run.rank_means == (summary.effective_rank.value, summary.effective_rank_null.value)
    early = run.last_third.start - 1
    assert early >= 1
    strange = {"gram/update_signal": 1e9, "gram/update_noise": 1e9}
    lines = [
        {**line, "credit/correlation": line["step"], **(strange if line["step"] == early else {})} for line in run.lines
    ]
    changed = replace(run, lines=lines)
    assert changed.update_power == run.update_power and not math.isnan(run.update_power.noise)
    assert MethodResult("one", [RunResult(0, changed)]).mean("credit/correlation").value == np.mean(run.last_third)


def test_the_update_table_by_hand():
    table = update_table(hand_made())
    assert [cell.value for cell in column(table, "update signal to noise")] == [0.5] * 3
    correlations = [cell.value for cell in column(table, "credit correlation")]
    assert correlations[1] == 0.5 and math.isnan(correlations[0])


def test_the_texts_hold_the_same_numbers():
    comparison = hand_made()
    tables = accuracy_table(comparison), update_table(comparison)
    rows = list(csv.DictReader(io.StringIO(csv_text(tables))))
    assert [row["method"] for row in rows] == ["grpo", "better", "mixed"]
    assert float(rows[1]["points over grpo"]) == 25 and float(rows[1]["credit correlation"]) == 0.5
    assert float(rows[1]["accuracy, low"]) < 75 < float(rows[1]["accuracy, high"])
    lines = markdown_text(tables[0]).splitlines()
    assert (
        lines[4].startswith("| grpo | 3 | 50 [0, 100] |  |  | 160 [160, 160] | 2 | 20.0 |")
        and len({line.count("|") for line in lines[2:7]}) == 1
    )
    assert "no significant difference to grpo for better (+25.0 points), mixed (-16.7 points)" in verdict_sentence(
        comparison
    )


# Whole comparisons


def small(model: Path, out: Path, **changes: Any) -> CompareConfig:
    settings: dict[str, Any] = {
        "methods": "grpo,vineppo:prefix_rollouts=1",
        "seeds": 2,
        "rollouts": 36,
        "batch_size": 12,
        "group_size": 4,
        "out": out,
        "model": str(model),
        "reward": JUDGE,
        "task": "arithmetic-compositions:3",
        "prompt": "plain",
        "device": "cpu",
        "max_new_tokens": 6,
        "learning_rate": 1e-3,
        "eval_problems": 6,
        "jobs": 1,
    }
    return CompareConfig(**settings | changes)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def made(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    assert compare_methods(small(policy, folder), console=QUIET) == 0
    return folder


def runs_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    paths = sorted(path.parent for path in folder.rglob("config.yaml"))
    return {str(path.relative_to(folder)): without_times(open_run(path).metrics()) for path in paths}


def test_a_comparison_writes_runs_tables_and_a_page(made, tmp_path, capsys):
    runs = runs_of(made)
    assert len(runs) == 4 and all(lines[-1]["rollouts"] >= 36 for lines in runs.values())
    exhibits = from_plain(json.loads((made / "table.json").read_text())["exhibits"])
    accuracy, updates, _ = exhibits
    assert isinstance(accuracy, Table) and isinstance(updates, Table)
    assert column(accuracy, "method") == ["grpo", "vineppo:prefix_rollouts=1"]
    for row, method in zip(accuracy.rows, ("grpo", "vineppo"), strict=True):
        last = [lines[-1] for name, lines in runs.items() if f"/{method}" in name]
        cells: dict[str, Any] = dict(zip(accuracy.columns, row, strict=True))
        assert cells["accuracy"].value == pytest.approx(100 * np.mean([line["eval/accuracy"] for line in last]))
        held_out = 100 * np.mean([line["eval/composition/accuracy"] for line in last])
        assert cells["accuracy, composition"].value == pytest.approx(held_out)
    assert column(accuracy, "extra rollouts, %")[0] == 0 < column(accuracy, "extra rollouts, %")[1]
    assert (made / "table.md").read_text().count("\n| ") == 8 and (made / "table.csv").read_text().count("\n") == 3
    assert is_comparison(made) and not is_comparison(tmp_path)
    assert cli.main(["report", str(made), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy over rollouts" in page and "vineppo:prefix_rollouts=1" in page
    assert write_comparison_report(made, tmp_path / "again.html").read_text() == page.replace(
        str(tmp_path / "page.html"), str(tmp_path / "again.html")
    )


def test_what_is_finished_is_kept_and_what_is_lost_is_trained_again(made, policy, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    shutil.rmtree(folder / "runs/grpo/seed-1")
    asked: list[str] = []
    original = cells_module.run_one

    def counted(config: TrainConfig) -> Trained:
        asked.append(str(config.out.relative_to(folder)))
        return original(config)

    monkeypatch.setattr(cells_module, "run_one", counted)
    assert compare_methods(small(policy, folder), console=QUIET) == 0
    assert asked == ["runs/grpo/seed-1"] and runs_of(folder) == runs_of(made)


def test_an_interrupted_comparison_continues(made, policy, tmp_path, monkeypatch):
    folder = tmp_path / "stopped"
    original = cells_module.run_one
    monkeypatch.setattr(cells_module, "run_one", lambda config: Trained(config.out, 0, interrupted=True))
    assert compare_methods(small(policy, folder), console=QUIET) == 130
    assert not (folder / "table.json").exists()
    monkeypatch.setattr(cells_module, "run_one", original)
    assert compare_methods(small(policy, folder), console=QUIET) == 0
    assert runs_of(folder) == runs_of(made)


def test_a_run_that_fails_does_not_end_the_others(made, policy, tmp_path, monkeypatch):
    folder = tmp_path / "failing"
    shutil.copytree(made, folder)
    shutil.rmtree(folder / "runs/grpo/seed-0")
    shutil.rmtree(folder / "runs/grpo/seed-1")
    original = cells_module.run_one

    def broken(config: TrainConfig) -> Trained:
        if config.seed == 0:
            raise ScoregramError("train: broken on purpose.")
        return original(config)

    monkeypatch.setattr(cells_module, "run_one", broken)
    said = StringIO()
    assert compare_methods(small(policy, folder), console=Console(file=said, width=200)) == 1
    assert "grpo, seed 0 failed: train: broken on purpose." in said.getvalue()
    exhibits = from_plain(json.loads((folder / "table.json").read_text())["exhibits"])
    assert isinstance(exhibits[0], Table) and column(exhibits[0], "seeds") == [1, 2]
    monkeypatch.setattr(cells_module, "run_one", original)
    assert compare_methods(small(policy, folder), console=QUIET) == 0
    assert runs_of(folder) == runs_of(made)


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "OutOfMemoryError: tried to allocate 2 GiB"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (ScoregramError("train: broken."), "train: broken."),
        (noted(KeyError("colour"), "raised by Guess.step"), "KeyError: 'colour', raised by Guess.step"),
    ],
)
def test_any_exception_ends_its_run_alone(error, reason, tmp_path, monkeypatch):
    def broken(config: TrainConfig) -> Trained:
        raise error

    monkeypatch.setattr(cells_module, "run_one", broken)
    config = TrainConfig(out=tmp_path / "runs/grpo/seed-0")
    assert not cells_module.run_or_explain(config).interrupted
    assert cells_module.failure_path(config).read_text() == f"{reason}\n"


def test_a_worker_process_that_dies_is_a_sentence(policy, tmp_path, monkeypatch):
    def died(*_: Any, **__: Any) -> bool:
        raise BrokenProcessPool

    monkeypatch.setattr(cells_module, "run_in_processes", died)
    with pytest.raises(ScoregramError, match="every run must sample its rollouts, got grpo, seed 0: 0 of 36; vine"):
        compare_methods(small(policy, tmp_path / "dying", jobs=2), console=QUIET)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 2e-3}, "must have the same config, got learning_rate: 0.001 in the run, 0.002 requested"),
        ({"rollouts": 12}, "compare --rollouts: must be at least 36"),
        ({"seeds": 1}, "compare --seeds: must be at least 2"),
    ],
)
def test_other_settings_do_not_mix_into_a_comparison(changes, says, made, policy):
    with pytest.raises(ScoregramError, match=says):
        compare_methods(small(policy, made, **changes), console=QUIET)


OTHER = {"learning_rate": 2e-3, "task": "arithmetic:3", "eval_problems": 4, "batch_size": 8, "every_rollouts": 12}


def without_shared(folder: Path) -> None:
    """Make the folder one of an older version, which did not store what all runs share."""
    setting = json.loads((folder / "compare.json").read_text())
    del setting["shared"]
    (folder / "compare.json").write_text(json.dumps(setting))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_a_new_method_must_have_the_settings_of_the_folder(name, is_old, made, policy, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    if is_old:
        without_shared(folder)
    before = (folder / "compare.json").read_text()
    with pytest.raises(ScoregramError, match=f"must have the same config, got {name}: .* in the run, {OTHER[name]} re"):
        compare_methods(small(policy, folder, methods="rloo", **{name: OTHER[name]}), console=QUIET)
    assert (folder / "compare.json").read_text() == before and not (folder / "runs/rloo").exists()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_new_method_comes_after_the_first_one(is_old, made, policy, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    if is_old:
        without_shared(folder)
    assert compare_methods(small(policy, folder, methods="rloo"), console=QUIET) == 0
    accuracy = from_plain(json.loads((folder / "table.json").read_text())["exhibits"])[0]
    assert isinstance(accuracy, Table) and "points over grpo" in accuracy.columns
    assert column(accuracy, "method") == ["grpo", "vineppo:prefix_rollouts=1", "rloo"]
    assert json.loads((folder / "compare.json").read_text())["shared"]["learning_rate"] == 1e-3


def test_a_larger_budget_extends_a_comparison_at_the_evaluations_it_has(made, policy, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    longer = {"methods": "grpo", "rollouts": 60}
    assert compare_methods(small(policy, folder, **longer), console=QUIET) == 0
    assert compare_methods(small(policy, tmp_path / "new", every_rollouts=3, **longer), console=QUIET) == 0
    extended = {name: lines for name, lines in runs_of(folder).items() if "/grpo/" in name}
    assert extended == runs_of(tmp_path / "new") and len(extended) == 2


def test_a_damaged_setting_is_a_sentence(tmp_path, capsys):
    (tmp_path / "compare.json").write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "must be written by scoregram compare, got no methods" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_train_the_same_runs(made, policy, tmp_path):
    assert compare_methods(small(policy, tmp_path / "two", jobs=2), console=QUIET) == 0
    assert runs_of(tmp_path / "two") == runs_of(made)


def test_the_command_line_knows_the_options_of_train_but_not_those_it_sets(capsys):
    given = "--methods rloo,grpo --seeds 2 --learning-rate 0.1 --no-push"
    parsed: Any = cli.parsed_command(["compare", *given.split()])
    assert (parsed.seeds, parsed.learning_rate, parsed.push, len(parsed.choices)) == (2, 0.1, False, 2)
    for refused in ("--seed 1", "--method grpo", "--steps 3", "--resume", "--no-keep-evidence"):
        with pytest.raises(SystemExit):
            cli.parsed_command(["compare", *refused.split()])
