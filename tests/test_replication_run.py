"""A whole replication in seconds: trained, judged, recorded, verified, shown; and done again only where it must be."""

import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from datetime import date
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from scoregram.checks import ScoregramError
from scoregram.exhibits import from_plain, to_plain
from scoregram.runs import GroupRecord, open_run
from scoregram.runs.disk import METRICS, parts
from scoregram.runs.records import groups_to_table, read_part, table_to_bytes, table_to_groups
from scoregram.studies.grpo_rank.evidence import SECTIONS, headline, recompute, write_evidence, write_replication_report
from scoregram.studies.grpo_rank.presets import PRESETS, START, Preset, plan, read_setting, start_of, write_setting
from scoregram.studies.grpo_rank.readings import read_evidence
from scoregram.studies.grpo_rank.replication import replicate, run_all, steps_done
from scoregram.studies.record import write_record
from scoregram.studies.verification import EXHIBITS_CHECK, FILES_CHECK, RUNS_CHECK, VERDICTS_CHECK, verify
from scoregram.training.loop import Trained
from scoregram.training.several import run_in_processes, run_one
from tests.run_cases import ENVIRONMENT
from tests.training_cases import JUDGE, save_policy, without_times

REPLICATION = "scoregram.studies.grpo_rank.replication"
SEEDS = 2
QUIET = Console(file=StringIO())


@pytest.fixture(scope="module")
def mini(tmp_path_factory) -> Preset:
    """The smallest experiment with all parts of a real one."""
    return Preset(
        about="a random policy, seconds",
        model=str(save_policy(tmp_path_factory.mktemp("policy"))),
        task="arithmetic:3",
        reward=JUDGE,
        sizes=(2, 4),
        seeds=SEEDS,
        steps=4,
        batch_size=8,
        learning_rate=1e-3,
        max_new_tokens=6,
        measure_every=1,
        batches_every=2,
        eval_every=2,
        eval_problems=6,
        rivals=("rloo",),
    )


