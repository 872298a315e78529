"""CONTRIBUTING.md followed word for word: its examples are right, and a copy of the tree that has them is green."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scoregram.advantages import ESTIMATORS
from scoregram.objectives import OBJECTIVES
from scoregram.tasks import turn_tasks
from scoregram.tasks.table import TASKS, TaskRow
from scoregram.training.loop import train
from scoregram.training.methods import METHODS, Method
from tests import method_definitions
from tests.method_definitions import DEFINITIONS, Definition
from tests.training_cases import config_for, save_policy

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
METHOD, DEFINITION, ENVIRONMENT, TASK, REPLIES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def row_of(snippet: str, **names: Any) -> tuple[str, Any]:
    """The name and the value of the one row of a table."""
    ((name, row),) = eval(f"{{{snippet}}}", names).items()
    return name, row


def test_a_new_training_method_is_a_row_and_a_definition(tmp_path):
    name, row = row_of(METHOD, Method=Method)
    assert METHODS.get(name, row) == row  # in a copy that follows the page, the row is in the table
    assert row.objective in OBJECTIVES and row.estimator in ESTIMATORS and row.about
    defined, definition = row_of(DEFINITION, **vars(method_definitions))
    assert defined == name and isinstance(DEFINITIONS.get(name, definition), Definition)
    config = config_for(save_policy(tmp_path / "policy"), tmp_path / "run", steps=2, eval_every=0)
    assert train(replace(config, estimator=row.estimator, objective=row.objective)).step == 2


def test_a_new_task_is_an_environment_a_function_and_a_row(tmp_path, monkeypatch):
    names = {**vars(turn_tasks)}
    exec(ENVIRONMENT, names)
    name, row = row_of(TASK, TaskRow=TaskRow, guess=names["guess"])
    assert row.about and TASKS.get(name, row).about == row.about
    exec(REPLIES, names)
    names["test_replies_of_the_guessing_game"]()
    monkeypatch.setattr("scoregram.tasks.table.TASKS", {name: row})
    config = config_for(save_policy(tmp_path / "policy"), tmp_path / "run", task=name, reward=None, steps=1)
    assert train(replace(config, method="turn-rloo", max_new_tokens=0, eval_problems=2)).step == 1


def indented(snippet: str, spaces: int) -> str:
    return "".join(" " * spaces + line for line in snippet.splitlines(keepends=True))


END_OF_METHODS, END_OF_TASKS = "    }\n)\n\nREFERENCE_STRENGTHS", "    }\n)\n\n\ndef load_task"
EDITS = [
    ("src/scoregram/training/methods.py", END_OF_METHODS, indented(METHOD, 8) + END_OF_METHODS),
    ("tests/method_definitions.py", "\n}\n<end>", f"\n{indented(DEFINITION, 4)}}}\n"),
    ("src/scoregram/tasks/turn_tasks.py", "<end>", f"\n\n{ENVIRONMENT}"),
    ("src/scoregram/tasks/table.py", "turn_tasks import calculator,", "turn_tasks import calculator, guess,"),
    ("src/scoregram/tasks/table.py", END_OF_TASKS, indented(TASK, 8) + END_OF_TASKS),
    ("tests/test_tasks_turns.py", "turn_tasks import ", "turn_tasks import Guess, "),
    ("tests/test_tasks_turns.py", "# Both\n", f"# The guessing game\n\n\n{REPLIES}\n\n# Both\n"),
]
"""File, a text that stands once in it, and what the page asks for in its place."""
TOUCHED = (
    "training_methods",
    "training_update",
    "training_loop",
    "tasks_table",
    "tasks_turns",
)
"""Tests with a case for every row."""
OF_THE_TREE = ("docs", "contributing", "layering", "advice_typed", "results_methods")


@pytest.mark.slow
def test_a_copy_of_the_tree_that_follows_the_page_is_green(tmp_path):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("which files are part of the tree is known to git")
    copy = tmp_path / "tree"
    call = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listing.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(sys.prefix)  # where pyright looks for packages
    for name, old, new in EDITS:
        text = (copy / name).read_text(encoding="utf-8") + "<end>"
        assert text.count(old) == 1, (name, old)
        (copy / name).write_text(text.replace(old, new).removesuffix("<end>"), encoding="utf-8")
    changed = sorted({name for name, *_ in EDITS})
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}

    def check(*arguments: str) -> None:
        call = [sys.executable, "-m", *arguments]
        ended = subprocess.run(call, cwd=copy, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, f"{' '.join(arguments)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"

    check("ruff", "check", *changed)
    check("ruff", "format", "--check", *changed)
    check("pyright", *changed)
    quiet = ("-q", "-p", "no:cacheprovider")
    check("pytest", *quiet, *(f"tests/test_{name}.py" for name in TOUCHED), "-k", "mean-tic or guess or definition")
    check("pytest", *quiet, *(f"tests/test_{name}.py" for name in OF_THE_TREE))
