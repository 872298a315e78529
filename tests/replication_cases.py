"""A small replication: real run folders, a table and a verdict that are computed from their Grams, and its record."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from scoregram.exhibits import Estimate, Figure, Series, Table, to_plain
from scoregram.replication.record import EXHIBITS, RUNS, VERDICTS, write_record
from scoregram.runs import open_run
from tests.run_cases import ENVIRONMENT, write

CREATED = date(2026, 7, 4)
PAPER = "arXiv:2606.29238"


def recompute(folder: Path) -> tuple[list[Any], list[Any]]:
    """A table of mean traces, a figure of them over steps, and a verdict on their sum."""
    runs = {path.name: list(open_run(path).groups()) for path in sorted((folder / RUNS).iterdir())}
    traces = {
        name: [float(torch.trace(group.gram)) for group in groups if group.gram is not None]
        for name, groups in runs.items()
    }
    rows = tuple((name, Estimate(sum(t) / len(t), min(t), max(t)), len(t)) for name, t in traces.items())
    table = Table("traces", "Traces", "Mean and range.", ("run", "trace of K", "groups"), rows)
    series = tuple(Series(name, tuple(map(float, range(len(t)))), tuple(t)) for name, t in traces.items())
    figure = Figure("over-steps", "Traces", "One point a group.", "group", "trace", series)
    verdict = {"id": "trace-positive", "verdict": "replicated", "effect": sum(map(sum, traces.values())), "σ": None}
    return to_plain([table, figure]), [verdict]


def write_parts(folder: Path, exhibits: list[Any], verdicts: list[Any]) -> None:
    for name, parts in ((EXHIBITS, exhibits), (VERDICTS, verdicts)):
        folder.joinpath(name).write_text(json.dumps({Path(name).stem: parts}, allow_nan=False))


def put_record(folder: Path, **options: Any) -> Path:
    settings = {"about": PAPER, "config": {"preset": "quick", "lr": 1e-6}, "seeds": (0, 1), "created": CREATED}
    return write_record(folder, **{"environment": ENVIRONMENT, **settings, **options})


def replication(folder: Path, **options: Any) -> Path:
    """The whole folder; returns its record."""
    for name, steps in (("a", 2), ("b", 1)):
        write(folder / RUNS / name, range(steps))
    write_parts(folder, *recompute(folder))
    (folder / "report.html").write_text("a view of the data, not data")
    (folder / RUNS / "a" / "report.html").write_text("likewise")
    return put_record(folder, **options)
