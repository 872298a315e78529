"""The errors that this library raises. Not part of `checks`, so that configs and the command line need no torch."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

_Row = TypeVar("_Row")


class ScoregramError(ValueError):
    """The input cannot give a meaningful number; the message says what to do instead."""


class NotFiniteError(ScoregramError):
    """A number is NaN or infinite because a computation went wrong; a trainer may skip the step."""


class SettingTypeError(ScoregramError, TypeError):
    """A setting has a value of another type than its annotation."""


def fail(caller: str, requirement: str, got: object, remedy: str) -> NoReturn:
    """Raise a `ScoregramError`: `<caller>: <requirement>, got <actual>. <What to do.>`"""
    raise ScoregramError(f"{caller}: {requirement}, got {got}. {remedy}")


def lookup(table: Mapping[str, _Row], name: str, *, kind: str) -> _Row:
    """Row `name` of a table; the error for an unknown name lists the choices and suggests the closest."""
    if name not in table:
        fail(kind, f"the name must be one of {listed(table)}", repr(name), spelling_remedy(name, table))
    return table[name]


def listed(names: Iterable[str]) -> str:
    """Names in one line, sorted and separated by commas."""
    return ", ".join(sorted(names))


def spelling_remedy(name: object, choices: Iterable[str]) -> str:
    """What to do about a name that is none of the choices: the closest of them, if one is close.

    Capitals, and which of `-`, `_`, `.` and spaces are between words, do not count.

    Example:
        >>> spelling_remedy("GRPO_verl", ["grpo", "grpo-verl"]), spelling_remedy("maths", ["gsm8k"])
        ("Did you mean 'grpo-verl'?", 'Check the spelling.')
    """
    plain = {_plain_name(choice): choice for choice in choices}
    close = get_close_matches(_plain_name(str(name)), plain, n=1, cutoff=0.75)
    return f"Did you mean {plain[close[0]]!r}?" if close else "Check the spelling."


def _plain_name(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace(".", " ").replace("-", " ").split())


def option_name(field_name: str) -> str:
    """A field of a config as an option of the command line.

    Example:
        >>> option_name("group_size")
        '--group-size'
    """
    return f"--{field_name.replace('_', '-')}"


def require_field_types(config: Any, *, caller: str) -> None:
    """Raise if a field of a dataclass has a value that its annotation does not allow.

    The command line checks types itself; a config that is made in Python may have any. Checked are whole numbers,
    numbers, texts, switches, choices and tuples; other annotations allow everything.
    """
    for name, hint in _annotations(type(config)).items():
        value = getattr(config, name)
        if not _is_allowed(value, hint):
            raise SettingTypeError(f"{caller}: {name} must be {expected_value(hint)}, got {value!r}. Check the value.")


@cache
def _annotations(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def is_readable_number(text: str, hint: Any) -> bool:
    """Whether an option of this type takes the text, or the type is not that of a number.

    Example:
        >>> [is_readable_number(text, int | Literal["auto"]) for text in ("8", "auto", "x")]
        [True, True, False]
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not {int, float} & set(kinds):
        return True
    for kind in kinds:
        if kind in (int, float):
            with suppress(ValueError):
                kind(text)
                return True
    return text in [str(choice) for kind in kinds for choice in (get_args(kind) or (None,))]


def _is_allowed(value: object, hint: Any) -> bool:
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_allowed(value, one) for one in choices)
    if origin is Literal:
        return any(value is choice or value == choice for choice in choices if type(value) is type(choice))
    if origin is tuple:
        return isinstance(value, tuple | list)
    if hint in (int, float):
        return isinstance(value, {int: Integral, float: Real}[hint]) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, NoneType) else True


def expected_value(hint: Any) -> str:
    """What an annotation allows, in words.

    Example:
        >>> expected_value(int | Literal["auto"]), expected_value(float | None)
        ('a whole number or auto', 'a number or None')
    """
    return " or ".join(_expected(hint))


def _expected(hint: Any) -> list[str]:
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [word for one in choices for word in _expected(one)]
    if origin is Literal:
        return [f"{'one of ' if len(choices) > 1 else ''}{', '.join(map(str, choices))}"]
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
    return [words.get(hint, "a tuple" if origin is tuple else str(hint))]
