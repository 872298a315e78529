"""The policy of the start, kept for a KL term."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from scoregram.training.collecting import Collected
from scoregram.training.update import Updater
from scoregram.types import LogProbs


class Reference:
    """Log-probabilities under the policy that a run began with: a frozen copy, or the base under the adapters."""

    def __init__(self, updater: Updater) -> None:
        """Take how the log-probabilities of the policy itself are made."""
        self._has_adapters = hasattr(updater.model, "disable_adapter")
        self._model: Any = updater.model if self._has_adapters else copy.deepcopy(updater.model).requires_grad_(False)
        self._updater = updater

    @torch.no_grad()
    def log_probs(self, collected: Collected) -> LogProbs:
        """`(N, T)` log-probabilities of the completion tokens, 0 elsewhere."""
        own = replace(self._updater, model=self._model)
        without = self._model.disable_adapter() if self._has_adapters else nullcontext()
        with without:
            return torch.cat([own.log_probs(collected.rollouts, here) for here in own.passes(collected)])
