"""Verification of a replication record: its form, hash, number and signature, every file, whether the files of each run
belong together, and whether the exhibits and verdicts follow from the stored Grams. A fault is located down to the
cell of a table.

Recomputed numbers may differ from the recorded ones by rounding: BLAS libraries and processors sum in different orders.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from scoregram.checks import ScoregramError, fail
from scoregram.runs import require_path
from scoregram.studies import record as records
from scoregram.studies.record import (
    EXHIBITS,
    RECORD,
    RECORD_TYPE,
    SCHEMA_VERSION,
    VERDICTS,
    canonical,
    data_files,
    measured_environments,
    parse_strict_json,
    read_list,
    record_number,
    record_text,
    sha256_hex,
    short_record_number,
)
from scoregram.studies.remeasurement import Remeasured
from scoregram.studies.run_files import RunName, compare_runs

State = Literal["passed", "failed", "not checked"]

Recompute = Callable[[Path], tuple[list[Any], list[Any]]]
"""Folder of a replication → its exhibits and its verdicts as plain values, computed from the stored Grams."""

RECORD_FIELDS: Mapping[str, type] = {
    "record_type": str,
    "schema_version": int,
    "sha256": str,
    "number": str,
    "short_number": str,
    "content": dict,
}
_FIRST_FIELDS: Mapping[str, type | tuple[type, ...]] = {
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
CONTENT_FIELDS: Mapping[int, Mapping[str, type | tuple[type, ...]]] = {
    1: _FIRST_FIELDS,
    2: {
        **_FIRST_FIELDS,
        "about_version": (int, type(None)),
        "environment": list,
        "key_id": (str, type(None)),
        "recorded_with": dict,
        "references": list,
        "signed_at": (str, type(None)),
        "strongest_claim": str,
        "summary": str,
        "weakest_assumption": str,
    },
}
"""Version of the format → fields of the content, and their types."""
OLD_RECORD = (
    "version 1: neither setting.json nor the figures are hashed, and the record's environment is that of the machine "
    "that wrote it; those that measured are in the runs' configs"
)
"""What a record of version 1 cannot show."""
FORM_CHECK, HASH_CHECK, NUMBER_CHECK = "form", "hash", "number"
SIGNATURE_CHECK, FILES_CHECK, RUNS_CHECK = "signature", "files", "runs"
EXHIBITS_CHECK = "exhibits follow from the Grams"
VERDICTS_CHECK = "verdicts follow from the exhibits"
TOKENS_CHECK = "Grams follow from the tokens"

SCOPE = (
    "A full pass shows which files the record was made of, and that its tables and verdicts follow from the stored "
    "Grams. It does not show that the Grams follow from the rollouts' tokens (--remeasure N measures some again), nor "
    "who holds the key."
)
"""What verification can and cannot show."""

FAULTS_SHOWN = 20
"""Further sentences of one check that are printed after the first."""

RTOL = 1e-9
"""Tolerated difference, relative to the larger of the two numbers."""
COLUMN_RTOL = 1e-12
"""The same, relative to the largest number in the column or series: rounding remains where large numbers cancel."""


@dataclass(frozen=True)
class Check:
    """One check of a record and its result."""

    name: str
    state: State
    sentences: tuple[str, ...] = ()
    """One sentence for each fault; or, without faults, what was checked, or why nothing was checked."""
    by_choice: bool = False
    """Not checked because the record has nothing to check, or because the caller did not ask for it."""


@dataclass(frozen=True)
class Verification:
    """All checks of one record."""

    record: Path
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed, and none was left out except by choice."""
        return all(check.state == "passed" or check.by_choice for check in self.checks)

    def lines(self) -> list[str]:
        """One line for each check, its further faults on lines of their own, a summary, and what that can show."""
        return [line for check in self.checks for line in _lines(check)] + [self._summary(), SCOPE]

    def _summary(self) -> str:
        unchecked = [check.name for check in self.checks if check.state == "not checked"]
        but = f" Not checked: {'; '.join(unchecked)}." if unchecked else ""
        return f"{self.record}: {'verified.' if self.passed else 'NOT verified.'}{but}"


