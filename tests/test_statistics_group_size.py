"""Errors at every group size against the list of all groups; the optimum against the curve; the bootstrap by loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.statistics import (
    GroupMoments,
    NoiseComponents,
    batch_mse,
    leave_one_out_mse,
    mean_baseline_mse,
    mse_curve,
    optimal_group_size,
    vanilla_mse,
)
from tests.discrete_laws import Law, law


def exact_moments(prompt: Law) -> GroupMoments:
    raw = prompt.mean((prompt.scores**2).sum(dim=1) * prompt.rewards**2)
    return GroupMoments(
        gradient_squared=(prompt.gradient @ prompt.gradient)[None],
        fisher_trace=prompt.fisher_trace[None],
        variance_fisher_trace=(prompt.variance * prompt.fisher_trace)[None],
        oracle_trace=prompt.oracle_trace[None],
        raw_square=raw[None],
        mean_score_squared=torch.zeros(1, dtype=torch.float64),
    )


def listed_error(prompt: Law, size: int, baselines) -> float:
    """`E|ĝ - g|²` as a sum over all groups; `baselines(rewards)` gives one number per rollout."""
    error = 0.0
    for chance, scores, rewards in prompt.groups(size):
        estimate = sum((r - b) * s for s, r, b in zip(scores, rewards, baselines(rewards), strict=True)) / size
        error += chance * float(((estimate - prompt.gradient) ** 2).sum())
    return error


def others_mean(rewards):
    return [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def whole_mean(rewards):
    return [sum(rewards) / len(rewards)] * len(rewards)


def nothing(rewards):
    return [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("formula", "baselines", "sizes"),
    [
        (leave_one_out_mse, others_mean, (2, 3, 4)),
        (mean_baseline_mse, whole_mean, (1, 2, 3, 4)),
        (vanilla_mse, nothing, (1, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("prompt", [law(0), law(1, outcomes=4, parameters=3), law(2, outcomes=2, parameters=1)])
def test_error_formulas_are_exact(formula, baselines, sizes, prompt):
    for size in sizes:
        found = float(formula(exact_moments(prompt), size))
        assert found == pytest.approx(listed_error(prompt, size, baselines), rel=1e-12, abs=1e-12)


def test_the_quadratic_form_of_the_error_is_asymptotic_only():
    """With `R²` in place of `R (R-1)` the error is too small at every finite R, by a factor that tends to one."""
    prompt = law(0)
    moments = exact_moments(prompt)
    pair = float(moments.variance_fisher_trace + moments.gradient_squared)
    for size in (2, 3, 4):
        rounded = float(moments.oracle_trace) / size + pair / size**2
        gap = listed_error(prompt, size, others_mean) - rounded
        assert gap == pytest.approx(pair / (size**2 * (size - 1)), rel=1e-10)


def test_leave_one_out_can_lose_to_no_baseline_in_a_pair():
    prompt = Law(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        torch.tensor([0.5, -0.5], dtype=torch.float64),  # the value is zero: no baseline is the oracle's
    )
    moments = exact_moments(prompt)
    assert float(leave_one_out_mse(moments, 2)) > float(vanilla_mse(moments, 2))


components = st.builds(
    NoiseComponents,
    gradient_squared=st.just(1.0),
    between_prompts=st.floats(1e-3, 1e3),
    within_prompt=st.floats(0, 10),
    group_baseline=st.floats(0, 1e3),
)


@given(components=components, rollouts=st.integers(1, 10_000))
def test_the_integer_is_the_lowest_point_of_the_curve(components, rollouts):
    best = optimal_group_size(components)
    sizes = torch.arange(2, 1100)
    curve = mse_curve(components, rollouts, sizes)
    assert best.integer is not None
    lowest = float(curve.min())
    assert float(mse_curve(components, rollouts, torch.tensor([best.integer]))) == pytest.approx(lowest, rel=1e-12)
    assert (
        best.exact
        == best.asymptotic + 1
        == pytest.approx(1 + math.sqrt(components.group_baseline / components.between_prompts))
    )
    if best.exact >= 2:  # the stationary point is the minimum: no step to either side is lower
        at = torch.tensor([best.exact, best.exact * (1 + 1e-3), 1 + (best.exact - 1) * (1 + 1e-3)]).double()
        assert bool(
            (mse_curve(components, rollouts, at) >= mse_curve(components, rollouts, at[:1]) * (1 - 1e-12)).all()
        )


def test_the_asymptotic_form_is_one_short():
    """`sqrt(c3/c1)` minimises `c1 R + c3/R`, not the exact `c1 R + c3/(R-1)`."""
    found = optimal_group_size(NoiseComponents(1.0, between_prompts=1.0, within_prompt=0.0, group_baseline=6.25))
    grid = torch.linspace(2, 8, 6001, dtype=torch.float64)
    curve = mse_curve(NoiseComponents(1.0, 1.0, 0.0, 6.25), 1, grid)
    assert float(grid[curve.argmin()]) == pytest.approx(found.exact, abs=1e-3)
    assert float(grid[(grid + 6.25 / grid).argmin()]) == pytest.approx(found.asymptotic, abs=1e-3)
    assert (found.exact, found.asymptotic) == (3.5, 2.5)


def test_the_curve_is_the_batch_error_at_divisors():
    components = NoiseComponents(1.0, 0.3, 2.0, 5.0)
    sizes = torch.tensor([2, 3, 4, 6, 12])
    expected = [batch_mse(components, 12 // int(size), int(size)) for size in sizes]
    assert mse_curve(components, 12, sizes).tolist() == pytest.approx(expected, rel=1e-12)


def test_exact_moments_never_ask_for_less_than_two():
    """`c3 >= E|g(X)|² >= c1` for any prompts."""
    for seed in range(20):
        prompts = [law(seed), law(seed + 100)]
        mean = (prompts[0].gradient + prompts[1].gradient) / 2
        c1 = sum(float(((p.gradient - mean) ** 2).sum()) for p in prompts) / 2
        c3 = sum(float(p.variance * p.fisher_trace + p.gradient @ p.gradient) for p in prompts) / 2
        assert optimal_group_size(NoiseComponents(1.0, c1, 0.0, c3)).exact >= 2


@pytest.mark.parametrize(
    ("c1", "c3", "exact", "integer"),
    [
        (0.0, 1.0, math.inf, None),
        (-1.0, 1.0, math.inf, None),
        (1.0, 0.0, 1.0, 2),
        (1.0, -1.0, 1.0, 2),
        (0.0, 0.0, math.nan, None),
        (-1.0, -1.0, math.nan, None),
        (math.nan, 1.0, math.nan, None),
        (1.0, math.nan, math.nan, None),
    ],
)
def test_degenerate_components(c1, c3, exact, integer):
    found = optimal_group_size(NoiseComponents(1.0, c1, 0.0, c3))
    assert found.exact == pytest.approx(exact, nan_ok=True) and found.integer == integer


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: leave_one_out_mse(exact_moments(law(0)), 1), "at least 2, got 1"),
        (lambda: mean_baseline_mse(exact_moments(law(0)), 0), "at least 1, got 0"),
        (lambda: vanilla_mse(exact_moments(law(0)), 0), "at least 1, got 0"),
        (lambda: mse_curve(NoiseComponents(1.0, 1.0, 1.0, 1.0), 0, torch.tensor([2])), "at least 1 rollout"),
        (lambda: mse_curve(NoiseComponents(1.0, 1.0, 1.0, 1.0), 8, torch.tensor([1, 2])), "at least 2, got 1"),
        (lambda: mse_curve(NoiseComponents(1.0, 1.0, 1.0, 1.0), 8, torch.tensor([math.nan])), "at least 2, got nan"),
    ],
)
def test_errors_say_what_was_received(call, part):
    with pytest.raises(ScoregramError) as caught:
        call()
    assert part in str(caught.value)
