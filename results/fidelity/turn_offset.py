"""Eq. (23) of arXiv:2606.29238 on tasks of several turns: the error of one advantage for a whole rollout, turn by turn.

python turn_offset.py [--tasks stopping,calculator] [--steps 16]    writes turn-offset.json beside this file

The error of the advantage at turn `h`, given the history, is `Bias_h = Σ_{h'<h} r_h' + v(s_h) − v(s_0)`. Values are
means over 16 fresh episodes that continue the history, as with `--credit-truth sampled`. Their own noise is taken off
the variance of `Bias_h`. Equal histories share their episodes. The policy is `tiny` of seed 0, which is not trained; a
step has 4 prompts with 8 rollouts, as in a training run at the learning rate 0.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from scoregram.machine import threads
from scoregram.policy import load_policy
from scoregram.tasks import load_task
from scoregram.training import TrainConfig
from scoregram.training.collect import collect, drawn_problems, seeded_generator
from scoregram.training.truth import TurnTruth, histories_of

HERE = Path(__file__).parent
ROLLOUTS, GROUP, COPIES = 32, 8, 16


def turn_sums(number: int, config: TrainConfig, truth: TurnTruth) -> dict[str, list[float]]:
    """Sums over the rollouts of a step, turn by turn: how many, `Bias`, `Bias²`, variance of its estimate.

    `returns` has how many, the return and its square.
    """
    problems = drawn_problems(truth.task.train, (number - 1) * config.prompts, config.prompts, config.seed)
    stream = seeded_generator(config.seed, "rollouts", number)
    given: dict[str, Any] = {"group_size": GROUP, "sampling": truth.sampling, "generator": stream}
    rollouts = collect(truth.policy, truth.task, problems, **given)
    places: dict[Any, int] = {}
    befores = [[places.setdefault(one, len(places)) for one in of_row] for of_row in histories_of(rollouts)]
    returns = truth.returns(number, list(places), problems)
    means, noises = returns.mean(1), returns.var(1) / returns.shape[1]
    found: dict[str, list[float]] = {"returns": [0.0, 0.0, 0.0]}
    for row, before in enumerate(befores):
        paid = 0.0
        for turn, place in enumerate(before):
            is_later = float(place != before[0])
            offset = paid + float(means[place] - means[before[0]])
            values = (1.0, offset, offset**2, is_later * float(noises[place] + noises[before[0]]))
            sums = found.setdefault(str(turn), [0.0] * 4)
            sums[:] = [old + new for old, new in zip(sums, values, strict=True)]
            paid += float(rollouts.turn_rewards[row, turn])
        total = float(rollouts.rewards[row])
        found["returns"] = [old + new for old, new in zip(found["returns"], (1.0, total, total**2), strict=True)]
    return {name: [float(f"{value:.7g}") for value in sums] for name, sums in found.items()}


def main() -> None:
    """Measure and write the file after every task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="stopping,calculator")
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    path = HERE / "turn-offset.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in given.tasks.split(","):
        config = TrainConfig(
            task=name, batch_size=ROLLOUTS, group_size=GROUP, truth_rollouts=COPIES, threads=1, device="cpu"
        )
        with threads(config.threads):
            task = load_task(name, seed=config.seed)
            policy = load_policy(config.policy, task)
            truth = TurnTruth(policy, task, config.sampling(task.max_new_tokens), config)
            with torch.no_grad():
                record[name] = [turn_sums(number, config, truth) for number in range(1, given.steps + 1)]
        path.write_text(json.dumps(record, indent=0) + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    main()
