"""Rules on what an update is made of: rollouts, layers and prompts, from the Grams and rollouts of a run folder.

A rule is a function of a `RunReading`, with the same verdicts as the rules on logs.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scoregram.advice.difficulty import HARDER
from scoregram.advice.findings import LEAST_SAVING, Alternative, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.prompt_filter import LEFT_OUT_FILE, LIVE
from scoregram.advice.settings import PROMPTS, draws_problems, reward_steps
from scoregram.bootstrap import FEWEST, clustered_mean, fieller_ratio, mean_estimate, t_mean
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import (
    OWN_TRAINER,
    SAMPLED_TEST,
    TRAINED_AND_FIXED,
    TRL_TRAINER,
    HeldOutInfluence,
    RunReading,
    StoredGroup,
    group_cosines,
    held_out_influence,
    layer_energy_shares,
    layer_signals,
    mean_cosine,
    prompt_products,
    stored_setting,
    trainer_of,
)

DRIVER_SHARE = 0.5
"""Share of the squared update that one rollout may have."""
LAYER_SHARE, LAYER_GROWTH, LAYER_ALONE = 0.5, 5.0, 0.95
"""Share of the update's energy that one layer may have, and how much that share may grow over the run."""
CARRIED, FEW_LAYERS, FEWEST_LAYERS = 0.8, 0.25, 8
"""Layers that have this share of the signal carry the update, if they are at most this share of at least 8 layers."""
ALIKE = 0.9
"""Cosine between right rollouts from which on they count as one solution."""
_TESTED = {OWN_TRAINER: "--eval-samples 4", TRL_TRAINER: "attach keeps no evaluations; scoregram train does"}
_SCORES = {TRL_TRAINER: 'attach(trainer, mode="scores")'}
COMPARED_GROUPS = 256
"""Groups of a third whose cosines are compared: more would cost time and change little."""


OUTLYING = 3.0
"""Distance of a reward from the range of usual ones, in widths of this range, from which on the reward is checked."""


@dataclass(frozen=True, eq=False)
class LargestRow:
    """A rollout of a group."""

    group: StoredGroup
    place: int


def dominating_rollouts(run: RunReading) -> RuleVerdict:
    """One rollout makes most of a step's update."""
    values = run.last_values("gram/largest_share")
    if len(values) < FEWEST:
        return Undecided(f"measure at least {3 * FEWEST - 2} steps, with the Gram between prompts")
    share = mean_estimate(values)
    if not share.low > DRIVER_SHARE:
        return None
    largest = largest_row(run)
    outlier = outlying_reward(run, largest)
    above_one = "; a share is above 1 where the other rollouts cancel a part of it" if max(values) > 1 else ""
    effect = f"the largest share falls from {share.value:.0%} towards that of equal shares"
    effect += f", {1 / run.batch_size:.1%}" if run.batch_size >= 1 else ""
    effect += ". The fall of the noise is unknown until a run with this change."
    told = f"One rollout alone makes {share.value:.0%} of a step's squared update on average. "
    return RunFinding(
        name="dominating rollouts",
        severity="warning",
        sentence=f"{told}{_who_dominates(run, largest)} {outlier}".strip(),
        number=share,
        label="largest share of one rollout, last third",
        evidence=f"found if the whole 95 % interval lies above {DRIVER_SHARE:.0%}; equal shares would be one over the "
        f"batch{above_one}.",
        change=_outlier_repair(run, effect, outlier) if outlier else _smaller_weight(run, effect, largest),
        confidence="certain",
    )


def _outlier_repair(run: RunReading, effect: str, outlier: str) -> Change:
    """Check the rewards in the group of the largest row: one of them is far from all others."""
    low, high = usual_rewards(run)
    return Change(
        knob="reward function",
        direction="repair",
        sentence="Check the rewards of the groups of these rollouts: one is far from all others.",
        effect=effect,
        steps=reward_steps(
            run.config,
            f"Call it on the rollouts of that group. {outlier}",
            f"If that is a mistake, repair it. If it is meant, limit the reward to the range from {low:g} to {high:g}.",
        ),
    )


