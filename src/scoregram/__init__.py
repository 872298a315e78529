"""scoregram: the exact Gram matrix of per-rollout policy-gradient scores, and everything that follows from it.

Importing this package imports nothing heavy; the public names below load their module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scoregram.errors import ScoregramError as ScoregramError

_HOME = {
    "ScoregramError": "scoregram.errors",
}
__all__ = ["ScoregramError", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'scoregram' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
