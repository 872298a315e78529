from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.tasks import Problem, SolutionStep, Task, load_task
from scoregram.tasks.arithmetic import (
    CARRYING,
    HELD_OUT_PAIRS,
    Teacher,
    by_held_out_pair,
    careless_solution,
    careless_teacher,
    number_of_sums,
    sum_problem,
)

TERMS = st.lists(st.integers(1, 9), min_size=1, max_size=8).flatmap(
    lambda later: st.integers(10, 49).map(lambda first: [first, *later])
)


def solved(task: Task, problem: Problem) -> str:
    assert task.demonstrate is not None
    return task.demonstrate(problem, Random(0))


def verified(task: Task, problem: Problem, completion: str) -> tuple[SolutionStep, ...]:
    assert task.steps is not None
    return task.steps(problem, completion)


def by_hand(terms: list[int]) -> list[int]:
    """Every running sum after the first term, added up from scratch each time."""
    return [sum(terms[: k + 1]) for k in range(1, len(terms))]


def first_wrong_character(problem: Problem, completion: str) -> int | None:
    """Index of the first character that differs from the right solution, its length if it stops too early."""
    right = ",".join(map(str, by_hand(list(problem.columns["terms"])))) + "."  # pyright: ignore[reportArgumentType]
    if completion == right:
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(completion, right, strict=False)) if a != b), min(len(completion), len(right))
    )


@pytest.mark.parametrize("difficulty", [2, 3, 4, 6, 16])
def test_splits_are_distinct_disjoint_and_repeatable(difficulty):
    task, again = load_task(f"arithmetic:{difficulty}"), load_task(f"arithmetic:{difficulty}")
    train, test = [p.prompt for p in task.train], [p.prompt for p in task.test]
    assert len({*train, *test}) == len(train) + len(test)
    assert len(train) >= 4 * len(test) > 0
    assert [p.prompt for p in again.train] == train and list(again.test) == list(task.test)
    assert len({p.id for p in (*task.train, *task.test)}) == len(train) + len(test)


def test_usual_sizes():
    task = load_task("arithmetic")
    assert (task.name, len(task.train), len(task.test)) == ("arithmetic:4", 8192, 512)


def test_the_seed_changes_the_training_problems_and_no_seed_trains_on_a_test_problem():
    one, other = load_task("arithmetic", seed=1), load_task("arithmetic", seed=2)
    assert {p.prompt for p in one.train} != {p.prompt for p in other.train}
    assert list(one.test) == list(other.test)
    assert not {p.prompt for p in other.train} & {p.prompt for p in one.test}


@given(terms=TERMS)
def test_a_problem_and_its_demonstration(terms):
    task = load_task(f"arithmetic:{len(terms)}")
    problem = sum_problem("p", terms)
    shown = solved(task, problem)
    assert problem.prompt == "+".join(map(str, terms)) + "=" and problem.answer == str(sum(terms))
    assert problem.columns == {"terms": tuple(terms)}
    assert shown == ",".join(map(str, by_hand(terms))) + "."
    assert task.rewards([problem], [shown]) == [1.0]
    assert len(shown) < task.max_new_tokens  # room for the stop token
    assert [step.correct for step in verified(task, problem, shown)] == [True] * (len(terms) - 1)
    assert first_wrong_character(problem, shown) is None


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("41,42,47.", 1.0),
        ("47.", 1.0),  # only the final answer is rewarded
        ("41,32,47.", 1.0),
        ("41,42,48.", 0.0),
        ("41,42,47", 0.0),  # not finished
        ("41,42,47x", 0.0),
        ("41,42,47.1", 0.0),
        ("41,42,47..", 0.0),
        ("41,42,147.", 0.0),
        ("41,42,47,.", 0.0),
        ("41,42,047.", 0.0),
        ("", 0.0),
        (".", 0.0),
    ],
)
def test_only_the_closed_last_number_is_rewarded(completion, reward):
    assert load_task("arithmetic").rewards([sum_problem("p", [34, 7, 1, 5])], [completion]) == [reward]


