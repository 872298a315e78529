import math

import pytest

from scoregram.advantages import leave_one_out
from scoregram.studies.grpo_rank.claims import CLAIMS, structure
from scoregram.studies.ledger import Verdict, check_claims

WRONG_ENTRIES = {(2, 0.3), (4, 0.3), (4, 0.2), (8, 0.3), (8, 0.1), (16, 0.3), (16, 0.2), (16, 0.1)}
EXPECTED = {
    "eq-24": Verdict.HOLDS,
    "eq-25": Verdict.HOLDS,
    "a1-covariance": Verdict.HOLDS,
    "hoeffding": Verdict.HOLDS,
    "hoeffding-table": Verdict.CORRECTED,
    "hoeffding-vacuous-labels": Verdict.CORRECTED,
    "hoeffding-needs-large-groups": Verdict.HOLDS,
    "a2-baseline-variance": Verdict.HOLDS,
    "a2-common-error": Verdict.HOLDS,
    "a2-all-advantages-at-once": Verdict.HOLDS,
}
CLAIM = {claim.id: claim for claim in structure.STRUCTURE_APPENDIX_CLAIMS}


def verdict(name: str) -> Verdict:
    return CLAIM[name].check().verdict


def test_every_verdict():
    entries = list(check_claims(CLAIM.values()))
    assert {entry.claim.id: entry.finding.verdict for entry in entries} == EXPECTED
    assert set(CLAIM) <= {claim.id for claim in CLAIMS}
    for entry in entries:
        assert entry.finding.evidence
        assert bool(entry.finding.correction) == (entry.finding.verdict is not Verdict.HOLDS)


def test_an_entry_is_right_when_it_rounds_to_what_is_printed():
    """By a second way to the same numbers: repeated multiplication instead of one exponential."""
    for (size, epsilon), printed in structure.PRINTED_BOUNDS.items():
        bound = 2.0
        for _ in range(size):
            bound *= math.exp(-2 * epsilon**2)
        assert (abs(bound - printed) <= 0.005) == ((size, epsilon) not in WRONG_ENTRIES)


def test_the_table_names_each_wrong_entry():
    evidence = CLAIM["hoeffding-table"].check().evidence
    assert {
        f"R = {size}, ε = {e}: bound where {structure.PRINTED_BOUNDS[size, e]:.2f} is printed"
        for size, e in WRONG_ENTRIES
    } == {name for name in evidence if "is printed" in name}


@pytest.mark.parametrize("entry", sorted(WRONG_ENTRIES))
def test_a_corrected_entry_is_noticed(monkeypatch, entry):
    right = {entry: round(2 * math.exp(-2 * entry[0] * entry[1] ** 2), 2)}
    monkeypatch.setattr(structure, "PRINTED_BOUNDS", structure.PRINTED_BOUNDS | right)
    assert verdict("hoeffding-table") is Verdict.BROKEN


@pytest.mark.parametrize("factor", [0.5, 1.01])
def test_a_wrong_bound_is_noticed(monkeypatch, factor):
    right = structure.hoeffding_bound
    monkeypatch.setattr(structure, "hoeffding_bound", lambda size, *, epsilon: factor * right(size, epsilon=epsilon))
    assert verdict("hoeffding-table") is Verdict.BROKEN


def test_a_bound_that_halves_its_exponent_twice_is_noticed(monkeypatch):
    monkeypatch.setattr(structure, "hoeffding_bound", lambda size, *, epsilon: 2 * math.exp(-8 * size * epsilon**2))
    for name in ("hoeffding", "hoeffding-vacuous-labels", "a2-all-advantages-at-once"):
        assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["eq-24", "eq-25", "a1-covariance", "a2-baseline-variance", "a2-common-error"])
def test_a_group_mean_without_the_rollout_is_noticed(monkeypatch, name):
    monkeypatch.setattr(structure, "mean_centered", leave_one_out)
    assert verdict(name) is Verdict.BROKEN


def test_needs_of_the_bound():
    evidence = CLAIM["hoeffding-needs-large-groups"].check().evidence
    assert list(evidence.values()) == [4, 9, 35, 21, 47, 185]
