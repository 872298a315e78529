"""Surrogate losses for one advantage per rollout or token: REINFORCE, four ways to bound an importance ratio, and AWR.

All but AWR are `L = −Σ_it u_it surrogate_it` with the weights `u` of `aggregation`. With `π = π_old` each has the
gradient of REINFORCE: `∂L/∂log π_it = −u_it A_it`, so the update is `Σ_it u_it A_it ∇log π_it`, and `Σ_i (A_i/N) ψ_i`
under `token_sum`. They differ only once `π` has moved away from `π_old`. The module `tokens` states how inputs are read
and checked.

In every loss here `log_probs`, `old_log_probs` and `mask` are `(N, T)`, `advantages` is `(N,)` or `(N, T)`, and a
rollout without completion tokens contributes exactly zero.
"""

import math

import torch
from torch import Tensor

from scoregram.checks import fail, require_in_range
from scoregram.objectives.aggregation import finite_loss, token_weights, weighted_sum
from scoregram.objectives.tokens import (
    advantages_on_tokens,
    bounded_exp,
    completion_log_probs,
    float32_or_better,
    log_ratios,
    mean_log_ratio,
    require_mask,
    rollout_log_ratio,
    rollout_values,
)
from scoregram.types import BatchAdvantages, BatchRewards, LogProbs, Loss, Mask, TokenWeights


def advantage_weights(
    advantages: BatchAdvantages, mask: Mask, *, aggregation: str, length: float | int | None = None
) -> TokenWeights:
    """Weight `w_it = u_it A_it` that every loss of this file gives to `∇log π_it` when `π = π_old`.

    With one advantage per rollout it is a weight on the rollout's score: `A_i/N` (token sum), `A_i/(N L_i)` (sequence
    mean), `A_i/(N L)` (constant), `A_i/Σ_j L_j` (token mean).

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> advantage_weights(torch.tensor([1.0, -1.0]), mask, aggregation="sequence_mean")
        tensor([[ 0.2500,  0.2500],
                [-0.5000,  0.0000]])
    """
    require_mask(mask, mask, caller="advantage_weights")
    a = advantages_on_tokens(advantages, mask, like=float32_or_better(advantages), caller="advantage_weights")
    return token_weights(mask, aggregation, length=length, dtype=a.dtype) * a


def reinforce(
    log_probs: LogProbs,
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    aggregation: str = "token_sum",
    length: float | int | None = None,
) -> Loss:
    """Log-probability of the rollouts weighted by advantage, negated: the policy gradient as a loss.

    `L = −Σ_it u_it A_it log π_it`. Correct only for rollouts of the current policy: there is no ratio. Its value has no
    meaning; its gradient is the estimate. Weight on `∇log π_it`: `u_it A_it`, at every policy.

    Raises:
        ScoregramError: If a completion token's log-probability or advantage is not finite, or shapes differ.

    Reference:
        Williams 1992.

    Example:
        >>> reinforce(torch.tensor([[-1.0, -2.0]]), torch.tensor([0.5]), torch.tensor([[True, True]]))
        tensor(1.5000)
    """
    current = completion_log_probs(log_probs, mask, caller="reinforce")
    a = advantages_on_tokens(advantages, mask, like=current, caller="reinforce")
    return -weighted_sum(current * a, mask, aggregation, length, caller="reinforce")


def clipped_ratio(
    log_probs: LogProbs,
    old_log_probs: LogProbs,
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    eps_low: float | int = 0.2,
    eps_high: float | int = 0.2,
    dual_clip: float | int | None = None,
    aggregation: str = "sequence_mean",
    length: float | int | None = None,
) -> Loss:
    """PPO's pessimistic surrogate with a ratio per token, negated.

    `surrogate_it = min(ρ A, clip(ρ, 1 − eps_low, 1 + eps_high) A)` with `ρ_it = π_it/π_old,it`. The gradient of a
    token is exactly zero once its ratio has moved past the clip in the direction of its advantage: `A > 0, ρ > 1 +
    eps_high` and `A < 0, ρ < 1 − eps_low`. For `A < 0` a ratio above one is unbounded (up to `MAX_LOG_RATIO`), unless
    `dual_clip = c` limits the surrogate to `c A`, beyond which the gradient is zero too. Weight on `∇log π_it`
    off-policy: `u_it ρ_it A_it` where not clipped; with `π = π_old`: `u_it A_it`, so `A_i/(N L_i)` for GRPO.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        old_log_probs: `(N, T)`, of the policy that sampled; a constant.
        advantages: `(N,)` or `(N, T)`; a constant.
        mask: `(N, T)`, true on completion tokens.
        eps_low: How far a ratio may fall, in `[0, 1]`.
        eps_high: How far a ratio may rise, `>= 0`; DAPO raises it to `0.28`.
        dual_clip: `c > 1`, or none.
        aggregation: A key of `AGGREGATIONS`.
        length: For `aggregation="constant"`.

    Reference:
        PPO, Schulman et al. 2017, arXiv:1707.06347. Dual clip, Ye et al. 2020, arXiv:1912.09729. GRPO,
        arXiv:2402.03300. Asymmetric clip, DAPO, arXiv:2503.14476.
    """
    _require_clip(eps_low, eps_high, caller="clipped_ratio")
    log_ratio = log_ratios(log_probs, old_log_probs, mask, other="old_log_probs", caller="clipped_ratio")
    a = advantages_on_tokens(advantages, mask, like=log_ratio, caller="clipped_ratio")
    surrogate = _pessimistic(bounded_exp(log_ratio), a, eps_low, eps_high)
    if dual_clip is not None:
        if not dual_clip > 1:
            fail("clipped_ratio", "dual_clip must be above 1", dual_clip, "Choose c > 1 (3 is common), or None.")
        surrogate = torch.where(a < 0, torch.maximum(surrogate, dual_clip * a), surrogate)
    return -weighted_sum(surrogate, mask, aggregation, length, caller="clipped_ratio")


