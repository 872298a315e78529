"""A task: problems to train on, problems to test on, and a verifiable reward, the task's own or a user's function."""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from random import Random
from typing import Any, Protocol, overload, runtime_checkable

from scoregram.checks import fail

MAX_NEW_TOKENS = 256
"""Longest completion, in tokens, of tasks that set no limit of their own."""


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    id: str
    """Stable name, the same in every process: `gsm8k/test/17`."""
    prompt: str
    """The bare question; `Task.prompt` turns it into the text that the policy reads."""
    answer: str
    """The reference answer."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Further values for the reward function, which receives each column as a keyword with one value per rollout."""


@runtime_checkable
class RewardFunction(Protocol):
    """One reward per rollout, in TRL's signature, so that a function written for TRL works unchanged.

    `prompts` and `completions` are texts, one per rollout. Every column (`answer`, `problem_id`, `completion_ids` where
    known, and `Problem.columns`) comes as a keyword with a list of the same length. `None` means that the function has
    no reward for this rollout.
    """

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """One reward, or `None`, per rollout."""
        ...


@runtime_checkable
class StepScoreFunction(Protocol):
    """Scores of the steps of every completion, in the signature of a reward function.

    For each completion it returns a list of pairs: the end of a step, in characters of the completion (exclusive), and
    the score of that step. Ends rise. A completion without a step gets an empty list.
    """

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> Sequence[Sequence[tuple[int, float]]]:
        """One list of `(end, score)` per rollout."""
        ...


@dataclass(frozen=True)
class ScoredStep:
    """A step of a completion: where it ends, in characters (exclusive), and its score."""

    end: int
    score: float


@dataclass(frozen=True)
class SolutionStep:
    """One verified step of a completion: characters `start` to `end` (exclusive), and whether they are right."""

    start: int
    end: int
    correct: bool | float
    """Whether the step is right, or its score, such as a probability that it is right."""
    final: bool = False
    """Whether the step says that it is the last, as a full stop does; whatever follows belongs to no further step."""


@dataclass(frozen=True)
class Reply:
    """What an environment answers to one turn of the policy."""

    observation: str = ""
    """Text that the policy reads before its next turn; not used after the last one."""
    reward: float = 0.0
    """Reward of this turn."""
    outcome: float = 0.0
    """Reward of the episode as a whole, given with its last turn. The return of an episode is the sum of all rewards
    and outcomes; methods that treat turns and outcome differently, such as MT-GRPO, need the two apart."""
    done: bool = False
    """Whether the episode has ended."""


@runtime_checkable
class Environment(Protocol):
    """One episode: the policy writes a text, the environment answers, and so on until the environment ends it.

    Every rollout has an environment of its own. It is a plain Python object: methods that try several turns from one
    history copy it with `copy.deepcopy`.
    """

    def reset(self, problem: Problem, seed: int) -> str:
        """Start an episode and return the text that the policy reads first.

        That text must not depend on `seed`, from which the environment takes all its randomness: the rollouts of a
        group share their prompt.
        """
        ...

    def step(self, text: str) -> Reply:
        """The answer to a turn; `text` is what the policy wrote, without its stop token, and may be anything."""
        ...


@runtime_checkable
class TeachingEnvironment(Environment, Protocol):
    """An environment that can also write turns, for supervised warm starts."""

    def demonstrate(self, rng: Random) -> str:
        """The next turn as a teacher would write it; the state of the episode stays as it is."""
        ...


