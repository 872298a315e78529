"""The U-statistic view of the leave-one-out update, arXiv:2603.01162: kernel, error, best baseline, best group size, steps.

`G` of that paper is our `R`; its 'GRPO-type' baseline is the mean of the *other* rollouts.

Statements follow notes from a full reading. A published summary of the paper confirms them and their numbers, except what a
place calls 'from notes'; the text itself was not at hand when this was checked.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from scoregram.advantages import (
    constant_baseline,
    energy_weighted_leave_one_out,
    leave_one_out,
    mean_centered,
    mixed_groups,
    no_baseline,
    standardized,
)
from scoregram.statistics import (
    batch_mse,
    excess_variance,
    expected_success_given_mixed,
    leave_one_out_mse,
    mixed_probability,
    mse_curve,
    optimal_group_size,
)
from scoregram.studies.grpo_rank.claims.grounds import (
    EXACT,
    ONE_DECISION,
    SINGLE_TURN,
    claim,
    ground,
    lab_worlds,
    prompts_of,
)
from scoregram.studies.ledger import Finding, as_printed, corrected, extremes, to_be_measured
from scoregram.theory import (
    WORLDS,
    GroundTruth,
    across_prompts,
    arcsine_objective,
    exact_components,
    exact_moments,
    group_size_to_beat_vanilla,
    group_update_moments,
    kernel_projection,
    pair_average,
    pair_kernels,
    standardized_weight,
    suboptimality_bound,
)

USTATISTIC_PAPER = "arXiv:2603.01162"
_SIZES = (2, 3, 4, 8, 16)


def uncorrelated_worlds() -> Iterator[GroundTruth]:
    """Worlds in which every rollout has the same score norm, so that the norm cannot covary with the reward."""
    for world in (WORLDS["step_rewards"], WORLDS["user_turns"], ONE_DECISION):
        yield ground(world, "uniform")


def constant_mse(truth: GroundTruth, prompt: int, baseline: Tensor, group_size: int) -> float:
    """Mean squared error of a prompt's update with a constant baseline, by enumeration of groups."""

    def advantage(rewards: Tensor) -> Tensor:
        return constant_baseline(rewards, baselines=baseline.expand(len(rewards)))

    return group_update_moments(truth, advantage, prompt=prompt, group_size=group_size).mse


def _group_mse(truth: GroundTruth, advantage, prompt: int, group_size: int) -> float:
    """Mean squared error of a prompt's update, by enumeration of groups."""
    return group_update_moments(truth, advantage, prompt=prompt, group_size=group_size).mse


def _kernel() -> Finding:
    worst, groups, generator = 0.0, 0, torch.Generator().manual_seed(0)
    for truth in lab_worlds("output_only", "user_turns"):
        for size in (2, 3, 5, 8):
            for _ in range(10):
                rows = torch.randint(len(truth.probability), (size,), generator=generator)
                rewards, scores = truth.listing.returns[rows], truth.scores[rows]
                update = leave_one_out(rewards[None])[0] @ scores / size
                worst = max(worst, float((update - pair_average(scores, rewards)).abs().max()))
                groups += 1
    return as_printed(worst <= EXACT, {"largest gap": worst, "groups": groups})


def _projection() -> Finding:
    printed = repaired = 0.0
    for truth in lab_worlds():
        for prompt in prompts_of(truth):
            rows = truth.listing.of_prompt(prompt)
            kernels = pair_kernels(truth.scores[rows], truth.listing.returns[rows])
            given = 2 * torch.einsum("ijd,j->id", kernels, truth.probability[rows])
            ours = kernel_projection(truth, prompt)
            printed = max(printed, float((given - ours + truth.gradient[prompt]).abs().max()))
            repaired = max(repaired, float((given - ours).abs().max()))
    return corrected(
        printed=printed <= EXACT,
        truth=repaired <= EXACT,
        evidence={"gap as printed": printed, "gap with + g": repaired},
        correction="2 h_1 = ψ (z - V) + g. Centring the projection removes the constant, so the later results hold.",
    )


