"""Accuracy of the greedy policy on test problems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scoregram.policy.config import SamplingConfig
from scoregram.policy.load import Policy
from scoregram.tasks.task import Problem, Task
from scoregram.training.collecting import collect

BATCH = 256
"""Test problems sampled at a time."""


@dataclass(frozen=True)
class Evaluation:
    """Greedy rewards on test problems."""

    rewards: tuple[float, ...]
    """One per problem, in the order of the problems; `nan` without a reward."""

    @property
    def accuracy(self) -> float:
        """Share of problems with a reward of 1 or more."""
        return sum(reward >= 1 for reward in self.rewards) / len(self.rewards)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson interval of the accuracy at 95 %."""
        n, z = len(self.rewards), 1.959963984540054
        centre = (self.accuracy + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(self.accuracy * (1 - self.accuracy) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return centre - half, centre + half

    def scalars(self) -> dict[str, float]:
        """What goes to the metrics."""
        low, high = self.interval
        rewards = [reward for reward in self.rewards if not math.isnan(reward)]
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/reward": sum(rewards) / len(rewards) if rewards else math.nan,
            "eval/problems": len(self.rewards),
        }


def evaluate(policy: Policy, task: Task, problems: Sequence[Problem], sampling: SamplingConfig) -> Evaluation:
    """Greedy rollouts of the problems, rewarded."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    rewards: list[float] = []
    for start in range(0, len(problems), BATCH):
        here = problems[start : start + BATCH]
        found = collect(policy, task, here, group_size=1, sampling=greedy, generator=None)
        pairs = zip(found.rewards[:, 0].tolist(), found.observed[:, 0].tolist(), strict=True)
        rewards += [reward if observed else math.nan for reward, observed in pairs]
    return Evaluation(tuple(rewards))
