"""Two controls for the gain of the runs here, from starts taught in the same way.

python control.py teach MODEL DATA OUT --seed S       the start: three epochs of GSM8K's solutions
python control.py continue START DATA OUT --seed S    more of the same: as many solutions as a run draws prompts

*Random rewards* is `scoregram train` with all options of `grpo-seed*` and `--reward control:random_reward`, run in this
folder: a rollout of a training problem gets 1 with probability 0.08, the success rate at the start, whatever it says;
rollouts of test problems get their true reward.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scoregram.policy import Policy, PolicyConfig, SamplingConfig, load_policy
from scoregram.tasks import Task, load_task
from scoregram.tasks.answers import right_answer
from scoregram.training.evaluate import evaluate, evaluation_records
from scoregram.training.supervised import warm_start, write_warm_start

CHANCE = 0.08
"""Probability of a reward: the share of right rollouts in the first 250 steps of a run."""
STEPS, PROMPTS = 1000, 16
"""Steps of a run, and prompts in each."""
LEARNING_RATE = 4e-5
EVALUATION_SAMPLES = 16
DRAWS = random.Random(0)


def random_reward(
    prompts: list[str], completions: list[str], *, answer: list[str], problem_id: list[str], **columns: Any
) -> list[float | None]:
    """1 with probability `CHANCE` for a training problem; the true reward for a test problem."""
    true = right_answer(prompts, completions, answer=answer)
    is_test = ["/test/" in name for name in problem_id]
    return [reward if tested else float(DRAWS.random() < CHANCE) for reward, tested in zip(true, is_test, strict=True)]


def teach(model: str, task: Task, out: Path, seed: int) -> None:
    """Write a start: three epochs of written solutions, batches of 64."""
    policy = policy_of(model, task, seed)
    warm_start(policy, task, epochs=3, batch_size=64, learning_rate=4e-4, seed=seed)
    write_warm_start(policy, out)


def continue_teaching(start: str, task: Task, out: Path, seed: int, steps: int = STEPS) -> None:
    """Train a start on further solutions, and write the rewards of all test problems.

    A run draws `STEPS × PROMPTS` prompts; this control learns the written solutions of as many, in as many updates, at
    the same learning rate.
    """
    policy = policy_of(start, task, seed)
    warm_start(
        policy,
        task,
        epochs=steps * PROMPTS / len(task.train),
        batch_size=PROMPTS,
        learning_rate=LEARNING_RATE,
        seed=1000 + seed,  # another order of the problems than that of the start
    )
    sampling = SamplingConfig(max_new_tokens=200)
    generator = torch.Generator(next(policy.model.parameters()).device).manual_seed(seed)
    judged = evaluate(policy, task, task.test, sampling, samples=EVALUATION_SAMPLES, generator=generator)
    records = evaluation_records(steps, task.test, judged, keep_greedy=True)
    columns = {
        "step": [record.step for record in records],
        "kind": [record.kind for record in records],
        "prompt_id": [record.prompt_id for record in records],
        "rewards": [record.rewards.float().numpy() for record in records],
    }
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), out / "groups.parquet", compression="zstd")


def policy_of(model: str, task: Task, seed: int) -> Policy:
    """The policy as the runs load it."""
    return load_policy(PolicyConfig(model=model, autocast=torch.cuda.is_available(), prompt="plain", seed=seed), task)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("teach", "continue"))
    parser.add_argument("model", help="a GGUF file or the folder of a start")
    parser.add_argument("data", help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    action = teach if chosen.action == "teach" else continue_teaching
    action(chosen.model, load_task(f"gsm8k:{chosen.data}"), chosen.out, chosen.seed)
