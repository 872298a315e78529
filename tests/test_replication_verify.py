"""Whatever is changed in a replication is found and named."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.studies import record as records
from scoregram.studies.record import canonical, record_number, record_text, sha256_hex, short_record_number
from scoregram.studies.verification import (
    EXHIBITS_CHECK,
    FILES_CHECK,
    FORM_CHECK,
    HASH_CHECK,
    NUMBER_CHECK,
    RUNS_CHECK,
    SIGNATURE_CHECK,
    VERDICTS_CHECK,
    Check,
    Verification,
    verify,
)
from tests.replication_cases import make_key, put_record, recompute, replication, write_parts

ALL = [FORM_CHECK, HASH_CHECK, NUMBER_CHECK, SIGNATURE_CHECK, FILES_CHECK, RUNS_CHECK, EXHIBITS_CHECK, VERDICTS_CHECK]
FOLLOW = {EXHIBITS_CHECK, VERDICTS_CHECK}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """An unsigned and a signed replication, to be left as they are."""
    pytest.importorskip("cryptography")
    root = tmp_path_factory.mktemp("replications")
    make_key(root / "key.pem")
    replication(root / "unsigned")
    replication(root / "signed", key_file=root / "key.pem")
    return {name: root / name for name in ("unsigned", "signed")}


@pytest.fixture(params=["unsigned", "signed"])
def folder(request, made, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made[request.param], tmp_path / request.param))


def states(verification: Verification) -> dict[str, str]:
    return {check.name: check.state for check in verification.checks}


def faults(verification: Verification) -> dict[str, tuple[str, ...]]:
    return {check.name: check.sentences for check in verification.checks if check.state == "failed"}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put another record in its place."""
    path = folder / "replication.json"
    record = json.loads(path.read_bytes())
    change(record)
    path.write_bytes(record_text(record))


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content, and make hash and numbers agree with it again, as a forger without the key could."""

    def agree(record: dict[str, Any]) -> None:
        change(record["content"])
        sha256 = sha256_hex(canonical(record["content"]))
        record |= {"sha256": sha256, "number": record_number(sha256, 2026), "short_number": short_record_number(sha256)}

    rewrite(folder, agree)


def test_an_intact_replication_passes(made):
    for name, folder in made.items():
        for path in (folder, folder / "replication.json", str(folder)):
            verification = verify(path, recompute=recompute)
            assert [check.name for check in verification.checks] == ALL
            expected = dict.fromkeys(ALL, "passed") | ({SIGNATURE_CHECK: "not checked"} if name == "unsigned" else {})
            assert states(verification) == expected
            assert verification.passed


def test_without_recomputing_nothing_is_said_of_the_tables(made):
    verification = verify(made["signed"])
    assert states(verification) == dict.fromkeys(ALL, "passed") | dict.fromkeys(FOLLOW, "not checked")
    assert verification.passed
    assert verification.lines()[-2].endswith(f"verified. Not checked: {EXHIBITS_CHECK}; {VERDICTS_CHECK}.")


def test_there_must_be_a_record(tmp_path):
    for path in (tmp_path, tmp_path / "replication.json"):
        with pytest.raises(ScoregramError, match="must be a record, got no such file"):
            verify(path)


def flipped(path: Path, at: int, mask: int) -> bytes:
    """Change one byte of a file; returns what was there."""
    content = path.read_bytes()
    at %= len(content)
    path.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])
    return content


@given(data=st.data(), at=st.integers(0, 10**6), mask=st.integers(1, 255), kind=st.sampled_from(["unsigned", "signed"]))
def test_a_flipped_byte_of_any_data_file_is_found_and_the_file_named(made, data, at, mask, kind):
    folder = made[kind]
    recorded = json.loads((folder / "replication.json").read_bytes())["content"]["files"]
    name = data.draw(st.sampled_from(sorted(recorded)))
    content = flipped(folder / name, at, mask)
    try:
        verification = verify(folder)
    finally:
        (folder / name).write_bytes(content)
    assert not verification.passed
    assert faults(verification)[FILES_CHECK] == (f"{name} was changed",)
    assert faults(verification).keys() <= {FILES_CHECK, RUNS_CHECK, *FOLLOW}


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_every_byte_of_the_record_counts(made, kind, stride, tmp_path):
    """One after another, in a folder without the data: what is left to find it are hash, number and signature."""
    text = (made[kind] / "replication.json").read_bytes()
    (tmp_path / "replication.json").write_bytes(text)
    assert faults(verify(tmp_path)).keys() == {FILES_CHECK, RUNS_CHECK, *FOLLOW}
    for at in range(0, len(text), stride):
        flipped(tmp_path / "replication.json", at, 1)
        assert faults(verify(tmp_path)).keys() & {FORM_CHECK, HASH_CHECK, NUMBER_CHECK, SIGNATURE_CHECK}, at
        (tmp_path / "replication.json").write_bytes(text)


@given(at=st.integers(0, 10**6), mask=st.integers(1, 255), kind=st.sampled_from(["unsigned", "signed"]))
def test_another_byte_in_the_record_is_found_unless_the_record_says_the_same(made, at, mask, kind):
    path = made[kind] / "replication.json"
    content = flipped(path, at, mask)
    try:
        verification, changed = verify(path), path.read_bytes()
    finally:
        path.write_bytes(content)
    if verification.passed:  # a space for another
        assert json.loads(changed) == json.loads(content)
        assert "was reformatted" in verification.checks[0].sentences[0]


def test_a_link_among_the_runs_is_refused(folder):
    (folder / "runs" / "linked").symlink_to(folder / "runs" / "b")
    verification = verify(folder)
    assert "runs/ must hold plain files and folders, got 'runs/linked'" in faults(verification)[FILES_CHECK][0]
    assert not verification.passed


def test_another_layout_passes_and_is_told(folder):
    path = folder / "replication.json"
    record = json.loads(path.read_bytes())
    for text in (json.dumps(record), json.dumps(dict(reversed(record.items())), indent=1), json.dumps(record) + " "):
        path.write_text(text)
        verification = verify(path)
        assert verification.passed
        assert verification.checks[0] == Check(FORM_CHECK, "passed", verification.checks[0].sentences)
        assert "was reformatted" in verification.lines()[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"about"', '"number": "x", "about"', "lacks|an unknown field"),
        ('"seeds":', '"seeds": [9], "seeds":', "'seeds' appears twice"),
        ("{", '{"sha256": "0", ', "'sha256' appears twice"),
        ("{", '{"more": 1, ', "the record has an unknown field more"),
        ('"lr": 1e-06', '"lr": NaN', "NaN is not JSON"),
        ('"lr": 1e-06', '"lr": 1e999', "inf"),
        ('"about"', '"abouu"', "the content lacks about"),
        ('"about"', '"about": 1, "more\\n"', "an unknown field"),
        ('"seeds": [', '"seeds": 0, "x": [', "seeds has the wrong type, int"),
        ('"schema_version": 2', '"schema_version": true', "schema_version has the wrong type, bool"),
        ('"schema_version": 2', '"schema_version": 3', "a newer scoregram wrote it"),
        ('"schema_version": 2', '"schema_version": 0', "schema_version is 0, not 2$"),
        ('"replication_record"', '"poem"', "record_type is poem"),
        ('"2026-07-04"', '"2026-02-30"', "2026-02-30, which is not a date"),
        ('"2026-07-04"', '"20260704"', "20260704, which is not a date"),
        ('"exhibits.json": "', '"exhibits.json": null, "y": "', "files has no hash for exhibits.json"),
    ],
)
def test_a_record_of_another_form_is_refused_in_words(folder, old, new, said):
    path = folder / "replication.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    verification = verify(path)
    (check, *rest) = verification.checks
    assert check.state == "failed" and any(re.search(said, sentence) for sentence in check.sentences), check
    assert {other.state for other in rest} == {"not checked"}
    assert not verification.passed
    assert all("\n" not in line for line in verification.lines())


def test_a_cut_record_is_refused_wherever_it_ends(folder):
    path = folder / "replication.json"
    text = path.read_bytes()
    for end in [*range(0, len(text) - 1, 97), len(text) - 2]:
        path.write_bytes(text[:end])
        assert faults(verify(path)).keys() == {FORM_CHECK}
    for value in (b"[]", b"null", b"1", b'"replication_record"'):
        path.write_bytes(value)
        assert faults(verify(path)) == {FORM_CHECK: ("the record must be a mapping",)}


def test_a_changed_field_is_found_by_the_hash_which_says_that_it_cannot_say_where(folder):
    rewrite(folder, lambda record: record["content"]["config"].update(lr=1e-5))
    found = faults(verify(folder, recompute=recompute))
    assert "A hash cannot show which field" in found[HASH_CHECK][0]
    assert found.keys() == {HASH_CHECK, NUMBER_CHECK} | ({SIGNATURE_CHECK} if folder.name == "signed" else set())


def test_a_changed_hash_is_told_from_changed_content(folder):
    rewrite(folder, lambda record: record.update(sha256="0" * 64))
    found = faults(verify(folder))
    assert found.keys() == {HASH_CHECK}
    assert found[HASH_CHECK][0].startswith("the field sha256 was changed")


@pytest.mark.parametrize(
    ("name", "old", "new"), [("number", ".$", "0"), ("number", ":2026:", ":2025:"), ("short_number", ".$", "0")]
)
def test_a_changed_number_is_named(folder, name, old, new):
    rewrite(folder, lambda record: record.update({name: re.sub(old, new, record[name])}))
    found = faults(verify(folder))
    assert found.keys() == {NUMBER_CHECK}
    assert len(found[NUMBER_CHECK]) == 1 and found[NUMBER_CHECK][0].startswith(f"{name} is scoregram:")


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda signature: signature.pop("algorithm"), "must consist of"),
        (lambda signature: signature.update(more=1), "must consist of"),
        (lambda signature: signature.update(algorithm="rsa"), "algorithm must be ed25519"),
        (lambda signature: signature.update(signature=""), "signature is not base64 of 64 bytes"),
        (lambda signature: signature.update(signature=1), "signature is not base64 of 64 bytes"),
        (lambda signature: signature.update(signature=signature["signature"] + " "), "not base64"),
        (lambda signature: signature.update(public_key="é"), "public key is not base64 of 32 bytes"),
        (lambda signature: signature.update(public_key="A" * 43 + "="), "but is signed with A"),
        (lambda signature: signature.update(signature="A" * 86 + "=="), "signature does not match this content"),
    ],
)
def test_a_changed_signature_is_named(folder, change, said):
    rewrite(folder, lambda record: change(record["signature"]))
    found = faults(verify(folder))
    assert found.keys() == {SIGNATURE_CHECK}
    assert said in found[SIGNATURE_CHECK][0]


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
def test_spare_bits_of_base64_are_not_free(folder):
    """The last letter of 64 bytes holds 2 bits that count and 4 that do not; decoders pass over the latter."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

    def change(record: dict[str, Any]) -> None:
        text = record["signature"]["signature"]
        record["signature"]["signature"] = text[:85] + letters[letters.index(text[85]) + 1] + "=="

    rewrite(folder, change)
    assert "not base64 of 64 bytes" in faults(verify(folder))[SIGNATURE_CHECK][0]


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
def test_a_signature_cannot_be_taken_off_or_replaced_unseen(folder, tmp_path):
    rewrite(folder, lambda record: record.pop("signature"))
    found = faults(verify(folder))
    assert found.keys() == {SIGNATURE_CHECK} and "its signature was removed" in found[SIGNATURE_CHECK][0]

    make_key(tmp_path / "other.pem")
    sha256 = json.loads((folder / "replication.json").read_bytes())["sha256"]
    by_other = records.sign(bytes.fromhex(sha256), tmp_path / "other.pem")
    rewrite(folder, lambda record: record.update(signature=by_other))
    found = faults(verify(folder))
    assert (
        found.keys() == {SIGNATURE_CHECK}
        and f"but is signed with {by_other['public_key']}" in found[SIGNATURE_CHECK][0]
    )


