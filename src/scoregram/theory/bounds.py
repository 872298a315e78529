"""Bounds that the papers use, and the exact numbers they bound.

Each function is one theorem: *Statement*, *Proof*, *Assumes*, *Checked by*.
"""

import math

from scoregram.checks import fail, require_in_range
from scoregram.statistics import right_chances

_COUNT_ROUNDING = 1e-9
"""A count within this many rollouts of a threshold is not above it: 0.5 - 0.2 is not above 0.3."""


def hoeffding_bound(group_size: int, *, epsilon: float | int, reward_range: float | int = 1.0) -> float:
    """Hoeffding's bound on the chance that the mean of `R` rewards is off by more than `epsilon`.

    Statement: `P(|r̄ - E r| > ε) <= 2 exp(-2 R ε² / range²)`.
    Proof: a centred variable in an interval of that length has `E exp(λ(r - E r)) <= exp(λ² range² / 8)`; Markov's
    inequality for `exp(λ R (r̄ - E r))` at the best `λ`, once for each tail.
    Assumes: independent rewards in an interval of length `reward_range`, whose ends do not depend on the sample.
    Checked by: exact binomial tails over a grid (`deviation_probability`).

    The bound is not clipped: at one or above it is vacuous.

    Example:
        >>> round(hoeffding_bound(16, epsilon=0.3), 3)
        0.112
    """
    _require_rollouts(group_size, "hoeffding_bound")
    _require_positive(epsilon, name="epsilon", caller="hoeffding_bound")
    _require_positive(reward_range, name="reward_range", caller="hoeffding_bound")
    return 2 * math.exp(-2 * group_size * (epsilon / reward_range) ** 2)


def hoeffding_group_size(*, epsilon: float | int, failure: float | int, reward_range: float | int = 1.0) -> int:
    """Fewest rollouts for which Hoeffding's bound at `epsilon` is at most `failure`.

    Statement: `ceil(range² ln(2 / failure) / (2 ε²))`, and at least one.
    Proof: solve `hoeffding_bound = failure` for `R`; the bound falls with `R`.
    Assumes: as `hoeffding_bound`. `failure` in `(0, 2)`; at one the result is the first size whose bound is not
    vacuous.
    Checked by: the bound at this size and at one less.

    Example:
        >>> [hoeffding_group_size(epsilon=epsilon, failure=0.05) for epsilon in (0.3, 0.2, 0.1)]
        [21, 47, 185]
    """
    _require_positive(epsilon, name="epsilon", caller="hoeffding_group_size")
    _require_positive(reward_range, name="reward_range", caller="hoeffding_group_size")
    _require_positive(failure, name="failure", caller="hoeffding_group_size")
    rollouts = max(1, math.ceil(math.log(2 / failure) / (2 * (epsilon / reward_range) ** 2)))
    # The logarithm is rounded: step to the size at which the bound itself crosses `failure`.
    while hoeffding_bound(rollouts, epsilon=epsilon, reward_range=reward_range) > failure:
        rollouts += 1
    while rollouts > 1 and hoeffding_bound(rollouts - 1, epsilon=epsilon, reward_range=reward_range) <= failure:
        rollouts -= 1
    return rollouts


def deviation_probability(success: float | int, group_size: int, *, epsilon: float | int) -> float:
    """Exact chance that the mean of `R` right-or-wrong rewards is off by more than `epsilon`.

    Statement: `Σ_k C(R,k) p^k (1-p)^(R-k) 1(|k - R p| > R ε)`, strictly, up to a rounding of 1e-9 rollouts.
    Proof: the number of right rollouts is binomial.
    Assumes: independent rewards in {0, 1}, each right with chance `success`.
    Checked by: listing all `2^R` groups.

    Example:
        >>> deviation_probability(0.5, 2, epsilon=0.3)
        0.5
    """
    caller = "deviation_probability"
    require_in_range(float(success), low=0.0, high=1.0, name="the chance of success", caller=caller)
    _require_rollouts(group_size, caller)
    _require_positive(epsilon, name="epsilon", caller=caller)
    far = group_size * epsilon + _COUNT_ROUNDING
    chances = right_chances(success, group_size)
    return min(1.0, math.fsum(chance for k, chance in enumerate(chances) if abs(k - group_size * success) > far))


