"""One generation of a TRL trainer, as `Rollouts`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.checks import fail
from scoregram.distributed import Processes
from scoregram.integrations.trl.support import answer_column, has_relative_positions, is_rloo, unwrapped_model
from scoregram.rollouts import Rollouts, concatenated_rollouts

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "spatial_shapes")
"""Keys of a batch whose prompts have images."""
NAME_COLUMNS = ("prompt_id", "problem_id", "question_id", "task_id", "uid", "id")
"""Columns of a dataset that name a prompt; the first one that exists is used."""


@dataclass(frozen=True)
class RewardCall:
    """One call of the trainer's reward functions: arguments and result."""

    inputs: Sequence[Mapping[str, Any]]
    """The dataset row of every rollout."""
    completion_ids: Sequence[Sequence[int]]
    """Completion tokens of every rollout, before truncated ones were masked."""
    rewards: Tensor
    """`(N, F)`: a column for each reward function, rollouts of all processes; `nan` where a function returned None."""
    log_probs: Sequence[Tensor] = ()
    """`(N, C)` log-probabilities of this process's completions that the trainer computed before the call: those of its
    policy, then, if it has a KL term, those of the reference."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation:
    """`N = P·R` rollouts that TRL generated together, before it shuffled them.

    `rollouts` holds them as rows; the other tensors hold them as TRL lays them out, in the same order, because its loss
    and custom estimators use that layout. With several processes each has a slice of a generation, which may begin and
    end inside a group.
    """

    serial: int
    """Number of the generation since `attach`."""
    policy_step: int
    """Number of optimisation steps before it was generated."""
    group_size: int
    """`R`."""
    rollouts: Rollouts
    """The same rollouts, prompt and completion in one row; rewards are `nan` where no function gave one."""
    columns: Tensor
    """`(N, T)`: for every token of `rollouts` its column in TRL's layout, prompts and completions side by side."""
    prompt_ids: Tensor
    """`(N, P)`, padded on the left."""
    prompt_mask: Tensor
    """`(N, P)`: tokens of the prompt, not padding."""
    completion_ids: Tensor
    """`(N, C)`, padded on the right."""
    completion_mask: Tensor
    """`(N, C)`: tokens that TRL attends to; all 0 for a truncated rollout that it masks out."""
    loss_mask: Tensor
    """`(N, C)` bool: tokens that the policy chose and that the loss counts; no tool tokens."""
    advantages: Tensor
    """`(N,)` or `(N, C)`, as the loss takes them."""
    has_images: bool = False
    """Whether its prompts have images; such a generation is not measured."""

    @property
    def size(self) -> int:
        """`N`."""
        return len(self.prompt_ids)

    @property
    def rewards(self) -> Tensor:
        """`(N,)` float64: what the trainer turns into advantages, see `trained_rewards`; `nan` without a reward."""
        return self.rollouts.rewards

    @property
    def mean_advantages(self) -> Tensor:
        """`(N,)` float64; the mean over counted tokens if every token has its own advantage."""
        if self.advantages.ndim == 1:
            return self.advantages.detach().double().cpu()
        counted = self.loss_mask.double()
        return ((self.advantages.double() * counted).sum(1) / counted.sum(1).clamp(min=1)).detach().cpu()

    def in_rows(self, values: Tensor) -> Tensor:
        """`(N, T)` from `(N, C)` values of completion tokens, as in `rollouts`; 0 for tokens that do not count."""
        beside_prompts = F.pad(values, (self.prompt_ids.shape[1], 0))
        return torch.where(self.rollouts.completion_mask, beside_prompts.gather(1, self.columns), 0)

    def to(self, device: torch.device | str) -> "Generation":
        """The same with its tensors on a device; rewards stay on the CPU."""
        tensors = {name: value.detach().to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, rollouts=self.rollouts.to(device), **tensors)