@pytest.mark.parametrize("folder", ["unsigned"], indirect=True)
def test_a_signature_cannot_be_added_unseen(folder, tmp_path):
    make_key(tmp_path / "other.pem")
    sha256 = json.loads((folder / "replication.json").read_bytes())["sha256"]
    rewrite(folder, lambda r: r.update(signature=records.sign(bytes.fromhex(sha256), tmp_path / "other.pem")))
    assert "the content names no key" in faults(verify(folder))[SIGNATURE_CHECK][0]


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
def test_only_the_holder_of_the_key_can_change_a_signed_record(folder):
    forge(folder, lambda content: content["seeds"].append(2))
    found = faults(verify(folder, recompute=recompute))
    assert found.keys() == {SIGNATURE_CHECK}
    assert "signature does not match this content" in found[SIGNATURE_CHECK][0]


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
def test_the_name_of_the_key_is_that_of_the_key(folder, made):
    replication(folder / "again", key_file=made["signed"].parent / "key.pem")
    assert verify(folder / "again").passed

    def change(record: dict[str, Any]) -> None:
        record["content"]["key_id"] = "0" * 32
        sha256 = sha256_hex(canonical(record["content"]))
        record |= {"sha256": sha256, "number": record_number(sha256, 2026), "short_number": short_record_number(sha256)}
        record["signature"] = records.sign(bytes.fromhex(sha256), made["signed"].parent / "key.pem")

    rewrite(folder / "again", change)
    (fault,) = faults(verify(folder / "again"))[SIGNATURE_CHECK]
    assert fault.startswith("key_id is 00000000000000000000000000000000, but the key has ")


