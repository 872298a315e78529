"""The critic: what its values depend on, what it learns, and what it leaves alone."""

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from scoregram.checks import NotFiniteError, ScoregramError
from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.critic import Critic, ValueModel, clipped_errors, value_loss
from scoregram.training.inputs import input_sources
from scoregram.training.loop import train
from scoregram.training.preparation import bytes_for_checkpoint
from tests.training_cases import config_for, save_policy, without_times

TASK = load_task("arithmetic:3", seed=0)
PROBLEMS = list(TASK.train[:3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(folder) -> Policy:
    return load_policy(PolicyConfig(model=str(folder), device="cpu", prompt="plain"), TASK)


def critic_for(policy: Policy, folder: Path, *, prompts_only: bool = False, **changes: Any) -> Critic:
    config = config_for(folder, Path("nowhere"), method="ppo", **changes)
    return Critic(config, policy, prompts_only=prompts_only)


def sampled(policy: Policy) -> Rollouts:
    config = config_for(Path("policy"), Path("nowhere"))
    stream = seeded_generator(3, "rollouts", 1)
    sampling = config.sampling(TASK.max_new_tokens)
    rollouts = collect(policy, TASK, PROBLEMS, group_size=4, sampling=sampling, generator=stream)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return replace(rollouts, rewards=rewards)


def with_random_head(model: ValueModel) -> None:
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def test_the_first_values_are_zero_and_draw_no_random_numbers(policy, folder):
    before = torch.get_rng_state()
    critic = critic_for(policy, folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert not critic.inputs(1, sampled(policy), PROBLEMS)["values"].any()


@pytest.mark.parametrize("kind", ["copy", "head"])
def test_a_value_depends_on_the_tokens_before_it_alone(policy, folder, kind):
    critic, rollouts = critic_for(policy, folder, critic=kind), sampled(policy)
    with_random_head(critic.model)
    place = int(rollouts.prompt_lengths[0]) + 2
    ids = rollouts.input_ids.clone()
    ids[:, place:] = (ids[:, place:] + 1) % policy.model.config.vocab_size
    one, other = critic.values(rollouts), critic.values(replace(rollouts, input_ids=ids))
    torch.testing.assert_close(one[:, : place + 1], other[:, : place + 1])
    assert not torch.allclose(one[:, place + 1], other[:, place + 1])


def test_the_value_of_a_prompt_is_that_before_its_first_completion_token(policy, folder):
    critic, rollouts = critic_for(policy, folder, prompts_only=True), sampled(policy)
    with_random_head(critic.model)
    for place, found in enumerate(critic.inputs(1, rollouts, PROBLEMS)["baselines"].tolist()):
        prompt = torch.tensor([policy.encode_prompt(TASK.prompt(PROBLEMS[place]))])
        with torch.no_grad():
            hidden = policy.model.model(input_ids=prompt).last_hidden_state[0, -1]
            expected = float(critic.model.head(hidden))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["copy", "head"])
@pytest.mark.parametrize("per_pass", [0, 4])
@pytest.mark.parametrize("prompts_only", [True, False])
def test_a_step_follows_the_gradient_of_the_mean_loss(policy, folder, kind, per_pass, prompts_only):
    critic = critic_for(
        policy, folder, critic=kind, micro_batch_size=per_pass, max_grad_norm=0.0, prompts_only=prompts_only
    )
    rollouts = sampled(policy)
    rollouts.rewards[5] = math.nan
    with_random_head(critic.model)
    twin = copy.deepcopy(critic.model)
    twin._shared = critic.model._shared
    critic.optimizer = torch.optim.SGD(critic.model.parameters(), lr=1.0)  # Adam would show only signs
    critic.inputs(1, rollouts, PROBLEMS)
    critic.learn(rollouts)

    total, count = torch.zeros(()), 0
    values = twin(rollouts.input_ids, rollouts.attention_mask)
    for i in range(rollouts.count):
        tokens = rollouts.completion_mask[i].nonzero().flatten().tolist()[: 1 if prompts_only else None]
        if math.isnan(float(rollouts.rewards[i])):
            continue
        for t in tokens:
            total, count = total + (values[i, t] - rollouts.rewards[i].float()).square() / 2, count + 1
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    (total / count).backward()
    optimizer.step()
    for (name, one), other in zip(critic.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["copy", "head"])
def test_learning_leaves_the_policy_alone(policy, folder, kind):
    critic, rollouts = critic_for(policy, folder, critic=kind), sampled(policy)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    critic.inputs(1, rollouts, PROBLEMS)
    critic.learn(rollouts)
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_critic_whose_gradient_is_not_finite_stays_as_it_was(policy, folder):
    critic, rollouts = critic_for(policy, folder), sampled(policy)
    critic.inputs(1, rollouts, PROBLEMS)
    before = {name: value.clone() for name, value in critic.model.state_dict().items()}
    with pytest.raises(
        NotFiniteError, match=r"gradient of the critic must be finite, got .* Lower --critic-learning-r"
    ):
        critic.learn(replace(rollouts, rewards=torch.full((12,), 1e30, dtype=torch.float64)))
    assert all(torch.equal(before[name], value) for name, value in critic.model.state_dict().items())
    assert all(parameter.grad is None for parameter in critic.model.parameters())


@pytest.mark.parametrize("policy_of_failures", ["skip", "stop"])
def test_a_run_says_that_its_critic_failed_and_keeps_the_update_of_the_policy(
    folder, tmp_path, monkeypatch, policy_of_failures
):
    real = Critic.learn

    def learn(critic: Critic, rollouts: Rollouts) -> dict[str, float]:
        broken = rollouts if len(learnt) != 1 else replace(rollouts, rewards=rollouts.rewards + 1e30)
        learnt.append(1)
        return real(critic, broken)

    learnt: list[int] = []
    monkeypatch.setattr(Critic, "learn", learn)
    said = Console(file=io.StringIO(), width=300)
    config = config_for(folder, tmp_path / "run", method="ppo", steps=4, on_not_finite=policy_of_failures)
    if policy_of_failures == "stop":
        with pytest.raises(NotFiniteError, match="step 2: train: the gradient of the critic must be finite"):
            train(config, console=said)
        return
    train(config, console=said)
    assert "step 2 ended after 1 of 1 updates: train: the gradient of the critic" in said.file.getvalue()  # type: ignore[union-attr]
    lines = open_run(tmp_path / "run").metrics()
    assert [line["step"] for line in lines if "skipped" in line] == []
    assert ["credit/value_loss" in line for line in lines if line["step"]] == [True, False, True, True]


def test_a_critic_learns_the_returns_of_fixed_rollouts(policy, folder):
    critic, rollouts = critic_for(policy, folder, critic_updates=5, critic_clip=0.0), sampled(policy)
    rewards = torch.where(torch.arange(12) % 4 < 2, 1.0, 0.0).double()
    told = []
    for number in range(60):
        critic.inputs(number, replace(rollouts, rewards=rewards), PROBLEMS)
        told.append(critic.learn(replace(rollouts, rewards=rewards))["credit/explained_variance"])
    assert told[0] == pytest.approx(0.0)
    assert told[-1] > 0.3, "prompts are the same for right and wrong rollouts, completions differ"


@pytest.mark.parametrize(
    ("value", "old", "ret", "expected"),
    [(0.5, 0.5, 1.0, 0.125), (0.9, 0.5, 1.0, 0.045), (0.6, 0.5, 1.0, 0.08), (0.0, 0.5, 1.0, 0.5), (1.0, 0.5, 0.0, 0.5)],
)
def test_the_clipped_loss_takes_the_larger_error(value, old, ret, expected):
    """With `c = 0.2`: `V = 0.9` counts as 0.7, which is further from 1."""
    found = clipped_errors(torch.tensor(value), torch.tensor(old), torch.tensor(ret), 0.2)
    assert float(found) == pytest.approx(expected)


def test_explained_variance_is_that_of_numpy():
    generator = torch.Generator().manual_seed(0)
    values, returns = (torch.randn(5, 7, generator=generator) for _ in range(2))
    counted = torch.rand(5, 7, generator=generator) > 0.4
    v, g = values[counted].double().numpy(), returns[counted].double().numpy()
    found = value_loss(values, values, returns, counted, 0.2)
    assert found.explained_variance == pytest.approx(1 - np.var(g - v) / np.var(g))
    assert found.loss == pytest.approx(np.mean((v - g) ** 2) / 2)
    assert math.isnan(value_loss(values, values, torch.ones(5, 7), counted, 0.2).explained_variance)
    assert math.isnan(value_loss(values, values, returns, torch.zeros(5, 7).bool(), 0.2).loss)


@pytest.mark.parametrize(
    "changes",
    [{"method": "ppo"}, {"method": "reinforce-critic", "critic": "head"}, {"method": "ppo", "lora_rank": 2}],
)
def test_a_resumed_run_continues_the_critic(folder, tmp_path, changes):
    train(config_for(folder, tmp_path / "whole", steps=4, **changes))
    train(config_for(folder, tmp_path / "parts", steps=2, **changes))
    train(config_for(folder, tmp_path / "parts", steps=4, resume=True, **changes))
    whole, parts = (without_times(open_run(tmp_path / name).metrics()) for name in ("whole", "parts"))
    assert whole == parts
    assert whole[-1]["credit/explained_variance"] != whole[1]["credit/explained_variance"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_rank": 2}, {"method": "ppo"}, {"method": "ppo", "critic": "head"}, {"method": "ppo", "lora_rank": 2}],
)
def test_the_space_asked_for_a_checkpoint_is_that_of_its_tensors(folder, tmp_path, changes):
    """Adapters without their base, and the critic with its optimiser."""
    config = config_for(folder, tmp_path / "run", steps=1, eval_every=0, **changes)
    policy = load_policy(config.policy, TASK)
    asked = bytes_for_checkpoint(policy, input_sources(config.chosen_method, config, policy, TASK))
    train(config)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    (weights,) = (checkpoint / "model").glob("*.safetensors")
    found = [*load_file(weights).values(), *tensors_in(state)]
    scalars = sum(value.numel() * value.element_size() for value in found if value.ndim == 0)  # steps of AdamW
    assert asked == sum(value.numel() * value.element_size() for value in found) - scalars


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inside for tensor in tensors_in(part)]


def test_a_critic_of_a_policy_with_adapters_trains_adapters(folder):
    config = config_for(folder, Path("unused"), method="ppo", lora_rank=2)
    policy = load_policy(config.policy, TASK)
    critic = Critic(config, policy, prompts_only=False)
    trained = {name for name, parameter in critic.model.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if "lora_" in name}
    assert adapters and trained - adapters == {"head.weight", "head.bias"} and critic.state()["model"].keys() == trained


def test_the_policy_waits_while_the_critic_warms_up(folder, tmp_path):
    train(config_for(folder, tmp_path / "run", method="ppo", steps=2, critic_warmup=2, eval_every=1))
    metrics = list(open_run(tmp_path / "run").metrics())
    assert [line["learning_rate"] for line in metrics[1:]] == [0.0, 0.0]
    assert metrics[2]["credit/value_loss"] != metrics[1]["credit/value_loss"]
    start = load_policy(PolicyConfig(model=str(folder), device="cpu", prompt="plain"), TASK).model.state_dict()
    latest = open_run(tmp_path / "run").latest_checkpoint
    assert latest is not None
    end = load_policy(PolicyConfig(model=str(latest[1] / "model"), device="cpu", prompt="plain"), TASK).model
    assert all(torch.equal(start[name], value) for name, value in end.state_dict().items())


def test_a_model_without_hidden_layers_is_refused():
    with pytest.raises(ScoregramError, match="a critic needs a transformers model with hidden layers, got Linear"):
        ValueModel(nn.Linear(2, 2), shares_policy=False)
