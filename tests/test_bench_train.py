"""The comparison of trainers runs, is a fair one, and says what it found."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scoregram.bench.train import run_train_bench, train_in_own_process, trainer_rows
from scoregram.bench.trainers import (
    CLOCK,
    Clock,
    Lap,
    TimedTraining,
    TrainingJob,
    require_laps,
    timed_training,
    train_under_clock,
)
from scoregram.checks import ScoregramError
from tests.training_cases import JUDGE, judge, save_policy

TINY: dict[str, Any] = {
    "task": "arithmetic:3",
    "reward": JUDGE,
    "group_size": 4,
    "batch_sizes": (8,),
    "max_new_tokens": 4,
    "steps": 2,
    "warmup": 1,
    "repeats": 1,
}
with_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def job(policy) -> TrainingJob:
    return TrainingJob(
        model=str(policy), task="arithmetic:3", reward=f"{__name__}:remembered", group_size=4, batch_size=8,
        max_new_tokens=4, learning_rate=1e-3, steps=2, warmup=1, threads=1, seed=0,
    )  # fmt: skip


SEEN: list[list[str]] = []


def remembered(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    SEEN.append(prompts)
    return judge(prompts, completions)


def lap(wall: float, processor: float = 0.0, rollouts: int = 4, tokens: float = 3.0, reward: float = 0.5) -> Lap:
    return Lap(float(wall), float(processor), rollouts, tokens, reward)


def test_a_period_runs_from_reward_to_reward_after_the_warm_up():
    laps = [lap(0), lap(100, 50), lap(104, 53, tokens=5.0, reward=0.0), lap(110, 56, tokens=7.0, reward=1.0)]
    found = timed_training(laps, sampling=[99.0, 99.0, 1.0, 2.0], updating=[99.0, 2.0, 3.0, 99.0], skipped=1)
    assert found == TimedTraining(
        seconds=5.0, processor_seconds=3.0, sampling=3.0 / 10, updating=5.0 / 10, completion_tokens=6.0, reward=0.5
    )


def test_the_clock_rewards_as_it_is_told_and_notes_a_lap():
    clock = Clock()
    with pytest.raises(ScoregramError, match="must be started"):
        clock([], [], completion_ids=[])
    clock.start(lambda prompts, completions, **columns: [1.0, None])
    assert clock(["a", "a"], ["b", "cde"], completion_ids=[[1], [2, 3, 4]], answer=["b", "b"]) == [1.0, None]
    assert [(seen.rollouts, seen.completion_tokens, seen.reward) for seen in clock.laps] == [(2, 2.0, 1.0)]
    clock.start(lambda prompts, completions, **columns: [0.0])
    assert clock.laps == []


@pytest.mark.parametrize("laps", [[lap(0)], [lap(0), lap(1, rollouts=3)], []])
def test_steps_of_another_size_are_refused(laps):
    with pytest.raises(ScoregramError, match="must reward 4 rollouts in each of 2 steps"):
        require_laps(laps, steps=2, rollouts=4)


def test_the_speedup_is_a_ratio_of_medians():
    run = TimedTraining(1.0, 1.0, 0.5, 0.4, 10.0, 0.5)
    trl = [replace(run, seconds=s, processor_seconds=2 * s) for s in (3.0, 9.0, 4.0)]
    own = [replace(run, seconds=s) for s in (1.0, 2.0, 8.0)]
    rows = {row.way: row for row in trainer_rows({"trl": trl, "scoregram": own}, 8)}
    assert rows["scoregram"].speedup == 2.0 and rows["scoregram"].processor_speedup == 8.0
    assert rows["trl"].speedup == 1.0 and rows["trl"].steps_per_second == 0.25
    assert trainer_rows({"scoregram": own}, 8)[0].speedup is None


def test_the_record_is_strict_json(policy, tmp_path, capsys):
    path = tmp_path / "record.json"
    assert run_train_bench(model=str(policy), ways=("scoregram",), as_json=True, out=path, **TINY) == 0
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert json.loads(capsys.readouterr().out) == record
    about, (row,) = record["settings"], record["rows"]
    assert about["bench"] == "train" and about["steps"] == 2 and about["parameters"] > 0 and about["torch"]
    assert row["way"] == "scoregram" and row["batch_size"] == 8 and row["speedup"] is None
    assert [1 / seconds for seconds in row["seconds"]] == [row["steps_per_second"]]
    assert row["sampling"] > 0 and row["updating"] > 0 and row["sampling"] + row["updating"] <= 1


def test_measuring_changes_no_rollout(job):
    seen = {}
    for way in ("scoregram", "unmeasured"):
        train_under_clock(way, job)
        seen[way] = [(lap.completion_tokens, lap.reward) for lap in CLOCK.laps]
    assert seen["scoregram"] == seen["unmeasured"] and len(seen["scoregram"]) == job.all_steps


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@with_trl
def test_both_trainers_see_the_same_prompts_in_the_same_order(job):
    seen: dict[str, list[list[str]]] = {}
    for way in ("scoregram", "trl"):
        SEEN.clear()
        train_under_clock(way, job)
        seen[way] = list(SEEN)
        assert {lap.rollouts for lap in CLOCK.laps} == {job.batch_size}
    assert seen["trl"] == seen["scoregram"]
    assert len(seen["trl"]) == job.all_steps and len(set(seen["trl"][0])) == job.batch_size // job.group_size


@pytest.mark.integration
@with_trl
def test_trl_beside_scoregram_in_processes_of_their_own(policy, capsys):
    assert run_train_bench(model=str(policy), **TINY) == 0
    table = capsys.readouterr().out
    assert all(way in table for way in ("trl", "scoregram", "unmeasured"))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("group_size", 1, "bench train --group-size: must be at least 2, got 1"),
        ("batch_sizes", (), "bench train --batch-sizes: must be at least 1, got 0"),
        ("batch_sizes", (8, 6), "bench train --batch-sizes: rollouts must be whole groups, got 6 rollouts"),
        ("steps", 0, "bench train --steps: must be at least 1, got 0"),
        ("warmup", -1, "bench train --warmup: must be at least 0, got -1"),
        ("ways", ("abacus",), "bench train --ways: the name must be one of scoregram, trl, .*got 'abacus'"),
    ],
)
def test_a_choice_that_leaves_nothing_to_measure_is_named(option, value, says):
    with pytest.raises(ScoregramError, match=says):
        run_train_bench(**{**TINY, option: value})


def test_without_trl_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("scoregram.bench.harness.find_spec", lambda name: None)
    with pytest.raises(ScoregramError, match=r"trl must be installed.*scoregram\[trl\]"):
        run_train_bench(**TINY)


def test_a_trainer_that_fails_is_named_with_its_last_words(job, tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2; echo last words. >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    with pytest.raises(ScoregramError, match=r"trl must train to the end, got last words\. Train"):
        train_in_own_process("trl", job)
