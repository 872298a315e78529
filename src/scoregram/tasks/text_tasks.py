"""Tasks with answers in free text: GSM8K, the generators of reasoning-gym, and a user's own JSON lines."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from scoregram.checks import fail, lookup
from scoregram.tasks.answers import ANSWER_MARK, right_answer
from scoregram.tasks.task import MAX_NEW_TOKENS, LazyProblems, Problem, Task

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
FOLDER_REMEDY = "Pass a folder with train.jsonl and test.jsonl instead: gsm8k:FOLDER."

_TRAIN_PROBLEMS, _TEST_PROBLEMS = 8192, 256
"""Sizes of the splits of a reasoning-gym task."""
ATTEMPTS = 16
"""Attempts to generate a training problem whose question is not in the test split."""
TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TAGGED_PROMPT = "{prompt}\nWrite the final answer between <answer> and </answer>.\n"

PROMPT_COLUMNS = ("prompt", "question")
TEST_SHARE = 10
"""One in this many problems of a single file is held out."""
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "problem_id")
"""Keywords that every reward function receives; a column of the data must not have one of these names."""


def gsm8k(argument: str = "", seed: int = 0) -> Task:
    """The 7,473 training and 1,319 test problems of GSM8K.

    Args:
        argument: Folder with `train.jsonl` and `test.jsonl`; if empty, the dataset `openai/gsm8k` of the hub is loaded.
        seed: Has no effect; the problems are fixed.

    Raises:
        ScoregramError: If the data cannot be loaded, or a problem lacks its question or its `#### N`.

    Reference:
        Cobbe et al. 2021, arXiv:2110.14168.
    """
    splits = _folder_rows(Path(argument).expanduser()) if argument else _hub_rows()
    train, test = (
        [_word_problem(row, f"gsm8k/{split}/{index}") for index, row in enumerate(splits[split])]
        for split in ("train", "test")
    )
    return Task(
        name=f"gsm8k:{argument}" if argument else "gsm8k",
        train=train,
        test=test,
        reward=right_answer,
        max_new_tokens=MAX_NEW_TOKENS,
        prompt_format="Question: {prompt}\nAnswer:",
        demonstrate=_worked_solution,
        rewards_are_binary=True,
    )


def _folder_rows(folder: Path) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Rows of both splits, from files."""
    if not folder.is_dir():
        fail("gsm8k", "the folder must exist", folder, FOLDER_REMEDY)
    return {split: [row for _, row in _read_rows(folder / f"{split}.jsonl")] for split in ("train", "test")}


