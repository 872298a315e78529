"""The claims ledger: every numbered claim of the paper, with a check that decides it.

One file per part of the paper; `CLAIMS` is all of them in the paper's order.
"""

from scoregram.theory.claims.abstract import ABSTRACT
from scoregram.theory.claims.concentration import APPENDIX_A1_A2
from scoregram.theory.claims.credit import CREDIT
from scoregram.theory.claims.derivation import DERIVATION
from scoregram.theory.claims.discussion import DISCUSSION
from scoregram.theory.claims.group_size import GROUP_SIZE
from scoregram.theory.claims.ledger import Claim
from scoregram.theory.claims.multiturn import SECTION_6
from scoregram.theory.claims.multiturn_appendix import APPENDIX_A3
from scoregram.theory.claims.rank import RANK
from scoregram.theory.claims.sparsity import SPARSITY
from scoregram.theory.claims.structure import STRUCTURE
from scoregram.theory.claims.table import TABLE
from scoregram.theory.claims.ustatistic import U_STATISTIC

CLAIMS: tuple[Claim, ...] = (
    *ABSTRACT,
    *DERIVATION,
    *CREDIT,
    *STRUCTURE,
    *SPARSITY,
    *SECTION_6,
    *RANK,
    *TABLE,
    *DISCUSSION,
    *APPENDIX_A1_A2,
    *APPENDIX_A3,
    *U_STATISTIC,
    *GROUP_SIZE,
)
