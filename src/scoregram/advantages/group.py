"""One advantage per rollout, from the rewards of its own group.

Every function takes `rewards` of shape `(P, R)` and `observed`, a bool of the same shape, or `None` when no reward is
missing. Unobserved rollouts take no part in any statistic and get advantage exactly 0. A NaN or infinite reward that
is observed is an error, and so is a weight (a length, an energy) that is negative or not finite. Estimators that
compare rollouts need two observed ones in a group: one is an error, none gives zeros. (`estimate` takes NaN for a
missing reward and gives zeros to a group with too few.) They give exactly 0 to a constant group. Arithmetic is float64;
the result has the dtype of `rewards`.

The update these advantages belong to is `ĝ = (1/R) Σ_i A_i ψ_i`, with `ψ_i` the summed score of rollout `i`.

The last functions are the advantages of other trainers: TRL, verl, OpenRLHF, prime-rl and NeMo-RL.
"The GRPO advantage" is not one number: the same rewards give different advantages in different trainers. These
functions reproduce each trainer's arithmetic: its `eps`, its `ddof` and its degenerate cases. One case differs: a group
of equal rewards gives exactly 0, never a rounding residue divided by a tiny deviation.
"""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from scoregram.advantages.comparisons import (
    all_pairs,
    finite_estimator,
    group_labels,
    mean_differences,
    nonnegative_weights,
    observed_rewards,
    other_pairs,
    require_spread_options,
    standard_scores,
    weighted_pairs,
)
from scoregram.checks import require_finite, require_in_range, require_same_shape
from scoregram.groups import differ_beyond_rounding, rounding_tolerance
from scoregram.types import Advantages, Observed, PerPrompt, PerRollout, Rewards


