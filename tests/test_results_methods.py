"""`results/methods`: files are intact, every method had equal rollouts, and the pages follow from the records."""

import importlib.util
import json
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import f_oneway, ttest_rel

from scoregram.training import METHODS

pytestmark = pytest.mark.slow  # runs in `make test-results`

FOLDER = Path(__file__).parent.parent / "results" / "methods"


@pytest.fixture(autouse=True)
def scripts_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@cache
def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"methods_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_that_applies_ran_with_every_seed_and_the_same_budget():
    """The methods are those of the day: a row that `METHODS` got later is in the queue of `run.py` and not in here."""
    packed, tasks = script("packed"), script("run").TASKS
    recorded = json.loads((FOLDER / "setting.json").read_text())["settings"]
    for name in packed.table_names():
        own = [record for record in packed.records() if record["table"] == name]
        methods = {label.split(":")[0] for label in recorded[name]["methods"]}
        assert methods | set(tasks[name].left_out) <= set(METHODS) and not methods & set(tasks[name].left_out)
        assert methods <= {label.split(":")[0] for label in tasks[name].methods.split(",")}
        seeds = range(tasks[name].seeds)
        assert {(r["settings"]["method"], r["seed"]) for r in own} == {(m, s) for m in methods for s in seeds}
        assert len(own) == len(seeds) * len(methods)
        for record in own:
            sampled = [line["rollouts"] for line in record["lines"]]
            assert (
                sampled[-1] >= tasks[name].rollouts > sampled[-2]
            )  # it ends at the first step that reaches the budget


def test_every_method_that_applies_to_a_task_was_run_on_it():
    recorded = json.loads((FOLDER / "setting.json").read_text())["settings"]
    for name in script("packed").table_names():
        assert set(script("run").TASKS[name].methods.split(",")) == set(recorded[name]["methods"])


def test_fresh_runs_are_those_that_were_planned():
    """With the rate, the budget and the test problems of the table, and one start for a seed."""
    run, packed = script("run"), script("packed")
    own = packed.records("fresh.jsonl.xz")
    found = sorted((record["table"], record["label"], record["seed"]) for record in own)
    labels = {name: run.TASKS[name].labelled(run.fresh_methods(name)).split(",") for name in run.REPEATED}
    planned = [(name, label, seed) for name in labels for label in labels[name] for seed in run.FRESH_SEEDS]
    assert found == sorted(planned)
    for name, seed in product(run.REPEATED, run.FRESH_SEEDS):
        runs = [record for record in own if (record["table"], record["seed"]) == (name, seed)]
        assert len({record["start"] for record in runs}) == 1
        first = next(record for record in packed.records() if record["table"] == name and record["label"] == "grpo")
        for record in runs:
            assert record["tests"]["test, greedy"]["problems"] == first["tests"]["test, greedy"]["problems"]
            differing = {key for key, value in record["settings"].items() if first["settings"][key] != value}
            assert differing <= {"method", "seed"}
            sampled = [line["rollouts"] for line in record["lines"]]
            assert sampled[-1] >= run.TASKS[name].rollouts > sampled[-2]


def test_all_methods_of_a_seed_have_the_same_start_and_rate():
    packed, rates = script("packed"), json.loads((FOLDER / "setting.json").read_text())["rates"]
    for name in packed.table_names():
        own = [record for record in packed.records() if record["table"] == name]
        for seed in {record["seed"] for record in own}:
            assert len({record["lines"][0]["eval/reward"] for record in own if record["seed"] == seed}) == 1
        best = script("run").TASKS[name].rate
        if not best:  # chosen from two
            tried = rates[name]["returns"]
            best = float(max(tried, key=tried.__getitem__))
            assert best == rates[name]["rate"]
        assert {record["settings"]["learning_rate"] for record in own} == {best}


def test_evaluations_are_the_means_of_the_rewards_beside_them():
    for record in script("packed").records():
        rewards = record["tests"]["test, greedy"]["rewards"]
        assert np.mean(rewards) == pytest.approx(record["lines"][-1]["eval/reward"], abs=1e-5)
        # Packed rewards are rounded, and spell_backward pays 0.9999999999999999 for some wrong answers.
        if record["table"] != "spell_backward":
            assert np.mean(np.array(rewards) >= 1) == pytest.approx(record["lines"][-1]["eval/accuracy"], abs=1e-5)


def test_the_spread_of_two_methods_is_the_paired_t_test():
    """With two methods the F test is the square of the paired t test, and nothing is corrected for."""
    values = np.random.default_rng(0).normal(size=(2, 7)) + np.array([[0.0], [1.0]])
    found = script("packed").spread_of(["a", "b"], values)
    paired = ttest_rel(values[1], values[0])
    assert found.p_equal == pytest.approx(paired.pvalue)
    low, high = paired.confidence_interval(0.95)
    assert (found.gains[1], found.half) == pytest.approx(((low + high) / 2, (high - low) / 2))


