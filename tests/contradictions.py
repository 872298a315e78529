"""Whether findings contradict each other: a check of its own, beside the code that prevents it."""

from collections.abc import Sequence

from scoregram.advice import Change, RunFinding


def moves(change: Change) -> set[tuple[str, str]]:
    """Knob and direction of the change and of each alternative."""
    return {(change.knob, change.direction), *((one.knob, one.direction) for one in change.alternatives)}


def contradictions(findings: Sequence[RunFinding]) -> list[tuple[str, str]]:
    """Pairs of findings that move one knob in two directions, alternatives included."""
    changes = [(one.name, one.change) for one in findings if one.change is not None]
    return [
        (name, other_name)
        for place, (name, change) in enumerate(changes)
        for other_name, other in changes[place + 1 :]
        if any(knob == same and one != two for knob, one in moves(change) for same, two in moves(other))
    ]
