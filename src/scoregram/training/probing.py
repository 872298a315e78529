"""Groups of the same few problems, measured at intervals: how the spectrum moves while the prompts stay."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from scoregram.gram import measure_gram
from scoregram.policy import BiasedSamplingWarning, Policy
from scoregram.runs import BatchRecord, GroupRecord
from scoregram.tasks import Problem, Task
from scoregram.training.collecting import Collected, collect
from scoregram.training.config import TrainConfig
from scoregram.training.credit import advantages_of, rollout_weights
from scoregram.training.order import generator
from scoregram.training.readings import over_groups, reward_reading
from scoregram.training.recording import batch_record, group_records, statistics_of
from scoregram.training.update import Gradient, Measured, inputs

FIXED = "fixed"
"""Kind of the groups of a probe at the policy's own temperature."""


@dataclass(frozen=True)
class Probed:
    """What a probe left."""

    groups: Sequence[GroupRecord]
    batches: Sequence[BatchRecord]
    scalars: Mapping[str, float]


def kind_of(config: TrainConfig, sampled_at: float, scored_at: float) -> str:
    """What the groups of a probe are called: `fixed`, or with the temperatures where they are not the policy's."""
    if sampled_at == scored_at == config.temperature:
        return FIXED
    return f"{FIXED}, sampled at {sampled_at:g}, scored at {scored_at:g}"


def probe(config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], step: int) -> Probed:
    """Sample groups of the problems and measure their Grams; the policy and its gradients stay as they are.

    At another temperature than the policy's the same rollouts are scored twice: at the temperature that they were
    sampled at, where scores average to zero, and at the policy's, where they do not. Advantages are those of the group
    mean, whatever the run is trained with. The scalars are those of the first temperature.
    """
    groups: list[GroupRecord] = []
    batches: list[BatchRecord] = []
    scalars: dict[str, float] = {}
    for temperature in config.probe_temperatures or (config.temperature,):
        sampling = replace(config.sampling(task.max_new_tokens), temperature=temperature)
        stream = generator(config.seed, "probe", step)
        with warnings.catch_warnings():  # both scores are taken, so that nothing is lost
            warnings.simplefilter("ignore", BiasedSamplingWarning)
            found = collect(policy, task, problems, group_size=config.group_size, sampling=sampling, generator=stream)
        for scored_at in dict.fromkeys((temperature, config.temperature)):
            kind = kind_of(config, temperature, scored_at)
            is_whole = config.between_prompts and kind == FIXED
            gradient = measured_only(policy, found, scored_at, None if is_whole else config.group_size)
            groups += group_records(step, found, gradient, kind=kind, **config.recording(is_probe=kind == FIXED))
            if is_whole:
                batches += batch_record(step, found, gradient, kind=kind)
            if not scalars:
                reading = over_groups(statistics_of(groups)) | reward_reading(found.rewards, gradient.advantages)
                scalars = {f"probe/{name.removeprefix('group/')}": value for name, value in reading.items()}
    return Probed(groups, batches, scalars)


def measured_only(policy: Policy, found: Collected, temperature: float, group_size: int | None) -> Gradient:
    """Advantages and Gram of some rollouts, all in one pass, without an update.

    Args:
        policy: Whose scores they are.
        found: Rollouts with their rewards.
        temperature: That scores are taken at.
        group_size: Of the blocks that are wanted of the Gram; None for all of it.
    """
    advantages = advantages_of("mean", found)
    mask = found.rollouts.completion_mask
    weights = rollout_weights("reinforce", advantages, mask, length=mask.shape[1])
    with policy.computing():
        gram = measure_gram(
            policy.model, *inputs(found.rollouts, slice(None)), temperature=temperature, group_size=group_size
        )
    measured = Measured(gram.matrix, gram.by_layer, gram.notes)
    return Gradient(advantages, weights.cpu(), torch.zeros(()), math.nan, measured)
