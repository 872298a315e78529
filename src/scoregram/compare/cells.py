"""The cells of a comparison: one run for each method and seed, trained if it is missing or incomplete."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import ScoregramError, fail
from scoregram.compare.config import CompareConfig, method_choice
from scoregram.compare.results import require_accuracy
from scoregram.compare.table import COMPARISON_FILE, comparison_setting, is_comparison, write_comparison
from scoregram.policy import load_policy
from scoregram.report import show_table
from scoregram.runs import (
    CONFIG_FILE,
    METRICS,
    FolderLock,
    config_differences,
    disk_errors,
    last_scalar,
    make_folder,
    require_own_folder,
    require_same_config,
    write_atomically,
)
from scoregram.tasks import load_step_scores, load_task
from scoregram.training import (
    TrainConfig,
    Trained,
    available_cores,
    fitted_task,
    require_runnable,
    require_some_effect,
    run_in_processes,
    run_one,
    runs_progress,
)

FAILURE = "failure.txt"
"""End of the name of the file, beside a run's folder, that says why the run failed."""
LONGEST_NAME = 255
"""Bytes of the longest file name that most disks allow."""


@dataclass(frozen=True)
class PlannedCell:
    """One run of a comparison: a method with a seed."""

    label: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The run as messages name it."""
        return f"{self.label}, seed {self.seed}"

    @property
    def done(self) -> int:
        """Rollouts sampled so far, at most the budget."""
        return min(last_scalar(self.config.out, "rollouts"), self.config.rollouts)

    @property
    def is_complete(self) -> bool:
        """Whether the budget is used up; a run without its config cannot be read."""
        return self.done == self.config.rollouts and (self.config.out / CONFIG_FILE).is_file()


def compare_methods(config: CompareConfig, *, console: Console | None = None) -> int:
    """Train the runs that are missing, then write and print the tables. One process at a time writes a folder.

    Returns:
        The exit status: 0, 1 if a run failed, 130 if the user stopped it.

    Raises:
        ScoregramError: If another process compares in the folder, it holds runs with other settings, or a method does
            not support these settings. Also, after the tables, if a worker process died before its run had ended.
    """
    require_own_folder(config.out, COMPARISON_FILE, caller="compare --out")
    with only_writer(config.out):
        return compare_in_folder(config, console or Console())


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in this block. The folder is made for it, and removed again if it stays empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    with disk_errors(folder, caller="compare --out"):
        make_folder(folder)
        lock = FolderLock(folder, caller="compare --out")
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # not empty
                path.rmdir()
        lock.release()


def compare_in_folder(config: CompareConfig, console: Console) -> int:
    """`compare_methods`, in a folder that this process alone writes."""
    known = read_comparison_setting(config.out)
    config = replace(config, every_rollouts=config.every_rollouts or known.get("every_rollouts", 0))
    refuse_other_settings(config, known)
    cells = planned_cells(config)
    refuse_other_runs(config, known, cells)
    refuse_unfit_settings(config, cells)
    write_comparison_setting(config)
    forget_failures(cells)
    if not train_cells(config, cells, console):
        console.print(f"Stopped. The same command continues from here: {config.out}", soft_wrap=True)
        return 130
    for table in write_comparison(config.out):
        show_table(table, console)
    failures = failed_cells(cells)
    for name, reason in failures.items():
        console.print(f"{name} failed: {reason}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Table: {config.out}/table.md, .csv, .json. Page: scoregram report {config.out}", soft_wrap=True)
    unfinished = [cell for cell in cells if not cell.is_complete and cell.name not in failures]
    if unfinished:  # a worker process died
        got = "; ".join(f"{cell.name}: {cell.done} of {config.rollouts}" for cell in unfinished)
        remedy = "The same command continues from here; choose fewer --jobs if a worker died for lack of memory."
        fail("compare", "every run must sample its rollouts", got, remedy)
    return 1 if failures else 0


def require_compared_effects(config: CompareConfig) -> None:
    """Raise if an option acts in none of the compared methods, or an option of one method does not act in it."""
    runs = {choice.label: config.run_config(choice, seed=0) for choice in config.choices}
    for run in runs.values():
        require_runnable(run)  # such as an estimator that does not exist
    defaults = {field.name: field.default for field in fields(CompareConfig)}
    given = [field.name for field in fields(TrainConfig) if getattr(config, field.name) != defaults[field.name]]
    require_some_effect(given, list(runs.values()), caller="compare")
    for choice in config.choices:
        own = [name for name, value in choice.options.items() if value != defaults[name]]
        require_some_effect(own, [runs[choice.label]], caller=f"compare --methods {choice.label}:")


def planned_cells(config: CompareConfig) -> list[PlannedCell]:
    """Every method with every seed. All methods of one seed come together: an interrupted comparison has whole seeds.

    Raises:
        ScoregramError: If a method does not support these settings, or its label is too long for a folder.
    """
    for choice in config.choices:
        if len(choice.folder) > LONGEST_NAME:
            requirement = f"a method with its options must have at most {LONGEST_NAME} characters: it names a folder"
            fail("compare --methods", requirement, f"{len(choice.folder)}: {choice.label}", "Give it fewer options.")
    choices = {
        choice.label: [config.run_config(choice, seed) for seed in range(config.seeds)] for choice in config.choices
    }
    for runs in choices.values():
        require_runnable(runs[0])
    return [PlannedCell(label, seed, runs[seed]) for seed in range(config.seeds) for label, runs in choices.items()]


def refuse_unfit_settings(config: CompareConfig, cells: Sequence[PlannedCell]) -> None:
    """Raise before the first run if the task excludes a setting of a run that is missing, or the target.

    The task is loaded once for this, with the first seed; a comparison that is complete does not need its task.
    """
    missing = {cell.label: cell.config for cell in cells if not cell.is_complete}
    if not missing:
        return
    task = load_task(config.task, reward=config.reward)
    if task.rewards_are_binary and config.target is not None:
        require_accuracy(config.target, f"the rewards of {task.name} are 0 or 1")
    for label, run in missing.items():
        scores = None if run.step_scores is None else load_step_scores(run.step_scores)
        try:
            fitted_task(run, replace(task, step_scores=scores))
        except ScoregramError as error:
            raise ScoregramError(f"compare --methods {label}: {error}") from error


def refuse_other_settings(config: CompareConfig, known: Mapping[str, Any]) -> None:
    """Raise if the comparison in the folder has more rollouts, more seeds or other shared settings.

    Folders of older versions state some of the shared settings only; `refuse_other_runs` checks the others.
    """
    for name in ("rollouts", "seeds"):
        if known.get(name, 0) > getattr(config, name):
            requirement = f"must be at least {known[name]}, which {config.out} has"
            fail(f"compare --{name}", requirement, getattr(config, name), "Choose another --out, or a larger number.")
    requested = config.shared_settings
    stated = ("task", "model", "batch_size", "every_rollouts")
    stored = known.get("shared") or {name: known.get(name, requested[name]) for name in stated}
    compared = requested if "shared" in known else {name: requested[name] for name in stated}
    differing = config_differences(stored, compared)
    if differing:
        remedy = "Give the settings of the folder, or choose another --out."
        fail("compare --out", f"all runs in {config.out} must have the same config", "; ".join(differing), remedy)


def refuse_other_runs(config: CompareConfig, known: Mapping[str, Any], cells: Sequence[PlannedCell]) -> None:
    """Raise if a run in the folder has other settings; in a folder of an older version, also of methods not named."""
    runs = [cell.config for cell in cells]
    if "shared" not in known:
        choices = [method_choice(label) for label in known.get("methods", {})]
        runs += [config.run_config(choice, seed) for choice in choices for seed in range(known["seeds"])]
    for run in runs:
        if (run.out / CONFIG_FILE).is_file():
            require_same_config(run.out, run.record(), run.may_differ())


def read_comparison_setting(folder: Path) -> Mapping[str, Any]:
    """The settings of the comparison in a folder; empty if it holds none, or if none of its runs has begun.

    A command whose runs all failed at once, such as one with a misspelt task, does not bind the next one.

    Raises:
        ScoregramError: If the file is damaged.
    """
    if not is_comparison(folder):
        return {}
    remedy = "Restore it from a copy, or choose another --out."
    setting = comparison_setting(folder, caller="compare --out", remedy=remedy)
    has_begun = any(any(folder.glob(f"runs/*/*/{name}")) for name in (CONFIG_FILE, METRICS))
    return setting if has_begun else {}


def write_comparison_setting(config: CompareConfig) -> None:
    """Write the settings of the comparison: methods in order, seeds, budget, and what all runs share.

    Methods already in the folder stay, and stay in front.
    """
    old = read_comparison_setting(config.out).get("methods", {})
    methods = {choice.label: choice.folder for choice in config.choices}
    setting = {
        "task": config.task,
        "model": config.model,
        "rollouts": config.rollouts,
        "every_rollouts": config.evaluation_rollouts,
        "batch_size": config.batch_size,
        "seeds": config.seeds,
        "target": config.target,
        "methods": {**old, **methods},
        "shared": config.shared_settings,
    }
    with disk_errors(config.out, caller="compare"):
        config.out.mkdir(parents=True, exist_ok=True)
        write_atomically(config.out / COMPARISON_FILE, json.dumps(setting, indent=1).encode())


def train_cells(config: CompareConfig, cells: Sequence[PlannedCell], console: Console) -> bool:
    """Train every incomplete run; False if the user stopped it. A failure is explained in `failure_path`.

    If a worker process died, the others ended after their step, and some runs are still incomplete.
    """
    missing = [cell.config for cell in cells if not cell.is_complete]
    if not missing:
        return True
    jobs = min(config.jobs or default_jobs(config), len(missing))
    try:
        if config.model == "tiny":
            prepare_tiny(missing, console)
        with runs_progress(
            config.rollouts * len(cells), lambda: sum(cell.done for cell in cells), unit="rollouts", console=console
        ):
            if jobs == 1:
                return all(not run_or_explain(one).interrupted for one in missing)
            return run_in_processes(missing, jobs, run=run_or_explain)
    except KeyboardInterrupt:  # while a policy is built, before the first step of a run, or a second time
        return False
    except BrokenProcessPool:
        console.print("A worker process died; the others stopped after their step.", soft_wrap=True)
        return True


def prepare_tiny(missing: Sequence[TrainConfig], console: Console) -> None:
    """Build the model `tiny` of every seed once, so that parallel runs find it in the cache."""
    for config in {one.seed: one for one in missing}.values():
        task = load_task(config.task, seed=config.seed, reward=config.reward)
        load_policy(config.policy, task, note=lambda line: console.print(line, soft_wrap=True, markup=False))


def default_jobs(config: CompareConfig) -> int:
    """Runs at a time: as many as the cores allow at `config.threads` threads each; one on a GPU.

    How many runs fit into the memory of a GPU is the user's choice: weights, gradients, Adam's moments and copies for a
    critic or a reference can be counted beforehand, but not the activations, caches and Grams of the completions.
    With 0 threads torch's own number is left as it is, which is all cores: one run at a time.
    """
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu or not config.threads else max(1, available_cores() // config.threads)


def run_or_explain(config: TrainConfig) -> Trained:
    """Train one run; an error of any kind ends this run alone, and its reason is written beside the folder."""
    reason = failure_path(config)
    reason.unlink(missing_ok=True)
    try:
        return run_one(config)
    except (Exception, SystemExit) as error:  # such as out of memory, or sys.exit() in the user's reward function
        with disk_errors(reason, caller="compare"):
            reason.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(reason, f"{failure_text(error)}\n".encode())
        return Trained(config.out, 0, interrupted=False)


def failure_text(error: BaseException) -> str:
    """An error as the reason of a failed run: its kind, its text, and what raised it where that is known.

    Example:
        >>> failure_text(ZeroDivisionError("division by zero")), failure_text(RuntimeError())
        ('ZeroDivisionError: division by zero', 'RuntimeError')
    """
    kind = "" if isinstance(error, ScoregramError) else type(error).__name__
    notes = list(getattr(error, "__notes__", ()))  # such as the name of the user's function
    if isinstance(error, SystemExit) and not notes:
        last = traceback.extract_tb(error.__traceback__)[-1]
        notes = [f"raised by {last.name} in {last.filename}, line {last.lineno}"]
    return ", ".join([": ".join(filter(None, [kind, str(error)])), *notes])


def failure_path(config: TrainConfig) -> Path:
    """File with the reason why a run failed."""
    return config.out.parent / f"{config.out.name}-{FAILURE}"


def forget_failures(cells: Sequence[PlannedCell]) -> None:
    """Remove the reasons of failures of earlier commands: a run that fails again gets a new one."""
    for cell in cells:
        with disk_errors(cell.config.out, caller="compare"):
            failure_path(cell.config).unlink(missing_ok=True)


def failed_cells(cells: Sequence[PlannedCell]) -> dict[str, str]:
    """Label and seed → reason, for every run that failed."""
    paths = {cell.name: failure_path(cell.config) for cell in cells}
    return {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items() if path.is_file()}
