"""One record of a dump: its fields, checked one by one, and the rollout that it describes.

The reader of every format produces `DumpedRollout`; code that uses it does not know the format.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.checks import fail

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with `role` and `content`."""
_LARGEST_INTEGER = 10**300
"""Integers from here on are refused, because large ones overflow a float."""
_LARGEST_NUMBER = 1e30
"""Largest reward, advantage or log-probability: float32 holds it, and float64 its fourth power."""
_MOST_VALUES = 1 << 24
"""Most numbers in a list, more than any context has tokens: an expanded tensor of a few bytes can have any size."""
_SCALAR_TYPES = {int, float, bool, type(None)}


class Location(NamedTuple):
    """File and line of a record."""

    file: Path
    line: int
    """Line of a text file, row of a table, or position in a list; from 1."""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True, eq=False, kw_only=True)
class DumpedRollout:
    """What a dump says about one rollout; None where it says nothing.

    `C` counts the tokens after the prompt, including those of tools and users in later turns.
    """

    location: Location
    step: int | None = None
    group: str | None = None
    """Name of its group, unique within the step."""
    prompt_id: str | None = None
    """Stable name of the prompt."""
    prompt: str | Messages | None = None
    """Text, or a conversation for the chat template."""
    completion: str | None = None
    prompt_ids: Int[Tensor, " prompt"] | None = None
    completion_ids: Int[Tensor, " completion"] | None = None
    completion_mask: Bool[Tensor, " completion"] | None = None
    """`(C,)`. True for the tokens that the policy chose; None if it chose all of them."""
    tokens: int | None = None
    """Number of completion tokens, as counted by a dump without token ids."""
    reward: float = math.nan
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Name of a reward function → its reward."""
    advantage: float | None = None
    """The trainer's advantage, if all tokens share it."""
    advantages: Float[Tensor, " completion"] | None = None
    """`(C,)`. The trainer's advantage of each token, if they differ."""
    log_probs: Float[Tensor, " completion"] | None = None
    """`(C,)`. Under the policy that drew the tokens; `nan` where unknown."""
    finished: bool | None = None
    """Whether it ended with a stop token rather than at the length limit."""
    kind: str = "train"

    @property
    def has_tokens(self) -> bool:
        """Whether the dump has the sampled token ids, so that no text is tokenised again."""
        return self.prompt_ids is not None and self.completion_ids is not None

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        tensors = (self.prompt_ids, self.completion_ids, self.completion_mask, self.advantages, self.log_probs)
        numbers = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        prompt = self.prompt if isinstance(self.prompt, str) else str(self.prompt or "")
        return numbers + len(prompt) + len(self.completion or "") + 1000


