"""Progress of a measurement: a bar with the time that is left, by the bytes that were read."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from scoregram.training import duration

EVERY_SECONDS = 10.0
"""Shortest time between plain lines, where there is no terminal."""
LARGEST_SHOWN = 10
"""Notes of one kind that are printed; further ones are counted."""


class Bar:
    """A `with` block around the loop; on a terminal it stays in its place, elsewhere there are plain lines."""

    def __init__(self, total_bytes: int, *, console: Console | None = None) -> None:
        self.console = console or Console()
        self.said: dict[str, int] = {}
        self._total = max(total_bytes, 1)
        self._began = self._said_at = time.monotonic()
        # refreshed by updates alone: no thread of its own that a fork could catch in the middle
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

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, bytes_read: int, groups: int) -> None:
        """Show where the reading stands."""
        self._progress.update(self._task, completed=bytes_read, groups=groups, refresh=True)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._said_at >= EVERY_SECONDS:
            left = (self._total - bytes_read) * (now - self._began) / bytes_read if bytes_read else math.nan
            self.say(f"{groups} groups · {bytes_read / self._total:.0%} · ETA {duration(left)}")
            self._said_at = now

    def note(self, kind: str, text: str) -> None:
        """A line above the bar; of many of one kind only the first ones."""
        self.said[kind] = self.said.get(kind, 0) + 1
        if self.said[kind] <= LARGEST_SHOWN:
            more = " (further ones are counted only)" if self.said[kind] == LARGEST_SHOWN else ""
            self.say(text + more)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(Text(text), soft_wrap=True)
