import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scoregram.checks import ScoregramError
from scoregram.runs import RunWriter, open_run
from tests.run_cases import CONFIG, ENVIRONMENT, create, make_group, make_rollout, resume, tree, write, write_step


def test_layout(tmp_path):
    write(tmp_path / "a" / "run", range(1, 6))
    assert list(tree(tmp_path / "a" / "run")) == [
        "checkpoints",
        "checkpoints/step-2",
        "checkpoints/step-2/SHA256SUMS",
        "checkpoints/step-2/inner",
        "checkpoints/step-2/inner/more.txt",
        "checkpoints/step-2/state.bin",
        "checkpoints/step-4",
        "checkpoints/step-4/SHA256SUMS",
        "checkpoints/step-4/inner",
        "checkpoints/step-4/inner/more.txt",
        "checkpoints/step-4/state.bin",
        "config.yaml",
        "groups",
        *(f"groups/step-00000000{step}-000.parquet" for step in range(1, 6)),
        "metrics.jsonl",
        "rollouts",
        *(f"rollouts/step-00000000{step}-000.parquet" for step in range(1, 6)),
        "updates",
        *(f"updates/step-00000000{step}-000.parquet" for step in range(1, 6)),
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "a/run/metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_the_config_says_how_and_where(tmp_path):
    RunWriter.create(tmp_path / "r", CONFIG).close()
    stored = yaml.safe_load((tmp_path / "r/config.yaml").read_text())
    assert stored["schema"] == 1 and stored["config"] == CONFIG
    assert {"python", "scoregram", "commit", "dirty", "packages", "cpu", "gpus"} <= stored["environment"].keys()


def test_lines_are_seen_while_the_run_goes_on(tmp_path):
    with create(tmp_path / "r") as writer:
        for step in range(3):
            writer.write_metrics(step, {})
            assert len(open_run(tmp_path / "r").metrics()) == step + 1


def test_equal_writers_give_equal_folders(tmp_path):
    write(tmp_path / "a", range(5))
    write(tmp_path / "b", range(5))
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("kept", [-1, 1, 4, 7])
def test_resume_cuts_back_and_goes_on_to_the_same_bytes(tmp_path, kept):
    write(tmp_path / "whole", range(8))
    write(tmp_path / "cut", range(8))
    resume(tmp_path / "cut", kept).close()
    run = open_run(tmp_path / "cut")
    assert [line["step"] for line in run.metrics()] == list(range(kept + 1))
    assert [group.step for group in run.groups()] == [step for step in range(kept + 1) for _ in range(2)]
    assert [rollout.step for rollout in run.rollouts()] == [step for step in range(kept + 1) for _ in range(2)]
    assert all(step <= kept for step in run.checkpoints)
    with resume(tmp_path / "cut", kept) as writer:
        for step in range(kept + 1, 8):
            write_step(writer, step)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_resume_without_a_step_keeps_what_is_complete(tmp_path):
    write(tmp_path / "r", range(3))
    before = tree(tmp_path / "r")
    with (tmp_path / "r/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    (tmp_path / "r/groups/.partial-step-000000003-000.parquet").write_bytes(b"PAR1")
    (tmp_path / "r/checkpoints/.partial-step-4").mkdir()
    assert len(open_run(tmp_path / "r").notes) == 3
    resume(tmp_path / "r", None).close()
    assert tree(tmp_path / "r") == before
    assert open_run(tmp_path / "r").notes == ()


def test_several_parts_of_one_step(tmp_path):
    with create(tmp_path / "r") as writer:
        writer.write_groups(0, [make_group(0, 2, seed=0)])
        writer.write_groups(0, [make_group(0, 2, seed=1)])
    with resume(tmp_path / "r", 0) as writer:
        writer.write_groups(0, [make_group(0, 2, seed=2)])
        writer.write_groups(1, [])
    assert [group.prompt_id for group in open_run(tmp_path / "r").groups()] == ["p/0", "p/1", "p/2"]
    assert len(list((tmp_path / "r/groups").iterdir())) == 3


def test_another_environment_is_told_apart(tmp_path):
    write(tmp_path / "r", range(6))
    other = {"python": "4", "commit": None}
    RunWriter.resume(tmp_path / "r", 4, environment=other).close()
    assert open_run(tmp_path / "r").resumed == ({"step": 4, "environment": other},)
    RunWriter.resume(tmp_path / "r", 4, environment=other).close()
    assert open_run(tmp_path / "r").resumed == ({"step": 4, "environment": other},)
    resume(tmp_path / "r", 2).close()  # back before it, on the first machine
    assert open_run(tmp_path / "r").resumed == ()
    assert open_run(tmp_path / "r").environment == ENVIRONMENT


# What a folder may be


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(ScoregramError, match=r"must be empty, got thesis.tex\. Choose a new or an empty folder"):
            create(tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_with_a_run_is_overwritten_only_when_asked(tmp_path):
    write(tmp_path, range(3))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ScoregramError, match=r"got a run\. Resume it, overwrite it, or choose another folder"):
        create(tmp_path)
    with create(tmp_path, overwrite=True) as writer:
        writer.write_metrics(0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl", "notes.txt"]


def test_somebody_elses_config_is_not_ours_to_overwrite(tmp_path):
    (tmp_path / "config.yaml").write_text("theme: dark")
    with pytest.raises(ScoregramError, match="must be written by scoregram"):
        create(tmp_path, overwrite=True)
    assert (tmp_path / "config.yaml").read_text() == "theme: dark"


def test_a_folder_left_by_a_kill_during_creation_is_empty(tmp_path):
    (tmp_path / ".partial-config.yaml").write_bytes(b"sche")
    create(tmp_path).close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.yaml", "metrics.jsonl"]


@pytest.mark.parametrize("inside", ["file", "file/run"])
def test_a_path_through_a_file_is_refused(tmp_path, inside):
    (tmp_path / "file").touch()
    with pytest.raises(ScoregramError, match=r"file.* must be writable, got .* Choose a path"):
        create(tmp_path / inside)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    def forbid(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", forbid)
    with pytest.raises(ScoregramError, match=r"got Permission denied\. Choose a folder that you may write to"):
        create(tmp_path / "r")


def test_one_writer_at_a_time(tmp_path):
    with create(tmp_path / "r"):
        for again in (lambda: resume(tmp_path / "r", 0), lambda: create(tmp_path / "r", overwrite=True)):
            with pytest.raises(ScoregramError, match=r"one writer, got this process, .* to it\. Close that writer"):
                again()
    resume(tmp_path / "r", 0).close()


def test_a_writer_of_another_process_is_named_as_such(tmp_path):
    create(tmp_path / "r").close()
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", script, str(tmp_path / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        with pytest.raises(
            ScoregramError, match=r"one writer, got another process .* Wait until that process has ended"
        ):
            resume(tmp_path / "r", 0)
        other.communicate(b"\n")


def test_a_failed_start_leaves_no_lock(tmp_path):
    write(tmp_path / "r", range(2))
    with pytest.raises(ScoregramError, match="same config"):
        resume(tmp_path / "r", 1, config={"seed": 8})
    resume(tmp_path / "r", 1).close()


def test_resume_wants_the_same_config(tmp_path):
    write(tmp_path / "r", range(2))
    before = tree(tmp_path / "r")
    resume(tmp_path / "r", 1, config=CONFIG).close()
    asked = {**CONFIG, "optimiser": {"name": "sgd", "lr": 1e-6}, "steps": 9}
    with pytest.raises(ScoregramError) as caught:
        resume(tmp_path / "r", -1, config=asked)
    message = str(caught.value)
    assert "optimiser.name: adamw in the run, sgd requested; steps: nothing in the run, 9 requested" in message
    assert tree(tmp_path / "r") == before
    resume(tmp_path / "r", 1, config={**CONFIG, "steps": 9}, may_differ=["steps"]).close()
    assert open_run(tmp_path / "r").config == {**CONFIG, "steps": 9}


def test_resume_wants_a_run(tmp_path):
    with pytest.raises(ScoregramError, match=r"must be a run folder with a config.yaml, got no such folder"):
        resume(tmp_path / "r", 0)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"a": {"b": [1, {2}]}}, r"config\.a\.b\[1\] must be a number, a string, a list or a mapping"),
        ({"f": print}, r"config\.f"),
    ],
)
def test_a_config_must_be_plain(tmp_path, config, where):
    with pytest.raises(ScoregramError, match=where):
        RunWriter.create(tmp_path / "r", config)
    assert not (tmp_path / "r").exists()


