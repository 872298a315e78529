"""Moments and noise components: the definition by tuples, and unbiasedness over the list of all groups."""

import math
from dataclasses import fields
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.statistics import (
    GroupMoments,
    NoiseComponents,
    batch_mse,
    group_moments,
    noise_components,
    noise_scale,
    prompt_estimates,
    signal_to_noise,
)
from tests.discrete_laws import Law, law

NAMES = [field.name for field in fields(GroupMoments)]


def exact_moments(prompt: Law) -> dict[str, float]:
    mean_score = prompt.mean(prompt.scores)
    raw = prompt.mean((prompt.scores**2).sum(dim=1) * prompt.rewards**2)
    return {
        "gradient_squared": float(prompt.gradient @ prompt.gradient),
        "fisher_trace": float(prompt.fisher_trace),
        "variance_fisher_trace": float(prompt.variance * prompt.fisher_trace),
        "oracle_trace": float(prompt.oracle_trace),
        "raw_square": float(raw),
        "mean_score_squared": float(mean_score @ mean_score),
    }


def expected_moments(prompt: Law, size: int) -> dict[str, float]:
    listed = list(prompt.groups(size))
    chances = torch.tensor([chance for chance, _, _ in listed], dtype=torch.float64)
    scores, rewards = torch.stack([s for _, s, _ in listed]), torch.stack([r for _, _, r in listed])
    moments = group_moments(scores @ scores.mT, rewards)
    return {name: float(chances @ getattr(moments, name)) for name in NAMES}


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_moments_are_unbiased(size, seed):
    prompt = law(seed)
    assert expected_moments(prompt, size) == pytest.approx(exact_moments(prompt), rel=1e-11, abs=1e-12)


