import importlib.util
import threading

import pytest

from scoregram.tasks.answers import equal_by_algebra, last_boxed, right_answer, same_answer, stated_answer

WITH_ALGEBRA = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")


@pytest.fixture
def without_algebra(monkeypatch):
    """math-verify as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))


NUMBERS = [
    ("so 9*2 = 18\n#### 18", "18", True),
    ("#### 18", "19", False),
    ("#### 18.", "18", True),
    ("#### 18.00", "18", True),
    ("####18", "18", True),
    ("#### $70,000", "70000", True),
    ("#### 70,000 dollars.", "70000", True),
    ("#### -5", "-5", True),
    ("#### -5", "5", False),
    ("#### -$5", "-5", True),
    ("#### 1.5", "15", False),
    ("#### .5", "0.5", True),
    ("#### 25%", "25", True),
    ("#### 18\nQuestion: next?\n#### 7", "18", True),  # what is rambled on about changes nothing
    ("#### 7\n#### 18", "18", False),
    ("#### \n18", "18", False),
    ("####", "18", False),
    ("18", "18", True),
    ("She makes $18.", "18", True),
    ("9 and then 18 eggs.", "18", True),
    ("18 eggs and 9 more", "18", False),
    ("It is 1,234.50 dollars.", "1234.5", True),
    (r"thus \boxed{18} eggs, not 4", "18", True),
    ("no number", "18", False),
    ("", "18", False),
    ("#### 180", "18", False),
    ("#### 1 8", "18", False),
    ("#### 118", "18", False),
]


@pytest.mark.parametrize(("completion", "answer", "same"), NUMBERS)
def test_a_number_is_compared_exactly_without_math_verify(completion, answer, same, without_algebra):
    assert same_answer(completion, answer) == same


@WITH_ALGEBRA
@pytest.mark.parametrize(("completion", "answer", "same"), [case for case in NUMBERS if case[0] != "#### 1 8"])
def test_math_verify_changes_no_verdict_on_a_plain_number(completion, answer, same):
    assert same_answer(completion, answer) == same


@WITH_ALGEBRA
@pytest.mark.parametrize(
    ("completion", "answer", "same"),
    [
        ("#### 36/2", "18", True),
        ("#### 36/2", "36", False),
        (r"#### \frac{36}{2}", "18", True),
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"#### x^2 + 2x", r"$x(x+2)$", True),
        ("#### 18 + 5", "18", False),
        ("#### 9^9^9^9", "18", False),  # would never end
        ("#### 5000!", "18", False),
        ("#### 2^100000", "18", False),
        ("#### " + "1+" * 200 + "1", "201", False),
    ],
)
def test_expressions_are_left_to_math_verify_in_every_thread(completion, answer, same):
    assert same_answer(completion, answer) == same
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(same_answer(completion, answer)))
    thread.start()
    thread.join()
    assert verdicts == [same]


@WITH_ALGEBRA
@pytest.mark.parametrize("expression", ["9^9^9", "2^{12345}", "x**9", "5000!", "1+" * 101])
def test_what_could_run_away_never_reaches_math_verify(expression, monkeypatch):
    import math_verify

    monkeypatch.setattr(math_verify, "parse", lambda *_, **__: pytest.fail("parsed"))
    assert not equal_by_algebra(expression, "18") and not equal_by_algebra("18", expression)


def test_an_expression_is_wrong_where_math_verify_is_missing(without_algebra):
    assert not equal_by_algebra("36/2", "18") and not same_answer("#### 36/2", "36")


@pytest.mark.parametrize(
    ("completion", "answer", "same"),
    [
        ("I think:\n  Paris. ", "paris", True),
        ("#### New   York", "new york", True),
        ("London", "Paris", False),
        ("", "Paris", False),
        ("", "", False),
        ("Paris\nor London", "Paris", False),
    ],
)
def test_a_text_is_compared_without_regard_to_case_and_spacing(completion, answer, same, without_algebra):
    assert same_answer(completion, answer) == same


def test_where_the_answer_stands():
    assert stated_answer(r"\boxed{1} #### 2") == "2"
    assert stated_answer("nothing") is None
    assert last_boxed(r"\boxed{1} \boxed{\frac{a}{b}}.") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{1") is None


def test_one_reward_per_completion():
    assert right_answer(["q", "q"], ["#### 1", "#### 2"], answer=["1", "1"], solution=["", ""]) == [1.0, 0.0]
