"""The first screen of a run's page: what was trained, whether it learns, what to change, and what the numbers mean."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from scoregram.advice import (
    CHECKED_STEPS,
    HARDER,
    PROMPTS,
    Change,
    Diagnosis,
    RunFinding,
    count_words,
    live_expectation,
    measuring_setting,
    superscript,
    typed_setting,
)
from scoregram.bootstrap import FEWEST
from scoregram.reading import (
    LIVE_GOOD,
    OWN_TRAINER,
    SAMPLED_TEST,
    Indicator,
    IndicatorState,
    RunReading,
    accuracy_gain,
    half_right_steps,
    live_rates,
    lost_randomness,
    paired_gain,
    steps_to_show,
    trainer_of,
)
from scoregram.training import TrainConfig

MOST_CARDS = 3
"""Pieces of advice on the first screen; the others are folded away."""
FACTS = {"model": "model", "task": "task", "method": "method", "estimator": "estimator", "objective": "objective"}
"""Settings that the first screen names, and their labels."""
METHOD_NOTES: Mapping[str, str] = MappingProxyType({"grpo-paper": " (eq. 22 of arXiv:2606.29238)"})
"""Method → what its name alone does not say."""

SUBJECTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "learning": ("constant reward", "reward against held-out score"),
        "prompts that teach": ("dead groups", "constant reward"),
        "signal in a step": ("batch size",),
        "truncated or clipped": ("truncation", "clip saturation"),
    }
)
"""Indicator → the rules of `advise` about the same thing."""
UNCHANGED = ("out", "resume", "overwrite", "trust_remote_code")
"""Options of `scoregram train` that a command for the next run does not repeat."""
LEAST_STATES: Mapping[str, IndicatorState] = MappingProxyType({"critical": "act", "warning": "watch"})
"""Severity of a finding → the mildest word that an indicator of its subject may say."""


def agreed_tiles(tiles: Sequence[Indicator], advice: Diagnosis) -> tuple[Indicator, ...]:
    """The indicators, with words that agree with the advice: one page does not say two things.

    An indicator is not `good` if a rule about the same thing warns. It says `act` only if such a rule asks for a
    change: where the rule cannot decide, because steps are too few, it says `watch`. Learning is not `good` while most
    rollouts are cut off.
    """
    severities = {one.name: one.severity for one in advice.findings}
    agreed = {tile.name: _agreed(tile, SUBJECTS[tile.name], severities, advice) for tile in tiles}
    learning, cut = agreed.get("learning"), agreed.get("truncated or clipped")
    if learning and cut and learning.state == "good" and cut.state == "act":  # a reward of unfinished texts
        agreed["learning"] = replace(learning, state="watch")
    return tuple(agreed.values())


def _agreed(tile: Indicator, rules: Sequence[str], severities: Mapping[str, str], advice: Diagnosis) -> Indicator:
    floors = [LEAST_STATES[severities[name]] for name in rules if severities.get(name) in LEAST_STATES]
    if "act" in floors:
        return replace(tile, state="act")
    if floors and tile.state == "good":
        return replace(tile, state="watch")
    if tile.state == "act" and not floors and any(name in advice.undecided for name in rules):
        return replace(tile, state="watch", sentence=f"{tile.sentence} Too few steps to ask for a change.")
    return tile


def run_facts(run: RunReading) -> Iterator[tuple[str, str]]:
    """Label and value of what was trained, and how, as far as the config says."""
    config = run.config
    yield "trainer", trainer_name(config)
    for name, label in FACTS.items():
        if config.get(name) is not None:
            yield label, str(config[name]) + METHOD_NOTES.get(str(config[name]), "")
            if name == "model":
                rank = config.get("lora_rank")
                yield "trains", f"LoRA of rank {rank}" if rank else "all parameters"
    if run.group_size:
        yield "group size R", str(run.group_size)
    batch = config.get("batch_size") or (None if math.isnan(run.batch_size) else f"{run.batch_size:g}")
    rate = run.setting("learning_rate")
    for label, value in (("rollouts per step", batch), ("learning rate", rate)):
        if value is not None:
            yield label, str(value)
    if config.get("seed") is not None:
        yield "seed", str(config["seed"])
    progress = run_progress(run)
    trained = f"{progress.steps}"
    if progress.is_budgeted:
        yield "rollouts", f"{progress.rollouts:,} of {progress.budget:,} sampled"
        trained += "" if progress.is_finished else f" of at most {progress.planned_steps}"
    elif progress.planned_steps:
        trained += f" of {progress.planned_steps}"
    yield "steps", f"{trained} trained, gradients of {run.trust.measured} measured"


def trainer_name(config: Mapping[str, Any]) -> str:
    """The trainer that made the run, as its users write it.

    Example:
        >>> trainer_name({"method": "grpo"}), trainer_name({"integration": {"name": "trl"}}), trainer_name({})
        ('scoregram train', 'TRL', 'not known')
    """
    trainer = trainer_of(config)
    if not trainer and config.get("format"):
        return f"not known: a dump, format {config['format']}"
    return {"scoregram": "scoregram train", "trl": "TRL", "": "not known"}.get(trainer, trainer)


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, and how far it is to go: to a number of steps, or to a budget of rollouts."""

    steps: int
    """Steps trained or recorded."""
    planned_steps: int
    """Steps that the config asks for; with a budget, the most that it allows. 0 if it does not say."""
    rollouts: int = 0
    """Rollouts sampled for training, those on top of a step's batch included; 0 if they were not logged."""
    budget: int = 0
    """Rollouts after which the run ends, whatever the number of steps; 0 for none."""

    @property
    def is_budgeted(self) -> bool:
        """Whether a budget of rollouts ends the run, and the rollouts so far are known."""
        return self.budget > 0 and self.rollouts > 0

    @property
    def is_finished(self) -> bool:
        """Whether the run has used its budget, or done its steps; False if neither is known."""
        if self.is_budgeted:
            return self.rollouts >= self.budget
        return 0 < self.planned_steps <= self.steps

    @property
    def steps_left(self) -> int:
        """Steps until the run ends, with a budget at the rollouts per step so far; 0 if it is finished or not known."""
        if self.is_budgeted:
            return max(0, math.ceil((self.budget - self.rollouts) * self.steps / self.rollouts))
        return max(0, self.planned_steps - self.steps)

    def budget_for(self, steps: int) -> int:
        """Budget that suffices for this many steps in all, at the rollouts per step so far."""
        if self.is_budgeted:
            return math.ceil(self.rollouts * steps / max(1, self.steps))
        return math.ceil(self.budget * steps / max(1, self.planned_steps))


