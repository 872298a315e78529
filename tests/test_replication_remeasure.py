"""Anyone with the starting policy measures Grams of a record again, from end to end on a small policy."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scoregram import cli
from scoregram.policy import Policy, PolicyConfig, load_policy, weights_sha256
from scoregram.runs import open_run, token_hash
from scoregram.studies.remeasurement import remeasure
from scoregram.studies.verification import TOKENS_CHECK, verify
from scoregram.tasks import load_task
from scoregram.training import train, write_warm_start
from tests.replication_cases import put_record, recompute, write_parts
from tests.training_cases import config_for, save_policy

TASK = "arithmetic:3"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A replication of one short run that keeps its evidence, beside its starting policy."""
    folder = tmp_path_factory.mktemp("kept")
    kept = {"keep_prompts": False, "keep_evidence": True, "checkpoint_every": 0, "final_checkpoint": False}
    probed = {"measure_every": 1, "probe_every": 1, "probe_problems": 2, "eval_every": 0, "rollouts_every": 0}
    train(config_for(save_policy(folder / "start"), folder / "runs/grpo-R4-seed0", steps=1, **kept, **probed))
    write_parts(folder, *recompute(folder))
    put_record(folder, config={})
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "r"))


def start_policy(folder: Path) -> Policy:
    return load_policy(PolicyConfig(model=str(folder / "start"), device="cpu", prompt="plain"), load_task(TASK))


def edit_column(folder: Path, name: str, change) -> None:
    for part in sorted((folder / "runs/grpo-R4-seed0/groups").glob("step-000000000-*.parquet")):
        table = pq.read_table(part)
        at = table.column_names.index(name)
        values = [change(value) for value in table.column(name).to_pylist()]
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
        pq.write_table(table, part)
    put_record(folder, config={})


def test_tokens_and_the_start_are_kept_but_no_prompt(made):
    run = open_run(made / "runs/grpo-R4-seed0")
    policy, task = start_policy(made), load_task(TASK)
    assert run.environment["start_sha256"] == weights_sha256(policy.model)
    measured = [group for group in run.groups() if group.gram is not None]
    assert {group.step for group in measured} == {0, 1}
    problems = {problem.id: problem for problem in (*task.test, *task.train)}
    for group in measured:
        assert group.completion_ids is not None and len(group.completion_ids) == int(group.lengths.sum())
        prompt = policy.encode_prompt(task.prompt(problems[group.prompt_id]))
        assert group.prompt is None and group.prompt_sha256 == token_hash(prompt)


def test_grams_follow_from_the_tokens(folder, capsys):
    found = remeasure(folder, 99)
    assert not found.faults and found.groups == found.candidates == 2 and found.largest < 1e-5
    assert remeasure(folder, 1).groups == 1
    assert cli.main(["verify", str(folder), "--no-recompute", "--remeasure", "2"]) == 0
    assert "passed       Grams follow from the tokens: 2 of 2 groups measured again" in capsys.readouterr().out


def test_an_edited_gram_or_token_is_found_though_all_hashes_agree(folder):
    edit_column(folder, "gram", lambda gram: [1.01 * value for value in gram])
    found = remeasure(folder, 2)
    assert len(found.faults) == 2 and "its Gram differs by 9.9e-03 of |K|, more than rounding" in found.faults[0]
    edit_column(folder, "gram", lambda gram: [value / 1.01 for value in gram])
    edit_column(folder, "completion_ids", lambda ids: ids[1:] + ids[:1])
    assert remeasure(folder, 2).faults
    edit_column(folder, "completion_ids", lambda ids: ids[-1:] + ids[:-1])
    edit_column(folder, "prompt_sha256", lambda value: "0" * 64)
    assert "the task has another prompt of this name" in remeasure(folder, 2).faults[0]


def test_other_weights_are_refused(folder, made, tmp_path):
    policy = start_policy(made)
    with torch.no_grad():
        next(policy.model.parameters()).mul_(1.001)
    write_warm_start(policy, tmp_path / "other")
    (fault,) = remeasure(folder, 1, start=tmp_path / "other").faults
    assert "are not those that the run started from" in fault
    shutil.rmtree(folder / "start")
    assert "its starting policy must be in" in remeasure(folder, 1).faults[0]
    check = verify(folder, remeasure=lambda path: remeasure(path, 1)).checks[-1]
    assert (check.name, check.state) == (TOKENS_CHECK, "failed")
    assert not remeasure(folder, 1, start=made / "start").faults


def test_a_record_without_tokens_says_so_and_has_not_passed(made):
    none = replace(remeasure(made, 0), candidates=0)
    verification = verify(made, remeasure=lambda path: none)
    assert verification.checks[-1].state == "not checked" and not verification.passed