def clipped_sequence_ratio(
    log_probs: LogProbs,
    old_log_probs: LogProbs,
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    eps_low: float | int = 3e-4,
    eps_high: float | int = 4e-4,
    aggregation: str = "sequence_mean",
    length: float | int | None = None,
) -> Loss:
    """PPO's pessimistic surrogate with one length-normalised ratio per rollout, negated (GSPO).

    `s_i = (π(y_i)/π_old(y_i))^(1/L_i)`, the geometric mean of the token ratios, in its token form `s_it = sg(s_i)
    π_it/sg(π_it)`, whose value is `s_i` and whose gradient reaches token `t` alone. Under `sequence_mean` with one
    advantage per rollout, value and gradient are those of `−(1/N) Σ_i min(s_i A_i, clip(s_i) A_i)`. The clip keeps or
    drops a rollout as a whole. `s_i` is a biased importance weight: it is the `L_i`-th root of the right one. Weight on
    `∇log π_it` off-policy: `u_it s_i A_it` where not clipped; with `π = π_old`: `u_it A_it`.

    Reference:
        GSPO, Zheng et al. 2025, arXiv:2507.18071. The default clip is that of public recipes.
    """
    _require_clip(eps_low, eps_high, caller="clipped_sequence_ratio")
    log_ratio = log_ratios(log_probs, old_log_probs, mask, other="old_log_probs", caller="clipped_sequence_ratio")
    a = advantages_on_tokens(advantages, mask, like=log_ratio, caller="clipped_sequence_ratio")
    shared = mean_log_ratio(log_ratio, mask).detach()[:, None]  # (N, 1)
    token_form = bounded_exp(shared + log_ratio - log_ratio.detach())  # (N, T): value s_i, gradient of token t only
    surrogate = _pessimistic(token_form, a, eps_low, eps_high)
    return -weighted_sum(surrogate, mask, aggregation, length, caller="clipped_sequence_ratio")


def stopped_ratio(
    log_probs: LogProbs,
    old_log_probs: LogProbs,
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    eps_low: float | int | None = None,
    eps_high: float | int = 0.2,
    aggregation: str = "token_mean",
    length: float | int | None = None,
) -> Loss:
    """REINFORCE with each token weighted by its clipped ratio, which carries no gradient, negated (CISPO).

    `surrogate_it = sg(clip(ρ_it, 1 − eps_low, 1 + eps_high)) A_it log π_it`. No token ever loses its gradient. The
    price is a truncated importance weight: it is biased where the ratio is clipped, and a token that has moved far is
    still pushed further, where PPO's clip would stop it. `eps_low` is `None` by default: in practice only the upper end
    is clipped.
    Weight on `∇log π_it`: `u_it clip(ρ_it) A_it`; with `π = π_old`: `u_it A_it`. The value has no meaning.

    The upper end is `1 + eps_high`. Code that uses `eps_high` as the upper end itself (`clip(ρ, max=0.2)`) scales every
    on-policy update by it.

    Reference:
        CISPO, MiniMax-M1, arXiv:2506.13585. The default `eps_high` is that of public code; we have not found it in
        the paper.
    """
    if eps_low is not None:
        require_in_range(float(eps_low), low=0.0, high=math.inf, name="eps_low", caller="stopped_ratio")
    require_in_range(float(eps_high), low=0.0, high=math.inf, name="eps_high", caller="stopped_ratio")
    log_ratio = log_ratios(log_probs, old_log_probs, mask, other="old_log_probs", caller="stopped_ratio")
    a = advantages_on_tokens(advantages, mask, like=log_ratio, caller="stopped_ratio")
    weight = bounded_exp(log_ratio.detach()).clamp(min=None if eps_low is None else 1 - eps_low, max=1 + eps_high)
    current = completion_log_probs(log_probs, mask, caller="stopped_ratio")
    return -weighted_sum(weight * a * current, mask, aggregation, length, caller="stopped_ratio")


