"""Whether a replication is what its record says: hash, number, signature, every file, and tables that follow from the
Grams. Whatever is wrong is named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from scoregram.checks import ScoregramError, fail
from scoregram.replication import signing
from scoregram.replication.differences import differences, shown
from scoregram.replication.record import (
    EXHIBITS,
    RECORD,
    RECORD_TYPE,
    SCHEMA_VERSION,
    VERDICTS,
    canonical,
    data_files,
    digest,
    number,
    parse,
    read_list,
    record_text,
    short_number,
)

State = Literal["passed", "failed", "not checked"]

Recompute = Callable[[Path], tuple[list[Any], list[Any]]]
"""Folder of a replication → its exhibits and its verdicts, as plain values, computed from the stored Grams."""

RECORD_FIELDS: Mapping[str, type] = {
    "record_type": str,
    "schema_version": int,
    "sha256": str,
    "number": str,
    "short_number": str,
    "content": dict,
}
CONTENT_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "about": str,
    "config": dict,
    "created": str,
    "environment": dict,
    "exhibits_sha256": str,
    "files": dict,
    "schema_version": int,
    "seeds": list,
    "signer": (str, type(None)),
    "verdicts": list,
}
FORM, HASH, NUMBER, SIGNATURE, FILES = "form", "hash", "number", "signature", "files"
EXHIBITS_FOLLOW = "exhibits follow from the Grams"
VERDICTS_FOLLOW = "verdicts follow from the exhibits"

SHOWN = 20
"""Sentences printed of one check."""


@dataclass(frozen=True)
class Check:
    """One question to a record, and its answer."""

    name: str
    state: State
    says: tuple[str, ...] = ()
    """What is wrong, one sentence for each fault; or what was found, or why nothing was checked."""
    by_choice: bool = False
    """Not checked because there was nothing to check, or because nobody asked."""


@dataclass(frozen=True)
class Verification:
    """All that was checked of one record."""

    record: Path
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether everything that should have been checked was, and nothing failed."""
        return all(check.state == "passed" or check.by_choice for check in self.checks)

    def lines(self) -> list[str]:
        """A line for each check, further faults of it on lines of their own, and one that sums up."""
        return [line for check in self.checks for line in _lines(check)] + [self._sum()]

    def _sum(self) -> str:
        open_ones = [check.name for check in self.checks if check.state == "not checked"]
        but = f" Not checked: {'; '.join(open_ones)}." if open_ones else ""
        return f"{self.record}: {'verified.' if self.passed else 'NOT verified.'}{but}"


def verify(path: Path | str, *, recompute: Recompute | None = None) -> Verification:
    """Check a record and the folder that it stands in.

    Args:
        path: `replication.json`, or its folder.
        recompute: Computes exhibits and verdicts from the runs; None leaves that unchecked.

    Returns:
        The checks, each passed, failed or not checked. Damage is never an error: it is what is asked about.

    Raises:
        ScoregramError: If there is no such file.
    """
    file = _record_file(Path(path))
    form, record = _form(file)
    if record is None:
        rest = (HASH, NUMBER, SIGNATURE, FILES, EXHIBITS_FOLLOW, VERDICTS_FOLLOW)
        unread = [Check(name, "not checked", ("the record has not the form of one",)) for name in rest]
        return Verification(file, (form, *unread))
    content, folder = record["content"], file.parent
    sha256 = digest(canonical(content))
    again = _recomputed(recompute, folder)
    checks = (
        form,
        _hash(record, sha256),
        _number(record, sha256),
        _signature(record, sha256),
        _files(content, folder, intact=record["sha256"] == sha256),
        _exhibits(content, folder, again),
        _verdicts(content, folder, again),
    )
    return Verification(file, checks)


def _record_file(path: Path) -> Path:
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        fail("verify", f"{file} must be a record", "no such file", f"Pass {RECORD} or the folder that holds it.")
    return file


