import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.spectra import (
    SPECTRUM_METRICS,
    common_cosine_null,
    feasible_interval,
    mean_pairwise_cosine,
    orthogonal_null,
    shuffled_null,
    spectrum_summary,
    spectrum_with_nulls,
)
from tests.spectra_cases import groups


@settings(max_examples=30)
@given(groups(max_rollouts=4), st.booleans())
def test_a_measured_metric_lies_in_its_interval(group, centred):
    scores, advantages = group
    reading = spectrum_with_nulls(scores @ scores.mT, advantages, centred=centred)
    for name in SPECTRUM_METRICS:
        shown = reading.metric(name)
        nothing_pulls = math.isnan(reading.measured.top1_fraction)
        assert math.isnan(shown.feasible.low) if nothing_pulls else shown.feasible.contains(shown.measured), name


@pytest.mark.parametrize("centred", [False, True])
def test_reading_joins_what_the_parts_say(centred):
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gram, advantages = scores @ scores.mT, torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64)
    reading = spectrum_with_nulls(gram, advantages, centred=centred)
    assert reading.measured == spectrum_summary(gram, advantages, centred=centred)
    assert reading.orthogonal == orthogonal_null(gram, advantages, centred=centred)
    assert reading.common_cosine == common_cosine_null(gram, advantages, centred=centred)
    assert reading.shuffled == shuffled_null(gram, advantages, centred=centred)
    assert reading.cosine == mean_pairwise_cosine(gram)
    assert reading.max_rank == (3 if centred else 4)
    shown = reading.metric("effective_rank")
    assert shown.measured == reading.measured.effective_rank
    assert shown.orthogonal == reading.orthogonal.effective_rank
    assert shown.common_cosine == reading.common_cosine.effective_rank
    assert shown.shuffled == reading.shuffled.metrics["effective_rank"]
    f = reading.measured.top1_fraction
    assert shown.feasible == feasible_interval("effective_rank", f, reading.max_rank)


def test_settings_reach_the_nulls():
    gram, advantages = torch.eye(8) + 0.5, torch.linspace(-1, 2, 8)
    reading = spectrum_with_nulls(gram, advantages, cosine=0.1, draws=10, seed=4)
    assert reading.cosine == 0.1
    assert reading.common_cosine == common_cosine_null(gram, advantages, cosine=0.1)
    assert reading.shuffled == shuffled_null(gram, advantages, draws=10, seed=4)
    assert spectrum_with_nulls(torch.eye(3), torch.linspace(-1, 2, 3), exact_up_to=1, draws=5).shuffled.assignments == 5


def test_rows_that_pull_nowhere_do_not_count_towards_the_largest_rank():
    gram = torch.diag(torch.tensor([1.0, 0.0, 2.0, 3.0]))
    assert spectrum_with_nulls(gram, torch.tensor([1.0, 1.0, 0.0, -2.0])).max_rank == 2


def test_a_group_where_nothing_pulls_reads_nan():
    reading = spectrum_with_nulls(torch.eye(3), torch.zeros(3)).metric("effective_rank")
    values = [reading.measured, reading.orthogonal, reading.common_cosine, reading.shuffled.mean, reading.feasible.low]
    assert all(math.isnan(value) for value in values)


def test_known_dimensions_narrow_the_interval():
    scores = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram, advantages = scores @ scores.mT, torch.linspace(-1, 2, 5)
    free, narrow = (spectrum_with_nulls(gram, advantages, max_rank=m).metric("effective_rank") for m in (None, 2))
    assert narrow.feasible.high == pytest.approx(narrow.measured) and free.feasible.high > narrow.measured + 0.5
    with pytest.raises(ScoregramError, match="numerical rank must be at most max_rank = 1, got "):
        spectrum_with_nulls(gram, advantages, max_rank=1)


def test_a_noisy_gram_is_read_with_a_named_tolerance():
    gram = torch.tensor([[1.0, 1 + 1e-4], [1 + 1e-4, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5])
    with pytest.raises(ScoregramError, match="positive semi-definite to 1e-06"):
        spectrum_with_nulls(gram, advantages)
    shown = spectrum_with_nulls(gram, advantages, psd_rtol=1e-3).metric("effective_rank")
    assert shown.measured == shown.common_cosine == shown.shuffled.mean == pytest.approx(1)


def test_a_cosine_that_is_no_number_is_refused():
    with pytest.raises(ScoregramError, match=r"common cosine .* got nan"):
        spectrum_with_nulls(torch.eye(2), torch.ones(2), cosine=float("nan"))


def test_unknown_metric_lists_the_choices():
    with pytest.raises(ScoregramError, match="one of effective_rank"):
        spectrum_with_nulls(torch.eye(2), torch.ones(2)).metric("rank")
