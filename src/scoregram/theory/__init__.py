"""Theorems and bounds as functions, the exact lab in which they are decided, and the ledger of claims."""
