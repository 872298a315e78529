"""Running sums, written step by step: `34+7+1+5=` is solved as `41,42,47.`

Only the last number is rewarded, yet every step can be verified, so this task also knows where a rollout went wrong.
The first term has two digits and the others one, so that every step of the default difficulty is two digits wide.
"""

from itertools import accumulate
from math import prod
from random import Random
from typing import Any

from scoregram.checks import fail
from scoregram.tasks.task import LazyProblems, Problem, Step, Task

DEFAULT_TERMS = 4
FEWEST_TERMS, MOST_TERMS = 2, 16
FIRST_TERMS = range(10, 50)
LATER_TERMS = range(1, 10)
TRAIN_PROBLEMS, TEST_PROBLEMS = 8192, 512
SPARE_TOKENS = 2
"""Tokens beyond the longest right solution, so that a policy that does not stop is seen not to."""


def arithmetic(argument: str = "", seed: int = 0) -> Task:
    """Running sums of `argument` terms (4 unless given).

    All problems of both splits are distinct; the seed decides which are in the training split and in which order. A
    difficulty with fewer problems than the usual 8,192 + 512 gives a fifth of them to the test split.

    Raises:
        ScoregramError: If `argument` is no whole number from 2 to 16.

    Example:
        >>> task = arithmetic("4")
        >>> task.steps(Problem("a", "34+7+1+5=", "47", {"terms": (34, 7, 1, 5)}), "41,32,37.")
        (Step(start=0, end=3, correct=True), Step(start=3, end=6, correct=False), Step(start=6, end=9, correct=True))
    """
    terms = number_of_terms(argument)
    alphabets = (FIRST_TERMS, *[LATER_TERMS] * (terms - 1))
    space = prod(len(alphabet) for alphabet in alphabets)
    test_size = min(TEST_PROBLEMS, space // 5)
    train_size = min(TRAIN_PROBLEMS, space - test_size)
    # Problems are numbers below `space`. The test split is the same for every seed, so that whatever was learnt under
    # one seed, a warm start included, can be tested under any other.
    held_out = Random(f"arithmetic/{terms}/test").sample(range(space), test_size)
    tested = set(held_out)
    drawn = Random(f"arithmetic/{terms}/train/{seed}").sample(range(space), test_size + train_size)
    trained = [number for number in drawn if number not in tested][:train_size]

    def build(split: str, index: int, number: int) -> Problem:
        values = []
        for alphabet in alphabets:
            number, digit = divmod(number, len(alphabet))
            values.append(alphabet[digit])
        return sum_problem(f"arithmetic:{terms}/{split}/{index}", values)

    return Task(
        name=f"arithmetic:{terms}",
        train=LazyProblems(train_size, lambda i: build("train", i, trained[i])),
        test=LazyProblems(test_size, lambda i: build("test", i, held_out[i])),
        reward=right_sum,
        max_new_tokens=longest_solution(terms) + 1 + SPARE_TOKENS,  # 1: the stop token
        demonstrate=lambda problem, rng: solution(problem),
        steps=verified_steps,
    )


def number_of_terms(argument: str) -> int:
    """The difficulty that follows `arithmetic:`; empty means the default."""
    if not argument:
        return DEFAULT_TERMS
    if not argument.isdecimal() or not FEWEST_TERMS <= int(argument) <= MOST_TERMS:
        fail(
            "arithmetic",
            f"the number of terms must be a whole number from {FEWEST_TERMS} to {MOST_TERMS}",
            repr(argument),
            f"Write for example arithmetic:{DEFAULT_TERMS}.",
        )
    return int(argument)


def sum_problem(problem_id: str, terms: list[int] | tuple[int, ...]) -> Problem:
    """The problem of adding `terms`, which every reward function is given as the column `terms`."""
    return Problem(problem_id, "+".join(map(str, terms)) + "=", str(sum(terms)), {"terms": tuple(terms)})


def terms_of(problem: Problem) -> tuple[int, ...]:
    """The numbers to be added."""
    return tuple(int(term) for term in problem.prompt.rstrip("=").split("+"))


def solution(problem: Problem) -> str:
    """The one right solution: every running sum, then a full stop."""
    return written(list(accumulate(terms_of(problem)))[1:])


def written(sums: list[int]) -> str:
    """Running sums as a policy writes them."""
    return ",".join(map(str, sums)) + "."


def longest_solution(terms: int) -> int:
    """Characters of the longest right solution."""
    largest = [FIRST_TERMS[-1], *[LATER_TERMS[-1]] * (terms - 1)]
    return len(written(list(accumulate(largest))[1:]))


def right_sum(prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any) -> list[float | None]:
    """`1` where the last number, closed by a full stop at the very end, is the sum; `0` otherwise."""
    return [float(final_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def final_number(completion: str) -> str | None:
    """What stands between the last comma and the closing full stop; `None` where there is no full stop at the end."""
    return completion[:-1].rpartition(",")[2] if completion.endswith(".") else None


def verified_steps(problem: Problem, completion: str) -> tuple[Step, ...]:
    """The steps of a completion, each with its separator, and whether each adds its own term rightly.

    A step is judged from the number written before it, right or wrong: after one mistake the later steps can be right.
    A separator is part of its step: a comma while terms are left, a full stop after the last. What cannot be read as a
    number, and what follows the last step, is wrong.
    """
    first, *later = terms_of(problem)
    steps: list[Step] = []
    before: int | None = first
    start = 0
    while start < len(completion):
        end = step_end(completion, start)
        text = completion[start:end]
        is_last = len(steps) == len(later) - 1
        expected = None if before is None or len(steps) >= len(later) else before + later[len(steps)]
        correct = expected is not None and text == f"{expected}{'.' if is_last else ','}"
        steps.append(Step(start, end, correct))
        digits = text.rstrip(",.")
        before = int(digits) if digits.isdecimal() else None
        start = end
    return tuple(steps)


def step_end(completion: str, start: int) -> int:
    """Index just behind the next separator, or the end of the text."""
    found = [at for at in (completion.find(mark, start) for mark in ",.") if at >= 0]
    return min(found) + 1 if found else len(completion)


def first_wrong_character(problem: Problem, completion: str) -> int | None:
    """Index of the first character that departs from the right solution; `None` where there is none.

    A completion that stops too early went wrong at its end: the index is then its length, that of the stop token.
    """
    right = solution(problem)
    for index, (is_there, should_be) in enumerate(zip(completion, right, strict=False)):
        if is_there != should_be:
            return index
    return None if completion == right else min(len(completion), len(right))
