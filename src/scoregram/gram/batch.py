"""Stage 1, the batch: check the caller's tensors, move padding to the right, and remove duplicate rollouts.

`Batch` is what the engine measures: one rollout per row, padding on the right unless the caller keeps it elsewhere.
`TokenLayout` maps the caller's tokens to these rows and back. `DistinctRollouts` removes duplicate rows before the
model runs. `RolloutLayout` says which rollout each entry of an activation's first axis belongs to. `segment_rows` makes
one row of every turn of a rollout.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.rollouts import Rollouts


@dataclass(frozen=True)
class TokenLayout:
    """The map between the caller's tensors `(B, T)` and rows with one rollout each, padded on the right."""

    given: torch.Size
    """The caller's shape `(B, T)`: one rollout per row with padding anywhere, or packed rollouts."""
    rows: tuple[int, int]
    """The shape `(N, T')` of the rows."""
    source: Tensor
    """Index of every real token in the caller's flattened tensor."""
    target: tuple[Tensor, Tensor]
    """Row and column of each of these tokens."""

    @staticmethod
    def of(rollout_ids: Tensor, rollouts: int = 0) -> "TokenLayout":
        """The layout for `rollout_ids` `(B, T)`: the rollout `0 … N-1` of every token, negative for padding.

        There are at least `rollouts` rows: a rollout without real tokens keeps its row.
        """
        owner = rollout_ids.reshape(-1)
        source = (owner >= 0).nonzero().squeeze(1)
        source = source[owner[source].argsort(stable=True)]  # by rollout, tokens in their order
        owner = owner[source]
        counts = torch.bincount(owner, minlength=rollouts)
        place = torch.arange(len(source), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        rows = (len(counts), max(int(counts.max()), 1)) if len(counts) else (0, 0)
        return TokenLayout(rollout_ids.shape, rows, source, (owner, place))

    def in_rows(self, values: Tensor) -> Tensor:
        """The caller's values `(B, T)` as rows `(N, T')`, 0 for padding."""
        rows = values.new_zeros(self.rows)
        rows[self.target] = values.reshape(-1)[self.source]
        return rows

    def as_given(self, rows: Tensor) -> Tensor:
        """Values of the rows `(N, T')` in the caller's shape `(B, T)`, 0 for padding."""
        values = rows.new_zeros(self.given.numel())
        values[self.source] = rows[self.target]
        return values.view(self.given)


@dataclass(frozen=True)
class Batch:
    """`N` rollouts of `T` tokens, one per row, and the coefficient of each token's log-probability."""

    input_ids: Tensor  # (N, T)
    attention_mask: Tensor  # (N, T) long, 1 for real tokens
    completion_mask: Tensor  # (N, T) bool
    coefficients: Tensor  # (N, T) float64, 0 outside the completion
    temperature: float = 1.0
    layout: TokenLayout | None = None
    """The map from the caller's tensors to these rows; None if they are the same."""
    keeps_padding: bool = False
    """Whether the caller's padding stays where it is."""
    static: "StaticSizes | None" = None
    """Sizes that depend on the tokens, if they are fixed in advance; None: a pass reads them from the device."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return len(self.input_ids)

    def at(self, rows: Tensor | slice) -> "Batch":
        """The batch of these rows."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            completion_mask=self.completion_mask[rows],
            coefficients=self.coefficients[rows],
            layout=None,
            static=None,
        )

    def alone(self, row: int) -> "Batch":
        """The batch of one rollout, without its padding unless `keeps_padding`."""
        one = self.at(slice(row, row + 1))
        real = one.attention_mask[0].bool()
        if self.keeps_padding or bool(real.all()) or not bool(real.any()):
            return one
        return replace(
            one,
            input_ids=one.input_ids[:, real],
            attention_mask=one.attention_mask[:, real],
            completion_mask=one.completion_mask[:, real],
            coefficients=one.coefficients[:, real],
        )

    def as_given(self, rows: Tensor) -> Tensor:
        """Values `(N, T)` in the shape of the caller's token ids."""
        return rows if self.layout is None else self.layout.as_given(rows)

    def of_unit_size(self) -> tuple["Batch", Tensor]:
        """This batch with each rollout's coefficients divided by a power of two, and these powers `(N,)`.

        The largest coefficient of a rollout is then in [1, 2). Small coefficients would underflow in half precision,
        and their squares in float32. The division is exact.
        """
        largest = self.coefficients.abs().amax(1)
        powers = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1), 1.0)
        return replace(self, coefficients=self.coefficients / powers[:, None]), powers

    def with_coefficients(self, coefficients: Tensor) -> "Batch":
        """This batch with new coefficients, which have the shape of the caller's token ids."""
        require_tensors("measure_gram", coefficients=coefficients)
        checked = checked_coefficients(coefficients, self.as_given(self.completion_mask))
        return replace(self, coefficients=checked if self.layout is None else self.layout.in_rows(checked))


