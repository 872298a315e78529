"""The tests that need a CUDA device, run by `make test-gpu`; their outcome goes to `benchmarks/results/gpu-tests.json`.

The command needs the tree and a Python with torch, Triton, transformers, peft, pyarrow and pytest. Where jaxtyping or
beartype are missing, shapes are not checked; where Hypothesis or xdist are missing, nothing changes for these tests.
"""

import argparse
import datetime as dt
import json
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

TREE = Path(__file__).parent.parent
RECORD = TREE / "benchmarks" / "results" / "gpu-tests.json"
SHAPES = "--jaxtyping-packages=scoregram,beartype.beartype"


class UncheckedShape:
    """`Float[Tensor, "a b"]` is `Tensor`: an annotation without jaxtyping."""

    def __class_getitem__(cls, array_and_shape):
        """The array type alone."""
        return array_and_shape[0]


class OutcomeRecorder:
    """Counts of the outcomes of a test session, and the tests that did not pass."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
        self.not_passed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in setup or teardown counts as a failed test."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if not report.passed:
            self.not_passed[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported counts as a failed test."""
        if report.failed:
            self.counts["failed"] += 1
            self.not_passed[report.nodeid] = "not collected"


def leave_shapes_unchecked() -> None:
    """Stand in for jaxtyping, which only checks annotations, on a machine that does not have it."""
    module = ModuleType("jaxtyping")
    for name in ("Bool", "Float", "Int", "Shaped"):
        setattr(module, name, UncheckedShape)
    sys.modules["jaxtyping"] = module


def files_with_gpu_tests() -> list[str]:
    """Only these are collected: the others may import packages that the machine lacks."""
    paths = sorted((TREE / "tests").glob("test_*.py"))
    return [str(path) for path in paths if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def device_driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def main() -> int:
    """Run the tests marked `gpu` and write their record; 0 if at least one ran and none failed or was skipped."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("arguments", nargs="*", help="passed on to pytest")
    options = parser.parse_args()
    sys.path[:0] = [str(TREE / "src"), str(TREE)]
    checked = all(find_spec(name) for name in ("jaxtyping", "beartype"))
    if find_spec("jaxtyping") is None:
        leave_shapes_unchecked()
    recorder, began = OutcomeRecorder(), time.perf_counter()
    # The options of pyproject.toml name plugins that may be missing here.
    shapes = [SHAPES] if checked else []
    flags = ["-o", "addopts=", "--strict-markers", "-ra", "-q", "-m", "gpu", *shapes]
    status = pytest.main([*flags, *options.arguments, *files_with_gpu_tests()], plugins=[recorder])
    from scoregram.runs import environment  # after pytest has rewritten the assertions of its plugins

    settings = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "driver": device_driver(),
        "shapes_checked": checked,
        **environment(),
    }
    outcome = {**recorder.counts, "seconds": round(time.perf_counter() - began, 1), "not_passed": recorder.not_passed}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps({"settings": settings, "rows": [outcome]}, indent=1) + "\n", encoding="utf-8")
    print(f"{dict(recorder.counts)} written to {options.record}")
    is_green = status == 0 and recorder.counts["passed"] > 0 and not recorder.not_passed
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
