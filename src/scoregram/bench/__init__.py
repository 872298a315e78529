"""Benchmarks: ratios measured side by side in one process, with the answers compared."""
