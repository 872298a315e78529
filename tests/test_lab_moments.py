import math
from itertools import product

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.theory.lab.moments import (
    UpdateMoments,
    across_prompts,
    expected_advantages,
    greedy_returns,
    group_update_moments,
    multisets,
)
from tests.lab_cases import CASES, averaged, case, close, drawn, ordered_groups

# Plain estimators, written here so that the lab is tested apart from the library's own.


def raw(rewards):
    return rewards


def centered(rewards):
    return rewards - rewards.mean(dim=-1, keepdim=True)


def others(rewards):
    size = rewards.shape[-1]
    return rewards - (rewards.sum(dim=-1, keepdim=True) - rewards) / (size - 1)


def standard(rewards):
    return centered(rewards) / (rewards.std(dim=-1, keepdim=True) + 0.1)


def by_length(rewards, lengths):
    return rewards - (lengths * rewards).sum(dim=-1, keepdim=True) / lengths.sum(dim=-1, keepdim=True)


def by_energy(rewards, score_energies):
    return by_length(rewards, score_energies)


def whole_batch(rewards):
    return rewards - rewards.mean()


PLAIN = [(raw, ()), (centered, ()), (others, ()), (standard, ()), (by_length, ("lengths",))]


def inputs_of(group, needs):
    given = {
        "lengths": torch.tensor([[len(rollout.rewards) for rollout in group]]),
        "score_energies": torch.tensor([[float(r.score @ r.score) for r in group]], dtype=torch.float64),
    }
    return {name: given[name] for name in needs}


def naive_moments(key, prompt, fn, needs, group_size):
    """All ordered groups, the update of each as a vector."""
    updates = []
    for probability, group in ordered_groups(drawn(key, prompt), group_size):
        rewards = torch.tensor([[sum(rollout.rewards) for rollout in group]], dtype=torch.float64)
        advantages = fn(rewards, **inputs_of(group, needs))[0]
        update = sum(a * rollout.score for a, rollout in zip(advantages, group, strict=True)) / group_size
        updates.append((probability, update))
    return averaged(updates, case(*key).truth.gradient[prompt])


def check(key, prompt, fn, needs, group_size, **options):
    moments = group_update_moments(case(*key).truth, fn, prompt=prompt, group_size=group_size, needs=needs, **options)
    expected, variance, mse = naive_moments(key, prompt, fn, needs, group_size)
    close(moments.expected, expected)
    close(moments.variance, variance)
    close(moments.mse, mse)


@pytest.mark.parametrize(("fn", "needs"), PLAIN)
@pytest.mark.parametrize("key", [key for key in CASES if key[0] != "user_turns"])
def test_pairs_match_all_ordered_groups(key, fn, needs):
    for prompt in range(case(*key).truth.value.numel()):
        check(key, prompt, fn, needs, 2)


@pytest.mark.parametrize(("fn", "needs"), [*PLAIN, (by_energy, ("score_energies",))])
def test_triples_match_all_ordered_groups(fn, needs):
    check(("output_only", "network"), 1, fn, needs, 3)


def test_many_rollouts_per_type_match_all_ordered_groups():
    check(("user_turns", "network"), 1, standard, (), 2)


def test_quadruples_match_all_ordered_groups():
    check(("step_rewards", "network"), 0, standard, (), 4)


def test_an_estimator_that_couples_prompts_is_shown_one_group_at_a_time():
    check(("step_rewards", "network"), 1, whole_batch, (), 3, couples_prompts=True)


def test_small_blocks_change_nothing(monkeypatch):
    truth = case("stopping", "network").truth
    whole = group_update_moments(truth, by_length, prompt=0, group_size=4, needs=("lengths",))
    monkeypatch.setattr("scoregram.theory.lab.moments.PAIRS_AT_ONCE", 50)
    blocks = group_update_moments(truth, by_length, prompt=0, group_size=4, needs=("lengths",))
    assert torch.equal(whole.expected, blocks.expected) and whole.variance == blocks.variance


