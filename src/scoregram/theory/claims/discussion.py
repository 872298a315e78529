"""Sections 8 and 9: what is said to follow."""

import torch

from scoregram.spectra import (
    SPECTRUM_METRICS,
    expected_orthogonal_effective_rank,
    orthogonal_effective_rank,
    spectrum_summary,
)
from scoregram.theory.claims.bench import (
    EXACT,
    advantages,
    batch_moments,
    binary_group,
    drawn_groups,
    estimator,
    gap,
    lab_world,
    lab_worlds,
    moments,
    reward_groups,
)
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, corrected, refuted, to_be_measured, unsupported
from scoregram.theory.lab.moments import across_prompts
from scoregram.theory.lab.turns import CREDITS, credit_moments, turn_moments
from scoregram.theory.theorems import group_mean_scale

SIZES = (2, 4, 8)


def template_learning() -> Finding:
    """Direction of the expected update under uniform credit and under exact credit for every token."""
    cosines, costs = [], []
    for truth in lab_worlds("output_only", "output_only_binary"):
        uniform = batch_moments(truth, "mean", group_size=4)
        exact = CREDITS["exact_advantage"].fn(truth)
        each = [credit_moments(truth, exact, prompt=p, group_size=4) for p in range(truth.value.numel())]
        by_token = across_prompts(truth, each, prompts=1)
        cosines.append(float(torch.nn.functional.cosine_similarity(uniform.expected, by_token.expected, dim=0)))
        costs.append(by_token.snr_squared / uniform.snr_squared)
    return unsupported(
        truth=min(cosines) > 1 - EXACT and min(costs) > 1,
        evidence={
            "least cosine of the two expected updates": min(cosines),
            "SNR² gained by exact credit, least": min(costs),
            "most": max(costs),
        },
        correction="No experiment or argument supports it. Uniform credit does not turn the expected update away from that of "
        "exact credit per token: they point the same way. It costs variance, so it can slow learning down; that it favours "
        "templates over composition would have to be shown.",
    )


def dense_rewards() -> Finding:
    """Zero-sum group baselines in a world with a reward at every step: bias of the update."""
    size, sums, biases, turn_biases = 3, 0.0, [], []
    for truth in lab_worlds("step_rewards"):
        row = estimator("turn-rloo")
        for prompt in range(truth.value.numel()):
            rewards = reward_groups(truth, prompt, size).rewards
            sums = max(sums, float(advantages("rloo", rewards).sum(dim=-1).abs().max()))
            biases.append(moments(truth, "rloo", prompt=prompt, group_size=size).relative_bias)
            by_turn = turn_moments(truth, row.fn, prompt=prompt, group_size=size, needs=("mask", *row.needs))
            turn_biases.append(by_turn.relative_bias)
    return unsupported(
        truth=max(sums, *biases, *turn_biases) < EXACT,
        evidence={
            "rloo: largest |Σ A_i|": sums,
            "rloo, step rewards: largest relative bias": max(biases),
            "turn-wise rloo: largest relative bias": max(turn_biases),
        },
        correction="No analysis of dense rewards is given. A sum of zero takes away only the part of the update along the mean "
        "score ψ̄, which is zero in expectation: with a reward at every step leave-one-out is zero-sum and unbiased, and so is "
        "(unbiased) leave-one-out turn by turn. No direction is lost in the mean.",
    )


def leave_one_out_breaks_rank() -> Finding:
    """Every rank metric of the same groups with the group mean and with the mean of the others."""
    differences, ratio = 0.0, 0.0
    for size in SIZES:
        for group in drawn_groups(lab_world("output_only_binary"), prompt=0, group_size=size, number=20, distinct=True):
            mean, others = (advantages(name, group.rewards) for name in ("mean", "rloo"))
            ratio = max(ratio, gap(others * group_mean_scale(size), mean))
            first, second = (spectrum_summary(group.gram, a) for a in (mean, others))
            for name in SPECTRUM_METRICS:
                differences = max(differences, abs(getattr(first, name) - getattr(second, name)))
    return refuted(
        printed=differences > 1e-6,
        truth=ratio < EXACT and differences < 1e-9,
        evidence={
            "metrics compared": len(SPECTRUM_METRICS),
            "largest difference in any rank metric": differences,
            "largest |A_mean - (R-1)/R A_rloo|": ratio,
        },
        correction="Leave-one-out advantages are R/(R-1) times the mean-centred ones, so every row of the stack is scaled "
        "alike and no rank metric moves. Baselines per token change the rows, not their number: the rank stays at most R.",
    )


