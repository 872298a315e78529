"""The U-statistic paper on many steps and on GRPO as it is run: decreasing steps, limit law, standardised rewards."""

import math
from collections.abc import Iterator
from functools import partial

from scoregram.advantages import leave_one_out, standardized
from scoregram.studies.grpo_rank.claims.grounds import EXACT, claim, ground, lab_worlds, prompts_of
from scoregram.studies.grpo_rank.claims.ustatistic import USTATISTIC_PAPER, constant_mse, uncorrelated_worlds
from scoregram.studies.ledger import Finding, as_printed, corrected, extremes, to_be_measured
from scoregram.theory import WORLDS, exact_moments, group_update_moments

_STEPS = 20_000
_LATE = 10_000
"""From this step on, what a sequence tends to is compared with its limit."""
_TREND = 0.01
"""Largest relative distance from a limit after `_STEPS` steps."""


def _gaps(curvatures: tuple[float, ...], rate: float) -> Iterator[float]:
    """`n E gap` of a quadratic after `n` steps of size `rate / n`, from 2 in every coordinate; total noise 1, exactly."""
    squares = [4.0] * len(curvatures)
    for step in range(1, _STEPS + 1):
        squares = [
            (1 - rate * c / step) ** 2 * x + (rate / step) ** 2 / len(curvatures)
            for c, x in zip(curvatures, squares, strict=True)
        ]
        yield step * sum(c * x / 2 for c, x in zip(curvatures, squares, strict=True))


def _decreasing_steps() -> Finding:
    least, attained = math.inf, 0.0
    for curvatures in ((1.0,), (1.0, 1.0), (0.5, 1.0)):
        for factor in (1.0, 1.5):
            rate = factor / min(curvatures)  # above 1/(2μ)
            bound = max(curvatures) * rate**2 / (4 * min(curvatures) * rate - 2)
            late = max(list(_gaps(curvatures, rate))[_LATE:])
            least, attained = min(least, bound / late), max(attained, late / bound)
    return as_printed(
        least >= 1 / (1 + _TREND) and attained >= 1 - _TREND,
        {"least bound / n × gap": least, "largest n × gap / bound": attained, "steps": _STEPS},
    )


def _limit_law() -> Finding:
    mean = spread = 0.0
    for curvature, rate in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        second, fourth = 4.0, 16.0  # moments of a coordinate that starts at 2, with noise ±1
        for step in range(1, _STEPS + 1):
            a, b = 1 - rate * curvature / step, rate / step
            fourth = a**4 * fourth + 6 * a**2 * b**2 * second + b**4
            second = a**2 * second + b**2
        weight = curvature * rate**2 / (2 * (2 * rate * curvature - 1))
        mean = max(mean, abs(_STEPS * curvature * second / 2 / weight - 1))
        spread = max(spread, abs((fourth / second**2 - 1) / 2 - 1))
    return as_printed(
        mean <= _TREND and spread <= _TREND,
        {"mean of n × gap off Σ w": mean, "its variance / mean² off that of χ²": spread, "steps": _STEPS},
    )


def _weights() -> Finding:
    gap, shares = 0.0, []
    for truth in lab_worlds():
        exact = exact_moments(truth)
        for prompt in prompts_of(truth):
            added = float(exact.variance_fisher_trace[prompt] + exact.gradient_squared[prompt])
            for size in (4, 8, 16):
                own = group_update_moments(truth, leave_one_out, prompt=prompt, group_size=size).mse
                rest = own - constant_mse(truth, prompt, truth.value[prompt], size)
                gap = max(gap, abs(rest * size * (size - 1) - added))
                shares.append(size**2 * rest / added)
    return as_printed(
        gap <= EXACT * 100 and max(shares) <= 4 / 3 + EXACT * 100,
        {"gap of G(G-1) × difference to σ² trF + |g|²": gap} | extremes("G² × difference over that", shares),
    )


def _best_in_the_limit() -> Finding:
    traces = formula = saved = 0.0
    for truth in uncorrelated_worlds():
        for prompt in prompts_of(truth):
            rows = truth.listing.of_prompt(prompt)
            chance, returns = truth.probability[rows], truth.listing.returns[rows]
            energies = chance[:, None] * truth.scores[rows].square()  # (listed, D)
            used = energies.sum(0) > EXACT
            energies, gradient = energies[:, used], truth.gradient[prompt][used]
            value, trace = truth.value[prompt], energies.sum(0)
            best = (returns @ energies) / trace  # per direction
            errors = [(energies * (returns[:, None] - b).square()).sum(0) - gradient.square() for b in (value, best)]
            positive = errors[0] > EXACT
            saved = max(saved, float((1 - errors[1] / errors[0])[positive].max()))
            formula = max(formula, float((errors[0] - errors[1] - trace * (value - best).square()).abs().max()))
            traces = max(traces, abs(float(truth.optimal_baseline[prompt] - value)))
    return corrected(
        printed=saved <= EXACT,
        truth=traces <= EXACT and formula <= EXACT and saved > 0.05,
        evidence={
            "|b* - V| for the sum over directions": traces,
            "largest share of one direction's variance that another baseline saves": saved,
            "gap to E(u·ψ)² (V - b_u)²": formula,
        },
        correction="If Corollary 10 rests on Assumption 2 alone, as in our notes: that makes V best for the sum "
        "of the variances over directions, that is, for equal curvature. In the limit each direction counts with its own "
        "curvature, and there the best baseline is E[(u·ψ)² z]/E(u·ψ)²: V is best for every curvature only if ψψᵀ as a whole "
        "does not covary with the reward.",
    )


