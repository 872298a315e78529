"""How a verdict comes about, and that no check can end the run."""

import json

import pytest

from scoregram.studies.grpo_rank.claims import CLAIMS
from scoregram.studies.ledger import (
    Claim,
    Verdict,
    as_printed,
    check_claims,
    corrected,
    extremes,
    refuted,
    show_claims,
    to_be_measured,
    unsupported,
)


def test_ids_and_statements_are_told_apart():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert len({claim.statement for claim in CLAIMS}) == len(CLAIMS)


def test_a_check_that_raises_has_failed_and_the_others_still_run():
    def divides_by_zero():
        raise ZeroDivisionError("nothing to divide by")

    claims = [
        Claim("broken", "here", "Raises.", divides_by_zero, "paper"),
        Claim("sound", "there", "Holds.", lambda: as_printed(True, {"number": 1}), "paper"),
    ]
    broken, sound = check_claims(claims)
    assert broken.finding.verdict is Verdict.BROKEN
    assert broken.finding.evidence == {"error": "ZeroDivisionError: nothing to divide by"}
    assert sound.finding.verdict is Verdict.HOLDS


def test_an_interrupt_is_not_a_finding():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(check_claims([Claim("endless", "here", "Takes too long.", interrupted, "paper")]))


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize("truth", [True, False])
def test_a_correction_stands_only_where_the_printed_statement_fell(printed, truth):
    facts = {"printed": printed, "truth": truth, "evidence": {}, "correction": "Otherwise."}
    stands = truth and not printed
    assert corrected(**facts).verdict is (Verdict.CORRECTED if stands else Verdict.BROKEN)
    assert refuted(**facts).verdict is (Verdict.FALSE if stands else Verdict.BROKEN)


@pytest.mark.parametrize("truth", [True, False])
def test_what_cannot_be_decided_needs_its_facts(truth):
    undecided = unsupported(truth=truth, evidence={}, correction="Say less.")
    assert undecided.verdict is (Verdict.UNSUPPORTED if truth else Verdict.BROKEN)
    measured = to_be_measured(truth=truth, evidence={}, measure="This.")
    assert measured.verdict is (Verdict.NEEDS_MEASUREMENT if truth else Verdict.BROKEN)
    assert as_printed(truth, {}).verdict is (Verdict.HOLDS if truth else Verdict.BROKEN)


def test_between_is_the_least_and_the_largest():
    assert extremes("gap", [0.5, -1.0, 0.25]) == {"gap, least": -1.0, "gap, largest": 0.5}


def test_verdicts_of_replications_stand_beside_their_claim(capsys):
    claims = [Claim(name, "here", name, lambda: as_printed(True, {"gap": 0.0}), "paper") for name in ("one", "other")]
    found = {"verdict": "confirmed", "sentence": "It fell.", "model": "tiny", "task": "copy", "seeds": [0, 1]}
    assert show_claims(claims, as_json=True, measured={"one": [found]}) == 0
    shown = json.loads(capsys.readouterr().out)["claims"]
    assert {claim["id"]: claim["measured"] for claim in shown} == {"one": [found], "other": []}
