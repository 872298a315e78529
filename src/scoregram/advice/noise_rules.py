"""Rules on the noise of a run: group size, batch size, estimator and baseline.

A rule is a function of a `RunReading`, with the same verdicts as the rules on logs. Numbers pooled over steps come from
`RunReading.noise()`; with too few steps for an interval a rule concludes nothing.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scoregram.advantages import ESTIMATORS
from scoregram.advice.findings import (
    LEAST_SAVING,
    Alternative,
    Change,
    RuleVerdict,
    RunFinding,
    Severity,
    Undecided,
)
from scoregram.bootstrap import FEWEST
from scoregram.exhibits import Estimate, cell_text
from scoregram.objectives import OBJECTIVES
from scoregram.reading import (
    OWN_TRAINER,
    PHASES,
    REFERENCE,
    TRL_TRAINER,
    RunNoise,
    RunReading,
    StoredGroup,
    SuccessLaw,
    can_replay,
    divisors,
    group_size_for,
    replay_groups,
    stored_setting,
    trainer_of,
)
from scoregram.statistics import mse_curve
from scoregram.training import METHODS

NOISE_FACTOR = 4.0
"""Factor between noise scale and batch size above which another batch size is advised."""
REPLAYED_GROUPS = 256
"""Groups of the last third that are replayed: more would cost time and change little."""
FEWEST_REPLAYED = 20
"""Fewer groups decide nothing."""
ENOUGH_STEPS = 3 * FEWEST - 2
"""Measured steps needed so that their last third has `FEWEST`."""


def noise_needs(run: RunReading) -> str:
    """What the noise of a run needs to be known: the first cause that keeps it unknown, as what to do."""
    groups, size = run.last_measured, run.group_size or 0
    if not run.draws_evenly:
        return "draw prompts evenly, without `--draw measured`: noise is not known for prompts drawn by their gradients"
    if run.trust.measured < ENOUGH_STEPS or size < SMALLEST_MEASURED or not groups:
        needs = f"measure at least {ENOUGH_STEPS} steps, with groups of {SMALLEST_MEASURED} or more and the Gram "
        return needs + "between prompts" + (f"; here are {run.trust.measured} steps" if run.trust.measured else "")
    if max(prompts_per_step(groups).values()) < 2:
        return "sample two prompts or more in a step: each has one, so nothing is known about the noise between prompts"
    missing = sum(not group.has_all_rewards for group in groups)
    if missing:
        needs = f"reward every rollout: {missing} of the {len(groups)} measured groups of the last third have one "
        return f"{needs}without a reward, and noise needs {FEWEST} steps with two whole groups or more"
    sizes = sorted({group.size for group in groups})
    if len(sizes) > 1:
        return f"sample groups of one size: those of the last third have {sizes[0]} to {sizes[-1]} rollouts"
    return "measure scores, with the Gram between prompts"


def prompts_per_step(groups: Sequence[StoredGroup]) -> Counter[int]:
    """Step → its groups."""
    return Counter(group.record.step for group in groups)


def group_size(run: RunReading) -> RuleVerdict:
    """One answer on the group size. The error of the update decides where it is known; liveness only where it is not.

    The error `(c1 R + c2 + c3/(R-1)) / N` counts dead groups already: they are draws in which the group's gradient is
    zero. So a group size that makes more groups live, and fewer prompts, is better only if the error says so.
    """
    noise, used = run.noise(), run.group_size
    if used is None or used < 2:
        return Undecided("record groups of two rollouts or more")
    best = noise.best_group_size
    if noise.components is not None and not math.isnan(best.low):
        if best.low <= used <= best.high:
            return None if math.isfinite(best.high) else Undecided("measure more steps: the best size is not bounded")
        return _size_by_error(run, used)
    return _size_by_liveness(run, used)


def advised_size(run: RunReading) -> int | None:
    """The group size that the error of the update asks for; None to keep the present one, or if it is not known."""
    noise, used = run.noise(), run.group_size
    best = noise.best_group_size
    if used is None or used < 2 or noise.components is None or math.isnan(best.low) or best.low <= used <= best.high:
        return None
    wanted = least_error_size(noise, used, run.batch_size)
    return wanted if size_gain(noise, used, wanted) >= LEAST_SAVING else None


def _size_by_error(run: RunReading, used: int) -> RuleVerdict:
    noise, wanted = run.noise(), advised_size(run)
    if wanted is None:
        return None
    best, gain = noise.best_group_size, size_gain(noise, used, wanted)
    return RunFinding(
        name="group size",
        severity="warning",
        sentence=f"Groups of {used} are {'too large' if wanted < used else 'too small'}: at the same number of "
        "rollouts the error "
        f"of the update is larger than needed.",
        number=best,
        label="best group size",
        evidence=f"found if the 95 % interval over {noise.steps} steps excludes {used} and the gain is at least "
        f"{LEAST_SAVING:.0%}. Dead groups count in the error.",
        change=Change(
            knob="group size",
            direction="down" if wanted < used else "up",
            sentence=_use_size(wanted, used, run.batch_size, advised_rollouts(run)),
            effect=f"the squared error of an update falls by about {gain:.0%} at equal rollouts"
            f"{_live_groups(run, wanted, used)}.",
            value=wanted,
        ),
    )


def group_size_phases(run: RunReading) -> RuleVerdict:
    """The best group size of the end of the run is not that of its beginning, and one size for both costs much."""
    used, phases = run.group_size, {phase: run.noise(phase) for phase in PHASES}
    first, last = phases["first"].best_group_size, phases["last"].best_group_size
    if used is None or math.isnan(first.low) or math.isnan(last.low):
        return Undecided(f"{noise_needs(run)} (in the first third too)")
    if first.low <= last.high and last.low <= first.high:
        return None
    gains = [size_gain(noise, used) for noise in phases.values()]
    if not max(gains) >= LEAST_SAVING:
        return None
    return RunFinding(
        name="group size by phase",
        severity="note",
        sentence=f"The best group size has moved from {cell_text(first)} in the first third to {cell_text(last)} in "
        "the last.",
        number=last,
        label="best group size, last third",
        evidence=f"found if the 95 % intervals of both thirds do not overlap and groups of {used} cost at least "
        f"{LEAST_SAVING:.0%} of the error in one of them (first {gains[0]:.0%}, last {gains[1]:.0%}).",
        change=Change(
            knob="group size over the run",
            direction="auto",
            sentence="In a next run let the size follow the measured noise"
            + (": --group-size auto." if trainer_of(run.config) == OWN_TRAINER else "."),
            effect="the error of the update falls by "
            f"{gains[0]:.0%} in the first third and by {gains[1]:.0%} in the last, at the same number of rollouts.",
            value="auto",
            steps=() if trainer_of(run.config) == OWN_TRAINER else _phase_steps(run, phases, used),
        ),
    )


def _phase_steps(run: RunReading, phases: Mapping[str, RunNoise], used: int) -> tuple[str, ...]:
    """How to change the group size in the middle of a run in a trainer that has one size for a run."""
    name = "num_generations=" if trainer_of(run.config) == TRL_TRAINER else "group size "
    early, late = (least_error_size(phases[phase], used, run.batch_size) for phase in ("first", "last"))
    middle = run.steps[-1] // 2
    return (f"Train {middle} steps with `{name}{early}`.", f"Resume from that checkpoint with `{name}{late}`.")


def wanted_size(best: Estimate, used: int) -> int:
    """The best group size as a whole number, at least 2; twice the size used if it is not bounded."""
    return max(2, round(best.value)) if math.isfinite(best.value) else 2 * used


SMALLEST_MEASURED = 4
"""Smallest group whose noise can be measured."""


def least_error_size(noise: RunNoise, used: int, batch: float | int) -> int:
    """The group size with the least error among those that divide the rollouts of a step into two prompts or more.

    It lies on the same side of the size used as the best size. Groups of 2 and 3 must save 5 % more than groups of 4,
    because their noise cannot be measured. The best size itself if no size divides the step: then a step needs another
    number of rollouts.
    """
    wanted = wanted_size(noise.best_group_size, used)
    fitting = [size for size in divisors(batch) if size != used and (size < used) == (wanted < used)]
    if not fitting or noise.components is None:
        return wanted
    error = dict(zip(fitting, mse_curve(noise.components, 1, torch.tensor(fitting)).tolist(), strict=True))
    best = min(fitting, key=error.__getitem__)
    measurable = error.get(SMALLEST_MEASURED, math.inf)
    return SMALLEST_MEASURED if best < SMALLEST_MEASURED and (1 - LEAST_SAVING) * measurable <= error[best] else best


def _use_size(wanted: int, used: int, batch: float | int, advised: int | None) -> str:
    """What to type and the number of prompts, at the rollouts that “batch size” advises if it asks for others."""
    if wanted not in divisors(batch):
        return f"Use groups of about {wanted} in place of {used}, with {'more' if wanted < used else 'fewer'} prompts."
    told = f"Use groups of {wanted} in place of {used}: "
    if advised is not None:
        return f"{told}{advised // wanted} prompts at the {advised} rollouts that “batch size” advises."
    return f"{told}{round(batch) // wanted} prompts at the same {batch:g} rollouts."


def _live_groups(run: RunReading, wanted: int, used: int) -> str:
    """The expected share of live groups; with how many of the groups of a step these are, where the size divides it."""
    law, batch = SuccessLaw.of(*run.success_stretches()), run.batch_size
    if law is None:
        return ""
    live = law.live_share(wanted)
    told = f", with about {live:.0%} of the groups live"
    if wanted not in divisors(batch):
        return told
    counts = [(law.live_share(size) * batch / size, batch / size) for size in (wanted, used)]
    (later, groups), (now, groups_now) = counts
    return f"{told}: {later:.0f} of {groups:g}, now {now:.0f} of {groups_now:g}"


def _of_a_step(law: SuccessLaw, size: int, used: int, run: RunReading) -> str:
    """How many live groups a step has at two sizes, where both divide it: more live ones of fewer groups."""
    batch = run.batch_size
    if not {size, used} <= set(divisors(batch)):
        return ""
    later, now = (law.live_share(one) * batch / one for one in (size, used))
    return f", {later:.1f} of {batch / size:g} in a step, now {now:.1f} of {batch / used:g}"


def size_gain(noise: RunNoise, used: int, wanted: int | None = None) -> float:
    """Share of the error at equal rollouts that groups of another size save; 0 where the error is not known.

    `1 - e(R') / e(R)` with `e(R) = c1 R + c2 + c3/(R-1)`; `R'` is the best size if not given.
    """
    if noise.components is None or math.isnan(noise.best_group_size.value):
        return 0.0
    sizes = torch.tensor([used, wanted or wanted_size(noise.best_group_size, used)])
    error = mse_curve(noise.components, 1, sizes).tolist()
    return 1 - error[1] / error[0] if error[0] > 0 else 0.0


def _size_by_liveness(run: RunReading, used: int) -> RuleVerdict:
    dead, counts = run.summary.dead, run.success_counts()
    law = SuccessLaw.of(*run.success_stretches())
    if not dead.low > 0.5 or law is None:
        return Undecided(noise_needs(run))
    size = group_size_for(law)
    if size is None or size <= used:
        return Undecided(f"{noise_needs(run)}: liveness alone does not name a size")
    size = min((one for one in divisors(run.batch_size) if one >= size), default=size)
    prompts = f" ({run.batch_size / size:g} prompts at the same rollouts)" if size in divisors(run.batch_size) else ""
    why, more = "too few steps were measured", f"measure the gradients of at least {ENOUGH_STEPS} steps (now "
    more += f"{run.trust.measured})"
    if run.is_withheld:
        why, more = "a self-check failed, so the Grams are not used", "make the self-check pass"
    return RunFinding(
        name="group size",
        severity="note",
        sentence=f"Groups of {used} are mostly dead. Whether larger ones have less error is not known: {why}.",
        number=dead,
        label="share of dead groups at the stored steps of the last third",
        evidence=f"mean {law.mean:.3f} and spread of the success rates of {len(counts)} prompts, as a Beta law.",
        change=Change(
            knob="group size",
            direction="up",
            sentence=f"Try groups of {size}{prompts}, or {more} to know the best size.",
            effect=f"about {law.live_share(size):.0%} of the groups would be live{_of_a_step(law, size, used, run)}.",
            value=size,
        ),
        confidence="possible",
        without_gram=True,
    )


def batch_size(run: RunReading) -> RuleVerdict:
    """The batch is far below the noise scale, or far above it."""
    noise, batch = run.noise(), run.batch_size
    scale = noise.noise_scale
    if math.isnan(scale.low) or not math.isfinite(batch):
        return Undecided(noise_needs(run))
    if scale.low == math.inf:  # a squared norm is not negative: the whole interval lies below the truth by chance
        return Undecided("measure more steps: the estimate of the signal lies below 0, which only chance can do")
    if scale.low > NOISE_FACTOR * batch:
        told = f"Steps of {batch:g} rollouts are mostly noise: signal to noise is {cell_text(noise.snr)}"
        unresolved = "" if math.isfinite(scale.high) else f", so no signal was resolved over {noise.steps} steps"
        return _batch_finding(noise, "warning", f"{told}{unresolved}.", _more_rollouts(run))
    if scale.high < batch / NOISE_FACTOR:
        if advised_rollouts(run) is None:  # a smaller step would have fewer than two prompts
            return None
        told = f"Steps of {batch:g} rollouts average more than needed: the signal is {noise.snr.value:.1f} times the "
        return _batch_finding(noise, "note", f"{told}noise.", _fewer_rollouts(run))
    decided = batch / NOISE_FACTOR <= scale.low and scale.high <= NOISE_FACTOR * batch
    return None if decided else Undecided("measure more steps: the interval of the noise scale is too wide")


def advised_rollouts(run: RunReading) -> int | None:
    """Rollouts of a step that the noise scale asks for, in whole groups of the advised size; None for the present ones.

    As `rollouts_for_scale`.
    """
    return rollouts_for_scale(run.noise().noise_scale, run.batch_size, advised_size(run) or run.group_size or 1)


def rollouts_for_scale(scale: Estimate, batch: float | int, size: int) -> int | None:
    """Rollouts that a step of `batch` should have, in whole groups of `size`; None to keep their number.

    Four times as many where the batch is far below the noise scale; two prompts or more where it is far above.
    """
    if math.isnan(scale.low) or not math.isfinite(batch):
        return None
    if NOISE_FACTOR * batch < scale.low < math.inf:
        return size * math.ceil(NOISE_FACTOR * batch / size)
    fewer = size * max(2, math.ceil(scale.high / size)) if scale.high < batch / NOISE_FACTOR else batch
    return int(fewer) if fewer < batch else None


def _batch_finding(noise: RunNoise, severity: Severity, sentence: str, change: Change) -> RunFinding:
    return RunFinding(
        name="batch size",
        severity=severity,
        sentence=sentence,
        number=noise.noise_scale,
        label="noise scale in rollouts",
        evidence=f"found if the whole 95 % interval over {noise.steps} steps is {NOISE_FACTOR:g} times above or below "
        "the batch.",
        change=change,
    )


def _more_rollouts(run: RunReading) -> Change:
    """Four times the rollouts; with a check of the reward first where no signal was resolved."""
    noise, batch = run.noise(), run.batch_size
    first = (
        ""
        if math.isfinite(noise.noise_scale.high)
        else "First check that right completions get more reward: more rollouts cannot repair a random one. Then use"
    )
    return Change(
        knob="batch size",
        direction="up",
        sentence=f"{first or 'Use'} more rollouts per step, towards {noise.noise_scale.low:.0f} or more, at first "
        f"{NOISE_FACTOR:g} times as many.",
        effect=_larger_signal(noise, (advised_rollouts(run) or batch) / batch),
        value=advised_rollouts(run),
        alternatives=(
            Alternative("learning rate", "down", "Lower the learning rate: noise then averages over steps."),
        ),
    )


def _larger_signal(noise: RunNoise, times: float) -> str:
    """What more rollouts make of the signal to noise; of the upper end of its interval if the estimate is not above 0.

    An estimate of 0 or less resolves no signal, and cannot be extrapolated.
    """
    grows, cost = "the signal to noise of a step grows in proportion to its rollouts", f"at {times:.3g} times the cost"
    value, high = noise.snr.value, noise.snr.high
    if value > 0:
        return f"{grows}: from {value:.2g} to about {times * value:.2g}, {cost}."
    if 0 < high < math.inf:
        most = f"from at most {high:.2g} to at most {times * high:.2g}"
        return f"{grows}: {most}, the upper end of its interval, {cost}. Whether there is a signal is unknown."
    return f"{grows}, {cost}. By how much is unknown: no signal was resolved."


def _fewer_rollouts(run: RunReading) -> Change:
    scale, fewer = run.noise().noise_scale, advised_rollouts(run) or run.batch_size
    return Change(
        knob="batch size",
        direction="down",
        sentence=f"Use fewer rollouts per step, towards {scale.high:.0f}, and more steps.",
        effect=f"nearly the same progress per step for {fewer / run.batch_size:.0%} of the rollouts.",
        value=int(fewer),
    )


def advantage_estimator(run: RunReading) -> RuleVerdict:
    """Another baseline or normalisation would have had less error on these very rollouts."""
    used = trained_estimator(run.config)
    size = run.group_size or 0
    groups = [group for group in run.last_measured if group.size == size and group.is_complete][-REPLAYED_GROUPS:]
    if used not in ESTIMATORS or not can_replay(used):
        return Undecided("train with an estimator of whole groups that the config names", {OWN_TRAINER: "--estimator"})
    if size // 2 < 2 or not run.noise().is_conclusive:
        return Undecided(noise_needs(run))
    if len(groups) < FEWEST_REPLAYED:
        needs = f"measure {FEWEST_REPLAYED} whole groups or more in the last third of the measured steps"
        return Undecided(f"{needs}; here are {len(groups)}")
    others = [name for name in (REFERENCE, "optimal-loo") if name != used and ESTIMATORS[name].min_group <= size // 2]
    rows = {row.estimator: row for row in replay_groups(groups, size, [used, *others]).rows}
    own = rows[used].efficiency
    gains = {name: rows[name].efficiency.low / own.high for name in others if own.high > 0}
    gains = {name: gain for name, gain in gains.items() if not math.isnan(gain)}
    if not gains:
        return Undecided("measure more groups: the signal of the estimators is not resolved")
    best = max(gains, key=lambda name: gains[name])
    if not gains[best] > 1 + LEAST_SAVING:
        return None
    value = rows[best].efficiency.value
    return RunFinding(
        name="estimator",
        severity="warning",
        sentence=f"On these rollouts {best} has more signal for the same noise than {used}"
        + (", which divides by the standard deviation." if "grpo" in used else "."),
        number=own,
        label=f"efficiency of {used}, {REFERENCE} = 1",
        evidence=f"the last {len(groups)} groups of the last third, replayed in halves; found if the intervals are "
        f"apart by {LEAST_SAVING:.0%}.",
        change=Change(
            knob="estimator",
            direction=best,
            sentence=f"Use {best}.",
            effect=f"an update of the same quality from {own.value / value:.0%} of the groups.",
            value=best,
        ),
    )


def method_estimator(method: str) -> str:
    """The replayable estimator of a method of `scoregram train` whose loss is linear in advantages; else its own name.

    Example:
        >>> [method_estimator(method) for method in ("tic", "awr", "of another trainer")]
        ['rloo', 'awr', 'of another trainer']
    """
    row = METHODS.get(method)
    if row is None or not can_replay(row.estimator):
        return method
    loss = OBJECTIVES[row.objective]
    return method if loss.weighs_ties or loss.couples_rollouts else row.estimator


def trained_estimator(config: Mapping[str, Any]) -> str:
    """Name of the estimator that a run was trained with, as far as its config tells; empty if it does not.

    TRL's GRPO divides by the deviation of the group, unless `scale_rewards` says otherwise.

    Example:
        >>> trained_estimator({"integration": {"name": "trl"}, "arguments": {"scale_rewards": "none"}})
        'mean'
    """
    method = str(config.get("method") or "")
    named = str(config.get("estimator") or method_estimator(method))
    if named or trainer_of(config) != TRL_TRAINER:
        return named
    if config["integration"].get("trainer", "").startswith("RLOO"):
        return "rloo"
    return {"group": "grpo-trl", "True": "grpo-trl", "none": "mean", "False": "mean"}.get(
        str(stored_setting(config, "scale_rewards")), ""
    )


def _pays_when_estimated(run: RunReading) -> bool:
    """Whether optimal-loo, replayed on these rollouts, sees more signal than the estimator used; True if not known."""
    used, size = trained_estimator(run.config), run.group_size or 0
    used = used if used in ESTIMATORS and can_replay(used) else REFERENCE
    groups = [group for group in run.last_measured if group.size == size and group.is_complete][-REPLAYED_GROUPS:]
    if len(groups) < FEWEST_REPLAYED or size // 2 < ESTIMATORS["optimal-loo"].min_group:
        return True
    rows = {row.estimator: row.snr.value for row in replay_groups(groups, size, [used, "optimal-loo"]).rows}
    return not rows["optimal-loo"] <= rows[used]


def baseline(run: RunReading) -> RuleVerdict:
    """The variance-minimising baseline, as `optimal-loo` estimates it, would save a part of the noise within prompts.

    No finding where the replay of these rollouts in halves does not show more signal than with the estimator used.
    """
    saving = run.noise().baseline_saving
    if math.isnan(saving.low):
        return Undecided(noise_needs(run))
    if not saving.low > LEAST_SAVING:
        return None if saving.high <= LEAST_SAVING else Undecided("measure more steps: its interval is too wide")
    if not _pays_when_estimated(run):
        return None
    return RunFinding(
        name="baseline",
        severity="note",
        sentence=f"The estimator optimal-loo would save {saving.value:.0%} of the variance within prompts that rloo "
        "has, the cost of estimating its baseline included.",
        number=saving,
        label="share of the variance saved",
        evidence=f"found if the whole 95 % interval lies above {LEAST_SAVING:.0%}.",
        change=Change(
            knob="estimator",
            direction="optimal-loo",
            sentence="Try the estimator optimal-loo.",
            effect=f"{saving.value:.0%} less variance within prompts than rloo has; `scoregram whatif` compares it "
            "with your estimator.",
            value="optimal-loo",
        ),
    )
