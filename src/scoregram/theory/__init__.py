"""Theorems and bounds as functions, and the exact lab in which every rollout is enumerated."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
