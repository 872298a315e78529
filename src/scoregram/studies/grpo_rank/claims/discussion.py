"""The abstract, the list of contributions, and Sections 8 to 10: what the paper announces, and what it concludes."""

import torch

from scoregram.spectra import (
    SPECTRUM_METRICS,
    expected_orthogonal_effective_rank,
    feasible_interval,
    orthogonal_effective_rank,
    spectrum_summary,
)
from scoregram.statistics import mixed_probability
from scoregram.studies.grpo_rank import PAPER_SIZES
from scoregram.studies.grpo_rank.claims.grounds import (
    EXACT,
    advantages,
    batch_moments,
    binary_group,
    claim,
    coin,
    drawn_groups,
    estimator,
    filler,
    gap,
    lab_world,
    lab_worlds,
    moments,
    prompts_of,
    reward_groups,
)
from scoregram.studies.grpo_rank.claims.rank import rank_two
from scoregram.studies.ledger import Finding, answered, as_printed, corrected, refuted, to_be_measured, unsupported
from scoregram.theory import (
    CREDITS,
    across_prompts,
    credit_moments,
    energy_return_covariance,
    group_mean_scale,
    turn_moments,
)


def sparsity_intensifies() -> Finding:
    """Zero advantages and zero coordinates of updates in mixed groups, and the share of dead groups by success rate."""
    zero_advantages = 0.0
    for p in (0.5, 0.9, 0.99):
        groups = reward_groups(coin(p), 0, 8)
        a = advantages("mean", groups.rewards[groups.mixed])
        zero_advantages = max(zero_advantages, float((a == 0).double().mean()))
    truth, zeros = lab_world("output_only_binary"), []
    for prompt in prompts_of(truth):
        reached = truth.scores[truth.listing.of_prompt(prompt)].abs().amax(dim=0) > 0  # nonzero in some rollout
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
        correction="Theorem 4.1 (iv), which A.1 calls the sparsity bound, limits the share of rollouts with |A_i| > ε as σ_r -> 0; "
        "it does not use uniform credit. No sparsity of the gradient itself is defined, proved or measured: in a "
        "mixed right-or-wrong group every advantage differs from zero. What grows as prompts are solved is the share of dead "
        "groups, p^R + (1-p)^R.",
    )


def baseline_conditions() -> Finding:
    """Variance at the value, which the group mean estimates, and at the best constant, against the condition for equality."""
    covariances, excess, errors = [], [], []
    for truth in (coin(0.5), coin(0.9), *lab_worlds("output_only", "output_only_binary")):
        covariance, returns = energy_return_covariance(truth), CREDITS["total_return"].fn(truth)
        for prompt in prompts_of(truth):
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
    """References for the measurement: null models by success rate, feasible intervals by top-1 fraction."""
    null = {(p, size): expected_orthogonal_effective_rank(p, size) for p in (0.5, 0.9) for size in PAPER_SIZES}
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


ABSTRACT_CLAIMS = (
    claim(
        "abstract-sparsity",
        "abstract, third sentence; section 5, first sentence",
        "Giving all tokens of a rollout the same advantage is proved to make the gradient sparse, more so over training.",
        sparsity_intensifies,
    ),
    claim(
        "abstract-effective-rank",
        "abstract, contribution 4, section 7.2, Figure 1",
        "The gradient matrix has an effective rank of about 2 whatever the group size (2, 4, 8).",
        effective_rank_two,
    ),
    claim(
        "rank-2",
        "abstract, fourth sentence; contribution 3; section 10, first sentence",
        "The gradient matrix has an intrinsic rank-2 structure, independent of R, from the zero-sum constraint on advantages.",
        rank_two,
    ),
    claim(
        "abstract-baseline",
        "abstract, fourth sentence",
        "Conditions are derived under which GRPO's baseline is optimal.",
        baseline_conditions,
    ),
)


