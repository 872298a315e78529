"""Accuracy on test problems: of greedy rollouts, and of rollouts sampled as in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from scoregram.policy import Policy, SamplingConfig
from scoregram.reading import GREEDY_TEST, SAMPLED_TEST
from scoregram.runs import GroupRecord
from scoregram.tasks import Problem, Task
from scoregram.training.collect import collect

EVALUATION_BATCH = 512
"""Rollouts sampled at a time."""


@dataclass(frozen=True)
class Evaluation:
    """Rewards on test problems."""

    rewards: tuple[float, ...]
    """Greedy, one per problem, in the order of the problems; `nan` without a reward."""
    sampled: tuple[tuple[float, ...], ...] = ()
    """Of the rollouts sampled for each problem; empty if none were sampled."""

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
        """The scalars `eval/…` of the metrics."""
        low, high = self.interval
        drawn = [reward for group in self.sampled for reward in group]
        sampled = {"eval/sampled_accuracy": sum(reward >= 1 for reward in drawn) / len(drawn)} if drawn else {}
        rewards = [reward for reward in self.rewards if not math.isnan(reward)]
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/reward": sum(rewards) / len(rewards) if rewards else math.nan,
            "eval/problems": len(self.rewards),
            **sampled,
        }


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    sampling: SamplingConfig,
    *,
    samples: int = 0,
    generator: torch.Generator | None = None,
) -> Evaluation:
    """Rewards of one greedy rollout of each problem, and of `samples` more drawn as in training."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    rewards: list[float] = []
    sampled: list[tuple[float, ...]] = []
    for start in range(0, len(problems), EVALUATION_BATCH):
        here = problems[start : start + EVALUATION_BATCH]
        rewards += collect(policy, task, here, group_size=1, sampling=greedy, generator=None).rewards.tolist()
        per_batch = max(1, EVALUATION_BATCH // max(samples, 1))
        for first in range(0, len(here) if samples else 0, per_batch):
            part = here[first : first + per_batch]
            rollouts = collect(policy, task, part, group_size=samples, sampling=sampling, generator=generator)
            sampled += map(tuple, rollouts.reward_grid.tolist())
    return Evaluation(tuple(rewards), tuple(sampled))


def evaluation_records(step: int, problems: Sequence[Problem], evaluation: Evaluation) -> list[GroupRecord]:
    """Groups of kind `test` and `test, greedy` with the rewards of an evaluation; nothing without sampled rollouts."""
    kinds = {SAMPLED_TEST: evaluation.sampled, GREEDY_TEST: tuple((reward,) for reward in evaluation.rewards)}
    return [
        GroupRecord(
            step=step,
            kind=kind,
            prompt_id=problem.id,
            rewards=torch.tensor(rewards, dtype=torch.float64),
            lengths=torch.zeros(len(rewards), dtype=torch.int64),
            advantages=torch.zeros(len(rewards), dtype=torch.float64),
        )
        for kind, each in (kinds if evaluation.sampled else {}).items()
        for problem, rewards in zip(problems, each, strict=True)
    ]
