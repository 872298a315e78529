"""Sections 2 and 3: from the policy gradient to the group mean, and one advantage for all tokens of a rollout."""

import torch
from torch import Tensor

from scoregram.advantages import spread_over_tokens
from scoregram.objectives import clipped_ratio, reinforce, token_coefficients
from scoregram.spectra import singular_values, summary_of
from scoregram.statistics import excess_variance
from scoregram.studies.grpo_rank.claims.grounds import (
    EXACT,
    SINGLE_TURN,
    DrawnGroup,
    advantages,
    batch_moments,
    claim,
    coin,
    drawn_groups,
    filler,
    gap,
    lab_world,
    lab_worlds,
    moments,
    prompts_of,
    reward_groups,
)
from scoregram.studies.ledger import Finding, as_printed, corrected, refuted
from scoregram.theory import (
    CREDITS,
    GroundTruth,
    across_prompts,
    advantage_offset,
    conditional_error,
    credit_moments,
    energy_return_covariance,
    group_mean_scale,
    largest_stacked_rank,
)


def state_baseline() -> Finding:
    """A random function of the state as baseline: distance of the expected update from the gradient, by enumeration."""
    generator = torch.Generator().manual_seed(1)
    biases, added = [], []
    for truth in lab_worlds():
        baseline = torch.randn(truth.state_value.shape, generator=generator, dtype=torch.float64)
        credit = truth.reward_to_go - baseline[truth.listing.state]
        for prompt in prompts_of(truth):
            plain = credit_moments(truth, truth.reward_to_go, prompt=prompt, group_size=1)
            shifted = credit_moments(truth, credit, prompt=prompt, group_size=1)
            biases.append(shifted.relative_bias)
            added.append(shifted.variance / plain.variance)
    evidence = {
        "worlds x prompts": len(biases),
        "largest relative bias": max(biases),
        "variance against none, least": min(added),
        "variance against none, most": max(added),
    }
    return as_printed(max(biases) < EXACT, evidence)


def best_baseline() -> Finding:
    """The variance-minimising constant against the value, on a coin, where they are `1 - p` and `p`, and on every prompt."""
    toss = coin(0.9)
    at_value, at_best = (
        credit_moments(toss, toss.listing.returns[:, None] - b, prompt=0, group_size=1).variance
        for b in (toss.value[0], toss.optimal_baseline[0])
    )
    excess = excess_variance(toss.value, toss.optimal_baseline, toss.fisher_trace, 1)
    fair = coin(0.5)
    gaps, formula = [], []
    for truth in (toss, fair, *lab_worlds(*SINGLE_TURN)):
        gaps += (truth.optimal_baseline - truth.value).tolist()
        predicted = energy_return_covariance(truth) / truth.fisher_trace
        formula.append(gap(truth.optimal_baseline - truth.value, predicted))
    evidence = {
        "p = 0.9: v": float(toss.value[0]),
        "p = 0.9: best b": float(toss.optimal_baseline[0]),
        "variance at v": at_value,
        "variance at best b": at_best,
        "p = 0.5: best b - v": gaps[1],
        "largest best b - v in the lab": max(map(abs, gaps[2:])),
        "largest error of Cov/E|ψ|²": max(formula),
    }
    return refuted(
        printed=max(map(abs, gaps)) < EXACT,
        truth=max(formula) < EXACT and abs(gaps[1]) < EXACT and abs(at_value - at_best - float(excess)) < EXACT,
        evidence=evidence,
        correction="The constant of least variance is b* = E[|ψ|² G] / E|ψ|² (Weaver and Tao 2001, whom the paper cites); "
        "b* - v = Cov(|ψ|², G) / E|ψ|², so v is best exactly if the squared score norm and the return are uncorrelated.",
    )


