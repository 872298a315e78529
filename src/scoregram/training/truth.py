"""True advantages of tokens, with which credit is compared, and the change of log-probability by the update.

The true advantage of a token is `V(prefix with it) − V(prefix before it)` under the policy before the update. There are
two sources of values `V`. `ExactTruth` has the probability that the policy writes the right solution. It needs a task
with one right solution and a policy with one token per character. `SampledTruth` has the mean reward of fresh rollouts
from the start of each segment, with its variance. It works for any task without an environment. Neither changes the
run: the rollouts of `SampledTruth` are a cost of measuring and count in no budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.policy import Policy
from scoregram.reading import CreditTruth, Step
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Task
from scoregram.training.config import TrainConfig
from scoregram.training.input_source import completion_places
from scoregram.training.prefix_values import PrefixRollouts, Segments, SolutionValues, exact_obstacle, require_exact
from scoregram.training.update import Updater


@runtime_checkable
class TruthSource(Protocol):
    """Computes or estimates the true advantages of the tokens of a step."""

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """The true advantages under the current policy, which sampled these rollouts."""
        ...


@dataclass
class ExactTruth:
    """Exact values before and after every token. A unit is a token of a rollout with a reward."""

    values: SolutionValues

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """One unit for each completion token of a rollout with a reward."""
        unit_of = torch.full(rollouts.input_ids.shape, -1, dtype=torch.int64)
        gains: list[float] = []
        agree: list[bool] = []
        rewards, values = rollouts.rewards.tolist(), self.values.prefix_values(rollouts, problems)
        for row, places in enumerate(completion_places(rollouts)):
            if not places or math.isnan(rewards[row]):
                continue
            unit_of[row, places] = torch.arange(len(gains), len(gains) + len(places))
            gains += [late - early for early, late in pairwise(values[row])]
            agree.append(values[row][-1] == rewards[row])
        return CreditTruth(
            unit_of=unit_of,
            advantages=torch.tensor(gains, dtype=torch.float64),
            agreement=sum(agree) / len(agree) if agree else math.nan,
        )


@dataclass
class SampledTruth:
    """Values from fresh rollouts at the start of each segment. A unit is a segment, its advantage the gain in value.

    The value after the last segment is the reward of the rollout itself.
    """

    prefixes: PrefixRollouts

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """One unit for each segment of a rollout with a reward."""
        drawn = self.prefixes.draw(number, rollouts, problems)
        means = drawn.rewards.mean(1).tolist()
        noises = (drawn.rewards.var(1) / drawn.rewards.shape[1]).tolist()
        unit_of = torch.full(rollouts.input_ids.shape, -1, dtype=torch.int64)
        gains: list[float] = []
        variances: list[float] = []
        rewards = rollouts.rewards.tolist()
        for row, places in enumerate(completion_places(rollouts)):
            if not places or math.isnan(rewards[row]):
                continue
            inside = drawn.starts[row, places]
            unit_of[row, places] = inside.cumsum(0) - 1 + len(gains)
            before = [int(prefix) for prefix in drawn.prefix_of[row, places][inside]]
            values = [*(means[prefix] for prefix in before), rewards[row]]
            noise = [*(noises[prefix] for prefix in before), 0.0]
            gains += [late - early for early, late in pairwise(values)]
            variances += [early + late for early, late in pairwise(noise)]
        return CreditTruth(
            unit_of=unit_of,
            advantages=torch.tensor(gains, dtype=torch.float64),
            variances=torch.tensor(variances, dtype=torch.float64),
            rollouts=self.prefixes.extra_rollouts or 0,
        )


def truth_source(config: TrainConfig, policy: Policy, task: Task) -> TruthSource | None:
    """The source that the config asks for; None for `none`, and for `auto` if exact values are not possible.

    Raises:
        ScoregramError: If exact values are asked for and not possible; the error says why.
    """
    sampling = config.sampling(task.max_new_tokens)
    if config.credit_truth == "none":
        return None
    if config.credit_truth == "sampled":
        own = replace(config, prefix_rollouts=config.truth_rollouts)
        segments = Segments(policy, task, own, every_token=False)
        return SampledTruth(PrefixRollouts(policy, task, sampling, own, segments, purpose="truth"))
    if config.credit_truth == "exact":
        require_exact(
            config, policy, task, option="credit-truth", remedy="Choose sampled, or train tiny on arithmetic."
        )
    elif exact_obstacle(config, policy, task) is not None:
        return None
    return ExactTruth(SolutionValues(policy, task, config.temperature, sampling.max_new_tokens))


@dataclass(frozen=True, eq=False)
class Observation:
    """True advantages and log-probabilities of a step before its update; None if they are not wanted."""

    truth: CreditTruth | None
    log_probs: Tensor | None
    """`(N, T)`."""


@dataclass(frozen=True)
class CreditObserver:
    """Observes true advantages, and the push of the update: `log π_after − log π_before` of every token.

    The push is the change that the update made, with the optimiser's momentum, scaling and clipping, on the rollouts of
    the step itself. For a small step along the gradient it is `η ⟨∇log π_it, ĝ⟩`.
    """

    updater: Updater
    """Computes log-probabilities."""
    source: TruthSource | None
    """Of true advantages; None if they are not wanted."""
    push: bool
    """Whether the push is wanted."""

    def before(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> Observation:
        """True advantages and log-probabilities; to be called before the update."""
        truth = None if self.source is None else self.source.truth(number, rollouts, problems)
        return Observation(truth, self.updater.all_log_probs(rollouts) if self.push else None)

    def after(self, step: Step, seen: Observation) -> Step:
        """The step with what was observed; to be called after the update."""
        push = None if seen.log_probs is None else self.updater.all_log_probs(step.rollouts) - seen.log_probs
        return replace(step, truth=seen.truth, push=push)
