"""Rules on plain logs: each on a log that shows its fault and on one that does not; formats, contradictions, noise."""

import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoregram import cli
from scoregram.advice import LOG_RULES, RunFinding, RunLog, advise_log, run_log
from scoregram.advice.completion_rules import least_truncated_reward
from scoregram.advice.findings import SEVERITIES, Change, Undecided, diagnosis_of, reconciled
from scoregram.advice.gradient_rules import spike_steps
from scoregram.advice.logs import SPELLINGS
from scoregram.advice.policy_rules import chance_agreement, collapse_step, most_repeated
from scoregram.advice.reward_rules import dead_kinds
from scoregram.advice.trends import slope_estimate, step_correlation
from scoregram.exhibits import Estimate
from tests.contradictions import contradictions, moves

STEPS = 60


def healthy(seed: int = 0, steps: int = STEPS) -> dict[str, np.ndarray]:
    """What TRL logs of a run that learns: the reward rises, the entropy falls by a third, everything is noisy."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0.0, 1.0, steps)
    return {
        "reward": 0.3 + 0.3 * ramp + rng.normal(0, 0.05, steps),
        "reward_std": 0.4 + rng.normal(0, 0.03, steps),
        "frac_reward_zero_std": np.clip(0.3 + rng.normal(0, 0.1, steps), 0, 1),
        "entropy": 1.0 - 0.3 * ramp + rng.normal(0, 0.05, steps),
        "kl": 0.05 * ramp + np.abs(rng.normal(0, 0.01, steps)),
        "clip_ratio/region_mean": np.abs(rng.normal(0.02, 0.01, steps)),
        "completions/mean_length": 200 * (1 + 0.1 * ramp) + rng.normal(0, 10, steps),
        "completions/clipped_ratio": np.clip(rng.normal(0.03, 0.02, steps), 0, 1),
        "grad_norm": np.exp(rng.normal(0, 0.4, steps)),
        "loss": rng.normal(0, 0.01, steps),
        "step_time": 20 * np.exp(rng.normal(0, 0.1, steps)),
        "eval_reward": 0.3 + 0.3 * ramp + rng.normal(0, 0.02, steps),
        "rewards/right/mean": 0.3 + 0.3 * ramp + rng.normal(0, 0.05, steps),
        "rewards/right/std": 0.4 + rng.normal(0, 0.03, steps),
        "rewards/format/mean": 0.8 + rng.normal(0, 0.05, steps),
        "rewards/format/std": 0.3 + rng.normal(0, 0.03, steps),
    }


def lines_of(series: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    count = len(next(iter(series.values())))
    return [{"step": place + 1, **{name: float(v[place]) for name, v in series.items()}} for place in range(count)]


def log_of(config: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> RunLog:
    """The healthy log with some scalars replaced; a scalar that is None is left out."""
    series = {**healthy(seed), **{name.replace("__", "/"): value for name, value in changes.items()}}
    known = {name: np.broadcast_to(value, STEPS) for name, value in series.items() if value is not None}
    return run_log("a log", lines_of(known), config)


RAMP = np.linspace(0.0, 1.0, STEPS)
NOISE = np.random.default_rng(9).normal(0, 1, STEPS)
LONGER = 200 * (1 + RAMP) + 20 * NOISE
ROT = np.exp(-1.5 * RAMP + 0.1 * np.random.default_rng(5).normal(0, 1, STEPS))
STUCK = np.where(np.arange(STEPS) < 30, healthy()["reward"], 0.5)
STUCK_LENGTH = np.where(np.arange(STEPS) < 30, healthy()["completions/mean_length"], 210.5)
TWICE = {name: np.tile(healthy()[name][:30], 2) for name in ("reward", "completions/mean_length")}

FAULTY: dict[str, dict[str, Any]] = {
    "NaN": {"grad_norm": np.where(np.arange(STEPS) == 40, math.nan, 1.0)},
    "constant reward": {"reward": 0.0, "frac_reward_zero_std": 1.0},
    "stuck batch": {"reward": STUCK, "completions__mean_length": STUCK_LENGTH},
    "lost seed": {"reward": TWICE["reward"], "completions__mean_length": TWICE["completions/mean_length"]},
    "phantom signal": {"rewards__right__mean": 0.0, "rewards__right__std": 0.0},
    "reward against held-out score": {"eval_reward": 0.6 - 0.3 * RAMP + 0.02 * NOISE},
    "dead groups": {"frac_reward_zero_std": np.clip(0.8 + 0.05 * NOISE, 0, 1)},
    "truncation": {"completions__clipped_ratio": 0.3 + 0.02 * NOISE},
    "entropy collapse": {"entropy": np.exp(-4 * RAMP) * (1 + 0.05 * NOISE)},
    "KL blow-up": {"kl": 0.01 * np.exp(6 * RAMP)},
    "falling reward": {"reward": 0.7 - 0.6 * RAMP + 0.01 * NOISE, "eval_reward": None},
    "reward spread death": {"reward_std": 0.4 * np.exp(-5 * RAMP)},
    "length gaming": {
        "completions__mean_length": LONGER,
        "reward": LONGER / 500,
        "eval_reward": 0.4 + 0.02 * NOISE,
    },
    "gradient spikes": {"grad_norm": np.where(np.arange(STEPS) == 45, 50.0, healthy()["grad_norm"])},
    "clip saturation": {"clip_ratio__region_mean": 0.4 + 0.02 * NOISE},
    "idle clipping": {"clip_ratio__region_mean": 0.0, "config": {"num_iterations": 2}},
    "throughput rot": {"step_time": 20 / ROT, "completions__mean_length": 200.0 + 10 * NOISE},
}


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_in_a_log_is_found_first(name):
    found = advise_log(log_of(**FAULTY[name]))
    assert found.findings and found.findings[0].name == name, [one.name for one in found.findings]
    one = found.findings[0]
    assert one.evidence and one.change is not None and one.change.effect and one.label
    assert one.since is None or 1 <= one.since <= STEPS


def test_a_healthy_log_has_no_finding():
    found = advise_log(log_of(config={"num_iterations": 1}))
    assert found.findings == () and found.undecided.keys() == {"repetition"}
    assert set(found.fine) == LOG_RULES.keys() - {"repetition"}


def test_equal_rewards_have_a_deviation_in_float32():
    """TRL logs it, and then counts the groups as live."""
    std = float(torch.full((8,), 0.3).std())
    assert 1e-9 < std < 1e-7
    found = advise_log(log_of(reward=0.3, reward_std=std, frac_reward_zero_std=0.0)).findings
    assert [one.name for one in found][:1] == ["constant reward"]
    silent: dict[str, Any] = {"rewards__right__mean": 0.3, "rewards__right__std": std}
    assert [one.name for one in advise_log(log_of(**silent)).findings] == ["phantom signal"]
    # a part that varies by rounding alone makes no advantages
    other: dict[str, Any] = {"rewards__format__mean": 0.3, "rewards__format__std": std}
    assert advise_log(log_of(**FAULTY["phantom signal"], **other)).findings == ()
    least: dict[str, Any] = {"rewards__format__std": 1e-4}
    assert [one.name for one in advise_log(log_of(**FAULTY["phantom signal"], **least)).findings] == ["phantom signal"]


@pytest.mark.parametrize(("end", "expected"), [(1.0, []), (0.0, ["phantom signal"]), (0.5, ["phantom signal"])])
def test_a_reward_that_every_rollout_came_to_earn_is_no_phantom(end, expected):
    """The format is learnt before the answers; a verifier that breaks later stops at less than it paid before."""
    is_early = np.arange(STEPS) < 30
    part: dict[str, Any] = {
        "rewards__format__mean": np.where(is_early, 0.5 + 0.4 * RAMP, end),
        "rewards__format__std": np.where(is_early, 0.3, 0.0),
    }
    assert [one.name for one in advise_log(log_of(**part)).findings] == expected


@pytest.mark.parametrize("name", LOG_RULES)
def test_an_empty_log_decides_nothing(name):
    assert isinstance(LOG_RULES[name](run_log("empty", [])), Undecided)


def test_findings_on_noise_are_rare():
    """Share of healthy logs of other seeds with any finding, over all rules together."""
    runs = 200
    wrong = [advise_log(log_of(seed=seed)).findings for seed in range(100, 100 + runs)]
    share = sum(bool(found) for found in wrong) / runs
    assert share <= 0.05, [one.name for found in wrong for one in found]


def test_repetition_is_read_from_tokens():
    log = run_log("x", [{"step": step, "repetition": 0.1 * step} for step in range(1, 10)])
    found = LOG_RULES["repetition"](log)
    assert isinstance(found, RunFinding) and found.number.value == pytest.approx(0.8) and found.since == 6


def test_the_kinds_of_dead_groups_follow_from_the_mean_reward_where_they_are_not_logged():
    """With rewards in [0, 1], at most a share `mean` of the groups can be all right."""
    log = log_of(reward=0.05, frac_reward_zero_std=0.9)
    right, wrong = dead_kinds(log)
    assert right.value == 0 and wrong.value == pytest.approx(0.85)
    (finding,) = [one for one in advise_log(log).findings if one.name == "dead groups"]
    assert finding.change is not None and finding.change.direction == "easier"
    assert "all right" not in finding.sentence  # a bound is no share
    for mean in (0.45, 0.55):  # at least 5 and 15 % are of one kind, which leaves 40 % open
        bounds = sorted(one.value for one in dead_kinds(log_of(reward=mean, frac_reward_zero_std=0.6)))
        assert bounds == pytest.approx([0.05, 0.15])
        (finding,) = [
            one
            for one in advise_log(log_of(reward=mean + 0.01 * NOISE, frac_reward_zero_std=0.6)).findings
            if one.name == "dead groups"
        ]
        assert finding.change is not None and finding.change.direction == "medium"
    own = run_log(
        "own",
        [
            {"step": s, "live_groups": 1, "groups": 4, "groups/all_right": 0.7, "groups/all_wrong": 0.05, "reward": 0.8}
            for s in range(20)
        ],
    )
    found = LOG_RULES["dead groups"](own)
    assert isinstance(found, RunFinding) and found.change is not None and found.change.direction == "harder"
    assert "70% are all right (every reward is 1) and 5% all wrong (every reward is 0)" in found.sentence


def test_a_rule_that_another_finding_replaces_is_not_called_fine():
    found = advise_log(log_of(reward=0.0, frac_reward_zero_std=1.0, reward_std=0.0))
    assert [one.name for one in found.findings] == ["constant reward"]
    told = {name: found.undecided[name] for name in ("dead groups", "reward spread death")}
    assert set(told.values()) == {"first repair what “constant reward” found"}
    dead = np.clip(0.8 + 0.05 * NOISE, 0, 1)
    verdict = LOG_RULES["reward spread death"](log_of(frac_reward_zero_std=dead))
    assert isinstance(verdict, Undecided) and "“dead groups”" in verdict.needs


def test_a_short_log_needs_more_steps_and_a_log_without_the_scalar_needs_the_scalar():
    for name, scalar in (("dead groups", "frac_reward_zero_std"), ("truncation", "completions/clipped_ratio")):
        verdict = LOG_RULES[name](run_log("x", [{"step": step, scalar: 0.3} for step in range(9)]))
        assert isinstance(verdict, Undecided) and verdict.needs == "log at least 10 steps; here are 9"
        verdict = LOG_RULES[name](run_log("x", [{"step": step} for step in range(9)]))
        assert isinstance(verdict, Undecided) and verdict.needs.startswith("log the share of")


def test_only_rewards_up_to_1_have_a_ceiling():
    falling: dict[str, Any] = {"reward_std": np.where(RAMP < 0.4, 1.0, 0.01), "frac_reward_zero_std": 0.0}
    assert LOG_RULES["reward spread death"](log_of(reward=0.97, **falling)) is None
    assert isinstance(LOG_RULES["reward spread death"](log_of(reward=5.0, **falling)), RunFinding)


def test_a_decline_of_the_entropy_is_extrapolated():
    steps = np.arange(1, 61)
    log = run_log("x", [{"step": int(s), "entropy": math.exp(-s / 50)} for s in steps])
    series = log.series("entropy")
    arrival = collapse_step(series, 0.1)
    assert arrival is not None and abs(arrival - 50 * math.log(10)) < 5
    found = LOG_RULES["entropy collapse"](log)
    assert (isinstance(found, RunFinding) and f"at step {arrival}" in found.sentence) or found is not None
    flat = run_log("x", [{"step": int(s), "entropy": 1.0 + 0.01 * (s % 3)} for s in steps])
    assert collapse_step(flat.series("entropy"), 0.1) is None
    drop = run_log("x", [{"step": int(s), "entropy": 1.0 if s < 40 else 0.3 + 0.01 * (s % 3)} for s in steps])
    assert collapse_step(drop.series("entropy"), 0.1) is None  # one drop is no steady decline


def test_spikes_are_measured_against_the_norms_before():
    values = [1.0] * 30
    values[20] = 25.0
    log = run_log("x", [{"step": place, "grad_norm": value} for place, value in enumerate(values)])
    assert spike_steps(log.series("grad_norm")) == {20: 25.0}


def test_a_usual_norm_after_a_vanishing_gradient_is_no_spike():
    """`demo kl-blow-up` once named a norm of 0.15 as 92,569 times the usual size, with a clip of 1."""
    values = np.array([0.1] * 25 + [1e-6] * 25)
    values[[40, 45]] = 0.15, 2.0
    log = run_log("x", [{"step": place, "grad_norm": float(value)} for place, value in enumerate(values)])
    assert spike_steps(log.series("grad_norm")) == {45: pytest.approx(20.0)}
    none = run_log("x", [{"step": place, "grad_norm": float(place == 40)} for place in range(50)])
    assert spike_steps(none.series("grad_norm")) == {}  # no norm before it says what is usual


def test_repeats_are_counted_at_their_distance():
    marks = {step: (float(step % 7), 1.0) for step in range(21)}
    assert most_repeated(marks) == (7, list(range(7, 21)))


def test_small_value_spaces_repeat_by_chance():
    """A batch of one group of four has few possible means: equal neighbours are no stuck batch."""
    rng = np.random.default_rng(0)
    log = log_of(reward=rng.integers(0, 5, STEPS) / 4, completions__mean_length=8.0)
    assert not {"stuck batch", "lost seed"} & {one.name for one in advise_log(log).findings}


def test_a_drifting_reward_repeats_itself_by_chance():
    """Close steps agree more often than distant ones if the reward drifts; that is neither fault."""
    level = np.repeat([1, 9, 5], 20)  # sixteenths, for twenty steps each
    for seed in range(20):
        reward = (level + np.random.default_rng(seed).integers(0, 3, STEPS)) / 16
        log = log_of(reward=reward, completions__mean_length=8.0)
        assert not {"stuck batch", "lost seed"} & {one.name for one in advise_log(log).findings}


def test_chance_is_counted_at_distances_close_to_that_of_the_repeats():
    a, b, c = (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)
    # neighbours: 5 + 4 + 3 + 2 pairs at distances 3 to 6, one of them within the stretch of four; 2 + 1 + 1 + 1 agree
    assert chance_agreement([a, a, a, a, b, c, a, b], 1) == pytest.approx((5 + 1) / (13 + 1))
    # distance 2: 5 and 7 of 4 to 7, since multiples of 2 repeat as well
    assert chance_agreement([a, b, a, b, a, b, a, b], 2) == pytest.approx((0 + 1) / (4 + 1))


# Statistics


def test_the_slope_is_that_of_a_line_and_its_interval_covers():
    steps = np.arange(40.0)
    slope, ends = slope_estimate(steps, 3 * steps + 1)
    assert slope == pytest.approx(3) and ends == pytest.approx((3, 3))
    rng, held, runs = np.random.default_rng(1), 0, 400
    for _ in range(runs):
        _, (low, high) = slope_estimate(steps, 0.5 * steps + rng.normal(0, 5, 40))
        held += low <= 0.5 <= high
    assert abs(held / runs - 0.95) < 3 * math.sqrt(0.95 * 0.05 / runs)


def test_two_trends_are_not_a_correlation_from_step_to_step():
    rng = np.random.default_rng(3)
    both = [{"step": s, "reward": s / 60 + rng.normal(0, 0.1), "length": s + rng.normal(0, 3)} for s in range(60)]
    log = run_log("x", both)
    found = step_correlation(log.series("reward"), log.series("length"))
    assert found.low < 0 < found.high


# One list without contradictions


def finding(name: str, severity: Any, knob: str, direction: str) -> RunFinding:
    change = Change(knob=knob, direction=direction, sentence="Do it.", effect="better.")
    return RunFinding(name=name, severity=severity, sentence="x", evidence="y", change=change)


def test_no_pair_of_findings_contradicts():
    """Every pair of the faults above, in one log, and every pair of directions at every pair of severities."""
    made = {name: advise_log(log_of(**FAULTY[name])).findings for name in FAULTY}
    for one, other in itertools.combinations(made.values(), 2):
        assert contradictions(reconciled([*one, *other])) == []
    for first, second in itertools.product(SEVERITIES, SEVERITIES):
        pair = [finding("a", first, "group size", "up"), finding("b", second, "group size", "down")]
        assert contradictions(pair) == [("a", "b")]
        kept = reconciled(pair)
        assert contradictions(kept) == [] and len(kept) == 2
        assert kept[0].change is not None and kept[1].change is None and "resolve" in kept[1].evidence
        assert SEVERITIES.index(kept[0].severity) <= SEVERITIES.index(kept[1].severity)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_longer_limit_is_not_advised_to_a_run_that_games_length(share):
    both = {**FAULTY["length gaming"], "completions__clipped_ratio": share}
    found = advise_log(log_of(**both)).findings
    assert {"length gaming", "truncation"} <= {one.name for one in found}
    moved = [move for one in found if one.change for move in moves(one.change)]
    assert [where for knob, where in moved if knob == "completion length"] == ["down"]
    told = " ".join(line for one in found for line in one.lines())
    assert "Allow longer" not in told and "max_completion_length" not in told


def test_the_worst_comes_first():
    mixed = [
        finding(str(place), severity, f"k{place}", "up")
        for place, severity in enumerate(("note", "critical", "warning"))
    ]
    assert [one.severity for one in reconciled(mixed)] == ["critical", "warning", "note"]
    found = diagnosis_of("x", {"a": mixed[0], "b": None, "c": Undecided("log it")})
    assert found.worst() == "note" and found.reaches("note") and not found.reaches("warning")
    assert "Checked and fine: b." in found.text() and "Cannot tell: c (log it)." in found.text()


# Formats


def test_every_scalar_that_a_rule_asks_for_has_a_spelling():
    spelled = {spelling.key for spellings in SPELLINGS.values() for spelling in spellings}
    assert len(spelled) == sum(map(len, SPELLINGS.values()))  # no key means two things
    for name in SPELLINGS:
        assert len(log_of().series(name)) >= 0


# The command


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in log_of(**changes).lines))
    return str(path)


def test_the_command_prints_text_or_json_and_fails_on_request(tmp_path, capsys):
    path = written(tmp_path, **FAULTY["KL blow-up"])
    assert cli.main(["advise", path]) == 0
    said = capsys.readouterr().out
    assert (
        "critical  KL blow-up" in said
        and "Change: Lower the learning rate" in said
        and "Cannot tell: repetition" in said
    )
    assert cli.main(["advise", path, "--json", "--fail-on", "critical"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["name"] == "KL blow-up" and found["findings"][0]["number"]["low"] is not None
    clean = written(tmp_path)
    assert cli.main(["advise", clean, "--fail-on", "note"]) == 0
    assert "Nothing to change was found." in capsys.readouterr().out


def test_a_warning_does_not_fail_a_check_for_critical_findings(tmp_path, capsys):
    path = written(tmp_path, **FAULTY["clip saturation"])
    assert [cli.main(["advise", path, "--fail-on", level]) for level in ("critical", "warning", "note")] == [0, 1, 1]


def test_an_unknown_severity_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["advise", written(tmp_path), "--fail-on", "fatal"])


def test_advice_on_a_log_imports_no_transformers(tmp_path):
    code = f"import sys; from scoregram.advice import advise; advise({written(tmp_path)!r})"
    code += "; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_number_without_an_interval_is_shown_alone():
    one = replace(finding("a", "note", "k", "up"), number=Estimate(3.0), label="norm", since=4)
    assert one.lines()[0] == "x (since step 4)" and "norm: 3.00; y" in one.lines()[1]
    assert one.plain()["number"] == {"value": 3.0, "low": None, "high": None, "label": "norm"}


def truncation_finding(**scalars: float) -> RunFinding:
    lines = [
        {"step": step, **{name.replace("__", "/"): value for name, value in scalars.items()}} for step in range(12)
    ]
    found = LOG_RULES["truncation"](run_log("x", lines))
    assert isinstance(found, RunFinding)
    return found


def truncation_advice(**scalars: float) -> Change:
    change = truncation_finding(**scalars).change
    assert change is not None
    return change


def test_truncated_completions_with_a_high_reward_question_the_reward():
    # 98 % cut, mean 0.99: even if every other completion has 1, the truncated ones have (0.99 - 0.02) / 0.98
    paid = truncation_advice(truncated_rate=0.98, reward=0.99)
    assert (paid.knob, paid.direction) == ("reward function", "repair")
    assert paid.sentence == "Give no reward to completions that the limit cuts off."
    why = truncation_finding(truncated_rate=0.98, reward=0.99).sentence
    assert why.endswith("get a mean reward of at least 0.99: the reward pays for unfinished texts.")
    assert "mask" not in " ".join((paid.sentence, *paid.others))  # 98 % masked would leave no update
    # 60 % cut, mean 0.5: they may have (0.5 - 0.4) / 0.6 only
    open_ = truncation_advice(truncated_rate=0.6, reward=0.5)
    assert open_.knob == "completion length" and "their reward is high anyway" in open_.others[-1]
    assert "mask" not in " ".join((open_.sentence, *open_.others))
    assert "mask_truncated" in " ".join(truncation_advice(truncated_rate=0.2, reward=0.1).others)
    # some completions end, so the model has an end-of-sequence token: that is no cause to name
    assert not any("end-of-sequence" in " ".join((*one.others, *one.steps)) for one in (paid, open_))
    # rewards outside [0, 1] bound nothing
    assert truncation_advice(truncated_rate=0.98, reward=3.0).knob == "completion length"


def test_what_to_do_about_truncation_has_no_condition():
    """What decides between causes is among the steps, or behind the change."""
    cases = [
        {"truncated_rate": 0.98, "reward": 0.99},
        {"truncated_rate": 1.0, "reward": 0.99},
        {"truncated_rate": 0.6, "reward": 0.5},
        {"truncated_rate": 0.2, "reward": 0.4, "truncated_reward": 0.05, "finished_reward": 0.5},
    ]
    for scalars in cases:
        told = truncation_advice(**scalars)
        assert not re.search(r"\b(if|unless|or)\b", told.sentence, re.IGNORECASE), told.sentence
    paid = truncation_advice(**cases[0])
    assert any(step.startswith("Read some truncated rollouts") for step in paid.steps)


def test_where_no_completion_ends_the_end_comes_before_the_reward():
    """A reward of 0 for every truncated completion would be constant there, and teach nothing."""
    told = truncation_advice(truncated_rate=1.0, reward=0.99)
    assert told.sentence.startswith("Make completions end") and "end-of-sequence" in told.steps[0]
    assert "end-of-sequence" in truncation_advice(truncated_rate=1.0, reward=0.1).others[0]


def test_stored_rollouts_tell_whether_truncation_is_paid_for():
    paid = truncation_finding(truncated_rate=0.2, reward=0.4, truncated_reward=0.38, finished_reward=0.4)
    assert paid.change is not None and paid.change.knob == "reward function"
    assert "get a mean reward of 0.38, finished ones 0.40: the reward pays" in paid.sentence
    missing = truncation_advice(truncated_rate=0.2, reward=0.4, truncated_reward=0.05, finished_reward=0.5)
    assert missing.knob == "completion length" and "mean reward of 0.05." in missing.sentence
    assert (
        truncation_advice(truncated_rate=0.2, reward=0.0, truncated_reward=0.0, finished_reward=0.0).direction == "up"
    )


def test_the_bound_on_the_reward_of_truncated_completions_holds_for_every_batch():
    for rewards in itertools.product((0.0, 0.5, 1.0), repeat=4):
        for count in (1, 2, 3, 4):  # the first `count` are truncated
            mean, cut = float(np.mean(rewards)), float(np.mean(rewards[:count]))
            least = least_truncated_reward(run_log("x", [{"step": 1, "reward": mean, "truncated_rate": count / 4}]))
            assert least <= cut + 1e-12
            if all(reward == 1 for reward in rewards[count:]):
                assert least == pytest.approx(cut)


def test_a_finding_says_what_holds_since_its_step():
    lines = [{"step": step, "truncated_rate": 0.2 if step > 20 else 0.0, "reward": 0.1} for step in range(1, 61)]
    found = LOG_RULES["truncation"](run_log("x", lines))
    assert isinstance(found, RunFinding)
    assert found.lines()[0].endswith("unfinished texts. The truncated share is above 10% since step 21.")


def test_a_few_logged_values_suffice_for_plain_truncation():
    def rule(*shares: float):
        lines = [{"step": 10 * step, "completions/clipped_ratio": share} for step, share in enumerate(shares, start=1)]
        return LOG_RULES["truncation"](run_log("x", lines))

    found = rule(0.86, 0.95, 0.97, 0.98, 0.98, 0.97)
    assert isinstance(found, RunFinding) and found.severity == "critical"
    assert isinstance(rule(0.9, 0.9, 0.9), RunFinding)  # a last third of one value has no interval
    assert isinstance(rule(0.9, 0.9), Undecided) and isinstance(rule(0.9, 0.4, 0.9, 0.9), Undecided)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"learning_rate": 1e-4}, "Halve the learning rate from 0.0001 to 5e-05."),
        ({"arguments": {"learning_rate": 2e-6}}, "Halve the learning rate from 2e-06 to 1e-06."),
        ({}, "Halve the learning rate."),
    ],
)
def test_advice_on_entropy_names_a_number(config, told):
    lines = [{"step": step, "entropy": math.exp(-step / 10), "reward": 0.5} for step in range(1, 61)]
    found = LOG_RULES["entropy collapse"](run_log("x", lines, config))
    assert isinstance(found, RunFinding) and found.change is not None and found.change.sentence.startswith(told)
    solved = LOG_RULES["entropy collapse"](run_log("x", [{**line, "reward": 0.99} for line in lines], config))
    assert solved is None and found.severity == "critical"  # a solved task has nothing left to explore
    tested = [{**line, "eval/accuracy": 0.97} for line in lines]
    assert LOG_RULES["entropy collapse"](run_log("x", tested, config)) is None
    clipped = LOG_RULES["entropy collapse"](run_log("x", [{**line, "clipped_tokens": 0.1} for line in lines], config))
    assert isinstance(clipped, RunFinding) and clipped.change is not None
    assert "upper clip" in clipped.change.all_others[0] and found.change.all_others == ()


def test_scalars_are_averaged_over_the_steps_of_the_run_not_over_their_own():
    lines = [{"step": 10 * place, "completions/clipped_ratio": place / 10} for place in range(1, 7)]
    series = run_log("x", lines, last_steps=range(40, 61)).series("truncated")
    assert series.last.tolist() == [0.4, 0.5, 0.6] and series.last_mean().value == pytest.approx(0.5)
    assert run_log("x", lines).series("truncated").last.tolist() == [0.5, 0.6]
    assert run_log("x", lines, last_steps=range(70, 80)).series("truncated").last.tolist() == [0.5, 0.6]


def test_groups_without_a_reward_are_not_dead():
    """One live group and two that no reward function judged: nothing is dead."""
    lines = [{"step": s, "live_groups": 1, "groups": 3, "judged_groups": 1, "reward": 0.5} for s in range(20)]
    assert run_log("x", lines).series("dead_share").values.tolist() == [0.0] * 20
    older = [{name: value for name, value in line.items() if name != "judged_groups"} for line in lines]
    assert run_log("x", older).series("dead_share").values == pytest.approx([2 / 3] * 20)


def test_a_reward_function_without_a_mean_is_no_phantom():
    log = log_of(rewards__right__mean=None, rewards__right__std=0.0)
    assert LOG_RULES["phantom signal"](log) == Undecided("log the mean and the deviation of each reward function")


def test_the_onset_of_a_blow_up_is_that_of_the_stated_threshold():
    found = LOG_RULES["KL blow-up"](log_of(kl=1.4 * RAMP))
    assert isinstance(found, RunFinding) and found.since == math.ceil((STEPS - 1) / 1.4) + 1


def test_seconds_are_divided_by_lengths_of_the_same_steps():
    """Tokens per second are constant; seconds are logged one step later than lengths."""
    tokens = 100.0 + 50 * (np.arange(STEPS + 1) % 2)
    lines = [
        {"step": s}
        | ({"completions/mean_length": tokens[s]} if s < STEPS else {})
        | ({"step_time": tokens[s] / 10} if s > 0 else {})
        for s in range(STEPS + 1)
    ]
    assert LOG_RULES["throughput rot"](run_log("x", lines)) is None
    apart = [{"step": s, ("step_time" if s % 2 else "completions/mean_length"): 1.0} for s in range(2 * STEPS)]
    assert isinstance(LOG_RULES["throughput rot"](run_log("x", apart)), Undecided)


def test_json_has_the_level_that_holds_since_a_step():
    found = advise_log(log_of(**FAULTY["truncation"])).findings[0]
    assert found.plain()["level"] == found.level != ""
