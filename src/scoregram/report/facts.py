"""What one run folder holds, read once, and the small questions that its report asks of it.

A run may lack any part: steps without a Gram, no evaluation, no groups, an end that is still being written.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from scoregram.checks import ScoregramError
from scoregram.report.gains import TestRewards, rewards_by_step
from scoregram.runs import GroupRecord, Run
from scoregram.spectra import concentrated_energies, effective_rank, spread_energies
from scoregram.statistics import group_outcomes
from scoregram.training import group_reading


@dataclass(frozen=True, eq=False)
class GroupFacts:
    """One group: its record and what follows from it."""

    record: GroupRecord
    reading: Mapping[str, float]
    """Scalars of the group, empty where no Gram was measured."""
    alive: bool
    right: int | None
    """Rollouts with reward 1; None unless every reward is 0 or 1."""

    @property
    def size(self) -> int:
        """Rollouts of the group."""
        return len(self.record.rewards)

    @cached_property
    def rows(self) -> int:
        """Rollouts that pull: the largest rank that the stacked matrix could have."""
        if self.record.gram is None:
            return 0
        return int(((self.record.advantages != 0) & (self.record.gram.diagonal() > 0)).sum())

    @cached_property
    def possible_ranks(self) -> tuple[float, float]:
        """Least and most effective rank that the top-1 fraction and the pulling rollouts allow; `nan` if unknown.

        The ends of `feasible_intervals`, of this one metric alone: a run has many groups.
        """
        top1 = self.reading.get("top1_fraction", math.nan)
        if math.isnan(top1) or not self.rows or self.reading.get("numerical_rank", 0) > self.rows:
            return math.nan, math.nan  # other weights than the stored advantages were read
        try:
            energies = torch.stack([concentrated_energies(top1, self.rows), spread_energies(top1, self.rows)])
        except ScoregramError:  # stored statistics that do not belong to the stored advantages
            return math.nan, math.nan
        least, most = effective_rank(energies.sqrt()).tolist()
        return least, most


@dataclass(frozen=True, eq=False)
class Facts:
    """A run as its report sees it."""

    config: Mapping[str, Any]
    notes: tuple[str, ...]
    lines: Sequence[Mapping[str, float | int | bool]]
    """One mapping a step, from `metrics.jsonl`."""
    groups: Sequence[GroupFacts]
    """Groups that were trained on, in order of step; those of probes only if there are no others."""
    tests: TestRewards = field(default_factory=dict)
    """Rewards of evaluations."""

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which the policy was trained or a group was recorded."""
        trained = {int(line["step"]) for line in self.lines if "reward" in line or "skipped" in line}
        return sorted(trained | {group.record.step for group in self.groups})

    @cached_property
    def ending(self) -> range:
        """The last third of the run, from its first to its last step; empty without a step."""
        if not self.steps:
            return range(0)
        last = self.steps[-math.ceil(len(self.steps) / 3) :]
        return range(last[0], last[-1] + 1)

    @cached_property
    def last_groups(self) -> list[GroupFacts]:
        """Groups of the last third."""
        return [group for group in self.groups if group.record.step in self.ending]

    @cached_property
    def last_lines(self) -> list[Mapping[str, float | int | bool]]:
        """Steps of the last third."""
        return [line for line in self.lines if int(line["step"]) in self.ending]

    @cached_property
    def group_size(self) -> int | None:
        """The usual number of rollouts of a prompt; None where nothing says it."""
        sizes = Counter(group.size for group in self.groups)
        if sizes:
            return sizes.most_common(1)[0][0]
        stated = self.config.get("group_size")
        return stated if isinstance(stated, int) else None

    @cached_property
    def batch_size(self) -> float:
        """Rollouts of a step in the last third, on average; `nan` where nothing says it."""
        per_step = Counter[int]()
        for group in self.last_groups:
            per_step[group.record.step] += group.size
        return sum(per_step.values()) / len(per_step) if per_step else math.nan

    def series(self, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps that logged a scalar, and its values; both empty if none did, or if it was never defined."""
        found = [(float(line["step"]), float(line[name])) for line in self.lines if name in line]
        if all(math.isnan(value) for _, value in found):
            return (), ()
        return tuple(step for step, _ in found), tuple(value for _, value in found)

    def last(self, name: str) -> list[float]:
        """Defined values of a scalar in the last third."""
        values = [float(line[name]) for line in self.last_lines if name in line]
        return [value for value in values if not math.isnan(value)]


def read_facts(run: Run) -> Facts:
    """Everything that the report needs, in one pass over the folder."""
    tests, records = [], []
    for record in run.groups(layers=False):
        (tests if record.kind.startswith("test") else records).append(record)
    trained = [record for record in records if record.kind == "train"] or records
    return Facts(
        config=run.config,
        notes=run.notes,
        lines=run.metrics(),
        groups=[group_facts(record) for record in trained],
        tests=rewards_by_step(tests),
    )


def group_facts(record: GroupRecord) -> GroupFacts:
    """A group with its scalars, taken from the record or made from its Gram; rollouts without a reward do not count."""
    rewards = record.rewards.double()
    rewards = rewards[rewards.isfinite()]
    alive = len(rewards) > 0 and bool(group_outcomes(rewards[None]).alive[0])
    whole = len(rewards) == len(record.rewards) and bool(((rewards == 0) | (rewards == 1)).all())
    right = int(rewards.sum()) if whole and len(rewards) else None
    return GroupFacts(record, _reading(record), alive, right)


def _reading(record: GroupRecord) -> Mapping[str, float]:
    if "effective_rank" in record.statistics:
        return {name: float(value) for name, value in record.statistics.items()}
    if record.gram is None:
        return {}
    try:
        return group_reading(record.gram, record.rewards, record.advantages)
    except ScoregramError:  # no Gram, or advantages that are not finite: no reading
        return {}
