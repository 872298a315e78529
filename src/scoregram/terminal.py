"""What long commands share on a terminal: Ctrl-C between two steps, the time that is left, how to follow a run."""

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

DASH = "–"
"""Shown for an undefined number."""


@dataclass
class StopRequest:
    """Whether the process received Ctrl-C or SIGTERM."""

    asked: bool = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """In this block the first Ctrl-C or SIGTERM requests a stop after the current step; the second stops at once."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread can handle signals
        before = {}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as on a clock.

    Example:
        >>> duration(3723.4), duration(9.0), duration(float("nan"))
        ('1:02:03', '0:09', '–')
    """
    if not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def print_view_command(out: Path | str) -> None:
    """Print to stderr the command that follows a run in a browser, if the packages that it needs are installed."""
    if all(map(find_spec, ("plotly", "starlette", "uvicorn"))):
        print(f"Follow it in a browser: scoregram view {out}", file=sys.stderr)
