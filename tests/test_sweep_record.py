"""The records of the sweep over architectures: `make test-all` writes the whole one, `make test-sweep` that of CI."""

import json
import re
from typing import Any, Literal

import pytest

from tests.sweep_record import RESULTS, SWEEP, SweepRecorder
from tests.test_gram_sweep import BUILT, FAST_ROUTE, FUSED_EXPERTS, PAGE, QUICK

CASES = {
    "every_axis_has_the_length_of_the_batch": len(BUILT),
    "no_parameter_is_replayed": len(FAST_ROUTE),
    "other_sizes_and_paddings": len(BUILT),
    "weights_streamed_and_rollouts_packed": len(BUILT),
    "checkpointing": len(BUILT),
    "lora": len(BUILT),
    "lora_on_fused_experts": len(FUSED_EXPERTS),
    "autocast_stays_at_its_noise_floor": len(BUILT),
}
"""Settings that the page lists, in its order, and their cases."""


def recorded(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a record by setting."""
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return {row["setting"]: row for row in rows}


@pytest.mark.parametrize("name", ["sweep-ci.json", "sweep-all.json"])
def test_no_case_of_the_record_failed(name):
    assert all(row["failed"] == 0 and row["passed"] > 0 for row in recorded(name).values())


def test_the_record_of_a_whole_run_has_every_case_and_the_page_shows_it():
    rows = {setting: recorded("sweep-all.json")[setting] for setting in CASES}
    counts = {setting: [row["passed"], row["skipped"]] for setting, row in rows.items()}
    assert {setting: sum(both) for setting, both in counts.items()} == CASES
    shown = re.findall(
        r"^\| [^|`]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.partition("## Mutants")[0], re.MULTILINE
    )
    columns = [[CASES[setting], *both] for setting, both in counts.items()]
    columns.append([sum(column) for column in zip(*columns, strict=True)])
    assert [[int(figure.replace(",", "")) for figure in row] for row in shown] == columns


def test_the_record_of_ci_has_the_cases_that_are_slow():
    rows = recorded("sweep-ci.json")
    slow = {
        "every_axis_has_the_length_of_the_batch": len({*BUILT} - QUICK),
        "no_parameter_is_replayed": len(FAST_ROUTE - QUICK),
        "lora_on_fused_experts": len(FUSED_EXPERTS),
    }
    assert {setting: rows[setting]["passed"] for setting in slow} == slow


def report(test: str, outcome: Literal["passed", "skipped", "failed"], when: Literal["setup", "call"] = "call") -> Any:
    """What pytest tells a plugin about one part of a test, which took a second."""
    why = {"passed": None, "skipped": (SWEEP, 1, "Skipped: no checkpointing"), "failed": "a trace\nE  off by 1"}[
        outcome
    ]
    return pytest.TestReport(test, (SWEEP, 1, test), {}, outcome, why, when, duration=1.0)


def test_cases_are_counted_by_setting(tmp_path):
    recorder = SweepRecorder(tmp_path / "sweep.json")
    recorder.pytest_sessionfinish()
    assert not recorder.path.exists(), "nothing ran"
    for name in ("gpt2", "opt"):
        recorder.pytest_runtest_logreport(report(f"{SWEEP}::test_lora[{name}]", "passed", "setup"))
        recorder.pytest_runtest_logreport(report(f"{SWEEP}::test_lora[{name}]", "passed"))
    recorder.pytest_runtest_logreport(report(f"{SWEEP}::test_lora[xlnet]", "skipped"))
    recorder.pytest_runtest_logreport(report(f"{SWEEP}::test_checkpointing[xlnet]", "failed", "setup"))
    recorder.pytest_runtest_logreport(report("tests/test_other.py::test_lora[gpt2]", "failed"))
    recorder.pytest_sessionfinish()
    record = json.loads(recorder.path.read_text(encoding="utf-8"))
    assert record["rows"] == [
        {"setting": "lora", "passed": 2, "skipped": 1, "failed": 0, "seconds": 5.0},
        {"setting": "checkpointing", "passed": 0, "skipped": 0, "failed": 1, "seconds": 1.0},
    ]
    assert record["not_passed"] == {"test_lora[xlnet]": "no checkpointing", "test_checkpointing[xlnet]": "E  off by 1"}
    assert record["settings"]["packages"]["transformers"]
