"""The tabular worlds and the five companions against slow references: time step by time step, and path by path."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.theory import (
    ALTERNATION,
    EMBEDDINGS,
    REPETITION,
    TabularWorld,
    action_values,
    blind_policy,
    blind_slope,
    blind_stationarity,
    classes,
    conservative_iteration,
    direct_gradient,
    embedding_policy,
    listing,
    logit_gradient,
    loop,
    matryoshka_gap,
    matryoshka_optimum,
    occupancy,
    output_set_update,
    pass_at_k_utility,
    pass_every_utility,
    performative_difference,
    performative_gradient,
    prompts_with_answers,
    regularised_values,
    state_values,
    stationarity,
    tabular_advantages,
    tabular_objective,
    utility_gradient,
    utility_reward,
    weary_user,
)
from tests.lab_cases import close

EVEN = torch.full((2, 2), 0.5, dtype=torch.float64)
WORLDS = {"loop": loop(), "weary user": weary_user(EVEN), "alternation": ALTERNATION, "repetition": REPETITION}
ENDLESS = 140
"""Steps after which `γ^t` is below rounding, at `γ = 3/4`."""


def random_tables(*shape: int, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).softmax(dim=-1) for _ in range(number)]


def visits_by_time(world: TabularWorld, policy: Tensor) -> list[list[float]]:
    """Discounted visits: the distribution over states is carried forward one step at a time."""
    states, actions = policy.shape
    here, total = world.start.tolist(), [[0.0] * actions for _ in range(states)]
    for time in range(ENDLESS):
        there = [0.0] * states
        for s, a in product(range(states), range(actions)):
            chance = here[s] * float(policy[s, a])
            total[s][a] += world.discount**time * chance
            for z in range(states):
                there[z] += chance * float(world.transition[s, a, z])
        here = there
    return total


def objective_by_time(world: TabularWorld, policy: Tensor) -> float:
    visits = visits_by_time(world, policy)
    return math.fsum(
        visits[s][a] * float(world.reward[s, a]) for s in range(len(visits)) for a in range(len(visits[s]))
    )


def finite_differences(value: Callable[[Tensor], float], at: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences, one entry at a time."""
    slopes = torch.zeros_like(at)
    for index in product(*(range(n) for n in at.shape)):
        up, down = at.clone(), at.clone()
        up[index] += step
        down[index] -= step
        slopes[index] = (value(up) - value(down)) / (2 * step)
    return slopes


@pytest.mark.parametrize("name", WORLDS)
def test_values_and_visits_are_sums_over_time(name):
    world = WORLDS[name]
    for policy in random_tables(*world.reward.shape):
        close(occupancy(world, policy), torch.tensor(visits_by_time(world, policy), dtype=torch.float64))
        close(float(tabular_objective(world, policy)), objective_by_time(world, policy))
        for s in range(len(policy)):
            start = torch.zeros_like(world.start)
            start[s] = 1.0
            there = TabularWorld(world.transition, world.reward, start, world.discount)
            close(float(state_values(world, policy)[s]), objective_by_time(there, policy))


@pytest.mark.parametrize("name", WORLDS)
def test_advantages_average_to_zero_and_action_values_to_the_value(name):
    world = WORLDS[name]
    for policy in random_tables(*world.reward.shape):
        close((policy * tabular_advantages(world, policy)).sum(dim=-1), torch.zeros_like(world.start))
        close((policy * action_values(world, policy)).sum(dim=-1), state_values(world, policy))


