"""What a run gained on its test problems, problem by problem."""

import math
from collections.abc import Iterable, Mapping

from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Cell, Estimate, Table
from scoregram.runs import GroupRecord

TestRewards = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Mean reward of every test problem, by kind of rollouts, step of the evaluation, and problem."""
SAMPLED = "test"
KINDS = {SAMPLED: "sampled, as trained", "test, greedy": "greedy"}
"""Kinds of groups that hold the rewards of an evaluation, and what they are called."""


def gain_table(tests: TestRewards) -> Table:
    """Mean reward on test problems at the first and the last evaluation, and the difference with its interval.

    Needs a run that kept the rewards of its evaluations (`eval_samples`); without rows otherwise.
    """
    rows: list[tuple[Cell, ...]] = []
    for kind, by_step in tests.items():
        if len(by_step) > 1:
            first, last = by_step[min(by_step)], by_step[max(by_step)]
            both = sorted(first.keys() & last.keys())
            gain = mean_estimate([last[name] - first[name] for name in both])
            before, after = (mean_estimate([each[name] for name in both]) for each in (first, last))
            rows.append((KINDS[kind], len(both), before, after, gain))
    return Table(
        "test-gain",
        "Gain on test problems",
        "Mean reward at the first and the last evaluation; the gain is taken problem by problem, and its 95 % interval "
        "is over problems. One run: the spread between seeds is not in it.",
        ("rollouts", "problems", "before", "after", "gain"),
        tuple(rows),
    )


def last_tested(tests: TestRewards) -> Estimate:
    """Mean reward of sampled rollouts on test problems at the last evaluation, with its interval over problems."""
    by_step = tests.get(SAMPLED)
    return mean_estimate(list(by_step[max(by_step)].values())) if by_step else Estimate(math.nan)


def rewards_by_step(tests: Iterable[GroupRecord]) -> TestRewards:
    """Of the groups of evaluations, whatever else is among them."""
    found: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in KINDS}
    for group in tests:
        if group.kind in found:
            found[group.kind].setdefault(group.step, {})[group.prompt_id] = float(group.rewards.nanmean())
    return found
