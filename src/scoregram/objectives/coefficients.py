"""What a loss really does to each token: its derivative by the token's log-probability."""

import torch

from scoregram.checks import fail, require_finite
from scoregram.types import LogProbs, Loss


def token_coefficients(loss: Loss, log_probs: LogProbs) -> LogProbs:
    """Coefficient `c_it = ∂L/∂log π_it` of each token in the gradient of a loss, by automatic differentiation.

    `∇L = Σ_it c_it ∇log π_it`, for any loss that sees the policy through `log_probs` alone: clipped, off-policy, with
    a KL term, somebody else's. The update is `−∇L`, so the weight that a loss gives to a token is `−c_it`. The Gram
    of the actual loss is the Gram of `Σ_t c_it ∇log π_it`. Zero where the loss does not reach a token: outside the
    mask, clipped, or with advantage zero.

    Args:
        loss: A scalar that depends on `log_probs`.
        log_probs: `(N, T)`; a leaf with `requires_grad`, or an intermediate of the graph.

    Returns:
        `(N, T)`, dtype of `log_probs`, detached. The graph is kept and no `.grad` is touched.

    Raises:
        ScoregramError: If `loss` is not a scalar, does not depend on `log_probs`, or has a gradient that is not finite.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> token_coefficients((log_probs * torch.tensor([[3.0, 0.5]])).sum(), log_probs)
        tensor([[3.0000, 0.5000]])
    """
    if loss.numel() != 1:
        fail("token_coefficients", "loss must be a scalar", f"shape {tuple(loss.shape)}", "Aggregate it first.")
    if not (loss.requires_grad and log_probs.requires_grad):
        got = f"requires_grad {loss.requires_grad} for loss and {log_probs.requires_grad} for log_probs"
        remedy = "Compute the loss from log_probs with gradients on."
        fail("token_coefficients", "loss must be differentiable in log_probs", got, remedy)
    (coefficients,) = torch.autograd.grad(loss, log_probs, retain_graph=True, allow_unused=True)
    if coefficients is None:
        remedy = "Pass the tensor from which the loss was computed, not a copy."
        fail("token_coefficients", "loss must depend on log_probs", "a loss that does not", remedy)
    return require_finite(coefficients, name="the gradient of the loss", caller="token_coefficients")
