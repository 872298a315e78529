"""Section 4 and Appendices A.1 and A.2: the advantages of a group, their variance, and how well the group mean estimates
the value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from scoregram.advantages import mean_centered
from scoregram.statistics import (
    effective_fraction,
    effective_fraction_bound,
    effective_probability,
    mixed_probability,
    update_norm,
)
from scoregram.studies.grpo_rank.claims.grounds import (
    EXACT,
    advantages,
    binary_group,
    claim,
    coin,
    drawn_groups,
    lab_world,
    lab_worlds,
    moments,
    prompts_of,
    reward_groups,
)
from scoregram.studies.ledger import Finding, as_printed, corrected, refuted
from scoregram.theory import (
    advantage_covariance,
    deviation_probability,
    gradient_norm_bound,
    group_mean_scale,
    hoeffding_bound,
    hoeffding_group_size,
    standardized_weight,
    update_norm_bound,
)

_SIZES = (2, 3, 4, 8)
_SUCCESS = (0.5, 0.9, 0.99, 0.999)


def zero_sum() -> Finding:
    """Sum of the advantages of every group of every world."""
    worst, groups = 0.0, 0
    for truth in lab_worlds():
        for prompt, size in product(prompts_of(truth), _SIZES):
            a = advantages("mean", reward_groups(truth, prompt, size).rewards)
            worst, groups = max(worst, float(a.sum(dim=-1).abs().max())), groups + len(a)
    return as_printed(worst < EXACT, {"groups": groups, "largest |Σ A_i|": worst})


def _second_moments() -> tuple[float, float, int]:
    """Largest error of the variance and of the covariance against enumeration, and the number of cases."""
    variance, covariance, cases = 0.0, 0.0, 0
    for truth in lab_worlds():
        for prompt, size in product(prompts_of(truth), _SIZES):
            groups = reward_groups(truth, prompt, size)
            a = advantages("mean", groups.rewards)
            squares, total = a.square().sum(dim=-1), a.sum(dim=-1)
            expected = advantage_covariance(float(truth.reward_variance[prompt]), size)
            variance = max(variance, abs(groups.mean(squares) / size - float(expected[0, 0])))
            pairs = groups.mean(total.square() - squares) / (size * (size - 1))
            covariance, cases = max(covariance, abs(pairs - float(expected[0, 1]))), cases + 1
    return variance, covariance, cases


def variance_of_advantages() -> Finding:
    """`E A_i²` over all groups against `σ² (R-1)/R`."""
    error, _, cases = _second_moments()
    return as_printed(error < EXACT, {"worlds x prompts x R": cases, "largest error": error})


def covariance_of_advantages() -> Finding:
    """`E A_i A_j` over all groups against `-σ²/R`."""
    _, error, cases = _second_moments()
    return as_printed(error < EXACT, {"worlds x prompts x R": cases, "largest error": error})


def chebyshev() -> Finding:
    """The expected ε-effective fraction against its bound, exactly, for coins and for every world."""
    slack, vacuous, cases = math.inf, 0, 0
    for p, size, epsilon in product((0.5, 0.7, 0.9, 0.99), (2, 4, 8, 16), (0.1, 0.25, 0.5)):
        bound = effective_fraction_bound(p * (1 - p), size, epsilon=epsilon)
        slack = min(slack, bound - effective_probability(p, size, epsilon=epsilon))
        vacuous, cases = vacuous + (bound >= 1), cases + 1
    for truth in lab_worlds():
        for prompt, epsilon in product(prompts_of(truth), (0.1, 0.25, 0.5)):
            groups = reward_groups(truth, prompt, 4)
            shares = torch.tensor(
                [effective_fraction(a[None], epsilon=epsilon) for a in advantages("mean", groups.rewards)]
            )
            bound = effective_fraction_bound(float(truth.reward_variance[prompt]), 4, epsilon=epsilon)
            slack = min(slack, bound - groups.mean(shares))
            vacuous, cases = vacuous + (bound >= 1), cases + 1
    evidence = {
        "cases": cases,
        "least bound - exact": slack,
        "cases where the bound is 1 or more": vacuous,
        "p = 0.5, R = 8, ε = 0.5: bound": effective_fraction_bound(0.25, 8, epsilon=0.5),
        "p = 0.5, R = 8, ε = 0.5: exact": effective_probability(0.5, 8, epsilon=0.5),
    }
    return as_printed(slack > -EXACT, evidence)


def ineffective_rollouts() -> Finding:
    """Share of the update that comes from rollouts that are not ε-effective: seven right of eight, at ε = 1/4."""
    epsilon, a = 0.25, advantages("mean", binary_group(7, 8))
    small = a[a.abs() <= epsilon]
    weight = float(small.abs().sum() / a.abs().sum())
    group = drawn_groups(lab_world("output_only_binary", "tabular"), prompt=0, group_size=8, number=1, distinct=True)[0]
    chosen = advantages("mean", group.rewards)
    small_ones = chosen.abs() <= chosen.abs().max() - EXACT
    part = float((chosen * small_ones) @ group.scores @ (chosen @ group.scores)) / update_norm(group.gram, chosen) ** 2
    smallest = min(
        float(advantages("mean", binary_group(k, size)).abs().min()) * size for size in _SIZES for k in range(1, size)
    )
    return refuted(
        printed=weight < 0.05,
        truth=abs(weight - 0.5) < EXACT and smallest > 1 - EXACT,
        evidence={
            "R = 8, k = 7: share of rollouts that are 1/4-effective": effective_fraction(a[None], epsilon=epsilon),
            "share of Σ|A| in the others": weight,
            f"drawn group, k = {int(group.rewards.sum())}: share of |ĝ|² from the smaller |A|": part,
            "least R |A_i| in a mixed group": smallest,
        },
        correction="An upper bound on how many are effective proves no sparsity, and the small ones add up: advantages sum "
        "to zero, so the seven small ones of (7 x 1/8, -7/8) weigh as much as the large one. In a mixed right-or-wrong "
        "group no |A_i| is below 1/R.",
    )


def norm_scales_with_spread() -> Finding:
    """Root mean square of the update over `σ_r` for a family of coins, and the bounds that do hold."""
    size, ratios, signals = 8, [], []
    for p in _SUCCESS:
        truth = coin(p)
        update = moments(truth, "mean", prompt=0, group_size=size)
        sigma = float(truth.reward_variance[0].sqrt())
        ratios.append(math.sqrt(update.variance + float(update.expected.square().sum())) / sigma)
        signals.append(float(update.expected.norm()) / sigma)
    slack = math.inf
    for truth in lab_worlds("output_only", "output_only_binary"):
        for prompt in prompts_of(truth):
            bound = gradient_norm_bound(float(truth.reward_variance[prompt]), truth.fisher[prompt])
            slack = min(slack, bound - float(truth.gradient[prompt].norm()))
            for group in drawn_groups(truth, prompt=prompt, group_size=size, number=20):
                length = update_norm(group.gram, advantages("mean", group.rewards) / size)
                slack = min(slack, update_norm_bound(group.gram, group.rewards) - length)
    return corrected(
        printed=max(signals) - min(signals) < 0.05 * max(signals),
        truth=slack > -EXACT and max(ratios) <= 1 + EXACT,
        evidence={
            **{f"rms |ĝ| / σ at p = {p}": ratio for p, ratio in zip(_SUCCESS, ratios, strict=True)},
            "|E ĝ| / σ at p = 0.5": signals[0],
            f"|E ĝ| / σ at p = {_SUCCESS[-1]}": signals[-1],
            "least bound - length": slack,
        },
        correction="An upper bound, not a proportion: |ĝ| <= s √(λ_max(K)/R) with s the spread of this group's rewards, and "
        "|∇J| <= σ_r √λ_max(F). How far below the bound depends on the scores, which change with the policy: for one logit "
        "the signal is σ_r², and only the noise scales with σ_r.",
    )


@dataclass(frozen=True)
class _Vanishing:
    """The largest advantage of a group as `p → 1`."""

    mean_square: list[float]
    """`E max A²` over all groups."""
    given_mixed: list[float]
    """`E[max |A|]` over mixed groups."""

    def evidence(self) -> dict[str, float | int]:
        every = {f"p = {p}: E max A²": x for p, x in zip(_SUCCESS, self.mean_square, strict=True)}
        ends = zip(_SUCCESS[::3], self.given_mixed[::3], strict=True)
        return every | {f"p = {p}: E[max |A|] given mixed": x for p, x in ends}


def _vanishing(name: str, size: int) -> _Vanishing:
    mean_square, given_mixed = [], []
    for p in _SUCCESS:
        groups = reward_groups(coin(p), 0, size)
        largest, mixed = advantages(name, groups.rewards).abs().amax(dim=-1), groups.mixed
        mean_square.append(groups.mean(largest.square()))
        given_mixed.append(float(groups.probability[mixed] @ largest[mixed] / groups.probability[mixed].sum()))
    return _Vanishing(mean_square, given_mixed)


def vanish_together() -> Finding:
    """The largest advantage as `p → 1`: in mean square, and in mixed groups."""
    size, seen = 8, _vanishing("mean", 8)
    slack = min((size - 1) * p * (1 - p) - x for p, x in zip(_SUCCESS, seen.mean_square, strict=True))
    return corrected(
        printed=seen.given_mixed[-1] < seen.given_mixed[0],
        truth=slack > -EXACT and seen.given_mixed == sorted(seen.given_mixed),
        evidence=seen.evidence(),
        correction="In mean square only: E max A² <= (R-1) σ_r² -> 0, because groups with both outcomes become rare. In a "
        "group with both outcomes the advantages do not shrink: one failure among R has |A| = 1 - 1/R, the largest possible.",
    )


def constant_group() -> Finding:
    """Advantages of constant groups, also at rewards that are not exact in binary, for three estimators."""
    worst = max(
        float(advantages(name, torch.full((size,), value, dtype=torch.float64)).abs().max())
        for name, size, value in product(("mean", "rloo", "grpo"), _SIZES, (0.0, 0.1, 1.0, 1e6 + 0.1))
    )
    return as_printed(worst == 0, {"constant groups": 3 * len(_SIZES) * 4, "largest |A_i|": worst})


def curriculum() -> Finding:
    """Weight of a prompt in the expected update relative to the plain policy gradient, by success rate."""
    size, rates = 8, (0.5, 0.9, 0.99)
    weight = {
        name: [float(moments(coin(p), name, prompt=0, group_size=size).expected / coin(p).gradient[0]) for p in rates]
        for name in ("reinforce", "mean", "grpo")
    }
    formula = max(abs(w - standardized_weight(p, size, ddof=1)) for p, w in zip(rates, weight["grpo"], strict=True))
    even = max(abs(w - group_mean_scale(size)) for w in weight["mean"])
    return corrected(
        printed=weight["mean"][0] > weight["mean"][-1] + EXACT,
        truth=max(even, formula) < 1e-9 and weight["grpo"] == sorted(weight["grpo"]),
        evidence={
            f"{name}, p = {p}: weight": w for name in ("mean", "grpo") for p, w in zip(rates, weight[name], strict=True)
        }
        | {"chance of a mixed group, p = 0.99": mixed_probability(0.99, size)},
        correction="Dead groups add nothing to the update, but on average the baseline selects no prompts: E ĝ(x) = (R-1)/R "
        "∇V(x) for every prompt, as without a baseline. Dividing by the standard deviation shifts weight away from p = 1/2, "
        "to prompts that are almost always or almost never solved.",
    )


STRUCTURE_CLAIMS = (
    claim("thm-4.1-i", "section 4, Theorem 4.1 (i)", "The advantages of a group sum to zero.", zero_sum),
    claim("thm-4.1-ii", "section 4, Theorem 4.1 (ii)", "Var(A_i) = σ_r² (R-1)/R.", variance_of_advantages),
    claim(
        "thm-4.1-iii", "section 4, Theorem 4.1 (iii)", "Cov(A_i, A_j) = -σ_r²/R for i ≠ j.", covariance_of_advantages
    ),
    claim(
        "thm-4.1-iv",
        "section 4, Theorem 4.1 (iv), eq. (20)",
        "The expected fraction of ε-effective rollouts, |A_i| > ε, is at most (R-1) σ_r² / (R ε²).",
        chebyshev,
    ),
    claim(
        "thm-4.1-iv-reading",
        "section 4, Theorem 4.1 (iv), last sentence",
        "Meaningful gradient signal comes only from ε-effective rollouts; the updates of the others are near zero.",
        ineffective_rollouts,
    ),
    claim(
        "cor-4.2-scale",
        "section 4, Corollary 4.2, first sentence",
        "The magnitude of the gradient scales with σ_r, the reward standard deviation under the current policy.",
        norm_scales_with_spread,
    ),
    claim(
        "cor-4.2-vanish",
        "section 4, Corollary 4.2, second sentence",
        "As the policy converges, σ_r -> 0 and the advantages of all rollouts go to zero simultaneously.",
        vanish_together,
    ),
    claim(
        "cor-4.2-constant",
        "section 4, Corollary 4.2, third sentence",
        "Where all rollouts of a prompt have the same reward, every advantage is exactly zero and the prompt gives no gradient.",
        constant_group,
    ),
    claim(
        "sec-4-curriculum",
        "section 4, last paragraph, last sentence",
        "GRPO is a natural curriculum: it focuses on prompts at the edge of the policy's ability, where the reward varies most.",
        curriculum,
    ),
)


_ORDERED_SIZES = (2, 3, 5)
_LAWS = (((0.0, 1.0), (0.7, 0.3)), ((0.0, 0.5, 1.0), (0.2, 0.5, 0.3)))
"""Possible rewards of one rollout, and their probabilities."""
_RATES = tuple(k / 40 for k in range(41))
_EPSILONS = (0.05, 0.1, 0.2, 0.3, 0.4)

PRINTED_BOUNDS = {
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
"""The table of A.2 as printed: group size and ε → bound."""

_LABELLED_VACUOUS = frozenset(PRINTED_BOUNDS) - {(8, 0.3), (16, 0.3), (16, 0.2)}


def _ordered_groups(law: tuple[tuple[float, ...], tuple[float, ...]], size: int) -> tuple[Tensor, Tensor]:
    """Every ordered group of `R` rewards `(C, R)` and its probability `(C,)`."""
    rewards, chances = (torch.tensor(x, dtype=torch.float64) for x in law)
    picks = torch.cartesian_prod(*[torch.arange(len(rewards))] * size)
    return rewards[picks], chances[picks].prod(dim=-1)


def _covariance(weight: Tensor, first: Tensor, second: Tensor) -> float:
    """Covariance of two columns under the probabilities of their rows."""
    return float(weight @ ((first - weight @ first) * (second - weight @ second)))


def _largest_over_groups(measure: Callable[[Tensor, Tensor, Tensor, int], float]) -> float:
    """Largest absolute value of a measure of (probability, rewards, advantages, R) over laws and group sizes."""
    found = []
    for law in _LAWS:
        for size in _ORDERED_SIZES:
            rewards, weight = _ordered_groups(law, size)
            found.append(abs(measure(weight, rewards, mean_centered(rewards), size)))
    return max(found)


def _equation_24() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variances = [_covariance(weight, column, column) for column in rewards.T]
        parts = ((size - 1) / size) ** 2 * variances[0] + sum(variances[1:]) / size**2
        return _covariance(weight, advantages[:, 0], advantages[:, 0]) - parts

    worst = _largest_over_groups(gap)
    return as_printed(worst <= EXACT, {"largest gap": worst, "group sizes": "2, 3, 5"})


def _equation_25() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variance = _covariance(weight, rewards[:, 0], rewards[:, 0])
        return _covariance(weight, advantages[:, 0], advantages[:, 0]) - (size - 1) / size * variance

    worst = _largest_over_groups(gap)
    steps = max(abs(((r - 1) ** 2 + (r - 1)) / r**2 - (r - 1) / r) for r in range(2, 65))
    return as_printed(max(worst, steps) <= EXACT, {"largest gap": worst, "gap of the arithmetic, R to 64": steps})


def _covariance_step() -> Finding:
    def zero(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        own = _covariance(weight, advantages[:, 0], advantages[:, 0])
        pair = _covariance(weight, advantages[:, 0], advantages[:, 1])
        return size * own + size * (size - 1) * pair

    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        variance = _covariance(weight, rewards[:, 0], rewards[:, 0])
        return _covariance(weight, advantages[:, 0], advantages[:, 1]) + variance / size

    total, worst = _largest_over_groups(zero), _largest_over_groups(gap)
    return as_printed(max(total, worst) <= EXACT, {"Var(Σ A_i)": total, "largest gap to -σ²/R": worst})


def _hoeffding() -> Finding:
    closest, slack = 0.0, 2.0
    for size in (1, 2, 3, 4, 8, 16, 32, 64):
        for epsilon in _EPSILONS:
            bound = hoeffding_bound(size, epsilon=epsilon)
            tail = max(deviation_probability(p, size, epsilon=epsilon) for p in _RATES)
            closest, slack = max(closest, tail / bound), min(slack, bound - tail)
    return as_printed(slack >= 0, {"largest exact tail / bound": closest, "least slack": slack})


def _bound_table() -> Finding:
    bounds = {at: hoeffding_bound(at[0], epsilon=at[1]) for at in PRINTED_BOUNDS}
    tails = {(size, e): max(deviation_probability(p, size, epsilon=e) for p in _RATES) for size, e in PRINTED_BOUNDS}
    exact = {(size, e): 2 * math.exp(-2 * size * e**2) for size, e in PRINTED_BOUNDS}
    sound = all(tails[at] <= bound and abs(bound - exact[at]) <= EXACT for at, bound in bounds.items())
    wrong = {at: bound for at, bound in bounds.items() if round(bound, 2) != PRINTED_BOUNDS[at]}
    too_small = sum(PRINTED_BOUNDS[at] < bound for at, bound in wrong.items())
    return corrected(
        printed=not wrong,
        truth=sound and len(wrong) == 8,
        evidence={
            "entries": len(bounds),
            "wrong in the printed digits": len(wrong),
            "of these below the bound": too_small,
        }
        | {f"R = {r}, ε = {e}: bound where {PRINTED_BOUNDS[r, e]:.2f} is printed": x for (r, e), x in wrong.items()}
        | {"largest exact tail / bound, binary rewards": max(tails[at] / bounds[at] for at in bounds)},
        correction="Eight of the twelve entries differ from 2 exp(-2Rε²) in the printed digits. An entry below the bound "
        "promises too much; one above it still is a bound.",
    )


def _vacuous_labels() -> Finding:
    bounds = {at: hoeffding_bound(at[0], epsilon=at[1]) for at in PRINTED_BOUNDS}
    vacuous = {at for at, bound in bounds.items() if bound >= 1}
    wrong = sorted(vacuous ^ _LABELLED_VACUOUS)
    return corrected(
        printed=not wrong,
        truth=wrong == [(4, 0.3)],
        evidence={
            "labels": len(_LABELLED_VACUOUS),
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
        for size, epsilon in PRINTED_BOUNDS
    )
    return as_printed(
        falls and all(size > 2 for size in first.values()),
        {f"R for < 1, ε={epsilon}": size for epsilon, size in first.items()}
        | {f"R for ≤ 0.05, ε={epsilon}": size for epsilon, size in needed.items()},
    )


def _baseline_variance() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        mean = rewards[:, 0] - advantages[:, 0]  # v̂
        return _covariance(weight, mean, mean) - _covariance(weight, rewards[:, 0], rewards[:, 0]) / size

    worst = _largest_over_groups(gap)
    sd = {f"sd of v̂ at σ = 1/2, R={size}": 0.5 / size**0.5 for size in (2, 4)}
    return as_printed(worst <= EXACT, {"largest gap to σ²/R": worst} | sd)


def _common_error() -> Finding:
    def gap(weight: Tensor, rewards: Tensor, advantages: Tensor, size: int) -> float:
        value = weight @ rewards[:, 0]
        error = advantages - (rewards - value)
        return float((error - (value - rewards.mean(dim=-1, keepdim=True))).abs().max())

    worst = _largest_over_groups(gap)
    return as_printed(worst <= EXACT, {"largest gap": worst})


def _simultaneous() -> Finding:
    slack, apart = 2.0, 0.0
    for size in (2, 4, 8):
        rewards, _ = _ordered_groups(_LAWS[0], size)
        for success in _RATES[4::8]:
            right = rewards.sum(dim=-1)
            weight = success**right * (1 - success) ** (size - right)
            errors = (mean_centered(rewards) - (rewards - success)).abs()  # (C, R)
            for epsilon in _EPSILONS:
                # The slack is that of `deviation_probability`: in floats 0.5 - 0.2 > 0.3.
                within = errors <= epsilon + 1e-9 / size
                every, one = (float(weight @ x.double()) for x in (within.all(dim=-1), within[:, 0]))
                slack = min(slack, every - 1 + hoeffding_bound(size, epsilon=epsilon))
                apart = max(apart, abs(every - one))
    return as_printed(
        slack >= 0 and apart <= EXACT, {"least slack": slack, "|P(all within ε) - P(one within ε)|": apart}
    )


STRUCTURE_APPENDIX_CLAIMS = (
    claim(
        "eq-24",
        "A.1, 'Variance', eq. (24)",
        "The variance of an advantage is ((R-1)/R)² Var(r_i) plus the other rollouts' variances over R².",
        _equation_24,
        restates="thm-4.1-ii",
    ),
    claim("eq-25", "A.1, 'Variance', eq. (25)", "That sum is (R-1)/R σ_r².", _equation_25, restates="thm-4.1-ii"),
    claim(
        "a1-covariance",
        "A.1, 'Covariance'",
        "From Var(Σ A_i) = 0 the covariance of two advantages is -Var(A_i)/(R-1) = -σ_r²/R.",
        _covariance_step,
        restates="thm-4.1-iii",
    ),
    claim(
        "hoeffding",
        "A.2, display before the table (it proves a statement referenced as '??')",
        "P(|v̂_R - v| > ε) ≤ 2 exp(-2Rε²) for rewards in [0, 1].",
        _hoeffding,
    ),
    claim(
        "hoeffding-table",
        "A.2, 'Interpretation by group size', table",
        "The bound at R = 2, 4, 8, 16 and ε = 0.3, 0.2, 0.1 has the twelve printed values.",
        _bound_table,
    ),
    claim(
        "hoeffding-vacuous-labels",
        "A.2, 'Interpretation by group size', labels of the table",
        "Nine of the twelve bounds are labelled vacuous.",
        _vacuous_labels,
    ),
    claim(
        "hoeffding-needs-large-groups",
        "A.2, first sentence below the table",
        "The bound becomes non-trivial only for larger R or larger ε.",
        _non_trivial,
    ),
    claim(
        "a2-baseline-variance",
        "A.2, second sentence below the table",
        "With few rollouts (R = 2, 4) the baseline has substantial variance, σ_r²/R, and the advantages are noisy.",
        _baseline_variance,
    ),
    claim(
        "a2-common-error",
        "A.2, 'Connection to advantage quality', display",
        "The advantage error of every rollout of a group is the same number, v(s_0) - v̂_R(s_0).",
        _common_error,
    ),
    claim(
        "a2-all-advantages-at-once",
        "A.2, 'Connection to advantage quality', last sentence",
        "With probability at least 1 - 2 exp(-2Rε²), every rollout's advantage is within ε of its true value r_i - v(s_0).",
        _simultaneous,
    ),
)
"""The claims of Appendices A.1 and A.2."""
