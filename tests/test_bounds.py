import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.theory.bounds import (
    deviation_probability,
    hoeffding_bound,
    hoeffding_group_size,
    return_range_bound,
    suboptimality_bound,
    turn_offset_bound,
)

chances = st.floats(0.0, 1.0)
sizes = st.integers(1, 40)
epsilons = st.floats(0.01, 1.0)


@given(success=chances, size=sizes, epsilon=epsilons)
def test_hoeffding_bounds_the_exact_tail(success, size, epsilon):
    assert deviation_probability(success, size, epsilon=epsilon) <= hoeffding_bound(size, epsilon=epsilon)


@given(size=sizes, epsilon=epsilons, unit=st.floats(1e-6, 1e6))
def test_hoeffding_is_blind_to_the_unit_of_reward(size, epsilon, unit):
    scaled = hoeffding_bound(size, epsilon=epsilon * unit, reward_range=unit)
    assert math.isclose(scaled, hoeffding_bound(size, epsilon=epsilon), rel_tol=1e-9)


@given(size=sizes, epsilon=epsilons)
def test_two_halves_of_a_group_multiply(size, epsilon):
    """The exponent is linear in R: the bound of 2R is half the square of that of R."""
    assert math.isclose(hoeffding_bound(2 * size, epsilon=epsilon), hoeffding_bound(size, epsilon=epsilon) ** 2 / 2)


@given(epsilon=st.floats(0.02, 2.0), failure=st.floats(1e-6, 1.9), unit=st.sampled_from([1e-6, 1.0, 1e6]))
def test_the_group_size_is_the_first_that_suffices(epsilon, failure, unit):
    options = {"epsilon": epsilon * unit, "reward_range": unit}
    size = hoeffding_group_size(failure=failure, **options)
    assert hoeffding_bound(size, **options) <= failure
    assert size == 1 or hoeffding_bound(size - 1, **options) > failure


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("success", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("epsilon", [0.05, 0.21, 0.4])
def test_the_tail_matches_the_list_of_all_groups(size, success, epsilon):
    total = 0.0
    for group in product((0, 1), repeat=size):
        chance = math.prod(success if reward else 1 - success for reward in group)
        total += chance * (abs(sum(group) / size - success) > epsilon)
    assert math.isclose(deviation_probability(success, size, epsilon=epsilon), total, abs_tol=1e-14)


def test_the_tail_is_strict_despite_rounding():
    assert 0.8 - 0.5 > 0.3  # what rounding does to a plain comparison
    assert deviation_probability(0.8, 2, epsilon=0.3) == pytest.approx(0.2**2)


@given(success=chances, size=sizes, epsilon=epsilons)
def test_right_and_wrong_change_places(success, size, epsilon):
    turned = deviation_probability(1 - success, size, epsilon=epsilon)
    other = deviation_probability(1 - (1 - success), size, epsilon=epsilon)
    assert math.isclose(turned, other, rel_tol=1e-9, abs_tol=1e-12)


@given(rewards=st.lists(st.floats(-3, 3), max_size=6), start=st.floats(-5, 5), now=st.floats(-5, 5))
def test_the_offset_bound_is_the_triangle_inequality(rewards, start, now):
    offset, top = abs(sum(rewards) + now - start), max((abs(r) for r in rewards), default=0.0)
    bound = turn_offset_bound(len(rewards), largest_reward=top, value_change=abs(now - start))
    assert offset <= bound + 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_offset_bound_is_attained(sign):
    offset = abs(3 * sign * 2.0 + sign * 0.5)  # three equal rewards and a change of value the same way
    assert turn_offset_bound(3, largest_reward=2.0, value_change=0.5) == offset


@given(returns=st.lists(st.floats(-5, 5), min_size=1, max_size=6), data=st.data())
def test_means_of_returns_stay_within_the_range_bound(returns, data):
    """Two means of the same returns under any two weightings: one is the value, the other what a history knows."""
    mixes = st.lists(st.floats(0.01, 1), min_size=len(returns), max_size=len(returns))
    value, known = (
        sum(w * g for w, g in zip(weights, returns, strict=True)) / sum(weights)
        for weights in (data.draw(mixes), data.draw(mixes))
    )
    value = min(max(value, min(returns)), max(returns))  # rounding may carry a mean past its terms
    bound = return_range_bound(value, lowest_return=min(returns), highest_return=max(returns))
    assert abs(known - value) <= bound + 1e-12


@given(curvature=st.floats(0.1, 5), share=st.floats(0.01, 1.9), noise=st.floats(0, 4), gap=st.floats(0, 4), steps=sizes)
def test_the_descent_bound_is_attained_by_one_curvature(curvature, share, noise, gap, steps):
    step = share / curvature
    exact = gap
    for _ in range(steps):
        exact = (1 - step * curvature) ** 2 * exact + curvature * step**2 * noise / 2
    bound = suboptimality_bound(
        steps, gap=gap, step_size=step, smoothness=curvature, pl_constant=curvature, noise=noise
    )
    # The bound keeps the whole floor from the first step on; the exact gap builds it up.
    floor = curvature * step**2 * noise / (2 * (1 - (1 - step * curvature) ** 2))
    assert math.isclose(bound - exact, floor * (1 - step * curvature) ** (2 * steps), rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hoeffding_bound(0, epsilon=0.1), "hoeffding_bound: group_size must be at least 1, got 0"),
        (lambda: hoeffding_bound(2, epsilon=0.0), "epsilon must be positive and finite, got 0.0"),
        (lambda: hoeffding_bound(2, epsilon=math.nan), "epsilon must be positive and finite, got nan"),
        (lambda: hoeffding_bound(2, epsilon=0.1, reward_range=math.inf), "reward_range .* got inf"),
        (lambda: hoeffding_group_size(epsilon=0.1, failure=0), "failure must be positive and finite, got 0"),
        (lambda: deviation_probability(1.2, 2, epsilon=0.1), r"must lie in \[0, 1\], got 1.2"),
        (lambda: deviation_probability(math.nan, 2, epsilon=0.1), r"must lie in \[0, 1\], got nan"),
        (lambda: turn_offset_bound(-1, largest_reward=1, value_change=1), "must not be negative, got -1"),
        (lambda: turn_offset_bound(1, largest_reward=-1, value_change=1), "largest_reward"),
        (lambda: return_range_bound(2.0, lowest_return=0, highest_return=1), r"got 2.0 outside \[0, 1\]"),
        (
            lambda: suboptimality_bound(1, gap=1, step_size=2, smoothness=1, pl_constant=1, noise=0),
            "step_size must be below 2/L = 2, got 2",
        ),
        (
            lambda: suboptimality_bound(1, gap=1, step_size=0.1, smoothness=1, pl_constant=2, noise=0),
            "pl_constant must not exceed smoothness, got 2",
        ),
        (
            lambda: suboptimality_bound(-1, gap=1, step_size=0.1, smoothness=1, pl_constant=1, noise=0),
            "must not be negative, got -1, 1 and 0",
        ),
    ],
)
def test_what_has_no_bound_is_refused(call, says):
    with pytest.raises(ScoregramError, match=says):
        call()
