"""How long a step of each method takes, over that of grpo: all methods in turns, in one process, alone on the machine.

python cost.py OUT [--tasks arithmetic,calculator] [--steps 4] [--rounds 3]    writes OUT/cost.json

In each round every method trains a few steps from the same start, without measurements and evaluations. The time of a
step is the median over its steps but the first; it includes sampling, and whatever a method samples or computes on top.
OUT/starts has the starting policies of `run.py`.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from scoregram.compare.config import MethodChoice, method_choice
from scoregram.runs import environment, open_run
from scoregram.training import METHODS, TrainConfig, train

from run import ON_GPU, TASKS, TaskSetting, comparison_config  # isort: skip

UNMEASURED: dict[str, Any] = {
    "rollouts": 0,
    "every_rollouts": 0,
    "measure_every": 0,
    "eval_every": 0,
    "rollouts_every": 0,
    "checkpoint_every": 0,
    "credit_truth": "none",
    "push": False,
}
"""Settings of a run that only trains."""
TOO_LONG = ("vineppo",)
"""Methods of which a single step of the large model takes minutes."""


def timed_methods(name: str) -> list[str]:
    """Methods of a task with their options, also those that its table leaves out for their cost."""
    setting = TASKS[name]
    if name != "gsm8k-qwen-further":
        costly = {method for method, why in setting.left_out.items() if "cost" in why}
        return [setting.labels.get(n, n) for n in METHODS if n not in setting.left_out or n in costly]
    every = {**TASKS["gsm8k-qwen"].labels, **setting.labels}
    asked = [n for n in METHODS if n not in setting.left_out or n in ON_GPU]
    return [every.get(n, n) for n in asked if n not in TOO_LONG]


def timed_run(setting: TaskSetting, name: str, choice: MethodChoice, steps: int, folder: Path) -> TrainConfig:
    """A short run of one method on one task."""
    config = comparison_config(name, folder, seeds=1, rate=setting.rate or setting.rates[0], methods="grpo")
    return replace(config.run_config(choice, seed=0), steps=steps, **UNMEASURED)


def seconds_per_step(config: TrainConfig) -> tuple[float, int]:
    """Median time of the steps but the first, and the rollouts that a step samples."""
    train(config, console=Console(quiet=True))
    lines = list(open_run(config.out).metrics())
    return median(line["time/step"] for line in lines[1:]), round(lines[-1]["rollouts"] / len(lines))


def main() -> None:
    """Time every method of some tasks and write the file after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default="arithmetic,calculator")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.chdir(given.out)
    found: dict[str, Any] = {"environment": environment(), "steps": given.steps, "tasks": {}}
    for turn in range(given.rounds):
        for name in given.tasks.split(","):
            rows = found["tasks"].setdefault(name, {})
            for label in timed_methods(name):
                began = time.perf_counter()
                with TemporaryDirectory() as folder:
                    config = timed_run(TASKS[name], name, method_choice(label), given.steps, Path(folder))
                    seconds, sampled = seconds_per_step(config)
                row = rows.setdefault(label, {"seconds": [], "rollouts": sampled})
                row["seconds"].append(float(f"{seconds:.4g}"))
                wall = time.perf_counter() - began
                print(f"round {turn} {name} {label}: {seconds:.3f} s a step, {wall:.1f} s in all", flush=True)
                Path("cost.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
