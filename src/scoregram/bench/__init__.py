"""Benchmarks: ratios measured side by side in one process, with the answers compared."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