@pytest.mark.parametrize(
    ("key", "group_size"),
    [*((key, size) for key in CASES for size in (2, 3, 8)), *((key, 64) for key in CASES if key[1] == "network")],
)
def test_closed_forms_hold_at_every_group_size(key, group_size):
    """MSE = tr Σ / R + (σ² tr F + |g|²) / (R (R-1)) for leave-one-out; the group mean is (R-1)/R of it."""
    truth = case(*key).truth
    shrink = (group_size - 1) / group_size
    for prompt in range(truth.value.numel()):
        loo, mean, none = (
            group_update_moments(truth, fn, prompt=prompt, group_size=group_size) for fn in (others, centered, raw)
        )
        gradient = truth.gradient[prompt]
        pair = truth.reward_variance[prompt] * truth.fisher_trace[prompt] + gradient @ gradient
        mse = float(truth.oracle_covariance[prompt].trace() / group_size + pair / (group_size * (group_size - 1)))
        close(loo.bias, torch.zeros_like(gradient))
        close(loo.mse, mse)
        close(mean.expected, shrink * gradient)
        close(mean.mse, shrink**2 * mse + float(gradient @ gradient) / group_size**2)
        rows = truth.listing.of_prompt(prompt)
        second = float(truth.probability[rows] @ (truth.score_energies * truth.listing.returns**2)[rows])
        close(none.mse, (second - float(gradient @ gradient)) / group_size)


@pytest.mark.parametrize("key", CASES)
def test_no_constant_baseline_beats_the_optimal_one(key):
    truth = case(*key).truth
    for prompt, best in enumerate(truth.optimal_baseline.tolist()):

        def variance(baseline, prompt=prompt):
            return group_update_moments(truth, lambda r: r - baseline, prompt=prompt, group_size=4).variance

        for offset in (-0.5, 0.25, 2.0):
            excess = offset**2 * float(truth.fisher_trace[prompt]) / 4
            close(variance(best + offset) - variance(best), excess, atol=1e-11)


def test_expected_advantage_given_the_own_rollout_matches_all_ordered_groups():
    key, prompt, size = ("stopping", "network"), 0, 3
    got = expected_advantages(case(*key).truth, standard, prompt=prompt, group_size=size)
    for row, own in enumerate(drawn(key, prompt)[:6]):
        total = 0.0
        for probability, rest in ordered_groups(drawn(key, prompt), size - 1):
            rewards = torch.tensor([[sum(rollout.rewards) for rollout in (own, *rest)]], dtype=torch.float64)
            total += probability * float(standard(rewards)[0, 0])
        close(got[row].item(), total)


@pytest.mark.parametrize("key", CASES)
def test_greedy_rollout_follows_the_likeliest_action(key):
    at = case(*key)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}
    for prompt in range(at.truth.value.numel()):
        found: dict[float, float] = {}

        def follow(history, chance, won, found=found):
            action = int(at.truth.log_probs[row_of[history]].argmax())
            for outcome in at.world.outcomes(history, action):
                p, total = chance * outcome.probability, won + outcome.reward
                if outcome.ends:
                    found[total] = found.get(total, 0.0) + p
                else:
                    follow((*history, action, outcome.observation), p, total)

        follow((prompt,), 1.0, 0.0)
        values, chances = greedy_returns(at.truth, prompt)
        assert values.tolist() == sorted(found)
        close(chances.tolist(), [found[value] for value in sorted(found)])


def test_greedy_baseline_is_averaged_over_its_own_luck():
    key, prompt, size = ("stopping", "tabular"), 0, 2
    truth = case(*key).truth
    values, chances = greedy_returns(truth, prompt)
    updates = []
    for (greedy, chance), (p, group) in product(
        zip(values.tolist(), chances.tolist(), strict=True), ordered_groups(drawn(key, prompt), size)
    ):
        update = sum(((sum(r.rewards) - greedy) * r.score for r in group), torch.zeros_like(truth.gradient[prompt]))
        updates.append((chance * p, update / size))
    expected, variance, _ = averaged(updates, truth.gradient[prompt])
    got = group_update_moments(
        truth,
        lambda rewards, greedy_rewards: rewards - greedy_rewards[:, None],
        prompt=prompt,
        group_size=size,
        needs=("greedy_rewards",),
    )
    assert len(values) > 1
    close(got.expected, expected)
    close(got.variance, variance)
    close(got.bias, torch.zeros_like(got.bias))


