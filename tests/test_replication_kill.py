"""Processes of a replication that lose their parent end by themselves, and what they left can be gone on with."""

import json
import time
from pathlib import Path

import pytest

from scoregram.runs import open_run
from scoregram.training.loop import train
from scoregram.training.several import resumable_config, run_in_processes
from tests.forked import started
from tests.training_cases import config_for, save_policy, without_times

STEPS = 400


def children_of(process: int) -> list[int]:
    """Processes that a process has started, as the kernel lists them."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits to be noticed does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow  # runs in `make test-kill`
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the process table of Linux")
def test_a_killed_parent_takes_its_runs_along_after_their_step(tmp_path):
    model, settings = save_policy(tmp_path / "policy"), {"checkpoint_every": 0, "eval_every": 0}
    configs = [config_for(model, tmp_path / name, steps=STEPS, **settings) for name in ("a", "b")]
    parent = started(run_in_processes, configs, 2, log=tmp_path / "log")
    lines = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    wait_for(lambda: all(path.is_file() and path.stat().st_size > 0 for path in lines))
    assert parent.pid is not None
    workers = children_of(parent.pid)
    assert len(workers) >= 2
    parent.kill()
    parent.join()
    wait_for(lambda: not any(map(is_alive, workers)))
    ends = [json.loads(path.read_text().splitlines()[-1])["step"] for path in lines]
    for path, end in zip(lines, ends, strict=True):
        latest = open_run(path.parent).latest_checkpoint
        assert end < STEPS and latest is not None and latest[0] == end
    steps = ends[-1] + 2
    train(resumable_config(config_for(model, tmp_path / "b", steps=steps, **settings)))
    train(config_for(model, tmp_path / "whole", steps=steps, **settings))
    found, wanted = (without_times(open_run(tmp_path / name).metrics()) for name in ("b", "whole"))
    assert found == wanted


def wait_for(condition, seconds: float = 120.0) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
