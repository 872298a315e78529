"""Integrations with other trainers: their rollouts, rewards and losses as scoregram's own types."""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
