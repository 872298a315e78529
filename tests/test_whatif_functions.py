"""Estimators, weights and selections that a user writes, the spectrum, larger groups, and what parts of two tell."""

import math

import numpy as np
import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.reading import what_if
from scoregram.report.replay_table import estimator_table, show_replay
from scoregram.statistics import GroupMoments, group_moments
from tests import test_whatif
from tests.report_cases import write_run
from tests.test_whatif import CHANCES, LENGTHS, REWARDS, SCORES, drawn_groups, expected, run_of, samples, update


def numbers(row):
    return {name: value for name, value in vars(row).items() if name != "estimator"}


def minus_mean(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)


def test_a_function_that_repeats_a_row_gives_its_numbers():
    """All but what the claim of the row decides: `rloo` is known to be unbiased, a function is not."""
    run = run_of(drawn_groups(180, 8), steps=18)

    def leave_one_out(rewards):
        size = rewards.shape[1]
        return torch.stack([rewards[:, i] - (rewards.sum(1) - rewards[:, i]) / (size - 1) for i in range(size)], dim=1)

    mean, own, named, alike = run.what_if(minus_mean, leave_one_out, "mean", "rloo").rows
    assert [one.estimator for one in (mean, own)] == ["minus_mean", "leave_one_out"]
    for one, other in ((mean, named), (own, alike)):
        kept = {"bias", "efficiency", "direction"} if other.estimator == "rloo" else ()
        for name, value in numbers(other).items():
            if name in kept:  # 0 and 1 by definition
                assert getattr(one, name).value == pytest.approx(value.value, abs=1e-9)
                continue
            assert vars(getattr(one, name)) == pytest.approx(vars(value), rel=1e-6, abs=1e-9, nan_ok=True), name


def test_a_function_as_weights_gives_the_numbers_of_the_row():
    run = run_of(drawn_groups(60, 8), steps=12)
    ours = run.what_if("rloo", weights=lambda rewards, lengths, advantages: 1 / lengths.double())
    theirs = run.what_if("rloo", weights="length")
    assert (ours.weights, theirs.weights) == ("weights", "length")
    assert str(ours.rows) == str(theirs.rows)


def test_a_mask_drops_rollouts_as_in_a_loop_over_all_groups():
    """Variance without the longest rollouts of a part, by enumeration of every group."""

    def without_longest(rewards, lengths, advantages):
        return lengths < lengths.amax(dim=1, keepdim=True)

    def masked(chosen):
        rewards = [REWARDS[one] for one in chosen]
        kept = [LENGTHS[one] < max(LENGTHS[other] for other in chosen) for one in chosen]
        mean = sum(rewards) / len(rewards)
        pulls = [(reward - mean) * keep * SCORES[one] for one, reward, keep in zip(chosen, rewards, kept, strict=True)]
        return torch.stack(pulls).sum(0) / len(chosen)

    exact = [(chance, masked(chosen)) for chosen, chance in samples(4)]
    mean = expected(exact)
    variance = float(expected([(chance, one @ one) for chance, one in exact]) - mean @ mean)
    found = run_of(drawn_groups(1200, 8), steps=60).what_if("mean", weights=without_longest)
    (row,) = found.rows
    assert found.weights == "without_longest" and row.variance.low <= variance <= row.variance.high
    assert row.snr.low <= float(mean @ mean) / variance <= row.snr.high


def test_groups_are_selected_by_a_function():
    run = run_of(drawn_groups(60, 8), steps=6)
    few = [group for group in run.groups if group.record.step in (5, 6)]
    kept = run.what_if("rloo", keep=lambda group: group.record.step == 6)
    assert run.last_groups == few and kept.groups == len(few) / 2
    with pytest.raises(ScoregramError, match="a run needs measured groups of four rollouts"):
        run.what_if("rloo", keep=lambda group: False)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda rewards: rewards.mean(1), r"the estimator function must return a tensor \(\d+, 2\), got \(\d+,\)"),
        (lambda rewards: [0.0], "must return a tensor .* got list"),
        (lambda rewards: rewards / 0, "must return finite numbers, got nan or inf"),
        (lambda rewards: rewards - rewards.mean(), "each row of advantages from the same row of rewards, got others"),
    ],
    ids=["shape", "list", "nan", "coupled"],
)
def test_a_function_that_is_no_estimator_is_refused(function, says):
    with pytest.raises(ScoregramError, match=says):
        what_if(run_of(drawn_groups(20, 4)), function)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (lambda rewards, lengths, advantages: rewards[:, :1, None], r"weights must return a tensor .* or \(\d+, 1\)"),
        (lambda rewards, lengths, advantages: lengths * math.inf, "weights must return finite numbers"),
        (lambda rewards, lengths, advantages: 2.0, "weights must return a tensor .*got float"),
    ],
    ids=["shape", "inf", "float"],
)
def test_weights_that_are_no_factors_are_refused(weights, says):
    with pytest.raises(ScoregramError, match=says):
        what_if(run_of(drawn_groups(20, 4)), ("rloo",), weights=weights)


def test_functions_cannot_change_the_run():
    run = run_of(drawn_groups(20, 4))
    before = run.what_if("rloo")

    def spoil(rewards):
        rewards.zero_()
        return torch.ones_like(rewards)

    def spoiled(rewards, lengths, advantages):
        advantages.zero_()
        return torch.ones_like(rewards)

    run.what_if(spoil)
    weighted = run.what_if("rloo", weights=spoiled).rows[0]
    assert str(run.what_if("rloo")) == str(before) and weighted.variance.value == before.rows[0].variance.value


