import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.objectives import (
    AGGREGATIONS,
    advantage_weighted,
    advantage_weights,
    clipped_ratio,
    clipped_sequence_ratio,
    exponential_advantage_weights,
    reinforce,
    stopped_ratio,
    token_coefficients,
    trajectory_ratio,
)

MASK = torch.tensor([[True, True, True, False], [True, False, True, True], [False] * 4, [False, True, False, False]])
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, 0.4], dtype=torch.float64)


def batch(seed, drift):
    """Log-probabilities of two policies, `drift` apart, on the tokens of `MASK`."""
    generator = torch.Generator().manual_seed(seed)
    old = -4 + torch.rand(MASK.shape, dtype=torch.float64, generator=generator)
    return old + drift * (torch.rand(MASK.shape, dtype=torch.float64, generator=generator) - 0.5), old


# The slow reference: plain Python numbers, one token at a time. `frozen` is the policy inside a stop-gradient.


def weight(name, i, lengths, length):
    n = len(lengths)
    denominators = {"token_sum": n, "sequence_mean": n * lengths[i], "constant": n * length, "token_mean": sum(lengths)}
    return 1 / denominators[name]


def naive(kind, log_probs, frozen, old, advantages, mask, *, low, high, c=None, aggregation="token_sum", length=1.0):
    log_probs, frozen, old, advantages, mask = (x.tolist() for x in (log_probs, frozen, old, advantages, mask))
    lengths = [sum(row) for row in mask]
    places = [(i, t) for i, row in enumerate(mask) for t, inside in enumerate(row) if inside]
    total = 0.0
    for i, t in places:
        a = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
        drifts = [log_probs[j][s] - old[j][s] for j, s in places if j == i]
        frozen_drifts = [frozen[j][s] - old[j][s] for j, s in places if j == i]
        ratio = math.exp(log_probs[i][t] - old[i][t])
        if kind == "reinforce":
            term = a * log_probs[i][t]
        elif kind == "cispo":
            term = min(max(math.exp(frozen[i][t] - old[i][t]), low), high) * a * log_probs[i][t]
        elif kind == "tic":
            term = min(math.exp(sum(drifts)), high) * a / lengths[i]
        else:
            if kind == "gspo":
                ratio = math.exp(sum(frozen_drifts) / lengths[i]) * math.exp(log_probs[i][t] - frozen[i][t])
            term = min(ratio * a, min(max(ratio, low), high) * a)
            if c is not None and a < 0:
                term = max(term, c * a)
        total -= weight(aggregation, i, lengths, length) * term
    return total


KINDS = {
    "reinforce": (lambda lp, old, a, m, **kw: reinforce(lp, a, m, **kw), {"low": 0.0, "high": 9.0}),
    "ppo": (clipped_ratio, {"low": 0.8, "high": 1.2}),
    "asymmetric": (
        lambda *args, **kw: clipped_ratio(*args, eps_low=0.1, eps_high=0.4, **kw),
        {"low": 0.9, "high": 1.4},
    ),
    "dual": (lambda *args, **kw: clipped_ratio(*args, dual_clip=1.5, **kw), {"low": 0.8, "high": 1.2, "c": 1.5}),
    "gspo": (
        lambda *args, **kw: clipped_sequence_ratio(*args, eps_low=0.1, eps_high=0.2, **kw),
        {"low": 0.9, "high": 1.2},
    ),
    "cispo": (lambda *args, **kw: stopped_ratio(*args, eps_low=0.3, **kw), {"low": 0.7, "high": 1.2}),
    "tic": (lambda *args, aggregation, length: trajectory_ratio(*args), {"low": 0.0, "high": 1.28}),
}
CASES = [
    (kind, aggregation) for kind in KINDS for aggregation in AGGREGATIONS if kind != "tic" or aggregation == "token_sum"
]


