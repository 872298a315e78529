"""Baselines against the parabola they minimise and against the list of all groups."""

import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.statistics import (
    baseline_saving,
    excess_variance,
    optimal_baseline,
)
from tests.discrete_laws import Law, law


def best_baseline(prompt: Law) -> torch.Tensor:
    norms = (prompt.scores**2).sum(dim=1)
    return prompt.mean(norms * prompt.rewards) / prompt.mean(norms)


def variance_with_constant(prompt: Law, baseline: torch.Tensor) -> torch.Tensor:
    """`tr Cov(ψ (r - b))`, outcome by outcome."""
    gradients = prompt.scores * (prompt.rewards - baseline)[:, None]
    return prompt.mean(((gradients - prompt.mean(gradients)) ** 2).sum(dim=1))


def test_excess_variance_is_the_height_above_the_bottom_of_the_parabola():
    prompt = law(0)
    best = best_baseline(prompt)
    for baseline in (prompt.value, best, best + 1, best - 1e3):
        height = (variance_with_constant(prompt, baseline) - variance_with_constant(prompt, best)) / 5
        found = excess_variance(baseline, best, prompt.fisher_trace, 5)
        torch.testing.assert_close(found, height, rtol=1e-10, atol=1e-10)


def test_the_baseline_matches_the_definition():
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    found = optimal_baseline(norms, rewards)
    for p in range(3):
        expected = sum(norms[p, j] * rewards[p, j] for j in range(5)) / sum(norms[p, j] for j in range(5))
        torch.testing.assert_close(found[p], torch.as_tensor(expected))


def test_a_baseline_that_includes_the_rollout_biases_the_gradient_and_one_from_the_others_does_not():
    prompt = law(3)
    expected = {"whole": torch.zeros(2).double(), "others": torch.zeros(2).double()}
    for chance, scores, rewards in prompt.groups(3):
        norms = (scores**2).sum(dim=1)[None]
        whole = optimal_baseline(norms, rewards[None])[0]
        others = torch.stack(
            [optimal_baseline(norms[:, kept], rewards[None, kept])[0] for kept in ([1, 2], [0, 2], [0, 1])]
        )
        expected["whole"] += chance * ((rewards - whole)[:, None] * scores).mean(dim=0)
        expected["others"] += chance * ((rewards - others)[:, None] * scores).mean(dim=0)
    torch.testing.assert_close(expected["others"], prompt.gradient, rtol=1e-12, atol=1e-13)
    cosine = torch.cosine_similarity(expected["whole"], prompt.gradient, dim=0)
    assert not torch.allclose(expected["whole"], prompt.gradient, rtol=1e-2)
    assert float(cosine) < 1 - 1e-6  # the direction is off too, not only the length


def weighted_mean_of_others(i: int, weights: list[float], rewards: list[float]) -> float:
    kept = [j for j in range(len(rewards)) if j != i]
    if sum(weights[j] for j in kept) == 0:
        return sum(rewards[j] for j in kept) / len(kept)
    return sum(weights[j] * rewards[j] for j in kept) / sum(weights[j] for j in kept)


def enumerated_variance(prompt: Law, size: int, *, weighted: bool) -> float:
    """Variance of the gradient of a group of `size`, over the list of all groups."""
    total = 0.0
    for chance, scores, rewards in prompt.unordered_groups(size):
        weights = [float(score @ score) if weighted else 1.0 for score in scores]
        known = rewards.tolist()
        means = [weighted_mean_of_others(i, weights, known) for i in range(size)]
        baselines = torch.tensor(means, dtype=torch.float64)
        gradient = ((rewards - baselines)[:, None] * scores).mean(dim=0)
        total += chance * float(((gradient - prompt.gradient) ** 2).sum())
    return total


RARE_SCORES = Law(  # two of three outcomes have no score: often all others of a rollout have weight zero
    torch.tensor([0.1, 0.5, 0.4]).double(),
    torch.tensor([[2.0, 1.0], [0.0, 0.0], [-0.5, -0.25]]).double(),
    torch.tensor([1.0, 0.0, 0.3]).double(),
)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("prompt", [law(4), law(5), RARE_SCORES])
def test_the_saving_is_exactly_that_of_the_two_estimators(prompt, size):
    """Its mean over all groups is the variance with `rloo` minus that with `optimal-loo`: nothing is biased."""
    assert prompt.mean(prompt.scores).abs().max() < 1e-12
    saved = variance = 0.0
    for chance, scores, rewards in prompt.unordered_groups(size):
        saving = baseline_saving((scores @ scores.T)[None], rewards[None])
        saved += chance * float(saving.per_prompt)
        variance += chance * float(saving.variance)
    plain, best = (enumerated_variance(prompt, size, weighted=weighted) for weighted in (False, True))
    assert variance == pytest.approx(plain, rel=1e-10)
    assert saved == pytest.approx(plain - best, rel=1e-9, abs=1e-12 * plain) and abs(plain - best) > 1e-4 * plain


