"""What a claim is, how a check decides it, and how the whole ledger is run.

A claim is a numbered statement of a paper, told in our own words. Its check runs every time the ledger is read and
returns a `Finding`: the numbers it saw and the verdict that follows from them. A verdict is never typed in; it comes
out of two facts, "the statement as printed held in this run" and "the corrected statement held in this run".
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Number = float | int | bool | str | None
Evidence = Mapping[str, Number]

PAPER = "arXiv:2606.29238"
U_STATISTIC_PAPER = "arXiv:2603.01162"


class Verdict(StrEnum):
    """The outcome of a check."""

    HOLDS = "holds"
    """True as printed."""
    CORRECTED = "holds with a correction"
    """False as printed; true in substance once the correction is made."""
    FALSE = "false"
    """False as printed, and the corrected statement says something else."""
    UNSUPPORTED = "not supported by the text"
    """The paper announces it and gives no statement, proof or measurement of it."""
    NEEDS_MEASUREMENT = "needs measurement"
    """An empirical statement that no enumeration can decide; the finding names what is to be measured."""
    BROKEN = "check failed"
    """Neither the printed nor the corrected statement held in this run, or the check ended in an error: our code or
    our correction is wrong."""


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    verdict: Verdict
    evidence: Evidence
    """The numbers of this very run."""
    correction: str = ""
    """The corrected statement, or what has to be measured; empty when the claim holds as printed."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper and the check that decides it."""

    id: str
    place: str
    """Where the paper says it."""
    statement: str
    """What the paper says, in our words."""
    check: Callable[[], Finding]
    paper: str = PAPER


@dataclass(frozen=True)
class Entry:
    """A claim with the finding of this run."""

    claim: Claim
    finding: Finding
    seconds: float = field(compare=False)


def as_printed(ok: bool, evidence: Evidence) -> Finding:
    """`holds` if the statement as printed held in this run, `check failed` otherwise."""
    return Finding(Verdict.HOLDS if ok else Verdict.BROKEN, evidence)


def corrected(*, printed: bool, truth: bool, evidence: Evidence, correction: str) -> Finding:
    """`holds with a correction`: the printed statement failed in this run, the corrected one held."""
    return Finding(Verdict.CORRECTED if truth and not printed else Verdict.BROKEN, evidence, correction)


def refuted(*, printed: bool, truth: bool, evidence: Evidence, correction: str) -> Finding:
    """`false`: the printed statement failed in this run, and what is true instead held."""
    return Finding(Verdict.FALSE if truth and not printed else Verdict.BROKEN, evidence, correction)


def unsupported(*, truth: bool, evidence: Evidence, correction: str) -> Finding:
    """`not supported by the text`; `truth` says whether what can be said instead held in this run."""
    return Finding(Verdict.UNSUPPORTED if truth else Verdict.BROKEN, evidence, correction)


def to_be_measured(*, truth: bool, evidence: Evidence, measure: str) -> Finding:
    """`needs measurement`; the evidence is what can be said before it (null models, feasible intervals)."""
    return Finding(Verdict.NEEDS_MEASUREMENT if truth else Verdict.BROKEN, evidence, measure)


def between(name: str, values: Sequence[float]) -> dict[str, Number]:
    """The least and the largest of some numbers, as evidence."""
    return {f"{name}, least": min(values), f"{name}, largest": max(values)}


def run(claims: Iterable[Claim]) -> Iterator[Entry]:
    """Check the claims one after another, so that a caller can show progress.

    A check that raises is a check that failed, with the error as its evidence; the others still run.
    """
    for claim in claims:
        start = time.perf_counter()
        try:
            finding = claim.check()
        except Exception as error:  # whatever a broken check raises, the ledger is to be told, not to end
            finding = Finding(Verdict.BROKEN, {"error": f"{type(error).__name__}: {error}"})
        yield Entry(claim, finding, time.perf_counter() - start)