def template_learning() -> Finding:
    """Cosine of the expected updates under uniform and under exact token-level credit."""
    cosines, costs = [], []
    for truth in lab_worlds("output_only", "output_only_binary"):
        uniform = batch_moments(truth, "mean", group_size=4)
        exact = CREDITS["exact_advantage"].fn(truth)
        each = [credit_moments(truth, exact, prompt=p, group_size=4) for p in prompts_of(truth)]
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
        "exact credit per token: they point the same way. It costs variance, so it can slow learning down; the "
        "paper does not show that it favours templates over composition. In training on sums (docs/methods.md) 33 methods with uniform "
        "credit showed no resolved loss on combinations of steps that they had never seen: 0.1 points [-1.4, 1.5], six seeds. There the "
        "noise between prompts counts too, and exact credit gained less: 1.09 [0.96, 1.24] and 1.11 [0.92, 1.35] times the "
        "efficiency of a group baseline (results/credit).",
    )


def dense_rewards() -> Finding:
    """Bias of the update with zero-sum group baselines, in a world with a reward at every step."""
    size, sums, biases, turn_biases = 3, 0.0, [], []
    for truth in lab_worlds("step_rewards"):
        row = estimator("turn-rloo")
        for prompt in prompts_of(truth):
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
        correction="No analysis of dense rewards is given. Zero-sum advantages remove only the part of the update along the "
        "mean score ψ̄, which is zero in expectation: with a reward at every step leave-one-out is zero-sum and unbiased, and so is "
        "(unbiased) leave-one-out turn by turn. No direction is lost on average.",
    )


def which_step_matters() -> Finding:
    """Push on a step with and without consequences, and the signal-to-noise ratio of uniform and exact credit."""
    truth, size = filler(), 8
    uniform = moments(truth, "mean", prompt=0, group_size=size)
    exact = credit_moments(truth, CREDITS["exact_advantage"].fn(truth), prompt=0, group_size=size)
    idle, deciding = (float(each) for each in uniform.expected)
    return corrected(
        printed=abs(idle) > EXACT,
        truth=abs(idle) < EXACT < deciding and exact.snr_squared > uniform.snr_squared,
        evidence={
            "step without consequences: average push": idle,
            "deciding step: average push": deciding,
            "SNR², uniform credit, R = 8": uniform.snr_squared,
            "SNR², exact credit per token": exact.snr_squared,
        },
        correction="Neither bias nor rank stands in the way: on average only the step that matters is pushed. What is poor in this "
        "world is the signal-to-noise ratio, since every step carries the noise of the whole rollout. On sums, where the noise between "
        "prompts counts too, exact credit gained 1.09 [0.96, 1.24] and 1.11 [0.92, 1.35] times the efficiency (results/credit), and "
        "tokens without consequences got 0.45 times [0.14, 0.77] the change of log-probability that their number suggests "
        "(docs/methods.md, six seeds).",
    )


def specific_to_grpo() -> Finding:
    """Rank and effective rank of the same groups with the group mean, with the value, and with 1/2 as the baseline."""
    truth = lab_world("output_only_binary")
    groups = drawn_groups(truth, prompt=0, group_size=8, number=20)
    levels = {"the value": float(truth.value[0]), "1/2": 0.5}
    means = {"the group mean": [spectrum_summary(g.gram, advantages("mean", g.rewards)) for g in groups]}
    for name, level in levels.items():
        baseline = torch.full((1,), level, dtype=torch.float64)
        fixed = [estimator("constant").fn(g.rewards[None], baselines=baseline)[0] for g in groups]
        means[name] = [spectrum_summary(g.gram, a) for g, a in zip(groups, fixed, strict=True)]
    rank = {name: sum(s.effective_rank for s in each) / len(each) for name, each in means.items()}
    differ = sum(len({s.numerical_rank for s in same}) > 1 for same in zip(*means.values(), strict=True))
    ratio = rank["the value"] / rank["the group mean"]
    return refuted(
        printed=not 0.8 < ratio < 1.25,
        truth=differ == 0 and 0.8 < ratio < 1.25 and rank["1/2"] > rank["the value"],
        evidence={f"mean effective rank, baseline {name}": x for name, x in rank.items()}
        | {"groups whose rank depends on the baseline": differ},
        correction="The rank of a group does not depend on the baseline. Its effective rank does, through the shape of |A|, and plain "
        "REINFORCE with the value as its baseline has nearly that of GRPO. Where the rank is low, rollouts repeat or resemble each other.",
    )