@pytest.mark.parametrize("folder", ["signed"], indirect=True)
def test_a_signature_that_cannot_be_checked_has_not_passed(folder, monkeypatch):
    monkeypatch.setattr(records, "can_verify", lambda: False)
    verification = verify(folder, recompute=recompute)
    (check,) = (check for check in verification.checks if check.name == SIGNATURE_CHECK)
    assert check.state == "not checked" and "pip install 'scoregram[sign]'" in check.sentences[0]
    assert not verification.passed and not faults(verification)
    rewrite(folder, lambda record: record["signature"].update(algorithm="rsa"))
    assert faults(verify(folder)).keys() == {SIGNATURE_CHECK}  # what is plainly wrong needs no package


def test_files_that_went_and_came_are_named(folder):
    part = folder / "runs/a/groups/step-000000001-000.parquet"
    part.rename(part.with_name("step-000000009-000.parquet"))
    (folder / "runs/a/groups/note.txt").write_text("")
    (folder / "runs/c").mkdir()
    (folder / "runs/c/config.yaml").write_text("")
    (folder / "runs/b/config.yaml").unlink()
    found = faults(verify(folder))
    assert found.keys() == {FILES_CHECK, RUNS_CHECK}
    assert found[FILES_CHECK] == (
        "runs/a/groups/note.txt was added",
        "runs/a/groups/step-000000001-000.parquet is missing",
        "runs/a/groups/step-000000009-000.parquet was added",
        "runs/b/config.yaml is missing",
        "runs/c/config.yaml was added",
    )