def bootstrapped_return() -> Finding:
    """The sampled return against the reward plus the next value, on every rollout and in conditional expectation."""
    apart, mean_apart = [], []
    for truth in lab_worlds():
        target = CREDITS["temporal_difference"].fn(truth) + truth.turn_values
        inside = truth.listing.mask
        apart.append(gap(truth.reward_to_go[inside], target[inside]))
        exists = truth.listing.action_mask
        errors = conditional_error(truth, truth.reward_to_go) - conditional_error(truth, target)
        mean_apart.append(float(errors[exists].abs().max()))
    return corrected(
        printed=max(apart) < EXACT,
        truth=max(mean_apart) < EXACT,
        evidence={
            "largest |return - (r + v')| on a rollout": max(apart),
            "largest difference of their means given (s, a)": max(mean_apart),
        },
        correction="The two agree only in expectation given the state and the action (and the next state); on a sampled "
        "rollout the return carries the noise that the next value has averaged out.",
    )


def temporal_difference_mean() -> Finding:
    """Mean of the return minus the value, and of the temporal difference, given state and action."""
    errors = {}
    for name in ("reward_to_go_minus_value", "temporal_difference"):
        each = [conditional_error(t, CREDITS[name].fn(t))[t.listing.action_mask] for t in lab_worlds()]
        errors[name] = float(torch.cat(each).abs().max())
    evidence = {f"largest error of the mean, {name}": error for name, error in errors.items()}
    return as_printed(max(errors.values()) < EXACT, evidence)


def advantage_form() -> Finding:
    """Mean of advantage times score, against the gradient of the objective."""
    biases = []
    for truth in lab_worlds():
        each = [
            credit_moments(truth, CREDITS["exact_advantage"].fn(truth), prompt=p, group_size=1)
            for p in prompts_of(truth)
        ]
        biases.append(across_prompts(truth, each, prompts=1).relative_bias)
    return as_printed(max(biases) < EXACT, {"worlds": len(biases), "largest relative error": max(biases)})


def terminal_differences() -> Finding:
    """`v(s_{t+1}) - v(s_t)` against the temporal difference, before the last token and at it."""
    before, last = [], []
    for truth in lab_worlds(*SINGLE_TURN):
        mask, values = truth.listing.mask, truth.turn_values
        change = torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
        apart = (CREDITS["temporal_difference"].fn(truth) - change).abs()
        ends = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
        before.append(float(apart[mask & ~ends].max()))
        last.append(float((apart - truth.listing.returns[:, None].abs())[ends].abs().max()))
        last.append(float(apart[ends].max()))
    return corrected(
        printed=max(*before, *last[1::2]) < EXACT,
        truth=max(*before, *last[::2]) < EXACT,
        evidence={"largest gap before the last token": max(before), "largest gap at the last token": max(last[1::2])},
        correction="True for t < T-1. At the last token δ = R_terminal - v(s_{T-1}): the reward is not zero there (or the "
        "value after the end has to be read as the reward). Either way δ_t differs from token to token.",
    )


def collapsed_advantage() -> Finding:
    """The true advantage of every token against the return minus the prompt's value, and the variance of the latter."""
    truth = lab_world("output_only")
    inside = truth.listing.mask
    uniform = CREDITS["return_minus_start_value"].fn(truth)
    largest = gap(uniform[inside], truth.turn_advantages[inside])
    within = max(
        float((truth.turn_advantages[m, h] - truth.turn_advantages[m, 0]).abs()) for m, h in inside.nonzero().tolist()
    )
    rows = {}
    for name in ("return_minus_start_value", "reward_to_go_minus_value", "exact_advantage"):
        each = [credit_moments(truth, CREDITS[name].fn(truth), prompt=p, group_size=1) for p in range(3)]
        rows[name] = across_prompts(truth, each, prompts=1)
    unbiased = max(row.relative_bias for row in rows.values()) < EXACT
    missed = max(_offset_gap(world) for world in lab_worlds(*SINGLE_TURN))
    cost = {name: row.variance / rows["exact_advantage"].variance for name, row in rows.items()}
    return refuted(
        printed=largest < EXACT,
        truth=unbiased
        and missed < EXACT
        and within > 0.1
        and cost["return_minus_start_value"] > cost["reward_to_go_minus_value"] > 1,
        evidence={
            "largest |A(s,a) - (R - v(s0))|": largest,
            "largest change of A along a rollout": within,
            "gap of the error given (s_t, a_t) to v(s_t) - v(s0)": missed,
            "relative bias of R - v(s0) as credit": rows["return_minus_start_value"].relative_bias,
            "variance of R - v(s0), A = 1": cost["return_minus_start_value"],
            "variance of R - v(s_t), A = 1": cost["reward_to_go_minus_value"],
        },
        correction="It does not follow: under output-only reward A(s_t, a_t) = v(s_{t+1}) - v(s_t) (and R - v at the end) "
        "changes from token to token. Given the prefix, R - v(s0) misses it by v(s_t) - v(s0): eq. (23) with tokens for "
        "turns. R - v(s0) on every token is a choice of baseline: unbiased, with more variance.",
    )


