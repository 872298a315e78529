"""The spectrum of one group's stacked gradient matrix: rank metrics, their feasible intervals, their null models."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
