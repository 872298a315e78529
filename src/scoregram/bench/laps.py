"""The clock of a training run: a reward function, which every trainer calls once a step, so that none needs a patch."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scoregram.checks import fail
from scoregram.tasks import RewardFunction

CALLER = "bench train"


@dataclass(frozen=True)
class Lap:
    """One call: between two of them lies exactly one step, from the reward of one to the reward of the next."""

    wall: float
    """Seconds on the clock of the wall, when the rewards were known."""
    processor: float
    """Seconds on the processor, of all threads."""
    rollouts: int
    completion_tokens: float
    """Mean length of the completions, the stop token included."""
    reward: float
    """Mean over the rollouts that have one."""


@dataclass
class Clock:
    """A reward function that notes when it was called and what it was given."""

    reward: RewardFunction | None = None
    """What the rollouts are really rewarded by."""
    laps: list[Lap] = field(default_factory=list)

    def start(self, reward: RewardFunction) -> None:
        """Forget the laps, and reward by `reward` from now on."""
        self.reward, self.laps = reward, []

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]:
        """The rewards, and one more lap."""
        if self.reward is None:
            fail(CALLER, "the clock must be started before it rewards", "a call", "This is a bug; please report it.")
        rewards = self.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        known = [reward for reward in rewards if reward is not None]
        self.laps.append(
            Lap(
                wall=time.perf_counter(),
                processor=time.process_time(),
                rollouts=len(completions),
                completion_tokens=statistics.fmean(len(ids) for ids in completion_ids),
                reward=statistics.fmean(known) if known else 0.0,
            )
        )
        return rewards


CLOCK = Clock()
"""The one of this process: a trainer that takes its reward by name finds it here."""


@dataclass(frozen=True)
class Timed:
    """A training run as the clock saw it, the first steps left out."""

    seconds: float
    """Of one step, on the clock of the wall."""
    processor_seconds: float
    """Of one step, on the processor."""
    sampling: float
    """Share of the time from the prompts to the rewards."""
    updating: float
    """Share of the time from the rewards to the new weights; the rest is bookkeeping and writing."""
    completion_tokens: float
    reward: float


def timed(laps: Sequence[Lap], sampling: Sequence[float], updating: Sequence[float], *, skipped: int) -> Timed:
    """What the laps after the first `skipped` steps come to.

    Args:
        laps: One for each of `n` steps.
        sampling: `n` times in seconds.
        updating: `n` times in seconds.
        skipped: Steps that warm up. Measured are the `n - 1 - skipped` periods from one reward to the next after them.
    """
    first, last, periods = laps[skipped], laps[-1], len(laps) - 1 - skipped
    wall = last.wall - first.wall
    return Timed(
        seconds=wall / periods,
        processor_seconds=(last.processor - first.processor) / periods,
        sampling=sum(sampling[skipped + 1 :]) / wall,
        updating=sum(updating[skipped:-1]) / wall,
        completion_tokens=statistics.fmean(lap.completion_tokens for lap in laps[skipped + 1 :]),
        reward=statistics.fmean(lap.reward for lap in laps[skipped + 1 :]),
    )


def require_laps(laps: Sequence[Lap], *, steps: int, rollouts: int) -> None:
    """Raise unless there was one lap a step with the same number of rollouts in each: else nothing is comparable."""
    found = sorted({lap.rollouts for lap in laps})
    if len(laps) != steps or found != [rollouts]:
        fail(
            CALLER,
            f"a trainer must reward {rollouts} rollouts in each of {steps} steps",
            f"{len(laps)} calls with {', '.join(map(str, found)) or 'no'} rollouts",
            "This is a bug; please report it.",
        )
