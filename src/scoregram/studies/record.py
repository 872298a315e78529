"""The replication record: the settings and verdicts of a replication, and the hash of every file they depend on.

The record is addressed by its content, as is the record that pith.science keeps for arXiv:2606.29238. There
`canonical_sha256` is the sha256 of the nested `canonical_record`, written as JSON with sorted keys, without spaces, in
UTF-8. The number of a record is a prefix, a year, and the first 16 bytes of that hash in base32 (26 letters without
padding); the short number is the prefix and the first 8 letters, without the year. The signature
is of the 32 bytes of the hash. This module does the same, with `content` in the place of `canonical_record`.

Signatures are made with ed25519 keys, through `cryptography`. A signature proves that the holder of a key signed the
record. It does not prove who the holder is: compare the public key with the one that the author publishes elsewhere.
"""

import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.runs import (
    CHECKPOINTS,
    REPORT,
    TEMPORARY,
    TRACKER_LOGS,
    disk_errors,
    file_sha256,
    open_run,
    require_run,
    write_atomically,
)
from scoregram.runs import environment as this_environment

RECORD = "replication.json"
EXHIBITS = "exhibits.json"
VERDICTS = "verdicts.json"
SETTING = "setting.json"
"""File with the preset and the number of seeds of a replication."""
RUNS = "runs"
"""Folder of the runs inside the folder of a replication."""
START = "start"
"""Folder of the policies that the runs start from."""
FIGURES = "figures"
"""Folder of the drawn figures, if there is one."""

RECORD_TYPE = "replication_record"
SCHEMA_VERSION = 2
"""Version of the record format. It increases when an older reader would misread a newer record.

Version 1 hashes neither `setting.json` nor figures, and its `environment` is that of the machine that wrote the record,
not of those that measured.
"""

NUMBER_PREFIX = "scoregram"
NUMBER_BYTES = 16
SHORT_LETTERS = 8

NOT_DATA = frozenset({CHECKPOINTS, TRACKER_LOGS, REPORT})
"""Parts of a run folder that may be added or deleted: no exhibit is computed from them."""

ALGORITHM = "ed25519"
KEY_LENGTHS = {"public_key": 32, "signature": 64}
"""Bytes in the parts of a signature."""
INSTALL = "Install it: pip install 'scoregram[sign]'."

_INTEGERS = range(-(2**63), 2**63)
_MAKE_KEY = "Make a key with `openssl genpkey -algorithm ed25519 -out FILE`."


@dataclass(frozen=True)
class Assessment:
    """What a study concludes, in its own words: the fields of a pith.science verdict that a replication can fill."""

    summary: str = ""
    """The result in one line; there `one_line_summary`."""
    strongest_claim: str = ""
    """What the evidence supports best."""
    weakest_assumption: str = ""
    """What the conclusion rests on most weakly."""
    references: tuple[str, ...] = ()
    """Papers that the study compares with or takes methods from."""
    about_version: int | None = None
    """Version of the paper; there `source.version`."""