@pytest.fixture(scope="module")
def made(mini, tmp_path_factory) -> Path:
    """Its folder, to be left as it is."""
    folder = tmp_path_factory.mktemp("replication") / "mini"
    write_setting(folder, "mini", mini, seeds=SEEDS)
    assert run_all(mini, folder, seeds=SEEDS, device="cpu", console=QUIET)
    write_evidence(folder)
    put_record(folder)
    write_replication_report(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy to change; the runs still begin with the policy of the first."""
    return Path(shutil.copytree(made, tmp_path / "mini"))


def put_record(folder: Path) -> Path:
    config = dict(read_setting(folder))
    return write_record(
        folder, about="paper", config=config, seeds=range(SEEDS), created=date(2026, 7, 4), environment=ENVIRONMENT
    )


def groups_of(folder: Path) -> list[GroupRecord]:
    return list(open_run(folder).groups())


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs with the same numbers, times apart."""
    assert without_times(open_run(one).metrics()) == without_times(open_run(other).metrics())
    for a, b in zip(groups_of(one), groups_of(other), strict=True):
        assert (a.step, a.kind, a.prompt_id, a.rewards.tolist()) == (b.step, b.kind, b.prompt_id, b.rewards.tolist())
        assert (a.gram is None) == (b.gram is None)
        if a.gram is not None and b.gram is not None:
            torch.testing.assert_close(a.gram, b.gram, rtol=0, atol=0)


def test_the_plan_is_every_size_and_rival_for_every_seed_at_equal_rollouts(mini, tmp_path):
    runs = plan(mini, tmp_path, seeds=3, device="cpu")
    assert [run.name for run in runs[:3]] == ["R2-seed0", "R4-seed0", "rloo-R4-seed0"]
    assert len(runs) == len({run.config.out for run in runs}) == 9
    for run in runs:
        config = run.config
        assert (config.group_size, config.seed, config.method) == (run.size, run.seed, run.method)
        assert config.model == str(tmp_path / START)
        assert config.batch_size == 8 and config.probe_problems * run.size == 8 and config.reward == JUDGE
    assert {run.config.reward for run in plan(PRESETS["quick"], tmp_path, seeds=1, device="cpu")} == {None}
    large = plan(replace(mini, sizes=(16,), batch_size=16), tmp_path, seeds=1, device="cpu")
    assert [run.name for run in large] == ["R16-seed0", "rloo-R16-seed0"]


def test_a_policy_that_is_taught_is_taught_anew_for_every_seed_that_is_missing(mini, tmp_path):
    taught = replace(mini, warm_epochs=0.02, warm_batch=4, sizes=(2,), rivals=(), steps=1)
    assert run_all(taught, tmp_path, seeds=2, device="cpu", console=QUIET)
    first, second = (start_of(taught, tmp_path, seed) for seed in (0, 1))
    assert [run.config.model for run in plan(taught, tmp_path, seeds=2, device="cpu")] == [str(first), str(second)]
    assert weights_of(first) != weights_of(second)
    before = weights_of(first)
    shutil.rmtree(tmp_path / START)
    shutil.rmtree(tmp_path / "runs" / "R2-seed0")
    assert run_all(taught, tmp_path, seeds=2, device="cpu", console=QUIET)
    assert weights_of(first) == before and not second.exists()


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_planned(name, tmp_path):
    preset = PRESETS[name]
    assert preset.batches_every % preset.measure_every == 0
    assert plan(preset, tmp_path, seeds=preset.seeds, device="cpu")


def test_the_record_verifies_with_everything_computed_anew_to_the_same_text(made):
    exhibits, verdicts = recompute(made)
    verification = verify(made, recompute=lambda _: (exhibits, verdicts))
    assert {check.state for check in verification.checks if check.name != "signature"} == {"passed"}
    assert verification.passed
    ids = [one["id"] for one in exhibits]
    assert sorted(ids) == sorted(name for _, _, names in SECTIONS for name in names)
    assert to_plain(from_plain(exhibits)) == exhibits
    for name, again in (("exhibits", exhibits), ("verdicts", verdicts)):
        assert json.dumps({name: again}) == json.dumps(json.loads((made / f"{name}.json").read_bytes()))
    assert {(tuple(one["seeds"]), one["task"]) for one in verdicts} == {((0, 1), "arithmetic:3")}


def test_the_report_has_the_sections_and_the_verdict(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    assert headline(json.loads((made / "verdicts.json").read_bytes())["verdicts"]).split("”")[1] in unescape(text)
    assert all(title in text for title, _, _ in SECTIONS if "'" not in title)
    assert "a random policy, seconds" in text


def test_evidence_holds_what_was_asked_for(made, mini):
    evidence = read_evidence(made)
    assert evidence.sizes == mini.sizes and evidence.seeds == (0, 1)
    assert {trial.method for trial in evidence.trials} == {"grpo-paper", "rloo"}
    kinds = {census.kind for census in evidence.census}
    assert {"train", "fixed", "fixed, sampled at 0.7, scored at 0.7", "fixed, sampled at 0.7, scored at 1"} == kinds
    assert evidence.live(size=2) and evidence.live(size=4) and evidence.live(size=4, method="rloo")
    for census in evidence.census:
        assert census.groups == 8 // census.trial.size
        live = [r for r in evidence.readings if (r.trial, r.step, r.kind) == (census.trial, census.step, census.kind)]
        assert len(live) == census.alive


def test_what_is_complete_is_not_trained_again(made, mini, monkeypatch):
    monkeypatch.setattr(f"{REPLICATION}.run_one", lambda config: pytest.fail(f"trained {config.out}"))
    monkeypatch.setattr(f"{REPLICATION}.prepare_start", lambda *_, **__: pytest.fail("made a start"))
    assert run_all(mini, made, seeds=SEEDS, device="cpu", console=QUIET)


def test_what_was_cut_short_is_done_again_to_the_same_numbers(made, folder, mini, monkeypatch):
    cut, lost = folder / "runs/R4-seed1", folder / "runs/R2-seed0"
    lines = (cut / METRICS).read_bytes().splitlines(keepends=True)
    (cut / METRICS).write_bytes(b"".join(lines[:-2]) + lines[-2][:5])
    shutil.rmtree(lost)
    trained: list[str] = []

    def counted(config) -> Trained:
        trained.append(config.out.name)
        return run_one(config)

    monkeypatch.setattr(f"{REPLICATION}.run_one", counted)
    assert run_all(mini, folder, seeds=SEEDS, device="cpu", console=QUIET)
    assert trained == ["R2-seed0", "R4-seed1"]
    for name in trained:
        assert_same_run(made / "runs" / name, folder / "runs" / name)
    assert verify(folder, recompute=recompute).checks[-2].state == "passed"


def test_a_run_in_the_making_can_be_looked_at(folder):
    cut = folder / "runs/R4-seed1"
    lines = (cut / METRICS).read_bytes().splitlines(keepends=True)
    (cut / METRICS).write_bytes(lines[0] + lines[1][:7])
    for step, path in parts(cut / "groups"):
        if step > 0:
            path.unlink()
    (folder / "runs/R2-seed0" / METRICS).write_bytes(b"")
    shutil.rmtree(folder / "runs/R2-seed0/groups")
    exhibits, verdicts = recompute(folder)
    assert to_plain(from_plain(exhibits)) == exhibits
    json.dumps(verdicts, allow_nan=False)


def test_a_stopped_run_stops_the_replication(folder, mini, monkeypatch):
    shutil.rmtree(folder / "runs/R2-seed0")
    shutil.rmtree(folder / "runs/R4-seed1")
    asked: list[str] = []

    def stopped(config) -> Trained:
        asked.append(config.out.name)
        return Trained(config.out, 1, interrupted=True)

    monkeypatch.setattr(f"{REPLICATION}.run_one", stopped)
    assert not run_all(mini, folder, seeds=SEEDS, device="cpu", console=QUIET)
    assert asked == ["R2-seed0"]
    monkeypatch.setattr(f"{REPLICATION}.PRESETS", {"mini": mini})
    out = StringIO()
    assert replicate("mini", folder, device="cpu", console=Console(file=out)) == 130
    assert "Stopped. The same command continues from here" in out.getvalue()


def test_a_stop_between_processes_leaves_the_rest_undone(mini, tmp_path, monkeypatch):
    """As Ctrl-C does: it reaches whoever waits for the runs."""
    futures: list[Future[Trained]] = []

    class Pool:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.cancelled = False

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            assert self.cancelled

        def submit(self, *_: Any) -> Future[Trained]:
            futures.append(Future())
            if len(futures) == 1:
                futures[0].set_exception(KeyboardInterrupt())
            return futures[-1]

        def shutdown(self, *, cancel_futures: bool) -> None:
            self.cancelled = cancel_futures

    monkeypatch.setattr("scoregram.training.several.ProcessPoolExecutor", Pool)
    planned = plan(mini, tmp_path, seeds=1, device="cpu")
    assert not run_in_processes([one.config for one in planned], 2)
    assert len(futures) == 3


@pytest.mark.slow
def test_two_processes_train_the_same_runs(made, mini, tmp_path):
    folder = tmp_path / "mini"
    shutil.copytree(made / START, folder / START)
    assert run_all(replace(mini, workers=2), folder, seeds=1, device="cpu", console=QUIET)
    for name in ("R2-seed0", "R4-seed0", "rloo-R4-seed0"):
        assert_same_run(made / "runs" / name, folder / "runs" / name)


def test_another_replication_in_the_same_folder_is_refused(folder, mini):
    with pytest.raises(ScoregramError, match="must hold the same replication, got steps 4"):
        write_setting(folder, "mini", replace(mini, steps=5), seeds=SEEDS)
    with pytest.raises(ScoregramError, match="must hold the same replication, got preset 'mini'"):
        write_setting(folder, "other", mini, seeds=SEEDS)
    with pytest.raises(ScoregramError, match="has runs of 2 seeds, got 1"):
        write_setting(folder, "mini", mini, seeds=1)
    assert read_setting(folder)["seeds"] == SEEDS
    write_setting(folder, "mini", mini, seeds=3)
    assert read_setting(folder)["seeds"] == 3


def test_a_folder_without_a_replication_says_so(tmp_path):
    with pytest.raises(ScoregramError, match="must hold runs, got none"):
        read_evidence(tmp_path)
    with pytest.raises(ScoregramError, match="must be the folder of a replication"):
        read_setting(tmp_path)


def test_a_changed_gram_does_not_give_the_same_exhibits(folder):
    run = folder / "runs/R4-seed0"
    path = next(path for step, path in parts(run / "groups") if step > 0 and _is_live(path))
    groups = list(table_to_groups(read_part(path)))
    place = next(i for i, group in enumerate(groups) if _live(group))
    gram = groups[place].gram
    assert gram is not None
    groups[place] = replace(groups[place], gram=gram + torch.diag(gram.diagonal() * torch.tensor([1.0, 0, 0, 0])))
    path.write_bytes(table_to_bytes(groups_to_table(groups)))
    failed = {check.name: check.sentences for check in verify(folder).checks if check.state == "failed"}
    assert f"runs/R4-seed0/groups/{path.name} was changed" in failed[FILES_CHECK]
    put_record(folder)  # now every hash agrees again
    failed = {
        check.name: check.sentences for check in verify(folder, recompute=recompute).checks if check.state == "failed"
    }
    assert FILES_CHECK not in failed and failed.keys() <= {RUNS_CHECK, EXHIBITS_CHECK, VERDICTS_CHECK}
    assert all("group/effective_rank is" in text for text in failed[RUNS_CHECK])
    said = failed[EXHIBITS_CHECK]
    assert any(text.startswith('table "table-1", row 2 (R = 4), column "effective rank"') for text in said)
    assert not any("(R = 2)" in text and "table-1" in text for text in said)


def _live(group: GroupRecord) -> bool:
    return group.kind == "train" and bool(group.rewards.max() > group.rewards.min())


def _is_live(path: Path) -> bool:
    return any(map(_live, table_to_groups(read_part(path))))


def test_the_command_prints_table_verdict_and_report(folder, mini, monkeypatch):
    monkeypatch.setattr(f"{REPLICATION}.PRESETS", {"mini": mini})
    out = StringIO()
    assert replicate("mini", folder, device="cpu", console=Console(file=out, width=120)) == 0
    text = out.getvalue()
    assert (
        text.index("Table 1") < text.index("orthogonal") < text.index("“Effective rank about 2") < text.index("Report")
    )
    assert all(word in text for word in ("paper", "~2", "0.7–0.8"))
    verdicts = json.loads((folder / "verdicts.json").read_bytes())["verdicts"]
    assert headline(verdicts) in " ".join(text.split())
    assert f"Report: {folder / 'report.html'}" in text
    assert all(f"{claim}: " in text for claim in ("fig-2", "fig-3", "sec-8-future-2", "sec-8-future-3"))
    assert verify(folder).passed


def test_the_command_refuses_what_cannot_be(tmp_path):
    with pytest.raises(ScoregramError, match="quick"):
        replicate("quik", tmp_path)
    with pytest.raises(ScoregramError, match="must be at least 1, got 0"):
        replicate("quick", tmp_path, seeds=0)
    assert not list(tmp_path.iterdir())


def test_steps_are_counted_from_what_was_written(made, mini, tmp_path):
    runs = plan(mini, made, seeds=SEEDS, device="cpu")
    assert {steps_done(run) for run in runs} == {4}
    assert {steps_done(run) for run in plan(mini, tmp_path, seeds=1, device="cpu")} == {0}


def test_a_key_that_cannot_be_read_is_told_of_before_anything_is_trained(tmp_path):
    with pytest.raises(ScoregramError, match=r"absent\.pem"):
        replicate("quick", tmp_path / "out", sign_with=tmp_path / "absent.pem")
    assert not (tmp_path / "out").exists()
