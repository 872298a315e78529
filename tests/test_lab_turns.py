from itertools import product

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.theory.lab.moments import group_update_moments
from scoregram.theory.lab.turns import CREDITS, credit_moments, prefix_value_moments, turn_moments
from tests.lab_cases import CASES, averaged, case, close, drawn, ordered_groups, walks


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("key", CASES)
def test_credit_from_the_own_rollout_is_unbiased_and_matches_enumeration(key, name):
    truth = case(*key).truth
    credit = CREDITS[name].fn(truth)
    for prompt in range(truth.value.numel()):
        rows = truth.listing.of_prompt(prompt)
        updates = []
        for row, rollout in zip(rows.tolist(), drawn(key, prompt), strict=True):
            pulls = [float(credit[row, h]) * score for h, score in enumerate(rollout.turn_scores)]
            updates.append((rollout.probability, torch.stack(pulls).sum(dim=0)))
        expected, variance, _ = averaged(updates, truth.gradient[prompt])
        got = credit_moments(truth, credit, prompt=prompt, group_size=5)
        close(got.expected, expected)
        close(got.expected, truth.gradient[prompt])
        close(got.variance, variance / 5)


@pytest.mark.parametrize("key", CASES)
def test_credits_are_their_definitions(key):
    truth = case(*key).truth
    listing, values = truth.listing, truth.state_value
    given = {name: credit.fn(truth) for name, credit in CREDITS.items()}
    for row in range(len(listing.prompt)):
        turns = int(listing.lengths[row])
        rewards, states = listing.reward[row].tolist()[:turns], listing.state[row].tolist()[:turns]
        for h in range(turns):
            v, after = float(values[states[h]]), float(values[states[h + 1]]) if h + 1 < turns else 0.0
            wanted = {
                "total_return": sum(rewards),
                "return_minus_start_value": sum(rewards) - float(values[states[0]]),
                "reward_to_go": sum(rewards[h:]),
                "reward_to_go_minus_value": sum(rewards[h:]) - v,
                "temporal_difference": rewards[h] + after - v,
                "exact_advantage": float(truth.action_value[states[h], listing.action[row, h]]) - v,
            }
            close({name: float(credit[row, h]) for name, credit in given.items()}, wanted)


@pytest.mark.parametrize("key", CASES)
def test_exact_advantage_has_less_noise_than_the_sampled_advantages(key):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        variance = {
            name: credit_moments(truth, credit.fn(truth), prompt=prompt, group_size=1).variance
            for name, credit in CREDITS.items()
        }
        assert variance["exact_advantage"] <= variance["temporal_difference"] + 1e-12


@pytest.mark.parametrize("kind", ["tabular", "network"])
def test_prefix_values_match_the_enumeration_of_rollouts_and_fresh_continuations(kind):
    """One fresh rollout per state: every rollout with every combination of continuations."""
    key, prompt = ("step_rewards", kind), 1
    at = case(*key)
    theta = at.policy.parameters
    log_probs = at.policy.log_probs(theta)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}

    def continuations(history):
        """Chance and return of every way on from a history."""
        found = []
        for action in range(at.world.actions(history)):
            for outcome in at.world.outcomes(history, action):
                p = float(log_probs[row_of[history], action].exp()) * outcome.probability
                longer = (*history, action, outcome.observation)
                rest = [(1.0, 0.0)] if outcome.ends else continuations(longer)
                found += [(p * q, outcome.reward + more) for q, more in rest]
        return found

    updates = []
    for walk, rollout in zip(walks(at, prompt, theta), drawn(key, prompt), strict=True):
        for estimates in product(*(continuations(history) for history, _ in walk.path)):
            values = [value for _, value in estimates] + [0.0]
            chance = rollout.probability
            for p, _ in estimates:
                chance *= p
            pulls = [
                (walk.rewards[h] + values[h + 1] - values[h]) * score for h, score in enumerate(rollout.turn_scores)
            ]
            updates.append((chance, torch.stack(pulls).sum(dim=0)))
    expected, variance, _ = averaged(updates, at.truth.gradient[prompt])
    got = prefix_value_moments(at.truth, prompt=prompt, group_size=1, rollouts_per_state=1)
    close(got.expected, expected)
    close(got.expected, at.truth.gradient[prompt])
    close(got.variance, variance)


