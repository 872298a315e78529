"""`results/false-findings/replay-coverage.json`: enumerated truths, the record simulated again, and its tables."""

import json
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.test_results_allocation import module

FOLDER = Path(__file__).parent.parent / "results" / "false-findings"
TOLERANCE = 0.03
"""By how much the share of intervals that hold the truth may lie below 95 %, pooled over laws and estimators."""
LARGER_TOLERANCE = 0.04
"""The same for `rloo` in groups of twice the run's size."""


@pytest.fixture
def coverage(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return module("false-findings", "replay_coverage")


@pytest.fixture
def worlds(coverage) -> ModuleType:
    return module("false-findings", "replay_worlds")


def advantages_by_hand(name, rewards, energies, lengths):
    """One group, one rollout at a time."""
    found = []
    for place, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        others = [other for other in range(len(rewards)) if other != place]
        weights = [energies[other] if name == "optimal-loo" else 1.0 for other in others]
        mean = sum(w * rewards[other] for w, other in zip(weights, others, strict=True)) / sum(weights)
        found.append(reward if name == "reinforce" else (reward - mean) / (length if name == "length" else 1))
    return found


@pytest.mark.parametrize("name", ["rloo", "reinforce", "optimal-loo", "length"])
@pytest.mark.parametrize("share", [False, True])
def test_truths_are_sums_over_all_groups(worlds, name, share):
    """Every ordered group of two, prompt and kind of step; `ε` of different rollouts are orthogonal on average."""
    law = worlds.LAWS["heavy tail"]
    steps = [(0, 1.0)] if not share else [(kind, np.exp(end * worlds.SCALE)) for kind in (1, 2) for end in (-1, 1)]
    signal = squared = base = across = 0.0
    for kind, factor in steps:
        tilt = {0: 0.0, 1: worlds.TILT, 2: -worlds.TILT}[kind]
        total = sum(np.exp(tilt * rate) for rate in worlds.RATES)
        for place, rate in enumerate(worlds.RATES):
            weight = np.exp(tilt * rate) / total / len(steps) * factor**2
            chances, scores = law.chances[place], law.scores[place]
            norms = (scores**2).sum(1) + law.norms**2
            mean, reference, square = np.zeros(worlds.SHARED), np.zeros(worlds.SHARED), 0.0
            for pair in product(range(worlds.ACTIONS), repeat=2):
                chance = np.prod([chances[one] for one in pair])
                given = (
                    [law.rewards[one] for one in pair],
                    [norms[one] for one in pair],
                    [worlds.LENGTHS[one] for one in pair],
                )
                ours, theirs = (advantages_by_hand(which, *given) for which in (name, "rloo"))
                updated, expected = (
                    np.sum([a * scores[one] for a, one in zip(some, pair, strict=True)], axis=0) / 2
                    for some in (ours, theirs)
                )
                mean, reference = mean + chance * updated, reference + chance * expected
                noise = sum((a / 2) ** 2 * law.norms[one] ** 2 for a, one in zip(ours, pair, strict=True))
                square += chance * (updated @ updated + noise)
            signal, squared = signal + weight * (mean @ mean), squared + weight * square
            base, across = base + weight * (reference @ reference), across + weight * (mean @ reference)
    key = ("rloo", "length") if name == "length" else (name, "uniform")
    found = worlds.truths("heavy tail", *key, 4, worlds.kinds_and_factors(share=share))
    assert found["variance"] == pytest.approx(squared - signal)
    assert found["snr"] == pytest.approx(signal / (squared - signal))
    assert found["direction"] == pytest.approx(across / np.sqrt(signal * base))
    assert found["bias"] == pytest.approx((signal - 2 * across + base) / base, abs=1e-12)


@pytest.mark.slow  # runs in `make test-results`
@pytest.mark.parametrize("size", [4, 8])
def test_drawn_groups_have_the_truths(coverage, worlds, size):
    """A long run of steps that differ, within four standard errors; also what whole groups have."""
    cell = coverage.ReplayCell("heavy tail", size, True)
    rng = np.random.default_rng(0)
    steps = worlds.Steps.drawn(rng, 1500, share=True)
    rows = [("optimal-loo", "uniform"), ("rloo", "length")]
    numbers = coverage.bank(cell, steps, 4, rows, rng)
    for name, weights in rows:
        found = coverage.replayed_row(name, name, numbers[name, weights], weights)
        truth = worlds.truths("heavy tail", name, weights, size, worlds.kinds_and_factors(share=True))
        for quantity in ("variance", "snr", "taken", "effective_rank_null", "top1_fraction_null", "stable_rank_null"):
            estimate = getattr(found, quantity)
            error = (estimate.high - estimate.low) / (2 * 1.96)
            assert abs(estimate.value - truth[quantity]) < 4 * error, (name, quantity)


def test_a_part_of_a_bank_has_the_numbers_of_its_groups(coverage, worlds):
    """Slices of the bank against a replay of their groups, the coupled estimator among them."""
    steps = worlds.Steps.drawn(np.random.default_rng(1), 12, share=True)
    groups = worlds.draw_groups(np.random.default_rng(2), worlds.LAWS["graded"], steps, 4, 4)
    names = ["grpo", coverage.COUPLED]
    whole, part = coverage.group_numbers(groups, names, 2), coverage.group_numbers(groups[20:44], names, 2)
    for one, other in zip(whole, part, strict=True):
        sliced = one.part(slice(20, 44))
        for name, values in other.columns().items():
            np.testing.assert_allclose(sliced.columns()[name], values, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(sliced.steps, other.steps)


@pytest.mark.slow  # runs in `make test-results`
def test_a_small_part_of_the_record_can_be_simulated_again(coverage):
    """The runs of a single step and of four steps of one cell."""
    rows = module("false-findings", "summarise").stored_replays()
    cell = coverage.ReplayCell("graded", 4, False)
    stored = [list(row.values()) for row in rows if (row["law"], row["size"], row["share"]) == ("graded", 4, False)]
    long = coverage.long_run(cell)
    for shape in ((1, 40), (4, 16)):
        steps = coverage.steps_of(shape, 1600)
        drawn = [*coverage.covered(cell, shape, steps, long), *coverage.covered_larger(cell, shape, steps)]
        assert drawn == [row for row in stored if (row[3], row[4]) == shape], shape


def test_the_standard_errors_of_simulated_truths_are_small(coverage):
    """Against the half width of an interval of 40 steps, which shrinks with the root of the steps."""
    record = json.loads((FOLDER / "replay-coverage.json").read_text(encoding="utf-8"))
    assert len(record["long"]) == len(coverage.CELLS)
    assert np.sqrt(40 / coverage.LONG_STEPS) < 0.15


def test_the_tables_follow_from_the_record_and_coverage_is_within_the_tolerance(coverage):
    tables = module("false-findings", "summarise")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in ("replays", "replays-shared", "replays-worst"):
        assert f"<!-- {name}: begin -->\n{tables.TABLES[name]()}\n<!-- {name}: end -->" in page
    rows = tables.stored_replays()
    for steps, prompts in coverage.SHAPES:
        for quantity, share in product([*coverage.QUANTITIES, *coverage.LARGER.values()], [False, True]):
            key = quantity, share, steps, prompts
            some = [row for row in rows if (row["quantity"], row["share"], row["steps"], row["prompts"]) == key]
            tolerance = LARGER_TOLERANCE if quantity in coverage.LARGER.values() else TOLERANCE
            assert tables.held_share(some)[0] >= 0.95 - tolerance, key
