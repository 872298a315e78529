"""Appendix A.3: the derivation of the multi-turn bias, its two sources and its bounds."""

import math

import torch
from torch import Tensor

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.theory.bounds import return_range_bound, turn_offset_bound
from scoregram.theory.claims.grounds import EXACT, MULTI_TURN, ONE_DECISION, REVERSAL, ground, grounds
from scoregram.theory.claims.ledger import Claim, Finding, as_printed, between, corrected
from scoregram.theory.claims.multiturn import GROUP_SIZE, distance, error_gap
from scoregram.theory.lab.comparison import comparison, moments_of
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.multiturn import advantage_offset, conditional_error, credit_costs, rollout_credit
from scoregram.theory.lab.turns import CREDITS
from scoregram.theory.lab.worlds import WORLDS

BUDGET = 256


def past_of_state(truth: GroundTruth) -> Tensor:
    """`Σ_{h'<h} r_h'` of every state, `(S,)`: a history fixes it."""
    past = torch.zeros_like(truth.state_value)
    past[truth.listing.state[truth.listing.mask]] = truth.past_rewards[truth.listing.mask]
    return past


def start_of_state(truth: GroundTruth) -> Tensor:
    """`v(s_0)` of the prompt that every state belongs to, `(S,)`."""
    return truth.value[torch.tensor([history[0] for history in truth.listing.histories])]


def _equation_26() -> Finding:
    others = own = repaired = 0.0
    for truth in grounds(*MULTI_TURN):
        wanted = past_of_state(truth)[:, None] + truth.action_value - start_of_state(truth)[:, None]
        rest = rollout_credit(truth, leave_one_out, group_size=GROUP_SIZE)
        mean = rollout_credit(truth, mean_centered, group_size=GROUP_SIZE)
        others = max(others, distance(conditional_error(truth, rest) + truth.advantage, wanted))
        given = conditional_error(truth, mean) + truth.advantage
        own = max(own, distance(given, wanted))
        repaired = max(repaired, distance(given, (GROUP_SIZE - 1) / GROUP_SIZE * wanted))
    return corrected(
        printed=max(others, own) <= EXACT,
        truth=max(others, repaired) <= EXACT,
        evidence={"gap, mean of the others": others, "gap, group mean R=4": own, "gap to (R-1)/R of it": repaired},
        correction="Exact for the mean of the other rollouts. The group mean also moves with the rollout: "
        "E[v̂ | s_h,a_h] is not v(s_0), and the whole right-hand side shrinks by (R-1)/R.",
    )


def _equation_27() -> Finding:
    worst = 0.0
    for truth in grounds(*WORLDS):
        past, start, value = past_of_state(truth), start_of_state(truth), truth.state_value
        before = past[:, None] + truth.action_value - start[:, None]
        after = truth.advantage + (past + value - start)[:, None]
        worst = max(worst, distance(before, after), distance(past + value - start, advantage_offset(truth)))
    return as_printed(worst <= EXACT, {"largest gap": worst})


def _leakage() -> Finding:
    growing, cancelled, shown = True, 0.0, {}
    for truth in grounds("step_rewards", "user_turns"):
        weight = truth.listing.prompt_weights[truth.listing.prompt] * truth.probability
        start = truth.value[truth.listing.prompt][:, None]
        past, change = weight @ truth.past_rewards, weight @ (truth.turn_values - start)
        growing &= bool((past.diff() > 0).all())
        cancelled = max(cancelled, float((past + change).abs().max()))
        for turn in (1, 2):
            shown[f"mean past reward at turn {turn + 1}"] = float(past[turn])
            shown[f"mean value change at turn {turn + 1}"] = float(change[turn])
    return as_printed(
        growing and cancelled <= EXACT,
        shown | {"|sum of the two|, any turn": cancelled},
    )


def _values_without_a_critic() -> Finding:
    bias, variance, error = 0.0, [], []
    for truth in grounds(*MULTI_TURN):
        fresh, group = (moments_of(truth, name, group_size=GROUP_SIZE) for name in ("vineppo", "rloo"))
        bias = max(bias, *(moments.relative_bias for moments in fresh))
        variance += [new.variance / old.variance for new, old in zip(fresh, group, strict=True)]
        rows = comparison(truth, budget=BUDGET, group_size=GROUP_SIZE, estimators=("vineppo", "rloo")).rows
        by_name = {row.estimator: row.mse for row in rows}
        error.append(by_name["vineppo"] / by_name["rloo"])
    return corrected(
        printed=bias > EXACT,
        truth=bias <= EXACT and max(variance) < 1 < min(error),
        evidence={
            "bias with values from fresh rollouts": bias,
        }
        | between("variance / leave-one-out's, per group", variance)
        | between("error / leave-one-out's, per rollout", error),
        correction="A group has no v(s_h); two fresh rollouts from every state estimate it without bias and without a "
        "critic, and lower the variance of each group. Counted per rollout they cost more than they save here.",
    )


