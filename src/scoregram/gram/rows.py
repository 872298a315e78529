"""Rows that are not whole rollouts of one batch: the turns of a rollout, and held-out rollouts beside trained ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scoregram.checks import fail, require_same_shape
from scoregram.gram.engine import measure_gram


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
        """What `measure_gram` takes after the model."""
        return self.input_ids, self.completion_mask, self.attention_mask


def segment_rows(input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor) -> SegmentRows:
    """One row for every segment of every rollout, so that their Gram is that of turns.

    The scores of the segments of a rollout add up to its own: `Σ_{a of i} Σ_{b of j} K_ab` is the Gram of the rollouts.
    Every row runs through the model with all its tokens, so that the cost grows with the number of segments.

    Args:
        input_ids: `(N, T)`.
        attention_mask: `(N, T)`, 0 for padding; all real by default.
        segments: `(N, T)` whole numbers: the turn of each completion token, negative for a token of none. Turns of
            different rollouts have nothing to do with each other; a rollout without any has no row.

    Raises:
        ScoregramError: If shapes differ, `segments` are not whole numbers, or there is no segment at all.

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


@dataclass(frozen=True)
class HeldOutGram:
    """Inner products of the scores of trained and held-out rollouts."""

    cross: Float[Tensor, "train held"]
    """`⟨ψ_i, ψ_j⟩` of trained `i` and held-out `j`, float64; `held_out_effect` takes its transpose."""
    train: Float[Tensor, "train train"]
    """The Gram of the trained rollouts alone, float64."""


def cross_gram(
    model: nn.Module,
    train: Sequence[Tensor | None],
    held_out: Sequence[Tensor | None],
    *,
    temperature: float = 1.0,
) -> HeldOutGram:
    """The rectangular block of the Gram of trained against held-out rollouts, from one pass over both.

    Args:
        model: As for `measure_gram`.
        train: `(input_ids, completion_mask, attention_mask)`, each `(N, T)`; the last may be None or left out.
        held_out: The same with `(M, T')`; the shorter of the two is padded on the right.
        temperature: Logits are divided by it.

    Raises:
        ScoregramError: As `measure_gram`, and if a part is empty or does not have two or three tensors.
    """
    tokens = max(whole_batch(part, name)[0].shape[1] for part, name in ((train, "train"), (held_out, "held_out")))
    parts = [whole_batch(part, name, tokens) for part, name in ((train, "train"), (held_out, "held_out"))]
    ids, mask, attention = (torch.cat(pair) for pair in zip(*parts, strict=True))
    matrix = measure_gram(model, ids, mask, attention, temperature=temperature).matrix
    count = len(parts[0][0])
    return HeldOutGram(cross=matrix[:count, count:], train=matrix[:count, :count])


def whole_batch(part: Sequence[Tensor | None], name: str, tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, completion mask and attention mask, checked, padded on the right to `tokens`."""
    caller = "cross_gram"
    if len(part) not in (2, 3) or part[0] is None or part[1] is None:
        given = [None if tensor is None else tuple(tensor.shape) for tensor in part]
        fail(caller, f"{name} must be (input_ids, completion_mask, attention_mask)", given, "The last may be None.")
    ids, mask, attention = part[0], part[1], part[2] if len(part) == 3 else None
    if ids.ndim != 2 or not ids.numel():
        fail(
            caller, f"{name} must hold at least one rollout (N, T)", tuple(ids.shape), "Use measure_gram for one part."
        )
    attention = torch.ones_like(ids) if attention is None else attention.long()
    require_same_shape(mask, ids, name=f"completion_mask of {name}", like_name="input_ids", caller=caller)
    require_same_shape(attention, ids, name=f"attention_mask of {name}", like_name="input_ids", caller=caller)
    missing = max(tokens - ids.shape[1], 0)
    return F.pad(ids, (0, missing)), F.pad(mask.bool(), (0, missing)), F.pad(attention, (0, missing))
