"""What a page says of single prompts: the run's own decisions on their rollouts, and which prompts help each other."""

from typing import Any

import numpy as np
import pytest

from scoregram.exhibits import Estimate, Table
from scoregram.reading import GROUP_SIZE_WINDOW, InterferenceMap, RunReading, group_size_decisions, read_run
from scoregram.report import prompt_exhibits
from scoregram.report.figures import PromptMap, data_table, is_wide, plotly_parts
from scoregram.report.page import Section
from scoregram.report.prompt_exhibits import (
    LOWEST_PAIRS,
    MOST_DECISIONS,
    control_exhibits,
    control_text,
    decision_table,
    interference_exhibits,
    lowest_pairs_table,
)
from scoregram.runs import open_run
from scoregram.training import TrainConfig, replayed_advice, train
from tests.report_cases import Page, write_run
from tests.training_cases import config_for, save_policy

pytest.importorskip("plotly")

from scoregram.report import write_report
from scoregram.report.run_page import run_page

QUIET: dict[str, Any] = {"eval_every": 0, "rollouts_every": 0, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def controlled(policy, tmp_path_factory):
    """A trained run with three decisions, the last from fewer steps than it has measured."""
    folder = tmp_path_factory.mktemp("controlled") / "run"
    control = {"group_size": "auto", "allocate": "measured", "method": "rloo", "batch_size": 64, "train_problems": 6}
    train(config_for(policy, folder, steps=30, **QUIET | control, layers="none"))
    return folder


@pytest.fixture(scope="module")
def few_prompts(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few") / "run"
    train(config_for(policy, folder, steps=8, train_problems=3, measure_every=1, batches_every=1, **QUIET))
    return folder


def section_of(folder, title: str) -> Section:
    (found,) = (one for one in run_page(open_run(folder)).sections if one.title.startswith(title))
    return found


def exhibits_of(folder, title: str) -> dict[str, Any]:
    return {one.id: one for one in section_of(folder, title).exhibits}


def test_the_recorded_decisions_are_those_that_can_be_computed_again(controlled):
    lines = list(open_run(controlled).metrics())
    recorded = group_size_decisions(lines)
    assert recorded == replayed_advice(TrainConfig.of_run(controlled), lines)
    assert [advice.steps for _, advice in recorded] == [10, GROUP_SIZE_WINDOW, GROUP_SIZE_WINDOW]


def test_the_page_has_every_decision_and_its_reason_as_the_terminal_prints_it(policy, tmp_path, capsys):
    control = {"group_size": "auto", "method": "rloo", "batch_size": 32, "layers": "none"}
    train(config_for(policy, tmp_path / "run", steps=11, **QUIET | control))
    printed = " ".join("".join(capsys.readouterr()).split())
    table = exhibits_of(tmp_path / "run", "Rollouts per prompt")["control-decisions"]
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    (line,) = (line for line in open_run(tmp_path / "run").metrics() if "control/next_group_size" in line)
    start, end = line["control/group_size"], line["control/next_group_size"]
    assert start != end and cells["group size"] == f"{start} → {end}" and cells["step"] == line["step"] == 10
    assert cells["best"] == line["control/best_group_size"]
    assert (cells["error"], cells["agreement"]) == (line["control/error_ratio"], line["control/agreement"])
    assert f"step 10: {cells['reason']}" in printed
    assert cells["reason"] in Page(write_report(tmp_path / "run").read_text()).text()


def test_the_sizes_of_a_step_are_those_of_its_groups(controlled):
    found = exhibits_of(controlled, "Rollouts per prompt")
    mean, smallest, largest = found["control-group-size"].series
    sizes: dict[int, list[int]] = {}
    for group in open_run(controlled).groups():
        sizes.setdefault(group.step, []).append(group.rewards.numel())
    assert mean.x == tuple(map(float, sizes)) == smallest.x
    assert smallest.y == tuple(float(min(each)) for each in sizes.values())
    assert largest.y == tuple(float(max(each)) for each in sizes.values())
    assert len({*mean.y}) > 1 and any(low < high for low, high in zip(smallest.y, largest.y, strict=True))
    lines = list(open_run(controlled).metrics())
    assert found["control-error"].series[0].y == tuple(line["control/error_of_uniform"] for line in lines)
    assert "control-weights" not in found
    text = section_of(controlled, "Rollouts per prompt").text
    assert "`--group-size auto`, `--allocate measured`" in text and "--draw" not in text


def test_a_run_with_weights_shows_their_range_and_no_decision(policy, tmp_path):
    settings = {"method": "rloo", "shrink": True, "train_problems": 3, "layers": "none"}
    train(config_for(policy, tmp_path / "run", steps=4, **QUIET | settings))
    found = exhibits_of(tmp_path / "run", "Rollouts per prompt")
    assert [*found] == ["control-group-size", "control-weights"]
    smallest, largest = found["control-weights"].series
    lines = list(open_run(tmp_path / "run").metrics())
    assert smallest.y == tuple(line["control/smallest_weight"] for line in lines)
    assert largest.y == tuple(line["control/largest_weight"] for line in lines) and smallest.y < largest.y
    assert found["control-group-size"].caption == "Rollouts per prompt of each step."


def test_a_run_that_decides_nothing_has_neither_section(tmp_path):
    write_run(tmp_path / "run")
    titles = [one.title for one in run_page(open_run(tmp_path / "run")).sections]
    assert "Prompts" in titles and not {"Rollouts per prompt", "Interference"} & {*titles}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"group_size": "auto"}, "(`--group-size auto`)"),
        ({"group_size": 8, "allocate": "success", "draw": "uniform"}, "(`--allocate success`)"),
        ({"draw": "measured", "shrink": True}, "(`--draw measured`, `--shrink`)"),
    ],
)
def test_the_text_names_the_options_of_the_run(config, options):
    assert options in control_text(config)


