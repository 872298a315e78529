"""`measure` in a process that is really killed (SIGKILL) at operations on the disk; `--resume` completes the run."""

import os
import shutil
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.measure import measure
from scoregram.runs import Run, open_run
from tests.dump_cases import ROLLOUTS, lines, plain_record
from tests.kill_cases import ended_well, forked, kill_at, numbers_reached
from tests.training_cases import save_policy

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

STEPS = 3


def measured(model: Path, dump: Path, out: Path) -> None:
    """Measure the dump, or go on with a run that was begun."""
    resume = (out / "config.yaml").exists()
    config = MeasureConfig(model=str(model), rollouts=dump, out=out, device="cpu", resume=resume)
    measure(config, console=Console(file=StringIO()))


def content(run: Run) -> tuple[list[Any], list[Any], list[dict[str, float]]]:
    """Groups, rollouts and lines of a run, as values that can be compared."""
    groups = [(one.step, one.prompt_id, one.gram, one.rewards, one.advantages, one.lengths) for one in run.groups()]
    rollouts = [(one.step, one.prompt_id, one.index, one.completion, one.token_ids) for one in run.rollouts()]
    return groups, rollouts, [dict(line) for line in run.metrics()]


def require_same(found: Run, whole: Run) -> None:
    """Raise AssertionError unless a run has the content of another, its numbers from a Gram to 1e-5."""
    for some, others in zip(content(found)[:2], content(whole)[:2], strict=True):
        assert len(some) == len(others)
        for one, other in zip(some, others, strict=True):
            for a, b in zip(one, other, strict=True):
                if isinstance(a, torch.Tensor):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
                else:
                    assert a == b
    for one, other in zip(content(found)[2], content(whole)[2], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-8, nan_ok=True)


def require_readable(out: Path, whole: Run) -> None:
    """What a killed process left is a beginning of the whole run, or nothing."""
    if (out / "config.yaml").exists():
        run = open_run(out)
        names = [(one.step, one.prompt_id) for one in run.groups()]
        assert names == [(one.step, one.prompt_id) for one in whole.groups()][: len(names)]
        assert [line["step"] for line in run.metrics()] == [line["step"] for line in whole.metrics()][
            : len(run.metrics())
        ]


def kill_measures(work: Path, model: Path, dump: Path, operations: Iterable[int]) -> None:
    """Kill a measurement at each operation, then complete it; print the kills and the last operation tried."""
    torch.set_num_threads(1)
    assert ended_well(forked(lambda: measured(model, dump, work / "whole")))
    whole, kills, operation = open_run(work / "whole"), 0, 0
    for operation in operations:
        out = work / str(operation)
        if ended_well(forked(lambda: (kill_at(operation), measured(model, dump, out)))):  # noqa: B023
            print("reached", kills, operation)
            return
        kills += 1
        require_readable(out, whole)
        assert ended_well(forked(lambda: measured(model, dump, out)))  # noqa: B023
        require_same(open_run(out), whole)
        shutil.rmtree(out)
    print("reached", kills, operation)


def killed(folder: Path, operations: Iterable[int]) -> tuple[int, int]:
    """Kills, and the last operation tried, as the process that forks and kills reports them."""
    records = [
        plain_record(i, one) | {"step": step, "group": f"{step}/{plain_record(i, one)['group']}"}
        for step in range(STEPS)
        for i, one in enumerate(ROLLOUTS)
    ]
    dump, model = lines(folder / "dump.jsonl", records), save_policy(folder / "model")
    return numbers_reached(kill_measures, folder, model, dump, operations)


@pytest.mark.slow  # runs in `make test-kill`
def test_a_measurement_killed_at_some_operations_is_completed(tmp_path):
    kills, _ = killed(tmp_path, (2, 23, 55))
    assert kills == 3


@pytest.mark.slow
def test_a_measurement_killed_at_every_operation_is_completed(tmp_path):
    kills, last = killed(tmp_path, range(1, 10_000))
    assert kills == last - 1 > 50
