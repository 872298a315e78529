"""What an attachment was asked for."""

from dataclasses import dataclass
from typing import Literal

from scoregram.integrations.trl.estimating import OwnEstimator

Mode = Literal["scores", "loss"]


@dataclass(frozen=True)
class Settings:
    """What an attachment was asked for."""

    every: int
    mode: Mode
    estimator: str | OwnEstimator | None
    tolerance: float
    memory_gb: float | int | None
    """None: most of what is free when a step is measured."""
    keep_rollouts: bool
    between_prompts: bool = False
    """One of several processes measures all groups, so that the Gram between them is known too."""
