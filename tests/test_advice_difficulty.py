"""How hard prompts are: chance by enumeration, chances of a second visit by integration, and one change first."""

import math
from dataclasses import replace
from typing import Any

import pytest

from scoregram.advice import RunFinding, advise, advise_run
from scoregram.advice.difficulty import (
    KINDS,
    DeadGroups,
    chance_sentence,
    prompt_change,
    size_sentence,
)
from scoregram.advice.findings import Change, Undecided, diagnosis_of
from scoregram.advice.noise_rules import method_estimator, trained_estimator
from scoregram.advice.settings import COUNT_CHANGES, trainer_of, typed_setting, with_setting
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.reading import SuccessLaw
from scoregram.reading.replay import can_replay
from scoregram.statistics import NoiseComponents
from scoregram.tasks import TASKS, load_task
from scoregram.training import METHODS
from tests.contradictions import contradictions
from tests.reading_cases import run_of, with_noise
from tests.test_advice_gram import found
from tests.test_reading_difficulty import counts


def test_a_filter_has_no_number_where_the_spread_is_not_resolved():
    known = DeadGroups(live=0.2, direction="easier", config=OWN, outcomes=DIFFERENT, law=SuccessLaw(0.075, math.inf))
    assert "is unknown: too few groups are stored" in prompt_change(known).effect


OWN: dict[str, Any] = {"method": "grpo", "dynamic_rounds": 4, "group_size": 8}
TRL: dict[str, Any] = {"integration": {"name": "trl", "trainer": "GRPOTrainer"}, "group_size": 8}
DIFFERENT = counts(100, 8, 60, wrong=80)
ALIKE = counts(100, 8, 60, wrong=55)


def test_one_change_comes_first_and_the_others_have_a_price():
    law = SuccessLaw(0.075, 1.5)
    known = DeadGroups(
        live=0.2, direction="easier", config=OWN, outcomes=DIFFERENT, law=law, batch_size=64, size_sentence="Groups …"
    )
    change = prompt_change(known)
    assert change.sentence == "Leave out prompts whose 8 rollouts were all wrong."
    graded = prompt_change(replace(known, is_graded=True))
    assert graded.sentence == "Leave out prompts whose 8 rollouts all have the reward 0."
    again = law.live_if_kept(8, "all wrong")
    assert f"about {again:.0%} of the remaining groups would then be live, now 20%." in change.effect
    price = (
        "Price: 8 rollouts for each prompt once, as much as 125 steps of this run for every 1,000 prompts (the run does"
    )
    assert price in change.effect
    easier, dynamic = change.others
    assert easier.startswith("Take easier") and change.not_advised == ("Groups …",)
    assert prompt_change(replace(known, size_is_advised=True)).others[-1] == "Groups …"
    assert "dynamic sampling, --method dapo" in dynamic and "At equal rollouts it gained less" in dynamic
    assert "p to 4.0 times as many live groups" in dynamic and "--dynamic-rounds 4 allows no more" in dynamic
    assert "7.5%" in easier  # 60 of 800 rollouts


@pytest.mark.parametrize("outcomes", [None, DIFFERENT, ALIKE])
def test_problems_that_are_drawn_are_not_filtered(outcomes):
    drawn = OWN | {"task": "arithmetic:3"}
    change = prompt_change(DeadGroups(live=0.2, direction="easier", config=drawn, outcomes=outcomes))
    assert change.sentence.startswith("Take easier problems") and not change.not_advised
    assert not any("eave out" in one for one in change.others)
    assert typed_setting(change, drawn) == "--task arithmetic:2 (now arithmetic:3)"


def test_problems_of_a_function_of_ones_own_have_no_file_to_filter():
    own = OWN | {"task": "python:my_tasks:load"}
    for direction in KINDS:
        change = prompt_change(DeadGroups(live=0.2, direction=direction, config=own, outcomes=DIFFERENT))
        told = " ".join([change.sentence, change.effect, *change.steps, *change.others])
        assert "scoregram filter" not in told and "wc -l" not in told and "Leave out" not in told


