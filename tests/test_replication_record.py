"""The record: one text for one value, a hash and a number that follow from the file alone, and all files in it."""

import base64
import hashlib
import json
import math
import os
import subprocess
from datetime import datetime
from pathlib import Path
from shutil import which

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.studies import record as records
from scoregram.studies.record import (
    canonical,
    data_files,
    hash_letters,
    parse_strict_json,
    read_list,
    record_number,
    sha256_hex,
    short_record_number,
)
from tests.replication_cases import PAPER, make_key, put_record, recompute, replication, write_parts
from tests.run_cases import ENVIRONMENT

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def reversed_keys(value):
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return tuple(map(reversed_keys, value)) if isinstance(value, list) else value


@given(PLAIN)
def test_a_value_has_one_text_and_the_text_gives_it_back(value):
    text = canonical(value)
    assert canonical(reversed_keys(value)) == text
    assert canonical(parse_strict_json(text, "it")) == text
    assert json.loads(text) == value
    assert canonical([text.decode()]) != text


def test_the_text_is_sorted_compact_and_not_escaped():
    assert (
        canonical({"b": [1, 2.0, None, True], "a": {"σ": "é\n"}}) == '{"a":{"σ":"é\\n"},"b":[1,2.0,null,true]}'.encode()
    )


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [0.0, math.nan]}, r"value\.a\[1\]"),
        (math.inf, "value"),
        ({1: "x"}, "string keys"),
        ({"\ud800": "x"}, "string keys"),
        ("\udfff", "value"),
        ({"path": object()}, r"value\.path"),
        ([2**63], r"value\[0\]"),
        (b"x", "value"),
    ],
)
def test_what_json_cannot_hold_is_refused_where_it_stands(value, where):
    with pytest.raises(ScoregramError, match=f"canonical: .*{where}"):
        canonical(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "'c' appears twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "inf"),
        (b'{"a": 1', "line 1"),
        (b"", "line 1"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'"\\ud800"', "be a JSON value"),
        (b"[" * 100_000, "RecursionError"),
        (b"9" * 5000, "digits"),
        (b"{} {}", "Extra data"),
    ],
)
def test_json_that_can_be_read_in_two_ways_is_refused(text, said):
    with pytest.raises(ScoregramError, match=f"must be strict JSON.*{said}"):
        parse_strict_json(text, "it")


def test_the_digest_is_sha256():
    assert sha256_hex(b"abc") == hashlib.sha256(b"abc").hexdigest()


def test_the_number_is_made_as_that_of_the_record_on_the_paper():
    """`pith:2026:…` and `pith:…` of arXiv:2606.29238, which have another prefix."""
    sha256 = "c10116930ee983efd2be3084939c01202fd5e7de134b1b7a1179abfdc94121ff"
    assert record_number(sha256, 2026) == "scoregram:2026:YEARNEYO5GB67UV6GCCJHHABEA"
    assert short_record_number(sha256) == "scoregram:YEARNEYO"


@given(st.binary(min_size=32, max_size=32))
def test_the_letters_stand_for_128_bits_of_the_hash(sha256):
    text = hash_letters(sha256.hex())
    assert len(text) == 26
    assert base64.b32decode(text + "======") == sha256[:16]


