"""Metrics of a step from its groups, added up one by one: no group is kept."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from scoregram.runs import GroupRecord
from scoregram.statistics import baseline_saving, group_moments
from scoregram.training import reward_reading

MARKS = ("group", "rollouts_left_out", "late")
"""Statistics of a group that are counts or names, not readings."""
CHECKS = ("exact", "round_trip", "count_agreement", "log_prob_gap")
OWN = ("token_log_prob", "finished")
"""Statistics of a group that are means over its rollouts: of the dump, and those that a trainer logs too."""
WORST = "log_prob_gap_max"
PER_ROLLOUT = ("reward", "advantage_abs")
SUMMED = ("live_groups", "groups")


class Tally:
    """What the groups of one step add up to."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.worst = math.nan
        self.saved = self.variance = 0.0
        self.whole: dict[str, float] = {}
        """Readings that need the Gram between prompts, if it was measured."""

    def add(self, group: GroupRecord) -> None:
        """Count a group that was measured now or before."""
        size, known = len(group.rewards), group.rewards.isfinite()
        for name, value in group.statistics.items():
            if name == WORST:
                self.worst = value if not self.worst >= value else self.worst
            elif name in CHECKS:
                self._mean(f"dump/{name}", value, size)
            elif name in OWN:
                self._mean(name, value, size)
            elif name not in MARKS:
                self._mean(f"group/{name}", value, 1)
        self.sums["dump/rollouts"] += size
        self.sums["dump/rollouts_left_out"] += group.statistics.get("rollouts_left_out", 0)
        self.sums["dump/late_groups"] += group.statistics.get("late", 0)
        self.sums["dump/without_reward"] += size - int(known.sum())
        self.sums["dump/groups_of_one"] += size == 1
        self._mean("length", float(group.lengths.double().mean()), size)
        if bool(known.any()):
            self._add_rewards(
                reward_reading(group.rewards[known][None], group.advantages[known][None]), int(known.sum())
            )
        else:
            self.sums["groups"] += 1
        if group.gram is not None:
            self._mean("gram/score_norm", float(group.gram.diagonal().clamp(min=0).sqrt().mean()), size)
            self._add_saving(group)

    def scalars(self) -> dict[str, Any]:
        """The line of the step."""
        made: dict[str, Any] = {name: self.sums[name] / self.counts[name] for name in self.counts if self.counts[name]}
        made |= {name: math.nan for name in self.counts if not self.counts[name]}
        made |= {name: value for name, value in self.sums.items() if name not in self.counts}
        made["gram/baseline_saving"] = self.saved / self.variance if self.variance > 0 else math.nan
        if not math.isnan(self.worst):
            made[f"dump/{WORST}"] = self.worst
        return made | self.whole

    def _mean(self, name: str, value: float, weight: int) -> None:
        known = not math.isnan(value)
        self.counts[name] += weight if known else 0
        self.sums[name] += value * weight if known else 0.0

    def _add_rewards(self, reading: Mapping[str, float], size: int) -> None:
        for name, value in reading.items():
            if name in SUMMED:
                self.sums[name] += value
            else:
                self._mean(name, value, size if name in PER_ROLLOUT else 1)

    def _add_saving(self, group: GroupRecord) -> None:
        """Numerator and denominator of `BaselineSaving.fraction`, which are sums over groups."""
        if len(group.rewards) < 4 or group.gram is None or not bool(group.rewards.isfinite().all()):
            return
        blocks, rewards = group.gram[None], group.rewards[None].double()
        self.saved += float((baseline_saving(blocks, rewards).per_prompt * rewards.shape[1]).sum())
        self.variance += float(group_moments(blocks, torch.as_tensor(rewards)).oracle_trace.sum())
