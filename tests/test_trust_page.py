"""docs/trust.md: every test that it names exists, its exceptions only shrink, and its counts are those of the tests."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
EXCEPTIONS = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "reformer", "cpmant", "prophetnet"}
"""Types of models that were ever listed as refused or not built. Names may be removed; a new one is a regression."""


def names_of_tests(file: str) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert len(named) >= 24
    assert [f"{file}::{name}" for file, name in named if name not in names_of_tests(file)] == []
    files = re.findall(r"`(tests/[\w*]+\.py)`", PAGE)
    assert [file for file in files if not list(ROOT.glob(file))] == []


def test_every_mended_item_has_a_row():
    rows = re.findall(r"^\| (\d+) \| .+ \| `test_\w+\.py::", PAGE, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 15))


def test_no_model_type_is_added_to_the_exceptions():
    listed = set(re.findall(r"^\| `([\w-]+)` \| (?:not built|refused) \|", PAGE, re.MULTILINE))
    assert listed and listed <= EXCEPTIONS


def test_kills_that_the_page_counts_are_those_of_the_tests():
    """The tests assert how many kills hit; the page has the same numbers."""
    row = next(line for line in PAGE.splitlines() if line.startswith("| a run that is killed"))
    source = {name: (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8") for name in KILL_TESTS}
    operations = re.search(r"assert operations == (\d+)", source["test_runs_kill"])
    assert operations is not None and f"{len(range(1, int(operations[1]), 3))} of a process that writes a run" in row
    at_random = re.findall(r"kills=(\d+)\)", source["test_runs_kill"])
    assert f"{at_random[0]} at random moments" in row and f"{at_random[1]} times at random" in row
    for name, told in KILL_TESTS.items():
        if told:
            kills = re.search(r"assert kills == (\d+)$", source[name], re.MULTILINE)
            assert kills is not None and f"{kills[1]} {told}" in row, name


KILL_TESTS = {
    "test_runs_kill": "",
    "test_measure_kill": "of `measure`",
    "test_integrations_trl_kill": "of a training with TRL",
}
"""Files of tests that kill processes, and what the page says after their number."""


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
@pytest.mark.parametrize(("variable", "status"), [("true", 1), ("", 0)])
def test_ci_fails_if_the_browser_tests_cannot_run(variable, status, tmp_path):
    """The function of `.ci/run`, where there is no browser and no right to install one."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^browser_tests\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "id").write_text("#!/bin/bash\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", f"set -euo pipefail\n{function[0]}\nbrowser_tests"],
        env={**os.environ, "PATH": str(tmp_path), "CI": variable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and ("NOT RUN" in done.stdout) == (status == 0), done.stdout + done.stderr
