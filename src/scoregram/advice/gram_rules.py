"""Rules on what an update is made of: rollouts, layers and prompts, from the Grams and rollouts of a run folder.

A rule is a function of a `RunReading`, with the same verdicts as the rules on logs.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scoregram.advantages import leave_one_out
from scoregram.advice.findings import LEAST_SAVING, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.prompt_filter import LEFT_OUT_FILE, LIVE
from scoregram.advice.settings import OWN_TRAINER, TRL_TRAINER, draws_problems, stored_setting, trainer_of
from scoregram.bootstrap import FEWEST, clustered_mean, fieller_ratio, mean_estimate, t_mean
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import (
    SAMPLED_TEST,
    TRAINED_AND_FIXED,
    HeldOutInfluence,
    RunReading,
    StoredGroup,
    held_out_influence,
    row_factors,
)
from scoregram.runs import BatchRecord
from scoregram.statistics import group_moments

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


def dominating_rollouts(run: RunReading) -> RuleVerdict:
    """One rollout makes most of a step's update."""
    values = run.last_values("gram/largest_share")
    if len(values) < FEWEST:
        return Undecided("measure at least 15 steps, with the Gram between prompts")
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
            effect=f"the largest share falls from {share.value:.0%} towards that of equal shares"
            + (f", {1 / run.batch_size:.1%}" if run.batch_size >= 1 else "")
            + ". By how much the noise falls cannot be said before one run.",
            steps=(
                "Not a setting: read these rollouts. If they are broken (a loop, another language), let the reward "
                "function return `None` for them: they then add nothing to the update.",
                "If they are fine and long, divide by length" + _by_length(run) + ".",
            ),
        ),
        confidence="certain",
    )


def _by_length(run: RunReading) -> str:
    """What to type for a loss in which long rollouts weigh no more than short ones."""
    typed = {OWN_TRAINER: "`--objective grpo`", TRL_TRAINER: '`loss_type="grpo"`'}.get(trainer_of(run.config))
    return f": {typed}" if typed else ""


def _who_dominates(run: RunReading) -> str:
    """The prompt, the length and, if stored, the text of the rollout with the largest row of the last third."""
    worst, place, energy = None, 0, 0.0
    for group in run.last_measured:
        pulls = group.row_energies()
        if len(pulls) and float(pulls.max()) > energy:
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
            + " What that does for the reward cannot be said.",
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
        f"Not a setting: print the norm of the weights of `{name}` and of its input at the first and the last "
        "checkpoint.",
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


def layer_energy_shares(run: RunReading, steps: int = 10) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Layers, and their shares of `Σ_groups |Σ_i A_i ψ_i|²` at the first and the last measured steps `(steps, L)`.

    Rows of a loss include their weights and are summed as they are. Steps whose self-check failed do not count. None
    without Grams of layers at `FEWEST` steps. The squared norm of an update is the sum over layers, so shares add up to
    1.
    """
    measured = run.usable_steps
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
                a = row_factors(record.advantages.double(), record.rows)
                energy = [float(a @ record.by_layer[name].double() @ a) for name in names if name in record.by_layer]
                rows[record.step] = rows.get(record.step, 0.0) + np.array(energy)
        shares = [row / row.sum() for row in rows.values() if len(row) == len(names) and row.sum() > 0]
        tables.append(np.array(shares))
    if not names or min(map(len, tables)) < FEWEST:
        return None
    return names, tables[0], tables[1]


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
            effect=f"adapters on {len(chosen)} of {len(names)} layers. What reward they reach cannot be said: a layer "
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


def layer_signals(run: RunReading, steps: int = 30) -> tuple[list[str], np.ndarray] | None:
    """Layers, and the unbiased `|g|²` of each `(steps, L)`: the mean over the complete groups of a step.

    From the last measured steps of the last third, at most `steps`. None with fewer than `2 FEWEST` of them.
    """
    size = run.group_size or 0
    measured = sorted({group.record.step for group in run.last_measured if group.is_complete and group.size == size})
    if run.folder is None or size < 4:
        return None
    names: list[str] = []
    rows: dict[int, list[np.ndarray]] = {}
    for record in run.folder.groups(measured[-steps:]):
        if record.kind != run.groups[0].record.kind or len(record.rewards) != size or not record.by_layer:
            continue
        names = names or list(record.by_layer)
        if list(record.by_layer) == names and bool(record.rewards.isfinite().all()):
            grams = torch.stack([gram.double() for gram in record.by_layer.values()])  # (L, R, R)
            moments = group_moments(grams, record.rewards.double().expand(len(names), -1))
            rows.setdefault(record.step, []).append(moments.gradient_squared.numpy())
    if len(rows) < 2 * FEWEST:
        return None
    return names, np.array([np.mean(rows[step], axis=0) for step in sorted(rows)])


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
            effect=f"the gradients of the other {len(seen) - len(against)} prompts no longer cancel against these. By "
            "how much the reward rises cannot be said before one run.",
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
        label=f"inner product of the gradient of {worst} with those of held-out prompts, over the squared score",
        evidence=f"unbiased products at {found.probes} probes, at least {FEWEST} for each prompt; 99 % t intervals "
        f"over probes, corrected for {count} prompts. Shuffled held-out rewards give {found.by_chance:.1f} of them.",
        change=Change(
            knob="prompt set",
            direction="split" if found.hurting else "keep",
            sentence=f"Check the rewards of {', '.join(found.hurting[:5])}, or leave them out."
            if found.hurting
            else "Keep these prompts; draw them more often.",
            effect="to first order of a plain gradient step, a larger share of the update raises held-out rewards. By "
            "how much cannot be said: the optimiser and later steps change it.",
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
    return (f"Not a setting: repeat the lines of these {len(names)} prompts, listed below, in your training data.",)


def _effect_line(found: HeldOutInfluence, name: str) -> str:
    effect = found.effects[name]
    return f"{'hurts' if effect.high < 0 else 'helps'}  {cell_text(effect)}  {name}"


def prompt_products(batches: Iterable[BatchRecord]) -> dict[str, list[float]]:
    """Prompt → for each visit, the inner product of its gradient with the mean of the other prompts of the step.

    Unbiased leave-one-out gradients of independent groups; divided by the mean squared norm of the step's scores over
    the group size, so that steps count alike. It is no cosine.
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
        others = products_with_others(batch.gram, rewards)
        if not bool(others.isfinite().all()):  # a Gram with a NaN says nothing
            continue
        scale = float(batch.gram.diagonal().double().mean()) / size
        for name, value in zip(batch.prompt_ids, others.tolist(), strict=True):
            found.setdefault(name, []).append(value / scale if scale > 0 else 0.0)
    return found


