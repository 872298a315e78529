"""Writing a run: after a kill at any moment the folder can be read, and resumed to the same bytes."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from scoregram.checks import fail
from scoregram.runs import disk
from scoregram.runs.config import config_differences, config_text, plain_values, read_config, require_run
from scoregram.runs.config import environment as this_environment
from scoregram.runs.metrics import metrics_line, read_metrics
from scoregram.runs.records import (
    BatchRecord,
    GroupRecord,
    LayerPrecision,
    RolloutRecord,
    UpdateRecord,
    batches_to_table,
    groups_to_table,
    rollouts_to_table,
    table_to_bytes,
    updates_to_table,
)


class RunWriter:
    """The only writer of a run folder. `create` or `resume` opens it, `close` or a `with` block closes it.

    Write the metrics, groups and rollouts of a step before its checkpoint: a checkpoint promises that everything up to
    its step is on the disk.
    """

    def __init__(
        self, folder: Path, lock: disk.FolderLock, *, layers: LayerPrecision, keep_checkpoints: int | None
    ) -> None:
        self.folder = folder
        self.layers: LayerPrecision = layers
        self.keep_checkpoints = keep_checkpoints
        self._lock = lock
        self._metrics = os.open(folder / disk.METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._last_step = _last_step(folder)
        self._parts = Counter((name, step) for name in disk.TABLE_FOLDERS for step, _ in disk.parts(folder / name))

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
        caller: str = "RunWriter.create",
    ) -> "RunWriter":
        """Start a run in `folder`, which is created if it does not exist.

        Args:
            folder: New, empty, or with `overwrite` the folder of an older run.
            config: Everything needed to run it again, with the seed: mappings, sequences, numbers, strings.
            overwrite: Remove the older run first. Files that scoregram did not write stay.
            layers: Precision of per-layer Grams; `none` leaves them out.
            keep_checkpoints: Keep this many of the newest checkpoints, at least one; None keeps all.
            environment: Versions, source and machine; those of this process by default.
            caller: What an error names: the function or the option that the user gave.

        Raises:
            ScoregramError: If the folder is not empty, is locked or cannot be written, or if YAML cannot hold a value
                of the config.
        """
        _require_keep(keep_checkpoints)
        text = config_text(config, this_environment() if environment is None else environment)
        root = disk.require_path(folder, caller=caller)
        with disk.disk_errors(root, caller=caller):
            disk.make_folder(root)
            lock = disk.FolderLock(root, caller=caller)
            try:
                _clear(root, overwrite=overwrite, caller=caller)
                disk.write_atomically(root / disk.CONFIG_FILE, text)
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
        """Continue after `step`: everything later is removed, as if the run had been interrupted there.

        Args:
            folder: Folder of the run.
            step: Last step to keep, usually that of the latest checkpoint; -1 keeps none, None keeps all complete ones.
            config: If given, it must equal the config of the run, which it then replaces.
            may_differ: Top-level keys of the config that may differ, such as the number of steps.
            layers: As in `create`.
            keep_checkpoints: As in `create`.
            environment: As in `create`; recorded in the config where it differs from the previous one.

        Raises:
            ScoregramError: If the folder holds no run, the configs differ, or another process is writing to it.
        """
        _require_keep(keep_checkpoints)
        root = require_run(folder)
        current_environment = plain_values(this_environment() if environment is None else environment)
        with disk.disk_errors(root, caller="RunWriter.resume"):
            lock = disk.FolderLock(root, caller="RunWriter.resume")
            try:
                require_same_config(root, config, may_differ)
                _cut(root, step)
                _prune(root, keep_checkpoints)  # the kill may have come after a checkpoint and before its pruning
                _rewrite_config(root, step, config, current_environment)
                return cls(root, lock, layers=layers, keep_checkpoints=keep_checkpoints)
            except BaseException:
                lock.release()
                raise

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_metrics(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Append the line of `step`, visible to readers at once; `nan` and infinities become `null`.

        Raises:
            ScoregramError: If the step already has a line, a value is not one number, or the disk is full; the file
                then still ends with the previous line.
        """
        self._require_step(step, caller="write_metrics")
        if step <= self._last_step:
            remedy = "Pass all scalars of a step in one call."
            fail("write_metrics", f"steps must increase beyond {self._last_step}", step, remedy)
        line = metrics_line(step, scalars)
        with disk.disk_errors(self.folder / disk.METRICS, caller="write_metrics"):
            size = os.fstat(self._metrics).st_size
            try:
                disk.write_all(self._metrics, line)
            except BaseException:
                os.ftruncate(self._metrics, size)
                raise
        self._last_step = step

    def write_groups(self, step: int, groups: Sequence[GroupRecord]) -> None:
        """Write a part file with the groups of `step`; another call for the same step writes another part."""
        self._require_step(step, groups, caller="write_groups")
        if groups:
            self._write_part(disk.GROUPS, step, groups_to_table(groups, self.layers))

    def write_batches(self, step: int, batches: Sequence[BatchRecord]) -> None:
        """Write a part file with the whole batches of `step`; another call for the same step writes another part."""
        self._require_step(step, batches, caller="write_batches")
        if batches:
            self._write_part(disk.BATCHES, step, batches_to_table(batches))

    def write_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Write a part file with the rollouts of `step`; another call for the same step writes another part."""
        self._require_step(step, rollouts, caller="write_rollouts")
        if rollouts:
            self._write_part(disk.ROLLOUTS, step, rollouts_to_table(rollouts))

    def write_updates(self, step: int, updates: Sequence[UpdateRecord]) -> None:
        """Write a part file with the sketch of the gradient of `step`; a further call writes another part."""
        self._require_step(step, updates, caller="write_updates")
        if updates:
            self._write_part(disk.UPDATES, step, updates_to_table(updates))

    def write_remarks(self, remarks: Mapping[str, str]) -> None:
        """Store what a reader must know before trusting the numbers, in `config.yaml`; the report shows it.

        Args:
            remarks: Kind → sentence. A sentence replaces the earlier one of its kind, an empty one removes it; other
                kinds stay.
        """
        stored = read_config(self.folder)
        merged = {kind: text for kind, text in (stored["remarks"] | dict(remarks)).items() if text}
        if merged != stored["remarks"]:
            text = config_text(stored["config"], stored["environment"], stored["resumed"], merged)
            with disk.disk_errors(self.folder / disk.CONFIG_FILE, caller="write_remarks"):
                disk.write_atomically(self.folder / disk.CONFIG_FILE, text)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A temporary folder to write into; it becomes `checkpoints/step-N` when the block ends without an exception.

        `SHA256SUMS`, with a hash of every file, is written last. Then older checkpoints beyond `keep_checkpoints` are
        removed.

        Raises:
            ScoregramError: If this step has a checkpoint, or the disk is full; older checkpoints stay as they are.
        """
        self._require_step(step, caller="checkpoint")
        path = self.folder / disk.CHECKPOINTS / disk.checkpoint_name(step)
        if path.exists():
            fail("checkpoint", f"{path} must be new", "one that exists", "Write one checkpoint per step.")
        temporary = disk.temporary_name(path)
        try:
            with disk.disk_errors(path, caller="checkpoint"):
                disk.make_folder(path.parent)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
            yield temporary
            with disk.disk_errors(path, caller="checkpoint"):
                disk.write_checksums(temporary)
                os.fsync(self._metrics)
                disk.sync_tree(temporary)
                temporary.replace(path)
                disk.sync_folder(path.parent)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            full = disk.disk_is_full(error)
            if full is not None:
                fail("checkpoint", f"{path} must be writable", full.strerror, disk.remedy_for(full.errno))
            raise
        with disk.disk_errors(path.parent, caller="checkpoint"):
            _prune(self.folder, self.keep_checkpoints)

    def close(self) -> None:
        """Flush the metrics to the disk and release the folder; further calls do nothing."""
        if self._metrics >= 0:
            with disk.disk_errors(self.folder / disk.METRICS, caller="RunWriter.close"):
                try:
                    os.fsync(self._metrics)
                finally:
                    os.close(self._metrics)
                    self._metrics = -1
                    self._lock.release()

    def _require_step(
        self,
        step: int,
        records: Sequence[GroupRecord | BatchRecord | RolloutRecord | UpdateRecord] = (),
        *,
        caller: str,
    ) -> None:
        if self._metrics < 0:
            remedy = "Open it again with RunWriter.resume."
            fail(caller, f"{self.folder} must be open", "a writer that was closed", remedy)
        if not 0 <= step <= disk.LARGEST_STEP:
            fail(caller, f"step must lie in [0, {disk.LARGEST_STEP}]", step, "Count steps from 0 or 1.")
        for record in records:
            if record.step != step:
                fail(caller, f"all records must be of step {step}", record.step, "Write one step at a time.")

    def _write_part(self, name: str, step: int, table: pa.Table) -> None:
        path = self.folder / name / disk.part_name(step, self._parts[name, step])
        with disk.disk_errors(path, caller=f"write_{name}"):
            disk.make_folder(path.parent)
            disk.write_atomically(path, table_to_bytes(table))
        self._parts[name, step] += 1


