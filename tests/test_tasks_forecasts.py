import math
from random import Random

import pytest

from scoregram.checks import ScoregramError
from scoregram.runs import open_run
from scoregram.tasks import Problem, load_task
from scoregram.tasks.forecasts import CHANCES, calibration_scalars, rough_forecast, stated_chance
from scoregram.training.loop import train
from tests.training_cases import config_for, save_policy


def toss(outcome: int, chance: float) -> Problem:
    return Problem("one", "d=", str(outcome), {"chance": chance})


def test_only_a_single_digit_states_a_probability():
    assert [stated_chance(text) for text in ("0", "7", "9")] == [0.05, 0.75, 0.95]
    assert [stated_chance(text) for text in ("", "77", "7.", "x", "²", "٣", " ")] == [None] * 7


def test_the_reward_is_proper():
    """Over the outcomes of every kind, the digit with the largest mean reward states its chance."""
    task = load_task("forecast")
    for chance in CHANCES.values():
        means = []
        for digit in "0123456789":
            right, wrong = task.rewards([toss(1, chance), toss(0, chance)], [digit, digit])
            assert right is not None and wrong is not None and min(right, wrong) > 0
            means.append(chance * right + (1 - chance) * wrong)
        assert stated_chance(str(means.index(max(means)))) == chance
    assert task.rewards([toss(1, 0.75)], ["7."]) == [0.0]


def test_tosses_have_the_chance_of_their_kind_and_differ_between_seeds():
    task, other = load_task("forecast"), load_task("forecast", seed=1)
    problems = list(task.train)
    for kind, chance in CHANCES.items():
        own = [int(problem.answer) for problem in problems if problem.prompt == f"{kind}="]
        assert abs(sum(own) / len(own) - chance) < 5 * math.sqrt(chance * (1 - chance) / len(own))
    assert [p.answer for p in problems[:64]] != [p.answer for p in other.train[:64]]
    assert [p.answer for p in task.test[:64]] == [p.answer for p in other.test[:64]]
    assert task.train[5] == task.train[5]


def test_demonstrations_are_right_on_average():
    task, rng = load_task("forecast"), Random(0)
    assert task.demonstrate is not None
    for chance in CHANCES.values():
        digits = {rough_forecast(chance, rng) for _ in range(200)}
        stated = [stated_chance(digit) for digit in digits]
        assert len(digits) == 5 and math.fsum(q for q in stated if q is not None) / 5 == pytest.approx(chance)
    assert stated_chance(task.demonstrate(task.train[0], rng)) is not None


def test_claimed_and_actual_confidence():
    problems = [toss(1, 0.75), toss(1, 0.75), toss(0, 0.25), toss(0, 0.75)]
    found = calibration_scalars(problems, ["9", "1", "2", "?"])
    assert found["claimed"] == pytest.approx((0.95 + 0.85 + 0.75) / 3)
    assert found["actual"] == pytest.approx((0.75 + 0.25 + 0.75) / 3)
    assert found["overconfidence"] == pytest.approx(found["claimed"] - found["actual"])
    assert found["calibration_error"] == pytest.approx((0.2 + 0.6 + 0.0) / 3)
    assert found["stated"] == 0.75
    nothing = calibration_scalars(problems, ["", "", "", ""])
    assert nothing.pop("stated") == 0.0 and all(math.isnan(value) for value in nothing.values())


def test_an_argument_is_refused():
    with pytest.raises(ScoregramError, match=r"forecast: takes no argument, got '3'\. Write forecast"):
        load_task("forecast:3")


def test_a_run_logs_the_scalars_of_its_task(tmp_path):
    train(config_for(save_policy(tmp_path / "policy"), tmp_path / "run", task="forecast", reward=None, steps=1))
    line = list(open_run(tmp_path / "run").metrics())[1]
    assert 0 <= line["task/stated"] <= 1 and "task/overconfidence" in line
