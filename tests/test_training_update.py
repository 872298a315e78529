"""The gradient of a step against autograd on the loss itself, for every method; one pass against many."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.gram import measure_gram
from scoregram.objectives import OBJECTIVES
from scoregram.policy.rollouts import Rollouts
from scoregram.tasks import Problem
from scoregram.training.collecting import Collected, joined, mixed
from scoregram.training.credit import advantages_of, rollout_weights
from scoregram.training.methods import METHODS, Method
from scoregram.training.reference import Reference
from scoregram.training.update import Updater
from tests.cases import KeepDouble, build

PROMPTS, SIZE, TOKENS, LENGTH = 3, 4, 9, 6


@pytest.fixture(autouse=True)
def double_throughout() -> Any:
    with KeepDouble():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return build("Llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def collected(model) -> Collected:
    draw = torch.Generator().manual_seed(0)
    count = PROMPTS * SIZE
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=draw)
    place = torch.arange(TOKENS)
    mask = (place >= 3) & (place < 3 + lengths)
    zeros = torch.zeros(count, TOKENS)
    rollouts = Rollouts(
        input_ids=torch.randint(2, 60, (count, TOKENS), generator=draw),
        attention_mask=place < 3 + lengths,
        completion_mask=mask,
        log_probs=zeros,
        behaviour_log_probs=zeros,
        prompt_lengths=torch.full((count,), 3),
        finished=torch.ones(count, dtype=torch.bool),
    )
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    problems = [Problem(f"p{i}", "?", "!") for i in range(PROMPTS)]
    drawn = Collected(problems, rollouts, ["x"] * count, rewards, torch.ones(PROMPTS, SIZE, dtype=torch.bool))
    with KeepDouble(), torch.no_grad():  # what a sampler would have found
        return replace(drawn, rollouts=replace(rollouts, log_probs=plain_log_probs(model, drawn)))


def updater_for(model: Any, method: Method, **changes: Any) -> Updater:
    settings = {"temperature": 0.8, "length": LENGTH, "rollouts_per_pass": 0, "computing": nullcontext, "beta": 0.0}
    return Updater(model=model, method=method, kl="k3", **(settings | changes))


def plain_log_probs(model: Any, collected: Collected, temperature: float = 0.8) -> Tensor:
    """Log-probabilities by the definition: all logits, one softmax."""
    ids = collected.rollouts.input_ids
    logits = model(input_ids=ids, attention_mask=collected.rollouts.attention_mask.long()).logits / temperature
    chosen = logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0)) * collected.rollouts.completion_mask


def taken(model: Any) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat


def gradient_by_definition(model: Any, collected: Collected, method: Method, greedy: Tensor) -> Tensor:
    """Autograd on the method's loss, the old policy being the same one."""
    rollouts = collected.rollouts
    rows = measure_gram(
        model, rollouts.input_ids, rollouts.completion_mask, rollouts.attention_mask, temperature=0.8
    ).matrix.diagonal()
    given = {
        "lengths": collected.lengths,
        "outcomes": collected.rewards,
        "greedy_rewards": greedy,
        "score_energies": rows.view(PROMPTS, SIZE),
    }
    inputs: Any = {name: given[name] for name in ESTIMATORS[method.estimator].needs}
    advantages = estimate(method.estimator, collected.rewards, **inputs).flatten()
    log_probs = plain_log_probs(model, collected)
    known = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "advantages": advantages,
        "mask": rollouts.completion_mask,
        "length": LENGTH,
    }
    row = OBJECTIVES[method.objective]
    row.fn(**{name: known[name] for name in row.needs}).backward()
    return taken(model)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_gradient_is_that_of_the_loss(model, collected, name, measure):
    method, greedy = METHODS[name], torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    expected = gradient_by_definition(model, collected, method, greedy)
    gradient = updater_for(model, method).first(collected, measure=measure, greedy=greedy, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    measured = gradient.measured
    assert (measured is not None) == (measure or "optimal" in name)
    if measured is not None:
        w = gradient.weights.double()
        torch.testing.assert_close(w @ measured.matrix @ w, expected.square().sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["rloo", "dapo", "optimal", "dr-grpo"])
@pytest.mark.parametrize("measure", [True, False])
def test_passes_of_whole_groups_add_up(model, collected, name, measure):
    one = updater_for(model, METHODS[name])
    whole = one.first(collected, measure=measure, greedy=None, reference=None)
    expected = taken(model)
    parts = replace(one, rollouts_per_pass=SIZE).first(collected, measure=measure, greedy=None, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts.log_probs, whole.log_probs)
    if parts.measured is not None and whole.measured is not None:
        known = parts.measured.matrix.isfinite()
        assert int(known.sum()) == PROMPTS * SIZE**2
        torch.testing.assert_close(parts.measured.matrix[known], whole.measured.matrix[known])


@pytest.mark.parametrize("name", ["rloo", "optimal", "optimal-loo"])
def test_blocks_within_groups_suffice_for_the_update(model, collected, name):
    one = updater_for(model, METHODS[name])
    whole = one.first(collected, measure=True, greedy=None, reference=None)
    expected = taken(model)
    blocks = replace(one, group_size=SIZE).first(collected, measure=True, greedy=None, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    assert blocks.measured is not None and whole.measured is not None
    known = blocks.measured.matrix.isfinite()
    assert int(known.sum()) == PROMPTS * SIZE**2
    torch.testing.assert_close(blocks.measured.matrix[known], whole.measured.matrix[known])


@pytest.mark.parametrize("passes", [0, SIZE])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "tic"])
def test_a_second_update_follows_the_ratio(model, collected, name, passes):
    method = METHODS[name]
    updater = updater_for(model, method, rollouts_per_pass=passes)
    before = updater.first(collected, measure=False, greedy=None, reference=None)
    model.zero_grad(set_to_none=True)
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    log_probs = plain_log_probs(model, collected)
    known = {
        "log_probs": log_probs,
        "old_log_probs": before.log_probs,
        "advantages": before.advantages.flatten(),
        "mask": collected.rollouts.completion_mask,
        "length": LENGTH,
    }
    row = OBJECTIVES[method.objective]
    expected_loss = row.fn(**{key: known[key] for key in row.needs})
    expected_loss.backward()
    expected = taken(model)
    loss = updater.again(collected, before, reference=None)
    found = taken(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), saved, strict=True):
            parameter.copy_(value)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("passes", [0, SIZE])
