"""`results/over-training`: the files are intact and hold no text, and every number of the page follows from them."""

import importlib.util
import itertools
import json
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from scipy import stats

from scoregram.spectra import orthogonal_null, spectrum_summary

pytestmark = pytest.mark.slow  # runs in `make test-results`

FOLDER = Path(__file__).parent.parent / "results" / "over-training"
RUNS = sorted(path.parent for path in FOLDER.glob("*/config.yaml"))
CONTINUED = sorted(FOLDER.glob("continued-seed*"))


@cache
def summarise() -> ModuleType:
    spec = importlib.util.spec_from_file_location("over_training_summarise", FOLDER / "summarise.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_a_run_holds_every_measured_group_and_no_text(run):
    table = pq.read_table(run / "groups.parquet")
    assert table.column_names == ["step", "kind", "prompt_id", "rewards", "lengths", "gram"]
    groups = summarise().training_groups(run.name)
    steps, counts = np.unique(groups.step, return_counts=True)
    assert steps.tolist() == list(range(10, 1001, 10)) and set(counts) == {16}
    metrics = {row["step"]: row for row in summarise().step_metrics(run.name)}
    assert len(metrics) == 1000
    for step in steps:
        rewards = groups.rewards[groups.step == step]
        live = (rewards.max(1) > rewards.min(1)).sum()
        assert (live, rewards.mean()) == (metrics[step]["live_groups"], pytest.approx(metrics[step]["reward"]))


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_grams_are_symmetric_and_positive(run):
    grams = summarise().training_groups(run.name).gram
    assert (grams == grams.transpose(0, 2, 1)).all()
    lowest, trace = np.linalg.eigvalsh(grams)[:, 0], np.trace(grams, axis1=1, axis2=2)
    assert (lowest > -1e-5 * trace).all()


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_rank_and_null_are_those_of_the_library(run):
    groups = summarise().training_groups(run.name)
    live = np.flatnonzero(groups.rewards.max(1) > groups.rewards.min(1))[::20]
    for rewards, gram in zip(groups.rewards[live], groups.gram[live], strict=True):
        given = torch.tensor(gram), torch.tensor(rewards - rewards.mean())
        rank, null = summarise().rank_and_null(gram, rewards)
        assert rank == pytest.approx(spectrum_summary(*given).effective_rank, rel=1e-3)
        assert null == pytest.approx(orthogonal_null(*given).effective_rank, rel=1e-9)


@pytest.mark.parametrize("run", CONTINUED, ids=lambda path: path.name)
def test_the_control_holds_the_rewards_of_every_test_problem_and_no_text(run):
    table = pq.read_table(run / "groups.parquet")
    assert table.column_names == ["step", "kind", "prompt_id", "rewards"] and set(table["step"].to_pylist()) == {1000}
    problems = set(pq.read_table(RUNS[0] / "groups.parquet", filters=[("kind", "=", "test")])["prompt_id"].to_pylist())
    assert set(table["prompt_id"].to_pylist()) == problems and len(problems) == 1319
    for kind, samples in (("test, greedy", 1), ("test", 16)):
        assert summarise().test_rewards(run.name, kind, 1000).shape == (1319, samples)


def test_the_difference_to_the_control_is_that_of_the_accuracies_by_seed():
    ends = [pq.read_table(FOLDER / f"{name}-seed1" / "groups.parquet").to_pylist() for name in ("grpo", "continued")]
    means = [
        np.mean([row["rewards"] for row in rows if (row["step"], row["kind"]) == (1000, "test, greedy")])
        for rows in ends
    ]
    row = next(line for line in summarise().control_table().splitlines() if line.startswith("| standardised GRPO"))
    assert row.split("|")[3].split(",")[1].strip() == f"{100 * (means[0] - means[1]):+.2f}"


def test_the_null_of_cosines_is_their_mean_over_permuted_rewards():
    groups = summarise().training_groups(RUNS[0].name)
    at = int(np.flatnonzero((groups.rewards.sum(1) == 3) & (groups.step > 900))[0])
    gram, right = groups.gram[at], groups.rewards[at] > 0.5
    assert summarise().first_of_each_text(gram).all()
    norms = np.sqrt(np.diagonal(gram))

    def mean_cosine(of: tuple[int, ...]) -> float:
        return float(np.mean([gram[i, j] / norms[i] / norms[j] for i in of for j in range(8) if j not in of]))

    measured = mean_cosine(tuple(np.flatnonzero(right).tolist()))
    null = np.mean([mean_cosine(chosen) for chosen in itertools.combinations(range(8), 3)])
    found = summarise().permuted_differences(RUNS[0].name)["right–wrong"]
    same_step = found[found[:, 0] == groups.step[at]]
    assert np.isclose(same_step[:, 1] / same_step[:, 2], measured - null, atol=1e-6).any()


def test_the_slope_is_that_of_least_squares_with_a_constant_for_each_cell():
    rows = summarise().live_groups(RUNS[0].name)
    cells = np.unique(rows[:, 1])
    design = np.column_stack([rows[:, 0] / 1000, rows[:, 1:2] == cells])
    expected = np.linalg.lstsq(design, np.log(rows[:, 2] / rows[:, 3]), rcond=None)[0][0]
    assert summarise().slope(rows) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_the_evaluations_agree_with_the_stored_rewards(run):
    """Accuracies in `metrics.jsonl` against the rewards of the test problems in `groups.parquet`."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    evaluations = {row["step"]: row for row in rows if "eval/accuracy" in row}
    assert sorted(evaluations) == [0, 1000]
    stored = pq.read_table(run / "groups.parquet", columns=["step", "kind", "prompt_id", "rewards"]).to_pylist()
    tested = [row for row in stored if row["kind"] != "train"]
    assert {row["step"] for row in tested} == evaluations.keys()
    for step, evaluation in evaluations.items():
        for kind, name, samples in (("test, greedy", "eval/accuracy", 1), ("test", "eval/sampled_accuracy", 16)):
            rewards = {row["prompt_id"]: row["rewards"] for row in tested if (row["step"], row["kind"]) == (step, kind)}
            assert {len(given) for given in rewards.values()} == {samples}
            assert len(rewards) == evaluation["eval/problems"] == 1319
            assert np.mean([*rewards.values()]) == pytest.approx(evaluation[name], abs=1e-9)
            assert set(itertools.chain(*rewards.values())) <= {0.0, 1.0}
        assert evaluation["eval/reward"] == evaluation["eval/accuracy"]


def test_quantiles_of_t_are_those_of_scipy():
    for freedom in (1.0, 2.0, 2.4546, 3.7, 5.0, 40.0):
        assert summarise().t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)
    for freedom, printed in summarise().T_QUANTILE.items():
        assert summarise().t_quantile(freedom) == pytest.approx(printed, abs=5e-4)


def test_the_intervals_against_random_rewards_are_those_of_scipy():
    lines = summarise().random_trend_table().splitlines()[2:]
    for (method, repeats), line in zip(itertools.product(("paper", "grpo"), (True, False)), lines, strict=True):
        own, control = (
            [summarise().slope(summarise().live_groups(f"{made}-seed{seed}", repeats)) for seed in range(3)]
            for made in (method, "random")
        )
        paired = stats.ttest_rel(own, control).confidence_interval()
        apart = stats.ttest_ind(own, control, equal_var=False).confidence_interval()
        mean = np.mean(own) - np.mean(control)
        shown = line.strip("| ").split(" | ")[3:]
        wanted = [[mean, *ends] for ends in (paired, apart)]
        found = [
            [float(part) for part in cell.replace("[", "").replace("]", "").replace(",", "").split()] for cell in shown
        ]
        np.testing.assert_allclose(found, wanted, atol=6e-4)


def test_the_mean_of_the_foretelling_correlations_is_quoted_with_its_interval():
    rows = summarise().foretelling_table().splitlines()[2:]
    values = [float(row.strip("| ").split(" | ")[3]) for row in rows]
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    mean, low, high = (
        f"{value:.2f}".replace("-", "−") for value in (np.mean(values), np.mean(values) - half, np.mean(values) + half)
    )
    page = " ".join((FOLDER.parent.parent / "docs" / "replication.md").read_text(encoding="utf-8").split())
    assert f"correlation without trends {mean} [{low}, {high}]" in page


def test_the_page_says_which_trees_were_clean():
    dirty = {run.name: yaml.safe_load((run / "config.yaml").read_text())["environment"]["dirty"] for run in RUNS}
    assert {name for name, found in dirty.items() if found is False} == {"grpo-seed0", "paper-seed0"}
    assert [found for found in dirty.values() if found is None] == [None] * 7


def test_every_table_of_the_page_follows_from_the_files():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert summarise().filled(text) == text, "run python results/over-training/summarise.py --write"
