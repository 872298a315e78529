"""Section 6 and Appendix A.3: a rollout-level baseline in tasks with several turns, its error and its bounds."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from scoregram.advantages import leave_one_out, mean_centered, prefix_value_differences, spread_over_tokens
from scoregram.studies.grpo_rank.claims.grounds import (
    EXACT,
    INDEPENDENT_TURNS,
    MULTI_TURN,
    ONE_DECISION,
    REVERSAL,
    claim,
    ground,
    lab_worlds,
    prompts_of,
)
from scoregram.studies.ledger import Finding, as_printed, corrected, extremes, refuted
from scoregram.theory import (
    CREDITS,
    WORLDS,
    GroundTruth,
    advantage_offset,
    comparison,
    conditional_error,
    credit_costs,
    expected_advantages,
    gradient_bias_by_turn,
    group_update_moments,
    moments_of,
    offsets_by_turn,
    return_range_bound,
    rollout_credit,
    turn_offset_bound,
)

_GROUP_SIZE = 4
_BUDGET = 256
"""Rollouts of a step."""


def _value_differences(truth: GroundTruth) -> Tensor:
    """`r_h + v(s_{h+1}) - v(s_h)` along every enumerated rollout, `(M, H)`, by the library's estimator."""
    rewards, mask, values = (x[None] for x in (truth.listing.reward, truth.listing.mask, truth.turn_values))
    return prefix_value_differences(rewards, mask=mask, prefix_values=values)[0]


def _largest_gap(actual: Tensor, expected: Tensor) -> float:
    """Largest `|actual - expected|` over the entries where neither is `nan`."""
    gaps = (actual - expected).abs()
    return float(gaps[~gaps.isnan()].max())


def _error_gap(truth: GroundTruth, credit: Tensor, formula: Tensor) -> float:
    """Largest distance of `E[Â_h | s_h, a_h] - A(s_h, a_h)` from a formula."""
    return _largest_gap(conditional_error(truth, credit), formula)


def _equation_21() -> Finding:
    def gap(truth: GroundTruth) -> float:
        return _largest_gap(_value_differences(truth)[truth.listing.mask], truth.turn_advantages[truth.listing.mask])

    fixed = max(gap(truth) for truth in lab_worlds("output_only", "step_rewards"))
    chance = max(gap(truth) for truth in lab_worlds("user_turns", "stopping"))
    mean = max(_error_gap(truth, _value_differences(truth), 0 * truth.advantage) for truth in lab_worlds())
    return corrected(
        printed=max(fixed, chance) <= EXACT,
        truth=max(fixed, mean) <= EXACT,
        evidence={"gap, transitions fixed": fixed, "gap, user by chance": chance, "gap of the mean over s'": mean},
        correction="A(s,a) is the mean of r + γ v(s') - v(s) over the possible next states. The two are equal only "
        "where an action determines the next state: between the tokens of one text, but not across user or tool turns.",
    )


def _equation_22() -> Finding:
    worst = apart = offset = 0.0
    for truth in lab_worlds(*MULTI_TURN):
        for prompt in prompts_of(truth):
            rows = truth.listing.of_prompt(prompt)
            returns, mask = truth.listing.returns[rows], truth.listing.mask[rows]
            credit = spread_over_tokens(mean_centered(returns[None]), mask=mask[None])[0]  # the list as one group
            wanted = (returns - returns.sum() / len(rows))[:, None].expand_as(mask)
            worst = max(worst, _largest_gap(credit[mask], wanted[mask]))
            apart = max(apart, _largest_gap(credit[:, 0][:, None].expand_as(mask)[mask], credit[mask]))
            mean = expected_advantages(truth, mean_centered, prompt=prompt, group_size=_GROUP_SIZE)
            offset = max(offset, abs(float(truth.probability[rows] @ mean)))
    return as_printed(
        max(worst, apart, offset) <= EXACT,
        {"gap to the formula": worst, "spread between turns": apart, "|E v̂ - v(s_0)|": offset},
    )