def fast_and_slow(kind, aggregation):
    fn, settings = KINDS[kind]
    length = 7.0 if aggregation == "constant" else None

    def fast(log_probs, old, advantages, mask):
        return fn(log_probs, old, advantages, mask, aggregation=aggregation, length=length)

    def slow(log_probs, frozen, old, advantages, mask):
        return naive(kind, log_probs, frozen, old, advantages, mask, aggregation=aggregation, length=7.0, **settings)

    return fast, slow


@pytest.mark.parametrize(
    ("kind", "aggregation", "per_token"),
    [(*case, per_token) for case in CASES for per_token in (False, True) if not (per_token and case[0] == "tic")],
)
@pytest.mark.parametrize("drift", [0.0, 0.3, 3.0])
def test_value_and_gradient_match_the_definition(kind, aggregation, drift, per_token):
    """The value token by token; the gradient by central differences of that, with what is stopped held fixed."""
    fast, slow = fast_and_slow(kind, aggregation)
    log_probs, old = batch(seed=3, drift=drift)
    advantages = ADVANTAGES[:, None] + torch.linspace(-1, 1, 4).double() if per_token else ADVANTAGES
    variable = log_probs.clone().requires_grad_()
    loss = fast(variable, old, advantages, MASK)
    torch.testing.assert_close(
        float(loss.detach()), slow(log_probs, log_probs, old, advantages, MASK), rtol=1e-13, atol=1e-14
    )
    coefficients = token_coefficients(loss, variable)
    step = 1e-6
    for i, t in itertools.product(*map(range, MASK.shape)):
        nudge = torch.zeros_like(log_probs)
        nudge[i, t] = step
        up = slow(log_probs + nudge, log_probs, old, advantages, MASK)
        down = slow(log_probs - nudge, log_probs, old, advantages, MASK)
        assert float(coefficients[i, t]) == pytest.approx((up - down) / (2 * step), abs=1e-8)


