"""Section 7.1, which announces a metric that is never shown, and what a published summary of the paper asserts.

The summary is Modelwire's note on arXiv:2606.29238. Its readers meet the paper through it, so its assertions are judged
as the paper's are.
"""

import math
from functools import partial

from scoregram.advantages import leave_one_out, no_baseline
from scoregram.spectra import expected_orthogonal_effective_rank
from scoregram.statistics import right_chances
from scoregram.studies.grpo_rank import ABOUT_TWO, PAPER_SIZES
from scoregram.studies.grpo_rank.claims.grounds import EXACT, claim, lab_worlds, prompts_of
from scoregram.studies.ledger import Finding, corrected, extremes, refuted, unsupported
from scoregram.theory import WORLDS, group_update_moments, listing

SUMMARY = "Modelwire on arXiv:2606.29238"
_EFFECTS = (-1, 0, 1)
"""Change of the score when the low rank is removed: it falls, stays, rises."""


def _mean_deviation(success: float, size: int) -> float:
    """Mean over groups of the population deviation of right-or-wrong rewards, by enumeration of `k`."""
    return math.fsum(chance * math.sqrt(k * (size - k)) / size for k, chance in enumerate(right_chances(success, size)))


def _deviation() -> Finding:
    found = {(p, size): _mean_deviation(p, size) for p in (0.1, 0.5, 0.9) for size in PAPER_SIZES}
    grows = all(found[p, 2] < found[p, 4] < found[p, 8] < math.sqrt(p * (1 - p)) for p in (0.1, 0.5, 0.9))
    return unsupported(
        truth=grows,
        evidence={f"mean deviation of a group, p={p}, R={size}": value for (p, size), value in found.items()},
        correction="σ_r(k) is listed as a metric; no figure, table or sentence reports it. A group's own deviation would "
        "not compare group sizes either: its mean grows with R towards √(p(1-p)) while the policy stays the same.",
    )


def _within_rollouts(world: str) -> float:
    """Largest difference of the reward still to come between two decisions of one rollout."""
    rows = listing(WORLDS[world])
    to_come = rows.reward.flip(-1).cumsum(-1).flip(-1)  # (listed, turns)
    highest = to_come.masked_fill(~rows.mask, -math.inf).amax(-1)
    lowest = to_come.masked_fill(~rows.mask, math.inf).amin(-1)
    return float((highest - lowest).max())


def _baseline_collapses_credit() -> Finding:
    alone, dense = _within_rollouts("output_only"), _within_rollouts("step_rewards")
    return corrected(
        printed=dense <= EXACT,
        truth=alone <= EXACT and dense > EXACT,
        evidence={
            "largest difference of reward to come in a rollout, output-only reward": alone,
            "the same, rewards per step": dense,
        },
        correction="The output-only reward does it, with any baseline or none: the reward still to come is then the "
        "same at every token. A baseline for the whole group shifts all tokens alike and leaves their differences.",
    )


def _converges() -> Finding:
    rates = (0.5, 0.9, 0.99, 0.9999)
    found = {(p, size): expected_orthogonal_effective_rank(p, size) for p in rates for size in PAPER_SIZES}
    limits = {size: 4 * (size - 1) / size for size in PAPER_SIZES}
    falls = all(found[0.5, size] >= found[0.9, size] >= found[0.99, size] - EXACT for size in PAPER_SIZES)
    near = max(abs(found[0.9999, size] - limit) for size, limit in limits.items())
    return unsupported(
        truth=falls and near < 0.01,
        evidence={f"rank of mixed groups, orthogonal scores, p={p}, R=8": found[p, 8] for p in rates}
        | {"gap to 4(R-1)/R at p=.9999": near},
        correction="The paper reports about 2 throughout training (Figure 1), not a convergence. Among mixed groups the "
        "rank of orthogonal scores does fall as success becomes sure, to 4(R-1)/R: 2, 3 and 3.5.",
    )