@pytest.mark.parametrize(("task", "parts"), [(name, row.parts) for name, row in TASKS.items() if row.parts])
def test_no_number_of_terms_or_turns_is_advised_that_the_task_refuses(task, parts):
    for count, direction in ((parts.fewest, "easier"), (parts.most, "harder")):
        config = OWN | {"task": f"{task}:{count}"}
        change = prompt_change(DeadGroups(live=0.2, direction=direction, config=config))
        assert typed_setting(change, config) == "" and f"the task {task} has no {direction} problems" in change.steps[0]
        assert load_task(f"{task}:{count}").name == f"{task}:{count}"
        with pytest.raises(ScoregramError, match=f"whole number from .*, got '{count + COUNT_CHANGES[direction]}'"):
            load_task(f"{task}:{count + COUNT_CHANGES[direction]}")


@pytest.mark.parametrize("config", [OWN, TRL, {}])
def test_where_most_groups_are_all_right_harder_problems_come_before_a_filter(config):
    change = prompt_change(DeadGroups(live=0.2, direction="harder", config=config))
    assert change.sentence.startswith("Take harder problems")
    assert "Leave out prompts" in change.others[0]


def test_a_trl_user_is_told_what_trl_has():
    change = prompt_change(DeadGroups(live=0.2, direction="easier", config=TRL, outcomes=DIFFERENT))
    assert change.sentence.endswith("TRL has no dynamic sampling.") and typed_setting(change, TRL) == ""
    assert [step.partition(":")[0] for step in change.steps] == [
        "Name the prompts",
        "Sample every prompt once, without learning",
        "List the prompts whose rewards are all 0",
        "Train as before, on the others",
    ]
    assert not any("dapo" in part.lower() or "--" in part for part in (change.sentence, change.effect, *change.others))
    used = prompt_change(DeadGroups(live=0.2, direction="easier", config=OWN | {"method": "dapo"}, outcomes=DIFFERENT))
    assert used.sentence.startswith("Leave out prompts") and typed_setting(used, {"method": "dapo"}) == ""
    unknown = prompt_change(DeadGroups(live=0.2, direction="easier"))
    assert "--" not in unknown.effect and typed_setting(unknown, {}) == ""


@pytest.mark.parametrize("config", [OWN, TRL, {}])
@pytest.mark.parametrize("direction", KINDS)
@pytest.mark.parametrize("outcomes", [None, DIFFERENT, ALIKE])
def test_no_prompt_is_called_unsolvable_by_chance(config, direction, outcomes):
    change = prompt_change(DeadGroups(live=0.3, direction=direction, config=config, outcomes=outcomes))
    told = " ".join((change.sentence, change.effect, *change.others, *change.not_advised))
    assert "never solved" not in told and "always solved" not in told
    if outcomes is ALIKE:
        assert "would gain little" in told and "Leave out" not in told and "leave the prompts" not in told
    assert change.direction == direction


def test_chance_stands_beside_the_share_of_dead_groups():
    assert "Chance would make 53% all wrong" in chance_sentence(DIFFERENT, "easier")  # (1 - 0.075)^8 = 0.536
    assert "so prompts differ, and some are harder" in chance_sentence(DIFFERENT, "easier")
    assert "no prompt is shown to be harder" in chance_sentence(ALIKE, "easier")
    assert "all right if" in chance_sentence(counts(10, 4, 36, solved=8), "harder")


SIZES = {
    "down": {"best_group_size": Estimate(2.0, 2.0, 3.0), "components": NoiseComponents(1.0, 10.0, 1.0, 10.0)},
    "up": {"best_group_size": Estimate(11.0, 8.0, 15.0), "components": NoiseComponents(1.0, 1.0, 1.0, 100.0)},
    "stays": {"best_group_size": Estimate(5.0, 3.0, 9.0), "components": NoiseComponents(1.0, 1.0, 1.0, 100.0)},
    "open": {"best_group_size": Estimate(11.0, 3.0, math.inf), "components": NoiseComponents(1.0, 1.0, 1.0, 100.0)},
}


