import json

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import load_task


def write(path, rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows),
        encoding="utf-8",
    )
    return path


def rows(number: int) -> list[dict]:
    return [{"prompt": f"{i}+1?", "answer": i + 1, "level": i} for i in range(number)]


@pytest.mark.parametrize(("number", "held_out"), [(2, 1), (5, 1), (19, 1), (20, 2), (100, 10)])
def test_the_last_tenth_of_a_file_is_the_test_split(tmp_path, number, held_out):
    task = load_task(f"jsonl:{write(tmp_path / 'sums.jsonl', rows(number))}")
    assert [p.prompt for p in (*task.train, *task.test)] == [row["prompt"] for row in rows(number)]
    assert len(task.test) == held_out


def test_other_columns_reach_the_reward_and_the_answer_is_text(tmp_path):
    task = load_task(f"jsonl:{write(tmp_path / 'sums.jsonl', [*rows(3), ''])}")
    first = task.train[0]
    assert (first.id, first.answer, first.columns) == ("sums/1", "1", {"level": 0})
    assert task.rewards([*task.train], ["it is 1", "#### 3"]) == [1.0, 0.0]


def test_a_folder_has_its_own_splits(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": "a\u2028b?", "answer": "yes"}])
    write(tmp_path / "test.jsonl", ["\ufeff" + json.dumps({"question": "b?", "answer": ["no", 1]}), "  "])
    task = load_task(f"jsonl:{tmp_path}")
    assert [p.prompt for p in task.train] == ["a\u2028b?"] and [p.prompt for p in task.test] == ["b?"]
    assert task.test[0].answer == '["no", 1]'
    assert task.train[0].id == f"{tmp_path.name}/train/1"


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ([*rows(2), '{"prompt": '], "in line 3 of"),
        ([rows(1)[0], "", "[1, 2]"], "a list in line 3 of"),
        ([*rows(2), {"prompt": "no answer"}], "got line 3 of"),
        ([*rows(2), {"answer": "no prompt"}], "got line 3 of"),
        ([*rows(2), {"prompt": [{"role": "user"}], "answer": "1"}], "prompt must be a string, got list in line 3 of"),
        ([*rows(2), {"prompt": "x", "answer": "1", "completions": 1}], "got completions in line 3 of"),
        ([], "an empty"),
        (["", " "], "an empty"),
        (rows(1), "must hold at least two problems"),
    ],
)
def test_a_broken_line_is_named(tmp_path, lines, part):
    path = write(tmp_path / "broken.jsonl", lines)
    with pytest.raises(ScoregramError) as caught:
        load_task(f"jsonl:{path}")
    assert part in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    with pytest.raises(ScoregramError, match=r"must exist, got .*nowhere.jsonl"):
        load_task(f"jsonl:{tmp_path / 'nowhere.jsonl'}")
    with pytest.raises(ScoregramError, match=r"must exist, got .*train.jsonl"):
        load_task(f"jsonl:{tmp_path}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "1"}')
    with pytest.raises(ScoregramError, match="readable as UTF-8"):
        load_task(f"jsonl:{tmp_path / 'latin.jsonl'}")
