"""The command line: one frozen dataclass per command, turned into options by tyro.

Nothing heavy is imported here; a command imports what it runs, so that `scoregram --help` answers at once.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from scoregram import __version__
from scoregram.errors import ScoregramError
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.training.config import TrainConfig
from scoregram.training.methods import METHODS


@dataclass(frozen=True)
class Claims:
    """Check every claim of the paper by enumeration and print the verdicts.

    Exit status 1 if a check failed, that is, if neither a printed nor its corrected statement held.
    """

    json: bool = False
    """Print strict JSON instead of a table."""
    id: tuple[str, ...] = ()
    """Only the claims with these ids."""
    measured: tuple[Path, ...] = ()
    """Replication records whose verdicts are shown beside the empirical claims; the shipped ones if not given."""

    def run(self) -> int:
        """Print the ledger."""
        from scoregram.replication.measured import measured_verdicts
        from scoregram.theory.claims.show import show_claims

        return show_claims(ids=self.id, as_json=self.json, measured=measured_verdicts(self.measured))


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
        from scoregram.theory.lab.show import show_comparison

        return show_comparison(world=self.world, budget=self.budget, group_size=self.group_size, as_json=self.json)


@dataclass(frozen=True)
class Train(TrainConfig):  # noqa: D101
    __doc__ = f"""{TrainConfig.__doc__}

    Methods: {"; ".join(f"{name} ({row.about})" for name, row in METHODS.items())}.
    """

    def run(self) -> int:
        """Train, and say where the run is."""
        from scoregram.training.loop import train

        trained = train(self)
        print(f"{trained.folder}: step {trained.step} of {self.steps}")
        return 130 if trained.interrupted else 0


@dataclass(frozen=True, kw_only=True)
class Measure(MeasureConfig):  # noqa: D101
    __doc__ = MeasureConfig.__doc__

    def run(self) -> int:
        """Measure, and say where the run is."""
        from scoregram.integrations.measure import measure

        return 130 if measure(self).interrupted else 0


@dataclass(frozen=True)
class BenchGram:
    """Measure what the exact Gram costs, beside a plain step and the other ways to get it, in one process."""

    shape: str = "llama-25m"
    """llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: tuple[int, ...] = (8,)
    """Numbers of rollouts."""
    tokens: tuple[int, ...] = (128, 512)
    """Tokens per rollout, a quarter of them prompt."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    lora: int = 0
    """Train adapters of this rank only; 0 trains everything."""
    ways: tuple[str, ...] = ("gram+gradient", "gram", "n-backwards", "vmap", "opacus")
    """What to time beside the plain step."""
    repeats: int = 5
    """Timed calls of each, in turns."""
    threads: int = 1
    """Threads on a CPU."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""
    plot: Path | None = None
    """Also plot the ratios here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.gram import run_gram_bench

        return run_gram_bench(
            shape=self.shape,
            rollouts=self.rollouts,
            tokens=self.tokens,
            dtype=self.dtype,
            device=self.device,
            lora=self.lora,
            ways=self.ways,
            repeats=self.repeats,
            threads=self.threads,
            as_json=self.json,
            out=self.out,
            plot=self.plot,
        )


@dataclass(frozen=True)
class BenchTrain:
    """Compare the steps per second of the trainer with those of TRL's GRPOTrainer, in a process each, on a CPU."""

    model: str = "tiny"
    """Hub id, folder, `.gguf` file or `tiny`."""
    task: str = "arithmetic"
    """arithmetic[:TERMS], gsm8k[:FOLDER], reasoning-gym:NAME or jsonl:FILE; prompts are plain text."""
    reward: str | None = None
    """`module:function` with TRL's signature, in place of the task's reward."""
    group_size: int = 8
    """Rollouts of one prompt."""
    batch_sizes: tuple[int, ...] = (8, 64)
    """Rollouts of one update."""
    max_new_tokens: int = 0
    """Longest completion; 0 for what the task suggests."""
    learning_rate: float = 1e-4
    """Of AdamW, constant."""
    steps: int = 30
    """Updates that are timed."""
    warmup: int = 10
    """Updates before them."""
    ways: tuple[str, ...] = ("trl", "scoregram", "unmeasured")
    """Trainers: TRL's, and scoregram's with every step measured and with none."""
    repeats: int = 5
    """Processes of each, in turns."""
    threads: int = 1
    """Threads of torch."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.train import run_train_bench

        return run_train_bench(
            model=self.model,
            task=self.task,
            reward=self.reward,
            group_size=self.group_size,
            batch_sizes=self.batch_sizes,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            steps=self.steps,
            warmup=self.warmup,
            ways=self.ways,
            repeats=self.repeats,
            threads=self.threads,
            as_json=self.json,
            out=self.out,
        )


@dataclass(frozen=True)
class BenchSample:
    """Compare the tokens per second of the sampler with those of transformers' `generate`, in one process."""

    shape: str = "tiny"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 64
    """Rollouts in all, whole groups."""
    group_size: int = 8
    """Rollouts of one prompt."""
    prompt_tokens: int = 16
    """Length of every prompt."""
    tokens: int = 48
    """New tokens of every rollout; none stops before."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    repeats: int = 5
    """Timed calls of each, in turns."""
    threads: int = 1
    """Threads on a CPU."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.sample import run_sample_bench

        return run_sample_bench(
            shape=self.shape,
            rollouts=self.rollouts,
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            dtype=self.dtype,
            device=self.device,
            repeats=self.repeats,
            threads=self.threads,
            as_json=self.json,
            out=self.out,
        )