def _split() -> Finding:
    mean = first = second = energy = 0.0
    for truth in lab_worlds():
        noise = exact_moments(truth)
        for prompt in prompts_of(truth):
            rows = truth.listing.of_prompt(prompt)
            chance, gradient = truth.probability[rows], truth.gradient[prompt]
            kernels = pair_kernels(truth.scores[rows], truth.listing.returns[rows])
            oracle = truth.scores[rows] * (truth.listing.returns[rows] - truth.value[prompt])[:, None] - gradient
            rest = kernels - gradient - (oracle[:, None] + oracle[None]) / 2
            given = torch.einsum("ijd,j->id", rest, chance)
            mean = max(mean, float((torch.einsum("ijd,i,j->d", kernels, chance, chance) - gradient).abs().max()))
            first = max(first, float((chance @ oracle).abs().max()))
            second = max(second, float(given.abs().max()))
            size = float(torch.einsum("ijd,i,j->", rest.square(), chance, chance))
            wanted = float(noise.variance_fisher_trace[prompt] + noise.gradient_squared[prompt]) / 2
            energy = max(energy, abs(size - wanted))
    return as_printed(
        max(mean, first, second, energy) <= EXACT,
        {
            "|E h - g|": mean,
            "|E first term|": first,
            "|E[second term | one rollout]|": second,
            "gap of its energy to (σ² trF + |g|²)/2": energy,
        },
    )


def _mean_squared_error() -> Finding:
    gap, share, bounded = 0.0, 0.0, True
    for truth in lab_worlds():
        exact = exact_moments(truth)
        for prompt in prompts_of(truth):
            for size in _SIZES:
                error = _group_mse(truth, leave_one_out, prompt, size)
                gap = max(gap, abs(error - float(leave_one_out_mse(exact, size)[prompt])))
                remainder = size**2 * (error - float(exact.oracle_trace[prompt]) / size)
                share = max(share, remainder / float(exact.variance_fisher_trace[prompt]))
                bounded &= 0 < remainder <= 4 * float(exact.variance_fisher_trace[prompt])
    return as_printed(
        gap <= EXACT and bounded,
        {"gap to trΣ/G + (σ² trF + |g|²)/(G(G-1))": gap, "largest G² × remainder / (σ² E|ψ|²)": share, "its bound": 4},
    )


def _minibatch() -> Finding:
    gap, share = 0.0, 0.0
    for truth in lab_worlds():
        parts = exact_components(truth)
        for size in _SIZES:
            each = [
                group_update_moments(truth, leave_one_out, prompt=prompt, group_size=size)
                for prompt in prompts_of(truth)
            ]
            for batch in (1, 8):
                error = across_prompts(truth, each, prompts=batch).mse
                gap = max(gap, abs(error - batch_mse(parts, batch, size)))
                share = max(share, parts.between_prompts / batch / error)
    return as_printed(gap <= EXACT, {"gap to c1/B + c2/(BG) + c3/(BG(G-1))": gap, "largest share of c1": share})


def _oracle_property() -> Finding:
    worst, constant = dict.fromkeys((2, 8, 16), 1.0), 0.0
    for truth in lab_worlds():
        exact = exact_moments(truth)
        for prompt in prompts_of(truth):
            added = exact.variance_fisher_trace[prompt] + exact.gradient_squared[prompt]
            for size in worst:
                oracle = constant_mse(truth, prompt, truth.value[prompt], size)
                ratio = _group_mse(truth, leave_one_out, prompt, size) / oracle
                worst[size] = max(worst[size], ratio)
                limit = float(added / exact.oracle_trace[prompt])
                constant = max(constant, abs((size - 1) * (ratio - 1) / limit - 1))
    return as_printed(
        constant <= 1e-10 and worst[16] < worst[8] < worst[2],
        {f"largest error / oracle's, G={size}": ratio for size, ratio in worst.items()}
        | {"gap to 1 + (σ² trF + |g|²)/(trΣ (G-1))": constant},
    )


def _optimal_with_assumption() -> Finding:
    covariance, least = 0.0, math.inf
    for truth in uncorrelated_worlds():
        for prompt in prompts_of(truth):
            value, best = truth.value[prompt], truth.optimal_baseline[prompt]
            covariance = max(covariance, abs(float(best - value)))
            own = constant_mse(truth, prompt, value, 4)
            others = [constant_mse(truth, prompt, value + shift, 4) for shift in (-0.5, -0.01, 0.01, 0.5)]
            least = min(least, min(others) / own)
    return as_printed(
        covariance <= EXACT and least > 1,
        {"|b* - V|, worlds with Cov(|ψ|², z) = 0": covariance, "least error of another baseline / V's": least},
    )


