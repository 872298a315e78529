"""The one batch type: `N` rollouts of `P` prompts, from the sampler or another trainer down to the Gram.

Samplers, the trainer, TRL and dumps all hand over a `Rollouts`. It holds no statistics: `scoregram.reading` computes
them. A missing reward stays `nan` until an estimator decides how to treat it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from scoregram.checks import fail
from scoregram.types import Rewards


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts:
    """`N` rollouts of `P` prompts, one sequence per row; the rows of a prompt are adjacent.

    A row holds prompt, completion and padding. Padding is wherever `attention_mask` is false: on the right for rows
    made here, on either side for rows that keep the layout of another trainer.
    """

    input_ids: Int[Tensor, "batch tokens"]
    """Token ids of prompt and completion."""
    attention_mask: Bool[Tensor, "batch tokens"]
    """True for the tokens of prompt and completion, false for padding."""
    completion_mask: Bool[Tensor, "batch tokens"]
    """True for the tokens that the policy sampled and whose log-probabilities count, a sampled stop token included.
    False for tool output and for every token of a masked-out rollout."""
    prompt_lengths: Int[Tensor, " batch"]
    """Prompt tokens of each row."""
    group_ids: Int[Tensor, " batch"]
    """Prompt of each row, `0 … P-1` in ascending order, on the CPU."""
    prompt_names: Sequence[str] = ()
    """`P` stable names of prompts, such as `gsm8k/train/17`; empty before a task or trainer names them."""
    prompts: Sequence[str | None] = ()
    """`P` texts, None where a text is not to be stored; empty where none are known."""
    answers: Sequence[str | None] = ()
    """`P` expected answers, None where the data set has none; empty where none are known."""
    completions: Sequence[str] = ()
    """`N` texts of completions; empty where none are known."""
    rewards: Float[Tensor, " batch"] = field(default_factory=lambda: torch.zeros(0))
    """`(N,)` float64, on the CPU; `nan` for a rollout without a reward. All `nan` if not given."""
    reward_parts: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    """Name of a reward function → its reward for each rollout, `nan` where it gave none."""
    log_probs: Float[Tensor, "batch tokens"] | None = None
    """Log-probability of every completion token under the policy at the sampling temperature, before top-k and top-p;
    0 elsewhere. Greedy rollouts are scored at temperature 1. None if the sampler's log-probabilities are unknown."""
    behaviour_log_probs: Float[Tensor, "batch tokens"] | None = None
    """The same under the distribution that the token was drawn from (after top-k and top-p, or another engine's); 0 for
    greedy rollouts (probability 1). A row of `nan` for a rollout without them; None if no rollout has any."""
    finished: Bool[Tensor, " batch"] | None = None
    """True for a rollout that ended with a stop token, false for one cut off at the limit; None where unknown."""
    turn_ids: Int[Tensor, "batch tokens"] | None = None
    """Turn of each completion token, from 0; 0 elsewhere. None for rollouts of one turn."""
    token_rewards: Float[Tensor, "batch tokens"] | None = None
    """Rewards at the tokens that they follow: that of a turn at its last token, 0 elsewhere; a row sums to its entry of
    `rewards`. On the CPU. None if a rollout gets its reward at its end."""

    def __post_init__(self) -> None:
        count = len(self.input_ids)
        if not len(self.rewards) and count:
            object.__setattr__(self, "rewards", torch.full((count,), torch.nan, dtype=torch.float64))
        if bool((self.group_ids.diff() < 0).any()):
            fail("Rollouts", "group_ids must ascend", self.group_ids.tolist(), "Put the rollouts of a prompt together.")

    @property
    def count(self) -> int:
        """`N`."""
        return len(self.input_ids)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """`(N,)` number of tokens in `completion_mask`; for a masked-out rollout, of all its completion tokens."""
        credited = self.completion_mask.sum(1)
        return torch.where(credited > 0, credited, self.attention_mask.sum(1) - self.prompt_lengths)

    @property
    def group_sizes(self) -> list[int]:
        """Rollouts of each prompt."""
        return torch.bincount(self.group_ids).tolist()

    @property
    def group_size(self) -> int | None:
        """`R` if every prompt has the same number of rollouts, else None."""
        sizes = set(self.group_sizes)
        return sizes.pop() if len(sizes) == 1 else None

    def group_slices(self) -> list[slice]:
        """Rows of each prompt."""
        stops = torch.tensor([0, *self.group_sizes]).cumsum(0).tolist()
        return [slice(start, stop) for start, stop in pairwise(stops)]

    def by_group(
        self, values: Shaped[Tensor, " batch"], *, fill: float = torch.nan
    ) -> Shaped[Tensor, "prompts rollouts"]:
        """One value per rollout as `(P, R)`; groups smaller than the largest are padded with `fill`."""
        if self.group_size is not None:
            return values.view(-1, self.group_size)
        grid = values.new_full((len(self.group_sizes), max(self.group_sizes)), fill)
        for row, here in zip(grid, self.group_slices(), strict=True):
            row[: here.stop - here.start] = values[here]
        return grid

    def by_rollout(self, grid: Float[Tensor, "prompts rollouts"]) -> Float[Tensor, " batch"]:
        """`(N,)`, one value per rollout: the inverse of `by_group`, without its padding."""
        if self.group_size is not None:
            return grid.flatten()
        return torch.cat([row[:size] for row, size in zip(grid, self.group_sizes, strict=True)])

    @property
    def reward_grid(self) -> Rewards:
        """`(P, R)` rewards, `nan` where a rollout has none or a group is smaller than the largest."""
        return self.by_group(self.rewards)

    @property
    def turn_mask(self) -> Bool[Tensor, "batch turns"]:
        """`(N, H)`: whether a rollout has completion tokens in each turn; on the CPU. `H = 1` without `turn_ids`."""
        return self._by_turn(self.completion_mask.cpu().double()) > 0

    @property
    def turn_rewards(self) -> Float[Tensor, "batch turns"]:
        """`(N, H)` float64 reward of each turn, 0 for turns that a rollout did not reach; on the CPU.

        Without `token_rewards`, the reward of a rollout is that of its last turn; `nan` if it is missing.
        """
        if self.token_rewards is not None:
            return self._by_turn(self.token_rewards.double())
        mask = self.turn_mask
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(is_last, self.rewards[:, None], 0.0)

    def _by_turn(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch turns"]:
        """Sums over the completion tokens of each turn."""
        mask = self.completion_mask.cpu()
        turns = torch.zeros(mask.shape, dtype=torch.int64) if self.turn_ids is None else self.turn_ids.cpu()
        sums = torch.zeros(len(mask), int(turns.max()) + 1, dtype=values.dtype)
        return sums.scatter_add(1, turns, torch.where(mask, values, 0.0))

    def token_ids(self) -> list[list[int]]:
        """Prompt and completion tokens of every rollout, without padding."""
        masks = self.attention_mask.tolist()
        rows = zip(self.input_ids.tolist(), masks, strict=True)
        return [[token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in rows]

    def completion_ids(self) -> list[list[int]]:
        """Completion tokens of every rollout, without padding."""
        pairs = zip(self.token_ids(), self.prompt_lengths.tolist(), strict=True)
        return [ids[start:] for ids, start in pairs]

    def select(self, rows: Bool[Tensor, " batch"]) -> "Rollouts":
        """The rollouts for which `rows` is true, without columns that are padding for all of them.

        A group with no rollout left is dropped.
        """
        kept = rows.cpu()
        used = self.attention_mask[rows.to(self.attention_mask.device)].any(0).nonzero()
        columns = int(used[-1]) + 1 if len(used) else 1
        chosen: dict[str, Any] = {}
        for name, value in self._tensors().items():
            cut = value[kept.to(value.device)]
            chosen[name] = cut[:, :columns] if cut.ndim == 2 else cut
        groups, chosen["group_ids"] = chosen["group_ids"].unique(return_inverse=True)
        return replace(
            self,
            **chosen,
            prompt_names=[self.prompt_names[group] for group in groups.tolist()] if self.prompt_names else (),
            prompts=[self.prompts[group] for group in groups.tolist()] if self.prompts else (),
            answers=[self.answers[group] for group in groups.tolist()] if self.answers else (),
            completions=[text for text, keep in zip(self.completions, kept.tolist(), strict=True) if keep]
            if self.completions
            else (),
            reward_parts={name: values[kept] for name, values in self.reward_parts.items()},
        )

    def to(self, device: torch.device | str) -> "Rollouts":
        """The same with its token tensors on a device; rewards and group ids stay on the CPU."""
        on_cpu = ("rewards", "token_rewards", "group_ids")
        return replace(
            self, **{name: value.to(device) for name, value in self._tensors().items() if name not in on_cpu}
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The fields that hold a tensor with one row per rollout."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def micro_batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` consecutive rows that cover rows `0 … count - 1` in order; 0 for all at once.

    All slices but the last have `size` rows. There is none if there are no rows.

    Example:
        >>> list(micro_batches(5, 2)), list(micro_batches(5, 0))
        ([slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)], [slice(0, 5, None)])
    """
    rows = size or max(count, 1)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def group_passes(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Rows of consecutive whole groups, as many as fit into `most` rows, and at least one group; 0 for all at once.

    Example:
        >>> list(group_passes([4, 2, 3, 8], 6))
        [slice(0, 6, None), slice(6, 9, None), slice(9, 17, None)]
    """
    start = stop = 0
    for size in sizes:
        if most and stop > start and stop + size - start > most:
            yield slice(start, stop)
            start = stop
        stop += size
    if stop > start:
        yield slice(start, stop)


def concatenated_rollouts(parts: Sequence[Rollouts], pad_id: int) -> Rollouts:
    """The batches concatenated, shorter rows padded on the right; group ids continue from batch to batch."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.input_ids.shape[1] for part in parts)
    stacked: dict[str, Tensor] = {}
    for name in parts[0]._tensors():
        values = [getattr(part, name) for part in parts]
        fill = pad_id if name == "input_ids" else 0
        stacked[name] = torch.cat([_padded_columns(value, longest, fill) for value in values])
    stacked["group_ids"] = torch.cat(list(_numbered_on(parts)))
    return replace(
        parts[0],
        **stacked,  # type: ignore[arg-type]
        prompt_names=[name for part in parts for name in part.prompt_names],
        prompts=[text for part in parts for text in part.prompts],
        answers=[text for part in parts for text in part.answers or (None,) * len(part.group_sizes)]
        if any(part.answers for part in parts)
        else (),
        completions=[text for part in parts for text in part.completions],
        reward_parts={name: torch.cat([part.reward_parts[name] for part in parts]) for name in parts[0].reward_parts},
    )


def _numbered_on(parts: Sequence[Rollouts]) -> Iterator[Tensor]:
    first = 0
    for part in parts:
        yield part.group_ids + first
        first += len(part.group_sizes)


def _padded_columns(value: Tensor, longest: int, fill: int) -> Tensor:
    if value.ndim == 1:
        return value
    return torch.nn.functional.pad(value, (0, longest - value.shape[1]), value=fill)
