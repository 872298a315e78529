"""Reading a run that is finished, still running or killed.

Everything complete can be read; `Run.notes` names what is incomplete.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scoregram.checks import fail
from scoregram.runs import disk
from scoregram.runs.config import read_config, require_run
from scoregram.runs.metrics import Scalar, has_failed_check, needs_gram, read_metrics
from scoregram.runs.records import (
    LAYER_COLUMNS,
    TRAINING_KINDS,
    BatchRecord,
    GroupRecord,
    RolloutRecord,
    decoded_rows,
    read_part,
    table_to_batches,
    table_to_groups,
    table_to_rollouts,
    table_to_updates,
)


@dataclass(frozen=True)
class BatchNames:
    """What a stored batch is, without its Gram."""

    step: int
    kind: str
    prompt_ids: tuple[str, ...]


JOINED_PARTS = 50
"""Part files of groups that are decoded together."""


@dataclass(frozen=True)
class Run:
    """A run folder, opened for reading. Every call reads the folder again, so a running run can be followed."""

    folder: Path
    config: Mapping[str, Any]
    """The config that the run was started or last resumed with."""
    environment: Mapping[str, Any]
    """Versions, source and machine that the run was started with."""
    resumed: tuple[Mapping[str, Any], ...]
    """`step` and `environment` of each resume on another machine or with other versions."""
    notes: tuple[str, ...]
    """What was incomplete in the folder when it was opened: traces of an interrupted write."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Kind → a sentence that a reader must know before trusting the numbers, such as `approximate`; usually empty."""

    def metrics(self) -> list[dict[str, Scalar]]:
        """One mapping per step with `step` among its keys; an undefined value is `nan`.

        The line of a step whose self-check failed has all its numbers, and `check/passed` is 0 in it.
        """
        return list(read_metrics(self.folder / disk.METRICS).lines)

    def series(self, name: str, *, failed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Steps that logged the scalar `name`, and its values: two arrays of equal length.

        Args:
            name: As in `metrics.jsonl`.
            failed: A scalar from the Gram is given for the steps whose self-check did not fail; with `failed`, for the
                others alone.

        Raises:
            ScoregramError: If no such step logged it; the error lists the logged names, or counts the other steps.
        """
        lines = self.metrics()
        logged = [line for line in lines if name in line]
        if not logged:
            names = ", ".join(sorted({name for line in lines for name in line})) or "no scalars"
            fail("Run.series", f"{self.folder} must have logged {name}", names, "Check the spelling.")
        kept = [line for line in logged if (needs_gram(name) and has_failed_check(line)) == failed]
        if not kept:
            kind, other = ("failed", "passed") if failed else ("passed", "failed")
            requirement = f"{self.folder} must have logged {name} at a step whose self-check {kind}"
            got = f"{len(logged)} steps whose self-check {other}"
            fail("Run.series", requirement, got, f"Pass failed={not failed} to read those.")
        steps, values = zip(*((line["step"], line[name]) for line in kept), strict=True)
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def groups(self, steps: Container[int] | None = None, *, layers: bool = True) -> Iterator[GroupRecord]:
        """Groups ordered by step, as written. One part file is in memory at a time, without layers a few of them.

        Args:
            steps: Only these, such as `range(100, 200)`.
            layers: Read the per-layer Grams; reading is faster without them.
        """
        tables = self._tables(disk.GROUPS, steps, without=() if layers else LAYER_COLUMNS)
        for table in tables if layers else joined_tables(tables):
            yield from table_to_groups(table)

    def batches(self, steps: Container[int] | None = None) -> Iterator[BatchRecord]:
        """Whole batches ordered by step, as written. One part file is in memory at a time."""
        for table in self._tables(disk.BATCHES, steps):
            yield from table_to_batches(table)

    def batch_names(self) -> Iterator[BatchNames]:
        """Step, kind and prompts of every stored batch; no Gram is read."""
        for table in self._tables(disk.BATCHES, None, only=("step", "kind", "prompt_ids")):
            for row in table.to_pylist():
                yield BatchNames(row["step"], row["kind"], tuple(row["prompt_ids"]))

    def rollouts(
        self, steps: Container[int] | None = None, *, prompts: Container[str] | None = None
    ) -> Iterator[RolloutRecord]:
        """Rollouts ordered by step, as written. One part file is in memory at a time.

        Args:
            steps: Only these.
            prompts: Only the rollouts of these prompts.
        """
        for table in self._tables(disk.ROLLOUTS, steps):
            yield from table_to_rollouts(table if prompts is None else _rows_among(table, "prompt_id", prompts))

    def completion_ids(self, step: int, kinds: Container[str] = TRAINING_KINDS) -> list[torch.Tensor]:
        """Tokens behind the prompt, for every stored rollout of a step and of these kinds; nothing else is read."""
        tables = self._tables(disk.ROLLOUTS, [step], only=("kind", "token_ids", "prompt_length"))
        rows = (row for table in tables for row in decoded_rows(_rows_among(table, "kind", kinds)))
        return [row["token_ids"][row["prompt_length"] :] for row in rows]

    def rollout_ends(self, step: int) -> list[tuple[float, bool]]:
        """Reward, and whether a stop token ended it, of every stored training rollout of a step; nothing else is read.

        The reward is `nan` where there is none.
        """
        tables = self._tables(disk.ROLLOUTS, [step], only=("kind", "reward", "finished"))
        rows = [row for table in tables for row in _rows_among(table, "kind", TRAINING_KINDS).to_pylist()]
        return [(math.nan if row["reward"] is None else float(row["reward"]), bool(row["finished"])) for row in rows]

    def rollout_steps(self) -> set[int]:
        """Steps whose rollouts are stored; no file is opened."""
        return {step for step, _ in disk.parts(self.folder / disk.ROLLOUTS)}

    def rollout_texts(self) -> Iterator[pa.Table]:
        """Step, prompt, completion and reward of all stored rollouts, the newest first, without their tokens."""
        columns = ["step", "prompt_id", "group", "index", "prompt", "completion", "reward"]
        for _, path in reversed(list(disk.parts(self.folder / disk.ROLLOUTS))):
            yield pq.read_table(path, columns=columns)

    def update_sketches(self) -> tuple[np.ndarray, np.ndarray]:
        """Measured steps `(n,)`, and the sketch `(n, m)` float32 of the gradient of each, ordered by step.

        The inner product of two sketches estimates that of the two gradients, before clipping and before the optimiser.
        Both arrays are empty for a run without sketches. If the settings of the sketch changed when a run was resumed,
        only the steps with the newest ones are given: others cannot be compared with them.
        """
        updates = [one for table in self._tables(disk.UPDATES, None) for one in table_to_updates(table)]
        kept = [one for one in updates if (one.seed, len(one.sketch)) == (updates[-1].seed, len(updates[-1].sketch))]
        if not kept:
            return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
        return np.array([one.step for one in kept], dtype=np.int64), np.stack([one.sketch.numpy() for one in kept])

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step → folder of every complete checkpoint, ordered by step."""
        return disk.checkpoints(self.folder)

    @property
    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the checkpoint to resume from; None before the first."""
        complete = self.checkpoints
        return max(complete.items()) if complete else None

    def _tables(
        self,
        name: str,
        steps: Container[int] | None,
        without: tuple[str, ...] = (),
        only: tuple[str, ...] | None = None,
    ) -> Iterator[pa.Table]:
        for step, path in disk.parts(self.folder / name):
            if steps is None or step in steps:
                yield read_part(path, without=without, only=only)


def _rows_among(table: pa.Table, column: str, wanted: Container[str]) -> pa.Table:
    """The rows whose cell in a column is one of some values."""
    chosen = np.array([value in wanted for value in table.column(column).to_pylist()], dtype=bool)
    bits = pa.py_buffer(np.packbits(chosen, bitorder="little"))  # `pa.array` would import pandas: most of a second
    return table.filter(pa.Array.from_buffers(pa.bool_(), len(chosen), [None, bits]))


def joined_tables(tables: Iterable[pa.Table], most: int = JOINED_PARTS) -> Iterator[pa.Table]:
    """Neighbouring tables of equal columns as one, at most `most` of them: decoding has a cost per table and column."""
    waiting: list[pa.Table] = []
    for table in tables:
        if waiting and (len(waiting) == most or table.schema != waiting[0].schema):
            yield pa.concat_tables(waiting)
            waiting = []
        waiting.append(table)
    if waiting:
        yield pa.concat_tables(waiting)


def open_run(folder: Path | str) -> Run:
    """The run in `folder`, opened for reading; nothing in the folder is changed.

    Leftovers of a killed writer (a torn last line, temporary files) are skipped and named in `notes`.

    Raises:
        ScoregramError: If the folder holds no run, or a newer scoregram wrote it.
    """
    root = require_run(folder)
    stored = read_config(root)
    return Run(
        folder=root,
        config=stored["config"],
        environment=stored["environment"],
        resumed=tuple(stored["resumed"]),
        notes=tuple(_notes(root)),
        remarks=stored["remarks"],
    )


def _notes(root: Path) -> Iterator[str]:
    torn = read_metrics(root / disk.METRICS).torn_bytes
    if torn:
        yield f"{disk.METRICS}: {torn} bytes after the last complete line are ignored (a write was interrupted)"
    for path in disk.temporaries(root):
        yield f"{path.relative_to(root).as_posix()}: unfinished, ignored (a write was interrupted)"
