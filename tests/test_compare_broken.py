"""Damaged folders, second commands, killed workers, rewards that exit: a comparison loses no run silently."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scoregram.checks import ScoregramError
from scoregram.compare import CompareConfig, compare_methods, write_comparison_report
from scoregram.compare import cells as cells_module
from scoregram.compare.cells import planned_cells
from scoregram.terminal import stop_requests
from scoregram.training import TrainConfig, Trained, train
from scoregram.training.several import run_in_processes
from tests.test_compare import QUIET, runs_of, small
from tests.test_replication_kill import children_of, wait_for
from tests.training_cases import save_policy

METHODS = "grpo,rloo"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def made(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    assert compare_methods(small(policy, folder, methods=METHODS, seeds=1), console=QUIET) == 0
    return folder


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def compared(config: CompareConfig) -> tuple[int, str]:
    """Exit status and output of a comparison."""
    out = StringIO()
    status = compare_methods(config, console=Console(file=out, width=300))
    return status, out.getvalue()


# Damaged run folders


def cut(path: Path, lines: int) -> None:
    """Keep the first lines of a file."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("rollouts", [36, 60])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: cut(run / "metrics.jsonl", 0), "the checkpoint of step 3, got a file without a step."),
        (lambda run: cut(run / "metrics.jsonl", -1), "the checkpoint of step 3, got a file that ends at step 2."),
        (lambda run: (run / "metrics.jsonl").unlink(), "the checkpoint of step 3, got no such file."),
        (lambda run: (run / "config.yaml").unlink(), "must have a config.yaml, got only checkpoints, groups,"),
    ],
    ids=["emptied", "cut", "metrics deleted", "config deleted"],
)
def test_a_damaged_run_is_a_failure_and_not_a_method_less(damage, says, rollouts, made, copy, policy):
    config, run = small(policy, copy, methods=METHODS, seeds=1, rollouts=rollouts, every_rollouts=3), copy / "runs/rloo"
    damage(run / "seed-0")
    status, said = compared(config)
    assert status == 1 and "rloo, seed 0 failed: train: " in said and says in said
    assert f"Restore it from a copy, or delete {run / 'seed-0'} to train the run again." in said
    shutil.rmtree(run / "seed-0")
    assert compared(config)[0] == 0
    assert rollouts > 36 or runs_of(copy) == runs_of(made)


def test_a_folder_whose_only_run_lost_its_config_keeps_its_settings(copy, policy):
    shutil.rmtree(copy / "runs/grpo")
    (copy / "runs/rloo/seed-0/config.yaml").unlink()
    with pytest.raises(ScoregramError, match="must have the same config, got learning_rate"):
        compare_methods(small(policy, copy, methods="rloo", seeds=1, learning_rate=0.5), console=QUIET)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", r"must be written by scoregram compare, got \[\]\. Restore it from a copy"),
        ("{}", "must be written by scoregram compare, got no methods"),
        ('{"methods": {"grpo": "grpo"}, "seeds": "one"}', "got seeds 'one'"),
        ('{"methods": {"grpo": 3}, "seeds": 1, "rollouts": 1, "every_rollouts": 1, "batch_size": 1}', "got methods"),
        ("{", "must be a JSON file, got Expecting"),
    ],
)
@pytest.mark.parametrize("has_runs", [True, False])
def test_a_damaged_file_of_a_comparison_is_a_sentence_and_stays(content, says, has_runs, copy, policy):
    (copy / "compare.json").write_text(content)
    if not has_runs:
        shutil.rmtree(copy / "runs")
    with pytest.raises(ScoregramError, match=says):
        compare_methods(small(policy, copy, methods=METHODS, seeds=1), console=QUIET)
    with pytest.raises(ScoregramError, match=f"report: .*{says}"):
        write_comparison_report(copy)
    assert (copy / "compare.json").read_text() == content


def test_train_does_not_resume_a_run_that_lost_steps(copy, policy):
    config = small(policy, copy, methods="rloo", seeds=1, rollouts=60, every_rollouts=3)
    (cell,) = planned_cells(config)
    cut(cell.config.out / "metrics.jsonl", -1)
    with pytest.raises(ScoregramError, match="must have every step up to the checkpoint of step 3, got a file that"):
        train(replace(cell.config, resume=True), console=QUIET)


# Two commands in one folder


def test_a_second_command_is_refused_while_the_first_trains(policy, tmp_path, monkeypatch):
    folder, refused = tmp_path / "new/both", []
    first, original = small(policy, folder, methods="grpo", seeds=1), cells_module.run_one

    def trained(config: TrainConfig) -> Trained:
        with pytest.raises(ScoregramError, match=r"compare --out: .* must have one writer, got this process") as error:
            compare_methods(replace(first, methods="rloo", learning_rate=0.5), console=QUIET)
        refused.append(error)
        return original(config)

    monkeypatch.setattr(cells_module, "run_one", trained)
    assert compared(first)[0] == 0 and len(refused) == 1 and not (folder / "runs/rloo").exists()


def test_a_command_in_another_process_is_named_as_such(copy, policy):
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    before = (copy / "compare.json").read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        with pytest.raises(ScoregramError, match="must have one writer, got another process"):
            compare_methods(small(policy, copy, methods="ppo", seeds=1), console=QUIET)
        other.communicate(b"\n")
    assert (copy / "compare.json").read_bytes() == before