def write_record(
    folder: Path | str,
    *,
    about: str,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    created: date,
    assessment: Assessment | None = None,
    environment: Mapping[str, Any] | None = None,
    key_file: Path | str | None = None,
    signed_at: datetime | None = None,
) -> Path:
    """Write `replication.json` into the folder of a replication that is otherwise complete.

    Exhibits, verdicts and runs are read from the folder, so that the record cannot disagree with it. The settings of
    each run are in the run's own config, which is hashed like all its data. So is the environment of the machine that
    measured it, which the record repeats.

    Args:
        folder: Holds `exhibits.json`, `verdicts.json` and `runs/`.
        about: Identifier of the paper.
        config: The preset, with everything needed to run it again.
        seeds: Seeds of the runs.
        created: The date of the record; its year is part of the number.
        environment: Versions, source and machine that computed exhibits and verdicts; this process if not given.
        assessment: What the study concludes, in its own words; empty if not given.
        key_file: Sign with the ed25519 key in this PEM file.
        signed_at: When the record is signed, to the second in UTC; now if not given.

    Raises:
        ScoregramError: If a part of the folder is missing or unreadable, or JSON cannot hold a value.
    """
    root = Path(folder)
    _require_runs(root)
    verdicts, exhibits = read_list(root, VERDICTS), read_list(root, EXHIBITS)
    own = assessment or Assessment()
    moment = (signed_at or datetime.now(UTC)).astimezone(UTC)
    signer = None if key_file is None else public_key(key_file)
    content = {
        "about": about,
        "about_version": own.about_version,
        "config": config,
        "created": _day(created).isoformat(),
        "environment": measured_environments(root),
        "exhibits_sha256": sha256_hex(canonical(exhibits)),
        "files": data_files(root),
        "key_id": None if signer is None else key_id(signer),
        "recorded_with": this_environment() if environment is None else environment,
        "references": list(own.references),
        "schema_version": SCHEMA_VERSION,
        "seeds": list(seeds),
        "signed_at": None if signer is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "signer": signer,
        "strongest_claim": own.strongest_claim,
        "summary": own.summary,
        "verdicts": verdicts,
        "weakest_assumption": own.weakest_assumption,
    }
    path = root / RECORD
    text = record_text(_addressed(content, key_file))
    with disk_errors(path, caller="write_record"):
        write_atomically(path, text)
    return path


def _addressed(content: Mapping[str, Any], key_file: Path | str | None) -> dict[str, Any]:
    """The whole record: content, its hash, the numbers made from the hash, and the signature if there is a key."""
    sha256 = sha256_hex(canonical(content))
    record = {
        "content": content,
        "number": record_number(sha256, date.fromisoformat(content["created"]).year),
        "record_type": RECORD_TYPE,
        "schema_version": SCHEMA_VERSION,
        "sha256": sha256,
        "short_number": short_record_number(sha256),
    }
    return record if key_file is None else record | {"signature": sign(bytes.fromhex(sha256), key_file)}


def run_folders(root: Path) -> list[Path]:
    """Folders of the runs of a replication, sorted by name."""
    return [path for path in sorted((root / RUNS).glob("*")) if not path.name.startswith(TEMPORARY)]


def measured_environments(root: Path) -> list[dict[str, Any]]:
    """`environment` and `runs` of every machine, version and source that measured: one entry for each, by run name."""
    runs = [open_run(path) for path in run_folders(root)]
    named = [(one.folder.name, e) for one in runs for e in (one.environment, *(r["environment"] for r in one.resumed))]
    found: dict[bytes, dict[str, Any]] = {}
    for name, environment in named:
        entry = found.setdefault(canonical(environment), {"environment": dict(environment), "runs": []})
        entry["runs"] += [] if name in entry["runs"] else [name]
    return list(found.values())


def _require_runs(root: Path) -> None:
    runs = run_folders(root)
    if not runs:
        fail("write_record", f"{root / RUNS} must hold the runs", "none", "Run the replication first.")
    for path in runs:
        require_run(path)


def _day(created: date) -> date:
    return created.date() if isinstance(created, datetime) else created


