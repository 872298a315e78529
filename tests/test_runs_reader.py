import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from scoregram.checks import ScoregramError
from scoregram.runs import FORMAT_VERSION, BatchNames, BatchRecord, GroupRecord, RolloutRecord, open_run
from scoregram.runs.reader import joined_tables
from tests.run_cases import (
    CONFIG,
    ENVIRONMENT,
    create,
    make_group,
    make_rollout,
    make_update,
    mean_reward,
    resume,
    tree,
    write,
)


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "r", range(3))
    run = open_run(tmp_path / "r")
    assert run.config == CONFIG and run.environment == ENVIRONMENT and run.resumed == () and run.notes == ()
    np.testing.assert_equal(
        run.metrics(), [{"step": step, "reward": mean_reward(step), "undefined": math.nan} for step in range(3)]
    )
    assert [(group.step, len(group.rewards)) for group in run.groups()] == [(s, r) for s in range(3) for r in (2, 3)]
    assert [len(rollout.token_ids) for rollout in run.rollouts()] == [6, 4] * 3
    before = tree(tmp_path / "r")
    list(run.groups())
    assert tree(tmp_path / "r") == before


def test_only_the_steps_asked_for(tmp_path):
    write(tmp_path / "r", range(5))
    run = open_run(str(tmp_path / "r"))
    assert {group.step for group in run.groups(range(3, sys.maxsize))} == {3, 4}
    assert {rollout.step for rollout in run.rollouts({0, 4, 9})} == {0, 4}


def test_one_part_at_a_time(tmp_path):
    write(tmp_path / "r", range(3))
    groups = open_run(tmp_path / "r").groups()
    next(groups)
    for path in sorted((tmp_path / "r/groups").iterdir())[1:]:
        path.write_bytes(b"damaged")  # not read yet, so not noticed yet
    next(groups)
    with pytest.raises(ScoregramError, match="must be a complete Parquet file"):
        next(groups)


def test_groups_without_layers(tmp_path):
    write(tmp_path / "r", range(1))
    run = open_run(tmp_path / "r")
    assert all(group.by_layer == {} and group.gram is not None for group in run.groups(layers=False))
    assert all(len(group.by_layer) == 2 for group in run.groups())


def test_parts_with_other_columns_keep_their_own(tmp_path):
    def with_statistics(step: int, **statistics: float) -> GroupRecord:
        return GroupRecord(**{**vars(make_group(step, 2)), "statistics": statistics})

    with create(tmp_path / "r") as writer:
        writer.write_groups(0, [with_statistics(0, a=1.0)])
        writer.write_groups(1, [with_statistics(1, b=2.0), with_statistics(1, a=math.nan)])
    run = open_run(tmp_path / "r")
    for layers in (True, False):  # a part at a time, and parts joined
        found = [group.statistics for group in run.groups(layers=layers)]
        np.testing.assert_equal(found, [{"a": 1.0}, {"b": 2.0}, {"a": math.nan}])


def test_a_run_that_has_only_begun(tmp_path):
    create(tmp_path / "r").close()
    run = open_run(tmp_path / "r")
    assert run.metrics() == [] and list(run.groups()) == [] and list(run.rollouts()) == []
    assert run.checkpoints == {} and run.latest_checkpoint is None


def test_a_series(tmp_path):
    with create(tmp_path / "r") as writer:
        for step in range(4):
            writer.write_metrics(step, {"reward": 0.5} | ({"eval/accuracy": step / 4} if step % 2 else {}))
    run = open_run(tmp_path / "r")
    steps, values = run.series("eval/accuracy")
    assert steps.tolist() == [1, 3] and values.tolist() == [0.25, 0.75]
    with pytest.raises(ScoregramError, match=r"must have logged loss, got eval/accuracy, reward, step\. Check"):
        run.series("loss")


def test_a_series_leaves_out_numbers_from_the_gram_of_steps_whose_self_check_failed(tmp_path):
    with create(tmp_path / "r") as writer:
        for step in range(1, 5):
            line = {"gram/snr": step / 4, "group/reward_std": 0.5, "reward": 0.5, "check/passed": float(step != 2)}
            writer.write_metrics(step, line)
        writer.write_metrics(5, {"gram/snr": 9.0})  # without a self-check, as scoregram's own trainer writes it
    run = open_run(tmp_path / "r")
    assert run.series("gram/snr")[0].tolist() == [1, 3, 4, 5]
    steps, values = run.series("gram/snr", failed=True)
    assert steps.tolist() == [2] and values.tolist() == [0.5]
    assert run.series("reward")[0].tolist() == run.series("group/reward_std")[0].tolist() == [1, 2, 3, 4]
    with create(tmp_path / "all") as writer:
        writer.write_metrics(1, {"gram/snr": 0.5, "check/passed": 0.0})
    with pytest.raises(
        ScoregramError, match=r"self-check passed, got 1 steps whose self-check failed\. Pass failed=True"
    ):
        open_run(tmp_path / "all").series("gram/snr")


