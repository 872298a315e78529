"""`scoregram filter`: the training prompts of a run without those whose rollouts all had one reward.

A run whose learning rate is 0 visits every prompt with the policy that it starts from; `visit_steps` says how to make
one, and `filter_prompts` reads it. Any other run does too, for the prompts that it stored.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from scoregram.advice.settings import has_prompt_list, task_name
from scoregram.checks import fail
from scoregram.reading import OWN_TRAINER, TRL_TRAINER, Outcome, outcomes_of, rollouts_remedy, trainer_of
from scoregram.runs import TRAINING_KINDS, Run, disk_errors, open_run, require_run, write_atomically
from scoregram.tasks import Problem, Task, load_task

EqualRewards = Literal["equal", "all-wrong", "all-right"]
"""Prompts to leave out: whose rewards are all equal, all 0, or all 1."""
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "equal": "whose rewards are all equal",
        "all-wrong": "whose rewards are all 0",
        "all-right": "whose rewards are all 1",
    }
)
EQUAL_OUTCOMES: Mapping[EqualRewards, tuple[Outcome, ...]] = MappingProxyType(
    {"equal": ("all right", "all wrong", "tied"), "all-wrong": ("all wrong",), "all-right": ("all right",)}
)
"""Prompts to leave out → outcomes that their groups may have."""
GSM8K_PROBLEMS = 7473
"""Training problems of GSM8K, where its files are not on this machine."""
SAMPLING_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float32",
        "prompt": "auto",
        "attention": "sdpa",
        "reward": None,
        "max_new_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
)
"""Options of `scoregram train` that decide what is sampled, beside the model, the task and the sizes, with the values
that need not be typed."""
NAMELESS = "prompt/"
"""Beginning of the names that an integration makes from token ids where a data set has no column of names."""
NAMED_PROMPTS = 'train_dataset = train_dataset.add_column("prompt_id", [str(i) for i in range(len(train_dataset))])'
"""Python that gives the prompts of a data set names."""
VISIT, LIVE, LEFT_OUT_FILE = "runs/visit", "data/live", "left_out.json"
"""Names that the commands of a finding use."""


@dataclass(frozen=True, kw_only=True)
class FilteredPrompts:
    """What a filter wrote."""

    path: Path
    """Folder with `train.jsonl` and `test.jsonl`, or a file with the names of the prompts that were left out."""
    visited: int
    """Prompts whose rewards are stored."""
    left_out: tuple[str, ...]
    """Names of the prompts that were left out, sorted."""
    problems: int = 0
    """Training problems of the task; 0 if the run's trainer keeps its prompts itself."""

    def lines(self, which: str, config: Mapping[str, Any]) -> Iterator[str]:
        """What was done, and what to type next."""
        what = LEFT_OUT.get(which, "that were named")
        yield f"{self.path}: left out {len(self.left_out):,} of {self.visited:,} visited prompts, those {what}."
        if not self.problems:
            yield f"Next: {_python_filter(self.path)}"
            return
        kept = self.problems - len(self.left_out)
        unseen = self.problems - self.visited
        yield f"Kept {kept:,} of {self.problems:,} training prompts" + (
            f", {unseen:,} of which the run did not store. To visit all: {visit_command(config, self.problems)}"
            if unseen > 0
            else "."
        )
        yield f"Next: scoregram train --task {task_name(config)}:{self.path}"


def filter_prompts(
    folder: Path | str, out: Path | str, *, which: EqualRewards = "equal", names: Sequence[str] = ()
) -> FilteredPrompts:
    """Write the training prompts of a run without some of them.

    A prompt is left out if its rewards were all equal at every visit that the run stored, as a group or as rollouts.
    Prompts that it did not store are kept: nothing is known of them. Test problems are kept as they are.

    Args:
        folder: Folder of the run.
        out: For a run of `scoregram train`, the folder to write `train.jsonl` and `test.jsonl` to; else a JSON file for
            the names of the prompts to leave out.
        which: Leave out prompts whose rewards are all equal, all 0 or all 1.
        names: Leave out these prompts, by name, and no others.

    Raises:
        ScoregramError: If the run stores no rewards, its task draws its problems, its task cannot be loaded, nothing
            would be left to train on, or the files exist or cannot be written.
    """
    run = open_run(require_run(folder, caller="filter"))
    rewards = stored_rewards(run)
    if not rewards:
        fail("filter", "the run must store groups or rollouts", f"none in {folder}", rollouts_remedy(run.config))
    if unknown := [name for name in names if name not in rewards]:
        remedy = f"Names look like {next(iter(rewards))}."
        fail("filter --names", "must be prompts that the run stored", ", ".join(map(repr, unknown)), remedy)
    left_out = tuple(sorted(names or (name for name, seen in rewards.items() if has_equal_rewards(seen, which))))
    if trainer_of(run.config) != OWN_TRAINER:
        _require_names(left_out)
        path = Path(out)
        _refuse_replacing(path)
        with disk_errors(path, caller="filter"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(left_out, indent=1).encode())
        return FilteredPrompts(path=path, visited=len(rewards), left_out=left_out)
    if not has_prompt_list(run.config):
        remedy = "Take another --task: there is no list of prompts to shorten."
        fail("filter", "the task must read its problems from files", run.config.get("task"), remedy)
    task = load_task(str(run.config["task"]), seed=int(run.config.get("seed") or 0))
    kept = [problem for problem in task.train if problem.id not in set(left_out)]
    if not kept:
        fail("filter", "a prompt must be left to train on", f"{len(left_out)} left out", "Take easier problems.")
    _write_task(Path(out), task, kept)
    return FilteredPrompts(path=Path(out), visited=len(rewards), left_out=left_out, problems=len(task.train))


