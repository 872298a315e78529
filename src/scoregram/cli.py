"""The command line: one frozen dataclass per command, which tyro turns into options.

This module does not import torch; each command imports what it runs, so that `scoregram --help` is fast.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from scoregram import __version__
from scoregram.bench import Bench, BenchPreset
from scoregram.compare import CompareConfig
from scoregram.errors import ScoregramError, expected_value, is_readable_number
from scoregram.integrations import MeasureConfig
from scoregram.training import METHODS, TrainConfig


@dataclass(frozen=True)
class Claims:
    """Check every claim of the paper by enumeration and print the verdicts.

    Exit status 1 if a check failed, that is, if neither the printed nor the corrected statement held.
    """

    json: bool = False
    """Print strict JSON instead of a table."""
    id: tuple[str, ...] = ()
    """Only the claims with these ids."""
    measured: tuple[Path, ...] = ()
    """Replication records whose verdicts are shown beside the empirical claims; the shipped records if not given."""

    def run(self) -> int:
        """Print the ledger."""
        from scoregram.studies import CLAIMS, measured_verdicts, show_claims

        return show_claims(CLAIMS, ids=self.id, as_json=self.json, measured=measured_verdicts(self.measured))


@dataclass(frozen=True)
class Lab:
    """Compare the exact error of every estimator in a small world at a fixed number of rollouts."""

    world: str = "output_only"
    """output_only, output_only_binary, step_rewards, user_turns or stopping."""
    budget: int = 128
    """Rollouts that one step may take."""
    group_size: int = 4
    """Rollouts per prompt."""
    json: bool = False
    """Print strict JSON instead of a table."""

    def run(self) -> int:
        """Print the comparison."""
        from scoregram.theory import show_comparison

        return show_comparison(world=self.world, budget=self.budget, group_size=self.group_size, as_json=self.json)


@dataclass(frozen=True)
class Train(TrainConfig):  # noqa: D101
    __doc__ = f"""{TrainConfig.__doc__}

    Methods: {"; ".join(f"{name} ({row.about})" for name, row in METHODS.items())}.
    """

    def run(self) -> int:
        """Train, and print the run folder and the last step."""
        from scoregram.terminal import print_view_command
        from scoregram.training import require_effects, require_runnable, train

        if not self.resume:  # a resumed run keeps its settings
            require_runnable(self)
            require_effects(self)
        trained = train(self, on_start=lambda: print_view_command(self.out))
        budget = f", {trained.rollouts} of {self.rollouts} rollouts" if self.rollouts else f" of {self.steps}"
        print(f"{trained.folder}: step {trained.step}{budget}")
        return 130 if trained.interrupted else 0


@dataclass(frozen=True)
class Compare(CompareConfig):  # noqa: D101
    __doc__ = CompareConfig.__doc__

    resume: tyro.conf.Suppress[bool] = False
    overwrite: tyro.conf.Suppress[bool] = False
    method: tyro.conf.Suppress[str] = "grpo"
    seed: tyro.conf.Suppress[int] = 0
    steps: tyro.conf.Suppress[int] = 100
    measure_every: tyro.conf.Suppress[int] = 1
    eval_every: tyro.conf.Suppress[int] = 20
    lr_schedule: tyro.conf.Suppress[Literal["constant", "linear", "cosine"]] = "constant"
    keep_evidence: tyro.conf.Suppress[bool] = True

    def run(self) -> int:
        """Train what is missing and print the table."""
        from scoregram.compare import compare_methods, require_compared_effects

        require_compared_effects(self)
        return compare_methods(self)


@dataclass(frozen=True, kw_only=True)
class Measure(MeasureConfig):  # noqa: D101
    __doc__ = MeasureConfig.__doc__

    def run(self) -> int:
        """Measure, and return 130 if it was interrupted."""
        from scoregram.integrations import measure

        return 130 if measure(self).interrupted else 0


@dataclass(frozen=True)
class Replicate:
    """Run the paper's experiment, with null models beside every number, and judge each empirical claim.

    After an interruption, the same command continues the replication.
    """

    preset: Literal["quick", "smollm2-gsm8k", "nemotron-4b-gsm8k"] = "quick"
    """quick: the embedded policy, minutes on two cores. The others need a GPU."""
    out: Path | None = None
    """Folder of the replication; `runs/PRESET` if not given."""
    seeds: int | None = None
    """Runs for each group size and method; the preset's own number if not given."""
    model: str | None = None
    """Model that replaces the preset's, such as a folder or a `.gguf` file."""
    task: str | None = None
    """Task that replaces the preset's, such as gsm8k:FOLDER."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    workers: int | None = None
    """Processes that train in parallel; the preset's own number if not given."""
    sign_with: Path | None = None
    """Sign the record with the ed25519 key in this PEM file."""

    def run(self) -> int:
        """Train, measure, judge, record and report."""
        from scoregram.studies import replicate

        folder = self.out or Path("runs") / self.preset
        given = {"seeds": self.seeds, "model": self.model, "task": self.task, "device": self.device}
        return replicate(self.preset, folder, workers=self.workers, sign_with=self.sign_with, **given)


