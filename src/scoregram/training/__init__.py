"""The trainer: one config, one straight-line loop that measures as it learns."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
