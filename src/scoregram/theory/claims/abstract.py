"""The abstract, the list of contributions and the conclusion: what is announced."""

import torch

from scoregram.spectra import expected_orthogonal_effective_rank, feasible_interval
from scoregram.statistics import mixed_probability
from scoregram.theory.claims.bench import (
    EXACT,
    advantages,
    coin,
    drawn_groups,
    lab_world,
    lab_worlds,
    reward_groups,
)
from scoregram.theory.claims.ledger import Claim, Finding, to_be_measured, unsupported
from scoregram.theory.claims.rank import rank_two
from scoregram.theory.lab.turns import CREDITS, credit_moments
from scoregram.theory.theorems import energy_return_covariance

SIZES = (2, 4, 8)


def sparsity_intensifies() -> Finding:
    """Zeros among the advantages and among the coordinates of updates of mixed groups; dead groups by success rate."""
    zero_advantages = 0.0
    for p in (0.5, 0.9, 0.99):
        groups = reward_groups(coin(p), 0, 8)
        a = advantages("mean", groups.rewards[groups.mixed])
        zero_advantages = max(zero_advantages, float((a == 0).double().mean()))
    truth, zeros = lab_world("output_only_binary"), []
    for prompt in range(truth.value.numel()):
        reached = truth.scores[truth.listing.of_prompt(prompt)].abs().amax(dim=0) > 0  # by any rollout of the prompt
        for group in drawn_groups(truth, prompt=prompt, group_size=8, number=20):
            zeros.append((advantages("mean", group.rewards) @ group.scores)[reached] == 0)
    zero_parameters = float(torch.cat(zeros).double().mean())
    dead = {p: 1 - mixed_probability(p, 8) for p in (0.5, 0.9, 0.99)}
    return unsupported(
        truth=zero_advantages == 0 and zero_parameters == 0 and sorted(dead.values()) == list(dead.values()),
        evidence={
            "zero advantages in mixed groups": zero_advantages,
            "zero coordinates in updates of mixed groups": zero_parameters,
            **{f"dead groups of 8, p = {p}": share for p, share in dead.items()},
        },
        correction="No sparsity of the gradient is defined, proved or measured, and none follows from uniform credit: in a "
        "mixed right-or-wrong group every advantage differs from zero. What grows as prompts are solved is the share of dead "
        "groups, p^R + (1-p)^R.",
    )


def baseline_conditions() -> Finding:
    """The condition under which the value, which the group mean estimates, is the best constant: with numbers."""
    covariances, excess, errors = [], [], []
    for truth in (coin(0.5), coin(0.9), *lab_worlds("output_only", "output_only_binary")):
        covariance, returns = energy_return_covariance(truth), CREDITS["total_return"].fn(truth)
        for prompt in range(truth.value.numel()):
            at_value, at_best = (
                credit_moments(truth, returns - b[prompt], prompt=prompt, group_size=1).variance
                for b in (truth.value, truth.optimal_baseline)
            )
            predicted = float(covariance[prompt] ** 2 / truth.fisher_trace[prompt])
            errors.append(abs(at_value - at_best - predicted))
            covariances.append(float(covariance[prompt]))
            excess.append((at_value - at_best) / at_value if at_value else 0.0)  # a fair coin has no noise left at all
    return unsupported(
        truth=max(errors) < EXACT and abs(covariances[0]) < EXACT and abs(excess[0]) < EXACT and excess[1] > 0.5,
        evidence={
            "coin p = 0.5: Cov(|ψ|², r)": covariances[0],
            "coin p = 0.5: share of variance lost": excess[0],
            "coin p = 0.9: Cov(|ψ|², r)": covariances[1],
            "coin p = 0.9: share of variance lost": excess[1],
            "lab: largest share of variance lost": max(excess[2:]),
            "largest error of Cov²/E|ψ|²": max(errors),
        },
        correction="The text contains no such condition. It is Cov(|ψ|², r) = 0: then and only then the value, which the "
        "group mean estimates, is the constant baseline of least variance; otherwise it costs Cov(|ψ|², r)² / (R E|ψ|²).",
    )


def effective_rank_two() -> Finding:
    """What a reader has to hold the measurement against: nulls by success rate, intervals by top-1 fraction."""
    null = {(p, size): expected_orthogonal_effective_rank(p, size) for p in (0.5, 0.9) for size in SIZES}
    ends = {(f, size): feasible_interval("effective_rank", f, size) for f, size in ((0.65, 2), (0.75, 4), (0.55, 8))}
    evidence = {f"null, p = {p}, R = {size}": x for (p, size), x in null.items()}
    evidence |= {f"possible at R = {size}, top-1 {f}": f"{i.low:.2f} to {i.high:.2f}" for (f, size), i in ends.items()}
    return to_be_measured(
        truth=all(i.low > 1.8 for i in ends.values()) and null[0.5, 2] < null[0.5, 4] < null[0.5, 8],
        evidence=evidence,
        measure="To be measured: effective rank and top-1 fraction of mixed groups at R = 2, 4, 8, sampled at temperature 1, "
        "at least three seeds, with error bars and k; beside the orthogonal, common-cosine and shuffled nulls and the "
        "interval that the top-1 fraction leaves open. A top-1 fraction of 0.5 to 0.8 alone forces at least 1.8.",
    )


ABSTRACT: tuple[Claim, ...] = (
    Claim(
        "abstract-sparsity",
        "abstract, section 5",
        "It is proved that uniform credit makes the gradient sparse, more so as training goes on.",
        sparsity_intensifies,
    ),
    Claim(
        "abstract-effective-rank",
        "abstract, contribution 4, section 7.2, Figure 1",
        "The gradient matrix has an effective rank of about 2 whatever the group size (2, 4, 8).",
        effective_rank_two,
    ),
    Claim(
        "rank-2",
        "abstract, contribution 3, section 10",
        "The zero-sum constraint gives the gradient matrix an intrinsic rank of two, independent of R.",
        rank_two,
    ),
    Claim(
        "abstract-baseline",
        "abstract",
        "Conditions are derived under which the group mean is the optimal baseline.",
        baseline_conditions,
    ),
)
