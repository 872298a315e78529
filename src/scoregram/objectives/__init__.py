"""Surrogate losses: pure functions from per-token log-probabilities to a scalar, and the weight each gives a score."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
