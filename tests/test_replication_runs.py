"""Tampering that hashes cannot show: the forger hashes the folder again, and the files no longer belong together."""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from scoregram.runs import open_run
from scoregram.studies.grpo_rank.presets import run_name
from scoregram.studies.verification import (
    EXHIBITS_CHECK,
    FILES_CHECK,
    FORM_CHECK,
    HASH_CHECK,
    NUMBER_CHECK,
    RUNS_CHECK,
    verify,
)
from tests.replication_cases import draw_group, put_record, recompute, stream, write_parts, write_trial
from tests.run_cases import ENVIRONMENT

SETTING = {"preset": "toy", "about": "a toy", "model": "tiny", "steps": 2, "temperature": 1.0}


def rank_of(group: Any) -> float:
    """Effective rank from the definition: singular values of the rows, here columns of a Cholesky-like root."""
    energies = np.linalg.eigvalsh(np.outer(group.advantages, group.advantages) * group.gram.numpy())
    sizes = np.sqrt(energies.clip(min=0))
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def metrics_of(step: int, groups: list[Any]) -> dict[str, Any]:
    """The metrics of a step, written out from its groups."""
    trained = [group for group in groups if group.kind == "train" and group.step == step]
    rewards = np.array([group.rewards.tolist() for group in trained])
    live = [group for group in trained if group.rewards[0] != group.rewards[1]]
    found = {"reward": rewards.mean(), "groups": len(trained), "live_groups": len(live)}
    found["group/effective_rank"] = np.mean([rank_of(group) for group in live])
    greedy = [float(group.rewards[0]) for group in groups if group.kind == "test, greedy" and group.step == step]
    sampled = [r for group in groups if group.kind == "test" and group.step == step for r in group.rewards.tolist()]
    if greedy:
        found |= {
            "eval/accuracy": np.mean(greedy),
            "eval/problems": len(greedy),
            "eval/sampled_accuracy": np.mean(sampled),
        }
    return {name: float(value) for name, value in found.items()}


def sound_replication(folder: Path) -> Path:
    """Two runs whose metrics follow from their groups, with settings and a figure."""
    for seed in (0, 1):
        generator = stream(seed)
        groups = [draw_group(step, 2, generator, rewards=(1.0, 0.0)) for step in (1, 2) for _ in range(3)]
        groups += [draw_group(step, 2, generator, rewards=(1.0, 1.0)) for step in (1, 2) for _ in range(1 + seed)]
        untested = {"gram": None, "by_layer": {}}
        for place, kind, rewards in (
            *((place, "test, greedy", (float(place < 2 + seed),)) for place in range(5)),
            *((place, "test", (1.0, float(place < 1 + seed))) for place in range(5)),
        ):
            named = {"prompt_id": f"p/{place}", "kind": kind, **untested}
            groups.append(draw_group(2, len(rewards), generator, rewards=rewards, **named))
        metrics = {step: metrics_of(step, groups) for step in (1, 2)}
        name = f"R2-seed{seed}"
        more = {"out": f"toy/runs/{name}", "steps": 2, "model": "toy/start", "temperature": 1.0}
        write_trial(folder / "runs" / name, size=2, seed=seed, groups=groups, metrics=metrics, **more)
    (folder / "setting.json").write_text(json.dumps(SETTING))
    (folder / "figures").mkdir()
    (folder / "figures/figure-1.svg").write_text("<svg><title>Traces</title></svg>")
    write_parts(folder, *recompute(folder))
    put_record(folder, config=SETTING)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return sound_replication(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(sound, tmp_path / "r"))


def faults(folder: Path) -> dict[str, tuple[str, ...]]:
    verification = verify(folder, recompute=recompute, run_name=run_name)
    return {check.name: check.sentences for check in verification.checks if check.state == "failed"}


def hash_again(folder: Path) -> None:
    """What a forger without a key can do: compute tables and hashes from the changed files, and write the record."""
    write_parts(folder, *recompute(folder))
    put_record(folder, config=SETTING)


def edit_metric(folder: Path, step: int, name: str, change: Callable[[float], float]) -> None:
    path = folder / "runs/R2-seed0/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {name: change(line[name])} if line["step"] == step else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any], run: str = "R2-seed0") -> None:
    path = folder / "runs" / run / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    change(stored)
    path.write_text(yaml.safe_dump(stored, sort_keys=False))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_runs_that_belong_together_pass_and_are_counted(folder):
    verification = verify(folder, recompute=recompute, run_name=run_name)
    assert verification.passed, verification.lines()
    (said,) = (check.sentences[0] for check in verification.checks if check.name == RUNS_CHECK)
    # reward, groups, live_groups and effective_rank at two steps, and three evaluation metrics, in each of two runs
    assert "2 runs (no commit) agree with their names and settings, 22 metrics with groups" in said
    assert "2 runs do not record whether their source had uncommitted changes" in said


