"""Progress of a run: one live line on a terminal, plain lines at intervals anywhere else."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from scoregram.terminal import DASH, duration

SHORTER = {"live groups": "live", "effective rank": "rank", "tokens/s": "tok/s"}
"""Shorter words for a narrow terminal."""

RECENT_STEPS = 20
"""Recent updates from which the remaining time is estimated; the first steps of a run are slower than the others."""


class Progress:
    """Shows the progress of a run; a `with` block around the loop.

    The line reads `step 12/200 · ETA 1:23 · reward 0.43 · live groups 5/8 · effective rank 2.91 (null 4.10) · 1,234
    tokens/s`. A terminal shows one line that is updated, in shorter words if the terminal is narrow. Anywhere else a
    line is printed for the first and the last update, and in between at most one every `every_seconds`.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        every_seconds: float | int = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total_steps: Number of the last step.
            first_step: Steps done before, when a run is resumed.
            console: Standard output by default.
            every_seconds: Shortest time between plain lines.
            clock: Monotonic seconds.
        """
        self.total_steps = total_steps
        self._console = console or Console()
        self._every = every_seconds
        self._clock = clock
        self._times = deque([(first_step, clock())], maxlen=RECENT_STEPS + 1)
        self._shown_at = -math.inf
        self._waiting: str | None = None
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            # no refresh thread: a fork could happen while that thread holds a lock
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the last update, even if the loop ends with an error or Ctrl-C."""
        if self._live is not None:
            self._live.stop()
        elif self._waiting is not None:
            self._print(self._waiting)

    def update(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Show `step` as done.

        Args:
            step: Number of the step.
            scalars: Any of `reward`, `live_groups`, `groups`, `effective_rank`, `effective_rank_null` and
                `tokens_per_second`. What is absent, None or `nan` is shown as a dash; other names are not shown.
        """
        now = self._clock()
        self._times.append((step, now))
        line = progress_line(step, self.total_steps, scalars, self._seconds_left())
        if self._live is not None and len(line) > self._console.width:
            for long, short in SHORTER.items():
                line = line.replace(long, short)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif step >= self.total_steps or now - self._shown_at >= self._every:
            self._print(line)
            self._shown_at = now
        else:
            self._waiting = line

    def note(self, text: str) -> None:
        """Print a line of its own, above the live one."""
        self._console.print(Text(text), soft_wrap=True)

    def _print(self, line: str) -> None:
        self._waiting = None
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()

    def _seconds_left(self) -> float:
        (old_step, then), (step, now) = self._times[0], self._times[-1]
        return (now - then) / (step - old_step) * (self.total_steps - step) if step > old_step else math.nan


def progress_line(step: int, total_steps: int, scalars: Mapping[str, Any], seconds_left: float) -> str:
    """The progress line.

    Example:
        >>> progress_line(12, 200, {"reward": 0.43, "effective_rank": 2.91, "effective_rank_null": 4.1}, 83.0)
        'step  12/200 · ETA 1:23 · reward 0.43 · live groups – · effective rank 2.91 (null 4.10) · – tokens/s'
    """
    width = len(str(total_steps))
    groups = f"/{_number(scalars['groups'], '.0f')}" if "groups" in scalars else ""
    null = _number(scalars.get("effective_rank_null"), ".2f")
    return " · ".join(
        [
            f"step {step:>{width}}/{total_steps}",
            f"ETA {duration(seconds_left)}",
            f"reward {_number(scalars.get('reward'), '.3g')}",
            f"live groups {_number(scalars.get('live_groups'), '.3g')}{groups}",
            f"effective rank {_number(scalars.get('effective_rank'), '.2f')} (null {null})",
            f"{_number(scalars.get('tokens_per_second'), ',.0f')} tokens/s",
        ]
    )


def _number(value: Any, form: str) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    return format(float(value), form)
