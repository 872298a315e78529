"""Reading a run, finished, running or killed: everything complete is there, and what is not is named in a note."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from scoregram.checks import fail
from scoregram.runs import layout
from scoregram.runs.metrics import Scalar, read_metrics
from scoregram.runs.records import BatchRecord, GroupRecord, RolloutRecord
from scoregram.runs.tables import (
    LAYER_COLUMNS,
    group_schema,
    read_part,
    require_known_schema,
    rollout_schema,
    table_to_batches,
    table_to_groups,
    table_to_rollouts,
)


@dataclass(frozen=True)
class Run:
    """A run folder, opened for reading. Every call looks at the folder anew, so a running one can be followed."""

    folder: Path
    config: Mapping[str, Any]
    """What the run was asked to do."""
    environment: Mapping[str, Any]
    """Versions, source and machine that it began with."""
    resumed: tuple[Mapping[str, Any], ...]
    """`step` and `environment` of each resumption on another machine or other versions."""
    notes: tuple[str, ...]
    """What a reader should know about the state of the folder when it was opened: traces of a kill."""

    def metrics(self) -> list[dict[str, Scalar]]:
        """One mapping a step, `step` among its keys; what was undefined is `nan`."""
        return list(read_metrics(self.folder / layout.METRICS).lines)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps that logged the scalar `name`, and its values: two arrays of equal length.

        Raises:
            ScoregramError: If no step logged it; the error lists the names there are.
        """
        lines = self.metrics()
        found = [(line["step"], line[name]) for line in lines if name in line]
        if not found:
            names = ", ".join(sorted({name for line in lines for name in line})) or "none at all"
            fail("Run.series", f"{self.folder} must have logged {name}", names, "Check the spelling.")
        steps, values = zip(*found, strict=True)
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def groups(self, steps: Container[int] | None = None, *, layers: bool = True) -> Iterator[GroupRecord]:
        """Groups in order of step, as written. One part file is in memory at a time.

        Args:
            steps: Only these, such as `range(100, 200)`.
            layers: Read the per-layer Grams too; without them reading is faster.
        """
        for table in self._tables(layout.GROUPS, steps, without=() if layers else LAYER_COLUMNS):
            yield from table_to_groups(table)

    def batches(self, steps: Container[int] | None = None) -> Iterator[BatchRecord]:
        """Whole batches in order of step, as written. One part file is in memory at a time."""
        for table in self._tables(layout.BATCHES, steps):
            yield from table_to_batches(table)

    def rollouts(self, steps: Container[int] | None = None) -> Iterator[RolloutRecord]:
        """Rollouts in order of step, as written. One part file is in memory at a time."""
        for table in self._tables(layout.ROLLOUTS, steps):
            yield from table_to_rollouts(table)

    def groups_table(self, steps: Container[int] | None = None, *, layers: bool = False) -> pa.Table:
        """All groups as one Arrow table, `.to_pandas()` from there; columns as in `scoregram.runs.tables`."""
        tables = self._tables(layout.GROUPS, steps, without=() if layers else LAYER_COLUMNS)
        return pa.concat_tables([group_schema("none").empty_table(), *tables], promote_options="permissive")

    def rollouts_table(self, steps: Container[int] | None = None) -> pa.Table:
        """All rollouts as one Arrow table."""
        tables = self._tables(layout.ROLLOUTS, steps)
        return pa.concat_tables([rollout_schema().empty_table(), *tables], promote_options="permissive")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step → folder of every complete checkpoint, in order of step."""
        return layout.checkpoints(self.folder)

    @property
    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder to resume from; None before the first."""
        found = self.checkpoints
        return max(found.items()) if found else None

    def _tables(self, name: str, steps: Container[int] | None, without: tuple[str, ...] = ()) -> Iterator[pa.Table]:
        for step, path in layout.parts(self.folder / name):
            if steps is None or step in steps:
                yield read_part(path, without=without)


def open_run(folder: Path | str) -> Run:
    """The run in `folder`, for reading; nothing in it is changed.

    Leftovers of a killed writer (a torn last line, temporary files) are passed over and named in `notes`.

    Raises:
        ScoregramError: If there is no run, or a newer scoregram wrote it.
    """
    root = require_run(folder)
    stored = read_config(root)
    return Run(
        folder=root,
        config=stored["config"],
        environment=stored.get("environment") or {},
        resumed=tuple(stored.get("resumed") or ()),
        notes=tuple(_notes(root)),
    )


def require_run(folder: Path | str) -> Path:
    """Path of the folder, provided that a run is in it."""
    root = Path(folder)
    if not (root / layout.CONFIG).is_file():
        got = "one without" if root.is_dir() else "a file" if root.exists() else "no such folder"
        fail("open_run", f"{root} must be a run folder with a {layout.CONFIG}", got, "Check the path.")
    return root


def read_config(root: Path) -> dict[str, Any]:
    """Content of `config.yaml`, provided that this scoregram knows its schema."""
    path = root / layout.CONFIG
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        return fail("open_run", f"{path} must be YAML", reason, "Restore it from a copy.")
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        return fail("open_run", f"{path} must be written by scoregram", "something else", "Choose a run folder.")
    require_known_schema(stored.get("schema"), path)
    return stored


def _notes(root: Path) -> Iterator[str]:
    torn = read_metrics(root / layout.METRICS).torn_bytes
    if torn:
        yield f"{layout.METRICS}: {torn} bytes after the last complete line are ignored (a write was interrupted)"
    for path in layout.temporaries(root):
        yield f"{path.relative_to(root).as_posix()}: unfinished, ignored (a write was interrupted)"
