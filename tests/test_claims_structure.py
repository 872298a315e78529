import pytest

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.statistics import effective_fraction_bound
from scoregram.studies.grpo_rank.claims import structure
from scoregram.studies.grpo_rank.claims.structure import STRUCTURE_CLAIMS
from scoregram.studies.ledger import Verdict
from scoregram.theory.theorems import advantage_covariance, update_norm_bound
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        STRUCTURE_CLAIMS,
        {
            "thm-4.1-i": Verdict.HOLDS,
            "thm-4.1-ii": Verdict.HOLDS,
            "thm-4.1-iii": Verdict.HOLDS,
            "thm-4.1-iv": Verdict.HOLDS,
            "thm-4.1-iv-reading": Verdict.FALSE,
            "cor-4.2-scale": Verdict.CORRECTED,
            "cor-4.2-vanish": Verdict.CORRECTED,
            "cor-4.2-constant": Verdict.HOLDS,
            "sec-4-curriculum": Verdict.CORRECTED,
        },
    )


@pytest.mark.parametrize(
    ("name", "fn", "claims"),
    [
        ("mean", leave_one_out, ("thm-4.1-ii", "thm-4.1-iii", "sec-4-curriculum")),
        ("mean", lambda r: mean_centered(r) + 0.1, ("thm-4.1-i", "cor-4.2-constant", "thm-4.1-iv-reading")),
        ("mean", lambda r: 3 * mean_centered(r), ("thm-4.1-iv", "cor-4.2-scale")),
        ("grpo", mean_centered, ("sec-4-curriculum",)),
    ],
)
def test_a_broken_estimator_is_noticed(monkeypatch, name, fn, claims):
    break_estimator(monkeypatch, name, fn)
    for claim in claims:
        assert finding(STRUCTURE_CLAIMS, claim).verdict is Verdict.BROKEN, claim


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("advantage_covariance", lambda v, size: advantage_covariance(v, size + 1), "thm-4.1-ii"),
        (
            "effective_fraction_bound",
            lambda *a, epsilon: 0.1 * effective_fraction_bound(*a, epsilon=epsilon),
            "thm-4.1-iv",
        ),
        ("update_norm_bound", lambda gram, r: 0.3 * update_norm_bound(gram, r), "cor-4.2-scale"),
        ("standardized_weight", lambda p, size, ddof: 1.0, "sec-4-curriculum"),
    ],
)
def test_a_wrong_theorem_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(structure, name, wrong)
    assert finding(STRUCTURE_CLAIMS, claim).verdict is Verdict.BROKEN