def canonical(value: Any) -> bytes:
    """Canonical text of a value: JSON with sorted keys, without spaces, in UTF-8 without escapes.

    Equal values have equal texts, whatever the order of their keys. A tuple counts as a list; `1` and `1.0` differ.

    Raises:
        ScoregramError: If JSON cannot hold the value (`nan`, infinities, keys that are not text), or if other readers
            would round it (integers beyond 64 bits); the error names the place.

    Example:
        >>> canonical({"b": (1, 2.0), "a": "σ"}).decode()
        '{"a":"σ","b":[1,2.0]}'
    """
    plain = _plain(value, "value")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(content: bytes) -> str:
    """The sha256 of some bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def hash_letters(sha256: str) -> str:
    """The first 128 bits of a hash in base32: 26 letters, the last of which holds 3 bits."""
    return base64.b32encode(bytes.fromhex(sha256)[:NUMBER_BYTES]).decode().rstrip("=")


def record_number(sha256: str, year: int) -> str:
    """Name of a record, with 128 bits of its hash, so that no two records share it.

    Example:
        >>> record_number("00" * 32, 2026)
        'scoregram:2026:AAAAAAAAAAAAAAAAAAAAAAAAAA'
    """
    return f"{NUMBER_PREFIX}:{year}:{hash_letters(sha256)}"


def short_record_number(sha256: str) -> str:
    """Short name of a record, with 40 bits of its hash.

    Example:
        >>> short_record_number("ff" * 32)
        'scoregram:77777777'
    """
    return f"{NUMBER_PREFIX}:{hash_letters(sha256)[:SHORT_LETTERS]}"


def record_text(record: Mapping[str, Any]) -> bytes:
    """Content of `replication.json`, indented for people. The hash is of the canonical text, not of this one."""
    return (json.dumps(_plain(record, "record"), sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def parse_strict_json(text: bytes, name: str) -> Any:
    """JSON that every parser reads the same way: each key once, no `NaN`, finite numbers.

    Raises:
        ScoregramError: If the text is anything else; the error calls it `name`.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse)
        canonical(value)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, RecursionError) else str(error).rstrip(".")
        return fail("verify", f"{name} must be strict JSON", f"a fault ({reason})", "Restore it from a copy.")
    return value


def read_list(folder: Path, name: str) -> list[Any]:
    """The list in `exhibits.json` or `verdicts.json`, whose only key is the name of the file."""
    key = Path(name).stem
    path = folder / name
    try:
        text = path.read_bytes()
    except OSError as error:
        fail("verify", f"{path} must be readable", error.strerror or error, "Restore it from a copy.")
    value = parse_strict_json(text, name)
    if not isinstance(value, dict) or value.keys() != {key} or not isinstance(value[key], list):
        return fail(
            "verify", f"{name} must hold a list of {key} and nothing else", "other JSON", "Restore it from a copy."
        )
    return value[key]


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(key, name): _plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if (isinstance(value, int) and value in _INTEGERS) or (isinstance(value, str) and _is_unicode(value)):
        return value
    remedy = "Pass strings, finite numbers, booleans, None, and lists and mappings of them."
    return fail("canonical", f"{name} must be a JSON value", f"{type(value).__name__} {value!r:.60}", remedy)


def _key(key: Any, name: str) -> str:
    if not (isinstance(key, str) and _is_unicode(key)):
        fail("canonical", f"{name} must have string keys", repr(key), "Pass a string.")
    return key


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text; it cannot hold lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!a} appears twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def data_files(folder: Path | str, *, version: int = SCHEMA_VERSION) -> dict[str, str]:
    """Path inside the folder → sha256, for every file that the replication depends on, sorted by path.

    These are the settings, the exhibits, the verdicts, the figures, and everything in the runs except checkpoints,
    reports, logs of trackers and unfinished files. Files that scoregram did not write are included: a reader could take
    them for data. A record of version 1 has neither settings nor figures.

    Raises:
        ScoregramError: If a file is unreadable, or a folder is a link, which could hide files.
    """
    root = Path(folder)
    try:
        names = (EXHIBITS, VERDICTS) if version == 1 else (EXHIBITS, VERDICTS, SETTING)
        folders = (RUNS,) if version == 1 else (RUNS, FIGURES)
        files = [path for name in names if (path := root / name).is_file()]
        files += [path for name in folders for path in _files_below(root, name)]
        return {name: file_sha256(root / name) for name in sorted(path.relative_to(root).as_posix() for path in files)}
    except OSError as error:
        return fail("data_files", f"{root} must be readable", error, "Check the permissions and the disk.")


