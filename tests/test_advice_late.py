"""Faults that begin late in a run, runs that end solved, and rewards on other scales than from 0 to 1."""

import json
from typing import Any

import numpy as np
import pytest

from scoregram import cli
from scoregram.advice import LOG_RULES, RunFinding, RunLog, advise_log, run_log
from scoregram.advice.logs import ScalarSeries
from scoregram.advice.reward_rules import constant_steps, equal_steps
from tests.test_advice import NOISE, RAMP, STEPS, healthy, lines_of, log_of


def died_log(first: int, steps: int, value: float = 0.0, seed: int = 0) -> RunLog:
    """A healthy log whose reward is constant from a step on."""
    series = healthy(seed, steps)
    dead = np.arange(1, steps + 1) >= first
    series["reward"] = np.where(dead, value, series["reward"])
    series["reward_std"] = np.where(dead, 0.0, series["reward_std"])
    series["frac_reward_zero_std"] = np.where(dead, 1.0, series["frac_reward_zero_std"])
    return run_log("x", lines_of(series))


def constant(log: RunLog) -> RunFinding | None:
    found = LOG_RULES["constant reward"](log)
    assert found is None or isinstance(found, RunFinding)
    return found


# A verifier that dies


@pytest.mark.parametrize(("first", "steps"), [(401, 590), (51, 60), (41, 60), (1, 60)])
def test_a_verifier_that_dies_is_found_with_its_step(first, steps):
    found = advise_log(died_log(first, steps)).findings[0]
    assert (found.name, found.since, found.severity) == ("constant reward", first, "critical")
    assert found.change is not None
    told = " ".join((found.change.sentence, *found.change.steps))
    assert ("parser" in told) == (first == 1) and (f"after step {first}" in told) == (first > 1)


def test_a_dead_verifier_is_found_after_ten_steps():
    """`halt_on` applies the rules after every logged step."""
    lines = died_log(401, 590).lines
    found = [constant(run_log("x", lines[:count])) for count in range(401, 415)]
    assert [one is not None for one in found] == [False] * 9 + [True] * 5


def test_a_reward_that_is_often_constant_is_so_at_the_end_by_chance():
    """Half of the steps have reward 0 throughout: 14 of 60 in a row have 60 · 0.51^14 = 0.005 > 1e-4; 25 have 3e-6."""
    often = np.arange(STEPS) % 2 == 0
    for count, is_found in ((14, False), (25, True)):
        dead = often | (np.arange(STEPS) >= STEPS - count)
        log = log_of(reward=np.where(dead, 0.0, 0.1), reward_std=np.where(dead, 0.0, 0.3), frac_reward_zero_std=dead)
        assert (constant(log) is not None) == is_found


def test_steps_without_a_spread_do_not_end_a_constant_stretch():
    steps = np.arange(30)
    reward = ScalarSeries(steps, np.where(steps < 15, 0.1 * steps, 0.5))
    equal = {int(step): bool(step >= 15) for step in steps if step % 2}
    assert constant_steps(reward, equal) == 15
    assert constant_steps(reward, {**equal, 20: False}) == 0
    assert constant_steps(reward, {}) == 0


def test_the_range_of_a_step_tells_where_the_deviation_is_not_logged():
    lines = [
        {"step": s, "critic/score/mean": 0.5, "critic/score/max": 0.5 + (s < 3), "critic/score/min": 0.5}
        for s in range(5)
    ]
    assert list(equal_steps(run_log("x", lines)).values()) == [False, False, False, True, True]


# Onsets


@pytest.mark.parametrize("first", [5, 30, 61, 75, 81])
def test_an_onset_in_the_last_third_is_that_of_the_fault(first):
    steps = np.arange(1, 91)
    assert ScalarSeries(steps, steps * 1.0).since(steps >= first) == first
    noisy = (steps >= first) & (steps != 85)  # a single value on the other side
    assert ScalarSeries(steps, steps * 1.0).since(noisy) == first


def test_an_onset_without_a_majority_is_the_start_of_the_last_third():
    steps = np.arange(1, 91)
    assert ScalarSeries(steps, steps * 1.0).since(steps == 90) == 90
    assert ScalarSeries(steps, steps * 1.0).since(steps < 0) == 61


def test_findings_name_late_onsets():
    kl = np.where(np.arange(90) >= 80, 2.0, 0.01)
    found = LOG_RULES["KL blow-up"](run_log("x", lines_of({**healthy(steps=90), "kl": kl})))
    assert isinstance(found, RunFinding) and found.since == 81
    cut = np.where(np.arange(600) >= 480, 0.9, 0.02)
    series = {**healthy(steps=600), "completions/clipped_ratio": cut}
    found = LOG_RULES["truncation"](run_log("x", lines_of(series)))
    assert isinstance(found, RunFinding) and found.since == 481


# Solved tasks

SOLVED: dict[str, Any] = {
    "reward": np.minimum(0.99, 0.5 + RAMP) + 0.001 * NOISE,
    "reward_std": 0.4 * np.exp(-4 * RAMP),
    "frac_reward_zero_std": np.minimum(0.95, 2 * RAMP),
    "entropy": 0.8 * np.exp(-4 * RAMP),
}


def test_a_solved_task_does_not_fail_a_check_for_critical_findings(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in log_of(**SOLVED).lines))
    assert [cli.main(["advise", str(path), "--fail-on", level]) for level in ("critical", "warning")] == [0, 1]
    unsolved = {**SOLVED, "reward": 0.05}
    assert "critical" in {one.severity for one in advise_log(log_of(**unsolved)).findings}


def test_a_constant_reward_of_1_that_was_learnt_is_a_solved_task():
    found = constant(died_log(31, 60, value=1.0))
    assert found is not None and found.severity == "warning" and "the task is solved" in found.sentence
    assert found.change is not None and found.change.direction == "harder"
    never_lived = constant(died_log(1, 60, value=1.0))  # a verifier that accepts everything
    assert never_lived is not None and never_lived.severity == "critical"
    other_scale = constant(died_log(31, 60, value=7.0))
    assert other_scale is not None and other_scale.severity == "critical"


# Scales


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_only_a_score_from_0_to_1_is_known_to_be_solved(scale):
    fallen: dict[str, Any] = {"entropy": np.exp(-4 * RAMP), "reward": 0.5 * scale, "eval_reward": 0.4 * scale}
    assert isinstance(LOG_RULES["entropy collapse"](log_of(**fallen)), RunFinding)
    fallen["reward"] = 0.97
    assert LOG_RULES["entropy collapse"](log_of(**fallen)) is None


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_a_fall_of_the_held_out_score_is_judged_on_its_scale(scale):
    """A fall by 0.007 of 0.4 is small, one by 0.1 is not, in percent as well."""
    reward = scale * (0.5 + 0.1 * RAMP + 0.002 * NOISE)
    for fall, is_found in ((0.007, False), (0.1, True)):
        log = log_of(reward=reward, eval_reward=scale * (0.4 - 1.5 * fall * RAMP + 0.0002 * NOISE))
        assert isinstance(LOG_RULES["reward against held-out score"](log), RunFinding) == is_found
