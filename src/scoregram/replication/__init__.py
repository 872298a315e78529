"""The paper's experiment, end to end: run, judged claim by claim, and kept in a record that anyone can verify."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
