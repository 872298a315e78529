"""The command line: one frozen dataclass per command, turned into options by tyro.

Nothing heavy is imported here; a command imports what it runs, so that `scoregram --help` answers at once.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from scoregram import __version__
from scoregram.errors import ScoregramError


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
class Version:
    """Print the version."""

    def run(self) -> int:
        """Print it."""
        print(__version__)
        return 0


Command = (
    Annotated[Claims, tyro.conf.subcommand("claims")]
    | Annotated[Lab, tyro.conf.subcommand("lab")]
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