@dataclass(frozen=True)
class Task:
    """Prompts with a verifiable reward, or problems with an environment that rewards every turn."""

    name: str
    train: Sequence[Problem]
    """Problems to train on; may be built on demand, by index."""
    test: Sequence[Problem]
    """Problems that are never trained on."""
    reward: RewardFunction
    """Rewards completions; `rewarded_by_environment`, and no other, if the task has an environment."""
    max_new_tokens: int
    """Longest completion, in tokens; of one turn if the task has an environment."""
    prompt_format: str = "{prompt}"
    """Template of the text that the policy reads; `{prompt}` is replaced by the question."""
    demonstrate: Callable[[Problem, Random], str] | None = None
    """Writes a solution, for supervised warm starts."""
    steps: Callable[[Problem, str], tuple[SolutionStep, ...]] | None = None
    """Splits a completion into verified steps, for process rewards and for the first error."""
    step_scores: StepScoreFunction | None = None
    """Scores of the steps of completions, for process rewards in place of those of `steps`."""
    scalars: "Callable[[Sequence[Problem], Sequence[str]], Mapping[str, float]] | None" = None
    """Numbers about completions, each with its problem, for the metrics `task/…`."""
    solution: Callable[[Problem], str] | None = None
    """Writes the right solution of a problem, for tasks in which there is only one."""
    rewards_solution_alone: bool = False
    """Whether the reward is 1 for that solution and 0 for every other completion, as exact values need."""
    held_out: Mapping[str, Sequence[Problem]] = field(default_factory=dict)
    """Further test problems by name, which an evaluation reports on their own: `eval/NAME/accuracy`."""
    rewards_are_binary: bool = False
    """Whether every reward is 0 or 1, so that the mean reward is an accuracy."""
    environment: Callable[[], Environment] | None = None
    """Builds the environment of one rollout, for a task of several turns; the environment then gives all rewards."""
    max_turns: int = 1
    """Turns after which an episode is cut off."""
    teaching_steps: int = 400
    """Steps in which the embedded policy learns the episodes of an environment's teacher."""

    def __post_init__(self) -> None:
        is_rewarded = self.reward is rewarded_by_environment
        if self.environment is not None and callable(self.reward) and not is_rewarded:
            got = f"reward {getattr(self.reward, '__qualname__', type(self.reward).__name__)}"
            remedy = "Pass reward=rewarded_by_environment, or leave the environment out."
            fail("Task", f"the rewards of {self.name} come from its environment", got, remedy)
        if self.environment is None and is_rewarded:
            remedy = "Pass environment=…, or a reward function of your own."
            fail("Task", f"{self.name}, rewarded by its environment, must have one", "environment None", remedy)

    def prompt(self, problem: Problem) -> str:
        """The text that the policy reads.

        Only `{prompt}` is replaced: other braces in the question or in the format stay as they are.
        """
        return self.prompt_format.replace("{prompt}", problem.prompt)

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Reward of every completion for the problem that it answers.

        Args:
            problems: The problem of each rollout, in the order of `completions`.
            completions: Decoded completions without the stop token.
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

    def verified_steps(self, problem: Problem, completion: str) -> tuple[SolutionStep, ...]:
        """What `steps` finds in a completion, after checks.

        Raises:
            ScoregramError: If it is no sequence of `SolutionStep`, or a step has no finite score or ends outside the
                completion. Exceptions of the function itself are re-raised with its name as a note.
        """
        assert self.steps is not None
        name = f"{self.name}.steps"
        with raised_by(name):
            found = self.steps(problem, completion)
        if not isinstance(found, tuple | list) or not all(isinstance(step, SolutionStep) for step in found):
            got = type(found).__name__ if not isinstance(found, tuple | list) else f"{[*found]!r}"
            remedy = "Return an empty tuple for a completion without a step."
            fail("task", f"{name} must return a tuple of SolutionStep", got, remedy)
        for step in found:
            checked_step(name, (step.end, step.correct), completion)
        return tuple(found)

    def scored_steps(
        self, problems: Sequence[Problem], completions: Sequence[str], **columns: Any
    ) -> list[list[ScoredStep]]:
        """The scored steps of every completion: those of `step_scores`, otherwise 1 or 0 for each verified step.

        Args:
            problems: The problem of each rollout, in the order of `completions`.
            completions: Decoded completions without the stop token.
            columns: Further lists with one value per rollout, for `step_scores`.
        """
        if self.step_scores is None:
            pairs = zip(problems, completions, strict=True)
            return [
                [ScoredStep(step.end, float(step.correct)) for step in self.verified_steps(problem, text)]
                for problem, text in pairs
            ]
        prompts = [self.prompt(problem) for problem in problems]
        given = {**reward_columns(problems), **columns}
        found = self.step_scores(prompts=prompts, completions=list(completions), **given)
        return [[ScoredStep(end, score) for end, score in steps] for steps in found]


@dataclass(frozen=True)
class DemonstratedTurn:
    """A turn that a teacher wrote, and the text that the teacher read before it."""

    observation: str
    text: str


def demonstrated_episode(task: Task, problem: Problem, rng: Random) -> list[DemonstratedTurn]:
    """An episode of a task with an environment, as the environment's teacher plays it.

    Raises:
        ScoregramError: If the environment has no teacher.
    """
    environment = built_environment(task) if task.environment is not None else None
    if not isinstance(environment, TeachingEnvironment):
        remedy = "Give the environment a method demonstrate, or train without a warm start."
        fail("demonstrated_episode", "the environment must have a teacher", type(environment).__name__, remedy)
    turns: list[DemonstratedTurn] = []
    with raised_by(f"the environment {type(environment).__name__}"):
        reply = Reply(task.prompt_format.replace("{prompt}", environment.reset(problem, rng.getrandbits(31))))
        while not reply.done and len(turns) < task.max_turns:
            turns.append(DemonstratedTurn(reply.observation, environment.demonstrate(rng)))
            reply = environment.step(turns[-1].text)
    return turns


