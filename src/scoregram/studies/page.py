"""The page of a replication: its headline in a sentence, a table of the verdicts, its exhibits."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoregram.checks import fail, listed
from scoregram.exhibits import Cell, Estimate, Exhibit, Table, cell_text, from_plain
from scoregram.report import Section, write_page
from scoregram.runs import REPORT
from scoregram.studies.ledger import replication_setting
from scoregram.studies.record import EXHIBITS, VERDICTS

PageText = Callable[[Path, Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Folder and verdicts → `title`, `lead`, `answers` and `sections` of the page; a study may leave out any of them."""


@dataclass(frozen=True)
class ReplicationPage:
    """Arguments of `write_page` for a replication."""

    title: str
    lead: str
    answers: tuple[tuple[str, str], ...]
    """Questions of a reader and their answers."""
    sections: tuple[Section, ...]


def is_replication(folder: Path | str) -> bool:
    """Whether a folder holds the exhibits and the verdicts of a replication."""
    return all((Path(folder) / name).is_file() for name in (EXHIBITS, VERDICTS))


def write_replication_page(folder: Path | str, out: Path | str | None = None, *, text: PageText) -> Path:
    """Write the page of a replication folder and return its path.

    Args:
        folder: Holds `exhibits.json` and `verdicts.json`.
        out: The file to write; `report.html` in the folder if not given.
        text: Title, lead and sections of the study.

    Raises:
        ScoregramError: As `read_replication` and `write_page`.
    """
    root = Path(folder)
    page = read_replication(root, text)
    path = root / REPORT if out is None else Path(out)
    redo = shlex.join(["scoregram", "report", str(root)])
    return write_page(path, redo=redo, **vars(page))


def read_replication(folder: Path, text: PageText = lambda folder, verdicts: {}) -> ReplicationPage:
    """The page of a replication folder, from `exhibits.json` and `verdicts.json`.

    A title, lead or sections in those files replace those of the study.

    Raises:
        ScoregramError: If one of the files is damaged; the error names it.
    """
    shown, judged = _read(folder / EXHIBITS, "exhibits"), _read(folder / VERDICTS, "verdicts")
    exhibits = from_plain(shown["exhibits"])
    verdicts = judged["verdicts"]
    own = text(folder, verdicts)
    sections = _sections(shown.get("sections") or own.get("sections"), exhibits, folder / EXHIBITS)
    titles = (page.get("title") for page in (judged, shown, own))
    leads = (page.get("lead") for page in (judged, shown, own))
    return ReplicationPage(
        title=str(next(filter(None, titles), f"Replication: {folder.resolve().name}")),
        lead=str(next(filter(None, leads), verdict_counts(verdicts))),
        answers=tuple(own.get("answers", ())),
        sections=(Section("Verdicts", "", (verdict_table(verdicts),)), *sections),
    )


def verdict_counts(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """How many independent statements got each verdict, in one sentence.

    A claim that restates another one of the list is not counted.

    Example:
        >>> again = {"claim": "b", "restates": "a", "verdict": "not replicated"}
        >>> others = {"claim": "a", "verdict": "not replicated"}, {"claim": "c", "verdict": "replicated"}
        >>> verdict_counts([*others, again])
        'Of 2 independent statements: 1 not replicated, 1 replicated (1 claim restates another).'
    """
    if not verdicts:
        return "No claim was judged."
    present = {one.get("claim") for one in verdicts}
    counted = [one for one in verdicts if one.get("restates") is None or one["restates"] not in present]
    again = len(verdicts) - len(counted)
    counts = Counter(str(one.get("verdict", "no verdict")) for one in counted)
    parts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    rest = f" ({again} claim{'s restate others' if again != 1 else ' restates another'})" if again else ""
    return f"Of {len(counted)} independent statement{'s' * (len(counted) != 1)}: {parts}{rest}."


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """One row per claim: the paper's statement, the verdict, and the effect that decided it."""
    rows = [
        (
            " · ".join(str(one[name]) for name in ("claim", "place") if one.get(name)),
            str(one.get("statement", "")),
            str(one.get("verdict", "")),
            str(one.get("sentence", "")),
            _effect(one.get("effect")),
            replication_setting(one),
        )
        for one in verdicts
    ]
    return Table(
        id="verdicts",
        title="Every empirical claim",
        caption="A claim is called replicated only if it holds and no null model predicts it.",
        columns=("claim", "the paper says", "verdict", "measured", "effect", "where"),
        rows=tuple(rows),
    )


def _effect(effect: Any) -> Cell:
    """The effect as text: a value with its interval and name, or all its parts."""
    if not isinstance(effect, Mapping):
        return None if effect is None else str(effect)
    if "value" not in effect:
        return "; ".join(f"{name.replace('_', ' ')}: {_part(value)}" for name, value in effect.items())
    ends = [_number(effect.get(name)) for name in ("value", "low", "high")]
    rest = [str(effect[name]) for name in ("name", "unit") if effect.get(name)]
    return " ".join([*rest, cell_text(Estimate(*ends))])


def _part(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(_effect(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_part, value))
    return cell_text(math.nan if value is None else value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _sections(plain: Any, exhibits: Sequence[Exhibit], path: Path) -> list[Section]:
    """The given sections; exhibits that no section names come last."""
    if not plain:
        return [Section("Tables and figures", "", tuple(exhibits))] if exhibits else []
    known = {exhibit.id: exhibit for exhibit in exhibits}
    sections, named = [], set()
    for one in plain:
        wanted = list(one.get("exhibits", ()))
        unknown = [name for name in wanted if name not in known]
        if unknown:
            fail("report", f"sections of {path} must name exhibits of {listed(known)}", unknown[0], "Write it again.")
        named |= set(wanted)
        title, text = str(one.get("title", "")), str(one.get("text", ""))
        sections.append(Section(title, text, tuple(known[name] for name in wanted)))
    rest = tuple(exhibit for exhibit in exhibits if exhibit.id not in named)
    return [*sections, *([Section("More", "", rest)] if rest else [])]


def _read(path: Path, key: str) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail("report", f"{path} must be a JSON file", error, "Run the replication again, or restore the file.")
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        fail("report", f"{path} must hold a list under {key!r}", type(content).__name__, "Restore the file.")
    return content
