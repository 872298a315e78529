"""A dump on disk, recognised and read as one stream of rollouts in bounded memory.

A file is a stream of raw records: lines of JSON, rows of Parquet, entries of a torch file. Reading continues after a
record that is broken. Only a few records are in memory at a time, except for torch files, which hold one step each and
are loaded whole.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scoregram.checks import ScoregramError, fail, lookup
from scoregram.integrations.dumps.formats import FORMATS, Format
from scoregram.integrations.dumps.records import DumpedRollout, Location
from scoregram.runs import LARGEST_STEP

_CALLER = "measure --rollouts"
_PICKLES = (".pkl", ".pickle")
_ROWS_AT_A_TIME = 16
"""Rows of a Parquet file that are converted to Python objects at a time."""
_TRIED_RECORDS = 100
"""Most records of a file to try when its format is recognised; the first readable one decides."""


@dataclass(frozen=True)
class RawRecord:
    """A record as the file has it, before its fields are checked."""

    line: int
    """From 1."""
    end: int
    """Bytes of the file up to the end of this record; an estimate for compressed files."""
    record: Any = None
    reason: str = ""
    """Why it could not be read; empty if it could."""


def json_lines(path: Path, *, allow_pickle: bool = False) -> Iterator[RawRecord]:
    """Lines of JSON; blank lines are skipped."""
    end = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            end += len(raw)
            text = raw.removeprefix(b"\xef\xbb\xbf").strip() if line == 1 else raw.strip()
            if not text:
                continue
            try:
                yield RawRecord(line, end, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield RawRecord(line, end, reason=f"invalid JSON ({_first_line(error)})")


def parquet_rows(path: Path, *, allow_pickle: bool = False) -> Iterator[RawRecord]:
    """Rows of a Parquet file; a file that cannot be read is one broken record."""
    size, line = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    line += 1
                    yield RawRecord(line, size * line // total, row)
    except (pa.ArrowException, OSError) as error:
        yield RawRecord(line + 1, size, reason=f"an incomplete or invalid Parquet file ({_first_line(error)})")


def torch_samples(path: Path, *, allow_pickle: bool = False) -> Iterator[RawRecord]:
    """Entries of the list `samples` in a torch file, which is loaded without running code unless that is allowed.

    Raises:
        ScoregramError: If the file holds objects that need a pickle, and pickles are not allowed.
    """
    size = path.stat().st_size
    try:
        content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except (OSError, EOFError, RuntimeError) as error:
        yield RawRecord(1, size, reason=f"no torch file ({_first_line(error)})")
        return
    except Exception as error:  # unpickling foreign classes can raise anything
        if not allow_pickle:
            got = "a file with more than tensors, numbers and text"
            remedy = "Pass --allow-pickle if you trust its author: loading it runs the code inside."
            fail(f"measure {path}", "a file must be readable without a pickle", got, remedy)
        yield RawRecord(1, size, reason=f"no torch file ({_first_line(error)})")
        return
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        yield RawRecord(1, size, reason="a torch file without a list called samples")
        return
    step = content.get("rollout_id")
    for line, sample in enumerate(samples, start=1):
        record = {"rollout_step": step, **sample} if isinstance(sample, Mapping) else sample
        yield RawRecord(line, size * line // len(samples), record)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


CONTAINERS: MappingProxyType[str, Callable[..., Iterator[RawRecord]]] = MappingProxyType(
    {".jsonl": json_lines, ".parquet": parquet_rows, ".pt": torch_samples}
)
"""Suffix of a file → its reader."""


@dataclass
class Dump:
    """The files of a dump; iterating reads all of them from the beginning, in order."""

    name: str
    """Key of the format in `FORMATS`."""
    files: tuple[Path, ...]
    allow_pickle: bool = False
    strict: bool = False
    """Raise for a broken record instead of skipping it."""
    on_broken: Callable[[str], object] = field(default=lambda message: None)
    """Called for every broken record that is skipped, with a sentence that names file and line."""
    bytes_read: int = 0
    broken: int = 0

    @property
    def format(self) -> Format:
        """Its row of the table."""
        return FORMATS[self.name]

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[DumpedRollout]:
        self.bytes_read = self.broken = before = 0
        for file in self.files:
            for raw in CONTAINERS[self.format.suffix](file, allow_pickle=self.allow_pickle):
                try:
                    rollouts = self._parsed_rollouts(raw, Location(file, raw.line))
                except ScoregramError as error:
                    if self.strict:
                        raise
                    self.broken += 1
                    self.on_broken(str(error))
                    rollouts = []
                self.bytes_read = before + raw.end
                yield from rollouts
            before += file.stat().st_size
            self.bytes_read = before

    def _parsed_rollouts(self, raw: RawRecord, location: Location) -> list[DumpedRollout]:
        """The rollouts of one record: all of them, or an error."""
        remedy = "Repair or remove this record."
        if raw.reason:
            fail(str(location), "must be readable", raw.reason, remedy)
        if not self.format.recognises(raw.record):
            is_mapping = isinstance(raw.record, dict)
            got = ", ".join(map(str, raw.record)) if is_mapping else f"a {type(raw.record).__name__}"
            fail(str(location), f"must have the fields {_fields_text(self.format)}", got[:200] or "none", remedy)
        rollouts = list(self.format.parse(raw.record, location))
        for rollout in rollouts:
            if not 0 <= (rollout.step or 0) <= LARGEST_STEP:
                fail(str(location), f"step must lie in [0, {LARGEST_STEP}]", rollout.step, remedy)
        return rollouts


def open_dump(path: Path, *, name: str = "auto", allow_pickle: bool = False, strict: bool = False) -> Dump:
    """The dump at `path`, its format recognised by the first readable record.

    Args:
        path: A file, or a folder, which is searched at any depth.
        name: A key of `FORMATS`, or `auto`.
        allow_pickle: Load torch files that hold more than tensors, numbers and text.
        strict: Raise for a broken record.

    Raises:
        ScoregramError: If the path does not exist, is empty, is a pickle, or no format matches; the message lists the
            formats.
    """
    if not path.exists():
        fail(_CALLER, "the path must exist", path, "Check it; relative paths start at the current folder.")
    if path.suffix in _PICKLES:
        remedy = f"Convert it to one of: {_formats_text()}."
        fail(_CALLER, "must be a dump of a known format", f"the pickle {path}", remedy)
    names = list(FORMATS) if name == "auto" else [name]
    seen: list[str] = []
    for candidate in names:
        row = lookup(FORMATS, candidate, kind="measure --format")
        files = _files_of_format(path, row)
        record = _first_readable_record(files, row, allow_pickle) if files else None
        if row.recognises(record) or (name != "auto" and files and record is not None):
            return Dump(candidate, tuple(files), allow_pickle, strict)
        seen += [f"{files[0]} with {_record_text(record)}"] if files else []
    got = "; ".join(dict.fromkeys(seen)) or "no file with such a name"
    remedy = "Check the path, or pass the name of the format as --format."
    return fail(_CALLER, f"{path} must hold one of: {_formats_text(names)}", got, remedy)


def _files_of_format(path: Path, row: Format) -> list[Path]:
    """Files that may be of a format, in the order of the numbers in their names."""
    if path.is_file():
        return [path] if path.suffix == row.suffix else []
    for pattern in row.names:
        matches = [file for file in path.rglob(pattern) if file.is_file()]
        if matches:
            return row.select_files(sorted(matches, key=lambda file: natural_key(file.relative_to(path).as_posix())))
    return []


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """A sort key that compares the numbers in names as numbers.

    Example:
        >>> sorted(["step_10/a", "step_9/a"], key=natural_key)
        ['step_9/a', 'step_10/a']
    """
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]


def _first_readable_record(files: Sequence[Path], row: Format, allow_pickle: bool) -> Any:
    """The first readable record of the first file that has one; None if there is none."""
    for file in files:
        raws = CONTAINERS[row.suffix](file, allow_pickle=allow_pickle)
        readable = next((raw for raw in islice(raws, _TRIED_RECORDS) if not raw.reason), None)
        if readable is not None:
            return readable.record
    return None


def _record_text(record: Any) -> str:
    if record is None:
        return "no readable record"
    if isinstance(record, dict):
        return "the fields " + ", ".join(list(map(str, record))[:8])
    return f"a {type(record).__name__}"


def _fields_text(row: Format) -> str:
    return " or ".join(" + ".join(fields) for fields in row.fields)


def _formats_text(names: Sequence[str] = tuple(FORMATS)) -> str:
    """Every format with its files and fields."""
    rows = [FORMATS[name] for name in names]
    return "; ".join(f"{name} ({row.names[0]}: {_fields_text(row)})" for name, row in zip(names, rows, strict=True))
