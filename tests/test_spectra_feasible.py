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
    Interval,
    concentrated_energies,
    effective_rank,
    effective_rank_bounds,
    feasible_interval,
    feasible_intervals,
    spread_energies,
    top1_fraction,
)
from tests.spectra_cases import majorises, partitions, spectra


@st.composite
def top1_and_rank(draw) -> tuple[float, int]:
    """`f` in `[1/m, 1]`, the ends and whole `1/f` among them."""
    m = draw(st.integers(1, 9))
    whole = st.integers(1, m).map(lambda n: 1 / n)
    return draw(st.one_of(whole, st.floats(1 / m, 1))), m


def random_feasible_energies(f: float, m: int, *, count: int, seed: int) -> torch.Tensor:
    """`(count, m)`. Energies with `e_1 = f` the largest: random mixtures of random vertices of the feasible set."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, m - 1, generator=generator, dtype=torch.float64)
    sharpness = 10 ** (4 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 2)
    rest = noise.pow(sharpness)
    rest = rest / rest.sum(-1, keepdim=True) * (1 - f)
    for _ in range(60):  # pour what stands above f over the entries below it, in proportion to their room
        over = (rest - f).clamp(min=0).sum(-1, keepdim=True)
        room = (f - rest).clamp(min=0)
        rest = rest.clamp(max=f) + room / room.sum(-1, keepdim=True).clamp(min=1e-300) * over
    return torch.cat([torch.full((count, 1), f, dtype=torch.float64), rest], dim=-1)


@given(top1_and_rank())
def test_closed_forms(case):
    f, m = case
    n = math.floor(1 / f + 1e-12)
    left = max(0.0, 1 - n * f) if abs(1 - n * f) > 1e-14 else 0.0
    flat = (1 - f) / (m - 1) if m > 1 else 0.0
    expected = {
        "effective_rank": ((n * f**0.5 + left**0.5) ** 2, (f**0.5 + ((m - 1) * (1 - f)) ** 0.5) ** 2),
        "participation_ratio": (1 / (n * f**2 + left**2), 1 / (f**2 + (m - 1) * flat**2)),
        "stable_rank": (1 / f, 1 / f),
        "nuclear_spectral_ratio": (n + (left / f) ** 0.5, 1 + (m - 1) * (flat / f) ** 0.5),
        "top1_fraction": (f, f),
    }
    for name, (low, high) in expected.items():
        interval = feasible_interval(name, f, m)
        assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-6), name


@pytest.mark.parametrize(("f", "m"), [(0.9, 2), (0.5, 4), (0.35, 3), (0.3, 8), (1 / 3, 6), (0.7, 5), (0.15, 20)])
def test_random_search_never_leaves_the_interval_and_the_ends_are_attained(f, m):
    energies = random_feasible_energies(f, m, count=4_000, seed=m)
    torch.testing.assert_close(energies.sum(-1), torch.ones(len(energies)).double(), rtol=1e-9, atol=0)
    assert float(energies.max()) <= f * (1 + 1e-9)
    ends = concentrated_energies(f, m), spread_energies(f, m)
    for name, interval in feasible_intervals(f, m).items():
        found = SPECTRUM_METRICS[name].fn(energies.sqrt())
        assert interval.contains(float(found.min()), atol=1e-7), name
        assert interval.contains(float(found.max()), atol=1e-7), name
        attained = sorted(SPECTRUM_METRICS[name].fn(e.sqrt()).item() for e in ends)
        assert attained == pytest.approx([interval.low, interval.high], rel=1e-9), name


@pytest.mark.parametrize("total", [6, 9])
def test_every_spectrum_of_whole_energies_lies_inside(total):
    for parts in partitions(total):
        sigma = torch.tensor(parts, dtype=torch.float64).sqrt()
        for m in (len(parts), len(parts) + 2):
            intervals = feasible_intervals(parts[0] / total, m)
            for name, metric in SPECTRUM_METRICS.items():
                assert intervals[name].contains(metric.fn(sigma).item(), atol=1e-7), (name, parts)


@given(spectra())
def test_every_spectrum_lies_inside_its_own_interval(sigma):
    f = float(top1_fraction(sigma))
    for name, interval in feasible_intervals(f, len(sigma)).items():
        assert interval.contains(SPECTRUM_METRICS[name].fn(sigma).item()), name


@given(top1_and_rank())
def test_extremal_energies_are_feasible(case):
    f, m = case
    for energies in (concentrated_energies(f, m), spread_energies(f, m)):
        assert len(energies) == m
        assert float(energies.sum()) == pytest.approx(1, rel=1e-12)
        assert float(energies.max()) == float(energies[0]) == f
        assert float(energies.min()) >= 0


@pytest.mark.parametrize(("f", "m"), [(3, 5), (4, 4), (5, 3), (12, 2)])
def test_one_extreme_majorises_all_and_the_other_is_majorised_by_all(f, m):
    total = 12
    feasible = [p + [0] * (m - len(p)) for p in partitions(total) if p[0] == f and len(p) <= m]
    extremes = [
        [round(total * e * 60) for e in of(f / total, m).tolist()] for of in (concentrated_energies, spread_energies)
    ]
    for energies in feasible:
        scaled = [60 * e for e in energies]
        assert majorises(extremes[0], scaled) and majorises(scaled, extremes[1])


@given(st.floats(0.5, 1))
def test_two_rows_leave_no_freedom(f):
    for name, interval in feasible_intervals(f, 2).items():
        assert interval.low == pytest.approx(interval.high, rel=1e-6), name


@given(st.floats(0.5, 0.8), st.integers(2, 64))
def test_half_the_energy_in_one_direction_forces_effective_rank_near_two(f, m):
    low = feasible_interval("effective_rank", f, m).low
    assert low == pytest.approx(1 + 2 * math.sqrt(f * (1 - f)), rel=1e-9)
    assert low >= 1.8 - 1e-12


@pytest.mark.parametrize("n", range(1, 50))
def test_whole_inverse_leaves_no_spurious_remainder(n):
    for f in (1 / n, math.nextafter(1 / n, 0), math.nextafter(1 / n, 1)):
        if f <= 1:
            assert feasible_interval("effective_rank", f, n + 1).low == pytest.approx(n, rel=1e-12)
            assert feasible_interval("numerical_rank", f, n + 1).low == n


def test_rank_below_the_tolerance_is_not_seen():
    share = 1 - 0.5 * RANK_RTOL**2
    sigma = torch.tensor([share, 1 - share], dtype=torch.float64).sqrt()
    found = SPECTRUM_METRICS["numerical_rank"].fn(sigma).item()
    assert feasible_interval("numerical_rank", share, 2) == Interval(1.0, 1.0)
    assert found == 1
    assert feasible_interval("numerical_rank", 1 - 10 * RANK_RTOL**2, 2).high == 2.0
    assert feasible_interval("numerical_rank", 1, 5) == Interval(1.0, 1.0)


@pytest.mark.parametrize(
    ("energies", "end"),
    [((1, 1, 0.75e-12, 0.75e-12), "low"), ((1, 1.2e-12, 0.3e-12), "high"), ((1, 1.2e-12, 1.2e-12), "high")],
)
def test_about_the_tolerance_other_spectra_have_the_extreme_rank(energies, end):
    sigma = torch.tensor(energies, dtype=torch.float64).sqrt()
    interval = feasible_interval("numerical_rank", 1 / sum(energies), len(energies))
    assert getattr(interval, end) == SPECTRUM_METRICS["numerical_rank"].fn(sigma).item()


def test_rounding_at_the_ends_is_forgiven():
    assert feasible_interval("effective_rank", 0.25 * (1 - 1e-12), 4).high == pytest.approx(4)
    assert feasible_interval("effective_rank", 1 + 1e-12, 4) == feasible_interval("effective_rank", 1, 4)


@pytest.mark.parametrize(
    ("f", "m", "part"),
    [
        (0.24, 4, "must lie in [0.25, 1], got 0.24"),
        (1.01, 4, "must lie in [0.25, 1], got 1.01"),
        (math.nan, 4, "got nan"),
        (0.5, 0, "largest rank must be at least 1, got 0"),
    ],
)
def test_impossible_pairs_are_refused(f, m, part):
    calls = [lambda f, m: feasible_interval("effective_rank", f, m), feasible_intervals]
    for call in itertools.chain(calls, [concentrated_energies, spread_energies]):
        with pytest.raises(ScoregramError) as caught:
            call(f, m)
        assert part in str(caught.value)


def test_unknown_metric_lists_the_choices():
    with pytest.raises(ScoregramError, match=r"one of effective_rank, .*got 'erank'"):
        feasible_interval("erank", 0.5, 2)


def test_interval_of_a_measured_effective_rank_is_not_trivial():
    sigma = torch.tensor([2.0, 1.0, 1.0, 0.5])
    interval = feasible_interval("effective_rank", float(top1_fraction(sigma)), 4)
    assert interval.low + 0.1 < float(effective_rank(sigma)) < interval.high
    assert not interval.contains(interval.low - 1e-3) and not interval.contains(interval.high + 1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_bounds_of_the_rank_are_the_ranks_of_the_two_extremes(rows):
    for place in range(41):
        top1 = 1 / rows + (1 - 1 / rows) * place / 40
        extremes = torch.stack([concentrated_energies(top1, rows), spread_energies(top1, rows)])
        assert effective_rank_bounds(top1, rows) == pytest.approx(effective_rank(extremes.sqrt()).tolist(), rel=1e-9)
    with pytest.raises(ScoregramError, match="effective_rank_bounds"):
        effective_rank_bounds(1.5, rows)
