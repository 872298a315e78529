"""Every generator of reasoning-gym with the scorer that belongs to it."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from scoregram.checks import fail, lookup
from scoregram.tasks.task import LazyProblems, Problem, Task

TRAIN_PROBLEMS, TEST_PROBLEMS = 8192, 256
ATTEMPTS = 16
"""Problems generated for one place of the training split before it is given up as being all test problems."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PROMPT_FORMAT = "{prompt}\nWrite the final answer between <answer> and </answer>.\n"
MAX_NEW_TOKENS = 256


def reasoning_gym(argument: str, seed: int = 0) -> Task:
    """Problems of the generator `argument` in its default configuration, scored by that generator.

    A problem is generated when it is asked for, those of the test split at once (which takes minutes for the few
    generators that search). A training problem whose question is also in the test split is replaced
    by the next one that is not.

    Raises:
        ScoregramError: If reasoning-gym is not installed or knows no such generator; the error lists those it knows.

    Reference:
        Stojanovski et al. 2025, arXiv:2505.24760.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("reasoning-gym", "needs the library", missing, "Install it: pip install 'scoregram[reasoning-gym]'.")
    lookup(DATASETS, argument, kind="reasoning-gym")
    try:
        generator: Any = create_dataset(argument, seed=seed, size=TEST_PROBLEMS + TRAIN_PROBLEMS * ATTEMPTS)
    except Exception as error:
        fail(
            "reasoning-gym", f"{argument} must work as it is configured by default", error, "Choose another generator."
        )
    # The test split is generated at once: it says which questions may not be trained on.
    test = [gym_problem(generator[index], f"reasoning-gym:{argument}/test/{index}") for index in range(TEST_PROBLEMS)]
    held_out = {problem.prompt for problem in test}

    def build(index: int) -> Problem:
        places = range(TEST_PROBLEMS + index, TEST_PROBLEMS + TRAIN_PROBLEMS * ATTEMPTS, TRAIN_PROBLEMS)
        fresh = (entry for entry in map(generator.__getitem__, places) if entry["question"] not in held_out)
        entry = next(fresh, None)
        if entry is None:
            fail(
                "reasoning-gym",
                f"{argument} must have more problems than its {len(held_out)} test problems",
                f"only test problems in {ATTEMPTS} attempts",
                "Choose another generator.",
            )
        return gym_problem(entry, f"reasoning-gym:{argument}/train/{index}")

    def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [scored_by(generator, text, entry) for text, entry in zip(completions, columns["entry"], strict=True)]

    return Task(
        name=f"reasoning-gym:{argument}",
        train=LazyProblems(TRAIN_PROBLEMS, build),
        test=test,
        reward=score,
        max_new_tokens=MAX_NEW_TOKENS,
        prompt_format=PROMPT_FORMAT,
        demonstrate=tagged_answer if test[0].answer else None,
    )


def gym_problem(entry: Mapping[str, Any], problem_id: str) -> Problem:
    """A generated entry as a problem; the scorer gets the whole of it again.

    Some generators know no one answer, only how to score any: the reference answer is then empty.
    """
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return Problem(problem_id, entry["question"], answer, {"entry": dict(entry)})


def scored_by(generator: Any, completion: str, entry: dict[str, Any]) -> float:
    """The generator's own score, from `0` to `1`; `0` for an answer that its scorer cannot read."""
    try:
        return float(generator.score_answer(extracted_answer(completion), entry))
    except Exception:  # scorers parse what a policy wrote, and some raise where it is nonsense
        return 0.0


def extracted_answer(completion: str) -> str:
    """The text in the last pair of answer tags, else the whole completion, stripped."""
    tagged = TAGGED.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def tagged_answer(problem: Problem, rng: Random) -> str:
    """The reference answer in its tags; reasoning-gym writes no solutions."""
    return f"<answer>{problem.answer}</answer>"