def show_filter(folder: Path, out: Path, *, which: EqualRewards = "equal", names: Sequence[str] = ()) -> int:
    """Write the prompts that are kept, and print what was left out and what to type next."""
    made = filter_prompts(folder, out, which=which, names=names)
    print(*made.lines("" if names else which, open_run(folder).config), sep="\n")
    return 0


def stored_rewards(run: Run) -> dict[str, list[list[float]]]:
    """Prompt → the rewards of its group at every stored visit, from groups and, where a step has none, rollouts."""
    found: dict[str, list[list[float]]] = {}
    grouped: set[int] = set()
    for group in run.groups(layers=False):
        if group.kind in TRAINING_KINDS:
            grouped.add(group.step)
            found.setdefault(group.prompt_id, []).append(group.rewards.tolist())
    visits: dict[tuple[int, str, int], list[float]] = {}
    for one in run.rollouts(run.rollout_steps() - grouped):
        if one.kind in TRAINING_KINDS:
            visits.setdefault((one.step, one.prompt_id, one.group), []).append(float(one.reward))
    for (_, name, _), rewards in visits.items():
        found.setdefault(name, []).append(rewards)
    return found


def has_equal_rewards(visits: Sequence[Sequence[float]], which: EqualRewards = "equal") -> bool:
    """Whether the rewards of every visit were all equal up to rounding, and of the kind.

    As `outcomes_of` tells dead groups from live ones. Missing rewards do not count; False if no visit has a reward.

    Example:
        >>> has_equal_rewards([[0.0, 0.0], [1.0, 1.0]]), has_equal_rewards([[0.0, 0.0], [0.0, 1.0]])
        (True, False)
        >>> has_equal_rewards([[0.0, 0.0]], "all-right"), has_equal_rewards([[math.nan, 1.0]], "all-right")
        (False, True)
    """
    rows = [torch.tensor(visit, dtype=torch.float64) for visit in visits if visit]
    if not rows:
        return False
    padded = pad_sequence(rows, batch_first=True, padding_value=math.nan)  # (visits, R): a missing reward is ignored
    judged = [outcome for outcome in outcomes_of(padded) if outcome != "unjudged"]
    return bool(judged) and all(outcome in EQUAL_OUTCOMES[which] for outcome in judged)


def _require_names(prompts: Sequence[str]) -> None:
    """Raise if prompts have no names in the user's data set: it could not be filtered by them."""
    if nameless := next((name for name in prompts if name.startswith(NAMELESS)), None):
        remedy = f"Name them, visit them again, then filter: {NAMED_PROMPTS}."
        fail("filter", "the prompts must have names in train_dataset", f"{nameless}, made from tokens", remedy)


def _refuse_replacing(path: Path) -> None:
    """Raise if a file is there already: it may be the only copy of the user's prompts."""
    if path.is_file():
        fail("filter --out", f"{path} must not exist yet", "a file", "Choose another name, or move the file away.")


def _write_task(folder: Path, task: Task, kept: Sequence[Problem]) -> None:
    for split in ("train", "test"):
        _refuse_replacing(folder / f"{split}.jsonl")
    with disk_errors(folder, caller="filter"):
        folder.mkdir(parents=True, exist_ok=True)
        for split, problems in (("train", kept), ("test", task.test)):
            lines = [json.dumps(_row(problem, task.name), ensure_ascii=False) for problem in problems]
            write_atomically(folder / f"{split}.jsonl", ("\n".join(lines) + "\n").encode())


