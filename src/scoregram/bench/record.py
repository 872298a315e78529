"""What every benchmark leaves: settings and rows as strict JSON, in a file, on the screen, or both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scoregram.runs import source_commit


def publish(record: dict[str, Any], *, as_json: bool, out: Path | None, show: Callable[[], None]) -> None:
    """Write the record if asked for, and print it, as JSON or the way that `show` does."""
    text = json.dumps(record, indent=1, allow_nan=False)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        show()


def short_commit() -> str | None:
    """The commit that was measured, as git abbreviates it; None outside a checkout."""
    commit, _ = source_commit()
    return commit[:7] if commit else None
