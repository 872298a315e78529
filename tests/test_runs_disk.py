"""Disks that fill, limits that bite, and the space that is asked for beforehand."""

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from scoregram.checks import ScoregramError
from scoregram.runs import RunWriter, open_run, require_space
from scoregram.runs.disk import disk_is_full, make_folder, remove, write_atomically
from tests.forked import started
from tests.run_cases import create, make_group, resume, tree, write, write_step


def write_steps(writer: RunWriter, steps: range) -> None:
    for step in steps:
        write_step(writer, step)


class FullDisk:
    """`os.write` that takes `room` bytes and then has no space, as a full disk does: in the middle of a write."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.write

    def __call__(self, descriptor: int, content: memoryview) -> int:
        """Write what fits."""
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.write(descriptor, content[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 1, 30, 700, 1500, 4000])
def test_a_full_disk_leaves_the_steps_before_it(tmp_path, monkeypatch, room):
    write(tmp_path / "before", range(2))
    shutil.copytree(tmp_path / "before", tmp_path / "r")
    with resume(tmp_path / "r", 1) as writer:
        with monkeypatch.context() as full:
            full.setattr(os, "write", FullDisk(room))
            with pytest.raises(
                ScoregramError, match=r"must be writable, got No space left on device\. Free some space"
            ):
                write_steps(writer, range(2, 9))
        run = open_run(tmp_path / "r")
        assert run.notes == ()
        assert all(list(run.groups({line["step"]})) for line in run.metrics())
    resume(tmp_path / "r", 1).close()
    assert tree(tmp_path / "r") == tree(tmp_path / "before")


def test_a_writer_can_go_on_when_there_is_space_again(tmp_path, monkeypatch):
    with create(tmp_path / "r") as writer:
        writer.write_metrics(0, {})
        with monkeypatch.context() as full:
            full.setattr(os, "write", FullDisk(5))
            with pytest.raises(ScoregramError):
                writer.write_metrics(1, {"reward": 1.0})
            with pytest.raises(ScoregramError):
                writer.write_groups(1, [make_group(1, 2)])
        writer.write_metrics(1, {"reward": 1.0})
        writer.write_groups(1, [make_group(1, 2)])
    assert len(open_run(tmp_path / "r").metrics()) == 2
    assert len(list(open_run(tmp_path / "r").groups())) == 1


def test_each_step_of_a_file_keeps_the_old_content_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")
    for name in ("open", "write", "fsync", "replace"):
        with monkeypatch.context() as failing:

            def refuse(*_: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            failing.setattr(os, name, refuse)
            with pytest.raises(OSError, match="Input/output error"):
                write_atomically(path, b"new")
        assert tree(tmp_path) == {"x": b"old"}
    write_atomically(path, b"new")
    assert tree(tmp_path) == {"x": b"new"}


def test_nothing_is_renamed_before_it_is_on_the_disk(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def watched(name: str):
        real = getattr(os, name)

        def call(first, *rest):
            answer = real(first, *rest)
            if name == "open":
                names[answer] = Path(first).name
            done.append((name, names[first] if name == "fsync" else Path(first).name))
            return answer

        return call

    with create(tmp_path / "r") as writer:
        writer.write_metrics(0, {})
        with monkeypatch.context() as watching:
            for name in ("open", "fsync", "replace"):
                watching.setattr(os, name, watched(name))
            names[writer._metrics] = "metrics.jsonl"
            writer.write_groups(0, [make_group(0, 2)])
            with writer.checkpoint(0) as folder:
                (folder / "inner").mkdir()
                (folder / "inner" / "w").write_bytes(b"w")
    part = ".partial-step-000000000-000.parquet"
    groups = [("fsync", "r"), ("fsync", part), ("replace", part), ("fsync", "groups")]
    kept = [
        ("fsync", "r"),
        ("fsync", "metrics.jsonl"),
        ("fsync", "SHA256SUMS"),
        ("fsync", ".partial-step-0"),
        ("fsync", "w"),
        ("fsync", "inner"),
    ]
    renamed = [("replace", ".partial-step-0"), ("fsync", "checkpoints")]
    assert [each for each in done if each[0] != "open"] == groups + kept + renamed


def write_under_a_limit(folder: Path, limit: int, what: str) -> None:
    """Go on with a run while no file may have more than `limit` bytes; print what it is refused with."""
    writer = resume(folder, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        for step in range(2, 100):
            write_step(writer, step) if what == "all" else writer.write_metrics(step, {"reward": 0.1})
    except ScoregramError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(error)


@pytest.mark.parametrize(
    ("limit", "what", "named"), [(300, "metrics", "metrics.jsonl"), (2000, "all", "groups/step-0")]
)
def test_a_limit_of_the_system_on_file_size(tmp_path, limit, what, named):
    write(tmp_path / "r", range(2))
    before = tree(tmp_path / "r")
    process = started(write_under_a_limit, tmp_path / "r", limit, what, log=tmp_path / "log")
    process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 0, said
    assert named in said and "must be writable, got File too large. Raise the limit" in said
    assert open_run(tmp_path / "r").notes == ()
    resume(tmp_path / "r", 1).close()
    assert tree(tmp_path / "r") == before


def test_space_is_asked_for_before_work_begins(tmp_path):
    assert require_space(tmp_path / "not" / "there" / "yet", 1) == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.1
    )
    assert not (tmp_path / "not").exists()
    with pytest.raises(ScoregramError, match=r"run needs 1e\+09 GB of free disk, got .* GB\. Free some space"):
        require_space(tmp_path / "run", 10**18)


def test_a_full_disk_is_found_behind_other_errors():
    assert disk_is_full(None) is None
    assert disk_is_full(ValueError("shape")) is None
    assert disk_is_full(OSError(errno.EIO, "broken")) is None
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    wrapped = RuntimeError("archive")
    wrapped.__cause__ = full
    assert disk_is_full(wrapped) is full
    wrapped.__cause__ = wrapped  # a chain that bites its tail
    assert disk_is_full(wrapped) is None


def test_a_removed_folder_vanishes_at_once(tmp_path, monkeypatch):
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "file").touch()

    def stop(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    for path in list(tmp_path.iterdir()):
        remove(path)
    assert tree(tmp_path) == {}


def test_a_link_is_removed_without_what_it_points_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove(tmp_path / "link")
    assert set(tree(tmp_path)) == {"kept", "kept/file"}
