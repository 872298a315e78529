"""The figures of the report on cosines between the gradients of steps."""

import csv
import io
import math

import pytest

from scoregram.exhibits import Figure
from scoregram.report.figures import CosineMap, data_csv, data_table, is_wide, plotly_parts
from scoregram.report.step_figures import update_figures
from scoregram.runs import RunWriter, UpdateRecord, open_run
from tests.report_cases import Page, write_run
from tests.run_cases import ENVIRONMENT, make_update

pytest.importorskip("plotly")

from scoregram.report import write_report
from scoregram.report.run_page import run_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs") / "run"
    write_run(made, steps=12, sketched=True)
    return made


def written(folder, steps: range, features: int = 100):
    with RunWriter.create(folder, {}, environment=ENVIRONMENT) as writer:
        for step in steps:
            writer.write_updates(step, [make_update(step, features)])
    return open_run(folder)


def test_the_geometry_of_a_run_holds_both_figures_last(folder):
    geometry = next(one for one in run_page(open_run(folder)).sections if one.title == "Geometry")
    assert [one.id for one in geometry.exhibits][-2:] == ["update-cosines", "cosine-decay"]


def test_a_run_without_sketches_shows_neither(tmp_path):
    write_run(tmp_path / "run")
    page = Page(write_report(tmp_path / "run").read_text())
    assert not [one for one in page.named("figure") if "cosines" in one.get("id", "")]
    assert "same direction" not in page.text() and list(update_figures(open_run(tmp_path / "run"))) == []


def test_two_steps_are_too_few_for_a_map(tmp_path):
    assert list(update_figures(written(tmp_path / "r", range(2)))) == []
    assert [one.id for one in update_figures(written(tmp_path / "s", range(3)))] == ["update-cosines"]


def test_a_map_has_cosines_around_zero_on_two_axes_of_steps(tmp_path):
    run = written(tmp_path / "r", range(2, 22, 2))
    figure = next(update_figures(run))
    assert isinstance(figure, CosineMap) and not is_wide(figure)
    sketches = [make_update(step, 100).sketch.double() for step in range(2, 22, 2)]
    for i, row in enumerate(figure.values):
        for j, value in enumerate(row):
            exact = float(sketches[i] @ sketches[j] / sketches[i].norm() / sketches[j].norm())
            assert math.isnan(value) if i == j else value == pytest.approx(exact, abs=1e-6)
    largest = max(abs(value) for row in figure.values for value in row if not math.isnan(value))
    parts = plotly_parts(figure, x_range=(0.0, 30.0))
    [trace], layout = parts["data"], parts["layout"]
    assert trace["zmax"] == -trace["zmin"] == max(largest, 0.4)
    assert trace["x"] == trace["y"] == list(range(2, 22, 2)) and trace["colorscale"][1] == [0.5, "#ffffff"]
    assert trace["z"][3][3] is None and "range" not in layout["xaxis"]
    assert "± 0.10 from the sketch" in figure.caption and "evenly spaced" not in figure.caption


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    figure, decay = update_figures(written(tmp_path / "r", range(1, 131)))
    assert isinstance(figure, CosineMap) and len(figure.x) == len(figure.values) == 60
    assert (figure.x[0], figure.x[-1]) == (1.0, 130.0)
    assert figure.caption.endswith("60 of 130 measured steps, evenly spaced.")
    assert isinstance(decay, Figure) and decay.series[0].x[:5] == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_the_null_is_zero_with_a_band(folder):
    _, decay = update_figures(open_run(folder))
    assert isinstance(decay, Figure)
    measured, null = decay.series
    assert (measured.role, null.role) == ("measured", "null") and set(null.y) == {0.0} and measured.x == null.x
    assert all(low == -high < 0 for low, high in zip(null.low, null.high, strict=True))
    bands = [one for one in plotly_parts(decay)["data"] if one.get("fill") == "toself"]
    assert len(bands) == 1


def test_the_cosines_are_in_the_csv(folder):
    figure = next(update_figures(open_run(folder)))
    assert isinstance(figure, CosineMap)
    rows = list(csv.reader(io.StringIO(data_csv(data_table(figure)))))
    assert rows[0] == ["step", *map(str, range(1, 13))] and rows[3][0] == "3" and rows[3][3] == ""
    assert float(rows[3][5]) == figure.values[4][2]


def test_a_page_follows_new_sketches(tmp_path):
    run = written(tmp_path / "r", range(5))
    before = next(update_figures(run))
    with RunWriter.resume(tmp_path / "r", None, environment=ENVIRONMENT) as writer:
        writer.write_updates(7, [UpdateRecord(step=7, sketch=make_update(7, 100).sketch)])
    after = next(update_figures(run))
    assert isinstance(before, CosineMap) and isinstance(after, CosineMap)
    assert after.x == (*before.x, 7.0)