# What a call may be


def test_a_step_has_one_line(tmp_path):
    with create(tmp_path / "r") as writer:
        writer.write_metrics(5, {"a": 1})
        for step in (5, 4):
            with pytest.raises(ScoregramError, match=r"steps must increase beyond 5, got .\. Pass all scalars"):
                writer.write_metrics(step, {"eval/accuracy": 1})
    with resume(tmp_path / "r", 5) as writer, pytest.raises(ScoregramError, match="beyond 5"):
        writer.write_metrics(5, {})


def test_records_belong_to_the_step(tmp_path):
    with create(tmp_path / "r") as writer:
        with pytest.raises(ScoregramError, match="records must be of step 1, got 0"):
            writer.write_groups(1, [make_group(0, 2)])
        with pytest.raises(ScoregramError, match="records must be of step 1, got 0"):
            writer.write_rollouts(1, [make_rollout(0, 0, 0)])
        with pytest.raises(ScoregramError, match="step must lie in"):
            writer.write_metrics(-1, {})


def test_a_closed_writer_says_so(tmp_path):
    writer = create(tmp_path / "r")
    writer.close()
    writer.close()
    with pytest.raises(ScoregramError, match="must be open, got a writer that was closed"):
        writer.write_metrics(0, {})


# Checkpoints


