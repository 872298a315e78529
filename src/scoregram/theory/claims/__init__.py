"""The claims ledger: every numbered claim of the paper, with a check that decides it.

One file per part of the paper; `CLAIMS` is all of them in the paper's order.
"""

from scoregram.theory.claims.ledger import Claim

CLAIMS: tuple[Claim, ...] = ()