def run_progress(run: RunReading) -> RunProgress:
    """How far a run is, from its config and its last step."""
    config, done = run.config, run.steps[-1] if run.steps else 0
    # a trainer that logs every tenth step has trained on the steps between
    count = done if "integration" in config else len(run.steps)
    budget, batch = config.get("rollouts"), config.get("batch_size")
    if trainer_of(config) == OWN_TRAINER and isinstance(budget, int) and budget > 0:
        used = run.series("rollouts")[1]
        planned = math.ceil(budget / batch) if isinstance(batch, int) and batch > 0 else 0
        return RunProgress(count, planned, int(used[-1]) if used else 0, budget)
    planned = run.setting("steps", "max_steps")
    return RunProgress(count, planned if isinstance(planned, int) and planned > 0 else 0)


def window_sentence(run: RunReading, learning: Indicator) -> str:
    """Which steps the numbers of the first screen come from, and what their intervals leave out."""
    steps = run.last_third
    if not steps:
        return ""
    which = f"the last third, {step_range(steps)}" if len(run.steps) > 1 else f"the only step, {steps[0]}"
    seed = run.config.get("seed")
    alone = "This is one run" + (f" with one seed, {seed}" if seed is not None else "")
    told = f"{alone}: the 95 % intervals, in brackets, leave out how much runs with other seeds differ."
    null = (
        "In figures further down, a grey dashed line is the null: what unrelated rollouts, prompts or steps would give."
    )
    return f"{told} {_arrow_sentence(learning)}Other numbers are means over {which}. {null}"


def _arrow_sentence(learning: Indicator) -> str:
    """Between which points of the run the arrow of the learning tile goes; empty without an arrow."""
    return f"“{learning.arrow}” goes from the {learning.span}. " if learning.arrow else ""