def generation_of(
    trainer: Any, output: Mapping[str, Any], call: RewardCall | None, serial: int, processes: Processes
) -> Generation:
    """The slice of a generation that TRL has just made in this process.

    `output` is the result of `_generate_and_score_completions`, `call` the call of the reward functions inside it.

    Raises:
        ScoregramError: If the reward functions were not called, or the rollouts are not whole groups.
    """
    size, group_size = len(output["prompt_ids"]), int(trainer.num_generations)
    everywhere, first_row = size * processes.count, size * processes.rank
    if call is None or len(call.rewards) != everywhere:
        got = "no call" if call is None else f"{len(call.rewards)} rewards for {everywhere} rollouts"
        remedy = "An override of _generate_and_score_completions must call it as TRL does."
        fail("attach", "_calculate_rewards must give one reward per rollout", got, remedy)
    if everywhere % group_size:
        fail("attach", f"a generation must hold whole groups of {group_size}", everywhere, "Change the batch size.")
    completion_mask = output["completion_mask"]
    loss_mask = (completion_mask * output["tool_mask"] if "tool_mask" in output else completion_mask).bool()
    columns, rollouts = trl_rows(
        output,
        loss_mask,
        torch.tensor([len(ids) for ids in call.completion_ids], device=completion_mask.device),
        group_ids=(torch.arange(size) + first_row) // group_size - first_row // group_size,
        moves_padding=has_relative_positions(unwrapped_model(trainer)),
    )
    rewards = call.rewards[first_row : first_row + size]
    stops = stop_ids(trainer)
    made = Generation(
        serial=serial,
        policy_step=int(trainer.state.global_step),
        group_size=group_size,
        rollouts=replace(
            rollouts,
            prompt_names=prompt_names(call.inputs, rollouts),
            answers=expected_answers(call.inputs, rollouts),
            rewards=trained_rewards(trainer, rewards, call.log_probs, completion_mask),
            reward_parts=dict(zip(trainer.reward_func_names, rewards.detach().double().cpu().unbind(1), strict=True)),
            finished=torch.tensor([bool(ids) and ids[-1] in stops for ids in call.completion_ids]),
        ),
        columns=columns,
        prompt_ids=output["prompt_ids"],
        prompt_mask=output["prompt_mask"],
        completion_ids=output["completion_ids"],
        completion_mask=completion_mask,
        loss_mask=loss_mask,
        advantages=output["advantages"],
        has_images=any(output.get(name) is not None for name in IMAGE_KEYS),
    )
    sampler = output.get("sampling_per_token_logps")  # set if another engine, such as vLLM, sampled
    if sampler is None:
        return made
    return replace(made, rollouts=replace(made.rollouts, behaviour_log_probs=made.in_rows(sampler)))


def trl_rows(
    output: Mapping[str, Tensor], loss_mask: Tensor, lengths: Tensor, *, group_ids: Tensor, moves_padding: bool
) -> tuple[Tensor, Rollouts]:
    """`(N, T)` column in TRL's layout of every token of a row, and the rows.

    Args:
        output: Has prompts, padded on the left, completions, padded on the right, and their masks.
        loss_mask: `(N, C)` bool: tokens that carry credit.
        lengths: `(N,)` sampled tokens.
        group_ids: `(N,)`.
        moves_padding: Move the padding of prompts to the right, so that rows are as short as their tokens; correct for
            every model with relative positions. Other models need the padding where TRL has it.
    """
    prompt_mask, attended = output["prompt_mask"].bool(), output["completion_mask"].bool()
    # TRL's mask is all 0 for a truncated rollout that it masks out; the row keeps its tokens
    places = torch.arange(attended.shape[1], device=attended.device)
    sampled = attended | (~attended.any(1, keepdim=True) & (places < lengths[:, None]))
    ids, real = torch.cat([output["prompt_ids"], output["completion_ids"]], 1), torch.cat([prompt_mask, sampled], 1)
    credited = F.pad(loss_mask, (prompt_mask.shape[1], 0))
    if moves_padding:
        columns = (~real).long().argsort(dim=1, stable=True)[:, : int(real.sum(1).max())]
    else:
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return columns, Rollouts(
        input_ids=ids.gather(1, columns),
        attention_mask=real.gather(1, columns),
        completion_mask=credited.gather(1, columns),
        prompt_lengths=prompt_mask.sum(1),
        group_ids=group_ids,
    )


def trained_rewards(trainer: Any, rewards: Tensor, log_probs: Sequence[Tensor], completion_mask: Tensor) -> Tensor:
    """`(N,)` float64 rewards that the trainer turns into advantages, `nan` if no function gave one.

    The weighted sum of the reward functions. `RLOOTrainer` clips it to `reward_clip_range` and subtracts the KL penalty
    `beta Σ_t (log π_t − log π_ref,t)` over the completion; `GRPOTrainer` has its KL term in the loss.

    Raises:
        ScoregramError: If the penalty is not 0 and the log-probabilities of policy and reference are not known.
    """
    total = weighted_rewards(trainer, rewards)
    if not is_rloo(trainer):
        return total
    if bounds := getattr(trainer, "reward_clip_range", None):
        total = total.clamp(min=bounds[0], max=bounds[1])
    beta = float(trainer.beta or 0.0)
    if not beta:
        return total
    if len(log_probs) != 2:
        remedy = "An override of _generate_and_score_completions must call that method as TRL does."
        requirement = "RLOOTrainer must ask for log-probabilities of policy and reference before its rewards"
        fail("attach", requirement, f"{len(log_probs)} results", remedy)
    policy, reference = (one.detach().double() for one in log_probs)
    return total - beta * ((policy - reference) * completion_mask).sum(1).cpu()


