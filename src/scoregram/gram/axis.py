"""Stage 3a, the rollout axis: find the activations whose first axis runs over the rollouts.

The length of an axis does not tell: with 16 rollouts, a tensor `(16, …)` may hold 16 experts, and with rollouts of 16
tokens, 16 positions. So two *probe passes* run the model forward, over two and over three rollouts. The interceptor
records the first axis of every activation that meets a parameter. The axis runs over the rollouts if it has `2 m`
entries in one pass and `3 m` in the other. If `m > 1`, the first `2 m` entries must also have the same values in both
passes: the entries of one rollout must be adjacent (sorted by rollout, not by token).

The model's facts store the result by operation, parameter and rank. A pass that meets an operation that is not stored,
or one with another `m`, does not split it; two more probe passes follow, and the pass is repeated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scoregram.gram.batch import Batch

PROBE_ROLLOUTS = (2, 3)
"""Rollouts in the two probe passes."""
FEATURES = 16
"""Values stored for every entry of a first axis, to compare it with the other probe pass."""

MOST_DIFFERENT = 1 / 8
"""Largest share of entries that may differ between the probe passes."""

OperationKey = tuple[object, ...]
"""Name of an operation, names of the parameters in it, and the rank (`ndim`) of an activation."""


@dataclass(frozen=True)
class FirstAxis:
    """The first axis of one activation."""

    length: int
    features: Tensor
    """`(length, f)` float64: the first values of every entry, at most `FEATURES`."""

    @staticmethod
    def of(value: Tensor) -> "FirstAxis":
        """The first axis of `value`; of length 0 for a scalar."""
        if not value.ndim:
            return FirstAxis(0, torch.empty(0, 1))
        value = value.detach()
        entries = (value.abs() if value.is_complex() else value).reshape(len(value), value[:1].numel())
        return FirstAxis(len(value), entries[:, :FEATURES].double().nan_to_num())

    def entries_per_rollout(self, other: "FirstAxis") -> int | None:
        """Entries per rollout, from this axis in the pass over two rollouts and `other` in the pass over three.

        None if the axis does not run over the rollouts, or the entries of a rollout are not adjacent.
        """
        few, many = PROBE_ROLLOUTS
        entries = self.length // few
        if not entries or self.length != few * entries or other.length != many * entries:
            return None
        if entries == 1:
            return 1
        few_values, many_values = self.features, other.features[: self.length]
        # A row of zeros says nothing: an expert may see zeros in place of the tokens of other experts.
        is_used = (few_values != 0).any(1) | (many_values != 0).any(1)
        if not bool(is_used.any()):
            return entries
        error = (few_values - many_values)[is_used].norm(dim=1)
        spread = (few_values - few_values.mean(0))[is_used].norm(dim=1).median()
        # Rounding depends on the batch size and may send a token to another expert, so a few entries may differ. If an
        # expert's own tokens came first and zeros behind them, a third of them would be the third rollout's.
        return entries if float((error > spread / 2).double().mean()) <= MOST_DIFFERENT else None


@dataclass(frozen=True)
class EntriesPerRollout:
    """How many entries of a first axis belong to each rollout: `count`, or `count` for each of its tokens."""

    count: int
    per_token: bool

    def fits(self, entries: int, tokens: int) -> bool:
        """Whether a rollout of `tokens` tokens has `entries` entries."""
        return entries == self.count * (tokens if self.per_token else 1)


Axes = dict[OperationKey, frozenset[EntriesPerRollout]]
"""Entries per rollout by operation; an empty set if the first axis does not run over the rollouts."""
Observations = dict[OperationKey, list[FirstAxis]]
"""First axes of the activations in one probe pass by operation, in the order of the calls."""


def observed_axes(few: Observations, many: Observations, tokens: int) -> Axes:
    """The axes that two probe passes with rollouts of `tokens` tokens show."""
    axes: Axes = {}
    for key, firsts in few.items():
        seconds = many.get(key, [])
        entries = {a.entries_per_rollout(b) for a, b in zip(firsts, seconds, strict=False)}
        if len(firsts) != len(seconds) or None in entries:
            axes[key] = frozenset()  # also if only one call differs: all calls share the key
        else:
            counts = [count for count in entries if count is not None]
            axes[key] = frozenset(
                EntriesPerRollout(count if count % tokens else count // tokens, count % tokens == 0) for count in counts
            )
    return axes


def merged_axes(known: Mapping[OperationKey, frozenset[EntriesPerRollout]], new: Axes) -> Axes:
    """Both tables together; an operation that was once seen without a rollout axis stays without."""
    both = {key: known[key] | new[key] if known[key] and new[key] else frozenset() for key in known.keys() & new.keys()}
    return {**known, **new, **both}


def probe_batch(batch: Batch, rollouts: int) -> Batch:
    """A batch of `rollouts` different rollouts made from those of `batch`; the second one is a token shorter."""
    rows = torch.arange(rollouts, device=batch.input_ids.device) % batch.rollouts
    probe = batch.at(rows)
    ids = torch.stack([row.roll(shift) for shift, row in enumerate(probe.input_ids)])
    attention = probe.attention_mask.clone()
    attention[1, -1] = 0  # so a selection of the real tokens has fewer of this rollout
    return replace(probe, input_ids=ids, attention_mask=attention)
