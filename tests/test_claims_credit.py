import pytest
import torch

from scoregram.objectives import reinforce
from scoregram.studies.grpo_rank.claims import derivation
from scoregram.studies.grpo_rank.claims.derivation import CREDIT_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        CREDIT_CLAIMS,
        {
            "thm-3.1": Verdict.HOLDS,
            "remark-3.2": Verdict.HOLDS,
            "eq-18-19": Verdict.HOLDS,
            "sec-3.1-rank": Verdict.CORRECTED,
        },
    )


def fading(advantages, mask):
    """Credit that falls along the rollout."""
    return torch.where(mask, advantages[..., None] / (1 + torch.arange(mask.shape[-1])), 0.0)


def by_length(log_probs, advantages, mask, *, aggregation):
    return reinforce(log_probs, advantages, mask, aggregation="sequence_mean")


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("spread_over_tokens", fading, "thm-3.1"),
        ("reinforce", by_length, "eq-18-19"),
        ("group_mean_scale", lambda size: 1.0, "remark-3.2"),
        ("largest_stacked_rank", lambda a: len(a) - 1, "sec-3.1-rank"),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(derivation, name, wrong)
    assert finding(CREDIT_CLAIMS, claim).verdict is Verdict.BROKEN


def test_an_estimator_that_only_rewards_winners_is_noticed(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: (r - r.mean(dim=-1, keepdim=True)).clamp(min=0))
    for claim in ("sec-3.1-rank", "remark-3.2"):
        assert finding(CREDIT_CLAIMS, claim).verdict is Verdict.BROKEN, claim
