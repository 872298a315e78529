"""What a rule finds in a run, and how the findings of several rules become one list that does not contradict itself."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scoregram.exhibits import Estimate, cell_text

CHECKED_STEPS = 20
"""Steps after which a new run shows whether a change works."""
LEAST_SAVING = 0.05
"""Smallest gain that is worth a change of setting."""
Severity = Literal["critical", "warning", "note"]
"""`critical`: the run learns nothing or the wrong thing. `warning`: a setting costs much. `note`: worth knowing."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")
Confidence = Literal["certain", "likely", "possible"]
"""`certain`: it follows from the numbers. `likely`: the interval excludes the harmless values. `possible`: a sign that
has another explanation, which the evidence names."""
CONFIDENCES: tuple[Confidence, ...] = ("certain", "likely", "possible")


@dataclass(frozen=True)
class Alternative:
    """Another setting that may be changed in place of the advised one."""

    knob: str
    """As in `Change`."""
    direction: str
    """As in `Change`."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting to change."""

    knob: str
    """The setting, by one name for all trainers, such as `group size`."""
    direction: str
    """Where to: `up`, `down`, or another word. Two findings contradict if they move one knob in two directions."""
    sentence: str
    effect: str
    """What to expect from the change."""
    check: str = ""
    """What to look at soon after the change, with the number that it should have; empty if nothing is special."""
    value: str | int | None = None
    """The value to set, where the rule knows one."""
    setting: str = ""
    """What to type in the trainer of the run; empty if it has no such setting or is not known."""
    steps: tuple[str, ...] = ()
    """What to do, one after the other, where no setting alone does it; what to type is between backticks."""
    alternatives: tuple[Alternative, ...] = ()
    """Other settings to change instead. A diagnosis leaves out those that oppose the change of another finding."""
    others: tuple[str, ...] = ()
    """What else to do instead, each with its price, the best first."""
    not_advised: tuple[str, ...] = ()
    """What a reader may think of, and why not."""

    @property
    def all_others(self) -> tuple[str, ...]:
        """What to do instead, in words: the alternatives, then `others`."""
        return (*(one.sentence for one in self.alternatives), *self.others)

    def plain(self) -> dict[str, Any]:
        """The change as values that JSON can hold."""
        lists = {name: list(getattr(self, name)) for name in ("steps", "others", "not_advised")}
        return vars(self) | lists | {"alternatives": [dict(vars(one)) for one in self.alternatives]}


@dataclass(frozen=True, kw_only=True)
class RunFinding:
    """One thing that is wrong with a run, with the number that shows it."""

    name: str
    severity: Severity
    sentence: str
    """What is wrong, in plain words."""
    since: int | None = None
    """First step from which on it holds; None if it is not tied to a step."""
    level: str = ""
    """The condition that has held since that step, as the beginning of a sentence, such as `The share is above 10%`.
    Empty if `sentence` states it; else `sentence` has the number of the last third."""
    number: Estimate = field(default_factory=lambda: Estimate(math.nan))
    label: str = ""
    """What `number` is."""
    count: str = ""
    """`number` as a count, such as `1 of 40`, which is printed in its place; empty if it is none."""
    evidence: str
    """Which data the finding rests on, and the threshold."""
    change: Change | None = None
    confidence: Confidence = "likely"
    listing: tuple[str, ...] = ()
    """Lines of a list that the finding is about, such as prompts with their numbers."""
    without_gram: bool = False
    """Whether a rule on Grams came to it from rewards alone."""
    mark: str = ""
    """What is in doubt about the numbers, such as ` (approximate)`; empty if nothing is."""

    @property
    def title(self) -> str:
        """Its name, with the mark."""
        return f"{self.name}{self.mark}"

    def lines(self) -> list[str]:
        """The finding as text: what is wrong, the number, the evidence, what to change and what to expect, the list."""
        since = "" if self.since is None else f" (since step {self.since})"
        if since and self.level:
            since = f" {self.level} since step {self.since}."
        shown = self.count or cell_text(self.number)
        number = "" if math.isnan(self.number.value) else f"{self.label}{self.mark}: {shown}; "
        told = [f"{self.sentence}{since}", f"Evidence, {self.confidence}: {number}{self.evidence}"]
        if self.change is not None:
            setting = f" Setting: {self.change.setting}." if self.change.setting else ""
            check = f" Check: {self.change.check}" if self.change.check else ""
            told.append(f"Change: {self.change.sentence}{setting} Expect: {self.change.effect}{check}")
            told += [f"Step {place}: {one}" for place, one in enumerate(self.change.steps, start=1)]
            told += [f"Otherwise, {place}: {one}" for place, one in enumerate(self.change.all_others, start=1)]
            told += [f"Not advised: {one}" for one in self.change.not_advised]
        return told + [f"  {line}" for line in self.listing]

    def plain(self) -> dict[str, Any]:
        """The finding as values that JSON can hold."""
        ends = {name: value if math.isfinite(value) else None for name, value in vars(self.number).items()}
        names = ("name", "severity", "since", "level", "sentence", "evidence", "confidence")
        own = {name: getattr(self, name) for name in names}
        return own | {
            "number": ends | {"label": f"{self.label}{self.mark}"},
            "mark": self.mark.strip(" ()"),
            "change": None if self.change is None else self.change.plain(),
            "listing": list(self.listing),
        }


