"""Theorems and bounds as functions, the exact lab in which they are decided, and the ledger of claims."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
