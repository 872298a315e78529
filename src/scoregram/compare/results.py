"""The results of a comparison: every number of its tables, computed from the run folders."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scoregram.bootstrap import t_mean
from scoregram.checks import fail
from scoregram.compare.intervals import bounded_interval, mean_over_problems, method_noise, ratio_over_seeds
from scoregram.exhibits import Cell, Estimate
from scoregram.reading import GREEDY_TEST, SAMPLED_TEST, RunReading, read_run, split_kinds
from scoregram.runs import CONFIG_FILE, open_run


@dataclass(frozen=True)
class RankedOutcome:
    """What methods are ranked by: a number from the reward of the greedy rollout of each test problem."""

    name: str
    scalar: str
    """The mean over problems is logged as `eval/SCALAR`."""
    scale: float
    """Factor from the mean to what tables show."""
    unit: str
    """Unit of a difference."""
    ends: tuple[float, float]
    """Least and largest mean."""

    @property
    def gain_ends(self) -> tuple[float, float]:
        """Least and largest difference of two means."""
        return self.ends[0] - self.ends[1], self.ends[1] - self.ends[0]

    def of(self, reward: float) -> float:
        """The outcome of one problem. A missing reward is a wrong answer for the accuracy, and `nan` for a return."""
        return float(reward >= 1) if self is ACCURACY else reward


def is_accuracy(target: float) -> bool:
    """Whether a target can be reached and is not reached from the start, where the outcome is an accuracy."""
    return 0 < target <= 1


def require_accuracy(target: float, reason: str) -> None:
    """Raise if a target is no accuracy; `reason` says why it must be one."""
    if not is_accuracy(target):
        requirement = f"must be an accuracy above 0 and at most 1, as {reason}"
        fail("compare --target", requirement, f"{target:g}", "Write 0.8 for 80 %.")


ACCURACY = RankedOutcome("accuracy", "accuracy", 100.0, "points", (0.0, 1.0))
POSITIVE_ENDS, SHARE_ENDS, CORRELATION_ENDS = (0.0, math.inf), (0.0, 1.0), (-1.0, 1.0)
"""The least and the largest value of a time or power, a share and a correlation."""
MEAN_RETURN = RankedOutcome("mean return", "reward", 1.0, "return", (-math.inf, math.inf))


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a comparison."""

    seed: int
    run: RunReading

    def evaluations(self, outcome: RankedOutcome = ACCURACY) -> list[tuple[int, float]]:
        """Rollouts sampled before each evaluation that judged a rollout, and the mean outcome of the test problems."""
        name = f"eval/{outcome.scalar}"
        lines = [line for line in self.run.lines if "rollouts" in line and not math.isnan(line.get(name, math.nan))]
        return [(int(line["rollouts"]), float(line[name])) for line in lines]

    @property
    def rollouts(self) -> int:
        """Rollouts that the run sampled."""
        return int(self.run.lines[-1].get("rollouts", 0)) if self.run.lines else 0

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len([line for line in self.run.lines if line["step"] > 0])

    @property
    def trained(self) -> int:
        """Rollouts that updates were computed from: `Σ groups × group size` over the steps that were not skipped.

        A step counts no more than it sampled: with branches, each turn of an episode has a group, and all groups of an
        episode together count as one. A group has `control/group_size` rollouts on average where the run decides it.
        """
        total = before = 0
        for line in self.run.lines:
            now = int(line.get("rollouts", before))
            size = line.get("control/group_size", self.run.config.get("group_size", 0))
            if "groups" in line and not line.get("skipped"):
                total += min(int(line["groups"]) * int(size), now - before)
            before = now
        return total

    @property
    def seconds(self) -> float:
        """Wall time of all steps and evaluations."""
        return sum(float(line.get("time/step", 0)) + float(line.get("time/eval", 0)) for line in self.run.lines)

    def outcomes(self, split: str = "", outcome: RankedOutcome = ACCURACY) -> dict[str, float]:
        """Problem → outcome of its greedy rollout at the last evaluation; problems without one are left out.

        Empty if no rollout of the evaluation has a reward.
        """
        by_step = self.run.tests.get(split_kinds(split)[1], {})
        last = by_step[max(by_step)] if by_step else {}
        if all(map(math.isnan, last.values())):
            return {}
        found = {name: outcome.of(reward) for name, reward in last.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    @cached_property
    def is_graded(self) -> bool:
        """Whether some greedy rollout of an evaluation had a reward other than 0 and 1."""
        kinds = [kind for kind in self.run.tests if kind.endswith(GREEDY_TEST.removeprefix(SAMPLED_TEST))]
        rewards = [reward for kind in kinds for by in self.run.tests[kind].values() for reward in by.values()]
        return any(reward not in (0.0, 1.0) and not math.isnan(reward) for reward in rewards)

    def outcome_at(self, rollouts: Sequence[float], outcome: RankedOutcome = ACCURACY) -> np.ndarray:
        """Mean outcome at these numbers of rollouts, on straight lines between evaluations."""
        return np.interp(rollouts, *np.array(self.evaluations(outcome), dtype=np.float64).T)

    def rollouts_to(self, level: float, outcome: RankedOutcome = ACCURACY) -> float:
        """Rollouts at which a mean outcome was first reached, on straight lines between evaluations; `inf` if never."""
        before = (0, -math.inf)
        for now in self.evaluations(outcome):
            if now[1] >= level:
                share = 1.0 if before[1] == -math.inf else (level - before[1]) / (now[1] - before[1])
                return before[0] + share * (now[0] - before[0])
            before = now
        return math.inf


@dataclass(frozen=True, eq=False)
class MethodResult:
    """All runs of one method."""

    label: str
    runs: Sequence[RunResult]

    def outcome_rows(
        self, split: str, outcome: RankedOutcome, seeds: Sequence[int], problems: Sequence[str]
    ) -> np.ndarray:
        """`(seeds, problems)`: outcome of the last greedy rollout."""
        by_seed = {run.seed: run.outcomes(split, outcome) for run in self.runs}
        return np.array([[by_seed[seed][name] for name in problems] for seed in seeds])

    def tested(self, outcome: RankedOutcome, split: str = "") -> dict[int, dict[str, float]]:
        """Seed → problem → outcome of its last greedy rollout; seeds without one are left out."""
        return {run.seed: found for run in self.runs if (found := run.outcomes(split, outcome))}

    def final(self, split: str = "", outcome: RankedOutcome = ACCURACY) -> Estimate:
        """Mean outcome after the last step, over seeds and problems; the interval is cut off at the outcome's ends."""
        tested = self.tested(outcome, split)
        if not tested:
            return Estimate(math.nan)
        rows = self.outcome_rows(split, outcome, list(tested), shared_problems(tested.values()))
        return bounded_interval(mean_over_problems(rows), *outcome.ends)

    def gain_over(self, other: "MethodResult", outcome: RankedOutcome = ACCURACY) -> Estimate:
        """Mean outcome minus that of another method, on the same seeds and test problems.

        The interval of an accuracy is cut off at 100 points.
        """
        mine, theirs = (one.tested(outcome) for one in (self, other))
        seeds = [seed for seed in mine if seed in theirs]
        if not seeds:
            return Estimate(math.nan)
        problems = shared_problems([table[seed] for table in (mine, theirs) for seed in seeds])
        rows = [one.outcome_rows("", outcome, seeds, problems) for one in (self, other)]
        return bounded_interval(mean_over_problems(rows[0] - rows[1]), *outcome.gain_ends)

    def rollouts_to(self, level: float, outcome: RankedOutcome = ACCURACY) -> Cell:
        """Mean over seeds of the rollouts to reach a level; if some seeds never reached it, how many did."""
        needed = [run.rollouts_to(level, outcome) for run in self.runs if run.evaluations(outcome)]
        reached = [value for value in needed if math.isfinite(value)]
        if len(reached) < len(needed):
            return f"{len(reached)} of {len(needed)} seeds"
        return bounded_interval(t_mean(needed), *POSITIVE_ENDS)

    def minutes(self) -> Estimate:
        """Wall time of a run."""
        return bounded_interval(t_mean([run.seconds / 60 for run in self.runs]), *POSITIVE_ENDS)

    def extra(self) -> Estimate:
        """Share of the sampled rollouts that no update was computed from: prefixes, greedy ones, dropped groups."""
        all_of_them = [float(run.rollouts) for run in self.runs]
        left = [float(run.rollouts - run.trained) for run in self.runs]
        return bounded_interval(ratio_over_seeds(left, all_of_them), *SHARE_ENDS)

    def signal_to_noise(self) -> Estimate:
        """`|E ĝ|²` over `E|ĝ − E ĝ|²` of the update `ĝ`, both means over the measured steps of the last third.

        Their means over seeds are divided. The signal is an unbiased estimate and may be below 0, so the interval is
        not cut off there. Runs without a measurement in their last third are left out; `nan` if all are.
        """
        powers = [run.run.update_power for run in self.runs]
        pooled = [power for power in powers if not math.isnan(power.signal + power.noise)]
        return ratio_over_seeds([power.signal for power in pooled], [power.noise for power in pooled])

    def noise(self) -> Estimate:
        """`E|ĝ − E ĝ|²` of the update `ĝ`, mean over the measured steps of the last third."""
        return bounded_interval(t_mean([run.run.update_power.noise for run in self.runs]), *POSITIVE_ENDS)

    def rank_over_null(self) -> Estimate:
        """Mean effective rank of the groups of the last third over the mean of its null."""
        ranks = [run.run.rank_means for run in self.runs]
        known = [pair for pair in ranks if not math.isnan(pair[0])]
        return bounded_interval(
            ratio_over_seeds([rank for rank, _ in known], [null for _, null in known]), *POSITIVE_ENDS
        )

    def mean(self, name: str, ends: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
        """Mean over seeds of the mean of a scalar over the last third; `ends` are its least and largest value."""
        return bounded_interval(t_mean([run.run.last_mean(name) for run in self.runs]), *ends)


def shared_problems(tables: Any) -> list[str]:
    """Problems that all evaluations have in common."""
    return sorted(set.intersection(*(set(table) for table in tables)))


@dataclass(frozen=True, eq=False)
class MethodComparison:
    """The results of all methods in a comparison's folder."""

    setting: Mapping[str, Any]
    methods: Sequence[MethodResult]
    """In order; the others are compared with the first."""

    @cached_property
    def splits(self) -> list[str]:
        """Held-out splits of the task, in order."""
        names = {name for method in self.methods for run in method.runs for line in run.run.lines[:1] for name in line}
        parts = [name.split("/") for name in sorted(names)]
        return [part[1] for part in parts if len(part) == 3 and part[0] == "eval" and part[2] == "accuracy"]

    @cached_property
    def outcome(self) -> RankedOutcome:
        """The accuracy if every reward of an evaluation is 0 or 1, otherwise the mean return."""
        return MEAN_RETURN if any(run.is_graded for method in self.methods for run in method.runs) else ACCURACY

    @cached_property
    def target(self) -> float:
        """Mean outcome to reach, for the column `rollouts to …`: the stated one, or where the first method ends.

        `nan` if it is not stated and the first method has no finished, tested run; also if the outcome is an accuracy
        and the target is none, such as 80 or 0.
        """
        stated = self.setting.get("target")
        target = self.methods[0].final(outcome=self.outcome).value if stated is None else float(stated)
        return math.nan if self.outcome is ACCURACY and not is_accuracy(target) else target

    @cached_property
    def needed_gain(self) -> float:
        """Least difference to the first method that survives a correction for the number of methods.

        `method_noise` of the means over the problems and seeds that all tested methods share. `nan` if they share fewer
        than two seeds, for fewer than three methods (one comparison needs no correction), or if no run differs.
        """
        tables = {method: found for method in self.methods if (found := method.tested(self.outcome))}
        seeds = sorted(set.intersection(*map(set, tables.values()))) if tables else []
        if len(tables) < 3 or self.methods[0] not in tables or len(seeds) < 2:
            return math.nan
        problems = shared_problems([table[seed] for table in tables.values() for seed in seeds])
        rows = [method.outcome_rows("", self.outcome, seeds, problems) for method in tables]
        return method_noise(np.mean(rows, axis=2)).needed_gain or math.nan


def read_comparison(folder: Path, setting: Mapping[str, Any]) -> MethodComparison:
    """The finished runs of a comparison, method by method; runs that are missing or incomplete are left out."""
    methods = []
    for label, name in setting["methods"].items():
        runs = []
        for seed in range(setting["seeds"]):
            path = folder / "runs" / name / f"seed-{seed}"
            result = RunResult(seed, read_run(open_run(path))) if (path / CONFIG_FILE).is_file() else None
            if result is not None and result.rollouts >= setting["rollouts"]:
                runs.append(result)
        methods.append(MethodResult(label, runs))
    return MethodComparison(setting, methods)


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