@dataclass(frozen=True)
class BenchTrl:
    """Compare measured with plain optimisation steps of TRL's GRPOTrainer, in turns, on a CPU."""

    shape: str = "llama-25m"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 16
    """Rollouts of one update, whole groups."""
    group_size: int = 8
    """Rollouts of one prompt."""
    micro_batch_size: int = 8
    """Rollouts of one backward pass of the trainer."""
    tokens: int = 128
    """Completion tokens of every rollout."""
    modes: tuple[str, ...] = ("scores", "loss")
    """What is measured."""
    checkpointing: tuple[bool, ...] = (False, True)
    """Without and with gradient checkpointing."""
    repeats: int = 5
    """Timed steps of each kind, in turns."""
    threads: int = 1
    """Threads of torch."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.trl import run_trl_bench

        return run_trl_bench(
            shape=self.shape,
            rollouts=self.rollouts,
            group_size=self.group_size,
            micro_batch_size=self.micro_batch_size,
            tokens=self.tokens,
            modes=self.modes,
            checkpointing=self.checkpointing,
            repeats=self.repeats,
            threads=self.threads,
            as_json=self.json,
            out=self.out,
        )


@dataclass(frozen=True)
class Bench:
    """Measure what the Gram costs, how fast training is, how fast sampling is, or what a step of TRL costs measured."""

    what: Annotated[
        Annotated[BenchGram, tyro.conf.subcommand("gram", prefix_name=False)]
        | Annotated[BenchTrain, tyro.conf.subcommand("train", prefix_name=False)]
        | Annotated[BenchSample, tyro.conf.subcommand("sample", prefix_name=False)]
        | Annotated[BenchTrl, tyro.conf.subcommand("trl", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        """Measure and print."""
        return self.what.run()


@dataclass(frozen=True)
class Replicate:
    """Run the paper's experiment, with null models beside every number, and judge each empirical claim.

    Interrupted, the same command goes on where it was.
    """

    preset: Literal["quick", "smollm2-gsm8k", "nemotron-4b-gsm8k"] = "quick"
    """quick: the embedded policy, minutes on two cores. The others need a GPU."""
    out: Path | None = None
    """Folder of the replication; `runs/PRESET` if not given."""
    seeds: int | None = None
    """Runs for each group size and method; the preset's own number if not given."""
    model: str | None = None
    """Another model than the preset's, such as a folder or a `.gguf` file."""
    task: str | None = None
    """Another task than the preset's, such as gsm8k:FOLDER."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    workers: int | None = None
    """Processes that train side by side; the preset's own number if not given."""
    sign_with: Path | None = None
    """Sign the record with the ed25519 key in this PEM file."""

    def run(self) -> int:
        """Train, measure, judge, record and report."""
        from scoregram.replicate import replicate

        folder = self.out or Path("runs") / self.preset
        given = {"seeds": self.seeds, "model": self.model, "task": self.task, "device": self.device}
        return replicate(self.preset, folder, workers=self.workers, sign_with=self.sign_with, **given)


@dataclass(frozen=True)
class Verify:
    """Check a replication record: its hash, number and signature, every file, and that tables follow from the Grams.

    Exit status 1 if anything failed, or could not be checked though it should have been.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """replication.json, or the folder that holds it."""
    recompute: bool = True
    """Compute tables and verdicts anew from the stored Grams, and compare."""

    def run(self) -> int:
        """Print a line for each check."""
        from scoregram.replication.verify import verify

        recompute = None
        if self.recompute:
            from scoregram.replication.evidence import recompute
        verification = verify(self.path, recompute=recompute)
        print(*verification.lines(), sep="\n")
        return 0 if verification.passed else 1


@dataclass(frozen=True)
class Report:
    """Write one self-contained page for a run or a replication: tables, figures, and what to change."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, or of the replication."""
    out: Path | None = None
    """Write it here, in place of `report.html` in the folder."""

    def run(self) -> int:
        """Write the page and print its path."""
        from scoregram.report import write_report

        print(write_report(self.folder, self.out))
        return 0


@dataclass(frozen=True)
class Version:
    """Print the version."""

    def run(self) -> int:
        """Print it."""
        print(__version__)
        return 0


Command = (
    Annotated[Claims, tyro.conf.subcommand("claims")]
    | Annotated[Lab, tyro.conf.subcommand("lab")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Measure, tyro.conf.subcommand("measure")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Replicate, tyro.conf.subcommand("replicate")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Version, tyro.conf.subcommand("version")]
)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the command, return the exit status."""
    command = tyro.cli(
        Command, prog="scoregram", description="What your policy-gradient step is made of.", args=arguments
    )  # type: ignore[arg-type]
    try:
        return command.run()
    except ScoregramError as error:
        print(f"scoregram: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