def when_justified() -> Finding:
    """Share of the error that estimating the baseline from the group adds, and the chance of a mixed group, by success rate."""
    size, rates, shares, errors = 8, (0.5, 0.9, 0.99), [], []
    for p in rates:
        truth = coin(p)
        of_baseline = truth.c3 / (size - 1)
        shares.append(of_baseline / (truth.c2 + of_baseline))
        # the definition, for the same number: leave-one-out against the value as a baseline
        oracle = credit_moments(
            truth, CREDITS["total_return"].fn(truth) - truth.value[0], prompt=0, group_size=size
        ).mse
        left_out = moments(truth, "rloo", prompt=0, group_size=size).mse
        errors.append(abs(shares[-1] - (1 - oracle / left_out)))
    mixed = [mixed_probability(p, size) for p in rates]
    return unsupported(
        truth=max(errors) < 1e-9 and shares == sorted(shares, reverse=True) and mixed == sorted(mixed, reverse=True),
        evidence={f"error due to the baseline, R = 8, p = {p}": x for p, x in zip(rates, shares, strict=True)}
        | {f"chance of a mixed group, p = {p}": x for p, x in zip(rates, mixed, strict=True)},
        correction="The single turn is treated (section 6 and A.3; see single-turn-exact); no statement of the text depends on the "
        "initial σ_r. A high σ_r cuts both ways: "
        "more groups are mixed, and a larger share of the error comes from estimating the baseline.",
    )


def leave_one_out_breaks_rank() -> Finding:
    """Every rank metric of the same groups, with the group mean and with the mean of the other rollouts."""
    differences, ratio = 0.0, 0.0
    for size in PAPER_SIZES:
        for group in drawn_groups(lab_world("output_only_binary"), prompt=0, group_size=size, number=20, distinct=True):
            mean, others = (advantages(name, group.rewards) for name in ("mean", "rloo"))
            ratio = max(ratio, gap(others * group_mean_scale(size), mean))
            first, second = (spectrum_summary(group.gram, a) for a in (mean, others))
            for name in SPECTRUM_METRICS:
                differences = max(differences, abs(getattr(first, name) - getattr(second, name)))
    return answered(
        truth=ratio < EXACT and differences < 1e-9,
        evidence={
            "metrics compared": len(SPECTRUM_METRICS),
            "largest difference in any rank metric": differences,
            "largest |A_mean - (R-1)/R A_rloo|": ratio,
        },
        answer="No. Leave-one-out advantages are R/(R-1) times the mean-centred ones, so every row of the stack is scaled "
        "alike and no rank metric moves. Baselines per token change the rows, not their number: the rank stays at most R. On sums of 12 terms "
        "(results/credit, six seeds), credit per step from VinePPO lowers rank over null from 0.82 [0.79, 0.85] to 0.68 [0.65, 0.72], process rewards have "
        "0.87 [0.84, 0.89], a critic's values per token 0.81 [0.75, 0.87] (it predicted nothing yet) and `optimal-token`, a baseline per token against "
        "noise, 0.66 [0.57, 0.74]. On these six seeds none of the four gained accuracy at this length beyond a correction. Two were repeated on ten "
        "fresh seeds at a rate of 1e-4 and gained mean accuracy over a run against a group baseline, beyond a correction for three contrasts: process "
        "rewards 3.0 points [1.3, 4.7], `optimal-token` 4.6 [1.9, 7.2].",
    )


def rank_as_signal() -> Finding:
    """Effective rank under the orthogonal null as a prompt's success rate rises from 0.5 to 0.99."""
    rates = (0.5, 0.7, 0.9, 0.99)
    null = [expected_orthogonal_effective_rank(p, 8) for p in rates]
    return to_be_measured(
        truth=null == sorted(null, reverse=True),
        evidence={f"null effective rank, R = 8, p = {p}": x for p, x in zip(rates, null, strict=True)},
        measure="The text asks and asserts nothing. To be measured: whether the effective rank predicts saturation better than the quantities it is computed from. "
        "Even with orthogonal scores it falls as prompts are solved, because of the shape of |A|; it must beat the mean reward and the "
        "share of mixed groups.",
    )


