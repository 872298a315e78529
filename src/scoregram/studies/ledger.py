"""The ledger of a paper's claims: what a claim is, how its check decides it, and how the ledger is printed.

A claim is a numbered statement of a paper, retold in our own words. Its check runs every time the ledger is read and
returns a `Finding`: the numbers of this run and the verdict that follows from them. No verdict is written by hand. Each
one follows from two facts of the run: whether the statement held as printed, and whether the corrected statement held.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from scoregram import __version__
from scoregram.checks import fail, listed, spelling_remedy
from scoregram.exhibits import json_value
from scoregram.machine import threads

Number = float | int | bool | str | None
NamedNumbers = Mapping[str, Number]
"""Evidence of a check: what each number is → the number."""
RecordedVerdicts = Mapping[str, Sequence[Mapping[str, Any]]]
"""Claim id → verdicts of replications, each with `verdict`, `sentence`, `model`, `task` and `seeds`."""


class Verdict(StrEnum):
    """The outcome of a check by enumeration."""

    HOLDS = "holds"
    """True as printed."""
    CORRECTED = "holds with a correction"
    """False as printed; true in substance once the correction is made."""
    FALSE = "false"
    """False as printed, and the corrected statement says something else."""
    UNSUPPORTED = "not supported by the text"
    """The paper announces it and gives no statement, proof or measurement of it."""
    ANSWERED = "a question, answered here"
    """The paper asks and asserts nothing; the finding is the answer."""
    NEEDS_MEASUREMENT = "needs measurement"
    """An empirical statement that no enumeration can decide; the finding names what has to be measured."""
    BROKEN = "check failed"
    """Neither the printed nor the corrected statement held in this run, or the check raised an error: our code or our
    correction is wrong."""


class MeasuredVerdict(StrEnum):
    """The outcome of a measurement of an empirical claim."""

    REPLICATED = "replicated"
    """The claim holds, and no null model predicts it."""
    AS_NULL = "replicated only as the null predicts"
    """The claim holds, and a null model predicts it as well."""
    NOT = "not replicated"
    """The claim fails beyond its interval."""
    UNDECIDED = "undecided"
    """The interval contains both answers, there is no interval, or these runs could not have shown the claim."""
    ANSWERED = "a question, answered here"
    """The paper asks and asserts nothing; the sentence is the answer."""
    OPEN = "a question, still open"
    """The paper asks and asserts nothing; the interval contains both answers, or there is none."""
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    verdict: Verdict
    evidence: NamedNumbers
    """The numbers of this run."""
    correction: str = ""
    """The corrected statement, or what has to be measured; empty when the claim holds as printed."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper and the check that decides it."""

    id: str
    place: str
    """Where the paper makes the statement."""
    statement: str
    """The statement in our words."""
    check: Callable[[], Finding]
    paper: str
    """Identifier of the paper, such as `arXiv:2606.29238`."""
    restates: str = ""
    """Id of the claim that makes the same statement elsewhere in the paper; the counts leave this one out."""


@dataclass(frozen=True)
class Entry:
    """A claim with the finding of this run."""

    claim: Claim
    finding: Finding
    seconds: float = field(compare=False)


def as_printed(ok: bool, evidence: NamedNumbers) -> Finding:
    """`holds` if the statement as printed held in this run, `check failed` otherwise."""
    return Finding(Verdict.HOLDS if ok else Verdict.BROKEN, evidence)


def corrected(*, printed: bool, truth: bool, evidence: NamedNumbers, correction: str) -> Finding:
    """`holds with a correction`: the printed statement failed in this run, the corrected one held."""
    return Finding(Verdict.CORRECTED if truth and not printed else Verdict.BROKEN, evidence, correction)


def refuted(*, printed: bool, truth: bool, evidence: NamedNumbers, correction: str) -> Finding:
    """`false`: the printed statement failed in this run, and the statement that replaces it held."""
    return Finding(Verdict.FALSE if truth and not printed else Verdict.BROKEN, evidence, correction)


