"""The paper's experiment from beginning to end: train, measure, judge, record, report."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from scoregram.checks import fail, lookup
from scoregram.exhibits import Table, from_plain
from scoregram.replication import (
    PRESETS,
    Preset,
    lead,
    public_key,
    run_all,
    write_evidence,
    write_record,
    write_setting,
)
from scoregram.report import show_table, write_report
from scoregram.theory import PAPER

SHOWN = ("R", "rank, paper", "effective rank", "null: orthogonal", "top-1, paper", "top-1 fraction", "top-1 orthogonal")
"""Columns of Table 1 that fit on a terminal."""


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
    """Run a preset into a folder, or go on with it, and print what came out; 0, or 130 if somebody stopped it.

    Args:
        preset: A row of `PRESETS`.
        out: Folder of the replication.
        seeds: Runs for each group size and method; the preset's number if not given.
        model: Another model than the preset's.
        task: Another task, such as `gsm8k:FOLDER`.
        device: auto, cpu, cuda or cuda:N.
        workers: Processes that train side by side; the preset's number if not given. Numbers do not depend on it.
        sign_with: PEM file with the ed25519 key to sign the record with.
        console: Where to print; standard output if not given.

    Raises:
        ScoregramError: For an unknown preset, a folder that holds another replication, or what training refuses.
    """
    console = console or Console()
    chosen = changed(lookup(PRESETS, preset, kind="replicate --preset"), model, task)
    count = chosen.seeds if seeds is None else seeds
    if count < 1:
        fail("replicate --seeds", "must be at least 1", count, "Leave it out for the preset's own.")
    if workers is not None and workers < 1:
        fail("replicate --workers", "must be at least 1", workers, "Leave it out for the preset's own.")
    if sign_with is not None:
        public_key(sign_with)  # a key that cannot be read is told of before work is lost
    began = time.perf_counter()
    setting = write_setting(out, preset, chosen, seeds=count)
    console.print(f"Replicating {PAPER}: {chosen.about}.")
    if not run_all(chosen, out, seeds=count, device=device, console=console, workers=workers):
        console.print(f"Stopped. The same command goes on where it was: {out}")
        return 130
    exhibits, verdicts = write_evidence(out)
    today = datetime.now(UTC).date()
    write_record(out, about=PAPER, config=dict(setting), seeds=range(count), created=today, key_file=sign_with)
    page = write_report(out)
    show(exhibits, verdicts, console)
    console.print(f"{time.perf_counter() - began:.0f} s. Report: {page}", soft_wrap=True)
    return 0


def changed(preset: Preset, model: str | None, task: str | None) -> Preset:
    """The preset with another model or task, if asked for."""
    given = {"model": model, "task": task}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


def show(exhibits: list[Any], verdicts: list[Any], console: Console) -> None:
    """Table 1 beside the paper's and the null's, and the verdict in one sentence."""
    table = next(one for one in from_plain(exhibits) if isinstance(one, Table) and one.id == "table-1")
    places = [table.columns.index(name) for name in SHOWN]
    narrow = replace(table, columns=SHOWN, rows=tuple(tuple(row[place] for place in places) for row in table.rows))
    show_table(narrow, console)
    console.print()
    console.print(lead(verdicts), style="bold")
    for one in verdicts:
        if not one["claim"].startswith("table-1-r") and one["claim"] != "abstract-effective-rank":
            console.print(f"  {one['claim']}: {one['verdict']}. {one['sentence']}", highlight=False)
