from dataclasses import replace
from typing import Any

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import LazyProblems, Problem, Task, load_task, reward_columns


def problem(index: int) -> Problem:
    return Problem(f"p/{index}", f"{index}?", str(index))


def recorded(calls: list) -> Task:
    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        calls.append((prompts, completions, columns))
        return [1.0] * len(completions)

    return Task("t", [problem(0)], [problem(1)], reward, 8, prompt_format="Q {x}: {prompt}\nA:")


def test_a_prompt_keeps_its_braces():
    assert recorded([]).prompt(Problem("p", "what is {0}{prompt}?", "")) == "Q {x}: what is {0}{prompt}?\nA:"


def test_a_reward_function_gets_prompts_completions_and_columns_as_trl_hands_them_over():
    calls = []
    first, second = Problem("a", "x", "1", {"level": 3}), Problem("b", "y", "2", {"source": "s"})
    rewards = recorded(calls).rewards([first, second], ["u", "v"], completion_ids=[[1], [2, 3]])
    assert rewards == [1.0, 1.0]
    prompts, completions, columns = calls[0]
    assert prompts == ["Q {x}: x\nA:", "Q {x}: y\nA:"] and completions == ["u", "v"]
    assert columns == {
        "answer": ["1", "2"],
        "problem_id": ["a", "b"],
        "level": [3, None],
        "source": [None, "s"],
        "completion_ids": [[1], [2, 3]],
    }


def test_one_problem_per_completion():
    with pytest.raises(ScoregramError, match="one problem per completion, got 1 problems and 2 completions"):
        recorded([]).rewards([problem(0)], ["a", "b"])


def test_no_problem_gives_no_column_values():
    assert reward_columns([]) == {"answer": [], "problem_id": []}


def test_lazy_problems_are_built_only_when_asked_for():
    built = []
    lazy = LazyProblems(1000, lambda i: built.append(i) or problem(i))
    assert len(lazy) == 1000 and built == []
    assert lazy[7] == problem(7) and lazy[-1] == problem(999) and built == [7, 999]


def test_lazy_problems_index_as_a_list_does():
    lazy, eager = LazyProblems(5, problem), [problem(i) for i in range(5)]
    assert list(lazy) == eager and list(reversed(lazy)) == eager[::-1]
    assert lazy[1:4:2] == eager[1:4:2] and lazy[10:] == [] and problem(3) in lazy
    for outside in (5, -6):
        with pytest.raises(IndexError):
            lazy[outside]


def test_a_task_is_replaced_not_changed():
    task = load_task("arithmetic")
    assert replace(task, max_new_tokens=3).max_new_tokens == 3 != task.max_new_tokens