@pytest.mark.parametrize("name", ["loop", "repetition"])
def test_gradients_are_differences_of_the_objective(name):
    world = WORLDS[name]
    for policy in random_tables(*world.reward.shape, number=1):
        by_logits = finite_differences(lambda x: objective_by_time(world, x.softmax(dim=-1)), policy.log())
        close(logit_gradient(world, policy), by_logits, rtol=1e-6, atol=1e-8)
        by_chances = finite_differences(lambda x: objective_by_time(world, x), policy)
        close(direct_gradient(world, policy), by_chances, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": torch.ones(2, 2, 2, dtype=torch.float64)}, "rows of the transition must be probabilities"),
        ({"transition": -torch.ones(2, 2, 2, dtype=torch.float64)}, "rows of the transition must be probabilities"),
        ({"start": torch.tensor([0.5, 0.4], dtype=torch.float64)}, "the start must be a distribution"),
        ({"start": torch.tensor([1.5, -0.5], dtype=torch.float64)}, "the start must be a distribution"),
        ({"discount": 1.5}, r"the discount must lie in \[0, 1\]"),
    ],
)
def test_a_world_that_is_none_is_refused(change, message):
    parts = {
        "transition": torch.full((2, 2, 2), 0.5, dtype=torch.float64),
        "reward": EVEN,
        "start": torch.tensor([0.5, 0.5], dtype=torch.float64),
        "discount": 0.5,
    }
    with pytest.raises(ScoregramError, match=message):
        TabularWorld(**(parts | change))


def test_the_output_set_by_hand():
    scores = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    rewards, weights = (torch.tensor(x, dtype=torch.float64) for x in ((1.0, 0.0), (0.25, 0.75)))
    # the mean reward is 1/4: 1/4 · 3/4 · (2, 0) - 3/4 · 1/4 · (0, 4)
    close(output_set_update(scores, rewards, weights), torch.tensor([0.375, -0.75], dtype=torch.float64))


def test_a_linear_head_scores_every_class_by_its_embedding():
    rows = listing(classes())
    policy = embedding_policy(rows, generator=torch.Generator().manual_seed(3))
    table = policy.log_probs(policy.parameters)
    head = policy.parameters.reshape(3, 2)
    for image, (x, y) in enumerate(EMBEDDINGS):
        logits = [float(head[c, 0]) * x + float(head[c, 1]) * y for c in range(3)]
        total = math.log(sum(math.exp(logit) for logit in logits))
        close(table[image].tolist(), [logit - total for logit in logits])
        right = [float(rows.returns[row]) for row in rows.of_prompt(image)]
        assert right == [float(c == image % 3) for c in range(3)]


def test_the_lemma_is_the_difference_of_two_deployments():
    policy, other, _ = random_tables(2, 2)
    first, second = (objective_by_time(weary_user(x), x) for x in (policy, other))
    close(performative_difference(weary_user, policy, other), first - second)


def test_the_performative_gradient_moves_policy_and_world():
    logits = random_tables(2, 2)[0].log()
    fixed = weary_user(logits.softmax(dim=-1))
    split = performative_gradient(weary_user, logits)
    alone = finite_differences(lambda x: objective_by_time(fixed, x.softmax(dim=-1)), logits)
    both = finite_differences(lambda x: objective_by_time(weary_user(x.softmax(-1)), x.softmax(-1)), logits)
    close(split.policy, alone, rtol=1e-6, atol=1e-8)
    close(split.total, both, rtol=1e-6, atol=1e-8)
    assert float((both - alone).abs().max()) > 0.01


def nested_value(world: TabularWorld, policies: Tensor, state: int, temperature: float) -> float:
    """Regularised value of the nested policies from a state, by recursion over every path."""
    if not len(policies):
        return 0.0
    policy, value = policies[-1][state].tolist(), 0.0
    for a, chance in enumerate(policy):
        onward = sum(
            float(world.transition[state, a, z]) * nested_value(world, policies[:-1], z, temperature)
            for z in range(len(world.start))
        )
        bonus = temperature * math.log(chance * len(policy))
        value += chance * (float(world.reward[state, a]) - bonus + world.discount * onward)
    return value


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_nested_values_and_their_gap_are_sums_over_paths(temperature):
    world = loop()
    best = matryoshka_optimum(world, 3, temperature=temperature)
    for policies in (*random_tables(3, 3, 2), best.policies):
        walked = [nested_value(world, policies, s, temperature) for s in range(3)]
        close(regularised_values(world, policies, temperature=temperature).values[-1].tolist(), walked)
        gap = matryoshka_gap(world, policies, temperature=temperature)
        close(gap.tolist(), [top - own for top, own in zip(best.values[-1].tolist(), walked, strict=True)])
        assert float(gap.min()) > -1e-12