def test_leftovers_are_noted_and_ignored(tmp_path):
    write(tmp_path / "r", range(2))
    with (tmp_path / "r/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "re')
    (tmp_path / "r/rollouts/.partial-step-000000002-000.parquet").write_bytes(b"PAR1")
    (tmp_path / "r/checkpoints/.partial-step-2").mkdir()
    (tmp_path / "r/groups/README").write_text("not a part")
    (tmp_path / "r/checkpoints/mine").mkdir()
    run = open_run(tmp_path / "r")
    assert len(run.metrics()) == 2 and len(list(run.rollouts())) == 4 and list(run.checkpoints) == [0]
    assert [note.partition(":")[0] for note in run.notes] == [
        "metrics.jsonl",
        "rollouts/.partial-step-000000002-000.parquet",
        "checkpoints/.partial-step-2",
    ]
    assert "15 bytes" in run.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema": 2, "config": {}}, r"schema 1 or older, got 2\. A newer scoregram wrote this run: upgrade"),
        ({"schema": "x", "config": {}}, "must be written by scoregram, got schema 'x'"),
        ({"config": {}}, "must be written by scoregram, got schema None"),
        ({"schema": 1}, "must be written by scoregram, got something else"),
        ([], "must be written by scoregram, got something else"),
    ],
)
def test_configs_that_are_not_ours_are_refused(tmp_path, content, message):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ScoregramError, match=message):
        open_run(tmp_path)


def test_a_folder_of_a_newer_format_is_neither_resumed_nor_overwritten(tmp_path):
    write(tmp_path / "r", range(2))
    path = tmp_path / "r" / "config.yaml"
    path.write_text(path.read_text().replace(f"schema: {FORMAT_VERSION}\n", f"schema: {FORMAT_VERSION + 1}\n", 1))
    before = tree(tmp_path / "r")
    for touch in (lambda folder: resume(folder, 0), lambda folder: create(folder, overwrite=True)):
        with pytest.raises(ScoregramError, match=r"pip install --upgrade scoregram"):
            touch(tmp_path / "r")
    assert tree(tmp_path / "r") == before


def test_a_run_keeps_its_format_version_when_it_is_resumed(tmp_path):
    write(tmp_path / "r", range(3))
    resume(tmp_path / "r", 1, environment={"python": "4"}).close()
    assert (tmp_path / "r" / "config.yaml").read_text().startswith(f"schema: {FORMAT_VERSION}\n")
    assert len(open_run(tmp_path / "r").metrics()) == 2


COMMITTED = sorted((Path(__file__).parents[1] / "results").rglob("config.yaml"))


def test_every_committed_run_has_a_format_version_that_this_reader_knows():
    assert COMMITTED
    for path in COMMITTED:
        assert 1 <= yaml.safe_load(path.read_text(encoding="utf-8"))["schema"] <= FORMAT_VERSION
        assert open_run(path.parent).config


@pytest.mark.parametrize("content", [b"a: [", b"a: \xff"])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ScoregramError, match=r"config\.yaml must be YAML"):
        open_run(tmp_path)


def test_what_is_not_a_run(tmp_path):
    cases = ((tmp_path, "a folder without it"), (tmp_path / "absent", "no such folder"), (tmp_path / "f", "a file"))
    for path, got in cases:
        (tmp_path / "f").touch()
        with pytest.raises(ScoregramError, match=f"must be a run folder with a config.yaml, got {got}"):
            open_run(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "groups", "rollouts", "updates", "checkpoints"])
def test_a_folder_for_a_file_and_a_file_for_a_folder_are_refused(tmp_path, name):
    """Read as empty, a `checkpoints` that is a file would let a resumed run begin anew and remove its records."""
    write(tmp_path / "r", range(3))
    path = tmp_path / "r" / name
    path.rename(tmp_path / "moved")
    path.mkdir() if name == "metrics.jsonl" else path.write_text("x")
    for touch in (open_run, lambda folder: resume(folder, 1)):
        with pytest.raises(ScoregramError, match=rf"{name} must be a (file|folder), got a (file|folder)"):
            touch(tmp_path / "r")


