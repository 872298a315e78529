"""Live and dead groups, and effective rollouts, from rewards and advantages alone."""

import math
import sys
from dataclasses import dataclass

import torch

from scoregram.checks import fail, require_finite, require_in_range
from scoregram.groups import judged_rollouts, live_groups, rounding_tolerance
from scoregram.types import Advantages, PromptMask, Rewards


@dataclass(frozen=True)
class GroupOutcomes:
    """Five masks over prompts; every group is in exactly one of them.

    A rollout without a reward (NaN) does not count: an all-right group with one missing reward is all right.
    """

    alive: PromptMask
    """Live: rewards differ inside the group."""
    all_right: PromptMask
    """Dead: every judged rollout has the reward that means right."""
    all_wrong: PromptMask
    """Dead: every judged rollout has the reward that means wrong."""
    tied: PromptMask
    """Dead: all rewards are equal, at another value."""
    unjudged: PromptMask
    """Dead: no rollout has a reward."""

    @property
    def fraction_alive(self) -> float:
        """Share of live groups; `nan` without a group."""
        return float(self.alive.double().mean())


def group_outcomes(
    rewards: Rewards, *, right: float | int = 1.0, wrong: float | int = 0.0, rtol: float | None = None
) -> GroupOutcomes:
    """Masks of the live groups, of the dead ones (all right, all wrong, tied), and of the unjudged ones.

    A group is dead if `max r - min r <= rtol · max |r|` over its judged rollouts, the spread that rounding alone can
    cause (`scoregram.groups.live_groups`); such a group has zero group-relative advantages. All-right groups call for
    harder prompts, all-wrong ones for easier prompts or more rollouts, tied ones for a finer reward, unjudged ones for
    a reward function that returns a value. A group with one judged rollout is always dead.

    Args:
        rewards: `(P, R)`, NaN where a reward is missing.
        right: The reward that means right.
        wrong: The reward that means wrong.
        rtol: Default: `ROUNDING_STEPS` times the machine epsilon of the dtype of `rewards`, the tolerance of the
            estimators; rewards of size 1e-6 that differ still count as different. A dead group is right (wrong) if its
            mean reward is within `rtol · max(|right|, |wrong|)` of that value.

    Raises:
        ScoregramError: If a reward is infinite, a group is empty, or `right` equals `wrong`.

    Example:
        >>> outcomes = group_outcomes(torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.1, 0.1], [1.0, 0.0]]))
        >>> outcomes.fraction_alive, outcomes.tied
        (0.25, tensor([False, False,  True, False]))
    """
    if not (math.isfinite(right) and math.isfinite(wrong)) or right == wrong:
        fail("group_outcomes", "right and wrong must be two finite rewards", f"{right} and {wrong}", "Pass both.")
    tolerance = rounding_tolerance(rewards.dtype) if rtol is None else rtol
    alive = live_groups(rewards, rtol=tolerance, caller="group_outcomes")
    judged = judged_rollouts(rewards, caller="group_outcomes")
    value = torch.where(judged, rewards.detach().double(), 0).sum(dim=1) / judged.sum(dim=1)  # NaN without a reward
    near = tolerance * max(abs(right), abs(wrong))
    all_right = ~alive & ((value - right).abs() <= near)
    all_wrong = ~alive & ((value - wrong).abs() <= near)
    unjudged = ~judged.any(dim=1)
    return GroupOutcomes(alive, all_right, all_wrong, ~(alive | all_right | all_wrong | unjudged), unjudged)


def effective_fraction(advantages: Advantages, *, epsilon: float | int) -> float:
    """Share of rollouts with `|A| > epsilon`: the ε-effective rollouts.

    The comparison is strict up to `ROUNDING_STEPS` machine epsilons of the dtype, so that `1 - 0.7` is not above
    `0.3`. Reads: `0` no rollout has an advantage above ε; `1` all have; `nan` without a rollout. If advantages are
    rewards minus their group mean, `effective_fraction_bound` bounds its expectation over groups.

    Example:
        >>> effective_fraction(torch.tensor([[0.75, -0.25, -0.25, -0.25]]), epsilon=0.5)
        0.25
    """
    a = require_finite(advantages.detach(), name="advantages", caller="effective_fraction").double()
    _require_threshold(epsilon, caller="effective_fraction", zero_allowed=True)
    return float((a.abs() > epsilon * (1 + rounding_tolerance(advantages.dtype))).double().mean())


def effective_fraction_bound(reward_variance: float | int, group_size: int, *, epsilon: float | int) -> float:
    """Chebyshev's upper bound on the expected ε-effective fraction of mean-centred advantages.

    `(R-1) σ² / (R ε²)`, from `Var(r_i - r̄) = σ² (R-1)/R`. It is not clipped: at one or above, and at `inf` for an `ε`
    too small to square, the bound is vacuous. It bounds from above only, so it cannot show that rollouts are effective;
    compare it with `effective_probability`.

    Reference:
        arXiv:2606.29238, eq. (20).

    Example:
        >>> effective_fraction_bound(0.25, 8, epsilon=0.5)
        0.875
    """
    caller = "effective_fraction_bound"
    variance = float(reward_variance)
    require_in_range(variance, low=0.0, high=sys.float_info.max, name="reward_variance", caller=caller)
    _require_rollouts(group_size, at_least=1, caller=caller)
    _require_threshold(epsilon, caller=caller, zero_allowed=False)
    return (group_size - 1) / group_size * variance / epsilon / epsilon