def _offset_gap(truth: GroundTruth) -> float:
    error = conditional_error(truth, CREDITS["return_minus_start_value"].fn(truth))  # (S, A)
    return float((error - advantage_offset(truth)[:, None])[truth.listing.action_mask].abs().max())


def sample_mean() -> Finding:
    """Mean and variance of the group's mean reward, by enumeration of groups."""
    errors, variances = [], []
    for truth in lab_worlds(*SINGLE_TURN):
        for prompt in prompts_of(truth):
            for size in (2, 4, 8):
                groups = reward_groups(truth, prompt, size)
                baseline = groups.rewards - advantages("mean", groups.rewards)  # (C, R): r̄ for every rollout
                errors.append(abs(groups.mean(baseline[:, 0]) - float(truth.value[prompt])))
                spread = groups.mean((baseline[:, 0] - truth.value[prompt]).square())
                variances.append(abs(spread - float(truth.reward_variance[prompt]) / size))
    evidence = {"largest |E v̂ - v|": max(errors), "largest |Var v̂ - σ²/R|": max(variances)}
    return as_printed(max(*errors, *variances) < EXACT, evidence)


def exactness() -> Finding:
    """The expected update with the group mean as baseline, in single-turn worlds, against the gradient."""
    scales, off, evidence = [], [], {}
    for size in (2, 4, 8):
        for truth in lab_worlds(*SINGLE_TURN):
            for prompt in prompts_of(truth):
                update = moments(truth, "mean", prompt=prompt, group_size=size)
                off.append(gap(update.expected, group_mean_scale(size) * update.target))
                scales.append(update.relative_bias)
        shown = batch_moments(lab_world("output_only"), "mean", group_size=size)
        evidence[f"|E ĝ|/|∇J| at R = {size}"] = float(shown.expected.norm() / shown.target.norm())
    left = max(moments(t, "rloo", prompt=0, group_size=2).relative_bias for t in lab_worlds(*SINGLE_TURN))
    return corrected(
        printed=max(scales) < EXACT,
        truth=max(off) < EXACT and left < EXACT,
        evidence=evidence | {"largest |E ĝ - (R-1)/R ∇J|": max(off), "relative bias of rloo, R = 2": left},
        correction="E ĝ = (R-1)/R ∇J: the group mean contains the rollout's own reward, so eq. (6) does not cover it. The "
        "direction is exact, the length is short by 1/R (half at R = 2); leaving the rollout out removes that.",
    )


