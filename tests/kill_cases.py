"""Processes that kill themselves (SIGKILL) at a chosen operation on the disk; forked from a process without threads."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.forked import started


def numbers_reached(task: Callable[..., None], folder: Path, *arguments: object) -> tuple[int, int]:
    """The two numbers that `task(folder, …)` prints behind `reached` at its end, in a process without threads."""
    process = started(task, folder, *arguments, log=folder / "log")
    process.join()
    said = (folder / "log").read_text()
    assert process.exitcode == 0, said
    first, second = map(int, said.rpartition("reached")[2].split())
    return first, second


def forked(work: Callable[[], object]) -> int:
    """Process id of a fork that does the work and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # a fork must never return into the caller
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
    return child


def ended_well(child: int) -> bool:
    """Whether the fork ended by itself; a failure that is not the kill is an error."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed"
    return not os.WIFSIGNALED(status)


def kill_at(operation: int) -> None:
    """Make this process kill itself at its n-th operation on the disk, before it or, for a write, halfway through."""
    done = 0

    def deadly(real: Callable, halfway: bool) -> Callable:
        def call(*arguments, **options):
            nonlocal done
            done += 1
            if done == operation:
                if halfway:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "truncate", "ftruncate"):
        setattr(os, name, deadly(getattr(os, name), halfway=name == "write"))