def test_a_kl_term_pulls_towards_the_reference(model, collected, passes):
    method = METHODS["rloo"]
    updater = updater_for(model, method, beta=0.3, rollouts_per_pass=passes)
    plain_log_probs(model, collected)
    reference = Reference(updater).log_probs(collected)
    torch.testing.assert_close(reference, plain_log_probs(model, collected).detach())
    shifted = reference - 0.1 * collected.rollouts.completion_mask
    log_probs = plain_log_probs(model, collected)
    advantages = advantages_of("rloo", collected).flatten()
    mask = collected.rollouts.completion_mask
    distance = shifted - log_probs
    kl = ((distance.exp() - 1 - distance) * mask).sum(1) / mask.sum(1)
    (-(advantages * log_probs.sum(1)).mean() + 0.3 * kl.mean()).backward()
    expected = taken(model)
    gradient = updater.first(collected, measure=True, greedy=None, reference=shifted)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    assert gradient.measured is not None


def test_weights_of_rollouts_are_those_of_the_table(collected):
    mask = collected.rollouts.completion_mask
    advantages = torch.randn(PROMPTS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    lengths, count = mask.sum(1), PROMPTS * SIZE
    flat = advantages.flatten()
    formulas = {
        "reinforce": flat / count,
        "grpo": flat / (count * lengths),
        "dr_grpo": flat / (count * LENGTH),
        "dapo": flat / lengths.sum(),
        "cispo": flat / lengths.sum(),
    }
    for objective, expected in formulas.items():
        torch.testing.assert_close(rollout_weights(objective, advantages, mask, length=LENGTH), expected)


def test_groups_can_be_picked_and_joined(collected):
    alive = mixed(collected)
    assert alive.tolist() == [True, False, True]
    kept = collected.kept(alive)
    assert [problem.id for problem in kept.problems] == ["p0", "p2"]
    assert torch.equal(kept.rewards, collected.rewards[alive])
    again = joined([collected.kept(~alive), kept], pad_id=0)
    order = torch.cat([torch.arange(4, 8), torch.arange(0, 4), torch.arange(8, 12)])
    for row, place in enumerate(order.tolist()):
        real = collected.rollouts.attention_mask[place]
        assert torch.equal(
            again.rollouts.input_ids[row][again.rollouts.attention_mask[row]],
            collected.rollouts.input_ids[place][real],
        )
        assert int(again.rollouts.completion_mask[row].sum()) == int(collected.rollouts.completion_mask[place].sum())
