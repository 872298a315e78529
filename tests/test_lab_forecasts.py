"""Expected updates of forecasts, against a loop over all groups and against the lab's own moments."""

import itertools
import math

import pytest
import torch

from scoregram.advantages import leave_one_out, mean_centered, standardized
from scoregram.checks import ScoregramError
from scoregram.theory import (
    STATED,
    SoftmaxPolicy,
    brier_score,
    forecast,
    forecast_ascent,
    forecast_update,
    ground_truth,
    group_update_moments,
    listing,
    mean_forecast,
)

LOGITS = torch.tensor([0.3, -0.4, 0.1, 0.8, -0.2], dtype=torch.float64)


@pytest.mark.parametrize("estimator", [standardized, mean_centered, leave_one_out])
@pytest.mark.parametrize(("chance", "size"), [(0.7, 2), (0.25, 3)])
def test_the_update_is_the_mean_over_every_ordered_group(estimator, chance, size):
    policy = LOGITS.softmax(0).tolist()
    expected = [0.0] * 5
    for outcome, weight in ((1.0, chance), (0.0, 1 - chance)):
        for group in itertools.product(range(5), repeat=size):
            rewards = torch.tensor([[1 - (STATED[a] - outcome) ** 2 for a in group]], dtype=torch.float64)
            advantages = estimator(rewards)[0].tolist()
            share = weight * math.prod(policy[a] for a in group) / size
            for a, advantage in zip(group, advantages, strict=True):
                for k in range(5):
                    expected[k] += share * advantage * ((a == k) - policy[k])
    found = forecast_update(LOGITS, estimator, chance=chance, group_size=size)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_the_world_gives_the_same_update():
    """Two prompts that share their logits, as a policy that does not see the outcome does."""
    rows = listing(forecast(0.7))
    blind = SoftmaxPolicy(LOGITS, lambda theta: theta.log_softmax(0).expand(2, 5))
    truth = ground_truth(rows, blind)
    moments = [group_update_moments(truth, standardized, prompt=prompt, group_size=3) for prompt in range(2)]
    mean = 0.7 * moments[0].expected + 0.3 * moments[1].expected
    torch.testing.assert_close(mean, forecast_update(LOGITS, standardized, chance=0.7, group_size=3))
    torch.testing.assert_close(
        truth.objective_gradient, forecast_update(LOGITS, leave_one_out, chance=0.7, group_size=2)
    )


def test_the_brier_score_is_largest_on_average_at_the_chance():
    stated = torch.tensor(STATED, dtype=torch.float64)
    mean = 0.75 * brier_score(stated, 1) + 0.25 * brier_score(stated, 0)
    torch.testing.assert_close(mean, 1 - 0.75 * 0.25 - (stated - 0.75).square())


def test_ascent_is_a_sum_of_updates():
    first = forecast_update(torch.zeros(5, dtype=torch.float64), standardized, chance=0.75, group_size=2)
    second = forecast_update(3 * first, standardized, chance=0.75, group_size=2)
    found = forecast_ascent(standardized, chance=0.75, group_size=2, rate=3.0, steps=2)
    torch.testing.assert_close(found, (3 * first + 3 * second).softmax(0))
    assert mean_forecast(torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0], dtype=torch.float64)) == 0.375


def test_a_chance_outside_its_range_is_refused():
    with pytest.raises(ScoregramError, match=r"forecast: chance must lie in \[0, 1\], got 1.5"):
        forecast(1.5)
