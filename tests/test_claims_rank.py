from dataclasses import replace
from functools import partial

import pytest

from scoregram.spectra import spectrum_summary
from scoregram.studies.grpo_rank.claims import rank
from scoregram.studies.grpo_rank.claims.rank import RANK_CLAIMS, rank_two
from scoregram.studies.ledger import Verdict
from scoregram.theory import exact_moments
from tests.claims_cases import break_estimator, check_verdicts, finding


def test_verdicts():
    check_verdicts(
        RANK_CLAIMS,
        {
            "max-rank": Verdict.FALSE,
            "sec-7.2-directions": Verdict.CORRECTED,
            "sec-7.2-dimensions": Verdict.FALSE,
            "sec-7.2-diminishing": Verdict.CORRECTED,
            "fig-2": Verdict.NEEDS_MEASUREMENT,
            "fig-3": Verdict.NEEDS_MEASUREMENT,
        },
    )


@pytest.mark.parametrize(
    ("name", "wrong", "claim"),
    [
        ("largest_stacked_rank", lambda a: len(a) - 1, "max-rank"),
        ("spectrum_summary", partial(spectrum_summary, centred=True), "max-rank"),  # R - 1 after all
        ("spectrum_summary", partial(spectrum_summary, centred=True), "sec-7.2-dimensions"),
        ("centred_gram", lambda gram: gram, "max-rank"),
        ("expected_orthogonal_top1_fraction", lambda p, size: 1 / size, "fig-2"),
        (
            "exact_moments",
            lambda t: replace(exact_moments(t), oracle_trace=100 * t.reward_variance),
            "sec-7.2-diminishing",
        ),
        ("signal_to_noise", lambda parts, prompts, size: 1 / size, "fig-3"),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, name, wrong, claim):
    monkeypatch.setattr(rank, name, wrong)
    assert finding(RANK_CLAIMS, claim).verdict is Verdict.BROKEN


def test_a_stack_of_rank_two_is_refuted():
    assert rank_two().verdict is Verdict.FALSE


def test_rank_two_notices_rows_that_get_lost(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: r)  # wrong rollouts get no row
    assert rank_two().verdict is Verdict.BROKEN


def test_signal_to_noise_notices_an_estimator_that_ignores_its_group(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda r: r)  # no baseline: SNR² is proportional to R
    assert finding(RANK_CLAIMS, "sec-7.2-diminishing").verdict is Verdict.BROKEN


@pytest.mark.parametrize("always_distinct", [True, False])
def test_the_directions_of_a_step_need_both_ways_of_drawing(monkeypatch, always_distinct):
    drawn = rank._groups
    monkeypatch.setattr(rank, "_groups", lambda size, *, distinct=True: drawn(size, distinct=always_distinct))
    assert finding(RANK_CLAIMS, "sec-7.2-directions").verdict is Verdict.BROKEN
