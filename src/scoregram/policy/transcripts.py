"""Transcripts: rollouts of several turns, in which the policy and an environment write alternately.

A transcript is one row of tokens: prompt, turn, observation, turn, observation, …. `completion_mask` is true for the
tokens that the policy sampled, its stop tokens included, and false for observations, which the policy only reads. The
open episodes of a batch draw their next turn together. Sampled text is never tokenized again, so up to rounding the
policy's tokens have the log-probabilities in the whole transcript that they were sampled with.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy.config import SamplingConfig
from scoregram.policy.load import Policy
from scoregram.policy.sampler import sample_policy
from scoregram.rollouts import Rollouts
from scoregram.tasks import Environment, Problem, Reply, Task, built_environment, raised_by

NOT_SAMPLED = -1
"""Turn of a token that the policy did not sample."""


@dataclass(frozen=True)
class DrawnTurn:
    """Tokens of one turn, their log-probabilities under the policy, and those under the distribution that drew them."""

    ids: list[int]
    log_probs: list[float]
    behaviour: list[float]


@dataclass
class Episode:
    """One transcript while it is written. The lists have one entry per token."""

    environment: Environment
    ids: list[int]
    """Prompt, turns and observations."""
    prompt_length: int
    turn_ids: list[int]
    """Turn of each sampled token; `NOT_SAMPLED` for the others."""
    log_probs: list[float]
    behaviour: list[float]
    rewards: list[float]
    """Reward plus outcome of a turn at its last token, 0 elsewhere."""
    turns: int = 0
    """Turns written so far."""
    outcome: float = 0.0
    """Reward of the whole episode, given with the last turn."""
    unread: list[int] = field(default_factory=list)
    """Observation after the latest turn, which the next turn will read."""
    done: bool = False
    """Whether the environment has ended the episode."""

    def read(self) -> None:
        """Append the observation that the environment gave after the latest turn."""
        self._append(self.unread, NOT_SAMPLED)
        self.unread = []

    def write(self, turn: DrawnTurn, policy: Policy) -> None:
        """Append a turn and let the environment answer it."""
        name = type(self.environment).__name__
        with raised_by(f"{name}.step"):
            reply = self.environment.step(policy.decode(turn.ids))
        reply = checked_reply(reply, name)
        self._append(turn.ids, self.turns, turn.log_probs, turn.behaviour)
        self.rewards[-1] = reply.reward + reply.outcome
        self.turns, self.outcome, self.done = self.turns + 1, reply.outcome, reply.done
        if not reply.done:
            # A turn that was cut off has no stop token; the environment closes it, so that all turns look alike.
            closing = [] if turn.ids[-1] in policy.stop_ids else [policy.stop_ids[0]]
            self.unread = [*closing, *policy.encode_observation(reply.observation)]

    def _append(
        self, ids: list[int], turn: int, log_probs: list[float] | None = None, behaviour: list[float] | None = None
    ) -> None:
        zeros = [0.0] * len(ids)
        self.ids += ids
        self.turn_ids += [turn] * len(ids)
        self.log_probs += log_probs or zeros
        self.behaviour += behaviour or zeros
        self.rewards += zeros

    def fits(self, policy: Policy, sampling: SamplingConfig) -> bool:
        """Whether the context has room for the observation and another turn."""
        return len(self.ids) + len(self.unread) + sampling.max_new_tokens <= policy.context


def start_episodes(
    policy: Policy, task: Task, problems: Sequence[Problem], seeds: Sequence[Sequence[int]]
) -> list[list[Episode]]:
    """One group of episodes for every problem, one episode for each of its seeds.

    Raises:
        ScoregramError: If the environments of a group start with different texts.
    """
    return [_start_group(policy, task, problem, own) for problem, own in zip(problems, seeds, strict=True)]


def _start_group(policy: Policy, task: Task, problem: Problem, seeds: Sequence[int]) -> list[Episode]:
    environments = [built_environment(task) for _ in seeds]
    with raised_by(f"{type(environments[0]).__name__}.reset"):
        texts = {each.reset(problem, seed) for each, seed in zip(environments, seeds, strict=True)}
    if len(texts) > 1:
        remedy = "Let reset return the same text for every seed; put what is random into later observations."
        fail("environment", f"the rollouts of {problem.id} must start with one text", f"{len(texts)} texts", remedy)
    text = texts.pop()
    if not isinstance(text, str):
        name = type(environments[0]).__name__
        fail("environment", f"{name}.reset must return a text", type(text).__name__, "Return what the policy reads.")
    prompt = policy.encode_prompt(task.prompt_format.replace("{prompt}", text))
    zeros = [0.0] * len(prompt)
    return [
        Episode(each, [*prompt], len(prompt), [NOT_SAMPLED] * len(prompt), [*zeros], [*zeros], [*zeros])
        for each in environments
    ]


def play_episodes(
    policy: Policy,
    groups: Sequence[Sequence[Episode]],
    *,
    sampling: SamplingConfig,
    max_turns: int,
    generator: torch.Generator | None,
) -> Rollouts:
    """Play episodes to their end and return them as rollouts.

    An episode ends when its environment says so. It is cut off after `max_turns` turns, or when the policy's context
    has no room for another turn; `finished` is then false. A turn has at most `sampling.max_new_tokens` tokens.

    Args:
        policy: Writes the turns.
        groups: Started episodes, the same number for every problem.
        sampling: Sampling settings of a turn.
        max_turns: Largest number of turns of an episode.
        generator: Source of the randomness of the tokens; every turn of an open episode draws from it.
    """
    play_on(policy, groups, sampling=sampling, max_turns=max_turns, generator=generator)
    return transcripts(policy, groups)


def play_on(
    policy: Policy,
    groups: Sequence[Sequence[Episode]],
    *,
    sampling: SamplingConfig,
    max_turns: int,
    generator: torch.Generator | None,
) -> None:
    """Play episodes to their end; they change in place. Those of a group have the same tokens so far."""
    contexts, copies, going = (
        [group[0].ids for group in groups],
        len(groups[0]),
        [one for each in groups for one in each],
    )
    while going:
        drawn = draw_turns(policy, contexts, copies, sampling, generator)
        for episode, turn in zip(going, drawn, strict=True):
            episode.write(turn, policy)
        going = [one for one in going if not one.done and one.turns < max_turns and one.fits(policy, sampling)]
        for episode in going:
            episode.read()
        contexts, copies = [episode.ids for episode in going], 1


def replayed_episode(
    policy: Policy, task: Task, problem: Problem, seed: int, turns: Sequence[Sequence[int]], history: Sequence[int]
) -> Episode | None:
    """A fresh episode in which the policy wrote these turns, if it then has the tokens of the history; else None.

    The environment starts with `seed`. Where it answers by chance, only some seeds lead to the same history.
    """
    ((episode,),) = start_episodes(policy, task, [problem], [[seed]])
    for ids in turns:
        zeros = [0.0] * len(ids)
        episode.write(DrawnTurn([*ids], zeros, zeros), policy)
        if episode.done:
            return None
        episode.read()
        if episode.ids != list(history[: len(episode.ids)]):
            return None
    return episode if episode.ids == list(history) else None


@dataclass(frozen=True)
class Branches:
    """Candidates for every turn of some episodes."""

    candidates: Rollouts
    """One group for every turn of every episode, episode by episode."""
    owners: list[int]
    """The episode of each group."""
    episodes: Rollouts
    """The episodes themselves, one rollout each: their turns are the first candidates."""


def play_branches(
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    candidates: int,
    sampling: SamplingConfig,
    max_turns: int,
    generator: torch.Generator | None,
) -> Branches:
    """Play episodes and draw several candidates for each turn, all from the same history.

    The first candidate continues the episode, so the histories are those of ordinary rollouts. Each candidate becomes a
    rollout: its prompt is the history, its completion the one turn, its reward that of the turn.
    """
    tried: list[list[list[Episode]]] = [[] for _ in episodes]
    going = dict(enumerate(episodes))
    while going:
        drawn = draw_turns(policy, [episode.ids for episode in going.values()], candidates, sampling, generator)
        for place, (index, base) in enumerate(list(going.items())):
            group = [base, *(copy.deepcopy(base) for _ in range(candidates - 1))]
            for episode, turn in zip(group, drawn[place * candidates : (place + 1) * candidates], strict=True):
                episode.write(turn, policy)
            tried[index].append([copy.deepcopy(base), *group[1:]])
            if base.done or base.turns == max_turns or not base.fits(policy, sampling):
                del going[index]
            else:
                base.read()
    owners = [index for index, groups in enumerate(tried) for _ in groups]
    groups_of_turns = [group for groups in tried for group in groups]
    return Branches(
        candidates=transcripts(policy, groups_of_turns, last_turn_only=True),
        owners=owners,
        episodes=transcripts(policy, [[episode] for episode in episodes]),
    )


def draw_turns(
    policy: Policy,
    contexts: Sequence[list[int]],
    copies: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> list[DrawnTurn]:
    """The next turn after every context, `copies` times."""
    drawn = sample_policy(policy, contexts, rollouts_per_prompt=copies, sampling=sampling, generator=generator)
    assert drawn.log_probs is not None and drawn.behaviour_log_probs is not None
    masks = drawn.completion_mask.cpu()
    columns = [values.cpu() for values in (drawn.input_ids, drawn.log_probs, drawn.behaviour_log_probs)]
    return [DrawnTurn(*(values[row][mask].tolist() for values in columns)) for row, mask in enumerate(masks)]


def checked_reply(reply: Any, name: str) -> Reply:
    """The reply of an environment, after checks.

    Raises:
        ScoregramError: If it is no `Reply`, has an observation that is no text, a reward that is not a finite number,
            a `done` that is neither true nor false, or an outcome before the last turn.
    """
    if not isinstance(reply, Reply):
        fail("environment", f"{name}.step must return a Reply", type(reply).__name__, "Return Reply(observation=…).")
    if not isinstance(reply.observation, str):
        got = type(reply.observation).__name__
        fail("environment", f"the observation of {name}.step must be a text", got, "Return Reply(observation='…').")
    if not all(isinstance(value, Real) and math.isfinite(value) for value in (reply.reward, reply.outcome)):
        got = f"reward {reply.reward!r} and outcome {reply.outcome!r}"
        fail("environment", f"the rewards of {name}.step must be finite", got, "Return 0 for a turn without a reward.")
    given: Any = reply.done
    done = given.item() if hasattr(given, "item") else given  # scalars of torch and numpy
    if not isinstance(done, bool):
        remedy = "Return Reply(done=True) at the end."
        fail("environment", f"done of {name}.step must be True or False", repr(given), remedy)
    if reply.outcome and not done:
        requirement = f"{name}.step must give an outcome with the last turn only"
        fail("environment", requirement, f"outcome {reply.outcome} before the end", "Give it as reward, or set done.")
    return reply if given is done else replace(reply, done=done)


def transcripts(policy: Policy, groups: Sequence[Sequence[Episode]], *, last_turn_only: bool = False) -> Rollouts:
    """Episodes as rollouts, padded on the right; with `last_turn_only`, everything before the last turn is prompt."""
    everyone = [episode for group in groups for episode in group]
    device = next(policy.model.parameters()).device
    turn_ids = _padded([episode.turn_ids for episode in everyone], NOT_SAMPLED, torch.int64)  # (N, T)
    last = torch.tensor([[episode.turns - 1] for episode in everyone])
    own = turn_ids == last if last_turn_only else turn_ids != NOT_SAMPLED

    def sampled(rows: Sequence[list[float]], dtype: torch.dtype) -> Tensor:
        return torch.where(own, _padded(rows, 0.0, dtype), 0.0)

    rewards = sampled([episode.rewards for episode in everyone], torch.float64)
    starts = own.int().argmax(1) if last_turn_only else torch.tensor([each.prompt_length for each in everyone])
    outcomes = torch.tensor([episode.outcome for episode in everyone], dtype=torch.float64)
    return Rollouts(
        input_ids=_padded([episode.ids for episode in everyone], policy.pad_id, torch.int64),
        attention_mask=_padded([[True] * len(episode.ids) for episode in everyone], False, torch.bool),
        completion_mask=own,
        prompt_lengths=starts,
        group_ids=torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups])),
        completions=[policy.decode(each.ids[start:]) for each, start in zip(everyone, starts.tolist(), strict=True)],
        rewards=rewards.sum(1),
        reward_parts={"turns": rewards.sum(1) - outcomes, "outcome": outcomes},
        finished=torch.tensor([episode.done for episode in everyone]),
        turn_ids=torch.where(own, turn_ids - (last if last_turn_only else 0), 0),
        token_rewards=rewards,
        log_probs=sampled([episode.log_probs for episode in everyone], torch.float32),
        behaviour_log_probs=sampled([episode.behaviour for episode in everyone], torch.float32),
    ).to(device)


def _padded(rows: Sequence[list[Any]], fill: float | int, dtype: torch.dtype) -> Tensor:
    """Lists as the rows of one tensor, shorter ones filled on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=dtype)
