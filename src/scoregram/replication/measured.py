"""Verdicts of replications that are shipped, for the ledger of claims."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.replication.record import RECORD

SHIPPED = Path(__file__).parent / "shipped"
"""Copies of the records in `results/`, installed with the package."""


def measured_verdicts(records: Sequence[Path] = ()) -> Mapping[str, list[dict[str, Any]]]:
    """Claim id → what each replication found, from the given records or folders, else from the shipped ones.

    Raises:
        ScoregramError: If one of them is no replication record.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in records or sorted(SHIPPED.glob("*.json")):
        for verdict in _verdicts(path / RECORD if path.is_dir() else path):
            found.setdefault(str(verdict["claim"]), []).append(verdict)
    return found


def _verdicts(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["content"]["verdicts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Pass replication.json or its folder."
        fail("claims --measured", f"{path} must be a replication record", repr(error), remedy)
