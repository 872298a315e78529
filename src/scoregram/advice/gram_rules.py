"""Rules that need more than scalars: they read the Grams, groups and rollouts of a run folder.

A rule is a function of a `RunReading`, with the same verdicts as the rules on logs. Numbers pooled over steps come from
`RunReading.noise()`; with too few steps for an interval a rule concludes nothing.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from scoregram.advantages import ESTIMATORS
from scoregram.advice.findings import Change, RuleVerdict, RunFinding, Undecided
from scoregram.bootstrap import FEWEST, clustered_mean, mean_estimate, t_mean
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import REFERENCE, SAMPLED_TEST, RunReading, StoredGroup, can_replay, replay_groups
from scoregram.runs import BatchRecord
from scoregram.statistics import mixed_probability, mse_curve, prompt_estimates

WANTED_LIVE = 0.8
"""Share of live groups that a group size aims at where no Gram says more."""
LARGEST_ADVISED_GROUP = 1024
NOISE_FACTOR = 4.0
"""Factor between noise scale and batch size above which another batch size is advised."""
LEAST_SAVING = 0.05
"""Smallest gain that is worth a change of setting."""
DRIVER_SHARE = 0.5
"""Share of the squared update that one rollout may have."""
LAYER_SHARE, LAYER_GROWTH = 0.5, 5.0
"""Share of the update's energy that one layer may have, and how much that share may grow over the run."""
ALIKE = 0.9
"""Cosine between right rollouts from which on they count as one solution."""
REPLAYED = 256
"""Groups of the last third that are replayed or compared: more would cost time and change little."""
_MORE_STEPS = "measure at least 15 steps, with groups of 4 or more and the Gram between prompts"


def group_size_for(chances: Sequence[float], wanted: float = WANTED_LIVE) -> int | None:
    """Least group size at which a share `wanted` of groups is expected to be live, given the prompts' success rates.

    None if no size up to 1024 reaches it.

    Example:
        >>> group_size_for([0.5], 0.8), group_size_for([0.0, 0.5], 0.8)
        (4, None)
    """
    for size in range(2, LARGEST_ADVISED_GROUP + 1):
        if live_share_at(chances, size) >= wanted:
            return size
    return None


def live_share_at(chances: Sequence[float], size: int) -> float:
    """Expected share of live groups of a size; `nan` without prompts."""
    return sum(mixed_probability(chance, size) for chance in chances) / len(chances) if chances else math.nan


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


def _size_by_error(run: RunReading, used: int) -> RuleVerdict:
    noise = run.noise()
    best = noise.best_group_size
    assert noise.components is not None
    wanted = max(2, round(best.value)) if math.isfinite(best.value) else 2 * used
    if wanted == used:
        return None
    error = mse_curve(noise.components, 1, torch.tensor([used, wanted])).tolist()
    gain = 1 - error[1] / error[0] if error[0] > 0 else math.nan
    if math.isnan(gain) or gain < LEAST_SAVING:
        return None
    live = live_share_at(run.success_rates(), wanted)
    told = "" if math.isnan(live) else f", with about {live:.0%} of the groups live"
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
            sentence=f"Use groups of about {wanted} in place of {used}, with {'more' if wanted < used else 'fewer'} "
            "prompts.",
            effect=f"the squared error of an update falls by about {gain:.0%} at equal rollouts{told}.",
        ),
    )


def _size_by_liveness(run: RunReading, used: int) -> RuleVerdict:
    dead, rates = run.summary.dead, run.success_rates()
    if not (dead.low > 0.5 and rates):
        return Undecided(_MORE_STEPS)
    size = group_size_for(rates)
    if size is None or size <= used:
        return Undecided(f"{_MORE_STEPS}: liveness alone does not name a size")
    return RunFinding(
        name="group size",
        severity="note",
        sentence=f"Groups of {used} are mostly dead; no Gram says whether larger ones would have less error.",
        number=dead,
        label="share of dead groups in the last third",
        evidence=f"the success rates of {len(rates)} prompts, (right + ½) / (rollouts + 1).",
        change=Change(
            knob="group size",
            direction="up",
            sentence=f"Try groups of {size}, or measure {FEWEST * 3} steps to know the best size.",
            effect=f"{WANTED_LIVE:.0%} of the groups would be live.",
        ),
        confidence="possible",
    )


