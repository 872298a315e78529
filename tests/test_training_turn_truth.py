"""True advantages of turns against the enumeration of every episode, and what measuring them leaves unchanged."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scoregram.checks import ScoregramError
from scoregram.policy import Episode, Policy, PolicyConfig, SamplingConfig, replayed_episode
from scoregram.policy.transcripts import DrawnTurn, transcripts
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.statistics import credit_fidelity
from scoregram.tasks import Problem, Reply, Task, load_task, rewarded_by_environment
from scoregram.training import truth as truth_module
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.loop import train
from scoregram.training.truth import TurnTruth, histories_of
from tests.training_cases import config_for, save_policy, without_times
from tests.turn_cases import ECHO, PROBLEMS, policy_in

PAD, STOP, A, B, X, Y = range(6)
LETTERS = {"a": A, "b": B, "x": X, "y": Y}
PROBLEM = Problem("ladder", "x", "")
TURNS, DRAWS, ROLLOUTS = 3, 60, 8
LARGEST_DEVIATION = 4.5
"""Standard errors: one of some 30 normal deviates exceeds it with probability 2e-4."""


class Ladder:
    """`a` climbs and pays more the higher one is, a fair coin decides how far; `b` cashes in; anything else costs."""

    def reset(self, problem: Problem, seed: int) -> str:
        """Start at the bottom."""
        self.level, self.turns, self.luck = 0, 0, Random(seed)
        return problem.prompt

    def step(self, text: str) -> Reply:
        """Climb, cash in or fall."""
        self.turns += 1
        if text == "a":
            paid, coin = 0.25 * (self.level + 1), self.luck.choice("xy")
            self.level += coin == "y"
            is_top = self.turns == TURNS
            return Reply(coin, reward=paid, outcome=0.5 * self.level * is_top, done=is_top)
        return Reply(outcome=float(self.level), done=True) if text == "b" else Reply(reward=-0.5, done=True)


LADDER = Task("ladder", [PROBLEM], [], rewarded_by_environment, 1, environment=Ladder, max_turns=TURNS)


class Characters:
    """A tokenizer of one token per letter."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Encode."""
        return {"input_ids": [LETTERS[letter] for letter in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The letters; other tokens have none."""
        return "".join({token: letter for letter, token in LETTERS.items()}.get(token, "") for token in ids)


@pytest.fixture(scope="module")
def climber() -> Policy:
    """A policy over six tokens whose episodes can be enumerated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        shape: dict[str, Any] = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1)).double().eval()
    for parameter in model.parameters():
        parameter.data *= 5.0
    return Policy(model, Characters(), PolicyConfig(), (STOP,), PAD, 64, False)


def next_chances(policy: Policy, ids: Sequence[int]) -> list[float]:
    with torch.no_grad():
        return policy.model(torch.tensor([[*ids]])).logits[0, -1].softmax(0).tolist()


def ladder_value(policy: Policy, ids: tuple[int, ...], level: int, turn: int) -> float:
    """Expected rewards to come before turn `turn`, by a walk over every turn and every coin."""
    total = 0.0
    for token, chance in enumerate(next_chances(policy, ids)):
        if token == A:
            total += chance * 0.25 * (level + 1)
            for coin, higher in ((X, level), (Y, level + 1)):
                later = (
                    0.5 * higher if turn + 1 == TURNS else ladder_value(policy, (*ids, A, STOP, coin), higher, turn + 1)
                )
                total += chance * later / 2
        else:
            total += chance * (level if token == B else -0.5)
    return total


