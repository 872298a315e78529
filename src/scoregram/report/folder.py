"""What a folder is, and the report that belongs into it."""

from pathlib import Path

from scoregram.checks import fail
from scoregram.report.page import write_page
from scoregram.report.replicated import EXHIBITS, VERDICTS, read_replication
from scoregram.report.run import run_page
from scoregram.runs import CONFIG_FILE, REPORT, open_run

NAMED = 8
"""Names of a folder's content that an error lists."""


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a run folder or of a replication folder.

    Args:
        folder: A run, or a replication with its runs below.
        out: The file to write; `report.html` in the folder if not given.

    Returns:
        Path of the page.

    Raises:
        ScoregramError: If the folder is neither, with what was found in it; or as `write_page`.
    """
    root = Path(folder)
    path = root / REPORT if out is None else Path(out)
    redo = f"scoregram report {root.resolve().name}"
    shown, judged = ((root / name).is_file() for name in (EXHIBITS, VERDICTS))
    if shown and judged:
        page = read_replication(root)
    elif (root / CONFIG_FILE).is_file():
        page = run_page(open_run(root))
    else:
        expected = f"{root} must hold a run ({CONFIG_FILE}) or a replication ({EXHIBITS} and {VERDICTS})"
        fail("report", expected, _found(root), "Choose such a folder.")
    return write_page(path, title=page.title, lead=page.lead, sections=page.sections, redo=redo)


def _found(root: Path) -> str:
    if not root.is_dir():
        return "a file" if root.exists() else "no such folder"
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "an empty folder"
