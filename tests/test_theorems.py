import math
from itertools import product

import pytest
import torch

from scoregram.advantages import mean_centered
from scoregram.checks import ScoregramError
from scoregram.spectra import effective_rank, orthogonal_top1_fraction
from scoregram.studies.grpo_rank.claims.grounds import coin
from scoregram.theory.lab.moments import group_update_moments
from scoregram.theory.lab.turns import credit_moments
from scoregram.theory.theorems import (
    advantage_covariance,
    contrast_weight,
    energy_return_covariance,
    expected_orthogonal_top1_fraction,
    gradient_norm_bound,
    group_mean_scale,
    largest_stacked_rank,
    most_energy_outside_top_two,
    update_norm_bound,
)
from tests.lab_cases import CASES, case, close

BINARY = [("output_only_binary", kind, prompt) for kind in ("tabular", "network") for prompt in range(3)]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("key", CASES)
def test_the_group_mean_keeps_all_but_one_part_in_r(key, size):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        update = group_update_moments(truth, mean_centered, prompt=prompt, group_size=size)
        close(update.expected, group_mean_scale(size) * truth.gradient[prompt])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_covariance_of_advantages_by_all_ordered_groups(size):
    values, chances = [0.0, 0.5, 2.0], [0.2, 0.5, 0.3]
    mean = sum(v * c for v, c in zip(values, chances, strict=True))
    variance = sum(c * (v - mean) ** 2 for v, c in zip(values, chances, strict=True))
    total = torch.zeros(size, size, dtype=torch.float64)
    for picks in product(range(3), repeat=size):
        r = torch.tensor([values[i] for i in picks], dtype=torch.float64)
        a = r - r.sum() / size
        total += math.prod(chances[i] for i in picks) * torch.outer(a, a)  # E A = 0
    close(advantage_covariance(variance, size), total)


@pytest.mark.parametrize("size", [2, 5])
def test_contrast_weight(size):
    generator = torch.Generator().manual_seed(0)
    for k in range(1, size):
        scores = torch.randn(size, 3, dtype=torch.float64, generator=generator)
        r = (torch.arange(size) < k).double()
        update = (r - r.mean()) @ scores / size
        close(update, contrast_weight(k, size) * (scores[:k].mean(dim=0) - scores[k:].mean(dim=0)))
    assert contrast_weight(0, size) == contrast_weight(size, size) == 0


def test_largest_rank_is_attained_by_independent_scores_and_not_lost_to_a_zero_sum():
    for rewards in ([1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [1.0, 0.5, 0.0]):
        a = mean_centered(torch.tensor([rewards], dtype=torch.float64))[0]
        assert int(torch.linalg.matrix_rank(torch.diag(a))) == largest_stacked_rank(a)
    assert largest_stacked_rank(torch.tensor([1.0, -1.0, 0.0])) == 2  # the middle reward of three


def test_update_norm_bound_holds_and_is_attained():
    generator = torch.Generator().manual_seed(0)
    for size, parameters in product((2, 3, 6), (1, 4)):
        scores = torch.randn(size, parameters, dtype=torch.float64, generator=generator)
        r = torch.randn(size, dtype=torch.float64, generator=generator)
        length = float(((r - r.mean()) @ scores / size).norm())
        assert length <= update_norm_bound(scores @ scores.mT, r) + 1e-12
    r = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    along = (r - r.mean())[:, None]  # all scores on one line, proportional to the advantages
    close(update_norm_bound(along @ along.mT, r), float(((r - r.mean()) @ along / 4).norm()))


@pytest.mark.parametrize("key", CASES)
def test_gradient_norm_bound(key):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        bound = gradient_norm_bound(float(truth.reward_variance[prompt]), truth.fisher[prompt])
        assert float(truth.gradient[prompt].norm()) <= bound + 1e-12


def test_gradient_norm_bound_is_attained_by_one_logit():
    truth = coin(0.8)  # ψ = r - p: score and reward are one line
    close(gradient_norm_bound(float(truth.reward_variance[0]), truth.fisher[0]), float(truth.gradient[0].norm()))


@pytest.mark.parametrize("key", CASES)
def test_covariance_of_energy_and_return_moves_the_best_baseline(key):
    truth = case(*key).truth
    covariance = energy_return_covariance(truth)
    close(truth.optimal_baseline - truth.value, covariance / truth.fisher_trace)
    for prompt in range(truth.value.numel()):
        at = {
            name: credit_moments(
                truth,
                (truth.listing.returns - b[prompt])[:, None].expand_as(truth.listing.reward),
                prompt=prompt,
                group_size=1,
            ).variance
            for name, b in (("value", truth.value), ("best", truth.optimal_baseline))
        }
        close(at["value"] - at["best"], float(covariance[prompt] ** 2 / truth.fisher_trace[prompt]), atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("p", [0.5, 0.8])
def test_expected_orthogonal_top1_fraction_by_all_ordered_groups(p, size):
    total = mixed = 0.0
    for outcome in product((0, 1), repeat=size):
        k = sum(outcome)
        if 0 < k < size:
            chance = p**k * (1 - p) ** (size - k)
            mixed, total = mixed + chance, total + chance * orthogonal_top1_fraction(k, size)
    close(expected_orthogonal_top1_fraction(p, size), total / mixed)
    assert math.isnan(expected_orthogonal_top1_fraction(1.0, size))
    assert math.isnan(expected_orthogonal_top1_fraction(p, 1))


@pytest.mark.parametrize("max_rank", [2, 3, 5, 8])
def test_no_spectrum_has_more_energy_outside_the_first_two(max_rank):
    generator = torch.Generator().manual_seed(max_rank)
    spectra = torch.rand(300, max_rank, dtype=torch.float64, generator=generator).pow(
        6 * torch.rand(300, 1, dtype=torch.float64, generator=generator)
    )
    energies = (spectra / spectra.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True).values
    ranks = effective_rank(energies.sqrt())
    for e, rank in zip(energies.tolist(), ranks.tolist(), strict=True):
        assert sum(e[2:]) <= most_energy_outside_top_two(e[0], rank, max_rank) + 1e-9


@pytest.mark.parametrize(("f", "second"), [(0.5, 0.5), (0.5, 0.45), (0.6, 0.25), (0.4, 0.25), (0.3, 0.21)])
def test_most_energy_outside_the_first_two_is_attained(f, second):
    energies = [f, second]
    while sum(energies) < 1 - 1e-12:
        energies.append(min(second, 1 - sum(energies)))
    rank = float(effective_rank(torch.tensor(energies, dtype=torch.float64).sqrt()))
    close(most_energy_outside_top_two(f, rank, 8), 1 - f - second, atol=1e-7)


def test_energy_outside_the_first_two_at_the_ends():
    assert math.isnan(most_energy_outside_top_two(0.6, 1.5, 8))  # 0.6 forces at least 1.98
    close(most_energy_outside_top_two(0.6, 8.0, 8), 0.4 * 6 / 7)
    assert most_energy_outside_top_two(1.0, 1.0, 8) == 0
    with pytest.raises(ScoregramError, match="at most 4 directions"):
        most_energy_outside_top_two(0.2, 2.0, 4)


@pytest.mark.parametrize(
    "bad", [lambda: group_mean_scale(0), lambda: contrast_weight(5, 4), lambda: advantage_covariance(-1, 2)]
)
def test_impossible_groups_are_refused(bad):
    with pytest.raises(ScoregramError):
        bad()
