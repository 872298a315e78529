"""A dump on disk, recognised and read as one stream of rollouts in bounded memory.

A file is a stream of raw records: lines of JSON, rows of Parquet, entries of a torch file. Reading continues after a
record that is broken. Only a few records are in memory at a time, except for torch files, which hold one step each and
are loaded whole.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from scoregram.checks import ScoregramError, fail, lookup
from scoregram.integrations.dumps.formats import FORMATS, Format
from scoregram.integrations.dumps.records import DumpedRollout, Location
from scoregram.runs import LARGEST_STEP, require_path

_CALLER = "measure --rollouts"
_PICKLES = (".pkl", ".pickle")
_ROWS_AT_A_TIME = 16
"""Rows of a Parquet file that are converted to Python objects at a time."""
_TRIED_RECORDS = 100
"""Most records of a file to try when its format is recognised; the first readable one decides."""
UNPACKED_BYTES = 4 << 30
"""Default of `--unpacked-mb`."""
_USUAL_RATIO = 64
"""A row group or file may always unpack to this many times its size on disk."""
_VALUE_BYTES = 40
"""Memory of a number in a Python list."""


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


def json_lines(path: Path, **_: Any) -> Iterator[RawRecord]:
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


def parquet_rows(path: Path, *, unpacked_bytes: int = UNPACKED_BYTES, **_: Any) -> Iterator[RawRecord]:
    """Rows of a Parquet file; a part that cannot be read, or is too large, counts as one broken record."""
    size, line = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
        texts = _texts_that_may_expand(metadata, size, unpacked_bytes)
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
            total = max(metadata.num_rows, 1)
            for number in range(file.num_row_groups):
                first = line
                for row, reason in _rows_of_group(file, number, size, unpacked_bytes):
                    line += 1
                    yield RawRecord(line, min(size * line // total, size), row, reason)
                line = first + metadata.row_group(number).num_rows
    except Exception as error:  # damaged files raise almost anything
        yield RawRecord(line + 1, size, reason=f"an incomplete or invalid Parquet file ({_first_line(error)})")


def _columns(metadata: pq.FileMetaData, group: int) -> list[pq.ColumnChunkMetaData]:
    return [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]


def _texts_that_may_expand(metadata: pq.FileMetaData, size: int, limit: int) -> list[str]:
    """Columns of text that may unpack to more than is allowed: a text that recurs is stored once, in a dictionary."""
    columns = [column for group in range(metadata.num_row_groups) for column in _columns(metadata, group)]
    texts = [column for column in columns if column.physical_type == "BYTE_ARRAY"]
    large = [text for text in texts if _too_large(text.num_values * text.total_uncompressed_size, size, limit)]
    return sorted({text.path_in_schema for text in large})


def _rows_of_group(file: pq.ParquetFile, number: int, size: int, limit: int) -> Iterator[tuple[Any, str]]:
    """Rows of a row group, each as a mapping or the reason why it cannot be one; ends where they become too large."""
    columns = _columns(file.metadata, number)
    unpacked = sum(max(_VALUE_BYTES * column.num_values, column.total_uncompressed_size) for column in columns)
    if reason := _too_large(unpacked, size, limit):
        yield None, f"row group {number + 1} {reason}"
        return
    texts = 0
    for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=[number]):
        texts += sum(map(_text_bytes, batch.columns))
        if reason := _too_large(texts, size, limit):
            yield None, f"row group {number + 1}, whose text is repeated, {reason}"
            return
        yield from _rows_of_batch(batch)


def _text_bytes(array: pa.Array) -> int:
    """Bytes of the texts of a column that was read with its dictionary; 0 for any other column."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return int(pc.call_function("sum", [lengths]).as_py() or 0)
    if isinstance(array, pa.StructArray):
        return sum(map(_text_bytes, array.flatten()))
    return _text_bytes(array.flatten()) if isinstance(array, pa.ListArray | pa.LargeListArray) else 0


def _rows_of_batch(batch: pa.RecordBatch) -> Iterator[tuple[Any, str]]:
    """Each row as a mapping, or the reason why it cannot be one."""
    try:
        yield from ((row, "") for row in batch.to_pylist())
        return
    except Exception:  # text that is not UTF-8, dates outside the calendar, …: find the rows that have it
        pass
    for i in range(len(batch)):
        try:
            yield batch.slice(i, 1).to_pylist()[0], ""
        except Exception as error:
            yield None, f"a value that Python cannot represent ({_first_line(error)})"


def _too_large(unpacked: int, packed: int, limit: int) -> str:
    """Why something may not be unpacked, as the end of a sentence; empty if it may."""
    if unpacked <= max(limit, _USUAL_RATIO * packed):
        return ""
    return f"that unpacks from {packed:,} bytes to {unpacked / 2**20:,.0f} MB (raise --unpacked-mb to read it)"