def test_parts_that_are_decoded_together_keep_their_rows(tmp_path):
    write(tmp_path / "r", range(5))
    with resume(tmp_path / "r", 4) as writer:
        other = make_group(5, 2)
        writer.write_groups(5, [GroupRecord(**{**vars(other), "statistics": {"another": 1.0}})])
    run = open_run(tmp_path / "r")
    one_by_one = [group for step in range(6) for group in run.groups([step])]
    together = list(run.groups(layers=False))
    assert [group.step for group in together] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    for group, alone in zip(together, one_by_one, strict=True):
        assert group.prompt_id == alone.prompt_id and group.statistics.keys() == alone.statistics.keys()
        for name in ("rewards", "lengths", "advantages", "gram"):
            assert getattr(group, name).equal(getattr(alone, name))


def test_at_most_so_many_tables_are_joined_and_only_equal_ones():
    first, other = pa.table({"a": [1]}), pa.table({"b": [1]})
    found = [table.to_pydict() for table in joined_tables([first, first, first, other, first], most=2)]
    assert found == [{"a": [1, 1]}, {"a": [1]}, {"b": [1]}, {"a": [1]}]


def test_names_of_batches_and_completions_need_no_other_column(tmp_path):
    gram = torch.arange(16.0).reshape(4, 4)
    batch = BatchRecord(
        step=0,
        kind="fixed",
        prompt_ids=("p/0", "p/1"),
        sizes=torch.tensor([2, 2]),
        rewards=torch.zeros(4),
        lengths=torch.ones(4, dtype=torch.int64),
        weights=torch.zeros(4),
        gram=gram + gram.mT,
    )
    probe = RolloutRecord(**{**vars(make_rollout(0, 1, 0)), "kind": "fixed"})
    with create(tmp_path / "r") as writer:
        writer.write_batches(0, [batch])
        writer.write_rollouts(0, [make_rollout(0, 0, 0), probe, make_rollout(0, 2, 0, tokens=4)])
    run = open_run(tmp_path / "r")
    assert list(run.batch_names()) == [BatchNames(0, "fixed", ("p/0", "p/1"))]
    assert next(run.batches()).gram.equal((gram + gram.mT).double())
    whole = [rollout.token_ids[2:].tolist() for rollout in run.rollouts() if rollout.kind == "train"]
    assert [ids.tolist() for ids in run.completion_ids(0)] == whole and len(whole) == 2
    assert [rollout.prompt_id for rollout in run.rollouts(prompts={"p/2", "p/9"})] == ["p/2"]
    assert [ids.tolist() for ids in run.completion_ids(0, ["fixed"])] == [probe.token_ids[2:].tolist()]


def test_reading_a_run_imports_no_pandas(tmp_path):
    write(tmp_path / "r", range(1))
    code = f"import sys; from scoregram.reading import read_run; read_run({str(tmp_path / 'r')!r}); "
    asked = subprocess.run([sys.executable, "-c", f"{code}print('pandas' in sys.modules)"], capture_output=True)
    assert asked.stdout.split() == [b"False"], asked.stderr


def test_sketches_of_updates_are_read_in_order_of_step(tmp_path):
    write(tmp_path / "r", range(4))
    steps, sketches = open_run(tmp_path / "r").update_sketches()
    assert steps.tolist() == [0, 1, 2, 3] and sketches.dtype == np.float32
    assert sketches.tolist() == [make_update(step).sketch.tolist() for step in range(4)]


def test_a_run_without_sketches_and_one_that_was_killed_while_it_wrote_one(tmp_path):
    write(tmp_path / "r", range(3))
    (tmp_path / "r/updates/step-000000002-000.parquet").rename(
        tmp_path / "r/updates/.partial-step-000000002-000.parquet"
    )
    run = open_run(tmp_path / "r")
    assert run.update_sketches()[0].tolist() == [0, 1]
    assert run.notes == ("updates/.partial-step-000000002-000.parquet: unfinished, ignored (a write was interrupted)",)
    shutil.rmtree(tmp_path / "r/updates")
    steps, sketches = open_run(tmp_path / "r").update_sketches()
    assert steps.shape == (0,) and sketches.shape == (0, 0)


def test_only_sketches_by_the_newest_map_are_compared(tmp_path):
    with create(tmp_path / "r") as writer:
        for step, settings in enumerate(({}, {"seed": 1}, {"features": 5}, {"features": 5, "seed": 1}, {"seed": 1})):
            writer.write_updates(step, [make_update(step, **settings)])
    assert open_run(tmp_path / "r").update_sketches()[0].tolist() == [1, 4]