def unsupported(*, truth: bool, evidence: NamedNumbers, correction: str) -> Finding:
    """`not supported by the text`; `truth` is whether the statement that replaces it held in this run."""
    return Finding(Verdict.UNSUPPORTED if truth else Verdict.BROKEN, evidence, correction)


def answered(*, truth: bool, evidence: NamedNumbers, answer: str) -> Finding:
    """`a question, answered here`; `truth` is whether the answer held in this run."""
    return Finding(Verdict.ANSWERED if truth else Verdict.BROKEN, evidence, answer)


def to_be_measured(*, truth: bool, evidence: NamedNumbers, measure: str) -> Finding:
    """`needs measurement`; the evidence is what is known before a measurement: null models and feasible intervals."""
    return Finding(Verdict.NEEDS_MEASUREMENT if truth else Verdict.BROKEN, evidence, measure)


def extremes(name: str, values: Sequence[float]) -> dict[str, Number]:
    """The least and the largest of some numbers, as evidence."""
    return {f"{name}, least": min(values), f"{name}, largest": max(values)}


def check_claims(claims: Iterable[Claim]) -> Iterator[Entry]:
    """Check the claims one after another, so that a caller can show progress.

    A check that raises has failed, and its error is the evidence; the other checks still run.
    """
    for claim in claims:
        start = time.perf_counter()
        try:
            finding = claim.check()
        except Exception as error:  # one broken check must not end the ledger
            finding = Finding(Verdict.BROKEN, {"error": f"{type(error).__name__}: {error}"})
        yield Entry(claim, finding, time.perf_counter() - start)


