"""A supervised warm start on the demonstrations of a task, so that a policy begins with something to learn from."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy import Policy, token_log_probs
from scoregram.tasks import Problem, Task
from scoregram.training.checkpoint import save_policy
from scoregram.training.collect import drawn_problems


@dataclass(frozen=True)
class Lesson:
    """One prompt with its written solution."""

    ids: tuple[int, ...]
    """Prompt, solution, stop token."""
    prompt: int
    """Tokens of the prompt."""


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
        task: Must be able to demonstrate.
        epochs: Passes over the training problems; may be a fraction.
        batch_size: Solutions of one step.
        learning_rate: At the start.
        seed: Of the order of the problems.
        tell: Gets a line now and then.

    Raises:
        ScoregramError: If the task has no demonstrations.
    """
    if task.demonstrate is None:
        fail("warm_start", "the task must have demonstrations", task.name, "Use gsm8k or arithmetic.")
    model, device = policy.model, next(policy.model.parameters()).device
    steps = max(1, round(epochs * len(task.train) / batch_size))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    random, began = Random(seed), time.perf_counter()
    model.train()
    for step in range(steps):
        problems = drawn_problems(task.train, step * batch_size, batch_size, seed)
        lessons = [lesson(policy, task, problem, task.demonstrate(problem, random)) for problem in problems]
        ids, attention, solution = padded(lessons, policy.pad_id, device)
        with policy.computing():
            loss = -token_log_probs(model, ids, attention, solution).sum() / solution.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            tell(f"warm start {step + 1}/{steps} · loss {loss.item():.3f} · {time.perf_counter() - began:.0f} s")
    model.eval()


def lesson(policy: Policy, task: Task, problem: Problem, solution: str) -> Lesson:
    """The tokens of a solved problem; the solution is encoded apart, as a completion is."""
    prompt = policy.encode_prompt(task.prompt(problem))
    written = policy.tokenizer(solution, add_special_tokens=False)["input_ids"]
    return Lesson((*prompt, *written, policy.stop_ids[0])[: policy.context], len(prompt))


def padded(lessons: Sequence[Lesson], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and mask of the solutions, all `(N, T)`, padded on the right."""
    longest = max(len(one.ids) for one in lessons)
    ids = torch.tensor([[*one.ids, *[pad_id] * (longest - len(one.ids))] for one in lessons], device=device)
    place = torch.arange(longest, device=device)
    lengths = torch.tensor([len(one.ids) for one in lessons], device=device).unsqueeze(1)
    prompts = torch.tensor([one.prompt for one in lessons], device=device).unsqueeze(1)
    return ids, place < lengths, (place >= prompts) & (place < lengths)


def write_warm_start(policy: Policy, folder: Path) -> None:
    """Write a warm-started policy as a folder that `--model` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_policy(folder, policy)