def test_functions_of_one_name_are_told_apart():
    rows = run_of(drawn_groups(20, 4)).what_if(lambda r: r, lambda r: -r, torch.sign, "rloo").rows
    assert [row.estimator for row in rows] == ["function", "function 2", "sign", "rloo"]


# Spectrum


def test_the_spectrum_is_that_of_every_live_group_beside_its_null():
    """By the singular values of the rows `A_i ψ_i`, group by group."""
    chosen = drawn_groups(60, 8)
    (row,) = run_of(chosen, steps=12).what_if("mean").rows
    found: dict[str, list[float]] = {}
    last = [group for place, group in enumerate(chosen) if 1 + place % 12 > 8]
    for group in last:
        rewards = torch.tensor([REWARDS[one] for one in group], dtype=torch.float64)
        rows = (rewards - rewards.mean())[:, None] * SCORES[group]
        if not rows.any():
            continue
        for end, values in (("", torch.linalg.svdvals(rows)), ("_null", rows.norm(dim=1))):
            energy = values.square()
            found.setdefault(f"effective_rank{end}", []).append(float(values.sum() ** 2 / energy.sum()))
            found.setdefault(f"top1_fraction{end}", []).append(float(energy.max() / energy.sum()))
            found.setdefault(f"stable_rank{end}", []).append(float(energy.sum() / energy.max()))
    assert len(found) == 6
    for name, values in found.items():
        assert getattr(row, name).value == pytest.approx(np.mean(values), rel=1e-6), name


# Larger groups


@pytest.fixture
def centred(monkeypatch):
    """Scores with mean 0, as they have on-policy: the components of the noise are derived from this."""
    centred = SCORES - torch.tensor(CHANCES, dtype=torch.float64) @ SCORES
    monkeypatch.setattr(test_whatif, "SCORES", centred)
    return centred


def exact_moments(size):
    exact = [(chance, update("rloo", chosen)) for chosen, chance in samples(size)]
    mean = expected(exact)
    return float(mean @ mean), float(expected([(chance, one @ one) for chance, one in exact]) - mean @ mean)


@pytest.mark.parametrize("size", [3, 5, 6])
def test_larger_groups_have_the_signal_and_noise_of_enumeration(centred, size):
    """From groups of four; five hundred of them."""
    found = run_of(drawn_groups(500, 4), steps=50).what_if("rloo", group_size=size)
    (row,), (signal, noise) = found.rows, exact_moments(size)
    assert found.is_extrapolated and found.group_size == size and found.run_size == 4
    assert row.variance.low <= noise <= row.variance.high and row.snr.low <= signal / noise <= row.snr.high
    assert row.efficiency == row.direction == Estimate(1.0, 1.0, 1.0)
    assert "extrapolated from the components of the noise of rloo" in estimator_table(found, "").caption


def test_signal_and_noise_of_larger_groups_are_unbiased(centred):
    """Over every group of four, weighted with its probability."""
    groups = list(samples(4))
    chances = torch.tensor([chance for _, chance in groups], dtype=torch.float64)
    rewards = torch.tensor([[REWARDS[one] for one in chosen] for chosen, _ in groups], dtype=torch.float64)
    grams = torch.stack([centred[chosen] @ centred[chosen].T for chosen, _ in groups])
    found: GroupMoments = group_moments(grams, rewards)
    for size in (5, 6):
        signal, noise = exact_moments(size)
        pair = found.variance_fisher_trace + found.gradient_squared
        assert float(found.gradient_squared @ chances) == pytest.approx(signal)
        assert float((found.oracle_trace / size + pair / (size * (size - 1))) @ chances) == pytest.approx(noise)


def test_others_are_refused_at_larger_sizes_and_the_way_out_is_named():
    run = run_of(drawn_groups(40, 8))
    for names, weights in (((), "uniform"), (("rloo", "grpo"), "uniform"), (("rloo",), "length")):
        with pytest.raises(ScoregramError, match=r"rloo alone has them at any size.*noise\(\) has its best size"):
            what_if(run, names, group_size=16, weights=weights)


# What parts of two can tell


def test_parts_of_two_do_not_tell_the_efficiency_of_what_they_cannot_tell_from_rloo():
    """With one other rollout, the weighted mean of the others is that rollout, whatever its weight."""
    rows = {row.estimator: row for row in run_of(drawn_groups(400, 4), steps=40).what_if().rows}
    assert rows["rloo"].snr.low > 0
    for name in ("optimal-loo", "opo-loo"):
        assert math.isnan(rows[name].efficiency.value) and rows[name].snr.value == pytest.approx(rows["rloo"].snr.value)
    assert rows["mean"].efficiency.value == pytest.approx(1.0)  # a multiple of rloo in groups of any size
    assert not math.isnan(rows["reinforce"].efficiency.value)
    large = {row.estimator: row for row in run_of(drawn_groups(400, 8), steps=40).what_if().rows}
    assert not math.isnan(large["optimal-loo"].efficiency.value)


def test_the_noise_of_a_step_stands_above_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    known = write_run(tmp_path / "run", steps=15, size=8)
    assert known
    assert show_replay(tmp_path / "run", ("rloo",)) == 0
    out = capsys.readouterr().out
    assert out.startswith("The update of a step with rloo: signal to noise") and max(map(len, out.splitlines())) <= 80


def test_a_single_group_is_replayed_without_intervals():
    (row,) = what_if(run_of(drawn_groups(1, 8)), ("rloo",)).rows
    assert math.isnan(row.snr.low) and math.isnan(row.variance.low) and not math.isnan(row.variance.value)
