"""Names inside a run folder, and the version of what they hold."""

import re
from collections.abc import Iterator
from pathlib import Path

SCHEMA = 1
"""Version of the folder and of its tables. It grows when an older reader would misread a newer run."""

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
GROUPS = "groups"
BATCHES = "batches"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
TRACKERS = "trackers"
REPORT = "report.html"
TABLES = (GROUPS, BATCHES, ROLLOUTS)
"""Folders of part files."""
OWN = (CONFIG, METRICS, *TABLES, CHECKPOINTS, TRACKERS, REPORT)
"""All that scoregram puts into a run folder, and all that overwriting a run removes. The config stands first."""

TEMPORARY = ".partial-"
"""How the name of everything unfinished begins. The dot hides it from `*.parquet` and from readers of data sets."""

LARGEST_STEP = 10**9 - 1
"""Steps are written with nine digits, so that names sort as steps do."""

_PART = re.compile(r"step-(\d{9})-(\d{3,})\.parquet")
_CHECKPOINT = re.compile(r"step-(0|[1-9]\d*)")


def temporary_name(path: Path) -> Path:
    """Where `path` is written before it is complete: a neighbour, so that renaming is atomic."""
    return path.with_name(TEMPORARY + path.name)


def part_name(step: int, part: int) -> str:
    """File name of part number `part` of a step: sorting names sorts steps, then parts.

    Example:
        >>> part_name(42, 0)
        'step-000000042-000.parquet'
    """
    return f"step-{step:09d}-{part:03d}.parquet"


def part_step(path: Path) -> int | None:
    """Step of a part file; None for anything else."""
    found = _PART.fullmatch(path.name)
    return int(found[1]) if found else None


def parts(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete part file in one of `TABLES`, in order of step, then part."""
    found = [(part_step(path), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((step, path) for step, path in found if step is not None)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step-{step}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step → folder of every complete checkpoint of a run, in order of step."""
    inside = folder / CHECKPOINTS
    found = {path: _CHECKPOINT.fullmatch(path.name) for path in (inside.iterdir() if inside.is_dir() else ())}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match and path.is_dir()))


def temporaries(folder: Path) -> Iterator[Path]:
    """Everything unfinished that a killed writer left behind."""
    for inside in (folder, *(folder / name for name in TABLES), folder / CHECKPOINTS):
        if inside.is_dir():
            yield from sorted(inside.glob(f"{TEMPORARY}*"))
