"""Train several runs in parallel, one process each, resuming interrupted ones, with one progress bar for all."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from scoregram.errors import fail
from scoregram.runs import CONFIG_FILE, TEMPORARY, open_run
from scoregram.terminal import duration
from scoregram.training.config import TrainConfig
from scoregram.training.loop import Trained, train

SHARED_MEMORY = 0.92
"""Share of a GPU's memory that the workers divide; the rest is for what each process needs besides tensors, such as
its CUDA context."""

_PROGRESS_SECONDS = 0.5
"""Seconds between two updates of the progress bar."""
_PLAIN_EVERY = 20
"""Updates between two plain lines, where the output is not a terminal."""

_STOPPED, _BROKEN = 1, 2
"""Values of `_stop`: no further run may begin; besides, a worker died and the queues between processes may hang."""
_stop: Any = None
"""In a worker: a number in shared memory, 0 at first. It has no lock, which a killed worker could leave locked."""


def run_in_processes(
    configs: Sequence[TrainConfig], workers: int, *, run: Callable[[TrainConfig], Trained] | None = None
) -> bool:
    """Train runs in parallel, each in a process of its own. Once a run is interrupted, no further run starts.

    Args:
        configs: The runs, in order.
        workers: Number of processes.
        run: Trains one run; `run_one` if not given. It must be defined at the top level of a module, so that the
            processes can import it.

    Returns:
        True if all runs ended, False if the user interrupted them.

    Raises:
        BrokenProcessPool: If a worker process died. The other runs have then ended after their current step.
    """
    context = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
    stop = context.RawValue("b", 0)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker, initargs=(workers, stop)) as pool:
        try:
            with _sigint_blocked():
                running: list[Future[Trained]] = [
                    pool.submit(_run_unless_stopped, run or run_one, config) for config in configs
                ]
            return not any(future.result().interrupted for future in running)
        except KeyboardInterrupt:  # the workers received it too, and end after their step
            return False
        except BrokenProcessPool:  # the pool sends SIGTERM to the other workers, which end after their step
            stop.value = _BROKEN
            raise
        finally:
            stop.value = max(stop.value, _STOPPED)  # the pool cannot cancel runs that are queued already
            pool.shutdown(cancel_futures=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in this block ignore Ctrl-C until `_init_worker` handles it.

    A process that it interrupts while it imports torch would print a traceback. Threads of this process still receive
    it, or this thread does at the end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(workers: int, stop: Any) -> None:
    """Handle Ctrl-C, end with the parent process, and limit this process to its share of each GPU's memory.

    Without a limit, one process could cache memory that another one needs.
    """
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, _begin_no_further_run)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # delivers a Ctrl-C that came during the imports
    _end_with_parent()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SHARED_MEMORY / workers, device)


def _begin_no_further_run(*_: object) -> None:
    """Let no worker begin a further run; a signal handler."""
    _stop.value = max(_stop.value, _STOPPED)


def _run_unless_stopped(run: Callable[[TrainConfig], Trained], config: TrainConfig) -> Trained:
    """Train one run in a worker, unless the runs were stopped; Ctrl-C before its first step stops it at once."""
    trained = Trained(config.out, 0, interrupted=True)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not _stop.value:
            trained = run(config)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, _begin_no_further_run)
    if _stop.value == _BROKEN:
        os._exit(1)
    if trained.interrupted:
        _begin_no_further_run()
    return trained


def _end_with_parent() -> None:
    """Terminate this process, after the current step of its run, when its parent process dies."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # training handles SIGTERM by ending after the current step

    threading.Thread(target=watch, daemon=True).start()


def run_one(config: TrainConfig) -> Trained:
    """Train one run without printing, as `resumable_config` says."""
    trained = train(resumable_config(config), console=Console(quiet=True))
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # without a parent, the worker would wait forever for its next run
    return trained


def resumable_config(config: TrainConfig) -> TrainConfig:
    """The config, set to resume a run that left a checkpoint, and to overwrite a run that left none.

    Raises:
        ScoregramError: If the folder lost its config.
    """
    folder = config.out
    if not (folder / CONFIG_FILE).is_file():
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        others = [name for name in found if not name.startswith(TEMPORARY)]
        if others:
            remedy = f"Restore it from a copy, or delete {folder} to train the run again."
            fail("train", f"{folder} must have a {CONFIG_FILE}", f"only {', '.join(others)}", remedy)
        return config
    latest = open_run(folder).latest_checkpoint
    return replace(config, resume=latest is not None, overwrite=latest is None)


@contextmanager
def runs_progress(total: int, done: Callable[[], int], *, unit: str, console: Console) -> Iterator[None]:
    """Show a progress bar with the remaining time while the block runs; plain lines if the output is not a terminal.

    Args:
        total: Value of `done` at the end.
        done: Returns how much is done now.
        unit: Name of what `done` counts.
        console: Shows the bar.
    """
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn(f"{unit} ·"), TimeElapsedColumn())
    bar = Bars(*columns, TextColumn("· left"), TimeRemainingColumn(), console=console, transient=True)
    ended, first, began = threading.Event(), done(), time.monotonic()

    def watch() -> None:
        task, updates = bar.add_task("training", total=total, completed=first), 0
        while not ended.wait(_PROGRESS_SECONDS):
            now = done()
            bar.update(task, completed=now)
            if not console.is_terminal and updates % _PLAIN_EVERY == 0:
                left = (time.monotonic() - began) / (now - first) * (total - now) if now > first else float("nan")
                console.print(f"training: {now} of {total} {unit} · ETA {duration(left)}")
            updates += 1

    watcher = threading.Thread(target=watch, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def available_cores() -> int:
    """Cores that this process may use."""
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
