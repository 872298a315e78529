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

    def run(self) -> int:
        """Print the ledger."""
        from scoregram.theory.claims.show import show_claims

        return show_claims(ids=self.id, as_json=self.json)


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


@dataclass(frozen=True)
class Bench:
    """Measure what the exact Gram costs, beside a plain step and the other ways to get it, in one process."""

    what: tyro.conf.Positional[Literal["gram"]]
    """What to measure."""
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
    | Annotated[Bench, tyro.conf.subcommand("bench")]
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
