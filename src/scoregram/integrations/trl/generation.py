"""The rollouts of a TRL trainer in our words: groups side by side as they were made, and laid out for one pass."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.trl.processes import Processes

PICTURES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "spatial_shapes")
"""What a batch holds when its prompts have images."""
NAMES = ("prompt_id", "problem_id", "question_id", "task_id", "uid", "id")
"""Columns of a dataset that name a prompt, the first one found is taken."""


@dataclass(frozen=True)
class RewardCall:
    """What the trainer's reward functions were given, and what they gave."""

    inputs: Sequence[Mapping[str, Any]]
    """The row of the dataset behind every rollout."""
    completion_ids: Sequence[Sequence[int]]
    """Completion tokens of every rollout, before truncated ones were masked."""
    rewards: Tensor
    """`(N, F)`, one column for each reward function, rollouts of all processes; `nan` where it gave None."""


@dataclass(frozen=True)
class Generation:
    """`N = P·R` rollouts that were generated together, before the trainer shuffled them.

    Several processes have a slice of it each, which may begin and end within a group.
    """

    serial: int
    """Number of the generation since `attach`."""
    policy_step: int
    """Optimisation steps that were done when they were generated."""
    group_size: int
    prompt_ids: Tensor
    """`(N, P)`, padded on the left."""
    prompt_mask: Tensor
    completion_ids: Tensor
    """`(N, C)`, padded on the right."""
    completion_mask: Tensor
    """`(N, C)`: what is attended to; all 0 for a truncated rollout that the trainer masks."""
    loss_mask: Tensor
    """`(N, C)` bool: the tokens that the policy chose and that the loss counts; no tokens of tools."""
    advantages: Tensor
    """`(N,)` or `(N, C)`, as the loss takes them."""
    rewards: Tensor
    """`(N,)` float64: weighted sum over the reward functions; `nan` if none of them judged the rollout."""
    by_function: Mapping[str, Tensor]
    """`(N,)` raw rewards of every reward function."""
    sampled: Sequence[Sequence[int]]
    """Completion tokens of every rollout, also of those that are masked."""
    prompt_names: Sequence[str]
    """`N` names, one and the same within a group."""
    behaviour: Tensor | None
    """`(N, C)` log-probabilities of another engine that sampled; None if it was the model itself."""
    has_pictures: bool

    @property
    def size(self) -> int:
        """Number of rollouts."""
        return len(self.prompt_ids)

    @property
    def token_lengths(self) -> Tensor:
        """`(N,)` tokens that the policy chose, also of rollouts that are masked."""
        counted = self.loss_mask.sum(1).cpu()
        return torch.where(counted > 0, counted, torch.tensor([len(ids) for ids in self.sampled]))

    def on(self, device: torch.device) -> "Generation":
        """The same with its tensors on a device; rewards are on the CPU always."""
        return replace(
            self,
            prompt_ids=self.prompt_ids.to(device),
            prompt_mask=self.prompt_mask.to(device),
            completion_ids=self.completion_ids.to(device),
            completion_mask=self.completion_mask.to(device),
            loss_mask=self.loss_mask.to(device),
            advantages=self.advantages.detach().to(device),
            behaviour=None if self.behaviour is None else self.behaviour.to(device),
        )

    def prompt_of(self, row: int) -> list[int]:
        """Prompt tokens of one rollout."""
        return self.prompt_ids[row][self.prompt_mask[row].bool()].tolist()

    @property
    def masked_out(self) -> Tensor:
        """`(N,)`, true for rollouts of which the loss counts no token."""
        return ~self.loss_mask.any(1).cpu()

    @property
    def mean_advantages(self) -> Tensor:
        """`(N,)` float64; the mean over counted tokens where every token has its own."""
        if self.advantages.ndim == 1:
            return self.advantages.detach().double().cpu()
        counted = self.loss_mask.double()
        return ((self.advantages.double() * counted).sum(1) / counted.sum(1).clamp(min=1)).detach().cpu()


