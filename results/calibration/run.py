"""Does a training method make a policy overconfident? The task `forecast`, four methods, some seeds.

python run.py OUT [SEEDS]    trains what is missing, two runs at a time, and writes calibration.json beside this file

It starts from the embedded policy, fine-tuned to forecasts that are right on average and up to 0.2 off. The record has
means over blocks of ten steps.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from scoregram import open_run
from scoregram.policy import PolicyConfig, load_policy
from scoregram.runs import last_scalar
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, run_in_processes
from scoregram.training.supervised import warm_start, write_warm_start

HERE = Path(__file__).parent
METHODS: dict[str, dict[str, str]] = {
    "GRPO": {"method": "grpo"},
    "GRPO without the deviation (`--estimator mean`)": {"method": "grpo", "estimator": "mean"},
    "RLOO": {"method": "rloo"},
    "PPO": {"method": "ppo"},
}
STEPS, BLOCK = 100, 10
SCALARS = ("task/claimed", "task/actual", "task/overconfidence", "task/calibration_error")


def start_policy(folder: Path) -> Path:
    """A policy whose forecasts are right on average."""
    if not folder.exists():
        task = load_task("forecast")
        policy = load_policy(PolicyConfig(model="tiny", device="cpu"), task)
        warm_start(policy, task, epochs=0.5, learning_rate=1e-3)
        write_warm_start(policy, folder)
    return folder


def run_config(model: Path, out: Path, label: str, seed: int) -> TrainConfig:
    """One run: rewards and forecasts of every step are logged, and nothing is measured."""
    options: dict[str, Any] = {**METHODS[label], "out": out / f"{[*METHODS].index(label)}-{seed}", "seed": seed}
    return TrainConfig(
        model=str(model),
        task="forecast",
        prompt="plain",
        device="cpu",
        threads=1,
        steps=STEPS,
        batch_size=128,
        group_size=8,
        learning_rate=3e-4,
        measure_every=0,
        eval_every=0,
        rollouts_every=0,
        checkpoint_every=0,
        final_checkpoint=False,
        overwrite=True,
        **options,
    )


def block_means(out: Path) -> list[list[float]]:
    """The last step of every block of ten, then the mean of each of `SCALARS` over the block."""
    lines = [line for line in open_run(out).metrics() if SCALARS[0] in line]
    blocks = [lines[first : first + BLOCK] for first in range(0, len(lines), BLOCK)]
    return [
        [block[-1]["step"], *(round(statistics.fmean(line[name] for line in block), 5) for name in SCALARS)]
        for block in blocks
    ]


def main(out: Path, seeds: int) -> None:
    """Train the missing runs, then write the record."""
    model = start_policy(out / "start")
    configs = {label: [run_config(model, out, label, seed) for seed in range(seeds)] for label in METHODS}
    missing = [one for runs in configs.values() for one in runs if last_scalar(one.out, "step") != STEPS]
    run_in_processes(missing, 2)
    record = {label: [block_means(one.out) for one in runs] for label, runs in configs.items()}
    (HERE / "calibration.json").write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("seeds", type=int, nargs="?", default=8)
    given = parser.parse_args()
    main(given.out, given.seeds)