def ladder_advantages(policy: Policy, rollouts: Rollouts) -> list[float]:
    """Of every turn, from the rewards of the rollouts and the values of their histories."""
    found = []
    for row, paid in enumerate(rollouts.turn_rewards.tolist()):
        ids = rollouts.token_ids()[row]
        starts = [place for place in range(1, len(ids)) if (place - 1) % 3 == 0]  # prompt, then turn, stop, coin
        values = []
        for turn, place in enumerate(starts):
            level = sum(token == Y for token in ids[3:place:3])
            values.append(ladder_value(policy, tuple(ids[:place]), level, turn))
        values.append(0.0)
        found += [paid[turn] + values[turn + 1] - values[turn] for turn in range(len(starts))]
    return found


def ladder_rollouts(policy: Policy, count: int = 24) -> Rollouts:
    return collect(
        policy,
        LADDER,
        [PROBLEM, PROBLEM],
        group_size=count // 2,
        sampling=SamplingConfig(1),
        generator=torch.Generator().manual_seed(1),
    )


def truth_of(policy: Policy, task: Task, copies: int) -> TurnTruth:
    return TurnTruth(policy, task, SamplingConfig(task.max_new_tokens), TrainConfig(truth_rollouts=copies))


def test_advantages_of_turns_are_unbiased_with_the_variances_that_they_state(climber):
    """Over many draws, in an environment that answers by chance: mean and spread of every turn's estimate."""
    rollouts = ladder_rollouts(climber)
    assert int(rollouts.turn_mask.sum(0)[-1]) >= 2  # some climb all the way
    exact = torch.tensor(ladder_advantages(climber, rollouts), dtype=torch.float64)
    drawn = [truth_of(climber, LADDER, ROLLOUTS).truth(number, rollouts, [PROBLEM] * 2) for number in range(DRAWS)]
    estimates = torch.stack([one.advantages for one in drawn])  # (draws, units)
    variances = torch.stack([one.variances for one in drawn if one.variances is not None])
    errors = estimates.std(0) / math.sqrt(DRAWS)
    assert bool(((estimates.mean(0) - exact).abs() <= LARGEST_DEVIATION * errors + 1e-12).all())
    # The mean stated variance is that of the estimates: both are means over draws, with errors of their own.
    squares = (estimates - exact).square() - variances
    assert bool((squares.mean(0).abs() <= LARGEST_DEVIATION * squares.std(0) / math.sqrt(DRAWS) + 1e-12).all())


