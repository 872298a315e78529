"""One advantage per rollout, from the rewards of its own group.

Every function takes `rewards` of shape `(P, R)` and `observed`, a bool of the same shape, or `None` when no reward is
missing. Unobserved rollouts take no part in any statistic and get advantage exactly 0; a NaN or infinite reward that
is observed is an error; a group with too few observed rollouts is an error, and one with none gets zeros. A constant
group gets exactly 0 from every estimator that compares rollouts with each other. Arithmetic is float64, the result
has the dtype of `rewards`.

The update these advantages belong to is `ĝ = (1/R) Σ_i A_i ψ_i`, with `ψ_i` the summed score of rollout `i`.
"""

import torch
from torch import Tensor

from scoregram.advantages.comparisons import (
    admitted,
    by_group,
    differences,
    everyone,
    others,
    require_spread_options,
    standard_scores,
    weighted,
)
from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.types import Advantages, Observed, PerPrompt, PerRollout, Rewards


def no_baseline(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """The reward itself.

    `A_i = r_i`. Unbiased, and of the highest variance: it pushes every rollout up when all rewards are positive.

    Reference:
        REINFORCE. Williams 1992.
    """
    values, _ = admitted(rewards, observed, at_least=1, caller="no_baseline")
    return values.to(rewards.dtype)


def constant_baseline(rewards: Rewards, *, baselines: PerPrompt, observed: Observed | None = None) -> Advantages:
    """Reward minus a number fixed for the prompt before its rollouts were sampled.

    `A_i = r_i − b`. Unbiased for any `b`; the variance is least at `b* = E[|ψ|² r] / E[|ψ|²]`.

    Args:
        rewards: `(P, R)`.
        baselines: `(P,)`. A value estimate, a running mean of earlier steps, a constant.
        observed: `(P, R)` bool.

    Reference:
        REINFORCE with a baseline. Williams 1992.
    """
    return _minus_per_prompt(rewards, baselines, observed, name="baselines", caller="constant_baseline")


def greedy_baseline(rewards: Rewards, *, greedy_rewards: PerPrompt, observed: Observed | None = None) -> Advantages:
    """Reward minus the reward of the greedy rollout of the same prompt.

    `A_i = r_i − r_greedy`. Unbiased: the greedy rollout is fixed by the policy, not by the sample. It is not one of
    the `R` rollouts and costs one more.

    Reference:
        ReMax. Li et al. 2023, arXiv:2310.10505.
    """
    return _minus_per_prompt(rewards, greedy_rewards, observed, name="greedy_rewards", caller="greedy_baseline")


def mean_centered(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """Reward minus the mean reward of the group, the rollout itself included.

    `A_i = r_i − (1/R) Σ_j r_j`, eqs. (14)–(16) of arXiv:2606.29238. It is `(R−1)/R` times `leave_one_out`, and so is
    its expected update: the right direction, too short by `1/R`. Every row sums to zero.

    Raises:
        ScoregramError: If a group has one observed rollout; its mean is itself and nothing would ever be learned.

    Reference:
        Dr. GRPO. Liu et al. 2025, arXiv:2503.20783.

    Example:
        >>> mean_centered(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    values, members = admitted(rewards, observed, at_least=2, caller="mean_centered")
    return differences(values, everyone(members)).to(rewards.dtype)


def leave_one_out(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """Reward minus the mean reward of the *other* rollouts of the same prompt.

    `A_i = r_i − (1/(R−1)) Σ_{j≠i} r_j`. The baseline does not see rollout `i`, so the update is unbiased.
    Every row sums to zero.

    Raises:
        ScoregramError: If a group has one observed rollout; there is no other to compare with.

    Reference:
        RLOO. Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740.

    Example:
        >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    values, members = admitted(rewards, observed, at_least=2, caller="leave_one_out")
    return differences(values, others(members)).to(rewards.dtype)


def standardized(
    rewards: Rewards, *, observed: Observed | None = None, eps: float | int = 0.0, ddof: int = 1
) -> Advantages:
    """Reward in units of its group's standard deviation, from the group's mean.

    `A_i = (r_i − mean) / (std + eps)`, `std² = Σ_j (r_j − mean)² / (R − ddof)`. A constant group gives exactly 0 also
    with `eps = 0`; constant means a spread within a few rounding steps of the rewards' own dtype and size, so a true
    spread of 1e-6 is kept. `Σ_i A_i² = R − ddof` in every other group at `eps = 0`, however rare its failures are:
    dividing by the spread reweights prompts, and bends the direction of one prompt's update unless its rewards take
    two values only.

    Raises:
        ScoregramError: If a group has one observed rollout.

    Reference:
        GRPO, outcome supervision. Shao et al. 2024, arXiv:2402.03300. Neither `eps` nor `ddof` is in the paper.

    Example:
        >>> standardized(torch.tensor([[3.0, 1.0], [0.1, 0.1]]), ddof=0)
        tensor([[ 1., -1.],
                [ 0.,  0.]])
    """
    require_spread_options(eps, ddof, caller="standardized")
    values, members = admitted(rewards, observed, at_least=2, caller="standardized")
    scores = standard_scores(values, by_group(members), members, eps=eps, ddof=ddof, dtype=rewards.dtype)
    return scores.to(rewards.dtype)


def length_weighted(rewards: Rewards, *, lengths: PerRollout, observed: Observed | None = None) -> Advantages:
    """Reward minus the group's mean reward weighted by rollout length, the rollout itself included.

    `A_i = r_i − Σ_j ℓ_j r_j / Σ_j ℓ_j`: the variance-minimising baseline if `|ψ_j|²` were proportional to length.
    Because the baseline sees rollout `i` with a weight of its own, the expected update is not even a multiple of the
    gradient; `length_weighted_leave_one_out` repairs that. Where every length is zero the weights are equal.

    Raises:
        ScoregramError: If a length is negative or not finite, or a group has one observed rollout.

    Reference:
        OPO. Hao et al. 2025, arXiv:2505.23585.
    """
    return _weighted_contrast(rewards, lengths, observed, everyone, name="lengths", caller="length_weighted")


def length_weighted_leave_one_out(
    rewards: Rewards, *, lengths: PerRollout, observed: Observed | None = None
) -> Advantages:
    """Reward minus the length-weighted mean reward of the *other* rollouts.

    `A_i = r_i − Σ_{j≠i} ℓ_j r_j / Σ_{j≠i} ℓ_j`. OPO's baseline without its bias. Where every other length is zero the
    weights are equal.

    Raises:
        ScoregramError: If a length is negative or not finite, or a group has one observed rollout.
    """
    caller = "length_weighted_leave_one_out"
    return _weighted_contrast(rewards, lengths, observed, others, name="lengths", caller=caller)


def energy_weighted(rewards: Rewards, *, score_energies: PerRollout, observed: Observed | None = None) -> Advantages:
    """Reward minus the group's mean reward weighted by squared score norms, the rollout itself included.

    `A_i = r_i − Σ_j K_jj r_j / Σ_j K_jj`, the plug-in form of the variance-minimising constant baseline
    `E[|ψ|² r] / E[|ψ|²]`. It sees rollout `i`, so the expected update is not a multiple of the gradient.

    Args:
        rewards: `(P, R)`.
        score_energies: `(P, R)`. `K_ii = |ψ_i|²`, the diagonal of the score Gram. All zero reads as all equal.
        observed: `(P, R)` bool.

    Raises:
        ScoregramError: If an energy is negative or not finite, or a group has one observed rollout.

    Reference:
        Weaver & Tao 2001; Greensmith et al. 2004.
    """
    return _weighted_contrast(
        rewards, score_energies, observed, everyone, name="score_energies", caller="energy_weighted"
    )


def energy_weighted_leave_one_out(
    rewards: Rewards, *, score_energies: PerRollout, observed: Observed | None = None
) -> Advantages:
    """Reward minus the energy-weighted mean reward of the *other* rollouts.

    `A_i = r_i − Σ_{j≠i} K_jj r_j / Σ_{j≠i} K_jj`. Unbiased, and tends to the variance-minimising constant baseline as
    the group grows. Where every other energy is zero the weights are equal.

    Raises:
        ScoregramError: If an energy is negative or not finite, or a group has one observed rollout.

    Reference:
        Weaver & Tao 2001; Greensmith et al. 2004; the leave-one-out form is ours.

    Example:
        >>> rewards, energies = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 3.0]])
        >>> energy_weighted_leave_one_out(rewards, score_energies=energies)
        tensor([[ 1.0000, -0.2500, -0.5000]])
    """
    caller = "energy_weighted_leave_one_out"
    return _weighted_contrast(rewards, score_energies, observed, others, name="score_energies", caller=caller)


def require_weights(weights: Tensor, members: Tensor, *, name: str, caller: str) -> Tensor:
    """Weights in float64, 0 where unobserved, provided that they are finite and not negative."""
    require_same_shape(weights, members, name=name, like_name="rewards", caller=caller)
    kept = require_finite(torch.where(members, weights.detach(), 0).double(), name=name, caller=caller)
    if bool((kept < 0).any()):
        at = tuple(int(i) for i in (kept < 0).nonzero()[0])
        fail(caller, f"{name} must not be negative", f"{float(kept[at]):g} at index {at}", "Pass sizes, not signs.")
    return kept


def _weighted_contrast(rewards, weights, observed, pairing, *, name: str, caller: str) -> Tensor:
    values, members = admitted(rewards, observed, at_least=2, caller=caller)
    kept = require_weights(weights, members, name=name, caller=caller)
    return differences(values, weighted(pairing(members), kept)).to(rewards.dtype)


def _minus_per_prompt(rewards, subtracted, observed, *, name: str, caller: str) -> Tensor:
    values, members = admitted(rewards, observed, at_least=1, caller=caller)
    require_same_shape(subtracted, rewards[:, 0], name=name, like_name="one row of prompts", caller=caller)
    level = require_finite(subtracted.detach().double(), name=name, caller=caller).unsqueeze(-1)  # (P, 1)
    return torch.where(members, values - level, 0.0).to(rewards.dtype)