def _optimal_without_assumption() -> Finding:
    saved = formula = 0.0
    for truth in lab_worlds():
        for prompt in prompts_of(truth):
            value, best, trace = (x[prompt] for x in (truth.value, truth.optimal_baseline, truth.fisher_trace))
            own, other = (constant_mse(truth, prompt, baseline, 4) for baseline in (value, best))
            saved = max(saved, 1 - other / own)
            formula = max(formula, abs(own - other - float(excess_variance(value, best, trace, 4))))
    truth, attained = ground(WORLDS["output_only"], "network"), {}
    for size in (4, 8):
        weighted = group_update_moments(
            truth, energy_weighted_leave_one_out, prompt=0, group_size=size, needs=("score_energies",)
        )
        attained[size] = weighted.mse / _group_mse(truth, leave_one_out, 0, size)
    return corrected(
        printed=saved <= EXACT,
        truth=formula <= EXACT and saved > 0.1 and attained[8] < 1 < attained[4],
        evidence={"largest share of the error that b* saves over V": saved, "gap to (V - b*)² trF / G": formula}
        | {f"error, weighted / plain mean of the others, G={size}": ratio for size, ratio in attained.items()},
        correction="Only where |ψ|² does not covary with the reward (the paper's Assumption 2, which its abstract leaves "
        "out). In general b* = E[|ψ|² z]/E|ψ|² has less error than V, by (V - b*)² trF / G; estimated from the group "
        "itself, it pays off only in larger groups.",
    )


def _below_vanilla() -> Finding:
    gap, ratio = 0.0, 0.0
    for truth in uncorrelated_worlds():
        exact = exact_moments(truth)
        for prompt in prompts_of(truth):
            saved = exact.raw_square[prompt] - exact.gradient_squared[prompt] - exact.oracle_trace[prompt]
            gap = max(gap, abs(float(saved - truth.value[prompt] ** 2 * truth.fisher_trace[prompt])))
            errors = [_group_mse(truth, fn, prompt, 16) for fn in (leave_one_out, no_baseline)]
            ratio = max(ratio, errors[0] / errors[1])
    return as_printed(
        gap <= EXACT and ratio < 1, {"gap of the saving to V² trF / G": gap, "largest error / vanilla's, G=16": ratio}
    )


def _below_vanilla_at_every_size() -> Finding:
    agreed, worse, cases, thresholds = True, 0, 0, []
    for truth in (*uncorrelated_worlds(), *lab_worlds(*SINGLE_TURN)):
        threshold = group_size_to_beat_vanilla(exact_moments(truth))
        for prompt in prompts_of(truth):
            for size in _SIZES:
                below = _group_mse(truth, leave_one_out, prompt, size) < _group_mse(truth, no_baseline, prompt, size)
                agreed &= below == (size > float(threshold[prompt]))
                cases, worse = cases + 1, worse + (not below)
            thresholds.append(float(threshold[prompt]))
    needle = ground(ONE_DECISION, "uniform")
    pair, none = (_group_mse(needle, fn, 0, 2) for fn in (leave_one_out, no_baseline))
    return corrected(
        printed=worse == 0,
        truth=agreed and pair > none,
        evidence={
            "cases": cases,
            "of them vanilla is better in": worse,
            "error / vanilla's, G=2, one right in eight": pair / none,
            "G to exceed, one right in eight": float(group_size_to_beat_vanilla(exact_moments(needle))[0]),
        }
        | extremes("G to exceed", thresholds),
        correction="Below vanilla exactly for G > 1 + (σ² trF + |g|²)/(E|ψz|² - E|ψ(z-V)|²), which is "
        "1 + (σ² + |g|²/trF)/V² under Assumption 2: small groups lose where success is rare.",
    )


_ustatistic_claim = partial(claim, paper=USTATISTIC_PAPER)