def decided_run(count: int) -> RunReading:
    """A run that decides at every step, and moves at the first alone; what it cannot predict is undefined."""
    lines = []
    for step in range(1, count + 1):
        known = {"next_group_size": 8, "best_group_size": 8, "error_ratio": 0.5, "agreement": 0.95}
        unknown = {"next_group_size": 8, "best_group_size": 8, "error_ratio": float("nan"), "agreement": float("nan")}
        values = {"group_size": 4 if step == 1 else 8, "gradient_squared": 1.0} | (known if step == 1 else unknown)
        lines.append({"step": step} | {f"control/{name}": value for name, value in values.items()})
    return RunReading({"group_size": "auto"}, (), lines, [])


def test_a_decision_to_stay_has_its_reason_too():
    (table,) = decision_table(decided_run(2))
    assert [row[1] for row in table.rows] == ["4 → 8", "8"]
    assert table.rows[1][-1] == "group size stays 8: 2 measured steps are too few to predict an error"
    assert "moved at 1 of 2 decisions" in table.caption and "last" not in table.caption


@pytest.mark.parametrize(("allocate", "is_said"), [("uniform", False), ("measured", True)])
def test_a_move_to_groups_that_cannot_be_divided_says_so_as_on_the_terminal(allocate, is_said):
    known = {"group_size": 8, "next_group_size": 4, "best_group_size": 4, "error_ratio": 0.5, "agreement": 0.95}
    lines = [{"step": 1} | {f"control/{name}": value for name, value in known.items()}]
    (table,) = decision_table(RunReading({"group_size": "auto", "allocate": allocate}, (), lines, []))
    assert str(table.rows[0][-1]).endswith("; groups of 4 are not divided unequally") == is_said
    ((_, advice),) = group_size_decisions(lines)
    assert table.rows[0][-1] == advice.words(is_divided=is_said)


def test_a_long_run_shows_the_last_decisions_and_counts_all():
    (table,) = decision_table(decided_run(MOST_DECISIONS + 3))
    assert [row[0] for row in table.rows] == [*range(4, MOST_DECISIONS + 4)]
    assert f"1 of {MOST_DECISIONS + 3}" in table.caption and f"The last {MOST_DECISIONS} of" in table.caption
    assert not list(control_exhibits(RunReading({}, (), [{"step": 1, "reward": 0.5}], [])))


def test_the_map_of_a_trained_run_has_the_products_of_its_prompts(few_prompts):
    found = exhibits_of(few_prompts, "Interference")
    drawn = found["interference"]
    known = prompt_exhibits.interference_map(read_run(open_run(few_prompts)))
    assert known is not None and isinstance(drawn, PromptMap)
    assert np.array_equal(np.array(drawn.values), known.products, equal_nan=True)
    assert [name.partition(": ")[2] for name in drawn.y] == [*known.prompts]
    largest = max(abs(estimate.value) for estimate in known.pairs.values())
    assert drawn.limit == largest
    (trace,) = plotly_parts(drawn, x_range=(0.0, 9.0))["data"]
    assert trace["zmax"] == -trace["zmin"] == largest and trace["colorscale"][-1] == [1.0, "#0072b2"]  # blue: help
    assert trace["meta"] == "diverging" and [name.split(":")[0] for name in trace["y"]] == [*map(str, trace["x"])]
    assert is_wide(drawn) and data_table(drawn).columns == ("prompt", *drawn.y)
    assert f"with shuffled rewards {known.by_chance:.1f} would be beyond 0" in drawn.caption
    rows = found["interference-pairs"].rows
    assert {(row[0], row[1]): row[2] for row in rows} == known.pairs
    page = Page(write_report(few_prompts).read_text())
    assert "Which prompts help each other?" in page.text() and known.prompts[0] in page.text()


def planted(pairs: int) -> InterferenceMap:
    """A prompt that costs the second reward, helps the third, and is not resolved with the others."""
    names = ("<b>", *(f"{'long ' * 20}{number}" for number in range(pairs)))
    found = {("<b>", name): Estimate(0.1 * place, -1.0, 1.0) for place, name in enumerate(names[1:])}
    found |= {("<b>", names[1]): Estimate(-0.5, -0.7, -0.3), ("<b>", names[2]): Estimate(0.2, 0.1, 0.3)}
    products = np.full((len(names), len(names)), np.nan)
    for place, name in enumerate(names[1:], start=1):
        products[0, place] = products[place, 0] = found["<b>", name].value
    return InterferenceMap(prompts=names, products=products, pairs=found, by_chance=0.04)


def test_pairs_beyond_0_are_counted_and_named(monkeypatch):
    run = RunReading({}, (), [], [])
    made = planted(3)
    monkeypatch.setattr(prompt_exhibits, "interference_map", lambda _: made)
    drawn, table = interference_exhibits(run)
    assert isinstance(drawn, PromptMap) and isinstance(table, Table)
    assert "Of 3 pairs 1 have an interval above 0 and 1 below; with shuffled rewards 0.0 would" in drawn.caption
    assert drawn.y[0] == "1: <b>" and all(len(name) < 40 for name in drawn.y)
    assert "<b>" not in str(plotly_parts(drawn)) and drawn.limit == 0.5
    assert [row[3] for row in table.rows] == ["cost each other reward", "help", "not resolved"]
    assert len(lowest_pairs_table(planted(20)).rows) == LOWEST_PAIRS
