"""The first screen of a run's page: what was trained, whether it learns, what to change, and what the numbers mean."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scoregram.advice import PROMPTS, Change, Diagnosis, RunFinding, measuring_setting, trainer_of, typed_setting
from scoregram.bootstrap import FEWEST
from scoregram.reading import (
    SAMPLED_TEST,
    Indicator,
    IndicatorState,
    RunReading,
    accuracy_gain,
    lost_randomness,
    paired_gain,
    steps_to_show,
)

MOST_CARDS = 3
"""Pieces of advice on the first screen; the others are folded away."""
FACTS = {"model": "model", "task": "task", "method": "method", "estimator": "estimator", "objective": "objective"}
"""Settings that the first screen names, and their labels."""
METHOD_NOTES: Mapping[str, str] = MappingProxyType({"grpo-paper": " (eq. 22 of arXiv:2606.29238)"})
"""Method → what its name alone does not say."""

SUBJECTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "learning": ("constant reward", "reward against held-out score"),
        "prompts that teach": ("dead groups",),
        "signal in a step": ("batch size",),
        "truncated or clipped": ("truncation", "clip saturation"),
    }
)
"""Indicator → the rules of `advise` about the same thing."""
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
    config, stated = run.config, trainer_arguments(run.config)
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
    rate = config.get("learning_rate", stated.get("learning_rate"))
    for label, value in (("rollouts per step", batch), ("learning rate", rate)):
        if value is not None:
            yield label, str(value)
    if config.get("seed") is not None:
        yield "seed", str(config["seed"])
    # a trainer that logs every tenth step has trained on the steps between
    count = run.steps[-1] if run.steps and "integration" in config else len(run.steps)
    planned = planned_steps(config)
    trained = f"{count} of {planned}" if planned else f"{count}"
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


def trainer_arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of another trainer, as its integration stored them."""
    found = config.get("arguments")
    return found if isinstance(found, Mapping) else {}


def planned_steps(config: Mapping[str, Any]) -> int:
    """Steps that the config asks for; 0 if it does not say."""
    planned = config.get("steps", trainer_arguments(config).get("max_steps"))
    return planned if isinstance(planned, int) and planned > 0 else 0


def window_sentence(run: RunReading) -> str:
    """Which steps the numbers of the first screen come from."""
    steps = run.last_third
    if not steps:
        return ""
    which = f"the last third, {step_range(steps)}" if len(run.steps) > 1 else f"the only step, {steps[0]}"
    told = f"Arrows: first → last evaluation or third of the steps. Other numbers are means over {which}."
    return f"{told} Brackets: 95 % intervals. Grey dashed lines below, the null: what unrelated rollouts would give."


