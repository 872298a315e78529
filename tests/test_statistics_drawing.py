"""Draws of prompts and shrunk weights: unbiased, the least error, the degenerate cases."""

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.statistics import inclusion_probabilities, shrunk_weights, systematic_draw
from scoregram.training.collect import seeded_generator

MOMENTS = torch.tensor([9.0, 0.0, 1.0, 4.0, 0.25, 0.0, 2.0])


def independent_error(moments: torch.Tensor, probabilities: torch.Tensor) -> float:
    """`E|estimate|²` up to a constant for draws with replacement: `Σ_p E|ĝ_p|² / q_p`, with `q = π/n`."""
    shares = probabilities / probabilities.sum()
    return sum(float(m) / float(q) for m, q in zip(moments, shares, strict=True) if m > 0)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("uniform", [0.1, 0.25, 1.0])
def test_probabilities_are_a_plan_for_count_prompts(count, uniform):
    found = inclusion_probabilities(MOMENTS, count, uniform=uniform)
    assert float(found.sum()) == pytest.approx(count) and bool((found <= 1).all()) and bool((found > 0).all())
    assert bool((found >= uniform * count / 7 - 1e-12).all())  # so no weight n/(Mπ) exceeds 1/uniform


def test_the_root_of_the_second_moment_has_the_least_error():
    positive = MOMENTS[MOMENTS > 0]
    best = inclusion_probabilities(positive, 1, uniform=0.0)
    torch.testing.assert_close(best, positive.double().sqrt() / positive.double().sqrt().sum())
    least = independent_error(positive, best)
    stream = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = torch.rand(len(positive), generator=stream).double() + 0.01
        assert independent_error(positive, other / other.sum()) >= least - 1e-9
    assert least == pytest.approx(float(positive.sqrt().sum()) ** 2)


def test_equal_or_no_moments_are_drawn_equally():
    for moments in (torch.zeros(5), torch.full((5,), 3.0)):
        assert inclusion_probabilities(moments, 2).tolist() == pytest.approx([0.4] * 5)
    assert inclusion_probabilities(torch.tensor([1e300, 0.0], dtype=torch.float64), 2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("moments", "count"), [([1.0, -1.0], 1), ([1.0, 1.0], 3), ([1.0], 0), ([float("nan"), 1.0], 1)]
)
def test_impossible_draws_are_refused(moments, count):
    with pytest.raises(ScoregramError):
        inclusion_probabilities(torch.tensor(moments), count)


def test_a_draw_has_its_probabilities_and_is_unbiased():
    """Over many draws: none twice in one, each as often as its probability, and the weighted mean is the true one."""
    probabilities, values = inclusion_probabilities(MOMENTS, 3), torch.arange(7.0).double() ** 2
    draws, hits, total = 6_000, torch.zeros(7, dtype=torch.float64), []
    for number in range(draws):
        drawn = systematic_draw(probabilities, torch.Generator().manual_seed(number))
        assert len(drawn.unique()) == len(drawn) == 3
        hits[drawn] += 1
        total.append(float((values[drawn] * 3 / (7 * probabilities[drawn])).mean()))
    error = (probabilities * (1 - probabilities) / draws).sqrt()
    assert bool(((hits / draws - probabilities).abs() <= 4.5 * error + 1e-12).all())
    means = torch.tensor(total, dtype=torch.float64)
    assert abs(float(means.mean() - values.mean())) < 4.5 * float(means.std()) / draws**0.5


@pytest.mark.parametrize("probabilities", [[0.5, 0.7], [1.5, 0.5], [-0.5, 0.5, 1.0], [0.0, 0.0], [float("nan"), 1.0]])
def test_what_is_no_plan_is_refused(probabilities):
    with pytest.raises(ScoregramError, match="needs probabilities with a whole sum"):
        systematic_draw(torch.tensor(probabilities), torch.Generator())


def test_a_draw_depends_on_its_generator_alone():
    probabilities = inclusion_probabilities(MOMENTS, 3)
    first, again, other = (systematic_draw(probabilities, seeded_generator(0, "draw", n)) for n in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)


def test_shrunk_weights_have_the_least_error():
    signal, error = torch.tensor([4.0, 1.0, 0.5]).double(), torch.tensor([1.0, 1.0, 6.0]).double()
    found = shrunk_weights(signal, error)
    assert float(found.mean()) == pytest.approx(1)
    factors = torch.linspace(0, 1, 2001).double()
    for p in range(3):  # E|cĝ - g|² = c² MSE + (1 - c)² |g|², least by trying
        best = factors[(factors**2 * error[p] + (1 - factors) ** 2 * signal[p]).argmin()]
        scale = float((signal / (signal + error)).mean())
        assert float(found[p]) * scale == pytest.approx(float(best), abs=1e-3)


@pytest.mark.parametrize(
    ("signal", "error", "expected"),
    [
        ([0.0, 0.0], [1.0, 2.0], [1.0, 1.0]),
        ([0.0, 0.0], [0.0, 0.0], [1.0, 1.0]),
        ([2.0, 0.0], [0.0, 1.0], [2.0, 0.0]),
        ([-1.0, 3.0], [1.0, -2.0], [0.0, 2.0]),
    ],
)
def test_prompts_without_signal_or_error(signal, error, expected):
    assert shrunk_weights(torch.tensor(signal), torch.tensor(error)).tolist() == pytest.approx(expected)


def test_prompts_without_signal_are_weighted_equally():
    assert shrunk_weights(torch.zeros(2), torch.tensor([0.0, 1.0])).tolist() == [1.0, 1.0]
    assert shrunk_weights(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])).tolist() == pytest.approx([4 / 3, 2 / 3])
