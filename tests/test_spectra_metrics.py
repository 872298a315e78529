import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.spectra import (
    RANK_RTOL,
    SPECTRUM_METRICS,
    effective_rank,
    energy_entropy_rank,
    entropy_rank,
    nuclear_spectral_ratio,
    numerical_rank,
    participation_ratio,
    stable_rank,
    top1_fraction,
    top_fractions,
)
from tests.spectra_cases import majorises, partitions, spectra


def by_definition(sigma: list[float]) -> dict[str, float]:
    """Every metric in plain Python, as the formula column of the table reads."""
    total, energy, largest = sum(sigma), sum(s * s for s in sigma), max(sigma)
    p, e = [s / total for s in sigma], [s * s / energy for s in sigma]
    return {
        "effective_rank": total**2 / energy,
        "participation_ratio": 1 / sum(x * x for x in e),
        "entropy_rank": math.exp(-sum(x * math.log(x) for x in p if x > 0)),
        "energy_entropy_rank": math.exp(-sum(x * math.log(x) for x in e if x > 0)),
        "stable_rank": 1 / max(e),
        "nuclear_spectral_ratio": total / largest,
        "numerical_rank": len([s for s in sigma if s > RANK_RTOL * largest]),
        "top1_fraction": max(e),
    }


@given(spectra())
def test_every_metric_is_its_definition(sigma):
    expected = by_definition(sigma.tolist())
    assert expected.keys() == SPECTRUM_METRICS.keys()
    for name, metric in SPECTRUM_METRICS.items():
        assert metric.fn(sigma).item() == pytest.approx(expected[name], rel=1e-12), name


@given(spectra())
def test_chain_of_inequalities(sigma):
    value = {name: metric.fn(sigma).item() for name, metric in SPECTRUM_METRICS.items()}
    nonzero = int((sigma > 0).sum())
    chains = [
        [1.0, value["stable_rank"], value["participation_ratio"], value["energy_entropy_rank"], value["entropy_rank"]],
        [
            value["stable_rank"],
            value["nuclear_spectral_ratio"],
            value["effective_rank"],
            value["entropy_rank"],
            nonzero,
        ],
        [value["participation_ratio"], value["effective_rank"]],
    ]
    for chain in chains:
        assert all(low <= high * (1 + 1e-12) for low, high in itertools.pairwise(chain)), chain


@pytest.mark.parametrize("directions", [1, 2, 5])
def test_equal_singular_values_count_themselves(directions):
    sigma = torch.tensor([0.3] * directions + [0.0] * 2)
    for name, metric in SPECTRUM_METRICS.items():
        expected = 1 / directions if name == "top1_fraction" else directions
        assert metric.fn(sigma).item() == pytest.approx(expected, rel=1e-12), name


@given(spectra(), st.sampled_from([1e-150, 1e-6, 1e6, 1e150]), st.randoms(use_true_random=False))
def test_scale_and_order_do_not_matter(sigma, scale, random):
    order = list(range(len(sigma)))
    random.shuffle(order)
    for metric in SPECTRUM_METRICS.values():
        torch.testing.assert_close(metric.fn(scale * sigma[order]), metric.fn(sigma), rtol=1e-12, atol=0)
    torch.testing.assert_close(top_fractions(scale * sigma[order]), top_fractions(sigma), rtol=1e-12, atol=0)


@given(spectra(min_values=3, max_values=3), spectra(min_values=3, max_values=3))
def test_a_batch_is_its_spectra_one_by_one(first, second):
    batch = torch.stack([first, torch.zeros(3), second])
    for metric in SPECTRUM_METRICS.values():
        alone = torch.stack([metric.fn(sigma) for sigma in batch])
        torch.testing.assert_close(metric.fn(batch), alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(SPECTRUM_METRICS))
def test_the_zero_matrix_has_no_metric_but_a_rank(name):
    value = SPECTRUM_METRICS[name].fn(torch.zeros(3)).item()
    assert value == 0 if name == "numerical_rank" else math.isnan(value)
    assert bool(top_fractions(torch.zeros(3)).isnan().all())


@given(spectra())
def test_top_fractions_are_sums_of_the_largest_energies(sigma):
    energies = sorted((s * s for s in (sigma / sigma.max()).tolist()), reverse=True)
    expected = [sum(energies[:k]) / sum(energies) for k in range(1, len(energies) + 1)]
    torch.testing.assert_close(top_fractions(sigma), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert float(top_fractions(sigma)[-1]) <= 1


@pytest.mark.parametrize("directions", [9, 11, 18, 20])
def test_no_share_of_the_energy_exceeds_all_of_it(directions):
    assert float(top_fractions(torch.ones(directions))[-1]) == 1  # ninths add up to 1 + 2e-16


def test_rank_tolerance_is_relative_to_the_largest():
    sigma = torch.tensor([1e-3, 2e-6, 0.5e-6], dtype=torch.float64)
    assert [int(numerical_rank(sigma, rtol=rtol)) for rtol in (1e-2, 1e-3, 1e-4)] == [1, 2, 3]


# All energies that are whole numbers with a small total, and two families in which Schur-concavity fails.
WHOLE_ENERGIES = [partition + [0] * (8 - len(partition)) for partition in partitions(8)]
TWO_AMONG_MANY = [[16 + x, 16 - x] + [1] * 30 for x in range(6)]
ABOUT_THE_TOLERANCE = [[10**13, 8 + x, 8 - x] for x in range(8)]


@pytest.mark.parametrize("name", sorted(SPECTRUM_METRICS))
def test_schur_concave_claim(name):
    def value(energies: list[int]) -> float:
        return SPECTRUM_METRICS[name].fn(torch.tensor(energies, dtype=torch.float64).sqrt()).item()

    universe = [WHOLE_ENERGIES, TWO_AMONG_MANY, ABOUT_THE_TOLERANCE]
    pairs = [(a, b) for family in universe for a, b in itertools.permutations(family, 2) if majorises(a, b)]
    assert len(pairs) > 150
    never_lowered = all(value(spread) >= value(concentrated) - 1e-12 for concentrated, spread in pairs)
    assert never_lowered == SPECTRUM_METRICS[name].schur_concave


@pytest.mark.parametrize(
    "metric",
    [
        effective_rank,
        participation_ratio,
        entropy_rank,
        energy_entropy_rank,
        stable_rank,
        nuclear_spectral_ratio,
        numerical_rank,
        top1_fraction,
        top_fractions,
    ],
)
@pytest.mark.parametrize(
    ("sigma", "part"),
    [
        (torch.tensor([1.0, math.nan]), "must be finite, got nan"),
        (torch.tensor([math.inf]), "must be finite, got inf"),
        (torch.tensor([1.0, -0.5]), "must not be negative, got -0.5"),
        (torch.zeros(0), "at least one singular value, got (0,)"),
    ],
)
def test_what_is_not_a_spectrum_is_refused(metric, sigma, part):
    with pytest.raises(ScoregramError) as caught:
        metric(sigma)
    assert part in str(caught.value) and str(caught.value).startswith(metric.__name__)
