"""True advantages of tokens, with which credit is compared, and the change of log-probability by the update.

The true advantage of a token is `V(prefix with it) − V(prefix before it)` under the policy before the update. There are
two sources of values `V`. `SolutionValues` is exact: the probability that the policy writes the right solution. It
needs a task with one right solution and a policy with one token per character. `SampledValues` is the mean reward of
fresh rollouts from the start of each segment, with its variance. It works for any task without an environment. Neither
changes the run: the rollouts of `SampledValues` are a cost of measuring and count in no budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy import Policy, token_log_probs
from scoregram.reading import CreditTruth, Step
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Task
from scoregram.training.config import TrainConfig
from scoregram.training.inputs import PrefixRollouts, completion_places
from scoregram.training.update import Updater

LARGEST_VOCABULARY = 4096
"""Vocabularies up to this size are searched for tokens of several characters; larger ones always have some."""


@runtime_checkable
class TruthSource(Protocol):
    """Computes or estimates the true advantages of the tokens of a step."""

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """The true advantages under the current policy, which sampled these rollouts."""
        ...


@dataclass
class SolutionValues:
    """Exact values where one right solution exists: `V(prefix) = π(rest of the right solution | prefix)`.

    The value of a prefix is the probability that the policy continues it to the right solution, token by token, and
    then stops; 0 once a token differs. One forward pass over the right solution of every problem gives all values. This
    definition is ours. It differs from the expected reward by completions that reach the right answer through an error;
    `CreditTruth.agreement` is the share of the rollouts for which the two agree.
    """

    policy: Policy
    task: Task
    temperature: float
    limit: int
    """Longest completion, in tokens."""

    def truth(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> CreditTruth:
        """One unit for each completion token of a rollout with a reward."""
        solutions = [self.solution_tokens(problem) for problem in problems]
        rows, lengths = rollouts.token_ids(), rollouts.prompt_lengths.tolist()
        prompts = [rows[here.start][: lengths[here.start]] for here in rollouts.group_slices()]
        values = self.values(prompts, solutions)
        unit_of = torch.full(rollouts.input_ids.shape, -1, dtype=torch.int64)
        owners, rewards, stops = rollouts.group_ids.tolist(), rollouts.rewards.tolist(), set(self.policy.stop_ids)
        gains: list[float] = []
        agree: list[bool] = []
        for row, places in enumerate(completion_places(rollouts)):
            if not places or math.isnan(rewards[row]):
                continue
            known, written = values[owners[row]], rollouts.input_ids[row, places].tolist()
            right = matching_tokens(written, solutions[owners[row]], stops)
            after = [known[min(place, len(known) - 1)] if place <= right else 0.0 for place in range(len(written) + 1)]
            unit_of[row, places] = torch.arange(len(gains), len(gains) + len(places))
            gains += [late - early for early, late in pairwise(after)]
            agree.append(after[-1] == rewards[row])
        return CreditTruth(
            unit_of=unit_of,
            advantages=torch.tensor(gains, dtype=torch.float64),
            agreement=sum(agree) / len(agree) if agree else math.nan,
        )

    def solution_tokens(self, problem: Problem) -> list[int]:
        """Tokens of the right solution, without the stop token."""
        assert self.task.solution is not None
        return list(self.policy.tokenizer(self.task.solution(problem), add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def values(self, prompts: Sequence[Sequence[int]], solutions: Sequence[Sequence[int]]) -> list[list[float]]:
        """For every prompt the value before each token of its right solution and stop token, and 1 after the last."""
        by_stop = torch.stack([self.log_probs(prompts, solutions, stop) for stop in self.policy.stop_ids])
        found = []
        for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
            end = len(prompt) + len(solution)
            tokens = [*by_stop[0, row, len(prompt) : end].tolist(), float(by_stop[:, row, end].logsumexp(0))]
            rest = torch.tensor(tokens[: self.limit], dtype=torch.float64).flip(0).cumsum(0).flip(0).exp()
            is_possible = len(solution) <= self.limit
            found.append([*(rest if is_possible else torch.zeros_like(rest)).tolist(), float(is_possible)])
        return found

    def log_probs(self, prompts: Sequence[Sequence[int]], solutions: Sequence[Sequence[int]], stop: int) -> Tensor:
        """`(P, T)` log-probabilities of right solutions that end with this stop token."""
        rows = [[*prompt, *solution, stop] for prompt, solution in zip(prompts, solutions, strict=True)]
        device = next(self.policy.model.parameters()).device
        ids = torch.full((len(rows), max(map(len, rows))), self.policy.pad_id, dtype=torch.int64)
        real, scored = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
        for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            real[row, : len(tokens)] = True
            scored[row, len(prompt) : len(tokens)] = True
        with self.policy.computing():
            given = (ids.to(device), real.to(device), scored.to(device))
            return token_log_probs(self.policy.model, *given, temperature=self.temperature).double().cpu()


def matching_tokens(completion: Sequence[int], solution: Sequence[int], stops: set[int]) -> int:
    """How many tokens a completion shares with the right solution and its stop, from the start.

    Example:
        >>> matching_tokens([4, 1, 7], [4, 1, 5], {0}), matching_tokens([4, 1, 0], [4, 1], {0})
        (2, 3)
    """
    for place, token in enumerate(completion):
        is_right = token == solution[place] if place < len(solution) else place == len(solution) and token in stops
        if not is_right:
            return place
    return len(completion)


@dataclass
class SampledValues:
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
        return SampledValues(PrefixRollouts(policy, task, sampling, own, every_token=False, purpose="truth"))
    obstacle = exact_obstacle(config, policy, task)
    if obstacle is None:
        return SolutionValues(policy, task, config.temperature, sampling.max_new_tokens)
    if config.credit_truth == "exact":
        remedy = "Choose sampled, or train tiny on arithmetic."
        fail("train --credit-truth", "exact needs a task and a policy with one right token sequence", obstacle, remedy)
    return None


def exact_obstacle(config: TrainConfig, policy: Policy, task: Task) -> str | None:
    """Why exact values are not possible, None if they are."""
    if task.solution is None:
        return f"task {task.name}, which has many right solutions"
    if config.reward is not None:
        return f"reward {config.reward}, which may reward other solutions"
    if config.top_k or config.top_p < 1:
        return "top_k or top_p, which change the probabilities of tokens"
    size = len(policy.tokenizer)
    if size > LARGEST_VOCABULARY or any(len(policy.decode([token])) > 1 for token in range(size)):
        return "a tokenizer with several characters per token, which writes a solution in many ways"
    return None


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