@dataclass(frozen=True)
class StaticSizes:
    """What a pass must know about the values in a batch, fixed in advance, so that the pass does not wait for them."""

    completion: int
    """A bound on the tokens of the longest completion."""
    vocabulary: Tensor
    """Sorted token ids that include all ids of the batch."""
    padded: bool
    """Whether there may be padding; without it the model gets no attention mask."""


def make_batch(
    model: nn.Module,
    input_ids: Tensor | Rollouts,
    completion_mask: Tensor | None,
    attention_mask: Tensor | None,
    *,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    temperature: float = 1.0,
    keep_padding: bool = False,
) -> Batch:
    """The caller's tensors, checked, as a batch: one rollout per row, padding on the right unless `keep_padding`."""
    caller = "measure_gram"
    if isinstance(input_ids, Rollouts):
        if completion_mask is not None or attention_mask is not None:
            remedy = "Leave the masks out: a Rollouts has its own."
            fail(caller, "a Rollouts must come without masks", "a Rollouts and a mask", remedy)
        rollouts = input_ids
        input_ids, completion_mask = rollouts.input_ids, rollouts.completion_mask
        attention_mask = rollouts.attention_mask
    if completion_mask is None:
        fail(caller, "token ids need a completion_mask", "none", "Pass one, or a Rollouts instead of token ids.")
    require_tensors(caller, input_ids=input_ids, completion_mask=completion_mask, attention_mask=attention_mask)
    require_tensors(caller, coefficients=coefficients, rollout_ids=rollout_ids)
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        fail(caller, "input_ids must be (N, T) and not empty", tuple(input_ids.shape), "Pass at least one rollout.")
    if isinstance(temperature, str | None) or temperature == float("inf"):
        remedy = "Pass the temperature of the policy, usually 1."
        fail(caller, "temperature must be a finite number", repr(temperature), remedy)
    if not temperature > 0:
        fail(caller, "temperature must be positive", temperature, "Pass the temperature of the policy, usually 1.")
    mask = zeros_and_ones(completion_mask, input_ids, name="completion_mask", remedy="Pass factors as coefficients.")
    attention = torch.ones_like(mask) if attention_mask is None else attention_mask
    attention = zeros_and_ones(attention, input_ids, name="attention_mask", remedy="Pass 1 for real tokens.")
    weight = checked_coefficients(mask if coefficients is None else coefficients, mask)
    layout = None
    if rollout_ids is not None:
        if rollout_ids.is_floating_point():
            fail(caller, "rollout_ids must be integers", rollout_ids.dtype, "Pass the rollout of every token.")
        require_same_shape(rollout_ids, input_ids, name="rollout_ids", like_name="input_ids", caller=caller)
        layout = TokenLayout.of(torch.where(attention, rollout_ids, -1))
    elif not keep_padding and bool((attention[:, 1:] & ~attention[:, :-1]).any()):
        # Padding before a real token: the model would count it as a position, or read it as a token.
        owner = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        layout = TokenLayout.of(torch.where(attention, owner, -1), len(input_ids))
    refuse_unpredicted_tokens(mask, attention, layout)
    refuse_padded_completions(mask, attention)
    if layout is not None:
        input_ids, attention, mask, weight = map(layout.in_rows, (input_ids, attention, mask, weight))
    require_known_tokens(model, input_ids, mask, caller)
    # A copy: the interceptor sets an attribute on the tensors that enter the model, and a model may write to them.
    return Batch(input_ids.long().clone(), attention.long(), mask, weight, temperature, layout, keep_padding)


# Checks of the caller's tensors


def require_tensors(caller: str, **values: Any) -> None:
    """Raise unless every value is a tensor or None."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            fail(caller, f"{name} must be a tensor", type(value).__name__, "Convert it with torch.as_tensor.")


def weight_vectors(weights: Tensor, rollouts: int, *, caller: str) -> Tensor:
    """The caller's weights `(M, N)`. Raises unless they have this shape and are finite."""
    require_tensors(caller, weights=weights)
    if weights.ndim != 2 or weights.shape[1] != rollouts:
        requirement = f"weights must be (M, N) with N = {rollouts}"
        fail(caller, requirement, tuple(weights.shape), "Pass vectors with one weight per rollout.")
    return require_finite(weights, name="weights", caller=caller)


