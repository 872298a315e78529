"""Does a training method make a policy overconfident? The task `forecast`, four methods, some seeds, one table.

    python examples/calibration.py runs/calibration [SEEDS]

It starts from the embedded policy, fine-tuned to forecasts that are right on average and up to 0.2 off.
"""

import statistics
import sys
from pathlib import Path

import scoregram
from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import load_task
from scoregram.training.supervised import warm_start, write_warm_start

METHODS = {
    "GRPO": {"method": "grpo"},
    "GRPO without deviation": {"method": "grpo", "estimator": "mean"},
    "RLOO": {"method": "rloo"},
    "PPO": {"method": "ppo"},
}
STEPS, LAST = 100, 10


def start_policy(folder: Path) -> Path:
    """A policy whose forecasts are right on average."""
    if not folder.exists():
        task = load_task("forecast")
        policy = load_policy(PolicyConfig(model="tiny", device="cpu"), task)
        warm_start(policy, task, epochs=0.5, learning_rate=1e-3)
        write_warm_start(policy, folder)
    return folder


def trained(model: Path, out: Path, seed: int, **method: str) -> list[dict[str, float]]:
    """The metrics of one run."""
    config = scoregram.TrainConfig(
        out=out,
        model=str(model),
        task="forecast",
        prompt="plain",
        device="cpu",
        steps=STEPS,
        batch_size=128,
        group_size=8,
        learning_rate=3e-4,
        measure_every=0,
        eval_every=0,
        rollouts_every=0,
        checkpoint_every=0,
        final_checkpoint=False,
        seed=seed,
        overwrite=True,
        **method,  # type: ignore[arg-type]
    )
    scoregram.train(config)
    return [dict(line) for line in scoregram.open_run(out).metrics()]


def main(folder: Path, seeds: int) -> None:
    """Train every method with every seed; print means over seeds of the last steps, ± their standard deviation."""
    model = start_policy(folder / "start")
    names = ("task/claimed", "task/actual", "task/overconfidence", "task/calibration_error")
    print("| method | claimed | actual | overconfidence | error |\n|---|---|---|---|---|")
    for label, method in METHODS.items():
        rows = []
        for seed in range(seeds):
            lines = trained(model, folder / f"{label.replace(' ', '-')}-{seed}", seed, **method)[-LAST:]
            rows.append([statistics.fmean(line[name] for line in lines) for name in names])
        cells = [f"{statistics.fmean(c):.3f} ± {statistics.stdev(c):.3f}" for c in zip(*rows, strict=True)]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "calibration.py: needs a folder to write, got none. Type python examples/calibration.py FOLDER [SEEDS]"
        )
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
