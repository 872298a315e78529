"""The embedded environments, reply by reply, and tasks of a user's own."""

from random import Random

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import (
    Environment,
    Problem,
    Reply,
    Task,
    TeachingEnvironment,
    demonstrated_episode,
    load_task,
)
from scoregram.tasks.turn_tasks import StoppingGame, best_return, card_reward


def started(task: Task, prompt: str) -> Environment:
    assert task.environment is not None
    environment = task.environment()
    assert environment.reset(Problem("a", prompt, ""), seed=0) == prompt
    return environment


# The calculator


@pytest.mark.parametrize(
    ("turns", "rewards", "observations"),
    [
        (["34+7", "41+5", "46."], [0.125, 0.125, 0.75], ["=41;", "=46;", ""]),
        (["34+8", "42+5", "47."], [0, 0.125, 0], ["=42;", "=47;", ""]),  # a mistake stays in the sum
        (["34+5", "39+7", "46."], [0, 0, 0.75], ["=39;", "=46;", ""]),  # terms are used in their order
        (["46."], [0.75], [""]),  # without the calculator
        (["", "34+7", "-3+1", "46"], [0, 0.125, 0, 0], ["?;", "=41;", "?;", "?;"]),
        (["34+7", "41+5", "46+1"], [0.125, 0.125, 0], ["=41;", "=46;", "=47;"]),  # no term is left
        (["34+7."], [0], [""]),
    ],
)
def test_replies_of_the_calculator(turns, rewards, observations):
    tool = started(load_task("calculator:3"), "34+7+5:")
    replies = [tool.step(text) for text in turns]
    assert [reply.reward + reply.outcome for reply in replies] == rewards
    assert [reply.observation for reply in replies] == observations
    assert [reply.done for reply in replies] == [text.endswith(".") for text in turns]
    assert all(reply.outcome == 0 for reply in replies if not reply.done)


@pytest.mark.parametrize("terms", [2, 3, 4, 5])
def test_a_perfect_episode_of_the_calculator_returns_exactly_one(terms):
    task = load_task(f"calculator:{terms}")
    problem = task.test[7]
    numbers = [int(text) for text in problem.prompt.rstrip(":").split("+")]
    tool, shown, paid = started(task, problem.prompt), numbers[0], 0.0
    for term in numbers[1:]:
        paid += tool.step(f"{shown}+{term}").reward
        shown += term
    assert str(shown) == problem.answer
    assert paid + tool.step(f"{shown}.").outcome == 1.0
    longest = max(len(f"{shown}."), len(f"{shown}+9")) + 1  # the stop token
    assert longest <= task.max_new_tokens and terms <= task.max_turns


def test_the_teacher_of_the_calculator_makes_mistakes_and_finishes():
    task, rng = load_task("calculator"), Random(0)
    returns = []
    for problem in task.train[:200]:
        turns = demonstrated_episode(task, problem, rng)
        tool = started(task, problem.prompt)
        replies = [tool.step(turn.text) for turn in turns]
        assert replies[-1].done and turns[0].observation == problem.prompt
        assert [turn.observation for turn in turns[1:]] == [reply.observation for reply in replies[:-1]]
        returns.append(sum(reply.reward + reply.outcome for reply in replies))
    assert 0.25 < sum(value == 1 for value in returns) / len(returns) < 0.6


# The game of when to stop


def test_replies_of_the_stopping_game():
    game = started(load_task("stopping:3"), "295:2;")
    assert game.step("+") == Reply("9;", reward=-3 / 32)
    assert game.step("+") == Reply("5;", reward=8 / 32)
    assert game.step("+") == Reply(reward=0.0, done=True)
    for text in (".", "", "++", "stop"):
        assert started(load_task("stopping:3"), "295:2;").step(text) == Reply(done=True)


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_the_best_return_is_that_of_the_best_moment_to_stop(turns):
    task = load_task(f"stopping:{turns}")
    for problem in task.test[:100]:
        returns = []
        for takes in range(turns + 1):
            game = started(task, problem.prompt)
            replies = [game.step("+") for _ in range(takes)]
            returns.append(sum(reply.reward for reply in replies))
        assert float(problem.answer) == pytest.approx(max(returns), abs=1e-6)


def test_rewards_of_cards_are_exact_and_bounded():
    for turns in (2, 4, 6):
        best, worst = [9] * turns, [1] * turns
        assert best_return(best) == 1 - 2.0**-turns == -sum(card_reward(worst, turn) for turn in range(turns))
        assert best_return(worst) == 0


def test_the_teacher_of_the_game_likes_high_cards():
    game, rng = StoppingGame((1, 5, 9)), Random(0)
    for taken, card in enumerate((1, 5, 9)):
        game.taken = taken
        share = sum(game.demonstrate(rng) == "+" for _ in range(2000)) / 2000
        assert abs(share - card / 10) < 4 * (card / 10 * (1 - card / 10) / 2000) ** 0.5


# Both


@pytest.mark.parametrize("name", ["calculator", "calculator:2", "stopping", "stopping:2", "stopping:6"])
def test_splits_are_disjoint_and_the_test_split_is_that_of_every_seed(name):
    one, other = load_task(name, seed=0), load_task(name, seed=1)
    tested = {problem.prompt for problem in one.test}
    assert [problem.prompt for problem in other.test] == [problem.prompt for problem in one.test]
    for task in (one, other):
        trained = [problem.prompt for problem in task.train]
        assert not tested & set(trained) and len(set(trained)) == len(trained)
    assert [p.prompt for p in one.train[:20]] != [p.prompt for p in other.train[:20]]
    assert one.environment is not None and isinstance(one.environment(), TeachingEnvironment)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("calculator:6", "calculator: the number of terms must be a whole number from 2 to 5, got '6'"),
        ("calculator:x", "calculator: the number of terms must be a whole number from 2 to 5, got 'x'"),
        ("stopping:1", "stopping: the number of turns must be a whole number from 2 to 6, got '1'"),
        ("python:guess", "task: a task's function must be named module:function, got 'guess'. Write module:function"),
        ("python:no_such_module:task", "task: the module of no_such_module:task must be importable, got no module"),
        ("python:json:loads2", "task: json must have loads2, got no loads2 in it"),
        ("python:builtins:str", "task: builtins:str must return a Task, got str"),
    ],
)
def test_wrong_tasks_are_refused(spec, says):
    with pytest.raises(ScoregramError, match=says):
        load_task(spec)


def test_a_text_has_no_reward_of_its_own():
    task = load_task("stopping")
    with pytest.raises(ScoregramError, match="a task with an environment has no reward for a text"):
        task.rewards([task.test[0]], ["+"])


def test_a_demonstration_needs_a_teacher():
    with pytest.raises(ScoregramError, match="the environment must have a teacher, got NoneType"):
        demonstrated_episode(load_task("arithmetic"), load_task("arithmetic").test[0], Random(0))