USTATISTIC_CLAIMS = (
    _ustatistic_claim(
        "ustat-lemma-1",
        "Lemma 1",
        "For one prompt the GRPO gradient is a U-statistic: the average of (ψ_i - ψ_j)(Z_i - Z_j)/2 over all pairs.",
        _kernel,
    ),
    _ustatistic_claim(
        "ustat-projection",
        "after Lemma 1, projection of the kernel (from notes)",
        "Twice the kernel's mean given one rollout is ψ (z - V).",
        _projection,
    ),
    _ustatistic_claim(
        "ustat-hoeffding-split",
        "after Lemma 1, Hoeffding decomposition",
        "The update is g plus the centred oracle update plus a degenerate term of second order.",
        _split,
    ),
    _ustatistic_claim(
        "ustat-theorem-2",
        "Theorem 2",
        "For one prompt the MSE is trΣ_oracle/G plus a term of order E|ψ|²/G².",
        _mean_squared_error,
    ),
    _ustatistic_claim(
        "ustat-prop-3",
        "Proposition 3",
        "For B prompts the MSE is E|g(X) - g|²/B + trΣ_oracle/(BG) plus a term of order 1/(BG²).",
        _minibatch,
    ),
    _ustatistic_claim(
        "ustat-cor-4",
        "Corollary 4 (oracle property)",
        "Up to terms of order 1/G² the MSE is that of the oracle algorithm, which knows the value function.",
        _oracle_property,
    ),
    _ustatistic_claim(
        "ustat-cor-5-optimal",
        "Corollary 5 (optimality); its Assumption 2 from notes",
        "If |ψ|² and the reward are uncorrelated, no baseline that depends on the prompt alone has a lower MSE as G grows.",
        _optimal_with_assumption,
    ),
    _ustatistic_claim(
        "ustat-abstract-optimal",
        "abstract, fifth sentence",
        "GRPO is asymptotically optimal within a broad class of policy gradient algorithms.",
        _optimal_without_assumption,
    ),
    _ustatistic_claim(
        "ustat-cor-5-below-vanilla",
        "Corollary 5, comparison with the vanilla algorithm (from notes)",
        "Under Assumption 2, with V ≠ 0, the MSE is strictly below that without a baseline as G grows.",
        _below_vanilla,
    ),
    _ustatistic_claim(
        "ustat-cor-5-finite-group",
        "Corollary 5, read at a finite G (the reading is ours)",
        "The MSE is below that without a baseline at every group size.",
        _below_vanilla_at_every_size,
    ),
)
"""Claims of arXiv:2603.01162 on one update."""


_MATH_ACCURACIES = {
    1024: (0.7677, 0.7491, 0.7753, 0.7627, 0.7817, 0.7743),
    2048: (0.7703, 0.7679, 0.7697, 0.7793, 0.7819, 0.7665),
    4096: (0.7691, 0.7713, 0.7701, 0.7673, 0.7703, 0.7757),
}
"""Rollouts per step → accuracy on MATH as printed, one run for each of `_MATH_SIZES`."""
_MATH_SIZES = (4, 8, 16, 32, 64, 128)


def _descent() -> Finding:
    slack, attained = math.inf, 0.0
    for curvatures in ((1.0,), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0)):
        least, most = min(curvatures), max(curvatures)
        for step_size in (0.1 / most, 0.45 / most):
            squares, noise = [4.0] * len(curvatures), 1.0
            start = sum(c * x / 2 for c, x in zip(curvatures, squares, strict=True))
            for steps in range(61):
                gap = sum(c * x / 2 for c, x in zip(curvatures, squares, strict=True))
                bound = suboptimality_bound(
                    steps, gap=start, step_size=step_size, smoothness=most, pl_constant=least, noise=noise
                )
                slack = min(slack, bound - gap)
                attained = max(attained, gap / bound)
                # E θ² of every coordinate; the noise is split evenly between them.
                squares = [
                    (1 - step_size * c) ** 2 * x + step_size**2 * noise / len(curvatures)
                    for c, x in zip(curvatures, squares, strict=True)
                ]
    return as_printed(slack >= -EXACT, {"least slack": slack, "largest gap / bound": attained})


