import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.spectra import (
    SPECTRUM_METRICS,
    common_cosine_null,
    mean_pairwise_cosine,
    orthogonal_null,
    shuffled_null,
    singular_values,
    spectrum_summary,
)
from tests.spectra_cases import groups


def random_gram(rollouts: int, *, seed: int = 0) -> torch.Tensor:
    scores = torch.randn(rollouts, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = (scores + 0.7) * torch.linspace(0.5, 2, rollouts, dtype=torch.float64)[:, None]
    return scores @ scores.mT


def right_and_wrong(right: int, rollouts: int) -> torch.Tensor:
    rewards = torch.tensor([1.0] * right + [0.0] * (rollouts - right), dtype=torch.float64)
    return rewards - rewards.mean()


@given(groups())
def test_orthogonal_null_keeps_the_row_norms(group):
    scores, advantages = group
    expected = sorted((abs(float(a)) * float(s.norm()) for a, s in zip(advantages, scores, strict=True)), reverse=True)
    found = orthogonal_null(scores @ scores.mT, advantages)
    assert found.singular_values == pytest.approx(expected, rel=1e-9, abs=1e-7 * max(expected))


@given(groups())
def test_orthogonal_and_common_cosine_keep_the_energy(group):
    scores, advantages = group
    gram = scores @ scores.mT
    measured = spectrum_summary(gram, advantages).energy
    assert orthogonal_null(gram, advantages).energy == pytest.approx(measured, rel=1e-9)
    assert common_cosine_null(gram, advantages).energy == pytest.approx(measured, rel=1e-9)


@given(groups(min_rollouts=2), st.booleans())
def test_orthogonal_null_is_common_cosine_zero(group, centred):
    scores, advantages = group
    gram = scores @ scores.mT
    one = orthogonal_null(gram, advantages, centred=centred)
    other = common_cosine_null(gram, advantages, cosine=0, centred=centred)
    assert one.singular_values == pytest.approx(other.singular_values, rel=1e-9)


@pytest.mark.parametrize("cosine", [-0.2, 0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("centred", [False, True])
def test_common_cosine_null_builds_scores_with_that_cosine(cosine, centred):
    """Scores with one shared cosine, written down as rows of a Cholesky factor."""
    norms, size = torch.linspace(0.5, 3, 6, dtype=torch.float64), 6
    angles = torch.full((size, size), cosine, dtype=torch.float64).fill_diagonal_(1)
    values, vectors = torch.linalg.eigh(angles)
    scores = norms[:, None] * vectors * values.clamp(min=0).sqrt()
    rows = right_and_wrong(2, size)[:, None] * scores
    expected = torch.linalg.svdvals(rows - rows.mean(0) if centred else rows)
    measured = torch.diag(norms.square())
    found = common_cosine_null(measured, right_and_wrong(2, size), cosine=cosine, centred=centred)
    assert found.singular_values == pytest.approx(expected.tolist(), abs=1e-7)


@pytest.mark.parametrize("cosine", [0.25, -0.1])
def test_a_group_of_one_common_cosine_is_its_own_null(cosine):
    norms = torch.linspace(1, 2, 5, dtype=torch.float64)
    gram = torch.outer(norms, norms) * torch.full((5, 5), cosine, dtype=torch.float64).fill_diagonal_(1)
    assert mean_pairwise_cosine(gram) == pytest.approx(cosine)
    found, expected = common_cosine_null(gram, right_and_wrong(2, 5)), spectrum_summary(gram, right_and_wrong(2, 5))
    assert found.singular_values == pytest.approx(expected.singular_values)


@given(groups(min_rollouts=2))
def test_mean_pairwise_cosine_is_the_mean_over_pairs(group):
    scores, _ = group
    nonzero = [score / score.norm() for score in scores if float(score.norm()) > 0]
    cosines = [float(a @ b) for a, b in itertools.combinations(nonzero, 2)]
    expected = statistics.fmean(cosines) if cosines else math.nan
    found = mean_pairwise_cosine(scores @ scores.mT)
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert not cosines or -1 / (len(nonzero) - 1) <= found <= 1


def test_a_zero_score_has_no_say_in_the_mean_cosine():
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]).double()
    assert mean_pairwise_cosine(scores @ scores.mT) == pytest.approx(math.sqrt(0.5))
    assert math.isnan(mean_pairwise_cosine(torch.zeros(3, 3)))


def test_cosines_beyond_one_are_no_gram():
    with pytest.raises(ScoregramError, match="cosines must lie in"):
        mean_pairwise_cosine(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))


def test_fewer_than_two_scores_have_no_cosine_but_a_null():
    gram = torch.diag(torch.tensor([4.0, 0.0]))
    assert math.isnan(mean_pairwise_cosine(gram))
    assert common_cosine_null(gram, torch.tensor([1.0, -1.0])).singular_values == (2.0, 0.0)


@pytest.mark.parametrize(("gram", "cosine"), [(torch.eye(3), -0.51), (torch.eye(3), 1.1), (torch.eye(2), math.nan)])
def test_a_cosine_no_scores_can_share_is_refused(gram, cosine):
    with pytest.raises(ScoregramError, match="common cosine of the nonzero scores must lie in"):
        common_cosine_null(gram, torch.ones(len(gram)), cosine=cosine)