def verify(
    path: Path | str,
    *,
    recompute: Recompute | None = None,
    run_name: RunName | None = None,
    remeasure: Callable[[Path], Remeasured] | None = None,
) -> Verification:
    """Check a record and the folder that holds it.

    Args:
        path: `replication.json`, or its folder.
        recompute: Computes exhibits and verdicts from the runs; None leaves both unchecked.
        run_name: The study's names of runs; None accepts any name that the run's own config has.
        remeasure: Measures Grams of the folder again; None leaves that check out.

    Returns:
        The checks, each passed, failed or not checked. Damage to the folder is a failed check, never an exception.

    Raises:
        ScoregramError: If there is no such file.
    """
    file = _record_file(Path(path))
    form, record = _form(file)
    if record is None:
        rest = (HASH_CHECK, NUMBER_CHECK, SIGNATURE_CHECK, FILES_CHECK, RUNS_CHECK, EXHIBITS_CHECK, VERDICTS_CHECK)
        unread = [Check(name, "not checked", ("the file does not have the form of a record",)) for name in rest]
        return Verification(file, (form, *unread))
    content, folder = record["content"], file.parent
    sha256 = sha256_hex(canonical(content))
    anew = _recomputed(recompute, folder)
    checks = (
        form,
        _hash(record, sha256),
        _number(record, sha256),
        _signature(record, sha256),
        _files(content, folder, intact=record["sha256"] == sha256),
        _runs(content, folder, run_name),
        _exhibits(content, folder, anew),
        _verdicts(content, folder, anew),
        *([] if remeasure is None else [_tokens(folder, remeasure)]),
    )
    return Verification(file, checks)


def _record_file(path: Path) -> Path:
    file = path / RECORD if require_path(path, caller="verify").is_dir() else path
    if not file.is_file():
        fail("verify", f"{file} must be a record", "no such file", f"Pass {RECORD} or the folder that holds it.")
    return file


def _form(file: Path) -> tuple[Check, dict[str, Any] | None]:
    """Whether the file is strict JSON with the fields of a record and no others."""
    try:
        text = file.read_bytes()
        record = parse_strict_json(text, file.name)
    except (OSError, ScoregramError) as error:
        return _judged(FORM_CHECK, [str(error)]), None
    faults = _form_faults(record)
    if faults:
        return _judged(FORM_CHECK, faults), None
    reformatted = "the file was reformatted (spaces, escapes, order of keys); its values are the same"
    remarks = [] if text == record_text(record) else [reformatted]
    remarks += [OLD_RECORD] if record["schema_version"] == 1 else []
    return Check(FORM_CHECK, "passed", ("; ".join(remarks),) if remarks else ()), record


def _form_faults(record: Any) -> list[str]:
    if not isinstance(record, dict):
        return ["the record must be a mapping"]
    faults = _field_faults({k: v for k, v in record.items() if k != "signature"}, RECORD_FIELDS, "the record")
    content = record.get("content")
    if isinstance(content, dict):
        version = record.get("schema_version")
        known = version if isinstance(version, int) and version in CONTENT_FIELDS else SCHEMA_VERSION
        faults += _field_faults(content, CONTENT_FIELDS[known], "the content")
    return faults or _value_faults(record, record["content"])


def _field_faults(found: Mapping[str, Any], fields: Mapping[str, Any], of: str) -> list[str]:
    faults = [f"{of} lacks {name}" for name in fields if name not in found]
    faults += [f"{of} has an unknown field {printable(name)}" for name in found if name not in fields]
    return faults + [
        f"{name} has the wrong type, {type(found[name]).__name__}"
        for name, kind in fields.items()
        if name in found and (not isinstance(found[name], kind) or isinstance(found[name], bool))
    ]