def _equation_23() -> Finding:
    known = others = included = shrunk = size = 0.0
    for truth in lab_worlds(*MULTI_TURN):
        offset = advantage_offset(truth)[:, None].expand_as(truth.advantage)
        size = max(size, float(offset.abs().max()))
        known = max(known, _error_gap(truth, CREDITS["return_minus_start_value"].fn(truth), offset))
        for rollouts in (2, _GROUP_SIZE):
            others = max(others, _error_gap(truth, rollout_credit(truth, leave_one_out, group_size=rollouts), offset))
        own = rollout_credit(truth, mean_centered, group_size=_GROUP_SIZE)
        formula = ((_GROUP_SIZE - 1) * offset - truth.advantage) / _GROUP_SIZE
        included, shrunk = max(included, _error_gap(truth, own, offset)), max(shrunk, _error_gap(truth, own, formula))
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
        "rollouts. The group mean of (14) contains the rollout itself, and its error is ((R-1) Bias_h - A(s_h,a_h)) / R.",
    )


def _bias() -> Finding:
    error = unseen = scale = direction = 0.0
    for truth in lab_worlds(*MULTI_TURN):
        error = max(error, float(advantage_offset(truth).abs().max()))
        ways = [CREDITS[name].fn(truth) for name in ("total_return", "return_minus_start_value")]
        ways += [rollout_credit(truth, leave_one_out, group_size=rollouts) for rollouts in (2, _GROUP_SIZE)]
        unseen = max(unseen, *(float(gradient_bias_by_turn(truth, credit).max()) for credit in ways))
        for prompt, target in enumerate(truth.gradient):
            own = group_update_moments(truth, mean_centered, prompt=prompt, group_size=_GROUP_SIZE).expected
            share = float(own @ target / (target @ target))
            scale = max(scale, abs(share - (_GROUP_SIZE - 1) / _GROUP_SIZE))
            direction = max(direction, float((own - share * target).norm() / target.norm()))
    return corrected(
        printed=unseen > EXACT,
        truth=max(unseen, scale, direction) <= EXACT and error > 0.1,
        evidence={
            "largest |Bias_h|, an error of the advantage": error,
            "gradient bias, baseline unseen": unseen,
            "|scale - (R-1)/R|, group mean": scale,
            "off direction, group mean": direction,
        },
        correction="True of the advantage given the history, which is how (23) defines Bias_h (see eq-23). It does not reach the "
        "gradient: Bias_h is fixed before a_h is drawn, so "
        "E[Bias_h ∇log π(a_h|s_h)] = 0 at every turn. The group mean only scales the gradient by (R-1)/R, as in one turn. In training on "
        "two multi-turn tasks (docs/methods.md, six seeds) credit per turn minus eq. (22) is a return of 0.004 [-0.077, 0.085] with a calculator and "
        "-0.015 [-0.035, 0.006] where the policy decides when to stop: neither is resolved.",
    )


def _linear_growth() -> Finding:
    means, falls, passes = [], [], []
    for truth in lab_worlds(*MULTI_TURN):
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
        evidence={"largest |mean|, any turn": max(means)}
        | {f"sd at turn {turn}, turns paid apart": sds[turn - 1] for turn in (2, 3, 8)}
        | {"sd of that return": math.sqrt(float(truth.reward_variance))}
        | {f"sd at turn {turn}, user turns": user[turn - 1] for turn in (2, 3)},
        correction="Over histories its mean is zero at every turn, because past + v(s_h) is a martingale. Its standard "
        "deviation never falls and never exceeds that of the return; with independent rewards per turn it grows as √(h-1).",
    )


def _no_bootstrap() -> Finding:
    uniform, differing = 0.0, math.inf
    for truth in lab_worlds(*MULTI_TURN):
        credit = rollout_credit(truth, mean_centered, group_size=_GROUP_SIZE)
        mask, first = truth.listing.mask, credit[:, :1].expand_as(credit)
        uniform = max(uniform, _largest_gap(credit[mask], first[mask]))
        steps = _value_differences(truth)
        differing = min(differing, _largest_gap(steps[mask], steps[:, :1].expand_as(steps)[mask]))
    return as_printed(
        uniform <= EXACT < differing,
        {"spread of Â between turns": uniform, "spread of r + v(s') - v(s), least world": differing},
    )


