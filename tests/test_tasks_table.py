import sys
from dataclasses import replace

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import TASKS, load_task


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