def rank_as_signal() -> Finding:
    """Effective rank under the orthogonal null along a prompt's way from half solved to solved."""
    rates = (0.5, 0.7, 0.9, 0.99)
    null = [expected_orthogonal_effective_rank(p, 8) for p in rates]
    return to_be_measured(
        truth=null == sorted(null, reverse=True),
        evidence={f"null effective rank, R = 8, p = {p}": x for p, x in zip(rates, null, strict=True)},
        measure="To be measured: whether the effective rank foretells saturation better than what it is computed from. Even "
        "with orthogonal scores it falls as prompts are solved, by the shape of |A|; it must beat the mean reward and the "
        "share of mixed groups.",
    )


def rank_falls_with_spread() -> Finding:
    """Effective rank at shrinking rewards and at fewer right rollouts, orthogonal and drawn scores."""
    group = drawn_groups(lab_world("output_only_binary"), prompt=0, group_size=8, number=1, distinct=True)[0]
    scaled = [
        spectrum_summary(group.gram, advantages("mean", s * group.rewards)).effective_rank for s in (1.0, 1e-3, 1e-6)
    ]
    shape = [
        spectrum_summary(torch.eye(8, dtype=torch.float64), advantages("mean", binary_group(k, 8))).effective_rank
        for k in (4, 3, 2, 1)
    ]
    formula = max(abs(x - orthogonal_effective_rank(k, 8)) for k, x in zip((4, 3, 2, 1), shape, strict=True))
    floor = {size: expected_orthogonal_effective_rank(1 - 1e-9, size) for size in SIZES}
    limits = max(abs(x - 4 * (size - 1) / size) for size, x in floor.items())
    return corrected(
        printed=scaled[-1] < 0.99 * scaled[0],
        truth=max(scaled) - min(scaled) < 1e-9 and shape == sorted(shape, reverse=True) and max(formula, limits) < 1e-6,
        evidence={
            "σ_r: effective rank of a drawn group": scaled[0],
            "σ_r x 1e-6": scaled[-1],
            **{f"R = 8, k = {k}, orthogonal scores": x for k, x in zip((4, 3, 2, 1), shape, strict=True)},
            **{f"limit as p -> 1, R = {size}": x for size, x in floor.items()},
        },
        correction="The effective rank does not see the size of σ_r. In mixed groups it falls through the shape of |A|, from R "
        "at k = R/2 to 4(R-1)/R at k = 1 for orthogonal scores, and no further; at R = 2 it does not fall at all. Nothing of "
        "this follows from Corollary 4.2 (which the text calls Theorem 4.2).",
    )


def leave_one_out_bias() -> Finding:
    """Relative bias of both baselines in every world, at every size."""
    own, left = [], []
    for truth in lab_worlds():
        for prompt in range(truth.value.numel()):
            for size in SIZES:
                own.append(abs(moments(truth, "mean", prompt=prompt, group_size=size).relative_bias - 1 / size))
                left.append(moments(truth, "rloo", prompt=prompt, group_size=size).relative_bias)
    evidence = {
        "worlds x prompts x R": len(own),
        "largest |relative bias - 1/R|, group mean": max(own),
        "largest relative bias, leave-one-out": max(left),
    }
    return as_printed(max(*own, *left) < EXACT, evidence)


DISCUSSION: tuple[Claim, ...] = (
    Claim(
        "sec-8-template",
        "section 8, memorization",
        "Uniform credit biases learning towards whole templates instead of composition.",
        template_learning,
    ),
    Claim(
        "sec-8-dense",
        "section 8, multi-step reasoning",
        "Even with dense rewards the zero-sum group baseline limits what the gradient can express.",
        dense_rewards,
    ),
    Claim(
        "sec-8-future-1",
        "section 8, future direction (1)",
        "A leave-one-out baseline may break the rank-2 bottleneck.",
        leave_one_out_breaks_rank,
    ),
    Claim(
        "sec-8-future-2",
        "section 8, future direction (2)",
        "The effective rank may predict saturation and tell when to enlarge the group.",
        rank_as_signal,
    ),
    Claim(
        "sec-8-future-3",
        "section 8, future direction (3)",
        "The theory predicts an effective rank that falls as σ_r -> 0.",
        rank_falls_with_spread,
    ),
    Claim(
        "sec-9-rloo",
        "section 9",
        "The leave-one-out baseline removes a bias of order 1/R.",
        leave_one_out_bias,
    ),
)
