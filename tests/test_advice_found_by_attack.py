"""Logs on which a stranger saw the advice fail: faults that it missed or hid, and healthy runs that it blamed."""

import math
from typing import Any

import numpy as np
import pytest

from scoregram.advice import LOG_RULES, Change, Diagnosis, RunFinding, advise_log, run_log
from scoregram.advice.findings import Undecided
from tests.test_advice import NOISE, RAMP, STEPS, healthy, lines_of, log_of

PLACES = np.arange(STEPS)


def findings(**changes: Any) -> dict[str, RunFinding]:
    return {one.name: one for one in advise_log(log_of(config={"num_iterations": 1}, **changes)).findings}


def change_of(found: RunFinding) -> Change:
    assert found.change is not None
    return found.change


def test_a_harmless_nan_does_not_hide_what_follows():
    """The run ended with exit status 0 under `--fail-on critical`, told that it needs no restart."""
    one_nan = np.where(PLACES == 29, math.nan, 1.0)
    blown: dict[str, Any] = {"grad_norm": one_nan, "kl": np.where(PLACES < 31, 0.01, 5.0)}
    found = findings(**blown)
    assert list(found) == ["NaN"] and found["NaN"].severity == "critical"
    assert "“KL blow-up” begins at step 32" in found["NaN"].sentence
    assert change_of(found["NaN"]).sentence.startswith("Restart from the checkpoint before step 30")
    assert findings(grad_norm=one_nan)["NaN"].severity == "warning"


def prefixes(norms: np.ndarray) -> set[str]:
    """The severities after every step of a run in which nothing else is wrong."""
    lines = lines_of({**healthy(), "loss": np.full(STEPS, 0.1), "grad_norm": norms})
    found: list[Diagnosis] = [advise_log(run_log("x", lines[: end + 1])) for end in range(len(norms))]
    return {one.severity for each in found for one in each.findings}


def test_a_run_in_fp16_is_not_halted_while_it_finds_its_loss_scale():
    norms = np.where((PLACES < 3) | (PLACES == 40), math.inf, 1.0)
    assert "critical" not in prefixes(norms)
    assert "critical" in prefixes(np.where(PLACES > 25, math.inf, 1.0))  # no scale is halved so often
    assert "critical" in prefixes(np.where(PLACES == 40, math.nan, 1.0))


def test_norms_of_steps_without_a_live_group_say_nothing_about_the_usual_norm():
    """`max_grad_norm=0.0028 (now 1.0)` was once advised: most steps had a KL term alone."""
    is_dead = np.random.default_rng(0).random(STEPS) < 0.6
    norms = np.where(is_dead, 0.002, 0.6) * np.exp(0.1 * NOISE)
    shares: dict[str, Any] = {"frac_reward_zero_std": is_dead.astype(float)}
    assert LOG_RULES["gradient spikes"](log_of(grad_norm=norms, **shares)) is None
    assert isinstance(LOG_RULES["gradient spikes"](log_of(grad_norm=norms)), RunFinding)
    norms[np.flatnonzero(~is_dead)[-1]] = 50.0
    assert isinstance(LOG_RULES["gradient spikes"](log_of(grad_norm=norms, **shares)), RunFinding)


def test_an_explosion_of_the_kl_is_found_after_some_steps_in_a_run_of_any_length():
    for count in (60, 1000, 4000):
        kl = np.full(count, 0.02)
        kl[-6:] = 20.0
        log = run_log("x", [{"step": step, "kl": float(value)} for step, value in enumerate(kl)])
        assert isinstance(LOG_RULES["KL blow-up"](log), RunFinding)


@pytest.mark.parametrize(
    "reward",
    [
        np.where(PLACES < 48, 0.6, 0.02),
        np.where(PLACES < 45, 0.15 + 0.6 * PLACES / 45, 0.15),
        np.where(PLACES < 30, 0.2 + 0.02 * PLACES, 0.8 - 0.025 * (PLACES - 30)),
    ],
)
def test_a_reward_that_rose_before_it_fell_is_found(reward):
    for scale in (1.0, 100.0):
        std = None if scale == 1 else 40.0
        found = findings(reward=scale * (reward + 0.01 * NOISE), reward_std=std, eval_reward=None)
        assert "falling reward" in found and "best quarter" in found["falling reward"].sentence


