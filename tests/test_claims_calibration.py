import pytest

from scoregram.advantages import mean_centered, standardized
from scoregram.studies.grpo_rank.claims import CLAIMS, calibration
from scoregram.studies.grpo_rank.claims.calibration import CALIBRATION_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import check_verdicts, finding


def test_verdicts():
    check_verdicts(CALIBRATION_CLAIMS, {"calibration-deviation": Verdict.HOLDS, "calibration-without": Verdict.HOLDS})
    assert {claim.id for claim in CALIBRATION_CLAIMS} <= {claim.id for claim in CLAIMS}


@pytest.mark.parametrize(
    ("claim", "name", "wrong"),
    [
        ("calibration-deviation", "standardized", mean_centered),
        ("calibration-without", "mean_centered", standardized),
        ("calibration-without", "leave_one_out", standardized),
        ("calibration-without", "critic_advantages", lambda rewards, *, value: standardized(rewards)),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, claim, name, wrong):
    monkeypatch.setattr(calibration, name, wrong)
    monkeypatch.setattr(calibration, "_SIZES", (2,))  # one size is enough to notice
    assert finding(CALIBRATION_CLAIMS, claim).verdict is Verdict.BROKEN