def products_with_others(gram: Tensor, rewards: Tensor) -> Tensor:
    """`(P,)`: inner product of each prompt's leave-one-out gradient with the mean of those of the other prompts.

    `⟨g_p, Σ_q g_q⟩ - |g_p|²` over `P - 1`, with `g_p = Σ_i w_i ψ_i` over the rollouts of `p`: one product of the Gram
    with the weights of all rollouts, where all products between two prompts would take many.

    Args:
        gram: `(P R, P R)`, rollouts prompt by prompt.
        rewards: `(P, R)`.
    """
    weights, k = leave_one_out(rewards) / rewards.shape[1], gram.double()
    prompts, size = weights.shape
    with_all = (k @ weights.flatten()).view(prompts, size)  # ⟨ψ_i, Σ_q g_q⟩
    own = k.view(prompts, size, prompts, size).diagonal(dim1=0, dim2=2)  # (R, R, P)
    squared = torch.einsum("pi,ijp,pj->p", weights, own, weights)
    return ((weights * with_all).sum(1) - squared) / (prompts - 1)


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
            sentence="Raise the sampling temperature or add an entropy bonus; draw harder prompts.",
            effect=f"right rollouts differ again: a mean cosine below {now.value:.2f}, at first it was "
            f"{before.value:.2f}. How far it falls cannot be said before one run.",
        ),
    )


def _wrong_beside_right(cosine: Estimate) -> str:
    """What the cosine between right and wrong rollouts adds to the finding."""
    if cosine.low > ALIKE:
        return "Wrong rollouts have it too: they are copies of the right ones with a late slip."
    if cosine.high < ALIKE:
        return "Wrong rollouts differ from them."
    return "Whether wrong rollouts have it too is not resolved."


@dataclass(frozen=True)
class GroupCosines:
    """Mean cosines between the scores of a group's rollouts."""

    prompt: str
    right_right: float
    right_wrong: float


def mean_cosine(groups: Sequence[GroupCosines], name: str) -> Estimate:
    """Mean of `right_right` or `right_wrong` over groups, with an interval over prompts."""
    return clustered_mean([getattr(one, name) for one in groups], [one.prompt for one in groups])


def group_cosines(groups: Iterable[StoredGroup]) -> list[GroupCosines]:
    """Cosines of each measured group that has two or more right rollouts and a wrong one, and no score of zero."""
    found = []
    for group in groups:
        record = group.record
        if record.gram is None or not group.right or group.right < 2 or group.right == group.size:
            continue
        gram = record.gram.double()
        norms = gram.diagonal().clamp(min=0).sqrt()
        if bool((norms > 0).all()):
            cosine, is_right = gram / norms[:, None] / norms[None, :], record.rewards == 1
            among_right = cosine[is_right][:, is_right]
            pairs = group.right * (group.right - 1)
            right_right = float((among_right.sum() - among_right.diagonal().sum()) / pairs)
            right_wrong = float(cosine[is_right][:, ~is_right].mean())
            found.append(GroupCosines(record.prompt_id, right_right, right_wrong))
    return found


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
            effect=f"the difference of {trained.value - tested.value:.2f} shrinks. By how much cannot be said before "
            "one run on more prompts.",
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
        return (f"Not a setting: pass a larger `train_dataset`; the last third used {seen} prompts.",)
    if draws_problems(run.config):
        return (f"Not a setting: the task draws its problems; the last third used {seen} of them. Train longer.",)
    return (f"Not a setting: add problems to the training file; the last third used {seen} prompts.",)
