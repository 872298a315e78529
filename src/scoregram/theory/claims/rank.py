"""Section 7 and the figures: how many directions the stacked gradient matrix has, and what follows."""

import math
from functools import lru_cache
from itertools import chain

import torch

from scoregram.spectra import centred_gram, orthogonal_effective_rank, spectrum_summary
from scoregram.statistics import NoiseComponents, optimal_group_size, signal_to_noise, update_coherence
from scoregram.theory.claims.bench import (
    EXACT,
    DrawnGroup,
    advantages,
    binary_group,
    drawn_groups,
    estimator,
    lab_world,
    lab_worlds,
    moments,
)
from scoregram.theory.claims.ledger import Claim, Finding, corrected, refuted, to_be_measured
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.theorems import expected_orthogonal_top1_fraction, largest_stacked_rank

SIZES = (2, 4, 8)


@lru_cache
def _groups(size: int) -> tuple[DrawnGroup, ...]:
    """Mixed groups of different rollouts, all prompts of the right-or-wrong world."""
    truth = lab_world("output_only_binary")
    draws = (drawn_groups(truth, prompt=p, group_size=size, number=10, distinct=True) for p in range(3))
    return tuple(chain.from_iterable(draws))


def rank_two() -> Finding:
    """Rank of zero-sum stacks, the same stacks with a baseline that is not zero-sum, and the two conditional means."""
    ranks, other = {}, {}
    for size in SIZES:
        groups = _groups(size)
        ranks[size] = {spectrum_summary(g.gram, advantages("mean", g.rewards)).numerical_rank for g in groups}
        level = torch.tensor([0.3], dtype=torch.float64)
        fixed = [estimator("constant").fn(g.rewards[None], baselines=level)[0] for g in groups]
        other[size] = {spectrum_summary(g.gram, a).numerical_rank for g, a in zip(groups, fixed, strict=True)}
    orthogonal = spectrum_summary(torch.eye(8, dtype=torch.float64), advantages("mean", binary_group(4, 8)))
    opposite = max(_cosine_of_means(truth, p) for truth in lab_worlds("output_only_binary") for p in range(3))
    return refuted(
        printed=max(ranks[8]) <= 2,
        truth=ranks == other == {size: {size} for size in SIZES}
        and abs(orthogonal.effective_rank - orthogonal_effective_rank(4, 8)) < 1e-9
        and opposite < -1 + EXACT,
        evidence={
            **{f"rank of zero-sum stacks, R = {size}": max(seen) for size, seen in ranks.items()},
            "the same, constant baseline, R = 8": max(other[8]),
            "effective rank, R = 8, k = 4, orthogonal scores": orthogonal.effective_rank,
            "cosine of E[ψ | right] and E[ψ | wrong]": opposite,
        },
        correction="No such theorem is stated or proved, and it is false: zero-sum advantages leave the stack any rank up to "
        "R (the baseline only scales rows). What is low-dimensional is elsewhere: the update itself is one vector, and in "
        "the mean right and wrong rollouts pull along one line, E[ψ | right] and E[ψ | wrong] being opposite.",
    )


def _cosine_of_means(truth: GroundTruth, prompt: int) -> float:
    rows = truth.listing.of_prompt(prompt)
    right = truth.listing.returns[rows] > 0
    weighted = truth.probability[rows, None] * truth.scores[rows]
    first, second = weighted[right].sum(dim=0), weighted[~right].sum(dim=0)
    return float(first @ second / (first.norm() * second.norm()))


def max_rank() -> Finding:
    """Largest rank met in stacks as they are and in centred ones, against the number of nonzero advantages."""
    evidence, found, bounds, centred = {}, [], [], []
    for size in SIZES:
        groups = _groups(size)
        a = [advantages("mean", g.rewards) for g in groups]
        found.append(max(spectrum_summary(g.gram, x).numerical_rank for g, x in zip(groups, a, strict=True)))
        bounds.append(max(largest_stacked_rank(x) for x in a))
        centred.append(
            max(spectrum_summary(centred_gram(g.gram), x).numerical_rank for g, x in zip(groups, a, strict=True))
        )
        evidence[f"R = {size}: rank of A_i ψ_i"] = found[-1]
        evidence[f"R = {size}: rank of A_i (ψ_i - ψ̄)"] = centred[-1]
    return refuted(
        printed=all(rank <= size - 1 for rank, size in zip(found, SIZES, strict=True)),
        truth=found == bounds == list(SIZES) and centred == [size - 1 for size in SIZES],
        evidence=evidence,
        correction="The largest rank is the number of nonzero advantages: R in a mixed right-or-wrong group. Σ A_i = 0 says "
        "1ᵀA = 0; it is not a relation between the rows A_i ψ_i, whose sum is R ĝ. R - 1 bounds the scores less their mean.",
    )


def two_directions_a_step() -> Finding:
    """Directions of the stack against directions of the step made of it."""
    stack, step, along = [], [], []
    for group in _groups(8):
        a = advantages("mean", group.rewards)
        rows = a[:, None] * group.scores
        update = rows.sum(dim=0, keepdim=True)
        stack.append(spectrum_summary(group.gram, a).effective_rank)
        step.append(spectrum_summary(update @ update.mT).numerical_rank)
        along.append(update_coherence(group.gram, a))
    return refuted(
        printed=max(step) > 1,
        truth=set(step) == {1},
        evidence={
            "groups of 8": len(step),
            "mean effective rank of the stack": sum(stack) / len(stack),
            "directions of the step": max(step),
            "mean share of the stack's energy that survives the sum": sum(along) / len(along),
        },
        correction="A step moves along one vector, the sum of the rows over all prompts, whatever their rank. The spectrum of "
        "the stack says how different the contributions are before they are added up.",
    )


