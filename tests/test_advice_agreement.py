"""One diagnosis agrees with itself: its changes, its numbers, its onsets, and what it says is missing."""

import ast
import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import scoregram.advice
from scoregram import cli
from scoregram.advice import LOG_RULES, Change, RunFinding, RunLog, advise, advise_log, run_log
from scoregram.advice.completion_rules import WITHOUT_ROLLOUTS
from scoregram.advice.diagnose import DEMOS, _short_rollouts
from scoregram.advice.findings import SEVERITIES, Alternative, Undecided, reconciled
from scoregram.advice.gram_rules import dominating_rollouts
from scoregram.advice.policy_rules import long_stretches
from scoregram.reading import RunReading, StoredGroup, layer_signals, read_run
from scoregram.runs import GroupRecord, RolloutRecord, RunWriter
from scoregram.statistics import group_moments
from tests.contradictions import contradictions
from tests.test_advice import FAULTY, STEPS, healthy, lines_of, log_of

ROOT = Path(__file__).parent.parent
RECORDED = sorted(path.parent for root in (DEMOS, ROOT / "tests" / "planted") for path in root.rglob("config.yaml"))


def log_finding(name: str, log: RunLog) -> RunFinding:
    found = LOG_RULES[name](log)
    assert isinstance(found, RunFinding), found
    return found


def change_of(finding: RunFinding) -> Change:
    assert finding.change is not None
    return finding.change


# Changes


