"""The U-statistic view of the leave-one-out update: kernel, error and best baseline of arXiv:2603.01162.

`G` of that paper is our `R`; its 'GRPO-type' baseline is the mean of the *other* rollouts.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from scoregram.advantages import (
    constant_baseline,
    energy_weighted_leave_one_out,
    leave_one_out,
    no_baseline,
)
from scoregram.statistics import (
    batch_mse,
    excess_variance,
    leave_one_out_mse,
)
from scoregram.theory.claims.grounds import EXACT, ONE_DECISION, SINGLE_TURN, ground, grounds
from scoregram.theory.claims.ledger import (
    U_STATISTIC_PAPER,
    Claim,
    Finding,
    as_printed,
    between,
    corrected,
)
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.moments import across_prompts
from scoregram.theory.lab.moments import group_update_moments as group_moments
from scoregram.theory.lab.worlds import WORLDS
from scoregram.theory.theorems import (
    exact_components,
    exact_moments,
    group_size_to_beat_vanilla,
    kernel_projection,
    pair_average,
    pair_kernels,
)

SIZES = (2, 3, 4, 8, 16)


def uncorrelated() -> Iterator[GroundTruth]:
    """Worlds in which every rollout has the same score norm, so that it cannot covary with the reward."""
    for world in (WORLDS["step_rewards"], WORLDS["user_turns"], ONE_DECISION):
        yield ground(world, "uniform")


def prompts(truth: GroundTruth) -> range:
    """Every prompt of a world."""
    return range(truth.value.numel())


def constant_mse(truth: GroundTruth, prompt: int, baseline: Tensor, group_size: int) -> float:
    """Error of a prompt's update with one number as baseline, by enumeration of groups."""

    def advantage(rewards: Tensor) -> Tensor:
        return constant_baseline(rewards, baselines=baseline.expand(len(rewards)))

    return group_moments(truth, advantage, prompt=prompt, group_size=group_size).mse


def group_mse(truth: GroundTruth, advantage, prompt: int, group_size: int) -> float:
    """Error of a prompt's update by enumeration of groups."""
    return group_moments(truth, advantage, prompt=prompt, group_size=group_size).mse


def _kernel() -> Finding:
    worst, groups, generator = 0.0, 0, torch.Generator().manual_seed(0)
    for truth in grounds("output_only", "user_turns"):
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
    for truth in grounds(*WORLDS):
        for prompt in prompts(truth):
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
        correction="2 h_1 = ψ (z - V) + g. The constant goes when the projection is centred, so what follows stands.",
    )


def _split() -> Finding:
    mean = first = second = energy = 0.0
    for truth in grounds(*WORLDS):
        noise = exact_moments(truth)
        for prompt in prompts(truth):
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
    for truth in grounds(*WORLDS):
        exact = exact_moments(truth)
        for prompt in prompts(truth):
            for size in SIZES:
                error = group_mse(truth, leave_one_out, prompt, size)
                gap = max(gap, abs(error - float(leave_one_out_mse(exact, size)[prompt])))
                remainder = size**2 * (error - float(exact.oracle_trace[prompt]) / size)
                share = max(share, remainder / float(exact.variance_fisher_trace[prompt]))
                bounded &= 0 < remainder <= 4 * float(exact.variance_fisher_trace[prompt])
    return as_printed(
        gap <= EXACT and bounded,
        {
            "gap to trΣ/G + (σ² trF + |g|²)/(G(G-1))": gap,
            "largest G² × remainder / (σ² E|ψ|²)": share,
            "its bound": 4,
        },
    )


def _minibatch() -> Finding:
    gap, share = 0.0, 0.0
    for truth in grounds(*WORLDS):
        parts = exact_components(truth)
        for size in SIZES:
            each = [group_moments(truth, leave_one_out, prompt=prompt, group_size=size) for prompt in prompts(truth)]
            for batch in (1, 8):
                error = across_prompts(truth, each, prompts=batch).mse
                gap = max(gap, abs(error - batch_mse(parts, batch, size)))
                share = max(share, parts.between_prompts / batch / error)
    return as_printed(gap <= EXACT, {"gap to c1/B + c2/(BG) + c3/(BG(G-1))": gap, "largest share of c1": share})


def _oracle_property() -> Finding:
    worst, constant = dict.fromkeys((2, 8, 16), 1.0), 0.0
    for truth in grounds(*WORLDS):
        exact = exact_moments(truth)
        for prompt in prompts(truth):
            added = exact.variance_fisher_trace[prompt] + exact.gradient_squared[prompt]
            for size in worst:
                oracle = constant_mse(truth, prompt, truth.value[prompt], size)
                ratio = group_mse(truth, leave_one_out, prompt, size) / oracle
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
    for truth in uncorrelated():
        for prompt in prompts(truth):
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
    for truth in grounds(*WORLDS):
        for prompt in prompts(truth):
            value, best, trace = (x[prompt] for x in (truth.value, truth.optimal_baseline, truth.fisher_trace))
            own, other = (constant_mse(truth, prompt, baseline, 4) for baseline in (value, best))
            saved = max(saved, 1 - other / own)
            formula = max(formula, abs(own - other - float(excess_variance(value, best, trace, 4))))
    truth, attained = ground(WORLDS["output_only"], "network"), {}
    for size in (4, 8):
        weighted = group_moments(
            truth, energy_weighted_leave_one_out, prompt=0, group_size=size, needs=("score_energies",)
        )
        attained[size] = weighted.mse / group_mse(truth, leave_one_out, 0, size)
    return corrected(
        printed=saved <= EXACT,
        truth=formula <= EXACT and saved > 0.1 and attained[8] < 1 < attained[4],
        evidence={
            "largest share of the error that b* saves over V": saved,
            "gap to (V - b*)² trF / G": formula,
        }
        | {f"error, weighted / plain mean of the others, G={size}": ratio for size, ratio in attained.items()},
        correction="Only where |ψ|² does not covary with the reward (the paper's Assumption 2, which its abstract leaves "
        "out). In general b* = E[|ψ|² z]/E|ψ|² has less error than V, by (V - b*)² trF / G; estimated from the group "
        "itself it takes larger groups to pay.",
    )


