"""What holds for every objective: the claims of the table, and what no objective may do with a bad batch."""

import itertools
import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.objectives import (
    MAX_LOG_RATIO,
    OBJECTIVES,
    kl_penalty,
    preference_pairs,
    reinforce,
    token_coefficients,
    token_weights,
)

NAMES = sorted(OBJECTIVES)
GROUP = 3
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, True]] * 2)
REWARDS = torch.tensor([0.0, 0.1, 1.0, 2.0, -0.5, 0.6], dtype=torch.float64)
AGGREGATION = {
    "grpo": "sequence_mean",
    "gspo": "sequence_mean",
    "dr_grpo": "constant",
    "ppo": "token_mean",
    "dapo": "token_mean",
    "dual_clip": "token_mean",
    "cispo": "token_mean",
}


def leave_one_out(rewards):
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(-1, keepdim=True)) * GROUP / (GROUP - 1)).flatten()


def batch(drift: float | torch.Tensor = 0.0, rewards=REWARDS, mask=MASK, beta=1.0):
    """Everything an objective may need; the current policy is `drift` away from the old one and the reference."""
    generator = torch.Generator().manual_seed(0)
    old = -25 - torch.rand(mask.shape, dtype=torch.float64, generator=generator)
    return {
        "log_probs": (old + drift).requires_grad_(),
        "old_log_probs": old,
        "ref_log_probs": old,
        "advantages": leave_one_out(rewards),
        "rewards": rewards,
        "mask": mask,
        "pairs": preference_pairs(rewards.view(-1, GROUP)),
        "group_size": GROUP,
        "beta": beta,
        "length": 8,
    }


def loss_of(name, inputs):
    row = OBJECTIVES[name]
    return row.fn(**{key: inputs[key] for key in row.needs})


def coefficients_of(name, inputs):
    return token_coefficients(loss_of(name, inputs), inputs["log_probs"])


# Claims. A drift is put on one token or one rollout at a time; both signs of the advantage are in the batch.

DRIFTS = [-19.0, -0.5, 1e-5, 0.5, 19.0]
BOTH_SIGNS = [0, 2]  # one rollout below its group, one above


def drifted(name, drift, where):
    size = torch.zeros(MASK.shape, dtype=torch.float64)
    size[where] = drift
    return coefficients_of(name, batch(size))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_is_reinforce_claim(name):
    inputs = batch()
    length = 8 if AGGREGATION.get(name) == "constant" else None
    loss = reinforce(
        inputs["log_probs"],
        inputs["advantages"],
        MASK,
        aggregation=AGGREGATION.get(name, "token_sum"),
        length=length,
    )
    expected = token_coefficients(loss, inputs["log_probs"])
    got = coefficients_of(name, inputs)
    scale = (got * expected).sum() / expected.square().sum()
    proportional = float(scale) > 0 and torch.allclose(got, scale * expected, rtol=1e-12, atol=1e-14)
    assert proportional == OBJECTIVES[name].on_policy_is_reinforce