MULTITURN_CLAIMS = (
    claim("eq-21", "section 6, eq. (21)", "A(s_t, a_t) = r_{t+1} + γ v(s_{t+1}) - v(s_t).", _equation_21),
    claim(
        "eq-22",
        "section 6, eq. (22)",
        "With per-step rewards GRPO subtracts v̂_R(s_0) from the total return, at every stage h.",
        _equation_22,
    ),
    claim(
        "eq-23",
        "section 6, eq. (23)",
        "At stage h this advantage is off by Σ_{h'<h} r_h' + v(s_h) - v(s_0).",
        _equation_23,
    ),
    claim(
        "multi-turn-bias",
        "section 6, sentence before eq. (23); 'In short', second sentence",
        "Subtracting v̂_R(s_0) from the total return conflates past with future rewards and introduces bias for multi-turn problems.",
        _bias,
    ),
    claim(
        "multi-turn-bias-linear",
        "section 6, sentence after eq. (23)",
        "Bias_h grows linearly with the stage h.",
        _linear_growth,
    ),
    claim(
        "multi-turn-no-bootstrap",
        "section 6, 'In short', first sentence",
        "GRPO cannot perform the bootstrapping step γ v(s_{t+1}), because it has no value function.",
        _no_bootstrap,
    ),
)
"""The claims of Section 6."""


def _past_of_state(truth: GroundTruth) -> Tensor:
    """`Σ_{h'<h} r_h'` of every state, `(S,)`; a state contains its history."""
    past = torch.zeros_like(truth.state_value)
    past[truth.listing.state[truth.listing.mask]] = truth.past_rewards[truth.listing.mask]
    return past


def _start_of_state(truth: GroundTruth) -> Tensor:
    """`v(s_0)` of every state's prompt, `(S,)`."""
    return truth.value[torch.tensor([history[0] for history in truth.listing.histories])]


def _equation_26() -> Finding:
    others = own = repaired = 0.0
    for truth in lab_worlds(*MULTI_TURN):
        wanted = _past_of_state(truth)[:, None] + truth.action_value - _start_of_state(truth)[:, None]
        rest = rollout_credit(truth, leave_one_out, group_size=_GROUP_SIZE)
        mean = rollout_credit(truth, mean_centered, group_size=_GROUP_SIZE)
        others = max(others, _largest_gap(conditional_error(truth, rest) + truth.advantage, wanted))
        given = conditional_error(truth, mean) + truth.advantage
        own = max(own, _largest_gap(given, wanted))
        repaired = max(repaired, _largest_gap(given, (_GROUP_SIZE - 1) / _GROUP_SIZE * wanted))
    return corrected(
        printed=max(others, own) <= EXACT,
        truth=max(others, repaired) <= EXACT,
        evidence={"gap, mean of the others": others, "gap, group mean R=4": own, "gap to (R-1)/R of it": repaired},
        correction="Exact for the mean of the other rollouts. The group mean also moves with the rollout: "
        "E[v̂ | s_h,a_h] is not v(s_0), and the whole right-hand side shrinks by (R-1)/R.",
    )


def _equation_27() -> Finding:
    worst = 0.0
    for truth in lab_worlds():
        past, start, value = _past_of_state(truth), _start_of_state(truth), truth.state_value
        before = past[:, None] + truth.action_value - start[:, None]
        after = truth.advantage + (past + value - start)[:, None]
        worst = max(worst, _largest_gap(before, after), _largest_gap(past + value - start, advantage_offset(truth)))
    return as_printed(worst <= EXACT, {"largest gap": worst})


def _leakage() -> Finding:
    growing, cancelled, shown = True, 0.0, {}
    for truth in lab_worlds("step_rewards", "user_turns"):
        weight = truth.listing.prompt_weights[truth.listing.prompt] * truth.probability
        start = truth.value[truth.listing.prompt][:, None]
        past, change = weight @ truth.past_rewards, weight @ (truth.turn_values - start)
        growing &= bool((past.diff() > 0).all())
        cancelled = max(cancelled, float((past + change).abs().max()))
        for turn in (1, 2):
            shown[f"mean past reward at turn {turn + 1}"] = float(past[turn])
            shown[f"mean value change at turn {turn + 1}"] = float(change[turn])
    return as_printed(growing and cancelled <= EXACT, shown | {"|sum of the two|, any turn": cancelled})


def _values_without_a_critic() -> Finding:
    bias, variance, error = 0.0, [], []
    for truth in lab_worlds(*MULTI_TURN):
        fresh, group = (moments_of(truth, name, group_size=_GROUP_SIZE) for name in ("vineppo", "rloo"))
        bias = max(bias, *(moments.relative_bias for moments in fresh))
        variance += [new.variance / old.variance for new, old in zip(fresh, group, strict=True)]
        rows = comparison(truth, budget=_BUDGET, group_size=_GROUP_SIZE, estimators=("vineppo", "rloo")).rows
        by_name = {row.estimator: row.mse for row in rows}
        error.append(by_name["vineppo"] / by_name["rloo"])
    return corrected(
        printed=bias > EXACT,
        truth=bias <= EXACT and max(variance) < 1 < min(error),
        evidence={"bias with values from fresh rollouts": bias}
        | extremes("variance / leave-one-out's, per group", variance)
        | extremes("error / leave-one-out's, per rollout", error),
        correction="A group has no v(s_h); two fresh rollouts from every state estimate it without bias and without a "
        "critic, and lower the variance of each group. Counted per rollout they cost more than they save here.",
    )


