"""Importance ratios `π/π_old`: of a token, of a rollout per token, of a whole rollout.

A ratio is exponentiated only up to `exp(MAX_LOG_RATIO)`. Above that it is the constant `exp(20) ≈ 4.9e8`, with a
gradient of zero, where float32 would end in `inf` and then `nan`. Below there is no clamp: the ratio underflows to
`0`, its limit. A log-ratio of 20 on one token means that the two policies do not describe the same model.
"""

from torch import Tensor

from scoregram.types import LogProbs, Mask

MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(min(log_ratio, 20))`: the ratio, constant beyond the clamp."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def rollout_log_ratio(log_ratio: LogProbs) -> Tensor:
    """`Σ_t log(π/π_old)`, `(N,)`: log-ratio of the whole rollout. Zero for a rollout without tokens."""
    return log_ratio.sum(dim=-1)


def mean_log_ratio(log_ratio: LogProbs, mask: Mask) -> Tensor:
    """`(1/L_i) Σ_t log(π/π_old)`, `(N,)`: log of the geometric mean of its token ratios. Zero without tokens."""
    return log_ratio.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