def trust_lines(run: RunReading, following: "NextStep") -> tuple[tuple[str, str], ...]:
    """How far to trust the numbers, each sentence behind its word; how to measure often enough joins the last one."""
    lines: list[tuple[str, str]] = [*run.trust.judged_sentences()]
    few = next((place for place, (_, told) in enumerate(lines) if told.startswith("Gradients were measured")), None)
    for told in more_measurements(run, following) if few is not None else ():
        lines[few or 0] = (lines[few or 0][0], f"{lines[few or 0][1]} {told}")
    return tuple(lines)


def more_measurements(run: RunReading, following: "NextStep") -> Iterator[str]:
    """How to measure the next run often enough; nothing if this run did, or a longer one does without a change."""
    if not run.steps or not run.trust.has_few_steps or run.trust.measured >= run.steps[-1]:
        return
    steps = following.steps_in_all or run.steps[-1]
    setting = measuring_setting(run.config, max(1, steps // (3 * FEWEST - 2)))
    if setting:
        typed, now, present = setting.partition(" (now ")
        yield f"To measure often enough: `{typed}`{now}{present}."


def learning_answer(run: RunReading, tiles: Sequence[Indicator]) -> str:
    """Whether the run learns: yes, no, not shown or not clear, and the numbers that say so."""
    if not run.steps:
        return "This run holds no step yet."
    by_name = {tile.name: tile for tile in tiles}
    learning, cut, greedy = by_name["learning"], by_name["truncated or clipped"], accuracy_gain(run)
    rises = learning.state in ("good", "watch") and learning.change.low > 0
    if rises and cut.state == "act":
        untested = "" if learning.is_test else ", and no test problem was evaluated"
        return (
            f"Not proven: {learning.headline}, but {cut.headline}{untested}. Read some rollouts before you believe it."
        )
    if rises and learning.state == "watch" and greedy is not None:
        both = f"sampled {learning.headline}, but greedy accuracy {_arrow(greedy.before.value, greedy.after.value)}"
        return f"Not clear: {both}. {lost_randomness(run)}".strip()
    said = {
        "good": f"Yes: {learning.headline}.",
        "watch": f"Not proven: {learning.headline}; the interval of the change includes 0.",
        "act": f"No: {learning.headline}. The finding below says why.",
        "unknown": "Too early to tell.",
    }[learning.state]
    if learning.state != "unknown" and learning.change.high < 0:
        said = f"No, it gets worse: {learning.headline}."
    return " ".join([said, *when_learnt(learning)])


def _arrow(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f}"


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """What to do after a run, as the first screen says it."""

    sentence: str
    """What to do; it says so first if nothing needs to change."""
    setting: str = ""
    """What to type, and the present value."""
    label: str = "Type"
    """What stands before the setting."""
    steps: tuple[str, ...] = ()
    """What to do one after the other, where no setting alone does it."""
    effect: str = ""
    """What to expect, with its number, or why that is unknown."""
    check: str = ""
    """What to look at soon after the change, with the number that it should have."""
    why: str = ""
    finding: str = ""
    """Name of the card that has the same change; empty if none has."""
    steps_in_all: int = 0
    """Steps of the run that is asked for, if it is a longer one; 0 otherwise."""
    is_longer: bool = False
    """Whether a longer run is asked for because this one is too short to judge."""


def next_step(run: RunReading, learning: Indicator, advice: Diagnosis) -> NextStep:
    """One thing to do next: stop, train longer, make the most important change, or keep going."""
    longer = longer_run(run, advice)
    if longer is not None:
        return longer
    changes = [one for one in advice.findings if one.change is not None]
    if is_solved(learning):
        return _stop(run, learning, next((one for one in changes if one.change and one.change.knob == PROMPTS), None))
    if not changes:
        return _keep_going(run, learning, advice)
    first, change = changes[0], changes[0].change
    assert change is not None
    is_optional = first.severity == "note" and learning.state == "good"
    told = f"Nothing must change: it learns. Worth a try: {change.sentence}" if is_optional else change.sentence
    return NextStep(
        sentence=told,
        setting=change.setting,
        steps=change.steps,
        effect=_sentence(change.effect),
        check=change.check,
        why=first_sentence(first.sentence),
        finding=first.name,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def first_sentence(text: str) -> str:
    """The first sentence of a text; the card below has all of them.

    Example:
        >>> first_sentence("The norm was 0.5 at step 3. So it fell.")
        'The norm was 0.5 at step 3.'
    """
    return re.split(r"(?<=[.!?])\s+(?=[A-Z“])", text, maxsplit=1)[0]


def _stop(run: RunReading, learning: Indicator, harder: RunFinding | None) -> NextStep:
    """The end of a run whose task is nearly solved, and harder problems if there are some."""
    told, why = "Stop here: the task is nearly solved.", _little_left(learning)
    if harder is None or harder.change is None or harder.change.direction != HARDER:
        return NextStep(sentence=told, why=why)
    words = count_words(HARDER, str(run.config.get("task") or ""))
    live = 1 - harder.number.value
    return NextStep(
        sentence=f"{told} To learn more, train a new run on harder problems{words}, again from the starting model.",
        setting=harder.change.setting,
        label="For a new run",
        steps=harder.change.steps,
        effect=_harder_effect(run, live),
        check=_harder_check(run),
        why=f"{why} {first_sentence(harder.sentence)}{_idle_rollouts(run, live)}",
    )


def _little_left(learning: Indicator) -> str:
    """What more steps on a nearly solved task can add at most, and what the second half of the run added."""
    known = learning.curve.points
    (_, last), (middle, before) = known[-1], known[(len(known) - 1) // 2]
    told = f"Going on with this task adds at most {1 - last:.2f} to the {learning.quantity} of {last:.2f}"
    return f"{told}; since step {middle:g} it went {_arrow(before, last)}." if len(known) > 2 else f"{told}."


def _idle_rollouts(run: RunReading, live: float) -> str:
    """How many rollouts of a step are in dead groups; empty if it is not known."""
    batch = run.config.get("batch_size") or run.batch_size
    if math.isnan(live) or not math.isfinite(batch):
        return ""
    return f" Those are {(1 - live) * batch:.0f} of the {batch:g} rollouts of a step."


def _harder_effect(run: RunReading, live: float) -> str:
    """Share of live groups to expect of problems that are hard enough, and what is unknown."""
    is_known = not run.is_graded and not math.isnan(live)
    expected = _sentence(live_expectation(half_right_steps(run), live, run.group_size)) if is_known else ""
    if not expected:
        return "Unknown: no harder problem was sampled."
    return f"{expected}. The accuracy that it reaches is unknown: no harder problem was sampled."


def _harder_check(run: RunReading) -> str:
    """Which share of right rollouts the first steps on other problems should have, by the groups that are live then."""
    size, wanted = run.group_size, f"{LIVE_GOOD:.0%}"
    rates = live_rates(size, LIVE_GOOD) if size else None
    if size is None or rates is None or run.is_graded:
        told = f"After {CHECKED_STEPS} steps of the new run, “prompts that teach” should read {wanted} or more. "
        return (
            f"{told}If it reads less and most rollouts are right, take harder ones again; if most are wrong, go back."
        )
    least, most = f"{math.ceil(100 * rates[0])}%", f"{math.floor(100 * rates[1])}%"
    raised, first = superscript(size), FIRST_STEPS
    told = f"In the first {first} steps of the new run, {least} to {most} of the rollouts should be right. Above, take "
    told += "harder ones again; below, they are too hard for this model. Basis: at the success rate p, a group of "
    return f"{told}{size} is live with the chance 1 − p{raised} − (1 − p){raised}, there {wanted} or more."


def _keep_going(run: RunReading, learning: Indicator, advice: Diagnosis) -> NextStep:
    """A run for which no rule asks for a change: whether to go on, and for how long."""
    undecided = len(advice.undecided)
    rules = undecided + len(advice.fine) + len(advice.findings)
    why = f"No rule asks for a change; {undecided} of {rules} cannot decide, and say below what they need."
    why = why if undecided else f"No rule of {rules} asks for a change."
    if not run.steps:
        return NextStep(sentence="Nothing yet: this run holds no step.")
    if learning.state == "act":
        told = "Stop, and read some rollouts: it gets worse, and no rule says why."
        return NextStep(sentence=told, effect="Unknown: no rule found the cause.", why=why)
    progress, done = run_progress(run), run.steps[-1]
    if progress.steps_left:
        told = f"Nothing: let it go on to step {progress.planned_steps}, now {done}."
        if progress.is_budgeted:
            told = f"Nothing: let it go on to {progress.budget:,} rollouts, now {progress.rollouts:,}."
        return NextStep(sentence=told, effect=_further_gain(learning, progress.steps_left), why=why)
    told = f"Nothing: keep going, {done} more steps."
    if progress.is_budgeted:
        more = progress.budget_for(2 * done) - progress.rollouts
        told = f"Nothing: keep going, {more:,} more rollouts, about {done} steps."
    setting = steps_setting(run, 2 * done)
    return NextStep(
        sentence=told, setting=setting, effect=_further_gain(learning, done), why=why, steps_in_all=2 * done
    )


def _further_gain(learning: Indicator, more: int) -> str:
    """What more steps may add: as much for each step as over the second half of the run, at best."""
    known, quantity = learning.curve.points, learning.quantity
    if len(known) < 2 or learning.state == "unknown":
        return "Unknown: too few steps for a trend."
    if learning.state != "good":
        return f"Unknown: the interval of the change of the {quantity} includes 0."
    (end, last), (middle, before) = known[-1], known[max(0, (len(known) - 1) // 2)]
    rise = (last - before) * more / (end - middle)
    if rise <= 0:
        return f"Little: the {quantity} did not rise over the second half of the run ({_arrow(before, last)})."
    best = min(1.0, last + rise) if 0 <= last <= 1 else last + rise  # a share, or a reward whose maximum is 1
    if best == 1 and f"{last:.3f}" == "1.000":
        return f"Little: the {quantity} is {last:.3f} already."
    told = f"The {quantity} rises at best from {last:.3f} to {best:.3f}"
    return f"{told}, if it rises as over the second half of the run ({_arrow(before, last)}); gains usually shrink."


def longer_run(run: RunReading, advice: Diagnosis) -> NextStep | None:
    """That the run is too short to judge, and how long it should be; None if that is not so or something is worse."""
    wanted, sampled, greedy = steps_to_show(run), paired_gain(run.tests, SAMPLED_TEST), accuracy_gain(run)
    worse = any(one.severity == "critical" for one in advice.findings)
    if wanted is None or sampled is None or greedy is None or worse:
        return None
    problems = f"{greedy.problems:,} test problems" if greedy.problems else "the test problems"
    steps, rise, change, before = run.steps[-1], sampled.change.value, greedy.change, greedy.before.value
    gain, error = rise * wanted / steps, (change.high - change.low) / 2
    effect = f"A greedy accuracy of {before + gain:.3f} = {before:.3f} + {gain:.3f} if it rises as fast as the sampled "
    effect += f"reward did ({rise:.4f} in {steps} steps), or still {before:.3f} if the policy only becomes less random."
    check = f"After {wanted} steps: above {before + error:.3f} it learns, below it do what the card further down says. "
    check += f"Basis: {problems} tell a change of the accuracy to ± {error:.3f}."
    progress = run_progress(run)
    planned = steps + progress.steps_left if progress.is_budgeted else max(steps, progress.planned_steps)
    is_planned = planned >= wanted
    setting = "" if is_planned else steps_setting(run, wanted)
    return NextStep(
        sentence=f"{_longer_sentence(run, wanted, planned, setting)} {steps} steps cannot tell.",
        setting=setting,
        effect=effect,
        check=check,
        why=f"The greedy accuracy changed by {change.value:.3f} [{change.low:.3f}, {change.high:.3f}] so far, which "
        f"fits both 0 and the {rise:.4f} of the sampled reward. If two settings change at once, the run does not show "
        "which one helped.",
        steps_in_all=planned if is_planned else wanted,
        is_longer=True,
    )


def _longer_sentence(run: RunReading, wanted: int, planned: int, setting: str) -> str:
    """To let a run go on to the steps that it is planned for, if they are enough, or to train more than these."""
    progress = run_progress(run)
    if planned >= wanted:
        end = f"{progress.budget:,} rollouts" if progress.is_budgeted else f"step {planned}"
        return f"Let it go on to {end}, as planned, and change nothing else."
    rollouts = f" ({progress.budget_for(wanted):,} rollouts)" if progress.budget else ""
    how = f"keep going, to {wanted} steps{rollouts} in all"
    if setting.startswith("--"):
        how = f"start again, for {wanted} steps{rollouts} in place of {planned}"
        how += ", since no checkpoint is stored" if run.folder is not None and not run.folder.checkpoints else ""
    return f"Train longer and change nothing else: {how}."


def steps_setting(run: RunReading, steps: int) -> str:
    """What to type for a longer run: the command that continues it if it has a checkpoint, else the setting.

    A run with a budget of rollouts gets a larger budget: it ends by that alone, whatever `--steps` says.
    """
    constant, progress = run.config.get("lr_schedule", "constant") == "constant", run_progress(run)
    longer = f"--steps {steps} (now {max(progress.planned_steps, run.steps[-1])})"
    if progress.budget:
        longer = f"--rollouts {progress.budget_for(steps)} (now {progress.budget})"
    if run.folder is not None and trainer_of(run.config) == OWN_TRAINER and constant and run.folder.checkpoints:
        return f"scoregram train --resume --out {shlex.quote(str(run.folder.folder))} {longer}"
    if progress.budget:
        return longer
    change = Change(knob="training steps", direction="up", sentence="", effect="", value=steps)
    return typed_setting(change, run.config)


def whole_command(config: Mapping[str, Any], setting: str) -> str:
    """The command of a run of `scoregram train` with one option changed; empty if the setting is no such option.

    Options that have their defaults are left out. The new run gets a folder of its own.
    """
    name, _, value = setting.partition(" (now ")[0].partition(" ")
    if trainer_of(config) != OWN_TRAINER or not name.startswith("--") or not value:
        return ""
    typed = ["scoregram train"]
    for one in fields(TrainConfig):
        option, stored = f"--{one.name.replace('_', '-')}", config.get(one.name, one.default)
        stored = tuple(stored) if isinstance(stored, list) else stored
        if option == name:
            typed.append(f"{name} {value}")
        elif one.name not in UNCHANGED and stored is not None and stored != one.default:
            typed.append(_typed_option(option, stored))
    return " ".join([*typed, "--out", shlex.quote(f"{config.get('out') or 'runs/train'}-next")])


def _typed_option(option: str, value: Any) -> str:
    if isinstance(value, bool):
        return option if value else f"--no-{option.removeprefix('--')}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([option, *(shlex.quote(str(each)) for each in values)])


def next_changes(cards: Iterable[RunFinding]) -> str:
    """Names of findings in their order, each with what to type for it."""
    settings = [(one.title, one.change.setting if one.change else "") for one in cards]
    return ", ".join(f"{name} ({setting})" if setting else name for name, setting in settings)


def is_solved(learning: Indicator) -> bool:
    """Whether the last score on test problems is so high that a run has little left to learn."""
    known = learning.curve.points
    return learning.is_test and bool(known) and SOLVED <= known[-1][1] <= 1


def ordered_cards(findings: Sequence[RunFinding], solved: bool) -> tuple[tuple[RunFinding, ...], int]:
    """The cards, and how many of them the first screen shows.

    Of a run whose task is solved it shows only those about its prompts: the other settings were measured on problems
    that have nothing left to teach.
    """
    if not solved:
        return tuple(findings), MOST_CARDS
    first = [one for one in findings if one.change is not None and one.change.knob == PROMPTS]
    return (*first, *(one for one in findings if one not in first)), min(len(first), MOST_CARDS)


FIRST_STEPS = 5
"""Steps of a new run whose rewards say whether its problems are of use."""
MOST_OF_IT, SOLVED = 0.9, 0.95
"""Share of a gain that counts as most of it, and score on test problems from which on a task counts as solved."""


def when_learnt(learning: Indicator) -> Iterator[str]:
    """When most of a gain was there; nothing unless the run learns."""
    known = learning.curve.points
    if learning.state != "good" or len(known) < 3:
        return
    (_, first), (end, last) = known[0], known[-1]
    step, reached = next(pair for pair in known if pair[1] >= first + MOST_OF_IT * (last - first))
    if step < end:
        share = "All of the gain" if reached >= last else f"{MOST_OF_IT:.0%} of the gain or more"
        yield f"{share} was there at step {step:g}."


def step_range(steps: range) -> str:
    """`step 3`, `steps 3 to 9` or `no step`."""
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