@dataclass(frozen=True)
class Verify:
    """Check a replication record: hash, number, signature, every file and run, and that tables follow from the Grams.

    Exit status 1 if a check failed, or if a requested check could not be made.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """replication.json, or the folder that holds it."""
    recompute: bool = True
    """Recompute tables and verdicts from the stored Grams and compare them with the recorded ones."""
    remeasure: int = 0
    """Measure the Grams of N groups again from their tokens. This needs the starting policy and the task."""
    start: Path | None = None
    """Folder of the starting policy; that in the folder of the replication if not given."""
    device: str = "cpu"
    """Where to measure again: cpu, cuda or cuda:N."""

    def run(self) -> int:
        """Print a line for each check."""
        from scoregram.studies import remeasure, run_name, verify

        if self.remeasure < 0:
            raise ScoregramError(f"verify --remeasure: must be at least 0, got {self.remeasure}. 0 measures none.")
        for option, is_given in {"start": self.start is not None, "device": self.device != "cpu"}.items():
            if is_given and not self.remeasure:
                raise ScoregramError(f"verify --{option}: acts only with --remeasure, got remeasure 0. Leave it out.")

        def again(folder: Path) -> Any:
            return remeasure(folder, self.remeasure, start=self.start, device=self.device)

        recompute = None
        if self.recompute:
            from scoregram.studies import recompute  # needs scipy, which the other checks do without
        measuring = again if self.remeasure > 0 else None
        verification = verify(self.path, recompute=recompute, run_name=run_name, remeasure=measuring)
        print(*verification.lines(), sep="\n")
        return 0 if verification.passed else 1


@dataclass(frozen=True)
class Report:
    """Write one self-contained page: what a run shows and what to change, or how several runs differ.

    Also for the folder of a comparison or of a replication.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folder of a run, of a comparison or of a replication; or folders of several runs."""
    out: Path | None = None
    """File to write; `report.html` in the folder if not given, `runs.html` here for several runs."""

    def run(self) -> int:
        """Write the page and print its path; print to stderr how far its numbers can be trusted."""
        from scoregram.compare import is_comparison
        from scoregram.studies import is_replication

        if len(self.folders) != 1:
            print(self._write_several())
            return 0
        (folder,) = self.folders
        if is_comparison(folder):
            from scoregram.compare import write_comparison_report

            print(write_comparison_report(folder, self.out))
        elif is_replication(folder):
            from scoregram.studies import write_replication_report

            print(write_replication_report(folder, self.out))
        else:
            from scoregram.report import write_report

            print(write_report(folder, self.out, tell=lambda trust: print(trust, file=sys.stderr)))
        return 0

    def _write_several(self) -> Path:
        if not self.folders:
            raise ScoregramError("report: needs a folder, got none. Name the folder of a run, such as runs/NAME.")
        from scoregram.report import write_several_report

        return write_several_report(self.folders, self.out)


@dataclass(frozen=True)
class View:
    """Serve a local page over run folders: a list of runs, each followed while it trains. It reads and never writes."""

    folder: tyro.conf.Positional[Path] = Path("runs")
    """Folder that holds run folders, or one run folder."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but the default lets other machines read your runs."""
    port: int = 8642
    """Port to listen on."""

    def run(self) -> int:
        """Serve until interrupted."""
        from scoregram.report import serve_runs

        serve_runs(self.folder, host=self.host, port=self.port)
        return 0


