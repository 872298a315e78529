"""Stage 1, the batch: rollouts as they were given, checked, unpacked, and without duplicates.

`Batch` is what the engine measures: one rollout per row. `DistinctRollouts` removes equal rows before the model sees
them. `RolloutLayout` says which rollout owns which row of a tensor inside the model. `segment_rows` turns the turns of
a rollout into rows of their own.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.rollouts import Rollouts


@dataclass(frozen=True)
class Batch:
    """`N` rollouts of `T` tokens, one per row, and the coefficient of each token's log-probability."""

    input_ids: Tensor  # (N, T)
    attention_mask: Tensor  # (N, T) long, 1 for real tokens
    completion_mask: Tensor  # (N, T) bool
    coefficients: Tensor  # (N, T) float64, 0 outside the completion
    position_ids: Tensor  # (N, T)
    temperature: float = 1.0

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return len(self.input_ids)

    def at(self, rows: Tensor | slice) -> "Batch":
        """The rollouts of these rows."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            completion_mask=self.completion_mask[rows],
            coefficients=self.coefficients[rows],
            position_ids=self.position_ids[rows],
        )

    def weighted(self, weights: Tensor) -> "Batch":
        """The same batch with the coefficients of rollout `i` multiplied by `weights[i]`."""
        return replace(self, coefficients=self.coefficients * weights.to(self.coefficients)[:, None])


def make_batch(
    input_ids: Tensor | Rollouts,
    completion_mask: Tensor | None,
    attention_mask: Tensor | None,
    *,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Batch:
    """The checked batch: packed rollouts are unpacked, missing masks, coefficients and positions are filled in."""
    caller = "measure_gram"
    if isinstance(input_ids, Rollouts):
        if completion_mask is not None or attention_mask is not None:
            remedy = "Leave the masks out: rollouts have their own."
            fail(caller, "masks belong to token ids", "rollouts and a mask", remedy)
        rollouts = input_ids
        input_ids, completion_mask = rollouts.input_ids, rollouts.completion_mask
        attention_mask = rollouts.attention_mask
    if completion_mask is None:
        fail(caller, "token ids need a completion_mask", "none", "Pass one, or a Rollouts in place of the ids.")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        fail(caller, "input_ids must be (N, T) and not empty", tuple(input_ids.shape), "Pass at least one rollout.")
    if not temperature > 0:
        fail(caller, "temperature must be positive", temperature, "Pass the temperature of the policy, usually 1.")
    require_same_shape(completion_mask, input_ids, name="completion_mask", like_name="input_ids", caller=caller)
    mask = completion_mask.bool()
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    require_same_shape(attention, input_ids, name="attention_mask", like_name="input_ids", caller=caller)
    weight = mask.double() if coefficients is None else coefficients
    require_same_shape(weight, input_ids, name="coefficients", like_name="input_ids", caller=caller)
    weight = torch.where(mask, weight.double(), 0.0)  # a caller may leave NaN outside the completion
    require_finite(weight, name="coefficients", caller=caller)
    if rollout_ids is not None:
        require_same_shape(rollout_ids, input_ids, name="rollout_ids", like_name="input_ids", caller=caller)
        input_ids, attention, mask, weight = unpacked_rollouts(rollout_ids, input_ids, attention, mask, weight)
    refuse_unpredicted_tokens(mask, attention)
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    # Views and copies: the interceptor marks the tensors that enter the model, and the caller's must stay unmarked.
    return Batch(input_ids.view_as(input_ids), attention.long().clone(), mask, weight, positions, temperature)


def refuse_unpredicted_tokens(mask: Tensor, attention: Tensor) -> None:
    """Raise if a completion token is the first real token of its rollout, or is padding."""
    first = attention.long().argmax(1)
    at_start = mask.gather(1, first[:, None]).squeeze(1)
    if bool(at_start.any()):
        row = int(at_start.nonzero()[0])
        fail(
            "measure_gram",
            "the first token of a rollout cannot be a completion token, nothing predicts it",
            f"completion_mask[{row}, {int(first[row])}] = True",
            "Start the completion after the prompt, or put a BOS token in front.",
        )
    padded = mask & (attention == 0)
    if bool(padded.any()):
        row, column = (int(i) for i in padded.nonzero()[0])
        fail(
            "measure_gram",
            "completion tokens must be real tokens",
            f"completion_mask[{row}, {column}] = True where attention_mask is 0",
            "Mask out the padding.",
        )


# Packed rollouts


def unpacked_rollouts(rollout_ids: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors `(B, T)` with one rollout per row, padded with zeros on the right.

    `rollout_ids` names the rollout `0 … N-1` of every token, negative for padding; tokens of a rollout are in order.
    """
    owner, order = rollout_ids.reshape(-1), packed_order(rollout_ids)
    counts = torch.bincount(owner[order])
    place = torch.arange(len(order), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
    blocks = []
    for value in values:
        block = value.new_zeros(len(counts), int(counts.max()))
        block[owner[order], place] = value.reshape(-1)[order]
        blocks.append(block)
    return tuple(blocks)


def repacked_tokens(values: Tensor, batch: Batch, rollout_ids: Tensor) -> Tensor:
    """Per-token values `(N, T')` of an unpacked batch, back in the packed order `(B, T)`; 0 for padding."""
    packed = values.new_zeros(rollout_ids.numel())
    packed[packed_order(rollout_ids)] = values[batch.attention_mask.bool()]
    return packed.reshape(rollout_ids.shape)


def packed_order(rollout_ids: Tensor) -> Tensor:
    """Indices of all real tokens in the flattened packed sequences, one rollout after another."""
    owner = rollout_ids.reshape(-1)
    order = (owner >= 0).nonzero().squeeze(1)
    return order[owner[order].argsort(stable=True)]


# Equal rollouts


@dataclass(frozen=True)
class DistinctRollouts:
    """The distinct rollouts of every group, and the row of each given rollout among them.

    Rollouts with the same tokens have the same score: their rows of the Gram are copies, and in a weighted sum of
    scores their weights add up. A policy of low entropy writes the same text again and again; a group of eight with
    three different texts costs as much as a group of three.
    """

    batch: Batch
    """`P` groups of `group_size` rows; a group with fewer distinct rollouts is filled up with its first one."""
    group_size: int | None
    row_of: Tensor
    """`(N,)` row of every given rollout, on the CPU."""

    @property
    def is_identity(self) -> bool:
        """Whether every given rollout has a row of its own."""
        return self.batch.rollouts == len(self.row_of)

    def members(self, row: int) -> list[int]:
        """The given rollouts that a row stands for."""
        return (self.row_of == row).nonzero().squeeze(1).tolist()

    def summed_weights(self, weights: Tensor) -> Tensor:
        """`(M, rows)` from `(M, N)` weights: the weights of equal rollouts are added up."""
        if self.is_identity:
            return weights
        totals = weights.new_zeros(len(weights), self.batch.rollouts)
        return totals.index_add_(1, self.row_of.to(weights.device), weights)

    def expanded_rows(self, values: Tensor) -> Tensor:
        """`(N, …)` from `(rows, …)`: one row for every given rollout."""
        return values if self.is_identity else values[self.row_of.to(values.device)]

    def expanded_matrix(self, matrix: Tensor) -> Tensor:
        """`(N, N)` from `(rows, rows)`: one row and one column for every given rollout."""
        return matrix if self.is_identity else matrix[self.row_of][:, self.row_of]


def distinct_rollouts(batch: Batch, group_size: int | None) -> DistinctRollouts:
    """The distinct rollouts of every group of `group_size` consecutive ones; None makes the whole batch one group.

    Two rollouts are equal if their tokens, masks and coefficients are equal, padding included.

    Raises:
        ScoregramError: If `group_size` does not divide the number of rollouts.
    """
    count = batch.rollouts
    size = count if group_size is None else group_size
    if size < 1 or count % size:
        requirement = f"group_size must divide the number of rollouts {count}"
        fail("measure_gram", requirement, group_size, "Pass whole groups.")
    # The coefficients' bits, not their values: NaN cannot occur, and 0.0 and -0.0 may safely count as different.
    parts = batch.input_ids, batch.attention_mask, batch.completion_mask, batch.coefficients.view(torch.int64)
    texts = [row.tobytes() for row in torch.cat([part.long() for part in parts], 1).cpu().numpy()]
    groups: list[dict[bytes, int]] = []  # per group: each distinct text and the first rollout that has it
    for start in range(0, count, size):
        groups.append({})
        for index in range(start, start + size):
            groups[-1].setdefault(texts[index], index)
    most = max(map(len, groups))
    if most == size:
        return all_rollouts(batch, group_size)
    rows, row_of = [], []
    for group, first_of in enumerate(groups):
        firsts = list(first_of.values())
        rows += firsts + firsts[:1] * (most - len(firsts))  # blocks of the Gram must have one size
        row_of_text = {text: group * most + place for place, text in enumerate(first_of)}
        row_of += [row_of_text[text] for text in texts[group * size : (group + 1) * size]]
    chosen = torch.tensor(rows, device=batch.input_ids.device)
    return DistinctRollouts(batch.at(chosen), None if group_size is None else most, torch.tensor(row_of))


def all_rollouts(batch: Batch, group_size: int | None = None) -> DistinctRollouts:
    """Every rollout in a row of its own, equal or not."""
    return DistinctRollouts(batch, group_size, torch.arange(batch.rollouts))


# Rows of a tensor inside the model


@dataclass(frozen=True)
class RolloutLayout:
    """Where `N` rollouts of `T` tokens are in a tensor that the model computes.

    The first axis of an activation runs over the `N` sequences or over all `N · T` tokens. A mixture of experts selects
    some of the tokens; then the tensor is marked with the owner (the rollout) of every row.
    """

    rollouts: int
    tokens: int

    def has_rollout_axis(self, value: Tensor) -> bool:
        """Whether the first axis of a tensor runs over the rollouts, or over all their tokens."""
        return value.ndim > 0 and value.shape[0] in (self.rollouts, self.rollouts * self.tokens)

    def owners(self, leading: int) -> Tensor | None:
        """Rollout of every entry of a first axis of size `leading`; None for an axis of any other size."""
        if leading == self.rollouts:
            return torch.arange(self.rollouts)
        if leading == self.rollouts * self.tokens:
            return torch.arange(self.rollouts).repeat_interleave(self.tokens)
        return None

    def blocks(self, value: Tensor, owner: Tensor | None = None) -> Tensor | None:
        """`value` `(first, …, f)` as `(N, S, f)`: one block of rows per rollout.

        `owner` names the rollout of each entry of the first axis. Without it the first axis must be `N` or `N · T`,
        else the result is None.
        """
        if owner is None:
            if not self.has_rollout_axis(value):
                return None
            return value.reshape(self.rollouts, -1, value.shape[-1])
        rows = value.reshape(-1, value.shape[-1])
        owner = owner.to(rows.device).repeat_interleave(len(rows) // max(len(owner), 1))
        return blocks_by_owner(rows, owner, self.rollouts)


def blocks_by_owner(rows: Tensor, owner: Tensor, rollouts: int) -> Tensor:
    """Rows `(n, f)` sorted into blocks `(N, S, f)` by their owner in `0 … N-1`, shorter blocks padded with zeros."""
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=rollouts)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=rows.device) - starts[owner[order]]
    blocks = rows.new_zeros(rollouts, max(int(counts.max()), 1), rows.shape[1])
    blocks[owner[order], place] = rows[order]
    return blocks


