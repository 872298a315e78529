"""What a task is: problems to train on, problems to test on, and a reward that can be verified."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, overload, runtime_checkable

from scoregram.checks import fail


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    id: str
    """Stable name, the same in every process: `gsm8k/test/17`."""
    prompt: str
    """The bare question; `Task.prompt_format` makes of it the text that a policy reads."""
    answer: str
    """The reference answer."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Anything else that a reward function is given, as a keyword with one value per rollout."""


@runtime_checkable
class RewardFunction(Protocol):
    """One reward per rollout, in TRL's signature, so that a function written for it works unchanged.

    `prompts` and `completions` are texts, one per rollout. Every column (`answer`, `problem_id`, `completion_ids` where
    known, and `Problem.columns`) comes as a keyword with a list of the same length. `None` stands for a rollout that
    this function does not judge.
    """

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """One reward, or `None`, per rollout."""
        ...


@dataclass(frozen=True)
class Step:
    """One verified step of a completion: characters `start` up to but excluding `end`, and whether they are right."""

    start: int
    end: int
    correct: bool


@dataclass(frozen=True)
class Task:
    """Prompts with a verifiable reward."""

    name: str
    train: Sequence[Problem]
    """Problems to learn from; may be built on demand, by index."""
    test: Sequence[Problem]
    """Problems never trained on."""
    reward: RewardFunction
    max_new_tokens: int
    """Tokens that a completion may take before it is cut off."""
    prompt_format: str = "{prompt}"
    """How a bare question becomes the text that a policy reads."""
    demonstrate: Callable[[Problem, Random], str] | None = None
    """A written solution, for supervised warm starts."""
    steps: Callable[[Problem, str], tuple[Step, ...]] | None = None
    """The steps of a completion with their truth, for process rewards and for the first error."""

    def prompt(self, problem: Problem) -> str:
        """The text that a policy reads.

        Only the mark `{prompt}` is replaced, so that braces in a question or in the format stay as they are.
        """
        return self.prompt_format.replace("{prompt}", problem.prompt)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Reward of every completion, given the problem it answers, one problem per completion.

        Args:
            problems: The problem of each rollout, in the order of `completions`.
            completions: Decoded rollouts without prompt and without stop token.
            columns: Further lists with one value per rollout, such as `completion_ids`.

        Raises:
            ScoregramError: If the two lists differ in length.
        """
        if len(problems) != len(completions):
            fail(
                "Task.rewards",
                "needs one problem per completion",
                f"{len(problems)} problems and {len(completions)} completions",
                "Repeat each problem once per rollout.",
            )
        prompts = [self.prompt(problem) for problem in problems]
        return self.reward(prompts=prompts, completions=list(completions), **reward_columns(problems), **columns)


def reward_columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """Columns of the problems, one list per column; a problem without a column has `None` there."""
    names = dict.fromkeys(name for problem in problems for name in problem.columns)  # in order, each once
    columns: dict[str, list[Any]] = {name: [problem.columns.get(name) for problem in problems] for name in names}
    columns["answer"] = [problem.answer for problem in problems]
    columns["problem_id"] = [problem.id for problem in problems]
    return columns


def first_error(steps: Sequence[Step]) -> Step | None:
    """The first wrong step, or `None` where every step is right."""
    return next((step for step in steps if not step.correct), None)


class LazyProblems(Sequence[Problem]):
    """A sequence of known length whose problems are built when they are asked for.

    Args:
        length: Number of problems.
        build: Problem at an index `0 <= i < length`; must give the same problem every time.
    """

    def __init__(self, length: int, build: Callable[[int], Problem]) -> None:
        self._length = length
        self._build = build

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        chosen = range(self._length)[index]  # handles negative indices, slices and IndexError as a list does
        if isinstance(chosen, range):
            return [self._build(i) for i in chosen]
        return self._build(chosen)
