"""The table of other estimators: the run's own is marked, empty columns are left out, every name has a word."""

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from scoregram.checks import ScoregramError
from scoregram.cli import WhatIf, parsed_command
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import Replay, ReplayedRun, StoredGroup, read_run, wrong_over_right_energy
from scoregram.reading.replay import USUAL
from scoregram.report import replay_table, show_table
from scoregram.report.replay_table import (
    DIRECTION_LIMIT,
    ESTIMATOR_WORDS,
    OWN_MARK,
    estimator_table,
    left_out_text,
    show_replay,
    what_if_table,
)
from scoregram.runs import GroupRecord, open_run
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
    assert found.columns == ("estimator", "advantage", "signal to noise of one prompt")
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
    assert wrong_over_right_energy(run.last_measured) == pytest.approx(wrong / right)


def group_of(rewards: list[float], energies: list[float]) -> StoredGroup:
    size = len(rewards)
    return StoredGroup(
        GroupRecord(
            step=1, prompt_id="p", rewards=torch.tensor(rewards).double(), advantages=torch.zeros(size).double(),
            lengths=torch.ones(size, dtype=torch.long), gram=torch.diag(torch.tensor(energies)).double(),
        )
    )  # fmt: skip


def test_the_energies_of_wrong_and_right_rollouts_are_pooled_over_groups():
    first, second = group_of([0, 1, 1], [8.0, 1.0, 3.0]), group_of([0, math.nan, 0], [4.0, 99.0, 6.0])
    assert wrong_over_right_energy([first, second]) == 6 / 2  # a rollout without a reward is neither
    without = replace(second.record, gram=None)
    assert wrong_over_right_energy([first, StoredGroup(without)]) == 8 / 2


@pytest.mark.parametrize(
    "rewards", [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0, 0.5], [0.0, math.nan]], ids=["wrong", "right", "graded", "missing"]
)
def test_without_both_kinds_or_with_graded_rewards_there_is_no_ratio_of_energies(rewards):
    assert math.isnan(wrong_over_right_energy([group_of(rewards, [1.0, 2.0, 3.0][: len(rewards)])]))
    assert math.isnan(wrong_over_right_energy([]))


def test_a_direction_above_1_is_shown_as_1_on_the_page_and_in_the_terminal(run, monkeypatch):
    above = Estimate(1.03, 0.96, 1.41)
    rows = row("rloo", Estimate(0.2, 0.1, 0.5), Estimate(1.0, 1.0, 1.0)), row("opo", Estimate(0.3, 0.1, 0.6), above)
    made = ReplayedRun(groups=40, run_size=8, group_size=4, weights="uniform", rows=rows)
    for found in (table(run, monkeypatch, *rows), estimator_table(made, "")):
        shown = {one[0]: one[found.columns.index("direction")] for one in found.rows}
        assert shown["opo"] == Estimate(1.0, 0.96, 1.0) and DIRECTION_LIMIT in found.caption


def test_the_terminal_has_every_number_and_the_largest_signal_first():
    rows = row("rloo", NAN), row("mean", Estimate(0.1)), row("opo", Estimate(0.3, 0.1, 0.6), Estimate(2.0))
    made = ReplayedRun(groups=40, run_size=8, group_size=3, weights="length", rows=rows)
    found = estimator_table(made, " (approximate)")
    assert found.title == "40 groups of 8, in parts of 3, weights length (approximate)"
    assert [one[0] for one in found.rows] == ["opo", "mean", "rloo"]
    assert found.rows[0][found.columns.index("signal / noise of one prompt")] == Estimate(0.3, 0.1, 0.6)
    assert found.rows[0][found.columns.index("efficiency, rloo = 1")] == Estimate(2.0)


def usual_rows() -> tuple[Replay, ...]:
    """Every usual estimator with numbers of the widths that runs have; nothing but rank and variance is resolved."""
    wide, known = Estimate(-0.0177, -0.0424, 0.0031), Estimate(872.0, 799.0, 953.0)
    numbers = {"variance": known, "bias": NAN, "snr": wide, "efficiency": NAN, "direction": NAN}
    ranks = {"effective_rank": Estimate(6.66, 6.45, 6.87), "effective_rank_null": Estimate(6.89, 6.67, 7.1)}
    return tuple(Replay(estimator=name, taken=Estimate(0.996, 0.995, 0.998), **numbers, **ranks) for name in USUAL)


def test_at_80_columns_names_and_numbers_are_whole_and_an_estimator_has_one_row_in_each_part():
    console = Console(file=io.StringIO(), width=80)
    found = ReplayedRun(groups=120, run_size=8, group_size=4, weights="uniform", rows=usual_rows())
    show_table(estimator_table(found, ""), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    firsts = [line.split()[0] for line in out.splitlines() if line.split()]
    assert all(firsts.count(name) == 3 for name in USUAL)
    assert "872" in out and out.count("[-0.0424, 0.0031]") == out.count("[0.995, 0.998]") == len(USUAL)
    assert all(word in out for word in ("variance", "bias", "signal / noise", "efficiency,", "direction", "as taken"))


def test_piped_output_fits_80_columns(tmp_path):
    write_run(tmp_path / "run", steps=12, size=8)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "scoregram", "whatif", str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, stdin=subprocess.DEVNULL
    )
    lines = done.stdout.splitlines()
    assert lines and max(map(len, lines)) <= 80 and "…" not in done.stdout
    replayable = [name for name in USUAL if sum(line.split()[:1] == [name] for line in lines)]
    assert sorted(replayable) == sorted(USUAL)


