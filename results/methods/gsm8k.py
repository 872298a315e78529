"""Trains seven methods and the control on GSM8K for a number of steps, at a learning rate that falls linearly to 0.

python gsm8k.py OUT --try                    `grpo` and `rloo` with the tuning seed at each rate; prints their gains
python gsm8k.py OUT --rate 4e-5 --seeds 3    all methods; the same command continues after an interruption

The starting policy must be in OUT/starts/gsm8k (`start.py gsm8k`), GSM8K's two files in OUT/gsm8k. All methods but
`vineppo` then have the same rollouts: 128 a step. `vineppo` gets that number at a constant half of the rate, because
its fresh rollouts count and their number is not known before. `collect.py OUT gsm8k.jsonl.xz` packs the runs.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from run import TASKS, TUNING_METHODS, TUNING_SEED, comparison_config

from scoregram.compare import CompareConfig
from scoregram.compare.cells import run_or_explain, write_comparison_setting
from scoregram.runs import open_run
from scoregram.training import TrainConfig, last_scalar, run_in_processes

RATES = (2e-5, 4e-5)
STEPS = 128
ROLLOUTS = STEPS * int(TASKS["gsm8k"].options["batch_size"])


def planned(out: Path, *, rate: float, seeds: int, methods: str = "") -> CompareConfig:
    """The comparison on GSM8K, with the rollouts of `STEPS` steps."""
    config = comparison_config("gsm8k", out, seeds=seeds, rate=rate, methods=methods)
    return replace(config, rollouts=ROLLOUTS, every_rollouts=ROLLOUTS)


def runs_of(config: CompareConfig, seeds: range) -> Iterator[TrainConfig]:
    """The runs of a comparison, seed by seed, with a falling rate where the number of steps is known."""
    for seed in seeds:
        for choice in config.choices:
            run = config.run_config(choice, seed)
            if choice.method == "vineppo":
                yield replace(run, learning_rate=run.learning_rate / 2)
            else:
                steps = {"steps": STEPS, "eval_every": STEPS, "measure_every": 0, "lr_schedule": "linear"}
                yield replace(run, rollouts=0, every_rollouts=0, **steps)


def train_missing(runs: list[TrainConfig], workers: int) -> None:
    """Train the runs that have not used up their rollouts."""
    missing = [run for run in runs if last_scalar(run.out, "rollouts") < ROLLOUTS]
    run_in_processes(missing, workers, run=run_or_explain)


def sampled_gain(run: TrainConfig) -> float:
    """Sampled accuracy after the last step minus that before the first one."""
    found = [line["eval/sampled_accuracy"] for line in open_run(run.out).metrics() if "eval/sampled_accuracy" in line]
    return found[-1] - found[0]


def try_rates(workers: int) -> None:
    """Print the mean gain of the tuning methods at each rate."""
    seeds = range(TUNING_SEED, TUNING_SEED + 1)
    plans = {
        rate: list(
            runs_of(planned(Path("tuning") / f"gsm8k-{rate:g}", rate=rate, seeds=1, methods=TUNING_METHODS), seeds)
        )
        for rate in RATES
    }
    train_missing([run for runs in plans.values() for run in runs], workers)
    for rate, runs in plans.items():
        print(f"rate {rate:g}: sampled accuracy {sum(map(sampled_gain, runs)) / len(runs):+.4f}", flush=True)


def main() -> None:
    """Try rates, or train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--try", dest="trial", action="store_true")
    parser.add_argument("--rate", type=float, default=RATES[-1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    os.chdir(given.out)
    if given.trial:
        try_rates(given.workers)
        return
    config = planned(Path("compare") / "gsm8k", rate=given.rate, seeds=given.seeds)
    write_comparison_setting(config)
    train_missing(list(runs_of(config, range(given.seeds))), given.workers)


if __name__ == "__main__":
    main()
