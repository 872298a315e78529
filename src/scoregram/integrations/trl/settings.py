"""What an attachment was asked for, and what a run folder says about it."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from scoregram.integrations.trl.estimating import OwnEstimator
from scoregram.integrations.trl.processes import Processes

Mode = Literal["scores", "loss"]
CLOSE = 1e-5
"""Error in float32 up to which two gradients are one and the same but for rounding."""


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
    fused: bool = True
    """Gram and gradient from one backward pass, where that is exact."""
    is_low_precision: bool = False
    """The trainer computes in a lower precision than float32."""

    @property
    def close(self) -> float:
        """Error up to which two gradients are one and the same but for rounding."""
        return self.tolerance if self.is_low_precision else min(CLOSE, self.tolerance)


def computes_in_low_precision(trainer: Any) -> bool:
    """Whether rounding is that of a lower precision than float32."""
    low = trainer.accelerator.mixed_precision in ("bf16", "fp16", "fp8")
    return low or any(p.dtype in (torch.bfloat16, torch.float16) for p in trainer.model.parameters() if p.requires_grad)


def default_tolerance(low: bool) -> float:
    """1e-3 in float32; 5e-2 where rounding is that of a lower precision."""
    return 5e-2 if low else 1e-3


def config_of(trainer: Any, settings: Settings, version: str, processes: Processes) -> dict[str, Any]:
    """What the run folder says about how the run was made; secrets are masked by the trainer's own arguments."""
    estimator = settings.estimator
    model = getattr(trainer.model, "config", None)
    return {
        "integration": {"name": "trl", "version": version, "trainer": type(trainer).__name__},
        "model": str(getattr(model, "_name_or_path", "") or type(trainer.model).__name__),
        "group_size": int(trainer.num_generations),
        "temperature": float(trainer.temperature),
        "seed": int(trainer.args.seed),
        "processes": processes.count,
        "measure_every": settings.every,
        "mode": settings.mode,
        "estimator": estimator if isinstance(estimator, str | None) else getattr(estimator, "__name__", "own"),
        "tolerance": settings.tolerance,
        "fused": settings.fused,
        "reward_functions": [str(name) for name in trainer.reward_func_names],
        "arguments": json.loads(json.dumps(trainer.args.to_dict(), default=str)),
    }