def clipping_leaves_structure() -> Finding:
    """Weight of each token under the clipped loss, on-policy and after a step, within the rollouts of one group."""
    truth = lab_world("output_only_binary", "tabular")
    group = drawn_groups(truth, prompt=0, group_size=8, number=1)[0]
    mask, state, action = (x[group.rows] for x in (truth.listing.mask, truth.listing.state, truth.listing.action))
    credit = advantages("mean", group.rewards)
    move = torch.randn(truth.log_probs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    old = torch.where(mask, truth.log_probs[state, action], 0.0)

    def weights(step: float) -> torch.Tensor:
        moved = (truth.log_probs + step * move).log_softmax(dim=-1)  # other logits in every state
        now = torch.where(mask, moved[state, action], 0.0).requires_grad_()
        loss = clipped_ratio(now, old, credit, mask, aggregation="token_sum")
        return -len(credit) * token_coefficients(loss, now)

    on_policy = gap(weights(0.0)[mask], credit[:, None].expand_as(mask)[mask])
    later = weights(0.5)
    long = mask.sum(dim=-1) > 1
    uneven = max(float(w[m].max() - w[m].min()) for w, m in zip(later[long], mask[long], strict=True))
    dropped = float((later[mask] == 0).double().mean())
    return corrected(
        printed=uneven < EXACT,
        truth=on_policy < EXACT and uneven > 0.01 and dropped > 0,
        evidence={
            "on-policy |weight - A_i|": on_policy,
            "after a step: largest spread of weights in a rollout": uneven,
            "after a step: share of tokens clipped away": dropped,
        },
        correction="True of the first update after sampling, where every ratio is one. From the second on a clipped loss "
        "weighs tokens by ρ_t A_i or drops them, so tokens of one rollout differ and eq. (19) no longer holds.",
    )


DERIVATION_CLAIMS = (
    claim(
        "eq-6",
        "section 2.4, eq. (6)",
        "Subtracting a baseline that depends on the state alone introduces no bias.",
        state_baseline,
    ),
    claim(
        "eq-7-baseline",
        "section 2.4, sentence after eq. (7)",
        "The baseline that minimises the variance is b*(s) = v(s).",
        best_baseline,
    ),
    claim(
        "eq-8",
        "section 2.4, eq. (8)",
        "In one-step form the sampled return is Ĝ_t = r_{t+1} + γ v(S_{t+1}).",
        bootstrapped_return,
    ),
    claim(
        "eq-9",
        "section 2.4, eq. (9) and the sentence after it",
        "Return minus value is about the TD error; given state and action its expectation is the advantage.",
        temporal_difference_mean,
    ),
    claim(
        "eq-10",
        "section 2.4, eq. (10)",
        "The policy gradient is E[Σ_t γ^t A(S_t, A_t) ∇ log π(A_t | S_t)].",
        advantage_form,
    ),
    claim(
        "eq-12",
        "section 2.5, eq. (12)",
        "Under output-only reward and γ = 1 the TD error at every position is v(s_{t+1}) - v(s_t).",
        terminal_differences,
    ),
    claim(
        "eq-13",
        "section 2.5, eq. (13); section 6, third paragraph",
        "Under output-only reward the advantage reduces to R_terminal - v(s_0) at every token.",
        collapsed_advantage,
    ),
    claim(
        "eq-14",
        "section 2.5, eq. (14) and the sentence after it",
        "The group's mean reward is a valid Monte Carlo estimate of v(s_0).",
        sample_mean,
    ),
    claim(
        "single-turn-exact",
        "section 6, 'In short', second sentence",
        "GRPO is exact for single-turn generation, where no bootstrapping is needed (read: its gradient has no bias).",
        exactness,
    ),
    claim(
        "scope-clipping",
        "section 1, 'Scope'; section 2.5, note after eq. (15)",
        "Clipping and KL change the step, not the gradient signal: credit and rank depend only on the advantage estimator.",
        clipping_leaves_structure,
    ),
)


def uniform_credit() -> Finding:
    """Range, along a rollout, of the return minus the group mean: output-only reward against step rewards."""
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
    for prompt in prompts_of(truth):
        for group in drawn_groups(truth, prompt=prompt, group_size=4, number=10):
            baseline = (group.rewards - advantages("mean", group.rewards))[:, None]
            credit, mask = truth.reward_to_go[group.rows] - baseline, truth.listing.mask[group.rows]
            worst = max(worst, *(float(c[m].max() - c[m].min()) for c, m in zip(credit, mask, strict=True)))
    return worst


def no_credit_inside() -> Finding:
    """Push on a token without consequences: in single groups, and in expectation."""
    truth, size = filler(), 4
    pushes = []
    for group in drawn_groups(truth, prompt=0, group_size=size, number=200):
        pushes.append(advantages("mean", group.rewards) @ group.scores / size)
    push = torch.stack(pushes)  # (200, 2)
    update = moments(truth, "mean", prompt=0, group_size=size)
    expected = update.expected / group_mean_scale(size)
    return as_printed(
        float(push[:, 0].abs().max()) > 0.01 and gap(expected, truth.gradient[0]) < EXACT,
        {
            "filler token: largest push in a group": float(push[:, 0].abs().max()),
            "the same, averaged over all groups": float(update.expected[0]),
            "deciding token: average push": float(update.expected[1]),
            "R/(R-1) times average push, less ∇J": gap(expected, truth.gradient[0]),
        },
    )


def factorisation() -> Finding:
    """Gradient of the policy-gradient loss, token by token, against `(1/R) Σ A_i ψ_i`."""
    worst, groups = 0.0, 0
    for truth in lab_worlds(*SINGLE_TURN):
        for prompt in prompts_of(truth):
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
    """Rank of the stack under uniform and under exact token-level credit, and of the matrix with one row per token."""
    truth, size = lab_world("output_only_binary"), 4
    ranks: dict[str, list[int]] = {"uniform": [], "token": [], "bound": [], "per token": []}
    apart = 0.0
    for group in drawn_groups(truth, prompt=0, group_size=size, number=20, distinct=True):
        a = advantages("mean", group.rewards)
        inner = truth.turn_scores[group.rows]  # (R, H, D)
        credited = torch.einsum("rh,rhd->rd", truth.turn_advantages[group.rows], inner)
        tokens = inner[truth.listing.mask[group.rows]]
        cosine = torch.nn.functional.cosine_similarity(credited, group.scores, dim=-1)
        apart = max(apart, float((1 - cosine.square()).max()))
        ranks["uniform"].append(_rank(a[:, None] * group.scores))
        ranks["token"].append(_rank(credited))
        ranks["bound"].append(largest_stacked_rank(a))
        ranks["per token"].append(_rank(tokens))
    rows_stay = ranks["uniform"] == ranks["bound"] and max(ranks["token"]) == size
    return corrected(
        printed=max(ranks["uniform"]) < max(ranks["token"]),
        truth=rows_stay and max(ranks["per token"]) > size and apart > 0.1,
        evidence={
            "rollouts": size,
            "rank, uniform credit": max(ranks["uniform"]),
            "rank, exact token-level credit": max(ranks["token"]),
            "rank of one row per token": max(ranks["per token"]),
            "largest part of a row outside ψ_i, token-level credit": apart,
        },
        correction="The factorisation does need uniform credit: with credit per token a rollout's row is no multiple of ψ_i. It "
        "reduces no rank. Credit per token still adds up to one vector per rollout, Σ_t A_it ∇log π_t, so the stack has R rows "
        "and rank at most R either way; only a matrix with a row per token differs.",
    )


def _rank(rows: Tensor) -> int:
    return summary_of(singular_values(rows @ rows.mT)).numerical_rank


CREDIT_CLAIMS = (
    claim(
        "thm-3.1",
        "section 3, Theorem 3.1, eqs. (16) and (17)",
        "Under output-only reward with γ = 1, every token of rollout i gets the same advantage r_i - v̂_R(s_0).",
        uniform_credit,
    ),
    claim(
        "remark-3.2",
        "section 3, Remark 3.2, second to fourth sentence",
        "The credit cannot tell which tokens of a rollout caused the outcome: all of them, filler too, are reinforced equally.",
        no_credit_inside,
    ),
    claim(
        "eq-18-19",
        "section 3.1, eqs. (18) and (19)",
        "The gradient factors into (1/R) Σ A_i ψ_i, where ψ_i is the trajectory score, the sum of a rollout's token scores.",
        factorisation,
    ),
    claim(
        "sec-3.1-rank",
        "section 3.1, last two sentences",
        "With token-level advantages the gradient would not factor; uniform credit enables this rank-reducing factorisation.",
        rank_reducing,
    ),
)
