import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.advantages import leave_one_out, no_baseline
from scoregram.checks import ScoregramError
from scoregram.statistics import GroupMoments, batch_mse, leave_one_out_mse, vanilla_mse
from scoregram.theory.lab.moments import across_prompts, group_update_moments
from scoregram.theory.theorems import (
    exact_components,
    exact_moments,
    group_size_to_beat_vanilla,
    kernel_projection,
    pair_average,
    pair_kernels,
)
from tests.lab_cases import CASES, averaged, case, close, drawn


@given(
    size=st.integers(2, 7), parameters=st.integers(1, 4), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1e6])
)
def test_pairs_give_the_leave_one_out_update(size, parameters, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, parameters, dtype=torch.float64, generator=generator)
    rewards = scale * torch.randint(0, 3, (size,), generator=generator).double()
    update = sum(
        (rewards[i] - sum(rewards[j] for j in range(size) if j != i) / (size - 1)) * scores[i] for i in range(size)
    )
    close(pair_average(scores, rewards), torch.as_tensor(update) / size, atol=1e-12 * scale)


def test_kernels_are_symmetric_and_vanish_on_the_diagonal():
    scores, rewards = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    kernels = pair_kernels(scores, rewards)
    assert torch.equal(kernels, kernels.transpose(0, 1)) and not kernels.diagonal().any()


@pytest.mark.parametrize("key", CASES)
def test_the_projection_is_the_mean_over_a_second_rollout(key):
    truth = case(*key).truth
    rollouts = drawn(key, 0)
    for row, mine in zip(kernel_projection(truth, 0), rollouts, strict=True):
        mean = torch.zeros_like(row)
        for other in rollouts:
            mean += other.probability * (mine.score - other.score) * (sum(mine.rewards) - sum(other.rewards))
        close(row, mean)


@pytest.mark.parametrize("key", CASES)
def test_exact_moments_match_the_walked_rollouts(key):
    truth, moments, rollouts = case(*key).truth, exact_moments(case(*key).truth), drawn(key, 0)

    def mean(values):
        return sum(rollout.probability * value for rollout, value in zip(rollouts, values, strict=True))

    value = mean([sum(rollout.rewards) for rollout in rollouts])
    oracle = [(rollout.probability, rollout.score * (sum(rollout.rewards) - value)) for rollout in rollouts]
    gradient, variance, _ = averaged(oracle, truth.gradient[0])
    energy = [float(rollout.score.square().sum()) for rollout in rollouts]
    spread = mean([(sum(rollout.rewards) - value) ** 2 for rollout in rollouts])
    raw = mean([e * sum(rollout.rewards) ** 2 for e, rollout in zip(energy, rollouts, strict=True)])
    close(float(moments.gradient_squared[0]), float(gradient.square().sum()))
    close(float(moments.fisher_trace[0]), mean(energy))
    close(float(moments.variance_fisher_trace[0]), spread * mean(energy))
    close(float(moments.oracle_trace[0]), variance)
    close(float(moments.raw_square[0]), raw)
    close(float(moments.mean_score_squared[0]), 0.0)


@pytest.mark.parametrize("key", CASES)
def test_exact_components_give_the_error_of_a_batch(key):
    truth = case(*key).truth
    for size in (2, 5):
        each = [
            group_update_moments(truth, leave_one_out, prompt=p, group_size=size) for p in range(truth.value.numel())
        ]
        close(across_prompts(truth, each, prompts=3).mse, batch_mse(exact_components(truth), 3, size))
    close(exact_components(truth).gradient_squared, float(truth.objective_gradient.square().sum()))


@pytest.mark.parametrize("key", CASES)
def test_the_threshold_is_where_the_errors_cross(key):
    truth = case(*key).truth
    threshold = group_size_to_beat_vanilla(exact_moments(truth))
    for prompt in range(truth.value.numel()):
        for size in (2, 3, 6):
            errors = [
                group_update_moments(truth, fn, prompt=prompt, group_size=size).mse
                for fn in (leave_one_out, no_baseline)
            ]
            assert (errors[0] < errors[1]) == (size > float(threshold[prompt]))


def moments(**given_values: float) -> GroupMoments:
    names = GroupMoments.__dataclass_fields__
    return GroupMoments(**{name: torch.tensor([given_values.get(name, 0.0)], dtype=torch.float64) for name in names})


def test_a_value_far_above_the_best_baseline_never_beats_none():
    """Here b* = 0 < V/2: subtracting V is worse than subtracting nothing, however large the group."""
    never = moments(raw_square=1.0, oracle_trace=1.5, variance_fisher_trace=1.0)
    assert float(group_size_to_beat_vanilla(never)) == math.inf
    assert float(leave_one_out_mse(never, 10**6)) > float(vanilla_mse(never, 10**6))
    close(float(group_size_to_beat_vanilla(moments(raw_square=2.0, oracle_trace=1.0, variance_fisher_trace=3.0))), 4.0)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_has_no_pair_is_refused():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ScoregramError, match="pair_average: needs at least 2 rollouts per prompt, got a group of 1"):
        pair_average(one[:, None], one)
    with pytest.raises(ScoregramError, match="rewards must have the shape of the rows of scores"):
        pair_kernels(torch.ones(3, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
