import itertools

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.objectives import KL_TERMS, kl_penalty, kl_values, token_coefficients

ACTIONS = 5


def policies(seed):
    """Logits of a categorical policy, and the log-probabilities of a reference far from it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ACTIONS, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), (1.5 * torch.randn(ACTIONS, dtype=torch.float64, generator=generator)).log_softmax(
        -1
    )


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(value, logits):
    (result,) = torch.autograd.grad(value, logits, retain_graph=True)
    return result


def term_per_action(name, log_p, log_q):
    """One rollout of one token for every action there is, `(A,)`."""
    everything = torch.ones(ACTIONS, 1, dtype=torch.bool)
    return kl_values(log_p[:, None], log_q[:, None], everything, term=name)[:, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(KL_TERMS))
def test_claims_by_enumeration_of_every_action(name, seed):
    row = KL_TERMS[name]
    logits, ref = policies(seed)
    log_p = logits.log_softmax(-1)
    p = log_p.exp().detach()
    values = term_per_action(name, log_p, ref)
    as_a_loss = gradient((p * values).sum(), logits)  # the mean over sampled actions, sampling not differentiated
    reverse, forward = gradient(divergence(log_p, ref), logits), gradient(divergence(ref, log_p), logits)

    def same(a, b):
        return bool(torch.allclose(a, b, rtol=1e-11, atol=1e-13))

    assert same((p * values).sum(), divergence(log_p, ref)) == row.unbiased_value
    assert bool((values >= 0).all()) == row.nonnegative
    assert same(as_a_loss, torch.zeros_like(logits)) == row.zero_mean_gradient
    assert same(as_a_loss, reverse) == row.reverse_gradient
    assert same(as_a_loss, forward) == row.forward_gradient


def test_half_square_is_the_divergence_to_second_order():
    """Shrinking the distance to the reference tenfold shrinks the bias of `k2` a thousandfold, that is `O(δ³)`."""
    logits, ref = policies(0)
    base = logits.detach()
    biases = []
    for delta in (1e-2, 1e-3):
        log_p, log_q = base.log_softmax(-1), (base + delta * ref).log_softmax(-1)
        mean = (log_p.exp() * term_per_action("k2", log_p, log_q)).sum()
        biases.append(float((mean - divergence(log_p, log_q)).abs()))
    assert 500 < biases[0] / biases[1] < 2000


def test_token_terms_miss_what_the_contexts_contribute():
    """Two tokens, the first choosing the context of the second: summed `k2` is the gradient at fixed contexts only."""
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(n, dtype=torch.float64, generator=generator) for n in ((2,), (2, 2)))
    ref_first, ref_second = (torch.randn(n, dtype=torch.float64, generator=generator) for n in ((2,), (2, 2)))
    first.requires_grad_()
    p1, p2, q1, q2 = (x.log_softmax(-1) for x in (first, second, ref_first, ref_second))
    rollouts = list(itertools.product(range(2), repeat=2))
    log_p = torch.stack([torch.stack([p1[a], p2[a, b]]) for a, b in rollouts])  # (4, 2)
    log_q = torch.stack([torch.stack([q1[a], q2[a, b]]) for a, b in rollouts])
    probability = log_p.detach().sum(-1).exp()
    values = kl_values(log_p, log_q, torch.ones(4, 2, dtype=torch.bool), term="k2")
    summed = gradient((probability[:, None] * values).sum(), first)
    local = gradient(divergence(p1, q1), first)
    whole = gradient((log_p.sum(-1).exp() * (log_p - log_q).sum(-1)).sum(), first)
    through_contexts = gradient((p1.exp() * torch.stack([divergence(p2[a], q2[a]) for a in range(2)])).sum(), first)
    torch.testing.assert_close(summed, local, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole, local + through_contexts, rtol=1e-12, atol=1e-14)
    assert float(through_contexts.norm()) > 0.05 * float(whole.norm())


@pytest.mark.parametrize(("aggregation", "power"), [("token_sum", 0), ("sequence_mean", 1)])
def test_the_plain_log_ratio_divided_by_length_asks_for_longer_rollouts(aggregation, power):
    """A policy that stops after its first token or goes on: `∇E[L^-power]` in the mean, zero only for a plain sum."""
    logits = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    stop, go = logits.log_softmax(-1).unbind()
    log_p = torch.stack([torch.stack([stop, stop]), torch.stack([go, torch.zeros_like(go)])])  # (2 rollouts, 2 tokens)
    mask, ref = torch.tensor([[True, False], [True, True]]), torch.full((2, 2), -1.7, dtype=torch.float64)
    mean = torch.zeros(2, dtype=torch.float64)
    for i, probability in enumerate((stop.exp(), go.exp())):
        loss = kl_penalty(log_p[i : i + 1], ref[i : i + 1], mask[i : i + 1], term="k1", aggregation=aggregation)
        mean += float(probability.detach()) * gradient(loss, logits)
    expected = gradient(stop.exp() + go.exp() / 2**power, logits)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-15)
    assert (float(mean.norm()) > 0.01) == (aggregation == "sequence_mean")


@pytest.mark.parametrize("name", sorted(KL_TERMS))
def test_gradient_matches_finite_differences_and_the_stated_weight(name):
    generator = torch.Generator().manual_seed(5)
    log_probs, ref = (-3 * torch.rand(2, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    variable = log_probs.clone().requires_grad_()
    coefficients = token_coefficients(kl_penalty(variable, ref, mask, term=name), variable)
    d = log_probs - ref
    stated = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - torch.exp(-d)}[name]
    torch.testing.assert_close(coefficients, mask * stated / (2 * mask.sum(-1, keepdim=True)), rtol=1e-12, atol=1e-15)
    for i, t in itertools.product(range(2), range(3)):
        nudge = torch.zeros_like(log_probs)
        nudge[i, t] = 1e-6
        up, down = (float(kl_penalty(log_probs + s * nudge, ref, mask, term=name)) for s in (1, -1))
        assert float(coefficients[i, t]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_small_ratios_do_not_drown_in_rounding():
    """`exp(−d) − 1 + d` for `d ≈ 1e-4` in float32 is `d²/2 = 5e-9` to a percent; summed naively it is off by more."""
    d = torch.tensor([[1e-4]])
    value = kl_values(d - 1, torch.tensor([[-1.0]]), torch.tensor([[True]]), term="k3")
    exact_d = float((d - 1) + 1)
    assert float(value) == pytest.approx(exact_d**2 / 2, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_ratios_stop_at_the_clamp(dtype):
    log_probs = torch.tensor([[-1000.0, -20.5, -1.0]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[0.0, 0.0, -1000.0]], dtype=dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    values = kl_values(log_probs, ref, mask, term="k3").detach()
    at_clamp = torch.tensor(20.0, dtype=dtype).exp() - 21
    torch.testing.assert_close(values, torch.stack([at_clamp, at_clamp, torch.tensor(998.0, dtype=dtype)])[None])
    coefficients = token_coefficients(kl_penalty(log_probs, ref, mask, term="k3", aggregation="token_sum"), log_probs)
    torch.testing.assert_close(coefficients, torch.tensor([[0.0, 0.0, 1.0]], dtype=dtype))


def test_a_reference_without_support_is_an_error():
    log_probs = torch.tensor([[-1.0, -1.0]])
    with pytest.raises(
        ScoregramError, match=r"ref_log_probs on completion tokens must be finite, got -inf at index \(0, 1\)"
    ):
        kl_penalty(log_probs, torch.tensor([[-1.0, -torch.inf]]), torch.tensor([[True, True]]), term="k2")


def test_unknown_term_lists_the_choices():
    with pytest.raises(ScoregramError, match="one of k1, k2, k3"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([[True]]), term="k4")