def _subtract_the_value() -> Finding:
    needed, scale, saved, bare = 0.0, 0.0, [], []
    for truth in lab_worlds(*MULTI_TURN):
        rows = {row.name: row for row in credit_costs(truth, group_size=_GROUP_SIZE)}
        needed = max(needed, rows["reward_to_go_minus_value"].largest_error)
        scale = max(scale, rows["others_mean"].relative_bias, rows["reward_to_go_minus_value"].relative_bias)
        saved.append(rows["others_mean"].variance / rows["reward_to_go_minus_value"].variance)
        bare.append(rows["others_mean"].variance / rows["reward_to_go"].variance)
    return corrected(
        printed=scale > EXACT,
        truth=max(needed, scale) <= EXACT and min(saved) > 1 > min(bare),
        evidence={"error of the advantage with v(s_h)": needed, "gradient bias with either": scale}
        | extremes("variance, mean of the others / v(s_h)", saved)
        | extremes("variance, mean of the others / reward to go", bare),
        correction="v(s_h) is what makes the advantage exact; the gradient is unbiased with either. What the baseline of "
        "the first state costs is variance. Dropping past rewards alone, with no baseline, may cost more still.",
    )


def _value_bound() -> Finding:
    slack, tightest = math.inf, math.inf
    for truth in (*lab_worlds(), ground(REVERSAL, "tabular")):
        offset, change = advantage_offset(truth).abs(), (truth.state_value - _start_of_state(truth)).abs()
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
    for truth in lab_worlds():
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
    change = float((signed.state_value - _start_of_state(signed)).abs().max() / signed.state_value.abs().max())
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
    zero, size = 0 * truth.advantage, _GROUP_SIZE
    known = _error_gap(truth, CREDITS["return_minus_start_value"].fn(truth), zero)
    others = _error_gap(truth, rollout_credit(truth, leave_one_out, group_size=size), zero)
    own = rollout_credit(truth, mean_centered, group_size=size)
    included, repaired = _error_gap(truth, own, zero), _error_gap(truth, own, -truth.advantage / size)
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
        "which is where the factor (R-1)/R of its gradient comes from. This needs a single decision; one turn of many tokens is not enough.",
    )


MULTITURN_APPENDIX_CLAIMS = (
    claim(
        "eq-26",
        "A.3, eq. (26)",
        "Given (s_h, a_h), GRPO's advantage averages to past rewards + q(s_h, a_h) - v(s_0).",
        _equation_26,
        restates="eq-23",
    ),
    claim(
        "eq-27",
        "A.3, eq. (27)",
        "That mean is past rewards + A(s_h, a_h) + v(s_h) - v(s_0).",
        _equation_27,
        restates="eq-23",
    ),
    claim(
        "a3-past-reward-leakage",
        "A.3, source 1, 'Past reward leakage'",
        "Rewards before stage h stay in the return of its action, and their sum grows as h increases.",
        _leakage,
    ),
    claim(
        "a3-value-needs-critic",
        "A.3, source 2, 'Value mismatch', last sentence",
        "Without a critic GRPO cannot compute v(s_h) for h > 0.",
        _values_without_a_critic,
    ),
    claim(
        "a3-subtract-state-value",
        "A.3, 'The key issue'",
        "GRPO subtracts v̂_R(s_0) when it should subtract v(s_h).",
        _subtract_the_value,
        restates="multi-turn-bias",
    ),
    claim(
        "a3-bound-value-change",
        "A.3, 'Bounding', first inequality",
        "|Bias_h| ≤ (h-1) r_max + |v(s_h) - v(s_0)|.",
        _value_bound,
    ),
    claim("a3-bound-v-max", "A.3, 'Bounding', second inequality", "|Bias_h| ≤ (h-1) r_max + 2 V_max.", _range_bound),
    claim(
        "a3-single-turn",
        "A.3, last line",
        "For a single turn, H = 1, Bias_1 = 0 and GRPO is exact.",
        _one_decision,
        restates="single-turn-exact",
    ),
)
"""The claims of Appendix A.3."""
