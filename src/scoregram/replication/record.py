"""The replication record: what was run, what came out, and the hash of every file that it rests on.

The record is addressed by its content, in the manner of the record that pith.science keeps for arXiv:2606.29238. There
`canonical_sha256` is the sha256 of the nested `canonical_record`, written as JSON with sorted keys, without spaces, in
UTF-8. The number is the base32 form of the first 16 bytes of that hash, 26 letters without padding, after
a prefix and a year; its short form has the first 8 letters and no year; and it is the 32 bytes of the hash that are
signed. All four are done alike here, with `content` in the place of `canonical_record`.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.replication import signing
from scoregram.runs import CHECKPOINTS, REPORT, TEMPORARY, TRACKER_LOGS, disk_errors, require_run, write_atomically
from scoregram.runs import environment as this_environment

RECORD = "replication.json"
EXHIBITS = "exhibits.json"
VERDICTS = "verdicts.json"
RUNS = "runs"

RECORD_TYPE = "replication_record"
SCHEMA_VERSION = 1
"""Version of the record. It grows when an older reader would misread a newer record."""

PREFIX = "scoregram"
NUMBER_BYTES = 16
SHORT_LETTERS = 8

NOT_DATA = frozenset({CHECKPOINTS, TRACKER_LOGS, REPORT})
"""What may come and go in a run folder: nothing is computed from it."""

_INTEGERS = range(-(2**63), 2**63)


def canonical(value: Any) -> bytes:
    """The one text of a value: JSON with sorted keys, without spaces, in UTF-8 that is not escaped.

    Equal values have equal texts, whatever the order of their keys; tuples count as lists, and `1` is not `1.0`.

    Raises:
        ScoregramError: If JSON cannot hold it (`nan`, infinities, keys that are not text), or not everywhere alike
            (integers beyond 64 bits); the error names where.

    Example:
        >>> canonical({"b": (1, 2.0), "a": "σ"}).decode()
        '{"a":"σ","b":[1,2.0]}'
    """
    plain = _plain(value, "value")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(content: bytes) -> str:
    """The sha256 of some bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def letters(sha256: str) -> str:
    """The first 128 bits of a hash in base32: 26 letters, the last of which holds 3 bits."""
    return base64.b32encode(bytes.fromhex(sha256)[:NUMBER_BYTES]).decode().rstrip("=")


def number(sha256: str, year: int) -> str:
    """Name of a record: enough of its hash that no two records share it.

    Example:
        >>> number("00" * 32, 2026)
        'scoregram:2026:AAAAAAAAAAAAAAAAAAAAAAAAAA'
    """
    return f"{PREFIX}:{year}:{letters(sha256)}"


def short_number(sha256: str) -> str:
    """Name of a record for people: 40 bits of its hash.

    Example:
        >>> short_number("ff" * 32)
        'scoregram:77777777'
    """
    return f"{PREFIX}:{letters(sha256)[:SHORT_LETTERS]}"


def write_record(
    folder: Path | str,
    *,
    about: str,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    created: date,
    environment: Mapping[str, Any] | None = None,
    key_file: Path | str | None = None,
) -> Path:
    """Write `replication.json` into the folder of a replication that is otherwise complete.

    Exhibits, verdicts and runs are read from the folder, so that the record cannot disagree with it. What each run was
    made with stands in its own config, which is hashed like all its data.

    Args:
        folder: Holds `exhibits.json`, `verdicts.json` and `runs/`.
        about: Identifier of the paper.
        config: The preset, with everything needed to run it again.
        seeds: Of the runs.
        created: The day, whose year stands in the number.
        environment: Versions, source and machine of this program; found out if not given.
        key_file: Sign with the ed25519 key in this PEM file.

    Raises:
        ScoregramError: If a part of the folder is missing or cannot be read, or a value is not fit for JSON.
    """
    root = Path(folder)
    _require_runs(root)
    verdicts, exhibits = read_list(root, VERDICTS), read_list(root, EXHIBITS)
    content = {
        "about": about,
        "config": config,
        "created": _day(created).isoformat(),
        "environment": this_environment() if environment is None else environment,
        "exhibits_sha256": digest(canonical(exhibits)),
        "files": data_files(root),
        "schema_version": SCHEMA_VERSION,
        "seeds": list(seeds),
        "signer": None if key_file is None else signing.public_key(key_file),
        "verdicts": verdicts,
    }
    path = root / RECORD
    text = record_text(_address(content, key_file))
    with disk_errors(path, caller="write_record"):
        write_atomically(path, text)
    return path


