"""`advise`: all rules on a run folder or on a plain log, as one diagnosis; and how it is printed."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from scoregram.advice import (
    completion_rules,
    gradient_rules,
    gram_rules,
    noise_rules,
    policy_rules,
    prompt_rules,
    reward_rules,
)
from scoregram.advice.causes import causes_first
from scoregram.advice.difficulty import informed_finding
from scoregram.advice.findings import SEVERITIES, Diagnosis, RuleVerdict, RunFinding, Severity, Undecided, diagnosis_of
from scoregram.advice.formats import read_log
from scoregram.advice.logs import RunLog, closest_column, is_known_column, listed_columns, run_log
from scoregram.advice.settings import with_setting
from scoregram.advice.trends import LEAST_STEPS
from scoregram.checks import fail
from scoregram.reading import RunReading, largest_layer, paused_collection, read_run, trainer_of
from scoregram.runs import CONFIG_FILE, TRAINING_KINDS, open_run, require_path

LOG_RULES: Mapping[str, Callable[[RunLog], RuleVerdict]] = MappingProxyType(
    {
        "NaN": gradient_rules.not_finite_steps,
        "constant reward": reward_rules.constant_reward,
        "stuck batch": policy_rules.stuck_batch,
        "lost seed": policy_rules.lost_seed,
        "phantom signal": reward_rules.phantom_signal,
        "reward against held-out score": reward_rules.reward_against_held_out,
        "KL blow-up": policy_rules.kl_blow_up,
        "entropy collapse": policy_rules.entropy_collapse,
        "repetition": completion_rules.repetition,
        "dead groups": reward_rules.dead_groups,
        "truncation": completion_rules.cut_completions,
        "falling reward": reward_rules.falling_reward,
        "reward spread death": reward_rules.reward_spread_death,
        "length gaming": reward_rules.length_gaming,
        "gradient spikes": gradient_rules.gradient_spikes,
        "clip saturation": policy_rules.clip_saturation,
        "idle clipping": policy_rules.idle_clipping,
        "throughput rot": policy_rules.throughput_rot,
    }
)
"""Rules that need scalars only, by the name of their finding, the most harmful fault first."""

GRAM_RULES: Mapping[str, Callable[[RunReading], RuleVerdict]] = MappingProxyType(
    {
        "dominating rollouts": gram_rules.dominating_rollouts,
        "dominating prompts": prompt_rules.dominating_prompts,
        "exploding layer": gram_rules.dominating_layer,
        "conflicting prompts": gram_rules.conflicting_prompts,
        "held-out influence": gram_rules.held_out_prompts,
        "lost exploration": gram_rules.lost_exploration,
        "estimator": noise_rules.advantage_estimator,
        "batch size": noise_rules.batch_size,
        "group size": noise_rules.group_size,
        "group size by phase": noise_rules.group_size_phases,
        "baseline": noise_rules.baseline,
        "overfitting to prompts": gram_rules.memorised_prompts,
        "layers that carry the update": gram_rules.carrying_layers,
    }
)
"""Rules that need the Grams, groups or rollouts of a run folder."""
WITHOUT_GRAMS = frozenset({"overfitting to prompts"})
"""Those of them that need no Gram, so that no self-check concerns them."""

QUICK_RULES = frozenset({"NaN", "idle clipping", "lost exploration", "falling reward"})
"""Rules that a step or two, a setting or the mean reward alone decides: if nothing else is decided, the run is not
called fine."""
ROLLOUT_STEPS = 12
"""Steps whose stored rollouts are read for repetition, spread over the run."""
FEWEST_ANSWERED = 10
"""Fewest truncated rollouts with an expected answer for which to count how many hold it."""
_GRAM_LENGTH = 4
"""Tokens of a sequence that counts as repeated."""


@paused_collection()
def advise(path: Path | str) -> Diagnosis:
    """What is wrong with a run, worst first, and what to change; silent where the data do not decide.

    Args:
        path: A run folder, or a log of any trainer: `trainer_state.json`, a TensorBoard folder, verl's JSONL, CSV, an
            offline folder of Weights & Biases, `metrics.jsonl`.

    Raises:
        ScoregramError: If there is no run and no log that can be read.
    """
    root = require_path(path, caller="advise")
    if (root / CONFIG_FILE).is_file():
        return advise_run(read_run(open_run(root)))
    return advise_log(read_log(root))


def advise_log(log: RunLog) -> Diagnosis:
    """The diagnosis of a plain log."""
    return _told_diagnosis(log, {name: rule(log) for name, rule in LOG_RULES.items()}, log.remarks)


def advise_run(run: RunReading) -> Diagnosis:
    """The diagnosis of a run folder: the rules on its scalars, then those on its Grams."""
    source = "" if run.folder is None else str(run.folder.folder)
    stored = [*_repetition_lines(run), *_truncation_lines(run)]
    log = run_log(source, [*run.lines, *stored], run.config, run.last_third)
    # among equally severe and certain findings those from the Gram come first: they name causes
    verdicts: dict[str, RuleVerdict] = {name: _trusted(name, rule(run), run) for name, rule in GRAM_RULES.items()}
    verdicts |= {name: rule(log) for name, rule in LOG_RULES.items()}
    size = verdicts["group size"]
    informed = {name: _informed(one, run, log, size) for name, one in verdicts.items()}
    return _told_diagnosis(log, informed, run.trust.sentences())


def _trusted(name: str, verdict: RuleVerdict, run: RunReading) -> RuleVerdict:
    """The verdict of a rule on Grams, as far as the run can be trusted.

    A finding from re-tokenised text or with a model in doubt is marked, and no more than possible. Rules leave out the
    Grams of steps whose self-check failed; one that cannot decide says so.
    """
    trust = run.trust
    if isinstance(verdict, Undecided) and trust.failed and name not in WITHOUT_GRAMS:
        told = f"first make the self-check pass, which failed or could not be made at {len(trust.failed)} of "
        told += f"{len(trust.errors)} measured steps (docs/trl.md lists the causes); then {verdict.needs}"
        return replace(verdict, needs=told)
    if not isinstance(verdict, RunFinding) or verdict.without_gram or not trust.mark:
        return verdict
    change = verdict.change and replace(verdict.change, sentence=trust.marked(verdict.change.sentence))
    evidence = f"{verdict.evidence} {trust.doubt}"
    told = {"sentence": trust.marked(verdict.sentence), "evidence": evidence, "change": change}
    return replace(verdict, mark=trust.mark, confidence="possible", **told)


def _told_diagnosis(log: RunLog, verdicts: Mapping[str, RuleVerdict], trust: Iterable[str] = ()) -> Diagnosis:
    """The diagnosis, causes before consequences, in the words of the trainer that made the run."""
    told = {
        name: with_setting(one, log.config) if isinstance(one, RunFinding) else one
        for name, one in causes_first(verdicts, log).items()
    }
    found = diagnosis_of(log.source, told, trainer_of(log.config), trust)
    if found.findings or set(found.fine) - QUICK_RULES:
        return found
    return replace(found, nothing_decided=_why_nothing_is_decided(log))


def _why_nothing_is_decided(log: RunLog) -> str:
    """What the log has, why that is too little, and which columns may have been meant."""
    columns, steps = log.columns(), len(log.lines)
    if not columns:
        return f"Nothing could be decided: no {'scalar' if steps else 'step'} is logged."
    unknown = [name for name in columns if not is_known_column(name)]
    told = f"Nothing could be decided: the log has {steps} {'step' if steps == 1 else 'steps'} with the columns "
    told += listed_columns(columns)
    if len(unknown) == len(columns):
        told += ", and no rule knows any of them."
    else:
        told += "; most rules need 10 steps or more." if steps < LEAST_STEPS else ", and no rule can decide from them."
    if steps < LEAST_STEPS and len(unknown) < len(columns):
        return told
    meant = [f"{name} may be `{known}`" for name in unknown if (known := closest_column(name)) and known not in columns]
    renamed = "Rename it" if len(meant) == 1 else "Rename them"
    return told + (f" {', '.join(meant)}. {renamed}, and ask again." if meant else "")


def _informed(verdict: RuleVerdict, run: RunReading, log: RunLog, size: RuleVerdict) -> RuleVerdict:
    """A finding of a rule on scalars, with what only the folder of the run knows."""
    if isinstance(verdict, RunFinding) and verdict.name == "dead groups":
        return informed_finding(verdict, run, size)
    if isinstance(verdict, Undecided) and verdict == completion_rules.WITHOUT_ROLLOUTS:
        return _short_rollouts(verdict, run)
    if isinstance(verdict, RunFinding) and verdict.name == "truncation":
        return _with_answers(verdict, run, log)
    if isinstance(verdict, RunFinding) and verdict.name == "gradient spikes":
        return _attributed(verdict, run, log)
    return verdict


def _with_answers(finding: RunFinding, run: RunReading, log: RunLog) -> RunFinding:
    """The finding of a reward that pays for truncated texts, with how many of them hold the expected answer.

    As it is if it asks for another change, rewards exceed 1, or the last third stores fewer than `FEWEST_ANSWERED` of
    them with answers.
    """
    change = finding.change
    if run.folder is None or change is None or completion_rules.WHAT_ELSE not in change.steps:
        return finding
    steps = [step for step in _some(sorted(run.folder.rollout_steps())) if step in run.last_third]
    cut = [one for one in run.folder.rollouts(set(steps)) if not one.finished and one.kind in TRAINING_KINDS]
    known = [
        (holds_answer(one.completion, one.answer), float(one.reward))
        for one in cut
        if one.answer and one.answer.strip() and one.completion is not None and not math.isnan(one.reward)
    ]
    if len(known) < FEWEST_ANSWERED or max(reward for _, reward in known) > 1:
        return finding
    held, reward = sum(holds for holds, _ in known), sum(reward for _, reward in known) / len(known)
    counted = f"{held} of the {len(known)} stored ones hold the expected answer"
    if held / len(known) < reward / 2:
        sentence = finding.sentence.removesuffix(".") + f", and {counted}."
        return replace(finding, sentence=sentence, change=completion_rules.paying_for_answers(change, log))
    told = f"Read some truncated rollouts: {counted}, and their mean reward is {reward:.2f}. "
    told += "So the function pays for answers, and needs no other change."
    changed = tuple(told if one == completion_rules.WHAT_ELSE else one for one in change.steps)
    return replace(finding, change=replace(change, steps=changed))


def holds_answer(text: str, answer: str) -> bool:
    """Whether a text holds an answer as a word or number of its own, in either case.

    Example:
        >>> holds_answer("so it is 12.", "12"), holds_answer("3127", "12"), holds_answer("1.12", "12")
        (True, False, False)
        >>> holds_answer("41,42,47.", "47"), holds_answer("1,247", "247"), holds_answer("1,247", "1")
        (True, False, False)
    """
    digits_follow = r"(?=\d{3}(?!\d))"  # of a number with a comma for the thousands
    pattern = rf"(?<![\w.])(?!(?<=\d,){digits_follow}){re.escape(answer.strip())}(?!\w|\.\w|,{digits_follow})"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _attributed(finding: RunFinding, run: RunReading, log: RunLog) -> RunFinding:
    """A finding of gradient spikes, with the rollout and the layer that have the most energy at the worst of them.

    The worst measured one; without it if no spike was measured, the self-checks failed, or no rollout has a gradient.
    """
    spikes = gradient_rules.spike_steps(gradient_rules.live_norms(log))
    measured = spikes.keys() & set(run.usable_steps)
    if not measured:
        return finding
    step = max(measured, key=lambda one: spikes[one])
    pulls = [
        (energy, group.record.prompt_id, place)
        for group in run.groups
        if group.record.step == step
        for place, energy in enumerate(group.row_energies().tolist())
        if math.isfinite(energy)
    ]
    total = sum(one for one, *_ in pulls)
    if not total > 0:
        return finding
    energy, prompt, place = max(pulls)
    told = f"At step {step}, rollout {place} of {prompt} has {energy / total:.0%} of the gradient energy"
    layer = largest_layer(run, step)
    told += "." if layer is None else f", and the layer {layer[0]} {layer[1]:.0%} of the update's energy."
    return replace(finding, sentence=f"{finding.sentence} {run.trust.marked(told)}")


def _short_rollouts(verdict: Undecided, run: RunReading) -> Undecided:
    """What the rule on repetition needs where rollouts are stored, but too short to be read."""
    stored = 0 if run.folder is None else len(run.folder.rollout_steps())
    if not stored:
        return verdict
    return Undecided(
        f"sample longer completions: it is read from those of {4 * _GRAM_LENGTH} tokens or more, and the rollouts "
        f"stored at {stored} {'step has' if stored == 1 else 'steps have'} none"
    )


def _repetition_lines(run: RunReading) -> Iterator[dict[str, float]]:
    """`repetition` at some steps whose rollouts are stored: the mean share of repeated 4-grams of tokens."""
    if run.folder is None:
        return
    for step in _some(sorted(run.folder.rollout_steps())):
        shares = [repeated_share(tokens.tolist()) for tokens in run.folder.completion_ids(step)]
        known = [share for share in shares if share is not None]
        if known:
            yield {"step": step, "repetition": sum(known) / len(known)}


def _truncation_lines(run: RunReading) -> Iterator[dict[str, float]]:
    """`truncated_reward` and `finished_reward` at some steps whose rollouts are stored: means over such rollouts."""
    if run.folder is None:
        return
    for step in _some(sorted(run.folder.rollout_steps())):
        rewards: dict[bool, list[float]] = {True: [], False: []}
        for reward, finished in run.folder.rollout_ends(step):
            rewards[finished] += [] if math.isnan(reward) else [reward]
        names = {True: "finished_reward", False: "truncated_reward"}
        known = {names[kind]: sum(values) / len(values) for kind, values in rewards.items() if values}
        if known:
            yield {"step": step, **known}


def _some(steps: Sequence[int]) -> list[int]:
    if len(steps) <= ROLLOUT_STEPS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (ROLLOUT_STEPS - 1))] for place in range(ROLLOUT_STEPS)]


def repeated_share(tokens: Sequence[int]) -> float | None:
    """Share of the 4-grams of a completion that occurred in it before; None below 16 tokens, which say little.

    Example:
        >>> repeated_share([1, 2] * 8), repeated_share(list(range(16))), repeated_share([1, 2])
        (0.8461538461538461, 0.0, None)
    """
    if len(tokens) < 4 * _GRAM_LENGTH:
        return None
    grams = zip(*(tokens[place:] for place in range(_GRAM_LENGTH)), strict=False)
    return 1 - len(set(grams)) / (len(tokens) - _GRAM_LENGTH + 1)


# On the terminal

STYLES: Mapping[str, str] = {"critical": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show_advice(path: Path, *, as_json: bool = False, fail_on: str = "never") -> int:
    """Print the diagnosis as text or as strict JSON; exit status 1 if a finding is at least as severe as `fail_on`."""
    if fail_on not in ("never", *SEVERITIES):
        fail("advise --fail-on", f"must be one of never, {', '.join(SEVERITIES)}", fail_on, "Check the spelling.")
    found = advise(path)
    if as_json:
        print(json.dumps(found.plain(), indent=1, allow_nan=False))
    else:
        print_diagnosis(found, Console())
    if found.nothing_decided and fail_on != "never":
        print(f"--fail-on {fail_on}: nothing could be decided, so the exit status is 0.", file=sys.stderr)
    return int(fail_on != "never" and found.reaches(_severity(fail_on)))


def _severity(name: str) -> Severity:
    return next(one for one in SEVERITIES if one == name)


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """How far to trust the numbers, every finding with its evidence and change, what is fine, and what is undecided."""
    console.print(Text(found.source, style="dim"), soft_wrap=True)
    for sentence in found.trust:
        console.print(Text(sentence))
    if not found.findings:
        console.print(Text(found.nothing_decided or "Nothing to change was found.", style="bold"))
    for one in found.findings:
        console.print(Text.assemble("\n", (one.severity, STYLES[one.severity]), "  ", (one.title, "bold")))
        for line in one.lines():
            console.print(Text(f"  {line}"))
    console.print()
    if found.fine:
        console.print(Text(f"Checked and fine: {', '.join(found.fine)}.", style="dim"))
    for names, needs in _open_questions(found):
        them = "it" if len(names) == 1 else "them"
        console.print(Text(f"Cannot tell: {', '.join(names)}. To decide {them}, {needs}.", style="dim"))


def _open_questions(found: Diagnosis) -> Iterator[tuple[list[str], str]]:
    """The rules that cannot decide and what they need; those with the same needs together, at the first of them."""
    names_with: dict[str, list[str]] = {}
    for name, needs in found.undecided.items():
        names_with.setdefault(needs, []).append(name)
    for needs, names in names_with.items():
        yield names, needs


# Recorded runs

DEMOS = Path(__file__).parent / "demos"
"""Recorded runs with a known fault, one folder each."""


def demo_names() -> list[str]:
    """Names of the recorded runs."""
    return sorted(path.name for path in DEMOS.iterdir() if path.is_dir())


def show_demo(name: str, *, as_json: bool = False) -> int:
    """Diagnose a recorded run with a known fault, and say which fault it was made with.

    As JSON it is the diagnosis alone.
    """
    names = demo_names()
    if name not in names:
        fail("demo", f"must be one of {', '.join(names)}", repr(name), "Check the spelling.")
    if as_json:
        return show_advice(DEMOS / name, as_json=True)
    console = Console(width=min(120, shutil.get_terminal_size().columns))
    fault = (DEMOS / name / "README.md").read_text(encoding="utf-8").strip()
    console.print(Text(fault, style="italic"))
    print_diagnosis(advise(DEMOS / name), console)
    return 0
