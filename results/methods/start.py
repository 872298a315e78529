"""Makes the starting policies that the embedded policy's own warm start does not cover.

python start.py gym GENERATOR OUT [cuda]     an untrained `tiny` imitates reference answers until it samples some right
python start.py gsm8k MODEL.gguf DATA OUT    SmolLM2 imitates GSM8K's solutions for three epochs
"""

import json
import sys
import time
from collections.abc import Iterator
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
from scoregram.policy.tiny import CONTEXT, WarmStart, character_tokenizer, untrained
from scoregram.tasks import Task, load_task
from scoregram.training import warm_start, write_warm_start
from scoregram.training.collect import drawn_problems
from scoregram.training.evaluate import evaluate
from scoregram.training.supervised import demonstration

BATCH, RATE, RISE = 64, 1e-3, 50
"""Reference answers per step, learning rate after a linear rise, steps of the rise."""
EVERY, LONGEST, SECONDS = 100, 8000, 130
"""Steps between two checks of the success, the most steps, and the most seconds."""
ENOUGH, LEAST = 0.4, 0.1
"""Imitation ends at this sampled success; a policy below `LEAST` is no start."""
PROBLEMS, SAMPLES, MAX_NEW_TOKENS = 96, 4, 40


def untrained_tiny(device: str) -> Policy:
    """The embedded policy before its warm start."""
    model: Any = untrained(WarmStart(), 0)
    tokenizer = character_tokenizer(CONTEXT)
    stops = stop_tokens(model, tokenizer)
    pad = pad_token(model, tokenizer, stops[0])
    return Policy(model.to(device), tokenizer, PolicyConfig(device=device), stops, pad, context_of(model))


def sampled_success(policy: Policy, task: Task) -> float:
    """Share of right rollouts, sampled at temperature 1, on test problems that the tables do not use."""
    policy.model.eval()
    generator = torch.Generator().manual_seed(0)
    problems = task.test[-PROBLEMS:]
    sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
    found = evaluate(policy, task, problems, sampling, samples=SAMPLES, generator=generator)
    policy.model.train()
    return sum(reward >= 1 for group in found.sampled for reward in group) / (PROBLEMS * SAMPLES)


def imitation_losses(policy: Policy, task: Task) -> Iterator[Tensor]:
    """Train on reference answers at a constant rate, without an end."""
    rng, device = Random(0), policy.model.device
    optimizer = torch.optim.AdamW(policy.model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))

    def batch_loss(step: int) -> Tensor:
        problems = drawn_problems(task.train, step * BATCH, BATCH, 0)
        batch = [demonstration(policy, task, problem, rng) for problem in problems]
        ids, attention, solution = padded_demonstrations(batch, policy.pad_id, device)
        return -token_log_probs(policy.model, ids, attention, solution).sum() / solution.sum()

    rates = (RATE * min(1.0, (step + 1) / RISE) for step in range(LONGEST))
    return supervised_losses(policy.model, optimizer, batch_loss, rates)


def gym_start(generator: str, out: Path, device: str) -> None:
    """Imitate until the sampled success is `ENOUGH`; writes the policy and what its success was."""
    task, policy = load_task(f"reasoning-gym:{generator}"), untrained_tiny(device)
    policy.model.train()
    success, step, began = 0.0, 0, time.perf_counter()
    for step, loss in enumerate(imitation_losses(policy, task), start=1):
        if step % EVERY == 0:
            success = sampled_success(policy, task)
            print(f"{generator} step {step} loss {loss.item():.3f} success {success:.3f}", flush=True)
            if success >= ENOUGH or time.perf_counter() - began > SECONDS:
                break
    if success < LEAST:
        raise SystemExit(f"{generator}: {success:.3f} after {step} steps, no start")
    policy.model.to("cpu").eval()
    write_warm_start(policy, out)
    (out / "start.json").write_text(json.dumps({"steps": step, "success": success}))


def gsm8k_start(weights: str, data: str, out: Path) -> None:
    """Three epochs of GSM8K's solutions, batch 64, learning rate 4e-4 falling to 0, as in results/over-training."""
    task = load_task(f"gsm8k:{data}")
    policy = load_policy(PolicyConfig(model=weights, device="auto", autocast=True, prompt="plain"), task)
    warm_start(policy, task, epochs=3, batch_size=64, learning_rate=4e-4, tell=lambda line: print(line, flush=True))
    write_warm_start(policy, out)


if __name__ == "__main__":
    if sys.argv[1] == "gym":
        gym_start(sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "cpu")
    else:
        gsm8k_start(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