@pytest.mark.parametrize(
    ("name", "per_token"), [(name, False) for name in NAMES] + [(name, True) for name in [*AGGREGATION, "reinforce"]]
)
def test_only_the_current_policy_gets_a_gradient(name, per_token):
    inputs = batch(0.1)
    if per_token:
        inputs["advantages"] = inputs["advantages"][:, None].expand(MASK.shape)
    others = [key for key in OBJECTIVES[name].needs if key.endswith("_log_probs") or key in {"advantages", "rewards"}]
    for key in others:
        inputs[key] = inputs[key].detach().clone().requires_grad_()
    loss = loss_of(name, inputs)
    assert others and torch.autograd.grad(loss, inputs["log_probs"], retain_graph=True)[0].abs().sum() > 0
    found = torch.autograd.grad(loss, [inputs[key] for key in others], allow_unused=True)
    assert dict(zip(others, found, strict=True)) == dict.fromkeys(others)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("grpo", 0.8, 1.2), ("dr_grpo", 0.8, 1.2), ("dapo", 0.8, 1.28), ("gspo", 0.9997, 1.0004)]
)
def test_a_ratio_is_clipped_from_the_limits_of_the_paper(name, low, high):
    below, above = BOTH_SIGNS  # a positive advantage is clipped from above, a negative one from below
    for rollout, limit, inwards in ((above, high, 1 - 1e-6), (below, low, 1 + 1e-6)):
        inside = coefficients_of(name, batch(math.log(limit * inwards)))
        outside = coefficients_of(name, batch(math.log(limit / inwards)))
        assert bool((inside[rollout][MASK[rollout]] != 0).all()) and bool((outside[rollout] == 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_weight_of_the_table(name):
    row, inputs = OBJECTIVES[name], batch()
    weight = row.weight(**{key: inputs[key] for key in row.weight_needs})
    torch.testing.assert_close(-coefficients_of(name, inputs), weight, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_bounded_ratio_claim(name):
    """Each rollout moved by up to e^±19 a token, against the largest weight on-policy; ten is beyond every clip."""
    still = coefficients_of(name, batch())
    amplification = 0.0
    for drift in DRIFTS:
        for i in BOTH_SIGNS:
            moved = drifted(name, drift, i)[i][MASK[i]].abs() / still.abs().max()
            amplification = max(amplification, float(moved.max()))
    assert (amplification < 10) == OBJECTIVES[name].bounded_ratio


@pytest.mark.parametrize("name", NAMES)
def test_keeps_every_gradient_claim(name):
    kept = all(bool((drifted(name, drift, i)[i][MASK[i]] != 0).all()) for drift in DRIFTS for i in BOTH_SIGNS)
    assert kept == OBJECTIVES[name].keeps_every_gradient


@pytest.mark.parametrize("name", NAMES)
def test_sequence_ratio_claim(name):
    changed = any(
        not torch.equal(drifted(name, drift, (i, 0))[i, 1:], drifted(name, 0.0, (i, 0))[i, 1:])
        for drift in DRIFTS
        for i in BOTH_SIGNS
    )
    assert changed == OBJECTIVES[name].sequence_ratio


@pytest.mark.parametrize("name", NAMES)
def test_weighs_ties_claim(name):
    """All rewards of a group are equal, so every advantage is zero and there is no pair."""
    inputs = batch(rewards=torch.full_like(REWARDS, 0.5))
    assert not inputs["advantages"].any()
    weighed = bool((coefficients_of(name, inputs)[MASK] != 0).all())
    assert weighed == bool((coefficients_of(name, inputs) != 0).any()) == OBJECTIVES[name].weighs_ties


@pytest.mark.parametrize("name", NAMES)
def test_couples_rollouts_claim(name):
    changed = any(not torch.equal(drifted(name, drift, 0)[1:GROUP], drifted(name, 0.0, 0)[1:GROUP]) for drift in DRIFTS)
    assert changed == OBJECTIVES[name].couples_rollouts


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", NAMES)
def test_credits_tokens_claim(name):
    """One token has an advantage: its weight alone changes, or the loss takes none or refuses the table."""
    still, credited = batch(), batch()
    still["advantages"] = torch.zeros(MASK.shape, dtype=torch.float64)
    credited["advantages"] = still["advantages"].clone()
    credited["advantages"][2, 0] = 1.0
    try:
        changed = (coefficients_of(name, credited) != coefficients_of(name, still)).nonzero().tolist()
    except ScoregramError:
        changed = []
    assert (changed == [[2, 0]]) == OBJECTIVES[name].credits_tokens
    assert changed in ([], [[2, 0]])


@pytest.mark.parametrize("name", NAMES)
def test_any_sampling_claim(name):
    """The mean gradient over every group of two that another policy draws, at the regularised optimum: zero or not."""
    law, values = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.6], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logits = (reference.log() + values / 0.5).requires_grad_()
    mean = torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(range(3), repeat=2):
        pair = torch.tensor([first, second])
        rewards = values[pair]
        inputs = {
            "log_probs": logits.log_softmax(0)[pair][:, None],
            "old_log_probs": law.log()[pair][:, None],
            "ref_log_probs": reference.log()[pair][:, None],
            "advantages": rewards - rewards.flip(0),
            "rewards": rewards,
            "mask": torch.ones(2, 1, dtype=torch.bool),
            "pairs": preference_pairs(rewards[None]),
            "group_size": 2,
            "beta": 0.5,
            "length": 1,
        }
        mean += law[first] * law[second] * torch.autograd.grad(loss_of(name, inputs), logits)[0]
    size = float(mean.norm())
    assert size < 1e-12 or size > 1e-3
    assert (size < 1e-12) == OBJECTIVES[name].any_sampling


@pytest.mark.parametrize("name", NAMES)
def test_groups_do_not_see_each_other(name):
    assert torch.equal(drifted(name, 0.5, 0)[GROUP:], drifted(name, 0.0, 0)[GROUP:])


# Bad batches.

TENSORS = {"log_probs", "old_log_probs", "ref_log_probs"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_lies_outside_the_mask_changes_nothing(name, bad):
    """Neither value nor gradient, although every input holds `bad` there."""
    clean, dirty = batch(0.1), batch(0.1)
    for key in TENSORS:
        dirty[key] = torch.where(MASK, dirty[key].detach(), torch.full_like(dirty[key], bad))
    if name not in ("tic", "agro", "dpo"):
        clean["advantages"] = clean["advantages"][:, None].expand(MASK.shape)
        dirty["advantages"] = torch.where(MASK, clean["advantages"], torch.full(MASK.shape, bad).double())
    dirty["log_probs"].requires_grad_()
    assert torch.equal(loss_of(name, clean), loss_of(name, dirty))
    assert torch.equal(coefficients_of(name, clean), coefficients_of(name, dirty))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in NAMES for key in OBJECTIVES[name].needs if key in TENSORS]
)
def test_a_bad_log_probability_is_named(name, key, bad):
    inputs = batch()
    inputs[key] = inputs[key].detach().clone()
    inputs[key][4, 1] = bad
    with pytest.raises(
        ScoregramError, match=rf"{key} on completion tokens must be finite, got {bad} at index \(4, 1\)"
    ):
        loss_of(name, inputs)


@pytest.mark.parametrize("name", [name for name in NAMES if "advantages" in OBJECTIVES[name].needs])
def test_a_bad_advantage_is_named(name):
    inputs = batch()
    inputs["advantages"] = inputs["advantages"].clone()
    inputs["advantages"][3] = math.nan
    with pytest.raises(ScoregramError, match=r"advantages must be finite, got nan at index \(3,\)"):
        loss_of(name, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_log_likelihood_is_refused(name):
    inputs = batch()
    inputs["log_probs"] = -inputs["log_probs"].detach()
    with pytest.raises(ScoregramError, match=r"log_probs must not be positive, got 2.* at index \(0, 0\)"):
        loss_of(name, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_without_tokens_contributes_exactly_zero(name):
    """Whatever its numbers are; and its own gradient is zero."""
    mask = MASK.clone()
    mask[1] = False
    plain, wild = batch(0.05, mask=mask), batch(0.05, mask=mask)
    for key in ("advantages", "rewards"):
        wild[key] = wild[key].clone()
        wild[key][1] = math.nan
    assert torch.equal(loss_of(name, plain), loss_of(name, wild))
    coefficients = coefficients_of(name, wild)
    assert torch.equal(coefficients_of(name, plain), coefficients)
    assert bool((coefficients[1] == 0).all()) and bool((coefficients[0] != 0).any())


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_has_loss_and_gradient_zero(name):
    inputs = batch(0.1, mask=torch.zeros_like(MASK))
    assert float(loss_of(name, inputs).detach()) == 0
    assert bool((coefficients_of(name, inputs) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drift", [-1e3, 1e3])
@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_stay_finite(name, drift, dtype):
    inputs = batch()
    shift = 1e3
    for key in TENSORS:
        inputs[key] = (inputs[key].detach() - shift).to(dtype)
    inputs["log_probs"] = (inputs["log_probs"] + drift).to(dtype).requires_grad_()
    loss = loss_of(name, inputs)
    assert loss.dtype == dtype
    assert bool(loss.isfinite()) and bool(coefficients_of(name, inputs).isfinite().all())


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_beyond_the_clamp_the_ratio_is_constant(name):
    """With a negative advantage no clip bites: just below the clamp the full ratio, above it a constant."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for drift, factor, slope in [(MAX_LOG_RATIO - 1, 19.0, 19.0), (MAX_LOG_RATIO + 1, 20.0, -math.inf)]:
        old = torch.tensor([[-1000.0]], dtype=torch.float64)
        variable = (old + drift).requires_grad_()
        loss = OBJECTIVES[name].fn(variable, old, torch.tensor([-1.0], dtype=torch.float64), mask)
        assert float(loss.detach()) == pytest.approx(math.exp(factor), rel=1e-12)
        assert float(token_coefficients(loss, variable)) == pytest.approx(math.exp(slope), rel=1e-12)


@pytest.mark.parametrize("name", ["reinforce", "agro"])
def test_a_loss_that_overflows_is_an_error(name):
    inputs = batch(rewards=REWARDS.float() * 1e3)
    for key in TENSORS:
        inputs[key] = inputs[key].detach().float()
    inputs["log_probs"] = inputs["log_probs"] * 1e36
    with pytest.raises(ScoregramError, match="the loss must be finite, got"):
        loss_of(name, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    inputs = batch(0.3)
    before = {key: value.detach().clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    loss_of(name, inputs).backward()
    assert all(torch.equal(inputs[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_order_of_rollouts_change_nothing(name):
    inputs = batch(torch.linspace(-0.4, 0.4, 18, dtype=torch.float64).view(6, 3))
    order = torch.tensor([5, 3, 4, 2, 0, 1])  # whole groups stay neighbours
    padding = torch.full((6, 2), math.nan, dtype=torch.float64)
    moved = dict(inputs)
    for key in TENSORS:
        moved[key] = torch.cat([inputs[key].detach()[order], padding], dim=-1)
    moved["mask"] = torch.cat([MASK[order], torch.zeros(6, 2, dtype=torch.bool)], dim=-1)
    for key in ("rewards", "advantages"):
        moved[key] = inputs[key][order]
    moved["pairs"] = preference_pairs(moved["rewards"].view(-1, GROUP))
    torch.testing.assert_close(loss_of(name, inputs), loss_of(name, moved), rtol=1e-13, atol=1e-15)


# Our own errors, as a user without shape checks meets them.


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"mask": MASK.float()}, "mask must be boolean, got torch.float32"),
        ({"mask": MASK[:, :2]}, r"mask must have the shape of log_probs \(6, 3\), got \(6, 2\)"),
        ({"old_log_probs": torch.zeros(6, 2)}, r"mask must have the shape of log_probs"),
        ({"advantages": torch.zeros(5)}, r"advantages must have one value per rollout \(6\), got \(5,\)"),
        ({"advantages": torch.zeros(6, 2)}, r"advantages must have the shape of mask \(6, 3\), got \(6, 2\)"),
        ({"log_probs": torch.zeros(0, 3), "mask": MASK[:0]}, r"log_probs must be \(N, T\) with N >= 1, got \(0, 3\)"),
        ({"log_probs": torch.zeros(6), "mask": MASK[:, 0]}, r"log_probs must be \(N, T\)"),
    ],
)
def test_shapes_that_disagree_are_refused(change, part):
    with pytest.raises(ScoregramError, match=part):
        loss_of("grpo", {**batch(), **change})


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda x: token_coefficients(x.sum().detach(), x), "requires_grad False for loss"),
        (lambda x: token_coefficients(x.sum(), x.detach()), "False for log_probs"),
        (lambda x: token_coefficients(x.sum(), x.clone()), "must depend on log_probs"),
        (
            lambda x: token_coefficients((x - x.detach()).sqrt().sum(), x),
            "gradient of the loss must be finite, got inf",
        ),
    ],
)
def test_token_coefficients_refuses_what_has_no_answer(call, part):
    with pytest.raises(ScoregramError, match=part):
        call(torch.full((2, 2), -1.0, requires_grad=True))


@pytest.mark.usefixtures("unchecked_shapes")
def test_token_coefficients_needs_a_scalar():
    x = torch.full((2, 2), -1.0, requires_grad=True)
    with pytest.raises(ScoregramError, match=r"loss must be a scalar, got shape \(2,\)"):
        token_coefficients(x.sum(dim=-1), x)


def test_token_coefficients_turn_scores_into_the_gradient():
    """`Σ_it c_it ∇log π_it` over a small network's tokens is the gradient of the loss, KL term and clip included."""
    generator = torch.Generator().manual_seed(7)
    theta = torch.randn(4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    contexts = torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)
    actions = torch.randint(5, (6, 3, 1), generator=generator)
    log_probs = (contexts @ theta).log_softmax(-1).gather(-1, actions)[..., 0]
    old = (log_probs.detach() + 0.5 * torch.randn(6, 3, dtype=torch.float64, generator=generator)).clamp(max=0)
    loss = OBJECTIVES["grpo"].fn(log_probs, old, leave_one_out(REWARDS), MASK)
    loss = loss + 0.1 * kl_penalty(log_probs, old, MASK, term="k3")
    coefficients = token_coefficients(loss, log_probs)
    total = torch.zeros_like(theta)
    for i in range(6):
        for t in range(3):
            (score,) = torch.autograd.grad(log_probs[i, t], theta, retain_graph=True)
            total += coefficients[i, t] * score
    (expected,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-14)
    assert theta.grad is None
    assert bool((coefficients[~MASK] == 0).all())
    assert float(token_weights(MASK, "sequence_mean").sum()) == pytest.approx(1)