def test_the_command_shows_the_reference_beside_itself_as_text_and_as_json(tmp_path, capsys):
    write_run(tmp_path / "run", steps=12, size=8)  # 12 groups of noise resolve no signal
    show_replay(tmp_path / "run", ("rloo", "grpo"), as_json=True)
    rows = {row["estimator"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["rloo"]["efficiency"]["value"] == rows["rloo"]["direction"]["value"] == 1
    assert rows["grpo"]["efficiency"]["value"] is rows["grpo"]["direction"]["value"] is None
    show_replay(tmp_path / "run", ("rloo", "grpo"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum("1.00" in line for line in lines if line[:1] == ["rloo"]) == 2


def test_the_caption_says_that_the_reference_is_1_by_definition_without_weights():
    found = ReplayedRun(groups=40, run_size=8, group_size=4, weights="uniform", rows=usual_rows())
    assert "of rloo are 1 by definition" in estimator_table(found, "").caption
    weighted = replace(found, weights="length")  # its rloo is not the reference
    assert "by definition" not in estimator_table(weighted, "").caption


def test_a_single_estimator_may_be_asked_for_in_the_singular():
    asked = [parsed_command(["whatif", "run", option, "rloo"]) for option in ("--estimator", "--estimators")]
    assert asked[0] == asked[1] == WhatIf(Path("run"), estimators=("rloo",))


# What the table leaves out


def test_a_number_whose_interval_has_no_ends_is_a_dash(run, monkeypatch):
    endless, half_open = Estimate(3.3, -math.inf, math.inf), Estimate(3.3, 1.2, math.inf)
    rows = [row(name, Estimate(0.2, 0.1, 0.5), one) for name, one in (("grpo", endless), ("tic", half_open))]
    page = table(run, monkeypatch, *rows)
    shown = {one[0]: [cell_text(cell) for cell in one[-2:]] for one in page.rows}
    assert shown == {"grpo": ["–", "–"], "tic": ["3.30 [1.20, ∞]", "1.00 [1.00, 1.00]"]}
    found = ReplayedRun(groups=40, run_size=8, group_size=4, weights="uniform", rows=tuple(rows))
    terminal = {one[0]: [cell_text(cell) for cell in one[4:6]] for one in estimator_table(found, "").rows}
    assert terminal == shown and "has no ends" in page.caption


def of_sizes(run, sizes, **config):
    """The run with groups of these sizes in its last third, cut out of its own groups."""
    groups = [
        StoredGroup(
            replace(
                group.record,
                rewards=group.record.rewards[:size],
                advantages=group.record.advantages[:size],
                lengths=group.record.lengths[:size],
                gram=group.record.gram[:size, :size],
            )
        )
        for group, size in zip(run.last_groups, sizes, strict=True)
    ]
    return replace(run, groups=groups, config={"group_size": 4, **config})


def test_it_says_how_many_groups_are_replayed_and_why(run):
    assert len(run.last_groups) == 6 and left_out_text(run, 4) == ""
    divided = of_sizes(run, [4, 4, 2, 3, 4, 3], allocate="measured")
    told = "3 of the 6 measured groups of the last third can be replayed: estimators are compared in groups of one "
    told += "size, 4 rollouts, and 3 have another (2 to 3; `--allocate measured` gave them others)."
    assert left_out_text(divided, 4) == told
    assert "(3; the run changed the size)" in left_out_text(of_sizes(run, [4, 4, 4, 3, 4, 4]), 4)
    one = run.last_groups[0]
    lacking = replace(one.record, rewards=torch.tensor([math.nan, 1.0, 0.0, 0.0], dtype=torch.float64))
    short = replace(run, groups=[StoredGroup(lacking), *run.last_groups[1:]])
    assert left_out_text(short, 4).startswith("5 of the 6") and left_out_text(short, 4).endswith(": 1 lacks a reward.")


def test_the_command_and_the_page_say_so(run, monkeypatch, capsys):
    divided = of_sizes(run, [4, 4, 2, 3, 4, 3], allocate="measured")
    monkeypatch.setattr(replay_table, "open_run", lambda folder: folder)
    monkeypatch.setattr(replay_table, "read_run", lambda folder: divided)
    assert show_replay(run.folder.folder, ("rloo",), group_size=2) == 0
    assert "3 of the 6 measured groups" in " ".join(capsys.readouterr().out.split())
    assert show_replay(run.folder.folder, ("rloo",), group_size=2, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == 3 and found["left_out"].startswith("3 of the 6")
    (page,) = what_if_table(divided)
    assert "3 of the 6 measured groups" in page.caption


def test_a_run_without_a_group_of_the_mean_size_says_that_it_has_others(run):
    with pytest.raises(ScoregramError, match="0 in the last third, of 4 rollouts, and 6 of other sizes"):
        of_sizes(run, [3, 3, 2, 3, 2, 3], allocate="measured").what_if("rloo")