def test_settings_are_hashed_and_are_those_of_the_record(folder):
    (folder / "setting.json").write_text(json.dumps(SETTING | {"about": "a giant"}))
    assert faults(folder)[FILES_CHECK] == ("setting.json was changed",)
    put_record(folder, config=SETTING)
    assert faults(folder) == {RUNS_CHECK: ("setting.json and the settings in the record are not the same",)}


def test_settings_are_those_of_the_runs(folder):
    (folder / "setting.json").write_text(json.dumps(SETTING | {"temperature": 0.7}))
    put_record(folder, config=SETTING | {"temperature": 0.7})
    said = faults(folder)[RUNS_CHECK]
    assert said[0] == "runs/R2-seed0: temperature is 1.0 in its config and 0.7 in the settings" and len(said) == 2


def test_figures_are_hashed(folder):
    figure = folder / "figures/figure-1.svg"
    figure.write_text(figure.read_text().replace("Traces", "Rank two"))
    assert faults(folder) == {FILES_CHECK: ("figures/figure-1.svg was changed",)}
    figure.rename(figure.with_name("figure-2.svg"))
    assert len(faults(folder)[FILES_CHECK]) == 2


@pytest.mark.parametrize("title", ["setting", "exhibit", "figure"])
def test_no_title_can_be_edited(folder, title):
    if title == "exhibit":
        exhibits, verdicts = recompute(folder)
        exhibits[0]["title"] = "Rank two"
        write_parts(folder, exhibits, verdicts)
    if title == "setting":  # `about` is the title of the page
        (folder / "setting.json").write_text(json.dumps(SETTING | {"about": "Rank two"}))
    if title == "figure":
        (folder / "figures/figure-1.svg").write_text("<svg><title>Rank two</title></svg>")
    assert FILES_CHECK in faults(folder)
    if title == "exhibit":  # nor with all hashes made again
        put_record(folder, config=SETTING)
        assert 'title: "Rank two" recorded, "Traces" recomputed' in faults(folder)[EXHIBITS_CHECK][0]


@pytest.mark.parametrize("name", ["eval/accuracy", "eval/sampled_accuracy", "eval/problems", "reward", "live_groups"])
def test_a_metric_is_that_of_the_stored_groups(folder, name):
    edit_metric(folder, 2, name, lambda value: value + 0.2)
    hash_again(folder)
    (fault,) = faults(folder)[RUNS_CHECK]
    assert fault.startswith(f"runs/R2-seed0: metrics.jsonl, step 2: {name} is ") and "but the groups give" in fault


def test_a_spectrum_is_that_of_the_stored_gram(folder):
    edit_metric(folder, 1, "group/effective_rank", lambda value: value * (1 + 1e-4))
    hash_again(folder)
    assert "step 1: group/effective_rank is" in faults(folder)[RUNS_CHECK][0]


def test_rows_belong_to_the_step_in_the_name_of_their_file(folder):
    groups = folder / "runs/R2-seed0/groups"
    swap(groups / "step-000000001-000.parquet", groups / "step-000000002-000.parquet")
    hash_again(folder)
    said = faults(folder)[RUNS_CHECK]
    assert "runs/R2-seed0: groups/step-000000001-000.parquet holds rows of step 2" in said
    assert "runs/R2-seed0: groups/step-000000002-000.parquet holds rows of step 1" in said


def test_a_run_is_the_one_in_the_name_of_its_folder(folder):
    swap(folder / "runs/R2-seed0", folder / "runs/R2-seed1")
    hash_again(folder)
    said = faults(folder)[RUNS_CHECK]
    assert "runs/R2-seed0: its config was written for a run named 'R2-seed1'" in said
    for run in ("R2-seed0", "R2-seed1"):
        edit_config(folder, lambda stored, run=run: stored["config"].update(out=f"toy/runs/{run}"), run)
    hash_again(folder)
    assert "runs/R2-seed0: its config is that of 'R2-seed1'" in faults(folder)[RUNS_CHECK]


def test_groups_are_those_of_their_run(folder):
    swap(folder / "runs/R2-seed0/groups", folder / "runs/R2-seed1/groups")
    hash_again(folder)
    said = " ".join(faults(folder)[RUNS_CHECK])
    assert "runs/R2-seed0: metrics.jsonl, step 1: reward is" in said and "eval/accuracy" in said


def test_groups_have_the_size_in_the_config(folder):
    edit_config(folder, lambda stored: stored["config"].update(group_size=3, out="toy/runs/R3-seed0"))
    (folder / "runs/R2-seed0").rename(folder / "runs/R3-seed0")
    hash_again(folder)
    assert "groups/step-000000001-000.parquet holds groups of 2, not of 3" in faults(folder)[RUNS_CHECK][0]


def test_a_step_with_groups_has_metrics(folder):
    path = folder / "runs/R2-seed0/metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    hash_again(folder)
    assert faults(folder)[RUNS_CHECK] == ("runs/R2-seed0: metrics.jsonl has no line for step 2, which has groups",)


