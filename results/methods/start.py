"""Makes the starting policies that the embedded policy's own warm start does not cover.

python start.py gym GENERATOR OUT [cuda]     an untrained `tiny` learns answers, then the habits of a careless teacher
python start.py gsm8k MODEL.gguf DATA OUT    SmolLM2 imitates GSM8K's solutions for three epochs
python start.py folder MODEL.gguf OUT        the model as it is, as a folder that loads in seconds
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from scoregram.policy import (
    Policy,
    PolicyConfig,
    SamplingConfig,
    load_policy,
    padded_demonstrations,
    supervised_losses,
    token_log_probs,
)
from scoregram.policy.load import pad_token, stop_tokens
from scoregram.policy.models import context_of
from scoregram.policy.tiny import CONTEXT, WarmStart, character_tokenizer, falling_rates, untrained
from scoregram.tasks import Problem, Task, load_task
from scoregram.training import warm_start, write_warm_start
from scoregram.training.collect import drawn_problems
from scoregram.training.evaluate import evaluate
from scoregram.training.supervised import demonstration

BATCH, RATE, RISE = 16, 1e-3, 50
"""Reference answers per step, learning rate after a linear rise, steps of the rise."""
EVERY, LONGEST, SECONDS = 50, 3000, 1800
"""Steps between two checks of the skill, and the most steps and seconds of the first stage."""
SKILLED, LEAST = 0.8, 0.5
"""Share of right greedy answers that ends the first stage; a policy below `LEAST` after it is no start."""
RIGHT, HABIT = 0.1, 0.9
"""Share of reference answers without a confused letter, and probability that the teacher confuses one."""
HABIT_STEPS, HABIT_RATE = 120, 3e-4
"""Steps on the answers of the careless teacher, and their first learning rate, which falls linearly to 0."""
PROBLEMS, SAMPLES, MAX_NEW_TOKENS = 64, 4, 40


def untrained_tiny(device: str) -> Policy:
    """The embedded policy before its warm start."""
    model: Any = untrained(WarmStart(), 0)
    tokenizer = character_tokenizer(CONTEXT)
    stops = stop_tokens(model, tokenizer)
    pad = pad_token(model, tokenizer, stops[0])
    return Policy(model.to(device), tokenizer, PolicyConfig(device=device), stops, pad, context_of(model))


@dataclass(frozen=True)
class Success:
    """How a policy answers test problems that the tables do not use."""

    greedy: float
    """Share of right greedy answers."""
    greedy_return: float
    sampled: float
    """Share of right answers sampled at temperature 1."""


def success(policy: Policy, task: Task) -> Success:
    """Greedy and sampled answers to the last `PROBLEMS` test problems."""
    policy.model.eval()
    generator = torch.Generator().manual_seed(0)
    problems = task.test[-PROBLEMS:]
    sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
    found = evaluate(policy, task, problems, sampling, samples=SAMPLES, generator=generator)
    policy.model.train()
    drawn = [reward >= 1 for group in found.sampled for reward in group]
    return Success(found.accuracy, sum(found.rewards) / PROBLEMS, sum(drawn) / len(drawn))


def imitation_losses(policy: Policy, task: Task, rates: Iterable[float]) -> Iterator[Tensor]:
    """Train on the answers that the task's teacher writes, one step for each learning rate."""
    rng, device = Random(0), policy.model.device
    optimizer = torch.optim.AdamW(policy.model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))

    def batch_loss(step: int) -> Tensor:
        problems = drawn_problems(task.train, step * BATCH, BATCH, 0)
        batch = [demonstration(policy, task, problem, rng) for problem in problems]
        ids, attention, solution = padded_demonstrations(batch, policy.pad_id, device)
        return -token_log_probs(policy.model, ids, attention, solution).sum() / solution.sum()

    return supervised_losses(policy.model, optimizer, batch_loss, rates)


def confused_letters(answers: Sequence[str], rng: Random) -> dict[str, str]:
    """Letter → the one that the careless teacher takes it for.

    Letters are added in random order until at most a share `RIGHT` of the answers is free of them.
    """
    letters = sorted({letter for answer in answers for letter in answer if letter.isalnum()})
    confused: dict[str, str] = {}
    for letter in rng.sample(letters, len(letters)):
        if sum(not confused.keys() & set(answer) for answer in answers) <= RIGHT * len(answers):
            break
        confused[letter] = rng.choice([other for other in letters if other != letter])
    return confused


def careless_task(task: Task) -> tuple[Task, dict[str, str]]:
    """The task with a teacher who confuses some letters with probability `HABIT`, and these letters."""
    confused = confused_letters([problem.answer for problem in task.test], Random(0))

    def careless(problem: Problem, rng: Random) -> str:
        written = (confused[c] if c in confused and rng.random() < HABIT else c for c in problem.answer)
        return f"<answer>{''.join(written)}</answer>"

    return replace(task, demonstrate=careless), confused


def gym_start(generator: str, out: Path, device: str) -> None:
    """Imitate right answers until the policy is skilled, then those of a careless teacher; writes the policy."""
    task, policy = load_task(f"reasoning-gym:{generator}"), untrained_tiny(device)
    policy.model.train()
    step, skill, began = 0, Success(0, 0, 0), time.perf_counter()
    rates = [RATE * min(1.0, step / RISE) for step in range(1, LONGEST + 1)]
    for step, loss in enumerate(imitation_losses(policy, task, rates), start=1):
        if step % EVERY == 0:
            skill = success(policy, task)
            print(f"{generator} step {step} loss {loss.item():.3f} {skill}", flush=True)
            if skill.greedy >= SKILLED or time.perf_counter() - began > SECONDS:
                break
    if skill.greedy < LEAST:
        raise SystemExit(f"{generator}: {skill} after {step} steps, not skilled enough for a start")
    teacher, confused = careless_task(task)
    for _ in imitation_losses(policy, teacher, falling_rates(HABIT_RATE, 0.0, HABIT_STEPS)):
        pass
    start = success(policy, task)
    print(f"{generator} start {start}", flush=True)
    policy.model.to("cpu").eval()
    write_warm_start(policy, out)
    facts = {"steps": step, "skill": asdict(skill), "confused": confused, "start": asdict(start)}
    (out / "start.json").write_text(json.dumps(facts))


def gsm8k_start(weights: str, data: str, out: Path) -> None:
    """Three epochs of GSM8K's solutions, batch 64, learning rate 4e-4 falling to 0, as in results/over-training."""
    task = load_task(f"gsm8k:{data}")
    policy = load_policy(PolicyConfig(model=weights, device="auto", autocast=True, prompt="plain"), task)
    warm_start(policy, task, epochs=3, batch_size=64, learning_rate=4e-4, tell=lambda line: print(line, flush=True))
    write_warm_start(policy, out)


def folder_start(weights: str, out: Path) -> None:
    """Write a model as a folder: a `.gguf` file takes half a minute to read, which every run would pay."""
    write_warm_start(load_policy(PolicyConfig(model=weights)), out)


if __name__ == "__main__":
    if sys.argv[1] == "gym":
        gym_start(sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "cpu")
    elif sys.argv[1] == "folder":
        folder_start(sys.argv[2], Path(sys.argv[3]))
    else:
        gsm8k_start(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