@pytest.mark.parametrize("key", CASES)
def test_batches_follow_the_three_constants(key):
    """MSE of B groups = c1/B + c2/(BR) + c3/(BR(R-1)) with a leave-one-out baseline."""
    truth, size, batch = case(*key).truth, 4, 3
    each = [group_update_moments(truth, others, prompt=p, group_size=size) for p in range(truth.value.numel())]
    mse = truth.c1 / batch + truth.c2 / (batch * size) + truth.c3 / (batch * size * (size - 1))
    close(across_prompts(truth, each, prompts=batch).mse, mse)


def test_batches_match_the_enumeration_of_prompts_and_groups():
    key, size = ("step_rewards", "network"), 2
    truth, weights = case(*key).truth, case(*key).world.prompt_weights
    singles = []
    for prompt, weight in enumerate(weights):
        for p, group in ordered_groups(drawn(key, prompt), size):
            rewards = torch.tensor([[sum(r.rewards) for r in group]], dtype=torch.float64)
            update = sum(a * r.score for a, r in zip(centered(rewards)[0], group, strict=True)) / size
            singles.append((weight * p, update))
    pairs = [(p * q, (u + v) / 2) for (p, u), (q, v) in product(singles, singles)]
    probability = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    updates = torch.stack([u for _, u in pairs])
    expected = probability @ updates
    each = [group_update_moments(truth, centered, prompt=p, group_size=size) for p in range(len(weights))]
    batch = across_prompts(truth, each, prompts=2)
    close(batch.expected, expected)
    close(batch.variance, float(probability @ (updates - expected).square().sum(dim=-1)))
    close(batch.mse, float(probability @ (updates - truth.objective_gradient).square().sum(dim=-1)))


def test_readings_of_moments():
    target = torch.tensor([3.0, 4.0]).double()
    half = UpdateMoments(target / 2, target, 5.0)
    assert half.relative_bias == 0.5 and half.cosine == 1.0 and half.snr_squared == 1.25 and half.mse == 11.25
    still = UpdateMoments(torch.zeros(2).double(), target, 0.0)
    assert math.isnan(still.snr_squared) and math.isnan(still.cosine) and still.relative_bias == 1.0
    assert UpdateMoments(target, target, 0.0).snr_squared == math.inf
    assert math.isnan(UpdateMoments(target, torch.zeros(2).double(), 0.0).relative_bias)


@pytest.mark.parametrize(("types", "size"), [(1, 5), (2, 3), (3, 4), (5, 2), (4, 1)])
def test_multisets_cover_every_ordered_group_once(types, size):
    found = multisets(types, size)
    ordered = [tuple(sorted(group)) for group in product(range(types), repeat=size)]
    assert [tuple(row) for row in found.members.tolist()] == sorted(set(ordered))
    assert found.orders.tolist() == [ordered.count(row) for row in sorted(set(ordered))]
    assert [[row.count(t) for t in range(types)] for row in found.members.tolist()] == found.counts.tolist()


def test_multinomial_probabilities_sum_to_one_at_the_largest_group():
    law = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    close(multisets(4, 64).probability(law).sum().item(), 1.0, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: multisets(40, 8), "at most 200000 groups are enumerated, got .* of 8 rollouts of 40 types"),
        (lambda: multisets(3, 0), r"must be positive, got \(3, 0\)"),
        (
            lambda: group_update_moments(
                case("stopping", "tabular").truth, raw, prompt=0, group_size=2, needs=("ages",)
            ),
            "needs must be among .*lengths.*, got 'ages'",
        ),
        (
            lambda: group_update_moments(case("stopping", "tabular").truth, lambda r: r / 0, prompt=0, group_size=2),
            "advantages must be finite",
        ),
        (lambda: across_prompts(case("stopping", "tabular").truth, [], prompts=1), "got 0 for 2 prompts"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(call, says):
    with pytest.raises(ScoregramError, match=says):
        call()


def test_other_needs_reach_the_estimator():
    truth = case("stopping", "tabular").truth
    got = group_update_moments(
        truth, lambda r, baselines: r - baselines[:, None], prompt=1, group_size=3, needs=("baselines",)
    )
    close(got.variance, float(truth.oracle_covariance[1].trace()) / 3)
