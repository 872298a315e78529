"""The one error this library raises. Apart from `checks` so that the command line can catch it without torch."""


class ScoregramError(ValueError):
    """What was received cannot give a meaningful number; the message says what to do instead."""