def test_a_missing_list_or_folder_is_named(folder):
    (folder / "exhibits.json").unlink()
    shutil.rmtree(folder / "runs")
    found = faults(verify(folder, recompute=recompute))
    assert "exhibits.json is missing" in found[FILES_CHECK] and "runs/b/metrics.jsonl is missing" in found[FILES_CHECK]
    assert "exhibits.json must be readable" in found[EXHIBITS_CHECK][0]
    assert "nothing could be recomputed: FileNotFoundError" in found[VERDICTS_CHECK][0]


def test_a_name_cannot_speak_for_the_program(folder):
    (folder / "runs/a/groups/x\npassed       files").write_text("")
    lines = verify(folder).lines()
    assert sum(line.startswith("passed       files") for line in lines) == 0
    assert any(r"'runs/a/groups/x\npassed       files' was added" in line for line in lines)


def test_a_changed_file_hash_in_the_record_is_not_blamed_on_the_file_alone(folder):
    rewrite(folder, lambda record: record["content"]["files"].update({"verdicts.json": "0" * 64}))
    found = faults(verify(folder))
    assert found[FILES_CHECK] == ("verdicts.json was changed (or its hash in the record, which was changed too)",)
    assert HASH_CHECK in found


def test_exhibits_that_do_not_follow_from_the_grams_are_found_though_all_hashes_agree(folder):
    exhibits, verdicts = recompute(folder)
    value = exhibits[0]["rows"][1][1]["value"]
    exhibits[0]["rows"][1][1]["value"] = value * (1 + 1e-6)
    exhibits[1]["series"][0]["y"][2] += 1.0
    exhibits[1]["caption"] = "Read it otherwise."
    write_parts(folder, exhibits, verdicts)
    put_record(folder)
    verification = verify(folder, recompute=recompute)
    assert faults(verification).keys() == {EXHIBITS_CHECK}
    cell, caption, point = faults(verification)[EXHIBITS_CHECK]
    assert cell.startswith('table "traces", row 2 (run = "b"), column "trace of K", value: ')
    assert cell.endswith(f"{value * (1 + 1e-6)} recorded, {value} recomputed")
    assert caption.startswith('figure "over-steps", caption: "Read it otherwise." recorded, "One point')
    assert point.startswith('figure "over-steps", series "a", y[2]: ')


