"""Running sums written step by step, `34+7+1+5=` solved as `41,42,47.`, and a careless teacher.

Only the last number is rewarded (in `arithmetic-strict` the whole solution), but every step can be verified, so these
tasks know where a rollout went wrong. The
first term has two digits and the others one, so that every step of the default difficulty has two digits.

Warm starts learn from the solutions of the careless teacher. If it made random mistakes alone, the right step would
stay the likeliest one, greedy decoding would solve everything, and nothing would be left to learn. So it has habits: at
some pairs of digits it nearly always forgets to carry. After a mistake it continues from the wrong number, so the later
steps are consistent with the mistake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from scoregram.checks import fail
from scoregram.tasks.task import LazyProblems, Problem, SolutionStep, Task

DEFAULT_TERMS = 4
FEWEST_TERMS, MOST_TERMS = 2, 16
FIRST_TERMS = range(10, 50)
LATER_TERMS = range(1, 10)
_TRAIN_PROBLEMS, _TEST_PROBLEMS = 8192, 512
_CANDIDATES = 60_000
"""Sums from which the splits with held-out compositions are chosen, where there are more."""
SPARE_TOKENS = 2
"""Tokens beyond the longest right solution, so that a policy that fails to stop is noticed."""
CARRYING = tuple((units, term) for units in range(10) for term in LATER_TERMS if units + term >= 10)
"""Pairs of last digit and term whose sum carries: half of all pairs."""

HELD_OUT_PAIRS = frozenset(
    zip(LATER_TERMS, Random("held-out compositions").sample(LATER_TERMS, len(LATER_TERMS)), strict=True)
)
"""Pairs of terms of which the second never follows the first in training on `arithmetic-compositions`."""


def arithmetic(argument: str = "", seed: int = 0) -> Task:
    """Running sums of `argument` terms (4 by default).

    All problems of both splits are distinct; the seed decides which are in the training split and in which order. The
    test split has 512 sums, or a fifth of all sums of this length if that is fewer.

    Raises:
        ScoregramError: If `argument` is not a whole number from 2 to 16.

    Example:
        >>> task = arithmetic("4")
        >>> steps = task.steps(Problem("a", "34+7+1+5=", "47", {"terms": (34, 7, 1, 5)}), "41,32,37.")
        >>> steps[1], [step.correct for step in steps]
        (SolutionStep(start=3, end=6, correct=False, final=False), [True, False, True])
    """
    terms = number_of_terms(argument)
    space = number_of_sums(terms)
    test_size = min(_TEST_PROBLEMS, space // 5)
    train_size = min(_TRAIN_PROBLEMS, space - test_size)
    # Problems are numbers below `space`. The test split is the same for every seed, so that a policy that was trained
    # or warm-started under one seed can be tested under any other.
    held_out = Random(f"arithmetic/{terms}/test").sample(range(space), test_size)
    tested = set(held_out)
    drawn = Random(f"arithmetic/{terms}/train/{seed}").sample(range(space), test_size + train_size)
    trained = [number for number in drawn if number not in tested][:train_size]
    return sum_task("arithmetic", terms, {"train": trained, "test": held_out})


def arithmetic_strict(argument: str = "", seed: int = 0) -> Task:
    """The sums of `arithmetic` with a reward for the whole right solution alone.

    `arithmetic` also rewards a right last number after two errors that cancel. Here the value of a prefix is the
    probability that the policy writes the rest of the solution, which `train --exact-values` computes.

    Example:
        >>> task = arithmetic_strict("4")
        >>> task.rewards([task.test[0]] * 2, ["0,0,47.", "nothing"])
        [0.0, 0.0]
    """
    terms = number_of_terms(argument, task="arithmetic-strict")
    return replace(
        arithmetic(str(terms), seed),
        name=f"arithmetic-strict:{terms}",
        reward=right_solution,
        rewards_solution_alone=True,
    )


def arithmetic_compositions(argument: str = "", seed: int = 0) -> Task:
    """Running sums in which some combinations of operations are held out: does a policy compose what it has learnt?

    An operation is the addition of a term, a combination two additions in a row. For each term there is one term that
    never follows it in training (`HELD_OUT_PAIRS`, 9 of 81 pairs), while both occur at every place. `test` has new
    problems without such a pair, and the held-out split `composition` problems with at least one. A policy that knows
    the single steps does equally well on both; one that knows templates of several steps does worse on `composition`.

    Raises:
        ScoregramError: If `argument` is not a whole number from 3 to 16.

    Example:
        >>> task = arithmetic_compositions("3")
        >>> len(task.train), len(task.test), len(task.held_out["composition"])
        (2520, 360, 360)
    """
    terms = number_of_terms(argument, fewest=3, task="arithmetic-compositions")
    space = number_of_sums(terms)
    shuffled = Random(f"arithmetic-compositions/{terms}/test").sample(range(space), min(space, _CANDIDATES))
    composed, familiar = by_held_out_pair(shuffled, terms)
    size = min(_TEST_PROBLEMS, len(composed), len(familiar) // 5)
    tested = set(familiar[:size])
    drawn = Random(f"arithmetic-compositions/{terms}/train/{seed}").sample(range(space), min(space, _CANDIDATES))
    trained = [number for number in by_held_out_pair(drawn, terms)[1] if number not in tested]
    splits = {"train": trained[:_TRAIN_PROBLEMS], "test": familiar[:size], "composition": composed[:size]}
    return sum_task("arithmetic-compositions", terms, splits)


def by_held_out_pair(numbers: Sequence[int], terms: int) -> tuple[list[int], list[int]]:
    """The sums with a held-out pair among their terms after the first, and those without, each in the given order.

    Sums are given as numbers, whose digits `terms_of_number` reads; here every digit of all numbers is read at once.
    """
    is_held_out = np.zeros((len(LATER_TERMS), len(LATER_TERMS)), dtype=bool)
    for pair in HELD_OUT_PAIRS:
        is_held_out[LATER_TERMS.index(pair[0]), LATER_TERMS.index(pair[1])] = True
    numbers_left = np.array(numbers, dtype=np.int64) // len(FIRST_TERMS)
    has_pair = np.zeros(len(numbers), dtype=bool)
    for _ in range(terms - 2):
        digit = numbers_left % len(LATER_TERMS)
        numbers_left //= len(LATER_TERMS)
        has_pair |= is_held_out[digit, numbers_left % len(LATER_TERMS)]
    composed = [number for number, has in zip(numbers, has_pair.tolist(), strict=True) if has]
    familiar = [number for number, has in zip(numbers, has_pair.tolist(), strict=True) if not has]
    return composed, familiar


def sum_task(name: str, terms: int, splits: Mapping[str, Sequence[int]]) -> Task:
    """The task whose splits hold these problems, given as numbers; splits besides train and test are held out."""

    def problems(split: str) -> LazyProblems:
        numbers = splits[split]
        full = f"{name}:{terms}/{split}"
        return LazyProblems(len(numbers), lambda i: sum_problem(f"{full}/{i}", terms_of_number(numbers[i], terms)))

    return Task(
        name=f"{name}:{terms}",
        train=problems("train"),
        test=problems("test"),
        reward=right_sum,
        max_new_tokens=longest_solution(terms) + 1 + SPARE_TOKENS,  # 1: the stop token
        demonstrate=lambda problem, rng: solution(problem),
        steps=verified_steps,
        solution=solution,
        rewards_are_binary=True,
        held_out={split: problems(split) for split in splits if split not in ("train", "test")},
    )


def number_of_sums(terms: int) -> int:
    """How many sums of this many terms there are."""
    return len(FIRST_TERMS) * len(LATER_TERMS) ** (terms - 1)


def terms_of_number(number: int, terms: int) -> list[int]:
    """The sum that a number below `number_of_sums` stands for: its digits in mixed base, as terms."""
    values = []
    for alphabet in (FIRST_TERMS, *[LATER_TERMS] * (terms - 1)):
        number, digit = divmod(number, len(alphabet))
        values.append(alphabet[digit])
    return values


def number_of_terms(argument: str, *, fewest: int = FEWEST_TERMS, task: str = "arithmetic") -> int:
    """The number of terms in `arithmetic:TERMS`; the default if it is empty."""
    if not argument:
        return DEFAULT_TERMS
    if not argument.isdecimal() or not fewest <= int(argument) <= MOST_TERMS:
        requirement = f"the number of terms must be a whole number from {fewest} to {MOST_TERMS}"
        fail(task, requirement, repr(argument), f"Write for example {task}:{DEFAULT_TERMS}.")
    return int(argument)


def sum_problem(problem_id: str, terms: list[int] | tuple[int, ...]) -> Problem:
    """The problem of adding `terms`, which reward functions receive as the column `terms`."""
    return Problem(problem_id, "+".join(map(str, terms)) + "=", str(sum(terms)), {"terms": tuple(terms)})


def terms_of(problem: Problem) -> tuple[int, ...]:
    """The numbers to add."""
    return tuple(int(term) for term in problem.prompt.rstrip("=").split("+"))


def solution(problem: Problem) -> str:
    """The one right solution: every running sum, then a full stop."""
    return written_sums(list(accumulate(terms_of(problem)))[1:])


def written_sums(sums: list[int]) -> str:
    """Running sums as a solution writes them."""
    return ",".join(map(str, sums)) + "."


def longest_solution(terms: int) -> int:
    """Characters of the longest right solution."""
    largest = [FIRST_TERMS[-1], *[LATER_TERMS[-1]] * (terms - 1)]
    return len(written_sums(list(accumulate(largest))[1:]))


def right_sum(prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any) -> list[float | None]:
    """`1` if the completion ends in the sum and a full stop; `0` otherwise."""
    return [float(final_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def right_solution(
    prompts: list[str], completions: list[str], *, terms: list[Any], **columns: Any
) -> list[float | None]:
    """`1` if every running sum is right and a full stop follows the last one; `0` otherwise."""
    solutions = (written_sums(list(accumulate(each))[1:]) for each in terms)
    return [float(text == right) for text, right in zip(completions, solutions, strict=True)]


def final_number(completion: str) -> str | None:
    """The text between the last comma and the final full stop; `None` without a full stop at the end."""
    return completion[:-1].rpartition(",")[2] if completion.endswith(".") else None


def verified_steps(problem: Problem, completion: str) -> tuple[SolutionStep, ...]:
    """The steps of a completion, each with its separator, and whether each adds its term correctly.

    A step is judged by the number written before it, right or wrong: steps after a mistake can be right. The separator
    is part of the step: a comma while terms are left, a full stop after the last. A step that is not a number is wrong,
    and so is everything after the last step.
    """
    first, *later = terms_of(problem)
    steps: list[SolutionStep] = []
    before: int | None = first
    start = 0
    while start < len(completion):
        end = step_end(completion, start)
        text = completion[start:end]
        is_last = len(steps) == len(later) - 1
        expected = None if before is None or len(steps) >= len(later) else before + later[len(steps)]
        correct = expected is not None and text == f"{expected}{'.' if is_last else ','}"
        steps.append(SolutionStep(start, end, correct, final=text.endswith(".")))
        digits = text.rstrip(",.")
        before = int(digits) if digits.isdecimal() else None
        start = end
    return tuple(steps)


def step_end(completion: str, start: int) -> int:
    """Index after the next separator, or the length of the text."""
    separators = [at for at in (completion.find(mark, start) for mark in ",.") if at >= 0]
    return min(separators) + 1 if separators else len(completion)


@dataclass(frozen=True)
class Teacher:
    """The mistakes of one careless teacher."""

    forgets: frozenset[tuple[int, int]]
    """Pairs of last digit and term at which it forgets to carry: its habits."""
    habit: float
    """Probability that it forgets to carry at such a pair."""
    slip: float
    """Probability of one wrong digit at any other step."""


def careless_teacher(terms: int, seed: int, *, right: float, habit: float, slip: float) -> Teacher:
    """A teacher with so many habits that, if it always followed them, a share `right` of its solutions would be right.

    The share `q` of pairs that are habits solves `(1 - q)^(terms - 1) = right` and is at most one half, because only
    pairs that carry can be habits. About a share `((1 - q · habit)(1 - slip))^(terms - 1)` of its solutions is right.
    """
    share = 1 - right ** (1 / (terms - 1))
    number = min(len(CARRYING), round(share * 2 * len(CARRYING)))
    return Teacher(frozenset(Random(f"habits/{seed}").sample(CARRYING, number)), habit, slip)


def careless_solution(problem: Problem, teacher: Teacher, rng: Random) -> str:
    """A solution as `teacher` writes it, with its mistakes."""
    value, *later = terms_of(problem)
    sums = []
    for term in later:
        value = careless_sum(value, term, teacher, rng)
        sums.append(value)
    return written_sums(sums)


def careless_sum(value: int, term: int, teacher: Teacher, rng: Random) -> int:
    """`value + term` as this teacher computes it."""
    right = value + term
    if (value % 10, term) in teacher.forgets and rng.random() < teacher.habit:
        return right - 10
    if rng.random() >= teacher.slip:
        return right
    digits = list(str(right))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([digit for digit in "0123456789"[at == 0 :] if digit != digits[at]])
    return int("".join(digits))
