"""`metrics.jsonl`: one line of strict JSON per step, appended, so that `tail -f` follows a run.

A line is valid if it ends in a newline and parses. A kill or a power cut can damage only the end of the file, which
readers skip. An invalid line followed by a valid one means other damage: reading raises an error.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.runs.disk import METRICS

Scalar = float | int | bool
"""A value of a line; an undefined one is `nan` in Python and `null` in the file."""
_TAIL_BYTES = 1 << 16
"""Bytes at the end of a metrics file in which its last line is looked for."""


@dataclass(frozen=True)
class MetricsFile:
    """The valid lines of a metrics file."""

    lines: tuple[dict[str, Scalar], ...]
    """One mapping per step with `step` among its keys; steps increase."""
    ends: tuple[int, ...]
    """Offset of the byte after each line."""
    torn_bytes: int
    """Bytes after the last valid line, left by a killed writer."""


def metrics_line(step: int, scalars: Mapping[str, Any]) -> bytes:
    r"""One line of the file: `step`, then the scalars in their order; `nan` and infinities become `null`.

    Raises:
        ScoregramError: If a value is not one number, or a name is not a string or is `step`.

    Example:
        >>> metrics_line(3, {"reward": 0.5, "effective_rank": float("nan")})
        b'{"step": 3, "reward": 0.5, "effective_rank": null}\n'
    """
    values = {"step": step} | {_name(name): _number_or_none(name, value) for name, value in scalars.items()}
    return (json.dumps(values, allow_nan=False) + "\n").encode()


OWN_PREFIX = "scoregram/"
"""Prefix of our scalars wherever another trainer's scalars have the same name."""


def own_name(name: str) -> str:
    """Name of our scalar where another trainer logs one of the same name."""
    return OWN_PREFIX + name


CHECK_PASSED = "check/passed"
"""Scalar of a step that was checked: 1 if its self-check was within the tolerance, else 0."""


def needs_gram(name: str) -> bool:
    """Whether a scalar is computed from a Gram, so that it can be trusted as far as the self-check of its step.

    Example:
        >>> [needs_gram(name) for name in ("gram/snr", "group/effective_rank", "group/reward_std", "reward")]
        [True, True, False, False]
    """
    return name.startswith(("gram/", "group/")) and not name.startswith("group/reward_")


def has_failed_check(line: Mapping[str, Any]) -> bool:
    """Whether the self-check of the step of a line failed or could not be made; False without a self-check.

    Example:
        >>> [has_failed_check(line) for line in ({"check/passed": 0.0}, {"check/passed": 1.0}, {})]
        [True, False, False]
    """
    return line.get(CHECK_PASSED, 1) != 1


def beside_foreign(ours: Mapping[str, Any], foreign: Mapping[str, Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """Scalars of one step, ours and another trainer's. Ours are renamed where the other trainer uses the same name.

    Args:
        ours: Our scalars; renamed to `scoregram/NAME` if `foreign` or `taken` has NAME.
        foreign: The other trainer's scalars of this step; they keep their names and values.
        taken: Further names that the other trainer uses, such as those of scalars that it logs at other steps.

    Example:
        >>> beside_foreign({"reward_std": 0.4, "gram/snr": 1.5}, {"reward_std": 0.5})
        {'reward_std': 0.5, 'scoregram/reward_std': 0.4, 'gram/snr': 1.5}
    """
    names = {*foreign, *taken}
    renamed = {own_name(name) if name in names else name: value for name, value in ours.items()}
    return {**foreign, **renamed, **foreign}


def _name(name: Any) -> str:
    if not isinstance(name, str) or name == "step":
        fail("write_metrics", "the name of a scalar must be a string other than `step`", repr(name), "Rename it.")
    return name


def _number_or_none(name: str, value: Any) -> float | int | bool | None:
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
    """All valid lines of a metrics file; none if there is no file.

    Raises:
        ScoregramError: If a line before the last valid one is invalid; an interrupted write cannot cause that.
    """
    content = path.read_bytes() if path.exists() else b""
    lines: list[dict[str, Scalar]] = []
    ends: list[int] = []
    first_invalid, end = 0, 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        end += len(raw)
        line = _parse(raw, after=int(lines[-1]["step"]) if lines else -1)
        if line is None:
            first_invalid = first_invalid or number
        elif first_invalid:
            requirement = f"{path} must hold one JSON object per line, with increasing steps"
            remedy = "Restore the file, or delete that line if you can do without its step."
            fail("open_run", requirement, f"an invalid line {first_invalid}", remedy)
        else:
            lines.append(line)
            ends.append(end)
    return MetricsFile(tuple(lines), tuple(ends), len(content) - (ends[-1] if ends else 0))


def last_scalar(folder: Path, name: str) -> int:
    """An integer scalar, such as `step`, in the last line that the run of a folder has written; 0 before the first.

    Only the end of the file is read, so that many runs can be watched.
    """
    path = folder / METRICS
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if not line.endswith(b"\n"):  # still being written, or torn by a kill
            continue
        try:
            return int(json.loads(line)[name])
        except (ValueError, KeyError, TypeError):  # another program's line
            continue
    return 0


def _parse(raw: bytes, *, after: int) -> dict[str, Scalar] | None:
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] <= after:
        return None
    return {name: math.nan if value is None else value for name, value in line.items()}
