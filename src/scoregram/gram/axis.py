"""Stage 3a, the rollout axis: which activations have the rollouts on their first axis is observed, not guessed by size.

A size proves nothing: with 16 rollouts, a tensor `(16, …)` may hold 16 experts, and with rollouts of 16 tokens, 16
positions. So the model first runs over two rollouts and then over three, without a backward pass. Every operation in
which a parameter meets activations notes the length of their first axis. It runs over the rollouts if it has `2 m`
entries in one pass and `3 m` in the other; if `m > 1`, the first `2 m` entries must also have the same values in both,
because entries of one rollout have to be neighbours (tokens of rollouts, not rollouts of tokens).

This is done once for a model and remembered by operation, parameter and number of axes. An operation that was not seen
then, or with another `m`, is looked at in two passes of its own; until then it counts as one that cannot be split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scoregram.gram.batch import Batch

PROBE_ROLLOUTS = (2, 3)
"""Rollouts in the two passes."""
FEATURES = 16
"""Numbers kept of every entry of a first axis, to recognise it in the other pass."""

OperationKey = tuple[object, ...]
"""Name of an operation, names of the parameters in it, and the number of axes of an activation."""


@dataclass(frozen=True)
class FirstAxis:
    """The first axis of one activation."""

    length: int
    features: Tensor
    """`(length, f)` float64: the first few numbers of every entry."""

    @staticmethod
    def of(value: Tensor) -> "FirstAxis":
        """The first axis of `value`; of length 0 for a scalar."""
        if not value.ndim:
            return FirstAxis(0, torch.empty(0, 1))
        value = value.detach()
        entries = (value.abs() if value.is_complex() else value).reshape(len(value), value[:1].numel())
        return FirstAxis(len(value), entries[:, :FEATURES].double().nan_to_num())

    def entries_per_rollout(self, other: "FirstAxis") -> int | None:
        """Entries of each rollout, for this axis in the pass over two rollouts and `other` in that over three.

        None if the axis does not run over the rollouts, or does not have the entries of a rollout side by side.
        """
        few, many = PROBE_ROLLOUTS
        entries = self.length // few
        if not entries or self.length != few * entries or other.length != many * entries:
            return None
        if entries == 1:
            return 1
        # Rounding depends on the number of rollouts, and may send a token to another expert: most entries must agree.
        error = (self.features - other.features[: self.length]).norm(dim=1).median()
        spread = (self.features - self.features.mean(0)).norm(dim=1).median()
        return entries if bool(error <= spread / 2) else None


@dataclass(frozen=True)
class EntriesPerRollout:
    """How many entries of a first axis belong to each rollout: `count`, or `count` for each of its tokens."""

    count: int
    per_token: bool

    def fits(self, entries: int, tokens: int) -> bool:
        """Whether a rollout of `tokens` tokens has so many entries."""
        return entries == self.count * (tokens if self.per_token else 1)


Axes = dict[OperationKey, frozenset[EntriesPerRollout]]
"""What is known about the first axes: empty for an operation whose activations do not have the rollouts first."""
Observations = dict[OperationKey, list[FirstAxis]]
"""First axes of the activations in one pass, in the order of the calls."""


def observed_axes(few: Observations, many: Observations, tokens: int) -> Axes:
    """What two passes with rollouts of `tokens` tokens say about the first axes."""
    axes: Axes = {}
    for key, firsts in few.items():
        seconds = many.get(key, [])
        entries = {a.entries_per_rollout(b) for a, b in zip(firsts, seconds, strict=False)}
        if len(firsts) != len(seconds) or None in entries:
            axes[key] = frozenset()  # also if one call in many differs: the key does not tell them apart
        else:
            counts = [count for count in entries if count is not None]
            axes[key] = frozenset(
                EntriesPerRollout(count if count % tokens else count // tokens, count % tokens == 0) for count in counts
            )
    return axes


def merged_axes(known: Mapping[OperationKey, frozenset[EntriesPerRollout]], new: Axes) -> Axes:
    """Both together; a first axis that was once seen without the rollouts stays one without."""
    both = {key: known[key] | new[key] if known[key] and new[key] else frozenset() for key in known.keys() & new.keys()}
    return {**known, **new, **both}


def probe_batch(batch: Batch, rollouts: int) -> Batch:
    """So many rollouts made from those of a batch, all different, the second one shorter by a token."""
    rows = torch.arange(rollouts, device=batch.input_ids.device) % batch.rollouts
    probe = batch.at(rows)
    ids = torch.stack([row.roll(shift) for shift, row in enumerate(probe.input_ids)])
    attention = probe.attention_mask.clone()
    attention[1, -1] = 0  # a selection of the real tokens must not have as many of every rollout
    return replace(probe, input_ids=ids, attention_mask=attention)
