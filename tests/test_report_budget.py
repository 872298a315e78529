"""What the page and the list of runs say of a run that a budget of rollouts ends, not a number of steps."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from scoregram import cli
from scoregram.cli import parsed_command
from scoregram.reading import RunReading, read_run
from scoregram.report.first_screen import RunProgress, next_step, run_facts, run_progress, steps_setting, whole_command
from scoregram.report.view import RunLibrary
from scoregram.runs import RunWriter, open_run
from scoregram.training import TrainConfig, train
from scoregram.training.checkpoint import Position
from scoregram.training.loop import is_finished
from tests.report_cases import write_run
from tests.test_reading_indicators import evaluated_run
from tests.test_report_next import diagnosis, learning
from tests.training_cases import config_for, save_policy

pytest.importorskip("plotly")

OWN: dict[str, Any] = {"method": "grpo", "task": "arithmetic", "group_size": 8, "steps": 100, "batch_size": 64}
"""A config as `scoregram train` stores it: `steps` has its default, whatever ends the run."""


def budgeted(budget: int, used: list[int], **config: Any) -> RunReading:
    lines = [{"step": step, "reward": 0.5, "rollouts": count} for step, count in enumerate(used, start=1)]
    return RunReading(OWN | {"rollouts": budget} | config, (), [{"step": 0, "rollouts": 0}, *lines], [])


TEN_STEPS = [64 * step for step in range(1, 11)]


def test_a_budget_that_is_used_up_ends_the_run():
    run = budgeted(640, TEN_STEPS)
    assert run_progress(run) == RunProgress(10, 10, 640, 640) and run_progress(run).is_finished
    facts = dict(run_facts(run))
    assert facts["rollouts"] == "640 of 640 sampled" and facts["steps"] == "10 trained, gradients of 0 measured"
    found = next_step(run, learning((0.1, 0.3, 0.4)), diagnosis())
    assert found.sentence == "Nothing: keep going, 640 more rollouts, about 10 steps."
    assert found.setting == "--rollouts 1280 (now 640)" and found.steps_in_all == 20


def test_rollouts_on_top_of_the_batch_end_a_run_in_fewer_steps():
    run = budgeted(640, [216, 432, 648])
    assert run_progress(run).is_finished and run_progress(run).planned_steps == 10
    assert dict(run_facts(run))["steps"].startswith("3 trained")
    running = budgeted(640, [216, 432])
    assert not run_progress(running).is_finished and run_progress(running).steps_left == 1  # 208 of 216 a step
    facts = dict(run_facts(running))
    assert facts["steps"].startswith("2 of at most 10 trained") and facts["rollouts"] == "432 of 640 sampled"
    told = next_step(running, learning((0.1, 0.3, 0.4)), diagnosis())
    assert told.sentence == "Nothing: let it go on to 640 rollouts, now 432." and told.setting == ""


def test_a_run_past_its_default_number_of_steps_goes_on_to_its_budget():
    run = budgeted(12800, [64 * step for step in range(1, 121)])
    assert not run_progress(run).is_finished and run_progress(run).steps_left == 80
    assert dict(run_facts(run))["steps"].startswith("120 of at most 200 trained")


@pytest.mark.parametrize(("budget", "batch"), [(640, 64), (65, 64), (1, 8), (129, 64)])
def test_the_planned_steps_are_those_of_the_trainer(budget, batch):
    run = budgeted(budget, [], batch_size=batch)
    config = TrainConfig(rollouts=budget, batch_size=batch, group_size=min(8, batch))
    assert run_progress(run).planned_steps == config.most_steps


@pytest.mark.parametrize("used", [TEN_STEPS, TEN_STEPS[:4], [216, 432, 648], [216, 432]])
def test_a_run_is_finished_where_the_trainer_ends(used):
    config = TrainConfig(rollouts=640, batch_size=64)
    assert run_progress(budgeted(640, used)).is_finished == is_finished(config, Position(len(used), 0, used[-1]))


def test_without_logged_rollouts_the_steps_decide():
    run = RunReading(OWN | {"rollouts": 640}, (), [{"step": step, "reward": 0.5} for step in range(1, 11)], [])
    assert run_progress(run) == RunProgress(10, 10, 0, 640) and run_progress(run).is_finished
    assert steps_setting(run, 20) == "--rollouts 1280 (now 640)"
    dump = RunReading({"rollouts": "steps/*.jsonl", "format": "trl"}, (), run.lines, [])  # a path, not a budget
    assert run_progress(dump) == RunProgress(10, 0) and not run_progress(dump).is_finished


@pytest.mark.parametrize(("used", "state"), [(640, "finished"), (632, "running")])
def test_the_list_of_runs_calls_a_used_budget_finished(used, state, tmp_path):
    pytest.importorskip("starlette")
    config = OWN | {"rollouts": 640, "seed": 0}
    with RunWriter.create(tmp_path / "run", config, environment={}) as writer:
        for step in range(1, 5):
            writer.write_metrics(step, {"reward": 0.5, "rollouts": used * step // 4})
    assert RunLibrary(tmp_path, patience=60).row("run").state == state


def test_a_run_of_another_trainer_is_finished_at_its_last_step(tmp_path):
    pytest.importorskip("starlette")
    config = {"integration": {"name": "trl"}, "arguments": {"max_steps": 60}}
    with RunWriter.create(tmp_path / "run", config, environment={}) as writer:
        for step in (20, 40, 60):  # it logs every twentieth step
            writer.write_metrics(step, {"reward": 0.5})
    assert RunLibrary(tmp_path, patience=60).row("run").state == "finished"


def test_a_budgeted_run_too_short_to_judge_is_told_its_budget(tmp_path):
    run = evaluated_run(tmp_path / "run", (0.2, 0.22), (0.3, 0.3), 1000)
    lines = [{**line, "rollouts": 64 * int(line["step"])} for line in run.lines]
    run = dataclasses.replace(run, config=OWN | {"rollouts": 64000}, lines=lines)
    found = next_step(run, learning((0.2, 0.22), state="watch"), diagnosis())
    again = f"start again, for 2100 steps ({run_progress(run).budget_for(2100):,} rollouts) in place of 1000"
    assert found.is_longer and found.sentence.startswith(f"Train longer and change nothing else: {again}, since no")
    assert found.setting.startswith("--rollouts ") and found.setting.endswith(" (now 64000)")
    assert found.why.endswith("If two settings change at once, the run does not show which one helped.")


def test_a_running_run_with_a_budget_that_is_long_enough_is_let_go_on(tmp_path):
    run = evaluated_run(tmp_path / "run", (0.2, 0.22), (0.3, 0.3), 1000)
    count = len(run.steps)
    lines = [{**line, "rollouts": 64 * int(line["step"])} for line in run.lines]
    for budget, is_enough in ((64000 * 2, False), (64000 * 3000 // count, True)):
        going = dataclasses.replace(run, config=OWN | {"rollouts": budget}, lines=lines)
        found = next_step(going, learning((0.2, 0.22), state="watch"), diagnosis())
        told = f"Let it go on to {budget:,} rollouts, as planned, and change nothing else."
        assert found.sentence.startswith(told) == is_enough and bool(found.setting) != is_enough


def test_the_whole_command_of_a_longer_run_has_the_new_budget_alone():
    config = dict(TrainConfig(out=Path("runs/mine"), rollouts=640).record())
    command = whole_command(config, steps_setting(budgeted(640, TEN_STEPS), 20))
    again = parsed_command(shlex.split(command)[1:])
    assert isinstance(again, TrainConfig) and again.rollouts == 1280 and "--steps" not in command


def test_the_command_that_is_typed_continues_the_run(tmp_path, capsys):
    folder = tmp_path / "run"
    train(config_for(save_policy(tmp_path / "policy"), folder, rollouts=20, eval_every=0))
    run = read_run(open_run(folder))
    assert run_progress(run) == RunProgress(2, 2, 24, 20) and run_progress(run).is_finished
    command, _, present = steps_setting(run, 4).partition(" (now ")
    assert command == f"scoregram train --resume --out {folder} --rollouts 48" and present == "20)"
    capsys.readouterr()
    assert cli.main(shlex.split(command)[1:]) == 0
    assert "step 4, 48 of 48 rollouts" in capsys.readouterr().out
    longer = run_progress(read_run(open_run(folder)))
    assert longer.is_finished and longer.steps == 4


def test_a_run_without_a_budget_counts_its_steps(tmp_path):
    write_run(tmp_path / "run")
    run = dataclasses.replace(read_run(open_run(tmp_path / "run")), config=OWN | {"steps": 6, "rollouts": 0})
    assert run_progress(run) == RunProgress(6, 6) and run_progress(run).is_finished
    assert "rollouts" not in dict(run_facts(run)) and steps_setting(run, 12) == "--steps 12 (now 6)"