@dataclass(frozen=True)
class RecordFields:
    """The fields of one record; a value of the wrong type raises `ScoregramError` with its file and line."""

    record: Mapping[str, Any]
    location: Location

    def refuse(self, requirement: str, got: object) -> NoReturn:
        """Raise, naming file and line."""
        shown = repr(got) if isinstance(got, str | int | float | bool | None) else f"a {type(got).__name__}"
        fail(str(self.location), requirement, shown[:80], "Repair or remove this record.")

    def nested(self, name: str) -> "RecordFields":
        """The fields of the mapping called `name`."""
        value = self.record.get(name)
        if not isinstance(value, Mapping):
            self.refuse(f"{name} must be a mapping", value)
        return RecordFields(value, self.location)

    def text(self, name: str) -> str:
        """Text; may be empty, but not absent."""
        value = self.record.get(name)
        if not isinstance(value, str):
            self.refuse(f"{name} must be text", value)
        return value

    def optional_text(self, name: str) -> str | None:
        """Text; None if absent."""
        return None if self.record.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool | None:
        """A boolean, which may be written as a number; None if absent."""
        value = self.record.get(name)
        if value is not None and not is_number(value):
            self.refuse(f"{name} must be true or false", value)
        return None if value is None else bool(value)

    def text_or_messages(self, name: str) -> str | Messages:
        """Text, or a conversation."""
        value = self.record.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
            return value
        return self.refuse(f"{name} must be text or a list of messages", value)

    def single_answer(self, name: str) -> str:
        """Text of a completion; the content of a conversation that is one message."""
        value = self.text_or_messages(name)
        if isinstance(value, str):
            return value
        content = value[0].get("content")
        if len(value) > 1 or not isinstance(content, str):
            requirement = f"{name} must be one answer, because text does not say which turns are the policy's"
            self.refuse(requirement, value)
        return content

    def integer(self, name: str) -> int | None:
        """A whole number; None if absent."""
        value = self.record.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not is_number(value) or value != value // 1:
            self.refuse(f"{name} must be a whole number", value)
        return int(value)

    def number(self, name: str) -> float:
        """A number; `nan` if absent."""
        value = self.record.get(name)
        if value is None:
            return math.nan
        if not is_number(value):
            self.refuse(f"{name} must be a number", value)
        return self.moderate(name, float(value))

    def moderate(self, name: str, value: float) -> float:
        """The value; refused if it is finite, but so large that its powers overflow."""
        if _LARGEST_NUMBER < abs(value) < math.inf:
            self.refuse(f"{name} must lie within ±{_LARGEST_NUMBER:g}", value)
        return value

    def finite_number(self, name: str) -> float | None:
        """A finite number; None if absent or not finite."""
        value = self.number(name)
        return value if math.isfinite(value) else None

    def finite_numbers(self, *excluded: str) -> dict[str, float]:
        """Every finite number of the record, except the fields in `excluded`."""
        return {
            name: self.moderate(name, float(value))
            for name, value in self.record.items()
            if isinstance(name, str) and name not in excluded and is_number(value) and math.isfinite(value)
        }

    def token_ids(self, name: str) -> Tensor:
        """`(T,)` token ids."""
        values = self._array(name)
        if values.size == 0:
            return torch.zeros(0, dtype=torch.int64)
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > np.iinfo(np.int64).max:
            self.refuse(f"{name} must be a list of token ids", _first_wrong(values))
        return torch.from_numpy(values.astype(np.int64))

    def flags(self, name: str, length: int) -> Tensor:
        """`(length,)` booleans, which may be written as 0 and 1."""
        values = self._array(name)
        if values.size and values.dtype.kind not in "biuf":
            self.refuse(f"{name} must be a list of 0 and 1", _first_wrong(values))
        self._require_length(name, values, length)
        return torch.from_numpy(values.astype(np.float64) != 0)

    def floats(self, name: str, length: int) -> Tensor | None:
        """`(length,)` numbers, `nan` for null and infinity; None if the list is absent or has no finite number."""
        if self.record.get(name) is None:
            return None
        try:
            values = self._array(name).astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            self.refuse(f"{name} must be a list of numbers", self.record[name])
        self._require_length(name, values, length)
        is_finite = np.isfinite(values)
        self.moderate(name, float(np.abs(values[is_finite]).max(initial=0.0)))
        return torch.from_numpy(np.where(is_finite, values, np.nan)) if is_finite.any() else None

    def _array(self, name: str) -> np.ndarray:
        value = self.record.get(name)
        if not isinstance(value, list | tuple | np.ndarray | Tensor):
            self.refuse(f"{name} must be a list", value)
        shape = (len(value),) if isinstance(value, list | tuple) else tuple(value.shape)
        if len(shape) != 1 or shape[0] > _MOST_VALUES:
            self.refuse(f"{name} must be one list of at most {_MOST_VALUES:,} numbers", f"the shape {shape}")
        if isinstance(value, list | tuple):
            # numpy would unpack lists inside, and a pickle can nest a few short ones to any size
            others = {type(one) for one in value} - _SCALAR_TYPES
            if not all(issubclass(kind, np.generic) for kind in others):
                self.refuse(f"{name} must be one list of numbers", next(v for v in value if type(v) in others))
        try:
            return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        except (TypeError, RuntimeError, ValueError):  # dtypes and layouts that numpy does not have
            self.refuse(f"{name} must be one list of numbers", value)

    def _require_length(self, name: str, values: np.ndarray, length: int) -> None:
        if values.shape != (length,):
            self.refuse(f"{name} must have one value for each of {length} tokens", values.size)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold, `nan` and infinity included."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST_INTEGER)


def _first_wrong(values: np.ndarray) -> object:
    if values.dtype.kind in "iu":
        return int(values.min() if values.min() < 0 else values.max())
    return next((value for value in values.tolist() if type(value) is not int), values.tolist()[0])


def split_sequence(
    ids: Int[Tensor, " tokens"], mask: Bool[Tensor, " tokens"], per_token: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """Fields of a `DumpedRollout` from one sequence: the prompt ends before the first token that the policy chose.

    Args:
        ids: `(T,)`.
        mask: `(T,)`, true for the tokens that the policy chose. If there are none, the whole sequence is the prompt.
        per_token: Further fields, each `(T,)` or None.
    """
    chosen = mask.nonzero()
    start = int(chosen[0]) if len(chosen) else len(ids)
    fields = {"prompt_ids": ids[:start], "completion_ids": ids[start:], "completion_mask": mask[start:]}
    return fields | {name: None if value is None else value[start:] for name, value in per_token.items()}


def shared_value(values: Float[Tensor, " completion"] | None, mask: Bool[Tensor, " completion"] | None) -> float | None:
    """The value that all chosen tokens share; None if they differ, one is not finite, or there are none."""
    if values is None:
        return None
    chosen = values if mask is None else values[mask]
    if not len(chosen) or not bool(torch.isfinite(chosen).all()):
        return None
    return float(chosen[0]) if bool((chosen == chosen[0]).all()) else None