@pytest.mark.parametrize("seed", [4, 5])
def test_the_saving_has_less_noise_than_the_plain_difference(seed):
    """`|ĝ_rloo|² - |ĝ_opt|²` of the group itself is unbiased too; over all groups its spread is twice as large."""
    prompt, size = law(seed), 5
    sums = {"ours": [0.0, 0.0], "plain": [0.0, 0.0]}
    for chance, scores, rewards in prompt.unordered_groups(size):
        squares = []
        for weights in ([1.0] * size, [float(score @ score) for score in scores]):
            means = [weighted_mean_of_others(i, weights, rewards.tolist()) for i in range(size)]
            gradient = ((rewards - torch.tensor(means, dtype=torch.float64))[:, None] * scores).mean(dim=0)
            squares.append(float(gradient @ gradient))
        ours = float(baseline_saving((scores @ scores.T)[None], rewards[None]).per_prompt)
        for name, value in (("ours", ours), ("plain", squares[0] - squares[1])):
            sums[name][0] += chance * value
            sums[name][1] += chance * value**2
    spread = {name: square - mean**2 for name, (mean, square) in sums.items()}
    assert sums["ours"][0] == pytest.approx(sums["plain"][0], rel=1e-9)
    assert spread["ours"] < spread["plain"] / 3


def test_the_best_constant_baseline_saves_the_squared_covariance():
    """`(V - b*)² tr F / R = Cov(|ψ|², r)² / (R tr F)`, the limit of the saving in large groups."""
    prompt, norms = law(4), (law(4).scores ** 2).sum(dim=1)
    covariance = prompt.mean((norms - prompt.fisher_trace) * (prompt.rewards - prompt.value))
    saved = excess_variance(prompt.value, best_baseline(prompt), prompt.fisher_trace, 4)
    assert float(covariance**2 / prompt.fisher_trace) / 4 == pytest.approx(float(saved), rel=1e-12)


@pytest.mark.parametrize("change", [lambda r: r + 1e3, lambda r: r.flip(1), lambda r: -2 * r])
def test_the_saving_has_the_laws_of_a_variance(change):
    """Unchanged by a shift of rewards and by the order of rollouts; quadratic in the scale."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    rewards = torch.rand(2, 6, generator=generator, dtype=torch.float64)
    changed = change(rewards)
    is_flipped = torch.equal(changed, rewards.flip(1))
    factor = float((changed[0, 0] - changed[0, 1]) / (rewards[0, 0] - rewards[0, 1])) if not is_flipped else 1.0
    moved = scores.flip(1) if is_flipped else scores
    own, other = baseline_saving(scores @ scores.mT, rewards), baseline_saving(moved @ moved.mT, changed)
    torch.testing.assert_close(other.per_prompt, own.per_prompt * factor**2, rtol=1e-8, atol=1e-12)
    assert other.fraction == pytest.approx(own.fraction, rel=1e-8)


def test_fraction_approaches_the_exact_one_in_a_large_group():
    """A group that holds every outcome in proportion stands for the law itself."""
    generator = torch.Generator().manual_seed(9)
    outcomes = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    outcomes = outcomes - outcomes.mean(dim=0)
    prompt = Law(torch.full((4,), 0.25).double(), outcomes, torch.tensor([1.0, 0.0, 0.0, 1.0]).double())
    scores, rewards = outcomes.repeat(200, 1), prompt.rewards.repeat(200)
    found = baseline_saving((scores @ scores.T)[None], rewards[None]).fraction
    best = best_baseline(prompt)
    exact = 1 - float(variance_with_constant(prompt, best) / variance_with_constant(prompt, prompt.value))
    assert exact > 0.01
    assert found == pytest.approx(exact, abs=5 / 800)  # U-statistics differ from averages by order 1/R


@pytest.mark.parametrize("level", [0.1, 1e-6, 1e6])
def test_constant_rewards_are_their_own_baseline(level):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 5, 3, generator=generator, dtype=torch.float64)
    rewards, norms = torch.full((1, 5), level, dtype=torch.float64), (scores**2).sum(dim=2)
    assert float(optimal_baseline(norms, rewards)) == level
    saving = baseline_saving(scores @ scores.mT, rewards)
    assert float(saving.per_prompt) == 0 and math.isnan(saving.fraction)


def test_zero_scores_have_no_baseline():
    assert math.isnan(float(optimal_baseline(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 3.0]]))))
    assert float(baseline_saving(torch.zeros(1, 4, 4), torch.rand(1, 4)).per_prompt) == 0


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: optimal_baseline(torch.ones(1, 2), torch.ones(1, 3)), "shape of rewards (1, 3)"),
        (lambda: optimal_baseline(torch.ones(1, 0), torch.ones(1, 0)), "at least 1 rollout"),
        (lambda: optimal_baseline(-torch.ones(1, 2), torch.ones(1, 2)), "must not be negative, got -1"),
        (lambda: optimal_baseline(torch.ones(1, 2), torch.tensor([[math.inf, 0.0]])), "rewards must be finite"),
        (lambda: baseline_saving(torch.ones(1, 3, 3), torch.ones(1, 3)), "at least 4 rollouts"),
        (lambda: excess_variance(torch.ones(1), torch.ones(1), torch.ones(1), 0), "at least 1, got 0"),
    ],
)
def test_errors_say_what_was_received(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)