def test_hash_and_number_follow_from_the_file_alone(tmp_path):
    """Recomputed here from the description, with none of the code that wrote the file."""
    record = json.loads(replication(tmp_path).read_text())
    text = json.dumps(record["content"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    sha256 = hashlib.sha256(text.encode())
    name = base64.b32encode(sha256.digest()[:16]).decode().rstrip("=")
    assert record["sha256"] == sha256.hexdigest()
    assert record["number"] == f"scoregram:2026:{name}"
    assert record["short_number"] == f"scoregram:{name[:8]}"
    assert record.keys() == {"record_type", "schema_version", "sha256", "number", "short_number", "content"}


def test_the_content_says_what_was_run_and_what_came_out(tmp_path):
    content = json.loads(replication(tmp_path).read_text())["content"]
    exhibits, verdicts = recompute(tmp_path)
    assert content["about"] == PAPER and content["created"] == "2026-07-04"
    assert content["config"] == {"preset": "quick", "lr": 1e-6} and content["seeds"] == [0, 1]
    assert content["environment"] == [{"environment": ENVIRONMENT, "runs": ["a", "b"]}]
    assert content["recorded_with"] == ENVIRONMENT and content["signer"] is None
    assert content["verdicts"] == verdicts
    assert content["exhibits_sha256"] == hashlib.sha256(canonical(exhibits)).hexdigest()
    assert content["files"] == data_files(tmp_path)


def test_the_content_says_what_the_study_concludes_and_who_signed_it_when(tmp_path):
    """The fields of the record on the paper that a replication can fill."""
    pytest.importorskip("cryptography")
    own = records.Assessment("In one line.", "This much.", "That it carries over.", ("arXiv:1",), 1)
    make_key(tmp_path / "key.pem")
    content = json.loads(replication(tmp_path / "r", assessment=own, key_file=tmp_path / "key.pem").read_text())[
        "content"
    ]
    assert content["about_version"] == 1 and content["references"] == ["arXiv:1"]
    assert (content["summary"], content["strongest_claim"]) == ("In one line.", "This much.")
    assert content["weakest_assumption"] == "That it carries over."
    assert content["signed_at"] == "2026-07-04T12:30:15Z"
    assert content["key_id"] == hashlib.sha256(base64.b64decode(content["signer"])).hexdigest()[:32]
    unsigned = json.loads(put_record(tmp_path / "r").read_text())["content"]
    assert unsigned["key_id"] is unsigned["signed_at"] is unsigned["about_version"] is None and not unsigned["summary"]


def test_the_environment_is_found_out(tmp_path):
    content = json.loads(replication(tmp_path, environment=None).read_text())["content"]
    assert {"commit", "dirty", "tree", "python", "packages"} <= content["recorded_with"].keys()


def test_every_data_file_of_every_run_is_in_it(tmp_path):
    replication(tmp_path)
    data = ("config.yaml", "metrics.jsonl", "groups/*", "batches/*", "rollouts/*", "updates/*")
    paths = [path for run in "ab" for pattern in data for path in (tmp_path / "runs" / run).glob(pattern)]
    paths += [tmp_path / "exhibits.json", tmp_path / "verdicts.json"]
    expected = {path.relative_to(tmp_path).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert data_files(tmp_path) == expected
    assert list(data_files(tmp_path)) == sorted(expected)


def test_what_is_not_data_may_come_and_go(tmp_path):
    replication(tmp_path)
    before = data_files(tmp_path)
    for name in (
        "start/model.safetensors",
        "note.txt",
        "runs/a/checkpoints/step-9/state.bin",
        "runs/a/trackers/events",
        "runs/a/groups/.partial-step-000000009-000.parquet",
        "runs/a/.partial-groups/x",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "runs/a/report.html").unlink()
    assert data_files(tmp_path) == before


@pytest.mark.parametrize("name", ["runs/a/groups/x.txt", "runs/a/x.txt", "runs/x.txt", "runs/a/groups/report.html"])
def test_a_file_that_scoregram_did_not_write_counts(tmp_path, name):
    replication(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    assert name in data_files(tmp_path)


def test_links_that_could_hide_files_are_refused(tmp_path):
    replication(tmp_path / "r")
    for target in (tmp_path, tmp_path / "nowhere"):
        (tmp_path / "r/runs/a/link").symlink_to(target)
        with pytest.raises(ScoregramError, match=r"plain files and folders, got 'runs/a/link'"):
            data_files(tmp_path / "r")
        (tmp_path / "r/runs/a/link").unlink()


def test_equal_replications_have_equal_records(tmp_path):
    pytest.importorskip("cryptography")
    key = tmp_path / "key.pem"
    make_key(key)
    a, b = (replication(tmp_path / name, key_file=key) for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_a_time_of_day_is_left_out(tmp_path):
    replication(tmp_path)
    record = put_record(tmp_path, created=datetime(2031, 1, 2, 3, 4, 5))
    assert json.loads(record.read_text())["content"]["created"] == "2031-01-02"
    assert json.loads(record.read_text())["number"].startswith("scoregram:2031:")


def test_a_record_is_of_a_whole_replication(tmp_path):
    with pytest.raises(ScoregramError, match=r"write_record: .*runs must hold the runs, got none"):
        put_record(tmp_path)
    replication(tmp_path)
    (tmp_path / "runs/c").mkdir()
    with pytest.raises(ScoregramError, match="must be a run folder"):
        put_record(tmp_path)
    (tmp_path / "runs/c").rmdir()
    (tmp_path / "verdicts.json").unlink()
    with pytest.raises(ScoregramError, match=r"verdicts\.json must be readable"):
        put_record(tmp_path)


def test_a_refused_record_leaves_the_old_one(tmp_path):
    old = replication(tmp_path).read_bytes()
    for options, said in (
        ({"config": {"lr": math.nan}}, r"value\.config\.lr"),
        ({"key_file": tmp_path / "no.pem"}, "no.pem"),
    ):
        with pytest.raises(ScoregramError, match=said):
            put_record(tmp_path, **options)
        assert (tmp_path / "replication.json").read_bytes() == old
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"exhibits": {}}', '{"exhibits": [], "more": 1}', '{"verdicts": []}'])
def test_a_list_must_stand_alone_under_its_name(tmp_path, text):
    (tmp_path / "exhibits.json").write_text(text)
    with pytest.raises(ScoregramError, match=r"exhibits\.json must hold a list of exhibits"):
        read_list(tmp_path, "exhibits.json")


def test_lists_are_read_as_written(tmp_path):
    write_parts(tmp_path, [{"id": "σ"}], [])
    assert read_list(tmp_path, "exhibits.json") == [{"id": "σ"}]
    assert read_list(tmp_path, "verdicts.json") == []


def test_the_public_key_is_that_of_the_file(tmp_path):
    pytest.importorskip("cryptography")
    public = make_key(tmp_path / "key.pem")
    assert records.public_key(tmp_path / "key.pem") == base64.b64encode(public).decode()


def test_a_signature_is_of_one_message_and_by_one_key(tmp_path):
    pytest.importorskip("cryptography")
    for name in "ab":
        make_key(tmp_path / name)
    by_a, by_b = (records.sign(b"message", tmp_path / name) for name in "ab")
    assert not records.signature_faults(by_a) and records.is_valid_signature(by_a, b"message")
    assert not records.is_valid_signature(by_a, b"messagf")
    assert not records.is_valid_signature(by_a | {"public_key": by_b["public_key"]}, b"message")
    assert not records.is_valid_signature(by_a | {"signature": by_b["signature"]}, b"message")
    short = base64.b64encode(base64.b64decode(by_a["public_key"])[:-1]).decode()
    assert not records.is_valid_signature(by_a | {"public_key": short}, b"message")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    replication(tmp_path / "study")
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "runs":
            raise PermissionError(13, "closed", str(path))
        return scandir(path)

    assert any(name.startswith("runs/") for name in data_files(tmp_path / "study"))
    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ScoregramError, match="must be readable"):
        data_files(tmp_path / "study")


@pytest.mark.skipif(which("openssl") is None, reason="needs openssl")
def test_keys_and_signatures_are_those_of_openssl(tmp_path):
    pytest.importorskip("cryptography")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "key.pem")
    openssl("pkey", "-in", "key.pem", "-pubout", "-out", "public.pem")
    signature = records.sign(b"message", tmp_path / "key.pem")
    (tmp_path / "message").write_bytes(b"message")
    (tmp_path / "signature").write_bytes(base64.b64decode(signature["signature"]))
    openssl("pkeyutl", "-verify", "-pubin", "-inkey", "public.pem", "-rawin", "-in", "message", "-sigfile", "signature")
    openssl("genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:word", "-out", "locked.pem")
    openssl("genpkey", "-algorithm", "x25519", "-out", "other.pem")
    for name, said in (
        ("locked.pem", "without a password"),
        ("other.pem", "an ed25519 key"),
        ("public.pem", "private key in PEM"),
        ("message", "private key in PEM"),
        ("nothing", "must be readable"),
    ):
        with pytest.raises(ScoregramError, match=said):
            records.sign(b"message", tmp_path / name)


def test_without_the_package_signing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "can_verify", lambda: False)
    for call in (
        lambda: records.sign(b"", tmp_path / "key.pem"),
        lambda: records.is_valid_signature({}, b""),
    ):
        with pytest.raises(ScoregramError, match=r"pip install 'scoregram\[sign\]'"):
            call()