def zeros_and_ones(mask: Tensor, input_ids: Tensor, *, name: str, remedy: str) -> Tensor:
    """The mask as bool. Raises unless it has the shape of the ids and contains only 0 and 1."""
    require_same_shape(mask, input_ids, name=name, like_name="input_ids", caller="measure_gram")
    if mask.dtype is torch.bool:
        return mask
    odd = (mask != 0) & (mask != 1)
    if bool(odd.any()):
        row, column = (int(i) for i in odd.nonzero()[0])
        got = f"{mask[row, column].item():g} at row {row}, column {column}"
        fail("measure_gram", f"{name} must contain only 0 and 1", got, remedy)
    return mask.bool()


def checked_coefficients(coefficients: Tensor, mask: Tensor) -> Tensor:
    """Coefficients in float64, set to 0 outside the completion; the caller's values there may be NaN."""
    caller = "measure_gram"
    require_same_shape(coefficients, mask, name="coefficients", like_name="input_ids", caller=caller)
    return require_finite(torch.where(mask, coefficients.double(), 0.0), name="coefficients", caller=caller)


def require_known_tokens(model: nn.Module, input_ids: Tensor, mask: Tensor, caller: str) -> None:
    """Raise for ids that are not integers or not in the vocabulary: on a GPU they would break the CUDA context."""
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype is torch.bool:
        fail(caller, "input_ids must be integers", input_ids.dtype, "Pass token ids.")
    # Embedding and head may differ in size: ids that only the embedding has are never predicted.
    sizes = [vocabulary_size(model, "get_input_embeddings"), vocabulary_size(model, "get_output_embeddings")]
    for size, ids in zip(sizes, (input_ids, torch.where(mask, input_ids, 0)), strict=True):
        unknown = (ids < 0) | (ids >= size) if size else ids < 0
        if bool(unknown.any()):
            row, column = (int(i) for i in unknown.nonzero()[0])
            got = f"{int(ids[row, column])} in rollout {row}"
            requirement = f"token ids must lie in 0 … {size - 1}" if size else "token ids must not be negative"
            fail(caller, requirement, got, "Use the tokenizer of this model; pad with an id of its vocabulary.")


def vocabulary_size(model: nn.Module, part: str) -> int:
    """Number of rows of the model's input or output embedding; 0 if it does not have one."""
    try:
        weight = getattr(getattr(model, part)(), "weight", None)
    except (AttributeError, NotImplementedError):
        return 0
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def refuse_padded_completions(mask: Tensor, attention: Tensor) -> None:
    """Raise if a completion token is padding."""
    padded = mask & ~attention
    if bool(padded.any()):
        row, column = (int(i) for i in padded.nonzero()[0])
        fail(
            "measure_gram",
            "completion tokens must be real tokens",
            f"completion_mask[{row}, {column}] = True where attention_mask is 0",
            "Mask out the padding.",
        )


def refuse_unpredicted_tokens(mask: Tensor, attention: Tensor, layout: TokenLayout | None) -> None:
    """Raise if a completion token is the first real token of its rollout."""
    if layout is None:
        starts = attention & (attention.cumsum(1) == 1)
    else:
        starts = layout.as_given(torch.arange(layout.rows[1], device=mask.device).expand(layout.rows) == 0)
    at_start = mask & starts
    if bool(at_start.any()):
        row, column = (int(i) for i in at_start.nonzero()[0])
        fail(
            "measure_gram",
            "the first token of a rollout cannot be a completion token (no token predicts it)",
            f"completion_mask[{row}, {column}] = True",
            "Start the completion after the prompt, or prepend a BOS token.",
        )


# Equal rollouts


@dataclass(frozen=True)
class DistinctRollouts:
    """The distinct rollouts of every group, and the row of each of the caller's rollouts among them.

    Equal rollouts have the same score: their rows of the Gram are copies, and in a weighted sum of scores their weights
    add up. A low-entropy policy repeats itself: a group of eight rollouts with three distinct texts costs as much as a
    group of three.
    """

    batch: Batch
    """`P` groups of `group_size` rows; a group with fewer distinct rollouts repeats its first one.

    The coefficients of each row are divided by its entry of `powers`.
    """
    powers: Tensor
    """`(rows,)` powers of two; the Gram, the sketches and the row weights are multiplied by them."""
    group_size: int | None
    """Rows per group, fewer than the caller's `group_size` if there are duplicates; None: one group."""
    row_of: Tensor
    """`(N,)` row of each of the caller's rollouts, on the CPU."""

    @property
    def groups(self) -> int:
        """Number of groups; 1 if the Gram is of the whole batch."""
        return 1 if self.group_size is None else self.batch.rollouts // self.group_size

    @property
    def is_identity(self) -> bool:
        """Whether there are no duplicates: each of the caller's rollouts has its own row."""
        return self.batch.rollouts == len(self.row_of)

    def members(self, row: int) -> list[int]:
        """The caller's rollouts that share a row."""
        return (self.row_of == row).nonzero().squeeze(1).tolist()

    def row_weights(self, weights: Tensor) -> Tensor:
        """`(M, rows)` float64 from the caller's weights `(M, N)`: summed over equal rollouts, times `powers`."""
        totals = weights
        if not self.is_identity:
            totals = weights.new_zeros(len(weights), self.batch.rollouts)
            totals.index_add_(1, self.row_of.to(weights.device), weights)
        return totals.double() * self.powers

    def expanded_rows(self, values: Tensor) -> Tensor:
        """`(N, …)` from `(rows, …)`: one row for each of the caller's rollouts."""
        return values if self.is_identity else values[self.row_of.to(values.device)]

    def expanded_matrix(self, matrix: Tensor) -> Tensor:
        """`(N, N)` from `(rows, rows)`: one row and one column for each of the caller's rollouts."""
        return matrix if self.is_identity else matrix[self.row_of][:, self.row_of]


