"""The ledger on a terminal and as strict JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from scoregram import __version__
from scoregram.checks import fail, listed
from scoregram.machine import threads
from scoregram.theory.claims import CLAIMS
from scoregram.theory.claims.ledger import Claim, Entry, Number, Verdict, run
from scoregram.theory.lab.comparison import json_value as plain

COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.CORRECTED: "yellow",
    Verdict.FALSE: "red",
    Verdict.UNSUPPORTED: "magenta",
    Verdict.NEEDS_MEASUREMENT: "cyan",
    Verdict.BROKEN: "bold white on red",
}


Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""Claim id → verdicts of replications, each with `verdict`, `sentence`, `model`, `task` and `seeds`."""


def show_claims(*, ids: Sequence[str] = (), as_json: bool = False, measured: Measured | None = None) -> int:
    """Check the claims, print them, and return 1 if a check failed, 0 otherwise.

    Args:
        ids: Only these claims.
        as_json: Strict JSON instead of a table.
        measured: What replications found, shown beside the claims.
    """
    measured = measured or {}
    claims = selected(ids)
    progress = track(
        run(claims), total=len(claims), description="Checking claims", console=Console(stderr=True), transient=True
    )
    with threads(1):
        entries = list(progress)
    if as_json:
        print(json.dumps(as_record(entries, measured), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        print_table(entries, Console(), measured)
    return int(any(entry.finding.verdict is Verdict.BROKEN for entry in entries))


def selected(ids: Sequence[str]) -> list[Claim]:
    """The claims with these ids, or all of them; an unknown id is an error that lists the choices."""
    known = {claim.id: claim for claim in CLAIMS}
    for wanted in ids:
        if wanted not in known:
            fail("claims", f"an id must be one of {listed(known)}", repr(wanted), "Check the spelling.")
    return [known[wanted] for wanted in ids] if ids else list(CLAIMS)


def as_record(entries: Iterable[Entry], measured: Measured | None = None) -> dict[str, object]:
    """The ledger as plain JSON values; a number that is not finite becomes null."""
    return {
        "scoregram": __version__,
        "claims": [
            {
                "id": entry.claim.id,
                "paper": entry.claim.paper,
                "place": entry.claim.place,
                "statement": entry.claim.statement,
                "verdict": str(entry.finding.verdict),
                "evidence": {name: plain(value) for name, value in entry.finding.evidence.items()},
                "correction": entry.finding.correction,
                "measured": [dict(one) for one in (measured or {}).get(entry.claim.id, ())],
                "seconds": round(entry.seconds, 4),
            }
            for entry in entries
        ],
    }


def print_table(entries: Sequence[Entry], console: Console, measured: Measured | None = None) -> None:
    """One row a claim: id and place, statement, verdict with its numbers and the correction; then the tally."""
    table = Table(show_lines=True, expand=True)
    longest = max((len(entry.claim.id) for entry in entries), default=0)
    table.add_column("claim", width=max(longest, 18))  # ids are typed in again, so they are never broken
    table.add_column("the paper says", ratio=5)
    table.add_column("this run says", ratio=7)
    for entry in entries:
        named = Text(entry.claim.id, style="bold").append(f"\n{entry.claim.place}", style="not bold")
        found = (measured or {}).get(entry.claim.id, ())
        table.add_row(named, Text(entry.claim.statement), verdict_cell(entry, found))
    console.print(table)
    for verdict in Verdict:
        count = sum(entry.finding.verdict is verdict for entry in entries)
        if count:
            console.print(Text(f"{count:4d}  ").append(str(verdict), style=COLOURS[verdict]))
    console.print(f"{len(entries)} claims checked in {sum(entry.seconds for entry in entries):.1f} s")


def verdict_cell(entry: Entry, measured: Sequence[Mapping[str, Any]] = ()) -> Group:
    """Verdict, correction and evidence of one claim, the numbers in a column of their own; then what was measured."""
    finding = entry.finding
    parts: list[RenderableType] = [Text(str(finding.verdict), style=COLOURS[finding.verdict])]
    if finding.correction:
        parts.append(Text(finding.correction))
    numbers = Table.grid(padding=(0, 1))
    numbers.add_column(justify="right", style="bold", no_wrap=True)
    numbers.add_column(style="dim")
    for name, value in finding.evidence.items():
        numbers.add_row(Text(shown(value)), Text(name))  # a plain string would lose what it has in brackets
    return Group(*parts, numbers, *(measured_lines(one) for one in measured))


def measured_lines(found: Mapping[str, Any]) -> Text:
    """The verdict of one replication, with where it was found."""
    count = len(found.get("seeds", ()))
    where = f" ({found.get('model')}, {found.get('task')}, {count} seed{'s' * (count != 1)})"
    return Text("measured: ").append(str(found["verdict"]), style="bold").append(f". {found['sentence']}{where}")


def shown(value: Number) -> str:
    """A number with four significant digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