def weighted_rewards(trainer: Any, rewards: Tensor) -> Tensor:
    """`(N,)` weighted sum of the rewards that were given, `nan` if there is none."""
    given = rewards.detach().double().cpu()
    total = (given * trainer.reward_weights.detach().double().cpu()).nansum(1)
    return torch.where(given.isnan().all(1), torch.nan, total)


def prompt_names(inputs: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> list[str]:
    """A name for the prompt of every group: that of the dataset, or else a hash of its tokens."""
    firsts = [here.start for here in rollouts.group_slices()]
    column = next((name for name in NAME_COLUMNS if name in inputs[0]), None)
    if column is not None:
        return [str(inputs[row][column]) for row in firsts]
    tokens, lengths = rollouts.token_ids(), rollouts.prompt_lengths.tolist()
    return ["prompt/" + hashlib.sha1(repr(tokens[row][: lengths[row]]).encode()).hexdigest()[:12] for row in firsts]


def expected_answers(inputs: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> list[str | None]:
    """The expected answer of every group as text; empty if no column of the dataset holds one.

    None for an answer that is neither text nor a number.
    """
    column = answer_column(inputs[0])
    if column is None:
        return []
    answers = [inputs[here.start].get(column) for here in rollouts.group_slices()]
    return [str(answer) if isinstance(answer, str | int | float) else None for answer in answers]


def stop_ids(trainer: Any) -> set[int]:
    """Tokens that end a rollout."""
    config = getattr(trainer.model, "generation_config", None)
    found: set[int] = set()
    for value in (
        getattr(trainer, "eos_token_ids", None),
        getattr(trainer, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        getattr(tokenizer_of(trainer), "eos_token_id", None),
    ):
        if value is not None:
            found |= set(value) if isinstance(value, list | tuple | set) else {int(value)}
    return found


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, also from inside a processor of text and images."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def merged_generation(slices: Sequence[Generation]) -> Generation:
    """A whole generation from the slices of all processes.

    Raises:
        ScoregramError: If the slices together are not whole groups.
    """
    first = slices[0]
    size = sum(part.size for part in slices)
    if size % first.group_size:
        got = f"{size} rollouts"
        fail("attach", f"a generation must hold whole groups of {first.group_size}", got, "Change the batch size.")
    if len(slices) == 1:
        return first
    ahead, behind = (max(getattr(part, name).shape[1] for part in slices) for name in ("prompt_ids", "completion_ids"))
    rollouts = concatenated_rollouts([part.rollouts for part in slices], pad_id=0)
    groups = rollouts.group_ids[:: first.group_size].tolist()
    names = [rollouts.prompt_names[group] for group in groups]
    answers = [rollouts.answers[group] for group in groups] if rollouts.answers else []

    def left_padded(name: str) -> Tensor:
        values = [getattr(part, name) for part in slices]
        return torch.cat([F.pad(value, (ahead - value.shape[1], 0)) for value in values])

    def right_padded(name: str) -> Tensor:
        values = [getattr(part, name) for part in slices]
        return torch.cat([F.pad(v, (0, behind - v.shape[1])) if v.ndim == 2 else v for v in values])

    # a slice with shorter prompts moves to the right by the padding that it gets; so do its columns
    shifted = [replace(part, columns=part.columns + ahead - part.prompt_ids.shape[1]) for part in slices]
    widest = rollouts.input_ids.shape[1]
    return replace(
        first,
        # a group that was cut between two processes is one group again
        rollouts=replace(
            rollouts, group_ids=torch.arange(size) // first.group_size, prompt_names=names, answers=answers
        ),
        columns=torch.cat([F.pad(part.columns, (0, widest - part.columns.shape[1])) for part in shifted]),
        prompt_ids=left_padded("prompt_ids"),
        prompt_mask=left_padded("prompt_mask"),
        completion_ids=right_padded("completion_ids"),
        completion_mask=right_padded("completion_mask"),
        loss_mask=right_padded("loss_mask"),
        advantages=right_padded("advantages"),
        has_images=any(part.has_images for part in slices),
    )