def record_text(record: Mapping[str, Any]) -> bytes:
    """Content of `replication.json`: indented for people. The hash is of the canonical text, not of this one."""
    return (json.dumps(_plain(record, "record"), sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def parse(text: bytes, name: str) -> Any:
    """JSON that can be read in one way only: each key once, no `NaN`, numbers that are finite.

    Raises:
        ScoregramError: If it is anything else; the error says so of `name`.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse)
        canonical(value)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, RecursionError) else str(error).rstrip(".")
        return fail("verify", f"{name} must be strict JSON", f"a fault ({reason})", "Restore it from a copy.")
    return value


def read_list(folder: Path, name: str) -> list[Any]:
    """The list in `exhibits.json` or `verdicts.json`, each of which has one key, the name of the file."""
    key = Path(name).stem
    value = parse(_read(folder / name), name)
    if not isinstance(value, dict) or value.keys() != {key} or not isinstance(value[key], list):
        return fail(
            "verify", f"{name} must hold a list of {key} and nothing else", "another", "Restore it from a copy."
        )
    return value[key]


def data_files(folder: Path | str) -> dict[str, str]:
    """Path inside the folder → sha256, for all that the replication rests on, sorted by path.

    The exhibits, the verdicts, and everything in the runs but checkpoints, reports, logs of trackers and unfinished
    files. A file that scoregram did not write counts too: somebody may take it for data.

    Raises:
        ScoregramError: If there is something unreadable, or a link to a folder, behind which files could hide.
    """
    root = Path(folder)
    try:
        files = [path for name in (EXHIBITS, VERDICTS) if (path := root / name).is_file()] + list(_run_files(root))
        return {name: _sha256(root / name) for name in sorted(path.relative_to(root).as_posix() for path in files)}
    except OSError as error:
        return fail("data_files", f"{root} must be readable", error, "Check the permissions and the disk.")


def _run_files(root: Path) -> Iterator[Path]:
    for inside, folders, names in os.walk(root / RUNS, onerror=_unless_absent):
        here = Path(inside)
        dropped = NOT_DATA if here.parent == root / RUNS else frozenset[str]()
        folders[:] = [name for name in folders if name not in dropped and not name.startswith(TEMPORARY)]
        files = [here / name for name in names if name not in dropped and not name.startswith(TEMPORARY)]
        odd = [here / name for name in folders if (here / name).is_symlink()]
        odd += [path for path in files if not path.is_file()]
        for path in odd:
            name = path.relative_to(root).as_posix()
            fail("data_files", f"{RUNS}/ must hold plain files and folders", f"{name!a}", "Put a copy in its place.")
        yield from files


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _require_runs(root: Path) -> None:
    runs = [path for path in sorted((root / RUNS).glob("*")) if not path.name.startswith(TEMPORARY)]
    if not runs:
        fail("write_record", f"{root / RUNS} must hold the runs", "none", "Run the replication first.")
    for path in runs:
        require_run(path)


def _address(content: Mapping[str, Any], key_file: Path | str | None) -> dict[str, Any]:
    """The whole record: content, its hash, the numbers made from that, and the signature if there is a key."""
    sha256 = digest(canonical(content))
    record = {
        "content": content,
        "number": number(sha256, date.fromisoformat(content["created"]).year),
        "record_type": RECORD_TYPE,
        "schema_version": SCHEMA_VERSION,
        "sha256": sha256,
        "short_number": short_number(sha256),
    }
    return record if key_file is None else record | {"signature": signing.sign(bytes.fromhex(sha256), key_file)}


def _day(created: date) -> date:
    return created.date() if isinstance(created, datetime) else created


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(key, name): _plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if (isinstance(value, int) and value in _INTEGERS) or (isinstance(value, str) and _is_unicode(value)):
        return value
    remedy = "Pass text, finite numbers, truth values, None, and lists and mappings of them."
    return fail("canonical", f"{name} must be fit for JSON", f"{type(value).__name__} {value!r:.60}", remedy)


def _key(key: Any, name: str) -> str:
    if not (isinstance(key, str) and _is_unicode(key)):
        fail("canonical", f"{name} must have text for keys", repr(key), "Pass text.")
    return key


def _is_unicode(text: str) -> bool:
    """Lone surrogates are not: no file can hold them."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!a} stands there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        return fail("verify", f"{path} must be readable", error.strerror or error, "Restore it from a copy.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
