"""A user's reward function, named `module:function`, called as TRL calls it and checked after every call."""

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from scoregram.checks import fail

FORM = "Write module:function, for example my_rewards:short_and_right."


@dataclass(frozen=True)
class CheckedReward:
    """A reward function whose result is checked: one finite number, or `None`, per rollout.

    A function without `**kwargs` is given only the columns it asks for; TRL would hand it all of them.
    """

    name: str
    function: Callable[..., Any]

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """One reward per rollout.

        Raises:
            ScoregramError: If the function asks for a column that is not there, or gives anything but one finite number
                or `None` per rollout. What the function itself raises comes through, with its name as a note.
        """
        given = {"prompts": prompts, "completions": completions, **columns}
        keywords = accepted(self.name, self.function, given)
        try:
            rewards = self.function(**keywords)
        except Exception as error:
            error.add_note(f"raised by the reward function {self.name}")
            raise
        return checked_rewards(self.name, rewards, len(completions))


def load_reward(spec: str) -> CheckedReward:
    """The function that `spec` names, imported from what is installed or from the current folder.

    The current folder is put on the path and stays there, as with `python -m`: the module may import its neighbours
    whenever it likes.

    Args:
        spec: `module:function`; both may have dots.

    Raises:
        ScoregramError: If the form is wrong, the module or the function is missing, or it cannot be called.
    """
    module_name, _, path = spec.partition(":")
    if not path or not all(part.isidentifier() for part in f"{module_name}.{path}".split(".")):
        fail("reward", "a reward function must be named module:function", repr(spec), FORM)
    found: Any = imported(module_name, spec)
    for part in path.split("."):
        if not hasattr(found, part):
            fail("reward", f"{module_name} must have {path}", f"no {part} in it", "Check the spelling.")
        found = getattr(found, part)
    if not callable(found):
        fail("reward", f"{spec} must be a function", type(found).__name__, "Name a function.")
    if inspect.iscoroutinefunction(found):
        fail("reward", f"{spec} must be a plain function", "an async one", "Wrap it with asyncio.run.")
    return CheckedReward(spec, found)


def imported(module_name: str, spec: str) -> Any:
    """The module; a module that is not there is told apart from one that fails while it is imported."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than the last look into this folder
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{module_name}.".startswith(f"{missing.name}."):
            fail(
                "reward",
                f"the module of {spec} must be importable",
                f"no module {missing.name}",
                f"Looked in {folder}.",
            )
        fail("reward", f"{module_name} must import", f"{missing}", "Install what it needs.")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fail("reward", f"{module_name} must import", reason, "Repair the module.")


def accepted(name: str, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the `given` keywords that `function` takes; all of them where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return given
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        fail(
            "reward",
            f"{name} must take its arguments by name",
            "positional-only ones",
            "Remove the / in its signature.",
        )
    if missing := [column for column in required if column not in given]:
        columns = ", ".join(sorted(given))
        fail(
            "reward", f"{name} may ask for {columns}", missing[0], "Rename the argument or add the column to the data."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    names = {p.name for p in parameters}
    return {key: value for key, value in given.items() if key in names}


def checked_rewards(name: str, rewards: Any, rollouts: int) -> list[float | None]:
    """Rewards as a list of floats and `None`, provided that there is one for each rollout and all are finite."""
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # tensors and arrays
    if not isinstance(values, list | tuple):
        fail("reward", f"{name} must give a list of rewards", type(rewards).__name__, "Give one per completion.")
    if len(values) != rollouts:
        got = f"{len(values)} for {rollouts} completions"
        fail(
            "reward",
            f"{name} must give one reward per completion",
            got,
            "Give one per completion, None for no verdict.",
        )
    return [checked_reward(name, value, index) for index, value in enumerate(values)]


def checked_reward(name: str, value: Any, index: int) -> float | None:
    """One reward as a float, or `None`."""
    number = value.item() if hasattr(value, "item") else value  # scalars of torch and numpy
    if number is None:
        return None
    if not isinstance(number, Real) or not math.isfinite(number):
        fail(
            "reward", f"{name} must give finite numbers", f"{value!r} for rollout {index}", "Give None for no verdict."
        )
    return float(number)
