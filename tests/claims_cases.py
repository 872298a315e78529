"""What the tests of the ledger share: verdicts by id, and a table of estimators with one row broken on purpose."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType

import pytest
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.studies.grpo_rank.claims import grounds
from scoregram.studies.ledger import Claim, Finding, Verdict


def finding(claims: Iterable[Claim], wanted: str) -> Finding:
    """What the check of one claim finds now."""
    return next(claim for claim in claims if claim.id == wanted).check()


def break_estimator(monkeypatch: pytest.MonkeyPatch, name: str, fn: Callable[..., Tensor]) -> None:
    """Put another function into one row of the table of estimators that the checks read."""
    rows = {**ESTIMATORS, name: replace(ESTIMATORS[name], fn=fn)}
    monkeypatch.setattr(grounds, "ESTIMATORS", MappingProxyType(rows))


def check_verdicts(claims: Iterable[Claim], expected: dict[str, Verdict]) -> None:
    """Every claim has the expected verdict, numbers that speak for it, and a correction unless it simply holds."""
    found = {claim.id: claim.check() for claim in claims}
    assert {wanted: seen.verdict for wanted, seen in found.items()} == expected
    for wanted, seen in found.items():
        assert any(isinstance(value, (int, float)) for value in seen.evidence.values()), wanted
        assert bool(seen.correction) == (seen.verdict is not Verdict.HOLDS), wanted
