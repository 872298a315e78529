"""Which finding is the cause of which other one, so that a consequence gets no advice of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scoregram.advice.completion_rules import MOSTLY_TRUNCATED
from scoregram.advice.findings import SEVERITIES, RuleVerdict, RunFinding
from scoregram.advice.gradient_rules import SINGLE_STEPS, not_finite_log_steps, restart_before_nan
from scoregram.advice.logs import RunLog
from scoregram.advice.reward_rules import deferred_verdict
from scoregram.advice.trends import LEAST_STEPS

NEARLY_ALL = 0.9
"""Truncated share from which on the finished completions are too few to show that the reward function works."""

Pair = Callable[[RunFinding, RunFinding, RunLog], bool]


@dataclass(frozen=True)
class CausalRow:
    """A finding that explains another one where both are found."""

    cause: str
    consequence: str
    """Name of a finding; `*` for any other finding on logged scalars."""
    reason: str
    """Why, as a sentence that a reader of the consequence understands."""
    holds: Pair
    """Whether the numbers of both findings allow it."""
    replaces: bool = False
    """Whether nothing of the consequence is left to say until the cause is repaired."""


def _always(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    return True


def _begins_after_nan(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    """Whether a finding begins with a NaN that stays, or within `LEAST_STEPS` logged steps after one that does not."""
    if consequence.since is None or cause.since is None or consequence.since < cause.since:
        return False
    steps = [int(line["step"]) for line in log.lines]
    bad = set(not_finite_log_steps(log))
    before = [step for step in steps if step <= consequence.since]
    return steps[-1] in bad or bool(bad.intersection(before[-LEAST_STEPS - 1 :]))


def _asks_for_more(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    return consequence.change is not None and consequence.change.direction == "up"


def _begins_no_later(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    return cause.since is None or consequence.since is None or cause.since <= consequence.since


def _most_are_cut(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    return cause.number.value > MOSTLY_TRUNCATED


def _nearly_all_were_cut(cause: RunFinding, consequence: RunFinding, log: RunLog) -> bool:
    """Whether nearly all completions were cut off from the step on from which all rewards are equal."""
    cut = log.series("truncated")
    during = cut.values[cut.steps >= (consequence.since or 0)]
    return len(during) > 0 and float(during.mean()) >= NEARLY_ALL


CAUSES: tuple[CausalRow, ...] = (
    CausalRow(
        "NaN",
        "*",
        "Once the weights hold a NaN, every later rollout is invalid.",
        _begins_after_nan,
        True,
    ),
    CausalRow(
        "repetition", "truncation", "A completion that repeats itself goes on until the limit cuts it off.", _always
    ),
    CausalRow(
        "repetition",
        "entropy collapse",
        "The next token of a text that repeats itself is nearly certain, so its entropy is small.",
        _begins_no_later,
    ),
    CausalRow(
        "length gaming",
        "truncation",
        "A policy that is paid for length fills any limit, so a longer one would pay it more.",
        _always,
    ),
    CausalRow(
        "KL blow-up",
        "truncation",
        "A policy that is far from its reference may have lost how to end.",
        _begins_no_later,
    ),
    CausalRow(
        "truncation",
        "constant reward",
        "A completion that is cut off before its answer gets the same reward from a verifier that works.",
        _nearly_all_were_cut,
    ),
    CausalRow(
        "truncation",
        "dead groups",
        "Most rewards are of unfinished texts, so they do not say which prompts are too hard or too easy.",
        _most_are_cut,
    ),
    CausalRow(
        "phantom signal",
        "dead groups",
        "The total reward is that of the other functions, so it does not say which prompts are too hard or too easy.",
        _always,
    ),
    CausalRow(
        "dominating rollouts",
        "batch size",
        "The noise is that of a single rollout at each step, so more rollouts would mostly pay for it again.",
        _asks_for_more,
    ),
    CausalRow(
        "dominating rollouts",
        "group size",
        "The error of each group size is that of a single rollout at each step.",
        _always,
    ),
    CausalRow(
        "dominating rollouts",
        "gradient spikes",
        "The norm of a step is that of its largest rollout.",
        _always,
    ),
    CausalRow(
        "KL blow-up",
        "falling reward",
        "A policy that is far from its reference may have lost what it could do.",
        _always,
    ),
    CausalRow(
        "repetition",
        "falling reward",
        "A completion that repeats itself seldom gives an answer.",
        _begins_no_later,
    ),
    CausalRow(
        "truncation",
        "falling reward",
        "A completion that is cut off before its answer is not paid for it.",
        _begins_no_later,
    ),
    CausalRow(
        "constant reward",
        "falling reward",
        "The equal rewards at the end are the lower ones.",
        _always,
    ),
    CausalRow(
        "reward against held-out score",
        "dead groups",
        "The reward that is equal in these groups is the exploited one, so it does not say which prompts are too easy.",
        _always,
    ),
)
"""Which finding explains which, one row each. A cause that is itself explained comes before its consequences here."""


def causes_first(verdicts: Mapping[str, RuleVerdict], log: RunLog) -> dict[str, RuleVerdict]:
    """The verdicts with every cause before its consequences, and no change for a consequence.

    A consequence is at most *possible* as a fault of its own, and its cause is at least as severe. Where nothing of it
    is left to say it becomes an open question.
    """
    told = dict(verdicts)
    for row in CAUSES:
        for name in _consequences(row, told):
            cause, consequence = told[row.cause], told[name]
            if not isinstance(cause, RunFinding) or not isinstance(consequence, RunFinding):
                continue
            if not row.holds(cause, consequence, log):
                continue
            if row.replaces:
                told |= {row.cause: _with_breakdown(cause, consequence, log), name: deferred_verdict(cause.name)}
                continue
            severity = min(cause.severity, consequence.severity, key=SEVERITIES.index)
            told |= {row.cause: replace(cause, severity=severity), name: _explained(consequence, cause, row.reason)}
            if list(told).index(name) < list(told).index(row.cause):  # equal findings keep the order of the verdicts
                told[name] = told.pop(name)
    return told


def _with_breakdown(cause: RunFinding, consequence: RunFinding, log: RunLog) -> RunFinding:
    """A NaN that other findings follow: as severe as they are, and no step that a run just goes on from."""
    severity = min(cause.severity, consequence.severity, key=SEVERITIES.index)
    if cause.severity == "critical" or cause.change is None or cause.change.knob != SINGLE_STEPS:
        return replace(cause, severity=severity)
    return replace(
        cause,
        severity=severity,
        sentence=f"{cause.sentence} “{consequence.name}” begins at step {consequence.since}.",
        evidence=f"later numbers are finite, but what begins within {LEAST_STEPS} steps may come from the same update.",
        change=restart_before_nan(log, not_finite_log_steps(log)),
    )


def _consequences(row: CausalRow, verdicts: Mapping[str, RuleVerdict]) -> list[str]:
    if row.consequence != "*":
        return [row.consequence] if {row.cause, row.consequence} <= verdicts.keys() else []
    return [name for name in verdicts if name != row.cause] if row.cause in verdicts else []


def _explained(finding: RunFinding, cause: RunFinding, reason: str) -> RunFinding:
    if finding.change is None:  # another cause has explained it
        return replace(finding, confidence="possible")
    told = f"{finding.evidence} No change is advised here: resolve “{cause.name}” first. {reason}"
    return replace(finding, change=None, confidence="possible", evidence=told)
