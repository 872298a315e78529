"""`config.yaml`: a config as plain values, as text, and where two of them differ."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

import yaml

from scoregram.checks import fail
from scoregram.runs.layout import SCHEMA


def plain(value: Any, name: str = "config") -> Any:
    """The value as YAML reads it back: mappings with text keys, lists, text, numbers, truth values and None.

    Raises:
        ScoregramError: If it holds anything else; the error names where.

    Example:
        >>> plain({"rollouts": (2, 4), "seed": 0})
        {'rollouts': [2, 4], 'seed': 0}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {_key(key, name): plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or type(value) in (bool, int, float) or (isinstance(value, str) and _is_unicode(value)):
        return value
    return fail("RunWriter", f"{name} must be plain", f"{type(value).__name__} {value!r}", "Pass numbers and text.")


def _is_unicode(text: str) -> bool:
    """Lone surrogates are not: no file can hold them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _key(key: Any, name: str) -> str:
    if type(key) is not str:
        fail("RunWriter", f"{name} must have names for keys", repr(key), "Pass text.")
    return key


def config_text(config: Mapping[str, Any], environment: Mapping[str, Any], resumed: Collection[Any] = ()) -> bytes:
    """Content of `config.yaml`."""
    stored = {"schema": SCHEMA, "config": plain(config), "environment": plain(environment, "environment")}
    if resumed:
        stored["resumed"] = plain(list(resumed), "resumed")
    return yaml.dump(stored, Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


class _Dumper(yaml.SafeDumper):
    """Every value in one place, without references between them; odd characters escaped, so that they come back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    odd = not all(character.isprintable() or character == "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


_Dumper.add_representer(str, _write_text)


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any], may_differ: Collection[str] = ()) -> list[str]:
    """One phrase for each value that differs between two configs, but for those under the keys in `may_differ`.

    Example:
        >>> differences({"seed": 0, "optimiser": {"lr": 0.1}}, {"seed": 0, "optimiser": {"lr": 0.2}})
        ['optimiser.lr: 0.1 in the run, 0.2 asked for']
    """
    left, right = (_flat({k: v for k, v in plain(each).items() if k not in may_differ}) for each in (stored, asked))
    absent = "nothing"
    return [
        f"{name}: {left.get(name, absent)} in the run, {right.get(name, absent)} asked for"
        for name in sorted(left.keys() | right.keys())
        if name not in left or name not in right or not _same(left[name], right[name])
    ]


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) and value else {before + name: value}
    return flat


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    both_undefined = all(isinstance(each, float) and math.isnan(each) for each in (left, right))
    return both_undefined or left == right
