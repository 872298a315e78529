"""scoregram: the exact Gram matrix of per-rollout policy-gradient scores, and everything that follows from it.

Importing it loads nothing heavy: the public names, listed in `__init__.pyi`, load their module when first used.
"""

from scoregram.lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
