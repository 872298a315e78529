"""A user's own prompts and answers, one JSON object a line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.tasks.answers import right_answer
from scoregram.tasks.task import Problem, Task

PROMPT_COLUMNS = ("prompt", "question")
TEST_SHARE = 10
"""One problem in this many is held out where a single file is given."""
RESERVED = ("prompts", "completions", "completion_ids", "problem_id")
"""Keywords that a reward function is given anyway, so no column may be called so."""
MAX_NEW_TOKENS = 256


def jsonl(argument: str, seed: int = 0) -> Task:
    """Problems of a file, or of a folder with `train.jsonl` and `test.jsonl`.

    Every line has a `prompt` (or `question`) and an `answer`; all its other columns go to the reward function. Of a
    single file the last tenth, at least one problem, is the test split.

    Raises:
        ScoregramError: If a file is missing or too short, or a line is broken; the line is named.
    """
    path = Path(argument).expanduser()
    name = path.stem if path.is_file() else path.name
    if path.is_dir():
        train, test = (problems(path / f"{split}.jsonl", f"{name}/{split}") for split in ("train", "test"))
    else:
        train, test = split_problems(problems(path, name), path)
    return Task(f"jsonl:{argument}", train, test, right_answer, MAX_NEW_TOKENS)


def split_problems(every: Sequence[Problem], path: Path) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """All but the last tenth, and the last tenth (at least one)."""
    if len(every) < 2:
        fail("jsonl", "a file needs two problems, one to train on and one to test on", f"1 in {path}", "Add problems.")
    held_out = max(1, len(every) // TEST_SHARE)
    return every[:-held_out], every[-held_out:]


def problems(path: Path, name: str) -> list[Problem]:
    """Problems of one file, named `name/line number`."""
    return [problem(record, f"{name}/{line}", f"line {line} of {path}") for line, record in read_records(path)]


def problem(record: Mapping[str, Any], problem_id: str, where: str) -> Problem:
    """The problem that one line holds."""
    key = next((key for key in PROMPT_COLUMNS if key in record), None)
    if key is None or "answer" not in record:
        fail("jsonl", "a line needs a prompt (or question) and an answer", f"{where} with {[*record]}", "Add them.")
    if not isinstance(record[key], str):
        fail("jsonl", f"{key} must be text", f"{type(record[key]).__name__} in {where}", "Write the text alone.")
    if taken := [name for name in record if name in RESERVED]:
        fail("jsonl", f"no column may be called {', '.join(RESERVED)}", f"{taken[0]} in {where}", "Rename it.")
    answer = record["answer"]
    columns = {name: value for name, value in record.items() if name not in (key, "answer")}
    return Problem(problem_id, record[key], answer if isinstance(answer, str) else json.dumps(answer), columns)


def read_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with the number of their line, from 1; blank lines are passed over.

    Raises:
        ScoregramError: If the file cannot be read, is empty, or a line is no JSON object.
    """
    if not path.is_file():
        fail("jsonl", "the file must exist", path, "Check the path; it is read from where the command was started.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand inside a string
    except (OSError, UnicodeDecodeError) as error:
        fail("jsonl", "the file must be readable as UTF-8", f"{error} in {path}", "Repair the file.")
    found = [(number, record(line, number, path)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        fail("jsonl", "the file must hold at least one problem", f"an empty {path}", "Write one JSON object a line.")
    return found


def record(line: str, number: int, path: Path) -> dict[str, Any]:
    """One line as a JSON object."""
    try:
        value = json.loads(line)
    except ValueError as error:
        fail("jsonl", "every line must be one JSON object", f"{error} in line {number} of {path}", "Repair the line.")
    if not isinstance(value, dict):
        kind = type(value).__name__
        fail("jsonl", "every line must be one JSON object", f"a {kind} in line {number} of {path}", "Repair the line.")
    return value