@pytest.mark.parametrize(
    ("completion", "steps", "wrong_at"),
    [
        ("41,42,47.", [(0, 3, True), (3, 6, True), (6, 9, True)], None),
        ("31,32,37.", [(0, 3, False), (3, 6, True), (6, 9, True)], 0),  # consistent after the first mistake
        ("41,42,57.", [(0, 3, True), (3, 6, True), (6, 9, False)], 6),
        ("41,43,47.", [(0, 3, True), (3, 6, False), (6, 9, False)], 4),
        ("41,42,47", [(0, 3, True), (3, 6, True), (6, 8, False)], 8),  # stopped too early
        ("41.", [(0, 3, False)], 2),
        ("41,42,47,48.", [(0, 3, True), (3, 6, True), (6, 9, False), (9, 12, False)], 8),
        ("41,42,47.9", [(0, 3, True), (3, 6, True), (6, 9, True), (9, 10, False)], 9),
        ("41,x,47.", [(0, 3, True), (3, 5, False), (5, 8, False)], 3),
        ("041,42,47.", [(0, 4, False), (4, 7, True), (7, 10, True)], 0),
        ("", [], 0),
    ],
)
def test_steps_and_the_first_wrong_character(completion, steps, wrong_at):
    problem = sum_problem("p", [34, 7, 1, 5])
    expected = tuple(SolutionStep(*step, final=completion[step[1] - 1] == ".") for step in steps)
    assert verified(load_task("arithmetic"), problem, completion) == expected
    assert first_wrong_character(problem, completion) == wrong_at


@given(terms=TERMS, text=st.text("0123456789,.= x", max_size=30))
def test_steps_cover_any_text_without_gap_and_agree_with_the_first_wrong_character(terms, text):
    problem, task = sum_problem("p", terms), load_task(f"arithmetic:{len(terms)}")
    steps = verified(task, problem, text)
    assert [step.start for step in steps] == [0, *(step.end for step in steps)][: len(steps)]
    assert "".join(text[step.start : step.end] for step in steps) == text
    wrong = next((step for step in steps if not step.correct), None)
    at = first_wrong_character(problem, text)
    if wrong is not None:
        assert at is not None and wrong.start <= at <= wrong.end
    elif len(steps) == len(terms) - 1:
        assert at is None


@pytest.mark.parametrize("argument", ["1", "17", "0", "-3", "four", "4.0", " 4", "²"])
def test_a_difficulty_out_of_range_is_named(argument):
    with pytest.raises(ScoregramError, match="number of terms must be a whole number from 2 to 16, got"):
        load_task(f"arithmetic:{argument}")