def _subtract_the_value() -> Finding:
    needed, scale, saved, bare = 0.0, 0.0, [], []
    for truth in grounds(*MULTI_TURN):
        rows = {row.name: row for row in credit_costs(truth, group_size=GROUP_SIZE)}
        needed = max(needed, rows["reward_to_go_minus_value"].largest_error)
        scale = max(scale, rows["others_mean"].relative_bias, rows["reward_to_go_minus_value"].relative_bias)
        saved.append(rows["others_mean"].variance / rows["reward_to_go_minus_value"].variance)
        bare.append(rows["others_mean"].variance / rows["reward_to_go"].variance)
    return corrected(
        printed=scale > EXACT,
        truth=max(needed, scale) <= EXACT and min(saved) > 1 > min(bare),
        evidence={
            "error of the advantage with v(s_h)": needed,
            "gradient bias with either": scale,
        }
        | between("variance, mean of the others / v(s_h)", saved)
        | between("variance, mean of the others / reward to go", bare),
        correction="v(s_h) is what makes the advantage exact; the gradient is unbiased with either. What the baseline of "
        "the first state costs is variance. Dropping past rewards alone, with no baseline, may cost more still.",
    )


def _value_bound() -> Finding:
    slack, tightest = math.inf, math.inf
    for truth in (*grounds(*WORLDS), ground(REVERSAL, "tabular")):
        offset, change = advantage_offset(truth).abs(), (truth.state_value - start_of_state(truth)).abs()
        for state, history in enumerate(truth.listing.histories):
            bound = turn_offset_bound(
                len(history) // 2,
                largest_reward=float(truth.listing.reward.abs().max()),
                value_change=float(change[state]),
            )
            slack = min(slack, bound - float(offset[state]))
            if len(history) > 1:
                tightest = min(tightest, bound - float(offset[state]))
    return as_printed(slack >= -EXACT, {"least slack": slack, "least slack after the first turn": tightest})


def _range_bound() -> Finding:
    slack, shares, halved = math.inf, [], []
    for truth in grounds(*WORLDS):
        offset, returns = advantage_offset(truth).abs(), truth.listing.returns
        reward, top = float(truth.listing.reward.abs().max()), float(truth.state_value.abs().max())
        for state, history in enumerate(truth.listing.histories):
            size, own = float(offset[state]), returns[truth.listing.of_prompt(history[0])]
            printed, tighter = (
                turn_offset_bound(len(history) // 2, largest_reward=reward, value_change=change)
                for change in (2 * top, top)
            )
            limits = {"lowest_return": float(own.min()), "highest_return": float(own.max())}
            slack = min(slack, printed - size)
            shares.append((size / printed, size / return_range_bound(float(truth.value[history[0]]), **limits)))
            if float(truth.listing.reward.min()) >= 0:
                halved.append(size / tighter)
    signed = ground(REVERSAL, "tabular")
    change = float((signed.state_value - start_of_state(signed)).abs().max() / signed.state_value.abs().max())
    return as_printed(
        slack >= -EXACT and max(*halved, *(share for _, share in shares)) <= 1 + EXACT and change > 1,
        {
            "largest |Bias_h| / bound": max(share for share, _ in shares),
            "the same with V_max for 2 V_max, rewards ≥ 0": max(halved),
            "|v(s_h)-v(s_0)| / V_max, signed rewards": change,
            "largest |Bias_h| / distance of v(s_0) to the farthest return": max(share for _, share in shares),
        },
    )


def _one_decision() -> Finding:
    truth = ground(ONE_DECISION, "tabular")
    zero, size = 0 * truth.advantage, GROUP_SIZE
    known = error_gap(truth, CREDITS["return_minus_start_value"].fn(truth), zero)
    others = error_gap(truth, rollout_credit(truth, leave_one_out, group_size=size), zero)
    own = rollout_credit(truth, mean_centered, group_size=size)
    included, repaired = error_gap(truth, own, zero), error_gap(truth, own, -truth.advantage / size)
    return corrected(
        printed=max(known, others, included) <= EXACT,
        truth=max(known, others, repaired) <= EXACT,
        evidence={
            "error, v(s_0)": known,
            "error, mean of the others": others,
            "error, group mean R=4": included,
            "gap to -A/R": repaired,
        },
        correction="Zero for v(s_0) and for the mean of the other rollouts. For the group mean the error is -A(s,a)/R, "
        "which is where the factor (R-1)/R of its gradient comes from. It takes one decision, not one turn of many tokens.",
    )


APPENDIX_A3 = (
    Claim(
        "eq-26",
        "A.3, eq. (26)",
        "Given (s_h, a_h), GRPO's advantage averages to past rewards + q(s_h,a_h) - v(s_0).",
        _equation_26,
    ),
    Claim(
        "eq-27",
        "A.3, eq. (27)",
        "That mean splits into past rewards, the true advantage and v(s_h) - v(s_0).",
        _equation_27,
    ),
    Claim(
        "a3-past-reward-leakage",
        "A.3, source 1",
        "Past rewards stay in the return of later turns, and their sum grows with h.",
        _leakage,
    ),
    Claim(
        "a3-value-needs-critic",
        "A.3, source 2",
        "Without a critic the value of a later state is out of reach.",
        _values_without_a_critic,
    ),
    Claim(
        "a3-subtract-state-value",
        "A.3, 'the key issue'",
        "What has to be subtracted at turn h is v(s_h), not v(s_0).",
        _subtract_the_value,
    ),
    Claim(
        "a3-bound-value-change",
        "A.3, first bound",
        "|Bias_h| ≤ (h-1) r_max + |v(s_h) - v(s_0)|.",
        _value_bound,
    ),
    Claim(
        "a3-bound-v-max",
        "A.3, second bound",
        "|Bias_h| ≤ (h-1) r_max + 2 V_max.",
        _range_bound,
    ),
    Claim(
        "a3-single-turn",
        "A.3, last line",
        "With H = 1 the bias is zero and GRPO is exact.",
        _one_decision,
    ),
)
"""The claims of Appendix A.3, in its order."""
