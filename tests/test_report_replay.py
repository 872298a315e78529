"""The table of other estimators: the run's own is marked, empty columns are left out, every name has a word."""

import math
from dataclasses import replace

import pytest

from scoregram.exhibits import Estimate
from scoregram.reading import Replay, ReplayedRun, read_run
from scoregram.reading.replay import USUAL
from scoregram.report import replay_table
from scoregram.report.replay_table import ESTIMATOR_WORDS, OWN_MARK, what_if_table, wrong_over_right_energy
from scoregram.runs import open_run
from tests.report_cases import write_run

NAN = Estimate(math.nan)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder)
    return read_run(open_run(folder))


def row(name: str, snr: Estimate, efficiency: Estimate = NAN) -> Replay:
    others = dict.fromkeys(("variance", "bias", "taken", "effective_rank", "effective_rank_null"), NAN)
    return Replay(estimator=name, snr=snr, efficiency=efficiency, direction=efficiency, **others)


def table(run, monkeypatch, *rows: Replay, config=None):
    made = ReplayedRun(groups=40, run_size=8, group_size=4, weights="uniform", rows=rows)
    monkeypatch.setattr(replay_table, "what_if", lambda *_, **__: made)
    run = run if config is None else replace(run, config=config)
    (found,) = what_if_table(run)
    return found


def test_every_usual_estimator_has_a_word():
    assert set(USUAL) <= set(ESTIMATOR_WORDS) and all(ESTIMATOR_WORDS.values())


def test_the_estimator_of_the_run_is_marked_and_columns_without_numbers_are_left_out(run, monkeypatch):
    rows = row("rloo", Estimate(0.2, -0.1, 0.5)), row("grpo", Estimate(0.1, -0.1, 0.3))
    found = table(run, monkeypatch, *rows, config={"method": "grpo"})
    assert found.columns == ("estimator", "advantage", "signal to noise")
    assert [one[0] for one in found.rows] == ["rloo", f"grpo{OWN_MARK}"]
    assert "Efficiency and direction are left out" in found.caption
    assert "from 4 rollouts: each group of 8 is compared as two halves" in found.caption
    resolved = table(run, monkeypatch, row("rloo", Estimate(0.2, 0.1, 0.5), Estimate(1.0, 1.0, 1.0)), rows[1])
    assert resolved.columns[-2:] == ("efficiency", "direction") and "–: the interval" in resolved.caption


def test_an_estimator_that_is_not_among_the_usual_ones_gets_a_row(run):
    config = {"integration": {"name": "trl"}, "arguments": {"scale_rewards": "group"}}
    (found,) = what_if_table(replace(run, config=config))
    names = [one[0] for one in found.rows]
    assert f"grpo-trl{OWN_MARK}" in names and "grpo" not in names


def test_reinforce_above_the_estimator_of_the_run_is_explained(run, monkeypatch):
    above = table(run, monkeypatch, row("reinforce", Estimate(4.0, 1.4, 12.0)), row("rloo", Estimate(0.2, 0.0, 0.4)))
    assert "reinforce is above rloo on these groups" in above.caption
    overlapping = table(
        run, monkeypatch, row("reinforce", Estimate(0.4, 0.1, 1.0)), row("rloo", Estimate(0.2, 0.0, 0.4))
    )
    assert "reinforce" not in overlapping.caption
    single = table(run, monkeypatch, row("reinforce", Estimate(0.4)), row("rloo", Estimate(0.2)))
    assert "too few for intervals" in single.caption and "reinforce" not in single.caption


def test_the_energy_of_wrong_rollouts_over_that_of_right_ones(run):
    energies: dict[float, list[float]] = {0.0: [], 1.0: []}
    for group in run.last_measured:
        for place, reward in enumerate(group.record.rewards.tolist()):
            energies[reward].append(float(group.record.gram[place, place]))
    wrong, right = (sum(energies[kind]) / len(energies[kind]) for kind in (0.0, 1.0))
    assert wrong_over_right_energy(run) == pytest.approx(wrong / right)
