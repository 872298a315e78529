"""The results of a comparison: every number of its tables, computed from the run folders."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scoregram.compare.intervals import mean_over_problems, mean_over_seeds, ratio_over_seeds
from scoregram.exhibits import Cell, Estimate
from scoregram.reading import RunReading, read_run, split_kinds
from scoregram.runs import CONFIG_FILE, open_run


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a comparison."""

    seed: int
    run: RunReading

    @cached_property
    def evaluations(self) -> list[tuple[int, float]]:
        """Rollouts sampled before each evaluation, and the accuracy on test problems."""
        lines = [line for line in self.run.lines if "eval/accuracy" in line and "rollouts" in line]
        return [(int(line["rollouts"]), float(line["eval/accuracy"])) for line in lines]

    @property
    def rollouts(self) -> int:
        """Rollouts that the run sampled."""
        return int(self.run.lines[-1].get("rollouts", 0)) if self.run.lines else 0

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len([line for line in self.run.lines if line["step"] > 0])

    @property
    def seconds(self) -> float:
        """Wall time of all steps and evaluations."""
        return sum(float(line.get("time/step", 0)) + float(line.get("time/eval", 0)) for line in self.run.lines)

    def right(self, split: str = "") -> dict[str, bool]:
        """Problem → whether its greedy rollout had a reward of 1 or more at the last evaluation."""
        by_step = self.run.tests.get(split_kinds(split)[1], {})
        return {name: reward >= 1 for name, reward in by_step[max(by_step)].items()} if by_step else {}

    def accuracy_at(self, rollouts: Sequence[float]) -> np.ndarray:
        """Accuracy at these numbers of rollouts, on straight lines between evaluations."""
        return np.interp(rollouts, *np.array(self.evaluations, dtype=np.float64).T)

    def rollouts_to(self, accuracy: float) -> float:
        """Rollouts at which the accuracy was first reached, on straight lines between evaluations; `inf` if never."""
        before = (0, -math.inf)
        for now in self.evaluations:
            if now[1] >= accuracy:
                share = 1.0 if before[1] == -math.inf else (accuracy - before[1]) / (now[1] - before[1])
                return before[0] + share * (now[0] - before[0])
            before = now
        return math.inf

    def mean(self, name: str) -> float:
        """Mean of a scalar over the steps at which it is defined."""
        values = [value for value in self.run.series(name)[1] if not math.isnan(value)]
        return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True, eq=False)
class MethodResult:
    """All runs of one method."""

    label: str
    runs: Sequence[RunResult]
    batch_size: int

    def rights(self, split: str, seeds: Sequence[int], problems: Sequence[str]) -> np.ndarray:
        """`(seeds, problems)`: 1 where the last greedy rollout was right."""
        by_seed = {run.seed: run.right(split) for run in self.runs}
        return np.array([[float(by_seed[seed][name]) for name in problems] for seed in seeds])

    def accuracy(self, split: str = "") -> Estimate:
        """Accuracy after the last step, over seeds and problems; the interval is cut off at 0 and 1."""
        tested = {run.seed: run.right(split) for run in self.runs if run.right(split)}
        if not tested:
            return Estimate(math.nan)
        found = mean_over_problems(self.rights(split, list(tested), shared_problems(tested.values())))
        low, high = (float(np.clip(end, 0.0, 1.0)) for end in (found.low, found.high))
        return Estimate(found.value, low, high)

    def gain_over(self, other: "MethodResult", split: str = "") -> Estimate:
        """Accuracy minus that of another method, on the same seeds and problems."""
        mine, theirs = ({run.seed: run.right(split) for run in one.runs} for one in (self, other))
        seeds = [seed for seed in mine if mine[seed] and theirs.get(seed)]
        if not seeds:
            return Estimate(math.nan)
        problems = shared_problems([table[seed] for table in (mine, theirs) for seed in seeds])
        return mean_over_problems(self.rights(split, seeds, problems) - other.rights(split, seeds, problems))

    def rollouts_to(self, accuracy: float) -> Cell:
        """Mean over seeds of the rollouts to reach an accuracy; if some seeds never reached it, how many did."""
        needed = [run.rollouts_to(accuracy) for run in self.runs if run.evaluations]
        reached = [value for value in needed if math.isfinite(value)]
        if len(reached) < len(needed):
            return f"{len(reached)} of {len(needed)} seeds"
        return mean_over_seeds(needed)

    def extra(self) -> Estimate:
        """Share of the sampled rollouts that no update was computed from: prefixes, greedy ones, dropped groups."""
        all_of_them = [float(run.rollouts) for run in self.runs]
        trained = [float(run.steps * self.batch_size) for run in self.runs]
        return ratio_over_seeds([a - t for a, t in zip(all_of_them, trained, strict=True)], all_of_them)

    def signal_to_noise(self) -> Estimate:
        """`|E ĝ|²` over `E|ĝ − E ĝ|²` of the update `ĝ`, both summed over measured steps."""
        pooled = [run.run.update_power for run in self.runs]
        return ratio_over_seeds([power.signal for power in pooled], [power.noise for power in pooled])

    def noise(self) -> Estimate:
        """`E|ĝ − E ĝ|²` of the update `ĝ`, mean over measured steps."""
        return mean_over_seeds([run.run.update_power.noise for run in self.runs])

    def rank_over_null(self) -> Estimate:
        """Mean effective rank of the groups over the mean of its null."""
        ranks = [run.run.rank_means for run in self.runs]
        known = [pair for pair in ranks if not math.isnan(pair[0])]
        return ratio_over_seeds([rank for rank, _ in known], [null for _, null in known])

    def mean(self, name: str) -> Estimate:
        """Mean over seeds of the mean of a scalar over measured steps."""
        return mean_over_seeds([run.mean(name) for run in self.runs])


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
    def target(self) -> float:
        """Accuracy for the column `rollouts to …`."""
        stated = self.setting.get("target")
        return float(stated) if stated is not None else self.methods[0].accuracy().value


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
        methods.append(MethodResult(label, runs, own_batch_size(runs, setting)))
    return MethodComparison(setting, methods)


def own_batch_size(runs: Sequence[RunResult], setting: Mapping[str, Any]) -> int:
    """Rollouts per step of a method, which may differ from the comparison's."""
    return int(runs[0].run.config.get("batch_size", setting["batch_size"])) if runs else int(setting["batch_size"])


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
