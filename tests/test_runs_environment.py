import getpass
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

import scoregram
from scoregram.runs import environment
from scoregram.runs.config import commit_tree, source_commit, source_tree


def test_versions_and_machine():
    found = environment()
    assert found["python"] == platform.python_version() and found["scoregram"] == scoregram.__version__
    assert found["packages"]["torch"] == version("torch") and found["threads"] == torch.get_num_threads()
    assert found["cpu"] and len(found["gpus"]) == torch.cuda.device_count()
    assert yaml.safe_load(yaml.safe_dump(found)) == found


def test_nobody_is_named():
    written = yaml.safe_dump(environment())
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in written
    assert f"/{getpass.getuser()}" not in written


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commit_and_dirt_of_the_source(tmp_path, monkeypatch):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert source_commit(package) == (None, None)  # no repository
    git(tmp_path, "init", "-q")
    assert source_commit(package) == (None, None)  # installed inside somebody's repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(package) == (commit, False)
    (tmp_path / "notes.txt").write_text("not the source")
    assert source_commit(package) == (commit, False)
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert source_commit(package) == (commit, False)
    monkeypatch.delenv("GIT_DIR")
    (package / "new.py").write_text("x = 1")
    assert source_commit(package) == (commit, True)
    monkeypatch.setenv("PATH", "")
    assert source_commit(package) == (None, None)  # no git


def test_a_source_without_its_history_may_be_told_its_commit(monkeypatch):
    monkeypatch.setenv("SCOREGRAM_COMMIT", "abc123")
    assert source_commit() == ("abc123", None)
    monkeypatch.setenv("SCOREGRAM_TREE", source_tree())
    assert source_commit() == ("abc123", False)
    monkeypatch.setenv("SCOREGRAM_TREE", "0" * 40)
    assert source_commit() == ("abc123", True)


def test_the_name_of_the_source_is_gits_own(tmp_path):
    package = tmp_path / "src" / "package"
    for name in ("a.py", "a-b.py", "a/__init__.py", "a/x.json", "ab.py", "b/c/d.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f"# {name}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_bytes(b"x")
    (package / "empty").mkdir()
    assert source_tree(package) == git(tmp_path, "rev-parse", "HEAD:src/package") == commit_tree("HEAD", package)
    (package / "b/c/d.py").write_text("x = 1")
    assert source_tree(package) != commit_tree("HEAD", package)
    assert commit_tree("0" * 40, package) is None
