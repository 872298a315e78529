"""Every task by its name on the command line."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from types import MappingProxyType
from typing import Any

from scoregram.checks import fail, lookup
from scoregram.tasks.arithmetic import arithmetic, arithmetic_compositions, arithmetic_strict
from scoregram.tasks.forecasts import coin_forecasts
from scoregram.tasks.task import (
    CheckedReward,
    Problem,
    Task,
    imported_function,
    load_reward,
    load_step_scores,
    raised_by,
)
from scoregram.tasks.text_tasks import gsm8k, jsonl, reasoning_gym
from scoregram.tasks.turn_tasks import calculator, stopping_game


def python_task(argument: str, seed: int) -> Task:
    """The task that the user's function `module:function` builds from the seed.

    Raises:
        ScoregramError: If the function cannot be imported, does not take the seed, or does not return a `Task` that
            can be trained on.
    """
    build = imported_function(argument, caller="task", what="a task's function", example="my_tasks:guess")
    try:
        signature(build).bind(seed)
    except TypeError as error:
        fail("task", f"{argument} must take one argument, the seed", error, "Define it as def name(seed).")
    except ValueError:  # a function written in C may have no signature
        pass
    with raised_by(f"the task's function {argument}"):
        task = build(seed)
    if not isinstance(task, Task):
        fail("task", f"{argument} must return a Task", type(task).__name__, "Return scoregram.tasks.Task(…).")
    require_task(task, argument)
    if task.environment is not None:
        return task
    return replace(task, reward=CheckedReward(f"{task.name}.reward", task.reward))


def require_task(task: Task, caller: str) -> None:
    """Raise if a user's task cannot be trained on."""
    for name, least in (("max_new_tokens", 1), ("max_turns", 1)):
        if not getattr(task, name) >= least:
            fail(caller, f"{name} of the task must be at least {least}", getattr(task, name), "Choose a larger number.")
    if not callable(task.reward):
        remedy = "Pass a function, or rewarded_by_environment."
        fail(caller, "reward of the task must be a function", repr(task.reward), remedy)
    if task.environment is not None and not callable(task.environment):
        remedy = "Pass a class, or a function that makes one environment."
        fail(caller, "environment of the task must be callable", repr(task.environment), remedy)
    for split, problems in {"train": task.train, "test": task.test, **task.held_out}.items():
        require_problems(problems, f"{split} of the task", caller)
    if not len(task.train):
        fail(caller, "train of the task must hold problems", "none", "Pass at least one Problem.")


def require_problems(problems: Any, name: str, caller: str) -> None:
    """Raise if the problems of a split are no sequence of `Problem`, or two of them have one id."""
    if not all(hasattr(problems, method) for method in ("__len__", "__getitem__")):
        fail(caller, f"{name} must be a sequence", type(problems).__name__, "Pass a list of Problem.")
    for problem in problems:
        if not isinstance(problem, Problem):
            remedy = "Pass Problem(id=…, prompt=…, answer=…)."
            fail(caller, f"{name} must hold scoregram.tasks.Problem", f"a {type(problem).__name__}", remedy)
    repeated = [each for each, count in Counter(problem.id for problem in problems).items() if count > 1]
    if repeated:
        remedy = "Groups are counted by the id of their problem: give each its own."
        fail(caller, f"the ids in {name} must differ", f"{repeated[0]!r} more than once", remedy)


@dataclass(frozen=True)
class CountedParts:
    """The parts of a problem whose number the text after the colon of a task is."""

    unit: str
    """What they are, in the plural."""
    usual: int
    """How many there are unless the text says."""
    fewest: int
    most: int


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
    is_generated: bool = False
    """Whether the problems are made up from the seed: there is no list of them to shorten."""
    parts: CountedParts | None = None
    """What the text after the colon counts; None if it is no number."""


