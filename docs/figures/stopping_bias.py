"""Three ways to credit turns on the task `stopping`, from the same policies: the numbers of docs/environments.md.

    python docs/figures/stopping_bias.py --seeds 0 1 2 3     # under a minute of one core per seed
    python docs/figures/stopping_bias.py                     # print the table of the stored numbers

A small Llama reads characters and learns the rules from the timid teacher of the task. Then every method trains it with
groups of two, where a turn is most often reached by one rollout alone.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_suffix(".json")
METHODS = ("grpo-paper", "turn-mean", "turn-rloo")
STEPS, GROUP_SIZE = 96, 2
T_975 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    11: 2.201,
}
"""97.5 % quantile of Student's t, by degrees of freedom."""


def start_policy(seed: int, folder: Path) -> Path:
    """A small policy that plays like the teacher."""
    from scoregram.policy import load_policy
    from scoregram.policy.tiny import WarmStart, character_tokenizer, untrained
    from scoregram.tasks import load_task
    from scoregram.training import TrainConfig, warm_start, write_warm_start

    untrained(WarmStart(hidden_size=32, intermediate_size=64, layers=2, heads=2), seed).save_pretrained(folder)
    character_tokenizer(128).save_pretrained(folder)
    task = load_task("stopping", seed=seed)
    policy = load_policy(TrainConfig(model=str(folder), prompt="plain", device="cpu").policy, task)
    epochs = 200 * 32 / len(task.train)
    warm_start(policy, task, epochs=epochs, learning_rate=1e-2, seed=seed, tell=lambda _: None)
    write_warm_start(policy, folder)
    return folder


def turn_shares(folder: Path, seed: int) -> dict[str, list[float]]:
    """For every turn under the first policy: the share of rollouts that reach it, and `E[(n - 1) / n]` given that."""
    from scoregram.policy import load_policy
    from scoregram.tasks import load_task
    from scoregram.training import TrainConfig, seeded_generator
    from scoregram.training.collect import collect

    task = load_task("stopping", seed=seed)
    config = TrainConfig(model=str(folder), prompt="plain", device="cpu")
    rollouts = collect(
        load_policy(config.policy, task),
        task,
        task.test[:256],
        group_size=GROUP_SIZE,
        sampling=config.sampling(task.max_new_tokens),
        generator=seeded_generator(seed, "shares", 0),
    )
    reached = rollouts.turn_mask.view(-1, GROUP_SIZE, task.max_turns).double()  # (P, R, H)
    count = reached.sum(1, keepdim=True)
    kept = reached * (count - 1) / count.clamp(min=1)
    return {"reached": reached.mean((0, 1)).tolist(), "kept": (kept.sum((0, 1)) / reached.sum((0, 1))).tolist()}


def trained_rewards(model: Path, out: Path, method: str, seed: int) -> dict[str, Any]:
    """Mean reward of a run's rollouts in four quarters, and the greedy test reward before, halfway and at the end."""
    from scoregram.runs import open_run
    from scoregram.training import TrainConfig, train

    quarter = STEPS // 4
    settings: dict[str, Any] = {"task": "stopping", "method": method, "seed": seed, "model": str(model), "out": out}
    settings |= {"prompt": "plain", "device": "cpu", "threads": 1, "steps": STEPS, "learning_rate": 1e-3}
    settings |= {"batch_size": 64, "group_size": GROUP_SIZE, "eval_every": 2 * quarter, "eval_problems": 256}
    settings |= {"measure_every": 0, "rollouts_every": 0, "checkpoint_every": 0, "final_checkpoint": False}
    train(TrainConfig(**settings))
    metrics = open_run(out).metrics()
    rewards = [line["reward"] for line in metrics if "reward" in line]
    return {
        "reward": [statistics.fmean(rewards[start : start + quarter]) for start in range(0, STEPS, quarter)],
        "eval": [line["eval/reward"] for line in metrics if "eval/reward" in line],
        "turns": [line["turns/count"] for line in metrics if "turns/count" in line][quarter - 1 :: quarter],
    }


def run_seeds(seeds: list[int], stored: Path) -> None:
    """Train every method from the first policy of each seed, and store the numbers after each seed."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            model = start_policy(seed, Path(folder) / "start")
            found: dict[str, Any] = turn_shares(model, seed)
            for method in METHODS:
                found[method] = trained_rewards(model, Path(folder) / method, method, seed)
        known = json.loads(stored.read_text()) if stored.exists() else {}
        stored.write_text(json.dumps(known | {str(seed): found}, indent=1) + "\n")


def interval(values: list[float]) -> str:
    """Mean and 95 % interval over seeds, by Student's t."""
    mean = statistics.fmean(values)
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def print_table(stored: Path) -> None:
    """Rewards of each method and paired differences to `turn-rloo`, over seeds."""
    seeds = json.loads(stored.read_text())
    for name in ("reached", "kept"):
        by_turn = zip(*(found[name] for found in seeds.values()), strict=True)
        print(f"{name} by turn:", ", ".join(f"{statistics.fmean(values):.3f}" for values in by_turn))
    print(f"seeds {', '.join(seeds)}")
    for what in ("reward", "eval"):
        for place in range(len(next(iter(seeds.values()))[METHODS[0]][what])):
            cells = []
            for method in METHODS:
                values = [found[method][what][place] for found in seeds.values()]
                others = [found["turn-rloo"][what][place] for found in seeds.values()]
                gap = [one - other for one, other in zip(values, others, strict=True)]
                cells.append(
                    f"{method} {interval(values)}" + ("" if method == "turn-rloo" else f", gap {interval(gap)}")
                )
            print(what, place, "|", " | ".join(cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--stored", type=Path, default=STORED)
    given = parser.parse_args()
    run_seeds(given.seeds, given.stored)
    print_table(given.stored)
