import sys

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import load_reward, load_task

MODULE = """
import numpy as np
import torch

CONSTANT = 3

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def plain(prompts, completions, answer):
    return [text == right for text, right in zip(completions, answer)]

def everything(prompts, completions, completion_ids=None, **columns):
    everything.seen = dict(columns, prompts=prompts, completion_ids=completion_ids)
    return [None, 1][:len(completions)]

def needs(completions, colour):
    return [0.0 for _ in completions]

def too_few(completions, **kwargs):
    return [1.0]

def infinite(completions, **kwargs):
    return [0.0, float("inf")]

def not_a_number(completions, **kwargs):
    return [float("nan"), 0.0]

def words(completions, **kwargs):
    return ["good", "bad"]

def scalar(completions, **kwargs):
    return 1.0

def tensor(completions, **kwargs):
    return torch.tensor([0.25, 0.5])

def array(completions, **kwargs):
    return [np.float32(0.25), np.int64(2)]

def raises(completions, **kwargs):
    raise KeyError("colour")

def positional(completions, /):
    return []

async def waits(completions, **kwargs):
    return []

class Judge:
    @staticmethod
    def strict(completions, **kwargs):
        return [0.0 for _ in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a module `own_rewards`, forgotten afterwards."""
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    (tmp_path / "hungry_rewards.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("own_rewards", "broken_rewards", "hungry_rewards"):
        sys.modules.pop(name, None)


def rewarded(name: str, **columns):
    return load_reward(f"own_rewards:{name}")(prompts=["p", "q"], completions=["a", "bb"], **columns)


def test_a_function_of_the_current_folder_replaces_the_reward_of_a_task(here):
    task = load_task("arithmetic", reward="own_rewards:length")
    assert task.rewards([*task.test[:2]], ["a", "bb"]) == [1.0, 2.0]
    assert load_task("arithmetic").rewards([*task.test[:2]], ["a", "bb"]) == [0.0, 0.0]


def test_columns_come_as_keywords_and_none_stands_for_no_verdict(here):
    assert rewarded("everything", answer=["1", "2"], completion_ids=[[1], [2]]) == [None, 1.0]
    seen = sys.modules["own_rewards"].everything.seen
    assert seen == {"answer": ["1", "2"], "prompts": ["p", "q"], "completion_ids": [[1], [2]]}


def test_a_function_without_kwargs_gets_what_it_asks_for(here):
    assert rewarded("plain", answer=["a", "x"], problem_id=["1", "2"]) == [1.0, 0.0]


def test_tensors_arrays_and_methods_are_welcome(here):
    assert rewarded("tensor") == [0.25, 0.5] and rewarded("array") == [0.25, 2.0]
    assert rewarded("Judge.strict") == [0.0, 0.0]
    assert all(type(value) is float for value in rewarded("array"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("needs", ["must be among answer, completions, prompts", "got colour"]),
        ("too_few", ["one reward per completion", "1 for 2 completions"]),
        ("infinite", ["finite", "inf for rollout 1"]),
        ("not_a_number", ["finite", "nan for rollout 0"]),
        ("words", ["finite numbers", "'good' for rollout 0"]),
        ("scalar", ["must return a list", "float"]),
        ("positional", ["by name"]),
    ],
)
def test_a_wrong_result_is_named(here, name, parts):
    with pytest.raises(ScoregramError) as caught:
        rewarded(name, answer=["1", "2"])
    assert all(part in str(caught.value) for part in [f"own_rewards:{name}", *parts]), str(caught.value)


def test_what_the_function_raises_comes_through_with_its_name(here):
    with pytest.raises(KeyError, match="colour") as caught:
        rewarded("raises")
    assert caught.value.__notes__ == ["raised by the reward function own_rewards:raises"]


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("own_rewards", ["module:function", "'own_rewards'"]),
        ("own_rewards:", ["module:function"]),
        (":length", ["module:function"]),
        ("own_rewards.py:length.", ["module:function"]),
        ("folder/own_rewards:length", ["module:function"]),
        ("no_rewards:length", ["no module no_rewards"]),
        ("own_rewards.py:length", ["no module own_rewards.py"]),
        ("own_rewards:lenght", ["own_rewards must have lenght"]),
        ("own_rewards:CONSTANT", ["must be a function", "int"]),
        ("own_rewards:waits", ["plain function", "async"]),
        ("broken_rewards:f", ["broken_rewards must import", "ZeroDivisionError"]),
        ("hungry_rewards:f", ["hungry_rewards must import", "no_such_package"]),
    ],
)
def test_a_function_that_cannot_be_had_is_named(here, spec, parts):
    with pytest.raises(ScoregramError) as caught:
        load_reward(spec)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
