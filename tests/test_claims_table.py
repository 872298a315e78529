import pytest

from scoregram.spectra import Interval
from scoregram.theory.claims import table
from scoregram.theory.claims.ledger import Verdict
from scoregram.theory.claims.table import TABLE
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        TABLE, {"table-1-r2": Verdict.FALSE, "table-1-r4": Verdict.CORRECTED, "table-1-r8": Verdict.CORRECTED}
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
    monkeypatch.setattr(table, name, wrong)
    assert finding(TABLE, claim).verdict is Verdict.BROKEN


def test_an_estimator_that_loses_rows_is_noticed(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: r)
    assert finding(TABLE, "table-1-r2").verdict is Verdict.BROKEN


def test_two_rows_are_judged_by_their_own_formula(monkeypatch):
    monkeypatch.setattr(table, "two_row_effective_rank_from_top1", lambda f: 2.0)
    assert finding(TABLE, "table-1-r2").verdict is Verdict.BROKEN
