import pytest

from scoregram.advantages import length_weighted, mean_centered, standardized, turn_mean_centered
from scoregram.spectra import spectrum_summary
from scoregram.studies.grpo_rank.claims import discussion
from scoregram.studies.grpo_rank.claims.discussion import DISCUSSION_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        DISCUSSION_CLAIMS,
        {
            "sec-8-template": Verdict.UNSUPPORTED,
            "sec-8-dense": Verdict.UNSUPPORTED,
            "sec-8-which-step": Verdict.CORRECTED,
            "sec-8-future-1": Verdict.ANSWERED,
            "sec-8-future-2": Verdict.NEEDS_MEASUREMENT,
            "sec-8-future-3": Verdict.CORRECTED,
            "sec-9-rloo": Verdict.HOLDS,
            "sec-9-specific": Verdict.FALSE,
            "sec-10-justified": Verdict.UNSUPPORTED,
        },
    )


@pytest.mark.parametrize(
    ("name", "fn", "claims"),
    [
        ("rloo", mean_centered, ("sec-8-dense", "sec-8-future-1", "sec-9-rloo")),  # the rollout left in its baseline
        ("rloo", mean_centered, ("sec-10-justified",)),
        ("constant", lambda r, baselines: r.roll(1, -1), ("sec-9-specific",)),
        ("mean", lambda r: r - r.roll(1, -1), ("sec-9-specific",)),
        ("mean", lambda r: -mean_centered(r), ("sec-8-which-step",)),
        ("turn-rloo", turn_mean_centered, ("sec-8-dense",)),
        ("mean", standardized, ("sec-8-template", "sec-9-rloo")),
        ("mean", lambda r: r - r.amin(dim=-1, keepdim=True), ("sec-8-future-3",)),
    ],
)
def test_a_broken_estimator_is_noticed(monkeypatch, name, fn, claims):
    break_estimator(monkeypatch, name, fn)
    for claim in claims:
        assert finding(DISCUSSION_CLAIMS, claim).verdict is Verdict.BROKEN, claim


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("mixed_probability", lambda p, size: p, "sec-10-justified"),
        ("orthogonal_effective_rank", lambda k, size: float(size), "sec-8-future-3"),
        ("expected_orthogonal_effective_rank", lambda p, size: 10 * p, "sec-8-future-2"),
        ("spectrum_summary", lambda gram, a: spectrum_summary(gram, a.round()), "sec-8-future-1"),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(discussion, name, wrong)
    assert finding(DISCUSSION_CLAIMS, claim).verdict is Verdict.BROKEN


def test_length_weights_would_bend_the_expected_update(monkeypatch):
    """The template claim is answered by a direction, so an estimator that bends it must be noticed."""
    break_estimator(monkeypatch, "mean", lambda r: length_weighted(r, lengths=1 + r))
    assert finding(DISCUSSION_CLAIMS, "sec-8-template").verdict is Verdict.BROKEN
