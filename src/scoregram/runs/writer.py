"""Writing a run: whatever kills the process, the folder can be read, and resumed to the same bytes."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from scoregram.checks import fail
from scoregram.runs import layout
from scoregram.runs.atomic import (
    disk_errors,
    disk_is_full,
    make_folder,
    remedy_for,
    remove,
    sync_file,
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
from scoregram.runs.records import BatchRecord, GroupRecord, RolloutRecord
from scoregram.runs.tables import (
    LayerPrecision,
    batches_to_table,
    groups_to_table,
    rollouts_to_table,
    table_to_bytes,
)


class RunWriter:
    """The one writer of a run folder; made by `create` or `resume`, ended by `close` or a `with` block.

    Write the metrics, groups and rollouts of a step before its checkpoint: a checkpoint promises that all of them up
    to its step are on the disk.
    """

    def __init__(self, folder: Path, lock: FolderLock, *, layers: LayerPrecision, keep_checkpoints: int | None) -> None:
        self.folder = folder
        self.layers: LayerPrecision = layers
        self.keep_checkpoints = keep_checkpoints
        self._lock = lock
        self._metrics = os.open(folder / layout.METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._last_step = _last_step(folder)
        written = ((name, step) for name in layout.TABLES for step, _ in layout.parts(folder / name))
        self._parts = Counter(written)

    @classmethod
    def create(
        cls,
        folder: Path | str,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        layers: LayerPrecision = "float32",
        keep_checkpoints: int | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> "RunWriter":
        """Begin a run in `folder`, which is made if absent.

        Args:
            folder: New, empty, or with `overwrite` the folder of an older run.
            config: Everything needed to run it again, seed included: mappings, sequences, numbers, text.
            overwrite: Remove the older run first. Files that are not part of it stay.
            layers: Precision of per-layer Grams; `none` leaves them out.
            keep_checkpoints: Keep this many of the newest checkpoints, at least one; None keeps all.
            environment: Versions, source and machine; found out if not given.

        Raises:
            ScoregramError: If the folder is not empty or cannot be written, or the config holds what YAML cannot.
        """
        _require_keep(keep_checkpoints)
        text = config_text(config, this_environment() if environment is None else environment)
        root = Path(folder)
        with disk_errors(root, caller="RunWriter.create"):
            make_folder(root)
            lock = FolderLock(root, caller="RunWriter.create")
            try:
                _clear(root, overwrite=overwrite)
                write_atomically(root / layout.CONFIG, text)
                return cls(root, lock, layers=layers, keep_checkpoints=keep_checkpoints)
            except BaseException:
                lock.release()
                raise

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        step: int | None,
        *,
        config: Mapping[str, Any] | None = None,
        may_differ: Sequence[str] = (),
        layers: LayerPrecision = "float32",
        keep_checkpoints: int | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> "RunWriter":
        """Go on after `step`: everything later is removed, as if the run had been interrupted right there.

        Args:
            folder: Folder of the run.
            step: Last step to keep, usually that of the latest checkpoint; -1 keeps none, None all that is complete.
            config: If given, must equal the config of the run, and is the one that stands in it from now on.
            may_differ: Top-level keys of the config that may differ, such as the number of steps.
            layers: As in `create`.
            keep_checkpoints: As in `create`.
            environment: As in `create`; noted in the config where it differs from the one before.

        Raises:
            ScoregramError: If there is no run, it has another config, or another process is writing to it.
        """
        _require_keep(keep_checkpoints)
        root = require_run(folder)
        asked_environment = plain(this_environment() if environment is None else environment)
        with disk_errors(root, caller="RunWriter.resume"):
            lock = FolderLock(root, caller="RunWriter.resume")
            try:
                _require_config(root, config, may_differ)
                _cut(root, step)
                _prune(root, keep_checkpoints)  # a kill may have come between a checkpoint and this
                _rewrite_config(root, step, config, asked_environment)
                return cls(root, lock, layers=layers, keep_checkpoints=keep_checkpoints)
            except BaseException:
                lock.release()
                raise

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_metrics(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Append the one line of `step`, visible at once; `nan` and infinities become `null`.

        Raises:
            ScoregramError: If the step has its line already, a value is not one number, or the disk is full; the file
                then ends with the line before.
        """
        self._require_step(step, caller="write_metrics")
        if step <= self._last_step:
            remedy = "Pass all scalars of a step in one call."
            fail("write_metrics", f"steps must increase beyond {self._last_step}", step, remedy)
        line = metrics_line(step, scalars)
        with disk_errors(self.folder / layout.METRICS, caller="write_metrics"):
            size = os.fstat(self._metrics).st_size
            try:
                write_all(self._metrics, line)
            except BaseException:
                os.ftruncate(self._metrics, size)
                raise
        self._last_step = step

    def write_groups(self, step: int, groups: Sequence[GroupRecord]) -> None:
        """Write a part file with the groups of `step`; each further call for one step writes a further part."""
        self._require_step(step, groups, caller="write_groups")
        if groups:
            self._write_part(layout.GROUPS, step, groups_to_table(groups, self.layers))

    def write_batches(self, step: int, batches: Sequence[BatchRecord]) -> None:
        """Write a part file with the whole batches of `step`; each further call for one step writes a further part."""
        self._require_step(step, batches, caller="write_batches")
        if batches:
            self._write_part(layout.BATCHES, step, batches_to_table(batches))

    def write_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Write a part file with the rollouts of `step`; each further call for one step writes a further part."""
        self._require_step(step, rollouts, caller="write_rollouts")
        if rollouts:
            self._write_part(layout.ROLLOUTS, step, rollouts_to_table(rollouts))

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A temporary folder to write into, which becomes `checkpoints/step-N` when the block ends well.

        After that, older checkpoints beyond `keep_checkpoints` are removed.

        Raises:
            ScoregramError: If there is one for this step, or the disk is full; older checkpoints stay as they are.
        """
        self._require_step(step, caller="checkpoint")
        path = self.folder / layout.CHECKPOINTS / layout.checkpoint_name(step)
        if path.exists():
            fail("checkpoint", f"{path} must be new", "one that exists", "Write one checkpoint a step.")
        temporary = layout.temporary_name(path)
        try:
            with disk_errors(path, caller="checkpoint"):
                make_folder(path.parent)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
            yield temporary
            with disk_errors(path, caller="checkpoint"):
                os.fsync(self._metrics)
                sync_tree(temporary)
                temporary.replace(path)
                sync_folder(path.parent)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            full = disk_is_full(error)
            if full is not None:
                fail("checkpoint", f"{path} must be writable", full.strerror, remedy_for(full.errno))
            raise
        with disk_errors(path.parent, caller="checkpoint"):
            _prune(self.folder, self.keep_checkpoints)

    def close(self) -> None:
        """Force the metrics to the disk and give the folder up; more than once does no harm."""
        if self._metrics >= 0:
            with disk_errors(self.folder / layout.METRICS, caller="RunWriter.close"):
                try:
                    os.fsync(self._metrics)
                finally:
                    os.close(self._metrics)
                    self._metrics = -1
                    self._lock.release()

    def _require_step(
        self, step: int, records: Sequence[GroupRecord | BatchRecord | RolloutRecord] = (), *, caller: str
    ) -> None:
        if self._metrics < 0:
            fail(caller, f"{self.folder} must be open", "a writer that was closed", "Resume the run.")
        if not 0 <= step <= layout.LARGEST_STEP:
            fail(caller, f"step must lie in [0, {layout.LARGEST_STEP}]", step, "Count steps from 0 or 1.")
        for record in records:
            if record.step != step:
                fail(caller, f"all records must be of step {step}", record.step, "Write one step at a time.")

    def _write_part(self, name: str, step: int, table: pa.Table) -> None:
        path = self.folder / name / layout.part_name(step, self._parts[name, step])
        with disk_errors(path, caller=f"write_{name}"):
            make_folder(path.parent)
            write_atomically(path, table_to_bytes(table))
        self._parts[name, step] += 1


