"""Section 5.1: why updates are said to be sparse."""

import torch

from scoregram.spectra import common_cosine_null
from scoregram.theory.claims.bench import EXACT, advantages, binary_group, drawn_groups, gap, lab_worlds
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, corrected
from scoregram.theory.theorems import contrast_weight, largest_stacked_rank

SIZES = (2, 4, 8)


def contrast() -> Finding:
    """Advantages of right-or-wrong groups, and the update as a multiple of the contrast of mean scores."""
    values = 0.0
    for size in SIZES:
        for k in range(1, size):
            stated = torch.where(binary_group(k, size) > 0, 1 - k / size, -k / size)
            values = max(values, gap(advantages("mean", binary_group(k, size)), stated))
    updates, groups = 0.0, 0
    for truth in lab_worlds("output_only_binary"):
        for prompt in range(truth.value.numel()):
            for group in drawn_groups(truth, prompt=prompt, group_size=8, number=20):
                right = group.rewards > 0
                weight = contrast_weight(int(right.sum()), 8)
                stated = weight * (group.scores[right].mean(dim=0) - group.scores[~right].mean(dim=0))
                updates = max(updates, gap(advantages("mean", group.rewards) @ group.scores / 8, stated))
                groups += 1
    evidence = {
        "largest |A - (1 - k/R or -k/R)|": values,
        "drawn groups": groups,
        "largest |ĝ - k(R-k)/R² (ψ̄₊ - ψ̄₋)|": updates,
    }
    return as_printed(max(values, updates) < EXACT, evidence)


def small_near_the_ends() -> Finding:
    """Largest advantage and contrast weight at one right rollout and at half of them."""
    largest = {k: float(advantages("mean", binary_group(k, 8)).abs().max()) for k in range(1, 8)}
    weight = {size: contrast_weight(1, size) / contrast_weight(size // 2, size) for size in SIZES}
    rises = [largest[k] for k in (4, 3, 2, 1)]
    energy = [float(advantages("mean", binary_group(k, 8)).square().sum()) for k in (1, 4)]
    return corrected(
        printed=largest[1] < largest[4],
        truth=rises == sorted(rises)
        and contrast_weight(0, 8) == contrast_weight(8, 8) == 0
        and min(weight.values()) > 0,
        evidence={
            "R = 8, k = 1: max |A|": largest[1],
            "R = 8, k = 4: max |A|": largest[4],
            "R = 8, k = 1: Σ A²": energy[0],
            "R = 8, k = 4: Σ A²": energy[1],
            **{f"weight of the contrast at k = 1 against k = R/2, R = {size}": w for size, w in weight.items()},
        },
        correction="The weight k(R-k)/R² of the contrast falls towards the ends but is zero only at k = 0 and k = R. The "
        "advantages do not get small: at k = 1 the right rollout has 1 - 1/R, the largest advantage there is.",
    )


def similar_scores() -> Finding:
    """Effective rank of eight rows at one common cosine, and the mean inner product of scores of one prompt."""
    a = advantages("mean", binary_group(4, 8))
    cosines = (0.0, 0.3, 0.6, 0.9, 1.0)
    ranks = [common_cosine_null(torch.eye(8, dtype=torch.float64), a, cosine=c).effective_rank for c in cosines]
    inner = 0.0
    for truth in lab_worlds():
        for prompt in range(truth.value.numel()):
            rows = truth.listing.of_prompt(prompt)
            inner = max(inner, float((truth.probability[rows] @ truth.scores[rows]).square().sum()))
    return corrected(
        printed=largest_stacked_rank(a) < len(a),
        truth=ranks == sorted(ranks, reverse=True) and abs(ranks[-1] - 1) < 1e-6 and inner < EXACT,
        evidence={f"effective rank, R = 8, common cosine {c}": r for c, r in zip(cosines, ranks, strict=True)}
        | {"largest E⟨ψ_i, ψ_j⟩ of two rollouts of a prompt": inner},
        correction="True of similar scores, whatever the credit: the effective rank falls as the common cosine grows. That "
        "credit is uniform adds nothing, and sharing a prompt does not make scores similar: sampled from the policy itself, "
        "two rollouts have E⟨ψ_i, ψ_j⟩ = |Eψ|² = 0. How alike they are has to be measured.",
    )


SPARSITY: tuple[Claim, ...] = (
    Claim(
        "sec-5.1-1-contrast",
        "section 5.1 (1)",
        "With k of R right, advantages are 1 - k/R and -k/R, and the update is the contrast of right and wrong.",
        contrast,
    ),
    Claim(
        "sec-5.1-1-small",
        "section 5.1 (1)",
        "With k close to 0 or R the advantages are small and the gradient vanishes.",
        small_near_the_ends,
    ),
    Claim(
        "sec-5.1-2",
        "section 5.1 (2)",
        "Uniform credit, and scores alike within a prompt, concentrate the gradient in few directions.",
        similar_scores,
    ),
)
