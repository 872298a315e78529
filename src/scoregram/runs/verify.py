"""Fingerprints of a run: what is in each file, so that one changed byte can be found and named."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from scoregram.runs.layout import CHECKPOINTS, CONFIG, METRICS, TABLES, checkpoints, parts
from scoregram.runs.reader import require_run


def file_hashes(folder: Path | str, *, with_checkpoints: bool = False) -> dict[str, str]:
    """Path inside the run → sha256, for every data file, sorted by path.

    The config, the metrics, groups, batches and rollouts; checkpoints if asked for. Temporary files, reports and the
    logs of trackers are not data.
    """
    root = require_run(folder)
    files = [path for name in (CONFIG, METRICS) if (path := root / name).exists()]
    files += [path for name in TABLES for _, path in parts(root / name)]
    if with_checkpoints:
        files += [path for kept in checkpoints(root).values() for path in kept.rglob("*") if path.is_file()]
    return {name: _sha256(root / name) for name in sorted(path.relative_to(root).as_posix() for path in files)}


def changed_files(folder: Path | str, recorded: Mapping[str, str]) -> dict[str, str]:
    """Path → `changed`, `missing` or `added`, for every data file that is not as `recorded`; empty when all are."""
    with_checkpoints = any(name.startswith(f"{CHECKPOINTS}/") for name in recorded)
    found = file_hashes(folder, with_checkpoints=with_checkpoints)
    verdicts = {name: _verdict(recorded.get(name), found.get(name)) for name in sorted(recorded.keys() | found.keys())}
    return {name: verdict for name, verdict in verdicts.items() if verdict}


def _verdict(recorded: str | None, found: str | None) -> str:
    if recorded == found:
        return ""
    return "missing" if found is None else "added" if recorded is None else "changed"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