def _standardised_error() -> Finding:
    sizes, off, remainders = (8, 16, 32), {}, []
    for policy in ("tabular", "network"):
        truth = ground(WORLDS["output_only_binary"], policy)
        for prompt in prompts_of(truth):
            rows = truth.listing.of_prompt(prompt)
            chance, returns, value = truth.probability[rows], truth.listing.returns[rows], truth.value[prompt]
            away, gradient = returns - value, truth.gradient[prompt]
            deviation = (chance @ away.square()).sqrt()
            if float(deviation) < 0.4:  # rarer outcomes reach the limit later
                continue
            first = (truth.scores[rows] * away[:, None] - gradient) / deviation
            first = first - gradient * ((away.square() - deviation**2) / (2 * deviation**3))[:, None]
            limit = float(chance @ first.square().sum(-1))
            for size in sizes:
                update = group_update_moments(truth, partial(standardized, ddof=0), prompt=prompt, group_size=size)
                error = update.variance + float((update.expected - gradient / deviation).square().sum())
                off.setdefault(size, []).append(abs(size * error / limit - 1))
                remainders.append(size**2 * abs(error - limit / size) / limit)
    worst = {size: max(values) for size, values in off.items()}
    return as_printed(
        len(worst) == len(sizes) and worst[32] < 0.6 * worst[16] < 0.6 * worst[8],
        {f"G × error off trΣ₁, largest, G={size}": value for size, value in worst.items()}
        | {"largest G² × remainder / trΣ₁": max(remainders), "prompts": len(off[sizes[0]])},
    )


def _gsm8k_runs() -> Finding:
    questions, runs = 1319, 5
    errors = {rate: math.sqrt(2 * rate * (1 - rate) / questions / runs) for rate in (0.7, 0.75, 0.8)}
    return to_be_measured(
        truth=min(errors.values()) > 0.006,
        evidence={f"standard error of a difference, accuracy {rate}, 5 runs": error for rate, error in errors.items()}
        | {"group sizes compared": 6},
        measure="The paper says itself that most differences are not significant. Measure accuracy over more than five "
        "seeds per G with the same questions paired, and c1 and c3 from the Gram at each checkpoint; null: G* is the "
        "same at every checkpoint.",
    )


_ustatistic_claim = partial(claim, paper=USTATISTIC_PAPER)

LIMIT_CLAIMS = (
    _ustatistic_claim(
        "ustat-lemma-6-decreasing",
        "Lemma 6, steps β/i; its constants from notes",
        "With steps β/i, β > 1/(2μ), n times the expected gap ends at or below L β² M/(4μβ - 2).",
        _decreasing_steps,
    ),
    _ustatistic_claim(
        "ustat-theorem-8",
        "Theorem 8",
        "With steps β/i, n times the suboptimality gap converges in law to Σ_k w_k χ²₁.",
        _limit_law,
    ),
    _ustatistic_claim(
        "ustat-cor-9",
        "Corollary 9 (oracle property of the policy); its order in G from notes",
        "The weights w_k of that law differ from the oracle's by terms of order 1/G².",
        _weights,
    ),
    _ustatistic_claim(
        "ustat-cor-10",
        "Corollary 10 (optimality of the policy)",
        "In that law no algorithm whose baseline depends on the prompt alone does better as G grows.",
        _best_in_the_limit,
    ),
    _ustatistic_claim(
        "ustat-theorem-12",
        "appendix A, Theorem 12, at one update per sample (from notes)",
        "With standardised rewards the MSE is trΣ₁/G plus a term of order 1/G².",
        _standardised_error,
    ),
    _ustatistic_claim(
        "ustat-experiment-gsm8k",
        "section 5.2, Figure 5 (GSM8K)",
        "Trained on GSM8K with 1,024 rollouts a step, G = 32 is best at every checkpoint but step 200.",
        _gsm8k_runs,
    ),
)
"""Claims of arXiv:2603.01162 on many steps, and on standardised rewards."""