def built_environment(task: Task) -> Environment:
    """A new environment of a task that has one, for one rollout.

    Raises:
        ScoregramError: If it lacks `reset` or `step`. Exceptions of the user's code are re-raised with a note.
    """
    assert task.environment is not None
    with raised_by(f"the environment of task {task.name}"):
        environment = task.environment()
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    if missing:
        requirement = f"{type(environment).__name__} must have the methods reset and step"
        remedy = "Define reset(self, problem, seed) and step(self, text)."
        fail("environment", requirement, f"no {' and no '.join(missing)}", remedy)
    return environment


def rewarded_by_environment(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """The reward function of a task with an environment, which has no reward for a bare text: always an error."""
    remedy = "Sample episodes of the task instead."
    fail("Task.rewards", "a task with an environment has no reward for a text", "a list of completions", remedy)


def reward_columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """Columns of the problems, one list per column; `None` where a problem lacks the column."""
    names = dict.fromkeys(name for problem in problems for name in problem.columns)  # in order, each once
    columns: dict[str, list[Any]] = {name: [problem.columns.get(name) for problem in problems] for name in names}
    columns["answer"] = [problem.answer for problem in problems]
    columns["problem_id"] = [problem.id for problem in problems]
    return columns


class LazyProblems(Sequence[Problem]):
    """A sequence of known length that builds each problem when it is indexed.

    Args:
        length: Number of problems.
        build: Returns the problem at index `0 <= i < length`, the same one at every call.
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
        chosen = range(self._length)[index]  # negative indices, slices and IndexError as in a list
        if isinstance(chosen, range):
            return [self._build(i) for i in chosen]
        return self._build(chosen)


@dataclass(frozen=True)
class CheckedReward:
    """A reward function whose result is checked: one finite number, or `None`, per rollout.

    A function without `**kwargs` receives only the columns in its signature, where TRL would pass all of them.
    """

    name: str
    function: Callable[..., Any]

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """One reward per rollout.

        Raises:
            ScoregramError: If the function requires a column that does not exist, or does not return one finite number
                or `None` per rollout. Exceptions of the function itself are re-raised with its name as a note.
        """
        given = {"prompts": prompts, "completions": completions, **columns}
        keywords = accepted_keywords(self.name, self.function, given)
        with raised_by(f"the reward function {self.name}"):
            rewards = self.function(**keywords)
        return checked_rewards(self.name, rewards, len(completions))


@contextmanager
def raised_by(origin: str) -> Iterator[None]:
    """Re-raise an exception of a user's code with its origin as a note."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {origin}")
        raise


@dataclass(frozen=True)
class CheckedStepScores:
    """A function of step scores whose result is checked: one list of `(end, score)` per rollout.

    As with a reward, a function without `**kwargs` receives only the columns in its signature.
    """

    name: str
    function: Callable[..., Any]

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> Sequence[Sequence[tuple[int, float]]]:
        """One list of `(end, score)` per rollout.

        Raises:
            ScoregramError: If the function requires a column that does not exist, or does not return one list of pairs
                per rollout, with rising ends inside the completion and finite scores. Exceptions of the function itself
                are re-raised with its name as a note.
        """
        given = {"prompts": prompts, "completions": completions, **columns}
        keywords = accepted_keywords(self.name, self.function, given, caller="step scores")
        with raised_by(f"the step scores {self.name}"):
            scores = self.function(**keywords)
        if not isinstance(scores, list | tuple):
            remedy = "Return one list of (end, score) per completion."
            fail("step scores", f"{self.name} must return a list", type(scores).__name__, remedy)
        if len(scores) != len(completions):
            got, remedy = f"{len(scores)} for {len(completions)} completions", "Return [] for one without a step."
            fail("step scores", f"{self.name} must return one list per completion", got, remedy)
        return [checked_steps(self.name, steps, text) for steps, text in zip(scores, completions, strict=True)]


def checked_steps(name: str, steps: Any, text: str) -> list[tuple[int, float]]:
    """The scored steps of one completion as pairs of a whole number and a float, their ends rising."""
    if not isinstance(steps, list | tuple):
        remedy = "Return [] for a completion without a step."
        fail("step scores", f"{name} must return a list of (end, score) for every completion", repr(steps), remedy)
    found = [checked_step(name, step, text) for step in steps]
    ends = [end for end, _ in found]
    if any(late <= early for early, late in pairwise(ends)):
        fail("step scores", f"the ends of {name} must rise from step to step", ends, "Sort the steps by their ends.")
    return found


def checked_step(name: str, step: Any, text: str) -> tuple[int, float]:
    """The end and the score of one step, after checks."""
    if not isinstance(step, list | tuple) or len(step) != 2:
        remedy = "The end counts the characters of the completion up to the end of the step."
        fail("step scores", f"a step of {name} must be a pair (end, score)", repr(step), remedy)
    end, score = (part.item() if hasattr(part, "item") else part for part in step)  # scalars of torch and numpy
    if not isinstance(end, Integral) or isinstance(end, bool) or not 0 < int(end) <= len(text):
        requirement = f"the end of a step of {name} must be a whole number from 1 to the length of the completion"
        fail("step scores", requirement, f"{end!r} for {len(text)} characters", "Count characters, not tokens.")
    if not isinstance(score, Real) or not math.isfinite(score):
        fail("step scores", f"the scores of {name} must be finite numbers", repr(score), "Leave this step out.")
    return int(end), float(score)


def load_step_scores(spec: str) -> CheckedStepScores:
    """The function of step scores that `spec` names, imported as a reward function is.

    Raises:
        ScoregramError: If `spec` is not `module:function`, or the function cannot be imported.
    """
    what, example = "a function of step scores", "my_rewards:steps"
    return CheckedStepScores(spec, imported_function(spec, caller="step scores", what=what, example=example))


def load_reward(spec: str) -> CheckedReward:
    """The reward function that `spec` names, imported from the installed packages or from the current folder.

    The current folder is added to `sys.path` and stays there, as with `python -m`: the module may import other modules
    of the folder later.

    Args:
        spec: `module:function`; both may have dots.

    Raises:
        ScoregramError: If `spec` has another form, the module or the function does not exist, or it is not callable.
    """
    example = "my_rewards:short_and_right"
    return CheckedReward(spec, imported_function(spec, caller="reward", what="a reward function", example=example))


def imported_function(spec: str, *, caller: str, what: str, example: str) -> Callable[..., Any]:
    """The function `module:function`; `caller`, `what` and `example` are for errors."""
    module_name, _, path = spec.partition(":")
    if not path or not all(part.isidentifier() for part in f"{module_name}.{path}".split(".")):
        remedy = f"Write module:function, for example {example}."
        fail(caller, f"{what} must be named module:function", repr(spec), remedy)
    target: Any = imported_module(module_name, spec, caller)
    for part in path.split("."):
        if not hasattr(target, part):
            fail(caller, f"{module_name} must have {path}", f"no {part} in it", "Check the spelling.")
        target = getattr(target, part)
    if not callable(target):
        fail(caller, f"{spec} must be a function", type(target).__name__, "Name a function.")
    if inspect.iscoroutinefunction(target):
        fail(caller, f"{spec} must be a plain function", "an async one", "Wrap it with asyncio.run.")
    return target


def imported_module(module_name: str, spec: str, caller: str) -> Any:
    """The module of a user's function; the error says whether it does not exist or fails while it is imported."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be newer than the cached listing of this folder
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{module_name}.".startswith(f"{missing.name}."):
            remedy = f"Start the command in the folder of the module; it was searched for in {folder}."
            fail(caller, f"the module of {spec} must be importable", f"no module {missing.name}", remedy)
        fail(caller, f"{module_name} must import", f"{missing}", "Install the package that it imports.")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fail(caller, f"{module_name} must import", reason, "Repair the module.")


def accepted_keywords(
    name: str, function: Callable[..., Any], given: dict[str, Any], *, caller: str = "reward"
) -> dict[str, Any]:
    """The keywords of `given` that are in the signature of `function`; all of them if it has `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return given
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        remedy = "Remove the / in its signature."
        fail(caller, f"{name} must take its arguments by name", "positional-only ones", remedy)
    if missing := [column for column in required if column not in given]:
        requirement = f"the arguments of {name} must be among {', '.join(sorted(given))}"
        fail(caller, requirement, missing[0], "Rename the argument or add the column to the data.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    names = {p.name for p in parameters}
    return {key: value for key, value in given.items() if key in names}


def checked_rewards(name: str, rewards: Any, rollouts: int) -> list[float | None]:
    """Rewards as a list of floats and `None`, one per rollout, all finite."""
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # tensors and arrays
    if not isinstance(values, list | tuple):
        fail("reward", f"{name} must return a list of rewards", type(rewards).__name__, "Return one per completion.")
    if len(values) != rollouts:
        got, remedy = f"{len(values)} for {rollouts} completions", "Return None for a completion without a reward."
        fail("reward", f"{name} must return one reward per completion", got, remedy)
    return [checked_reward(name, value, index) for index, value in enumerate(values)]


def checked_reward(name: str, value: Any, index: int) -> float | None:
    """One reward as a float, or `None`."""
    number = value.item() if hasattr(value, "item") else value  # scalars of torch and numpy
    if number is None:
        return None
    if not isinstance(number, Real) or not math.isfinite(number):
        got, remedy = f"{value!r} for rollout {index}", "Return None for a completion without a reward."
        fail("reward", f"{name} must return finite numbers", got, remedy)
    return float(number)
