"""A pytest plugin that counts the outcomes of `test_gram_sweep.py` by setting, and writes them down.

`-p tests.sweep_record --sweep-record FILE` writes FILE in `benchmarks/results/`: `make test-sweep` writes
`sweep-ci.json`, `make test-all` writes `sweep-all.json`. A setting is a test of that file; its cases are model types.
"""

import datetime as dt
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
SWEEP = "tests/test_gram_sweep.py"


class SweepRecorder:
    """Outcomes by setting, the seconds that the cases took, and why a case did not pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: dict[str, Counter[str]] = defaultdict(lambda: Counter(passed=0, skipped=0, failed=0))
        self.seconds: dict[str, float] = defaultdict(float)
        self.not_passed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case once: by its call, or by a setup or teardown that does not pass."""
        file, _, test = report.nodeid.partition("::")
        if file != SWEEP:
            return
        setting = test.partition("[")[0].removeprefix("test_")
        self.seconds[setting] += report.duration
        if report.when == "call" or not report.passed:
            self.counts[setting][report.outcome] += 1
        if not report.passed:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext.splitlines()[-1]
            self.not_passed[test] = why.removeprefix("Skipped: ")

    def pytest_sessionfinish(self) -> None:
        """Write the record, unless no case ran."""
        if not self.counts:
            return
        from scoregram.runs import environment

        settings = {"date": dt.datetime.now(dt.UTC).date().isoformat(), **environment()}
        rows = [
            {"setting": setting, **counts, "seconds": round(self.seconds[setting], 1)}
            for setting, counts in self.counts.items()
        ]
        record = {"settings": settings, "rows": rows, "not_passed": self.not_passed}
        self.path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the record."""
    parser.addoption("--sweep-record", help="file in benchmarks/results that gets the counts of the sweep")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that sees all reports, not in the workers of xdist."""
    name = config.getoption("--sweep-record")
    if name and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SweepRecorder(RESULTS / name))