def moves_in_source() -> dict[str, list[tuple[str, str]]]:
    """Knob and direction of every `Change` in the rules and of its alternatives; `any` where it is computed."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(Path(scoregram.advice.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Change":
                given = {one.arg: one.value for one in node.keywords}
                moves = [(written(given["knob"]), written(given["direction"]))]
                for inner in ast.walk(given.get("alternatives", ast.Tuple(elts=[]))):
                    if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "Alternative":
                        moves.append((written(inner.args[0]), written(inner.args[1])))
                found[f"{path.name}:{node.lineno}"] = moves
    return found


def written(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)


def finding_of(place: str, severity: Any, moves: list[tuple[str, str]]) -> RunFinding:
    (knob, direction), *others = moves
    alternatives = tuple(Alternative(one, where, f"{one} {where}.") for one, where in others)
    change = Change(knob=knob, direction=direction, sentence="", effect="", alternatives=alternatives)
    return RunFinding(name=place, severity=severity, sentence="", evidence="", change=change)


def test_no_two_changes_of_any_rules_move_one_knob_in_two_directions():
    """All pairs of changes in the rules at all severities, and random lists of them; alternatives included."""
    moves = moves_in_source()
    assert sum(len(one) > 1 for one in moves.values()) >= 8 and len(moves) >= 25
    draw = random.Random(0)
    lists = [list(pair) for pair in itertools.combinations(moves, 2)]
    lists += [draw.sample(sorted(moves), draw.randint(3, 12)) for _ in range(300)]
    for places in lists:
        findings = [finding_of(place, draw.choice(SEVERITIES), moves[place]) for place in places]
        kept = reconciled(findings)
        assert contradictions(kept) == [] and len(kept) == len(findings)
        assert reconciled(kept) == kept


def test_an_alternative_that_opposes_a_change_is_left_out_and_the_rest_stays():
    """One list once held a smaller and a larger learning rate."""
    noise = finding_of("batch size", "warning", [("batch size", "up"), ("learning rate", "down"), ("x", "up")])
    idle = finding_of("idle clipping", "note", [("updates per batch", "down"), ("learning rate", "up")])
    assert contradictions([noise, idle]) == [("batch size", "idle clipping")]
    first, second = reconciled([idle, noise])
    assert change_of(first).all_others == ("learning rate down.", "x up.") and change_of(second).all_others == ()
    main = finding_of("entropy collapse", "note", [("learning rate", "up")])
    first, second = reconciled([noise, main])  # a change counts more than an alternative of a worse finding
    assert change_of(first).all_others == ("x up.",) and change_of(second).direction == "up"
    assert change_of(first).plain()["alternatives"] == [{"knob": "x", "direction": "up", "sentence": "x up."}]
    assert "Otherwise, 1: x up." in first.lines()


# Numbers


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_the_value_of_every_recorded_finding_lies_in_its_interval(folder):
    for one in advise(folder).findings:
        assert_ordered(one)


@pytest.mark.parametrize("name", FAULTY)
def test_the_value_of_every_finding_in_a_log_lies_in_its_interval(name):
    for one in advise_log(log_of(**FAULTY[name])).findings:
        assert_ordered(one)


def assert_ordered(finding: RunFinding) -> None:
    number = finding.number
    if not math.isnan(number.low):
        assert number.low <= number.value <= number.high, finding.name


# Onsets


def test_the_onset_is_that_of_the_fault_and_not_of_an_earlier_chance():
    (found,) = (one for one in advise(DEMOS / "stuck-batch").findings if one.name == "stuck batch")
    assert found.since == 16 and found.sentence.startswith("21 steps ")  # step 16 repeats step 15, as do 20 more
    rng = np.random.default_rng(0)
    reward, length = rng.normal(size=STEPS), 200 + rng.normal(size=STEPS)
    early = np.arange(STEPS)
    early[40:55] = np.arange(25, 40)
    early[20] = 5  # by chance, at the distance of the fault
    found = log_finding("lost seed", log_of(reward=reward[early], completions__mean_length=length[early]))
    assert found.since == 41 and found.sentence.startswith("15 steps ")
    stuck = np.minimum(np.arange(STEPS), 40)
    stuck[5] = 4  # by chance
    found = log_finding("stuck batch", log_of(reward=reward[stuck], completions__mean_length=length[stuck]))
    assert found.since == 42 and found.sentence.startswith("19 steps ")


def test_batches_that_are_each_used_twice_recur():
    assert long_stretches([2, 4, 6, 8], range(1, 9)) == [2, 4, 6, 8]
    assert long_stretches([2, 20, 21, 40, 41], range(1, 50)) == [2, 20, 21, 40, 41]
    assert long_stretches([2, *range(20, 30)], range(1, 50)) == list(range(20, 30))


# Gradient norms


SPIKED = FAULTY["gradient spikes"]["grad_norm"]


@pytest.mark.parametrize(
    ("limit", "knob"),
    [
        *((limit, "gradient clipping") for limit in (None, 0, 40.0)),
        *((limit, "batch of a gradient spike") for limit in (0.5, 1.0)),
    ],
)
def test_a_clip_that_limits_every_step_is_not_raised(limit, knob):
    """`--max-grad-norm 83 (now 1.0)` was once advised against spikes."""
    config = {"method": "grpo"} if limit is None else {"method": "grpo", "max_grad_norm": limit}
    (found,) = advise_log(log_of(config=config, grad_norm=SPIKED)).findings
    usual = float(np.median(SPIKED))
    assert change_of(found).knob == knob
    if knob != "gradient clipping":
        assert found.severity == "note" and "leave the clip as it is" in change_of(found).sentence
        return
    advised = float(str(change_of(found).value))
    assert advised == pytest.approx(usual, rel=0.05) and (not limit or advised < limit)
    assert ("if the run does not do so yet" in change_of(found).sentence) == (limit is None)
    times = min(50.0, limit or math.inf) / usual
    assert f"now up to {times:.0f} times as far" in change_of(found).effect


# What is missing


def test_a_reward_that_is_not_finite_is_found():
    reward = np.where(np.arange(STEPS) >= 30, math.nan, healthy()["reward"])
    found = log_finding("NaN", log_of(reward=reward))
    assert found.since == 31 and change_of(found).knob == "reward function" and "mean reward" in found.sentence
    late = np.where(np.arange(STEPS) >= 40, math.nan, 1.0)
    assert change_of(log_finding("NaN", log_of(reward=late, loss=reward))).knob == "learning rate"  # what came first


def test_no_rule_asks_for_a_scalar_that_the_log_has():
    lines = lines_of(healthy())[:5]
    for name in LOG_RULES.keys() - {"NaN", "repetition", "phantom signal", "reward against held-out score"}:
        verdict = LOG_RULES[name](run_log("x", lines, {"num_iterations": 2}))
        assert isinstance(verdict, Undecided) and verdict.needs.endswith("steps; here are 5"), (name, verdict)
    one = run_log("x", [{"step": step, "loss": 0.1} for step in range(20)], {"inner_updates": 1})
    assert LOG_RULES["idle clipping"](one) is None  # nothing to clip on one update per batch
    unknown = LOG_RULES["idle clipping"](log_of(clip_ratio__region_mean=0.0))
    assert isinstance(unknown, Undecided) and "updates on each batch" in unknown.needs


def test_rollouts_that_are_too_short_to_repeat_themselves_are_not_asked_for_again(tmp_path):
    known = {"token_ids": torch.tensor([1, 2]), "prompt_length": 1, "log_probs": torch.zeros(2), "reward": 0.0}
    known |= {"finished": True}
    for name, stored in (("short", True), ("none", False)):
        with RunWriter.create(tmp_path / name, {"method": "grpo"}, environment={}) as writer:
            for step in range(1, 5):
                if stored:
                    writer.write_rollouts(step, [RolloutRecord(step=step, prompt_id="p", group=0, index=0, **known)])
                writer.write_metrics(step, {"reward": 0.5})
    needs = {name: advise(tmp_path / name).undecided["repetition"] for name in ("short", "none")}
    assert "16 tokens or more" in needs["short"] and "at 4 steps" in needs["short"]
    assert needs["none"].startswith("store rollouts")


# Rollouts and layers


def dominated_run(reward: float, longest: int = 4, others: float = 4) -> RunReading:
    """Fifteen steps of a group of four, of which the first rollout makes nearly the whole update."""
    lengths = torch.tensor([longest, others, others, others]).long()
    groups, lines = [], []
    for step in range(1, 16):
        for place in range(8):
            first = reward if place == 0 else float(place % 2)
            gram = torch.eye(4, dtype=torch.float64)
            gram[0, 0] = 1000.0 if place == 0 else 1.0
            record = GroupRecord(
                step=step,
                prompt_id=f"p/{place}",
                rewards=torch.tensor([first, 0.0, 1.0, 1.0]).double(),
                lengths=lengths if place == 0 else torch.full((4,), 4),
                advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]).double(),
                gram=gram,
            )
            groups.append(StoredGroup(record))
        lines.append({"step": step, "reward": 0.5, "gram/largest_share": 0.9 + 0.2 * (step % 2)})
    return RunReading({"method": "grpo"}, (), lines, groups)


def test_an_outlying_reward_comes_before_the_weight_of_a_rollout():
    paid = dominating_rollouts(dominated_run(100.0))
    assert isinstance(paid, RunFinding) and change_of(paid).knob == "reward function"
    assert "Its reward is 100; those of its group are 100, 0, 1, 1, while 90 % of all rewards lie from 0 to 1" in (
        paid.sentence
    )
    plain = dominating_rollouts(dominated_run(1.0))
    assert isinstance(plain, RunFinding) and change_of(plain).knob == "weight of single rollouts"
    assert "Its reward" not in plain.sentence and not any("length" in step for step in change_of(plain).steps)
    long = dominating_rollouts(dominated_run(1.0, longest=9))
    assert isinstance(long, RunFinding) and "divide by length" in change_of(long).steps[-1]
    assert "a share is above 1 where the other rollouts cancel a part of it" in plain.evidence


def test_the_demo_names_the_reward_that_was_planted():
    found = advise(DEMOS / "dominating-rollout").findings[0]
    assert "those of its group are 100, 0, 0, 1" in found.sentence and change_of(found).knob == "reward function"


def test_a_demo_is_printed_as_json(capsys):
    assert cli.main(["demo", "stuck-batch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "stuck batch"


def test_the_signal_of_layers_is_that_of_their_moments(tmp_path):
    generator = torch.Generator().manual_seed(3)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    wanted: dict[int, list[torch.Tensor]] = {}
    with RunWriter.create(tmp_path / "run", {"group_size": 5}, environment={}, layers="float64") as writer:
        for step in range(1, 40):
            records = []
            for place in range(2):
                rows = {name: torch.randn(5, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
                grams = {name: one @ one.mT for name, one in rows.items()}
                stacked = torch.stack(list(grams.values()))
                wanted.setdefault(step, []).append(group_moments(stacked, rewards.expand(2, -1)).gradient_squared)
                records.append(
                    GroupRecord(
                        step=step,
                        prompt_id=f"p/{place}",
                        rewards=rewards,
                        lengths=torch.ones(5).long(),
                        advantages=rewards - rewards.mean(),
                        gram=grams["a"] + grams["b"],
                        by_layer=grams,
                    )
                )
            writer.write_groups(step, records)
            writer.write_metrics(step, {"reward": 0.5})
    found = layer_signals(read_run(tmp_path / "run"))
    assert found is not None and found[0] == ["a", "b"]
    expected = torch.stack([torch.stack(wanted[step]).mean(0) for step in sorted(wanted)[-len(found[1]) :]])
    torch.testing.assert_close(torch.from_numpy(found[1]), expected)


def test_a_rule_that_has_alternatives_says_what_to_do_in_one_sentence():
    """What may be done instead is structured, so that contradictions are seen."""
    for name in FAULTY:
        for one in advise_log(log_of(**FAULTY[name])).findings:
            if one.change is not None and one.change.alternatives:
                assert " or " not in one.change.sentence, one.name


# Other explanations, and numbers that agree


def used_several_times(updates: int) -> RunLog:
    """Every batch is used for some updates, and every update is logged."""
    first = np.arange(STEPS) // updates * updates
    reward, length = healthy()["reward"], healthy()["completions/mean_length"]
    return log_of(reward=reward[first], completions__mean_length=length[first])


@pytest.mark.parametrize("updates", [2, 4])
def test_updates_on_one_batch_are_no_certain_fault(updates):
    found = log_finding("stuck batch", used_several_times(updates))
    assert (found.severity, found.confidence) == ("warning", "possible")
    assert "Several updates on each batch" in found.evidence and "change nothing" in change_of(found).steps[0]


@pytest.mark.parametrize(
    ("bad", "value", "loss", "severity"),
    [
        ([0, 1], math.inf, 0.1, None),  # fp16 finds its loss scale
        ([0, 1], math.nan, 0.1, "warning"),
        ([0, 1], math.inf, math.nan, "warning"),
        ([25, 30], math.inf, 0.1, "warning"),
        ([0, 1, 2, 30], math.inf, 0.1, None),  # and doubles it later
        ([0, 59], math.inf, 0.1, "undecided"),  # the next step will tell
        ([25, 30, 59], math.inf, 0.1, "critical"),
        ([49], math.nan, 0.1, "warning"),
        ([50], math.nan, 0.1, "critical"),
    ],
)
def test_a_run_that_recovers_from_a_step_that_is_not_finite_needs_no_restart(bad, value, loss, severity):
    """Two infinite norms at the start of a run in fp16 were once critical and certain."""
    norms = np.ones(STEPS)
    norms[bad] = value
    losses = np.full(STEPS, 0.1)
    losses[bad] = loss
    found = LOG_RULES["NaN"](log_of(grad_norm=norms, loss=losses))
    told = "undecided" if isinstance(found, Undecided) else found.severity if isinstance(found, RunFinding) else None
    assert told == severity
    if isinstance(found, RunFinding):
        assert ("needs no restart" in change_of(found).sentence) == (severity == "warning")


def test_one_infinite_norm_in_a_hundred_is_a_loss_scale_that_grew():
    for count, is_usual in ((200, True), (199, False)):
        lines = [{"step": s, "loss": 0.1, "grad_norm": math.inf if s in (50, 70) else 1.0} for s in range(count)]
        assert (LOG_RULES["NaN"](run_log("x", lines)) is None) == is_usual


@pytest.mark.parametrize(
    ("reward", "std", "found"),
    [
        (np.linspace(0.7, 0.1, STEPS), None, True),  # "Nothing to change was found" once
        (np.where(np.arange(STEPS) < 40, 0.7, 0.1), None, True),
        (np.linspace(0.5, 0.1, STEPS), None, True),
        (np.linspace(0.6, 0.3, STEPS), None, False),  # success rates that wander do so
        (np.linspace(-3.0, -8.0, STEPS), 2.0, True),
        (np.linspace(-3.0, -5.0, STEPS), 2.0, False),
        (np.linspace(40.0, 4.0, STEPS), 10.0, True),
        (np.linspace(0.1, 0.7, STEPS), None, False),
    ],
)
def test_a_reward_that_is_mostly_lost_is_found(reward, std, found):
    noise = 0.02 * np.random.default_rng(3).normal(size=STEPS)
    verdict = LOG_RULES["falling reward"](log_of(reward=reward + noise, reward_std=std, eval_reward=None))
    assert isinstance(verdict, RunFinding) == found
    if isinstance(verdict, RunFinding):
        start, end = (float(one) for one in re.findall(r"from (\S+) in .* to (\S+) in", verdict.sentence)[0])
        assert (start, end) == pytest.approx((reward[:20].mean(), reward[40:].mean()), rel=0.05)
        assert 15 < (verdict.since or 0) < 45
        best = int(re.findall(r"near step (\d+)", change_of(verdict).sentence)[0])
        assert reward[best - 1] > reward.min() + 0.8 * np.ptp(reward)
    negative = log_of(reward=np.linspace(-3.0, -8.0, STEPS) + noise, reward_std=None, eval_reward=None)
    unknown = LOG_RULES["falling reward"](negative)
    assert isinstance(unknown, Undecided)


def test_a_stuck_batch_is_an_inference():
    found = log_finding("stuck batch", log_of(**FAULTY["stuck batch"]))
    assert (found.severity, found.confidence) == ("critical", "likely") and "Several updates" in found.evidence
    assert log_finding("lost seed", log_of(**FAULTY["lost seed"])).confidence == "likely"


@pytest.mark.parametrize("place", [0, 3, 4, 5])
def test_the_first_gradient_norms_are_judged_too(place):
    norms = np.where(np.arange(30) == place, 100.0, np.exp(0.2 * np.random.default_rng(0).normal(size=30)))
    log = run_log("x", [{"step": 10 * (s + 1), "grad_norm": float(one)} for s, one in enumerate(norms)])
    assert log_finding("gradient spikes", log).since == 10 * (place + 1)
    falling = run_log("x", [{"step": s, "grad_norm": math.exp(-s / 6)} for s in range(60)])
    assert LOG_RULES["gradient spikes"](falling) is None  # norms that fall are no spikes


def test_a_clip_and_a_learning_rate_are_advised_with_their_numbers():
    found = log_finding("gradient spikes", log_of(grad_norm=SPIKED))
    assert f"near its median, {float(np.median(SPIKED)):.2g}, if" in change_of(found).sentence
    for name in ("KL blow-up", "clip saturation"):
        rated: dict[str, Any] = {**FAULTY[name], "learning_rate": 4e-6}
        plain, logged = (log_finding(name, log_of(**changes)) for changes in (FAULTY[name], rated))
        assert change_of(plain).sentence == "Lower the learning rate."
        assert change_of(logged).sentence == "Lower the learning rate from 4e-06 to 2e-06."


def test_the_entropy_has_one_number_for_now():
    found = log_finding("entropy collapse", log_of(**FAULTY["entropy collapse"]))
    start, now = (float(one) for one in re.findall(r"from (\S+) to (\S+) nats", found.sentence)[0])
    slower, again = (float(one) for one in re.findall(r"about (\S+) nats .* now (\S+);", change_of(found).effect)[0])
    assert again == pytest.approx(now, rel=0.05) and slower == pytest.approx(math.sqrt(start * now), rel=0.05)


def test_a_log_of_verl_is_not_told_settings_of_trl():
    names = {"reward": "critic/score/mean", "entropy": "actor/entropy", "kl": "actor/kl_loss"}
    names |= {"completions/clipped_ratio": "response_length/clip_ratio", "clip_ratio/region_mean": "actor/pg_clipfrac"}
    changes = {**FAULTY["truncation"], **FAULTY["entropy collapse"], **FAULTY["KL blow-up"]}
    lines = [{names.get(key, key): value for key, value in line.items()} for line in log_of(**changes).lines]
    found = advise_log(run_log("x", lines))
    told = " ".join(line for one in found.findings for line in one.lines())
    assert {"truncation", "entropy collapse", "KL blow-up"} == {one.name for one in found.findings}
    assert "TRL" not in told and "mask_truncated" not in told and "(beta)" not in told
    assert "`response_mask`" in told and "clip_ratio_high" in told and "kl_loss_coef" in told


@pytest.mark.parametrize("name", sorted(path.name for path in DEMOS.iterdir() if path.is_dir()))
def test_no_demo_names_a_function_that_the_wheel_does_not_have(name, capsys):
    assert cli.main(["demo", name]) == 0
    said = capsys.readouterr().out
    assert "tests." not in said
    assert ("my_rewards:reward" in said) <= ("my_rewards:reward" in (DEMOS / name / "README.md").read_text())


@pytest.mark.parametrize(
    ("name", "count"), [("NaN", "1 of 60"), ("stuck batch", "29 of 59"), ("lost seed", "30 of 30")]
)
def test_a_share_of_counted_steps_is_told_as_the_count(name, count):
    found = log_finding(name, log_of(**FAULTY[name]))
    assert f"{found.label}: {count}; " in found.lines()[1]
    counted, of = map(int, count.split(" of "))
    assert found.number.value == counted / of


def test_what_a_recorded_run_shows_is_called_checked_and_fine(capsys):
    assert cli.main(["demo", "kl-blow-up"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Checked and fine: NaN," in said and "Nothing to change: " not in said
    told = " ".join(log_finding("truncation", log_of(**FAULTY["truncation"])).lines())
    assert "If truncated completions already hold the answer: mask" in told


@pytest.mark.parametrize(("steps", "told"), [(1, "at 1 step has none"), (2, "at 2 steps have none")])
def test_one_step_is_a_step(steps, told):
    run = RunReading({}, (), [], [])
    run.__dict__["folder"] = SimpleNamespace(rollout_steps=lambda: list(range(steps)))
    assert _short_rollouts(WITHOUT_ROLLOUTS, run).needs.endswith(told)


def test_questions_that_need_the_same_data_are_printed_once(capsys):
    assert cli.main(["demo", "stuck-batch"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    needed = re.findall(r"To decide (?:it|them), (.*?)\.(?= Cannot tell|$)", said)
    assert len(needed) == len(set(needed)) > 5
    assert "Cannot tell: estimator, batch size, group size, baseline. To decide them, measure at least 13" in said
    names = [name for told in re.findall(r"Cannot tell: (.*?)\. To decide", said) for name in told.split(", ")]
    assert sorted(names) == sorted(advise(DEMOS / "stuck-batch").undecided)
