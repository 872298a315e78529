"""An independent check of a measured Gram: `wᵀKw` against `‖Σ w_i ψ_i‖²` from a plain backward pass."""

import torch
from torch import nn

from scoregram.checks import fail
from scoregram.gram.batch import Batch
from scoregram.gram.dropout import DropoutOff
from scoregram.gram.replay import loss_gradients
from scoregram.gram.result import Gram
from scoregram.gram.survey import Survey

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Disagreement allowed, relative to `Σ |w_i w_j K_ij|`, by the lowest precision among the parameters.

Many models compute their norms in float32 whatever their dtype, so float64 promises little more than float32 does.
"""


def verify_gram(
    model: nn.Module, batch: Batch, gram: Gram, group_size: int | None, survey: Survey, seed: int = 0
) -> None:
    """Raise unless `wᵀKw` equals the squared norm of a plain gradient, for a random `w` on each group."""
    size = batch.rollouts if group_size is None else group_size
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, batch.rollouts, size):
        weights = torch.zeros(batch.rollouts, dtype=torch.float64)
        weights[start : start + size] = torch.randn(size, generator=generator, dtype=torch.float64)
        grads = loss_gradients(model, batch.weighted(weights), DropoutOff(), survey)
        plain = sum(float(grad.double().square().sum()) for grad in grads.values())
        block = gram.matrix[start : start + size, start : start + size]
        w = weights[start : start + size]
        disagree_at = abs(float(w @ block @ w) - plain) / max(float(w.abs() @ block.abs() @ w.abs()), 1e-300)
        allowed = max(TOLERANCE.get(parameter.dtype, 1e-4) for parameter in survey.parameters.values())
        if disagree_at > allowed:
            fail(
                "measure_gram",
                f"wᵀKw must agree with a plain backward pass to {allowed:g}",
                f"a disagreement of {disagree_at:.2e} for rollouts {start} to {start + size - 1}",
                "A layer mixes rollouts or is not batch first; please report the architecture.",
            )
