"""The groups of one step: which problems, in how many rounds, and which of their groups the step trains on."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from scoregram.policy import BiasedSamplingWarning, Policy, warn_of_bias
from scoregram.reading import outcomes_of
from scoregram.rollouts import Rollouts, concatenated_rollouts
from scoregram.tasks import Problem, Task
from scoregram.training.checkpoint import Position
from scoregram.training.collect import (
    Drafts,
    best_drafts,
    collect,
    collect_branches,
    drawn_problems,
    rescored_rollouts,
    seeded_generator,
)
from scoregram.training.config import TrainConfig
from scoregram.training.control import Controller


@dataclass(frozen=True)
class DrawnRollouts:
    """The groups of a step."""

    rollouts: Rollouts
    problems: Sequence[Problem]
    """The problem of every group."""
    position: Position
    """Position after the step, without the rollouts that sources of inputs take besides these."""
    drafts: Sequence[Drafts]
    """The drafts that the rollouts refine, round by round; empty for a method without drafts."""
    played: Rollouts | None = None
    """The episodes of a method with branches, whose rollouts are candidates for single turns of them; else None."""

    @property
    def episodes(self) -> Rollouts:
        """One rollout per episode: those that were played to their end."""
        return self.rollouts if self.played is None else self.played


def draw_rollouts(controller: Controller, policy: Policy, task: Task, position: Position, number: int) -> DrawnRollouts:
    """The groups of step `number`, their problems, and the position after it.

    With dynamic sampling, further prompts are drawn until the step is full of live groups or the rounds are used up; a
    step without a live group keeps its first round, and its update is zero.
    """
    config = controller.config
    if config.chosen_method.branches:
        return draw_branches(config, policy, task, position, number)
    stream, draft_stream = (seeded_generator(config.seed, purpose, number) for purpose in ("rollouts", "drafts"))
    drawn: list[Problem] = []
    drafts: list[Drafts] = []
    parts: list[Rollouts] = []
    live: list[bool] = []
    for _ in range(config.dynamic_rounds if config.chosen_method.dynamic_sampling else 1):
        if config.draw == "measured":
            problems = controller.drawn_problems(task.train, number)
        else:
            problems = drawn_problems(task.train, position.problems + len(drawn), config.prompts, config.seed)
        drawn += problems
        sizes, texts = controller.rollouts_of(problems), None
        if config.chosen_method.drafts:
            drafts.append(draft_round(config, policy, task, problems, draft_stream))
            texts = drafts[-1].refinement_prompts([task.prompt(p) for p in problems], config.draft_format)
        parts.append(sampled_round(config, policy, task, problems, sizes, stream, texts))
        live += [outcome == "live" for outcome in outcomes_of(parts[-1].reward_grid)]
        if sum(live) >= config.prompts:
            break
    after = position_after(config, position, number, drawn)
    if not config.chosen_method.dynamic_sampling or not any(live):
        return DrawnRollouts(parts[0], drawn[: config.prompts], after, drafts)
    places = [place for place, is_live in enumerate(live) if is_live][: config.prompts]
    everything = concatenated_rollouts(parts, policy.pad_id)
    kept = torch.isin(everything.group_ids, torch.tensor(places))
    return DrawnRollouts(everything.select(kept), [drawn[place] for place in places], after, drafts)


def draw_branches(config: TrainConfig, policy: Policy, task: Task, position: Position, number: int) -> DrawnRollouts:
    """The same for a method with branches: each turn of an episode has a group of its own.

    Together the groups of an episode cost as many turns as a group of whole episodes, and count as one.
    """
    problems = drawn_problems(task.train, position.problems, config.prompts, config.seed)
    branches = collect_branches(
        policy,
        task,
        problems,
        group_size=config.starting_group_size,
        sampling=config.behaviour_sampling(task.max_new_tokens),
        generator=seeded_generator(config.seed, "rollouts", number),
    )
    after, owners = position_after(config, position, number, problems), branches.owners
    return DrawnRollouts(branches.candidates, [problems[owner] for owner in owners], after, [], branches.episodes)


def draft_round(
    config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], stream: torch.Generator
) -> Drafts:
    """The best draft of every problem of a round."""
    sampling = config.behaviour_sampling(task.max_new_tokens)
    return best_drafts(policy, task, problems, count=config.drafts, sampling=sampling, generator=stream)


@contextmanager
def one_sampling_warning(config: TrainConfig) -> Iterator[None]:
    """Warn once if top-k or top-p bias the gradient; in the block, sampling does not warn.

    A temperature is no bias here: rollouts are scored at the temperature that they are sampled at, or get a loss for
    rollouts of any policy.
    """
    sampling = config.sampling(max_new_tokens=1)
    if sampling.truncates:
        warn_of_bias(sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BiasedSamplingWarning)
        yield


def sampled_round(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    sizes: int | Sequence[int],
    stream: torch.Generator,
    texts: Sequence[str] | None,
) -> Rollouts:
    """The rollouts of one round: groups of these sizes, which read `texts` where given in place of the task's prompts.

    Rollouts sampled at another temperature than the policy's get the policy's own log-probabilities.
    """
    sampling = config.behaviour_sampling(task.max_new_tokens)
    rollouts = collect(policy, task, problems, group_size=sizes, sampling=sampling, generator=stream, texts=texts)
    if config.sampling_temperature:
        return rescored_rollouts(policy, rollouts, config.temperature, config.micro_batch_size)
    return rollouts


def position_after(config: TrainConfig, position: Position, number: int, drawn: Sequence[Problem]) -> Position:
    """Position after step `number`, which drew these problems with a group of rollouts each."""
    rollouts = position.rollouts + len(drawn) * config.starting_group_size
    return Position(number, position.problems + len(drawn), rollouts)


def draft_scalars(drafts: Sequence[Drafts]) -> dict[str, float]:
    """The mean reward of the best drafts of a step, all rounds together; nothing without drafts."""
    rewards = torch.tensor([reward for part in drafts for reward in part.rewards], dtype=torch.float64)
    return {"credit/draft_reward": float(rewards.nanmean())} if drafts else {}
