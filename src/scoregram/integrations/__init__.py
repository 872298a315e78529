"""Other trainers: their rollouts, rewards and losses, in the words of this library."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