def show_claims(
    claims: Sequence[Claim], *, ids: Sequence[str] = (), as_json: bool = False, measured: RecordedVerdicts | None = None
) -> int:
    """Check the claims, print them, and return 1 if a check failed, 0 otherwise.

    Args:
        claims: The ledger of a paper.
        ids: Only these claims.
        as_json: Strict JSON instead of a table.
        measured: Verdicts of replications, shown beside the claims.
    """
    measured = measured or {}
    chosen = _selected(claims, ids)
    progress = track(
        check_claims(chosen),
        total=len(chosen),
        description="Checking claims",
        console=Console(stderr=True),
        transient=True,
    )
    with threads(1):
        entries = list(progress)
    if as_json:
        print(json.dumps(_record(entries, measured), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        _print_entries(entries, Console(), measured)
    return int(any(entry.finding.verdict is Verdict.BROKEN for entry in entries))


def _selected(claims: Sequence[Claim], ids: Sequence[str]) -> list[Claim]:
    """The claims with these ids, or all of them; an unknown id is an error that lists the choices."""
    known = {claim.id: claim for claim in claims}
    for wanted in ids:
        if wanted not in known:
            fail("claims", f"an id must be one of {listed(known)}", repr(wanted), spelling_remedy(wanted, known))
    return [known[wanted] for wanted in ids] if ids else list(claims)


def _record(entries: Iterable[Entry], measured: RecordedVerdicts) -> dict[str, object]:
    """The ledger as plain JSON values; a number that is not finite becomes null."""
    return {
        "scoregram": __version__,
        "claims": [
            {
                "id": entry.claim.id,
                "paper": entry.claim.paper,
                "place": entry.claim.place,
                "statement": entry.claim.statement,
                "restates": entry.claim.restates or None,
                "verdict": str(entry.finding.verdict),
                "evidence": json_value(entry.finding.evidence),
                "correction": entry.finding.correction,
                "measured": [dict(one) for one in measured.get(entry.claim.id, ())],
                "seconds": round(entry.seconds, 4),
            }
            for entry in entries
        ],
    }


_COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.CORRECTED: "yellow",
    Verdict.FALSE: "red",
    Verdict.UNSUPPORTED: "magenta",
    Verdict.ANSWERED: "blue",
    Verdict.NEEDS_MEASUREMENT: "cyan",
    Verdict.BROKEN: "bold white on red",
}


def _print_entries(entries: Sequence[Entry], console: Console, measured: RecordedVerdicts) -> None:
    """One row per claim: id and place, statement, verdict with its numbers and the correction; then the counts."""
    table = Table(show_lines=True, expand=True)
    longest = max((len(entry.claim.id) for entry in entries), default=0)
    table.add_column("claim", width=max(longest, 18))  # an id is never broken, so that it can be copied
    table.add_column("the paper says", ratio=5)
    table.add_column("this run says", ratio=7)
    for entry in entries:
        named = Text(entry.claim.id, style="bold").append(f"\n{entry.claim.place}", style="not bold")
        if entry.claim.restates:
            named.append(f"\n(restates {entry.claim.restates})", style="not bold dim")
        table.add_row(named, Text(entry.claim.statement), _verdict_cell(entry, measured.get(entry.claim.id, ())))
    console.print(table)
    for verdict, count in independent_counts(entries).items():
        console.print(Text(f"{count:4d}  ").append(str(verdict), style=_COLOURS[verdict]))
    again = sum(_restates_another(entry, entries) for entry in entries)
    counted = f", {again} of them restate others and are not counted above" * bool(again)
    console.print(f"{len(entries)} claims checked in {sum(entry.seconds for entry in entries):.1f} s{counted}")


def independent_counts(entries: Sequence[Entry]) -> dict[Verdict, int]:
    """Verdict → number of independent statements; a claim that restates another one of the list is not counted."""
    counted = [entry for entry in entries if not _restates_another(entry, entries)]
    counts = {verdict: sum(entry.finding.verdict is verdict for entry in counted) for verdict in Verdict}
    return {verdict: count for verdict, count in counts.items() if count}


def _restates_another(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether the statement of this claim is counted with another claim of the list. A failed check always counts."""
    present = {other.claim.id for other in entries}
    return entry.claim.restates in present and entry.finding.verdict is not Verdict.BROKEN


def _verdict_cell(entry: Entry, measured: Sequence[Mapping[str, Any]]) -> Group:
    """Verdict, correction and evidence of one claim, the numbers in a column of their own; then replications."""
    finding = entry.finding
    parts: list[RenderableType] = [Text(str(finding.verdict), style=_COLOURS[finding.verdict])]
    if finding.correction:
        parts.append(Text(finding.correction))
    numbers = Table.grid(padding=(0, 1))
    numbers.add_column(justify="right", style="bold", no_wrap=True)
    numbers.add_column(style="dim")
    for name, value in finding.evidence.items():
        digits = f"{value:.4g}" if isinstance(value, float) else str(value)
        numbers.add_row(Text(digits), Text(name))  # `Text`: rich reads brackets in a plain string as markup
    return Group(*parts, numbers, *(_replication_line(one) for one in measured))


def _replication_line(found: Mapping[str, Any]) -> Text:
    """The verdict of one replication, with what was replicated: kind, scale, task, success rate and seeds."""
    line = Text("measured: ").append(str(found["verdict"]), style="bold").append(f". {found['sentence']}")
    return line.append(f" ({replication_setting(found)})")


def replication_setting(found: Mapping[str, Any]) -> str:
    """What was replicated, in one line: kind of replication, model and scale, task, success rate, seeds.

    What the verdict does not tell is left out.

    Example:
        >>> replication_setting({"replication": "conceptual", "model": "m", "scale": "9 M", "paper_scale": "4 B"})
        "conceptual replication, m, 9 M parameters against the paper's 4 B"
    """
    scale = f"{found['scale']} parameters" if found.get("scale") else ""
    if found.get("paper_scale"):
        scale = f"{scale or 'a scale not given'} against the paper's {found['paper_scale']}"
    rate, seeds = found.get("success_rate"), found.get("seeds")
    count = len(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else seeds
    parts = (
        f"{found['replication']} replication" if found.get("replication") else "",
        str(found["model"]) if found.get("model") else "",
        scale,
        str(found["task"]) if found.get("task") else "",
        "" if rate is None else f"{100 * rate:.0f} % of rollouts right",
        f"{count} seed{'s' * (count != 1)}" if count else "",
    )
    return ", ".join(part for part in parts if part)
