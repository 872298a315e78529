"""Every task by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from scoregram.checks import fail, lookup
from scoregram.tasks.arithmetic import arithmetic
from scoregram.tasks.gsm8k import gsm8k
from scoregram.tasks.jsonl import jsonl
from scoregram.tasks.reasoning_gym import reasoning_gym
from scoregram.tasks.reward import load_reward
from scoregram.tasks.task import Task


@dataclass(frozen=True)
class TaskRow:
    """One task and how it is named on the command line."""

    load: Callable[[str, int], Task]
    """The task, given the text after the colon and a seed."""
    argument: str
    """What stands after the colon."""
    needs_argument: bool
    """Whether the name alone is not enough."""
    about: str
    """One line for people who choose."""


TASKS: MappingProxyType[str, TaskRow] = MappingProxyType(
    {
        "arithmetic": TaskRow(
            load=arithmetic,
            argument="number of terms",
            needs_argument=False,
            about="running sums written step by step; embedded, every step verifiable",
        ),
        "gsm8k": TaskRow(
            load=gsm8k,
            argument="folder with train.jsonl and test.jsonl",
            needs_argument=False,
            about="grade-school word problems; from the hub where no folder is given",
        ),
        "reasoning-gym": TaskRow(
            load=reasoning_gym,
            argument="name of a generator",
            needs_argument=True,
            about="the generators and scorers of the library reasoning-gym",
        ),
        "jsonl": TaskRow(
            load=jsonl,
            argument="file, or folder with train.jsonl and test.jsonl",
            needs_argument=True,
            about="your own prompts and answers, one JSON object a line",
        ),
    }
)


def load_task(spec: str, *, seed: int = 0, reward: str | None = None) -> Task:
    """The task that `spec` names: `arithmetic`, `arithmetic:6`, `gsm8k:FOLDER`, `reasoning-gym:NAME`, `jsonl:FILE`.

    Args:
        spec: Name of a row of `TASKS`, and after a colon what that row takes.
        seed: Which problems are generated, where problems are generated.
        reward: `module:function` in place of the task's own reward.

    Raises:
        ScoregramError: If there is no such task, or its argument is missing or wrong.

    Example:
        >>> load_task("arithmetic:3").test[0].id
        'arithmetic:3/test/0'
    """
    name, _, argument = spec.partition(":")
    row = lookup(TASKS, name, kind="task")
    if row.needs_argument and not argument:
        fail("task", f"{name} needs its {row.argument} after a colon", repr(spec), f"Write {name}:….")
    task = row.load(argument, seed)
    return task if reward is None else replace(task, reward=load_reward(reward))
