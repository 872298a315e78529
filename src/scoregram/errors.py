"""The errors that this library raises. Not part of `checks`, so that configs and the command line need no torch."""

from typing import NoReturn


class ScoregramError(ValueError):
    """The input cannot give a meaningful number; the message says what to do instead."""


class NotFiniteError(ScoregramError):
    """A number is NaN or infinite because a computation went wrong; a trainer may skip the step."""


def fail(caller: str, requirement: str, got: object, remedy: str) -> NoReturn:
    """Raise a `ScoregramError`: `<caller>: <requirement>, got <actual>. <What to do.>`"""
    raise ScoregramError(f"{caller}: {requirement}, got {got}. {remedy}")
