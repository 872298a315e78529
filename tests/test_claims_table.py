import pytest

from scoregram.spectra import Interval
from scoregram.studies.grpo_rank.claims import rank
from scoregram.studies.grpo_rank.claims.rank import TABLE_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        TABLE_CLAIMS, {"table-1-r2": Verdict.FALSE, "table-1-r4": Verdict.CORRECTED, "table-1-r8": Verdict.CORRECTED}
    )


@pytest.mark.parametrize("claim", ["table-1-r2", "table-1-r4", "table-1-r8"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("largest_stacked_rank", lambda a: len(a) - 1),
        ("feasible_interval", lambda metric, f, m: Interval(1.0, 1.2)),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(rank, name, wrong)
    assert finding(TABLE_CLAIMS, claim).verdict is Verdict.BROKEN


def test_an_estimator_that_loses_rows_is_noticed(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: r)
    assert finding(TABLE_CLAIMS, "table-1-r2").verdict is Verdict.BROKEN


def test_two_rows_are_judged_by_their_own_formula(monkeypatch):
    monkeypatch.setattr(rank, "two_row_effective_rank_from_top1", lambda f: 2.0)
    assert finding(TABLE_CLAIMS, "table-1-r2").verdict is Verdict.BROKEN
