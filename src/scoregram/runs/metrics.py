"""`metrics.jsonl`: one line of strict JSON a step, appended, so that `tail -f` shows a run as it goes.

A line counts when it ends in a newline and parses; a kill or a power cut can spoil the end of the file only. A spoilt
line with a good one after it is damage of another kind, and is refused.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from scoregram.checks import fail

Scalar = float | int | bool
"""What a line of metrics holds; an undefined one is `nan` here and `null` in the file."""


@dataclass(frozen=True)
class MetricsFile:
    """What can be read of a file of metrics."""

    lines: tuple[dict[str, Scalar], ...]
    """One mapping a step, `step` among its keys, steps increasing."""
    ends: tuple[int, ...]
    """Offset of the byte after each line."""
    torn_bytes: int
    """Bytes after the last good line, left by a writer that was killed."""


def metrics_line(step: int, scalars: Mapping[str, Any]) -> bytes:
    r"""One line of the file: `step` first, then the scalars as given; `nan` and infinities as `null`.

    Raises:
        ScoregramError: If a value is not one number, or a name is not text or is `step`.

    Example:
        >>> metrics_line(3, {"reward": 0.5, "effective_rank": float("nan")})
        b'{"step": 3, "reward": 0.5, "effective_rank": null}\n'
    """
    values = {"step": step} | {_name(name): _plain(name, value) for name, value in scalars.items()}
    return (json.dumps(values, allow_nan=False) + "\n").encode()


def _name(name: Any) -> str:
    if not isinstance(name, str) or name == "step":
        fail("write_metrics", "a scalar needs a name of its own, and `step` is taken", repr(name), "Rename it.")
    return name


def _plain(name: str, value: Any) -> float | int | bool | None:
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:  # a tensor or a numpy number
        count = value.numel() if hasattr(value, "numel") else value.size
        value = value.item() if count == 1 else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return fail("write_metrics", f"{name} must be one number", f"{type(value).__name__} {value!r}", "Pass a scalar.")


def read_metrics(path: Path) -> MetricsFile:
    """All good lines of a file of metrics; an absent file has none.

    Raises:
        ScoregramError: If a line in the middle is spoilt, which no interrupted writer does.
    """
    content = path.read_bytes() if path.exists() else b""
    lines: list[dict[str, Scalar]] = []
    ends: list[int] = []
    spoilt, start = 0, 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        start += len(raw)
        line = _parse(raw, after=int(lines[-1]["step"]) if lines else -1)
        if line is None:
            spoilt = spoilt or number
        elif spoilt:
            remedy = "Restore the file, or delete that line if you accept the gap."
            fail("open_run", f"{path} must hold one JSON object a line, steps increasing", f"line {spoilt}", remedy)
        else:
            lines.append(line)
            ends.append(start)
    return MetricsFile(tuple(lines), tuple(ends), len(content) - (ends[-1] if ends else 0))


def _parse(raw: bytes, *, after: int) -> dict[str, Scalar] | None:
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] <= after:
        return None
    return {name: math.nan if value is None else value for name, value in line.items()}
