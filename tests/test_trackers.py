import importlib.util
import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.training import trackers
from scoregram.training.trackers import TRACKERS, Opening, TrackerRow, Trackers, open_trackers

ROOT = Path(__file__).parent.parent


def need(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


class Recorder:
    """A tracker that remembers, or fails."""

    def __init__(self, opening: Opening | None = None, *, fails: bool = False) -> None:
        self.opening, self.fails = opening, fails
        self.logged: list[tuple[int, dict]] = []
        self.closed = 0

    def log(self, step: int, scalars) -> None:
        """Remember."""
        if self.fails:
            raise ConnectionError("no network")
        self.logged.append((step, dict(scalars)))

    def close(self) -> None:
        """Remember."""
        self.closed += 1


def test_none_at_all_is_fine(tmp_path):
    with open_trackers((), tmp_path, {}) as none:
        none.log(0, {"reward": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_undefined_scalars_are_left_out():
    one, two = Recorder(), Recorder()
    with Trackers({"one": one, "two": two}) as both:
        both.log(3, {"a": 1, "b": None, "c": math.nan, "d": math.inf, "e": torch.tensor(0.5), "f": True})
    assert one.logged == two.logged == [(3, {"a": 1.0, "e": 0.5, "f": 1.0})]
    both.close()
    assert one.closed == two.closed == 1


def test_a_failing_tracker_is_dropped_and_the_run_goes_on():
    bad, good = Recorder(fails=True), Recorder()
    both = Trackers({"bad": bad, "good": good})
    with pytest.warns(UserWarning, match=r"bad failed and gets no more scalars; metrics\.jsonl .*no network"):
        both.log(0, {"a": 1.0})
    both.log(1, {"a": 2.0})
    both.close()
    assert [step for step, _ in good.logged] == [0, 1] and good.closed == 1 and bad.closed == 0


def test_an_unknown_name_lists_the_choices(tmp_path):
    with pytest.raises(ScoregramError, match="one of tensorboard, trackio, wandb, got 'mlflow'"):
        open_trackers(["mlflow"], tmp_path, {})


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_an_absent_package_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, TRACKERS[name].package, None)
    with pytest.raises(ScoregramError, match=rf"{name} needs the package .*pip install 'scoregram\[trackers\]'"):
        open_trackers([name], tmp_path, {})


def test_what_does_not_start_ends_the_others(tmp_path, monkeypatch):
    opened: list[Recorder] = []

    def start(opening: Opening) -> Recorder:
        opened.append(Recorder(opening))
        return opened[-1]

    def stall(_: Opening) -> Recorder:
        raise RuntimeError("not logged in\nlong explanation")

    table = {"good": TrackerRow(start, "json"), "bad": TrackerRow(stall, "json")}
    monkeypatch.setattr(trackers, "TRACKERS", table)
    with pytest.raises(ScoregramError, match=r"bad must start, got RuntimeError: not logged in\. Repair it"):
        open_trackers(["good", "bad"], tmp_path / "r", {"seed": 1}, resume_step=4)
    (good,) = opened
    assert good.closed == 1
    assert good.opening == Opening(tmp_path / "r", {"seed": 1}, 4)


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard would show of a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "trackers" / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@need("tensorboard")
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_shows_what_was_logged_and_forgets_what_was_cut(tmp_path):
    with open_trackers(["tensorboard"], tmp_path, {"seed": 0}) as first:
        for step in range(5):
            first.log(step, {"eval/accuracy": step / 4, "rank": math.nan if step == 1 else 2.0})
    assert points(tmp_path, "eval/accuracy") == [(step, step / 4) for step in range(5)]
    assert [step for step, _ in points(tmp_path, "rank")] == [0, 2, 3, 4]
    with open_trackers(["tensorboard"], tmp_path, {"seed": 0}, resume_step=2) as resumed:
        resumed.log(3, {"eval/accuracy": 9.0})
    assert points(tmp_path, "eval/accuracy") == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 9.0)]


@need("tensorboard")
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_reads_a_resumed_run_last(tmp_path):
    """However its files are numbered: of one second and process, the tenth sorts before the ninth."""
    with open_trackers(["tensorboard"], tmp_path, {}) as first:
        for step in range(3):
            first.log(step, {"reward": float(step)})
    (file,) = (tmp_path / "trackers" / "tensorboard").iterdir()
    second = file.name.split(".")[3]
    file.rename(file.with_name(f"events.out.tfevents.{second}.~"))  # sorts after any other of its second
    with open_trackers(["tensorboard"], tmp_path, {}, resume_step=0) as resumed:
        resumed.log(1, {"reward": 9.0})
    assert points(tmp_path, "reward") == [(0, 0.0), (1, 9.0)]


REPORT = """
import sys
from pathlib import Path
from scoregram.training.trackers import open_trackers

for resume_step in (None, 2):
    with open_trackers([sys.argv[1]], Path(sys.argv[2]), {"seed": 0}, resume_step=resume_step) as trackers:
        for step in range(resume_step + 1 if resume_step else 0, 6):
            trackers.log(step, {"reward": step / 4})
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param("wandb", marks=need("wandb")), pytest.param("trackio", marks=need("trackio"))]
)
def test_the_real_trackers_take_a_run_and_its_resumption(tmp_path, name):
    """Offline, in a process of their own: they start threads and services that outlive a test."""
    alone = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-W", "error::UserWarning:scoregram", "-c", REPORT, name, tmp_path / "r"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, env={**os.environ, **alone}
    )
    assert done.returncode == 0, done.stderr
    assert "failed and gets no more" not in done.stderr
    if name == "wandb":
        runs = list((tmp_path / "r/trackers/wandb").rglob("run-*.wandb"))
        assert len({run.name for run in runs}) == 1 and len(runs) == 2  # two parts of one run
    else:
        (database,) = (tmp_path / "trackio").rglob("*.db")
        with closing(sqlite3.connect(database)) as connection:
            logged = connection.execute("select run_name, step from metrics").fetchall()
        assert {step for _, step in logged} == set(range(6))
        assert len({run for run, _ in logged}) == 1