def more_measurements(run: RunReading, longer: Change | None) -> Iterator[str]:
    """How to measure the next run often enough; nothing if this run did, or a longer one does without a change."""
    if not run.steps or not run.trust.has_few_steps or run.trust.measured >= run.steps[-1]:
        return
    steps = longer.value if longer and isinstance(longer.value, int) else run.steps[-1]
    setting = measuring_setting(run.config, max(1, steps // (3 * FEWEST - 2)))
    if setting:
        yield f"To measure often enough: {setting}."


def learning_answer(run: RunReading, tiles: Sequence[Indicator]) -> str:
    """Whether the run learns: yes, no, not shown or not clear, and the numbers that say so."""
    if not run.steps:
        return "This run holds no step yet."
    learning, cut, greedy = tiles[0], tiles[3], accuracy_gain(run)
    rises = learning.state in ("good", "watch") and learning.change.low > 0
    if rises and cut.state == "act":
        untested = "" if learning.headline.startswith("test") else ", and nothing was tested"
        return (
            f"Not shown: {learning.headline}, but {cut.headline}{untested}. Read some rollouts before you believe it."
        )
    if rises and learning.state == "watch" and greedy is not None:
        both = f"sampled {learning.headline}, but greedy accuracy {_arrow(greedy.before.value, greedy.after.value)}"
        return f"Not clear: {both}. {lost_randomness(run)}".strip()
    said = {
        "good": f"Yes: {learning.headline}.",
        "watch": f"Not shown: {learning.headline}; the interval of the change includes 0.",
        "act": f"No, it gets worse: {learning.headline}.",
        "unknown": "Too early to tell.",
    }[learning.state]
    return " ".join([said, *when_learnt(learning)])


def _arrow(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f}"


def change_answer(learning: Indicator, advice: Diagnosis, longer: Change | None = None) -> str:
    """The most important change in one or two sentences; that of a longer run comes before all others."""
    changes = [one.change for one in advice.findings if one.change is not None]
    if longer is None and is_solved(learning):
        harder = next((one for one in changes if one.knob == PROMPTS), None)
        setting = f" Setting: {harder.setting}." if harder and harder.setting else ""
        return f"The task is nearly solved: stop here, or take harder problems.{setting}"
    change = longer or next(iter(changes), None)
    if change is None:
        return "No rule asks for a change."
    return change.sentence + (f" Setting: {change.setting}." if change.setting else "")


def longer_run(run: RunReading, advice: Diagnosis) -> Change | None:
    """That the run is too short to judge, and how long it should be; None if that is not so or something is worse."""
    wanted, sampled, greedy = steps_to_show(run), paired_gain(run.tests, SAMPLED_TEST), accuracy_gain(run)
    worse = any(one.severity == "critical" for one in advice.findings)
    if wanted is None or sampled is None or greedy is None or worse:
        return None
    problems = f"{greedy.problems:,} test problems" if greedy.problems else "the test problems"
    steps, rise = run.steps[-1], sampled.change.value
    told = f"Train longer: {steps} steps cannot tell. If greedy accuracy rises as fast as the sampled reward, by "
    told += f"{rise:.3f} in {steps} steps, {problems} show it after about {wanted} steps "
    told += f"({_arrow(greedy.before.value, greedy.before.value + rise * wanted / steps)})."
    change = Change(knob="training steps", direction="up", sentence=told, effect="", value=wanted)
    return replace(change, setting=typed_setting(change, run.config))


def next_changes(cards: Iterable[RunFinding]) -> str:
    """Names of findings in their order, each with what to type for it."""
    settings = [(one.title, one.change.setting if one.change else "") for one in cards]
    return ", ".join(f"{name} ({setting})" if setting else name for name, setting in settings)


def is_solved(learning: Indicator) -> bool:
    """Whether the last score on test problems is so high that a run has little left to learn."""
    known = [value for value in learning.curve.mean if not math.isnan(value)]
    return learning.headline.startswith("test") and bool(known) and SOLVED <= known[-1] <= 1


def ordered_cards(findings: Sequence[RunFinding], solved: bool) -> tuple[tuple[RunFinding, ...], int]:
    """The cards, and how many of them the first screen shows.

    Of a run whose task is solved it shows only those about its prompts: the other settings were measured on problems
    that have nothing left to teach.
    """
    if not solved:
        return tuple(findings), MOST_CARDS
    first = [one for one in findings if one.change is not None and one.change.knob == PROMPTS]
    return (*first, *(one for one in findings if one not in first)), min(len(first), MOST_CARDS)


MOST_OF_IT, SOLVED = 0.9, 0.95
"""Share of a gain that counts as most of it, and score on test problems from which on a task counts as solved."""


def when_learnt(learning: Indicator) -> Iterator[str]:
    """When most of a gain was there; nothing unless the run learns."""
    known = [pair for pair in zip(learning.curve.steps, learning.curve.mean, strict=True) if not math.isnan(pair[1])]
    if learning.state != "good" or len(known) < 3:
        return
    (_, first), (end, last) = known[0], known[-1]
    step = next(step for step, value in known if value >= first + MOST_OF_IT * (last - first))
    if step < end:
        yield f"{MOST_OF_IT:.0%} of the gain or more was there at step {step:g}."


def trust_state(run: RunReading) -> str:
    """`act` after a failed self-check, `watch` for anything else to keep in mind, `unknown` if nothing was measured."""
    trust = run.trust
    if trust.failed:
        return "act"
    if not trust.is_sound or trust.has_few_steps:
        return "watch"
    return "good" if trust.measured and trust.errors else "unknown"


def step_range(steps: range) -> str:
    """`step 3`, `steps 3 to 9` or `no step`."""
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
