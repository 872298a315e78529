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
    independent_counts,
    refuted,
    replication_setting,
    show_claims,
    to_be_measured,
    unsupported,
)


def test_ids_and_statements_are_told_apart():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert len({claim.statement for claim in CLAIMS}) == len(CLAIMS)


def test_a_claim_restates_one_of_its_own_paper_that_restates_none():
    by_id = {claim.id: claim for claim in CLAIMS}
    again = [claim for claim in CLAIMS if claim.restates]
    assert again
    for claim in again:
        assert by_id[claim.restates].paper == claim.paper and not by_id[claim.restates].restates


def test_a_statement_counts_once_and_a_failed_check_always():
    def claims(restated_holds):
        yield Claim("first", "section 1", "It is so.", lambda: as_printed(True, {}), "paper")
        yield Claim("again", "appendix", "So it is.", lambda: as_printed(restated_holds, {}), "paper", "first")

    assert independent_counts(list(check_claims(claims(True)))) == {Verdict.HOLDS: 1}
    assert independent_counts(list(check_claims(claims(False)))) == {Verdict.HOLDS: 1, Verdict.BROKEN: 1}
    alone = [entry for entry in check_claims(claims(True)) if entry.claim.restates]
    assert independent_counts(alone) == {Verdict.HOLDS: 1}  # the first one was not asked for


def test_the_ledger_says_what_it_does_not_count(capsys):
    claims = [
        Claim("first", "section 1", "It is so.", lambda: as_printed(True, {}), "paper"),
        Claim("again", "appendix", "So it is.", lambda: as_printed(True, {}), "paper", "first"),
    ]
    show_claims(claims)
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 holds" in shown and "2 claims checked" in shown
    assert "1 of them restate others and are not counted above" in shown and "(restates first)" in shown
    show_claims(claims, as_json=True)
    assert [claim["restates"] for claim in json.loads(capsys.readouterr().out)["claims"]] == [None, "first"]


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


def test_a_replication_tells_its_kind_scale_and_success_rate(capsys):
    found = {"verdict": "undecided", "sentence": "It fell.", "model": "m", "task": "copy", "seeds": [0]}
    line = "conceptual replication, m, 9 M parameters against the paper's 4 B, copy, 8 % of rollouts right, 1 seed"
    more = {"replication": "conceptual", "scale": "9 M", "paper_scale": "4 B", "success_rate": 0.0784}
    assert replication_setting(found | more) == line
    assert replication_setting(found) == "m, copy, 1 seed" and replication_setting({}) == ""
    assert replication_setting({"paper_scale": "4 B"}) == "a scale not given against the paper's 4 B"
    assert replication_setting(found | {"success_rate": 0.0}).endswith("0 % of rollouts right, 1 seed")
    claims = [Claim("one", "here", "So.", lambda: as_printed(True, {"gap": 0.0}), "paper")]
    show_claims(claims, measured={"one": [found | more]})
    words = capsys.readouterr().out.replace("│", " ").split()
    assert " ".join(f"measured: undecided. It fell. ({line})".split()[:6]) in " ".join(words)
    assert all(word in words for word in f"({line})".split())