def _clear(root: Path, *, overwrite: bool) -> None:
    """Make room for a new run; the old config stays until the new one replaces it, so that a kill leaves a run."""
    is_run = (root / layout.CONFIG).is_file()
    others = [path.name for path in sorted(root.iterdir()) if not path.name.startswith(layout.TEMPORARY)]
    if others and not (is_run and overwrite):
        remedy = "Resume it, overwrite it, or choose another folder." if is_run else "Choose a new or an empty folder."
        got = "a run" if is_run else ", ".join(others[:3]) + (" and more" if len(others) > 3 else "")
        fail("RunWriter.create", f"{root} must be empty", got, remedy)
    if is_run:
        read_config(root)  # a folder with somebody else's config.yaml is not ours to clear
    for path in [*layout.temporaries(root), *(root / name for name in layout.OWN if name != layout.CONFIG)]:
        if path.exists():
            remove(path)


def _require_config(root: Path, config: Mapping[str, Any] | None, may_differ: Sequence[str]) -> None:
    stored = read_config(root)["config"]
    found = [] if config is None else differences(stored, config, may_differ)
    if found:
        got = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        fail(
            "RunWriter.resume", f"{root} must have the same config", got, "Ask for the same, or choose another folder."
        )


def _require_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        fail("RunWriter", "keep_checkpoints must be at least 1", keep, "Pass None to keep all.")


def _prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, oldest first."""
    found = list(layout.checkpoints(root).values())
    for path in found[: len(found) - keep] if keep and keep < len(found) else ():
        remove(path)


def _cut(root: Path, step: int | None) -> None:
    """Remove what is unfinished and what is later than `step`.

    Checkpoints go first, newest first: killed halfway, the newest one left still has all that was written before it.
    """
    last = layout.LARGEST_STEP if step is None else step
    for path in [path for at, path in reversed(layout.checkpoints(root).items()) if at > last]:
        remove(path)
    for path in list(layout.temporaries(root)):
        remove(path)
    for folder in (root / name for name in layout.TABLES):
        for path in [path for at, path in layout.parts(folder) if at > last]:
            path.unlink()
        if folder.is_dir():
            sync_folder(folder)
    _cut_metrics(root / layout.METRICS, last)


def _cut_metrics(path: Path, last: int) -> None:
    """Lines up to step `last` are the beginning of the file: cutting its length is one atomic operation."""
    if path.exists():
        read = read_metrics(path)
        end = max((end for end, line in zip(read.ends, read.lines, strict=True) if line["step"] <= last), default=0)
        os.truncate(path, end)
        sync_file(path)


def _rewrite_config(
    root: Path, step: int | None, config: Mapping[str, Any] | None, environment: Mapping[str, Any]
) -> None:
    """The config asked for now; steps made by other versions or on another machine than those before are told apart."""
    stored = read_config(root)
    last = layout.LARGEST_STEP if step is None else step
    resumed = [each for each in stored.get("resumed", []) if each["step"] < last]
    before = resumed[-1]["environment"] if resumed else stored["environment"]
    if environment != before:
        resumed.append({"step": _last_step(root) if step is None else step, "environment": environment})
    text = config_text(config or stored["config"], stored["environment"], resumed)
    if text != (root / layout.CONFIG).read_bytes():
        write_atomically(root / layout.CONFIG, text)


def _last_step(root: Path) -> int:
    lines = read_metrics(root / layout.METRICS).lines
    return int(lines[-1]["step"]) if lines else -1
