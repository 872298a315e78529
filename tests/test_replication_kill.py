"""Processes of a replication that lose their parent end by themselves, and what they left can be gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scoregram.runs import open_run
from scoregram.training.loop import train
from scoregram.training.several import resumable
from tests.training_cases import config_for, save_policy, without_times

STEPS = 400
PARENT = """
import json, sys
from pathlib import Path
from scoregram.training.several import run_in_processes
from tests.training_cases import config_for

if __name__ == "__main__":
    model, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    configs = [config_for(model, folder / name, steps=steps, checkpoint_every=0, eval_every=0) for name in ("a", "b")]
    run_in_processes(configs, 2)
"""


def children_of(process: int) -> list[int]:
    """Processes that a process has started, as the kernel lists them."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits to be noticed does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the process table of Linux")
def test_a_killed_parent_takes_its_runs_along_after_their_step(tmp_path):
    model, script = save_policy(tmp_path / "policy"), tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, script, model, tmp_path, str(STEPS)], env=environment)
    lines = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    wait_for(lambda: all(path.is_file() and path.stat().st_size > 0 for path in lines))
    workers = children_of(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(is_alive, workers)))
    ends = [json.loads(path.read_text().splitlines()[-1])["step"] for path in lines]
    for path, end in zip(lines, ends, strict=True):
        latest = open_run(path.parent).latest_checkpoint
        assert end < STEPS and latest is not None and latest[0] == end
    steps = ends[-1] + 2
    settings = {"checkpoint_every": 0, "eval_every": 0}
    train(resumable(config_for(model, tmp_path / "b", steps=steps, **settings)))
    train(config_for(model, tmp_path / "whole", steps=steps, **settings))
    found, wanted = (without_times(open_run(tmp_path / name).metrics()) for name in ("b", "whole"))
    assert found == wanted


def wait_for(condition, seconds: float = 120.0) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
