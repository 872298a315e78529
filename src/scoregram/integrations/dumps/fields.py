"""Values of a record, checked one by one; what is wrong is named with its file and line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.dumps.record import Messages, Where

LARGEST = 10**300
"""Whole numbers from here on are not what a trainer writes, and beyond what a float can hold."""


@dataclass(frozen=True)
class Source:
    """One record of a dump and where it stands; every method raises `ScoregramError` for a value that is no such."""

    record: Mapping[str, Any]
    where: Where

    def refuse(self, requirement: str, got: object) -> NoReturn:
        """Raise in the one wording."""
        shown = repr(got) if isinstance(got, str | int | float | bool | None) else f"a {type(got).__name__}"
        fail(str(self.where), requirement, shown[:80], "Repair or remove this record.")

    def within(self, name: str) -> "Source":
        """The mapping that stands under `name`."""
        value = self.record.get(name)
        if not isinstance(value, Mapping):
            self.refuse(f"{name} must be a mapping", value)
        return Source(value, self.where)

    def text(self, name: str) -> str:
        """Text, which may be empty but not absent."""
        value = self.record.get(name)
        if not isinstance(value, str):
            self.refuse(f"{name} must be text", value)
        return value

    def text_or_messages(self, name: str) -> str | Messages:
        """Text, or a conversation."""
        value = self.record.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
            return value
        return self.refuse(f"{name} must be text or a list of messages", value)

    def whole(self, name: str) -> int | None:
        """A whole number, None where there is none."""
        value = self.record.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not is_number(value) or value != value // 1:
            self.refuse(f"{name} must be a whole number", value)
        return int(value)

    def number(self, name: str) -> float:
        """A number; `nan` where there is none."""
        value = self.record.get(name)
        if value is None:
            return math.nan
        if not is_number(value):
            self.refuse(f"{name} must be a number", value)
        return float(value)

    def optional(self, name: str) -> float | None:
        """A finite number, None where there is none."""
        value = self.number(name)
        return value if math.isfinite(value) else None

    def ids(self, name: str) -> Tensor:
        """`(T,)` token ids."""
        values = self._array(name)
        if values.size == 0:
            return torch.zeros(0, dtype=torch.int64)
        if values.dtype.kind not in "iu" or values.min() < 0:
            self.refuse(f"{name} must be a list of token ids", _first_wrong(values))
        return torch.from_numpy(values.astype(np.int64))

    def flags(self, name: str, length: int) -> Tensor:
        """`(length,)` truth values, which may be written as 0 and 1."""
        values = self._array(name)
        if values.size and values.dtype.kind not in "biuf":
            self.refuse(f"{name} must be a list of 0 and 1", _first_wrong(values))
        self._require_length(name, values, length)
        return torch.from_numpy(values.astype(np.float64) != 0)

    def floats(self, name: str, length: int) -> Tensor | None:
        """`(length,)` numbers with `nan` for what is null; None where there is no list, or nothing in it is known."""
        if self.record.get(name) is None:
            return None
        try:
            values = np.asarray(self.record[name], dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            self.refuse(f"{name} must be a list of numbers", self.record[name])
        self._require_length(name, values, length)
        return torch.from_numpy(values) if np.isfinite(values).any() else None

    def scores(self, *without: str) -> dict[str, float]:
        """Every finite number of the record that is not named in `without`."""
        return {
            name: float(value)
            for name, value in self.record.items()
            if name not in without and is_number(value) and math.isfinite(value)
        }

    def _array(self, name: str) -> np.ndarray:
        value = self.record.get(name)
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if not isinstance(value, list | tuple | np.ndarray):
            self.refuse(f"{name} must be a list", value)
        try:
            values = np.asarray(value)
        except ValueError:
            self.refuse(f"{name} must be one list of numbers", value)
        if values.ndim != 1:
            self.refuse(f"{name} must be one list of numbers", value)
        return values

    def _require_length(self, name: str, values: np.ndarray, length: int) -> None:
        if values.shape != (length,):
            self.refuse(f"{name} must have one value for each of {length} tokens", values.size)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold, if only as `nan` or infinity."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST)


def _first_wrong(values: np.ndarray) -> object:
    if values.dtype.kind in "iu":
        return int(values.min())
    return next((value for value in values.tolist() if type(value) is not int), values.tolist()[0])
