"""The paper's experiment from beginning to end: train, measure, judge, record, report.

A replication may take any number of attempts: runs that are complete are not trained again.
"""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scoregram.checks import fail, lookup
from scoregram.exhibits import Table, from_plain
from scoregram.policy import PolicyConfig, load_policy
from scoregram.report import show_table
from scoregram.runs import CONFIG_FILE, METRICS, open_run, read_metrics, write_atomically
from scoregram.studies.grpo_rank import PAPER_ID
from scoregram.studies.grpo_rank.evidence import assessment, headline, write_evidence, write_replication_report
from scoregram.studies.grpo_rank.presets import PRESETS, PlannedRun, Preset, plan, start_of, write_setting
from scoregram.studies.record import public_key, write_record
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, Trained, train, warm_start, write_warm_start

TERMINAL_COLUMNS = (
    *("R", "rank, paper", "effective rank", "null: orthogonal"),
    *("top-1, paper", "top-1 fraction", "top-1 orthogonal"),
)
"""Columns of Table 1 that fit on a terminal."""

START_STAMP = "start.json"
"""Settings of a starting policy, written last: without this file, or with other settings, it is prepared again."""

SHARED_MEMORY = 0.92
"""Share of a GPU's memory that the workers divide; the rest is for what each process needs besides tensors."""

_PROGRESS_SECONDS = 0.5
"""Seconds between two updates of the progress bar."""
_PLAIN_EVERY = 20
"""Updates between two plain lines, where the output is not a terminal."""


def replicate(
    preset: str,
    out: Path,
    *,
    seeds: int | None = None,
    model: str | None = None,
    task: str | None = None,
    device: str = "auto",
    workers: int | None = None,
    sign_with: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run a preset into a folder, or continue it, and print the results; returns 0, or 130 if the user stopped it.

    Args:
        preset: A row of `PRESETS`.
        out: Folder of the replication.
        seeds: Runs for each group size and method; the preset's number if not given.
        model: Replaces the preset's model.
        task: Replaces the preset's task, such as `gsm8k:FOLDER`.
        device: auto, cpu, cuda or cuda:N.
        workers: Processes that train in parallel; the preset's number if not given. The results do not depend on it.
        sign_with: PEM file with the ed25519 key to sign the record with.
        console: Where to print; standard output if not given.

    Raises:
        ScoregramError: For an unknown preset, a folder that holds another replication, or settings that training
            refuses.
    """
    console = console or Console()
    replaced = {name: value for name, value in {"model": model, "task": task}.items() if value is not None}
    chosen = replace(lookup(PRESETS, preset, kind="replicate --preset"), **replaced)
    count = chosen.seeds if seeds is None else seeds
    if count < 1:
        fail("replicate --seeds", "must be at least 1", count, "Leave it out for the preset's own.")
    if workers is not None and workers < 1:
        fail("replicate --workers", "must be at least 1", workers, "Leave it out for the preset's own.")
    if sign_with is not None:
        public_key(sign_with)  # an unreadable key is an error now, not after hours of training
    began = time.perf_counter()
    setting = write_setting(out, preset, chosen, seeds=count)
    console.print(f"Replicating {PAPER_ID}: {chosen.about}.")
    if not run_all(chosen, out, seeds=count, device=device, console=console, workers=workers):
        console.print(f"Stopped. The same command continues from here: {out}")
        return 130
    exhibits, verdicts = write_evidence(out)
    facts = {"about": PAPER_ID, "config": dict(setting), "seeds": range(count), "created": datetime.now(UTC).date()}
    write_record(out, **facts, assessment=assessment(verdicts, setting), key_file=sign_with)
    page = write_replication_report(out)
    _print_results(exhibits, verdicts, console)
    console.print(f"{time.perf_counter() - began:.0f} s. Report: {page}", soft_wrap=True)
    return 0


def _print_results(exhibits: list[Any], verdicts: list[Any], console: Console) -> None:
    """Table 1 with the paper's numbers and the null, the headline, and the other verdicts."""
    table = next(one for one in from_plain(exhibits) if isinstance(one, Table) and one.id == "table-1")
    places = [table.columns.index(name) for name in TERMINAL_COLUMNS]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    show_table(replace(table, columns=TERMINAL_COLUMNS, rows=rows), console)
    console.print()
    console.print(headline(verdicts), style="bold")
    for one in verdicts:
        if not one["claim"].startswith("table-1-r") and one["claim"] != "abstract-effective-rank":
            console.print(f"  {one['claim']}: {one['verdict']}. {one['sentence']}", highlight=False)


def run_all(
    preset: Preset, folder: Path, *, seeds: int, device: str, console: Console, workers: int | None = None
) -> bool:
    """Prepare the starting policies and train every run that is not complete; False if the user stopped it.

    Args:
        preset: The experiment.
        folder: The folder of the replication.
        seeds: Runs for each group size and method.
        device: As in `TrainConfig`.
        console: Where progress is shown.
        workers: Processes that train in parallel; the preset's number if not given.
    """
    planned = plan(preset, folder, seeds=seeds, device=device)
    missing = [one for one in planned if steps_done(one) < one.config.steps]
    if not missing:
        return True
    for start, seed in {start_of(preset, folder, one.seed): one.seed for one in missing}.items():
        prepare_start(preset, start, seed=seed, device=device, tell=console.print)
    with _progress_bar(planned, console):
        if (workers or preset.workers) > 1:
            return run_in_processes(missing, workers or preset.workers)
        return all(not run_one(resumable(one.config)).interrupted for one in missing)


def prepare_start(preset: Preset, folder: Path, *, seed: int, device: str, tell: Callable[[str], None]) -> Path:
    """The folder of a starting policy, written if it is not there: the model, after a warm start if the preset has one.

    The seed sets the order of the solutions in the warm start.
    """
    settings: dict[str, Any] = {
        name: getattr(preset, name) for name in ("model", "task", "warm_epochs", "warm_rate", "warm_batch", "autocast")
    } | ({"seed": seed} if preset.warm_epochs else {})
    stamp = folder / START_STAMP
    if stamp.is_file() and json.loads(stamp.read_text()) == settings:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    task = load_task(preset.task)
    config = PolicyConfig(model=preset.model, device=device, prompt=preset.prompt, autocast=preset.autocast)
    policy = load_policy(config, task)
    if preset.warm_epochs:
        warm_start(
            policy,
            task,
            epochs=preset.warm_epochs,
            batch_size=preset.warm_batch,
            learning_rate=preset.warm_rate,
            seed=seed,
            tell=tell,
        )
    write_warm_start(policy, folder)
    write_atomically(stamp, json.dumps(settings).encode())
    # Leave the GPU to the processes that train next: torch would keep the freed memory cached in this one.
    del policy
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder


def run_in_processes(missing: Sequence[PlannedRun], workers: int) -> bool:
    """Train several runs at a time, one process each; if one is interrupted, no further run starts."""
    context = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker, initargs=(workers,)) as pool:
        running: list[Future[Trained]] = [pool.submit(run_one, resumable(one.config)) for one in missing]
        try:
            return not any(future.result().interrupted for future in running)
        except KeyboardInterrupt:  # the workers received it too, and end after their step
            return False
        finally:
            pool.shutdown(cancel_futures=True)