def distinct_rollouts(batch: Batch, group_size: int | None) -> DistinctRollouts:
    """The distinct rollouts within groups of `group_size` consecutive ones; None: the whole batch is one group.

    Two rollouts are equal if their tokens, masks and coefficients are equal, padding included.

    Raises:
        ScoregramError: If `group_size` does not divide the number of rollouts.
    """
    require_complete_groups(batch, group_size, caller="measure_gram")
    count = batch.rollouts
    size = count if group_size is None else group_size
    # Compares the bits of coefficients: none is NaN, and it is harmless if 0.0 and -0.0 count as different.
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
    unit, powers = batch.at(chosen).of_unit_size()
    return DistinctRollouts(unit, powers, None if group_size is None else most, torch.tensor(row_of))


def require_complete_groups(batch: Batch, group_size: int | None, *, caller: str) -> None:
    """Raise unless the rollouts are groups of `group_size`; None: the whole batch is one group."""
    if isinstance(group_size, str | float):
        fail(caller, "group_size must be a whole number or None", repr(group_size), "Pass complete groups.")
    if group_size is not None and (group_size < 1 or batch.rollouts % group_size):
        requirement = f"group_size must divide the number of rollouts {batch.rollouts}"
        fail(caller, requirement, group_size, "Pass complete groups.")


def all_rollouts(batch: Batch, group_size: int | None = None) -> DistinctRollouts:
    """Every rollout in its own row, duplicates included."""
    unit, powers = batch.of_unit_size()
    return DistinctRollouts(unit, powers, group_size, torch.arange(batch.rollouts))


# Rows of a tensor inside the model


@dataclass(frozen=True)
class RolloutLayout:
    """Which of the `N` rollouts of `T` tokens each entry of an activation's first axis belongs to.

    The first axis runs over the `N` sequences, over all `N · T` tokens, or has another number of entries per rollout,
    the same for all (`axis` finds out). In a mixture of experts it runs over selected tokens; then the interceptor
    marks the tensor with the owner of each entry, that is its rollout.
    """

    rollouts: int
    tokens: int

    def entries(self, value: Tensor) -> int:
        """Entries of the first axis per rollout; 0 if its length is not a multiple of the number of rollouts."""
        return 0 if not value.ndim or value.shape[0] % self.rollouts else value.shape[0] // self.rollouts

    def owners(self, value: Tensor) -> Tensor | None:
        """Rollout of every entry of the first axis; None if `entries` is 0."""
        entries = self.entries(value)
        return torch.arange(self.rollouts).repeat_interleave(entries) if entries else None

    def blocks(self, value: Tensor, owner: Tensor | None = None) -> Tensor:
        """`value` `(first, …, f)` as `(N, S, f)`: one block of rows per rollout.

        `owner` is the rollout of each entry of the first axis; without it, all rollouts have equally many entries.
        """
        if owner is None:
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
    """The rollout of each row, ascending."""
    segment: Int[Tensor, " segments"]
    """The segment id of each row, ascending within a rollout."""

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `measure_gram` after the model."""
        return self.input_ids, self.completion_mask, self.attention_mask


def segment_rows(input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor) -> SegmentRows:
    """One row for every segment (turn) of every rollout; `measure_gram` of these rows is the Gram of the turns.

    The scores of a rollout's segments add up to its score, so `Σ_{a of i} Σ_{b of j} K_ab` is entry `(i, j)` of the
    Gram of the rollouts. Every row has all tokens of its rollout, so the cost grows with the number of segments.

    Args:
        input_ids: `(N, T)`.
        attention_mask: `(N, T)`, 0 for padding; by default there is no padding.
        segments: `(N, T)` integers: the turn of each completion token, negative for tokens outside every turn.
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
        fail(caller, "segments must be integers", segments.dtype, "Pass the turn of each token.")
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