def _form(file: Path) -> tuple[Check, dict[str, Any] | None]:
    """Whether the file can be read in one way only, and has the fields of a record and no others."""
    try:
        text = file.read_bytes()
        record = parse(text, file.name)
    except (OSError, ScoregramError) as error:
        return _judged(FORM, [str(error)]), None
    faults = _form_faults(record)
    if faults:
        return _judged(FORM, faults), None
    relaid = "the text of the file was laid out anew (spaces, escapes, order of keys); what it says is the same"
    return Check(FORM, "passed", () if text == record_text(record) else (relaid,)), record


def _form_faults(record: Any) -> list[str]:
    if not isinstance(record, dict):
        return ["the record must be a mapping"]
    faults = _field_faults({k: v for k, v in record.items() if k != "signature"}, RECORD_FIELDS, "the record")
    content = record.get("content")
    if isinstance(content, dict):
        faults += _field_faults(content, CONTENT_FIELDS, "the content")
    return faults or _value_faults(record, record["content"])


def _field_faults(found: Mapping[str, Any], fields: Mapping[str, Any], of: str) -> list[str]:
    faults = [f"{of} lacks {name}" for name in fields if name not in found]
    faults += [f"{of} has a field {shown(name)}, which no record has" for name in found if name not in fields]
    return faults + [
        f"{name} is of the wrong kind, {type(found[name]).__name__}"
        for name, kind in fields.items()
        if name in found and (not isinstance(found[name], kind) or isinstance(found[name], bool))
    ]


