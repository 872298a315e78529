"""Language models as policies: load, sample, log-probabilities.

The names below load their module when first used, so that the settings can be read without torch.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