def _row(problem: Problem, task: str) -> dict[str, Any]:
    """A problem as a line of its task's files."""
    if task.startswith("gsm8k"):
        return {"question": problem.prompt, "answer": problem.columns["solution"]}
    return {"prompt": problem.prompt, "answer": problem.answer, **problem.columns}


# What a finding tells its reader to type


def visit_steps(which: EqualRewards, config: Mapping[str, Any]) -> tuple[str, ...]:
    """How to leave out such prompts, one command after the other, in the trainer that made the run."""
    trainer, option = trainer_of(config), "" if which == "equal" else f" --which {which}"
    if trainer == OWN_TRAINER and config.get("task"):
        return (
            f"Sample every prompt once, without learning: `{visit_command(config)}`",
            f"Leave out the prompts {LEFT_OUT[which]}: `scoregram filter {VISIT}{option} --out {LIVE}`",
            f"Train as before, on the others: `--task {task_name(config)}:{LIVE}` (now {config['task']})",
        )
    if trainer == TRL_TRAINER:
        return (
            f"Name the prompts: `{NAMED_PROMPTS}`",
            "Sample every prompt once, without learning: `GRPOConfig(learning_rate=0.0, num_train_epochs=1, "
            f'max_steps=-1, …)` and `attach(trainer, every=1, out="{VISIT}")`',
            f"List the prompts {LEFT_OUT[which]}: `scoregram filter {VISIT}{option} --out {LEFT_OUT_FILE}`",
            f"Train as before, on the others: `{_python_filter(LEFT_OUT_FILE)}`",
        )
    return ("Sample every prompt once with the policy that you start from.", "Train on those whose rewards differ.")


def visit_command(config: Mapping[str, Any], problems: int | None = None) -> str:
    """The command that samples every training problem of a run's task once, with a learning rate of 0.

    The number of steps is that of `problems`; if not given, the shell counts the lines of the task's file.
    """
    size, batch = config.get("group_size"), config.get("batch_size")
    size = size if isinstance(size, int) else 8
    prompts = max(1, int(batch) // size) if batch else 8
    known = {"model": config.get("model"), "task": config.get("task"), "batch_size": prompts * size, "group_size": size}
    known |= {name: config.get(name, value) for name, value in SAMPLING_DEFAULTS.items()}
    typed = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in known.items()
        if value is not None and value != SAMPLING_DEFAULTS.get(name)
    ]
    typed += ["--autocast"] * bool(config.get("autocast"))
    return (
        f"scoregram train {' '.join(typed)} --steps {_visit_count(config, prompts, problems)} --learning-rate 0 "
        f"--measure-every 0 --rollouts-every 1 --eval-every 0 --no-final-checkpoint --out {VISIT}"
    )


def _visit_count(config: Mapping[str, Any], prompts: int, problems: int | None) -> str:
    name, _, argument = str(config.get("task") or "").partition(":")
    if problems is None and name == "gsm8k" and not argument:
        problems = GSM8K_PROBLEMS
    if problems is not None:
        return str(math.ceil(problems / prompts))
    file = _training_file(argument)
    return f"$(( $(wc -l < {shlex.quote(file)}) / {prompts} + 1 ))"


def _training_file(argument: str) -> str:
    """The file with the training problems of a task that is given by a file or a folder."""
    return argument if argument.endswith((".jsonl", ".json")) else f"{argument}/train.jsonl"


def counted_prompts(config: Mapping[str, Any]) -> tuple[int, str]:
    """How many prompts one visit of the data set takes, and in words whose number that is.

    From the file of the task if it is on this machine, else GSM8K's own number, else 1,000 as a unit to scale by.

    Example:
        >>> counted_prompts({"method": "grpo", "task": "gsm8k"})
        (7473, 'the 7,473 training prompts of GSM8K')
    """
    name, _, argument = str(config.get("task") or "").partition(":")
    file = Path(_training_file(argument))
    if trainer_of(config) == OWN_TRAINER and argument and file.is_file():
        with disk_errors(file, caller="advise"), file.open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
        return count, f"the {count:,} training prompts of {file}"
    if trainer_of(config) == OWN_TRAINER and name == "gsm8k":
        absent = f", if {argument} holds all of them (its files are not here)" if argument else ""
        return GSM8K_PROBLEMS, f"the {GSM8K_PROBLEMS:,} training prompts of GSM8K{absent}"
    return 1000, "every 1,000 prompts (the run does not store how many your data set has)"


def _python_filter(path: Path | str) -> str:
    return (
        f'left_out = set(json.loads(Path("{path}").read_text())); '
        'train_dataset = train_dataset.filter(lambda row: row["prompt_id"] not in left_out)'
    )
