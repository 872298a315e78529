import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.theory.lab.exact import ground_truth
from scoregram.theory.lab.worlds import SoftmaxPolicy
from tests.lab_cases import CASES, case, close, drawn, walked_objective


@pytest.mark.parametrize("key", CASES)
def test_probabilities_sum_to_one_and_scores_to_zero(key):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        rows = truth.listing.of_prompt(prompt)
        close(truth.probability[rows].sum().item(), 1.0)
        mean_score = truth.probability[rows] @ truth.scores[rows]
        close(mean_score, torch.zeros_like(mean_score))


@pytest.mark.parametrize("key", CASES)
def test_objective_and_gradient_match_autograd_through_a_walk(key):
    at = case(*key)
    theta = at.policy.parameters.clone().requires_grad_()
    objective = walked_objective(at, theta)
    close(at.truth.objective, objective.item())
    close(at.truth.objective_gradient, torch.autograd.grad(objective, theta)[0])


@pytest.mark.parametrize("key", CASES)
def test_gradient_matches_finite_differences(key):
    at, step = case(*key), 1e-5
    for d in range(0, at.policy.parameters.numel(), 7):
        nudge = torch.zeros_like(at.policy.parameters)
        nudge[d] = step
        up, down = (walked_objective(at, at.policy.parameters + sign * nudge) for sign in (1, -1))
        close(at.truth.objective_gradient[d].item(), float(up - down) / (2 * step), rtol=0, atol=1e-9)


@pytest.mark.parametrize("key", CASES)
def test_scores_match_one_backward_pass_per_turn(key):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        rollouts = drawn(key, prompt)
        rows = truth.listing.of_prompt(prompt)
        close(truth.scores[rows], torch.stack([rollout.score for rollout in rollouts]))
        for row, rollout in zip(rows, rollouts, strict=True):
            turns = len(rollout.turn_scores)
            close(truth.turn_scores[row, :turns], torch.stack(rollout.turn_scores))
            assert not truth.turn_scores[row, turns:].any()


@pytest.mark.parametrize("key", CASES)
def test_values_obey_the_bellman_recursion(key):
    at = case(*key)
    row_of = {history: row for row, history in enumerate(at.listing.histories)}
    probs = at.truth.log_probs.exp()

    def moments(history):  # first two moments of the reward to go, and its mean for each action
        firsts, seconds = [], []
        for action in range(at.world.actions(history)):
            first = second = 0.0
            for outcome in at.world.outcomes(history, action):
                longer = (*history, action, outcome.observation)
                m1, m2, _ = (0.0, 0.0, None) if outcome.ends else moments(longer)
                first += outcome.probability * (outcome.reward + m1)
                second += outcome.probability * (outcome.reward**2 + 2 * outcome.reward * m1 + m2)
            firsts.append(first)
            seconds.append(second)
        weights = probs[row_of[history], : len(firsts)].tolist()
        mean = sum(w * f for w, f in zip(weights, firsts, strict=True))
        return mean, sum(w * s for w, s in zip(weights, seconds, strict=True)), firsts

    for history, row in row_of.items():
        value, second, firsts = moments(history)
        close(at.truth.state_value[row].item(), value)
        close(at.truth.state_variance[row].item(), second - value**2)
        close(at.truth.action_value[row, : len(firsts)].tolist(), firsts)
        close(at.truth.advantage[row, : len(firsts)].tolist(), [first - value for first in firsts])
        assert at.truth.action_value[row, len(firsts) :].isnan().all()


@pytest.mark.parametrize("key", CASES)
def test_moments_of_a_prompt_match_sums_over_the_walk(key):
    truth = case(*key).truth
    for prompt in range(truth.value.numel()):
        value = sum(r.probability * sum(r.rewards) for r in drawn(key, prompt))
        terms = [(r.probability, sum(r.rewards), r.score) for r in drawn(key, prompt)]
        zero = torch.zeros_like(truth.gradient[prompt])
        gradient = sum((p * g * s for p, g, s in terms), zero)
        fisher = sum((p * s.outer(s) for p, _, s in terms), zero.outer(zero))
        weighted = sum(p * float(s @ s) * g for p, g, s in terms)
        oracle = sum(
            (p * (s * (g - value) - gradient).outer(s * (g - value) - gradient) for p, g, s in terms), fisher * 0
        )
        close(truth.value[prompt].item(), value)
        close(truth.gradient[prompt], gradient)
        close(truth.fisher[prompt], fisher)
        close(truth.fisher_trace[prompt].item(), fisher.trace().item())
        close(truth.optimal_baseline[prompt].item(), weighted / fisher.trace().item())
        close(truth.reward_variance[prompt].item(), sum(p * (g - value) ** 2 for p, g, _ in terms))
        close(truth.oracle_covariance[prompt], oracle)


@pytest.mark.parametrize("key", CASES)
def test_constants_across_prompts(key):
    truth, weights = case(*key).truth, case(*key).world.prompt_weights
    gradient = truth.objective_gradient
    c1 = sum(w * float((g - gradient).square().sum()) for w, g in zip(weights, truth.gradient, strict=True))
    c2 = sum(w * float(s.trace()) for w, s in zip(weights, truth.oracle_covariance, strict=True))
    c3 = sum(
        w * float(truth.reward_variance[p] * truth.fisher[p].trace() + truth.gradient[p] @ truth.gradient[p])
        for p, w in enumerate(weights)
    )
    close([truth.c1, truth.c2, truth.c3], [c1, c2, c3])


@pytest.mark.parametrize("key", CASES)
def test_views_along_a_rollout_add_up(key):
    truth = case(*key).truth
    total = truth.listing.returns[:, None].expand_as(truth.listing.reward)
    close(truth.past_rewards + truth.reward_to_go, total)
    close(truth.reward_to_go[:, 0], truth.listing.returns)
    # E[A | s] = 0 in every state
    mean = (truth.log_probs.exp() * truth.advantage).nansum(dim=-1)
    close(mean, torch.zeros_like(mean))


def test_parameters_that_are_not_finite_are_refused():
    at = case("step_rewards", "tabular")
    broken = at.policy.parameters.clone()
    broken[3] = torch.nan
    with pytest.raises(ScoregramError, match=r"ground_truth: the parameters must be finite, got nan at index \(3,\)"):
        ground_truth(at.listing, SoftmaxPolicy(broken, at.policy.log_probs))


def test_a_policy_that_excludes_a_listed_action_is_refused():
    at = case("step_rewards", "tabular")
    one_sided = SoftmaxPolicy(
        at.policy.parameters, lambda theta: torch.tensor([0.0, -torch.inf]).double().repeat(14, 1)
    )
    with pytest.raises(ScoregramError, match="log-probabilities must be finite"):
        ground_truth(at.listing, one_sided)