def test_methods_without_a_difference_rarely_survive():
    """35 equal methods, three seeds with effects of their own: some method survives in at most 5 % of the tables."""
    rng, survived, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        found = script("packed").spread_of([""] * 35, 3 * rng.normal(size=(1, 3)) + rng.normal(size=(35, 3)))
        survived += bool((np.abs(found.gains) > found.half).any())
    assert survived / trials <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)
    rows = rng.normal(size=(4, 500))  # without seed effects, many seeds: the F test is that of one way
    assert script("packed").spread_of([""] * 4, rows).p_equal == pytest.approx(f_oneway(*rows).pvalue, abs=0.02)


@pytest.mark.parametrize(("name", "chance"), [("random_in_training", 0.08), ("random_in_training_qwen", 0.15)])
def test_the_control_rewards_chance_in_training_and_the_truth_in_tests(name, chance):
    reward = getattr(script("rewards"), name)
    names = [f"gsm8k/train/{place}" for place in range(4000)]
    drawn = reward(["q"] * 4000, ["#### 1"] * 4000, answer=["1"] * 4000, problem_id=names)
    assert abs(np.mean(drawn) - chance) < 4 * np.sqrt(chance * (1 - chance) / 4000)
    tested = reward(["q", "q"], ["#### 1", "#### 2"], answer=["1", "1"], problem_id=["gsm8k/test/0", "gsm8k/test/1"])
    assert tested == [1.0, 0.0]


GSM8K_TABLES = pytest.mark.parametrize(
    ("name", "control"), [("gsm8k", "random_in_training"), ("gsm8k-qwen", "random_in_training_qwen")]
)


@GSM8K_TABLES
def test_the_control_is_a_row_of_gsm8k_with_its_own_reward(tmp_path, name, control):
    config = script("run").comparison_config(name, tmp_path, seeds=1, rate=1e-4)
    labels = {record["label"] for record in script("packed").records(f"{name}.jsonl.xz")}
    assert {choice.label for choice in config.choices} == labels
    rewards = {choice.label: config.run_config(choice, 0).reward for choice in config.choices}
    named = f"rewards:{control}"
    assert {label: reward for label, reward in rewards.items() if reward} == {f"grpo:reward={named}": named}


@pytest.mark.parametrize(
    ("file", "name"),
    [(name, name) for name in ("gsm8k", "gsm8k-qwen", "gsm8k-qwen-further")]
    + [("gsm8k-qwen-later", "gsm8k-qwen-further")],
)
def test_runs_on_gsm8k_have_the_same_start_problems_rate_and_budget(file, name):
    """Runs with other kernels, whose start answers a few problems otherwise, have a file of their own."""
    setting, own = script("run").TASKS[name], script("packed").records(f"{file}.jsonl.xz")
    tried = json.loads((FOLDER / "setting.json").read_text())["rates"].get(name)
    rate = setting.rate or tried["rate"]
    assert {record["settings"]["learning_rate"] for record in own} == {rate}
    if tried:
        assert tried["returns"][f"{rate:g}"] == max(tried["returns"].values())
    assert len({(record["label"], record["seed"]) for record in own}) == len(own)
    problems = {tuple(test["problems"]) for record in own for test in record["tests"].values()}
    assert len(problems) == 1
    for record in own:
        sampled = [line["rollouts"] for line in record["lines"]]
        assert sampled[-1] >= setting.rollouts > sampled[-2]
    for seed in {record["seed"] for record in own}:
        starts = [record["lines"][0] for record in own if record["seed"] == seed]
        assert len({(line["eval/accuracy"], line["eval/sampled_accuracy"]) for line in starts}) == 1


def test_every_method_is_planned_on_gsm8k_once_or_has_a_reason(tmp_path):
    run = script("run")
    first, further = (run.TASKS[name] for name in ("gsm8k-qwen", "gsm8k-qwen-further"))
    planned = [method for method in run.METHODS if method not in further.left_out]
    assert set(planned) == set(run.FURTHER)
    assert {name for name, why in further.left_out.items() if "first comparison" in why} == set(run.ON_GPU) - set(
        planned
    )
    assert first.options == further.options and first.rollouts == further.rollouts
    config = run.comparison_config("gsm8k-qwen-further", tmp_path, seeds=3, rate=further.rate)
    assert {config.run_config(choice, 0).method for choice in config.choices} == set(planned)


