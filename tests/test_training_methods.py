"""Every training method against its definition: its first update, and a further one with ratios beyond the clips."""

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scoregram.policy import Policy, load_policy
from scoregram.rollouts import Rollouts
from scoregram.tasks import load_task
from scoregram.training.inputs import HeadFeatures, HeadGrams, LogitEnergies, ScoreEnergies, TokenScores, input_sources
from scoregram.training.methods import METHODS
from scoregram.training.update import Updater
from tests.cases import KeepDouble, build
from tests.method_definitions import DEFINITIONS, Batch, above_mean, generalised, standardised
from tests.naive import score_rows
from tests.training_cases import config_for, save_policy
from tests.turn_cases import two_turns

SIZE, TOKENS, LONGEST, PROMPT, TEMPERATURE, BETA = 4, 11, 8, 3, 0.8, 0.3
REWARDS = [
    *(1.0, 0.0, 0.25, 1.0),
    *(0.5, 0.502, 0.5, 0.501),  # a spread at which the eps of a deviation counts
    *(1.0, 1.0, 1.0, 1.0),
    *(0.0, 0.0, 0.75, 0.0),  # the others of the third rollout are equal
]
TURN_LENGTHS = [[2, 3], [1], [3, 1], [2, 2], [1, 1], [2], [1], [3]]
TURN_REWARDS = [[0.5, 1.0], [0.25], [0.0, 1.5], [0.5, 0.0], [0.0, 2.0], [0.75], [0.75], [0.0]]
OUTCOMES = [1.0, 0.0, 1.0, 0.0, 2.0, 0.5, 0.5, 0.0]
OBSERVATIONS = [["p", "x"], ["p"], ["p", "x"], ["p", "3"], ["q", "4"], ["q"], ["q"], ["q"]]
"""Rollouts 0 and 2 read the same text before their second turns."""
GEOMETRY: dict[str, list[type]] = {
    "optimal-token": [LogitEnergies],
    "optimal-token-exact": [ScoreEnergies],
    "optimal-token-loo": [ScoreEnergies],
    "salt": [HeadGrams],
    "salt-exact": [],
    "g2rl": [HeadGrams],
    "g2rl-exact": [],
    "delta": [HeadFeatures],
    "delta-exact": [TokenScores],
}
"""Sources of gradients: a proxy or the exact ones; the exact Gram of a group comes from the update itself."""


@pytest.fixture(autouse=True)
def double_throughout() -> Any:
    with KeepDouble():
        yield


def with_log_probs(model: Any, rollouts: Rollouts) -> Rollouts:
    """With the log-probabilities that a sampler would have found."""
    with KeepDouble(), torch.no_grad():
        return replace(rollouts, log_probs=log_probs_of(model, rollouts))


def log_probs_of(model: Any, rollouts: Rollouts) -> Tensor:
    """`(N, T)` by the definition: all logits, one softmax."""
    ids = rollouts.input_ids
    logits = model(input_ids=ids, attention_mask=rollouts.attention_mask.long()).logits / TEMPERATURE
    chosen = logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0)) * rollouts.completion_mask