def _no_fix() -> Finding:
    ranks = {size: expected_orthogonal_effective_rank(0.5, size) for size in PAPER_SIZES}
    falls = []
    for truth in lab_worlds("output_only", "output_only_binary"):
        for prompt in prompts_of(truth):
            few, many = (
                group_update_moments(truth, leave_one_out, prompt=prompt, group_size=size).mse for size in (2, 8)
            )
            falls.append(many / few)
    return refuted(
        printed=max(ranks.values()) - min(ranks.values()) <= ABOUT_TWO or max(falls) >= 1,
        truth=ranks[2] < ranks[4] < ranks[8] and max(falls) <= 2 / 8,
        evidence={f"rank, orthogonal scores, p=.5, R={size}": rank for size, rank in ranks.items()}
        | extremes("error of the gradient, R=8 / R=2", falls),
        correction="A larger group helps: orthogonal scores have a rank that grows with R, and the error of a prompt's "
        "gradient falls at least as 1/R whatever the rank.",
    )


def _parity() -> Finding:
    suppressing, regularising = ({effect for effect in _EFFECTS if effect * sign > 0} for sign in (1, -1))
    parity, drop = ({effect for effect in _EFFECTS if effect == seen} for seen in (0, -1))
    same, noise = 0.0, []
    for truth in lab_worlds("output_only"):
        for prompt in prompts_of(truth):
            others, none = (
                group_update_moments(truth, fn, prompt=prompt, group_size=4) for fn in (leave_one_out, no_baseline)
            )
            same = max(same, float((others.expected - none.expected).abs().max()))
            noise.append(none.mse / others.mse)
    return refuted(
        printed=bool(suppressing & parity),
        truth=not suppressing & parity and bool(regularising & drop) and same <= EXACT and max(noise) > 1.1,
        evidence={
            "effects in which the rank suppresses scores and its removal leaves them equal": len(suppressing & parity),
            "effects in which the rank regularises and its removal lowers scores": len(regularising & drop),
            "gap of the mean update, leave-one-out and no baseline": same,
        }
        | extremes("error of the update, no baseline / leave-one-out", noise),
        correction="Equal scores after a fix mean that the rank did not matter; suppression would show as a rise. A drop is what "
        "regularisation would give, but no proof of it: a fix also changes the noise of the update, and may leave its mean as it was. "
        "In training at equal rollouts (docs/methods.md) finer credit kept accuracy or lost it, with two gains, both on sums of 12 terms "
        "(means over a run, ten fresh seeds): process rewards, 3.0 points [1.3, 4.7], and a baseline per token against noise "
        "(`optimal-token`), 4.6 points [1.9, 7.2].",
    )


SETUP_CLAIMS = (
    claim(
        "sec-7.1-deviation",
        "section 7.1, metrics, third item",
        "The reward deviation σ_r(k) at training step k is measured beside the spectrum.",
        _deviation,
    ),
)
"""The metric that Section 7.1 announces."""

_summary_claim = partial(claim, paper=SUMMARY)

SUMMARY_CLAIMS = (
    _summary_claim(
        "summary-baseline-credit",
        "first paragraph, second sentence",
        "GRPO's baseline mechanism is what collapses the credit of tokens into a single scalar.",
        _baseline_collapses_credit,
    ),
    _summary_claim(
        "summary-converges",
        "first paragraph, third sentence",
        "Over training the gradient matrices converge to rank 2 whatever the group size.",
        _converges,
    ),
    _summary_claim(
        "summary-group-size",
        "context, first paragraph",
        "Since the rank stays low however many rollouts are sampled, a larger group is not a fix.",
        _no_fix,
    ),
    _summary_claim(
        "summary-parity",
        "context, third paragraph, second sentence",
        "If benchmark parity holds after the fix, the rank collapse was suppressing performance; if scores drop, the sparsity was acting "
        "as implicit regularisation.",
        _parity,
    ),
)
"""Four assertions of the summary."""
