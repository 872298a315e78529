from dataclasses import replace

import pytest

from scoregram.checks import ScoregramError
from scoregram.tasks import TASKS, load_task


def test_an_unknown_task_lists_the_choices():
    choices = "arithmetic, arithmetic-compositions, arithmetic-strict, calculator, forecast, gsm8k, jsonl, python, "
    with pytest.raises(ScoregramError, match=f"one of {choices}reasoning-gym, stopping, got 'maths'"):
        load_task("maths:3")


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
