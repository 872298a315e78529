"""Reading the log of a run, whichever tool wrote it.

`trainer_state.json` of transformers, JSONL (verl's `file` logger, our `metrics.jsonl`, one mapping a line), CSV,
TensorBoard's event files, and the `.wandb` file of an offline run of Weights & Biases, which is decoded without wandb.
"""

import csv
import io
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scoregram.advice.logs import RECORD_KEYS, STEP_KEYS, RunLog, listed_columns, run_log
from scoregram.checks import fail

_CALLER = "advise"
STATE_FILE = "trainer_state.json"


def read_log(path: Path) -> RunLog:
    """The scalars in a log file, or in the log file of a folder.

    Raises:
        ScoregramError: If there is no such file, no known format, or no step in it.
    """
    file, read = _reader(path)
    try:
        lines = list(read(file))
    except OSError as error:
        fail(_CALLER, f"{file} must be a file that can be read", error.strerror or str(error), "Check its permissions.")
    log = run_log(file.as_posix(), lines)
    if not log.lines:
        _require_step(file, {key: value for line in lines for key, value in line.items()})
        fail(_CALLER, f"{file} must hold the scalars of at least one step", "no readable record", _STEP_REMEDY)
    return replace(log, remarks=tuple(unread_events(file, log))) if read is tensorboard_lines else log


_STEP_REMEDY = f"Each record needs the number of its step as '{STEP_KEYS[0]}'."


def _require_step(path: Path, known: Mapping[str, Any]) -> None:
    """Raise with the columns that a log has, if none of them is the step; `known` maps a column to a value of it."""
    if not known:
        return
    requirement, steps = f"{path} must hold the scalars of at least one step", (*STEP_KEYS, *RECORD_KEYS)
    for key in steps:
        if key in known:
            fail(_CALLER, requirement, f"no number as '{key}', but {known[key]!r}", _STEP_REMEDY)
    got = f"no record with a step, but the column{'s' * (len(known) > 1)} {listed_columns(list(known))}"
    remedy = f"Name the column with the number of the step '{STEP_KEYS[0]}', or add one."
    fail(_CALLER, requirement, got, remedy)


def _reader(path: Path) -> tuple[Path, Callable[[Path], Iterable[Mapping[str, Any]]]]:
    """The file to read, and the function that reads it."""
    if path.is_dir():
        return _file_in(path)
    if not path.exists():
        fail(_CALLER, "needs a run folder or a log", f"no such file: {path}", "Check the path.")
    if "tfevents" in path.name:
        return path, tensorboard_lines
    read = LOG_READERS.get(path.suffix)
    if read is None:
        known = ", ".join(sorted(LOG_READERS))
        got = path.suffix or "a name without an ending"
        fail(_CALLER, f"{path.name} must be a log ({known}, or TensorBoard's events)", got, "Convert it.")
    return path, read


def _file_in(folder: Path) -> tuple[Path, Callable[[Path], Iterable[Mapping[str, Any]]]]:
    states = sorted(folder.glob(f"**/{STATE_FILE}"), key=lambda path: path.stat().st_mtime)
    if states:
        _require_one_run(folder, {_training_folder(path) for path in states})
        return states[-1], state_lines
    if any(folder.glob("**/*tfevents*")):
        return folder, tensorboard_lines
    for pattern in ("**/*.wandb", "*.jsonl", "*.csv"):
        found = list({path.resolve(): path for path in sorted(folder.glob(pattern))}.values())  # links to a run are it
        if found:
            _require_one_run(folder, set(found))
            return found[-1], LOG_READERS[found[-1].suffix]
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
    return fail(
        _CALLER, f"{folder} must hold a run or a log", names, f"Point it at {STATE_FILE}, a JSONL or a CSV file."
    )


def _training_folder(state: Path) -> Path:
    """The output folder of the training whose checkpoint, or end, wrote this state."""
    folder = state.parent
    return folder.parent if folder.name.startswith("checkpoint-") else folder


def _require_one_run(folder: Path, runs: Set[Path]) -> None:
    """Raise if a folder holds the logs of several runs: which one is meant is not known, and none is like their mix."""
    if len(runs) > 1:
        names = ", ".join(str(run.relative_to(folder)) for run in sorted(runs)[:8])
        fail(_CALLER, f"{folder} must hold the log of one run", names, "Point it at one of them.")


def state_lines(path: Path) -> list[Mapping[str, Any]]:
    """`log_history` of transformers' trainer state."""
    state = _parsed(path, _text(path))
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        fail(_CALLER, f"{path} must have log_history", type(history).__name__, f"Pass {STATE_FILE} of a checkpoint.")
    return [line for line in history if isinstance(line, dict)]


