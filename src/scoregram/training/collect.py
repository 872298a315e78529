"""Rollouts of given problems: sample a group for each and compute the rewards; and which problems come next.

The problems and the random numbers of a step depend only on the seed and on a position, not on earlier steps. So a run
that is resumed at a position continues with the same problems and draws as one that was never interrupted.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from scoregram.checks import fail
from scoregram.policy import (
    Branches,
    Episode,
    Policy,
    SamplingConfig,
    play_branches,
    play_episodes,
    sample_policy,
    start_episodes,
    token_log_probs,
)
from scoregram.rollouts import Rollouts, micro_batches
from scoregram.tasks import Problem, Task
from scoregram.types import PerPrompt


def collect(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int | Sequence[int],
    sampling: SamplingConfig,
    generator: torch.Generator | None,
    texts: Sequence[str] | None = None,
) -> Rollouts:
    """`group_size` rollouts of every problem, with texts and rewards; whole episodes if the task has an environment.

    `group_size` may differ between problems, in tasks without an environment. `texts` replaces the prompts of the task
    that the policy reads; the rewards are those of the problems.

    Raises:
        ScoregramError: If a prompt leaves no room for a whole completion, or a user's reward function fails its checks.
    """
    if task.environment is not None:
        assert isinstance(group_size, int)
        return collect_episodes(policy, task, problems, group_size=group_size, sampling=sampling, generator=generator)
    sizes = [group_size] * len(problems) if isinstance(group_size, int) else list(group_size)
    part = math.gcd(*sizes)  # the sampler takes one size: a larger group is its prompt several times
    read = [task.prompt(problem) for problem in problems] if texts is None else texts
    prompts = [policy.encode_prompt(text) for text in read]
    refuse_long_prompts(prompts, problems, sampling, policy)
    parts = [ids for ids, size in zip(prompts, sizes, strict=True) for _ in range(size // part)]
    rollouts = sample_policy(policy, parts, rollouts_per_prompt=part, sampling=sampling, generator=generator)
    ids = rollouts.completion_ids()
    completions = [policy.decode(row) for row in ids]
    each = [problem for problem, size in zip(problems, sizes, strict=True) for _ in range(size)]
    rewards = task.rewards(each, completions, completion_ids=ids)
    return replace(
        rollouts,
        group_ids=torch.arange(len(problems)).repeat_interleave(torch.tensor(sizes)),
        prompt_names=[problem.id for problem in problems],
        prompts=[problem.prompt for problem in problems] if texts is None else list(texts),
        answers=[problem.answer or None for problem in problems],
        completions=completions,
        rewards=torch.tensor([torch.nan if value is None else value for value in rewards], dtype=torch.float64),
    )


@torch.no_grad()
def rescored_rollouts(policy: Policy, rollouts: Rollouts, temperature: float, rows: int) -> Rollouts:
    """Rollouts of another distribution with the policy's own `log_probs`, `rows` at a time; 0 for all at once.

    `behaviour_log_probs` stay those of the distribution that they were drawn from.
    """
    parts = []
    for here in micro_batches(rollouts.count, rows):
        masks = rollouts.attention_mask[here], rollouts.completion_mask[here]
        with policy.computing():
            parts.append(token_log_probs(policy.model, rollouts.input_ids[here], *masks, temperature=temperature))
    return replace(rollouts, log_probs=torch.cat(parts).float())


@dataclass(frozen=True)
class Drafts:
    """The best draft of every problem."""

    texts: Sequence[str]
    """The draft itself, as the policy wrote it."""
    rewards: Sequence[float]
    """Its reward; `nan` where no draft of a problem has a reward."""
    extra_rollouts: int
    """Number of drafts, of all problems together."""

    def refinement_prompts(self, prompts: Sequence[str], layout: str) -> list[str]:
        """What the policy reads to refine them: `layout` with `{prompt}` and `{draft}` replaced in one go."""
        pairs = zip(prompts, self.texts, strict=True)
        return [
            re.sub(r"\{(prompt|draft)\}", lambda found, both=both: both[found[1] == "draft"], layout) for both in pairs
        ]


def best_drafts(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    count: int,
    sampling: SamplingConfig,
    generator: torch.Generator,
) -> Drafts:
    """The draft with the highest reward among `count` of every problem; of equal ones the first, as of missing ones."""
    drafts = collect(policy, task, problems, group_size=count, sampling=sampling, generator=generator)
    best = drafts.reward_grid.nan_to_num(nan=-torch.inf).argmax(dim=1)
    rows: list[int] = [here.start + int(place) for here, place in zip(drafts.group_slices(), best, strict=True)]
    return Drafts([drafts.completions[row] for row in rows], drafts.rewards[rows].tolist(), drafts.count)


def collect_episodes(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> Rollouts:
    """`group_size` episodes of every problem as transcripts, with the reward of every turn.

    Every episode has its own seed, drawn from `generator`; without a generator, the seed of a problem is always the
    same, so that greedy episodes can be compared between steps.

    Raises:
        ScoregramError: If a prompt leaves no room for a whole turn, or an environment breaks its interface.
    """
    groups = started_groups(policy, task, problems, group_size, sampling, generator)
    rollouts = play_episodes(policy, groups, sampling=sampling, max_turns=task.max_turns, generator=generator)
    return replace(
        rollouts,
        prompt_names=[problem.id for problem in problems],
        prompts=[problem.prompt for problem in problems],
        answers=[problem.answer or None for problem in problems],
    )


def collect_branches(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> Branches:
    """`group_size` candidates for every turn of one episode of each problem.

    A task without an environment has one turn, so its candidates are ordinary rollouts, and each is an episode.
    """
    if task.environment is None:
        size: dict[str, Any] = {"group_size": group_size, "sampling": sampling, "generator": generator}
        rollouts = collect(policy, task, problems, **size)
        return Branches(rollouts, [*range(len(problems))], rollouts)
    bases = [group[0] for group in started_groups(policy, task, problems, 1, sampling, generator)]
    branches = play_branches(
        policy,
        bases,
        candidates=group_size,
        sampling=sampling,
        max_turns=task.max_turns,
        generator=generator,
    )
    owners = branches.owners
    turns = [owners[:place].count(owner) for place, owner in enumerate(owners)]
    names = [f"{problems[owner].id}/turn-{turn}" for owner, turn in zip(owners, turns, strict=True)]
    texts = [problems[owner].prompt if turn == 0 else None for owner, turn in zip(owners, turns, strict=True)]
    return replace(branches, candidates=replace(branches.candidates, prompt_names=names, prompts=texts))


def started_groups(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    group_size: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> list[list[Episode]]:
    """`group_size` started episodes of every problem."""
    if generator is None:
        seeds = [[zlib.crc32(problem.id.encode())] * group_size for problem in problems]
    else:
        seeds = torch.randint(2**31, (len(problems), group_size), generator=generator).tolist()
    groups = start_episodes(policy, task, problems, seeds)
    refuse_long_prompts([group[0].ids for group in groups], problems, sampling, policy)
    return groups


def greedy_rewards(policy: Policy, task: Task, problems: Sequence[Problem], sampling: SamplingConfig) -> PerPrompt:
    """`(P,)` reward of the greedy rollout of every problem; `nan` where the reward function returned `None`."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    return collect(policy, task, problems, group_size=1, sampling=greedy, generator=None).rewards


