"""What a run gained on its test problems, problem by problem."""

from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Cell, Table
from scoregram.runs import Run

KINDS = {"test": "sampled, as trained", "test, greedy": "greedy"}
"""Kinds of groups that hold the rewards of an evaluation, and what they are called."""


def gain_table(run: Run) -> Table:
    """Mean reward on test problems at the first and the last evaluation, and the difference with its interval.

    Needs a run that kept the rewards of its evaluations (`eval_samples`); without rows otherwise.
    """
    found: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in KINDS}
    for group in run.groups(layers=False):
        if group.kind in found:
            found[group.kind].setdefault(group.step, {})[group.prompt_id] = float(group.rewards.nanmean())
    rows: list[tuple[Cell, ...]] = []
    for kind, by_step in found.items():
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
