"""Where recomputed exhibits and verdicts differ from those on record, in sentences that name the very cell.

Numbers are held to be equal within rounding: other BLAS libraries and processors add in another order.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RTOL = 1e-9
"""Of the larger of two numbers."""
COLUMN_RTOL = 1e-12
"""Of the largest number in the same column or series: what is left where numbers of that size cancel."""

NAMED_BY = ("id", "claim", "name")
"""What an exhibit, a verdict or a series is called by."""


def differences(recorded: Sequence[Any], recomputed: Sequence[Any], what: str) -> list[str]:
    """A sentence for each value that differs between two lists of exhibits or of verdicts; none if they agree.

    Args:
        recorded: As read from JSON.
        recomputed: Likewise.
        what: Their name in the singular, for those without a name or a kind of their own.

    Example:
        >>> differences([{"id": "thm-1", "seeds": 2}], [{"id": "thm-1", "seeds": 3}], "verdict")
        ['verdict "thm-1", seeds: 2 recorded, 3 recomputed']
    """
    return list(_named(recorded, recomputed, what, before=""))


def _named(recorded: Sequence[Any], recomputed: Sequence[Any], what: str, *, before: str) -> Iterator[str]:
    """Two lists of things with names: those that only one has, another order, and each pair in turn."""
    left, right = _by_name(recorded, what), _by_name(recomputed, what)
    yield from (f"{before}{name}: recorded, but not recomputed" for name in left if name not in right)
    yield from (f"{before}{name}: recomputed, but not recorded" for name in right if name not in left)
    both = [name for name in left if name in right]
    if both != [name for name in right if name in left]:
        yield f"{before}every {what} is there, but in another order"
    for name in both:
        yield from _values(left[name], right[name], before + name)


def _values(recorded: Any, recomputed: Any, where: str, largest: float = 0.0) -> Iterator[str]:
    if isinstance(recorded, Mapping) and isinstance(recomputed, Mapping):
        for key in sorted(recorded.keys() | recomputed.keys()):
            if key in recorded and key in recomputed:
                yield from _parts(key, recorded, recomputed, where, largest)
            else:
                yield f"{where}, {shown(key)}: {'recorded' if key in recorded else 'recomputed'} only"
    elif isinstance(recorded, list) and isinstance(recomputed, list):
        yield from _entries(recorded, recomputed, where, largest)
    elif not _same(recorded, recomputed, largest):
        yield f"{where}: {_brief(recorded)} recorded, {_brief(recomputed)} recomputed"


def _parts(key: str, recorded: Mapping[str, Any], recomputed: Mapping[str, Any], where: str, largest: float) -> Any:
    """One part of a mapping; rows of a table and series of a figure are called by their names."""
    left, right = recorded[key], recomputed[key]
    columns: Any = recorded.get("columns")
    if key == "rows" and _is_grid(left, columns) and _is_grid(right, columns):
        return _rows(columns, left, right, where)
    if key == "series" and isinstance(left, list) and isinstance(right, list):
        return _named(left, right, "series", before=f"{where}, ")
    return _values(left, right, f"{where}, {shown(key)}", largest)


def _rows(columns: Sequence[Any], recorded: Sequence[Any], recomputed: Sequence[Any], where: str) -> Iterator[str]:
    if len(recorded) != len(recomputed):
        yield f"{where}: {len(recorded)} rows recorded, {len(recomputed)} recomputed"
    largest = [_largest([row[j] for row in recorded]) for j in range(len(columns))]
    for i, (left, right) in enumerate(zip(recorded, recomputed, strict=False)):
        row = f"{where}, row {i + 1}" + (f" ({shown(columns[0])} = {_brief(left[0])})" if left else "")
        for j, column in enumerate(columns):
            yield from _values(left[j], right[j], f"{row}, column {_quoted(column)}", largest[j])


def _entries(recorded: list[Any], recomputed: list[Any], where: str, largest: float) -> Iterator[str]:
    if len(recorded) != len(recomputed):
        yield f"{where}: {len(recorded)} entries recorded, {len(recomputed)} recomputed"
    largest = max(largest, _largest(recorded))
    for i, (left, right) in enumerate(zip(recorded, recomputed, strict=False)):
        yield from _values(left, right, f"{where}[{i}]", largest)


def _same(left: Any, right: Any, largest: float) -> bool:
    if _is_number(left) and _is_number(right):
        both_whole = isinstance(left, int) and isinstance(right, int)
        return left == right or (
            not both_whole and math.isclose(left, right, rel_tol=RTOL, abs_tol=COLUMN_RTOL * largest)
        )
    return type(left) is type(right) and left == right


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_grid(rows: Any, columns: Any) -> bool:
    if not isinstance(rows, list) or not isinstance(columns, list):
        return False
    return all(isinstance(row, list) and len(row) == len(columns) for row in rows)


def _largest(value: Any) -> float:
    """Largest absolute number anywhere in it; 0 if there is none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return max(map(_largest, value), default=0.0)
    return abs(float(value)) if _is_number(value) else 0.0


def _by_name(things: Sequence[Any], what: str) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for i, thing in enumerate(things):
        name = _name(thing, what) or f"{what} {i + 1}"
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name} ({seen[name]})"] = thing
    return named


def _name(thing: Any, what: str) -> str:
    if not isinstance(thing, Mapping):
        return ""
    kind = shown(thing["kind"]) if isinstance(thing.get("kind"), str) else what
    called = next((thing[key] for key in NAMED_BY if isinstance(thing.get(key), str)), None)
    return "" if called is None else f"{kind} {_quoted(called)}"


def shown(name: Any) -> str:
    """A name as it may be printed: what would move the cursor or end the line is escaped."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def _quoted(name: Any) -> str:
    return f'"{shown(name)}"'


def _brief(value: Any) -> str:
    text = shown(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else f"{text[:57]}..."
