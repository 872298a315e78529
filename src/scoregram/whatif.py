"""`scoregram whatif`: what other estimators would have done with the stored rollouts of a run, on the terminal."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scoregram.exhibits import cell_text
from scoregram.reading import REFERENCE, read_run, what_if
from scoregram.runs import open_run

COLUMNS = {
    "estimator": "estimator",
    "variance": "variance",
    "bias": "bias",
    "signal / noise": "snr",
    f"efficiency, {REFERENCE} = 1": "efficiency",
    "direction": "direction",
    "as taken": "taken",
    "rank": "effective_rank",
    "null": "effective_rank_null",
}
"""Title of a column → field of `Replay`."""


def show_replay(
    folder: Path,
    estimators: Sequence[str] = (),
    *,
    group_size: int = 0,
    weights: str = "uniform",
    as_json: bool = False,
) -> int:
    """Print the comparison as a table or as strict JSON, with the run's trust, and return the exit status 0."""
    run = read_run(open_run(folder))
    found = what_if(run, estimators, group_size=group_size, weights=weights)
    if as_json:
        trust = {"mark": run.trust.mark.strip(" ()"), "trust": run.trust.sentences()}
        print(json.dumps(without_nan(asdict(found)) | trust, indent=1, allow_nan=False))
        return 0
    weighted = "" if found.weights == "uniform" else f", weights {found.weights}"
    title = f"{found.groups} groups of {found.run_size}, in parts of {found.group_size}{weighted}{run.trust.mark}"
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "estimator" else "right")
    for row in sorted(found.rows, key=lambda row: -row.snr.value):
        cells = [getattr(row, field) for field in COLUMNS.values()][1:]
        table.add_row(row.estimator, *("cannot tell" if math.isnan(cell.value) else cell_text(cell) for cell in cells))
    console = Console()
    console.print(table)
    console.print(
        f"Signal over noise is that of one prompt's update from {found.group_size} rollouts; variance is the trace of "
        f"that update's covariance. Bias is |E ĝ - g|² / |g|² with {REFERENCE} for g, a wrong length included. "
        "Direction is the cosine between E ĝ and g; as taken, that between the update of the whole groups and the "
        "run's own. Groups of the last third; 95 % intervals resample groups.",
        style="dim",
    )
    for sentence in run.trust.sentences():
        console.print(sentence, style="dim")
    return 0


def without_nan(value: Any) -> Any:
    """The same with None in place of `nan`, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