def _value_faults(record: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    faults = []
    if record["record_type"] != RECORD_TYPE:
        faults.append(f"record_type is {printable(record['record_type'])}, not {RECORD_TYPE}")
    for version in {record["schema_version"], content["schema_version"]} - CONTENT_FIELDS.keys():
        newer = ": a newer scoregram wrote it, or it was changed" if version > SCHEMA_VERSION else ""
        faults.append(f"schema_version is {version}, not {SCHEMA_VERSION}{newer}")
    if not faults and record["schema_version"] != content["schema_version"]:
        faults.append(f"schema_version is {record['schema_version']}, but {content['schema_version']} in the content")
    if _year(content["created"]) is None:
        faults.append(f"created is {printable(content['created'])}, which is not a date")
    wrong = [name for name, sha256 in content["files"].items() if not isinstance(sha256, str)]
    faults += [f"files has no hash for {printable(name)}" for name in wrong]
    return faults


def _hash(record: Mapping[str, Any], sha256: str) -> Check:
    if record["sha256"] == sha256:
        return Check(HASH_CHECK, "passed", (sha256,))
    if record["number"] == record_number(sha256, _year(record["content"]["created"]) or 0):
        fault = f"the field sha256 was changed: the content has the hash {sha256}, and the number agrees with it"
    else:
        fault = (
            f"the content of the record was changed: it has the hash {sha256}, but {printable(record['sha256'])} is "
            "recorded. A hash cannot show which field changed; compare with another copy"
        )
    return _judged(HASH_CHECK, [fault])


def _number(record: Mapping[str, Any], sha256: str) -> Check:
    expected = {
        "number": record_number(sha256, _year(record["content"]["created"]) or 0),
        "short_number": short_record_number(sha256),
    }
    faults = [
        f"{name} is {printable(record[name])}, but the content gives {right}"
        for name, right in expected.items()
        if record[name] != right
    ]
    return _judged(NUMBER_CHECK, faults, expected["number"])


def _signature(record: Mapping[str, Any], sha256: str) -> Check:
    """The content names the key that signs it, so that a removed signature and one by another key are both noticed."""
    signer = record["content"]["signer"]
    if "signature" not in record:
        if signer is None:
            return Check(SIGNATURE_CHECK, "not checked", ("the record is not signed",), by_choice=True)
        return _judged(
            SIGNATURE_CHECK, [f"the record names the key {printable(signer)}, but its signature was removed"]
        )
    signature = record["signature"]
    faults = records.signature_faults(signature)
    if not faults and signature["public_key"] != signer:
        by = "no key" if signer is None else f"the key {printable(signer)}"
        faults = [f"the content names {by}, but is signed with {signature['public_key']}"]
    if not faults and not records.can_verify():
        return Check(SIGNATURE_CHECK, "not checked", (f"the check needs cryptography. {records.INSTALL}",))
    if not faults and not records.is_valid_signature(signature, bytes.fromhex(sha256)):
        faults = [f"the signature does not match this content and the key {signer}: one of them was changed"]
    content = record["content"]
    name = "" if faults else records.key_id(signature["public_key"])
    if not faults and content.get("key_id", name) != name:
        faults = [f"key_id is {printable(content['key_id'])}, but the key has {name}"]
    moment = f" at {printable(content['signed_at'])}" if content.get("signed_at") else ""
    said = f"by the {records.ALGORITHM} key {signer}{moment}; compare it with the author's"
    return _judged(SIGNATURE_CHECK, faults, said)


def _files(content: Mapping[str, Any], folder: Path, *, intact: bool) -> Check:
    recorded = content["files"]
    try:
        found = data_files(folder, version=content["schema_version"])
    except ScoregramError as error:
        return _judged(FILES_CHECK, [str(error)])
    doubt = "" if intact else " (or its hash in the record, which was changed too)"
    faults = [
        f"{printable(name)} {_fate(recorded.get(name), found.get(name))}{doubt}"
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    ]
    return _judged(FILES_CHECK, faults, f"{len(found)} files are as recorded")


def _runs(content: Mapping[str, Any], folder: Path, run_name: RunName | None) -> Check:
    try:
        found = compare_runs(folder, config=content["config"], run_name=run_name)
        faults = [printable(fault) for fault in found.faults]
        if content["schema_version"] > 1 and canonical(measured_environments(folder)) != canonical(
            content["environment"]
        ):
            faults.append("the environments in the record are not those in the runs' configs")
    except Exception as error:  # damaged data may raise anything
        return _judged(RUNS_CHECK, [printable(error)])
    return _judged(RUNS_CHECK, faults, found.sentence())


def _tokens(folder: Path, remeasure: Callable[[Path], Remeasured]) -> Check:
    try:
        found = remeasure(folder)
    except Exception as error:  # a damaged folder, or a model that cannot be loaded
        return _judged(TOKENS_CHECK, [f"nothing could be measured: {type(error).__name__}: {printable(error)}"])
    if not found.candidates:
        return Check(TOKENS_CHECK, "not checked", ("no run keeps the tokens of groups of its starting policy",))
    return _judged(TOKENS_CHECK, [printable(fault) for fault in found.faults], found.sentence())


def _fate(recorded: Any, found: str | None) -> str:
    return "is missing" if found is None else "was added" if recorded is None else "was changed"


@dataclass(frozen=True)
class _Recomputed:
    """Exhibits and verdicts computed in this run, or why there are none."""

    exhibits: list[Any]
    verdicts: list[Any]
    fault: str = ""
    asked: bool = True


def _recomputed(recompute: Recompute | None, folder: Path) -> _Recomputed:
    if recompute is None:
        return _Recomputed([], [], asked=False)
    try:
        exhibits, verdicts = (parse_strict_json(canonical(part), "the recomputed list") for part in recompute(folder))
    except Exception as error:  # damaged data may raise anything, and that is a fault to report
        return _Recomputed([], [], fault=f"nothing could be recomputed: {type(error).__name__}: {printable(error)}")
    return _Recomputed(exhibits, verdicts)


def _exhibits(content: Mapping[str, Any], folder: Path, anew: _Recomputed) -> Check:
    try:
        stored = read_list(folder, EXHIBITS)
    except ScoregramError as error:
        return _judged(EXHIBITS_CHECK, [str(error)])
    as_recorded = sha256_hex(canonical(stored)) == content["exhibits_sha256"]
    faults = [] if as_recorded else [f"{EXHIBITS} does not hold the exhibits that the record was made from"]
    return _follows(EXHIBITS_CHECK, faults, stored, anew, "exhibit")


def _verdicts(content: Mapping[str, Any], folder: Path, anew: _Recomputed) -> Check:
    try:
        stored = read_list(folder, VERDICTS)
    except ScoregramError as error:
        return _judged(VERDICTS_CHECK, [str(error)])
    as_recorded = canonical(stored) == canonical(content["verdicts"])
    faults = [] if as_recorded else [f"{VERDICTS} and the verdicts in the record are not the same"]
    return _follows(VERDICTS_CHECK, faults, stored, anew, "verdict")


def _follows(name: str, faults: list[str], stored: list[Any], anew: _Recomputed, what: str) -> Check:
    if not anew.asked:
        if faults:
            return _judged(name, faults)
        return Check(name, "not checked", ("the caller did not ask to recompute it",), by_choice=True)
    recomputed = anew.exhibits if what == "exhibit" else anew.verdicts
    faults = faults + ([anew.fault] if anew.fault else recorded_differences(stored, recomputed, what))
    return _judged(name, faults, f"{len(stored)} recomputed, all the same")


def _judged(name: str, faults: list[str], otherwise: str = "") -> Check:
    """A failed check with these faults, or a passed one if there are none."""
    return Check(name, "failed", tuple(faults)) if faults else Check(name, "passed", (otherwise,) if otherwise else ())


def _year(created: str) -> int | None:
    """Year of a date as records write it, `YYYY-MM-DD`; None for any other text."""
    try:
        day = date.fromisoformat(created)
    except ValueError:
        return None
    return day.year if day.isoformat() == created else None


def _lines(check: Check) -> list[str]:
    first, *more = check.sentences or ("",)
    hidden = len(more) - FAULTS_SHOWN
    more = more[:FAULTS_SHOWN] + ([f"and {hidden} more"] if hidden > 0 else [])
    head = f"{check.state:<13}{check.name}" + (f": {first}" if first else "")
    return [head, *(f"{'':<13}{sentence}" for sentence in more)]


NAME_KEYS = ("id", "claim", "name")
"""Keys that hold the name of an exhibit, a verdict or a series."""


def recorded_differences(recorded: Sequence[Any], recomputed: Sequence[Any], what: str) -> list[str]:
    """A sentence for each value that differs between two lists of exhibits or of verdicts; none if they agree.

    Args:
        recorded: As read from JSON.
        recomputed: As read from JSON.
        what: `"exhibit"` or `"verdict"`: what the sentences call an entry without a name or a kind.

    Example:
        >>> recorded_differences([{"id": "thm-1", "seeds": 2}], [{"id": "thm-1", "seeds": 3}], "verdict")
        ['verdict "thm-1", seeds: 2 recorded, 3 recomputed']
    """
    return list(_named(recorded, recomputed, what, before=""))


def _named(recorded: Sequence[Any], recomputed: Sequence[Any], what: str, *, before: str) -> Iterator[str]:
    """Entries that only one of two lists has, a different order, and differences between entries of the same name."""
    left, right = _by_name(recorded, what), _by_name(recomputed, what)
    yield from (f"{before}{name}: recorded, but not recomputed" for name in left if name not in right)
    yield from (f"{before}{name}: recomputed, but not recorded" for name in right if name not in left)
    both = [name for name in left if name in right]
    if both != [name for name in right if name in left]:
        yield f"{before}every {what} is there, but in another order"
    for name in both:
        yield from _values(left[name], right[name], before + name)


def _values(recorded: Any, recomputed: Any, where: str, largest: float = 0.0) -> Iterator[str]:
    if isinstance(recorded, Mapping) and isinstance(recomputed, Mapping):
        for key in sorted(recorded.keys() | recomputed.keys()):
            if key in recorded and key in recomputed:
                yield from _parts(key, recorded, recomputed, where, largest)
            else:
                yield f"{where}, {printable(key)}: {'recorded' if key in recorded else 'recomputed'} only"
    elif isinstance(recorded, list) and isinstance(recomputed, list):
        yield from _entries(recorded, recomputed, where, largest)
    elif not _same(recorded, recomputed, largest):
        yield f"{where}: {_brief(recorded)} recorded, {_brief(recomputed)} recomputed"


def _parts(key: str, recorded: Mapping[str, Any], recomputed: Mapping[str, Any], where: str, largest: float) -> Any:
    """Differences in one value of a mapping; rows of a table and series of a figure are named."""
    left, right = recorded[key], recomputed[key]
    columns: Any = recorded.get("columns")
    if key == "rows" and _is_grid(left, columns) and _is_grid(right, columns):
        return _rows(columns, left, right, where)
    if key == "series" and isinstance(left, list) and isinstance(right, list):
        return _named(left, right, "series", before=f"{where}, ")
    return _values(left, right, f"{where}, {printable(key)}", largest)


def _rows(columns: Sequence[Any], recorded: Sequence[Any], recomputed: Sequence[Any], where: str) -> Iterator[str]:
    if len(recorded) != len(recomputed):
        yield f"{where}: {len(recorded)} rows recorded, {len(recomputed)} recomputed"
    largest = [_largest([row[j] for row in recorded]) for j in range(len(columns))]
    for i, (left, right) in enumerate(zip(recorded, recomputed, strict=False)):
        row = f"{where}, row {i + 1}" + (f" ({printable(columns[0])} = {_brief(left[0])})" if left else "")
        for j, column in enumerate(columns):
            yield from _values(left[j], right[j], f"{row}, column {_quoted(column)}", largest[j])


def _entries(recorded: list[Any], recomputed: list[Any], where: str, largest: float) -> Iterator[str]:
    if len(recorded) != len(recomputed):
        yield f"{where}: {len(recorded)} entries recorded, {len(recomputed)} recomputed"
    largest = max(largest, _largest(recorded))
    for i, (left, right) in enumerate(zip(recorded, recomputed, strict=False)):
        yield from _values(left, right, f"{where}[{i}]", largest)


def _same(left: Any, right: Any, largest: float) -> bool:
    if _is_number(left) and _is_number(right):
        both_whole = isinstance(left, int) and isinstance(right, int)
        return left == right or (
            not both_whole and math.isclose(left, right, rel_tol=RTOL, abs_tol=COLUMN_RTOL * largest)
        )
    return type(left) is type(right) and left == right


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_grid(rows: Any, columns: Any) -> bool:
    if not isinstance(rows, list) or not isinstance(columns, list):
        return False
    return all(isinstance(row, list) and len(row) == len(columns) for row in rows)


def _largest(value: Any) -> float:
    """Largest absolute number anywhere in a value; 0 if it contains none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return max(map(_largest, value), default=0.0)
    return abs(float(value)) if _is_number(value) else 0.0


def _by_name(things: Sequence[Any], what: str) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for i, thing in enumerate(things):
        name = _name(thing, what) or f"{what} {i + 1}"
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name} ({seen[name]})"] = thing
    return named


def _name(thing: Any, what: str) -> str:
    if not isinstance(thing, Mapping):
        return ""
    kind = printable(thing["kind"]) if isinstance(thing.get("kind"), str) else what
    name = next((thing[key] for key in NAME_KEYS if isinstance(thing.get(key), str)), None)
    return "" if name is None else f"{kind} {_quoted(name)}"


def printable(name: Any) -> str:
    """A name with control characters escaped, so that it cannot move the cursor or end the line."""
    text = str(name)
    return text if text.isprintable() else ascii(text)


def _quoted(name: Any) -> str:
    return f'"{printable(name)}"'


def _brief(value: Any) -> str:
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else f"{text[:57]}..."