def _files_below(root: Path, top: str) -> Iterator[Path]:
    for inside, folders, names in os.walk(root / top, onerror=_unless_absent):
        here = Path(inside)
        dropped = NOT_DATA if here.parent == root / RUNS else frozenset[str]()
        folders[:] = [name for name in folders if name not in dropped and not name.startswith(TEMPORARY)]
        files = [here / name for name in names if name not in dropped and not name.startswith(TEMPORARY)]
        odd = [here / name for name in folders if (here / name).is_symlink()]
        odd += [path for path in files if not path.is_file()]
        for path in odd:
            name = path.relative_to(root).as_posix()
            fail("data_files", f"{top}/ must hold plain files and folders", f"{name!a}", "Replace it with a copy.")
        yield from files


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def can_verify() -> bool:
    """Whether `cryptography` is installed."""
    return find_spec("cryptography") is not None


def public_key(key_file: Path | str) -> str:
    """Public half of the key in a PEM file, base64 of 32 bytes."""
    return _public(_private(key_file, caller="public_key"))


def key_id(signer: str) -> str:
    """Short name of a public key: the first 16 bytes of its sha256, as 32 hexadecimal digits."""
    return hashlib.sha256(_bytes(signer)).hexdigest()[: 2 * NUMBER_BYTES]


def sign(message: bytes, key_file: Path | str) -> dict[str, str]:
    """Signature of a message by the key in a PEM file: `algorithm`, and `public_key` and `signature` in base64.

    The same key and message always give the same signature.

    Raises:
        ScoregramError: If `cryptography` is absent, or the file does not hold an unencrypted ed25519 key.
    """
    key = _private(key_file, caller="sign")
    return {"algorithm": ALGORITHM, "public_key": _public(key), "signature": _base64(key.sign(message))}


def signature_faults(signature: Any) -> list[str]:
    """A sentence for each malformed part of a signature: no message could make it valid."""
    if not isinstance(signature, Mapping) or signature.keys() != {"algorithm", *KEY_LENGTHS}:
        return [f"the signature must consist of algorithm, {' and '.join(KEY_LENGTHS)}"]
    found = [] if signature["algorithm"] == ALGORITHM else [f"the algorithm must be {ALGORITHM}"]
    wrong = [name for name, length in KEY_LENGTHS.items() if len(_bytes(signature[name])) != length]
    return found + [f"the {name.replace('_', ' ')} is not base64 of {KEY_LENGTHS[name]} bytes" for name in wrong]


def is_valid_signature(signature: Mapping[str, str], message: bytes) -> bool:
    """Whether the signature is of this message and by the key that it names; it must have no `signature_faults`.

    Raises:
        ScoregramError: If `cryptography` is absent.
    """
    _require_cryptography("verify")
    from cryptography.exceptions import InvalidSignature  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # pyright: ignore[reportMissingImports]

    try:
        key = Ed25519PublicKey.from_public_bytes(_bytes(signature["public_key"]))
        key.verify(_bytes(signature["signature"]), message)
    except (InvalidSignature, ValueError):  # ValueError: the 32 bytes are not a point of the curve
        return False
    return True


def _private(key_file: Path | str, *, caller: str) -> Any:
    _require_cryptography(caller)
    from cryptography.exceptions import UnsupportedAlgorithm  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # pyright: ignore[reportMissingImports]

    try:
        key = load_pem_private_key(Path(key_file).read_bytes(), password=None)
    except OSError as error:
        fail(caller, f"{key_file} must be readable", error.strerror, _MAKE_KEY)
    except TypeError:
        fail(caller, f"{key_file} must hold a key without a password", "an encrypted key", _MAKE_KEY)
    except (ValueError, UnsupportedAlgorithm):  # the message shows nothing of the file: it may hold a secret
        fail(caller, f"{key_file} must hold a private key in PEM format", "something else", _MAKE_KEY)
    if not isinstance(key, Ed25519PrivateKey):
        fail(caller, f"{key_file} must hold an {ALGORITHM} key", "a key of another kind", _MAKE_KEY)
    return key


def _require_cryptography(caller: str) -> None:
    if not can_verify():
        fail(caller, "signatures need cryptography", "no such package", INSTALL)


def _public(key: Any) -> str:
    return _base64(key.public_key().public_bytes_raw())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: Any) -> bytes:
    """The bytes that base64 text encodes; empty unless the text is their canonical encoding (spare bits zero)."""
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
    return content if _base64(content) == text else b""