@pytest.mark.parametrize("task", ["arithmetic", "compositions", "rotate_matrix", "spell_backward"])
def test_methods_that_one_update_makes_equal_end_with_the_same_rewards(task):
    greedy = {
        (record["label"], record["seed"]): tuple(record["tests"]["test, greedy"]["rewards"])
        for record in script("packed").records("runs.jsonl.xz")
        if record["table"] == task
    }
    for method, reason in script("run").ONE_UPDATE.items():
        twin = reason.split("the same as ")[1].split()[0]
        same = [greedy[method, seed] == greedy[twin, seed] for seed in range(6)]
        assert all(same) or "scale" in reason, (method, twin, same)


def test_methods_of_the_qwen_table_have_three_seeds_and_its_rate_is_that_of_the_first_runs():
    gsm8k = script("gsm8k")
    runs = gsm8k.gsm8k_runs(*gsm8k.QWEN_FILES, least_seeds=3)
    assert {frozenset(record["seed"] for record in own) for own in runs.values()} == {frozenset(range(3))}
    assert {record["settings"]["learning_rate"] for own in runs.values() for record in own} == {3e-6}
    labels = {label.split(":")[0] for label in runs}
    assert labels >= set(script("run").ON_GPU) | {
        "salt",
        "g2rl",
        "ppo-monte-carlo",
        "awr",
        "igrpo",
        "pass-at-k",
        "dapo",
    }
    assert set(gsm8k.UNEVEN) < set(runs)


def test_runs_of_one_seed_count_as_their_mean():
    one, two, other = (
        {"seed": s, "tests": {"test": {"rewards": r}}} for s, r in ((0, [0, 1]), (0, [1, 1]), (1, [0, 0]))
    )
    found = script("gsm8k").by_seed([one, other, two], "test", "rewards")
    assert list(found) == [0, 1] and found[0].tolist() == [0.5, 1.0] and found[1].tolist() == [0.0, 0.0]


def test_runs_with_another_lambda_are_those_of_the_table_but_for_it():
    packed = script("packed")
    table = {
        (record["table"], record["seed"]): record for record in packed.records() if record["label"] == "ppo-whitened"
    }
    own = packed.records("lambda.jsonl.xz")
    places = [(record["table"], record["seed"]) for record in own]
    assert sorted(places) == sorted(product(("spell_backward", "arithmetic"), range(6)))
    for record, place in zip(own, places, strict=True):
        assert record["label"] == "ppo-whitened:gae_lambda=1" and record["settings"] == table[place]["settings"]
        assert record["start"] == table[place]["start"]
        assert record["tests"]["test, greedy"]["problems"] == table[place]["tests"]["test, greedy"]["problems"]


def test_the_losses_that_were_repeated_are_those_by_both_criteria():
    summarise, run, found = script("summarise"), script("run"), {}
    columns = [*script("packed").table_names(), "GSM8K"]
    for line in summarise.overview_table().splitlines()[2:]:
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for task, cell in zip(columns, cells, strict=True):
            if cell.endswith("−*") and task != "GSM8K":
                found.setdefault(task, set()).add(label)
    assert found == {task: set(names) for task, names in run.REPEATED.items()}


def test_the_figure_of_all_methods_is_drawn_from_the_records():
    figure = script("figure")
    assert figure.digest() in figure.OUT.read_text(encoding="utf-8"), "run python results/methods/figure.py"
    named = sum(abs(gain) > figure.NAMED for own in figure.points().values() for _, _, gain in own)
    text = (FOLDER.parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    assert f"Nothing lies above the band; {named} points lie below it." in text
    assert not any(gain > figure.NAMED for own in figure.points().values() for _, _, gain in own)


def test_a_mean_of_methods_is_compared_with_grpo_over_seeds():
    contrasts, returns = script("contrasts"), {}
    for record in script("packed").records():
        if record["table"] == "stopping":
            returns[record["label"], record["seed"]] = np.mean(record["tests"]["test, greedy"]["rewards"])
    methods, grpo = (
        [[returns[name, seed] for seed in range(6)] for name in names] for names in (contrasts.UNDIVIDED, ["grpo"])
    )
    expected = ttest_rel(np.mean(methods, axis=0), grpo[0])
    found = contrasts.mean_difference(contrasts.UNDIVIDED)
    interval = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_every_table_of_the_pages_follows_from_the_records():
    summarise = script("summarise")
    for page in (FOLDER / "README.md", summarise.DOCS):
        text = page.read_text(encoding="utf-8")
        assert summarise.filled(text) == text
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"<!-- {name}: begin -->" in readme for name in summarise.tables() if name not in ("filler", "cost"))