@given(
    rollouts=st.integers(1, 4),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    case=st.sampled_from(CASES),
)
def test_value_matches_the_definition_for_any_shape_and_scale(rollouts, tokens, seed, scale, case):
    generator = torch.Generator().manual_seed(seed)
    shape = (rollouts, tokens)
    old = -3 * torch.rand(shape, dtype=torch.float64, generator=generator)
    log_probs = -3 * torch.rand(shape, dtype=torch.float64, generator=generator)
    advantages = scale * torch.randn(rollouts, dtype=torch.float64, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    fast, slow = fast_and_slow(*case)
    expected = slow(log_probs, log_probs, old, advantages, mask)
    assert float(fast(log_probs, old, advantages, mask)) == pytest.approx(expected, rel=1e-11, abs=1e-12 * scale)


@pytest.mark.parametrize(("kind", "aggregation"), CASES)
def test_on_policy_every_loss_weighs_tokens_as_stated(kind, aggregation):
    """`−∂L/∂log π = u A` at ratio one, also when one tensor plays both policies."""
    fast, _ = fast_and_slow(kind, aggregation)
    variable = batch(seed=4, drift=0.0)[0].requires_grad_()
    length = 7 if aggregation == "constant" else None
    expected = advantage_weights(ADVANTAGES, MASK, aggregation=aggregation, length=length)
    coefficients = token_coefficients(fast(variable, variable, ADVANTAGES, MASK), variable)
    torch.testing.assert_close(-coefficients, expected, rtol=1e-13, atol=0)
    lengths = [int(n) for n in MASK.sum(dim=-1)]
    for i, t in itertools.product(*map(range, MASK.shape)):
        by_hand = weight(aggregation, i, lengths, 7) * float(ADVANTAGES[i]) if MASK[i, t] else 0.0
        assert float(expected[i, t]) == pytest.approx(by_hand, rel=1e-14)


# Clip regions: sign of the advantage × ratio below, inside, above, and the factor on `u A ∇log π` that must come out.

LOW, ONE, HIGH, FAR = 0.5, 1.05, 1.5, 4.0
REGIONS = {
    "ppo": {
        (+1, LOW): LOW,
        (+1, ONE): ONE,
        (+1, HIGH): 0,
        (-1, LOW): 0,
        (-1, ONE): ONE,
        (-1, HIGH): HIGH,
        (-1, FAR): FAR,
    },
    "dual": {(+1, LOW): LOW, (+1, HIGH): 0, (+1, FAR): 0, (-1, LOW): 0, (-1, ONE): ONE, (-1, HIGH): HIGH, (-1, FAR): 0},
    "gspo": {(+1, LOW): LOW, (+1, ONE): ONE, (+1, HIGH): 0, (-1, LOW): 0, (-1, ONE): ONE, (-1, HIGH): HIGH},
    "cispo": {(s, r): min(r, 1.2) for s in (+1, -1) for r in (LOW, ONE, HIGH, FAR)},
    "cispo_low": {(s, r): min(max(r, 0.7), 1.2) for s in (+1, -1) for r in (LOW, ONE, HIGH, FAR)},
    "tic": {(s, r): r if r < 1.28 else 0 for s in (+1, -1) for r in (LOW, ONE, HIGH, FAR)},
}
REGION_LOSSES = {
    "ppo": clipped_ratio,
    "dual": lambda *args: clipped_ratio(*args, dual_clip=3),
    "gspo": lambda *args: clipped_sequence_ratio(*args, eps_low=0.2, eps_high=0.2),
    "cispo": stopped_ratio,
    "cispo_low": lambda *args: stopped_ratio(*args, eps_low=0.3),
    "tic": trajectory_ratio,
}


@pytest.mark.parametrize(
    ("kind", "sign", "ratio", "factor"),
    [(kind, *region, factor) for kind, regions in REGIONS.items() for region, factor in regions.items()],
)
def test_clip_regions(kind, sign, ratio, factor):
    old = torch.tensor([[-2.0]], dtype=torch.float64)
    variable = (old + math.log(ratio)).requires_grad_()
    advantages = torch.tensor([2.0 * sign], dtype=torch.float64)
    loss = REGION_LOSSES[kind](variable, old, advantages, torch.tensor([[True]]))
    assert float(-token_coefficients(loss, variable)) == pytest.approx(factor * 2.0 * sign, rel=1e-12, abs=0)


def test_token_form_of_the_sequence_ratio_is_the_sequence_form():
    """Value and gradient of `−(1/N) Σ min(s A, clip(s) A)` with `s` differentiated as a whole."""
    log_probs, old = batch(seed=6, drift=0.8)
    variable, whole = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    token_form = clipped_sequence_ratio(variable, old, ADVANTAGES, MASK, eps_low=0.1, eps_high=0.1)
    lengths = MASK.sum(dim=-1)
    terms = []
    for i in range(4):
        if lengths[i]:
            s = ((whole[i] - old[i])[MASK[i]].sum() / lengths[i]).exp()
            terms.append(torch.min(s * ADVANTAGES[i], s.clamp(0.9, 1.1) * ADVANTAGES[i]))
    sequence_form = -torch.stack(terms).sum() / 4
    torch.testing.assert_close(token_form, sequence_form, rtol=1e-13, atol=0)
    sequence_form.backward()
    torch.testing.assert_close(token_coefficients(token_form, variable), whole.grad, rtol=1e-12, atol=1e-15)


def test_trajectory_ratio_unclipped_is_an_unbiased_importance_weight():
    """Over all rollouts of two tokens from another policy, its mean is the policy gradient of the current one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    old = torch.randn(2, 3, dtype=torch.float64, generator=generator).log_softmax(-1)
    reward = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    new = logits.log_softmax(-1)
    rollouts = list(itertools.product(range(3), repeat=2))
    log_probs = torch.stack([torch.stack([new[0, a], new[1, b]]) for a, b in rollouts])
    old_log_probs = torch.stack([torch.stack([old[0, a], old[1, b]]) for a, b in rollouts])
    mask = torch.ones(9, 2, dtype=torch.bool)
    # The probability under the old policy goes in as an advantage: the batch mean becomes the mean over that policy.
    advantages = 9 * old_log_probs.sum(-1).exp() * torch.stack([reward[a, b] for a, b in rollouts])
    loss = trajectory_ratio(log_probs, old_log_probs, advantages, mask, eps_high=math.inf)
    truth = sum(new[0, a].exp() * new[1, b].exp() * reward[a, b] for a, b in rollouts)
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert isinstance(truth, torch.Tensor)
    (expected,) = torch.autograd.grad(truth, logits)
    torch.testing.assert_close(-got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda lp, a: clipped_ratio(lp, lp, a, MASK, eps_low=1.5), "eps_low must lie in"),
        (lambda lp, a: clipped_ratio(lp, lp, a, MASK, eps_high=-0.1), "eps_high must lie in"),
        (lambda lp, a: clipped_ratio(lp, lp, a, MASK, eps_high=math.nan), "eps_high must lie in"),
        (lambda lp, a: clipped_ratio(lp, lp, a, MASK, dual_clip=1.0), "dual_clip must be above 1"),
        (lambda lp, a: clipped_ratio(lp, lp, a, MASK, dual_clip=math.nan), "dual_clip must be above 1"),
        (lambda lp, a: stopped_ratio(lp, lp, a, MASK, eps_low=-1), "eps_low must lie in"),
        (lambda lp, a: trajectory_ratio(lp, lp, a, MASK, eps_high=-1), "eps_high must lie in"),
    ],
)
def test_settings_that_mean_nothing_are_refused(call, part):
    with pytest.raises(ScoregramError, match=part):
        call(batch(seed=0, drift=0.0)[0], ADVANTAGES)


def test_half_precision_is_summed_in_float32():
    log_probs = torch.full((1, 4096), -1.001, dtype=torch.bfloat16)
    loss = reinforce(log_probs, torch.ones(1, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bool))
    assert loss.dtype == torch.float32
    assert float(loss) == -4096 * float(log_probs[0, 0])


def test_advantage_weighted_is_a_regression_on_exponentiated_advantages():
    """Rollout by rollout: `min(exp(A/τ), most)` times its log-likelihood; a large advantage does not overflow."""
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -9.0], [-3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    advantages = torch.tensor([0.7, -1.2, 900.0], dtype=torch.float64)
    for tau, most in ((1.0, 20.0), (0.5, 3.0)):
        options: Any = {} if tau == 1 else {"temperature": tau, "most": most}
        weights = [math.exp(min(float(a) / tau, math.log(most))) for a in advantages]
        expected = -(weights[0] * -3.0 + weights[1] * -0.5 + weights[2] * -4.0) / 3
        loss = advantage_weighted(log_probs, advantages, mask, **options)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
        gradient = -torch.autograd.grad(loss, log_probs)[0]
        torch.testing.assert_close(exponential_advantage_weights(advantages, mask, **options), gradient)
    for name in ("temperature", "most"):
        wrong: Any = {name: 0.0}
        with pytest.raises(ScoregramError, match=f"{name} must lie in"):
            advantage_weighted(log_probs, advantages, mask, **wrong)


def test_at_its_optimum_advantage_weighted_regression_tilts_the_sampling_law():
    """The exact minimiser over all policies of `−E_μ[exp(r/τ) log π]` is `π ∝ μ exp(r/τ)`, for any law `μ`."""
    law = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    best = (law * rewards.exp() / (law * rewards.exp()).sum()).log().requires_grad_()
    weighted = [
        law[a]
        * advantage_weighted(best.log_softmax(0)[a].view(1, 1), rewards[a : a + 1], torch.ones(1, 1, dtype=torch.bool))
        for a in range(3)
    ]
    (gradient,) = torch.autograd.grad(torch.stack(weighted).sum(), best)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)
