"""Tables and figures as plain data, computed once and then printed, drawn on a page, or checked against a record.

An exhibit holds its numbers and how to read them, and nothing about how it is drawn. An undefined number is `nan` in
Python and `null` in JSON.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scoregram.checks import fail


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; both ends are `nan` if it has none."""

    value: float
    low: float = math.nan
    high: float = math.nan


Cell = Estimate | float | int | str | None
"""One entry of a table; None is shown blank."""

Role = Literal["measured", "null", "bound", "paper"]
"""Source of a series: measured, predicted by a null model, a bound on what is possible, or printed in the paper."""


@dataclass(frozen=True)
class Table:
    """Named columns and rows of cells."""

    id: str
    title: str
    caption: str
    """How to read it."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                got = f"a row of {len(row)} in {self.id}"
                fail("Table", f"every row must have {len(self.columns)} cells", got, "Fill the row with None.")


@dataclass(frozen=True)
class Series:
    """One line, or one set of points, of a figure; `low` and `high` are empty or as long as `y`."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    role: Role = "measured"
    points: bool = False
    """Draw points without a line between them."""

    def __post_init__(self) -> None:
        if len({len(self.x), len(self.y)} | {len(ends) for ends in (self.low, self.high) if ends}) > 1:
            got = f"{len(self.x)}, {len(self.y)}, {len(self.low)} and {len(self.high)} in {self.name}"
            fail("Series", "x, y, low and high must be equally long", got, "Leave low and high empty, or fill them.")


@dataclass(frozen=True)
class Figure:
    """Series over a common axis."""

    id: str
    title: str
    caption: str
    """How to read it."""
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False


Exhibit = Table | Figure


def to_plain(exhibits: Sequence[Exhibit]) -> list[dict[str, Any]]:
    """Exhibits as values that JSON can hold, in order."""
    return [{"kind": type(exhibit).__name__.lower(), **_plain(exhibit)} for exhibit in exhibits]


def from_plain(plain: Sequence[Mapping[str, Any]]) -> tuple[Exhibit, ...]:
    """Exhibits from the output of `to_plain`.

    Raises:
        ScoregramError: If an entry is neither a table nor a figure, or lacks a field.
    """
    return tuple(_exhibit(one) for one in plain)


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists, undefined numbers as None."""
    if isinstance(value, Table | Figure | Series | Estimate):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _exhibit(plain: Mapping[str, Any]) -> Exhibit:
    given: dict[str, Any] = {name: value for name, value in plain.items() if name != "kind"}
    try:
        if plain["kind"] == "table":
            rows = tuple(tuple(_cell(cell) for cell in row) for row in plain["rows"])
            return Table(**{**given, "columns": tuple(plain["columns"]), "rows": rows})
        if plain["kind"] == "figure":
            return Figure(**{**given, "series": tuple(_series(one) for one in plain["series"])})
    except (KeyError, TypeError, AttributeError) as error:
        remedy = "Write the file again with this scoregram."
        fail("from_plain", "an exhibit must have all its fields", repr(error), remedy)
    return fail("from_plain", "an exhibit must be a table or a figure", plain["kind"], "Check the file.")


def _cell(plain: Any) -> Cell:
    if not isinstance(plain, Mapping):
        return plain
    return Estimate(**{name: math.nan if value is None else float(value) for name, value in plain.items()})


def _series(plain: Mapping[str, Any]) -> Series:
    numbers: dict[str, Any] = {
        name: tuple(math.nan if v is None else float(v) for v in plain[name]) for name in ("x", "y", "low", "high")
    }
    return Series(**{**plain, **numbers})
