"""scoregram: the exact Gram matrix of per-rollout policy-gradient scores, and everything that follows from it."""

__version__ = "0.1.0"
