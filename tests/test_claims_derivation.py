import pytest
import torch

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.studies.grpo_rank.claims import derivation
from scoregram.studies.grpo_rank.claims.derivation import DERIVATION_CLAIMS
from scoregram.studies.ledger import Verdict
from scoregram.theory.lab import multiturn as lab
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        DERIVATION_CLAIMS,
        {
            "eq-6": Verdict.HOLDS,
            "eq-7-baseline": Verdict.FALSE,
            "eq-8": Verdict.CORRECTED,
            "eq-9": Verdict.HOLDS,
            "eq-10": Verdict.HOLDS,
            "eq-12": Verdict.CORRECTED,
            "eq-13": Verdict.FALSE,
            "eq-14": Verdict.HOLDS,
            "single-turn-exact": Verdict.CORRECTED,
            "scope-clipping": Verdict.CORRECTED,
        },
    )


@pytest.mark.parametrize(
    ("name", "fn", "claim"),
    [
        ("rloo", mean_centered, "single-turn-exact"),  # the others' mean with the rollout itself left in
        ("mean", leave_one_out, "single-turn-exact"),
        ("mean", leave_one_out, "eq-14"),  # not the mean of all R
        ("mean", lambda r: 2 * mean_centered(r), "scope-clipping"),
    ],
)
def test_a_broken_estimator_is_noticed(monkeypatch, name, fn, claim):
    if claim == "scope-clipping":  # weights must be the advantages themselves, whoever computes them
        monkeypatch.setattr(derivation, "clipped_ratio", lambda now, old, a, mask, **_: -(2 * a[:, None] * now).sum())
    else:
        break_estimator(monkeypatch, name, fn)
    assert finding(DERIVATION_CLAIMS, claim).verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("theorem", "wrong", "claim"),
    [
        ("group_mean_scale", lambda size: 1.0, "single-turn-exact"),
        ("advantage_offset", lambda truth: 1.01 * lab.advantage_offset(truth), "eq-13"),
        ("energy_return_covariance", lambda truth: torch.zeros_like(truth.value), "eq-7-baseline"),
        ("excess_variance", lambda b, best, trace, size: 2 * (b - best) ** 2 * trace, "eq-7-baseline"),
    ],
)
def test_a_wrong_theorem_is_noticed(monkeypatch, theorem, wrong, claim):
    monkeypatch.setattr(derivation, theorem, wrong)
    assert finding(DERIVATION_CLAIMS, claim).verdict is Verdict.BROKEN


def test_a_baseline_that_sees_the_action_would_not_pass_as_a_state_baseline(monkeypatch):
    real = derivation.credit_moments
    monkeypatch.setattr(
        derivation,
        "credit_moments",
        lambda truth, credit, **at: real(truth, credit - 0.1 * truth.listing.action, **at),
    )
    assert finding(DERIVATION_CLAIMS, "eq-6").verdict is Verdict.BROKEN