def batch_size(run: RunReading) -> RuleVerdict:
    """The batch is far below the noise scale, or far above it."""
    noise, batch = run.noise(), run.batch_size
    scale = noise.noise_scale
    if math.isnan(scale.low) or not math.isfinite(batch):
        return Undecided(_MORE_STEPS)
    if scale.low > NOISE_FACTOR * batch:
        least = f"towards {scale.low:.0f} or more" if math.isfinite(scale.low) else "well beyond that"
        return _batch_finding(
            run,
            "up",
            f"Steps of {batch:g} rollouts are mostly noise: signal to noise is {cell_text(noise.snr)}.",
            f"Use more rollouts per step, {least}, or a smaller learning rate.",
            "the signal to noise of a step grows in proportion to its rollouts.",
        )
    if scale.high < batch / NOISE_FACTOR:
        return _batch_finding(
            run,
            "down",
            f"Steps of {batch:g} rollouts average more than needed: the signal is {noise.snr.value:.1f} times the "
            "noise.",
            f"Use fewer rollouts per step, towards {scale.high:.0f}, and more steps.",
            "nearly the same progress per step for a part of the rollouts.",
        )
    decided = batch / NOISE_FACTOR <= scale.low and scale.high <= NOISE_FACTOR * batch
    return None if decided else Undecided("measure more steps: the interval of the noise scale is too wide")


def _batch_finding(run: RunReading, direction: str, sentence: str, advice: str, effect: str) -> RunFinding:
    return RunFinding(
        name="batch size",
        severity="warning" if direction == "up" else "note",
        sentence=sentence,
        number=run.noise().noise_scale,
        label="noise scale in rollouts",
        evidence=f"found if the whole 95 % interval over {run.noise().steps} steps is {NOISE_FACTOR:g} times above or "
        "below the "
        "batch.",
        change=Change(knob="batch size", direction=direction, sentence=advice, effect=effect),
    )