@dataclass(frozen=True)
class Undecided:
    """A question that the data do not decide."""

    needs: str
    """What to log or measure so that they would."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Trainer → what to type for it, or that this trainer does not have it."""

    def told(self, trainer: str = "") -> str:
        """What is needed, in the words of a trainer as far as they are known."""
        option = self.options.get(trainer, "")
        return f"{self.needs} ({option})" if option else self.needs


RuleVerdict = RunFinding | Undecided | None
"""What a rule returns: a finding, what is missing, or None if there is nothing to change."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What all rules say about a run."""

    source: str
    """Where the run was read from."""
    findings: tuple[RunFinding, ...]
    """Worst first."""
    fine: tuple[str, ...]
    """Rules that found nothing to change."""
    undecided: Mapping[str, str]
    """Rule → what to log or measure so that it could decide."""
    trust: tuple[str, ...] = ()
    """How far the numbers of the run can be trusted, a sentence each; of a plain log, what of it could not be read."""
    nothing_decided: str = ""
    """Why hardly any rule could decide, as a sentence; empty if there is a finding or enough of them could."""

    def worst(self) -> Severity | None:
        """Severity of the first finding; None without one."""
        return self.findings[0].severity if self.findings else None

    def reaches(self, severity: Severity) -> bool:
        """Whether a finding is at least this severe."""
        worst = self.worst()
        return worst is not None and SEVERITIES.index(worst) <= SEVERITIES.index(severity)

    def text(self) -> str:
        """How far to trust the numbers, the findings as a list, then `open_text`."""
        blocks = [f"- **{one.title}** ({one.severity}). " + " ".join(one.lines()) for one in self.findings]
        parts = (" ".join(self.trust), "\n".join(blocks), self.nothing_decided, self.open_text())
        return "\n\n".join(part for part in parts if part)

    def open_text(self) -> str:
        """What needs no change, and what the data do not decide, as paragraphs."""
        fine = f"Checked and fine: {', '.join(self.fine)}." if self.fine else ""
        open_ = "; ".join(f"{name} ({needs})" for name, needs in self.undecided.items())
        return "\n\n".join(part for part in (fine, f"Cannot tell: {open_}." if open_ else "") if part)

    def plain(self) -> dict[str, Any]:
        """The diagnosis as values that JSON can hold."""
        return {
            "source": self.source,
            "trust": list(self.trust),
            "findings": [one.plain() for one in self.findings],
            "nothing_decided": self.nothing_decided or None,
            "nothing_to_change": list(self.fine),
            "cannot_tell": dict(self.undecided),
        }


def diagnosis_of(
    source: str, verdicts: Mapping[str, RuleVerdict], trainer: str = "", trust: Iterable[str] = ()
) -> Diagnosis:
    """The verdicts of all rules as one list, worst first, without contradictions.

    `trainer` decides in whose words an open question says what it needs; `trust` is that of the diagnosis.
    """
    return Diagnosis(
        source=source,
        findings=reconciled(verdict for verdict in verdicts.values() if isinstance(verdict, RunFinding)),
        fine=tuple(name for name, verdict in verdicts.items() if verdict is None),
        undecided={name: verdict.told(trainer) for name, verdict in verdicts.items() if isinstance(verdict, Undecided)},
        trust=tuple(trust),
    )


def reconciled(findings: Iterable[RunFinding]) -> tuple[RunFinding, ...]:
    """Findings worst first; a change that opposes the change of a worse finding is withheld until that one is done.

    Equal severities are ordered by confidence, then by their order in the table of rules. An alternative is left out if
    it opposes the change of any finding, or an alternative of a worse one.
    """
    order = sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), CONFIDENCES.index(one.confidence)))
    taken: dict[str, tuple[str, RunFinding]] = {}
    kept = []
    for one in order:
        if one.change is not None:
            direction, first = taken.setdefault(one.change.knob, (one.change.direction, one))
            if direction != one.change.direction:
                one = replace(one, change=None, evidence=f"{one.evidence} {_deferral(one.change.knob, first)}")
        kept.append(one)
    wanted = {knob: direction for knob, (direction, _) in taken.items()}
    return tuple(_with_agreeing_alternatives(one, wanted) for one in kept)


def _with_agreeing_alternatives(finding: RunFinding, wanted: dict[str, str]) -> RunFinding:
    """The finding without the alternatives that move a knob against `wanted`, to which it adds the others."""
    change = finding.change
    if change is None or not change.alternatives:
        return finding
    agreeing = tuple(one for one in change.alternatives if wanted.setdefault(one.knob, one.direction) == one.direction)
    return replace(finding, change=replace(change, alternatives=agreeing))


def _deferral(knob: str, first: RunFinding) -> str:
    return f"No change is advised here: resolve “{first.name}” first, which concerns the {knob} too."
