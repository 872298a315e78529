"""Multi-turn tasks that come with the package: sums with a calculator, and a game of when to stop."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from scoregram.checks import fail
from scoregram.tasks.arithmetic import Teacher, arithmetic, careless_teacher
from scoregram.tasks.task import LazyProblems, Problem, Reply, Task, rewarded_by_environment

# Sums with a calculator

CALCULATOR_TERMS = 4
FEWEST_CALCULATOR_TERMS, MOST_CALCULATOR_TERMS = 2, 5
OPERATION_REWARD = 0.125
"""Reward of a right operation: a binary fraction, so that the rewards of a perfect episode sum to exactly 1."""
OPERATION = re.compile(r"(\d{1,4})\+(\d{1,4})")
SPARE_TURNS = 1
"""Turns beyond those of a right solution, so that one unreadable turn can be made up for."""


@dataclass
class Calculator:
    """Adds two numbers per turn: `34+7` is answered by `=41;`, and a number with a full stop, `46.`, is the answer.

    An operation is right if it adds the next term to the number that the calculator showed last. It then pays
    `OPERATION_REWARD`. The calculator shows the result of any operation, so a mistake stays in the sum. It answers
    unreadable text by `?;`. The right answer pays the rest, so that a perfect episode has a return of 1.
    """

    teacher: Teacher
    terms: tuple[int, ...] = ()
    shown: int = 0
    used: int = 0
    """Operations so far plus one: the first term needs no operation."""

    def reset(self, problem: Problem, seed: int) -> str:
        """Show the sum, such as `34+7+5:`; nothing is random."""
        self.terms = tuple(map(int, re.findall(r"\d+", problem.prompt)))
        self.shown, self.used = self.terms[0], 1
        return problem.prompt

    def step(self, text: str) -> Reply:
        """The result of an operation, or the outcome of an answer."""
        if text.endswith("."):
            paid = 1 - OPERATION_REWARD * (len(self.terms) - 1)
            return Reply(outcome=paid * (text == f"{sum(self.terms)}."), done=True)
        operation = OPERATION.fullmatch(text)
        if operation is None:
            return Reply("?;")
        numbers = int(operation[1]), int(operation[2])
        is_right = self.used < len(self.terms) and numbers == (self.shown, self.terms[self.used])
        self.shown, self.used = sum(numbers), self.used + 1
        return Reply(f"={self.shown};", reward=OPERATION_REWARD * is_right)

    def demonstrate(self, rng: Random) -> str:
        """The next operation, or the answer after the last; a careless teacher adds a wrong term now and then."""
        if self.used >= len(self.terms):
            return f"{self.shown}."
        term = self.terms[self.used]
        has_habit = (self.shown % 10, term) in self.teacher.forgets
        if rng.random() < (self.teacher.habit if has_habit else self.teacher.slip):
            term = term % 9 + 1
        return f"{self.shown}+{term}"


def calculator(argument: str = "", seed: int = 0) -> Task:
    """Sums of `argument` terms (4 by default), one operation per turn, on the problems of `arithmetic`.

    Raises:
        ScoregramError: If `argument` is not a whole number from 2 to 5.

    Example:
        >>> task = calculator("3")
        >>> tool = task.environment()
        >>> tool.reset(Problem("a", "34+7+5:", "46"), seed=0)
        '34+7+5:'
        >>> tool.step("34+7")
        Reply(observation='=41;', reward=0.125, outcome=0.0, done=False)
        >>> tool.step("46.")
        Reply(observation='', reward=0.0, outcome=0.75, done=True)
    """
    fewest, most = FEWEST_CALCULATOR_TERMS, MOST_CALCULATOR_TERMS
    terms = whole_number(argument, "calculator", "terms", CALCULATOR_TERMS, fewest, most)
    sums = arithmetic(str(terms), seed)
    teacher = careless_teacher(terms, seed, right=0.33, habit=0.8, slip=0.02)
    return Task(
        name=f"calculator:{terms}",
        train=calculator_problems(sums.train),
        test=calculator_problems(sums.test),
        reward=rewarded_by_environment,
        max_new_tokens=len("85+9") + 1 + 2,  # the longest operation, the stop token, two to spare
        environment=lambda: Calculator(teacher),
        max_turns=terms + SPARE_TURNS,
    )


def calculator_problems(sums: Sequence[Problem]) -> LazyProblems:
    """Problems of `arithmetic` with the prompt of this task: `34+7+5:`."""

    def build(index: int) -> Problem:
        problem = sums[index]
        name = problem.id.replace("arithmetic", "calculator", 1)
        return Problem(name, problem.prompt.removesuffix("=") + ":", problem.answer, problem.columns)

    return LazyProblems(len(sums), build)


# When to stop

STOPPING_TURNS = 4
FEWEST_STOPPING_TURNS, MOST_STOPPING_TURNS = 2, 6
GO_ON = "+"
_STOPPING_TEST, _STOPPING_TRAIN = 512, 4096


@dataclass
class StoppingGame:
    """Cards with rising stakes: the policy takes the next card with `+` and stops with `.` or any other text.

    The prompt lists all cards, such as `2853:2;`; it and every observation, such as `8;`, end with the next card. Card
    `c` of turn `h` pays `(c - 5) 2^(h-1)` points, so later turns matter most. With `H` cards, a reward is the points
    divided by `2^(H+2)`.
    """

    cards: tuple[int, ...] = ()
    taken: int = 0

    def reset(self, problem: Problem, seed: int) -> str:
        """Show the cards; nothing is random."""
        self.cards, self.taken = cards_of(problem), 0
        return problem.prompt

    def step(self, text: str) -> Reply:
        """The points of a card and the card after it, or the end."""
        if text != GO_ON:
            return Reply(done=True)
        paid = card_reward(self.cards, self.taken)
        self.taken += 1
        if self.taken == len(self.cards):
            return Reply(reward=paid, done=True)
        return Reply(f"{self.cards[self.taken]};", reward=paid)

    def demonstrate(self, rng: Random) -> str:
        """Take card `c` with probability `c / 10`: a timid teacher that likes high cards and never looks ahead."""
        return GO_ON if rng.random() * 10 < self.cards[self.taken] else "."


def cards_of(problem: Problem) -> tuple[int, ...]:
    """The cards that a prompt lists."""
    return tuple(int(digit) for digit in problem.prompt.partition(":")[0])


def card_reward(cards: Sequence[int], turn: int) -> float:
    """`(c - 5) 2^(h-1) / 2^(H+2)` of turn `h = turn + 1`: a binary fraction between -1/2 and 1/2."""
    return (cards[turn] - 5) * 2.0 ** (turn - len(cards) - 2)


def best_return(cards: Sequence[int]) -> float:
    """Largest return: that of stopping when the points so far are highest.

    Example:
        >>> best_return([2, 8])  # points: -3, then 6 more
        0.1875
    """
    return max(accumulate((card_reward(cards, turn) for turn in range(len(cards))), initial=0.0))


def stopping_game(argument: str = "", seed: int = 0) -> Task:
    """The game of at most `argument` turns (4 by default); the test problems are never trained on.

    Raises:
        ScoregramError: If `argument` is not a whole number from 2 to 6.
    """
    fewest, most = FEWEST_STOPPING_TURNS, MOST_STOPPING_TURNS
    turns = whole_number(argument, "stopping", "turns", STOPPING_TURNS, fewest, most)
    space = 9**turns
    test_size = min(_STOPPING_TEST, space // 5)
    train_size = min(_STOPPING_TRAIN, space - test_size)
    # As in arithmetic, every seed has the same test split.
    held_out = Random(f"stopping/{turns}/test").sample(range(space), test_size)
    tested = set(held_out)
    drawn = Random(f"stopping/{turns}/train/{seed}").sample(range(space), test_size + train_size)
    trained = [number for number in drawn if number not in tested][:train_size]

    def build(split: str, index: int, number: int) -> Problem:
        cards = [number // 9**place % 9 + 1 for place in range(turns)]
        prompt = "".join(map(str, cards)) + f":{cards[0]};"
        return Problem(f"stopping:{turns}/{split}/{index}", prompt, f"{best_return(cards):g}")

    return Task(
        name=f"stopping:{turns}",
        train=LazyProblems(train_size, lambda i: build("train", i, trained[i])),
        test=LazyProblems(test_size, lambda i: build("test", i, held_out[i])),
        reward=rewarded_by_environment,
        max_new_tokens=len(GO_ON) + 1 + 1,  # the stop token, one to spare
        environment=StoppingGame,
        max_turns=turns,
        teaching_steps=80,
    )


def whole_number(argument: str, task: str, what: str, default: int, fewest: int, most: int) -> int:
    """The number after the colon of a task's name; the default if there is none."""
    if not argument:
        return default
    if not argument.isdecimal() or not fewest <= int(argument) <= most:
        requirement = f"the number of {what} must be a whole number from {fewest} to {most}"
        fail(task, requirement, repr(argument), f"Write for example {task}:{default}.")
    return int(argument)
