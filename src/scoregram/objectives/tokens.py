"""Inputs of a loss: checked log-probabilities and advantages on completion tokens, and importance ratios.

Every objective reads its inputs through this file, so the rules are the same for all of them:

- Values outside the mask are never read. They may be NaN or infinite and reach neither the loss nor its gradient.
- Inside the mask every number must be finite and no log-probability may be positive; the error names the index.
- Half precision is promoted to float32; float32 and float64 stay as they are.
- Only `log_probs` carries a gradient. Old and reference log-probabilities, advantages and rewards are constants, so
  that passing one tensor as both `log_probs` and `old_log_probs` gives the on-policy gradient and not zero.
- A ratio is exponentiated only up to `exp(MAX_LOG_RATIO)`. Above that it is the constant `exp(20) ≈ 4.9e8` with a
  gradient of zero; float32 would give `inf` and then `nan`. Below there is no clamp: the ratio underflows to its limit
  `0`. A log-ratio of 20 on one token means that the two policies are not versions of the same model.
"""

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.types import BatchAdvantages, BatchRewards, LogProbs, Mask

MAX_LOG_RATIO = 20.0
# Rounding can lift log 1 slightly above zero; a negative log-likelihood passed by mistake is far above.
POSITIVE_TOLERANCE = 1e-2


def require_mask(mask: Tensor, like: Tensor, *, caller: str) -> Tensor:
    """`mask` unchanged; an error unless it is boolean, has a rollout, and has the shape of the log-probabilities."""
    if mask.dtype != torch.bool:
        fail(caller, "mask must be boolean", mask.dtype, "Pass mask.bool(), true on completion tokens.")
    if like.ndim != 2 or like.shape[0] == 0:
        fail(caller, "log_probs must be (N, T) with N >= 1", tuple(like.shape), "Pass one row per rollout.")
    return require_same_shape(mask, like, name="mask", like_name="log_probs", caller=caller)


def completion_values(values: Tensor, mask: Tensor, *, name: str, caller: str) -> Tensor:
    """`values` on completion tokens and `0` elsewhere, `(N, T)`, in float32 or better.

    Masked values are replaced before anything is computed: a `where` after the computation would still backpropagate
    `0 · nan` through it.
    """
    require_same_shape(values, mask, name=name, like_name="mask", caller=caller)
    kept = torch.where(mask, values, torch.zeros_like(values))
    return float32_or_better(require_finite(kept, name=f"{name} on completion tokens", caller=caller))


def completion_log_probs(log_probs: LogProbs, mask: Mask, *, name: str = "log_probs", caller: str) -> LogProbs:
    """Log-probabilities on completion tokens and `0` elsewhere; an error if one is positive."""
    require_mask(mask, log_probs, caller=caller)
    kept = completion_values(log_probs, mask, name=name, caller=caller)
    if bool((kept > POSITIVE_TOLERANCE).any()):
        at = tuple(int(i) for i in (kept > POSITIVE_TOLERANCE).nonzero()[0])
        fail(caller, f"{name} must not be positive", f"{kept[at].item():g} at index {at}", "Pass log π, not −log π.")
    return kept


def log_ratios(log_probs: LogProbs, other_log_probs: LogProbs, mask: Mask, *, other: str, caller: str) -> LogProbs:
    """`log π − log π_other` on completion tokens and `0` elsewhere; the other policy is a constant."""
    current = completion_log_probs(log_probs, mask, caller=caller)
    return current - completion_log_probs(other_log_probs.detach(), mask, name=other, caller=caller).to(current.dtype)


def advantages_on_tokens(advantages: BatchAdvantages, mask: Mask, *, like: Tensor, caller: str) -> Tensor:
    """Advantages as constants on completion tokens, `(N, T)`, dtype of `like`; `(N,)` is repeated on every token.

    The advantage of a rollout without completion tokens is not read.
    """
    constant = advantages.detach()
    if constant.ndim == 1:
        constant = rollout_values(constant, mask, name="advantages", caller=caller)[:, None].expand(mask.shape)
    return completion_values(constant, mask, name="advantages", caller=caller).to(like.dtype)


def rollout_values(values: BatchRewards, mask: Mask, *, name: str, caller: str) -> Tensor:
    """One constant per rollout, `(N,)`, and `0` for a rollout without completion tokens, whose value is not read."""
    if values.shape != mask.shape[:1]:
        fail(
            caller,
            f"{name} must have one value per rollout ({mask.shape[0]})",
            tuple(values.shape),
            "Pass shape (N,), or for advantages (N, T).",
        )
    kept = torch.where(mask.any(dim=-1), values.detach(), torch.zeros_like(values))
    return float32_or_better(require_finite(kept, name=name, caller=caller))


def float32_or_better(values: Tensor) -> Tensor:
    """`values` in float32 if they are narrower than that, unchanged otherwise."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(min(log_ratio, 20))`: the ratio, constant above the clamp."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def rollout_log_ratio(log_ratio: LogProbs) -> Tensor:
    """`Σ_t log(π/π_old)`, `(N,)`: log-ratio of the whole rollout. Zero for a rollout without tokens."""
    return log_ratio.sum(dim=-1)


def mean_log_ratio(log_ratio: LogProbs, mask: Mask) -> Tensor:
    """`(1/L_i) Σ_t log(π/π_old)`, `(N,)`: log of the geometric mean of the token ratios. Zero without tokens."""
    return log_ratio.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