def generation_of(
    trainer: Any, output: Mapping[str, Any], call: RewardCall | None, serial: int, processes: Processes
) -> Generation:
    """What the trainer has just generated in this process.

    Args:
        trainer: The trainer.
        output: What its `_generate_and_score_completions` returned.
        call: The call of its reward functions in between.
        serial: Number of the generation.
        processes: Which slice it is; rewards come from all processes.

    Raises:
        ScoregramError: If the reward functions were not called, or the rollouts are not whole groups.
    """
    size, group_size = len(output["prompt_ids"]), int(trainer.num_generations)
    everywhere = size * processes.count
    if call is None or len(call.rewards) != everywhere:
        got = "no call" if call is None else f"{len(call.rewards)} rewards for {everywhere} rollouts"
        fail("attach", "_calculate_rewards must give one reward per rollout", got, "Let the trainer call it.")
    if everywhere % group_size:
        fail("attach", f"a generation must hold whole groups of {group_size}", everywhere, "Change the batch size.")
    rewards = call.rewards[size * processes.rank : size * (processes.rank + 1)]
    completion_mask = output["completion_mask"]
    counted = completion_mask * output["tool_mask"] if "tool_mask" in output else completion_mask
    return Generation(
        serial=serial,
        policy_step=int(trainer.state.global_step),
        group_size=group_size,
        prompt_ids=output["prompt_ids"],
        prompt_mask=output["prompt_mask"],
        completion_ids=output["completion_ids"],
        completion_mask=completion_mask,
        loss_mask=counted.bool(),
        advantages=output["advantages"],
        rewards=weighted_rewards(trainer, rewards),
        by_function=dict(zip(trainer.reward_func_names, rewards.detach().double().cpu().unbind(1), strict=True)),
        sampled=call.completion_ids,
        prompt_names=prompt_names(call.inputs, output["prompt_ids"], output["prompt_mask"]),
        behaviour=output.get("sampling_per_token_logps"),
        has_pictures=any(output.get(name) is not None for name in PICTURES),
    )


def weighted_rewards(trainer: Any, rewards: Tensor) -> Tensor:
    """`(N,)` weighted sum of the rewards that were given, `nan` if there is none."""
    given = rewards.detach().double().cpu()
    total = (given * trainer.reward_weights.detach().double().cpu()).nansum(1)
    return torch.where(given.isnan().all(1), torch.nan, total)


def prompt_names(inputs: Sequence[Mapping[str, Any]], prompt_ids: Tensor, prompt_mask: Tensor) -> list[str]:
    """`N` names of prompts: what the dataset calls them, or else a hash of their tokens."""
    column = next((name for name in NAMES if name in inputs[0]), None)
    if column is not None:
        return [str(given[column]) for given in inputs]
    rows = zip(prompt_ids.cpu(), prompt_mask.cpu().bool(), strict=True)
    tokens = [repr(ids[mask].tolist()) for ids, mask in rows]
    return ["prompt/" + hashlib.sha1(prompt.encode()).hexdigest()[:12] for prompt in tokens]


@dataclass(frozen=True)
class Laid:
    """Rollouts as one batch for the model: prompt and completion in one row."""

    input_ids: Tensor
    """`(n, T)`"""
    completion_mask: Tensor
    """`(n, T)` bool."""
    attention_mask: Tensor
    """`(n, T)`"""
    coefficients: Tensor
    """`(n, T)`: `∂L/∂log π` of every token; 1 where none are known."""

    def on(self, device: torch.device) -> "Laid":
        """The same on a device."""
        return Laid(
            self.input_ids.to(device),
            self.completion_mask.to(device),
            self.attention_mask.to(device),
            self.coefficients.to(device),
        )

    def at(self, rows: slice | Tensor) -> "Laid":
        """Some of the rows."""
        return Laid(
            self.input_ids[rows], self.completion_mask[rows], self.attention_mask[rows], self.coefficients[rows]
        )


def laid_out(generation: Generation, coefficients: Tensor | None, *, compact: bool) -> Laid:
    """A generation as one batch.

    Args:
        generation: The rollouts.
        coefficients: `(N, C)`, or None for ones.
        compact: Move the padding of prompts to the right, so that rows are as short as their tokens; right for every
            model to which only distances between tokens matter.
    """
    ids = torch.cat([generation.prompt_ids, generation.completion_ids], 1)
    attention = torch.cat([generation.prompt_mask, generation.completion_mask], 1)
    ahead = generation.prompt_ids.shape[1]
    mask = F.pad(generation.loss_mask, (ahead, 0))
    weights = mask.double() if coefficients is None else F.pad(coefficients.double(), (ahead, 0))
    if compact:
        longest = int(attention.sum(1).max())
        order = (attention == 0).long().argsort(dim=1, stable=True)[:, :longest]
        ids, attention, mask, weights = (value.gather(1, order) for value in (ids, attention, mask, weights))
    return Laid(ids, mask, attention, weights)


def together(parts: Sequence[Laid]) -> Laid:
    """Batches under each other, the shorter ones padded on the right."""
    longest = max(part.input_ids.shape[1] for part in parts)

    def under(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([F.pad(value, (0, longest - value.shape[1])) for value in values])

    return Laid(
        under([part.input_ids for part in parts]),
        under([part.completion_mask for part in parts]),
        under([part.attention_mask for part in parts]),
        under([part.coefficients for part in parts]),
    )