def _smaller_weight(run: RunReading, effect: str, largest: LargestRow | None) -> Change:
    """Mask the rollout with the largest row, limit its advantage, or divide by length if it is long."""
    is_long = largest is not None and _is_long(run, int(largest.group.record.lengths[largest.place]))
    return Change(
        knob="weight of single rollouts",
        direction="down",
        sentence="Look at these rollouts, and reduce the weight of single ones.",
        effect=effect,
        steps=(
            "Read these rollouts. If they are broken (a loop, another language), let the reward "
            "function return `None` for them: they then add nothing to the update.",
            f"If they are fine, divide by length: they are longer than most{division_by_length(run)}."
            if is_long
            else "If they are fine, limit the advantages.",
        ),
    )


def _is_long(run: RunReading, length: int) -> bool:
    """Whether more than half of the rollouts of the last third are shorter."""
    lengths = np.concatenate([group.record.lengths.numpy() for group in run.last_measured])
    return float(np.mean(lengths < length)) > 0.5


def usual_rewards(run: RunReading) -> tuple[float, float]:
    """The 5 % and the 95 % quantile of the rewards of the last third; `nan` without rewards."""
    rewards = np.concatenate([group.record.rewards.double().numpy() for group in run.last_groups] or [np.zeros(0)])
    known = rewards[np.isfinite(rewards)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, (0.05, 0.95), method="nearest").tolist()
    return low, high


def outlying_reward(run: RunReading, largest: LargestRow | None) -> str:
    """The rewards in the group of the largest row, if one of them is far from the usual ones; else empty.

    Such a reward moves the mean of its group, and so the advantage of each of its rollouts. Far: `OUTLYING` times the
    width of the usual range away from it. Empty if usual rewards are all equal, which says nothing about far.
    """
    low, high = usual_rewards(run)
    if largest is None or not high > low:
        return ""
    rewards = largest.group.record.rewards.double().tolist()
    far = {one: max(low - one, one - high) for one in rewards if math.isfinite(one)}
    extreme = max(far, key=lambda one: far[one], default=math.nan)
    if not far or not far[extreme] > OUTLYING * (high - low):
        return ""
    told = (
        f"Its reward is {rewards[largest.place]:g}; those of its group are {', '.join(f'{one:g}' for one in rewards)}"
    )
    return f"{told}, while 90 % of all rewards lie from {low:g} to {high:g}."


def division_by_length(run: RunReading) -> str:
    """What to type for a loss in which long rollouts weigh no more than short ones."""
    typed = {OWN_TRAINER: "`--objective grpo`", TRL_TRAINER: '`loss_type="grpo"`'}.get(trainer_of(run.config))
    return f" ({typed})" if typed else ""


def largest_row(run: RunReading) -> LargestRow | None:
    """The rollout with the largest row `A_i ψ_i` of the last third; None if there is no row other than zero."""
    found, energy = None, 0.0
    for group in run.last_measured:
        pulls = group.row_energies()
        if len(pulls) and float(pulls.max()) > energy:
            found, energy = LargestRow(group, int(pulls.argmax())), float(pulls.max())
    return found


def _who_dominates(run: RunReading, largest: LargestRow | None) -> str:
    """The prompt, the length and, if stored, the text of the rollout with the largest row of the last third."""
    if largest is None:
        return ""
    worst, place = largest.group.record, largest.place
    told = f"The largest: prompt {worst.prompt_id} at step {worst.step}, {int(worst.lengths[place])} tokens"
    stored = [] if run.folder is None else run.folder.rollouts([worst.step], prompts=[worst.prompt_id])
    text = [one.completion for one in stored if one.kind == worst.kind and one.index == place and one.completion]
    # a step may have several groups of one prompt, and a record does not say which of them it is
    return f"{told}: “{shortened_text(text[0])}”" if len(text) == 1 else f"{told}."


