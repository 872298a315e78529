import math
from itertools import product
from statistics import pstdev
from types import SimpleNamespace

import pytest

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.studies.grpo_rank.claims import CLAIMS, announcements, limits
from scoregram.studies.grpo_rank.claims.announcements import SETUP_CLAIMS, SUMMARY_CLAIMS
from scoregram.studies.grpo_rank.claims.grounds import lab_worlds
from scoregram.studies.grpo_rank.claims.limits import LIMIT_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import check_verdicts, finding

ALL = (*LIMIT_CLAIMS, *SETUP_CLAIMS, *SUMMARY_CLAIMS)


def test_verdicts():
    check_verdicts(
        ALL,
        {
            "ustat-lemma-6-decreasing": Verdict.HOLDS,
            "ustat-theorem-8": Verdict.HOLDS,
            "ustat-cor-9": Verdict.HOLDS,
            "ustat-cor-10": Verdict.CORRECTED,
            "ustat-theorem-12": Verdict.HOLDS,
            "ustat-experiment-gsm8k": Verdict.NEEDS_MEASUREMENT,
            "sec-7.1-deviation": Verdict.UNSUPPORTED,
            "summary-baseline-credit": Verdict.CORRECTED,
            "summary-converges": Verdict.UNSUPPORTED,
            "summary-group-size": Verdict.FALSE,
            "summary-parity": Verdict.FALSE,
        },
    )
    assert {claim.id for claim in ALL} <= {claim.id for claim in CLAIMS}


@pytest.mark.parametrize(
    ("module", "name", "wrong", "claims"),
    [
        (limits, "leave_one_out", mean_centered, ("ustat-cor-9",)),
        (limits, "constant_mse", lambda *_: 0.0, ("ustat-cor-9",)),
        (limits, "standardized", lambda rewards, ddof: mean_centered(rewards), ("ustat-theorem-12",)),
        (limits, "_gaps", lambda curvatures, rate: iter([9.0] * limits._STEPS), ("ustat-lemma-6-decreasing",)),
        (limits, "_STEPS", 3, ("ustat-theorem-8",)),
        (announcements, "right_chances", lambda p, size: [1.0 / (size + 1)] * (size + 1), ("sec-7.1-deviation",)),
        (announcements, "leave_one_out", mean_centered, ("summary-parity",)),
        (announcements, "no_baseline", leave_one_out, ("summary-parity",)),  # then a fix would not change the noise
        (announcements, "_EFFECTS", (0, 1), ("summary-parity",)),
        (limits, "uncorrelated_worlds", lambda: lab_worlds("output_only"), ("ustat-cor-10",)),
        (limits, "math", SimpleNamespace(sqrt=lambda x: 0.0), ("ustat-experiment-gsm8k",)),
        (announcements, "_within_rollouts", lambda world: 0.0, ("summary-baseline-credit",)),
        (announcements, "_within_rollouts", lambda world: 1.0, ("summary-baseline-credit",)),
        (announcements, "expected_orthogonal_effective_rank", lambda p, size: 10.0 - size, ("summary-group-size",)),
        (announcements, "expected_orthogonal_effective_rank", lambda p, size: 2 + size / 100, ("summary-group-size",)),
        (
            announcements,
            "expected_orthogonal_effective_rank",
            lambda p, size: 2.0,
            ("summary-converges", "summary-group-size"),
        ),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, module, name, wrong, claims):
    monkeypatch.setattr(module, name, wrong)
    for claim in claims:
        assert finding(ALL, claim).verdict is Verdict.BROKEN, claim


def test_the_deviation_of_a_group_is_that_of_all_its_outcomes():
    for size in (2, 4):
        outcomes = list(product((0, 1), repeat=size))
        chances = [0.3 ** sum(one) * 0.7 ** (size - sum(one)) for one in outcomes]
        mean = math.fsum(chance * pstdev(one) for chance, one in zip(chances, outcomes, strict=True))
        assert announcements._mean_deviation(0.3, size) == pytest.approx(mean)