def test_four_outcomes_with_ties_and_a_zero_score():
    drawn = law(5, outcomes=4, parameters=3)
    scores = drawn.scores.clone()
    scores[0] = 0
    scores[3] = -(drawn.chances[1] * scores[1] + drawn.chances[2] * scores[2]) / drawn.chances[3]  # E ψ = 0 again
    prompt = Law(drawn.chances, scores, torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    assert expected_moments(prompt, 4) == pytest.approx(exact_moments(prompt), rel=1e-11, abs=1e-12)


def test_gradient_squared_needs_no_centred_scores():
    prompt = law(2, on_policy=False)
    assert float(prompt.mean(prompt.scores).norm()) > 0.1
    expected, exact = expected_moments(prompt, 4), exact_moments(prompt)
    for name in set(NAMES) - {"variance_fisher_trace"}:
        assert expected[name] == pytest.approx(exact[name], rel=1e-11), name


def by_tuples(k: torch.Tensor, r: torch.Tensor) -> dict[str, float]:
    """The U-statistics as they are defined: averages over all ordered tuples of different rollouts."""

    def average(kernel, degree):
        terms = [float(kernel(*tuples)) for tuples in permutations(range(len(r)), degree)]
        return sum(terms) / len(terms)

    def pairs(i, j, m, n):  # ⟨h_ij, h_mn⟩ with h_ij = (ψ_i - ψ_j)(r_i - r_j)/2
        return (k[i, m] - k[i, n] - k[j, m] + k[j, n]) * (r[i] - r[j]) * (r[m] - r[n]) / 4

    gradient_squared = average(pairs, 4)
    return {
        "gradient_squared": gradient_squared,
        "fisher_trace": average(lambda i: k[i, i], 1),
        "variance_fisher_trace": average(lambda i, j, m: k[i, i] * (r[j] - r[m]) ** 2 / 2, 3),
        "oracle_trace": average(lambda i, j, m: k[i, i] * (r[i] - r[j]) * (r[i] - r[m]), 3) - gradient_squared,
        "raw_square": average(lambda i: k[i, i] * r[i] ** 2, 1),
        "mean_score_squared": average(lambda i, j: k[i, j], 2),
    }


@given(size=st.integers(4, 6), seed=st.integers(0, 10_000), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_moments_match_the_tuples(size, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, size, 3, generator=generator, dtype=torch.float64)
    rewards = torch.randint(0, 3, (1, size), generator=generator).double() * scale  # ties are common
    moments = group_moments(scores @ scores.mT, rewards)
    exact = by_tuples((scores @ scores.mT)[0], rewards[0])
    for name in NAMES:
        unit = 1.0 if name in ("fisher_trace", "mean_score_squared") else scale**2
        assert float(getattr(moments, name)) == pytest.approx(exact[name], rel=1e-10, abs=1e-11 * unit), name


def test_moments_forget_the_shift_and_the_order():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(6, generator=generator)
    moments = group_moments(scores @ scores.mT, rewards)
    moved = group_moments(scores[:, order] @ scores[:, order].mT, rewards[:, order] + 7)
    for name in set(NAMES) - {"raw_square"}:
        torch.testing.assert_close(getattr(moments, name), getattr(moved, name), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("level", [0.1, 1e-6, 1e6])
def test_constant_rewards_carry_no_signal_and_no_noise(level):
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = group_moments(scores @ scores.mT, torch.full((2, 5), level))
    for name in ("gradient_squared", "variance_fisher_trace", "oracle_trace"):
        assert torch.equal(getattr(moments, name), torch.zeros(2, dtype=torch.float64))


@pytest.fixture(scope="module")
def two_prompts() -> list[tuple[float, Law]]:
    return [(0.4, law(10, outcomes=2)), (0.6, law(11, outcomes=3))]


def exact_components(prompts: list[tuple[float, Law]]) -> NoiseComponents:
    gradient = torch.stack([chance * prompt.gradient for chance, prompt in prompts]).sum(dim=0)
    total = {"c1": 0.0, "c2": 0.0, "c3": 0.0}
    for chance, prompt in prompts:
        off = prompt.gradient - gradient
        total["c1"] += chance * float(off @ off)
        total["c2"] += chance * float(prompt.oracle_trace)
        total["c3"] += chance * float(prompt.variance * prompt.fisher_trace + prompt.gradient @ prompt.gradient)
    return NoiseComponents(float(gradient @ gradient), total["c1"], total["c2"], total["c3"])


def every_batch(prompts: list[tuple[float, Law]], count: int, size: int):
    """Every batch of `count` independent prompts with `size` rollouts: chance, scores (P, R, D), rewards (P, R).

    One order of each group stands for all; `test_components_forget_the_order` is why it may.
    """
    one = [
        (chance * inner, scores, rewards)
        for chance, prompt in prompts
        for inner, scores, rewards in prompt.unordered_groups(size)
    ]
    for groups in product(one, repeat=count):
        chance = math.prod(group[0] for group in groups)
        yield chance, torch.stack([g[1] for g in groups]), torch.stack([g[2] for g in groups])


def as_row(found: NoiseComponents) -> list[float]:
    return [found.gradient_squared, found.between_prompts, found.within_prompt, found.group_baseline]


def test_components_forget_the_order():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mixed, moved = scores[[2, 0, 1]].flip(1), rewards[[2, 0, 1]].flip(1)
    first = noise_components(scores.flatten(0, 1) @ scores.flatten(0, 1).T, rewards)
    second = noise_components(mixed.flatten(0, 1) @ mixed.flatten(0, 1).T, moved)
    assert as_row(first) == pytest.approx(as_row(second), rel=1e-12)


def test_components_are_unbiased(two_prompts):
    """All batches of two prompts with four rollouts each."""
    expected, total = torch.zeros(4, dtype=torch.float64), 0.0
    for chance, scores, rewards in every_batch(two_prompts, 2, 4):
        flat = scores.flatten(0, 1)
        expected += chance * torch.tensor(as_row(noise_components(flat @ flat.T, rewards)), dtype=torch.float64)
        total += chance
    assert total == pytest.approx(1)
    assert expected.tolist() == pytest.approx(as_row(exact_components(two_prompts)), rel=1e-11, abs=1e-13)


def leave_one_out_gradient(scores: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    size = len(rewards)
    baselines = [sum(float(rewards[j]) for j in range(size) if j != i) / (size - 1) for i in range(size)]
    return sum((scores[i] * (float(rewards[i]) - baselines[i]) for i in range(size)), torch.zeros(())) / size


@pytest.mark.parametrize(("count", "size"), [(1, 2), (1, 4), (2, 2), (2, 3)])
def test_batch_mse_is_the_error_over_all_batches(two_prompts, count, size):
    gradient = torch.stack([chance * prompt.gradient for chance, prompt in two_prompts]).sum(dim=0)
    error = 0.0
    for chance, scores, rewards in every_batch(two_prompts, count, size):
        estimate = torch.stack([leave_one_out_gradient(s, r) for s, r in zip(scores, rewards, strict=True)]).mean(dim=0)
        error += chance * float(((estimate - gradient) ** 2).sum())
    components = exact_components(two_prompts)
    assert batch_mse(components, count, size) == pytest.approx(error, rel=1e-12)
    assert signal_to_noise(components, count, size) == pytest.approx(components.gradient_squared / error, rel=1e-12)


def test_at_the_noise_scale_the_error_has_the_power_of_the_signal():
    components = NoiseComponents(gradient_squared=0.5, between_prompts=2.0, within_prompt=3.0, group_baseline=6.0)
    for size in (2, 3, 7):
        rollouts = noise_scale(components, size)
        one_prompt = batch_mse(components, 1, size)
        assert one_prompt / (rollouts / size) == pytest.approx(components.gradient_squared)


def test_unresolved_signal_and_noise():
    no_signal = NoiseComponents(-0.1, 1.0, 1.0, 1.0)
    assert noise_scale(no_signal, 4) == math.inf and signal_to_noise(no_signal, 2, 4) < 0
    no_noise = NoiseComponents(1.0, -1.0, 0.0, 0.0)
    assert math.isnan(noise_scale(no_noise, 4)) and math.isnan(signal_to_noise(no_noise, 2, 4))


def test_cross_terms_are_inner_products_of_leave_one_out_gradients():
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    flat = scores.flatten(0, 1)
    estimates = prompt_estimates(flat @ flat.T, rewards)
    gradients = torch.stack([leave_one_out_gradient(s, r) for s, r in zip(scores, rewards, strict=True)])
    apart = ~torch.eye(3, dtype=torch.bool)
    torch.testing.assert_close(estimates.gradient_gram[apart], (gradients @ gradients.T)[apart])
    torch.testing.assert_close(estimates.gradient_gram.diagonal(), estimates.moments.gradient_squared)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: group_moments(torch.ones(1, 3, 3), torch.ones(1, 3)), "at least 4 rollouts"),
        (lambda: group_moments(torch.ones(0, 4, 4), torch.ones(0, 4)), "at least one prompt"),
        (lambda: group_moments(torch.ones(2, 4, 4), torch.ones(1, 4)), "blocks (2, 4, 4)"),
        (lambda: group_moments(torch.ones(1, 4, 4), torch.full((1, 4), math.nan)), "rewards must be finite"),
        (lambda: group_moments(torch.full((1, 4, 4), math.inf), torch.ones(1, 4)), "the Gram must be finite"),
        (lambda: noise_components(torch.eye(4), torch.ones(1, 4)), "at least 2 prompts"),
        (lambda: noise_components(torch.eye(6), torch.ones(2, 3)), "at least 4 rollouts"),
        (lambda: noise_components(torch.eye(7), torch.ones(2, 4)), "all N = P·R rollouts"),
        (lambda: noise_components(torch.eye(8), torch.ones(8)), "all N = P·R rollouts"),
        (lambda: noise_components(torch.zeros(0, 0), torch.ones(0, 4)), "not empty"),
        (lambda: batch_mse(NoiseComponents(1.0, 1.0, 1.0, 1.0), 1, 1), "2 rollouts per prompt"),
        (lambda: noise_scale(NoiseComponents(1.0, 1.0, 1.0, 1.0), 1), "2 rollouts per prompt"),
    ],
)
def test_errors_say_what_was_received(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)