def test_prefix_values_approach_the_exact_difference():
    truth = case("user_turns", "network").truth
    exact = credit_moments(truth, CREDITS["temporal_difference"].fn(truth), prompt=0, group_size=4).variance
    extra = [
        prefix_value_moments(truth, prompt=0, group_size=4, rollouts_per_state=k).variance - exact for k in (1, 2, 8)
    ]
    close([extra[0] / extra[1], extra[0] / extra[2]], [2.0, 8.0])
    assert extra[0] > 0


def to_go_centered(turn_rewards, *, mask):
    """Reward to go minus its mean over the rollouts that reached the turn."""
    to_go = turn_rewards.flip(-1).cumsum(dim=-1).flip(-1)
    reached = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, to_go - (to_go * mask).sum(dim=1, keepdim=True) / reached, 0.0)


def padded(rows, turns):
    return torch.tensor([[row + [0.0] * (turns - len(row)) for row in rows]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("key", "size"),
    [(("stopping", "network"), 2), (("output_only", "tabular"), 3), (("step_rewards", "network"), 3)],
)
def test_group_credit_by_turn_matches_all_ordered_groups(key, size):
    truth, prompt = case(*key).truth, 1
    updates = []
    for probability, group in ordered_groups(drawn(key, prompt), size):
        rewards = padded([rollout.rewards for rollout in group], 3)
        mask = padded([[1.0] * len(rollout.rewards) for rollout in group], 3) > 0
        credit = to_go_centered(rewards, mask=mask)[0]
        pulls = [float(credit[i, h]) * s for i, rollout in enumerate(group) for h, s in enumerate(rollout.turn_scores)]
        updates.append((probability, torch.stack(pulls).sum(dim=0) / size))
    expected, variance, mse = averaged(updates, truth.gradient[prompt])
    got = turn_moments(truth, to_go_centered, prompt=prompt, group_size=size, needs=("mask",))
    close(got.expected, expected)
    close(got.variance, variance)
    close(got.mse, mse)


def test_rollouts_that_differ_in_an_input_are_told_apart():
    """Going on by a sunny or by a cloudy path pays the same; only the state shows which it was."""
    key, size, prompt = ("stopping", "network"), 2, 0
    at = case(*key)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}

    def against_values(turn_rewards, *, mask, values):
        """Reward of the turn against the mean of everybody's squared values there."""
        return turn_rewards - values.square().mean(dim=1, keepdim=True)

    rollouts = drawn(key, prompt)
    met = {
        id(rollout): [float(at.truth.state_value[row_of[history]]) for history, _ in walk.path]
        for rollout, walk in zip(rollouts, walks(at, prompt, at.policy.parameters), strict=True)
    }
    updates = []
    for probability, group in ordered_groups(rollouts, size):
        rewards, values = padded([r.rewards for r in group], 3), padded([met[id(r)] for r in group], 3)
        credit = against_values(rewards, mask=None, values=values)[0]
        pulls = [float(credit[i, h]) * s for i, rollout in enumerate(group) for h, s in enumerate(rollout.turn_scores)]
        updates.append((probability, torch.stack(pulls).sum(dim=0) / size))
    expected, variance, _ = averaged(updates, at.truth.gradient[prompt])
    got = turn_moments(at.truth, against_values, prompt=prompt, group_size=size, needs=("mask", "values"))
    close(got.expected, expected)
    close(got.variance, variance)


def test_a_rollout_level_advantage_seen_turn_by_turn_is_the_same_update():
    truth = case("stopping", "network").truth

    def spread(turn_rewards, *, mask):
        returns = turn_rewards.sum(dim=-1)
        return (returns - returns.mean(dim=-1, keepdim=True))[..., None].expand_as(turn_rewards)

    by_turn = turn_moments(truth, spread, prompt=0, group_size=3, needs=("mask",))
    whole = group_update_moments(truth, lambda r: r - r.mean(dim=-1, keepdim=True), prompt=0, group_size=3)
    close(by_turn.expected, whole.expected)
    close(by_turn.variance, whole.variance)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: turn_moments(t, to_go_centered, prompt=0, group_size=2, needs=("moods",)), "among .*mask.*'moods'"),
        (lambda t: credit_moments(t, torch.zeros_like(t.listing.reward), prompt=0, group_size=0), "at least one"),
        (
            lambda t: prefix_value_moments(t, prompt=0, group_size=1, rollouts_per_state=0),
            "at least one rollout, got 0",
        ),
        (lambda t: credit_moments(t, t.listing.reward / 0, prompt=0, group_size=1), "credit must be finite"),
    ],
)
def test_what_has_no_meaning_is_refused(call, says):
    with pytest.raises(ScoregramError, match=says):
        call(case("stopping", "tabular").truth)
