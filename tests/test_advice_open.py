"""What `advise` says where it cannot decide: that nothing was decided, which columns there are, and the true cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scoregram import cli
from scoregram.advice import advise_log, advise_run, run_log
from scoregram.advice.noise_rules import noise_needs
from scoregram.reading import RunReading, StoredGroup
from scoregram.runs import GroupRecord
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


# The actual cause


def measured_run(steps: int = 15, prompts: int = 4, size: int = 8, missing: int = 0, other_size: int = 0) -> RunReading:
    """A run with measured groups; the first rollout of `missing` groups of a step has no reward."""
    groups, lines = [], []
    for step in range(1, steps + 1):
        for place in range(prompts):
            count = other_size if other_size and place == 0 else size
            rewards = (torch.arange(count) % 2).double()
            if place < missing:
                rewards[0] = float("nan")
            record = GroupRecord(
                step=step,
                prompt_id=f"p/{step}/{place}",
                rewards=rewards,
                lengths=torch.full((count,), 4),
                advantages=(rewards - 0.5).nan_to_num(),
                gram=torch.eye(count, dtype=torch.float64),
            )
            groups.append(StoredGroup(record))
        lines.append({"step": step, "reward": 0.5, "gram/score_norm": 1.0, "gram/largest_share": 0.1})
    return RunReading({"method": "grpo"}, (), lines, groups)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"steps": 2}, "measure at least 13 steps, with groups of 4 or more and the Gram between prompts; here are 2"),
        ({"size": 3}, "measure at least 13 steps, with groups of 4 or more"),
        ({"prompts": 1}, "sample two prompts or more in a step: each has one"),
        ({"missing": 3}, "reward every rollout: 15 of the 20 measured groups of the last third have one without"),
        ({"other_size": 10}, "sample groups of one size: those of the last third have 8 to 10 rollouts"),
        ({}, "measure scores, with the Gram between prompts"),
    ],
)
def test_the_cause_that_keeps_the_noise_unknown_is_named(settings, cause):
    run = measured_run(**settings)
    assert noise_needs(run).startswith(cause)
    undecided = advise_run(run).undecided
    for name in ("batch size", "group size", "group size by phase"):
        assert undecided[name].startswith(cause), name


def test_whole_groups_are_counted_for_a_replay():
    assert advise_run(measured_run(missing=3)).undecided["estimator"].endswith("measured steps; here are 5")


def test_a_column_that_the_log_has_is_not_suggested():
    lines = [{"step": s, "reward": 0.5 + 0.01 * (s % 3), "my_reward": 0.5} for s in range(60)]
    told = advise_log(run_log("x", lines)).nothing_decided
    assert told.endswith("no rule can decide from them.") and "may be" not in told


def test_the_prompts_of_a_step_are_named_where_they_are_too_few():
    assert advise_run(measured_run(prompts=2)).undecided["dominating prompts"].endswith("in a step: here it has 2")
    assert "no shares of prompts" in advise_run(measured_run()).undecided["dominating prompts"]


def test_every_sentence_names_one_number_of_steps():
    """13 measured steps have 5 in their last third."""
    run = measured_run(steps=2)
    found = advise_run(run)
    told = " ".join((*found.trust, *(found.undecided[name] for name in ("dominating rollouts", "batch size"))))
    assert told.count("13") == 3 and "15" not in told
