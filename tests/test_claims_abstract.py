import pytest
import torch

from scoregram.studies.grpo_rank.claims import discussion
from scoregram.studies.grpo_rank.claims.discussion import ABSTRACT_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        ABSTRACT_CLAIMS,
        {
            "abstract-sparsity": Verdict.UNSUPPORTED,
            "abstract-effective-rank": Verdict.NEEDS_MEASUREMENT,
            "rank-2": Verdict.FALSE,
            "abstract-baseline": Verdict.UNSUPPORTED,
        },
    )


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("energy_return_covariance", lambda truth: torch.zeros_like(truth.value), "abstract-baseline"),
        ("mixed_probability", lambda p, size: p, "abstract-sparsity"),
        ("expected_orthogonal_effective_rank", lambda p, size: 2.0, "abstract-effective-rank"),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(discussion, name, wrong)
    assert finding(ABSTRACT_CLAIMS, claim).verdict is Verdict.BROKEN


def test_an_estimator_that_drops_rollouts_is_noticed(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: (r - r.mean(dim=-1, keepdim=True)).clamp(min=0))
    assert finding(ABSTRACT_CLAIMS, "abstract-sparsity").verdict is Verdict.BROKEN
    assert finding(ABSTRACT_CLAIMS, "rank-2").verdict is Verdict.BROKEN
