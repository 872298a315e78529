import copy
import math
import sys
from dataclasses import replace
from random import Random

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import TASKS, Environment, Problem, Task, built_environment, demonstrated_episode, load_task


def test_an_unknown_task_lists_the_choices():
    with pytest.raises(ScoregramError, match=f"one of {', '.join(sorted(TASKS))}, got 'maths'"):
        load_task("maths:3")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_claim_that_problems_are_generated(name, tmp_path):
    """The problems of two seeds differ where they are generated, and nowhere else."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1+1?", "prompt": "1+1=", "answer": "#### 2"}\n')
    if name in ("python", "reasoning-gym"):  # the code of a user, and a library that may be missing
        assert TASKS[name].is_generated == (name == "reasoning-gym")
        return
    spec = f"{name}:{tmp_path}" if name in ("gsm8k", "jsonl") else name
    prompts = [[problem.prompt for problem in load_task(spec, seed=seed).train[:50]] for seed in (0, 1)]
    assert (prompts[0] != prompts[1]) == TASKS[name].is_generated


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_claim_that_an_argument_is_needed(name, monkeypatch):
    called, row, some_task = [], TASKS[name], load_task("arithmetic")
    spy = replace(row, load=lambda *given: called.append(given) or some_task)
    monkeypatch.setattr("scoregram.tasks.table.TASKS", {name: spy})
    for spec in (name, f"{name}:"):
        if row.needs_argument:
            with pytest.raises(ScoregramError, match=f"{name} needs its .* after a colon"):
                load_task(spec)
        else:
            load_task(spec, seed=5)
    assert called == ([] if row.needs_argument else [("", 5)] * 2)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_claim_of_what_a_task_counts(name):
    """The usual number is the default, the fewest and the most are taken, and one beyond them is refused."""
    parts = TASKS[name].parts
    if parts is None:
        return
    assert load_task(name).name == f"{name}:{parts.usual}"
    for number in (parts.fewest, parts.most):
        assert load_task(f"{name}:{number}").name == f"{name}:{number}"
    for number in (parts.fewest - 1, parts.most + 1):
        with pytest.raises(ScoregramError, match=f"from {parts.fewest} to {parts.most}, got '{number}'"):
            load_task(f"{name}:{number}")


def embedded_environment(name: str) -> Task | None:
    """The task if it has an environment of ours; None for tasks of one turn and those of a user."""
    is_ours = not TASKS[name].needs_argument and name != "gsm8k"  # which would be downloaded
    task = load_task(name) if is_ours else None
    return task if task is not None and task.environment is not None else None


def started(task: Task, problem: Problem, seed: int) -> Environment:
    environment = built_environment(task)
    assert environment.reset(problem, seed) == problem.prompt  # of any seed, as the rollouts of a group share it
    return environment


@pytest.mark.parametrize("name", sorted(TASKS))
def test_an_environment_takes_any_text_and_survives_a_copy(name):
    """A policy writes nonsense at first, and branches continue a copy."""
    task, rng = embedded_environment(name), Random(0)
    if task is None:
        return
    for seed, problem in enumerate(task.test[:20]):
        environment = started(task, problem, seed)
        for _ in range(task.max_turns):
            text = rng.choice(["", " ", "7", "+", ".", "12+34", "-1", "\u0663", "\u00b2", "\n", "9" * 5000, "no."])
            twin = copy.deepcopy(environment)
            reply = environment.step(text)
            assert twin.step(text) == reply
            assert math.isfinite(reply.reward) and math.isfinite(reply.outcome) and (reply.done or not reply.outcome)
            if reply.done:
                break


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_teacher_of_an_environment_finishes_and_leaves_something_to_learn(name):
    task, rng = embedded_environment(name), Random(0)
    if task is None:
        return
    returns = []
    for problem in (task.train[at % len(task.train)] for at in range(200)):
        environment, replies = started(task, problem, 0), []
        for turn in demonstrated_episode(task, problem, rng):
            assert len(turn.text) < task.max_new_tokens  # a character is a token of the policy; then its stop token
            replies.append(environment.step(turn.text))
        returns.append(sum(reply.reward + reply.outcome for reply in replies))
    assert min(returns) < sum(returns) / len(returns) < max(returns)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_seed_trains_on_the_test_problems_of_an_environment(name):
    if embedded_environment(name) is None:
        return
    seeds = [load_task(name, seed=seed) for seed in range(3)]
    tested = {(problem.id, problem.prompt, problem.answer) for problem in seeds[0].test}
    for task in seeds:
        assert {(problem.id, problem.prompt, problem.answer) for problem in task.test} == tested
        trained = {(problem.prompt, problem.answer) for problem in task.train}
        assert not trained & {(prompt, answer) for _, prompt, answer in tested}


def test_a_colon_inside_the_argument_stays(tmp_path):
    path = tmp_path / "a:b.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n{"prompt": "y", "answer": "2"}')
    assert len(load_task(f"jsonl:{path}").train) == 1


OWN = """
from scoregram.tasks import Problem, Task


def task(seed):
    problems = [Problem("one", "1+1=", "2")]
    return Task("own", problems, problems, reward, 4)


def reward(completions, answer):
    if "raise" in completions:
        raise KeyError("colour")
    return [None if not text else float(text == right) for text, right in zip(completions, answer)][:2]


def broken(seed):
    raise KeyError(seed)
"""


def test_the_functions_of_a_users_task_are_named_when_they_fail(tmp_path, monkeypatch):
    (tmp_path / "own_task_of_a_user.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = load_task("python:own_task_of_a_user:task")
    (problem,) = task.train
    assert task.rewards([problem] * 2, ["2", ""]) == [1.0, None]
    with pytest.raises(ScoregramError, match=r"own\.reward must return one reward per completion, got 2 for 3 comp"):
        task.rewards([problem] * 3, ["2"] * 3)
    with pytest.raises(KeyError) as caught:
        task.rewards([problem], ["raise"])
    assert caught.value.__notes__ == ["raised by the reward function own.reward"]
    with pytest.raises(KeyError) as caught:
        load_task("python:own_task_of_a_user:broken")
    assert caught.value.__notes__ == ["raised by the task's function own_task_of_a_user:broken"]
