"""GSM8K: grade-school word problems, from the hub or from a folder with `train.jsonl` and `test.jsonl`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from scoregram.checks import fail
from scoregram.tasks.answers import MARK, right_answer
from scoregram.tasks.jsonl import read_records
from scoregram.tasks.task import Problem, Task

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
MAX_NEW_TOKENS = 256
FOLDER_REMEDY = "Pass a folder with train.jsonl and test.jsonl instead: gsm8k:FOLDER."


def gsm8k(argument: str = "", seed: int = 0) -> Task:
    """The 7,473 training and 1,319 test problems of GSM8K.

    Args:
        argument: Folder with `train.jsonl` and `test.jsonl`; empty for the dataset `openai/gsm8k` of the hub.
        seed: Has no effect; the problems are what they are.

    Raises:
        ScoregramError: If the data cannot be had, or a problem lacks its question or its `#### N`.

    Reference:
        Cobbe et al. 2021, arXiv:2110.14168.
    """
    splits = folder_rows(Path(argument).expanduser()) if argument else hub_rows()
    train, test = (
        [word_problem(row, f"gsm8k/{split}/{index}") for index, row in enumerate(splits[split])]
        for split in ("train", "test")
    )
    return Task(
        name=f"gsm8k:{argument}" if argument else "gsm8k",
        train=train,
        test=test,
        reward=right_answer,
        max_new_tokens=MAX_NEW_TOKENS,
        prompt_format="Question: {prompt}\nAnswer:",
        demonstrate=demonstration,
    )


def folder_rows(folder: Path) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Rows of both splits, from files."""
    if not folder.is_dir():
        fail("gsm8k", "the folder must exist", folder, FOLDER_REMEDY)
    return {split: [row for _, row in read_records(folder / f"{split}.jsonl")] for split in ("train", "test")}


def hub_rows() -> dict[str, Iterable[Mapping[str, Any]]]:
    """Rows of both splits, from the hub or its cache on this machine."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("gsm8k", "needs datasets to read from the hub", missing, f"pip install 'scoregram[data]'. {FOLDER_REMEDY}")
    try:
        loaded: Any = load_dataset(HUB_ID, HUB_CONFIG)
        return {split: loaded[split] for split in ("train", "test")}
    except Exception as error:  # whatever the hub client raises, there is no data
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        fail("gsm8k", f"the hub must give {HUB_ID}", reason, f"Check the connection. {FOLDER_REMEDY}")


def word_problem(row: Mapping[str, Any], problem_id: str) -> Problem:
    """A problem with the number behind `####` as its answer and the whole solution as the column `solution`."""
    question, written = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(written, str) or MARK not in written:
        fail(
            "gsm8k",
            f"a problem needs a question and an answer that ends in {MARK} N",
            f"{dict(row)} as {problem_id}",
            "Repair the file, or use jsonl:FILE for problems of another form.",
        )
    number = written.rsplit(MARK, 1)[1].strip().replace(",", "")
    return Problem(problem_id, question, number, {"solution": written})


def demonstration(problem: Problem, rng: Random) -> str:
    """The solution of the dataset without its calculator marks, ending in `#### N`.

    It begins with a blank, for the prompt ends in `Answer:`.
    """
    steps = CALCULATOR_MARK.sub("", str(problem.columns["solution"])).rsplit(MARK, 1)[0].rstrip()
    return f" {steps}\n{MARK} {problem.answer}"
