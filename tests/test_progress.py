import io
import math
import re

import pytest
import torch
from rich.console import Console

from scoregram.terminal import duration
from scoregram.training.progress import Progress, progress_line

SCALARS = {
    "reward": 0.4321,
    "live_groups": 5,
    "groups": 8,
    "effective_rank": 2.912,
    "effective_rank_null": 4.1,
    "tokens_per_second": 12345.6,
}


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self) -> float:
        """Seconds now."""
        return self.now


def plain_progress(total: int, **options) -> tuple[Progress, Clock, io.StringIO]:
    clock, output = Clock(), io.StringIO()
    return Progress(total, console=Console(file=output, width=40), clock=clock, **options), clock, output


def test_the_line_says_it_all():
    line = progress_line(3, 200, SCALARS, 3723.0)
    rank = "effective rank 2.91 (null 4.10)"
    assert line == f"step   3/200 · ETA 1:02:03 · reward 0.432 · live groups 5/8 · {rank} · 12,346 tokens/s"


@pytest.mark.parametrize("undefined", [None, math.nan, math.inf, torch.tensor(math.nan)])
def test_undefined_is_a_dash(undefined):
    line = progress_line(1, 9, dict.fromkeys(SCALARS, undefined), math.nan)
    assert line == "step 1/9 · ETA – · reward – · live groups –/– · effective rank – (null –) · – tokens/s"


def test_tensors_are_numbers():
    assert "reward 0.25 " in progress_line(1, 9, {"reward": torch.tensor(0.25)}, 1.0)


def test_first_last_and_one_every_few_seconds():
    progress, clock, output = plain_progress(100, every_seconds=10)
    with progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, SCALARS)
        assert "step 100/100" in output.getvalue()  # before whatever comes after the last step
    shown = [int(line.split("/")[0].removeprefix("step")) for line in output.getvalue().splitlines()]
    assert shown == [*range(1, 101, 10), 100]


def test_lines_are_whole_and_without_control_characters():
    progress, _, output = plain_progress(1)
    with progress:
        progress.note("a note [not markup] that is longer than the forty columns of the console")
        progress.update(1, SCALARS)
    note, line = output.getvalue().splitlines()
    assert note == "a note [not markup] that is longer than the forty columns of the console"
    assert line == progress_line(1, 1, SCALARS, 0.0)
    assert "\x1b" not in output.getvalue()


def test_the_last_update_is_shown_when_the_loop_breaks():
    progress, _, output = plain_progress(100)

    def loop() -> None:
        with progress:
            for step in (1, 2, 3):
                progress.update(step, {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert [line.split("·")[0].strip() for line in output.getvalue().splitlines()] == ["step   1/100", "step   3/100"]


def test_no_update_no_line():
    progress, _, output = plain_progress(100)
    with progress:
        pass
    assert output.getvalue() == ""


@pytest.mark.parametrize("first", [0, 50])
def test_time_left_counts_the_steps_of_this_process(first):
    progress, clock, output = plain_progress(100, first_step=first, every_seconds=0)
    with progress:
        for step in range(first + 1, 61):
            clock.now += 2.0
            progress.update(step, {})
    assert output.getvalue().splitlines()[-1].split(" · ")[1] == f"ETA {duration(2.0 * 40)}"


def test_time_left_follows_the_recent_steps():
    progress, clock, output = plain_progress(100, every_seconds=0)
    with progress:
        for step in range(1, 51):
            clock.now += 60.0 if step <= 25 else 1.0  # a slow start is forgotten
            progress.update(step, {})
    assert output.getvalue().splitlines()[-1].split(" · ")[1] == "ETA 0:50"


def test_a_terminal_has_one_live_line():
    output = io.StringIO()
    console = Console(file=output, width=30, force_terminal=True, force_interactive=True)
    with Progress(3, console=console) as progress:
        for step in (1, 2, 3):
            progress.update(step, SCALARS)
        progress.note("saved")
    written = output.getvalue()
    assert "step 1/3" in written and "step 3/3" in written and "saved" in written
    assert written.count("\x1b[2K") >= 2  # the line before is erased, not scrolled away
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", written)
    assert max(map(len, visible.splitlines())) == 30
    assert "…" in written  # too narrow: cut, never wrapped


@pytest.mark.parametrize(
    ("width", "words"), [(80, "live 5/8 · rank 2.91 (null 4.10)"), (120, "effective rank 2.91 (null")]
)
def test_an_ordinary_terminal_shows_what_matters(width, words):
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, force_interactive=True)
    with Progress(1000, console=console) as progress:
        progress.update(999, SCALARS)
    assert "step  999/1000 · ETA 0:00 · reward 0.432 · live" in output.getvalue()
    assert words in output.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0:00"), (59.6, "1:00"), (3599.0, "59:59"), (86400.0, "24:00:00"), (math.inf, "–")]
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown
