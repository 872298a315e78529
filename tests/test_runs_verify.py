import hashlib

import pytest

from scoregram.checks import ScoregramError
from scoregram.runs import changed_files, file_hashes
from tests.run_cases import tree, write


def test_every_data_file_has_its_hash(tmp_path):
    write(tmp_path / "r", range(3))
    (tmp_path / "r/report.html").write_text("a view of the data, not data")
    (tmp_path / "r/groups/.partial-step-000000003-000.parquet").write_bytes(b"")
    files = {name: content for name, content in tree(tmp_path / "r").items() if content is not None}
    data = {
        name for name in files if not name.startswith("checkpoints") and "report" not in name and ".partial" not in name
    }
    assert file_hashes(tmp_path / "r") == {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(data)}
    kept = file_hashes(tmp_path / "r", with_checkpoints=True).keys() - data
    assert kept == {name for name in files if name.startswith("checkpoints")}
    assert list(file_hashes(tmp_path / "r")) == sorted(data)


@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_one_changed_byte_is_found_and_named(tmp_path, with_checkpoints):
    write(tmp_path / "r", range(3))
    recorded = file_hashes(tmp_path / "r", with_checkpoints=with_checkpoints)
    assert changed_files(tmp_path / "r", recorded) == {}
    for name in recorded:
        path = tmp_path / "r" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert changed_files(tmp_path / "r", recorded) == {name: "changed"}
        path.write_bytes(content)


def test_files_that_went_and_came(tmp_path):
    write(tmp_path / "r", range(2))
    recorded = file_hashes(tmp_path / "r")
    (tmp_path / "r/groups/step-000000001-000.parquet").rename(tmp_path / "r/groups/step-000000009-000.parquet")
    assert changed_files(tmp_path / "r", recorded) == {
        "groups/step-000000001-000.parquet": "missing",
        "groups/step-000000009-000.parquet": "added",
    }


def test_equal_runs_have_equal_hashes(tmp_path):
    write(tmp_path / "a", range(2))
    write(tmp_path / "b", range(2))
    assert file_hashes(tmp_path / "a") == file_hashes(tmp_path / "b")


def test_only_runs_are_hashed(tmp_path):
    with pytest.raises(ScoregramError, match="must be a run folder"):
        file_hashes(tmp_path)
