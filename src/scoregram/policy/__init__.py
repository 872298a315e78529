"""Language models as policies: load, sample, log-probabilities.

Each name imports its module on first use, so that the settings can be read without importing torch.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
