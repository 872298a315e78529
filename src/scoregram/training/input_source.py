"""What supplies inputs of an estimator, and where the completion tokens of a step lie."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from scoregram.policy import Policy
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem


@runtime_checkable
class InputSource(Protocol):
    """Supplies inputs of an estimator."""

    @property
    def extra_rollouts(self) -> int | None:
        """Rollouts that the latest step took on top of those it trains on; None for a source that samples none."""
        ...

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """The inputs for step `number`, by name; `token_rewards` `(N, T)` replaces the reward at the last token."""
        ...

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Learn from a step that was trained on; returns scalars for the metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, plain numbers and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        ...


class StatelessSource:
    """A source that learns nothing."""

    extra_rollouts: int | None = None

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Nothing."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


def completion_places(rollouts: Rollouts) -> list[list[int]]:
    """Columns of the completion tokens of every rollout."""
    return [row.nonzero().squeeze(1).tolist() for row in rollouts.completion_mask.cpu()]


def text_lengths(policy: Policy, ids: Sequence[int]) -> list[int]:
    """Characters of the text after each token; a token that completes no character adds none."""
    return [len(policy.decode(ids[: count + 1])) for count in range(len(ids))]
