"""How hard prompts are: chance by enumeration, chances of a second visit by integration, and one change first."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from scoregram.advice import RunFinding, advise, advise_run
from scoregram.advice.difficulty import (
    KINDS,
    DeadGroups,
    OutcomeCounts,
    SuccessLaw,
    chance_sentence,
    joined_outcomes,
    last_outcomes,
    pairs_exceed_chance,
    prompt_change,
    size_sentence,
)
from scoregram.advice.findings import Change, Undecided, contradictions, diagnosis_of
from scoregram.advice.noise_rules import METHOD_ESTIMATORS, trained_estimator
from scoregram.advice.settings import COUNT_CHANGES, COUNT_LIMITS, trainer_of, typed_setting, with_setting
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.reading import RunReading
from scoregram.reading.group import GROUPS_IN_A_STRETCH, StoredGroup, step_stretches, with_rewards
from scoregram.reading.replay import can_replay
from scoregram.runs import GroupRecord
from scoregram.statistics import NoiseComponents
from scoregram.tasks import load_task
from scoregram.training import METHODS
from tests.test_advice_gram import found, run_of, with_noise


def counts(groups: int, size: int, right: int, wrong: int = 0, solved: int = 0) -> OutcomeCounts:
    return OutcomeCounts(groups=groups, size=size, right=right, all_wrong=wrong, all_right=solved)


def numbers_by_enumeration(groups: int, size: int, right: int, mark: int) -> list[int]:
    """How many groups are all `mark`, for every arrangement of the right rollouts."""
    places = range(groups * size)
    found = []
    for chosen in itertools.combinations(places, right):
        marks = [int(place in chosen) for place in places]
        found.append(sum(all(one == mark for one in marks[i * size : (i + 1) * size]) for i in range(groups)))
    return found


@pytest.mark.parametrize(
    ("groups", "size", "right"), [(3, 3, 2), (4, 2, 3), (2, 4, 1), (4, 3, 9), (3, 2, 0), (1, 4, 2)]
)
@pytest.mark.parametrize(("kind", "mark"), [("all wrong", 0), ("all right", 1)])
def test_chance_is_that_of_all_arrangements(groups, size, right, kind, mark):
    numbers = numbers_by_enumeration(groups, size, right, mark)
    mean = Fraction(sum(numbers), len(numbers))
    assert counts(groups, size, right).chance_share(kind) * groups == pytest.approx(float(mean))
    variance = float(Fraction(sum(n * n for n in numbers), len(numbers)) - mean**2)
    for number in range(groups + 1):
        field = {"all wrong": "wrong", "all right": "solved"}[kind]
        exceeds = counts(groups, size, right, **{field: number}).exceeds_chance(kind)
        assert exceeds == (variance > 1e-12 and number - 0.5 - float(mean) > 1.645 * math.sqrt(variance))


def test_equally_hard_prompts_rarely_exceed_chance_and_different_ones_do():
    rng = np.random.default_rng(0)

    def share(rates: np.ndarray, runs: int = 400) -> float:
        exceeding = 0
        for _ in range(runs):
            right = rng.binomial(8, rng.permutation(rates))
            made = counts(len(right), 8, int(right.sum()), wrong=int((right == 0).sum()))
            exceeding += made.exceeds_chance("all wrong")
        return exceeding / runs

    assert share(np.full(100, 0.06)) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert share(np.repeat([0.0, 0.2], 50)) > 0.9


@pytest.mark.parametrize(("a", "b", "size"), [(0.5, 3.0, 4), (2.0, 2.0, 8), (1.0, 9.0, 8), (6.0, 1.0, 3)])
@pytest.mark.parametrize("direction", KINDS)
def test_a_second_visit_of_kept_prompts_by_integration(a, b, size, direction):
    points = (np.arange(400_000) + 0.5) / 400_000
    density = points ** (a - 1) * (1 - points) ** (b - 1)
    right, wrong = points**size, (1 - points) ** size
    kept = 1 - right * (direction != "easier") - wrong * (direction != "harder")
    again = float((density * kept * (1 - right - wrong)).sum() / (density * kept).sum())
    law = SuccessLaw(a / (a + b), a + b)
    assert law.live_if_kept(size, KINDS[direction]) == pytest.approx(again, abs=2e-3)


def test_a_second_visit_at_the_edges():
    assert SuccessLaw(0.5, math.inf).live_if_kept(4, "all wrong") == 7 / 8  # an earlier visit says nothing
    always_or_never = SuccessLaw(0.5, 0.0)
    assert always_or_never.live_if_kept(4, "all wrong") == 0  # those that are always solved are kept
    assert math.isnan(always_or_never.live_if_kept(4, KINDS["medium"]))  # none is kept


def test_a_success_rate_that_rises_does_not_look_like_prompts_that_differ():
    """All prompts of a step are equally hard, while the rate goes from 10 to 30 %: the test errs in 5 % at most."""
    rng, runs, exceeding, pooled = np.random.default_rng(1), 200, 0, 0
    stored = run_of("11110000")
    stored = replace(stored, groups=[StoredGroup(replace(group.record, step=90)) for group in stored.groups])
    for _ in range(runs):
        right = rng.binomial(8, np.broadcast_to(np.linspace(0.1, 0.3, 30)[:, None], (30, 4)))
        lines = [
            {"step": step, "groups": 4, "reward": row.mean() / 8}
            | {"groups/all_wrong": (row == 0).mean(), "groups/all_right": (row == 8).mean()}
            for step, row in enumerate(np.concatenate([right] * 3), start=1)
        ]
        found = last_outcomes(replace(stored, lines=lines))
        assert found is not None and found.groups == 120 and found.right == right.sum()
        assert [part.groups for part in found.stretches] == [8] * 15
        exceeding += found.exceeds_chance("all wrong")
        pooled += replace(found, stretches=()).exceeds_chance("all wrong")
    assert exceeding / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs) < pooled / runs


def test_different_prompts_are_found_within_stretches():
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(15):
        right = rng.binomial(8, rng.permutation(np.repeat([0.0, 0.2], 4)))
        parts.append(counts(8, 8, int(right.sum()), wrong=int((right == 0).sum())))
    whole = replace(joined_outcomes(parts), stretches=tuple(parts))
    assert whole.exceeds_chance("all wrong")
    mean = sum(part.groups * part.chance_share("all wrong") for part in parts) / whole.groups
    assert whole.chance_share("all wrong") == pytest.approx(mean)


# The law of success rates, and dead groups by chance, within stretches of steps


@pytest.mark.parametrize(
    ("sizes", "right"), [((3, 3, 3), 4), ((4, 4), 3), ((2, 3, 5), 6), ((2, 2, 2, 2), 4), ((5, 4), 1)]
)
def test_right_pairs_by_chance_are_those_of_all_arrangements(sizes, right):
    places, ends = range(sum(sizes)), np.cumsum([0, *sizes])
    made = []
    for chosen in itertools.combinations(places, right):
        marks = [int(place in chosen) for place in places]
        made.append([sum(marks[start:stop]) for start, stop in itertools.pairwise(ends)])
    numbers = [sum(math.comb(one, 2) for one in counts) for counts in made]
    mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
    for counts_of_prompts, number in zip(made, numbers, strict=True):
        stretch = list(zip(counts_of_prompts, sizes, strict=True))
        for times in (1, 3):  # means and variances of stretches add up
            beyond = times * (number - mean) - 0.5 > 1.751 * math.sqrt(times) * deviation
            assert pairs_exceed_chance([stretch] * times) == (deviation > 0 and beyond)


def test_the_spread_is_that_within_stretches():
    """Against pairs of rollouts, one by one: of one prompt, and of different prompts of the same stretch."""
    rng = np.random.default_rng(0)
    marks = [[rng.integers(0, 2, size=8) * (place % 2) for place in range(prompts)] for prompts in (4, 3, 5)]
    spread = mixed = 0.0
    for part in marks:
        same = [a * b for one in part for a, b in itertools.permutations(one.tolist(), 2)]
        apart = [a * b for one, other in itertools.permutations(part, 2) for a in one for b in other]
        mean = np.concatenate(part).mean()
        spread += len(part) / 12 * (np.mean(same) - np.mean(apart))
        mixed += len(part) / 12 * (mean - np.mean(same))
    law = SuccessLaw.of(*([(int(one.sum()), 8) for one in part] for part in marks))
    assert law is not None and law.concentration == pytest.approx(mixed / spread)
    assert law.mean == pytest.approx(np.concatenate([one for part in marks for one in part]).mean())


def run_with_rates(rng: np.random.Generator, rates: np.ndarray, size: int = 8) -> RunReading:
    """A run whose last third has a row of `rates` for each step: a group of `size` for each rate, of a new prompt."""
    steps, groups = rates.shape
    rewards = (rng.random((steps, groups, size)) < rates[..., None]).astype(float)
    records = [
        GroupRecord(
            step=2 * steps + step + 1,
            prompt_id=f"p/{step}/{place}",
            rewards=torch.tensor(rewards[step, place]),
            lengths=torch.ones(size).long(),
            advantages=torch.zeros(size, dtype=torch.float64),
        )
        for step in range(steps)
        for place in range(groups)
    ]
    lines = [{"step": step, "reward": 0.5} for step in range(1, 3 * steps + 1)]
    return RunReading({}, (), lines, with_rewards([StoredGroup(record) for record in records]))


def shares_that_differ(rates: np.ndarray, runs: int, seed: int, *, mixed: bool = False) -> dict[str, float]:
    """Share of runs in which prompts seem to differ: by the law, by the share of dead groups, and by both if pooled."""
    rng, found = np.random.default_rng(seed), dict.fromkeys(("law", "dead", "law, pooled", "dead, pooled"), 0)
    for _ in range(runs):
        run = run_with_rates(rng, rates * rng.choice([0.1, 1.9], size=rates.shape) if mixed else rates)
        law, dead, counts_of_prompts = SuccessLaw.of(*run.success_stretches()), run.summary.dead, run.success_counts()
        assert law is not None and len(run.last_groups) == rates.size == len(counts_of_prompts)
        rate = sum(right for right, _ in counts_of_prompts) / (8 * rates.size)
        found["law"] += math.isfinite(law.concentration)
        found["law, pooled"] += pairs_exceed_chance([counts_of_prompts])
        found["dead"] += dead.low > run.summary.equally_hard_dead
        found["dead, pooled"] += dead.low > rate**8 + (1 - rate) ** 8
    return {name: count / runs for name, count in found.items()}


def test_law_and_dead_groups_do_not_take_a_rising_rate_for_a_difference():
    """Prompts of a step are equally hard, while the rate goes from 5 to 45 %: each errs in 5 % at most."""
    rates = np.broadcast_to(np.linspace(0.05, 0.45, 30)[:, None], (30, 4))
    runs = 150
    found = shares_that_differ(rates, runs, seed=0)
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert found["law"] < most < found["law, pooled"] and found["dead"] < most < found["dead, pooled"], found


def test_law_and_dead_groups_find_prompts_that_differ_while_the_rate_rises():
    rates = np.broadcast_to(np.linspace(0.05, 0.45, 30)[:, None], (30, 4))
    found = shares_that_differ(rates, 20, seed=1, mixed=True)
    assert found["law"] == found["dead"] == 1, found


def test_a_filter_has_no_number_where_the_spread_is_not_resolved():
    known = DeadGroups(live=0.2, direction="easier", config=OWN, outcomes=DIFFERENT, law=SuccessLaw(0.075, math.inf))
    assert "cannot be said from so few stored groups" in prompt_change(known).effect


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


@pytest.mark.parametrize("task", COUNT_LIMITS)
def test_no_number_of_terms_or_turns_is_advised_that_the_task_refuses(task):
    for count, direction in zip(COUNT_LIMITS[task], ("easier", "harder"), strict=True):
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


def test_outcomes_are_those_of_every_logged_step():
    line = {"groups": 4, "groups/all_wrong": 0.5, "groups/all_right": 0.25, "reward": 0.375}
    run = run_of("1111", "0000", "1000", "1000", lines=line)
    assert last_outcomes(run) == counts(4, 4, 6, wrong=2, solved=1)
    assert last_outcomes(run_of("1111", "0002", lines=line)) is None  # graded rewards
    assert last_outcomes(run_of("1111", "000", lines=line)) is None  # groups of two sizes
    assert last_outcomes(run_of("1111", "0000")) is None  # nothing logged


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


def test_larger_groups_are_live_more_often_but_fewer_in_a_step():
    """At equal rollouts `L(2R) / 2R ≤ L(R) / R` from R = 3 on, whatever the success rate."""
    for mean, concentration, size in itertools.product(
        (0.01, 0.1, 0.5, 0.9), (0.5, 2.0, 20.0, math.inf), (3, 4, 8, 16)
    ):
        law = SuccessLaw(mean, concentration)
        assert law.live_share(size) <= law.live_share(2 * size) <= 2 * law.live_share(size) + 1e-12


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
    rows = {name: row for name, row in METHODS.items() if row.estimator != name and can_replay(row.estimator)}
    linear = {name for name, row in rows.items() if row.objective not in ("agro", "awr", "dpo")}
    assert {name: rows[name].estimator for name in linear} == METHOD_ESTIMATORS
    assert (
        trained_estimator({"method": "tic"}) == "rloo" and trained_estimator({"method": "x", "estimator": "y"}) == "y"
    )
    change = Change(knob="estimator", direction="rloo", sentence="", effect="", value="rloo")
    finding = RunFinding(name="estimator", severity="note", sentence="", evidence="", change=change)
    told = with_setting(finding, TRL).change
    assert told is not None and told.setting == 'attach(trainer, estimator="rloo")'


@pytest.mark.parametrize("groups", [[3], [3, 3], [3, 3, 3, 3], [8, 8, 3], [3] * 7, [9, 2, 9, 1], [8] * 4])
def test_stretches_hold_every_step_once_in_order(groups):
    steps = [counts(count, 4, place) for place, count in enumerate(groups)]
    parts = [steps[part] for part in step_stretches(groups)]
    assert [step for part in parts for step in part] == steps
    assert len(parts) == 1 or all(sum(step.groups for step in part) >= GROUPS_IN_A_STRETCH for part in parts)