def jsonl_scalars(path: Path) -> Iterator[Mapping[str, Any]]:
    """One mapping a line; verl nests the scalars under `data`. A torn last line is skipped.

    Lines end at a newline only: a string in JSON may hold U+2028, at which `str.splitlines` splits too.
    """
    rows = _text(path).removesuffix("\n").split("\n")
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            line = json.loads(row)
        except (ValueError, RecursionError) as error:
            if number == len(rows) and isinstance(error, ValueError):
                return
            fail(_CALLER, f"line {number} of {path} must be JSON", str(error), "Repair or remove it.")
        if isinstance(line, dict):
            yield {**line, **line["data"]} if isinstance(line.get("data"), dict) else line


def csv_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """One row a step; cells that are not numbers are left out. A comma, a semicolon or a tab separates the columns.

    A table that Weights & Biases exports has columns such as `RUN - train/reward`, with `…__MIN` and `…__MAX` beside
    them: the name of the run is removed. Where semicolons separate the columns, a comma may be the decimal point.

    Raises:
        ScoregramError: If it is such a table of several runs, or has no column with the step.
    """
    text = _text(path).lstrip("\r\n")
    try:
        separator = _separator(text)
        table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        names = _scalar_names(path, table.fieldnames or ())
        if not {*STEP_KEYS, *RECORD_KEYS} & set(names.values()):
            _require_step(path, dict.fromkeys(names))
        for row in table:
            cells = {names[key]: cell for key, cell in row.items() if key in names}
            yield {key: value for key, cell in cells.items() if (value := _number(cell, separator)) is not None}
    except csv.Error as error:
        fail(_CALLER, f"{path} must be a table with a row per step", str(error), "Export it again as CSV.")


_SEPARATORS = (",", ";", "\t")


def _separator(text: str) -> str:
    """What separates the columns of a table: under which its head has a step, or else the most columns."""

    def columns(separator: str) -> Sequence[str]:
        return next(csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True), [])

    return max(_SEPARATORS, key=lambda one: (bool({*STEP_KEYS, *RECORD_KEYS} & set(columns(one))), len(columns(one))))


_RUN_ENDS = " - "
_RANGE_ENDS = ("__MIN", "__MAX")


def _scalar_names(path: Path, columns: Iterable[str]) -> dict[str, str]:
    """Column of a CSV file → the scalar it holds."""
    known = [name for name in columns if name]
    runs = {name.rpartition(_RUN_ENDS)[0] for name in known if _RUN_ENDS in name}
    if not runs or not {*STEP_KEYS, *RECORD_KEYS} & set(known):
        return {name: name for name in known}
    if len(runs) > 1:
        fail(_CALLER, f"{path} must hold one run", ", ".join(sorted(runs)), "Export each run to a file of its own.")
    return {name: name.rpartition(_RUN_ENDS)[2] for name in known if not name.endswith(_RANGE_ENDS)}


def tensorboard_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """All scalars of the event files in a folder.

    Raises:
        ScoregramError: If tensorboard is not installed, or the folder holds several runs.
    """
    try:
        module = import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        fail(_CALLER, "TensorBoard's event files need tensorboard", str(error), "pip install tensorboard")
    scalars: dict[Path, dict[str, list[Any]]] = {}
    for folder in sorted({file.parent for file in path.glob("**/*tfevents*")} if path.is_dir() else {path}):
        events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        with suppress(import_module("google.protobuf.message").DecodeError):  # it keeps what is before the damage
            events.Reload()
        scalars[folder] = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    _require_one_run(path, _folders_of_runs(scalars))
    for tags in scalars.values():
        for tag, values in tags.items():
            for event in values:
                yield {"step": event.step, tag: event.value}


def unread_events(path: Path, log: RunLog) -> Iterator[str]:
    """A sentence for each event file of which the end could not be read: TensorBoard stops at a damaged record.

    An event file is a sequence of records: length in 8 bytes, a checksum of 4, the record, a checksum of 4.
    """
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    decode_error = import_module("google.protobuf.message").DecodeError
    for file in sorted(path.glob("**/*tfevents*")) if path.is_dir() else [path]:
        content, place, last = file.read_bytes(), 0, b""
        while place + 16 <= len(content):
            end = place + 16 + struct.unpack_from("<Q", content, place)[0]
            if end > len(content):
                break
            last, place = content[place + 12 : end - 4], end
        try:
            is_read = place == len(content) and event.FromString(last).step <= log.lines[-1]["step"]
        except decode_error:
            is_read = False
        if not is_read:
            told = f"{file.name} is read up to step {log.lines[-1]['step']}: "
            yield told + "the record after it is damaged, or not written completely."