@dataclass(frozen=True)
class WhatIf:
    """Replay other estimators on the stored Grams of a run: variance, bias, signal over noise, direction, spectrum."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    estimators: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--estimator",))] = ()
    """Estimators of advantages, such as rloo or grpo; one of each kind if not given."""
    group_size: int = 0
    """Rollouts per group, at most half of the run's; 0 for that half. `--estimators rloo` alone may have any size."""
    weights: str = "uniform"
    """Factors of the advantages: uniform, length (1 over the tokens of a rollout), right or wrong (rollouts with a
    positive or a negative advantage alone), hard (prompts by 1 minus their mean reward), spread (by its variance)."""
    json: bool = False
    """Print strict JSON instead of a table."""

    def run(self) -> int:
        """Print the comparison."""
        from scoregram.report import show_replay

        replayed = {"group_size": self.group_size, "weights": self.weights}
        return show_replay(self.folder, self.estimators, as_json=self.json, **replayed)


@dataclass(frozen=True)
class Advise:
    """Say what is wrong with a run and what to change, worst first; silent where the data do not decide."""

    path: tyro.conf.Positional[Path]
    """Run folder, or a trainer's log: trainer_state.json, JSONL, CSV, a folder of TensorBoard, W&B's offline folder."""
    json: bool = False
    """Print strict JSON instead of text."""
    fail_on: Literal["never", "critical", "warning", "note"] = "never"
    """Exit status 1 if a finding is at least this severe."""

    def run(self) -> int:
        """Print the diagnosis."""
        from scoregram.advice import show_advice
        from scoregram.compare import is_comparison

        if is_comparison(self.path):
            remedy = f"Name one of its runs, such as {self.path}/runs/METHOD/seed-0."
            raise ScoregramError(f"advise: needs a run or a log, got a comparison: {self.path}. {remedy}")
        return show_advice(self.path, as_json=self.json, fail_on=self.fail_on)


@dataclass(frozen=True)
class Filter:
    """Write the training prompts of a run without those whose rollouts all had the same reward: they teach nothing.

    Prompts that the run did not store are kept. It prints what to type next.
    """

    folder: tyro.conf.Positional[Path]
    """Folder of the run; with a learning rate of 0 it visits prompts without learning, and `advise` says how."""
    out: Path
    """For a run of `scoregram train`, the folder to write train.jsonl and test.jsonl to; for another trainer, a JSON
    file for the names of the prompts that are left out."""
    which: Literal["equal", "all-wrong", "all-right"] = "equal"
    """Leave out prompts whose rewards are all equal, all 0 or all 1."""
    names: tuple[str, ...] = ()
    """Leave out these prompts, by name, and no others."""

    def run(self) -> int:
        """Write the files, and print what was left out."""
        from scoregram.advice import show_filter

        return show_filter(self.folder, self.out, which=self.which, names=self.names)


@dataclass(frozen=True)
class Demo:
    """Diagnose a recorded run with a known fault; needs no model."""

    name: tyro.conf.Positional[str] = "dominating-rollout"
    """The recorded run: dominating-rollout, kl-blow-up or stuck-batch."""
    json: bool = False
    """Print the diagnosis alone, as strict JSON."""

    def run(self) -> int:
        """Print the fault and the diagnosis."""
        from scoregram.advice import show_demo

        return show_demo(self.name, as_json=self.json)


@dataclass(frozen=True)
class BenchCommand(Bench):  # noqa: D101
    __doc__ = Bench.__doc__

    def run(self) -> int:
        """Measure and print; a preset's config comes from its study."""
        if not isinstance(self.what, BenchPreset):
            return self.what.run()
        from scoregram.studies import largest_config

        return self.what.run(trained=largest_config(self.what.preset))


@dataclass(frozen=True)
class Version:
    """Print the version."""

    def run(self) -> int:
        """Print the version."""
        print(__version__)
        return 0


