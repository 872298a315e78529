import json
import sys
from random import Random
from types import ModuleType

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import load_task

EGGS = {
    "question": "Ducks lay 16 eggs, 7 are eaten, each of the rest is sold for $2,000. How much?",
    "answer": "She sells 16 - 7 = <<16-7=9>>9 eggs.\nShe makes 9 * 2000 = $<<9*2000=18000>>18,000.\n#### 18,000",
}
PENS = {"question": "Two pens and one. How many?", "answer": "2+1=<<2+1=3>>3\n#### 3"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(EGGS) + "\n" + json.dumps(PENS) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(PENS) + "\n")
    return tmp_path


def test_a_folder_gives_both_splits(folder):
    task = load_task(f"gsm8k:{folder}")
    eggs = task.train[0]
    assert (len(task.train), len(task.test)) == (2, 1)
    assert (eggs.id, eggs.answer) == ("gsm8k/train/0", "18000")
    assert task.prompt(eggs) == f"Question: {EGGS['question']}\nAnswer:"


def test_a_demonstration_has_no_calculator_marks_and_is_rewarded(folder):
    task = load_task(f"gsm8k:{folder}")
    assert task.demonstrate is not None
    shown = task.demonstrate(task.train[0], Random(0))
    assert shown == " She sells 16 - 7 = 9 eggs.\nShe makes 9 * 2000 = $18,000.\n#### 18000"
    assert task.rewards([task.train[0]] * 2, [shown, "#### 18"]) == [1.0, 0.0]


@pytest.mark.parametrize("row", [{"question": "x"}, {"answer": "#### 1"}, {"question": "x", "answer": "1"}])
def test_a_problem_without_its_parts_is_named(folder, row):
    (folder / "test.jsonl").write_text(json.dumps(PENS) + "\n" + json.dumps(row))
    with pytest.raises(ScoregramError, match="gsm8k/test/1"):
        load_task(f"gsm8k:{folder}")


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(ScoregramError, match=r"nowhere.*Pass a folder with train.jsonl"):
        load_task(f"gsm8k:{tmp_path / 'nowhere'}")
    with pytest.raises(ScoregramError, match=r"train\.jsonl"):
        load_task(f"gsm8k:{tmp_path}")


def hub(monkeypatch, load):
    module = ModuleType("datasets")
    vars(module)["load_dataset"] = load
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_the_hub_is_asked_where_no_folder_is_given(monkeypatch):
    asked = []
    hub(monkeypatch, lambda *names: asked.append(names) or {"train": [EGGS], "test": [PENS]})
    task = load_task("gsm8k")
    assert asked == [("openai/gsm8k", "main")]
    assert (task.name, task.train[0].prompt, task.test[0].answer) == ("gsm8k", EGGS["question"], "3")


def test_no_hub_says_what_to_do_instead(monkeypatch):
    def offline(*names):
        raise ConnectionError("no route\nand more")

    hub(monkeypatch, offline)
    with pytest.raises(ScoregramError, match=r"got ConnectionError: no route\. Check the connection\. Pass a folder"):
        load_task("gsm8k")


def test_no_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ScoregramError, match=r"pip install 'scoregram\[data\]'"):
        load_task("gsm8k")
