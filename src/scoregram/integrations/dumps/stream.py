"""A dump found, recognised, and read as one stream of rollouts with a count of bytes."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from scoregram.checks import ScoregramError, fail, lookup
from scoregram.integrations.dumps.containers import CONTAINERS
from scoregram.integrations.dumps.record import DumpedRollout, Where
from scoregram.integrations.dumps.table import FORMATS, Format
from scoregram.runs import LARGEST_STEP

CALLER = "measure --rollouts"
PICKLES = (".pkl", ".pickle")
TRIED = 100
"""Records of a file that are looked at to tell its format; the first that can be read decides."""


@dataclass
class Dump:
    """The files of a dump; iterating reads them from the beginning, one after the other."""

    name: str
    """Key of the format in `FORMATS`."""
    files: tuple[Path, ...]
    allow_pickle: bool = False
    strict: bool = False
    """Raise for a record that is broken, instead of passing over it."""
    on_broken: Callable[[str], object] = field(default=lambda message: None)
    """Called with one sentence, file and line in it, for every record that is passed over."""
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
                where = Where(file, raw.line)
                try:
                    rollouts = self._parsed(raw.record, raw.reason, where)
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

    def _parsed(self, record: Any, reason: str, where: Where) -> list[DumpedRollout]:
        """Rollouts of one record, all of them or none."""
        if reason:
            fail(str(where), "must be readable", reason, "Repair or remove it.")
        if not self.format.recognises(record):
            got = ", ".join(map(str, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
            fail(str(where), f"must have the fields {wanted(self.format)}", got[:200] or "none", "Repair or remove it.")
        rollouts = list(self.format.parse(record, where))
        for rollout in rollouts:
            if not 0 <= (rollout.step or 0) <= LARGEST_STEP:
                fail(str(where), f"step must lie in [0, {LARGEST_STEP}]", rollout.step, "Repair or remove it.")
        return rollouts


def open_dump(path: Path, *, name: str = "auto", allow_pickle: bool = False, strict: bool = False) -> Dump:
    """The dump at `path`, its format told from the first record that can be read.

    Args:
        path: A file, or a folder in which files are looked for at any depth.
        name: A key of `FORMATS`, or `auto`.
        allow_pickle: Read torch files that hold more than tensors, numbers and text.
        strict: Raise for a record that is broken.

    Raises:
        ScoregramError: If there is no such path, nothing in it, a pickle, or no format is recognised; what was looked
            for is listed.
    """
    if not path.exists():
        fail(CALLER, "the path must exist", path, "Check the path; it is read from where the command was started.")
    if path.suffix in PICKLES:
        fail(CALLER, "must be a dump of a known format", f"the pickle {path}", f"Convert it to one of: {looked_for()}.")
    names = list(FORMATS) if name == "auto" else [name]
    seen: list[str] = []
    for candidate in names:
        row = lookup(FORMATS, candidate, kind="measure --format")
        files = files_of(path, row)
        record = first_record(files, row, allow_pickle) if files else None
        if row.recognises(record) or (name != "auto" and files and record is not None):
            return Dump(candidate, tuple(files), allow_pickle, strict)
        seen += [f"{files[0]} with {shown(record)}"] if files else []
    got = "; ".join(dict.fromkeys(seen)) or "nothing with such a name"
    remedy = "Check the path, or name the format with --format."
    return fail(CALLER, f"{path} must hold one of: {looked_for(names)}", got, remedy)


def files_of(path: Path, row: Format) -> list[Path]:
    """Files that a format may be read from, in order of the numbers in their names."""
    if path.is_file():
        return [path] if path.suffix == row.suffix else []
    for pattern in row.names:
        found = [file for file in path.rglob(pattern) if file.is_file()]
        if found:
            return row.chosen(sorted(found, key=lambda file: natural(file.relative_to(path).as_posix())))
    return []


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts numbers inside names as numbers.

    Example:
        >>> sorted(["step_10/a", "step_9/a"], key=natural)
        ['step_9/a', 'step_10/a']
    """
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]


def first_record(files: Sequence[Path], row: Format, allow_pickle: bool) -> Any:
    """The first record that can be read; None if there is none among the first ones of the first file with any."""
    for file in files:
        raws = CONTAINERS[row.suffix](file, allow_pickle=allow_pickle)
        found = next((raw for raw in islice(raws, TRIED) if not raw.reason), None)
        if found is not None:
            return found.record
    return None


def shown(record: Any) -> str:
    """What a record looks like, in a few words."""
    if record is None:
        return "no record that can be read"
    if isinstance(record, dict):
        return "the fields " + ", ".join(list(map(str, record))[:8])
    return f"a {type(record).__name__}"


def wanted(row: Format) -> str:
    """The fields of a format in words."""
    return " or ".join(" + ".join(fields) for fields in row.fields)


def looked_for(names: Sequence[str] = tuple(FORMATS)) -> str:
    """Every format with its files and fields."""
    rows = [FORMATS[name] for name in names]
    return "; ".join(f"{name} ({row.names[0]}: {wanted(row)})" for name, row in zip(names, rows, strict=True))
