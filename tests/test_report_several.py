"""Several runs on one page: sets by seed, means over seeds, differences with intervals."""

import math
import statistics

import pytest
from scipy.stats import t as student

from scoregram import cli
from scoregram.exhibits import Estimate
from scoregram.reading import compared_quantities, mean_curve, read_run, run_sets, running_curve
from scoregram.report import write_several_report
from scoregram.report.several_page import difference_table
from scoregram.runs import RunWriter, open_run
from tests.report_cases import Page, write_run

pytest.importorskip("plotly")


def reading(folder, config, rewards=(0.1, 0.2, 0.3)):
    with RunWriter.create(folder, config, environment={}) as writer:
        for step, reward in enumerate(rewards, start=1):
            writer.write_metrics(step, {"reward": reward})
    return read_run(open_run(folder))


def test_runs_that_differ_in_their_seed_alone_are_a_set(tmp_path):
    runs = {
        f"{method}-{seed}": reading(
            tmp_path / f"{method}-{seed}", {"method": method, "seed": seed, "model": f"start/seed{seed}", "out": "x"}
        )
        for method in ("grpo", "rloo")
        for seed in (1, 11)
    }
    sets = run_sets(runs)
    assert [(one.name, one.seeds) for one in sets] == [("method grpo", 2), ("method rloo", 2)]


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([{"a": 1}, {"a": 1}], ["r0"]),
        ([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}], ["a 1, b 1", "a 1, b 2", "a 2, b 1"]),
        ([{"learning_rate": 1, "a": 1}, {"learning_rate": 2, "a": 2}], ["learning_rate 1", "learning_rate 2"]),
    ],
)
def test_sets_are_named_by_what_tells_them_apart(configs, names, tmp_path):
    runs = {f"r{i}": reading(tmp_path / f"r{i}", config) for i, config in enumerate(configs)}
    assert [one.name for one in run_sets(runs)] == names


def test_the_mean_over_seeds_has_a_t_interval(tmp_path):
    values = [0.1, 0.4, 0.7]
    curves = [running_curve([1, 2], [value, 2 * value]) for value in values]
    found = mean_curve([*curves, running_curve([], [])])
    half = student.ppf(0.975, 2) * statistics.stdev(values) / math.sqrt(3)
    assert found.mean == pytest.approx((0.4, 0.8)) and found.high[0] - 0.4 == pytest.approx(half, rel=1e-5)
    assert mean_curve(curves[:1]) == curves[0] and not mean_curve([])
    runs = {f"s{i}": reading(tmp_path / f"s{i}", {"seed": i}, [value] * 3) for i, value in enumerate(values)}
    other = reading(tmp_path / "other", {"seed": 0, "method": "b"}, [0.5, 0.5, 0.5])
    rows = {row.name: row for row in compared_quantities(run_sets(runs | {"other": other}))}
    reward = rows["reward"]
    assert reward.values[0].value == pytest.approx(0.4) and reward.values[0].low == pytest.approx(0.4 - half, rel=1e-5)
    assert reward.differences[0].value == pytest.approx(0.1) and set(rows) == {"reward"}


def test_one_seed_keeps_the_interval_of_its_run(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", size=6)
    runs = {name: read_run(open_run(tmp_path / name)) for name in "ab"}
    sets = run_sets(runs)
    assert len(sets) == 1  # the same config: two seeds of one set
    (accuracy,) = [row for row in compared_quantities([sets[0].__class__("a", (runs["a"],))]) if "accuracy" in row.name]
    assert accuracy.values == (Estimate(0.75, 0.65, 0.85),) and accuracy.differences == ()
    assert difference_table(sets).columns == ("quantity", "set", "value", "minus a")


def test_the_command_takes_several_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate(("a<script>", "b")):
        reading(tmp_path / name, {"seed": 0, "learning_rate": place})
    assert cli.main(["report", "a<script>", "b"]) == 0
    assert capsys.readouterr().out == "runs.html\n"
    page = Page((tmp_path / "runs.html").read_text())
    assert "2 runs side by side" in page.text("h1") and "learning_rate 0" in page.text("td")
    assert len(page.named("script")) == 2 and "a<script>" in page.text("th")
    assert cli.main(["report", "b", "./b"]) == 2
    assert "every run must be given once" in capsys.readouterr().err
    assert cli.main(["report"]) == 2
    assert "needs a folder" in capsys.readouterr().err
    assert cli.main(["report", "b", "nowhere"]) == 2
    assert "nowhere must hold a run" in capsys.readouterr().err


def test_the_page_can_be_written_elsewhere(tmp_path):
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    for folder in folders:
        reading(folder, {"seed": folder.parent.name})
    path = write_several_report(folders, tmp_path / "out.html")
    assert path == tmp_path / "out.html" and "x/run" in Page(path.read_text()).text("th")
