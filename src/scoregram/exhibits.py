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

Role = Literal["measured", "raw", "null", "bound", "paper"]
"""Source of a series: measured, the single values behind a mean, predicted by a null model, a bound on what is
possible, or printed in the paper."""


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
    return [{"kind": type(exhibit).__name__.lower(), **json_value(exhibit)} for exhibit in exhibits]


def from_plain(plain: Sequence[Mapping[str, Any]]) -> tuple[Exhibit, ...]:
    """Exhibits from the output of `to_plain`.

    Raises:
        ScoregramError: If an entry is neither a table nor a figure, or lacks a field.
    """
    return tuple(_exhibit(one) for one in plain)


def json_value(value: Any) -> Any:
    """A value that JSON can hold: exhibits as mappings, tuples as lists, a float that is not finite as None.

    Example:
        >>> json_value({"ends": (1.0, float("inf")), "mean": Estimate(0.5)})
        {'ends': [1.0, None], 'mean': {'value': 0.5, 'low': None, 'high': None}}
    """
    if isinstance(value, Table | Figure | Series | Estimate):
        return {name: json_value(inner) for name, inner in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
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


DIGITS = 3
"""Significant digits of a number that is not whole."""

UNDEFINED = "–"
"""Shown for `nan`."""

SMALLEST, LARGEST = 1e-3, 1e6
"""Sizes between which numbers are written without an exponent."""


def cell_text(cell: Cell) -> str:
    """A cell as text; None is empty, `nan` a dash.

    Example:
        >>> [cell_text(cell) for cell in (Estimate(2.406, 2.3, 2.52), 0.12345, 8, float("nan"), None, "R")]
        ['2.41 [2.30, 2.52]', '0.123', '8', '–', '', 'R']
    """
    if isinstance(cell, Estimate):
        return " ".join(estimate_parts(cell))
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return number_text(cell, cell)
    return "" if cell is None else str(cell)


def estimate_parts(estimate: Estimate) -> tuple[str, ...]:
    """The value and, where there is one, its interval in brackets, all with the same decimals."""
    known = [abs(number) for number in vars(estimate).values() if math.isfinite(number)]
    largest = max(known, default=math.nan)
    value = number_text(estimate.value, largest)
    if math.isnan(estimate.low) and math.isnan(estimate.high):
        return (value,)
    return value, f"[{number_text(estimate.low, largest)}, {number_text(estimate.high, largest)}]"


def number_text(value: float, like: float) -> str:
    """`value` with the decimals that give `like` three significant digits.

    Example:
        >>> number_text(9.996, 9.996), number_text(0.05, 12.0), number_text(-0.001, 1.0), number_text(3e-7, 3e-7)
        ('10.0', '0.1', '0.00', '3.00e-07')
    """
    if math.isnan(value):
        return UNDEFINED
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(float(f"{like:.{DIGITS - 1}e}")) if math.isfinite(like) else 0.0  # 9.996 is rounded to 10.0
    if size == 0:
        return f"{value:.{DIGITS}g}"
    if not SMALLEST <= size < LARGEST:
        return f"{value:.{DIGITS - 1}e}"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(size)))
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no minus before a zero