def _folders_of_runs(scalars: Mapping[Path, Mapping[str, Any]]) -> Set[Path]:
    """Folders with the events of different runs: they share a scalar, and none lies within another one that has events.

    One writer may write to several folders, but not one scalar to two of them.
    """
    known = [folder for folder, tags in scalars.items() if tags]
    roots = [folder for folder in known if not set(folder.parents) & set(known)]
    return {one for one in roots for other in roots if one != other and scalars[one].keys() & scalars[other].keys()}


def _number(cell: Any, separator: str = ",") -> float | None:
    if separator == ";" and isinstance(cell, str) and "." not in cell:
        cell = cell.replace(",", ".")  # where a comma is the decimal point, Excel separates columns by semicolons
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _text(path: Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that Excel writes, and without a torn last character.

    Raises:
        ScoregramError: If it is no text in UTF-8.
    """
    content = path.read_bytes()
    try:
        text, place = content.decode("utf-8-sig"), content.find(0)
    except UnicodeDecodeError as error:
        place = error.start
        text = content[:place].decode("utf-8-sig") if error.reason == "unexpected end of data" else ""
        place = -1 if text else place
    if place < 0:
        return text
    is_utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    got = "UTF-16" if is_utf16 else f"the byte 0x{content[place]:02x} at place {place}"
    return fail(_CALLER, f"{path} must be text in UTF-8", got, "Save it again in UTF-8, in Excel as “CSV UTF-8”.")


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return fail(_CALLER, f"{path} must be JSON", str(error), "Restore it from a copy.")


# Weights & Biases, offline: a log of length-prefixed chunks in blocks of 32 KiB (LevelDB's format), each record a
# protobuf message `Record`, of which field 2 is `history`: items (1) with key (1), nested key (2), value as JSON (16).

_BLOCK, _HEADER = 32768, 7
_MAGIC = b":W&B"
_RECORD_HISTORY, _HISTORY_ITEM, _HISTORY_STEP = 2, 1, 2
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_VALUE = 1, 2, 16


def wandb_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The history of an offline run of Weights & Biases, without the package; a torn end is skipped."""
    content = path.read_bytes()
    if content[:4] != _MAGIC:
        fail(_CALLER, f"{path} must be a file of an offline run of Weights & Biases", repr(content[:4]), "Check it.")
    for record in wandb_records(content):
        for field, history in protobuf_fields(record):
            if field == _RECORD_HISTORY and isinstance(history, bytes):
                yield _history_line(history)


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of the file: chunks of kind 1 are whole, 2 begin, 3 continue and 4 end a record."""
    place, parts = _HEADER, b""
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:  # the end of a block is padded
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        chunk = content[place + _HEADER : place + _HEADER + size]
        if kind not in (1, 2, 3, 4) or len(chunk) < size:
            return
        place += _HEADER + size
        parts = chunk if kind in (1, 2) else parts + chunk
        if kind in (1, 4):
            yield parts


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message; numbers are unsigned, everything else is bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield field, value
        elif wire == 2:
            size, place = _varint(message, place)
            yield field, message[place : place + size]
            place += size
        elif wire in (1, 5):
            place += 8 if wire == 1 else 4
        else:
            return


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while place < len(message):
        byte = message[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            break
    return value, place


def _history_line(history: bytes) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for field, content in protobuf_fields(history):
        if field == _HISTORY_ITEM and isinstance(content, bytes):
            parts: dict[int, list[bytes]] = {}
            for number, value in protobuf_fields(content):
                if isinstance(value, bytes):
                    parts.setdefault(number, []).append(value)
            key = b"/".join(parts.get(_ITEM_KEY, []) or parts.get(_ITEM_NESTED_KEY, [])).decode(errors="replace")
            value = _json_number(parts.get(_ITEM_VALUE, [b"null"])[0])
            line |= {key: value} if key else {}
        elif field == _HISTORY_STEP and isinstance(content, bytes):
            number = next((value for place, value in protobuf_fields(content) if place == 1), 0)
            line["_step"] = number
    return line


def _json_number(text: bytes) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return (
        {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
        if isinstance(value, str)
        else value
    )


LOG_READERS: Mapping[str, Callable[[Path], Iterable[Mapping[str, Any]]]] = MappingProxyType(
    {".json": state_lines, ".jsonl": jsonl_scalars, ".csv": csv_lines, ".wandb": wandb_lines}
)
"""Suffix of a file → the function that reads it."""
