"""True advantages of tokens, with which credit is compared, and the change of log-probability by the update.

The true advantage of a token is `V(prefix with it) − V(prefix before it)` under the policy before the update. There are
three sources of values `V`. `ExactTruth` has the probability that the policy writes the right solution. It needs a task
with one right solution and a policy with one token per character. `SampledTruth` has the mean reward of fresh rollouts
from the start of each segment, with its variance. It works for any task without an environment. `TurnTruth` has the
mean of the rewards to come in fresh episodes that continue the history before each turn. None changes the run: fresh
rollouts are a cost of measuring and count in no budget.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy import Episode, Policy, SamplingConfig, play_on, replayed_episode
from scoregram.reading import CreditTruth, Step
from scoregram.rollouts import Rollouts, micro_batches
from scoregram.tasks import Problem, Task
from scoregram.training.collect import seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.credit import turns_of_tokens
from scoregram.training.input_source import completion_places
from scoregram.training.prefix_values import (
    EXACT_TRUTH_REMEDY,
    ROWS_SAMPLED_AT_ONCE,
    PrefixRollouts,
    Segments,
    SolutionValues,
    exact_obstacle,
    require_exact,
)
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


MOST_REPLAYS = 1000
"""Fresh episodes with the turns of a history until one must have its observations too."""


@dataclass(frozen=True)
class TurnHistory:
    """What the policy has read and written before a turn."""

    problem: int
    """Place of its problem."""
    ids: tuple[int, ...]
    """All its tokens."""
    turns: tuple[tuple[int, ...], ...]
    """Those of each turn."""


@dataclass
class TurnTruth:
    """Values from fresh episodes that continue the history before each turn. A unit is a turn of an episode.

    The true advantage of turn `h` is `r_h + V(history after it) − V(history before it)`, where `V` is the expected sum
    of the rewards to come, and 0 after the last turn; its reward includes the outcome. Equal histories share their
    fresh episodes, and all others have their own, so that the noise of two values is independent. A fresh environment
    with a seed of its own repeats the turns of the history. If it answers by chance, seeds are drawn until the answers
    are those of the history.
    """

    policy: Policy
    task: Task
    sampling: SamplingConfig
    config: TrainConfig

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """One unit for each turn of an episode with a reward."""
        histories: dict[TurnHistory, int] = {}
        befores: list[tuple[int, list[int]]] = []
        for row, of_row in enumerate(histories_of(rollouts)):
            if not math.isnan(float(rollouts.rewards[row])):
                befores.append((row, [histories.setdefault(one, len(histories)) for one in of_row]))
        returns = self.returns(number, list(histories), problems)
        means, noises = returns.mean(1).tolist(), (returns.var(1) / returns.shape[1]).tolist()
        unit_of = torch.full(rollouts.input_ids.shape, -1, dtype=torch.int64)
        mask, turns, rewards = rollouts.completion_mask.cpu(), turns_of_tokens(rollouts), rollouts.turn_rewards.tolist()
        gains: list[float] = []
        variances: list[float] = []
        for row, before in befores:
            unit_of[row] = torch.where(mask[row], turns[row] + len(gains), -1)
            values, noise = [*(means[one] for one in before), 0.0], [*(noises[one] for one in before), 0.0]
            gains += [paid + late - early for paid, (early, late) in zip(rewards[row], pairwise(values), strict=False)]
            variances += [early + late for early, late in pairwise(noise)]
        return CreditTruth(
            unit_of=unit_of,
            advantages=torch.tensor(gains, dtype=torch.float64),
            variances=torch.tensor(variances, dtype=torch.float64),
            rollouts=returns.numel(),
        )

    def returns(self, number: int, histories: Sequence[TurnHistory], problems: Sequence[Problem]) -> Tensor:
        """`(histories, truth_rollouts)` float64 rewards to come of fresh episodes that continue each history."""
        copies, generator = self.config.truth_rollouts, seeded_generator(self.config.seed, "truth", number)
        found: list[list[float]] = []
        for here in micro_batches(len(histories), max(1, ROWS_SAMPLED_AT_ONCE // copies)):
            part = histories[here]
            groups = [[self.replayed(one, problems, generator) for _ in range(copies)] for one in part]
            limits = {"sampling": self.sampling, "max_turns": self.task.max_turns}
            play_on(self.policy, groups, generator=generator, **limits)
            for one, group in zip(part, groups, strict=True):
                found.append([sum(episode.rewards[len(one.ids) :]) for episode in group])
        return torch.tensor(found, dtype=torch.float64).view(len(histories), copies)

    def replayed(self, history: TurnHistory, problems: Sequence[Problem], generator: torch.Generator) -> Episode:
        """A fresh episode with this history.

        Raises:
            ScoregramError: If none of `MOST_REPLAYS` fresh environments gives its observations.
        """
        problem = problems[history.problem]
        for _ in range(MOST_REPLAYS):
            seed = int(torch.randint(2**31, (1,), generator=generator))
            episode = replayed_episode(self.policy, self.task, problem, seed, history.turns, history.ids)
            if episode is not None:
                break
        else:
            got = f"none in {MOST_REPLAYS} tries for {len(history.turns)} turns of {problem.id}"
            requirement = "a fresh environment must repeat the observations of a history"
            fail("train --credit-truth", requirement, got, "Leave it out: these observations are too random.")
        return episode


def histories_of(rollouts: Rollouts) -> Iterator[list[TurnHistory]]:
    """The history before each turn, for every rollout."""
    ids, owners, turn_of = rollouts.input_ids.tolist(), rollouts.group_ids.tolist(), turns_of_tokens(rollouts).tolist()
    for row, places in enumerate(completion_places(rollouts)):
        turns: list[tuple[int, ...]] = []
        found: list[TurnHistory] = []
        for _, turn in groupby(places, key=turn_of[row].__getitem__):
            own = list(turn)
            found.append(TurnHistory(owners[row], tuple(ids[row][: own[0]]), tuple(turns)))
            turns.append(tuple(ids[row][place] for place in own))
        yield found


def truth_source(config: TrainConfig, policy: Policy, task: Task) -> TruthSource | None:
    """The source that the config asks for; None for `none`, and for `auto` if exact values are not possible.

    Raises:
        ScoregramError: If exact values are asked for and not possible; the error says why.
    """
    sampling = config.sampling(task.max_new_tokens)
    if config.credit_truth == "none":
        return None
    if config.credit_truth == "sampled" and task.environment is not None:
        return TurnTruth(policy, task, sampling, config)
    if config.credit_truth == "sampled":
        own = replace(config, prefix_rollouts=config.truth_rollouts)
        segments = Segments(policy, task, own, every_token=False)
        return SampledTruth(PrefixRollouts(policy, task, sampling, own, segments, purpose="truth"))
    if config.credit_truth == "exact":
        require_exact(config, policy, task, option="credit-truth", remedy=EXACT_TRUTH_REMEDY)
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
