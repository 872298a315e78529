import math
from functools import partial

import pytest

from scoregram.advantages import standardized
from scoregram.checks import ScoregramError
from scoregram.theory.lab.moments import group_update_moments
from scoregram.theory.theorems import arcsine_objective, standardized_weight
from tests.lab_cases import case, close


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", ["tabular", "network"])
def test_the_weight_is_that_of_the_enumerated_update(kind, size, ddof):
    truth = case("output_only_binary", kind).truth
    for prompt, gradient in enumerate(truth.gradient):
        found = group_update_moments(truth, partial(standardized, ddof=ddof), prompt=prompt, group_size=size)
        close(found.expected, standardized_weight(float(truth.value[prompt]), size, ddof=ddof) * gradient)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_the_weight_tends_to_the_slope_of_the_arcsine(p):
    slope = (arcsine_objective(p + 1e-6) - arcsine_objective(p - 1e-6)) / 2e-6
    gaps = [abs(standardized_weight(p, size) / slope - 1) for size in (50, 200, 800)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] and gaps[2] < 0.02


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_weight_stays_finite_where_the_limit_does_not(p, size):
    close(standardized_weight(p, size), math.sqrt(size - 1))
    close(standardized_weight(abs(p - 1e-9), size), math.sqrt(size - 1), rtol=1e-6)


def test_the_weight_favours_the_ends_from_four_rollouts_on():
    close([standardized_weight(p, 3, ddof=1) for p in (0.1, 0.3)], [standardized_weight(0.5, 3, ddof=1)] * 2)
    weights = [standardized_weight(p, 8, ddof=1) for p in (0.5, 0.7, 0.9, 0.99, 1.0)]
    assert weights == sorted(weights)
    close(weights[-1], math.sqrt(7 * 7 / 8))


def test_right_and_wrong_change_places():
    close(standardized_weight(0.2, 7), standardized_weight(0.8, 7))
    close(arcsine_objective(0.2) + arcsine_objective(0.8), math.pi)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: standardized_weight(0.5, 1), "group_size must lie in 2…1000, got 1"),
        (lambda: standardized_weight(0.5, 1001), "group_size must lie in 2…1000, got 1001"),
        (lambda: standardized_weight(0.5, 4, ddof=2), "ddof must be 0 or 1, got 2"),
        (lambda: standardized_weight(math.nan, 4), r"must lie in \[0, 1\], got nan"),
        (lambda: arcsine_objective(-0.1), r"must lie in \[0, 1\], got -0.1"),
    ],
)
def test_what_has_no_weight_is_refused(call, says):
    with pytest.raises(ScoregramError, match=says):
        call()
