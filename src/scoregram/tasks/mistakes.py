"""Solutions of running sums as a careless teacher writes them: what a warm-started policy has to unlearn.

A teacher who only slips at random would leave the right step the likeliest one: greedy decoding alone would then solve
everything, and there would be nothing to learn. So this teacher has habits too: at some pairs of digits it nearly
always forgets to carry. After either kind of mistake it carries on from the wrong number: a solution is consistent.
"""

from dataclasses import dataclass
from random import Random

from scoregram.tasks.arithmetic import LATER_TERMS, terms_of, written
from scoregram.tasks.task import Problem

CARRYING = tuple((units, term) for units in range(10) for term in LATER_TERMS if units + term >= 10)
"""Pairs of last digit and term whose sum carries: half of all pairs."""


@dataclass(frozen=True)
class Teacher:
    """How one teacher goes wrong."""

    forgets: frozenset[tuple[int, int]]
    """Pairs of last digit and term at which it forgets to carry."""
    habit: float
    """Chance that it does so at such a pair."""
    slip: float
    """Chance of one wrong digit at any other step."""


def careless_teacher(terms: int, seed: int, *, right: float, habit: float, slip: float) -> Teacher:
    """A teacher a share `right` of whose solutions would be right if it always followed its bad habits.

    A share `q` of all pairs is a bad habit, `(1 - q)^(terms - 1) = right`, and at most the half that carries. The share
    of its solutions that is right by chance is about `((1 - q · habit)(1 - slip))^(terms - 1)`.
    """
    share = 1 - right ** (1 / (terms - 1))
    number = min(len(CARRYING), round(share * 2 * len(CARRYING)))
    return Teacher(frozenset(Random(f"habits/{seed}").sample(CARRYING, number)), habit, slip)


def careless_solution(problem: Problem, teacher: Teacher, rng: Random) -> str:
    """A solution by `teacher`, mistakes and all."""
    value, *later = terms_of(problem)
    sums = []
    for term in later:
        value = careless_sum(value, term, teacher, rng)
        sums.append(value)
    return written(sums)


def careless_sum(value: int, term: int, teacher: Teacher, rng: Random) -> int:
    """`value + term`, or what this teacher takes it for."""
    right = value + term
    if (value % 10, term) in teacher.forgets and rng.random() < teacher.habit:
        return right - 10
    if rng.random() >= teacher.slip:
        return right
    digits = list(str(right))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([digit for digit in "0123456789"[at == 0 :] if digit != digits[at]])
    return int("".join(digits))
