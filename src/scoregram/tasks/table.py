"""Every task by its name on the command line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from scoregram.checks import fail, lookup
from scoregram.tasks.arithmetic import arithmetic, arithmetic_compositions
from scoregram.tasks.forecasts import coin_forecasts
from scoregram.tasks.task import Task, load_reward
from scoregram.tasks.text_tasks import gsm8k, jsonl, reasoning_gym


@dataclass(frozen=True)
class TaskRow:
    """One task."""

    load: Callable[[str, int], Task]
    """Builds the task from the text after the colon and a seed."""
    argument: str
    """What the text after the colon means."""
    needs_argument: bool
    """Whether the text after the colon is required."""
    about: str
    """One line of description."""


TASKS: MappingProxyType[str, TaskRow] = MappingProxyType(
    {
        "arithmetic": TaskRow(
            load=arithmetic,
            argument="number of terms",
            needs_argument=False,
            about="running sums written step by step; needs no data, every step is verifiable",
        ),
        "arithmetic-compositions": TaskRow(
            load=arithmetic_compositions,
            argument="number of terms",
            needs_argument=False,
            about="the same sums, with pairs of additions that training never has; evaluated with and without them",
        ),
        "forecast": TaskRow(
            load=coin_forecasts,
            argument="nothing",
            needs_argument=False,
            about="stated probabilities of random outcomes under a proper scoring rule: is the policy overconfident?",
        ),
        "gsm8k": TaskRow(
            load=gsm8k,
            argument="folder with train.jsonl and test.jsonl",
            needs_argument=False,
            about="grade-school word problems; from the hub if no folder is given",
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
            about="your own prompts and answers, one JSON object per line",
        ),
    }
)


def load_task(spec: str, *, seed: int = 0, reward: str | None = None) -> Task:
    """The task that `spec` names: `arithmetic:6`, `forecast`, `gsm8k:FOLDER`, `reasoning-gym:NAME`, `jsonl:FILE`.

    Args:
        spec: Name of a row of `TASKS`, then a colon and its argument.
        seed: Of the generated problems; fixed datasets ignore it.
        reward: `module:function` in place of the task's own reward.

    Raises:
        ScoregramError: If no task has this name, or its argument is missing or invalid.

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
