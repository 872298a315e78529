"""What is known of an intermediate tensor: whether it depends on the rollouts, or on parameters alone."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """Mark of a tensor that depends on the rollouts."""

    owner: Tensor | None = None
    """Rollout of every entry of the first axis, where that axis is no longer that of the batch."""


@dataclass(frozen=True)
class Derived:
    """Mark of a tensor that depends on parameters alone."""

    cast_of: Tensor | None = None
    """The tensor that it is a cast of, if it is one."""


ACTIVATION = Activation()


def mark(tensor: Tensor, kind: Activation | Derived) -> None:
    """Mark an intermediate tensor; the mark lives and dies with it. Parameters and inputs are never marked."""
    tensor._scoregram = kind  # pyright: ignore[reportAttributeAccessIssue]


def mark_of(tensor: Tensor) -> Activation | Derived | None:
    """The mark of a tensor, if it has one."""
    return getattr(tensor, "_scoregram", None)
