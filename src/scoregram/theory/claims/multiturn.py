"""Section 6: what a rollout-level baseline does when there are several turns."""

import math
from itertools import pairwise

from torch import Tensor

from scoregram.advantages import leave_one_out, mean_centered, prefix_value_differences, spread_over_tokens
from scoregram.theory.claims.grounds import (
    EXACT,
    INDEPENDENT_TURNS,
    MULTI_TURN,
    ground,
    grounds,
)
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, corrected, refuted
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.moments import expected_advantages
from scoregram.theory.lab.moments import group_update_moments as group_moments
from scoregram.theory.lab.multiturn import (
    advantage_offset,
    conditional_error,
    gradient_bias_by_turn,
    offsets_by_turn,
    rollout_credit,
)
from scoregram.theory.lab.turns import CREDITS
from scoregram.theory.lab.worlds import WORLDS

GROUP_SIZE = 4


def value_differences(truth: GroundTruth) -> Tensor:
    """`r_h + v(s_{h+1}) - v(s_h)` along every listed rollout, `(M, H)`, by the library's own estimator."""
    rewards, mask, values = (x[None] for x in (truth.listing.reward, truth.listing.mask, truth.turn_values))
    return prefix_value_differences(rewards, mask=mask, prefix_values=values)[0]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest `|actual - expected|` where both are numbers."""
    gaps = (actual - expected).abs()
    return float(gaps[~gaps.isnan()].max())


def error_gap(truth: GroundTruth, credit: Tensor, formula: Tensor) -> float:
    """How far `E[Â_h | s_h, a_h] - A(s_h, a_h)` is from a formula, at worst."""
    return distance(conditional_error(truth, credit), formula)


def _equation_21() -> Finding:
    def gap(truth: GroundTruth) -> float:
        return distance(value_differences(truth)[truth.listing.mask], truth.turn_advantages[truth.listing.mask])

    fixed = max(gap(truth) for truth in grounds("output_only", "step_rewards"))
    chance = max(gap(truth) for truth in grounds("user_turns", "stopping"))
    mean = max(error_gap(truth, value_differences(truth), 0 * truth.advantage) for truth in grounds(*WORLDS))
    return corrected(
        printed=max(fixed, chance) <= EXACT,
        truth=max(fixed, mean) <= EXACT,
        evidence={"gap, transitions fixed": fixed, "gap, user by chance": chance, "gap of the mean over s'": mean},
        correction="A(s,a) is the mean of r + γ v(s') - v(s) over what may follow. The two are equal only where the "
        "answer to an action is certain, as it is between the tokens of one text and is not across user or tool turns.",
    )


def _equation_22() -> Finding:
    worst = apart = offset = 0.0
    for truth in grounds(*MULTI_TURN):
        for prompt in range(truth.value.numel()):
            rows = truth.listing.of_prompt(prompt)
            returns, mask = truth.listing.returns[rows], truth.listing.mask[rows]
            credit = spread_over_tokens(mean_centered(returns[None]), mask=mask[None])[0]  # the list as one group
            wanted = (returns - returns.sum() / len(rows))[:, None].expand_as(mask)
            worst = max(worst, distance(credit[mask], wanted[mask]))
            apart = max(apart, distance(credit[:, 0][:, None].expand_as(mask)[mask], credit[mask]))
            mean = expected_advantages(truth, mean_centered, prompt=prompt, group_size=GROUP_SIZE)
            offset = max(offset, abs(float(truth.probability[rows] @ mean)))
    return as_printed(
        max(worst, apart, offset) <= EXACT,
        {"gap to the formula": worst, "spread between turns": apart, "|E v̂ - v(s_0)|": offset},
    )


def _equation_23() -> Finding:
    known = others = included = shrunk = size = 0.0
    for truth in grounds(*MULTI_TURN):
        offset = advantage_offset(truth)[:, None].expand_as(truth.advantage)
        size = max(size, float(offset.abs().max()))
        known = max(known, error_gap(truth, CREDITS["return_minus_start_value"].fn(truth), offset))
        for rollouts in (2, GROUP_SIZE):
            others = max(others, error_gap(truth, rollout_credit(truth, leave_one_out, group_size=rollouts), offset))
        own = rollout_credit(truth, mean_centered, group_size=GROUP_SIZE)
        formula = ((GROUP_SIZE - 1) * offset - truth.advantage) / GROUP_SIZE
        included, shrunk = max(included, error_gap(truth, own, offset)), max(shrunk, error_gap(truth, own, formula))
    return corrected(
        printed=max(known, others, included) <= EXACT,
        truth=max(known, others, shrunk) <= EXACT,
        evidence={
            "gap, v(s_0)": known,
            "gap, mean of the others": others,
            "gap, group mean R=4": included,
            "gap, corrected": shrunk,
            "largest |Bias_h|": size,
        },
        correction="This is the error of the advantage given (s_h, a_h), exact for v(s_0) and for the mean of the other "
        "rollouts. The group mean of (14) holds the rollout itself, and its error is ((R-1) Bias_h - A(s_h,a_h)) / R.",
    )


def _bias() -> Finding:
    error = unseen = scale = direction = 0.0
    for truth in grounds(*MULTI_TURN):
        error = max(error, float(advantage_offset(truth).abs().max()))
        ways = [CREDITS[name].fn(truth) for name in ("total_return", "return_minus_start_value")]
        ways += [rollout_credit(truth, leave_one_out, group_size=rollouts) for rollouts in (2, GROUP_SIZE)]
        unseen = max(unseen, *(float(gradient_bias_by_turn(truth, credit).max()) for credit in ways))
        for prompt, target in enumerate(truth.gradient):
            own = group_moments(truth, mean_centered, prompt=prompt, group_size=GROUP_SIZE).expected
            share = float(own @ target / (target @ target))
            scale = max(scale, abs(share - (GROUP_SIZE - 1) / GROUP_SIZE))
            direction = max(direction, float((own - share * target).norm() / target.norm()))
    return refuted(
        printed=unseen > EXACT,
        truth=max(unseen, scale, direction) <= EXACT and error > 0.1,
        evidence={
            "largest |Bias_h|": error,
            "gradient bias, baseline unseen": unseen,
            "|scale - (R-1)/R|, group mean": scale,
            "off direction, group mean": direction,
        },
        correction="The advantage is off, the gradient is not: Bias_h is fixed before a_h is drawn, so "
        "E[Bias_h ∇log π(a_h|s_h)] = 0 at every turn. The group mean keeps only its scale (R-1)/R, as in one turn.",
    )


def _linear_growth() -> Finding:
    means, falls, passes = [], [], []
    for truth in grounds(*MULTI_TURN):
        turns = offsets_by_turn(truth)
        means += [abs(turn.mean) for turn in turns]
        falls += [before.sd - after.sd for before, after in pairwise(turns)]
        passes.append(turns[-1].sd - math.sqrt(float(truth.listing.prompt_weights @ truth.reward_variance)))
    truth = ground(INDEPENDENT_TURNS, "uniform")
    sds = [turn.sd for turn in offsets_by_turn(truth)]
    root = max(abs(sd - math.sqrt(turn) / 2) for turn, sd in enumerate(sds))
    user = [turn.sd for turn in offsets_by_turn(ground(WORLDS["user_turns"], "network"))]
    return refuted(
        printed=abs(sds[2] - 2 * sds[1]) <= EXACT or max(means) > EXACT,
        truth=max(*means, *falls, *passes, root) <= EXACT,
        evidence={
            "largest |mean|, any turn": max(means),
        }
        | {f"sd at turn {turn}, turns paid apart": sds[turn - 1] for turn in (2, 3, 8)}
        | {"sd of that return": math.sqrt(float(truth.reward_variance))}
        | {f"sd at turn {turn}, user turns": user[turn - 1] for turn in (2, 3)},
        correction="Over histories its mean is zero at every turn, because past + v(s_h) is a martingale. Its standard "
        "deviation never falls and never passes that of the return; with turns paid independently it grows as √(h-1).",
    )


def _no_bootstrap() -> Finding:
    uniform, differing = 0.0, math.inf
    for truth in grounds(*MULTI_TURN):
        credit = rollout_credit(truth, mean_centered, group_size=GROUP_SIZE)
        mask, first = truth.listing.mask, credit[:, :1].expand_as(credit)
        uniform = max(uniform, distance(credit[mask], first[mask]))
        steps = value_differences(truth)
        differing = min(differing, distance(steps[mask], steps[:, :1].expand_as(steps)[mask]))
    return as_printed(
        uniform <= EXACT < differing,
        {"spread of Â between turns": uniform, "spread of r + v(s') - v(s), least world": differing},
    )


SECTION_6 = (
    Claim(
        "eq-21",
        "§6, eq. (21)",
        "The advantage equals r + γ v(s') - v(s).",
        _equation_21,
    ),
    Claim(
        "eq-22",
        "§6, eq. (22)",
        "GRPO credits every turn with the total return minus the group's mean return.",
        _equation_22,
    ),
    Claim(
        "eq-23",
        "§6, eq. (23)",
        "At turn h that advantage is off by the past rewards plus v(s_h) - v(s_0).",
        _equation_23,
    ),
    Claim(
        "multi-turn-bias",
        "§6, after (22), and 'In short'",
        "Using the value of the first state at later turns biases GRPO in multi-turn problems.",
        _bias,
    ),
    Claim(
        "multi-turn-bias-linear",
        "§6, after (23)",
        "The bias grows linearly with the turn.",
        _linear_growth,
    ),
    Claim(
        "multi-turn-no-bootstrap",
        "§6, 'In short'",
        "Without a value function GRPO cannot use the value of the next state.",
        _no_bootstrap,
    ),
)
"""The claims of Section 6, in its order."""