def _init_worker(workers: int) -> None:
    """Make this process end with its parent, and limit it to its share of each GPU's memory.

    Without a limit, one process could cache memory that another one needs.
    """
    _end_with_parent()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SHARED_MEMORY / workers, device)


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
    """Train one run without printing."""
    trained = train(config, console=Console(quiet=True))
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # without a parent, the worker would wait forever for its next run
    return trained


def resumable(config: TrainConfig) -> TrainConfig:
    """The config, set to resume if an interrupted run left a checkpoint, and to overwrite one that left none."""
    if not (config.out / CONFIG_FILE).is_file():
        return config
    has_checkpoint = open_run(config.out).latest_checkpoint is not None
    return replace(config, resume=has_checkpoint, overwrite=not has_checkpoint)


def steps_done(one: PlannedRun) -> int:
    """The last step that a run has written."""
    lines = read_metrics(one.config.out / METRICS).lines
    return int(lines[-1]["step"]) if lines else 0


@contextmanager
def _progress_bar(planned: Sequence[PlannedRun], console: Console) -> Iterator[None]:
    """A bar over the steps of all runs while the block runs; plain lines where the output is not a terminal."""
    total = sum(one.config.steps for one in planned)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps ·"), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("· left"), TimeRemainingColumn(), console=console, transient=True)
    ended = threading.Event()

    def watch() -> None:
        task, updates = bar.add_task("training", total=total), 0
        while not ended.wait(_PROGRESS_SECONDS):
            done = sum(map(steps_done, planned))
            bar.update(task, completed=done)
            if not console.is_terminal and updates % _PLAIN_EVERY == 0:
                console.print(f"training: {done} of {total} steps")
            updates += 1

    watcher = threading.Thread(target=watch, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