def test_verdicts_that_do_not_follow_are_found_though_all_hashes_agree(folder):
    exhibits, verdicts = recompute(folder)
    write_parts(folder, exhibits, [verdicts[0] | {"verdict": "not replicated"}])
    put_record(folder)
    assert faults(verify(folder, recompute=recompute)) == {
        VERDICTS_CHECK: ('verdict "trace-positive", verdict: "not replicated" recorded, "replicated" recomputed',)
    }


def test_lists_beside_the_record_must_be_those_in_it(folder):
    exhibits, _ = recompute(folder)
    write_parts(folder, exhibits[:1], [])
    found = faults(verify(folder))
    assert found[FILES_CHECK] == ("exhibits.json was changed", "verdicts.json was changed")
    assert "does not hold the exhibits that the record was made from" in found[EXHIBITS_CHECK][0]
    assert "are not the same" in found[VERDICTS_CHECK][0]
    found = faults(verify(folder, recompute=recompute))
    assert found[EXHIBITS_CHECK][1] == 'figure "over-steps": recomputed, but not recorded'
    assert found[VERDICTS_CHECK][1] == 'verdict "trace-positive": recomputed, but not recorded'


@pytest.mark.parametrize("text", ['{"exhibits": [], "exhibits": []}', '{"exhibits": [', "[]"])
def test_exhibits_of_another_form_are_told(folder, text):
    (folder / "exhibits.json").write_text(text)
    found = faults(verify(folder, recompute=recompute))
    assert found.keys() == {FILES_CHECK, EXHIBITS_CHECK}
    assert "exhibits.json must" in found[EXHIBITS_CHECK][0]


def test_data_that_cannot_be_read_and_numbers_that_are_none_are_answers(folder):
    part = folder / "runs/a/groups/step-000000000-000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    found = faults(verify(folder, recompute=recompute))
    assert found.keys() == {FILES_CHECK, RUNS_CHECK, *FOLLOW}
    assert found[RUNS_CHECK][0].startswith("runs/a: cannot be read: ScoregramError: ")
    assert all(found[name][0].startswith("nothing could be recomputed: ") for name in FOLLOW)
    said = faults(verify(folder, recompute=lambda _: ([float("nan")], [])))[EXHIBITS_CHECK][0]
    assert "value[0] must be a JSON value, got float nan" in said


def test_many_faults_are_counted_not_printed():
    lines = Verification(
        Path("r"), (Check(FILES_CHECK, "failed", tuple(f"f{i} was changed" for i in range(99))),)
    ).lines()
    assert lines[0] == "failed       files: f0 was changed"
    assert lines[-3].strip() == "and 78 more" and len(lines) == 24
    assert lines[-2] == "r: NOT verified."
    assert (
        lines[-1].startswith("A full pass shows ")
        and "not show that the Grams follow from the rollouts' tokens" in lines[-1]
    )


@pytest.fixture
def evidence(monkeypatch) -> None:
    """What the command recomputes with."""
    module = ModuleType("scoregram.studies.grpo_rank.evidence")
    module.recompute = recompute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("evidence")
def test_the_command_prints_a_line_for_each_check(folder, capsys):
    assert cli.main(["verify", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL) + 2
    assert [line[13:].split(":")[0] for line in lines[:-2]] == ALL
    assert lines[-2].startswith(f"{folder / 'replication.json'}: verified.")


@pytest.mark.usefixtures("evidence")
def test_the_command_recomputes_unless_told_not_to(folder, capsys):
    exhibits, verdicts = recompute(folder)
    exhibits[0]["rows"][0][2] += 1
    write_parts(folder, exhibits, verdicts)
    put_record(folder)
    assert cli.main(["verify", str(folder / "replication.json")]) == 1
    assert 'row 1 (run = "a"), column "groups": 5 recorded, 4 recomputed' in capsys.readouterr().out
    assert cli.main(["verify", str(folder), "--no-recompute"]) == 0


def test_the_command_ends_with_the_status_of_the_record(folder, capsys):
    flipped(folder / "runs/b/metrics.jsonl", 3, 1)
    assert cli.main(["verify", str(folder), "--no-recompute"]) == 1
    assert "failed       files: runs/b/metrics.jsonl was changed\n" in capsys.readouterr().out
    (folder / "replication.json").unlink()
    assert cli.main(["verify", str(folder), "--no-recompute"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
