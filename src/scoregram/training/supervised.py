"""A supervised warm start on the demonstrations of a task, so that reinforcement learning begins with some rewards."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy import (
    Demonstration,
    Policy,
    episode_demonstration,
    padded_demonstrations,
    supervised_losses,
    token_log_probs,
)
from scoregram.tasks import Problem, Task, demonstrated_episode
from scoregram.training.checkpoint import save_policy
from scoregram.training.collect import drawn_problems


def warm_start(
    policy: Policy,
    task: Task,
    *,
    epochs: float,
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> None:
    """Train the policy in place on written solutions: AdamW, the learning rate falling linearly to 0.

    Args:
        policy: Its model is trained.
        task: Must have demonstrations, or an environment with a teacher.
        epochs: Passes over the training problems; may be a fraction.
        batch_size: Solutions in one step.
        learning_rate: At the start.
        seed: Of the order of the problems.
        tell: Called with a line of progress every 100 steps.

    Raises:
        ScoregramError: If the task has no demonstrations.
    """
    if task.demonstrate is None and task.environment is None:
        fail("warm_start", "the task must have demonstrations", task.name, "Use gsm8k or arithmetic.")
    model, device = policy.model, next(policy.model.parameters()).device
    random, began = Random(seed), time.perf_counter()
    steps = max(1, round(epochs * len(task.train) / batch_size))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)

    def batch_loss(step: int) -> Tensor:
        problems = drawn_problems(task.train, step * batch_size, batch_size, seed)
        batch = [demonstration(policy, task, problem, random) for problem in problems]
        ids, attention, solution = padded_demonstrations(batch, policy.pad_id, device)
        with policy.computing():
            return -token_log_probs(model, ids, attention, solution).sum() / solution.sum()

    model.train()
    rates = (learning_rate * (1 - step / steps) for step in range(steps))
    for step, loss in enumerate(supervised_losses(model, optimizer, batch_loss, rates)):
        if step % 100 == 0 or step == steps - 1:
            tell(f"warm start {step + 1}/{steps} · loss {loss.item():.3f} · {time.perf_counter() - began:.0f} s")
    model.eval()


def demonstration(policy: Policy, task: Task, problem: Problem, rng: Random) -> Demonstration:
    """A solved problem, or an episode of the environment's teacher, in tokens."""
    if task.demonstrate is not None:
        return task_demonstration(policy, task, problem, task.demonstrate(problem, rng))
    episode = episode_demonstration(
        demonstrated_episode(task, problem, rng),
        prompt=policy.encode_prompt,
        observation=policy.encode_observation,
        turn=lambda text: written_tokens(policy, text),
    )
    return replace(episode, ids=episode.ids[: policy.context])


def task_demonstration(policy: Policy, task: Task, problem: Problem, solution: str) -> Demonstration:
    """A solved problem in tokens; the solution is tokenized on its own, as a completion is."""
    prompt = policy.encode_prompt(task.prompt(problem))
    return Demonstration((*prompt, *written_tokens(policy, solution))[: policy.context], len(prompt))


def written_tokens(policy: Policy, text: str) -> list[int]:
    """What the policy is to write, with its stop token."""
    return [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.stop_ids[0]]


def write_warm_start(policy: Policy, folder: Path) -> None:
    """Write a warm-started policy as a folder that `--model` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_policy(folder, policy)