@pytest.fixture(scope="module")
def model() -> Any:
    return build("Llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def moved(model) -> Any:
    """The policy after an update so large that ratios of tokens lie on both sides of every clip."""
    moved, draw = copy.deepcopy(model), torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    return moved


@pytest.fixture(scope="module")
def one_turn(model) -> Rollouts:
    draw, count, place = torch.Generator().manual_seed(0), len(REWARDS), torch.arange(TOKENS)
    lengths = torch.randint(1, LONGEST + 1, (count, 1), generator=draw)
    ids, groups = torch.randint(2, 60, (count, TOKENS), generator=draw), torch.arange(count) // SIZE
    ids[:, :PROMPT] = ids[SIZE * groups, :PROMPT]  # the rollouts of a group read one prompt
    return with_log_probs(
        model,
        Rollouts(
            input_ids=ids,
            attention_mask=place < PROMPT + lengths,
            completion_mask=(place >= PROMPT) & (place < PROMPT + lengths),
            prompt_lengths=torch.full((count,), PROMPT),
            group_ids=groups,
            rewards=torch.tensor(REWARDS, dtype=torch.float64),
            finished=torch.ones(count, dtype=torch.bool),
        ),
    )


@pytest.fixture(scope="module")
def some_turns(model) -> Rollouts:
    """Two groups of rollouts with one or two turns; texts before a turn are equal where `OBSERVATIONS` are."""
    drawn = two_turns(TURN_LENGTHS, prompt=PROMPT, group_ids=torch.arange(len(TURN_LENGTHS)) // SIZE)
    assert drawn.turn_ids is not None
    ids, rewards = drawn.input_ids.clone(), torch.zeros(drawn.input_ids.shape, dtype=torch.float64)
    ids[:4, :PROMPT], ids[4:, :PROMPT] = torch.tensor([5, 6, 7]), torch.tensor([8, 6, 7])
    for row in (0, 2):
        end = PROMPT + TURN_LENGTHS[row][0]
        ids[row, end : end + 2] = torch.tensor([9, 9])
    for row, paid in enumerate(TURN_REWARDS):
        for turn, reward in enumerate(paid):
            own = drawn.completion_mask[row] & (drawn.turn_ids[row] == turn)
            rewards[row, int(own.nonzero()[-1])] = reward
    outcomes = torch.tensor(OUTCOMES, dtype=torch.float64)
    parts = {"turns": rewards.sum(1) - outcomes, "outcome": outcomes}
    paid = replace(drawn, input_ids=ids, token_rewards=rewards, rewards=rewards.sum(1), reward_parts=parts)
    return with_log_probs(model, paid)


@pytest.fixture(scope="module")
def inputs(one_turn) -> dict[str, Tensor]:
    """Arbitrary inputs of every kind, as the sources of the trainer would supply them."""
    draw, mask = torch.Generator().manual_seed(5), one_turn.completion_mask
    uniform = torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    ends = is_last | (mask & (uniform > 0.6))
    proxies = torch.randn(len(mask) // SIZE, SIZE, 3, generator=draw, dtype=torch.float64)
    return {
        "greedy_rewards": torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64),
        "baselines": torch.tensor([0.3, 0.1, 0.6, 0.2], dtype=torch.float64),
        "best_of": torch.tensor([2, 3, 4, 2]),
        "values": uniform,
        "prefix_values": uniform,
        "segment_starts": mask & (uniform > 0.5),
        "path_energies": uniform.cumsum(1) * mask,
        "step_ends": ends,
        "token_rewards": torch.where(ends, (uniform > 0.8).double(), 0.0),
        "token_features": torch.randn(*mask.shape, 3, generator=draw, dtype=torch.float64),
        "score_grams": proxies @ proxies.mT,
    }


@pytest.fixture(scope="module")
def reference(one_turn) -> Tensor:
    """`(N, T)` log-probabilities of some other policy."""
    drawn = torch.rand(one_turn.input_ids.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return -2 * drawn * one_turn.completion_mask


@pytest.fixture(scope="module")
def scores(model, one_turn) -> Tensor:
    """`(N, D)`, one backward pass for each rollout."""
    with KeepDouble():
        return score_rows(
            model, one_turn.input_ids, one_turn.completion_mask, one_turn.attention_mask, temperature=TEMPERATURE
        )


@pytest.fixture(scope="module")
def batches(one_turn, some_turns, inputs, reference, scores) -> dict[bool, Batch]:
    """The rollouts as lists: those of one turn, and under `True` those of several."""
    places = [[row.nonzero().flatten().tolist() for row in r.completion_mask] for r in (one_turn, some_turns)]
    single = Batch(
        group_size=SIZE,
        rewards=REWARDS,
        places=places[0],
        longest=LONGEST,
        inputs=inputs,
        energies=scores.square().sum(1).tolist(),
        grams=[rows @ rows.T for rows in scores.split(SIZE)],
        reference=reference,
        beta=BETA,
    )
    several = Batch(
        group_size=SIZE,
        rewards=[sum(paid) for paid in TURN_REWARDS],
        places=places[1],
        longest=LONGEST,
        inputs={},
        turn_rewards=TURN_REWARDS,
        turn_lengths=TURN_LENGTHS,
        observations=OBSERVATIONS,
        outcomes=OUTCOMES,
    )
    return {False: single, True: several}


def updater_of(name: str, model: Any) -> Updater:
    settings = {"temperature": TEMPERATURE, "length": LONGEST, "rollouts_per_pass": 0, "computing": nullcontext}
    return Updater(model=model, method=METHODS[name], kl="k3", beta=DEFINITIONS[name].beta, **settings)


def given_to(name: str, inputs: Mapping[str, Tensor], reference: Tensor) -> dict[str, Any]:
    """What the trainer hands to the first update besides the rollouts."""
    definition = DEFINITIONS[name]
    given = {key: inputs[key] for key in definition.inputs}
    return {"measure": False, "inputs": given, "reference": reference if definition.beta else None}


@dataclass(frozen=True)
class Case:
    """The rollouts of a method, as the trainer has them and as lists, with `log π` of the policy before and after."""

    rollouts: Rollouts
    batch: Batch
    log_probs: Mapping[str, Tensor]

    def update(self, name: str, policy: str, model: Any) -> tuple[float, Tensor]:
        """Loss and flat gradient of the definition of a method, at one of the two policies."""
        assert self.rollouts.log_probs is not None
        loss = DEFINITIONS[name].loss(self.batch, self.log_probs[policy], self.rollouts.log_probs)
        parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return float(loss.detach()), torch.cat([part.flatten() for part in parts])


@pytest.fixture(scope="module")
def cases(model, moved, one_turn, some_turns, batches) -> dict[bool, Case]:
    """The rollouts of one turn, and under `True` those of several."""
    with KeepDouble():
        return {
            several: Case(
                rollouts,
                batches[several],
                {"first": log_probs_of(model, rollouts), "moved": log_probs_of(moved, rollouts)},
            )
            for several, rollouts in ((False, one_turn), (True, some_turns))
        }


def taken_gradient(model: Any) -> Tensor:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat


def test_every_method_has_a_definition():
    assert set(DEFINITIONS) == set(METHODS)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_the_first_update_is_that_of_the_definition(model, cases, inputs, reference, name):
    case = cases[DEFINITIONS[name].turns]
    expected_loss, expected = case.update(name, "first", model)
    assert float(expected.norm()) > 1e-3
    _, loss = updater_of(name, model).first(1, case.rollouts, **given_to(name, inputs, reference))
    torch.testing.assert_close(taken_gradient(model), expected, rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_a_further_update_is_that_of_the_definition(model, moved, cases, inputs, reference, name):
    """The pair of estimator and loss: losses with one average agree in the first update, where all ratios are 1."""
    case, given = cases[DEFINITIONS[name].turns], given_to(name, inputs, reference)
    step, _ = updater_of(name, model).first(1, case.rollouts, **given)
    model.zero_grad(set_to_none=True)
    expected_loss, expected = case.update(name, "moved", moved)
    assert float(expected.norm()) > 1e-3
    loss, _ = updater_of(name, moved).further_update(step, reference=given["reference"])
    torch.testing.assert_close(taken_gradient(moved), expected, rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("credit", [standardised(), generalised(0.95)], ids=["of rollouts", "of tokens"])
def test_the_further_update_has_ratios_on_both_sides_of_every_clip(moved, one_turn, batches, credit):
    """Else two losses that differ in a clip alone would pass for each other."""
    batch, signed = batches[False], []
    with torch.no_grad():
        log_ratios = log_probs_of(moved, one_turn) - one_turn.log_probs
    for i, places in enumerate(batch.places):
        advantages = credit(batch, i)
        of_tokens = advantages if isinstance(advantages, list) else [advantages] * len(places)
        signed += zip(of_tokens, log_ratios[i, places].exp().tolist(), strict=True)
    better = [ratio for advantage, ratio in signed if advantage > 0]
    worse = [ratio for advantage, ratio in signed if advantage < 0]
    for low, high in ((0.8, 1.2), (1.2, 1.28), (1.28, math.inf)):
        assert any(low < ratio < high for ratio in better)
    for low, high in ((0.0, 0.8), (0.8, 1.2), (1.28, 3.0), (3.0, math.inf)):
        assert any(low < ratio < high for ratio in worse)


def test_the_further_update_clips_some_rollouts_and_keeps_others(moved, one_turn, batches):
    with torch.no_grad():
        log_ratios = log_probs_of(moved, one_turn) - one_turn.log_probs
    advantages = torch.tensor([above_mean(batches[False], i) for i in range(len(REWARDS))])
    better, worse = advantages > 0, advantages < 0
    product, root = log_ratios.sum(1).exp(), (log_ratios.sum(1) / one_turn.completion_mask.sum(1)).exp()
    assert bool(((product > 1.28) & (better | worse)).any() and ((product < 1.28) & (better | worse)).any())  # tic
    assert bool(((root > 1.001) & better).any() and ((root < 0.999) & better).any())  # gspo
    assert bool(((root > 1.001) & worse).any() and ((root < 0.999) & worse).any())


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    folder = save_policy(tmp_path_factory.mktemp("policy"))
    return load_policy(config_for(folder, folder).policy)


@pytest.mark.parametrize("name", sorted(GEOMETRY))
def test_gradients_are_a_proxy_or_exact_as_the_method_says(policy, name):
    config = config_for(Path("model"), Path("run"), method=name)
    sources = input_sources(config.chosen_method, config, policy, load_task("arithmetic:3"))
    assert [type(source) for source in sources] == GEOMETRY[name]
