"""The errors that this library raises. Not part of `checks`, so that the command line can catch them without torch."""


class ScoregramError(ValueError):
    """The input cannot give a meaningful number; the message says what to do instead."""


class NotFiniteError(ScoregramError):
    """A number is NaN or infinite because a computation went wrong; a trainer may skip the step."""
