"""The report of a run folder."""

from pathlib import Path

from scoregram.checks import fail
from scoregram.report.page import write_page
from scoregram.report.run import run_page
from scoregram.runs import CONFIG, REPORT, open_run

NAMED = 8
"""Names of a folder's content that an error lists."""


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of a run folder. A study writes the page of its own replications.

    Args:
        folder: A run.
        out: The file to write; `report.html` in the folder if not given.

    Returns:
        Path of the page.

    Raises:
        ScoregramError: If the folder holds no run, with what was found in it; or as `write_page`.
    """
    root = Path(folder)
    if not (root / CONFIG).is_file():
        # `scoregram report` tries replications first, so its users need to know both kinds of folder.
        expected = f"{root} must hold a run ({CONFIG}) or a replication (exhibits.json and verdicts.json)"
        fail("report", expected, _found(root), "Choose such a folder.")
    page = run_page(open_run(root))
    path = root / REPORT if out is None else Path(out)
    redo = f"scoregram report {root.resolve().name}"
    return write_page(path, title=page.title, lead=page.lead, sections=page.sections, redo=redo)


def _found(root: Path) -> str:
    if not root.is_dir():
        return "a file" if root.exists() else "no such folder"
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "an empty folder"