@finite_estimator
def no_baseline(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """The reward itself.

    `A_i = r_i`. Unbiased, with a high variance: if all rewards are positive, it pushes every rollout up.

    Reference:
        REINFORCE. Williams 1992.
    """
    values, _ = observed_rewards(rewards, observed, at_least=1, caller="no_baseline")
    return values.to(rewards.dtype)


@finite_estimator
def constant_baseline(rewards: Rewards, *, baselines: PerPrompt, observed: Observed | None = None) -> Advantages:
    """Reward minus a number fixed for the prompt before its rollouts were sampled.

    `A_i = r_i − b`. Unbiased for any `b`, such as a value estimate, a running mean of earlier steps, or a constant;
    the variance is least at `b* = E[|ψ|² r] / E[|ψ|²]`.

    Reference:
        REINFORCE with a baseline. Williams 1992.
    """
    return _minus_per_prompt(rewards, baselines, observed, name="baselines", caller="constant_baseline")


@finite_estimator
def greedy_baseline(rewards: Rewards, *, greedy_rewards: PerPrompt, observed: Observed | None = None) -> Advantages:
    """Reward minus the reward of the greedy rollout of the same prompt.

    `A_i = r_i − r_greedy`. Unbiased, because the greedy rollout does not depend on the sampled ones. It is not one of
    the `R` rollouts and costs one more.

    Reference:
        ReMax. Li et al. 2023, arXiv:2310.10505.
    """
    return _minus_per_prompt(rewards, greedy_rewards, observed, name="greedy_rewards", caller="greedy_baseline")


@finite_estimator
def mean_centered(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """Reward minus the mean reward of the group, the rollout itself included.

    `A_i = r_i − (1/R) Σ_j r_j`, eqs. (14)–(16) of arXiv:2606.29238. It is `(R−1)/R` times `leave_one_out`, and so is
    its expected update: the right direction, too short by `1/R`. Every row sums to zero.

    Raises:
        ScoregramError: If a group has one observed rollout; its advantage would always be zero.

    Reference:
        Dr. GRPO. Liu et al. 2025, arXiv:2503.20783.

    Example:
        >>> mean_centered(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    values, members = observed_rewards(rewards, observed, at_least=2, caller="mean_centered")
    return mean_differences(values, all_pairs(members)).to(rewards.dtype)


@finite_estimator
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
    values, members = observed_rewards(rewards, observed, at_least=2, caller="leave_one_out")
    return mean_differences(values, other_pairs(members)).to(rewards.dtype)


@finite_estimator
def standardized(
    rewards: Rewards, *, observed: Observed | None = None, eps: float | int = 0.0, ddof: int = 1
) -> Advantages:
    """Distance of the reward from its group's mean, in standard deviations of the group.

    `A_i = (r_i − mean) / (std + eps)`, `std² = Σ_j (r_j − mean)² / (R − ddof)`. A constant group gives exactly 0 even
    with `eps = 0`. A group is constant if its rewards differ by no more than a few rounding steps of their own dtype
    and size, so a true spread of 1e-6 is kept. In every other group `Σ_i A_i² = R − ddof` at `eps = 0`, however rare
    failures are in it. Dividing by the spread therefore reweights prompts, and it changes the direction of one prompt's
    update unless the rewards take two values only.

    Reference:
        GRPO, outcome supervision. Shao et al. 2024, arXiv:2402.03300. Neither `eps` nor `ddof` is in the paper.

    Example:
        >>> standardized(torch.tensor([[3.0, 1.0], [0.1, 0.1]]), ddof=0)
        tensor([[ 1., -1.],
                [ 0.,  0.]])
    """
    require_spread_options(eps, ddof, caller="standardized")
    values, members = observed_rewards(rewards, observed, at_least=2, caller="standardized")
    scores = standard_scores(values, group_labels(members), members, eps=eps, ddof=ddof, dtype=rewards.dtype)
    return scores.to(rewards.dtype)


@finite_estimator
def length_corrected_standardized(
    rewards: Rewards, *, lengths: PerRollout, observed: Observed | None = None, eps: float | int = 0.0, ddof: int = 1
) -> Advantages:
    """Reward per token, in standard deviations of its group.

    `A_i = (q_i − mean(q)) / (std(q) + eps)` with `q_i = r_i/max(ℓ_i, 1)`. It favours short right rollouts and, where
    rewards are negative, long wrong ones. Equal rewards other than 0 still differ per token, so a group of right
    rollouts pushes towards the shorter ones; adding a constant to all rewards changes the advantages.

    Reference:
        TIC-GRPO, Pang, Luo, Jin 2025, arXiv:2508.02833, as one re-implementation has it; not verified in the paper.

    Example:
        >>> length_corrected_standardized(torch.tensor([[1.0, 1.0, 0.0]]), lengths=torch.tensor([[1, 2, 4]]))
        tensor([[ 1.,  0., -1.]])
    """
    caller = "length_corrected_standardized"
    require_spread_options(eps, ddof, caller=caller)
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    per_token = values / nonnegative_weights(lengths, members, name="lengths", caller=caller).clamp_min(1)
    scores = standard_scores(per_token, group_labels(members), members, eps=eps, ddof=ddof, dtype=rewards.dtype)
    return scores.to(rewards.dtype)


@finite_estimator
def best_of_contribution(
    rewards: Rewards, *, best_of: Int[Tensor, " prompts"], observed: Observed | None = None
) -> Advantages:
    """What a rollout adds to the best reward of `k` rollouts, averaged over all sets of `k` that hold it.

    `A_i = (R/C(R,k)) Σ_{I∋i, |I|=k} (max_I r − max_{I∖i} r)`, which is `(R/C(R,k)) Σ_{j below i} C(j, k−2) (r_i − r_j)`
    over the rewards in ascending order, `j = 0, 1, …`. The subtracted maximum does not see rollout `i`, so the expected
    update is the gradient of `E[max of k rewards]`, for binary rewards of pass@k, and not of the mean reward. No
    advantage is negative: the best rollout of a group gets the most and the worst gets 0. At `k = R` only the best one
    gets credit. A group with fewer than `k` observed rollouts gets zeros.

    Args:
        rewards: `(P, R)`.
        best_of: `(P,)` integers `k`, from 2 to `R`.
        observed: `(P, R)` bool, or None.

    Reference:
        PKPO, Walder and Karkhanis 2025, arXiv:2505.15201, with the baseline from the other `k − 1` rollouts.

    Example:
        >>> best_of_contribution(torch.tensor([[1.0, 0.0, 0.0]]), best_of=torch.tensor([2]))
        tensor([[2., 0., 0.]])
    """
    caller = "best_of_contribution"
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    require_same_shape(best_of, rewards[:, 0], name="best_of", like_name="the prompts", caller=caller)
    for k in {best_of.min().item(), best_of.max().item()} if len(best_of) else ():
        require_in_range(float(k), low=2.0, high=float(rewards.shape[1]), name="best_of", caller=caller)
    lowest_first = torch.where(members, values, torch.inf).argsort(dim=-1)  # the unobserved ones last
    ordered, counts = values.gather(-1, lowest_first), members.sum(dim=-1)
    gaps = (ordered.unsqueeze(-1) - ordered.unsqueeze(-2)).tril()  # (P, R, R): to every reward below
    added = (gaps * _sets_below(best_of, counts, rewards.shape[1]).unsqueeze(-2)).sum(dim=-1)
    advantages = torch.zeros_like(values).scatter(-1, lowest_first, added)
    return torch.where(members, advantages, 0.0).to(rewards.dtype)


def _sets_below(best_of: Tensor, counts: Tensor, size: int) -> Tensor:
    """`(P, R)`: `n C(j, k−2)/C(n, k)` at place `j` of `n` rollouts in ascending order, 0 where `n < k`."""
    table = torch.zeros(len(best_of), size, dtype=torch.float64, device=best_of.device)
    for k, n in {(int(k), int(n)) for k, n in zip(best_of, counts, strict=True) if n >= k}:
        row = [n * math.comb(j, k - 2) / math.comb(n, k) for j in range(size)]
        table[(best_of == k) & (counts == n)] = torch.tensor(row, dtype=torch.float64, device=table.device)
    return table


@finite_estimator
def length_weighted(rewards: Rewards, *, lengths: PerRollout, observed: Observed | None = None) -> Advantages:
    """Reward minus the group's mean reward weighted by rollout length, the rollout itself included.

    `A_i = r_i − Σ_j ℓ_j r_j / Σ_j ℓ_j`: the variance-minimising baseline if `|ψ_j|²` is proportional to length.
    The baseline includes rollout `i` with a weight that depends on it, so the expected update is not even a multiple of
    the gradient; `length_weighted_leave_one_out` removes that bias. If every length is zero, the weights are equal.

    Reference:
        OPO. Hao et al. 2025, arXiv:2505.23585.
    """
    return _weighted_contrast(rewards, lengths, observed, all_pairs, name="lengths", caller="length_weighted")


@finite_estimator
def length_weighted_leave_one_out(
    rewards: Rewards, *, lengths: PerRollout, observed: Observed | None = None
) -> Advantages:
    """Reward minus the length-weighted mean reward of the *other* rollouts.

    `A_i = r_i − Σ_{j≠i} ℓ_j r_j / Σ_{j≠i} ℓ_j`. OPO's baseline without its bias. If every other length is zero, the
    weights are equal.
    """
    caller = "length_weighted_leave_one_out"
    return _weighted_contrast(rewards, lengths, observed, other_pairs, name="lengths", caller=caller)


@finite_estimator
def energy_weighted(rewards: Rewards, *, score_energies: PerRollout, observed: Observed | None = None) -> Advantages:
    """Reward minus the group's mean reward weighted by squared score norms, the rollout itself included.

    `A_i = r_i − Σ_j K_jj r_j / Σ_j K_jj`, the plug-in form of the variance-minimising constant baseline
    `E[|ψ|² r] / E[|ψ|²]`. It includes rollout `i`, so the expected update is not a multiple of the gradient.
    `score_energies` are `K_ii = |ψ_i|²`, the diagonal of the score Gram. If all are zero, the weights are equal.

    Reference:
        Weaver & Tao 2001; Greensmith et al. 2004.
    """
    return _weighted_contrast(
        rewards, score_energies, observed, all_pairs, name="score_energies", caller="energy_weighted"
    )


@finite_estimator
def energy_weighted_leave_one_out(
    rewards: Rewards, *, score_energies: PerRollout, observed: Observed | None = None
) -> Advantages:
    """Reward minus the energy-weighted mean reward of the *other* rollouts.

    `A_i = r_i − Σ_{j≠i} K_jj r_j / Σ_{j≠i} K_jj`. Unbiased, and it tends to the variance-minimising constant baseline
    as the group grows. If every other energy is zero, the weights are equal.

    Reference:
        Weaver & Tao 2001; Greensmith et al. 2004; the leave-one-out form is ours.

    Example:
        >>> rewards, energies = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 3.0]])
        >>> energy_weighted_leave_one_out(rewards, score_energies=energies)
        tensor([[ 1.0000, -0.2500, -0.5000]])
    """
    caller = "energy_weighted_leave_one_out"
    return _weighted_contrast(rewards, score_energies, observed, other_pairs, name="score_energies", caller=caller)


@finite_estimator
def trl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """TRL's GRPO advantage: `(r − mean) / (std + 1e-4)`, sample deviation; rollouts without a reward get 0.

    The `1e-4` is in units of reward: advantages are visibly damped if the rewards spread over less than about 1e-3.
    """
    return standardized(rewards, observed=observed, eps=1e-4, ddof=1)


@finite_estimator
def verl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """Verl's GRPO advantage: `(r − mean) / (std + 1e-6)`, sample deviation.

    In a group of one verl uses mean 0 and deviation 1, so the advantage is the reward over `1 + 1e-6`, not zero.
    """
    values, members = observed_rewards(rewards, observed, at_least=1, caller="verl_standardized")
    scores = standard_scores(values, group_labels(members), members, eps=1e-6, ddof=1, dtype=rewards.dtype)
    alone = members & (members.sum(dim=-1, keepdim=True) == 1)
    return torch.where(alone, values / (1 + 1e-6), scores).to(rewards.dtype)


@finite_estimator
def openrlhf_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """OpenRLHF's `group_norm` advantage: `(r − mean) / (std + 1e-9)`, sample deviation (torch's default)."""
    return standardized(rewards, observed=observed, eps=1e-9, ddof=1)


@finite_estimator
def prime_rl_centered(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """prime-rl's default advantage: the reward minus the group's mean, not divided by a deviation."""
    return mean_centered(rewards, observed=observed)


@finite_estimator
def nemo_rl_standardized(rewards: Rewards, *, observed: Observed | None = None) -> Advantages:
    """NeMo-RL's default advantage: mean *and* deviation are those of the other rollouts.

    `A_i = (r_i − m_{−i}) / (s_{−i} + 1e-6)` where `s_{−i} > 0`, and `r_i − m_{−i}` where the others are constant
    (always, in a group of two). Neither statistic depends on rollout `i`, so the expected update of one prompt is
    `E[1/s]` times its gradient: the direction is exact, the length is not. Rows do not sum to zero. If a single rollout
    of a group differs, it keeps its raw difference, while the advantages of the others are divided by a deviation.

    Here the others count as constant if their spread is within rounding, so no advantage is divided by a rounding
    residue.
    """
    values, members = observed_rewards(rewards, observed, at_least=2, caller="nemo_rl_standardized")
    pairs = other_pairs(members)
    advantages = mean_differences(values, pairs)
    constant = ~differ_beyond_rounding(values.unsqueeze(-2), pairs > 0, rtol=rounding_tolerance(rewards.dtype))
    std = torch.where(constant, 1.0, _deviation_of_others(values, pairs, advantages))
    return torch.where(constant, advantages, advantages / (std + 1e-6)).to(rewards.dtype)


def _weighted_contrast(rewards, weights, observed, pairing, *, name: str, caller: str) -> Tensor:
    values, members = observed_rewards(rewards, observed, at_least=2, caller=caller)
    kept = nonnegative_weights(weights, members, name=name, caller=caller)
    return mean_differences(values, weighted_pairs(pairing(members), kept)).to(rewards.dtype)


def _minus_per_prompt(rewards, subtracted, observed, *, name: str, caller: str) -> Tensor:
    values, members = observed_rewards(rewards, observed, at_least=1, caller=caller)
    require_same_shape(subtracted, rewards[:, 0], name=name, like_name="the prompts", caller=caller)
    level = require_finite(subtracted.detach().double(), name=name, caller=caller).unsqueeze(-1)  # (P, 1)
    return torch.where(members, values - level, 0.0).to(rewards.dtype)


def _deviation_of_others(values: Tensor, pairs: Tensor, advantages: Tensor) -> Tensor:
    """Sample deviation of the rollouts that each rollout is compared with."""
    level = (values - advantages).unsqueeze(-1)  # (P, R, 1): mean of the others
    deviations = pairs * (values.unsqueeze(-2) - level)  # (P, R, R)
    # Divide by a power of two near the largest deviation before squaring: the square of 1e155 would overflow.
    scale = torch.exp2(torch.frexp(deviations.abs().amax(dim=-1, keepdim=True)).exponent.double() - 1)
    squares = (deviations / scale).square().sum(dim=-1)
    return scale.squeeze(-1) * (squares / (pairs.sum(dim=-1) - 1).clamp_min(1)).sqrt()
