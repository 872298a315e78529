"""Train and measure everything a replication needs, in any number of attempts: what is complete is not done again."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scoregram.replication.presets import Planned, Preset, plan, start_of
from scoregram.replication.start import prepared
from scoregram.runs import CONFIG_FILE, METRICS, open_run, read_metrics
from scoregram.training import TrainConfig, Trained, train

LOOK_EVERY = 0.5
"""Seconds between two looks at how far the runs have come."""
PLAIN_EVERY = 20
"""Looks between two lines where the output is no terminal."""
SHARED_MEMORY = 0.92
"""Part of a GPU's memory that workers share; the rest is taken by what each process needs besides tensors."""


def run_all(
    preset: Preset, folder: Path, *, seeds: int, device: str, console: Console, workers: int | None = None
) -> bool:
    """Make what runs begin with and train every run that is not complete; False if somebody stopped it.

    Args:
        preset: What to train.
        folder: Of the replication.
        seeds: Runs for each group size and method.
        device: As in `TrainConfig`.
        console: Where progress is shown.
        workers: Processes that train side by side; the preset's number if not given.
    """
    planned = plan(preset, folder, seeds=seeds, device=device)
    missing = [one for one in planned if steps_done(one) < one.config.steps]
    if not missing:
        return True
    for start, seed in {start_of(preset, folder, one.seed): one.seed for one in missing}.items():
        prepared(preset, start, seed=seed, device=device, tell=console.print)
    with shown_progress(planned, console):
        if (workers or preset.workers) > 1:
            return in_processes(missing, workers or preset.workers)
        return all(not attempt(resumable(one.config)).interrupted for one in missing)


def in_processes(missing: Sequence[Planned], workers: int) -> bool:
    """Train several runs at a time, one process each; what has not begun when one of them ends early does not begin."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=settle, initargs=(workers,)) as pool:
        running: list[Future[Trained]] = [pool.submit(attempt, resumable(one.config)) for one in missing]
        try:
            return not any(future.result().interrupted for future in running)
        except KeyboardInterrupt:  # the runs got it too, and end after their step
            return False
        finally:
            pool.shutdown(cancel_futures=True)


def settle(workers: int) -> None:
    """Make this process one of several: it ends with its parent and keeps to its share of a GPU's memory.

    Without a share, memory that torch keeps for later in one process is missing in another.
    """
    end_with_parent()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SHARED_MEMORY / workers, device)


def end_with_parent() -> None:
    """Have this process end its run after the step, and itself, when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # a run takes it as a request to end after its step

    threading.Thread(target=watch, daemon=True).start()


def attempt(config: TrainConfig) -> Trained:
    """One run, without a line of its own."""
    done = train(config, console=Console(quiet=True))
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # nobody is left to ask for the next one
    return done


def resumable(config: TrainConfig) -> TrainConfig:
    """The config, set to go on from a checkpoint where an interrupted run left one, and to begin anew elsewhere."""
    if not (config.out / CONFIG_FILE).is_file():
        return config
    goes_on = open_run(config.out).latest_checkpoint is not None
    return replace(config, resume=goes_on, overwrite=not goes_on)


def steps_done(one: Planned) -> int:
    """The last step that a run has written."""
    lines = read_metrics(one.config.out / METRICS).lines
    return int(lines[-1]["step"]) if lines else 0


@contextmanager
def shown_progress(planned: Sequence[Planned], console: Console) -> Iterator[None]:
    """Inside, a bar over the steps of all runs; a plain line now and then where the output is no terminal."""
    total = sum(one.config.steps for one in planned)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps ·"), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("· left"), TimeRemainingColumn(), console=console, transient=True)
    ended = threading.Event()

    def watch() -> None:
        task, looks = bar.add_task("training", total=total), 0
        while not ended.wait(LOOK_EVERY):
            done = sum(map(steps_done, planned))
            bar.update(task, completed=done)
            if not console.is_terminal and looks % PLAIN_EVERY == 0:
                console.print(f"training: {done} of {total} steps")
            looks += 1

    watcher = threading.Thread(target=watch, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
