"""A small environment, a policy to play in it, and rollouts of two turns for tests of credit."""

import copy
from pathlib import Path
from random import Random
from typing import Any

import torch

from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Reply, Task, rewarded_by_environment

PROBLEMS = [Problem(f"echo/{index}", f"say {index}:", str(index)) for index in range(5)]


class Echo:
    """Repeats the text, its length and a random digit; rewards even sums of characters, and ends after three turns."""

    turns = 0
    luck: Random

    def reset(self, problem: Problem, seed: int) -> str:
        """Show the prompt."""
        self.turns, self.luck = 0, Random(seed)
        return problem.prompt

    def step(self, text: str) -> Reply:
        """Repeat the text's length."""
        self.turns += 1
        even = sum(map(ord, text)) % 2 == 0
        if self.turns == 3 or (text and ord(text[0]) % 3 == 0):
            return Reply(reward=0.5 * even, outcome=float(len(text)), done=True)
        return Reply(f"[{len(text)}{self.luck.randrange(3)}]", reward=0.5 * even)


ECHO = Task(
    name="echo",
    train=PROBLEMS,
    test=PROBLEMS,
    reward=rewarded_by_environment,
    max_new_tokens=4,
    environment=Echo,
    max_turns=3,
)


def echo_task(seed: int) -> Task:
    """The task by a name that a config can hold, `python:tests.turn_cases:echo_task`."""
    return ECHO


def policy_in(folder: Path, dtype: str = "float32") -> Policy:
    return load_policy(PolicyConfig(model=str(folder), device="cpu", prompt="plain", dtype=dtype))


def two_turns(lengths: list[list[int]], *, gap: int = 2, prompt: int = 3, seed: int = 0, **columns: Any) -> Rollouts:
    """Rollouts with turns of these lengths, `gap` observed tokens between them, and random tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for row in lengths:
        turns_and_gaps = [[turn] * length + [-1] * gap for turn, length in enumerate(row)]
        rows.append([-1] * prompt + [turn for part in turns_and_gaps for turn in part][:-gap])
    longest = max(map(len, rows))
    turns = torch.tensor([[*row, *[-2] * (longest - len(row))] for row in rows])
    return Rollouts(
        input_ids=torch.randint(2, 60, turns.shape, generator=draw),
        attention_mask=turns > -2,
        completion_mask=turns >= 0,
        prompt_lengths=torch.full((len(rows),), prompt),
        finished=torch.ones(len(rows), dtype=torch.bool),
        turn_ids=turns.clamp(min=0),
        **columns,
    )


def played_by_hand(
    policy: Policy, rollouts: Rollouts, row: int, seed: int, problem: Problem
) -> list[tuple[str, Reply]]:
    """The turns of a transcript, given again to a fresh environment: each text with its reply."""
    environment, turns = Echo(), []
    environment.reset(problem, seed)
    assert rollouts.turn_ids is not None
    mask, ids, of = rollouts.completion_mask[row], rollouts.input_ids[row], rollouts.turn_ids[row]
    for turn in range(int(of[mask].max()) + 1):
        text = policy.decode(ids[mask & (of == turn)].tolist())
        turns.append((text, copy.copy(environment.step(text))))
    return turns
