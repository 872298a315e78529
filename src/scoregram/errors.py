"""The error this library raises. Apart from `checks` so that the command line can catch it without torch."""


class ScoregramError(ValueError):
    """What was received cannot give a meaningful number; the message says what to do instead."""


class NotFiniteError(ScoregramError):
    """A number is `nan` or infinite where that means that a computation went wrong; a trainer may pass over it."""