def _value_faults(record: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    faults = []
    if record["record_type"] != RECORD_TYPE:
        faults.append(f"record_type is {shown(record['record_type'])}, not {RECORD_TYPE}")
    for version in {record["schema_version"], content["schema_version"]} - {SCHEMA_VERSION}:
        newer = ": a newer scoregram wrote it, or it was changed" if version > SCHEMA_VERSION else ""
        faults.append(f"schema_version is {version}, not {SCHEMA_VERSION}{newer}")
    if _year(content["created"]) is None:
        faults.append(f"created is {shown(content['created'])}, which is no date")
    wrong = [name for name, sha256 in content["files"].items() if not isinstance(sha256, str)]
    faults += [f"files has no hash for {shown(name)}" for name in wrong]
    return faults


def _hash(record: Mapping[str, Any], sha256: str) -> Check:
    if record["sha256"] == sha256:
        return Check(HASH, "passed", (sha256,))
    if record["number"] == number(sha256, _year(record["content"]["created"]) or 0):
        fault = f"the field sha256 was changed: the content has the hash {sha256}, and the number agrees with it"
    else:
        fault = (
            f"the content of the record was changed: it has the hash {sha256}, but {shown(record['sha256'])} is "
            "recorded. A hash cannot say which field it was; compare with another copy"
        )
    return _judged(HASH, [fault])


def _number(record: Mapping[str, Any], sha256: str) -> Check:
    expected = {
        "number": number(sha256, _year(record["content"]["created"]) or 0),
        "short_number": short_number(sha256),
    }
    faults = [
        f"{name} is {shown(record[name])}, but the content gives {right}"
        for name, right in expected.items()
        if record[name] != right
    ]
    return _judged(NUMBER, faults, expected["number"])


def _signature(record: Mapping[str, Any], sha256: str) -> Check:
    """The content names the key that signs it: a signature cannot be taken off, nor another key put in its place."""
    signer = record["content"]["signer"]
    if "signature" not in record:
        if signer is None:
            return Check(SIGNATURE, "not checked", ("the record is not signed",), by_choice=True)
        return _judged(SIGNATURE, [f"the record is by the key {shown(signer)}, but its signature was removed"])
    signature = record["signature"]
    faults = signing.faults(signature)
    if not faults and signature["public_key"] != signer:
        by = "no key" if signer is None else f"the key {shown(signer)}"
        faults = [f"the content is by {by}, but signed with {signature['public_key']}"]
    if not faults and not signing.can_verify():
        return Check(SIGNATURE, "not checked", (f"that needs cryptography. {signing.INSTALL}",))
    if not faults and not signing.is_valid(signature, bytes.fromhex(sha256)):
        faults = [f"the signature is not of this content by the key {signer}: one of them was changed"]
    return _judged(SIGNATURE, faults, f"by the {signing.ALGORITHM} key {signer}; compare it with the author's")


def _files(content: Mapping[str, Any], folder: Path, *, intact: bool) -> Check:
    recorded = content["files"]
    try:
        found = data_files(folder)
    except ScoregramError as error:
        return _judged(FILES, [str(error)])
    doubt = "" if intact else " (or its hash in the record, which was changed too)"
    faults = [
        f"{shown(name)} {_fate(recorded.get(name), found.get(name))}{doubt}"
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    ]
    return _judged(FILES, faults, f"{len(found)} files are as recorded")


def _fate(recorded: Any, found: str | None) -> str:
    return "is missing" if found is None else "was added" if recorded is None else "was changed"


def _exhibits(content: Mapping[str, Any], folder: Path, again: "_Again") -> Check:
    try:
        stored = read_list(folder, EXHIBITS)
    except ScoregramError as error:
        return _judged(EXHIBITS_FOLLOW, [str(error)])
    as_recorded = digest(canonical(stored)) == content["exhibits_sha256"]
    faults = [] if as_recorded else [f"{EXHIBITS} does not hold the exhibits that the record was made of"]
    return _follows(EXHIBITS_FOLLOW, faults, stored, again, again.exhibits, "exhibit")


def _verdicts(content: Mapping[str, Any], folder: Path, again: "_Again") -> Check:
    try:
        stored = read_list(folder, VERDICTS)
    except ScoregramError as error:
        return _judged(VERDICTS_FOLLOW, [str(error)])
    as_recorded = canonical(stored) == canonical(content["verdicts"])
    faults = [] if as_recorded else [f"{VERDICTS} and the verdicts in the record are not the same"]
    return _follows(VERDICTS_FOLLOW, faults, stored, again, again.verdicts, "verdict")


@dataclass(frozen=True)
class _Again:
    """What was computed anew, or why nothing was."""

    exhibits: list[Any]
    verdicts: list[Any]
    fault: str = ""
    asked: bool = True


def _recomputed(recompute: Recompute | None, folder: Path) -> _Again:
    if recompute is None:
        return _Again([], [], asked=False)
    try:
        exhibits, verdicts = (parse(canonical(part), "what was recomputed") for part in recompute(folder))
    except Exception as error:  # damaged data may fail in any way, and that is an answer
        return _Again([], [], fault=f"nothing could be recomputed: {type(error).__name__}: {shown(error)}")
    return _Again(exhibits, verdicts)


def _follows(name: str, faults: list[str], stored: list[Any], again: _Again, recomputed: list[Any], what: str) -> Check:
    if again.asked:
        faults = faults + ([again.fault] if again.fault else differences(stored, recomputed, what))
    if not faults and not again.asked:
        return Check(name, "not checked", ("recomputing was not asked for",), by_choice=True)
    return _judged(name, faults, f"{len(stored)} recomputed, and the same")


def _judged(name: str, faults: list[str], otherwise: str = "") -> Check:
    """Failed with these faults, or passed where there are none."""
    return Check(name, "failed", tuple(faults)) if faults else Check(name, "passed", (otherwise,) if otherwise else ())


def _year(created: str) -> int | None:
    """Year of an ISO date, written in the one way that records write it."""
    try:
        day = date.fromisoformat(created)
    except ValueError:
        return None
    return day.year if day.isoformat() == created else None


def _lines(check: Check) -> list[str]:
    first, *more = check.says or ("",)
    hidden = len(more) - SHOWN
    more = more[:SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
    head = f"{check.state:<13}{check.name}" + (f": {first}" if first else "")
    return [head, *(f"{'':<13}{sentence}" for sentence in more)]