def test_evaluations_without_stored_rewards_are_counted(folder):
    kept = [group for group in open_run(folder / "runs/R2-seed0").groups() if group.kind == "train"]
    shutil.rmtree(folder / "runs/R2-seed0")
    more = {"out": "toy/runs/R2-seed0", "steps": 2, "temperature": 1.0}
    metrics = {step: metrics_of(step, kept) for step in (1, 2)}
    metrics[2] |= {"eval/accuracy": 0.4}
    write_trial(folder / "runs/R2-seed0", size=2, seed=0, groups=kept, metrics=metrics, **more)
    hash_again(folder)
    said = [check.sentences[0] for check in verify(folder).checks if check.name == RUNS_CHECK]
    assert said[0].endswith("1 evaluations stored no rewards to compare their metrics with")


def test_the_environment_is_that_of_the_runs(folder):
    path = folder / "replication.json"
    record = json.loads(path.read_text())
    assert record["content"]["environment"] == [{"environment": ENVIRONMENT, "runs": ["R2-seed0", "R2-seed1"]}]
    edit_config(folder, lambda stored: stored["environment"].update(python="4"))
    put_record(folder, config=SETTING)
    environments = json.loads(path.read_text())["content"]["environment"]
    assert [one["runs"] for one in environments] == [["R2-seed0"], ["R2-seed1"]]
    edit_config(folder, lambda stored: stored["environment"].update(python="5"))
    assert "the environments in the record are not those in the runs' configs" in faults(folder)[RUNS_CHECK]


def test_a_source_is_that_of_the_commit_it_names(folder, monkeypatch):
    monkeypatch.setattr("scoregram.studies.run_files.commit_tree", {"abc1234def": "t1"}.get)
    source = {"commit": "abc1234def", "dirty": False, "tree": "t1"}
    edit_config(folder, lambda stored: stored["environment"].update(source))
    put_record(folder, config=SETTING)
    verification = verify(folder, recompute=recompute, run_name=run_name)
    assert verification.passed and "2 runs (no commit, abc1234)" in " ".join(verification.lines())
    edit_config(folder, lambda stored: stored["environment"].update(tree="t2"))
    put_record(folder, config=SETTING)
    assert "its source was not that of commit abc1234def" in faults(folder)[RUNS_CHECK][0]
    edit_config(folder, lambda stored: stored["environment"].update(dirty=None))  # not claimed: counted, not a fault
    put_record(folder, config=SETTING)
    verification = verify(folder, recompute=recompute, run_name=run_name)
    assert verification.passed and "1 runs had uncommitted changes" in " ".join(verification.lines())


def first_version(folder: Path) -> None:
    """Put a record of version 1 in place, written out by hand."""
    path = folder / "replication.json"
    content = json.loads(path.read_text())["content"]
    files = {name: hashed for name, hashed in content["files"].items() if name.startswith(("runs/", "ex", "ver"))}
    old = {name: content[name] for name in ("about", "config", "created", "exhibits_sha256", "seeds", "verdicts")}
    old |= {"environment": {"python": "3"}, "files": files, "schema_version": 1, "signer": None}
    text = json.dumps(old, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_text(json.dumps(numbered(old, text), sort_keys=True, indent=2, ensure_ascii=False) + "\n")


def numbered(content: dict[str, Any], text: str) -> dict[str, Any]:
    digest = hashlib.sha256(text.encode())
    letters = base64.b32encode(digest.digest()[:16]).decode().rstrip("=")
    return {
        "content": content,
        "number": f"scoregram:2026:{letters}",
        "record_type": "replication_record",
        "schema_version": 1,
        "sha256": digest.hexdigest(),
        "short_number": f"scoregram:{letters[:8]}",
    }


def test_a_record_of_version_1_verifies_and_says_what_it_cannot_show(folder):
    first_version(folder)
    verification = verify(folder, recompute=recompute, run_name=run_name)
    assert verification.passed, verification.lines()
    assert (
        sum("version 1: neither setting.json nor the figures are hashed" in line for line in verification.lines()) == 1
    )
    (folder / "figures/figure-1.svg").write_text("<svg/>")
    assert verify(folder).passed  # as the line says
    (folder / "setting.json").write_text(json.dumps(SETTING | {"about": "a giant"}))
    assert faults(folder).keys() == {RUNS_CHECK}  # not hashed, but the record repeats the settings
    (folder / "runs/R2-seed0/config.yaml").write_text("")
    assert FILES_CHECK in faults(folder)


def test_the_two_versions_of_a_record_must_agree(folder):
    path = folder / "replication.json"
    text = path.read_text()
    path.write_text(text.replace('"schema_version": 2', '"schema_version": 1', 1))
    assert FORM_CHECK in faults(folder)
    record = json.loads(text)
    record["schema_version"] = 1
    path.write_text(json.dumps(record))
    assert faults(folder).keys().isdisjoint({HASH_CHECK, NUMBER_CHECK}) and FORM_CHECK in faults(folder)
