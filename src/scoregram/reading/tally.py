"""The numbers of a step whose groups arrive one at a time: sums and counts are kept, groups are not.

A dump may hold more rollouts than memory, and a resumed measurement finds some groups of a step on disk already. The
numbers are those of `read_step` for the same groups, up to the order of summation.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from scoregram.reading.group import SHARE_COLUMN
from scoregram.reading.step import BLOCK_SCALARS, block_scalars, outcome_scalars
from scoregram.runs import GroupRecord

_PLACES = ("group", "rollouts_left_out", "late", SHARE_COLUMN)
"""Marks of a group that are positions, counts or parts of a whole, so they are not averaged."""
_DUMP_CHECKS = ("exact", "round_trip", "count_agreement", "log_prob_gap")
"""Marks that compare a dump with the policy, logged as `dump/NAME`: means over rollouts."""
_ROLLOUT_MEANS = ("token_log_prob", "finished")
"""Marks that a trainer logs under the same name: means over rollouts."""
_LARGEST_GAP = "log_prob_gap_max"
_MEANS_OVER_JUDGED = ("reward", "advantage_abs")
"""Reward scalars that are means over the rollouts that have a reward; the others are means over groups, or counts."""
_COUNTS = ("live_groups", "groups", "judged_groups")


class StepTally:
    """Scalars of one step, accumulated group by group."""

    def __init__(self) -> None:
        self.between_prompts: dict[str, float] = {}
        """Scalars that need the Gram between prompts; empty unless it was measured."""
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._largest_gap = math.nan

    @property
    def rollouts(self) -> int:
        """Rollouts of the groups added so far."""
        return int(self._sums["dump/rollouts"])

    def add(self, group: GroupRecord) -> None:
        """Add a measured group."""
        size, judged = len(group.rewards), int(group.rewards.isfinite().sum())
        self._add_statistics(group.statistics, size)
        self._sums["dump/rollouts"] += size
        self._sums["dump/rollouts_left_out"] += group.statistics.get("rollouts_left_out", 0)
        self._sums["dump/late_groups"] += group.statistics.get("late", 0)
        self._sums["dump/without_reward"] += size - judged
        self._sums["dump/groups_of_one"] += size == 1
        self._add_mean("length", float(group.lengths.double().mean()), size)
        for name, value in outcome_scalars(group.rewards[None], group.advantages[None]).items():
            if name in _COUNTS:
                self._sums[name] += value
            else:
                self._add_mean(name, value, judged if name in _MEANS_OVER_JUDGED else 1)
        if group.gram is not None:
            self._add_mean("gram/score_norm", float(group.gram.diagonal().clamp(min=0).sqrt().mean()), size)
            self._add_noise(group)

    def scalars(self) -> dict[str, float]:
        """Name → number, as in `metrics.jsonl`; `nan` for a mean to which no group contributed."""
        sums, counts = self._sums, self._counts
        scalars = {name: sums[name] / count if count else math.nan for name, count in counts.items()}
        scalars |= {name: value for name, value in sums.items() if name not in counts}
        saved, variance = (scalars.get(f"gram/{name}", math.nan) for name in ("optimal_loo_saved", "rloo_variance"))
        scalars["gram/baseline_saving"] = saved / variance if variance > 0 else math.nan
        if not math.isnan(self._largest_gap):
            scalars[f"dump/{_LARGEST_GAP}"] = self._largest_gap
        return scalars | self.between_prompts

    def _add_statistics(self, statistics: Mapping[str, float], size: int) -> None:
        for name, value in statistics.items():
            if name == _LARGEST_GAP:
                self._largest_gap = value if not self._largest_gap >= value else self._largest_gap
            elif name in _DUMP_CHECKS:
                self._add_mean(f"dump/{name}", value, size)
            elif name in _ROLLOUT_MEANS:
                self._add_mean(name, value, size)
            elif name not in _PLACES:
                self._add_mean(f"group/{name}", value, 1)

    def _add_mean(self, name: str, value: float, weight: int) -> None:
        is_defined = not math.isnan(value)
        self._counts[name] += weight if is_defined else 0
        self._sums[name] += value * weight if is_defined else 0.0

    def _add_noise(self, group: GroupRecord) -> None:
        """Add `block_scalars` of a group that is large enough and has all rewards; `baseline_saving` is their ratio."""
        is_complete = len(group.rewards) >= 4 and bool(group.rewards.isfinite().all())
        self._sums["gram/complete_prompts"] += is_complete
        if group.gram is not None and is_complete:
            found = block_scalars(group.gram[None], group.rewards[None].double())
            for name in BLOCK_SCALARS:
                if name != "gram/baseline_saving":  # a ratio of the others
                    self._add_mean(name, found[name], 1)