def test_error_and_correlation_are_corrected_for_the_noise_of_the_values(climber):
    rollouts = ladder_rollouts(climber)
    exact = torch.tensor(ladder_advantages(climber, rollouts), dtype=torch.float64)
    credit = exact + 0.5 * torch.randn(len(exact), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    squares, correlations, raw = [], [], []
    for number in range(DRAWS):
        seen = truth_of(climber, LADDER, ROLLOUTS).truth(number, rollouts, [PROBLEM] * 2)
        found = credit_fidelity(credit, seen.advantages, variances=seen.variances)
        squares.append(found.error**2)
        correlations.append(found.correlation)
        raw.append(credit_fidelity(credit, seen.advantages).error ** 2)
    expected = credit_fidelity(credit, exact)

    def deviation(values: list[float], value: float) -> float:
        table = torch.tensor(values, dtype=torch.float64)
        return float((table.mean() - value) / (table.std() / math.sqrt(DRAWS)))

    assert abs(deviation(squares, expected.error**2)) < LARGEST_DEVIATION
    assert abs(deviation(correlations, expected.correlation)) < LARGEST_DEVIATION
    assert deviation(raw, expected.error**2) > LARGEST_DEVIATION  # uncorrected, the noise counts as error


def test_every_token_of_a_turn_is_in_its_unit_and_equal_histories_share_their_episodes(climber):
    rollouts = ladder_rollouts(climber)
    seen = truth_of(climber, LADDER, ROLLOUTS).truth(1, rollouts, [PROBLEM] * 2)
    assert seen.unit_of[rollouts.completion_mask].tolist() == list(range(int(rollouts.turn_mask.sum())))
    assert not bool((seen.unit_of[~rollouts.completion_mask] != -1).any())
    before = [one for row in histories_of(rollouts) for one in row]
    assert seen.rollouts == ROLLOUTS * len(set(before)) < ROLLOUTS * len(before)
    partial = replace(rollouts, rewards=rollouts.rewards.index_fill(0, torch.tensor([0]), torch.nan))
    fewer = truth_of(climber, LADDER, ROLLOUTS).truth(1, partial, [PROBLEM] * 2)
    assert bool((fewer.unit_of[0] == -1).all())
    assert len(fewer.advantages) == len(seen.advantages) - int(rollouts.turn_mask[0].sum())


def test_observations_that_no_fresh_environment_repeats_are_an_error(climber, monkeypatch):
    monkeypatch.setattr(truth_module, "MOST_REPLAYS", 3)
    rollouts = ladder_rollouts(climber)
    ids = torch.where(rollouts.input_ids == Y, X, torch.where(rollouts.input_ids == X, Y, rollouts.input_ids))
    unseen = replace(rollouts, input_ids=ids)  # even the prompt is another
    with pytest.raises(ScoregramError, match="none in 3 tries for 0 turns of ladder"):
        truth_of(climber, LADDER, ROLLOUTS).truth(1, unseen, [PROBLEM] * 2)


# The tasks that come with the package


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def written(policy: Policy, task: Task, problem: Problem, texts: Sequence[str]) -> Episode:
    """An episode in which the policy wrote these turns, each of them cut off."""
    turns = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert task.environment is not None
    history = list(policy.encode_prompt(task.environment().reset(problem, 0)))
    episode = replayed_episode(policy, task, problem, 0, [], history)
    assert episode is not None
    for place, ids in enumerate(turns):
        if place:
            episode.read()
        episode.write(DrawnTurn([*ids], [0.0] * len(ids), [0.0] * len(ids)), policy)
    return episode


def test_advantages_of_the_stopping_game_are_those_of_its_enumeration(folder):
    """Turns of one token: the next card is taken with the probability of `+`, anything else ends the game."""
    policy, task = policy_in(folder, "float64"), replace(load_task("stopping:3"), max_new_tokens=1)
    problem = task.train[3]
    plays = [["+", "+", "+"], ["+", "+", "."], ["+", "."], ["."]]
    episodes = [written(policy, task, problem, texts) for texts in plays]
    rollouts = transcripts(policy, [episodes])
    (plus,) = policy.tokenizer("+", add_special_tokens=False)["input_ids"]
    cards = [int(digit) for digit in problem.prompt.partition(":")[0]]
    pays = [(card - 5) * 2.0**turn / 2**5 for turn, card in enumerate(cards)]
    full = episodes[0].ids
    starts = [place for place, turn in enumerate(episodes[0].turn_ids) if turn >= 0]
    values = [0.0] * 4
    for turn in (2, 1, 0):
        values[turn] = next_chances(policy, full[: starts[turn]])[plus] * (pays[turn] + values[turn + 1])
    taken = [pays[turn] + values[turn + 1] - values[turn] for turn in range(3)]
    expected = [*taken, *taken[:2], -values[2], taken[0], -values[1], -values[0]]
    found = truth_of(policy, task, 2000).truth(1, rollouts, [problem])
    assert found.variances is not None and found.rollouts == 3 * 2000
    gaps = (found.advantages - torch.tensor(expected, dtype=torch.float64)).abs()
    assert bool((gaps <= LARGEST_DEVIATION * found.variances.sqrt() + 1e-12).all())


@pytest.mark.parametrize("name", ["calculator:3", "stopping:4"])
def test_a_replayed_episode_is_in_the_state_of_the_original(folder, name):
    policy, task = policy_in(folder), load_task(name)
    problem = task.train[1]
    right, *_ = problem.prompt.rpartition("+")
    texts = [right, "nonsense", "1+2"] if name.startswith("calc") else ["+", "+", "+"]
    states, histories, turns = [], [], []
    episode = written(policy, task, problem, texts[:1])
    for place in range(3):
        turns.append([i for i, t in zip(episode.ids, episode.turn_ids, strict=True) if t == place])
        states.append(copy.deepcopy(episode.environment))
        episode.read()
        histories.append([*episode.ids])
        if place < 2:
            ids = policy.tokenizer(texts[place + 1], add_special_tokens=False)["input_ids"]
            episode.write(DrawnTurn([*ids], [0.0] * len(ids), [0.0] * len(ids)), policy)
    for place in range(3):
        again = replayed_episode(policy, task, problem, 99, turns[: place + 1], histories[place])
        assert again is not None and again.environment == states[place] and again.turns == place + 1
        changed = [*histories[place][:-1], histories[place][-1] + 1]
        assert replayed_episode(policy, task, problem, 99, turns[: place + 1], changed) is None


def test_fresh_episodes_of_a_random_environment_repeat_what_was_read(folder):
    """The digits that `Echo` draws are in the history: a fresh environment draws the same up to there."""
    policy = policy_in(folder)
    rollouts = collect(
        policy,
        ECHO,
        PROBLEMS[:2],
        group_size=6,
        sampling=SamplingConfig(4),
        generator=torch.Generator().manual_seed(0),
    )
    source, generator = truth_of(policy, ECHO, 4), seeded_generator(0, "truth", 1)
    several = [one for row in histories_of(rollouts) for one in row if one.turns]
    assert several
    for one in several:
        episodes = [source.replayed(one, PROBLEMS, generator) for _ in range(4)]
        assert all(tuple(episode.ids) == one.ids and not episode.done for episode in episodes)
        later = {str(episode.environment.luck.random()) for episode in episodes}  # type: ignore[attr-defined]
        assert len(later) > 1  # what comes after is not that of the original


# Runs


def weights_of(out: Any) -> dict[str, Tensor]:
    latest = open_run(out).latest_checkpoint
    assert latest is not None
    return LlamaForCausalLM.from_pretrained(latest[1] / "model").state_dict()


def echo(seed: int) -> Task:
    """The task of `turn_cases`, as `--task python:…` loads it."""
    return ECHO


@pytest.mark.parametrize("method", ["turn-rloo", "grpo", "ppo"])
def test_a_run_learns_the_same_with_and_without_the_comparison(folder, tmp_path, method):
    shared: dict[str, Any] = {"task": f"python:{__name__}:echo", "reward": None, "max_new_tokens": 0, "method": method}
    train(config_for(folder, tmp_path / "plain", **shared, steps=4, measure_every=2))
    seen: dict[str, Any] = {**shared, "credit_truth": "sampled", "truth_rollouts": 3, "measure_every": 2}
    train(config_for(folder, tmp_path / "seen", **seen, steps=4))
    train(config_for(folder, tmp_path / "parts", **seen, steps=2))
    train(config_for(folder, tmp_path / "parts", **seen, steps=4, resume=True))
    plain, compared, parts = (without_times(open_run(tmp_path / n).metrics()) for n in ("plain", "seen", "parts"))
    assert list(map(str, compared)) == list(map(str, parts))  # a resumed run draws the same fresh episodes
    names = {"credit/correlation", "credit/error", "credit/truth_error", "credit/truth_rollouts"}
    for before, after in zip(plain, compared, strict=True):
        assert after.keys() - before.keys() == (names if after["step"] in (2, 4) else set())
        assert {name: str(after[name]) for name in before} == {name: str(value) for name, value in before.items()}
    assert all(line["rollouts"] == 12 * line["step"] for line in compared)
    measured = [line for line in compared if "credit/error" in line]
    assert all(line["credit/truth_rollouts"] > 0 and math.isfinite(line["credit/error"]) for line in measured)
    before, after = weights_of(tmp_path / "plain"), weights_of(tmp_path / "seen")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    start = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in start.items())