def test_a_refused_command_leaves_no_folder(policy, tmp_path):
    with pytest.raises(ScoregramError, match="compare --target"):
        compare_methods(small(policy, tmp_path / "a/b/c", target=80.0, reward=None), console=QUIET)
    assert not (tmp_path / "a").exists()


def test_the_reason_of_an_earlier_failure_goes_when_the_run_is_complete(copy, policy):
    reason = copy / "runs/rloo/seed-0-failure.txt"
    reason.write_text("train: runs/rloo/seed-0 must have one writer\n")
    status, said = compared(small(policy, copy, methods=METHODS, seeds=1))
    assert status == 0 and "failed" not in said and not reason.exists()


# Failures of one run


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise RuntimeError", "RuntimeError"),
        ("raise ValueError('')", "ValueError"),
        ("raise SystemExit(3)", "SystemExit: 3, raised by reward in rewards.py, line 2"),
        ("raise SystemExit", "SystemExit, raised by reward in rewards.py, line 2"),
    ],
)
def test_a_reward_that_exits_ends_its_run_alone(statement, reason, tmp_path, monkeypatch):
    names: dict[str, Any] = {}
    exec(compile(f"def reward(_):\n    {statement}", "rewards.py", "exec"), names)
    monkeypatch.setattr(cells_module, "run_one", names["reward"])
    config = TrainConfig(out=tmp_path / "runs/grpo/seed-0")
    assert not cells_module.run_or_explain(config).interrupted
    assert cells_module.failure_path(config).read_text() == f"{reason}\n"


@pytest.mark.parametrize("length", [255, 256])
def test_a_label_that_no_folder_can_have_is_refused_before_the_first_run(length, policy, tmp_path):
    label = "grpo:learning_rate=0.".ljust(length - 1, "0") + "1"
    config = small(policy, tmp_path / "named", methods=f"rloo,{label}", seeds=1)
    if length == 255:
        assert len(cells_module.planned_cells(config)) == 2
        return
    with pytest.raises(ScoregramError, match="must have at most 255 characters: it names a folder, got 256: grpo:lear"):
        compare_methods(config, console=QUIET)
    assert not (tmp_path / "named").exists()


# Workers


def test_a_dead_worker_names_the_runs_that_had_not_ended(policy, tmp_path, monkeypatch):
    def died(missing: list[TrainConfig], jobs: int, run: Any) -> bool:
        run(missing[0])
        raise BrokenProcessPool

    monkeypatch.setattr(cells_module, "run_in_processes", died)
    config, said = small(policy, tmp_path / "dying", methods=METHODS, seeds=1, jobs=2), StringIO()
    with pytest.raises(ScoregramError, match="every run must sample its rollouts, got rloo, seed 0: 0 of 36"):
        compare_methods(config, console=Console(file=said, width=300))
    assert "A worker process died" in said.getvalue() and "| grpo | 1 |" in (tmp_path / "dying/table.md").read_text()


def die_or_wait(config: TrainConfig) -> Trained:
    """A run that leaves a file when it begins: the one with seed 0 kills its process, others wait for a stop."""
    config.out.with_suffix(".began").touch()
    end = time.monotonic() + 60
    with stop_requests() as stop:
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.1)
            if config.seed == 0 and config.out.with_name("1.began").exists():
                os.kill(os.getpid(), signal.SIGKILL)
    return Trained(config.out, 0, interrupted=True)


@pytest.mark.slow
def test_no_run_begins_after_a_worker_died(tmp_path):
    configs = [TrainConfig(out=tmp_path / str(seed), seed=seed) for seed in range(6)]
    with pytest.raises(BrokenProcessPool):
        run_in_processes(configs, 2, run=die_or_wait)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.began", "1.began"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the process table of Linux")
@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.0])
def test_ctrl_c_while_workers_start_prints_no_traceback(seconds, policy, tmp_path):
    settings = {"out": tmp_path / "new", "model": policy, "seeds": 3, "rollouts": 4000, "jobs": 2, "device": "cpu"}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "scoregram", "compare", *options, "--task", "arithmetic:3", "--prompt", "plain"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(lambda: len(children_of(process.pid)) >= 2 or process.poll() is not None)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and "Stopped. The same command continues from here" in said


def test_ctrl_c_while_the_first_policy_is_built_ends_the_comparison(tmp_path, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cells_module, "load_policy", interrupted)
    config = CompareConfig(out=tmp_path / "new", methods=METHODS, seeds=1, rollouts=32, device="cpu")
    status, said = compared(config)
    assert status == 130 and "Stopped. The same command continues from here" in said


def test_the_failure_of_an_earlier_command_is_not_reported_for_a_run_that_did_not_start(copy, policy, monkeypatch):
    config = small(policy, copy, methods=METHODS, seeds=1, rollouts=60, every_rollouts=3)
    old = copy / "runs/rloo/seed-0-failure.txt"
    old.write_text("ValueError: from yesterday\n")

    def die(*_: Any, **__: Any) -> bool:
        raise BrokenProcessPool("a worker died")

    monkeypatch.setattr(cells_module, "run_in_processes", die)
    said = StringIO()
    with pytest.raises(ScoregramError, match=r"got grpo, seed 0: 36 of 60; rloo, seed 0: 36 of 60"):
        compare_methods(replace(config, jobs=2), console=Console(file=said, width=300))
    assert "yesterday" not in said.getvalue() and not old.exists()
