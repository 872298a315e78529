"""Rules on gradients and on numbers that are not finite, from nothing but the scalars of a run."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from scoregram.advice.findings import Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.logs import RunLog, ScalarSeries
from scoregram.advice.reward_rules import too_few
from scoregram.advice.settings import reward_steps
from scoregram.advice.trends import LEAST_STEPS
from scoregram.exhibits import Estimate
from scoregram.reading import rollouts_option

FIRST_NORMS, EARLY_NORMS = 5, 11
"""Gradient norms at the start of a log that have too few before them, and among how many they are judged."""
SPIKE, SPIKE_WINDOW = 10.0, 20
"""Factor above the median of the gradient norms before it, and how many of these are its neighbours."""
CLIP_NEAR = 2.0
"""Largest ratio of the gradient clip to the median norm at which a spike hardly moves the policy further."""
FIRST_OVERFLOWS, RARE_OVERFLOWS = 20, 0.01
"""Among how many first steps, and in which share of all steps, infinite gradients are usual: in fp16 the loss scale
starts too large, is halved at each of them, and is doubled every 2,000 steps."""
SINGLE_STEPS = "numbers of single steps"
"""What a finding about a NaN that did not stay changes."""
CUDNN = (
    "If the loss is finite and only the gradient is not, on an H100 or H200: "
    "torch.backends.cuda.enable_cudnn_sdp(False), since the attention of cuDNN 9.19 gives NaN with some masks."
)
"""A repair of the gradients alone, seen on an H200."""


def not_finite_steps(log: RunLog) -> RuleVerdict:
    """Loss, gradient or reward was NaN or infinite at some step, or the trainer skipped steps."""
    if not log.lines:
        return Undecided("log loss and gradient norm")
    bad = not_finite_log_steps(log)
    unpaid = log.bad_steps("reward")
    if unpaid and not (bad and bad[0] < unpaid[0]):  # at one step the reward is the cause
        return _rewards_not_finite(log, unpaid)
    if not bad:
        known = log.has("loss", least=1) or log.has("grad_norm", least=1)
        return None if known else Undecided("log loss and gradient norm")
    finite = _steps_after(log, bad)
    if (scaled := _judged_overflows(log, bad, finite)) is not True:
        return scaled
    has_recovered = finite >= LEAST_STEPS
    share, counted = len(bad) / len(log.lines), f"{len(bad)} of {len(log.lines)}"
    evidence = "one is enough: a NaN in the weights does not go away."
    if finite:
        evidence = f"the last {finite} are finite; {LEAST_STEPS} would show that the weights hold no NaN."
    if has_recovered:
        evidence = "the last steps are finite, so the weights hold no NaN: these updates were left out or lost."
    return RunFinding(
        name="NaN",
        severity="warning" if has_recovered else "critical",
        sentence=f"Loss, gradient norm or KL was not finite at {counted} logged steps, first at step {bad[0]}"
        + (f"; the last {finite} are finite." if has_recovered else "."),
        since=bad[0],
        number=Estimate(share, share, share),
        label="share of steps that are not finite",
        count=counted,
        evidence=evidence,
        change=_recovered_repair(bad, counted) if has_recovered else restart_before_nan(log, bad),
        confidence="certain",
    )


def _steps_after(log: RunLog, bad: Sequence[int]) -> int:
    """How many steps are logged after the last of these."""
    return sum(int(line["step"]) > bad[-1] for line in log.lines)


def _judged_overflows(log: RunLog, bad: Sequence[int], finite: int) -> RuleVerdict | Literal[True]:
    """The verdict on gradients that loss scaling in fp16 makes infinite; True if they are something else.

    Only gradient norms are infinite then, and none is NaN. Usual are those among the first `FIRST_OVERFLOWS` steps, and
    later one or `RARE_OVERFLOWS` of all steps. If the last step is one of them, the next will tell: the trainer leaves
    the update out, or the loss becomes NaN.
    """
    if bad != log.infinite_steps("grad_norm") or log.bad_steps("loss", "kl"):
        return True
    first = {int(line["step"]) for line in log.lines[:FIRST_OVERFLOWS]}
    if len(set(bad) - first) > max(1.0, RARE_OVERFLOWS * len(log.lines)):
        return True
    return None if finite else Undecided("log the next steps: an infinite gradient may be that of a loss scale in fp16")


def restart_before_nan(log: RunLog, bad: Sequence[int]) -> Change:
    """Go back to a checkpoint from before the first of these steps: the weights may hold a NaN."""
    return Change(
        knob="learning rate",
        direction="down",
        sentence=f"Restart from the checkpoint before step {bad[0]} with a lower learning rate or gradient clipping, "
        f"in float32 if it happens again. {CUDNN}",
        effect=f"every step is finite, now {len(bad)} of {len(log.lines)} are not.",
    )


def _recovered_repair(bad: Sequence[int], counted: str) -> Change:
    """What to look at where the steps after a NaN are finite again: the weights need no checkpoint."""
    return Change(
        knob=SINGLE_STEPS,
        direction="repair",
        sentence="Find what is not finite at these steps; the run needs no restart.",
        effect=f"every step is finite, now {counted} are not.",
        steps=(
            f"Compute the loss of step {bad[0]} again in float32, and print rewards, log-probabilities and gradients "
            "that are NaN or infinite.",
            CUDNN,
        ),
    )


def not_finite_log_steps(log: RunLog) -> list[int]:
    """Steps at which loss, gradient norm or KL was not finite, or which the trainer skipped for that."""
    skipped = {int(line["step"]) for line in log.lines if line.get("skipped")}
    return sorted(skipped.union(log.bad_steps("loss", "grad_norm", "kl")))


def _rewards_not_finite(log: RunLog, bad: Sequence[int]) -> RunFinding:
    """The finding of steps whose mean reward is NaN or infinite."""
    share, counted = len(bad) / len(log.lines), f"{len(bad)} of {len(log.lines)}"
    has_recovered = _steps_after(log, bad) >= LEAST_STEPS
    return RunFinding(
        name="NaN",
        severity="warning" if has_recovered else "critical",
        sentence=f"The mean reward was not finite at {counted} logged steps, first at step {bad[0]}.",
        since=bad[0],
        number=Estimate(share, share, share),
        label="share of steps whose mean reward is not finite",
        count=counted,
        evidence="one is enough: a reward is NaN or infinite, or no rollout of the step has one.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence="Find the completion whose reward is not finite, and repair the reward function.",
            effect=f"the mean reward is finite at every step, now {counted} are not. What the run then learns is "
            "unknown until a run with this change.",
            steps=reward_steps(
                log.config,
                f"Call it on the rollouts of step {bad[0]}, and print those whose reward is NaN or infinite.",
                "Look for a division by zero, a logarithm of zero and a mean of an empty list.",
            ),
        ),
        confidence="certain",
    )


def gradient_spikes(log: RunLog) -> RuleVerdict:
    """Some gradient norms are many times those before them."""
    norms = live_norms(log)
    if len(norms) < 2 * LEAST_STEPS:
        return too_few(norms, "log the gradient norm before clipping", 2 * LEAST_STEPS)
    spikes = spike_steps(norms)
    if not spikes:
        return None
    worst = max(spikes, key=lambda step: spikes[step])
    usual, limit = float(np.median(norms.values[norms.values > 0])), norm_limit(log)
    is_limited = limit <= CLIP_NEAR * usual
    clipped = f" The run clips the norm to {limit:g}, and its median is {usual:.2g}." if math.isfinite(limit) else ""
    return RunFinding(
        name="gradient spikes",
        severity="note" if is_limited else "warning",
        sentence=f"The gradient norm was {spikes[worst]:.0f} times its usual size at step {worst}"
        + (f", and more than {SPIKE:g} times at {len(spikes)} steps in all." if len(spikes) > 1 else "."),
        since=min(spikes),
        number=Estimate(spikes[worst]),
        label="largest gradient norm over its usual size",
        evidence=f"found above {SPIKE:g} times the median of the {SPIKE_WINDOW} norms before it and that of all norms "
        f"before it; the first {FIRST_NORMS} norms are compared with the first {EARLY_NORMS}.{clipped}",
        change=_spike_repair(log, worst) if is_limited else _tighter_clip(log, worst, usual),
        confidence="certain",
    )


def live_norms(log: RunLog) -> ScalarSeries:
    """Gradient norms of the steps that had a live group; all of them where the log does not tell.

    In a step without one the norm is 0, or that of a KL term alone, and says nothing about the usual size.
    """
    norms, dead = log.series("grad_norm"), log.series("dead_share").by_step()
    is_live = np.array([dead.get(step, 0.0) < 1 for step in norms.steps.tolist()], dtype=bool)
    return ScalarSeries(norms.steps[is_live], norms.values[is_live], norms.last_steps)


def norm_limit(log: RunLog) -> float:
    """The norm that the run clips its gradient to; `inf` if it does not clip, or the config does not say."""
    limit = log.setting("max_grad_norm")
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    return float(limit) if is_number and limit > 0 else math.inf


def _tighter_clip(log: RunLog, step: int, usual: float) -> Change:
    """Clip near the median norm: the run does not clip, or far above it."""
    norms = log.series("grad_norm")
    largest = min(float(norms.values[norms.steps == step].max()), norm_limit(log))
    is_known = log.setting("max_grad_norm") is not None
    return Change(
        knob="gradient clipping",
        direction="down",
        sentence=f"Clip the gradient norm near its median, {usual:.2g}"
        f"{'' if is_known else ', if the run does not do so yet'}, and look at the rollouts of that step.",
        effect="no batch moves the policy further than a usual one, now up to "
        f"{largest / usual:.0f} times as far{'' if is_known else ' without clipping'}.",
        value=f"{float(f'{usual:.2g}'):g}",
    )


def _spike_repair(log: RunLog, step: int) -> Change:
    """Look at the batch of the spike: the clip already limits every step to a usual one."""
    return Change(
        knob="batch of a gradient spike",
        direction="repair",
        sentence=f"Look at the rollouts of step {step}, and leave the clip as it is: it limits every step already.",
        effect="no single rollout decides the direction of a step; the length of a step does not change. What that "
        "brings is unknown until a run without such batches.",
        steps=(
            f"Read the rollouts of step {step}{_rollouts_option(log)}, those with the most extreme rewards first.",
            "If a reward is far from all others, limit it in the reward function.",
        ),
    )


def _rollouts_option(log: RunLog) -> str:
    option = rollouts_option(log.config)
    return f" (to store them: {option})" if option else ""


def spike_steps(norms: ScalarSeries) -> dict[int, float]:
    """Step → norm over its usual size, where that exceeds `SPIKE`.

    The usual size is the median of up to `SPIKE_WINDOW` norms before it, or that of all positive norms before it if
    this is larger: where gradients vanish for some steps, a norm as before is no spike. The first `FIRST_NORMS` have
    too few before them, and are compared with the others among the first `EARLY_NORMS`.
    """
    found = {}
    for place, norm in enumerate(norms.values):
        early = np.delete(norms.values[:EARLY_NORMS], place) if place < FIRST_NORMS else norms.values[:place]
        window = early if place < FIRST_NORMS else early[-SPIKE_WINDOW:]
        if not (early > 0).any():
            continue
        usual = float(max(np.median(window), np.median(early[early > 0])))
        if norm > SPIKE * usual:
            found[int(norms.steps[place])] = float(norm) / usual
    return found
