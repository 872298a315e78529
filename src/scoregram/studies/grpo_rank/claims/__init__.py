"""The claims of the paper in its order, each with a check that decides it by enumeration; a file per part of the paper.

The U-statistic paper, arXiv:2603.01162, follows: it analyses the same estimator. Then come five companions, each in a world
of its own, a paper on calibration, and assertions of a summary.
"""

from scoregram.studies.grpo_rank.claims.announcements import SETUP_CLAIMS, SUMMARY_CLAIMS
from scoregram.studies.grpo_rank.claims.calibration import CALIBRATION_CLAIMS
from scoregram.studies.grpo_rank.claims.companions import COMPANION_CLAIMS, DISCOUNT_CLAIMS
from scoregram.studies.grpo_rank.claims.derivation import CREDIT_CLAIMS, DERIVATION_CLAIMS
from scoregram.studies.grpo_rank.claims.discussion import ABSTRACT_CLAIMS, DISCUSSION_CLAIMS
from scoregram.studies.grpo_rank.claims.limits import LIMIT_CLAIMS
from scoregram.studies.grpo_rank.claims.multiturn import MULTITURN_APPENDIX_CLAIMS, MULTITURN_CLAIMS
from scoregram.studies.grpo_rank.claims.rank import RANK_CLAIMS, SPARSITY_CLAIMS, TABLE_CLAIMS
from scoregram.studies.grpo_rank.claims.structure import STRUCTURE_APPENDIX_CLAIMS, STRUCTURE_CLAIMS
from scoregram.studies.grpo_rank.claims.ustatistic import GROUP_SIZE_CLAIMS, USTATISTIC_CLAIMS
from scoregram.studies.ledger import Claim

CLAIMS: tuple[Claim, ...] = (
    *ABSTRACT_CLAIMS,
    *DISCOUNT_CLAIMS,
    *DERIVATION_CLAIMS,
    *CREDIT_CLAIMS,
    *STRUCTURE_CLAIMS,
    *SPARSITY_CLAIMS,
    *MULTITURN_CLAIMS,
    *SETUP_CLAIMS,
    *RANK_CLAIMS,
    *TABLE_CLAIMS,
    *DISCUSSION_CLAIMS,
    *STRUCTURE_APPENDIX_CLAIMS,
    *MULTITURN_APPENDIX_CLAIMS,
    *USTATISTIC_CLAIMS,
    *GROUP_SIZE_CLAIMS,
    *LIMIT_CLAIMS,
    *COMPANION_CLAIMS,
    *CALIBRATION_CLAIMS,
    *SUMMARY_CLAIMS,
)