def checkpoint(writer: RunWriter, step: int) -> None:
    with writer.checkpoint(step) as folder:
        (folder / "w").write_bytes(b"w")


def test_all_checkpoints_are_kept_unless_asked(tmp_path):
    with create(tmp_path / "r", keep_checkpoints=None) as writer:
        for step in (1, 9, 10, 100):
            checkpoint(writer, step)
        with pytest.raises(ScoregramError, match="must be new"):
            checkpoint(writer, 100)
    assert list(open_run(tmp_path / "r").checkpoints) == [1, 9, 10, 100]


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_checkpoints_are_kept(tmp_path, keep):
    steps = (1, 9, 10, 100, 101)
    with create(tmp_path / "r", keep_checkpoints=keep) as writer:
        for count, step in enumerate(steps, start=1):
            checkpoint(writer, step)
            assert list(open_run(tmp_path / "r").checkpoints) == list(steps[max(count - keep, 0) : count])
    assert open_run(tmp_path / "r").latest_checkpoint == (101, tmp_path / "r/checkpoints/step-101")
    resume(tmp_path / "r", None, keep_checkpoints=1).close()
    assert list(open_run(tmp_path / "r").checkpoints) == [101]


@pytest.mark.parametrize("start", [create, lambda folder, **options: resume(folder, 0, **options)])
def test_the_only_checkpoint_cannot_be_asked_away(tmp_path, start):
    with pytest.raises(ScoregramError, match="keep_checkpoints must be at least 1, got 0"):
        start(tmp_path / "r", keep_checkpoints=0)


@pytest.mark.parametrize("error", [RuntimeError("model"), KeyboardInterrupt(), FileNotFoundError(2, "data")])
def test_a_failed_checkpoint_is_no_checkpoint(tmp_path, error):
    with create(tmp_path / "r") as writer:
        checkpoint(writer, 1)
        with pytest.raises(type(error)) as caught, writer.checkpoint(2) as folder:  # noqa: PT012
            (folder / "w").write_bytes(b"half")
            raise error
        assert caught.value is error
        assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["step-1"]
        checkpoint(writer, 2)


def test_a_checkpoint_where_nothing_may_be_written(tmp_path):
    with create(tmp_path / "r") as writer:
        (tmp_path / "r/checkpoints").touch()
        with pytest.raises(ScoregramError, match=r"step-2 must be writable, got File exists\. Choose a path"):
            checkpoint(writer, 2)


def wrapped_full_disk() -> Exception:
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 470") from None
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        wrapped_full_disk(),
        RuntimeError("No space left on device (28)"),
    ],
)
def test_a_checkpoint_on_a_full_disk(tmp_path, error):
    with create(tmp_path / "r") as writer:
        checkpoint(writer, 1)
        message = r"step-2 must be writable, got No space left on device\. Free"
        with pytest.raises(ScoregramError, match=message), writer.checkpoint(2):
            raise error
        assert list(open_run(tmp_path / "r").checkpoints) == [1]