@pytest.mark.parametrize("case", SIZES)
def test_dead_groups_and_the_rule_on_the_group_size_say_one_thing(case):
    outcomes = ["0000", "0000", "0000", "1000"] * 2
    run = with_noise(run_of(*outcomes), **SIZES[case])
    verdict, law = found("group size", run), SuccessLaw.of(*run.success_stretches())
    told = size_sentence(run, law, verdict)
    if case in ("up", "down"):
        assert isinstance(verdict, RunFinding) and verdict.change is not None and verdict.change.direction == case
        assert told.startswith({"up": "Larger groups: Use groups", "down": "Larger groups: the update has"}[case])
    else:
        assert isinstance(verdict, Undecided) == (case == "open") == (told == "")
    if case == "stays":
        assert told.startswith("Groups of 8 at the same rollouts: ") and law is not None
        later, now = (law.live_share(size) * 32 / size for size in (8, 4))
        assert later < now and f"a step would have about {later:.1f} live ones, now {now:.1f}" in told
    assert contradictions(advise_run(run).findings) == []


def test_the_recorded_run_is_told_chance_and_one_setting():
    diagnosis = advise("results/smollm2-gsm8k/runs/R8-seed0")
    (one,) = [finding for finding in diagnosis.findings if finding.name == "dead groups"]
    # 320 groups of 8 in the last third, 239 right rollouts, (1 - 239/2560)^8 = 0.456; by step it is 0.470
    assert "69% all wrong (every reward is 0). Chance would make 47% all wrong" in one.sentence
    assert one.change is not None and one.change.setting == "" and len(one.change.steps) == 3
    assert [line.split(":")[0] for line in one.lines()[3:]] == [
        *("Step 1", "Step 2", "Step 3"),
        *("Otherwise, 1", "Otherwise, 2"),
    ]
    plain = one.plain()["change"]
    assert plain["others"] == list(one.change.others) and plain["steps"] == list(one.change.steps)


def test_open_questions_name_options_of_the_trainer_alone():
    options = {"scoregram": "--layers float32", "trl": 'attach(trainer, layers="float32")'}
    verdict = Undecided("store the Grams of layers", options)
    assert diagnosis_of("", {"x": verdict}, "trl").undecided == {"x": f"store the Grams of layers ({options['trl']})"}
    assert diagnosis_of("", {"x": verdict}, "scoregram").undecided["x"].endswith("(--layers float32)")
    assert diagnosis_of("", {"x": verdict}).undecided == {"x": "store the Grams of layers"}
    assert trainer_of(TRL) == "trl"
    run = run_of("1000", "0000")
    told = advise_run(type(run)(TRL, run.notes, run.lines, run.groups)).undecided
    assert not any("--" in needs for needs in told.values()), told


def test_the_estimator_of_a_trl_run_is_known():
    def named(trainer: str = "GRPOTrainer", **arguments: Any) -> str:
        return trained_estimator({"integration": {"name": "trl", "trainer": trainer}, "arguments": arguments})

    assert named(scale_rewards="group") == named(scale_rewards=True) == "grpo-trl"
    assert named(scale_rewards="none") == named(scale_rewards=False) == "mean" and named("RLOOTrainer") == "rloo"
    assert named(scale_rewards="batch") == "" and trained_estimator({"method": "rloo"}) == "rloo"
    rows = {name: row for name, row in METHODS.items() if can_replay(row.estimator)}
    linear = {name: row.estimator for name, row in rows.items() if row.objective not in ("agro", "awr", "dpo")}
    assert linear["tic"] == "rloo" and linear["gspo"] == "grpo"
    assert {name: method_estimator(name) for name in METHODS} == {name: name for name in METHODS} | linear
    assert (
        trained_estimator({"method": "tic"}) == "rloo" and trained_estimator({"method": "x", "estimator": "y"}) == "y"
    )
    change = Change(knob="estimator", direction="rloo", sentence="", effect="", value="rloo")
    finding = RunFinding(name="estimator", severity="note", sentence="", evidence="", change=change)
    told = with_setting(finding, TRL).change
    assert told is not None and told.setting == 'attach(trainer, estimator="rloo")'