SHOWN_LENGTH = 80
"""Characters of a rollout's text that a finding shows."""


def shortened_text(text: str) -> str:
    """Text on one line; if it is too long, its first `SHOWN_LENGTH` characters and an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_LENGTH else f"{line[:SHOWN_LENGTH]} …"


def dominating_layer(run: RunReading) -> RuleVerdict:
    """One layer carries most of the update, and much more than at the start."""
    shares = layer_energy_shares(run)
    if shares is None:
        return _layers_needed(run, 2 * FEWEST)
    names, first, last = shares
    if len(names) < 2:
        return None
    place = int(np.argmax(last.mean(0)))
    share = mean_estimate(last[:, place])
    growth = share.value / max(float(first[:, place].mean()), 1e-9)
    level = share.low if not math.isnan(share.low) else -math.inf
    is_new = growth > LAYER_GROWTH
    if not (level > LAYER_SHARE and (is_new or level > LAYER_ALONE)):
        return None
    return RunFinding(
        name="exploding layer",
        severity="warning",
        sentence=f"{names[place]} carries {share.value:.0%} of the update's energy"
        + (f", {growth:.0f} times its share at the start." if is_new else ": the other layers hardly learn."),
        number=share,
        label="share of the update's energy in one layer",
        evidence=f"found above {LAYER_SHARE:.0%} if it grew {LAYER_GROWTH:g}-fold, or above {LAYER_ALONE:.0%}.",
        change=Change(
            knob="learning rate of a layer",
            direction="down",
            sentence=f"Check the scale of {names[place]} (its norm, its initialisation), freeze it, or lower its "
            "learning rate.",
            effect=(
                f"its share falls from {share.value:.0%} towards {float(first[:, place].mean()):.0%}, that of the "
                "first steps."
                if is_new
                else f"the other layers get more than {1 - share.value:.0%} of the update."
            )
            + " The effect on the reward is unknown until a run with this change.",
            steps=_steps_for_a_layer(names[place]),
        ),
        confidence="certain",
    )


def _steps_for_a_layer(name: str) -> tuple[str, ...]:
    """How to look at a layer, or at a kind of layer such as `layers.*.mlp`, and how to slow it down."""
    freeze = f"model.get_submodule({name!r}).requires_grad_(False)"
    if "*" in name:
        freeze = f"for n, layer in model.named_modules(): fnmatch(n, {name!r}) and layer.requires_grad_(False)"
    return (
        f"Print the norm of the weights of `{name}` and of its input at the first and the last checkpoint.",
        f"If one grew, freeze the layer: `{freeze}`.",
        "Or give it a parameter group of its own with a tenth of the learning rate.",
    )


def _layers_needed(run: RunReading, steps: int) -> Undecided:
    """Measure more steps if there are too few; else store the Grams of layers, of a model that has several."""
    usable = len(run.usable_steps)
    if usable < steps:
        return Undecided(f"measure at least {steps} steps with groups of 4 or more; here are {usable}")
    options = {OWN_TRAINER: "--layers float32", TRL_TRAINER: 'attach(trainer, layers="float32")'}
    return Undecided(f"store the Grams of layers, of {FEWEST_LAYERS} or more", options)


def carrying_layers(run: RunReading) -> RuleVerdict:
    """A few layers have most of the signal of the gradient: candidates for LoRA targets.

    Every other measured step chooses the fewest layers that have `CARRIED` of the signal; the remaining steps estimate
    their share, which the choice would otherwise inflate.
    """
    found = layer_signals(run)
    if found is None or len(found[0]) < FEWEST_LAYERS:
        return _layers_needed(run, 6 * FEWEST)
    names, signals = found
    chosen = fewest_layers(signals[::2].mean(0), CARRIED)
    judged = signals[1::2]
    share = fieller_ratio(judged[:, chosen].sum(1), judged.sum(1))
    if not math.isfinite(share.low):
        return Undecided("measure more steps: the signal of the gradient is not resolved")
    if not (share.low > LAYER_SHARE and len(chosen) <= len(names) * FEW_LAYERS):
        return None
    shares = {names[place]: fieller_ratio(judged[:, place], judged.sum(1)) for place in chosen}
    return RunFinding(
        name="layers that carry the update",
        severity="note",
        sentence=f"{len(chosen)} of {len(names)} layers have most of the gradient's squared norm.",
        number=share,
        label="their share of the gradient's squared norm, last third",
        evidence=f"unbiased |g|² of each layer; chosen at every other step, judged at the other {len(judged)}. Found "
        f"if they are at most {FEW_LAYERS:.0%} of the layers and the interval lies above {LAYER_SHARE:.0%}.",
        change=Change(
            knob="LoRA targets",
            direction="few",
            sentence="For LoRA, try these layers as targets, all with the same rank.",
            effect=f"adapters on {len(chosen)} of {len(names)} layers. The reward that they reach is unknown: a layer "
            "without signal now may get one later, so compare with all linear layers. Ranks in proportion to such "
            "shares have lost against equal ranks.",
            steps=(
                f"Leave out embeddings and norms, which take no adapter, and type{_lora_targets(run, shares)}.",
                "Train once more with all linear layers and the same seed, to compare.",
            ),
        ),
        confidence="possible",
        listing=tuple(f"{cell_text(one)}  {name}" for name, one in shares.items()),
    )


def _lora_targets(run: RunReading, layers: Iterable[str]) -> str:
    """The option that puts adapters on some layers alone."""
    names = [name.rpartition("*.")[2] for name in layers]  # of a kind of layer, the end of its name
    if trainer_of(run.config) == TRL_TRAINER:
        return f" `LoraConfig(target_modules={names})` as `peft_config`"
    return f" `--lora-rank 16 --lora-targets {' '.join(names)}`"


def fewest_layers(signals: np.ndarray, share: float) -> list[int]:
    """Places of the fewest layers that together have a share of the signal, the largest first.

    Estimates below 0 count as 0; all layers if none has a signal.

    Example:
        >>> fewest_layers(np.array([1.0, 6.0, -1.0, 3.0]), 0.8)
        [1, 3]
    """
    known = np.clip(signals, 0, None)
    order = np.argsort(-known, kind="stable")
    reached = np.cumsum(known[order]) >= share * known.sum()
    count = int(np.argmax(reached)) + 1 if known.sum() > 0 else len(known)
    return order[:count].tolist()


def conflicting_prompts(run: RunReading) -> RuleVerdict:
    """Some prompts pull against the others, step after step."""
    trained = [batch for batch in run.batch_names if batch.kind == "train" and batch.step not in run.trust.failed]
    visits = Counter(name for batch in trained for name in batch.prompt_ids)
    steps = {batch.step for batch in trained if any(visits[name] >= FEWEST for name in batch.prompt_ids)}
    products = prompt_products(run.batches(steps))
    seen = {name: values for name, values in products.items() if len(values) >= FEWEST}
    if not seen:
        options = {OWN_TRAINER: "--batches-every 1", TRL_TRAINER: "attach(trainer, every=1), on few prompts"}
        return Undecided("store whole batches in which prompts come back at least five times", options)
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
        label="inner product of its gradient with the mean of the others, over the mean squared score norm / R",
        evidence="found if the mean over the visits is below 0 in a t test, corrected for the number of prompts.",
        change=Change(
            knob="prompt set",
            direction="split",
            sentence=f"Check the rewards of {', '.join(against[:5])}: leave them out, or train on them separately.",
            effect=f"the gradients of the other {len(seen) - len(against)} prompts no longer cancel against these. The "
            "rise in reward is unknown until a run with this change.",
            steps=leave_out_steps(run, against),
        ),
    )


def held_out_prompts(run: RunReading) -> RuleVerdict:
    """Training prompts whose gradients help or hurt held-out prompts: a keep-list, and a list to check."""
    steps = {batch.step for batch in run.batch_names if batch.kind == TRAINED_AND_FIXED}
    found = held_out_influence(run.batches(steps - run.trust.failed))
    if not found.effects:
        options = {
            OWN_TRAINER: "--probe-every 1 --probe-trained, and few --train-problems",
            TRL_TRAINER: "attach has no probes; scoregram train has",
        }
        return Undecided("store training rollouts with probes", options)
    if not found.helping and not found.hurting:
        return None
    count, worst = len(found.effects), (found.hurting or found.helping)[0]
    keep, check = (f"{len(names)} of {count} training prompts" for names in (found.helping, found.hurting))
    return RunFinding(
        name="held-out influence",
        severity="warning" if found.hurting else "note",
        sentence=f"{check} push against held-out prompts." if found.hurting else f"{keep} help held-out prompts.",
        number=found.effects[worst],
        label=f"inner product of the gradient of {worst} with those of held-out prompts, over the mean squared "
        "score norm / R",
        evidence=f"unbiased products at {found.probes} probes, at least {FEWEST} for each prompt; 99 % t intervals "
        f"over probes, corrected for {count} prompts. Shuffled held-out rewards give {found.by_chance:.1f} of them.",
        change=Change(
            knob="prompt set",
            direction="split" if found.hurting else "keep",
            sentence=f"Check the rewards of {', '.join(found.hurting[:5])}, or leave them out."
            if found.hurting
            else "Keep these prompts; draw them more often.",
            effect="to first order of a plain gradient step, a larger share of the update raises held-out rewards. The "
            "size of the rise is unknown: the optimiser and later steps change it.",
            steps=leave_out_steps(run, found.hurting) if found.hurting else keep_steps(found.helping),
        ),
        listing=tuple(_effect_line(found, name) for name in [*found.hurting, *found.helping]),
    )


def leave_out_steps(run: RunReading, names: Sequence[str]) -> tuple[str, ...]:
    """How to train without some prompts, after their rewards were checked."""
    folder = "RUN" if run.folder is None else shlex.quote(str(run.folder.folder))
    typed = " ".join(map(shlex.quote, names))
    out = LIVE if trainer_of(run.config) == OWN_TRAINER else LEFT_OUT_FILE
    return (
        "Read some rollouts of these prompts: is the reward what you mean by it?",
        f"If it is, leave the prompts out: `scoregram filter {folder} --names {typed} --out {out}`. It prints what to "
        "type next.",
    )


def keep_steps(names: Sequence[str]) -> tuple[str, ...]:
    """How to train more often on some prompts."""
    return (f"Repeat the lines of these {len(names)} prompts, listed below, in your training data.",)


def _effect_line(found: HeldOutInfluence, name: str) -> str:
    effect = found.effects[name]
    return f"{'hurts' if effect.high < 0 else 'helps'}  {cell_text(effect)}  {name}"


def lost_exploration(run: RunReading) -> RuleVerdict:
    """Right rollouts of a prompt have nearly the same gradient by now: they are one solution."""
    if run.rows == "loss":
        return Undecided("measure scores: rows of a loss have the sign of their advantage", _SCORES)
    third = [group for group in run.groups[: len(run.groups) // 3] if group.record.step not in run.trust.failed]
    first, last = (group_cosines(part) for part in (third[:COMPARED_GROUPS], run.last_measured[-COMPARED_GROUPS:]))
    if min(len({one.prompt for one in part}) for part in (first, last)) < FEWEST:
        return Undecided("measure groups with two or more right rollouts on five prompts, early and late")
    before, now = (mean_cosine(part, "right_right") for part in (first, last))
    if not (now.low > ALIKE and before.high < now.low - LEAST_SAVING):
        return None
    wrong = mean_cosine(last, "right_wrong")
    return RunFinding(
        name="lost exploration",
        severity="warning",
        sentence="The right rollouts of a prompt have come to nearly the same gradient: one solution to each is left. "
        + _wrong_beside_right(wrong),
        number=now,
        label="mean cosine between right rollouts of a group, last third",
        evidence=f"found above {ALIKE:g} if it was lower in the first third, {cell_text(before)}. Between right and "
        f"wrong rollouts it is {cell_text(wrong)}, at first {cell_text(mean_cosine(first, 'right_wrong'))}. Intervals "
        "over prompts.",
        change=Change(
            knob="exploration",
            direction="up",
            sentence="Raise the sampling temperature.",
            alternatives=(
                Alternative("entropy bonus", "up", "Add an entropy bonus."),
                Alternative(PROMPTS, HARDER, "Draw harder prompts."),
            ),
            effect=f"right rollouts differ again: a mean cosine below {now.value:.2f}, at first it was "
            f"{before.value:.2f}. How far it falls is unknown until a run with this change.",
        ),
    )


def _wrong_beside_right(cosine: Estimate) -> str:
    """What the cosine between right and wrong rollouts adds to the finding."""
    if cosine.low > ALIKE:
        return "Wrong rollouts have nearly the same gradient as right ones."
    if cosine.high < ALIKE:
        return "Wrong rollouts differ from them."
    return "Whether wrong rollouts have it too is not resolved."


def memorised_prompts(run: RunReading) -> RuleVerdict:
    """The policy earns more on the prompts that it trains on than on held-out ones, both in the last third of the run.

    The units are prompts: many visits of a few prompts say little about others. Both means are over the same steps,
    since a policy that drifts would otherwise be compared with another one.
    """
    evaluations = run.tests.get(SAMPLED_TEST)
    prompts = [group.record.prompt_id for group in run.last_groups]
    if not evaluations or len(set(prompts)) < FEWEST:
        return Undecided("evaluate sampled rollouts of test problems, and record groups of five prompts", _TESTED)
    trained = clustered_mean([group.mean_reward for group in run.last_groups], prompts)
    steps = [step for step in evaluations if step in run.last_third]
    if not steps:
        return Undecided("evaluate sampled rollouts of test problems in the last third of the run", _TESTED)
    rewards = [(problem, reward) for step in steps for problem, reward in evaluations[step].items()]
    tested = clustered_mean([reward for _, reward in rewards], [problem for problem, _ in rewards])
    if math.isnan(trained.low) or math.isnan(tested.high):
        return Undecided("evaluate sampled rollouts of more test problems", _TESTED)
    if not (trained.low > tested.high and trained.value - tested.value >= LEAST_SAVING):
        return None
    return RunFinding(
        name="overfitting to prompts",
        severity="warning",
        sentence=f"Sampled in the same way, the policy earns {cell_text(trained)} on the prompts that it trains on and "
        f"{cell_text(tested)} on test problems.",
        number=Estimate(trained.value - tested.value),
        label="difference of the mean rewards",
        evidence="means over the last third; found if the 95 % intervals, both over prompts, do not overlap. This "
        "assumes that test problems are no harder.",
        change=Change(
            knob="prompt set",
            direction="larger",
            sentence="Train on more prompts.",
            effect=f"the difference of {trained.value - tested.value:.2f} shrinks. By how much is unknown until a "
            "run on more prompts.",
            steps=_more_prompts(run, len(set(prompts))),
        ),
        confidence="possible",
        without_gram=True,
    )


def _more_prompts(run: RunReading, seen: int) -> tuple[str, ...]:
    """How to train on more prompts in the trainer of the run."""
    used = stored_setting(run.config, "train_problems")
    if used:
        return (f"Use all training problems of the task: `--train-problems 0` (now {used}).",)
    if trainer_of(run.config) == TRL_TRAINER:
        return (f"Pass a larger `train_dataset`; the last third used {seen} prompts.",)
    if draws_problems(run.config):
        return (f"Train longer: the task draws its problems, and the last third used {seen} of them.",)
    return (f"Add training problems; the last third used {seen} prompts.",)