def refuse_long_prompts(
    prompts: Sequence[Sequence[int]], problems: Sequence[Problem], sampling: SamplingConfig, policy: Policy
) -> None:
    """Raise for the first prompt that leaves no room for a whole completion."""
    new, context = sampling.max_new_tokens, policy.context
    for prompt, problem in zip(prompts, problems, strict=True):
        if len(prompt) + new > context:
            fail(
                "train",
                f"prompt and completion must fit into the context of {context} tokens",
                f"{len(prompt)} tokens of prompt {problem.id} and {new} of completion",
                "Lower max_new_tokens, or leave such prompts out.",
            )


def drawn_problems(problems: Sequence[Problem], position: int, count: int, seed: int) -> list[Problem]:
    """The problems at places `position … position + count - 1` of an endless sequence of shuffled epochs.

    Every epoch holds every problem once, in a different order.
    """
    size = len(problems)
    places = range(position, position + count)
    orders = {epoch: epoch_order(size, epoch, seed) for epoch in {place // size for place in places}}
    return [problems[orders[place // size][place % size]] for place in places]


@lru_cache(maxsize=4)
def epoch_order(size: int, epoch: int, seed: int) -> tuple[int, ...]:
    """A permutation of `0 … size-1`, the same for one epoch and seed."""
    return tuple(torch.randperm(size, generator=seeded_generator(seed, "order", epoch)).tolist())


def seeded_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """A fresh generator for one purpose and one number, such as a step; no two of them share a stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
