import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.spectra import (
    SPECTRUM_METRICS,
    SpectrumSummary,
    centred_gram,
    group_spectra,
    singular_values,
    spectrum_summary,
    summary_of,
    top_fractions,
)
from tests.spectra_cases import groups, stacked_singular_values


def assert_same_spectrum(found, expected, *, size):
    """Square roots of eigenvalues are known to about `√ε` of the stack's norm, and no better."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-7 * float(size))


@given(groups(), st.booleans())
def test_spectrum_is_that_of_the_stacked_matrix(group, centred):
    scores, advantages = group
    size = (advantages[:, None] * scores).norm()
    found = singular_values(scores @ scores.mT, advantages, centred=centred)
    assert_same_spectrum(found, stacked_singular_values(scores, advantages, centred=centred), size=size)
    assert bool((found.diff() <= 0).all())


@given(groups())
def test_without_advantages_it_is_the_spectrum_of_the_scores(group):
    scores, _ = group
    found = singular_values(scores @ scores.mT)
    assert_same_spectrum(
        found, stacked_singular_values(scores, torch.ones(len(scores)), centred=False), size=scores.norm()
    )


@given(groups(min_rollouts=2))
def test_centred_scores_are_another_form_than_centred_rows(group):
    scores, advantages = group
    mean = sum(scores) / len(scores)
    size = scores.norm() * advantages.abs().max()
    found = singular_values(centred_gram(scores @ scores.mT), advantages)
    assert_same_spectrum(found, stacked_singular_values(scores - mean, advantages, centred=False), size=size)


@given(groups(), st.sets(st.integers(0, 5)))
def test_signs_of_advantages_do_not_change_the_spectrum(group, flipped):
    scores, advantages = group
    signs = torch.tensor([-1.0 if i in flipped else 1.0 for i in range(len(advantages))])
    gram = scores @ scores.mT
    size = (advantages[:, None] * scores).norm()
    assert_same_spectrum(singular_values(gram, advantages * signs), singular_values(gram, advantages), size=size)


def test_signs_do_change_the_centred_spectrum():
    gram = torch.ones(2, 2)
    assert singular_values(gram, torch.tensor([1.0, 1.0]), centred=True).tolist() == [0.0, 0.0]
    torch.testing.assert_close(
        singular_values(gram, torch.tensor([1.0, -1.0]), centred=True), torch.tensor([2**0.5, 0.0]).double()
    )


@pytest.mark.parametrize("rollouts", [2, 4, 8])
def test_zero_sum_advantages_leave_full_rank_and_centring_takes_one(rollouts):
    scores = torch.randn(rollouts, 40, generator=torch.Generator().manual_seed(rollouts), dtype=torch.float64)
    gram, rewards = scores @ scores.mT, torch.tensor([1.0] + [0.0] * (rollouts - 1))
    advantages = rewards - rewards.mean()
    assert spectrum_summary(gram, advantages).numerical_rank == rollouts
    assert spectrum_summary(gram, advantages, centred=True).numerical_rank == rollouts - 1
    assert spectrum_summary(centred_gram(gram), advantages).numerical_rank == rollouts - 1


@given(groups(min_rollouts=2), st.sampled_from([1e-6, 1e6]), st.sampled_from([1e-12, 1e12]), st.booleans())
def test_summary_does_not_depend_on_scales(group, advantage_scale, gram_scale, centred):
    scores, advantages = group
    gram = scores @ scores.mT
    one = spectrum_summary(gram, advantages, centred=centred)
    other = spectrum_summary(gram_scale * gram, advantage_scale * advantages, centred=centred)
    for name in SPECTRUM_METRICS:
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-5, nan_ok=True), name


def test_extreme_scales_neither_vanish_nor_overflow():
    tiny = spectrum_summary(torch.eye(3, dtype=torch.float64) * 1e-250, torch.full((3,), 1e-190, dtype=torch.float64))
    huge = spectrum_summary(torch.eye(3, dtype=torch.float64) * 1e250, torch.full((3,), 1e150, dtype=torch.float64))
    assert tiny.effective_rank == huge.effective_rank == pytest.approx(3)


@given(groups(), st.booleans())
def test_summary_holds_every_metric_of_its_spectrum(group, centred):
    scores, advantages = group
    gram = scores @ scores.mT
    sigma = singular_values(gram, advantages, centred=centred)
    summary = spectrum_summary(gram, advantages, centred=centred)
    assert (summary.rollouts, summary.centred) == (len(scores), centred)
    assert summary.singular_values == tuple(sigma.tolist())
    assert summary.top_fractions == pytest.approx(top_fractions(sigma).tolist(), nan_ok=True)
    for name, metric in SPECTRUM_METRICS.items():
        assert getattr(summary, name) == pytest.approx(metric.fn(sigma).item(), nan_ok=True)
    if not centred:
        energy = sum(float(a) ** 2 * float(score.square().sum()) for a, score in zip(advantages, scores, strict=True))
        assert summary.energy == pytest.approx(energy, rel=1e-9)


def test_summary_has_one_field_per_metric():
    fields = {field.name for field in dataclasses.fields(SpectrumSummary)}
    assert fields - set(SPECTRUM_METRICS) == {"rollouts", "centred", "energy", "singular_values", "top_fractions"}
    assert summary_of(torch.tensor([1.0, 2.0])).singular_values == (2.0, 1.0)


def test_duplicates_do_not_raise_the_rank():
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = (scores @ scores.mT).expand(6, 6)
    summary = spectrum_summary(gram, torch.tensor([0.1, -0.7, 0.3, 0.3, 0.9, -0.9]))
    for name in SPECTRUM_METRICS:
        assert getattr(summary, name) == pytest.approx(1, abs=1e-9), name


@pytest.mark.parametrize(
    ("gram", "advantages", "centred"),
    [
        (torch.eye(3), torch.zeros(3), False),
        (torch.zeros(3, 3), torch.ones(3), False),
        (torch.diag(torch.tensor([0.0, 2.0])), torch.tensor([1.0, 0.0]), False),
        (torch.full((3, 3), 0.1), torch.ones(3), True),
        (torch.full((5, 5), 1 / 3, dtype=torch.float64), torch.full((5,), 0.7), True),
        (torch.tensor([[2.0]]), torch.tensor([1.0]), True),
        (centred_gram(torch.full((3, 3), 0.1)), torch.ones(3), False),
        (centred_gram(torch.tensor([[2.0]])), torch.ones(1), False),
    ],
)
def test_where_nothing_pulls_metrics_are_nan(gram, advantages, centred):
    summary = spectrum_summary(gram, advantages, centred=centred)
    assert summary.energy == 0 and summary.numerical_rank == 0
    assert all(math.isnan(getattr(summary, name)) for name in SPECTRUM_METRICS if name != "numerical_rank")


def test_a_group_of_one_is_one_direction():
    assert spectrum_summary(torch.tensor([[4.0]]), torch.tensor([-0.5])).singular_values == (1.0,)


@given(groups(min_rollouts=2))
def test_centred_gram_is_the_gram_of_centred_scores(group):
    scores, _ = group
    mean = sum(scores) / len(scores)
    expected = torch.stack([torch.stack([(a - mean) @ (b - mean) for b in scores]) for a in scores])
    found, size = centred_gram(scores @ scores.mT), float(scores.square().sum())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13 * size)
    assert float(found.diagonal().min()) >= 0


@pytest.mark.parametrize("seed", range(8))
def test_a_score_on_the_mean_keeps_a_squared_norm_of_zero(seed):
    first, second = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 3
    scores = torch.stack([first, second, (first + second) / 2])
    centred = centred_gram(scores @ scores.mT)
    assert float(centred.diagonal().min()) >= 0
    assert spectrum_summary(centred).numerical_rank == 1


def test_what_rounding_leaves_of_identical_scores_is_zero():
    gram = torch.ones(3, 3, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = math.nextafter(1, 2)  # the same inner product, summed in another order
    assert float(centred_gram(gram).abs().max()) == 0
    assert spectrum_summary(gram, centred=True).numerical_rank == 0


def test_rows_of_a_centred_gram_sum_to_zero_beside_a_large_mean():
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e4
    centred = centred_gram(scores @ scores.mT)
    assert float(centred.sum(-1).abs().max()) < 1e-12 * float(centred.trace())


def test_a_large_common_part_does_not_leak_into_the_centred_rank():
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e4
    centred = centred_gram(scores @ scores.mT)
    assert (
        spectrum_summary(centred).numerical_rank
        == spectrum_summary(scores @ scores.mT, centred=True).numerical_rank
        == 5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gram_of_low_precision_is_read_at_its_own_precision(dtype):
    score = torch.linspace(0.3, 1.7, 8, dtype=torch.float64)
    gram = torch.outer(score, score).to(dtype)  # one parameter: rank one, but for the rounding of its entries
    assert spectrum_summary(gram, torch.ones(8)).effective_rank == pytest.approx(1, abs=1e-9)
    assert spectrum_summary(gram.double(), psd_rtol=0.1).effective_rank > 1 + 1e-5


def test_inputs_are_not_modified():
    gram, advantages = torch.eye(3) + 0.5, torch.tensor([1.0, -2.0, 0.5])
    kept = gram.clone(), advantages.clone()
    spectrum_summary(gram, advantages, centred=True)
    centred_gram(gram)
    assert torch.equal(gram, kept[0]) and torch.equal(advantages, kept[1])


NOT_A_GRAM = torch.tensor([[1.0, 2.0], [2.0, 1.0]])


@pytest.mark.parametrize(
    ("gram", "part"),
    [
        (NOT_A_GRAM, "-0.5 times the trace"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "-inf times the trace"),
        (NOT_A_GRAM * 1e-9, "-0.5 times the trace"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "the Gram must be finite"),
    ],
)
def test_what_is_not_a_gram_is_refused(gram, part):
    for centred, advantages in itertools.product([False], [None, torch.tensor([1.0, -1.0])]):
        with pytest.raises(ScoregramError, match="singular_values: ") as caught:
            singular_values(gram, advantages, centred=centred)
        assert part in str(caught.value)


def test_how_negative_counts_as_rounding_is_named():
    gram = torch.tensor([[1.0, 1 + 1e-4], [1 + 1e-4, 1.0]], dtype=torch.float64)
    with pytest.raises(ScoregramError, match="semi-definite to 1e-06 of its trace"):
        singular_values(gram)
    assert singular_values(gram, psd_rtol=1e-3)[1] == 0
    assert singular_values(torch.tensor([[1.0, 1 + 1e-7], [1 + 1e-7, 1.0]], dtype=torch.float64))[1] == 0


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("advantages", "part"),
    [
        (torch.tensor([1.0]), "advantages must have the shape"),
        (torch.tensor([1.0, math.nan]), "advantages must be finite, got nan at index (1,)"),
        (torch.tensor([-math.inf, 1.0]), "advantages must be finite, got -inf at index (0,)"),
    ],
)
def test_advantages_must_fit(advantages, part):
    with pytest.raises(ScoregramError) as caught:
        spectrum_summary(torch.eye(2), advantages)
    assert part in str(caught.value)


@given(st.lists(groups(min_rollouts=4, max_rollouts=4), min_size=1, max_size=5))
def test_many_groups_at_once_have_the_spectra_of_each(several):
    grams = torch.stack([scores @ scores.mT for scores, _ in several])
    advantages = torch.stack([weights for _, weights in several])
    for found, (scores, weights) in zip(group_spectra(grams, advantages), several, strict=True):
        size = (weights[:, None] * scores).norm()
        assert_same_spectrum(found, stacked_singular_values(scores, weights, centred=False), size=size)


def test_one_matrix_that_is_not_a_gram_is_refused_among_others():
    grams, advantages = torch.eye(3).repeat(2, 1, 1), torch.ones(2, 3)
    assert group_spectra(grams * torch.tensor([0.0, 4.0])[:, None, None], advantages).tolist() == [[0] * 3, [2] * 3]
    grams[1, 0, 1] = grams[1, 1, 0] = 5.0
    with pytest.raises(ScoregramError, match="positive semi-definite"):
        group_spectra(grams, advantages)
