"""Signatures with ed25519 keys, through `cryptography`.

A signature says that the holder of a key stood by the record. Whose key it is it cannot say: compare the public key
with the one that its holder gives elsewhere.
"""

import base64
import binascii
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scoregram.checks import fail
from scoregram.runs import disk_errors, write_all

ALGORITHM = "ed25519"
LENGTHS = {"public_key": 32, "signature": 64}
INSTALL = "Install it: pip install 'scoregram[sign]'."
MAKE_ONE = "Make a key with `openssl genpkey -algorithm ed25519 -out FILE`."


def can_verify() -> bool:
    """Whether `cryptography` is installed."""
    return find_spec("cryptography") is not None


def new_key(path: Path | str) -> str:
    """Make a key in a new PEM file that only its owner may read; returns the public key, base64 of 32 bytes.

    Raises:
        ScoregramError: If the file exists, since a lost key cannot be made again, or cannot be written.
    """
    _require_cryptography("new_key")
    from cryptography.hazmat.primitives import serialization as form  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # pyright: ignore[reportMissingImports]

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    if Path(path).exists():
        fail("new_key", f"{path} must be new", "a file that exists", "Choose another name.")
    with disk_errors(Path(path), caller="new_key"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_all(descriptor, pem)
        finally:
            os.close(descriptor)
    return _raw(key)


def public_key(key_file: Path | str) -> str:
    """Public half of the key in a PEM file, base64 of 32 bytes."""
    return _raw(_private(key_file, caller="public_key"))


def sign(message: bytes, key_file: Path | str) -> dict[str, str]:
    """Signature of a message by the key in a PEM file: `algorithm`, `public_key` and `signature`, both in base64.

    The same key and message always give the same signature.

    Raises:
        ScoregramError: If `cryptography` is absent, or the file does not hold an ed25519 key without a password.
    """
    key = _private(key_file, caller="sign")
    return {"algorithm": ALGORITHM, "public_key": _raw(key), "signature": _base64(key.sign(message))}


def faults(signature: Any) -> list[str]:
    """A sentence for each part of a signature that cannot be right, whatever was signed."""
    if not isinstance(signature, Mapping) or signature.keys() != {"algorithm", *LENGTHS}:
        return [f"the signature must consist of algorithm, {' and '.join(LENGTHS)}"]
    found = [] if signature["algorithm"] == ALGORITHM else [f"the algorithm must be {ALGORITHM}"]
    wrong = [name for name, length in LENGTHS.items() if len(_bytes(signature[name])) != length]
    return found + [f"the {name.replace('_', ' ')} is not base64 of {LENGTHS[name]} bytes" for name in wrong]


def is_valid(signature: Mapping[str, str], message: bytes) -> bool:
    """Whether the signature is of this message and by the key that it names; it must have no faults.

    Raises:
        ScoregramError: If `cryptography` is absent.
    """
    _require_cryptography("verify")
    from cryptography.exceptions import InvalidSignature  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # pyright: ignore[reportMissingImports]

    try:
        key = Ed25519PublicKey.from_public_bytes(_bytes(signature["public_key"]))
        key.verify(_bytes(signature["signature"]), message)
    except (InvalidSignature, ValueError):  # the latter for bytes that are no point of the curve
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
        fail(caller, f"{key_file} must be readable", error.strerror, MAKE_ONE)
    except TypeError:
        fail(caller, f"{key_file} must hold a key without a password", "one with", MAKE_ONE)
    except (ValueError, UnsupportedAlgorithm):  # says nothing of what stands there: it may be a secret
        fail(caller, f"{key_file} must hold a private key in PEM format", "something else", MAKE_ONE)
    if not isinstance(key, Ed25519PrivateKey):
        fail(caller, f"{key_file} must hold an {ALGORITHM} key", "a key of another kind", MAKE_ONE)
    return key


def _require_cryptography(caller: str) -> None:
    if not can_verify():
        fail(caller, "signatures need cryptography", "no such package", INSTALL)


def _raw(key: Any) -> str:
    return _base64(key.public_key().public_bytes_raw())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: Any) -> bytes:
    """What the text stands for; nothing if it is not the one text that stands for it (spare bits must be zero)."""
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
    return content if _base64(content) == text else b""