def _group_size() -> Finding:
    sizes = torch.arange(2, 65)
    right = off = cases = 0
    excess, literal = 0.0, []
    for truth in (*lab_worlds(), ground(WORLDS["user_turns"], "uniform")):
        parts = exact_components(truth)
        curve = mse_curve(parts, 1024, sizes)
        best, found = int(sizes[curve.argmin()]), optimal_group_size(parts)
        bound = parts.between_prompts * sizes + parts.group_baseline / sizes
        asymptotic = int(sizes[bound.argmin()])
        cases, off = cases + 1, off + (asymptotic != best)
        right += found.integer == best and abs(found.exact - 1 - found.asymptotic) <= EXACT
        excess = max(excess, float(curve[asymptotic - 2] / curve.min()) - 1)
        trace = float(truth.listing.prompt_weights @ truth.fisher_trace)
        literal.append(math.sqrt(trace / parts.between_prompts) / found.exact)
    return corrected(
        printed=off == 0,
        truth=right == cases,
        evidence={
            "worlds": cases,
            "best integer missed in": off,
            "found by 1 + √(c3/c1) in": right,
            "largest excess error": excess,
        }
        | extremes("√(E|ψ|²/c1) / best", literal),
        correction="√(c3/c1) minimises a bound with G² where the error has G(G-1). The error itself is least at "
        "G* = 1 + √(c3/c1) with c3 = E[σ² trF + |g|²]; the order E|ψ|² alone does not determine it.",
    )


