"""Theorems and bounds as functions, the exact lab that decides them by enumeration, and the ledger of claims."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