def test_a_reward_that_falls_while_the_held_out_score_does_not_is_that_of_harder_prompts():
    fallen = np.where(PLACES < 25, 0.62, 0.17) + 0.01 * NOISE
    assert "falling reward" in findings(reward=fallen, eval_reward=0.5 - 0.3 * RAMP)
    assert "falling reward" not in findings(reward=fallen, eval_reward=0.2 + 0.3 * RAMP)


def test_a_penalty_that_nothing_calls_for_is_a_warning_and_may_be_no_fault():
    """`soft_overlong` at 0 throughout was critical and certain, with the advice to pay 0 for right answers."""
    idle: dict[str, Any] = {"rewards__soft_overlong__mean": 0.0, "rewards__soft_overlong__std": 0.0}
    found = findings(**idle)["phantom signal"]
    assert (found.severity, found.confidence) == ("warning", "likely")
    assert any("a penalty that nothing has called for yet, change nothing" in step for step in change_of(found).steps)
    died: dict[str, Any] = {"rewards__soft_overlong__mean": np.where(PLACES < 30, 0.4, 0.0)}
    late: dict[str, Any] = {**died, "rewards__soft_overlong__std": np.where(PLACES < 30, 0.3, 0.0)}
    assert findings(**late)["phantom signal"].severity == "critical"


@pytest.mark.parametrize("top", [2.0, 100.0])
def test_a_task_that_is_solved_on_another_scale_has_no_broken_verifier(top):
    learnt = np.minimum(1.0, 0.4 + 0.6 * PLACES / 40)
    spread = np.where(learnt < 1, 0.4, 0.0)
    found = findings(
        reward=top * learnt,
        reward_std=top * spread,
        frac_reward_zero_std=np.where(learnt < 1, 0.3, 1.0),
        eval_reward=None,
    )["constant reward"]
    assert found.severity == "warning" and "the highest of the run" in found.sentence
    jumped = np.where(PLACES < 40, 0.4 + 0.01 * NOISE, 1.0)
    broken = findings(
        reward=top * jumped, reward_std=top * spread, frac_reward_zero_std=np.where(PLACES < 40, 0.3, 1.0)
    )
    assert broken["constant reward"].severity == "critical"


def test_shorter_answers_in_shorter_steps_are_no_rot():
    length = 600 - 480 * RAMP + 5 * NOISE
    seconds = 25 + 0.03 * length
    assert LOG_RULES["throughput rot"](log_of(step_time=seconds, completions__mean_length=length)) is None
    slower = LOG_RULES["throughput rot"](
        log_of(step_time=seconds * np.exp(1.5 * RAMP), completions__mean_length=length)
    )
    assert isinstance(slower, RunFinding)


def test_a_reward_that_was_not_finite_once_is_a_warning():
    once = np.where(PLACES == 4, math.nan, healthy()["reward"])
    assert findings(reward=once)["NaN"].severity == "warning"
    assert "now 1 of 60 are not" in change_of(findings(reward=once)["NaN"]).effect


def test_the_summary_of_a_run_is_no_step():
    lines = [{"step": s, "loss": 0.1, "grad_norm": math.nan if s == 5 else 1.0} for s in range(60)]
    found = advise_log(run_log("x", [*lines, {"step": 59, "train_loss": math.nan}])).findings
    assert [(one.name, one.severity) for one in found] == [("NaN", "warning")]


def test_a_sum_over_a_sequence_is_no_kl_per_token():
    lines = [{"step": s, "objective/kl": 3 + s / 25, "objective/scores": 0.5 + s / 100} for s in range(200)]
    assert isinstance(LOG_RULES["KL blow-up"](run_log("x", lines)), Undecided)


def test_a_validation_before_training_does_not_hide_the_trainer():
    lines = [{"step": 0, "val-core/gsm8k/reward/mean@1": 0.3}, {"step": 1, "actor/kl_loss": 0.1}]
    assert run_log("x", lines).is_of_verl and not run_log("x", lines[:1]).is_of_verl


def test_a_resumed_run_is_extrapolated_as_one_that_begins():
    fall = np.exp(-PLACES / 50)
    for begins in (1, 5001):
        log = run_log(
            "x", [{"step": begins + int(s), "entropy": float(one)} for s, one in zip(PLACES, fall, strict=True)]
        )
        found = LOG_RULES["entropy collapse"](log)
        assert isinstance(found, RunFinding) and f"left at step {begins + 119}" in found.sentence