def _hub_rows() -> dict[str, Iterable[Mapping[str, Any]]]:
    """Rows of both splits, from the hub or its local cache."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("gsm8k", "needs datasets to read from the hub", missing, f"pip install 'scoregram[data]'. {FOLDER_REMEDY}")
    try:
        loaded: Any = load_dataset(HUB_ID, HUB_CONFIG)
        return {split: loaded[split] for split in ("train", "test")}
    except Exception as error:  # the hub client raises many types; each of them means that there is no data
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        fail("gsm8k", f"{HUB_ID} must load from the hub", reason, f"Check the connection. {FOLDER_REMEDY}")


def _word_problem(row: Mapping[str, Any], problem_id: str) -> Problem:
    """A problem with the number after `####` as its answer and the whole solution as the column `solution`."""
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or ANSWER_MARK not in solution:
        requirement = f"a problem must have a question and an answer that ends in {ANSWER_MARK} N"
        remedy = "Repair the file, or use jsonl:FILE for problems of another form."
        fail("gsm8k", requirement, f"{dict(row)} as {problem_id}", remedy)
    number = solution.rsplit(ANSWER_MARK, 1)[1].strip().replace(",", "")
    return Problem(problem_id, question, number, {"solution": solution})


def _worked_solution(problem: Problem, rng: Random) -> str:
    """The dataset's solution without its calculator marks, ending in `#### N`.

    It begins with a space, because the prompt ends in `Answer:`.
    """
    steps = CALCULATOR_MARK.sub("", str(problem.columns["solution"])).rsplit(ANSWER_MARK, 1)[0].rstrip()
    return f" {steps}\n{ANSWER_MARK} {problem.answer}"


def reasoning_gym(argument: str, seed: int = 0) -> Task:
    """Problems of a generator of reasoning-gym, scored by that generator.

    `argument` is the generator's name, after a further colon with settings of its configuration if they differ from
    the library's: `chain_sum:max_terms=3,max_digits=2`.

    The test split is generated at once, which takes minutes for the few generators that search; a training problem is
    generated when it is indexed. A training problem whose question is in the test split is replaced by another.

    The test split is the same for every `seed`. The library draws its problem `i` from `seed + i`, so neighbouring
    seeds of its own share nearly all problems: here `seed` selects another stretch of the problems of its seed 0.

    Raises:
        ScoregramError: If reasoning-gym is not installed, has no such generator (the error lists them), or the
            generator refuses a setting.

    Reference:
        Stojanovski et al. 2025, arXiv:2505.24760.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        remedy = "Install it: pip install 'scoregram[reasoning-gym]'."
        fail("reasoning-gym", "the library must be installed", missing, remedy)
    name, _, settings = argument.partition(":")
    lookup(DATASETS, name, kind="reasoning-gym")
    given = _gym_settings(settings)
    start = _TEST_PROBLEMS + seed * _TRAIN_PROBLEMS * ATTEMPTS
    try:
        generator: Any = create_dataset(name, seed=0, size=start + _TRAIN_PROBLEMS * ATTEMPTS, **given)
    except Exception as error:  # every generator checks its settings in its own way
        wanted = "with these settings" if given else "in its default configuration"
        remedy = "Correct the settings." if given else "Choose another generator."
        fail("reasoning-gym", f"{name} must work {wanted}", f"{argument}: {error or type(error).__name__}", remedy)
    # The test split is generated at once: its questions must not be trained on.
    test = [_gym_problem(generator[index], f"reasoning-gym:{argument}/test/{index}") for index in range(_TEST_PROBLEMS)]
    held_out = {problem.prompt for problem in test}

    def build(index: int) -> Problem:
        places = range(start + index, start + _TRAIN_PROBLEMS * ATTEMPTS, _TRAIN_PROBLEMS)
        fresh = (entry for entry in map(generator.__getitem__, places) if entry["question"] not in held_out)
        entry = next(fresh, None)
        if entry is None:
            requirement = f"{argument} must have more problems than its {len(held_out)} test problems"
            got = f"only test problems in {ATTEMPTS} attempts"
            fail("reasoning-gym", requirement, got, "Choose another generator.")
        return _gym_problem(entry, f"reasoning-gym:{argument}/train/{index}")

    def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [_gym_score(generator, text, entry) for text, entry in zip(completions, columns["entry"], strict=True)]

    return Task(
        name=f"reasoning-gym:{argument}",
        train=LazyProblems(_TRAIN_PROBLEMS, build),
        test=test,
        reward=score,
        max_new_tokens=MAX_NEW_TOKENS,
        prompt_format=TAGGED_PROMPT,
        demonstrate=_tagged_answer if test[0].answer else None,
    )


def _gym_settings(text: str) -> dict[str, Any]:
    """Settings of a generator from `name=value,name=value`; a value is a JSON literal, or else a text.

    Raises:
        ScoregramError: If a part is not of this form, or sets `seed` or `size`, which the task sets itself.
    """
    settings: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and sign and value) or name in ("seed", "size"):
            remedy = "Write reasoning-gym:GENERATOR:max_terms=3,max_digits=2; seed and size are the task's own."
            fail("reasoning-gym", "settings must be name=value, separated by commas", repr(part), remedy)
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _gym_problem(entry: Mapping[str, Any], problem_id: str) -> Problem:
    """A generated entry as a problem, with the whole entry as a column for the scorer.

    Some generators have a scorer and no reference answer: the answer is then empty.
    """
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return Problem(problem_id, entry["question"], answer, {"entry": dict(entry)})