def no_new_dimensions() -> Finding:
    """Rank and mean effective rank of stacks of growing size, beside orthogonal scores of the same norms."""
    ranks, means, evidence = [], [], {}
    for size in SIZES:
        spectra = [spectrum_summary(g.gram, advantages("mean", g.rewards)) for g in _groups(size)]
        ranks.append({s.numerical_rank for s in spectra})
        means.append(math.fsum(s.effective_rank for s in spectra) / len(spectra))
        evidence |= {f"R = {size}: rank": max(ranks[-1]), f"R = {size}: mean effective rank": means[-1]}
    return refuted(
        printed=max(ranks[-1]) <= 2,
        truth=ranks == [{size} for size in SIZES] and means == sorted(means),
        evidence=evidence,
        correction="A rollout with a score of its own and a nonzero advantage adds a dimension to the stack, up to R in all. "
        "How much energy it carries in a language model is a matter of measurement, not of the zero-sum constraint.",
    )


def diminishing_returns() -> Finding:
    """Signal to noise per rollout within a prompt, and the best group size when rollouts are shared among prompts."""
    worst, shown = math.inf, {}
    for truth in lab_worlds("output_only"):
        for prompt in range(truth.value.numel()):
            per_rollout = [moments(truth, "mean", prompt=prompt, group_size=s).snr_squared / s for s in SIZES]
            worst = min(worst, per_rollout[1] - per_rollout[0], per_rollout[2] - per_rollout[1])
            shown = shown or {f"SNR² per rollout, R = {s}": x for s, x in zip(SIZES, per_rollout, strict=True)}
    best = optimal_group_size(_components(lab_world("output_only")))
    return corrected(
        printed=worst < 0,
        truth=worst > 0 and math.isfinite(best.exact),
        evidence=shown | {"least gain in SNR² per rollout": worst, "best R at a fixed number of rollouts": best.exact},
        correction="Not because of rank. For one prompt the squared signal-to-noise ratio grows faster than R, so every "
        "rollout counts for more, not less. Returns diminish against using the rollouts on other prompts: the best R is "
        "1 + √(c3/c1), where prompts differ by c1 and the baseline's noise is c3.",
    )


def _components(truth: GroundTruth) -> NoiseComponents:
    return NoiseComponents(float(truth.objective_gradient.square().sum()), truth.c1, truth.c2, truth.c3)


def top_fraction_order() -> Finding:
    """Top-1 fractions that `|A|` alone would give, orthogonal scores, by success rate; where they have the printed order."""
    rates = [i / 100 for i in range(1, 100)]
    null = {p: [expected_orthogonal_top1_fraction(p, size) for size in SIZES] for p in rates}
    same = [p for p, (two, four, eight) in null.items() if four > two > eight]
    evidence = {f"null, p = {p}, R = {size}": f for p in (0.5, 0.9) for size, f in zip(SIZES, null[p], strict=True)}
    return to_be_measured(
        truth=bool(same) and null[0.9][2] > null[0.9][1],
        evidence=evidence
        | {
            "least p where the null has the printed order": min(same, default=math.nan),
            "largest such p": max(same, default=math.nan),
        },
        measure="To be measured: top-1 fraction of mixed groups at R = 2, 4, 8, with seeds, beside the orthogonal, "
        "common-cosine and shuffled nulls at the same k. The order R = 4 > 2 > 8 needs no interplay of scores: for middling "
        "success rates |A| alone gives it.",
    )


def larger_groups_learn_faster() -> Finding:
    """Exact signal to noise of a step at equal prompts and at equal rollouts, in the lab."""
    parts = _components(lab_world("output_only"))
    prompts = [signal_to_noise(parts, 8, size) for size in SIZES]
    rollouts = [signal_to_noise(parts, 32 // size, size) for size in SIZES]
    evidence = {f"SNR², 8 prompts, R = {size}": x for size, x in zip(SIZES, prompts, strict=True)}
    evidence |= {f"SNR², 32 rollouts, R = {size}": x for size, x in zip(SIZES, rollouts, strict=True)}
    return to_be_measured(
        truth=prompts == sorted(prompts),
        evidence=evidence,
        measure="To be measured: accuracy over training at R = 2, 4, 8, at least three seeds, against steps and against "
        "rollouts. Larger groups at equal prompts also use more rollouts; the null is the same number of rollouts on more "
        "prompts.",
    )


RANK: tuple[Claim, ...] = (
    Claim(
        "max-rank",
        "section 7.2, Figure 1, Table 1",
        "The largest possible rank of the stacked gradient matrix is R - 1.",
        max_rank,
    ),
    Claim(
        "sec-7.2-directions",
        "section 7.2, interpretation",
        "Each step moves the parameters along about two directions only.",
        two_directions_a_step,
    ),
    Claim(
        "sec-7.2-dimensions",
        "section 7.2, interpretation",
        "Rollouts beyond two refine the same two directions and add no new ones.",
        no_new_dimensions,
    ),
    Claim(
        "sec-7.2-diminishing",
        "section 7.2, interpretation",
        "Because of the rank, larger groups bring diminishing returns in what the gradient tells.",
        diminishing_returns,
    ),
    Claim(
        "fig-2",
        "Figure 2",
        "The top-1 fraction is highest at R = 4 and lowest at R = 8, by an interplay of advantages and scores.",
        top_fraction_order,
    ),
    Claim(
        "fig-3", "Figure 3", "Larger groups learn faster, by a better estimate of ψ₊ - ψ₋.", larger_groups_learn_faster
    ),
)