def _universal() -> Finding:
    sizes, gap, found = range(2, 9), 0.0, {}  # all of them divide the budgets
    for truth in lab_worlds("output_only", "step_rewards"):
        each = {
            size: [
                group_update_moments(truth, leave_one_out, prompt=prompt, group_size=size)
                for prompt in prompts_of(truth)
            ]
            for size in sizes
        }
        for rollouts in (840, 8400, 84000):
            errors = [across_prompts(truth, each[size], prompts=rollouts // size).mse for size in sizes]
            curve = mse_curve(exact_components(truth), rollouts, torch.tensor(sizes))
            gap = max(gap, rollouts * float((torch.tensor(errors, dtype=torch.float64) - curve).abs().max()))
            found.setdefault(rollouts, []).append(sizes[errors.index(min(errors))])
    return as_printed(
        gap <= EXACT and found[840] == found[8400] == found[84000],
        {f"best G of four worlds, N={rollouts}": "  ".join(map(str, best)) for rollouts, best in found.items()}
        | {"gap of N × error to c1 G + c2 + c3/(G-1)": gap},
    )


def _math_runs() -> Finding:
    best = {rollouts: _MATH_SIZES[row.index(max(row))] for rollouts, row in _MATH_ACCURACIES.items()}
    ahead = {rollouts: sorted(row)[-1] - sorted(row)[-2] for rollouts, row in _MATH_ACCURACIES.items()}
    noise = math.sqrt(0.77 * 0.23 / 500)
    return to_be_measured(
        truth=max(ahead.values()) < noise and len(set(best.values())) > 1,
        evidence={f"best G as printed, N={rollouts}": size for rollouts, size in best.items()}
        | {"largest lead over the second": max(ahead.values()), "standard error of .77 on 500 questions": noise},
        measure="One run each, leads within the noise of one evaluation; the authors suspect the limited number "
        "of prompts behind the third budget. Measure c1 and c3 from the Gram at several steps, and accuracy over at least five "
        "seeds per G and N; null: G* does not change with N.",
    )


def _error_experiment() -> Finding:
    near, worse = {8: [], 32: []}, 0
    for truth in lab_worlds():
        exact = exact_moments(truth)
        for prompt in prompts_of(truth):
            for size, ratios in near.items():
                ratios.append(float((leave_one_out_mse(exact, size) * size / exact.oracle_trace)[prompt]))
            worse += float(group_size_to_beat_vanilla(exact)[prompt]) >= 4
    return to_be_measured(
        truth=1 < max(near[32]) < max(near[8]) and worse > 0,
        evidence=extremes("error / oracle's in the lab, G=8", near[8])
        | extremes("error / oracle's in the lab, G=32", near[32])
        | {"prompts of the lab where vanilla wins at G=4": worse},
        measure="Measure trΣ, σ² trF + |g|² and E|ψz|² per prompt from the Gram, with a bootstrap over prompts, and "
        "compare the error at each G with 1 + (σ² trF + |g|²)/(trΣ (G-1)); null: that ratio.",
    )


def _arcsine() -> Finding:
    gap, slope = 0.0, 0.0
    for truth in lab_worlds("output_only_binary"):
        for prompt in prompts_of(truth):
            for size in _SIZES:
                update = group_update_moments(
                    truth, partial(standardized, ddof=0), prompt=prompt, group_size=size
                ).expected
                weight = standardized_weight(float(truth.value[prompt]), size)
                gap = max(gap, float((update - weight * truth.gradient[prompt]).abs().max()))
    grid, step = [k / 20 for k in range(1, 20)], 1e-6
    for p in grid:
        rise = (arcsine_objective(p + step) - arcsine_objective(p - step)) / (2 * step)
        slope = max(slope, abs(rise * math.sqrt(p * (1 - p)) - 1))
    away = {
        size: max(abs(standardized_weight(p, size) * math.sqrt(p * (1 - p)) - 1) for p in grid) for size in (8, 64, 512)
    }
    return as_printed(
        gap <= EXACT and slope <= 1e-8 and away[512] < 0.03 and away[512] < away[64] / 4 < away[8] / 16,
        {"gap of the weight to enumeration": gap}
        | {f"weight off 1/√(p(1-p)), p in .05….95, G={size}": value for size, value in away.items()}
        | {"weight at p → 0, G=8": standardized_weight(0.0, 8)},
    )


def _mixed_groups() -> Finding:
    gap, scale = 0.0, 0.0
    for size in (2, 4, 8):
        rewards = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * size)
        for success in (0.1, 0.3, 0.5, 0.9):
            right = rewards.sum(dim=-1)
            weight = success**right * (1 - success) ** (size - right) * mixed_groups(rewards)
            share = float(weight @ right) / size / float(weight.sum())
            gap = max(gap, abs(share - expected_success_given_mixed(success, size)))
            gap = max(gap, abs(float(weight.sum()) - mixed_probability(success, size)))
    for truth in lab_worlds("output_only_binary"):
        for prompt, target in enumerate(truth.gradient):
            p = float(truth.value[prompt])

            def selected(rewards: Tensor, chance: float = mixed_probability(p, 4)) -> Tensor:
                return mixed_groups(rewards)[:, None] * mean_centered(rewards) / chance

            update = group_update_moments(truth, selected, prompt=prompt, group_size=4).expected
            scale = max(scale, float((update - 3 / 4 * target / mixed_probability(p, 4)).abs().max()))
    shares = {(p, size): expected_success_given_mixed(p, size) for p, size in ((0.1, 8), (0.9, 8), (0.1, 4))}
    return as_printed(
        gap <= EXACT and scale <= EXACT and shares[0.1, 8] > 0.1 and shares[0.9, 8] < 0.9,
        {f"share right given mixed, p={p}, G={size}": share for (p, size), share in shares.items()}
        | {"gap to enumeration": gap, "gap of E[ĝ | mixed] to E ĝ / P(mixed)": scale},
    )


GROUP_SIZE_CLAIMS = (
    _ustatistic_claim(
        "ustat-lemma-6",
        "Lemma 6, constant step; its constants from notes",
        "Under the PL condition and a constant step, the expected gap falls geometrically to a floor set by the gradient's MSE.",
        _descent,
    ),
    _ustatistic_claim(
        "ustat-theorem-7",
        "Theorem 7",
        "At a fixed number of rollouts the best group size is G* = √(c3/c1).",
        _group_size,
    ),
    _ustatistic_claim(
        "ustat-theorem-7-universal",
        "Theorem 7, universality",
        "The best group size depends on data and model, not on the budget of rollouts or the number of iterations.",
        _universal,
    ),
    _ustatistic_claim(
        "ustat-experiment-mse",
        "section 5, the experiment on the gradient's MSE (from notes, which do not name its subsection)",
        "On a language model the MSE of GRPO's gradient is close to the oracle's at G = 8 and no different from it at 32; the vanilla "
        "gradient, without a baseline, has the largest.",
        _error_experiment,
    ),
    _ustatistic_claim(
        "ustat-experiment-universal",
        "section 5.2, Table 2 (MATH)",
        "On MATH the best group size is 64, 64 and 128 at three budgets of rollouts, which supports that it is universal.",
        _math_runs,
    ),
    _ustatistic_claim(
        "ustat-prop-13",
        "appendix A, Proposition 13 (from notes)",
        "With binary rewards, dividing by the standard deviation maximises E[2 arcsin √V], for large groups.",
        _arcsine,
    ),
    claim(
        "mixed-group-selection",
        "Theorem 1, known from summaries",
        "Given both outcomes in a group, its mean overrates the success rate of hard prompts and underrates that of easy ones.",
        _mixed_groups,
        paper="arXiv:2601.08521",
    ),
)
"""Claims of arXiv:2603.01162 on group sizes and steps, and one of another paper on dynamic sampling."""
