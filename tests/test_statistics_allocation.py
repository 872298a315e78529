"""Allocation of rollouts: against every allocation listed, and the bias of sizes that follow the rewards."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.statistics import (
    NoiseComponents,
    allocated_rollouts,
    allocation_error,
    components_of_estimates,
    noise_components,
    prompt_estimates,
    recommend_group_size,
    unequal_prompt_estimates,
)
from tests.discrete_laws import Law, law

noises = st.lists(st.floats(0, 100), min_size=3, max_size=3)


def error_by_definition(single: list[float], pair: list[float], sizes: tuple[int, ...]) -> float:
    return sum(s / r + k / (r * (r - 1)) for s, k, r in zip(single, pair, sizes, strict=True)) / len(sizes) ** 2


@given(single=noises, pair=noises, total=st.integers(6, 14), most=st.integers(5, 9))
def test_no_other_allocation_has_less_error(single, pair, total, most):
    sizes = allocated_rollouts(torch.tensor(single), torch.tensor(pair), total, most=most)
    others = [each for each in product(range(2, most + 1), repeat=3) if sum(each) == total]
    best = min(error_by_definition(single, pair, each) for each in others)
    assert tuple(sizes.tolist()) in others
    assert allocation_error(torch.tensor(single), torch.tensor(pair), sizes) == pytest.approx(best, rel=1e-5, abs=1e-9)


def test_equal_noises_give_equal_sizes_and_negative_ones_count_as_zero():
    assert allocated_rollouts(torch.ones(4), torch.ones(4), 32).tolist() == [8, 8, 8, 8]
    assert allocated_rollouts(torch.zeros(4), torch.zeros(4), 32).tolist() == [8, 8, 8, 8]
    assert allocated_rollouts(torch.tensor([-5.0, 1.0]), torch.zeros(2), 12).tolist() == [2, 10]


def test_large_sizes_follow_the_root_of_the_noise():
    sizes = allocated_rollouts(torch.tensor([16.0, 4.0, 1.0]), torch.zeros(3), 7000)
    assert sizes.tolist() == pytest.approx([4000, 2000, 1000], abs=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: allocated_rollouts(torch.ones(3), torch.ones(3), 5), "P·least <= total <= P·most"),
        (lambda: allocated_rollouts(torch.ones(3), torch.ones(3), 30, most=8), "P·least <= total <= P·most"),
        (lambda: allocated_rollouts(torch.ones(3), torch.ones(3), 12, least=1), "least >= 2"),
        (lambda: allocated_rollouts(torch.tensor([math.nan]), torch.ones(1), 4), "single_noise"),
        (lambda: allocated_rollouts(torch.ones(0), torch.ones(0), 4), "at least one prompt"),
        (lambda: allocation_error(torch.ones(2), torch.ones(2), torch.tensor([1, 3])), "at least 2 rollouts"),
        (lambda: recommend_group_size([], 3, (4, 8), generator=torch.Generator()), "include the current size"),
        (lambda: recommend_group_size([], 4, (4, 8), agreement=2.0, generator=torch.Generator()), "agreement"),
    ],
)
def test_wrong_values_are_refused(call, words):
    with pytest.raises(ScoregramError, match=words.replace("(", r"\(")):
        call()


# Sizes and bias, by enumeration


def gradient(scores: Tensor, rewards: Tensor) -> Tensor:
    """Leave-one-out gradient of one group, from its definition."""
    count = len(rewards)
    others = (rewards.sum() - rewards) / (count - 1)
    return ((rewards - others)[:, None] * scores).mean(0)


def expected(prompt: Law, size: int, value) -> Tensor:
    """`E[value(scores, rewards)]` over all groups of `size`."""
    return sum(
        (chance * value(s, r) for chance, s, r in prompt.groups(size)), start=torch.zeros(2, dtype=torch.float64)
    )


def test_error_of_unequal_sizes_is_that_of_all_pairs_of_groups():
    prompts, sizes = [law(0), law(1)], (2, 3)
    truth = sum(prompt.gradient for prompt in prompts) / 2
    error = 0.0
    for (c1, s1, r1), (c2, s2, r2) in product(prompts[0].groups(2), prompts[1].groups(3)):
        error += c1 * c2 * float((((gradient(s1, r1) + gradient(s2, r2)) / 2 - truth) ** 2).sum())
    single = torch.stack([prompt.oracle_trace for prompt in prompts])
    pair = torch.stack([p.variance * p.fisher_trace + p.gradient @ p.gradient for p in prompts])
    assert allocation_error(single, pair, torch.tensor(sizes)) == pytest.approx(error, rel=1e-12)


def further(rewards: Tensor) -> int:
    """A size that follows the first rewards: 2 more rollouts if they differ, else 1."""
    return 2 if float(rewards[0]) != float(rewards[1]) else 1


def two_stages(prompt: Law, combine) -> Tensor:
    """`E[combine(pilot, second)]`: 2 rollouts, then as many more as their rewards decide."""
    total = torch.zeros(2, dtype=torch.float64)
    for chance, scores, rewards in prompt.groups(2):
        for later, more_scores, more_rewards in prompt.groups(further(rewards)):
            total += chance * later * combine(scores, rewards, more_scores, more_rewards)
    return total


def pooled(s1: Tensor, r1: Tensor, s2: Tensor, r2: Tensor) -> Tensor:
    return gradient(torch.cat([s1, s2]), torch.cat([r1, r2]))


def stratified(s1: Tensor, r1: Tensor, s2: Tensor, r2: Tensor) -> Tensor:
    """Fixed weights of the two stages; the baseline of the second is the mean reward of the first."""
    return 0.5 * gradient(s1, r1) + 0.5 * ((r2 - r1.mean())[:, None] * s2).mean(0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_size_that_follows_the_rewards_biases_pooled_leave_one_out(seed):
    prompt = law(seed)
    assert float((two_stages(prompt, pooled) - prompt.gradient).norm() / prompt.gradient.norm()) > 0.01
    torch.testing.assert_close(two_stages(prompt, stratified), prompt.gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("chance", "ratio"), [(0.05, 0.45), (0.1, 0.54), (0.3, 0.81), (0.5, 0.89)])
@pytest.mark.parametrize("mixed_first", [True, False])
def test_the_bias_that_the_page_shows(chance, ratio, mixed_first):
    """4 rollouts of a policy with one logit, and 8 more if they are mixed, or if they are equal: all outcomes."""
    total = 0.0
    for right in range(5):
        more = 8 if (0 < right < 4) == mixed_first else 0
        for later in range(more + 1):
            rewards = torch.tensor([1.0] * (right + later) + [0.0] * (4 + more - right - later), dtype=torch.float64)
            counts = math.comb(4, right) * math.comb(more, later)
            likelihood = counts * chance ** (right + later) * (1 - chance) ** (4 + more - right - later)
            total += likelihood * float(gradient((rewards - chance)[:, None], rewards))
    assert total / (chance * (1 - chance)) == pytest.approx(ratio if mixed_first else 2 - ratio, abs=0.0051)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_size_from_earlier_visits_leaves_no_bias(size):
    prompt = law(3)
    torch.testing.assert_close(expected(prompt, size, gradient), prompt.gradient, rtol=1e-11, atol=1e-12)


# Unequal groups


def test_unequal_estimates_of_equal_groups_are_the_equal_ones():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    gram, prompt_of = scores @ scores.mT, torch.arange(3).repeat_interleave(4)
    found, known = unequal_prompt_estimates(gram, rewards.flatten(), prompt_of), prompt_estimates(gram, rewards)
    torch.testing.assert_close(found.gradient_gram, known.gradient_gram)
    torch.testing.assert_close(found.moments.oracle_trace, known.moments.oracle_trace)
    assert components_of_estimates(found) == noise_components(gram, rewards)


def test_components_of_pairs_that_were_measured_together():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    estimates = prompt_estimates(scores @ scores.mT, rewards)
    together = torch.eye(4, dtype=torch.bool)
    together[0, 1] = together[1, 0] = together[1, 3] = together[3, 1] = True
    found = components_of_estimates(estimates, same_pass=together)
    inner = estimates.gradient_gram
    assert found.gradient_squared == pytest.approx(float(inner[0, 1] + inner[1, 3]) / 2)
    distances = [float(inner[p, p] + inner[q, q] - 2 * inner[p, q]) for p, q in ((0, 1), (1, 3))]
    assert found.between_prompts == pytest.approx(sum(distances) / 4)
    everything = components_of_estimates(estimates)
    assert (found.within_prompt, found.group_baseline) == (everything.within_prompt, everything.group_baseline)
    with pytest.raises(ScoregramError, match="2 prompts together"):
        components_of_estimates(estimates, same_pass=torch.eye(4, dtype=torch.bool))


def test_unequal_components_are_unbiased():
    prompts, sizes = [law(0, outcomes=2), law(4, outcomes=2)], (4, 5)
    sums = torch.zeros(4, dtype=torch.float64)
    prompt_of = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    for (c1, s1, r1), (c2, s2, r2) in product(*(p.unordered_groups(n) for p, n in zip(prompts, sizes, strict=True))):
        scores, rewards = torch.cat([s1, s2]), torch.cat([r1, r2])
        noise = components_of_estimates(unequal_prompt_estimates(scores @ scores.mT, rewards, prompt_of))
        found = (noise.gradient_squared, noise.between_prompts, noise.within_prompt, noise.group_baseline)
        sums += c1 * c2 * torch.tensor(found, dtype=torch.float64)
    a, b = (p.gradient for p in prompts)
    pair = [p.variance * p.fisher_trace + p.gradient @ p.gradient for p in prompts]
    truth = [a @ b, ((a - b) ** 2).sum() / 2, sum(p.oracle_trace for p in prompts) / 2, sum(pair) / 2]
    torch.testing.assert_close(sums, torch.stack(truth), rtol=1e-10, atol=1e-11)


def test_unequal_estimates_refuse_unsorted_prompts():
    with pytest.raises(ScoregramError, match="ascending prompts"):
        unequal_prompt_estimates(torch.eye(8), torch.zeros(8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 0]))


# The group size


def advice(components: list[NoiseComponents], current: int = 8, choices=(4, 8, 16, 32), **options):
    return recommend_group_size(components, current, choices, generator=torch.Generator().manual_seed(0), **options)


def test_the_size_moves_one_choice_towards_the_optimum_and_stays_there():
    steps = [NoiseComponents(1.0, 0.01, 1.0, 9.0)] * 12  # R* = 1 + sqrt(9 / 0.01) = 31
    visited, careful = [4], [4]
    for _ in range(5):
        visited.append(advice(steps, visited[-1]).recommended)
        careful.append(advice(steps, careful[-1], least_saving=0.1).recommended)
    assert visited == [4, 8, 16, 32, 32, 32]
    assert careful == [4, 8, 16, 16, 16, 16]  # 32 has (0.32 + 1 + 9/31) / (0.16 + 1 + 9/15) = 0.915 of the error of 16


def test_a_move_needs_a_saving_and_agreement():
    flat = [NoiseComponents(1.0, 0.0, 100.0, 1.0)] * 12
    assert advice(flat).recommended == 8 and "too little to move" in advice(flat).sentence
    noisy = [NoiseComponents(1.0, c1, 0.1, 1.0) for c1 in (-3.0, 3.4) * 6]
    assert advice(noisy).best == 4 and advice(noisy).recommended == 8
    assert advice(noisy, agreement=0.0).recommended == 4


def test_too_few_steps_or_no_noise_leave_the_size():
    few = advice([NoiseComponents(1.0, 0.01, 1.0, 9.0)] * 9)
    assert few.recommended == 8 and math.isnan(few.error_ratio) and "9 measured steps" in few.sentence
    assert advice([NoiseComponents(0.0, -1.0, -1.0, -1.0)] * 12).recommended == 8


def test_advice_is_the_argmin_of_the_exact_error():
    components = NoiseComponents(1.0, 0.5, 2.0, 30.0)
    errors = {size: 0.5 * size + 2.0 + 30.0 / (size - 1) for size in (4, 8, 16, 32)}
    found = advice([components] * 10, 32)
    assert found.best == min(errors, key=errors.__getitem__) == 8 and found.recommended == 16
    assert found.error_ratio == pytest.approx(errors[8] / errors[32])