# Turns as rows


@dataclass(frozen=True)
class SegmentRows:
    """A batch with one row for every segment of every rollout: the same tokens, different completion masks."""

    input_ids: Int[Tensor, "segments tokens"]
    completion_mask: Bool[Tensor, "segments tokens"]
    attention_mask: Int[Tensor, "segments tokens"]
    owner: Int[Tensor, " segments"]
    """The rollout that each row is a part of; in order."""
    segment: Int[Tensor, " segments"]
    """The id of the segment; in order within a rollout."""

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `measure_gram` that follow the model."""
        return self.input_ids, self.completion_mask, self.attention_mask


def segment_rows(input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor) -> SegmentRows:
    """One row for every segment of every rollout; `measure_gram` of them is the Gram of turns.

    The scores of a rollout's segments add up to its own: `Σ_{a of i} Σ_{b of j} K_ab` is the Gram of the rollouts.
    Every row runs through the model with all its tokens, so the cost grows with the number of segments.

    Args:
        input_ids: `(N, T)`.
        attention_mask: `(N, T)`, 0 for padding; all real by default.
        segments: `(N, T)` integers: the turn of each completion token, negative for a token outside every turn.
            Turn ids of different rollouts are unrelated; a rollout without a turn has no row.

    Raises:
        ScoregramError: If shapes differ, `segments` are not integers, or there is no segment at all.

    Example:
        >>> rows = segment_rows(torch.tensor([[5, 6, 7, 8]]), None, torch.tensor([[-1, 0, -1, 1]]))
        >>> rows.completion_mask.int().tolist(), rows.owner.tolist()
        ([[0, 1, 0, 0], [0, 0, 0, 1]], [0, 0])
    """
    caller = "segment_rows"
    require_same_shape(segments, input_ids, name="segments", like_name="input_ids", caller=caller)
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    require_same_shape(attention, input_ids, name="attention_mask", like_name="input_ids", caller=caller)
    if segments.is_floating_point() or segments.is_complex() or segments.dtype is torch.bool:
        fail(caller, "segments must be whole numbers", segments.dtype, "Pass the turn of each token.")
    rollout, _ = (segments >= 0).nonzero(as_tuple=True)
    if not len(rollout):
        fail(caller, "needs at least one segment", "only negative ids", "Number the turns from 0.")
    owner, segment = torch.stack([rollout, segments[segments >= 0].long()]).unique(dim=1)
    return SegmentRows(
        input_ids=input_ids[owner],
        completion_mask=segments[owner] == segment[:, None],
        attention_mask=attention[owner],
        owner=owner,
        segment=segment,
    )
