"""Appendices A.1 and A.2: the proof of the advantages' variance, and how close a group mean comes to the value."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from scoregram.advantages import mean_centered
from scoregram.theory.bounds import deviation_probability, hoeffding_bound, hoeffding_group_size
from scoregram.theory.claims.grounds import EXACT
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, corrected

SIZES = (2, 3, 5)
LAWS = (((0.0, 1.0), (0.7, 0.3)), ((0.0, 0.5, 1.0), (0.2, 0.5, 0.3)))
"""Rewards of one rollout and their chances."""
SUCCESS = tuple(k / 40 for k in range(41))
EPSILONS = (0.05, 0.1, 0.2, 0.3, 0.4)

PRINTED = {
    (2, 0.3): 1.34,
    (2, 0.2): 1.70,
    (2, 0.1): 1.92,
    (4, 0.3): 0.93,
    (4, 0.2): 1.44,
    (4, 0.1): 1.85,
    (8, 0.3): 0.44,
    (8, 0.2): 1.05,
    (8, 0.1): 1.71,
    (16, 0.3): 0.10,
    (16, 0.2): 0.55,
    (16, 0.1): 1.47,
}
"""The table of A.2 as printed: group size and deviation to the bound."""

LABELLED_VACUOUS = frozenset(PRINTED) - {(8, 0.3), (16, 0.3), (16, 0.2)}


def ordered_groups(law: tuple[tuple[float, ...], tuple[float, ...]], size: int) -> tuple[Tensor, Tensor]:
    """Every ordered group of `R` rewards `(C, R)` and its probability `(C,)`."""
    rewards, chances = (torch.tensor(x, dtype=torch.float64) for x in law)
    picks = torch.cartesian_prod(*[torch.arange(len(rewards))] * size)
    return rewards[picks], chances[picks].prod(dim=-1)


def covariance(weight: Tensor, first: Tensor, second: Tensor) -> float:
    """Covariance of two columns under the probabilities of their rows."""
    return float(weight @ ((first - weight @ first) * (second - weight @ second)))


def over_groups(measure: Callable[[Tensor, Tensor, Tensor, int], float]) -> float:
    """Largest value of a measure of (probability, rewards, advantages, R) over laws and group sizes."""
    found = []
    for law in LAWS:
        for size in SIZES:
            rewards, weight = ordered_groups(law, size)
            found.append(abs(measure(weight, rewards, mean_centered(rewards), size)))
    return max(found)


def _equation_24() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variances = [covariance(weight, column, column) for column in rewards.T]
        parts = ((size - 1) / size) ** 2 * variances[0] + sum(variances[1:]) / size**2
        return covariance(weight, advantages[:, 0], advantages[:, 0]) - parts

    worst = over_groups(gap)
    return as_printed(worst <= EXACT, {"largest gap": worst, "group sizes": "2, 3, 5"})


def _equation_25() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variance = covariance(weight, rewards[:, 0], rewards[:, 0])
        return covariance(weight, advantages[:, 0], advantages[:, 0]) - (size - 1) / size * variance

    worst = over_groups(gap)
    steps = max(abs(((r - 1) ** 2 + (r - 1)) / r**2 - (r - 1) / r) for r in range(2, 65))
    return as_printed(max(worst, steps) <= EXACT, {"largest gap": worst, "gap of the arithmetic, R to 64": steps})


def _covariance_step() -> Finding:
    def zero(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        own = covariance(weight, advantages[:, 0], advantages[:, 0])
        pair = covariance(weight, advantages[:, 0], advantages[:, 1])
        return size * own + size * (size - 1) * pair

    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variance = covariance(weight, rewards[:, 0], rewards[:, 0])
        return covariance(weight, advantages[:, 0], advantages[:, 1]) + variance / size

    total, worst = over_groups(zero), over_groups(gap)
    return as_printed(max(total, worst) <= EXACT, {"Var(Σ A_i)": total, "largest gap to -σ²/R": worst})


def _hoeffding() -> Finding:
    closest, slack = 0.0, 2.0
    for size in (1, 2, 3, 4, 8, 16, 32, 64):
        for epsilon in EPSILONS:
            bound = hoeffding_bound(size, epsilon=epsilon)
            tail = max(deviation_probability(p, size, epsilon=epsilon) for p in SUCCESS)
            closest, slack = max(closest, tail / bound), min(slack, bound - tail)
    return as_printed(slack >= 0, {"largest exact tail / bound": closest, "least slack": slack})


def _entry(size: int, epsilon: float) -> Finding:
    printed, value = PRINTED[size, epsilon], hoeffding_bound(size, epsilon=epsilon)
    tail = max(deviation_probability(p, size, epsilon=epsilon) for p in SUCCESS)
    evidence = {"printed": printed, "bound": value, "largest exact tail, binary": tail}
    right = round(value, 2) == printed
    sound = tail <= value and abs(value - 2 * math.exp(-2 * size * epsilon**2)) <= EXACT
    if right:
        return as_printed(sound, evidence)
    side = "below the bound, so it promises too much" if printed < value else "above it, so it is a bound still"
    return corrected(
        printed=right,
        truth=sound,
        evidence=evidence,
        correction=f"2 exp(-2·{size}·{epsilon}²) = {value:.3f}; the printed {printed:.2f} is {side}.",
    )


def _vacuous_labels() -> Finding:
    bounds = {at: hoeffding_bound(at[0], epsilon=at[1]) for at in PRINTED}
    vacuous = {at for at, bound in bounds.items() if bound >= 1}
    wrong = sorted(vacuous ^ LABELLED_VACUOUS)
    return corrected(
        printed=not wrong,
        truth=wrong == [(4, 0.3)],
        evidence={
            "labels": len(LABELLED_VACUOUS),
            "bounds ≥ 1": len(vacuous),
            "wrong": "  ".join(f"R={size} ε={epsilon}" for size, epsilon in wrong),
            "bound there": bounds[4, 0.3],
        },
        correction="At R = 4, ε = 0.3 the bound is 0.974, below one: weak, not vacuous. The other eight labels are right.",
    )


def _non_trivial() -> Finding:
    first = {epsilon: hoeffding_group_size(epsilon=epsilon, failure=1) for epsilon in (0.3, 0.2, 0.1)}
    needed = {epsilon: hoeffding_group_size(epsilon=epsilon, failure=0.05) for epsilon in first}
    falls = all(
        hoeffding_bound(2 * size, epsilon=epsilon) < hoeffding_bound(size, epsilon=epsilon)
        and hoeffding_bound(size, epsilon=2 * epsilon) < hoeffding_bound(size, epsilon=epsilon)
        for size, epsilon in PRINTED
    )
    return as_printed(
        falls and all(size > 2 for size in first.values()),
        {f"R for < 1, ε={epsilon}": size for epsilon, size in first.items()}
        | {f"R for ≤ 0.05, ε={epsilon}": size for epsilon, size in needed.items()},
    )


def _baseline_variance() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        mean = rewards[:, 0] - advantages[:, 0]  # v̂
        return covariance(weight, mean, mean) - covariance(weight, rewards[:, 0], rewards[:, 0]) / size

    worst = over_groups(gap)
    sd = {f"sd of v̂ at σ = 1/2, R={size}": 0.5 / size**0.5 for size in (2, 4)}
    return as_printed(worst <= EXACT, {"largest gap to σ²/R": worst} | sd)


def _common_error() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        value = weight @ rewards[:, 0]
        error = advantages - (rewards - value)
        return float((error - (value - rewards.mean(dim=-1, keepdim=True))).abs().max())

    worst = over_groups(gap)
    return as_printed(worst <= EXACT, {"largest gap": worst})


def _simultaneous() -> Finding:
    slack, apart = 2.0, 0.0
    for size in (2, 4, 8):
        rewards, _ = ordered_groups(LAWS[0], size)
        for success in SUCCESS[4::8]:
            right = rewards.sum(dim=-1)
            weight = success**right * (1 - success) ** (size - right)
            errors = (mean_centered(rewards) - (rewards - success)).abs()  # (C, R)
            for epsilon in EPSILONS:
                # As in `deviation_probability`: 0.5 - 0.2 is not above 0.3.
                within = errors <= epsilon + 1e-9 / size
                every, one = (float(weight @ x.double()) for x in (within.all(dim=-1), within[:, 0]))
                slack = min(slack, every - 1 + hoeffding_bound(size, epsilon=epsilon))
                apart = max(apart, abs(every - one))
    return as_printed(
        slack >= 0 and apart <= EXACT, {"least slack": slack, "|P(all within ε) - P(one within ε)|": apart}
    )


APPENDIX_A1_A2 = (
    Claim(
        "eq-24",
        "A.1, eq. (24)",
        "The variance of an advantage is ((R-1)/R)² Var(r_i) plus the other rollouts' variances over R².",
        _equation_24,
    ),
    Claim("eq-25", "A.1, eq. (25)", "That sum is (R-1)/R σ².", _equation_25),
    Claim(
        "a1-covariance",
        "A.1, covariance",
        "A sum of zero variance makes two advantages covary by -Var(A_i)/(R-1) = -σ²/R.",
        _covariance_step,
    ),
    Claim(
        "hoeffding",
        "A.2 (the statement it proves is referenced as '??')",
        "P(|v̂ - v| > ε) ≤ 2 exp(-2Rε²) for rewards in [0, 1].",
        _hoeffding,
    ),
    *(
        Claim(
            f"hoeffding-r{size}-e{epsilon}",
            f"A.2, table, R={size}, ε={epsilon}",
            f"The bound at R = {size}, ε = {epsilon} is {printed:.2f}.",
            partial(_entry, size, epsilon),
        )
        for (size, epsilon), printed in PRINTED.items()
    ),
    Claim(
        "hoeffding-vacuous-labels",
        "A.2, table",
        "Nine of the twelve bounds say nothing and are labelled so.",
        _vacuous_labels,
    ),
    Claim(
        "hoeffding-needs-large-groups",
        "A.2, below the table",
        "The bound says something only for larger R or larger ε.",
        _non_trivial,
    ),
    Claim(
        "a2-baseline-variance",
        "A.2, below the table",
        "The group mean has variance σ²/R, much of it at R = 2 or 4.",
        _baseline_variance,
    ),
    Claim(
        "a2-common-error",
        "A.2, connection to advantage quality",
        "Every advantage of a group is off by the same number, v - v̂.",
        _common_error,
    ),
    Claim(
        "a2-all-advantages-at-once",
        "A.2, connection to advantage quality",
        "With probability at least 1 - 2 exp(-2Rε²) all advantages of a group are within ε of r_i - v.",
        _simultaneous,
    ),
)
"""The claims of Appendices A.1 and A.2, in their order."""
