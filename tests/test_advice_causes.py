"""Two faults at once: causes come before consequences, and a consequence gets no advice of its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoregram.advice import DEMOS, GRAM_RULES, LOG_RULES, Diagnosis, RunFinding, advise, advise_log
from scoregram.advice.causes import CAUSES, causes_first
from scoregram.advice.findings import SEVERITIES, Change
from scoregram.advice.reward_rules import dead_kinds
from tests.test_advice import FAULTY, NOISE, STEPS, healthy, log_of

AFTER = np.arange(STEPS) >= 31
DEAD_LATE: dict[str, Any] = {
    "reward": np.where(AFTER, 0.0, healthy()["reward"]),
    "reward_std": np.where(AFTER, 0.0, 0.4),
    "frac_reward_zero_std": np.where(AFTER, 1.0, 0.3),
}
DEAD: dict[str, Any] = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
MOSTLY_DEAD: dict[str, Any] = {"reward": 0.05, "frac_reward_zero_std": np.clip(0.91 + 0.02 * NOISE, 0, 1)}
CUT: dict[str, Any] = {"completions__clipped_ratio": 0.97}
LOOPED: dict[str, Any] = {"repetition": 0.8 + 0.01 * NOISE}
PHANTOM: dict[str, Any] = {**FAULTY["phantom signal"], "reward": 0.8, "frac_reward_zero_std": 0.7 + 0.02 * NOISE}

PAIRS: dict[str, tuple[dict[str, Any], str, str]] = {
    "repetition, truncation": ({**LOOPED, **CUT, "reward": 0.99}, "repetition", "truncation"),
    "repetition, entropy collapse": ({**LOOPED, **FAULTY["entropy collapse"]}, "repetition", "entropy collapse"),
    "length gaming, truncation": (
        {**FAULTY["length gaming"], "completions__clipped_ratio": 0.6},
        "length gaming",
        "truncation",
    ),
    "KL blow-up, truncation": (
        {"kl": np.where(np.arange(STEPS) < 20, 0.01, 5.0), "completions__clipped_ratio": np.where(AFTER, 0.9, 0.02)},
        "KL blow-up",
        "truncation",
    ),
    "truncation, constant reward": ({**DEAD, **CUT}, "truncation", "constant reward"),
    "truncation, dead groups": ({**MOSTLY_DEAD, **CUT}, "truncation", "dead groups"),
    "phantom signal, dead groups": (PHANTOM, "phantom signal", "dead groups"),
    "reward against held-out score, dead groups": (
        {**FAULTY["reward against held-out score"], "frac_reward_zero_std": 0.8},
        "reward against held-out score",
        "dead groups",
    ),
}


FALLING: dict[str, Any] = {"reward": 0.7 - 0.6 * np.linspace(0, 1, STEPS) + 0.01 * NOISE, "eval_reward": None}
PAIRS |= {
    "KL blow-up, falling reward": ({**FAULTY["KL blow-up"], **FALLING}, "KL blow-up", "falling reward"),
    "repetition, falling reward": ({**LOOPED, **FALLING}, "repetition", "falling reward"),
    "truncation, falling reward": ({**FALLING, "completions__clipped_ratio": 0.4}, "truncation", "falling reward"),
    "constant reward, falling reward": (
        {**DEAD_LATE, "reward": np.where(AFTER, 0.0, 0.6 + 0.01 * NOISE), "eval_reward": None},
        "constant reward",
        "falling reward",
    ),
}
GRAM_PAIRS = {("dominating rollouts", name) for name in ("batch size", "group size", "gradient spikes")}
"""Causes that only a Gram shows: a recorded run in place of a log."""


def diagnosed(**changes: Any) -> Diagnosis:
    return advise_log(log_of(config={"num_iterations": 1}, **changes))


def named(found: Diagnosis, name: str) -> RunFinding:
    (one,) = (one for one in found.findings if one.name == name)
    return one


@pytest.mark.parametrize("pair", PAIRS)
def test_a_cause_comes_first_and_its_consequence_has_no_change(pair):
    changes, cause, consequence = PAIRS[pair]
    found = diagnosed(**changes)
    assert [one.name for one in found.findings] == [cause, consequence]
    first, second = found.findings
    assert first.change is not None and second.change is None and second.confidence == "possible"
    (row,) = (row for row in CAUSES if (row.cause, row.consequence) == (cause, consequence))
    assert second.evidence.endswith(f"resolve “{cause}” first. {row.reason}")
    assert SEVERITIES.index(first.severity) <= SEVERITIES.index(second.severity)


def test_every_row_names_rules_and_every_pair_is_tested():
    rules = {*LOG_RULES, *GRAM_RULES}
    assert all(row.cause in rules and row.consequence in {*rules, "*"} for row in CAUSES)
    assert {(row.cause, row.consequence) for row in CAUSES if row.consequence != "*"} == {
        *((cause, consequence) for _, cause, consequence in PAIRS.values()),
        *GRAM_PAIRS,
    }
    causes = [row.cause for row in CAUSES]
    for place, row in enumerate(CAUSES):  # the causes of a cause come before it in the table
        assert row.consequence not in causes[: place + 1] or row.consequence == "*"


def test_what_one_rollout_causes_has_no_change_of_its_own():
    """`demo dominating-rollout` once advised larger groups against the noise of one rollout."""
    found = advise(DEMOS / "dominating-rollout")
    assert found.findings[0].name == "dominating rollouts" and found.findings[0].change is not None
    consequences = {one.name for one in found.findings[1:]}
    assert consequences == {"group size", "gradient spikes"}
    assert all(
        one.change is None and "resolve “dominating rollouts” first" in one.evidence for one in found.findings[1:]
    )


@pytest.mark.parametrize(("direction", "is_explained"), [("up", True), ("down", False)])
def test_a_batch_too_small_is_explained_by_one_rollout_and_one_too_large_is_not(direction, is_explained):
    change = Change(knob="batch size", direction=direction, sentence="Use another.", effect="less noise.")
    batch = RunFinding(name="batch size", severity="warning", sentence="It is.", evidence="seen.", change=change)
    told = causes_first(
        {"dominating rollouts": replace(batch, name="dominating rollouts"), "batch size": batch}, log_of()
    )
    assert isinstance(told["batch size"], RunFinding) and (told["batch size"].change is None) == is_explained


@pytest.mark.parametrize("bad", [AFTER | (np.arange(STEPS) == 30), np.arange(STEPS) == 30])
def test_what_begins_after_a_nan_is_its_consequence(bad):
    """The NaN stays, or is logged once, ten steps or fewer before the reward dies."""
    found = diagnosed(**DEAD_LATE, grad_norm=np.where(bad, np.nan, 1.0))
    assert [one.name for one in found.findings] == ["NaN"] and found.findings[0].since == 31
    assert found.undecided["constant reward"] == "first repair what “NaN” found"
    assert "constant reward" not in found.fine


def test_what_began_before_a_nan_is_no_consequence():
    late = np.where(np.arange(STEPS) >= 50, np.nan, 1.0)
    assert {one.name for one in diagnosed(**DEAD, grad_norm=late).findings} == {"NaN", "constant reward"}
    early = np.where(np.arange(STEPS) == 5, np.nan, 1.0)  # one norm that is NaN, and 25 steps later
    found = diagnosed(**DEAD_LATE, grad_norm=early).findings
    assert {one.name for one in found if one.change is not None} == {"NaN", "constant reward"}


def test_the_parser_is_not_blamed_where_every_completion_is_cut_off():
    told = " ".join(line for one in diagnosed(**DEAD, completions__clipped_ratio=1.0).findings for line in one.lines())
    assert "parser" not in told and "Call it on a completion that is right" not in told
    half = named(diagnosed(**DEAD, completions__clipped_ratio=0.6), "constant reward")
    assert half.confidence == "certain" and half.change is not None  # 40 % ended, and none of them earned anything


def test_an_entropy_that_collapsed_first_is_no_consequence_of_repetition():
    late = np.where(np.arange(STEPS) < 35, 0.1, 0.8) + 0.01 * NOISE
    found = diagnosed(repetition=late, **FAULTY["entropy collapse"])
    assert all(one.change is not None for one in found.findings) and len(found.findings) == 2


def test_a_total_reward_that_one_function_makes_up_does_not_bound_the_kinds_of_dead_groups():
    right, wrong = dead_kinds(log_of(**PHANTOM))
    assert np.isnan([right.value, wrong.value]).all()
    told = " ".join(named(diagnosed(**PHANTOM), "dead groups").lines())
    assert "arder" not in told and "all right" not in told


def test_a_repeating_run_that_is_cut_off_is_not_given_a_shorter_limit():
    both = diagnosed(**LOOPED, **CUT).findings[0]
    assert both.change is not None and both.change.knob == "reward function" and both.change.steps
    alone = diagnosed(**LOOPED).findings[0]
    assert alone.change is not None and alone.change.sentence == "Shorten the token limit."