def effective_probability(success: float | int, group_size: int, *, epsilon: float | int) -> float:
    """Exact chance that a rollout is ε-effective, for rewards in {0, 1} centred by their group mean.

    `Σ_k C(R,k) p^k (1-p)^(R-k) [ (k/R) 1(1 - k/R > ε) + (1 - k/R) 1(k/R > ε) ]`, `p` the chance of success.
    At `ε = 0` it is the chance of a mixed group: in a mixed binary group every advantage differs from zero.

    Example:
        >>> effective_probability(0.5, 2, epsilon=0.25)
        0.5
    """
    _require_success(success, group_size, at_least=1, caller="effective_probability")
    _require_threshold(epsilon, caller="effective_probability", zero_allowed=True)
    threshold = epsilon * group_size * (1 + 1e-12)  # rounding: 0.29 · 100 is below 29 in float64
    chances = right_chances(success, group_size)
    effective = (
        k * (group_size - k > threshold) + (group_size - k) * (k > threshold)
        for k in range(1, group_size)  # k right; at 0 and R all advantages are zero
    )
    return math.fsum(chance * number for chance, number in zip(chances[1:-1], effective, strict=True)) / group_size


def right_chances(success: float | int, group_size: int) -> list[float]:
    """Chance of `k` right rollouts in a group, for `k = 0 … R`: `C(R,k) p^k (1-p)^(R-k)`.

    Built outwards from the likeliest `k` and divided by the sum, so that no binomial coefficient or power leaves the
    range of float64, however large the group is.

    Example:
        >>> right_chances(0.5, 2)
        [0.25, 0.5, 0.25]
    """
    _require_success(success, group_size, at_least=1, caller="right_chances")
    likeliest = min(math.floor((group_size + 1) * success), group_size)
    chances = [0.0] * likeliest + [1.0] + [0.0] * (group_size - likeliest)
    for k in range(likeliest, group_size):
        chances[k + 1] = chances[k] * (group_size - k) / (k + 1) * (success / (1 - success))
    for k in range(likeliest, 0, -1):
        chances[k - 1] = chances[k] * k / (group_size - k + 1) * ((1 - success) / success)
    total = math.fsum(chances)
    return [chance / total for chance in chances]


def mixed_probability(success: float | int, group_size: int) -> float:
    """Chance that a group of `R` right-or-wrong rollouts holds both kinds: `1 - p^R - (1-p)^R`.

    Reads: `0` at `p` of zero or one and in a group of one; largest, `1 - 2^(1-R)`, at `p = 1/2`. Accurate to machine
    precision for rare successes and rare failures, where the plain formula cancels.

    Example:
        >>> mixed_probability(0.5, 4)
        0.875
    """
    _require_success(success, group_size, at_least=1, caller="mixed_probability")
    rare = float(min(success, 1 - success))
    if group_size == 1 or rare == 0:
        return 0.0
    return -math.expm1(group_size * math.log1p(-rare)) - rare**group_size


def expected_success_given_mixed(success: float | int, group_size: int) -> float:
    """Expected share of right rollouts in a group, given that the group is mixed.

    `E[k/R | 0 < k < R] = (p - p^R) / (1 - p^R - (1-p)^R)`. Keeping only mixed groups moves the share towards 1/2: it
    tends to `1/R` as `p → 0`, to `1 - 1/R` as `p → 1`, and is `1/2` at `p = 1/2` and for `R = 2`.
    `nan` at `p` of zero or one, where no group is mixed.

    Raises:
        ScoregramError: If `R < 2`; a group of one is never mixed.

    Example:
        >>> expected_success_given_mixed(0.5, 8)
        0.5
    """
    _require_success(success, group_size, at_least=2, caller="expected_success_given_mixed")
    rare = float(min(success, 1 - success))
    if rare == 0:
        return math.nan
    share = rare * -math.expm1((group_size - 1) * math.log(rare)) / mixed_probability(rare, group_size)
    return share if success <= 0.5 else 1 - share  # p → 1-p swaps right and wrong


def _require_threshold(epsilon: float | int, *, caller: str, zero_allowed: bool) -> None:
    if not (epsilon >= 0 if zero_allowed else epsilon > 0) or math.isinf(epsilon):
        requirement = f"epsilon must be finite and {'not negative' if zero_allowed else 'positive'}"
        fail(caller, requirement, epsilon, "Pass the smallest advantage that should count.")


def _require_success(success: float | int, group_size: int, *, at_least: int, caller: str) -> None:
    require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller=caller)
    _require_rollouts(group_size, at_least=at_least, caller=caller)


def _require_rollouts(group_size: int, *, at_least: int, caller: str) -> None:
    if group_size < at_least:
        fail(caller, f"group_size must be at least {at_least}", group_size, "Sample more rollouts per prompt.")
