"""Processes that tests start, forked from one process that has imported the package.

A new interpreter takes about six seconds to import torch and transformers. The fork server imports them once for all
processes of a test session; unlike a plain fork it has no threads, so that no lock is held at the fork.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

START_METHOD = "forkserver"
_PRELOADED = ["tests.distributed_cases", "tests.run_cases", "tests.training_cases", "scoregram.training.loop"]
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(_PRELOADED)


def started(task: Callable[..., object], *arguments: object, log: Path) -> ForkServerProcess:
    """A process that calls `task`, which must be a function at the top level of a module; its output goes to `log`."""
    process = _CONTEXT.Process(target=_logged, args=(log, task, arguments))
    process.start()
    return process


def _logged(log: Path, task: Callable[..., object], arguments: tuple[object, ...]) -> None:
    with log.open("w", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        try:
            task(*arguments)
        except BaseException:
            traceback.print_exc()  # the log is closed before multiprocessing would print it
            raise
