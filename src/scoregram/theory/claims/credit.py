"""Section 3: one advantage for all tokens of a rollout, and the factorisation that follows."""

import torch
from torch import Tensor

from scoregram.advantages import spread_over_tokens
from scoregram.objectives import reinforce, token_coefficients
from scoregram.spectra import singular_values, summary_of
from scoregram.theory.claims.bench import (
    EXACT,
    DrawnGroup,
    advantages,
    drawn_groups,
    filler,
    gap,
    lab_world,
    lab_worlds,
    moments,
)
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, corrected, refuted
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.theorems import group_mean_scale, largest_stacked_rank

SINGLE_TURN = ("output_only", "output_only_binary")


def uniform_credit() -> Finding:
    """Return from every position less the group mean: spread along rollouts, output-only and with step rewards."""
    spreads = {name: _credit_spread(lab_world(name)) for name in ("output_only", "step_rewards")}
    truth = lab_world("output_only")
    group = drawn_groups(truth, prompt=0, group_size=8, number=1)[0]
    mask = truth.listing.mask[group.rows][None]
    spread = spread_over_tokens(advantages("mean", group.rewards)[None], mask)[0]
    own = advantages("mean", group.rewards)[:, None].expand_as(spread)
    apart = gap(spread[mask[0]], own[mask[0]])
    evidence = {
        "largest spread of credit in a rollout, output-only": spreads["output_only"],
        "the same with a reward at every step": spreads["step_rewards"],
        "largest |A_it - A_i|": apart,
    }
    return as_printed(max(spreads["output_only"], apart) < EXACT < spreads["step_rewards"], evidence)


def _credit_spread(truth: GroundTruth) -> float:
    worst = 0.0
    for prompt in range(truth.value.numel()):
        for group in drawn_groups(truth, prompt=prompt, group_size=4, number=10):
            baseline = (group.rewards - advantages("mean", group.rewards))[:, None]
            credit, mask = truth.reward_to_go[group.rows] - baseline, truth.listing.mask[group.rows]
            worst = max(worst, *(float(c[m].max() - c[m].min()) for c, m in zip(credit, mask, strict=True)))
    return worst


def no_credit_inside() -> Finding:
    """A token without consequences: its push in single groups and its expected push."""
    truth, size = filler(), 4
    pushes = []
    for group in drawn_groups(truth, prompt=0, group_size=size, number=200):
        pushes.append(advantages("mean", group.rewards) @ group.scores / size)
    push = torch.stack(pushes)  # (200, 2)
    update = moments(truth, "mean", prompt=0, group_size=size)
    expected = update.expected / group_mean_scale(size)
    return corrected(
        printed=abs(float(update.expected[0])) > EXACT,
        truth=float(push[:, 0].abs().max()) > 0.01 and gap(expected, truth.gradient[0]) < EXACT,
        evidence={
            "filler token: largest push in a group": float(push[:, 0].abs().max()),
            "filler token: expected push": float(update.expected[0]),
            "deciding token: expected push": float(update.expected[1]),
            "R/(R-1) times expected push, less ∇J": gap(expected, truth.gradient[0]),
        },
        correction="True of one group: all tokens of a rollout carry the same weight. Averaged over groups the weight of "
        "a token is its advantage: what made no difference gets no push, so the price is variance, not missing credit.",
    )


def factorisation() -> Finding:
    """Gradient of the policy-gradient loss, token by token, against `(1/R) Σ A_i ψ_i`."""
    worst, groups = 0.0, 0
    for truth in lab_worlds(*SINGLE_TURN):
        for prompt in range(truth.value.numel()):
            for group in drawn_groups(truth, prompt=prompt, group_size=4, number=5):
                a = advantages("mean", group.rewards)
                by_token = torch.einsum("rh,rhd->d", _loss_weights(truth, group, a), truth.turn_scores[group.rows])
                worst, groups = max(worst, gap(by_token, a @ group.scores / len(a))), groups + 1
    return as_printed(worst < EXACT, {"groups": groups, "largest |token by token - (1/R) Σ A_i ψ_i|": worst})


def _loss_weights(truth: GroundTruth, group: DrawnGroup, a: Tensor) -> Tensor:
    """Weight of every token in the update of the policy-gradient loss, `(R, H)`."""
    mask = truth.listing.mask[group.rows]
    taken = truth.log_probs[truth.listing.state[group.rows], truth.listing.action[group.rows]]
    log_probs = torch.where(mask, taken, 0.0).requires_grad_()
    return -token_coefficients(reinforce(log_probs, a, mask, aggregation="token_sum"), log_probs)


def rank_reducing() -> Finding:
    """Rank of the stack with uniform and with exact token-level credit, and of the matrix with a row for every token."""
    truth, size = lab_world("output_only_binary"), 4
    ranks: dict[str, list[int]] = {"uniform": [], "token": [], "bound": [], "per token": []}
    for group in drawn_groups(truth, prompt=0, group_size=size, number=20, distinct=True):
        a = advantages("mean", group.rewards)
        inner = truth.turn_scores[group.rows]  # (R, H, D)
        credited = torch.einsum("rh,rhd->rd", truth.turn_advantages[group.rows], inner)
        tokens = inner[truth.listing.mask[group.rows]]
        ranks["uniform"].append(_rank(a[:, None] * group.scores))
        ranks["token"].append(_rank(credited))
        ranks["bound"].append(largest_stacked_rank(a))
        ranks["per token"].append(_rank(tokens))
    return refuted(
        printed=max(ranks["uniform"]) < max(ranks["token"]),
        truth=ranks["uniform"] == ranks["bound"] and max(ranks["token"]) == size and max(ranks["per token"]) > size,
        evidence={
            "rollouts": size,
            "rank, uniform credit": max(ranks["uniform"]),
            "rank, exact token-level credit": max(ranks["token"]),
            "rank of one row per token": max(ranks["per token"]),
        },
        correction="Credit per token still adds up to one vector per rollout, Σ_t A_it ∇log π_t, so the stack has R rows "
        "and rank at most R either way. Uniform credit reduces no rank; only a matrix with a row per token differs.",
    )


def _rank(rows: Tensor) -> int:
    return summary_of(singular_values(rows @ rows.mT)).numerical_rank


CREDIT: tuple[Claim, ...] = (
    Claim(
        "thm-3.1",
        "Theorem 3.1, eqs. (16)-(17)",
        "With output-only reward and the group mean, every token of a rollout gets the same advantage.",
        uniform_credit,
    ),
    Claim(
        "remark-3.2",
        "Remark 3.2",
        "Tokens are reinforced alike whether they mattered or not: no credit inside a rollout.",
        no_credit_inside,
    ),
    Claim("eq-18-19", "eqs. (18)-(19)", "The update is (1/R) Σ A_i ψ_i with ψ_i the summed score.", factorisation),
    Claim(
        "sec-3.1-rank",
        "section 3.1",
        "Uniform credit is what reduces the rank; with credit per token the update would not factor over rollouts.",
        rank_reducing,
    ),
)