def _clear(root: Path, *, overwrite: bool, caller: str) -> None:
    """Remove the older run, except its config: a kill before the new config is written still leaves a readable run."""
    is_run = (root / disk.CONFIG_FILE).is_file()
    others = [path.name for path in sorted(root.iterdir()) if not path.name.startswith(disk.TEMPORARY)]
    if others and not (is_run and overwrite):
        remedy = (
            "Resume it, overwrite it, or choose another folder (overwrite=True, --overwrite)."
            if is_run
            else "Choose a new or an empty folder."
        )
        got = "a run" if is_run else ", ".join(others[:3]) + (" and more" if len(others) > 3 else "")
        fail(caller, f"{root} must be empty", got, remedy)
    if is_run:
        read_config(root)  # raises for a config.yaml that scoregram did not write: that folder is not cleared
    for path in [*disk.temporaries(root), *(root / name for name in disk.RUN_FILES if name != disk.CONFIG_FILE)]:
        if path.exists():
            disk.remove(path)


def require_same_config(
    folder: Path | str, config: Mapping[str, Any] | None, may_differ: Sequence[str] = (), *, caller: str = "resume"
) -> None:
    """Raise if `config` differs from the config of the run in `folder`, except under the keys in `may_differ`."""
    root = require_run(folder)
    stored = read_config(root)["config"]
    differing = [] if config is None else config_differences(stored, config, may_differ)
    if differing:
        got = "; ".join(differing[:3]) + (f"; and {len(differing) - 3} more" if len(differing) > 3 else "")
        remedy = "Leave these settings out to use those of the run, or choose another folder."
        fail(caller, f"{root} must have the same config", got, remedy)


