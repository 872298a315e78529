"""What the first screen says to do next: something to type, what to expect from it with a number, and why."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from scoregram.advice.findings import Change, RunFinding, Severity, Undecided, diagnosis_of
from scoregram.advice.settings import PROMPTS, with_setting
from scoregram.cli import parsed_command
from scoregram.exhibits import Estimate
from scoregram.reading import Indicator, IndicatorState, RunReading, accuracy_gain, read_run, running_curve
from scoregram.report.first_screen import (
    MOST_CARDS,
    NextStep,
    first_sentence,
    next_step,
    ordered_cards,
    steps_setting,
    whole_command,
)
from scoregram.report.page import STATE_WORDS
from scoregram.report.run_page import run_page
from scoregram.runs import RunWriter, open_run
from scoregram.training import TrainConfig
from tests.report_cases import Page, write_run
from tests.test_reading_indicators import evaluated_run
from tests.test_report_run import graded

pytest.importorskip("plotly")

OWN: dict[str, Any] = {"method": "grpo", "task": "arithmetic", "group_size": 8, "steps": 60}


def run_of(steps: int = 60, **config: Any) -> RunReading:
    return RunReading(OWN | config, (), [{"step": step, "reward": 0.5} for step in range(1, steps + 1)], [])


def learning(values: Any, *, quantity: str = "test accuracy", state: IndicatorState = "good") -> Indicator:
    arrow = f"{values[0]:.2f} → {values[-1]:.2f}"
    told: dict[str, Any] = {"headline": f"{quantity} {arrow}", "quantity": quantity, "arrow": arrow, "sentence": ""}
    curve = running_curve(tuple(range(0, 20 * len(values), 20)), values)
    is_test = quantity != "training reward"
    return Indicator(name="learning", state=state, curve=curve, is_test=is_test, scale=(0.0, 1.0), **told)


def a_finding(knob: str, *, severity: Severity = "warning", direction: str = "up", value: Any = 4) -> RunFinding:
    told = {"sentence": f"Change the {knob}.", "effect": "more by 0.5.", "value": value}
    change = Change(knob=knob, direction=direction, **told)
    one = RunFinding(name=knob, severity=severity, sentence="It is 0.1. So it is.", evidence="", change=change)
    return with_setting(one, OWN)


def diagnosis(*findings: RunFinding):
    return diagnosis_of("", {one.name: one for one in findings})


def test_a_solved_task_is_told_to_stop_and_what_more_could_be_gained():
    size, harder = a_finding("group size"), a_finding(PROMPTS, direction="harder", value=None)
    solved, learns = (learning((0.3, 0.9, last)) for last in (0.96, 0.94))
    found = next_step(run_of(), solved, diagnosis(size, harder))
    assert found.sentence == (
        "Stop here: the task is nearly solved. To learn more, train a new run on harder problems, "
        "with 5 terms in place of 4, again from the starting model."
    )
    assert found.label == "For a new run"
    assert found.setting == "--task arithmetic:5 (now arithmetic:4)"
    left = (
        "Going on with this task adds at most 0.04 to the test accuracy of 0.96; since step 20 it went 0.900 → 0.960."
    )
    assert found.why == f"{left} It is 0.1."
    assert found.effect == "Unknown: no harder problem was sampled."
    alone = next_step(run_of(), solved, diagnosis(size))
    assert alone.sentence == "Stop here: the task is nearly solved." and alone.setting == ""
    assert next_step(run_of(), learns, diagnosis(size, harder)).finding == "group size"
    # a training reward does not show that a task is solved
    reward = learning((0.3, 0.9, 0.96), quantity="training reward")
    assert next_step(run_of(), reward, diagnosis(size, harder)).finding == "group size"
    assert ordered_cards([size, harder], solved=False) == ((size, harder), MOST_CARDS)
    assert ordered_cards([size, harder], solved=True) == ((harder, size), 1)


def test_a_solved_task_says_what_harder_problems_should_give_and_what_to_check():
    def line(step: int) -> dict[str, float]:
        # 4 steps with half of the rollouts right, of which 6 of 8 groups are live; then a solved task
        live, reward = (6, 0.5) if step <= 4 else (2, 0.95)
        return {"step": step, "reward": reward, "groups": 8, "live_groups": live}

    config = OWN | {"batch_size": 64}
    run = RunReading(config, (), [line(step) for step in range(1, 61)], [])
    harder = dataclasses.replace(a_finding(PROMPTS, direction="harder", value=None), number=Estimate(0.75))
    found = next_step(run, learning((0.3, 0.9, 0.96)), diagnosis(harder))
    assert found.effect.startswith(
        "About 75% [75, 75] of the groups live if 25% to 75% of the rollouts are right, as at 4"
    )
    assert "steps of this run; now 25%." in found.effect and found.effect.endswith(
        ". The accuracy that it reaches is unknown: no harder problem was sampled."
    )
    # 1 - p^8 - (1-p)^8 is one half at 0.083
    assert found.check.startswith("In the first 5 steps of the new run, 9% to 91% of the rollouts should be right.")
    assert found.check.endswith("a group of 8 is live with the chance 1 − p⁸ − (1 − p)⁸, there 50% or more.")
    assert found.why.endswith("It is 0.1. Those are 48 of the 64 rollouts of a step.")
    never = RunReading(config, (), [line(step) for step in range(5, 61)], [])
    known = next_step(never, learning((0.3, 0.9, 0.96)), diagnosis(harder)).effect
    assert known.startswith("At most 99% of the groups live, now 25%, if half of the rollouts are right (1 − 2 · 0.5⁸;")


def test_the_worst_finding_is_the_next_thing_with_its_value_its_effect_and_its_reason():
    found = next_step(run_of(), learning((0.3, 0.9, 0.9)), diagnosis(a_finding("group size")))
    expected: dict[str, Any] = {"sentence": "Change the group size.", "setting": "--group-size 4 (now 8)"}
    assert found == NextStep(**expected, effect="More by 0.5.", why="It is 0.1.", finding="group size")
    note = next_step(run_of(), learning((0.3, 0.9, 0.9)), diagnosis(a_finding("group size", severity="note")))
    assert note.sentence == "Nothing must change: it learns. Worth a try: Change the group size."


def test_a_run_that_learns_without_a_finding_goes_on_and_says_what_that_may_bring():
    found = next_step(run_of(), learning((0.1, 0.3, 0.4, 0.5)), diagnosis())
    assert found.sentence == "Nothing: keep going, 60 more steps." and found.setting == "--steps 120 (now 60)"
    # from 0.3 at step 20 to 0.5 at step 60: 0.005 a step
    assert found.effect.startswith("The test accuracy rises at best from 0.500 to 0.800, if it rises as over the")
    near = next_step(run_of(), learning((0.1, 0.6, 0.8, 0.9)), diagnosis())
    assert near.effect.startswith("The test accuracy rises at best from 0.900 to 1.000, if it rises as")
    full = next_step(run_of(), learning((0.1, 0.6, 0.8, 1.0), quantity="training reward"), diagnosis())
    assert full.effect == "Little: the training reward is 1.000 already."
    flat = next_step(run_of(), learning((0.1, 0.5, 0.5, 0.5)), diagnosis())
    assert flat.effect == "Little: the test accuracy did not rise over the second half of the run (0.500 → 0.500)."
    unfinished = next_step(run_of(40), learning((0.1, 0.2, 0.3)), diagnosis())
    assert unfinished.sentence == "Nothing: let it go on to step 60, now 40." and unfinished.setting == ""


def test_what_is_unknown_is_called_so():
    open_ = diagnosis_of("", {"batch size": Undecided("measure more"), "NaN": None})
    watched = next_step(run_of(), learning((0.1, 0.2, 0.1), state="watch"), open_)
    assert watched.effect == "Unknown: the interval of the change of the test accuracy includes 0."
    assert watched.why.startswith("No rule asks for a change; 1 of 2 cannot decide")
    worse = next_step(run_of(), learning((0.4, 0.2, 0.1), state="act"), open_)
    assert worse.sentence.startswith("Stop, and read some rollouts")
    assert worse.effect == "Unknown: no rule found the cause."
    early = next_step(run_of(2), learning((0.4,), state="unknown"), open_)
    assert early.effect == "Unknown: too few steps for a trend."
    assert next_step(RunReading(OWN, (), [], []), early_tile(), open_).sentence.startswith("Nothing yet")


def early_tile() -> Indicator:
    return Indicator(name="learning", state="unknown", headline="no step yet", sentence="", curve=running_curve((), ()))


def test_a_run_too_short_to_judge_is_told_how_long_it_must_be(tmp_path):
    run = dataclasses.replace(evaluated_run(tmp_path / "run", (0.2, 0.22), (0.3, 0.3), 1000), config=OWN)
    found = next_step(run, learning((0.2, 0.22), state="watch"), diagnosis(a_finding("group size")))
    assert found.is_longer and found.steps_in_all == 2100 and found.setting == "--steps 2100 (now 60)"
    again = "start again, for 2100 steps in place of 1000, since no checkpoint is stored"
    assert found.sentence == f"Train longer and change nothing else: {again}. 1000 steps cannot tell."
    assert found.effect.startswith("A greedy accuracy of 0.342 = 0.300 + 0.042 if")  # 0.02 in 1,000 steps, 2,100 steps
    assert "(0.0200 in 1000 steps), or still 0.300 if" in found.effect
    change = accuracy_gain(run)
    assert change is not None
    error = (change.change.high - change.change.low) / 2
    assert found.check.startswith(f"After 2100 steps: above {0.3 + error:.3f} it learns, below it do")
    critical = diagnosis(a_finding("group size", severity="critical"))
    assert next_step(run, learning((0.2, 0.22)), critical).finding == "group size"


@pytest.mark.parametrize(("planned", "is_enough"), [(2099, False), (2100, True), (5000, True)])
def test_a_running_run_that_is_planned_to_be_long_enough_is_let_go_on(planned, is_enough, tmp_path):
    """2,100 steps are needed; it has 1,000 of those that it is planned for."""
    run = evaluated_run(tmp_path / "run", (0.2, 0.22), (0.3, 0.3), 1000)
    run = dataclasses.replace(run, config=OWN | {"steps": planned})
    found = next_step(run, learning((0.2, 0.22), state="watch"), diagnosis(a_finding("group size")))
    assert found.is_longer and found.check.startswith("After 2100 steps:")
    if is_enough:
        told = f"Let it go on to step {planned}, as planned, and change nothing else. 1000 steps cannot tell."
        assert (found.sentence, found.setting, found.steps_in_all) == (told, "", planned)
    else:
        assert f"for 2100 steps in place of {planned}, since" in found.sentence
        assert found.setting == f"--steps 2100 (now {planned})" and found.steps_in_all == 2100


def test_a_run_with_a_checkpoint_is_continued(tmp_path):
    write_run(tmp_path / "run")
    run = dataclasses.replace(read_run(open_run(tmp_path / "run")), config=OWN | {"steps": 6})
    tile = learning((0.1, 0.3, 0.4))
    assert next_step(run, tile, diagnosis()).setting == "--steps 12 (now 6)"
    with RunWriter.resume(tmp_path / "run", None, environment={}) as writer, writer.checkpoint(6) as inside:
        (inside / "weights").write_bytes(b"x")
    continued = dataclasses.replace(read_run(open_run(tmp_path / "run")), config=run.config)
    typed = f"scoregram train --resume --out {tmp_path / 'run'} --steps 12 (now 6)"
    assert next_step(continued, tile, diagnosis()).setting == typed
    running = dataclasses.replace(continued, config={**continued.config, "steps": 9})  # stopped before its last step
    assert steps_setting(running, 12) == typed.replace("(now 6)", "(now 9)")
    decays = dataclasses.replace(continued, config={**continued.config, "lr_schedule": "cosine"})
    assert next_step(decays, tile, diagnosis()).setting == "--steps 12 (now 6)"


def test_the_first_sentence_ends_before_the_next_one():
    assert first_sentence("It is 0.5 of arXiv.1 here. Then more.") == "It is 0.5 of arXiv.1 here."
    assert first_sentence("One.") == "One." and first_sentence("") == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs") / "run"
    write_run(made, errors=dict.fromkeys(range(1, 7), 1e-7))
    return made


def test_the_page_shows_what_to_type_what_to_expect_and_why(folder):
    page = run_page(open_run(folder))
    told = NextStep(sentence="S", setting="--x 1 (now 2)", effect="0.1 → 0.2.", why="Because.")
    shown = Page(dataclasses.replace(page, next_step=told).html())
    assert "<dt>Type</dt><dd><code>--x 1</code> (now 2)" in dataclasses.replace(page, next_step=told).html()
    typed = dataclasses.replace(page, next_step=told, command="scoregram train --x 1").html()
    assert "<summary>The whole command</summary><code>scoregram train <span>--x</span> 1</code>" in typed
    assert all(part in shown.text("dd") for part in ("0.1\u00a0→\u00a00.2.", "Because."))
    steps = dataclasses.replace(page, next_step=NextStep(sentence="S", steps=("First `a`.", "Then.")))
    assert '<ol class="steps"><li>First <code>a</code>.</li><li>Then.</li></ol>' in steps.html()
    assert dict(page.answers)["What next?"] == page.next_step.sentence


def test_a_line_on_trust_has_one_colour_that_of_its_word(folder, tmp_path):
    write_run(tmp_path / "bad", errors=dict.fromkeys(range(1, 7), 1e-7) | {3: 0.5})
    for run, states in ((folder, ["good", "watch"]), (tmp_path / "bad", ["act", "watch"])):
        page = run_page(open_run(run))
        assert [state for state, _ in page.trust] == states
        for state, sentence in page.trust:
            word = f'<li class="{state}"><span class="word">{STATE_WORDS[state]}</span> {sentence[:10]}'
            assert word in page.html()
    assert '<span class="fine">' not in run_page(open_run(folder)).html()


def test_rows_of_a_loss_are_not_called_scores_under_the_glass(tmp_path):
    write_run(tmp_path / "loss", kind="loss", evaluated=False)
    write_run(tmp_path / "scores")
    loss, scores = (Page(run_page(open_run(tmp_path / name)).html()) for name in ("loss", "scores"))
    assert "Cosines between gradients" in loss.text("h3") and "Cosines between scores" in scores.text("h3")
    text = loss.text("p")
    assert "part of the gradient of the trainer’s loss, in which its weight" in text
    assert "before it is multiplied by the advantage" not in text and "works against itself" not in text
    assert "works against itself" in scores.text("p") and "norm of each gradient." in loss.text("figcaption")
    labels = [one.get("aria-label", "") for one in loss.named("div")]
    assert any("Cosines between the gradients of" in label for label in labels)
    assert not any("scores" in label for label in labels)


def test_graded_rewards_are_neither_right_nor_wrong(tmp_path):
    def rewards(step, prompt, generator):
        return graded(step, prompt, generator) if prompt else graded(step, prompt, generator) * 0 + step % 2

    write_run(tmp_path / "graded", rewards=rewards)
    write_run(tmp_path / "binary")
    names = {}
    for name in ("graded", "binary"):
        page = run_page(open_run(tmp_path / name))
        (groups,) = [one for section in page.sections for one in section.exhibits if one.id == "groups"]
        names[name] = [one.name for one in getattr(groups, "series", ())]
        outcomes = {group["outcome"] for step in page.glass.steps for group in step["groups"]}
        words = {"graded": {"live", "all rewards 0", "all rewards 1"}, "binary": {"live", "all right", "all wrong"}}
        assert outcomes <= words[name] and len(outcomes) > 1
    assert names["graded"] == ["live", "all rewards 0", "all rewards 1"]
    assert names["binary"] == ["live", "all wrong", "all right"]


def test_the_whole_command_is_that_of_the_run_with_one_option_changed():
    given = TrainConfig(
        out=Path("runs/mine"),
        task="gsm8k:a b",
        steps=60,
        adam_betas=(0.9, 0.95),
        between_prompts=False,
        autocast=True,
        lora_targets=("q_proj", "v_proj"),
        lora_rank=4,
    )
    config = json.loads(json.dumps(dataclasses.asdict(given), default=str)) | {"method": "grpo"}
    command = whole_command(config, "--steps 150 (now 60)")
    again = parsed_command(shlex.split(command)[1:])
    assert isinstance(again, TrainConfig)
    expected = dataclasses.replace(given, steps=150, out=Path("runs/mine-next"))
    assert dataclasses.asdict(again) == dataclasses.asdict(expected)
    assert "--batch-size" not in command  # a default
    assert whole_command({"integration": {"name": "trl"}}, "max_steps=120 (now 60)") == ""
    assert (
        whole_command(config, "scoregram train --resume --out runs/mine --steps 9") == "" == whole_command(config, "")
    )