def advantage_estimator(run: RunReading) -> RuleVerdict:
    """Another baseline or normalisation would have had less error on these very rollouts."""
    used = str(run.config.get("estimator") or run.config.get("method") or "")
    size = run.group_size or 0
    groups = [group for group in run.last_measured if group.size == size and group.is_complete][-REPLAYED:]
    if used not in ESTIMATORS or not can_replay(used):
        return Undecided("the config must name a group-level estimator")
    if len(groups) < 20 or size // 2 < 2 or not run.noise().is_conclusive:
        return Undecided("measure at least 15 steps and 20 groups of 4 or more")
    others = [name for name in (REFERENCE, "optimal-loo") if name != used and ESTIMATORS[name].min_group <= size // 2]
    rows = {row.estimator: row for row in replay_groups(groups, size, [used, *others]).rows}
    own = rows[used].efficiency if used != REFERENCE else Estimate(1.0, 1.0, 1.0)
    gains = {
        name: (1.0 if name == REFERENCE else rows[name].efficiency.low) / own.high
        for name in others
        if own.high > 0 and not math.isnan(own.high)
    }
    if not gains:
        return Undecided("measure more groups: the signal of the estimators is not resolved")
    best = max(gains, key=lambda name: gains[name])
    if not gains[best] > 1 + LEAST_SAVING:
        return None
    value = 1.0 if best == REFERENCE else rows[best].efficiency.value
    return RunFinding(
        name="estimator",
        severity="warning",
        sentence=f"On these rollouts {best} has more signal for the same noise than {used}"
        + (", which divides by the standard deviation." if "grpo" in used else "."),
        number=own,
        label=f"efficiency of {used}, {REFERENCE} = 1",
        evidence=f"{len(groups)} groups of the last third replayed in halves; found if the intervals are apart by "
        f"{LEAST_SAVING:.0%}.",
        change=Change(
            knob="estimator",
            direction=best,
            sentence=f"Use {best}.",
            effect=f"an update of the same quality from {own.value / value:.0%} of the groups.",
        ),
    )


def baseline(run: RunReading) -> RuleVerdict:
    """The variance-minimising baseline would save a part of the noise within prompts."""
    saving = run.noise().baseline_saving
    if math.isnan(saving.low):
        return Undecided(_MORE_STEPS)
    if not saving.low > LEAST_SAVING:
        return None if saving.high <= LEAST_SAVING else Undecided("measure more steps: its interval is too wide")
    return RunFinding(
        name="baseline",
        severity="note",
        sentence=f"The best baseline would save {saving.value:.0%} of the variance within prompts, before the cost of "
        "estimating "
        "it.",
        number=saving,
        label="share of the variance saved",
        evidence=f"found if the whole 95 % interval lies above {LEAST_SAVING:.0%}.",
        change=Change(
            knob="estimator",
            direction="optimal-loo",
            sentence="Try the estimator optimal-loo, or opo-loo, which needs lengths only.",
            effect="less noise per rollout; `scoregram whatif` shows how much is left after estimating the baseline.",
        ),
    )


def dominating_rollouts(run: RunReading) -> RuleVerdict:
    """One rollout makes most of a step's update."""
    values = run.last_values("gram/largest_share")
    if len(values) < FEWEST:
        return Undecided(_MORE_STEPS)
    share = mean_estimate(values)
    if not share.low > DRIVER_SHARE:
        return None
    return RunFinding(
        name="dominating rollouts",
        severity="warning",
        sentence=f"One rollout alone makes {share.value:.0%} of a step's squared update on average. "
        f"{_who_dominates(run)}".strip(),
        number=share,
        label="largest share of one rollout, last third",
        evidence=f"found if the whole 95 % interval lies above {DRIVER_SHARE:.0%}; equal shares would be one over the "
        "batch.",
        change=Change(
            knob="weight of long rollouts",
            direction="down",
            sentence="Look at these rollouts; weight tokens equally or normalise by length, clip advantages, or mask "
            "them.",
            effect="the update averages over rollouts again; its noise falls.",
        ),
        confidence="certain",
    )


def _who_dominates(run: RunReading) -> str:
    """The prompt, the length and, if stored, the text of the rollout with the largest `A² K_ii` of the last third."""
    worst, place, energy = None, 0, 0.0
    for group in run.last_groups:
        if group.record.gram is None:
            continue
        pulls = group.record.advantages.double().square() * group.record.gram.diagonal().double()
        if float(pulls.max()) > energy:
            worst, place, energy = group.record, int(pulls.argmax()), float(pulls.max())
    if worst is None:
        return ""
    told = f"The largest: prompt {worst.prompt_id} at step {worst.step}, {int(worst.lengths[place])} tokens"
    stored = [] if run.folder is None else list(run.folder.rollouts([worst.step]))
    text = [r.completion for r in stored if r.prompt_id == worst.prompt_id and r.index == place and r.completion]
    return f"{told}: “{shortened(text[0])}”" if text else f"{told}."


def shortened(text: str, most: int = 80) -> str:
    """Text on one line; if it is too long, its first characters and an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} …"


def dominating_layer(run: RunReading) -> RuleVerdict:
    """One layer carries most of the update, and much more than at the start."""
    shares = layer_energy_shares(run)
    if shares is None:
        return Undecided("store the Grams of layers (--layers float32)")
    names, first, last = shares
    place = int(np.argmax(last.mean(0)))
    share = mean_estimate(last[:, place])
    growth = share.value / max(float(first[:, place].mean()), 1e-9)
    level = share.low if not math.isnan(share.low) else -math.inf
    is_new = growth > LAYER_GROWTH
    if not (level > LAYER_SHARE and (is_new or level > 0.95)):
        return None
    return RunFinding(
        name="exploding layer",
        severity="warning",
        sentence=f"{names[place]} carries {share.value:.0%} of the update's energy"
        + (f", {growth:.0f} times its share at the start." if is_new else ": the other layers hardly learn."),
        number=share,
        label="share of the update's energy in one layer",
        evidence=f"found above {LAYER_SHARE:.0%} if it grew {LAYER_GROWTH:g}-fold, or above 95 %.",
        change=Change(
            knob="learning rate of a layer",
            direction="down",
            sentence=f"Check the scale of {names[place]} (its norm, its initialisation), freeze it, or lower its "
            "learning rate.",
            effect="the update spreads over layers; steps of a given norm change the policy more evenly.",
        ),
        confidence="certain",
    )


def layer_energy_shares(run: RunReading, steps: int = 10) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Layers, and their shares of `Σ_groups |Σ_i A_i ψ_i|²` at the first and the last measured steps `(steps, L)`.

    None without Grams of layers at `FEWEST` steps. The squared norm of an update is the sum over layers, so shares add
    up to 1.
    """
    measured = sorted({group.record.step for group in run.groups if group.record.gram is not None})
    if run.folder is None or len(measured) < 2 * FEWEST:
        return None
    count = min(steps, len(measured) // 2)
    names: list[str] = []
    tables = []
    for chosen in (measured[:count], measured[-count:]):
        rows: dict[int, np.ndarray] = {}
        for record in run.folder.groups(chosen):
            if record.kind == run.groups[0].record.kind and record.by_layer:
                names = names or list(record.by_layer)
                a = record.advantages.double()
                energy = [float(a @ record.by_layer[name].double() @ a) for name in names if name in record.by_layer]
                rows[record.step] = rows.get(record.step, 0.0) + np.array(energy)
        shares = [row / row.sum() for row in rows.values() if len(row) == len(names) and row.sum() > 0]
        tables.append(np.array(shares))
    if not names or min(map(len, tables)) < FEWEST:
        return None
    return names, tables[0], tables[1]


def conflicting_prompts(run: RunReading) -> RuleVerdict:
    """Some prompts pull against the others, step after step."""
    products = prompt_products(() if run.folder is None else run.folder.batches())
    seen = {name: values for name, values in products.items() if len(values) >= FEWEST}
    if not seen:
        return Undecided("store whole batches in which prompts come back at least five times (--batches-every 1)")
    bounds = {name: t_mean(values, tests=len(seen)) for name, values in seen.items()}
    against = [name for name, bound in bounds.items() if bound.high < 0]
    if not against:
        return None
    worst = min(against, key=lambda name: bounds[name].value)
    return RunFinding(
        name="conflicting prompts",
        severity="warning",
        sentence=f"{len(against)} of {len(seen)} prompts pull against the rest of their batches, {worst} most.",
        number=bounds[worst],
        label="inner product of its gradient with that of the others, over their norms",
        evidence="found if the mean over the visits is below 0 in a t test, corrected for the number of prompts.",
        change=Change(
            knob="prompt set",
            direction="split",
            sentence=f"Check the rewards of {', '.join(against[:5])}: leave them out, or train on them separately.",
            effect="the gradients of the remaining prompts no longer cancel.",
        ),
    )


def prompt_products(batches: Iterable[BatchRecord]) -> dict[str, list[float]]:
    """Prompt → for each visit, the inner product of its gradient with the mean of the other prompts of the step.

    Unbiased leave-one-out gradients of independent groups; divided by the mean squared norm of the step's groups, so
    that steps count alike.
    """
    found: dict[str, list[float]] = {}
    for batch in batches:
        size = int(batch.sizes[0])
        rewards = batch.rewards.double().reshape(-1, size) if bool((batch.sizes == size).all()) else None
        if (
            rewards is None
            or size < 4
            or len(rewards) < 2
            or not bool(rewards.isfinite().all())
            or batch.kind != "train"
        ):
            continue
        inner = prompt_estimates(batch.gram.double(), rewards).gradient_gram
        others = (inner.sum(1) - inner.diagonal()) / (len(rewards) - 1)
        scale = float(batch.gram.diagonal().double().mean()) / size
        for name, value in zip(batch.prompt_ids, others.tolist(), strict=True):
            found.setdefault(name, []).append(value / scale if scale > 0 else 0.0)
    return found


def lost_exploration(run: RunReading) -> RuleVerdict:
    """Right rollouts of a prompt have nearly the same gradient by now: they are one solution."""
    third = len(run.groups) // 3
    first, last = (right_cosines(part) for part in (run.groups[:third][:REPLAYED], run.last_measured[-REPLAYED:]))
    if min(len({prompt for prompt, _ in part}) for part in (first, last)) < FEWEST:
        return Undecided("measure groups with two or more right rollouts on five prompts, early and late")
    before, now = (
        clustered_mean([value for _, value in part], [prompt for prompt, _ in part]) for part in (first, last)
    )
    if not (now.low > ALIKE and before.high < now.low - LEAST_SAVING):
        return None
    return RunFinding(
        name="lost exploration",
        severity="warning",
        sentence="The right rollouts of a prompt have come to nearly the same gradient: one solution to each is left.",
        number=now,
        label="mean cosine between right rollouts of a group, last third",
        evidence=f"found above {ALIKE:g} if it was lower in the first third, {cell_text(before)}; intervals over "
        "prompts.",
        change=Change(
            knob="exploration",
            direction="up",
            sentence="Raise the sampling temperature or add an entropy bonus; draw harder prompts.",
            effect="right rollouts differ again, before the entropy shows it.",
        ),
    )


def right_cosines(groups: Iterable[StoredGroup]) -> list[tuple[str, float]]:
    """Prompt and mean cosine between the right rollouts of each group that has two or more of them, and a wrong one."""
    found = []
    for group in groups:
        record = group.record
        if record.gram is None or not group.right or group.right < 2 or group.right == group.size:
            continue
        right = torch.nonzero(record.rewards == 1).flatten()
        gram = record.gram.double()[right][:, right]
        norms = gram.diagonal().clamp(min=0).sqrt()
        if bool((norms > 0).all()):
            cosine = gram / norms[:, None] / norms[None, :]
            pairs = len(right) * (len(right) - 1)
            found.append((record.prompt_id, float((cosine.sum() - cosine.diagonal().sum()) / pairs)))
    return found


def memorised_prompts(run: RunReading) -> RuleVerdict:
    """The policy earns more on the prompts that it trains on than on held-out ones."""
    if not run.tests.get(SAMPLED_TEST):  # asked first: the summary of a long run takes time
        return Undecided("evaluate on test problems with --eval-samples")
    trained, tested = run.summary.reward, run.summary.tested
    if math.isnan(trained.low) or math.isnan(tested.high):
        return Undecided("evaluate on test problems with --eval-samples")
    if not (trained.low > tested.high and trained.value - tested.value >= LEAST_SAVING):
        return None
    return RunFinding(
        name="overfitting to prompts",
        severity="warning",
        sentence=f"Sampled in the same way, the policy earns {cell_text(trained)} on the prompts that it trains on and "
        f"{cell_text(tested)} on test problems.",
        number=Estimate(trained.value - tested.value),
        label="difference of the mean rewards",
        evidence="found if the 95 % intervals do not overlap; this assumes that test problems are no harder.",
        change=Change(
            knob="prompt set",
            direction="larger",
            sentence="Train on more prompts.",
            effect="both rewards move together.",
        ),
        confidence="possible",
    )