Command = (
    Annotated[Claims, tyro.conf.subcommand("claims")]
    | Annotated[Lab, tyro.conf.subcommand("lab")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Measure, tyro.conf.subcommand("measure")]
    | Annotated[WhatIf, tyro.conf.subcommand("whatif")]
    | Annotated[Advise, tyro.conf.subcommand("advise")]
    | Annotated[Filter, tyro.conf.subcommand("filter")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[Replicate, tyro.conf.subcommand("replicate")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[View, tyro.conf.subcommand("view")]
    | Annotated[Version, tyro.conf.subcommand("version")]
)


@dataclass(frozen=True)
class ResumedRun:
    """The options of `train` that select the run to resume."""

    out: Path = TrainConfig.out
    resume: bool = False


COMPARED_OTHERWISE = {
    "--steps": "Give --rollouts, the budget of every run.",
    "--method": "Give --methods, separated by commas.",
    "--seed": "Give --seeds, the number of runs of each method.",
    "--resume": "Leave it out: the same command continues a comparison.",
    "--overwrite": "Choose another --out, or delete the folder.",
    "--measure-every": "Give --every-rollouts.",
    "--eval-every": "Give --every-rollouts.",
    "--lr-schedule": "Leave it out: with a budget of rollouts the learning rate is constant.",
}
"""Options of `scoregram train` that `scoregram compare` does not have, and what to give instead."""


def refuse_options_of_train(arguments: Sequence[str]) -> None:
    """Raise if `compare` is given an option of `train` that it lacks; tyro would show the help of another command."""
    for argument in arguments[1:] if arguments[:1] == ["compare"] else ():
        option = argument.partition("=")[0].replace("_", "-")
        if option in COMPARED_OTHERWISE:
            remedy = COMPARED_OTHERWISE[option]
            raise ScoregramError(f"compare: has no option {option}, got {argument}. {remedy}")


def refuse_unreadable_numbers(arguments: Sequence[str]) -> None:
    """Raise if an option that takes a number is given another text; tyro would list all types that it tried."""
    commands = {get_args(one)[1].name: get_args(one)[0] for one in get_args(Command)}
    if not arguments or arguments[0] not in commands:
        return
    hints = get_type_hints(commands[arguments[0]])
    words = [part for word in arguments[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, text in pairwise(words):
        hint = hints.get(option.removeprefix("--").replace("-", "_")) if option.startswith("--") else None
        if not text.startswith("--") and not is_readable_number(text, hint):
            expected = expected_value(hint)
            raise ScoregramError(f"{arguments[0]} {option}: must be {expected}, got {text!r}. Check the value.")


PATH_COMMANDS = ("advise", "filter", "report", "verify", "view", "whatif")
"""Commands with paths as arguments without an option."""


def refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Raise if a path is the empty text, as of a shell variable that is not set: it would mean the current folder."""
    command = next(iter(arguments), "")
    for before, argument in pairwise(arguments):
        is_positional = command in PATH_COMMANDS and (not before.startswith("--") or before in ("--json", "--no-json"))
        if argument == "--out=" or (argument == "" and (is_positional or before == "--out")):
            remedy = "Name a file or folder, . for the current one."
            raise ScoregramError(f"{command}: a path must not be empty, got ''. {remedy}")


def parsed_command(arguments: list[str]) -> Command:
    """The command with its options; those of `train --resume` that are not given come from the run itself."""
    if arguments[:1] == ["train"] and not {"-h", "--help"} & set(arguments):
        run, _ = tyro.cli(ResumedRun, args=arguments[1:], return_unknown_args=True)
        if run.resume:
            own: Train = Train.of_run(run.out)  # type: ignore[assignment]
            return tyro.cli(Train, prog="scoregram train", args=arguments[1:], default=own)
    return tyro.cli(Command, prog="scoregram", description="What your policy-gradient step is made of.", args=arguments)  # type: ignore[arg-type]


def require_paths(command: object) -> None:
    """Raise ScoregramError if a path among the options cannot exist on a disk, such as a name of over 255 bytes."""
    for field in fields(command):  # type: ignore[arg-type]
        value = getattr(command, field.name)
        if is_dataclass(value):
            require_paths(value)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                from scoregram.runs import require_path  # imports torch, as every command with a path does

                require_path(path, caller=field.name)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the command, return the exit status: 2 for a mistake, 130 after Ctrl-C."""
    try:
        try:
            given = sys.argv[1:] if arguments is None else arguments
            refuse_options_of_train(given)
            refuse_empty_paths(given)
            refuse_unreadable_numbers(given)
            command = parsed_command(given)
            require_paths(command)
            return command.run()
        except ScoregramError as error:
            print(f"scoregram: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("scoregram: interrupted", file=sys.stderr)
            return 130  # as a shell reports a command that Ctrl-C ended
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        return 1


if __name__ == "__main__":
    sys.exit(main())