FALL_OVER_TRAINING = (
    "Measured over 1,000 steps at fixed k (results/over-training: 135 M parameters, 7 to 13 % right, three seeds), log(rank / null) has a "
    "slope of -0.045 [-0.115, +0.024] with the paper's update and of -0.030 [-0.073, +0.013] with standardised GRPO. Every run falls; over "
    "seeds the fall is resolved only for the paper's update without repeated texts, -0.023 [-0.044, -0.002]."
)
"""Slopes per 1,000 steps, as in the table of that folder."""


def rank_falls_with_spread() -> Finding:
    """Effective rank of a drawn group as its rewards shrink, and of orthogonal scores as fewer rollouts are right."""
    group = drawn_groups(lab_world("output_only_binary"), prompt=0, group_size=8, number=1, distinct=True)[0]
    scaled = [
        spectrum_summary(group.gram, advantages("mean", s * group.rewards)).effective_rank for s in (1.0, 1e-3, 1e-6)
    ]
    shape = [
        spectrum_summary(torch.eye(8, dtype=torch.float64), advantages("mean", binary_group(k, 8))).effective_rank
        for k in (4, 3, 2, 1)
    ]
    formula = max(abs(x - orthogonal_effective_rank(k, 8)) for k, x in zip((4, 3, 2, 1), shape, strict=True))
    floor = {size: expected_orthogonal_effective_rank(1 - 1e-9, size) for size in PAPER_SIZES}
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
        f"this follows from Corollary 4.2 (which the text calls Theorem 4.2). {FALL_OVER_TRAINING}",
    )


def leave_one_out_bias() -> Finding:
    """Relative bias of both baselines, in every world and at every group size."""
    own, left = [], []
    for truth in lab_worlds():
        for prompt in prompts_of(truth):
            for size in PAPER_SIZES:
                own.append(abs(moments(truth, "mean", prompt=prompt, group_size=size).relative_bias - 1 / size))
                left.append(moments(truth, "rloo", prompt=prompt, group_size=size).relative_bias)
    evidence = {
        "worlds x prompts x R": len(own),
        "largest |relative bias - 1/R|, group mean": max(own),
        "largest relative bias, leave-one-out": max(left),
    }
    return as_printed(max(*own, *left) < EXACT, evidence)


DISCUSSION_CLAIMS = (
    claim(
        "sec-8-template",
        "section 8, 'Connection to memorization vs. generalization', second sentence",
        "Uniform credit biases towards template-level learning: sequences are reinforced as wholes and not decomposed.",
        template_learning,
    ),
    claim(
        "sec-8-dense",
        "section 8, 'Implications for multi-step reasoning', second sentence",
        "Even with dense reward the group-relative baseline (negative correlations, zero sum) constrains what the gradient can express.",
        dense_rewards,
    ),
    claim(
        "sec-8-which-step",
        "section 8, 'Implications for multi-step reasoning', first sentence",
        "Multi-turn bias and rank-2 collapse suggest that GRPO is poorly suited for learning which step of a chain matters.",
        which_step_matters,
    ),
    claim(
        "sec-8-future-1",
        "section 8, 'Future directions' (1)",
        "Can leave-one-out or learned token-level baselines break the rank-2 bottleneck? (a question)",
        leave_one_out_breaks_rank,
    ),
    claim(
        "sec-8-future-2",
        "section 8, 'Future directions' (2)",
        "If effective rank predicts saturation, can it be a signal to increase R or to switch to denser rewards? (a question)",
        rank_as_signal,
    ),
    claim(
        "sec-8-future-3",
        "section 8, 'Future directions' (3)",
        "The theory predicts that the effective rank decreases as σ_r -> 0; measuring it over training would validate Theorem 4.2.",
        rank_falls_with_spread,
    ),
    claim(
        "sec-9-rloo",
        "section 9, 'GRPO and RLHF', second sentence",
        "RLOO's leave-one-out baseline eliminates the O(1/R) bias.",
        leave_one_out_bias,
    ),
    claim(
        "sec-9-specific",
        "section 9, 'Gradient rank in deep learning', last sentence",
        "The low rank has a theoretical reason that is specific to GRPO's policy gradient structure.",
        specific_to_grpo,
    ),
    claim(
        "sec-10-justified",
        "section 10, third sentence; abstract, last sentence",
        "The results formalise when GRPO's simplicity is justified: a single turn and a high initial σ_r.",
        when_justified,
    ),
)
