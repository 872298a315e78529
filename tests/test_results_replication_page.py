"""Numbers in the text of docs/replication.md that follow from stored records and stand in none of its tables."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from scipy.optimize import minimize

from scoregram.studies.grpo_rank import ABOUT_TWO

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAGE = " ".join((ROOT / "docs" / "replication.md").read_text(encoding="utf-8").split())


def dirty_trees(runs: Path) -> Counter:
    """How many configs say that the tree had uncommitted changes, that it had none, or nothing."""
    configs = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in runs.glob("*/config.yaml"))
    return Counter(config["environment"]["dirty"] for config in configs)


def test_the_page_says_which_runs_came_from_changed_trees():
    assert dirty_trees(RESULTS / "tiny-settings" / "runs") == {True: 26, False: 1}
    assert "26 of the 27 runs were made from trees with uncommitted changes (`dirty: true`)" in PAGE
    assert dirty_trees(RESULTS / "smollm2-gsm8k" / "runs") == {None: 12}
    assert "(`dirty: null` in all 12 configs)" in PAGE


def test_the_page_counts_the_tiny_settings_near_two():
    exhibits = json.loads((RESULTS / "tiny-settings" / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    table = next(one for one in exhibits if one["id"] == "settings")
    rank, null = (table["columns"].index(name) for name in ("effective rank", "null: orthogonal"))
    ranks = np.array([row[rank]["value"] for row in table["rows"]])
    assert (ranks < [row[null] for row in table["rows"]]).all() and len(ranks) == 27
    low, high = 2 - ABOUT_TWO, 2 + ABOUT_TWO
    near, lower, higher = ((low <= ranks) & (ranks <= high)).sum(), (ranks < low).sum(), (ranks > high).sum()
    assert f"about 2 ({low:g} to {high:g}) in {near} settings, lower in {lower} and higher in {higher}" in PAGE


def test_the_energy_outside_two_directions_at_a_rank_of_about_two():
    """Search over spectra: largest share of the third to eighth σ² where `(Σσ)² / Σσ²` is at most 2.25."""
    draw, best = np.random.default_rng(0), 0.0
    norm = {"type": "eq", "fun": lambda x: x @ x - 1}
    rank = {"type": "ineq", "fun": lambda x: 2 + ABOUT_TWO - x.sum() ** 2}
    order = {"type": "ineq", "fun": lambda x: x[:-1] - x[1:]}
    for _ in range(40):
        start = np.sort(draw.random(8) ** 4)[::-1]
        start /= np.linalg.norm(start)
        found = minimize(lambda x: -(x[2:] @ x[2:]), start, bounds=[(0, 1)] * 8, constraints=[norm, rank, order])
        if found.success:
            best = max(best, -found.fun)
    three = np.array(
        [1.5 - 2 * (6 - 6**0.5) / 12, (6 - 6**0.5) / 12, (6 - 6**0.5) / 12]
    )  # the best found: two equal ones
    assert three @ three == pytest.approx(1) and three.sum() ** 2 == pytest.approx(2.25)
    assert best == pytest.approx(three[2] ** 2, abs=1e-4)
    assert f"an effective rank of {2 + ABOUT_TWO:g} or less leaves at most {100 * best:.1f} % of the energy" in PAGE


@pytest.mark.slow  # runs in `make test-results`
@pytest.mark.parametrize("threshold", [0.999, 0.9995])
def test_the_page_counts_the_groups_without_a_repeated_text(threshold):
    live = distinct = 0
    for path in (RESULTS / "smollm2-gsm8k" / "runs").glob("*/groups/*.parquet"):
        for row in pq.read_table(path, columns=["kind", "rewards", "gram"]).to_pylist():
            size = len(row["rewards"])
            if row["kind"] == "train" and len(set(row["rewards"])) == 2:
                k = np.reshape(row["gram"], (size, size))
                cosines = k / np.sqrt(np.outer(np.diagonal(k), np.diagonal(k)))
                live, distinct = live + 1, distinct + bool((cosines[np.triu_indices(size, 1)] < threshold).all())
    assert f"{distinct} of the {live} live groups contain no text twice" in PAGE


@pytest.mark.slow  # runs in `make test-results`
def test_the_gain_of_the_single_run():
    """Gains in points with normal intervals over test problems, as `docs/training.md` and the run's page have them."""
    rewards: dict[tuple[str, int], dict[str, float]] = {}
    for path in (RESULTS / "smollm2-gsm8k-gain" / "groups").glob("*.parquet"):
        for row in pq.read_table(path, columns=["step", "kind", "prompt_id", "rewards"]).to_pylist():
            if row["kind"] != "train":
                rewards.setdefault((row["kind"], row["step"]), {})[row["prompt_id"]] = 100 * np.mean(row["rewards"])
    assert len({step for _, step in rewards}) == 6
    pages = [ROOT / "docs" / "training.md", RESULTS / "smollm2-gsm8k-gain" / "README.md"]
    texts = [" ".join(page.read_text(encoding="utf-8").split()) for page in pages]
    for kind, step, words in (
        ("test", 1250, "{:.1f} points [{:.1f}, {:.1f}]"),
        ("test, greedy", 1250, "{:.1f} [{:.1f}, {:.1f}]"),
        ("test, greedy", 1248, "{:.1f} [{:.2f}, {:.1f}]"),
    ):
        before, after = rewards[kind, 0], rewards[kind, step]
        gains = np.array([after[problem] - before[problem] for problem in before])
        half = 1.96 * gains.std(ddof=1) / len(gains) ** 0.5
        quoted = words.format(gains.mean(), gains.mean() - half, gains.mean() + half)
        assert quoted in texts[0].replace("2.3 points", "2.3")
        assert quoted in texts[1] or step == 1248


@pytest.mark.slow  # runs in `make test-results`
def test_the_gains_over_seeds_are_those_of_the_longer_runs():
    """The rows over seeds of `results/over-training`, with one digit, in `docs/training.md` and on the page."""
    table = (RESULTS / "over-training" / "README.md").read_text(encoding="utf-8")
    training = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split()).replace("−", "-")
    for line in table.splitlines():
        if "over seeds** | " in line and line.count("|") == 6 and "random" not in line:
            mean, low, high = (float(part.strip("[],")) for part in line.split("|")[5].split())
            interval = f"[{low:.1f}, {high:.1f}]"
            assert interval in training and interval in PAGE.replace("−", "-"), line
            assert f"{mean:.1f}" in training, line


@pytest.mark.slow  # runs in `make test-results`
def test_the_copy_for_numpy_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("table_1_pack", RESULTS / "table-1" / "pack.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with np.load(RESULTS / "table-1" / "grams.npz") as stored:
        packed = script.arrays()
        assert sorted(stored.files) == sorted(packed)
        for name, values in packed.items():
            np.testing.assert_array_equal(stored[name], values)
