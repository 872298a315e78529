"""Groups of the same few problems, measured at intervals: how the spectrum moves while the prompts stay."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scoregram.gram import measure_gram
from scoregram.policy import BiasedSamplingWarning, Policy
from scoregram.reading import Step, batch_records, group_readings, group_records, mean_over_groups, reward_scalars
from scoregram.rollouts import Rollouts
from scoregram.runs import BatchRecord, GroupRecord
from scoregram.tasks import Problem, Task
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.credit import advantages_of, score_weights
from scoregram.training.update import gram_inputs

FIXED_PROBE = "fixed"
"""Kind of the groups of a probe at the policy's own temperature."""


@dataclass(frozen=True)
class ProbeResult:
    """Records and scalars of a probe."""

    groups: Sequence[GroupRecord]
    batches: Sequence[BatchRecord]
    scalars: Mapping[str, float]


def probe_kind(config: TrainConfig, sampled_at: float, scored_at: float) -> str:
    """What the groups of a probe are called: `fixed`, or with the temperatures where they are not the policy's."""
    if sampled_at == scored_at == config.temperature:
        return FIXED_PROBE
    return f"{FIXED_PROBE}, sampled at {sampled_at:g}, scored at {scored_at:g}"


def run_probe(config: TrainConfig, policy: Policy, task: Task, problems: Sequence[Problem], step: int) -> ProbeResult:
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
        stream = seeded_generator(config.seed, "probe", step)
        with warnings.catch_warnings():  # the rollouts are scored at both temperatures, so there is no hidden bias
            warnings.simplefilter("ignore", BiasedSamplingWarning)
            rollouts = collect(
                policy, task, problems, group_size=config.group_size, sampling=sampling, generator=stream
            )
        for scored_at in dict.fromkeys((temperature, config.temperature)):
            kind = probe_kind(config, temperature, scored_at)
            is_whole = config.between_prompts and kind == FIXED_PROBE
            blocks = None if is_whole else config.group_size
            probed = probe_step(policy, rollouts, number=step, kind=kind, temperature=scored_at, blocks=blocks)
            readings = group_readings(probed)
            groups += group_records(probed, readings, **config.recording(is_probe=kind == FIXED_PROBE))
            if is_whole:
                batches += batch_records(probed)
            if not scalars:
                means = mean_over_groups([reading.scalars() for reading in readings]) | reward_scalars(probed)
                scalars = {f"probe/{name.removeprefix('group/')}": value for name, value in means.items()}
    return ProbeResult(groups, batches, scalars)


def probe_step(
    policy: Policy, rollouts: Rollouts, *, number: int, kind: str, temperature: float, blocks: int | None
) -> Step:
    """Rollouts with the advantages of the group mean and their Gram, measured in one pass without an update.

    Args:
        policy: Whose scores they are.
        rollouts: With their rewards.
        number: Step of the run.
        kind: Of the records.
        temperature: That scores are taken at.
        blocks: Measure only the blocks within groups of this size; None for the whole Gram.
    """
    advantages = advantages_of("mean", rollouts)
    mask = rollouts.completion_mask
    with policy.computing():
        gram = measure_gram(policy.model, *gram_inputs(rollouts), temperature=temperature, group_size=blocks)
    return Step(
        number=number,
        rollouts=rollouts,
        advantages=advantages.flatten().double(),
        weights=score_weights("reinforce", advantages, mask, length=mask.shape[1]).cpu(),
        gram=gram,
        kind=kind,
    )
