"""The paper's experiment from beginning to end: train, measure, judge, record, report.

A replication may take any number of attempts: runs that are complete are not trained again.
"""

import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import fail, lookup
from scoregram.exhibits import Table, from_plain
from scoregram.policy import PolicyConfig, load_policy
from scoregram.report import show_table
from scoregram.runs import last_scalar, write_atomically
from scoregram.studies.grpo_rank import PAPER_ID
from scoregram.studies.grpo_rank.evidence import assessment, headline, write_evidence, write_replication_report
from scoregram.studies.grpo_rank.presets import PRESETS, PlannedRun, Preset, plan, start_of, write_setting
from scoregram.studies.record import public_key, write_record
from scoregram.tasks import load_task
from scoregram.training import (
    resumable_config,
    run_in_processes,
    run_one,
    runs_progress,
    warm_start,
    write_warm_start,
)

TERMINAL_COLUMNS = (
    *("R", "rank, paper", "effective rank", "null: orthogonal"),
    *("top-1, paper", "top-1 fraction", "top-1 orthogonal"),
)
"""Columns of Table 1 that fit on a terminal."""

START_STAMP = "start.json"
"""Settings of a starting policy, written last: without this file, or with other settings, it is prepared again."""


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
    write_record(out, **facts, assessment=assessment(verdicts), key_file=sign_with)
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
    total = sum(one.config.steps for one in planned)
    with runs_progress(total, lambda: sum(map(steps_done, planned)), unit="steps", console=console):
        if (workers or preset.workers) > 1:
            return run_in_processes([one.config for one in missing], workers or preset.workers)
        return all(not run_one(resumable_config(one.config)).interrupted for one in missing)


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


def steps_done(one: PlannedRun) -> int:
    """The last step that a run has written."""
    return last_scalar(one.config.out, "step")