def _require_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        fail("RunWriter", "keep_checkpoints must be at least 1", keep, "Pass None to keep all.")


def _prune(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, oldest first."""
    complete = list(disk.checkpoints(root).values())
    for path in complete[: len(complete) - keep] if keep and keep < len(complete) else ():
        disk.remove(path)


def _cut(root: Path, step: int | None) -> None:
    """Remove everything unfinished and everything later than `step`.

    Checkpoints are removed first, the newest first: after a kill halfway, the newest remaining checkpoint still has all
    the records before it.
    """
    last = disk.LARGEST_STEP if step is None else step
    for path in [path for at, path in reversed(disk.checkpoints(root).items()) if at > last]:
        disk.remove(path)
    for path in list(disk.temporaries(root)):
        disk.remove(path)
    for folder in (root / name for name in disk.TABLE_FOLDERS):
        for path in [path for at, path in disk.parts(folder) if at > last]:
            path.unlink()
        if folder.is_dir():
            disk.sync_folder(folder)
    _cut_metrics(root / disk.METRICS, last)


def _cut_metrics(path: Path, last: int) -> None:
    """Remove the lines after step `last`. They are the end of the file, so one atomic `truncate` does it."""
    if path.exists():
        read = read_metrics(path)
        end = max((end for end, line in zip(read.ends, read.lines, strict=True) if line["step"] <= last), default=0)
        os.truncate(path, end)
        disk.sync_file(path)


def _rewrite_config(
    root: Path, step: int | None, config: Mapping[str, Any] | None, environment: Mapping[str, Any]
) -> None:
    """Store the new config, and the environment of the steps to come where it differs from the previous one."""
    stored = read_config(root)
    last = disk.LARGEST_STEP if step is None else step
    resumed = [entry for entry in stored["resumed"] if entry["step"] < last]
    before = resumed[-1]["environment"] if resumed else stored["environment"]
    if environment != before:
        resumed.append({"step": _last_step(root) if step is None else step, "environment": environment})
    text = config_text(config or stored["config"], stored["environment"], resumed, stored["remarks"])
    if text != (root / disk.CONFIG_FILE).read_bytes():
        disk.write_atomically(root / disk.CONFIG_FILE, text)


def _last_step(root: Path) -> int:
    lines = read_metrics(root / disk.METRICS).lines
    return int(lines[-1]["step"]) if lines else -1
