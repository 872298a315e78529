import pytest

from scoregram.advantages import leave_one_out, standardized
from scoregram.studies.grpo_rank.claims import rank
from scoregram.studies.grpo_rank.claims.rank import SPARSITY_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        SPARSITY_CLAIMS,
        {
            "sec-5.1-1-contrast": Verdict.HOLDS,
            "sec-5.1-1-small": Verdict.CORRECTED,
            "sec-5.1-2": Verdict.CORRECTED,
        },
    )


@pytest.mark.parametrize("fn", [leave_one_out, standardized])
def test_another_estimator_in_place_of_the_mean_is_noticed(monkeypatch, fn):
    break_estimator(monkeypatch, "mean", fn)
    assert finding(SPARSITY_CLAIMS, "sec-5.1-1-contrast").verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("contrast_weight", lambda k, size: k / size, "sec-5.1-1-contrast"),
        ("contrast_weight", lambda k, size: k / size, "sec-5.1-1-small"),
        ("largest_stacked_rank", lambda a: len(a) - 1, "sec-5.1-2"),
    ],
)
def test_a_wrong_theorem_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(rank, name, wrong)
    assert finding(SPARSITY_CLAIMS, claim).verdict is Verdict.BROKEN
