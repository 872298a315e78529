"""Rules on gradients and on numbers that are not finite, from nothing but the scalars of a run."""

import math
from collections.abc import Sequence

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
    since_then = sum(int(line["step"]) > bad[-1] for line in log.lines)
    has_recovered = since_then >= LEAST_STEPS
    if has_recovered and _are_overflows(log, bad):
        return None
    share = len(bad) / len(log.lines)
    return RunFinding(
        name="NaN",
        severity="warning" if has_recovered else "critical",
        sentence=f"Loss, gradient norm or KL was not finite at {len(bad)} of {len(log.lines)} logged steps, first at "
        f"step {bad[0]}" + (f"; the last {since_then} are finite." if has_recovered else "."),
        since=bad[0],
        number=Estimate(share, share, share),
        label="share of steps that are not finite",
        count=f"{len(bad)} of {len(log.lines)}",
        evidence="the last steps are finite, so the weights hold no NaN: these updates were left out or lost."
        if has_recovered
        else "one is enough: a NaN in the weights does not go away.",
        change=_recovered_repair(bad, share) if has_recovered else _restart_before_nan(share),
        confidence="certain",
    )


def _restart_before_nan(share: float) -> Change:
    return Change(
        knob="learning rate",
        direction="down",
        sentence="Restart from the checkpoint before that step with a lower learning rate or gradient clipping, "
        f"in float32 if it happens again. {CUDNN}",
        effect=f"every step is finite, now {1 - share:.0%} are.",
    )


def _recovered_repair(bad: Sequence[int], share: float) -> Change:
    """What to look at where the steps after a NaN are finite again: the weights need no checkpoint."""
    return Change(
        knob="numbers of single steps",
        direction="repair",
        sentence="Find what is not finite at these steps; the run needs no restart.",
        effect=f"every step is finite, now {1 - share:.0%} are.",
        steps=(
            f"Compute the loss of step {bad[0]} again in float32, and print rewards, log-probabilities and gradients "
            "that are NaN or infinite.",
            CUDNN,
        ),
    )


def _are_overflows(log: RunLog, bad: Sequence[int]) -> bool:
    """Whether only gradient norms were infinite, none of them NaN, and as often as loss scaling in fp16 makes them."""
    if bad != log.infinite_steps("grad_norm") or log.bad_steps("loss", "kl"):
        return False
    first = [int(line["step"]) for line in log.lines[:FIRST_OVERFLOWS]]
    return set(bad) <= set(first) or len(bad) <= RARE_OVERFLOWS * len(log.lines)


def not_finite_log_steps(log: RunLog) -> list[int]:
    """Steps at which loss, gradient norm or KL was not finite, or which the trainer skipped for that."""
    skipped = {int(line["step"]) for line in log.lines if line.get("skipped")}
    return sorted(skipped.union(log.bad_steps("loss", "grad_norm", "kl")))


def _rewards_not_finite(log: RunLog, bad: Sequence[int]) -> RunFinding:
    """The finding of steps whose mean reward is NaN or infinite."""
    share = len(bad) / len(log.lines)
    return RunFinding(
        name="NaN",
        severity="critical",
        sentence=f"The mean reward was not finite at {len(bad)} of {len(log.lines)} logged steps, first at step "
        f"{bad[0]}.",
        since=bad[0],
        number=Estimate(share, share, share),
        label="share of steps whose mean reward is not finite",
        count=f"{len(bad)} of {len(log.lines)}",
        evidence="one is enough: a reward is NaN or infinite, or no rollout of the step has one.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence="Find the completion whose reward is not finite, and repair the reward function.",
            effect=f"the mean reward is finite at every step, now at {1 - share:.0%}. What the run then learns is "
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
    norms = log.series("grad_norm")
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
