from dataclasses import replace

import pytest
import torch

from scoregram.advantages import leave_one_out, mean_centered
from scoregram.studies.grpo_rank.claims import CLAIMS, grounds, multiturn
from scoregram.studies.ledger import Verdict, check_claims
from scoregram.theory import bounds
from scoregram.theory.lab import multiturn as lab

EXPECTED = {
    "eq-21": Verdict.CORRECTED,
    "eq-22": Verdict.HOLDS,
    "eq-23": Verdict.CORRECTED,
    "multi-turn-bias": Verdict.CORRECTED,
    "multi-turn-bias-linear": Verdict.FALSE,
    "multi-turn-no-bootstrap": Verdict.HOLDS,
    "eq-26": Verdict.CORRECTED,
    "eq-27": Verdict.HOLDS,
    "a3-past-reward-leakage": Verdict.HOLDS,
    "a3-value-needs-critic": Verdict.CORRECTED,
    "a3-subtract-state-value": Verdict.CORRECTED,
    "a3-bound-value-change": Verdict.HOLDS,
    "a3-bound-v-max": Verdict.HOLDS,
    "a3-single-turn": Verdict.CORRECTED,
}
CLAIM = {claim.id: claim for claim in (*multiturn.MULTITURN_CLAIMS, *multiturn.MULTITURN_APPENDIX_CLAIMS)}


def verdict(name: str) -> Verdict:
    return CLAIM[name].check().verdict


def test_every_verdict():
    entries = list(check_claims(CLAIM.values()))
    assert {entry.claim.id: entry.finding.verdict for entry in entries} == EXPECTED
    assert set(CLAIM) <= {claim.id for claim in CLAIMS}
    for entry in entries:
        assert entry.finding.evidence
        assert bool(entry.finding.correction) == (entry.finding.verdict is not Verdict.HOLDS)


@pytest.mark.parametrize("name", ["eq-23", "multi-turn-bias", "eq-26", "a3-single-turn"])
def test_a_leave_one_out_that_sees_itself_is_noticed(monkeypatch, name):
    monkeypatch.setattr(multiturn, "leave_one_out", mean_centered)
    assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["eq-23", "multi-turn-bias", "eq-26", "a3-single-turn"])
def test_a_group_mean_that_does_not_see_itself_is_noticed(monkeypatch, name):
    monkeypatch.setattr(multiturn, "mean_centered", leave_one_out)
    assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["eq-21", "multi-turn-no-bootstrap"])
def test_value_differences_that_forget_the_reward_are_noticed(monkeypatch, name):
    monkeypatch.setattr(
        multiturn, "prefix_value_differences", lambda rewards, *, mask, prefix_values: torch.zeros_like(rewards)
    )
    assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["eq-23", "eq-27"])
def test_an_offset_one_percent_off_is_noticed(monkeypatch, name):
    def stretched(truth):
        return 1.01 * lab.advantage_offset(truth)

    monkeypatch.setattr(multiturn, "advantage_offset", stretched)
    assert verdict(name) is Verdict.BROKEN


def test_a_mean_that_drifts_over_turns_is_noticed(monkeypatch):
    def drifting(truth):
        return tuple(replace(turn, mean=0.1 * turn.turn) for turn in lab.offsets_by_turn(truth))

    monkeypatch.setattr(multiturn, "offsets_by_turn", drifting)
    assert verdict("multi-turn-bias-linear") is Verdict.BROKEN


@pytest.mark.parametrize("name", ["a3-bound-value-change", "a3-bound-v-max"])
def test_a_bound_that_is_too_small_is_noticed(monkeypatch, name):
    def small(turns_before, **options):
        return bounds.turn_offset_bound(turns_before, **options) / 4

    monkeypatch.setattr(multiturn, "turn_offset_bound", small)
    assert verdict(name) is Verdict.BROKEN


def test_the_worlds_are_what_they_are_said_to_be():
    needle = grounds.ground(grounds.ONE_DECISION, "uniform")
    assert needle.listing.mask.shape == (8, 1) and float(needle.value) == pytest.approx(1 / 8)
    turns = grounds.ground(grounds.INDEPENDENT_TURNS, "uniform")
    assert float(turns.reward_variance) == pytest.approx(8 / 4) and turns.listing.mask.shape == (2**8, 8)
    assert float(grounds.ground(grounds.REVERSAL, "tabular").value) == pytest.approx(0.05 - 0.95)
