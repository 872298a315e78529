"""Running means, energy shares and errors by group size, against direct computations."""

import math
import statistics

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from scoregram.bootstrap import NORMAL_FROM, difference, mean_estimate, mean_of_many, t_mean
from scoregram.exhibits import Estimate
from scoregram.reading import (
    RunReading,
    complement,
    geometric_curve,
    group_curve,
    mse_by_group_size,
    read_run,
    running_curve,
    scalar_curve,
    spectrum_energies,
)
from scoregram.reading.curves import MOST_POINTS, SHORT, WINDOWS
from scoregram.runs import open_run
from scoregram.statistics import noise_components
from tests.report_cases import write_run

NAN = math.nan


def test_a_short_curve_is_not_smoothed():
    curve = running_curve(range(SHORT), [1.0, NAN, 3.0] * (SHORT // 3))
    assert curve.mean[0] == 1 and math.isnan(curve.mean[1]) and all(map(math.isnan, curve.low))
    assert not curve.is_smoothed and curve and not running_curve([1], [NAN])


def test_the_points_of_a_curve_are_its_known_means():
    short = running_curve([0, 20, 40, 60], [0.1, NAN, 0.3, NAN])
    assert short.points == ((0.0, 0.1), (40.0, 0.3)) and running_curve([1], [NAN]).points == ()
    long = running_curve(range(60), [0.0, 1.0] * 30)
    assert long.is_smoothed and long.points == tuple(zip(long.steps, long.mean, strict=True))


def test_the_running_mean_and_its_band_are_those_of_the_window():
    rng = np.random.default_rng(0)
    values = (1e6 + rng.normal(size=90)).tolist()  # far from zero: sums of squares would cancel
    values[40:44] = [NAN] * 4
    curve = running_curve(range(90), values)
    half = round(90 / WINDOWS / 2)
    assert curve.window == 2 * half + 1
    for place in range(90):
        here = [v for v in values[max(0, place - half) : place + half + 1] if not math.isnan(v)]
        mean, error = statistics.fmean(here), statistics.stdev(here) / math.sqrt(len(here))
        width = student.ppf(0.975, len(here) - 1) * error
        assert curve.mean[place] == pytest.approx(mean, rel=1e-12)
        assert curve.high[place] - mean == pytest.approx(width, rel=1e-4)
        assert mean - curve.low[place] == pytest.approx(width, rel=1e-4)


def test_a_long_curve_is_shown_at_fewer_steps_and_uses_all():
    count = 2 * MOST_POINTS + 1
    values = [float(place % 2) for place in range(count)]
    curve = running_curve(range(count), values)
    assert len(curve.steps) <= MOST_POINTS and curve.steps[1] - curve.steps[0] == 3
    assert curve.mean[50] == pytest.approx(0.5, abs=0.05)


def test_the_complement_turns_its_band_over():
    curve = running_curve(range(30), [float(place % 3 == 0) for place in range(30)])
    other = complement(curve)
    assert other.mean[9] == pytest.approx(1 - curve.mean[9]) and other.low[9] == pytest.approx(1 - curve.high[9])


def test_group_curves_are_means_and_ratios_of_sums(tmp_path):
    write_run(tmp_path / "run", steps=4)
    groups = read_run(open_run(tmp_path / "run")).groups

    def norm(group):
        return group.record.statistics["score_norm"]

    def deviation(group):
        return group.record.statistics["reward_std"]

    means, ratios = group_curve(groups, norm), group_curve(groups, norm, deviation)
    for place, step in enumerate(means.steps):
        here = [group for group in groups if group.record.step == step]
        assert means.raw[place] == pytest.approx(statistics.fmean(map(norm, here)))
        assert ratios.raw[place] == pytest.approx(sum(map(norm, here)) / sum(map(deviation, here)))


def test_energies_are_those_of_the_rows_of_each_group(tmp_path):
    known = write_run(tmp_path / "run", steps=3)
    run = read_run(open_run(tmp_path / "run"))
    found = spectrum_energies([group for group in run.groups if group.has_spectrum])
    for place, step in enumerate(found.steps):
        gram, rewards = known[int(step)]
        shares = []
        for prompt, row in enumerate(rewards):
            if len(row.unique()) > 1:
                here = slice(4 * prompt, 4 * prompt + 4)
                a = row - row.mean()
                energies = torch.linalg.eigvalsh(a[:, None] * gram[here, here] * a).flip(0).clamp(min=0)
                shares.append(energies / energies.sum())
        expected = torch.stack(shares).mean(dim=0)
        np.testing.assert_allclose([row[place] for row in found.shares], expected, atol=1e-9)
    assert spectrum_energies([]).steps == ()


def test_the_error_by_group_size_is_relative_to_the_one_used(tmp_path):
    known = write_run(tmp_path / "run", steps=2)
    run = read_run(open_run(tmp_path / "run"))
    curve = mse_by_group_size(run)
    last = [noise_components(*known[step]) for step in run.last_third]
    c1, c2, c3 = (
        statistics.fmean(getattr(one, name) for one in last)
        for name in ("between_prompts", "within_prompt", "group_baseline")
    )

    def error(size: int) -> float:  # of N rollouts in groups of R: (R c1 + c2 + c3 / (R - 1)) / N, with N = 1
        return size * c1 + c2 + c3 / (size - 1)

    if curve is None:
        assert not error(4) > 0
        return
    for size, found in zip(curve.sizes, curve.errors, strict=True):
        assert found == pytest.approx(error(int(size)) / error(4))


def test_t_means_and_differences():
    values = [1.0, 2.0, 4.0, NAN]
    found = t_mean(values)
    half = student.ppf(0.975, 2) * statistics.stdev(values[:3]) / math.sqrt(3)
    assert (found.value, found.high) == (pytest.approx(7 / 3), pytest.approx(7 / 3 + half, rel=1e-5))
    assert t_mean([5.0]).value == 5 and math.isnan(t_mean([5.0]).low) and math.isnan(t_mean([]).value)
    gap = difference(Estimate(3.0, 0.0, 6.0), Estimate(1.0, -3.0, 5.0))
    assert gap == Estimate(2.0, -3.0, 7.0)  # 3 and 4 give 5
    assert math.isnan(difference(Estimate(1.0), Estimate(1.0, 0.0, 2.0)).low)
    assert math.isnan(difference(Estimate(math.inf, 1.0, math.inf), Estimate(1.0, 0.0, 2.0)).value)


def test_the_mean_of_many_values_has_the_interval_of_the_bootstrap():
    values = np.random.default_rng(3).exponential(size=NORMAL_FROM + 1)
    fast, slow = mean_of_many([*values, NAN]), mean_estimate(values)
    assert fast.value == pytest.approx(slow.value)
    for end in ("low", "high"):  # the ends of 1,000 resamples have an error of about 5 % of the half width
        assert getattr(fast, end) == pytest.approx(getattr(slow, end), abs=0.15 * (slow.high - slow.value))
    few = values[:NORMAL_FROM]
    assert mean_of_many(few) == mean_estimate(few) and math.isnan(mean_of_many([]).value)


def test_a_geometric_curve_is_that_of_the_logarithm_and_stays_positive():
    norms = [1.0, 100.0, 0.01, 1.0, 1.0, 50.0] * 5
    run = RunReading({}, (), [{"step": step, "grad_norm": norm} for step, norm in enumerate(norms)], [])
    found, plain = geometric_curve(run, "grad_norm"), scalar_curve(run, "grad_norm")
    assert found.raw == pytest.approx(plain.raw) and found.window == plain.window == 3
    for place in range(1, len(norms) - 1):
        assert found.mean[place] == pytest.approx(math.prod(norms[place - 1 : place + 2]) ** (1 / 3))
    assert min(found.low) > 0 > min(plain.low)
    zero = RunReading({}, (), [{"step": step, "grad_norm": 0.0 if step == 2 else 1.0} for step in range(4)], [])
    assert math.isnan(geometric_curve(zero, "grad_norm").raw[2])
