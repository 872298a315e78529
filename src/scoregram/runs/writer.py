"""Writing a run: whatever kills the process, the folder can be read, and resumed to the same bytes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from scoregram.checks import fail
from scoregram.runs import layout
from scoregram.runs.atomic import (
    disk_errors,
    disk_is_full,
    make_folder,
    remedy_for,
    remove,
    sync_folder,
    sync_tree,
    write_all,
    write_atomically,
)
from scoregram.runs.config import config_text, differences, plain
from scoregram.runs.environment import environment as this_environment
from scoregram.runs.lock import FolderLock
from scoregram.runs.metrics import metrics_line, read_metrics
from scoregram.runs.reader import read_config, require_run
from scoregram.runs.records import GroupRecord, RolloutRecord
from scoregram.runs.tables import LayerPrecision, groups_to_table, rollouts_to_table, table_to_bytes


class RunWriter:
    """The one writer of a run folder; made by `create` or `resume`, ended by `close` or a `with` block.

    Write the metrics, groups and rollouts of a step before its checkpoint: a checkpoint promises that all of them up
    to its step are on the disk.
    """

    def __init__(self, folder: Path, lock: FolderLock, *, layers: LayerPrecision = "float32") -> None:
        self.folder = folder
        self.layers: LayerPrecision = layers
        self._lock = lock
        self._metrics = os.open(folder / layout.METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        lines = read_metrics(folder / layout.METRICS).lines
        self._last_step = int(lines[-1]["step"]) if lines else -1

    @classmethod
    def create(
        cls,
        folder: Path | str,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        layers: LayerPrecision = "float32",
        environment: Mapping[str, Any] | None = None,
    ) -> Self:
        """Begin a run in `folder`, which is made if absent.

        Args:
            folder: New, empty, or with `overwrite` the folder of an older run.
            config: Everything needed to run it again, seed included: mappings, sequences, numbers, text.
            overwrite: Remove the older run first. Files that are not part of it stay.
            layers: Precision of per-layer Grams; `none` leaves them out.
            environment: Versions, source and machine; found out if not given.

        Raises:
            ScoregramError: If the folder is not empty or cannot be written, or the config holds what YAML cannot.
        """
        ...

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        step: int | None,
        *,
        config: Mapping[str, Any] | None = None,
        may_differ: Sequence[str] = (),
        layers: LayerPrecision = "float32",
        environment: Mapping[str, Any] | None = None,
    ) -> Self:
        """Go on after `step`: everything later is removed, as if the run had been interrupted right there.

        Args:
            folder: Folder of the run.
            step: Last step to keep, usually that of the latest checkpoint; -1 begins anew, None keeps all that is complete.
            config: If given, must equal the config of the run.
            may_differ: Top-level keys of the config that may differ, such as the number of steps.
            layers: As in `create`.
            environment: As in `create`; noted in the config where it differs from the one before.

        Raises:
            ScoregramError: If there is no run, it has another config, or another process is writing to it.
        """
        ...

    def write_metrics(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Append the one line of `step`, visible at once; `nan` and infinities become `null`."""
        ...

    def write_groups(self, step: int, groups: Sequence[GroupRecord]) -> None:
        """Write a part file with the groups of `step`; each further call for one step writes a further part."""
        ...

    def write_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Write a part file with the rollouts of `step`; each further call for one step writes a further part."""
        ...

    @contextmanager
    def checkpoint(self, step: int, *, keep: int | None = None) -> Iterator[Path]:
        """A temporary folder to write into, which becomes `checkpoints/step-N` when the block ends well.

        Args:
            step: Steps done.
            keep: Keep the newest `keep` checkpoints (at least one) and remove the others afterwards; None keeps all.
        """
        yield self.folder

    def close(self) -> None:
        """Force the metrics to the disk and give the folder up; more than once does no harm."""
        ...
