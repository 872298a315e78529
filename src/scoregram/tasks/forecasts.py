"""Forecasts of random outcomes: the answer to `c=` is a digit, which states a probability and earns its Brier score.

A problem is one toss of a coin of some kind. The prompt names the kind and not the outcome, so the best a policy can do
is to state the chance of the kind. All rollouts of a group forecast the same toss, as the rollouts of a real question
share its answer. No toss can be predicted for certain, so a policy that states certainty is overconfident.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from scoregram.checks import fail
from scoregram.tasks.task import LazyProblems, Problem, Task

CHANCES = {"a": 0.25, "b": 0.35, "c": 0.65, "d": 0.75}
"""Kind of a coin → its chance of outcome 1. For each chance there is a digit that states it."""
_TRAIN_PROBLEMS, _TEST_PROBLEMS = 8192, 512


def coin_forecasts(argument: str = "", seed: int = 0) -> Task:
    """Tosses of four kinds of coins, to be forecast; the seed decides the tosses of the training split.

    Raises:
        ScoregramError: If there is an argument.

    Example:
        >>> task = coin_forecasts()
        >>> toss = Problem("one", "d=", "1", {"chance": 0.75})
        >>> task.rewards([toss, toss, toss], ["7", "0", "1."])
        [0.9375, 0.09750000000000003, 0.0]
    """
    if argument:
        fail("forecast", "takes no argument", repr(argument), "Write forecast.")

    def build(split: str, index: int) -> Problem:
        draw = Random(f"forecast/{split}/{seed if split == 'train' else ''}/{index}")
        kind = draw.choice(sorted(CHANCES))
        outcome = int(draw.random() < CHANCES[kind])
        return Problem(f"forecast/{split}/{index}", f"{kind}=", str(outcome), {"chance": CHANCES[kind]})

    return Task(
        name="forecast",
        train=LazyProblems(_TRAIN_PROBLEMS, lambda i: build("train", i)),
        test=LazyProblems(_TEST_PROBLEMS, lambda i: build("test", i)),
        reward=brier_rewards,
        max_new_tokens=2,  # a digit and the stop token
        demonstrate=lambda problem, rng: rough_forecast(CHANCES[problem.prompt[0]], rng),
        scalars=calibration_scalars,
    )


def rough_forecast(chance: float, rng: Random) -> str:
    """A digit at most two away from the one that states the chance: right on average, for supervised warm starts."""
    return str(int(10 * chance) + rng.randint(-2, 2))


def stated_chance(completion: str) -> float | None:
    """The probability that a completion states: `(digit + 1/2)/10`; None unless it is exactly one digit."""
    is_digit = len(completion) == 1 and completion in "0123456789"
    return (int(completion) + 0.5) / 10 if is_digit else None


def brier_rewards(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any
) -> list[float | None]:
    """`1 − (q − o)²` of the stated probability `q` and the outcome `o`; 0, worse than any digit, if none is stated."""
    stated = [stated_chance(text) for text in completions]
    return [0.0 if q is None else 1 - (q - int(o)) ** 2 for q, o in zip(stated, answer, strict=True)]


def calibration_scalars(problems: Sequence[Problem], completions: Sequence[str]) -> dict[str, float]:
    """How confident the stated probabilities are, and how confident they should be.

    A stated `q` claims that the likelier outcome comes with probability `max(q, 1 − q)`. `claimed` is its mean,
    `actual` the mean true chance of the outcome that was called likelier, `overconfidence` their difference: 0 for a
    calibrated policy, positive for one that is too sure. `calibration_error` is the mean `|q − p|`, `stated` the share
    of rollouts that state a probability. Without any, all but `stated` are `nan`.
    """
    pairs = [
        (stated_chance(text), problem.columns["chance"]) for problem, text in zip(problems, completions, strict=True)
    ]
    known = [(q, float(str(p))) for q, p in pairs if q is not None]
    shown = max(len(known), 1)
    claimed = sum(max(q, 1 - q) for q, _ in known) / shown
    actual = sum(p if q > 0.5 else 1 - p for q, p in known) / shown
    error = sum(abs(q - p) for q, p in known) / shown
    found = {"claimed": claimed, "actual": actual, "overconfidence": claimed - actual, "calibration_error": error}
    if not known:
        found = dict.fromkeys(found, float("nan"))
    return found | {"stated": len(known) / max(len(pairs), 1)}