def trajectory_ratio(
    log_probs: LogProbs, old_log_probs: LogProbs, advantages: BatchRewards, mask: Mask, *, eps_high: float | int = 0.28
) -> Loss:
    """Advantage of each rollout times the ratio of the whole rollout, clipped from above, negated and averaged.

    `L = −(1/N) Σ_i min(ρ_i, 1 + eps_high) A_i` with `ρ_i = Π_t π_it/π_old,it`. Unclipped, `ρ_i` is the unbiased
    importance weight of a rollout; its variance grows exponentially with length. The clip applies to both signs of the
    advantage: above it the rollout has no gradient. There is no lower clip; as `ρ_i` falls to zero, so does the
    gradient. Weight on `∇log π_it` off-policy: `ρ_i A_i/N` below the clip; with `π = π_old`: `A_i/N`, on the whole
    score `ψ_i`.

    This form is ours. Of TIC-GRPO we know the product ratio and an upper-only clip. We have not verified in the paper
    whether its clip is inside a pessimistic minimum, nor its constants (`0.28` is from a re-implementation). Its length
    correction belongs to the advantages: `length_corrected_standardized`. The method `tic` pairs this loss with
    `leave_one_out`; that pairing is ours too, the paper's abstract speaks of group-normalised rewards.

    Reference:
        TIC-GRPO, Pang, Luo, Jin 2025, arXiv:2508.02833.
    """
    require_in_range(float(eps_high), low=0.0, high=math.inf, name="eps_high", caller="trajectory_ratio")
    log_ratio = log_ratios(log_probs, old_log_probs, mask, other="old_log_probs", caller="trajectory_ratio")
    a = rollout_values(advantages, mask, name="advantages", caller="trajectory_ratio").to(log_ratio.dtype)
    ratio = bounded_exp(rollout_log_ratio(log_ratio)).clamp(max=1 + eps_high)  # (N,)
    return finite_loss(-(ratio * a).mean(), caller="trajectory_ratio")


def advantage_weighted(
    log_probs: LogProbs,
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    temperature: float | int = 1.0,
    most: float | int = 20.0,
    aggregation: str = "token_sum",
    length: float | int | None = None,
) -> Loss:
    """Log-likelihood of the rollouts weighted by their exponentiated advantage, negated (AWR).

    `L = −Σ_it u_it min(exp(A_it/τ), most) log π_it`: supervised learning on the sampled rollouts, for rollouts of any
    policy. No weight is negative, so bad rollouts are imitated less and never pushed away. An advantage of zero has the
    weight 1: a dead group is imitated as it is, which on-policy moves the policy by noise alone (`E[ψ] = 0`). Pass a
    mask without the tokens of a rollout that has no reward.

    Args:
        log_probs: `(N, T)`, carries the gradient.
        advantages: `(N,)` or `(N, T)`; a constant.
        mask: `(N, T)`, true on completion tokens.
        temperature: `τ > 0`; as it grows, all weights tend to 1.
        most: The largest weight, `> 0`.
        aggregation: A key of `AGGREGATIONS`.
        length: For `aggregation="constant"`.

    Reference:
        AWR, Peng et al. 2019, arXiv:1910.00177. The paper's advantages come from a value function; `τ = 1` for
        advantages in standard deviations is our choice.

    Example:
        >>> advantage_weighted(torch.tensor([[-2.0], [-2.0]]), torch.tensor([0.0, -200.0]), torch.ones(2, 1).bool())
        tensor(1.)
    """
    current = completion_log_probs(log_probs, mask, caller="advantage_weighted")
    a = advantages_on_tokens(advantages, mask, like=current, caller="advantage_weighted")
    weights = _exponential_weights(a, temperature, most)
    return -weighted_sum(current * weights, mask, aggregation, length, caller="advantage_weighted")


def exponential_advantage_weights(
    advantages: BatchAdvantages,
    mask: Mask,
    *,
    temperature: float | int = 1.0,
    most: float | int = 20.0,
    aggregation: str = "token_sum",
    length: float | int | None = None,
) -> TokenWeights:
    """Weight `w_it = u_it min(exp(A_it/τ), most)` that `advantage_weighted` gives to `∇log π_it`, at every policy."""
    caller = "exponential_advantage_weights"
    require_mask(mask, mask, caller=caller)
    a = advantages_on_tokens(advantages, mask, like=float32_or_better(advantages), caller=caller)
    return token_weights(mask, aggregation, length=length, dtype=a.dtype) * _exponential_weights(a, temperature, most)


def _exponential_weights(advantages: Tensor, temperature: float | int, most: float | int) -> Tensor:
    """`min(exp(A/τ), most)`, without overflow."""
    tiny = torch.finfo(torch.float32).tiny
    for name, value in (("temperature", temperature), ("most", most)):
        require_in_range(float(value), low=tiny, high=1e30, name=name, caller="advantage_weighted")
    return (advantages / temperature).clamp(max=math.log(most)).exp()


def _pessimistic(ratio: Tensor, advantages: Tensor, eps_low: float | int, eps_high: float | int) -> Tensor:
    """`min(ρ A, clip(ρ) A)`, elementwise."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


def _require_clip(eps_low: float | int, eps_high: float | int, *, caller: str) -> None:
    require_in_range(float(eps_low), low=0.0, high=1.0, name="eps_low", caller=caller)
    require_in_range(float(eps_high), low=0.0, high=math.inf, name="eps_high", caller=caller)