def test_one_step_is_the_boltzmann_policy_of_the_reward():
    best = matryoshka_optimum(loop(), 1, temperature=0.5)
    for s, row in enumerate(loop().reward.tolist()):
        weights = [math.exp(pay / 0.5) for pay in row]
        close(best.policies[0, s].tolist(), [w / sum(weights) for w in weights])
        close(float(best.values[0, s]), 0.5 * math.log(sum(weights) / 2))


@pytest.mark.parametrize(("horizon", "temperature"), [(0, 1.0), (3, 0.0)])
def test_no_horizon_and_no_temperature_are_refused(horizon, temperature):
    with pytest.raises(ScoregramError, match="horizon and temperature must be positive"):
        matryoshka_optimum(loop(), horizon, temperature=temperature)


@pytest.mark.parametrize("draws", [1, 2, 4])
def test_utilities_of_draws_by_enumeration(draws):
    world = prompts_with_answers((0.25, 0.75), 3)
    policy = random_tables(2, 3)[0]
    at_least_one = every = 0.0
    for x, answers in product(range(2), product(range(3), repeat=draws)):
        chance = (0.25, 0.75)[x] * math.prod(float(policy[x, a]) for a in answers)
        at_least_one += chance * (0 in answers)
        every += chance * (set(answers) == {0})
    visits = occupancy(world, policy)
    close(float(pass_at_k_utility(world, draws)(visits)), at_least_one)
    close(float(pass_every_utility(world, draws)(visits)), every)


def test_the_reward_of_pass_at_k_is_the_chance_that_the_others_fail():
    world = prompts_with_answers((0.25, 0.75), 3)
    policy = random_tables(2, 3)[0]
    paid = utility_reward(pass_at_k_utility(world, 4), occupancy(world, policy))
    close(paid[:, 0].tolist(), [4 * (1 - float(p)) ** 3 for p in policy[:, 0]])
    close(paid[:, 1:], torch.zeros(2, 2, dtype=torch.float64))


def test_the_gradient_of_a_utility_is_its_difference():
    world, policy = loop(), random_tables(3, 2)[0]

    def spread(visits: Tensor) -> Tensor:
        return visits.sqrt().sum()

    def walked(table: Tensor) -> float:
        return sum(math.sqrt(x) for row in visits_by_time(world, table) for x in row)

    close(utility_gradient(world, policy, spread), finite_differences(walked, policy), rtol=1e-6, atol=1e-8)


def test_stationarity_is_the_best_gain_of_a_deterministic_policy():
    policy = random_tables(3, 2)[0]
    gradient = direct_gradient(loop(), policy)
    gains = [
        sum(float(gradient[s, a]) - float(gradient[s] @ policy[s]) for s, a in enumerate(picked))
        for picked in product(range(2), repeat=3)
    ]
    close(stationarity(gradient, policy), max(gains))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_blind_class_by_hand(share):
    first = (0.5 * share * (1 - share), 0.5 * (1 - 2 * share))
    close((float(tabular_objective(ALTERNATION, blind_policy(share))), blind_slope(ALTERNATION, share)), first)
    second = (0.5 * (share**2 + 2 * (1 - share) ** 2), 0.5 * (2 * share - 4 * (1 - share)))
    close((float(tabular_objective(REPETITION, blind_policy(share))), blind_slope(REPETITION, share)), second)
    for world, (_, slope) in ((ALTERNATION, first), (REPETITION, second)):
        close(blind_stationarity(world, share), max(slope * (other - share) for other in (0.0, 1.0)))


def test_conservative_iteration_follows_the_slope():
    assert conservative_iteration(REPETITION, 0.5, rate=0.5, steps=1) == 0.25  # downhill from two thirds
    assert conservative_iteration(REPETITION, 0.8, rate=0.5, steps=1) == pytest.approx(0.9)
    assert conservative_iteration(ALTERNATION, 0.0, rate=0.5, steps=2) == 0.5 - 0.5 / 2 * 0.5