def _below_vanilla() -> Finding:
    gap, ratio = 0.0, 0.0
    for truth in uncorrelated():
        exact = exact_moments(truth)
        for prompt in prompts(truth):
            saved = exact.raw_square[prompt] - exact.gradient_squared[prompt] - exact.oracle_trace[prompt]
            gap = max(gap, abs(float(saved - truth.value[prompt] ** 2 * truth.fisher_trace[prompt])))
            errors = [group_mse(truth, fn, prompt, 16) for fn in (leave_one_out, no_baseline)]
            ratio = max(ratio, errors[0] / errors[1])
    return as_printed(
        gap <= EXACT and ratio < 1,
        {"gap of the saving to V² trF / G": gap, "largest error / vanilla's, G=16": ratio},
    )


def _below_vanilla_at_every_size() -> Finding:
    agreed, worse, cases, thresholds = True, 0, 0, []
    for truth in (*uncorrelated(), *grounds(*SINGLE_TURN)):
        threshold = group_size_to_beat_vanilla(exact_moments(truth))
        for prompt in prompts(truth):
            for size in SIZES:
                below = group_mse(truth, leave_one_out, prompt, size) < group_mse(truth, no_baseline, prompt, size)
                agreed &= below == (size > float(threshold[prompt]))
                cases, worse = cases + 1, worse + (not below)
            thresholds.append(float(threshold[prompt]))
    needle = ground(ONE_DECISION, "uniform")
    pair, none = (group_mse(needle, fn, 0, 2) for fn in (leave_one_out, no_baseline))
    return corrected(
        printed=worse == 0,
        truth=agreed and pair > none,
        evidence={
            "cases": cases,
            "of them vanilla is better in": worse,
            "error / vanilla's, G=2, one right in eight": pair / none,
            "G to exceed, one right in eight": float(group_size_to_beat_vanilla(exact_moments(needle))[0]),
        }
        | between("G to exceed", thresholds),
        correction="Below vanilla exactly for G > 1 + (σ² trF + |g|²)/(E|ψz|² - E|ψ(z-V)|²), which is "
        "1 + (σ² + |g|²/trF)/V² under Assumption 2: small groups lose where success is rare.",
    )


def printed_in_ustatistic(name: str, place: str, statement: str, check) -> Claim:
    """A claim of arXiv:2603.01162."""
    return Claim(name, place, statement, check, paper=U_STATISTIC_PAPER)


U_STATISTIC = (
    printed_in_ustatistic(
        "ustat-lemma-1",
        "Lemma 1",
        "The leave-one-out update is the average of (ψ_i - ψ_j)(Z_i - Z_j)/2 over all pairs.",
        _kernel,
    ),
    printed_in_ustatistic(
        "ustat-projection",
        "Lemma 1, projection of the kernel",
        "Twice the kernel's mean given one rollout is ψ (z - V).",
        _projection,
    ),
    printed_in_ustatistic(
        "ustat-hoeffding-split",
        "Lemma 1, Hoeffding decomposition",
        "The update is g plus the centred oracle update plus a term whose mean given any one rollout is zero.",
        _split,
    ),
    printed_in_ustatistic(
        "ustat-theorem-2",
        "Theorem 2",
        "For one prompt the error is trΣ_oracle/G plus a term of order E|ψ|²/G².",
        _mean_squared_error,
    ),
    printed_in_ustatistic(
        "ustat-prop-3",
        "Proposition 3",
        "For B prompts the error is E|g(X) - g|²/B + trΣ_oracle/(BG) plus a term of order 1/(BG²).",
        _minibatch,
    ),
    printed_in_ustatistic(
        "ustat-cor-4",
        "Corollary 4",
        "Up to terms of order 1/G² the error is that of the oracle, which knows the value.",
        _oracle_property,
    ),
    printed_in_ustatistic(
        "ustat-cor-5-optimal",
        "Corollary 5, under Assumption 2",
        "If |ψ|² and the reward are uncorrelated, no baseline that depends on the prompt alone does better in the limit.",
        _optimal_with_assumption,
    ),
    printed_in_ustatistic(
        "ustat-abstract-optimal",
        "Abstract",
        "Asymptotically no algorithm of this class does better.",
        _optimal_without_assumption,
    ),
    printed_in_ustatistic(
        "ustat-cor-5-below-vanilla",
        "Corollary 5, in the limit",
        "Under Assumption 2, with V ≠ 0, the error is strictly below that without a baseline.",
        _below_vanilla,
    ),
    printed_in_ustatistic(
        "ustat-cor-5-finite-group",
        "Corollary 5, read at a finite G",
        "The error is below that without a baseline at every group size.",
        _below_vanilla_at_every_size,
    ),
)
"""What it says of one update, in its order."""
