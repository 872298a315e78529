"""What `attach(…, advise_every=N)` recommends every N steps: a group size, a number of rollouts, the worst finding.

The group size is decided as by `--group-size auto` of `scoregram train`, from the same window of measured steps, and
the number of rollouts as by the finding *batch size*. Nothing is applied: TRL trains on with its arguments.
"""

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from scoregram.advice import Diagnosis, RunFinding, rollouts_for_scale
from scoregram.exhibits import Estimate
from scoregram.integrations.trl.step import MeasuredStep
from scoregram.reading import (
    GROUP_SIZE,
    GROUP_SIZE_WINDOW,
    BatchSizeAdvice,
    Recommendation,
    RunNoise,
    inverse_estimate,
    recorded_recommendations,
    replayed_components,
    replayed_scalars,
    step_components,
)
from scoregram.runs import own_name
from scoregram.statistics import GroupSizeAdvice, NoiseComponents
from scoregram.training import GroupSizeControl, group_size_choices

OF_SIZES = frozenset({"group size", "group size by phase", "batch size"})
"""Findings about what a recommendation names itself."""


def components_of(measured: MeasuredStep) -> NoiseComponents | None:
    """The noise of a measured step; None if its self-check failed or its scalars do not define it."""
    return step_components(measured.scalars) if measured.passed else None


def evidence_scalars(measured: MeasuredStep, group_size: int) -> dict[str, float | int]:
    """The scalars `control/…` of a measured step from which recommendations can be computed again."""
    components = components_of(measured)
    return {} if components is None else {GROUP_SIZE: group_size} | replayed_scalars(components)


def size_recommendation(
    step: int, window: Sequence[NoiseComponents], group_size: int, batch: int, seed: int
) -> GroupSizeAdvice:
    """What `--group-size auto` would decide after these measured steps."""
    choices = sorted({group_size, *group_size_choices(batch)})
    kept = deque(window, maxlen=GROUP_SIZE_WINDOW)
    return GroupSizeControl(choices, seed, group_size, kept).advice(step)


def batch_recommendation(signal: Estimate, group_size: int, batch: int) -> BatchSizeAdvice:
    """The number of rollouts that the noise scale asks for, in whole groups; `batch` if it asks for no change."""
    return BatchSizeAdvice(batch, rollouts_for_scale(inverse_estimate(signal), batch, group_size) or batch, signal)


def recommendation(
    step: int,
    found: Diagnosis,
    readings: Sequence[MeasuredStep],
    noise: RunNoise,
    *,
    earlier: Sequence[NoiseComponents] = (),
    group_size: int,
    seed: int,
) -> Recommendation:
    """The recommendation after a step.

    Args:
        step: Number of the step.
        found: The diagnosis of the training so far.
        readings: The measured steps so far.
        noise: Pooled over them.
        earlier: Noise of the measured steps before a resume.
        group_size: Rollouts per prompt in this training.
        seed: Of the resamples.
    """
    findings = dict(Counter(one.severity for one in found.findings))
    worst = next((finding_clause(one) for one in found.findings if one.name not in OF_SIZES), "")
    window = [*earlier, *(one for one in map(components_of, readings) if one is not None)]
    if not window or not readings:
        return Recommendation(step=step, group_size=None, batch_size=None, findings=findings, worst=worst)
    batch = group_size * int(readings[-1].scalars["groups"])
    size = size_recommendation(step, window, group_size, batch, seed)
    rollouts = batch_recommendation(inverse_estimate(noise.noise_scale), size.recommended, batch)
    return Recommendation(step=step, group_size=size, batch_size=rollouts, findings=findings, worst=worst)


def finding_clause(finding: RunFinding) -> str:
    """The name of a finding, its severity, and what is wrong."""
    return f"{finding.title} ({finding.severity}): {finding.sentence}"


def recommendation_line(made: Recommendation) -> str:
    """What is printed: one line."""
    return f"scoregram, step {made.step}, recommended and not applied: {' '.join(made.sentence.split())}"


def print_to_stderr(line: str) -> None:
    """Print a line where the trainer's progress bar is, so that it is not part of what a script prints."""
    print(line, file=sys.stderr, flush=True)


def log_scalars(made: Recommendation) -> dict[str, list[float]]:
    """The scalars of a recommendation for the trainer's log, which has no place for what is undefined."""
    return {own_name(name): [float(value)] for name, value in made.scalars().items() if value == value}


def replayed_recommendations(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[Recommendation]:
    """The recommendations of a run of TRL, computed again from `metrics.jsonl`, without the findings.

    Args:
        config: The config of the run folder.
        lines: The lines of its metrics.

    Returns:
        In order. Sizes equal those that were recorded: the scalars are stored without rounding.
    """
    window: list[NoiseComponents] = []
    recorded = {one.step: one for one in recorded_recommendations(lines)}
    found = []
    for line in lines:
        components, one = replayed_components(line), recorded.get(int(line["step"]))
        window += [] if components is None else [components]
        if one is None:
            continue
        size, rollouts = one.group_size, one.batch_size
        if size is not None and rollouts is not None:
            seed, batch = int(config["seed"]), rollouts.current
            size = size_recommendation(one.step, window, int(config["group_size"]), batch, seed)
            rollouts = batch_recommendation(rollouts.rollout_signal, size.recommended, batch)
        found.append(Recommendation(step=one.step, group_size=size, batch_size=rollouts))
    return found
