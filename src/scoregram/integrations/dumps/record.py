"""One rollout as a dump tells of it, in the words of this library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with `role` and `content`."""


class Where(NamedTuple):
    """The place of a record in a dump."""

    file: Path
    line: int
    """Line of a text file, row of a table, or place in a list; from 1."""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True, eq=False, kw_only=True)
class DumpedRollout:
    """What a dump says about one rollout; `None` is what it does not say.

    `C` counts the tokens after the prompt, those of tools and users in later turns included.
    """

    where: Where
    step: int | None = None
    group: str | None = None
    """Name of its group, unique within the step."""
    prompt_id: str | None = None
    """Stable name of the prompt."""
    prompt: str | Messages | None = None
    """Text, or a conversation that goes through the chat template."""
    completion: str | None = None
    prompt_ids: Int[Tensor, " prompt"] | None = None
    completion_ids: Int[Tensor, " completion"] | None = None
    completion_mask: Bool[Tensor, " completion"] | None = None
    """`(C,)`. True for the tokens that the policy chose; None says all."""
    tokens: int | None = None
    """Completion tokens that the dump counted, where it has no token ids."""
    reward: float = math.nan
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Name of a reward function → what it gave."""
    advantage: float | None = None
    """What the trainer used, where it is one number for the whole rollout."""
    advantages: Float[Tensor, " completion"] | None = None
    """`(C,)`. One for each token."""
    log_probs: Float[Tensor, " completion"] | None = None
    """`(C,)`. Under the policy that drew the tokens; `nan` where unknown."""
    finished: bool | None = None
    """Ended by a stop token, not by a limit."""
    kind: str = "train"

    @property
    def has_tokens(self) -> bool:
        """Whether the very tokens are known, so that nothing needs to be tokenised again."""
        return self.prompt_ids is not None and self.completion_ids is not None

    @property
    def size(self) -> int:
        """Bytes that it holds in memory, about."""
        tensors = (self.prompt_ids, self.completion_ids, self.completion_mask, self.advantages, self.log_probs)
        numbers = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        written = self.prompt if isinstance(self.prompt, str) else str(self.prompt or "")
        return numbers + len(written) + len(self.completion or "") + 1000


def split_sequence(
    ids: Int[Tensor, " tokens"], mask: Bool[Tensor, " tokens"], per_token: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """Fields of a rollout from one whole sequence: the prompt is all before the first token that the policy chose.

    Args:
        ids: `(T,)`.
        mask: `(T,)`, true for the tokens that the policy chose. If there is none, all is prompt.
        per_token: Further fields, each `(T,)` or None.
    """
    chosen = mask.nonzero()
    start = int(chosen[0]) if len(chosen) else len(ids)
    fields = {"prompt_ids": ids[:start], "completion_ids": ids[start:], "completion_mask": mask[start:]}
    return fields | {name: None if value is None else value[start:] for name, value in per_token.items()}


def one_advantage(
    advantages: Float[Tensor, " completion"] | None, mask: Bool[Tensor, " completion"] | None
) -> float | None:
    """The advantage that all chosen tokens share; None where they differ, are unknown, or are none."""
    if advantages is None:
        return None
    chosen = advantages if mask is None else advantages[mask]
    if not len(chosen) or not bool(torch.isfinite(chosen).all()):
        return None
    return float(chosen[0]) if bool((chosen == chosen[0]).all()) else None
