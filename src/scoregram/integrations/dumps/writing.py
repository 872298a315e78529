"""What a measurement writes: the run folder, in pages (part files of several groups), and progress on the terminal.

A group counts as measured once it is in `groups/`; its rollouts are written before it, and the step's line of metrics
after all its groups. So a measurement that is killed at any moment can be resumed: groups in the folder are not
measured again, and nothing is written twice.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from scoregram.integrations.dumps.steps import StepRecords
from scoregram.reading import StepTally
from scoregram.runs import GROUPS, ROLLOUTS, STATISTIC, GroupRecord, RolloutRecord, RunWriter, open_run, parts
from scoregram.terminal import duration

PAGE_GROUPS = 64
PAGE_SECONDS = 60.0
PAGE_BYTES = 64 << 20
"""A page is written once it holds this many groups, has waited this long, or has this size."""
_SECONDS_BETWEEN_LINES = 10.0
"""Shortest time between progress lines where there is no terminal."""
_NOTES_SHOWN = 10
"""Notes of one kind that are printed; further ones are only counted."""


class PagedRun:
    """The run folder of a measurement: records that are not on disk yet, and the tally of the current step."""

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self.step = -1
        self.tally = StepTally()
        self.groups_written = _written_positions(writer.folder / GROUPS, f"{STATISTIC}group")
        self.rollouts_written = _written_positions(writer.folder / ROLLOUTS, "group")
        self.last_line = max((int(line["step"]) for line in open_run(writer.folder).metrics()), default=-1)
        self.incomplete_lines: set[int] = set()
        """Steps with groups that arrived after the line of this step, or of a later one, was written."""
        self._groups: list[GroupRecord] = []
        self._rollouts: list[RolloutRecord] = []
        self._bytes = 0
        self._since = time.monotonic()

    def __enter__(self) -> "PagedRun":
        return self

    def __exit__(self, *_: object) -> None:
        """Write what was measured, also after an error."""
        self.flush()

    def begin_step(self, step: int) -> None:
        """Set the step of the next groups; a new step ends the one before."""
        if step == self.step:
            return
        self.end_step()
        self.step, self.tally = step, StepTally()
        if step > self.last_line:
            for group in open_run(self.writer.folder).groups([step], layers=False):
                self.tally.add(group)

    def add(self, records: StepRecords) -> None:
        """Add measured groups of the current step."""
        for group in records.groups:
            self.tally.add(group)
        self.tally.between_prompts |= dict(records.between_prompts)
        self._groups += records.groups
        self._rollouts += records.rollouts
        self._bytes += sum(
            group.gram.numel() * 8 * (1 + len(group.by_layer)) for group in records.groups if group.gram is not None
        )
        self._bytes += sum(rollout.token_ids.numel() * 24 for rollout in records.rollouts)
        if records.batches:
            self.writer.write_batches(self.step, records.batches)
        is_due = time.monotonic() - self._since > PAGE_SECONDS
        if len(self._groups) >= PAGE_GROUPS or self._bytes >= PAGE_BYTES or is_due:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if self._groups:
            known = self.rollouts_written[self.step]
            self.writer.write_rollouts(self.step, [rollout for rollout in self._rollouts if rollout.group not in known])
            self.writer.write_groups(self.step, self._groups)
        self._groups, self._rollouts, self._bytes, self._since = [], [], 0, time.monotonic()

    def end_step(self) -> None:
        """Write the line of the step, unless a line of this step or of a later one was written before."""
        self.flush()
        if not self.tally.rollouts:
            return
        if self.step > self.last_line:
            self.writer.write_metrics(self.step, self.tally.scalars())
            self.last_line = self.step
        else:
            self.incomplete_lines.add(self.step)


def _written_positions(folder: Path, column: str) -> Mapping[int, set[int]]:
    """Step → positions of the groups in the part files of a folder; only this column is read."""
    positions: defaultdict[int, set[int]] = defaultdict(set)
    for step, path in parts(folder):
        positions[step] |= {int(position) for position in pq.read_table(path, columns=[column]).column(0).to_pylist()}
    return positions


class ProgressBar:
    """Bytes read and time left: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, total_bytes: int, *, console: Console | None = None) -> None:
        self.console = console or Console()
        self._notes: defaultdict[str, int] = defaultdict(int)
        self._total = max(total_bytes, 1)
        self._began = self._last_line = time.monotonic()
        # refreshed by updates alone: rich's own thread could be in the middle of a write when a process forks
        self._progress = Progress(
            TextColumn("{task.fields[groups]} groups"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            auto_refresh=False,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=self._total, groups=0)

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, bytes_read: int, groups: int) -> None:
        """Show how far the dump has been read."""
        self._progress.update(self._task, completed=bytes_read, groups=groups, refresh=True)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            left = (self._total - bytes_read) * (now - self._began) / bytes_read if bytes_read else math.nan
            self.print(f"{groups} groups · {bytes_read / self._total:.0%} · ETA {duration(left)}")
            self._last_line = now

    def note(self, kind: str, text: str) -> None:
        """Print a line above the bar, for the first few notes of a kind."""
        self._notes[kind] += 1
        if self._notes[kind] <= _NOTES_SHOWN:
            more = " (further ones are only counted)" if self._notes[kind] == _NOTES_SHOWN else ""
            self.print(text + more)

    def print(self, text: str) -> None:
        """Print a line above the bar; characters that the terminal cannot show are escaped."""
        encoding = self.console.encoding or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(Text(shown), soft_wrap=True)