def test_the_least_common_cosine_counts_nonzero_scores_only():
    gram = torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    assert common_cosine_null(gram, torch.ones(3), cosine=-1).numerical_rank == 1


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "advantages", [(0.75, -0.25, -0.25, -0.25), (0.5, 0.5, -0.5, -0.5), (1.0, -2.0, 0.25, 0.75), (0.0, 1.0, -1.0, 0.0)]
)
def test_shuffled_null_is_the_mean_over_all_permutations(advantages, centred):
    gram = random_gram(4)
    orders = list(itertools.permutations(advantages))
    found = shuffled_null(gram, torch.tensor(advantages, dtype=torch.float64), centred=centred)
    listed = [spectrum_summary(gram, torch.tensor(order, dtype=torch.float64), centred=centred) for order in orders]
    assert found.exact
    for name in SPECTRUM_METRICS:
        values = [float(getattr(summary, name)) for summary in listed]
        null = found.metrics[name]
        assert null.mean == pytest.approx(statistics.fmean(values), rel=1e-9)
        assert null.spread == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-9)
        assert (null.low, null.high) == pytest.approx((min(values), max(values)))
        assert (null.standard_error, null.undefined) == (0, 0)


@pytest.mark.parametrize(("right", "rollouts", "centred", "assignments"), [(1, 7, False, 7), (3, 7, True, 35)])
def test_right_or_wrong_groups_are_listed_by_who_is_right(right, rollouts, centred, assignments):
    found = shuffled_null(random_gram(rollouts), right_and_wrong(right, rollouts), centred=centred)
    assert (found.exact, found.assignments) == (True, assignments == math.comb(rollouts, right) and assignments)


@given(st.permutations([0.5, -1.0, 0.25, 0.25]))
def test_shuffled_null_does_not_see_the_order(order):
    gram = random_gram(4)
    one = shuffled_null(gram, torch.tensor([0.5, -1.0, 0.25, 0.25]))
    other = shuffled_null(gram, torch.tensor(order))
    for name in SPECTRUM_METRICS:
        assert one.metrics[name].mean == pytest.approx(other.metrics[name].mean, rel=1e-9)


def test_an_even_group_cannot_be_shuffled_unless_centred():
    gram, advantages = random_gram(6), right_and_wrong(3, 6)
    found = shuffled_null(gram, advantages)
    assert found.assignments == 1
    assert found.metrics["effective_rank"].mean == pytest.approx(spectrum_summary(gram, advantages).effective_rank)
    assert shuffled_null(gram, advantages, centred=True).assignments == math.comb(6, 3)


def test_draws_agree_with_the_exact_mean_within_their_error():
    gram, advantages = random_gram(7), torch.linspace(-1, 2.3, 7, dtype=torch.float64)
    exact = shuffled_null(gram, advantages)
    drawn = shuffled_null(gram, advantages, exact_up_to=5039, draws=2000, seed=3)
    assert (exact.exact, exact.assignments) == (True, math.factorial(7))
    assert (drawn.exact, drawn.assignments) == (False, 2000)
    for name in set(SPECTRUM_METRICS) - {"numerical_rank"}:
        known, found = exact.metrics[name], drawn.metrics[name]
        assert abs(found.mean - known.mean) < 4 * found.standard_error
        assert found.standard_error == pytest.approx(known.spread / math.sqrt(2000), rel=0.1)


def test_the_seed_decides_the_draws_and_the_global_state_is_left_alone():
    gram, advantages = random_gram(9), torch.linspace(-1, 2, 9)
    state = torch.get_rng_state()
    one, same, other = (shuffled_null(gram, advantages, draws=20, seed=seed).metrics for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one == same
    assert one["effective_rank"].mean != other["effective_rank"].mean


def test_chunks_do_not_change_the_result(monkeypatch):
    gram, advantages = random_gram(5), torch.linspace(-1, 2, 5)
    whole = shuffled_null(gram, advantages)
    monkeypatch.setattr("scoregram.spectra.nulls.BATCH_ENTRIES", 60)
    assert shuffled_null(gram, advantages).metrics["entropy_rank"].mean == whole.metrics["entropy_rank"].mean


def test_assignments_that_pull_nowhere_are_counted_apart():
    gram, advantages = torch.diag(torch.tensor([1.0, 1.0, 0.0])), torch.tensor([0.0, 0.0, 1.0])
    null = shuffled_null(gram, advantages).metrics["effective_rank"]
    assert (null.mean, null.undefined) == pytest.approx((1, 1 / 3))
    nowhere = shuffled_null(gram, torch.zeros(3)).metrics["effective_rank"]
    assert math.isnan(nowhere.mean) and math.isnan(nowhere.spread) and nowhere.undefined == 1


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("null", [orthogonal_null, common_cosine_null, shuffled_null])
def test_nulls_refuse_what_singular_values_refuses(null):
    for gram, advantages in [(torch.zeros(2, 3), torch.ones(2)), (torch.eye(2), torch.tensor([1.0, math.nan]))]:
        with pytest.raises(ScoregramError, match=f"{null.__name__}: "):
            null(gram, advantages)
    with pytest.raises(ScoregramError, match="shuffled_null: a Gram must be positive semi-definite"):
        shuffled_null(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.ones(2))


def test_one_draw_does_not_know_its_error():
    with pytest.raises(ScoregramError, match="at least 2 draws for a standard error, got 1"):
        shuffled_null(random_gram(8), torch.linspace(-1, 2, 8), draws=1)


@settings(max_examples=20)
@given(groups(min_rollouts=2, max_rollouts=4), st.booleans())
def test_the_measured_assignment_is_one_of_the_listed(group, centred):
    scores, advantages = group
    gram = scores @ scores.mT
    found = shuffled_null(gram, advantages, centred=centred).metrics["stable_rank"]
    measured = spectrum_summary(gram, advantages, centred=centred).stable_rank
    assert math.isnan(measured) or found.low - 1e-9 <= measured <= found.high + 1e-9
    assert singular_values(gram, advantages, centred=centred).numel() == len(advantages)
