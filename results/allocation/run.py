"""Fixed group sizes, a moving one, allocation and dynamic sampling at equal rollouts.

python run.py --out FOLDER                 train what is missing, task by task, then write runs.json beside this file
python run.py --out FOLDER --only-write    write runs.json from the runs that are complete
python run.py --table                      the tables of runs.json

Every run is an ordinary folder under FOLDER/TASK/runs, and the same command continues after an interruption. All
methods are RLOO with summed tokens, so that they estimate the same gradient, with the same optimiser, learning rate and
number of rollouts per step; dynamic sampling draws up to four times as many prompts, and all of its rollouts count.
Training problems are few, so that prompts come back: allocation decides from earlier visits.

Tables. *Area* is the mean of the test accuracy over the budget, on straight lines between evaluations: it rewards early
learning. *Best fixed* is the fixed group size with the largest mean in the first column, chosen in hindsight from the
same runs, which favours it. Differences are paired by seed; intervals are 95 %, t distribution over seeds.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from scoregram.compare import CompareConfig, compare_methods
from scoregram.compare.intervals import mean_over_seeds
from scoregram.compare.table import open_comparison
from scoregram.exhibits import Estimate
from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import load_task
from scoregram.training import warm_start, write_warm_start

HERE = Path(__file__).parent
RUNS = HERE / "runs.json"
FIXED = {f"R = {size}": f"rloo:group_size={size}" for size in (4, 8, 16, 32)}
OTHERS = {
    "auto": "rloo:group_size=auto",
    "success": "rloo:allocate=success",
    "measured": "rloo:allocate=measured",
    "auto and measured": "rloo:group_size=auto:allocate=measured",
    "dynamic sampling": "dapo:estimator=rloo:objective=reinforce",
}
METHODS = FIXED | OTHERS
"""Name in the tables → method and options of `scoregram compare`."""


@dataclass(frozen=True)
class Plan:
    """What to train."""

    out: Path = Path("runs/allocation")
    """Folder of the runs."""
    tasks: tuple[str, ...] = ("arithmetic", "reasoning-gym:chain_sum", "reasoning-gym:number_sorting")
    """Tasks; those of reasoning-gym begin with a supervised warm start of the embedded policy."""
    names: tuple[str, ...] = tuple(METHODS)
    """Rows of the table to train."""
    seeds: int = 5
    """Runs of each method."""
    rollouts: int = 6_400
    """Rollouts of each run."""
    batch_size: int = 64
    """Rollouts per step."""
    train_problems: int = 256
    """Training problems."""
    learning_rate: float = 2e-5
    """Learning rate of every run. At 1e-4 arithmetic is at 0.9 after 256 rollouts, whatever the group size."""
    eval_problems: int = 256
    """Test problems of an evaluation; there are ten."""
    warm_start_epochs: float = 1.0
    """Passes over demonstrations, for tasks other than arithmetic."""
    jobs: int = 0
    """Runs at a time; 0 for one per core."""
    only_write: bool = False
    """Train nothing; write runs.json from complete runs."""
    table: bool = False
    """Print the tables of runs.json."""
    columns: tuple[str, ...] = field(default=("area", "final"))
    """Columns of the tables."""


def comparison(plan: Plan, task: str) -> CompareConfig:
    """The comparison of all methods on one task."""
    folder = plan.out / task.replace(":", "-")
    return CompareConfig(
        out=folder,
        task=task,
        model="tiny" if task.startswith("arithmetic") else str(started_policy(plan, task, folder / "start")),
        methods=",".join(METHODS[name] for name in plan.names),
        seeds=plan.seeds,
        rollouts=plan.rollouts,
        batch_size=plan.batch_size,
        train_problems=plan.train_problems,
        learning_rate=plan.learning_rate,
        eval_problems=plan.eval_problems,
        credit_truth="none",
        push=False,
        jobs=plan.jobs,
    )


def started_policy(plan: Plan, task: str, folder: Path) -> Path:
    """The embedded policy after a supervised warm start on the task, trained once and then kept."""
    if not (folder / "config.json").is_file():
        loaded = load_task(task, seed=0)
        policy = load_policy(PolicyConfig(model="tiny"), loaded)
        warm_start(policy, loaded, epochs=plan.warm_start_epochs, learning_rate=1e-3)
        write_warm_start(policy, folder)
    return folder


def complete_runs(config: CompareConfig) -> dict[str, Any]:
    """Name → seed → evaluations `(rollouts, accuracy)`, seconds, and the path of the group size of one task's runs."""
    names = {label: name for name, label in METHODS.items()}
    found: dict[str, Any] = {}
    for method in open_comparison(config.out).methods:
        found[names[method.label]] = {
            str(run.seed): {
                "evaluations": run.evaluations,
                "seconds": round(run.seconds, 1),
                "group_sizes": [
                    (line["step"], line["control/next_group_size"])
                    for line in run.run.lines
                    if line.get("control/next_group_size", line.get("control/group_size"))
                    != line.get("control/group_size")
                ],
            }
            for run in method.runs
        }
    return found


def area(evaluations: list[list[float]]) -> float:
    """Mean accuracy over the budget, on straight lines between evaluations."""
    rollouts, accuracy = np.array(evaluations, dtype=float).T
    return float(np.trapezoid(accuracy, rollouts) / (rollouts[-1] - rollouts[0]))


def final(evaluations: list[list[float]]) -> float:
    """Accuracy at the last evaluation."""
    return float(evaluations[-1][1])


MEASURES = {"area": area, "final": final}


def task_table(runs: dict[str, Any], columns: tuple[str, ...]) -> str:
    """One row per method: each measure, and its difference from the best fixed group size."""
    values = {
        n: {m: {s: MEASURES[m](r["evaluations"]) for s, r in seeds.items()} for m in columns}
        for n, seeds in runs.items()
        if seeds
    }
    fixed = [name for name in values if name in FIXED]
    best = max(fixed, key=lambda name: mean(values[name][columns[0]].values()))
    head = ["", "seeds", *(f"{m}{more}" for m in columns for more in ("", f" minus {best}"))]
    lines = [head, ["---"] * len(head)]
    for name, measures in values.items():
        cells = [name, str(len(measures[columns[0]]))]
        for measure in columns:
            own, other = measures[measure], values[best][measure]
            cells += [shown(mean_over_seeds(list(own.values())))]
            cells += ["" if name == best else shown(mean_over_seeds([own[s] - other[s] for s in own if s in other]))]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(estimate: Estimate) -> str:
    """A number and its interval, in per cent of accuracy."""
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def main() -> None:
    """Train, write, or print."""
    plan = tyro.cli(Plan)
    if plan.table:
        for task, runs in json.loads(RUNS.read_text(encoding="utf-8")).items():
            print(f"## {task}\n\n{task_table(runs, plan.columns)}\n")
        return
    stored: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.is_file() else {}
    for task in plan.tasks:
        config = comparison(plan, task)
        if not plan.only_write and compare_methods(config, console=Console()) == 130:
            break
        stored[task] = complete_runs(config)
        RUNS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