def test_carrying_pairs_are_those_that_carry():
    assert set(CARRYING) == {(u, t) for u in range(10) for t in range(1, 10) if (20 + u + t) // 10 > 2}


@given(terms=TERMS, seed=st.integers(0, 99))
def test_a_faultless_teacher_is_right_and_a_habit_forgets_the_carry_and_carries_on(terms, seed):
    problem, rng = sum_problem("p", terms), Random(seed)
    right = solved(load_task(f"arithmetic:{len(terms)}"), problem)
    assert careless_solution(problem, Teacher(frozenset(), 1.0, 0.0), rng) == right
    value, sums = terms[0], []
    for term in terms[1:]:
        value = value // 10 * 10 + (value % 10 + term) % 10  # the tens stay as they were
        sums.append(value)
    assert careless_solution(problem, Teacher(frozenset(CARRYING), 1.0, 0.0), rng) == ",".join(map(str, sums)) + "."


@given(terms=TERMS, seed=st.integers(0, 99))
def test_a_slip_changes_exactly_one_digit_of_its_step(terms, seed):
    text = careless_solution(sum_problem("p", terms), Teacher(frozenset(), 0.0, 1.0), Random(seed))
    before = terms[0]
    for term, value in zip(terms[1:], text.rstrip(".").split(","), strict=True):
        right = str(before + term)
        assert len(value) == len(right) and sum(a != b for a, b in zip(value, right, strict=True)) == 1
        before = int(value)


@pytest.mark.parametrize("difficulty", [2, 3, 4, 6, 8])
def test_the_teacher_is_right_as_often_as_asked_by_habit_and_by_chance(difficulty):
    """Monte Carlo over 2,000 problems: four standard errors, and 0.08 for steps that are not quite independent."""
    teacher = careless_teacher(difficulty, seed=0, right=0.4, habit=0.7, slip=0.02)
    headstrong = Teacher(teacher.forgets, 1.0, 0.0)
    task, rng = load_task(f"arithmetic:{difficulty}"), Random(0)
    problems = [rng.choice(task.train) for _ in range(2000)]
    share = min(0.5, 1 - 0.4 ** (1 / (difficulty - 1)))  # of all steps; no more than half of them carry
    for who in (teacher, headstrong):
        expected = ((1 - share * who.habit) * (1 - who.slip)) ** (difficulty - 1)
        rewards = task.rewards(problems, [careless_solution(problem, who, rng) for problem in problems])
        standard_error = (expected * (1 - expected) / len(problems)) ** 0.5
        assert abs(rewards.count(1.0) / len(rewards) - expected) < 4 * standard_error + 0.08


def pairs_in_a_row(problem: Problem) -> set[tuple[int, int]]:
    """Every two added terms that stand next to each other, read from the prompt."""
    _, *added = [int(term) for term in problem.prompt.rstrip("=").split("+")]
    return {(added[k], added[k + 1]) for k in range(len(added) - 1)}


def test_the_strict_task_rewards_the_whole_solution_alone():
    strict, plain = (load_task(f"{name}:4", seed=3) for name in ("arithmetic-strict", "arithmetic"))
    problem = sum_problem("p", [34, 7, 1, 5])
    texts = ["41,42,47.", "51,52,47.", "41,42,47", "41,42,47.9", ""]
    assert strict.rewards([problem] * 5, texts) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert plain.rewards([problem] * 5, texts)[:2] == [1.0, 1.0]
    assert list(strict.train[:9]) == list(plain.train[:9]) and list(strict.test) == list(plain.test)
    assert strict.rewards_solution_alone and not plain.rewards_solution_alone
    with pytest.raises(ScoregramError, match="arithmetic-strict: the number of terms must be"):
        load_task("arithmetic-strict:1")


@pytest.mark.parametrize("terms", [3, 4, 16])
@pytest.mark.parametrize("seed", [0, 7])
def test_held_out_compositions_do_not_leak_into_training(terms, seed):
    task = load_task(f"arithmetic-compositions:{terms}", seed=seed)
    composed = task.held_out["composition"]
    seen = set().union(*map(pairs_in_a_row, (*task.train, *task.test)))
    unseen = {(a, b) for a in range(1, 10) for b in range(1, 10)} - seen
    assert len(unseen) == 9 == len({a for a, _ in unseen}) == len({b for _, b in unseen})
    assert all(pairs_in_a_row(problem) & unseen for problem in composed)
    prompts = [problem.prompt for problem in (*task.train, *task.test, *composed)]
    assert len(set(prompts)) == len(prompts)
    assert len(task.test) == len(composed) >= 300 and len(task.train) >= 4 * len(task.test)


@pytest.mark.parametrize("terms", [3, 4, 16])
def test_sums_are_divided_by_the_pairs_of_their_terms(terms):
    space = number_of_sums(terms)
    numbers = Random(0).sample(range(space), min(space, 3000))
    composed, familiar = by_held_out_pair(numbers, terms)
    assert sorted(composed + familiar) == sorted(numbers) and sorted(composed, key=numbers.index) == composed
    with_pair = set(composed)
    for number in numbers:
        added = [number // 40 // 9**place % 9 + 1 for place in range(terms - 1)]
        pairs = {(added[place], added[place + 1]) for place in range(terms - 2)}
        assert (number in with_pair) == bool(pairs & HELD_OUT_PAIRS)


def test_every_single_addition_of_a_held_out_composition_is_trained():
    task = load_task("arithmetic-compositions")
    places = [tuple(map(int, p.prompt.rstrip("=").split("+")))[1:] for p in task.train]
    for place in range(3):
        assert {terms[place] for terms in places} == set(range(1, 10))


def test_compositions_are_the_same_test_for_every_seed():
    one, other = (load_task("arithmetic-compositions", seed=seed) for seed in (1, 2))
    assert list(one.test) == list(other.test)
    assert list(one.held_out["composition"]) == list(other.held_out["composition"])
    assert not {p.prompt for p in other.train} & {p.prompt for p in one.test}


def test_a_composition_needs_two_additions():
    with pytest.raises(ScoregramError, match=r"arithmetic-compositions: the number of terms must be .* from 3 to 16"):
        load_task("arithmetic-compositions:2")