TASKS: MappingProxyType[str, TaskRow] = MappingProxyType(
    {
        "arithmetic": TaskRow(
            load=arithmetic,
            argument="number of terms",
            needs_argument=False,
            about="running sums written step by step; needs no data, every step is verifiable",
            is_generated=True,
            parts=CountedParts("terms", usual=4, fewest=2, most=16),
        ),
        "arithmetic-strict": TaskRow(
            load=arithmetic_strict,
            argument="number of terms",
            needs_argument=False,
            about="the same sums, rewarded only if every step is right; the values of prefixes are known exactly",
            is_generated=True,
            parts=CountedParts("terms", usual=4, fewest=2, most=16),
        ),
        "arithmetic-compositions": TaskRow(
            load=arithmetic_compositions,
            argument="number of terms",
            needs_argument=False,
            about="the same sums, with pairs of additions that training never has; evaluated with and without them",
            is_generated=True,
            parts=CountedParts("terms", usual=4, fewest=3, most=16),
        ),
        "forecast": TaskRow(
            load=coin_forecasts,
            argument="nothing",
            needs_argument=False,
            about="stated probabilities of random outcomes under a proper scoring rule: is the policy overconfident?",
            is_generated=True,
        ),
        "calculator": TaskRow(
            load=calculator,
            argument="number of terms",
            needs_argument=False,
            about="sums over several turns with a calculator; every operation is rewarded; needs no data",
            is_generated=True,
            parts=CountedParts("terms", usual=4, fewest=2, most=5),
        ),
        "stopping": TaskRow(
            load=stopping_game,
            argument="number of turns",
            needs_argument=False,
            about="cards with rising stakes: the policy decides before every card whether to stop; needs no data",
            is_generated=True,
            parts=CountedParts("turns", usual=4, fewest=2, most=6),
        ),
        "gsm8k": TaskRow(
            load=gsm8k,
            argument="folder with train.jsonl and test.jsonl",
            needs_argument=False,
            about="grade-school word problems; from the hub if no folder is given",
        ),
        "reasoning-gym": TaskRow(
            load=reasoning_gym,
            argument="name of a generator, and settings of it",
            needs_argument=True,
            about="the generators and scorers of the library reasoning-gym",
            is_generated=True,
        ),
        "jsonl": TaskRow(
            load=jsonl,
            argument="file, or folder with train.jsonl and test.jsonl",
            needs_argument=True,
            about="your own prompts and answers, one JSON object per line",
        ),
        "python": TaskRow(
            load=python_task,
            argument="module:function, which takes the seed and returns a Task",
            needs_argument=True,
            about="a task of your own, such as one with an environment",
        ),
    }
)


def load_task(spec: str, *, seed: int = 0, reward: str | None = None, step_scores: str | None = None) -> Task:
    """The task that `spec` names: `arithmetic:6`, `calculator`, `forecast`, `gsm8k:FOLDER`, `jsonl:FILE`, ….

    Args:
        spec: Name of a row of `TASKS`, then a colon and its argument.
        seed: Of the generated problems; fixed datasets ignore it.
        reward: `module:function` in place of the task's own reward.
        step_scores: `module:function` that scores the steps of completions, in place of the task's own verifier.

    Raises:
        ScoregramError: If no task has this name, or its argument is missing or invalid.

    Example:
        >>> load_task("arithmetic:3").test[0].id
        'arithmetic:3/test/0'
    """
    if not isinstance(spec, str):
        fail("task", "must be named by a text", repr(spec), "Write for example arithmetic:4.")
    name, _, argument = spec.partition(":")
    row = lookup(TASKS, name, kind="task")
    if row.needs_argument and not argument:
        fail("task", f"{name} needs its {row.argument} after a colon", repr(spec), f"Write {name}:….")
    task = row.load(argument, seed)
    if reward is not None and task.environment is not None:
        fail("task", f"the rewards of {name} come from its environment", f"--reward {reward}", "Leave the reward out.")
    if reward is not None:
        task = replace(task, reward=load_reward(reward), rewards_are_binary=False)
    return task if step_scores is None else replace(task, step_scores=load_step_scores(step_scores))
