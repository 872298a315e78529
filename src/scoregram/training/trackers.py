"""Scalars of a run, forwarded to TensorBoard, Weights & Biases or trackio.

A tracker that fails during a run is dropped with a warning, and the run continues: `metrics.jsonl` has all scalars.
"""

import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, runtime_checkable

from scoregram.checks import fail, lookup
from scoregram.runs import TRACKER_LOGS

PROJECT = "scoregram"
"""Project that runs are listed under, unless the tracker's own environment variable names another."""


@runtime_checkable
class Tracker(Protocol):
    """A destination for scalars."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a step, all of them finite."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


@dataclass(frozen=True)
class Opening:
    """Arguments for opening a tracker."""

    run_folder: Path
    config: Mapping[str, Any]
    resume_step: int | None

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.run_folder.resolve().name

    def folder(self, name: str) -> Path:
        """Folder inside the run for the files of one tracker."""
        folder = self.run_folder / TRACKER_LOGS / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class TensorBoard:
    """Event files under `trackers/tensorboard`; `tensorboard --logdir RUN` shows them."""

    def __init__(self, opening: Opening) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        # hide what the interrupted run logged after the step that it is resumed from
        purge = None if opening.resume_step is None else opening.resume_step + 1
        folder = opening.folder("tensorboard")
        _wait_for_a_later_name(folder)
        self._writer = writer(log_dir=str(folder), purge_step=purge)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One point per scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """At most a second: TensorBoard reads event files by name, `events.out.tfevents.SECOND.HOST.PROCESS.NUMBER`.

    A file of the same second may sort before that of the interrupted run, which would then hide the resumed steps.
    """
    seconds = [file.name.split(".")[3] for file in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))


class WeightsAndBiases:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it under `trackers/wandb`."""

    def __init__(self, opening: Opening) -> None:
        folder = opening.folder("wandb")
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=opening.name,
            id=_stable_id(folder, fresh=opening.resume_step is None),
            resume="allow",
            dir=str(folder),
            config=dict(opening.config),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One point per scalar."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Trackio:
    """A run of trackio, which keeps its own database; `trackio show` shows it.

    trackio identifies a run by its name alone. The name includes an id, so runs in folders of the same name differ.
    """

    def __init__(self, opening: Opening) -> None:
        self._trackio = import_module("trackio")
        fresh = opening.resume_step is None
        self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{opening.name}-{_stable_id(opening.folder('trackio'), fresh=fresh)}",
            resume="never" if fresh else "allow",
            config=dict(opening.config),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """One point per scalar."""
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._trackio.finish()


@dataclass(frozen=True)
class TrackerRow:
    """A tracker that `report_to` can name."""

    open: Callable[[Opening], Tracker]
    package: str
    """Package that must be installed."""


TRACKERS: Mapping[str, TrackerRow] = MappingProxyType(
    {
        "tensorboard": TrackerRow(TensorBoard, "tensorboard"),
        "trackio": TrackerRow(Trackio, "trackio"),
        "wandb": TrackerRow(WeightsAndBiases, "wandb"),
    }
)


class Trackers:
    """Zero or more trackers, used as one."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._open = dict(trackers)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Send the scalars of a step; those that are undefined are left out."""
        finite = {name: float(value) for name, value in scalars.items() if value is not None and math.isfinite(value)}
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.log(step, finite))

    def close(self) -> None:
        """Close all trackers; further calls do nothing."""
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.close())
            self._open.pop(name, None)

    def _try(self, name: str, action: Callable[[Tracker], None]) -> None:
        try:
            action(self._open[name])
        except Exception as error:
            del self._open[name]
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{name} failed and gets no more scalars; metrics.jsonl has them all ({reason})", stacklevel=3
            )


def open_trackers(
    report_to: Sequence[str], run_folder: Path | str, config: Mapping[str, Any], *, resume_step: int | None = None
) -> Trackers:
    """The trackers that `report_to` names, ready for scalars.

    Args:
        report_to: Names from `TRACKERS`.
        run_folder: Folder of the run; a tracker that keeps files keeps them in `trackers/` inside it.
        config: Shown beside the run.
        resume_step: Step that the run is resumed after; None for a new run.

    Raises:
        ScoregramError: If a name is unknown, or its package is absent or does not start.
    """
    rows = require_trackers(report_to)  # all of them before the first is opened
    opening = Opening(Path(run_folder), config, resume_step)
    opened: dict[str, Tracker] = {}
    for name, row in rows.items():
        try:
            opened[name] = row.open(opening)
        except Exception as error:
            Trackers(opened).close()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            fail("report_to", f"{name} must start", reason, "Repair it, or leave it out.")
    return Trackers(opened)


def require_trackers(report_to: Sequence[str]) -> dict[str, TrackerRow]:
    """The rows that `report_to` names, provided that all are known and their packages are installed."""
    rows = {name: lookup(TRACKERS, name, kind="report_to") for name in report_to}
    for name, row in rows.items():
        _require_package(name, row.package)
    return rows


def _require_package(name: str, package: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        remedy = "Install it with `pip install 'scoregram[trackers]'`."
        return fail("report_to", f"{name} needs the package {package}", str(error), remedy)


def _stable_id(folder: Path, *, fresh: bool) -> str:
    """Id of the run, stored in its folder so that a resumed run continues under it."""
    path = folder / "id"
    if fresh or not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