def turn_offset_bound(turns_before: int, *, largest_reward: float | int, value_change: float | int) -> float:
    """Bound on the error of a rollout-level advantage at a turn, from the rewards before it.

    Statement: `|Σ_{h'<h} r_h' + v(s_h) - v(s_0)| <= (h-1) max|r| + |v(s_h) - v(s_0)|`. `value_change` may be any bound
    on `|v(s_h) - v(s_0)|`: `2 max|v|` always is one, `max|v|` is one if no reward is negative.
    Proof: the triangle inequality; values of rewards that are not negative lie in `[0, max v]`.
    Assumes: `largest_reward` bounds `|r|`, not only `r`.
    Checked by: every state of every world of the lab.

    Reference:
        arXiv:2606.29238, A.3.

    Example:
        >>> turn_offset_bound(2, largest_reward=1.0, value_change=0.5)
        2.5
    """
    caller = "turn_offset_bound"
    if turns_before < 0:
        fail(caller, "the number of turns before must not be negative", turns_before, "Count from 0 at the first turn.")
    require_in_range(float(largest_reward), low=0.0, high=math.inf, name="largest_reward", caller=caller)
    require_in_range(float(value_change), low=0.0, high=math.inf, name="value_change", caller=caller)
    return float(turns_before * largest_reward + value_change)


def return_range_bound(value: float | int, *, lowest_return: float | int, highest_return: float | int) -> float:
    """Bound on the error of a rollout-level advantage at *any* turn: it does not grow with the turn.

    Statement: `|Σ_{h'<h} r_h' + v(s_h) - v(s_0)| <= max(G_max - v(s_0), v(s_0) - G_min)` for every `h`.
    Proof: `Σ_{h'<h} r_h' + v(s_h) = E[G | s_h]`, a mean of returns, so it lies between the lowest and the highest.
    Assumes: `s_h` is the whole history, which determines the past rewards; all returns lie in the given interval.
    Checked by: every state of every world of the lab.

    Example:
        >>> return_range_bound(1.0, lowest_return=0.0, highest_return=3.0)
        2.0
    """
    if not lowest_return <= value <= highest_return:
        got = f"{value} outside [{lowest_return}, {highest_return}]"
        fail("return_range_bound", "the value must lie between the returns", got, "A mean lies between its terms.")
    return float(max(highest_return - value, value - lowest_return))


def suboptimality_bound(
    steps: int,
    *,
    gap: float | int,
    step_size: float | int,
    smoothness: float | int,
    pl_constant: float | int,
    noise: float | int,
) -> float:
    """Bound on the expected distance from the best objective after `n` noisy gradient steps of one size.

    Statement: with `ρ = 1 - 2μβ + Lμβ²`, `E gap_n <= ρ^n gap_0 + Lβ² M / (4μβ - 2Lμβ²)`.
    Proof: smoothness gives `E gap_{i+1} <= E gap_i - (β - Lβ²/2) E|∇J|² + Lβ² M/2`, and `|∇J|² >= 2μ gap` turns it into
    `E gap_{i+1} <= ρ E gap_i + Lβ² M/2`; sum the geometric series.
    Assumes: `J` is `L`-smooth, `|∇J|² >= 2μ (J* - J)` everywhere, the gradient is unbiased with error at most `M`, and
    `0 < β < 2/L`, so that a step improves `J`.
    Checked by: a quadratic, where the bound is attained if all curvatures are equal.

    Reference:
        arXiv:2603.01162, Lemma 6, constant step.
    """
    caller = "suboptimality_bound"
    for name, value in (("smoothness", smoothness), ("pl_constant", pl_constant), ("step_size", step_size)):
        _require_positive(value, name=name, caller=caller)
    if pl_constant > smoothness:
        remedy = "The PL constant of a function is at most its smoothness."
        fail(caller, "pl_constant must not exceed smoothness", pl_constant, remedy)
    if not step_size < 2 / smoothness:
        fail(caller, f"step_size must be below 2/L = {2 / smoothness:g}", step_size, "Take a smaller step.")
    if min(steps, gap, noise) < 0:
        got = f"{steps}, {gap} and {noise}"
        fail(caller, "steps, gap and noise must not be negative", got, "Pass 0 or more.")
    gain = 2 * pl_constant * step_size - smoothness * pl_constant * step_size**2
    return (1 - gain) ** steps * gap + smoothness * step_size**2 * noise / (2 * gain)


def _require_rollouts(group_size: int, caller: str) -> None:
    if group_size < 1:
        fail(caller, "group_size must be at least 1", group_size, "Pass the number of rollouts per prompt.")


def _require_positive(value: float | int, *, name: str, caller: str) -> None:
    if not 0 < value < math.inf:
        fail(caller, f"{name} must be positive and finite", value, "Pass a size above zero.")
