"""The run folder of a measurement: groups written a page at a time, a line of metrics when a step is complete.

A group counts as measured when it stands in `groups/`; its rollouts are written before it. So a measurement that is
killed anywhere can be resumed: what it holds is not measured again, and nothing is written twice.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from scoregram.integrations.dumps.measuring import MeasuredGroups
from scoregram.integrations.dumps.tally import Tally
from scoregram.runs import GROUPS, ROLLOUTS, STATISTIC, GroupRecord, RolloutRecord, RunWriter, open_run, parts

PAGE_GROUPS = 64
PAGE_SECONDS = 60.0
PAGE_BYTES = 64 << 20
"""A page is written when it holds so many groups, after so long, or at such a size."""


class Pages:
    """What was measured and is not on the disk yet, and the tally of the step that is being measured."""

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self.step = -1
        self.tally = Tally()
        self.groups_written = positions_in(writer.folder / GROUPS, f"{STATISTIC}group")
        self.rollouts_written = positions_in(writer.folder / ROLLOUTS, "group")
        self.last_line = max((int(line["step"]) for line in open_run(writer.folder).metrics()), default=-1)
        self.incomplete_lines: set[int] = set()
        """Steps of which groups came after their line was written, or a later one."""
        self._groups: list[GroupRecord] = []
        self._rollouts: list[RolloutRecord] = []
        self._bytes = 0
        self._since = time.monotonic()

    def __enter__(self) -> "Pages":
        return self

    def __exit__(self, *_: object) -> None:
        """Write what was measured, also when the loop ends by an error."""
        self.flush()

    def begin(self, step: int) -> None:
        """Say that the next group is of this step; the step before, if it is another, is complete."""
        if step == self.step:
            return
        self.end_step()
        self.step, self.tally = step, Tally()
        if step > self.last_line:
            for group in open_run(self.writer.folder).groups([step], layers=False):
                self.tally.add(group)

    def add(self, made: MeasuredGroups) -> None:
        """Take in groups of the step that was begun."""
        for group in made.groups:
            self.tally.add(group)
        self.tally.whole |= dict(made.whole or {})
        self._groups += made.groups
        self._rollouts += made.rollouts
        self._bytes += sum(
            group.gram.numel() * 8 * (1 + len(group.by_layer)) for group in made.groups if group.gram is not None
        )
        self._bytes += sum(rollout.token_ids.numel() * 24 for rollout in made.rollouts)
        if made.batch is not None:
            self.writer.write_batches(self.step, [made.batch])
        is_late = time.monotonic() - self._since > PAGE_SECONDS
        if len(self._groups) >= PAGE_GROUPS or self._bytes >= PAGE_BYTES or is_late:
            self.flush()

    def flush(self) -> None:
        """Write what is not on the disk."""
        if self._groups:
            known = self.rollouts_written[self.step]
            self.writer.write_rollouts(self.step, [rollout for rollout in self._rollouts if rollout.group not in known])
            self.writer.write_groups(self.step, self._groups)
        self._groups, self._rollouts, self._bytes, self._since = [], [], 0, time.monotonic()

    def end_step(self) -> None:
        """Write the line of the step; one that comes back after it has its line, or a later one has, gets no other."""
        self.flush()
        if not self.tally.sums["dump/rollouts"]:
            return
        if self.step > self.last_line:
            self.writer.write_metrics(self.step, self.tally.scalars())
            self.last_line = self.step
        else:
            self.incomplete_lines.add(self.step)


def positions_in(folder: Path, column: str) -> Mapping[int, set[int]]:
    """Step → positions of the groups in the part files of a folder, without reading anything else of them."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for step, path in parts(folder):
        found[step] |= {int(position) for position in pq.read_table(path, columns=[column]).column(0).to_pylist()}
    return found
