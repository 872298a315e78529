"""Credit for turns in the trainer: against loops, against enumeration, and in real runs."""

import itertools
import statistics
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scoregram.checks import ScoregramError
from scoregram.objectives import OBJECTIVES
from scoregram.policy import load_policy
from scoregram.reading import turn_scalars
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.credit import credited_step, turn_advantages_of, turn_anchors
from scoregram.training.critic import rewards_to_come
from scoregram.training.loop import train
from scoregram.training.methods import METHODS, Method
from scoregram.training.supervised import demonstration, warm_start, write_warm_start
from scoregram.training.update import Updater
from tests.cases import KeepDouble, build
from tests.training_cases import config_for, save_policy, without_times
from tests.turn_cases import two_turns

TURN_METHODS = ("turn-mean", "turn-rloo", "mt-grpo", "gigpo", "tl-grpo")
LENGTHS = [[2, 3], [1], [3, 1], [2, 2], [1, 1], [2], [1], [3]]
PAID = [[0.5, 1.0], [0.25], [0.0, 1.5], [0.5, 0.0], [0.0, 2.0], [0.75], [0.75], [0.0]]
OUTCOMES = [1.0, 0.0, 1.0, 0.0, 2.0, 0.5, 0.5, 0.0]
"""The reward of a last turn includes the outcome."""


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    """Two groups of four, of one or two turns; the observations of rollouts 0 and 2 are equal, so are those of 3, 4."""
    drawn = two_turns(LENGTHS, group_ids=torch.arange(8) // 4, prompt_names=["a", "b"])
    ids = drawn.input_ids.clone()
    ids[:4, :3], ids[4:, :3] = torch.tensor([5, 6, 7]), torch.tensor([8, 6, 7])
    for row in (0, 2):
        ids[row, 3 + LENGTHS[row][0] : 5 + LENGTHS[row][0]] = torch.tensor([9, 9])
    rewards = torch.zeros(ids.shape, dtype=torch.float64)
    for row, paid in enumerate(PAID):
        for turn, reward in enumerate(paid):
            own = drawn.completion_mask[row] & (drawn.turn_ids[row] == turn)  # type: ignore[index]
            rewards[row, int(own.nonzero()[-1])] = reward
    outcomes = torch.tensor(OUTCOMES, dtype=torch.float64)
    return Rollouts(
        **{name: getattr(drawn, name) for name in drawn.__dataclass_fields__}
        | {
            "input_ids": ids,
            "token_rewards": rewards,
            "rewards": rewards.sum(1),
            "reward_parts": {"turns": rewards.sum(1) - outcomes, "outcome": outcomes},
        }
    )


# Against loops


def standard(value: float, among: list[float]) -> float:
    spread = statistics.stdev(among) if len(among) > 1 else 0.0
    return (value - statistics.fmean(among)) / spread if spread else 0.0


def credit_by_hand(estimator: str) -> list[list[float]]:
    """The advantage of every turn of `PAID`, turn by turn."""
    credit = []
    for i, paid in enumerate(PAID):
        group = range(4 * (i // 4), 4 * (i // 4) + 4)
        row = []
        for h in range(len(paid)):
            reached = [j for j in group if len(PAID[j]) > h]
            to_go = {j: sum(PAID[j][h:]) for j in reached}
            others = [to_go[j] for j in reached if j != i]
            if estimator == "turn-mean":
                row.append(to_go[i] - statistics.fmean(to_go.values()))
            elif estimator == "turn-rloo":
                row.append(to_go[i] - (statistics.fmean(others) if others else 0.0))
            elif estimator == "same-state":
                row.append(standard(paid[h], [PAID[j][h] for j in reached]))
            elif estimator == "mt-grpo":
                bare = {j: PAID[j][h] - (OUTCOMES[j] if h == len(PAID[j]) - 1 else 0.0) for j in reached}
                row.append(standard(bare[i], list(bare.values())) + standard(OUTCOMES[i], [OUTCOMES[j] for j in group]))
            else:
                assert estimator == "gigpo"
                # States: the prompt (first turn), the equal observations of rollouts 0 and 2, every other one alone.
                same = reached if h == 0 else [j for j in reached if j == i or {i, j} == {0, 2}]
                whole = [sum(PAID[j]) for j in group]
                row.append(standard(sum(paid), whole) + standard(to_go[i], [to_go[j] for j in same]))
        credit.append(row)
    return credit


@pytest.mark.parametrize("name", TURN_METHODS)
def test_every_token_of_a_turn_gets_the_credit_of_the_turn(rollouts, name):
    estimator = METHODS[name].estimator
    found = turn_advantages_of(estimator, rollouts)
    expected = torch.zeros_like(found)
    for row, credit in enumerate(credit_by_hand(estimator)):
        for turn, value in enumerate(credit):
            expected[row][rollouts.completion_mask[row] & (rollouts.turn_ids[row] == turn)] = value
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_anchors_are_the_texts_before_a_turn(rollouts):
    anchors = turn_anchors(rollouts)
    assert anchors[:4, 0].unique().numel() == 1 and anchors[4:, 0].unique().numel() == 1
    assert int(anchors[0, 0]) != int(anchors[4, 0])
    later = anchors[:, 1].tolist()
    assert later[0] == later[2] and len({later[0], later[3], later[4]}) == 3
    assert [later[row] for row in (1, 5, 6, 7)] == [0] * 4


def test_a_rollout_without_a_reward_is_left_out(rollouts):
    rewards = rollouts.rewards.clone()
    rewards[[0, 4, 5, 6]] = torch.nan
    partial = replace(rollouts, rewards=rewards)
    for name in TURN_METHODS:
        found = turn_advantages_of(METHODS[name].estimator, partial)
        assert not bool(found[[0, 4, 5, 6, 7]].any())  # one judged rollout is left in the second group
    kept = turn_advantages_of("turn-mean", partial)[1:4]
    to_go = [sum(PAID[row]) for row in (1, 2, 3)]
    assert kept[0, 3].item() == pytest.approx(to_go[0] - statistics.fmean(to_go))


@pytest.mark.parametrize("name", TURN_METHODS)
def test_a_rollout_of_one_turn_is_credited_as_a_whole(name):
    lengths, rewards = (2, 1, 3, 2, 1, 1), torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    single = two_turns([[length] for length in lengths], group_ids=torch.arange(6) // 3, rewards=rewards)
    ids = single.input_ids.clone()
    ids[:, :3] = torch.tensor([5, 6, 7])
    found = turn_advantages_of(METHODS[name].estimator, replace(single, input_ids=ids, turn_ids=None))
    factor = {"gigpo": 2}.get(name, 1)  # the prompt is a state that all rollouts share
    for row in range(6):
        among = rewards[3 * (row // 3) : 3 * (row // 3) + 3].tolist()
        own = float(rewards[row])
        centred = {"turn-mean": own - sum(among) / 3, "turn-rloo": own - (sum(among) - own) / 2}
        expected = centred.get(name, factor * standard(own, among))
        assert found[row][single.completion_mask[row]].tolist() == pytest.approx([expected] * lengths[row])


# The update and its Gram


@pytest.fixture(scope="module")
def model() -> Any:
    return build("Llama", tie_word_embeddings=True)


def updater_for(model: Any, method: Method, **changes: Any) -> Updater:
    settings = {"temperature": 1.0, "length": 6, "rollouts_per_pass": 0, "computing": nullcontext, "beta": 0.0}
    return Updater(model=model, method=method, kl="k3", **(settings | changes))


def log_probs_by_definition(model: Any, rollouts: Rollouts) -> Tensor:
    ids = rollouts.input_ids
    logits = model(input_ids=ids, attention_mask=rollouts.attention_mask.long()).logits
    chosen = logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0)) * rollouts.completion_mask


def flat_gradient(model: Any) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat


@pytest.mark.parametrize("name", [*TURN_METHODS, "grpo-paper"])
def test_the_update_and_its_gram_are_those_of_the_loss(model, rollouts, name):
    """Rows of `K` are the gradients of the rollouts' parts of the loss; for eq. 22 they are scores."""
    method = METHODS[name]
    with KeepDouble():
        with torch.no_grad():
            drawn = replace(rollouts, log_probs=log_probs_by_definition(model, rollouts))
        if name == "grpo-paper":
            totals = [sum(paid) for paid in PAID]
            means = [statistics.fmean(totals[:4])] * 4 + [statistics.fmean(totals[4:])] * 4
            credit = [[total - mean] * len(paid) for total, mean, paid in zip(totals, means, PAID, strict=True)]
        else:
            credit = credit_by_hand(method.estimator)
        by_token = torch.zeros(rollouts.input_ids.shape, dtype=torch.float64)
        for row, turns in enumerate(credit):
            for turn, value in enumerate(turns):
                by_token[row][rollouts.completion_mask[row] & (rollouts.turn_ids[row] == turn)] = value
        known = {"log_probs": log_probs_by_definition(model, drawn), "advantages": by_token, "length": 6}
        known |= {"old_log_probs": known["log_probs"].detach(), "mask": rollouts.completion_mask}
        loss = OBJECTIVES[method.objective]
        loss.fn(**{need: known[need] for need in loss.needs}).backward()
        expected = flat_gradient(model)

        step, _ = updater_for(model, method).first(1, drawn, measure=True)
        torch.testing.assert_close(flat_gradient(model), expected, rtol=1e-9, atol=1e-12)
        updater_for(model, method).first(1, drawn, measure=False)
        torch.testing.assert_close(flat_gradient(model), expected, rtol=1e-9, atol=1e-12)

        rows = []
        for row in range(rollouts.count):
            weights = rollouts.completion_mask[row].double() if step.rows == "scores" else by_token[row].clone()
            if step.rows == "loss":
                length = int(rollouts.completion_mask[row].sum())
                weights /= 8 * (length if method.objective == "grpo" else 1)
            (log_probs_by_definition(model, drawn)[row] * weights).sum().backward()
            rows.append(flat_gradient(model))
        assert step.gram is not None
        stacked = torch.stack(rows)
        torch.testing.assert_close(step.gram.matrix, stacked @ stacked.T, rtol=1e-8, atol=1e-12)


# Against enumeration: a policy over four tokens, an observation after the first turn, a stop that ends the episode

STOP, TOKENS = 1, 4
OBSERVED = {0: 5, 2: 6, 3: 6}
"""Observation token after each first turn that does not stop."""


def toy_reward(first: int, second: int | None) -> list[float]:
    if second is None:
        return [0.5]
    return [0.25 * first, {0: 1.0, STOP: 0.0, 2: -1.0, 3: 2.0}[second] * (1 if first == 2 else 0.5)]


def toy_transcripts() -> list[tuple[list[int], list[float]]]:
    """Every token row and its rewards per turn; token 4 is the prompt, -1 stands for padding."""
    rows = [([4, STOP, -1, -1], toy_reward(STOP, None))]
    for first, second in itertools.product(OBSERVED, range(TOKENS)):
        rows.append(([4, first, OBSERVED[first], second], toy_reward(first, second)))
    return rows


class Toy:
    """A small Llama restricted to four tokens, all its transcripts, and the exact gradient of the expected return."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config).double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(3.0)
        rows = toy_transcripts()
        self.ids = torch.tensor([ids for ids, _ in rows])
        self.mask = torch.stack([torch.tensor([False, True, False, ids[3] >= 0]) for ids, _ in rows])
        self.paid = [paid for _, paid in rows]

    def log_probs(self) -> Tensor:
        """`(M, 4)` of every transcript."""
        logits = self.model(input_ids=self.ids.clamp(min=0)).logits[..., :TOKENS].log_softmax(-1)
        chosen = logits[:, :-1].gather(2, self.ids[:, 1:, None].clamp(0, TOKENS - 1)).squeeze(2)
        return torch.nn.functional.pad(chosen, (1, 0)) * self.mask

    def gradient(self, weights: Tensor) -> Tensor:
        """`Σ_it w_it ∇log π_it`."""
        (self.log_probs() * weights).sum().backward()
        return flat_gradient(self.model)

    def rollouts(self, chosen: tuple[int, ...]) -> Rollouts:
        """One group of these transcripts."""
        rewards = torch.zeros(len(chosen), 4, dtype=torch.float64)
        for row, index in enumerate(chosen):
            for turn, reward in enumerate(self.paid[index]):
                rewards[row, 1 + 2 * turn] = reward
        places, pick = torch.arange(4), list(chosen)
        return Rollouts(
            input_ids=self.ids[pick].clamp(min=0),
            attention_mask=self.ids[pick] >= 0,
            completion_mask=self.mask[pick],
            prompt_lengths=torch.ones(len(chosen), dtype=torch.int64),
            group_ids=torch.zeros(len(chosen), dtype=torch.int64),
            rewards=rewards.sum(1),
            turn_ids=(places >= 3).long().expand(len(chosen), 4) * self.mask[pick],
            token_rewards=rewards,
            reward_parts={"outcome": torch.zeros(len(chosen), dtype=torch.float64)},
        )

    def expected_update(self, name: str, size: int) -> Tensor:
        """Mean over all groups of `size`, by the credit of the trainer and one gradient of the summed weights."""
        chances = self.log_probs().detach().sum(1).exp()
        assert float(chances.sum()) == pytest.approx(1)
        weights = torch.zeros(self.mask.shape, dtype=torch.float64)
        for chosen in itertools.product(range(len(self.ids)), repeat=size):
            drawn = self.rollouts(chosen)
            step = credited_step(METHODS[name], 1, drawn, length=2)
            own = step.weights[:, None] * drawn.completion_mask if step.token_weights is None else step.token_weights
            chance = float(chances[list(chosen)].prod())
            for row, index in enumerate(chosen):
                weights[index] += chance * own[row]
        return self.gradient(weights)

    def true_gradient(self) -> Tensor:
        """Of the expected return, over all transcripts."""
        returns = torch.tensor([sum(paid) for paid in self.paid], dtype=torch.float64)
        (self.log_probs().sum(1).exp() * returns).sum().backward()
        return flat_gradient(self.model)


@pytest.fixture(scope="module")
def toy() -> Toy:
    with KeepDouble():
        return Toy()


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_expected_update_when_the_policy_may_stop(toy):
    """Eq. 22 only scales the gradient; a mean over those that reached a turn turns it; leave-one-out does neither."""
    with KeepDouble():
        truth = toy.true_gradient()
        for name in ("rloo", "turn-rloo"):
            torch.testing.assert_close(toy.expected_update(name, 2), truth, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(toy.expected_update("grpo-paper", 2), truth / 2, rtol=1e-9, atol=1e-11)
        turned = toy.expected_update("turn-mean", 2)
        cosine = float(turned @ truth / (turned.norm() * truth.norm()))
        assert 0 < cosine < 0.99
        # Each turn is scaled by its own factor: (n-1)/n, averaged over how many of the group reach it.
        chances = toy.log_probs().detach().sum(1).exp()
        goes_on = float(chances[toy.mask[:, 3]].sum())
        returns = torch.tensor([sum(paid) for paid in toy.paid], dtype=torch.float64)
        last = torch.tensor([paid[-1] for paid in toy.paid], dtype=torch.float64)
        parts = torch.zeros(2, *toy.mask.shape, dtype=torch.float64)
        parts[0, :, 1] = chances * returns
        parts[1, :, 3] = chances * last * toy.mask[:, 3]
        first, second = (toy.gradient(part) for part in parts)
        torch.testing.assert_close(turned, first / 2 + goes_on * second / 2, rtol=1e-9, atol=1e-11)


# Metrics and the critic


def test_metrics_of_turns(rollouts):
    scalars = turn_scalars(rollouts)
    written = sum(sum(row) + 2 * (len(row) - 1) for row in LENGTHS)
    assert scalars["turns/count"] == statistics.fmean(map(len, PAID))
    assert scalars["turns/policy_tokens"] == pytest.approx(sum(map(sum, LENGTHS)) / written)
    assert scalars["turns/best_reward"] == statistics.fmean(map(max, PAID))
    assert scalars["turns/reached_1"] == 1 and scalars["turns/reached_2"] == 0.5
    assert scalars["turns/reward_1"] == statistics.fmean(paid[0] for paid in PAID)
    assert scalars["turns/reward_2"] == statistics.fmean(paid[1] for paid in PAID if len(paid) > 1)
    assert turn_scalars(replace(rollouts, turn_ids=None)) == {}


def test_a_critic_learns_the_rewards_to_come(rollouts):
    found = rewards_to_come(rollouts)
    for row, paid in enumerate(PAID):
        for turn in range(len(paid)):
            here = rollouts.completion_mask[row] & (rollouts.turn_ids[row] == turn)
            assert found[row][here].tolist() == pytest.approx([sum(paid[turn:])] * LENGTHS[row][turn])


# Real runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("task", ["stopping:3", "calculator:3"])
@pytest.mark.parametrize("name", [*TURN_METHODS, "grpo-paper", "ppo", "remax"])
def test_every_turn_method_trains_on_both_tasks(folder, tmp_path, name, task):
    changes: dict[str, Any] = {"task": task, "reward": None, "max_new_tokens": 0}
    train(config_for(folder, tmp_path / "run", method=name, steps=2, **changes))
    lines = open_run(tmp_path / "run").metrics()[1:]
    assert len(lines) == 2
    for line in lines:
        assert line["grad_norm"] == pytest.approx(line["gram/update_norm"], rel=1e-4, abs=1e-7)
        assert line["sampler_gap"] < 1e-4
        assert 0 < line["turns/policy_tokens"] <= 1
        assert line["turns/count"] >= 1
    records = list(open_run(tmp_path / "run").rollouts())
    assert records


def test_the_turns_of_candidates_are_those_of_the_episodes_that_they_continue(folder, tmp_path):
    """The best turn of an episode is not the mean candidate: from the records of a run, by its prompt ids."""
    changes: dict[str, Any] = {"task": "python:tests.turn_cases:echo_task", "reward": None, "max_new_tokens": 0}
    train(config_for(folder, tmp_path / "run", method="tl-grpo", steps=1, rollouts_every=1, **changes))
    paid: dict[str, list[float]] = {}
    for record in open_run(tmp_path / "run").rollouts():
        if record.index == 0:  # the candidate that continues the episode; turns come in their order
            paid.setdefault(record.prompt_id.partition("/turn-")[0], []).append(record.reward)
    line = open_run(tmp_path / "run").metrics()[-1]
    assert line["turns/count"] == statistics.fmean(map(len, paid.values())) > 1
    assert line["turns/best_reward"] == pytest.approx(statistics.fmean(map(max, paid.values())))
    assert line["turns/best_reward"] > line["reward"]
    assert line["turns/reward_1"] == pytest.approx(statistics.fmean(turns[0] for turns in paid.values()))
    assert line["turns/policy_tokens"] < 1  # the environment answers


@pytest.mark.parametrize("name", ["turn-rloo", "tl-grpo"])
def test_a_resumed_run_plays_the_same_episodes(folder, tmp_path, name):
    changes: dict[str, Any] = {"method": name, "task": "stopping:3", "reward": None, "max_new_tokens": 0}
    train(config_for(folder, tmp_path / "whole", steps=4, **changes))
    train(config_for(folder, tmp_path / "parts", steps=2, **changes))
    train(config_for(folder, tmp_path / "parts", steps=4, resume=True, **changes))
    whole, parts = (without_times(open_run(tmp_path / run).metrics()) for run in ("whole", "parts"))
    assert whole == parts


def test_a_short_run_learns_when_to_stop(tmp_path):
    """A small policy that plays like the timid teacher learns to take more of the good cards."""
    start = save_policy(tmp_path / "random")
    config = config_for(start, tmp_path / "run", task="stopping:2", reward=None, max_new_tokens=0)
    task = load_task("stopping:2")
    policy = load_policy(config.policy, task)
    warm_start(policy, task, epochs=60 * 32 / len(task.train), learning_rate=1e-2, tell=lambda _: None)
    write_warm_start(policy, tmp_path / "warm")
    sampling, stream = config.sampling(task.max_new_tokens), seeded_generator(0, "before", 0)
    before = collect(policy, task, task.train, group_size=8, sampling=sampling, generator=stream).rewards.mean()
    changes: dict[str, Any] = {"task": "stopping:2", "reward": None, "max_new_tokens": 0, "method": "turn-rloo"}
    settings: dict[str, Any] = {"steps": 30, "batch_size": 64, "group_size": 8, "learning_rate": 3e-3}
    quiet: dict[str, Any] = {"eval_every": 0, "rollouts_every": 0, "checkpoint_every": 0, "measure_every": 0}
    train(config_for(tmp_path / "warm", tmp_path / "run", **changes, **settings, **quiet))
    rewards = [line["reward"] for line in open_run(tmp_path / "run").metrics()]
    assert statistics.fmean(rewards[-15:]) > float(before) + 0.05


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "stopping", "reward": "tests.training_cases:judge"}, "the rewards of stopping come from its environ"),
        ({"task": "arithmetic:3", "max_turns": 2}, "train --max-turns: needs a task with an environment, got arithmet"),
        ({"task": "stopping", "reward": None, "max_turns": -1}, "train --max-turns: must be finite and at least 0"),
        (
            {"task": "stopping", "reward": None, "method": "tl-grpo", "credit_truth": "sampled"},
            "sampled values of turns need whole episodes, got tl-grpo, whose rollouts are candidates",
        ),
        (
            {"task": "stopping", "reward": None, "method": "igrpo"},
            "the drafts of igrpo need a task of one turn, got st",
        ),
        ({"task": "stopping", "reward": None, "method": "vineppo"}, "--method: vineppo needs a task of one turn"),
        ({"task": "calculator", "reward": None, "method": "grpo-process"}, "needs a task that verifies steps"),
        (
            {"task": "stopping", "reward": None, "method": "tl-grpo", "estimator": "remax"},
            "tl-grpo takes an estimator that needs only the rollouts, got remax",
        ),
        ({"task": "stopping", "reward": None, "method": "turn-rloo", "objective": "dpo"}, "credit for turns needs one"),
        ({"task": "stopping", "reward": None, "method": "mt-grpo", "group_size": 1}, "needs at least 2 rollouts"),
    ],
)
def test_what_cannot_work_with_turns_is_refused_at_once(folder, tmp_path, changes, says):
    with pytest.raises(ScoregramError, match=says):
        train(config_for(folder, tmp_path / "run", max_new_tokens=0, **changes))
    assert not (tmp_path / "run").exists()


def test_max_turns_cuts_episodes_off(folder, tmp_path):
    changes: dict[str, Any] = {"task": "calculator:4", "reward": None, "max_new_tokens": 0, "max_turns": 1}
    train(config_for(folder, tmp_path / "run", method="grpo", steps=1, **changes))
    assert open_run(tmp_path / "run").metrics()[1]["turns/count"] == 1


def test_a_warm_start_learns_turns_and_not_observations(folder):
    task = load_task("calculator:3")
    policy = load_policy(config_for(folder, Path("nowhere")).policy, task)
    problem = task.train[0]
    shown = demonstration(policy, task, problem, Random(4))
    read = [token for token, is_learnt in zip(shown.ids, shown.learnt, strict=True) if not is_learnt]
    learnt = [token for token, is_learnt in zip(shown.ids, shown.learnt, strict=True) if is_learnt]
    assert policy.decode(read).startswith(problem.prompt + "=")
    assert policy.decode(learnt).count("+") == 2 and policy.decode(learnt).endswith(".")
    assert learnt.count(policy.stop_ids[0]) == 3 and policy.stop_ids[0] not in read