def torch_samples(
    path: Path, *, allow_pickle: bool = False, unpacked_bytes: int = UNPACKED_BYTES
) -> Iterator[RawRecord]:
    """Entries of the list `samples` in a torch file, which is loaded without running code unless that is allowed.

    Raises:
        ScoregramError: If the file holds objects that need a pickle, and pickles are not allowed.
    """
    size = path.stat().st_size
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if reason := _too_large(unpacked, size, unpacked_bytes):
                yield RawRecord(1, size, reason=f"a torch file {reason}")
                return
        content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if not allow_pickle and "GLOBAL" in str(error):  # otherwise the file is damaged
            got = "a file with more than tensors, numbers and text"
            remedy = "Pass --allow-pickle if you trust its author: loading it runs the code inside."
            fail(f"measure {path}", "a file must be readable without a pickle", got, remedy)
        yield RawRecord(1, size, reason=f"an invalid torch file ({_first_line(error)})")
        return
    except Exception as error:  # damaged files raise almost anything
        yield RawRecord(1, size, reason=f"an invalid torch file ({_first_line(error)})")
        return
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        yield RawRecord(1, size, reason="a torch file without a list called samples")
        return
    step = content.get("rollout_id")
    for line, sample in enumerate(samples, start=1):
        record = {"rollout_step": step, **sample} if isinstance(sample, dict) else sample
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
    unpacked_bytes: int = UNPACKED_BYTES
    """Largest unpacked size of a row group of Parquet, or of a torch file."""
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
            options = {"allow_pickle": self.allow_pickle, "unpacked_bytes": self.unpacked_bytes}
            for raw in CONTAINERS[self.format.suffix](file, **options):
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
        try:
            rollouts = list(self.format.parse(raw.record, location))
            for rollout in rollouts:
                repr(rollout.prompt)  # grouping hashes it, which fails for messages that are nested too deeply
        except ScoregramError:
            raise
        except Exception as error:  # values that no reader foresaw
            fail(str(location), "must be readable", f"{type(error).__name__} ({_first_line(error)})", remedy)
        for rollout in rollouts:
            if not 0 <= (rollout.step or 0) <= LARGEST_STEP:
                fail(str(location), f"step must lie in [0, {LARGEST_STEP}]", rollout.step, remedy)
        return rollouts


def open_dump(
    path: Path,
    *,
    name: str = "auto",
    allow_pickle: bool = False,
    strict: bool = False,
    unpacked_bytes: int = UNPACKED_BYTES,
) -> Dump:
    """The dump at `path`, its format recognised by the first readable record.

    Args:
        path: A file, or a folder, which is searched at any depth.
        name: A key of `FORMATS`, or `auto`.
        allow_pickle: Load torch files that hold more than tensors, numbers and text.
        strict: Raise for a broken record.
        unpacked_bytes: Largest unpacked size of a row group of Parquet, or of a torch file.

    Raises:
        ScoregramError: If the path does not exist, is empty, is a pickle, or no format matches; the message lists the
            formats.
    """
    if not require_path(path, caller=_CALLER).exists():
        fail(_CALLER, "the path must exist", path, "Check it; relative paths start at the current folder.")
    if path.suffix in _PICKLES:
        remedy = f"Convert it to one of: {_formats_text()}."
        fail(_CALLER, "must be a dump of a known format", f"the pickle {path}", remedy)
    names = list(FORMATS) if name == "auto" else [name]
    seen: list[str] = []
    for candidate in names:
        row = lookup(FORMATS, candidate, kind="measure --format")
        files = _files_of_format(path, row)
        options = {"allow_pickle": allow_pickle, "unpacked_bytes": unpacked_bytes}
        first = _first_record(files, row, options)
        if first is not None and not first.reason and (row.recognises(first.record) or name != "auto"):
            return Dump(candidate, tuple(files), allow_pickle, strict, unpacked_bytes)
        seen += [f"{files[0]} with {_record_text(first)}"] if files else []
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


def _first_record(files: Sequence[Path], row: Format, options: Mapping[str, Any]) -> RawRecord | None:
    """The first readable record of all files, else the first unreadable one; None without records."""
    unreadable = None
    for file in files:
        for raw in islice(CONTAINERS[row.suffix](file, **options), _TRIED_RECORDS):
            if not raw.reason:
                return raw
            unreadable = unreadable or raw
    return unreadable


def _record_text(raw: RawRecord | None) -> str:
    if raw is None:
        return "no record"
    if raw.reason:
        return f"no readable record: {raw.reason}"
    if isinstance(raw.record, dict):
        return "the fields " + ", ".join(list(map(str, raw.record))[:8])[:200]
    return f"a {type(raw.record).__name__}"


def _fields_text(row: Format) -> str:
    return " or ".join(" + ".join(fields) for fields in row.fields)


def _formats_text(names: Sequence[str] = tuple(FORMATS)) -> str:
    """Every format with its files and fields."""
    rows = [FORMATS[name] for name in names]
    return "; ".join(f"{name} ({row.names[0]}: {_fields_text(row)})" for name, row in zip(names, rows, strict=True))
