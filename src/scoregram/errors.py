"""The errors that this library raises. Not part of `checks`, so that configs and the command line need no torch."""

from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints


class ScoregramError(ValueError):
    """The input cannot give a meaningful number; the message says what to do instead."""


class NotFiniteError(ScoregramError):
    """A number is NaN or infinite because a computation went wrong; a trainer may skip the step."""


class SettingTypeError(ScoregramError, TypeError):
    """A setting has a value of another type than its annotation."""


def fail(caller: str, requirement: str, got: object, remedy: str) -> NoReturn:
    """Raise a `ScoregramError`: `<caller>: <requirement>, got <actual>. <What to do.>`"""
    raise ScoregramError(f"{caller}: {requirement}, got {got}. {remedy}")


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
            expected = " or ".join(_expected(hint))
            raise SettingTypeError(f"{caller}: {name} must be {expected}, got {value!r}. Check the value.")


@cache
def _annotations(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


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


def _expected(hint: Any) -> list[str]:
    """What an annotation allows, in words."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [word for one in choices for word in _expected(one)]
    if origin is Literal:
        return [f"one of {', '.join(map(str, choices))}"]
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
    return [words.get(hint, "a tuple" if origin is tuple else str(hint))]
