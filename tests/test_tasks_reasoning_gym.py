import importlib.util
import sys
from random import Random
from typing import Any

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import load_task
from scoregram.tasks.text_tasks import extracted_answer


def test_where_the_answer_stands():
    assert extracted_answer(" 12\n") == "12"
    assert extracted_answer("<answer>1</answer> no: <answer>\n2 </answer>.") == "2"


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ScoregramError, match=r"pip install 'scoregram\[reasoning-gym\]'"):
        load_task("reasoning-gym:chain_sum")


needs_library = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@needs_library
def test_an_unknown_generator_lists_the_choices():
    with pytest.raises(ScoregramError, match=r"one of .*chain_sum, .*got 'sums'"):
        load_task("reasoning-gym:sums")


@needs_library
def test_problems_are_the_library_s_and_repeatable():
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    task, again = load_task("reasoning-gym:chain_sum", seed=3), load_task("reasoning-gym:chain_sum", seed=3)
    entry = reasoning_gym.create_dataset("chain_sum", seed=0, size=1)[0]
    assert (task.test[0].prompt, task.test[0].answer) == (entry["question"], entry["answer"])
    assert [*task.train[:5]] == [*again.train[:5]] and task.test[0] == again.test[0]


@needs_library
def test_seeds_share_the_test_problems_and_no_training_problems():
    """The library's problem `i` of seed `s + 1` is its problem `i + 1` of seed `s`; a seed here is no such shift."""
    first, second = (load_task("reasoning-gym:chain_sum", seed=seed) for seed in (3, 4))
    assert list(first.test) == list(second.test)
    trained = [{problem.prompt for problem in task.train[:300]} for task in (first, second)]
    assert len(trained[0] & trained[1]) < 3  # of 300: short sums may repeat by chance


@needs_library
def test_the_library_scores():
    task = load_task("reasoning-gym:chain_sum")
    problem = task.train[0]
    assert task.demonstrate is not None
    shown = task.demonstrate(problem, Random(0))
    partly = f"it is {problem.answer}, I think"  # the library's own partial score
    rewards = task.rewards([problem] * 4, [shown, problem.answer, partly, "<answer></answer>"])
    assert rewards[:2] == [1.0, 1.0] and 0 < (rewards[2] or 0) < 0.5 and rewards[3] == 0.0


@needs_library
def test_a_scorer_that_raises_scores_zero(monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset  # pyright: ignore[reportMissingImports]

    task = load_task("reasoning-gym:chain_sum")
    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda *_: 1 / 0)
    assert task.rewards([task.train[0]], ["1"]) == [0.0]


@needs_library
def test_no_test_question_is_trained_on_even_where_problems_repeat(monkeypatch):
    monkeypatch.setattr("scoregram.tasks.text_tasks._TEST_PROBLEMS", 40)
    monkeypatch.setattr("scoregram.tasks.text_tasks._TRAIN_PROBLEMS", 300)
    task = load_task("reasoning-gym:coin_flip")
    tested = {problem.prompt for problem in task.test}
    assert len(task.train) == 300 and not tested & {problem.prompt for problem in task.train}


@pytest.mark.usefixtures("unchecked_shapes")  # a check of the types would itself look at a problem
@needs_library
def test_a_generator_with_too_few_problems_is_named(monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset  # pyright: ignore[reportMissingImports]

    entry = {"question": "always this", "answer": "1", "metadata": {}}
    monkeypatch.setattr(ChainSumDataset, "__getitem__", lambda *_: entry)
    task = load_task("reasoning-gym:chain_sum")
    with pytest.raises(ScoregramError, match="more problems than its 1 test problems"):
        task.train[0]


@needs_library
def test_a_generator_that_only_scores_gives_no_demonstration():
    task = load_task("reasoning-gym:propositional_logic")
    assert task.test[0].answer == "" and task.demonstrate is None
    entry: Any = task.test[0].columns["entry"]
    example = entry["metadata"]["example_answer"]
    assert task.rewards([task.test[0]] * 2, [example, "(P ∧ ¬P)"])[0] == 1.0


@needs_library
def test_a_generator_that_needs_more_than_its_name_is_refused():
    with pytest.raises(ScoregramError, match="composite must work in its default configuration"):
        load_task("reasoning-gym:composite")


@needs_library
def test_settings_reach_the_generator():
    task = load_task("reasoning-gym:chain_sum:min_terms=3,max_terms=3,max_digits=1")
    sums = [problem.prompt.split(":")[1].split() for problem in (*task.test[:20], *task.train[:20])]
    assert all(len(words) == 6 and all(len(term) == 1 for term in words[:5:2]) for words in sums)  # a + b - c =
    assert task.name == "reasoning-gym:chain_sum:min_terms=3,max_terms=3,max_digits=1"


@needs_library
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("max_terms", r"name=value, separated by commas, got 'max_terms'"),
        ("max_terms=3,,max_digits=1", r"name=value, separated by commas, got ''"),
        ("size=5", r"got 'size=5'.*seed and size are the task's own"),
        ("min_terms=9", "must work with these settings, got chain_sum:min_terms=9: max_terms must be >= min_terms"),
        ("terms=3", "must work with these settings"),
    ],
)
def test_a_wrong_setting_is_refused(settings, said):
    with pytest.raises(ScoregramError, match=said):
        load_task(f"reasoning-gym:chain_sum:{settings}")
