"""What `advise` says where it cannot decide: that nothing was decided, which columns there are, and the actual cause."""

import json
from pathlib import Path
from typing import Any

import pytest

from scoregram import cli
from scoregram.advice import advise_log, run_log
from tests.test_advice import healthy, lines_of, log_of

# Nothing decided


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_unknown_columns_are_named_with_the_name_that_was_meant():
    lines = [{"step": s, "Reward Mean": 0.5, "Entropy": 0.1, "GradNorm": 1.0, "xyz": 0.0} for s in range(60)]
    told = advise_log(run_log("x", lines)).nothing_decided
    assert "with the columns Entropy, GradNorm, Reward Mean, xyz, and no rule knows any of them." in told
    meant = "Entropy may be `entropy`, GradNorm may be `grad_norm`, Reward Mean may be `reward`. Rename them"
    assert meant in told and "xyz may be" not in told


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "no step is logged."),
        (lines_of(healthy())[:5], "most rules need 10 steps or more."),
        ([{"step": 1, "reward": 0.5}], "the log has 1 step with the columns reward; most rules need"),
        ([{"step": s, "reward": 0.5 + 0.01 * (s % 3)} for s in range(60)], "no rule can decide from them."),
    ],
)
def test_a_log_that_decides_nothing_is_not_called_fine(lines, told, tmp_path, capsys):
    found = advise_log(run_log("x", lines))
    assert found.nothing_decided.startswith("Nothing could be decided: ") and told in found.nothing_decided
    assert found.nothing_decided in found.text() and found.plain()["nothing_decided"] == found.nothing_decided
    if not lines:
        return
    assert cli.main(["advise", written(tmp_path, lines), "--fail-on", "critical"]) == 0
    printed = capsys.readouterr()
    assert "Nothing could be decided" in printed.out and "Nothing to change was found" not in printed.out
    assert printed.err == "--fail-on critical: nothing could be decided, so the exit status is 0.\n"
    assert cli.main(["advise", written(tmp_path, lines), "--json", "--fail-on", "note"]) == 0
    assert json.loads(capsys.readouterr().out)["nothing_decided"]


def test_a_log_that_decides_something_says_so(tmp_path, capsys):
    assert cli.main(["advise", written(tmp_path, lines_of(healthy())), "--fail-on", "note"]) == 0
    printed = capsys.readouterr()
    assert "Nothing to change was found." in printed.out and not printed.err
    assert advise_log(log_of(kl=3.0)).nothing_decided == ""
