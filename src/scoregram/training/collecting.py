"""The rollouts of one step: prompts drawn, sampled and rewarded, in whole groups."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import mixed_groups
from scoregram.checks import fail
from scoregram.policy import Policy, Rollouts, SamplingConfig, sample
from scoregram.tasks import Problem, Task
from scoregram.types import Observed, PerPrompt, Rewards


@dataclass(frozen=True)
class Collected:
    """`P` groups of `R` rollouts with their rewards."""

    problems: Sequence[Problem]
    """`P` of them."""
    rollouts: Rollouts
    """`N = P·R`, group by group."""
    completions: Sequence[str]
    """`N` texts."""
    rewards: Rewards
    """`(P, R)` float64; 0 where unobserved."""
    observed: Observed
    """`(P, R)`, false where the reward function gave None."""

    @property
    def group_size(self) -> int:
        """Rollouts of one prompt."""
        return self.rewards.shape[1]

    @property
    def lengths(self) -> Tensor:
        """`(P, R)` completion tokens of every rollout."""
        return self.rollouts.lengths.cpu().view_as(self.rewards)

    @property
    def tokens(self) -> int:
        """Completion tokens of all rollouts."""
        return int(self.rollouts.lengths.sum())

    def kept(self, groups: Tensor) -> "Collected":
        """Only the groups for which the `(P,)` mask is true."""
        places = groups.nonzero().squeeze(1).tolist()
        rows = groups.repeat_interleave(self.group_size)
        return Collected(
            problems=[self.problems[place] for place in places],
            rollouts=rollouts_at(self.rollouts, rows),
            completions=[text for text, keep in zip(self.completions, rows.tolist(), strict=True) if keep],
            rewards=self.rewards[groups],
            observed=self.observed[groups],
        )


def collect(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> Collected:
    """Sample `group_size` rollouts of every problem and reward them.

    Raises:
        ScoregramError: A prompt that leaves no room for a completion, or a reward that is not a number.
    """
    prompts = [policy.encode_prompt(task.prompt(problem)) for problem in problems]
    refuse_long(prompts, problems, sampling, policy)
    with policy.computing():
        rollouts = sample(
            policy.model,
            prompts,
            rollouts_per_prompt=group_size,
            sampling=sampling,
            stop_ids=policy.stop_ids,
            pad_id=policy.pad_id,
            generator=generator,
        )
    ids = rollouts.completion_ids()
    completions = [policy.decode(row) for row in ids]
    each = [problem for problem in problems for _ in range(group_size)]
    given = task.rewards(each, completions, completion_ids=ids)
    observed = torch.tensor([value is not None for value in given])
    rewards = torch.tensor([0.0 if value is None else float(value) for value in given], dtype=torch.float64)
    shape = (len(problems), group_size)
    return Collected(problems, rollouts, completions, rewards.view(shape), observed.view(shape))


def greedy_rewards(policy: Policy, task: Task, problems: Sequence[Problem], sampling: SamplingConfig) -> PerPrompt:
    """`(P,)` reward of the greedy rollout of every problem."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    return collect(policy, task, problems, group_size=1, sampling=greedy, generator=None).rewards[:, 0]


def joined(parts: Sequence[Collected], pad_id: int) -> Collected:
    """Several collections as one, the shorter ones padded on the right."""
    if len(parts) == 1:
        return parts[0]
    return Collected(
        problems=[problem for part in parts for problem in part.problems],
        rollouts=joined_rollouts([part.rollouts for part in parts], pad_id),
        completions=[text for part in parts for text in part.completions],
        rewards=torch.cat([part.rewards for part in parts]),
        observed=torch.cat([part.observed for part in parts]),
    )


def mixed(collected: Collected) -> Tensor:
    """`(P,)`, true for groups whose rewards differ."""
    return mixed_groups(collected.rewards, observed=collected.observed)


def rollouts_at(rollouts: Rollouts, rows: Tensor) -> Rollouts:
    """The rollouts for which the `(N,)` mask is true, without columns that are padding for all of them."""
    at = rows.to(rollouts.input_ids.device)
    longest = max(int(rollouts.attention_mask[at].sum(1).max()), 1) if bool(at.any()) else 1
    return Rollouts(**{name: cut(value[at], longest) for name, value in tensors_of(rollouts).items()})


def joined_rollouts(parts: Sequence[Rollouts], pad_id: int) -> Rollouts:
    """Batches of rollouts under each other."""
    longest = max(part.input_ids.shape[1] for part in parts)
    made: dict[str, Tensor] = {}
    for name in tensors_of(parts[0]):
        values = [tensors_of(part)[name] for part in parts]
        fill = pad_id if name == "input_ids" else 0
        made[name] = torch.cat([padded(value, longest, fill) for value in values])
    return Rollouts(**made)


def tensors_of(rollouts: Rollouts) -> dict[str, Any]:
    """The fields of a batch by name."""
    return {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}


def cut(value: Tensor, longest: int) -> Tensor:
    """The first `longest` columns of a matrix; a vector as it is."""
    return value[:, :longest] if value.ndim == 2 else value


def padded(value: Tensor, longest: int, fill: int) -> Tensor:
    """A matrix with columns added on the right; a vector as it is."""
    return torch.nn.functional.pad(value, (0, longest - value.shape[1]), value=fill) if value.ndim == 2 else value


def refuse_long(
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
