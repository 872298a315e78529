"""A writer that is really killed (SIGKILL), at every operation on the disk and at random moments.

A process without threads forks a writer for each kill; the writer resumes as the trainer does: from the
latest checkpoint, or from the beginning.
"""

import os
import random
import shutil
import signal
import time
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from scoregram.runs import open_run
from tests.forked import started
from tests.kill_cases import ended_well, forked, kill_at, numbers_reached
from tests.run_cases import create, resume, tree, write_step

KEEP = {"keep_checkpoints": 1}

STEPS = 3
"""Checkpoints after the first and the last; a run keeps one."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_writer(folder: Path, steps: int) -> None:
    """What a trainer does: go on from the latest checkpoint if there is a run, begin one if not."""
    if (folder / "config.yaml").exists():
        latest = open_run(folder).latest_checkpoint
        done = latest[0] if latest else -1
        writer = resume(folder, done, **KEEP)
    else:
        done = -1
        writer = create(folder, **KEEP)
    with writer:
        for step in range(done + 1, steps):
            write_step(writer, step)


def assert_readable(folder: Path) -> None:
    """Whatever was killed: what is complete can be read, and it is consistent up to the latest checkpoint."""
    if not (folder / "config.yaml").exists():
        assert all(path.name.startswith(".partial-") for path in (folder.iterdir() if folder.exists() else ()))
        return
    run = open_run(folder)
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(len(steps)))
    assert all(group.gram is not None for group in run.groups())
    assert all(len(rollout.log_probs) == len(rollout.token_ids) for rollout in run.rollouts())
    if run.latest_checkpoint:
        step, path = run.latest_checkpoint
        assert len(steps) > step
        assert len(list(run.groups(range(step + 1)))) == len(list(run.rollouts(range(step + 1)))) == 2 * (step + 1)
        assert (path / "inner" / "more.txt").read_text() == f"step {step}"
        assert len((path / "state.bin").read_bytes()) == 1000


def kill_at_operations(work: Path, whole: dict, stride: int, second_kill: bool) -> int:
    """Kill a new writer at each operation, or each few; then one that resumes, if asked; the next finishes the run."""
    for operation in count(1, stride):
        folder = work / str(operation)
        finished = ended_well(forked(lambda: (kill_at(operation), run_writer(folder, STEPS))))  # noqa: B023
        assert_readable(folder)
        if finished:
            return operation
        if second_kill:
            ended_well(forked(lambda: (kill_at(1 + operation % 29), run_writer(folder, STEPS))))  # noqa: B023
            assert_readable(folder)
        run_writer(folder, STEPS)
        assert tree(folder) == whole, f"killed at operation {operation}"
        shutil.rmtree(folder)
    raise AssertionError("a run has an end")


def kill_at_random_moments(work: Path, whole: dict, kills: int, steps: int) -> int:
    """Kill writers of one folder until that many were hit; start over whenever one finishes. Returns those finished.

    Moments are drawn from the time that a whole run takes here, so that most kills hit on idle and on busy cores.
    """
    chance, finished, hit = random.Random(0), 0, 0
    folder, began = work / "random", time.monotonic()
    assert ended_well(forked(lambda: run_writer(work / "timed", steps)))
    seconds = time.monotonic() - began
    while hit < kills:
        assert finished < 20 * kills, "the kills come too late"
        child = forked(lambda: run_writer(folder, steps))
        time.sleep(chance.uniform(0.0, seconds))
        os.kill(child, signal.SIGKILL)
        if ended_well(child):
            assert tree(folder) == whole
            shutil.rmtree(folder)
            finished += 1
        else:
            assert_readable(folder)
            hit += 1
    run_writer(folder, steps)
    assert tree(folder) == whole
    return finished


def kill_writers(work: Path, *, stride: int, second_kill: bool, kills: int) -> None:
    """Both kinds of kills, in a process of their own; print the operations reached and the runs finished."""
    run_writer(work / "whole", STEPS)
    operations = kill_at_operations(work, tree(work / "whole"), stride, second_kill)
    run_writer(work / "longer", 10)
    finished = kill_at_random_moments(work, tree(work / "longer"), kills, steps=10)
    print("reached", operations, finished)


@pytest.mark.slow  # runs in `make test-kill`
def test_killed_at_every_third_operation_and_at_random_moments(tmp_path):
    operations, _ = numbers_reached(partial(kill_writers, stride=3, second_kill=False, kills=20), tmp_path)
    assert operations == 127  # 42 kills at operations, then 20 that hit: docs/trust.md has both numbers


@pytest.mark.slow
def test_killed_again_and_again(tmp_path):
    operations, _ = numbers_reached(partial(kill_writers, stride=1, second_kill=True, kills=300), tmp_path)
    assert operations > 100


def test_a_forked_worker_that_outlives_its_writer_does_not_keep_the_folder(tmp_path):
    reader, pipe = Pipe(duplex=False)
    writer = started(write_with_a_worker, tmp_path / "r", pipe, log=tmp_path / "log")
    worker = reader.recv()
    try:
        writer.kill()
        writer.join()
        os.kill(worker, 0)  # still there
        resume(tmp_path / "r", None).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def write_with_a_worker(folder: Path, pipe: Connection) -> None:
    """Open a run, fork, send the number of the fork, and stay."""
    writer = create(folder)
    worker = os.fork()
    if worker:
        pipe.send(worker)
    time.sleep(60)
    writer.close()