def _gym_score(generator: Any, completion: str, entry: dict[str, Any]) -> float:
    """The generator's own score, from `0` to `1`; `0` for an answer that its scorer cannot parse."""
    try:
        return float(generator.score_answer(extracted_answer(completion), entry))
    except Exception:  # scorers parse the text of a policy, and some raise on nonsense
        return 0.0


def extracted_answer(completion: str) -> str:
    """The text in the last pair of answer tags, else the whole completion, stripped."""
    tagged = TAGGED_ANSWER.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def _tagged_answer(problem: Problem, rng: Random) -> str:
    """The reference answer in its tags; reasoning-gym has no worked solutions."""
    return f"<answer>{problem.answer}</answer>"


def jsonl(argument: str, seed: int = 0) -> Task:
    """Problems of a file, or of a folder with `train.jsonl` and `test.jsonl`.

    Every line has a `prompt` (or `question`) and an `answer`; its other columns go to the reward function. The last
    tenth of a single file, at least one problem, is the test split.

    Raises:
        ScoregramError: If a file is missing or too short, or a line is invalid; the error names the line.
    """
    path = Path(argument).expanduser()
    name = path.stem if path.is_file() else path.name
    if path.is_dir():
        train, test = (_file_problems(path / f"{split}.jsonl", f"{name}/{split}") for split in ("train", "test"))
    else:
        train, test = _split_problems(_file_problems(path, name), path)
    return Task(f"jsonl:{argument}", train, test, right_answer, MAX_NEW_TOKENS, rewards_are_binary=True)


def _split_problems(problems: Sequence[Problem], path: Path) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """All but the last tenth, and the last tenth (at least one)."""
    if len(problems) < 2:
        requirement = "a file must hold at least two problems, one to train on and one to test on"
        fail("jsonl", requirement, f"1 in {path}", "Add problems.")
    held_out = max(1, len(problems) // TEST_SHARE)
    return problems[:-held_out], problems[-held_out:]


def _file_problems(path: Path, name: str) -> list[Problem]:
    """Problems of one file, with the ids `name/line number`."""
    return [_row_problem(row, f"{name}/{line}", f"line {line} of {path}") for line, row in _read_rows(path)]


def _row_problem(row: Mapping[str, Any], problem_id: str, where: str) -> Problem:
    key = next((key for key in PROMPT_COLUMNS if key in row), None)
    if key is None or "answer" not in row:
        fail("jsonl", "a line must have a prompt (or question) and an answer", f"{where} with {[*row]}", "Add them.")
    if not isinstance(row[key], str):
        fail("jsonl", f"{key} must be a string", f"{type(row[key]).__name__} in {where}", "Write one JSON string.")
    if reserved := [name for name in row if name in RESERVED_COLUMNS]:
        requirement = f"no column may be called {', '.join(RESERVED_COLUMNS)}"
        fail("jsonl", requirement, f"{reserved[0]} in {where}", "Rename it.")
    answer = row["answer"]
    columns = {name: value for name, value in row.items() if name not in (key, "answer")}
    return Problem(problem_id, row[key], answer if isinstance(answer, str) else json.dumps(answer), columns)


def _read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with their line numbers, from 1; blank lines are skipped."""
    if not path.is_file():
        fail("jsonl", "the file must exist", path, "Check the path; it is relative to the current folder.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines would split at U+2028 inside a string
    except (OSError, UnicodeDecodeError) as error:
        fail("jsonl", "the file must be readable as UTF-8", f"{error} in {path}", "Repair the file.")
    rows = [(number, _parsed_row(line, number, path)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        fail("jsonl", "the file must hold at least one problem", f"an empty {path}", "Write one JSON object per line.")
    return rows


def _parsed_row(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(line)
        reason = f"a {type(value).__name__}"
    except ValueError as error:
        value, reason = None, str(error)
    if not isinstance(value, dict):
        got = f"{reason} in line {number} of {path}"
        fail("jsonl", "every line must be one JSON object", got, "Repair the line.")
    return value
