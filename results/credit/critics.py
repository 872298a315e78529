"""How much of the rewards a critic predicts after 50 updates, for nine settings of the critic.

python critics.py OUT [--workers 2]    train what is missing
python critics.py OUT --write          write critics.json from the runs

A seed that no table has, sums of 4 and 12 terms, the settings of `run.py`, rate 3e-5 for the policy. The last row has
exact values in place of a critic: what they explain is the limit.
"""

import argparse
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from run import HERE, SHARED

from scoregram.compare import CompareConfig
from scoregram.compare.cells import run_or_explain
from scoregram.policy import load_policy
from scoregram.runs import last_scalar, open_run
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, run_in_processes

SEED, RATE, LENGTHS = 100, 3e-5, (4, 12)
UPDATES, CRITIC_RATES = (1, 4, 16), (1e-3, 3e-4, 1e-4)
METHOD = "ppo-monte-carlo:objective=grpo"
ROWS = {
    f"updates {updates}, rate {rate:g}": f"{METHOD}:critic_updates={updates}:critic_learning_rate={rate:g}"
    for updates in UPDATES
    for rate in CRITIC_RATES
} | {"exact values": f"{METHOD}:exact_values=true"}
"""Row → method; *updates* are those of the critic in a step."""
EVALUATION: dict[str, Any] = {"every_rollouts": 320, "eval_problems": 16, "eval_samples": 0}


def configs(out: Path) -> dict[int, dict[str, TrainConfig]]:
    """Terms → row → run."""
    found: dict[int, dict[str, TrainConfig]] = {}
    for terms in LENGTHS:
        config = CompareConfig(
            out=out / "critics" / f"terms-{terms}",
            task=f"arithmetic-strict:{terms}",
            methods=",".join(ROWS.values()),
            learning_rate=RATE,
            **SHARED | EVALUATION,
        )
        runs = [config.run_config(choice, SEED) for choice in config.choices]
        found[terms] = dict(zip(ROWS, runs, strict=True))
    return found


def explained(config: TrainConfig) -> list[float]:
    """Mean explained variance in each third of the steps that have one."""
    values = [line["credit/explained_variance"] for line in open_run(config.out).metrics() if line["step"] > 0]
    known = [value for value in values if value is not None]
    ends = [round(len(known) * part / 3) for part in range(4)]
    return [round(mean(known[begin:end]), 4) for begin, end in pairwise(ends)]


def main() -> None:
    """Train, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write the record, train nothing")
    given = parser.parse_args()
    runs = configs(given.out)
    if given.write:
        table = {str(terms): {row: explained(one) for row, one in own.items()} for terms, own in runs.items()}
        setting = {"shared": SHARED | EVALUATION, "seed": SEED, "learning_rate": RATE, "methods": ROWS}
        text = json.dumps({"setting": setting, "explained_variance_by_third": table}, indent=0)
        (HERE / "critics.json").write_text(text + "\n", encoding="utf-8")
        return
    for own in runs.values():
        config = next(iter(own.values()))
        load_policy(replace(config.policy, seed=SEED), load_task(config.task, seed=SEED))
    missing = [one for own in runs.values() for one in own.values() if last_scalar(one.out, "rollouts") < one.rollouts]
    run_in_processes(missing, given.workers, run=run_or_explain)


if __name__ == "__main__":
    main()
