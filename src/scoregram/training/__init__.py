"""The trainer: one config, one straight-line loop that measures as it learns."""
