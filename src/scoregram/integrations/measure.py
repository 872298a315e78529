"""`scoregram measure`: the Gram of every group in a dump of rollouts, written as a run folder.

Top to bottom: find the dump, load the policy, group the rollouts as they are read, measure group after group, write.
Nothing depends on groups that were measured before, so groups can be dealt out to several processes by their number
(`rank_of_group`) and gathered in any order.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import fail
from scoregram.integrations.dumps.advantages import require_estimator
from scoregram.integrations.dumps.bar import Bar
from scoregram.integrations.dumps.config import MAY_DIFFER, MeasureConfig
from scoregram.integrations.dumps.grouping import DumpedGroup, grouped, without_repeats
from scoregram.integrations.dumps.measuring import Candidate, Measurer
from scoregram.integrations.dumps.stream import Dump, open_dump
from scoregram.integrations.dumps.tally import Tally
from scoregram.integrations.dumps.tokens import tokenised, unmeasurable
from scoregram.integrations.dumps.writing import Pages
from scoregram.policy.load import Policy, load_policy
from scoregram.runs import RunWriter, open_run, require_space
from scoregram.training.loop import stop_requests

FAR = 0.1
"""A mean distance between log-probabilities beyond which the policy is hardly the one that drew the rollouts."""


@dataclass(frozen=True)
class MeasuredDump:
    """How a measurement ended."""

    folder: Path
    format: str
    groups: int
    """Measured now."""
    held: int
    """Measured before, by the run that was resumed."""
    rollouts: int
    """Of the groups that were measured now."""
    left_out: int
    """Rollouts that cannot be measured, or are beyond the limit of a group."""
    broken: int
    """Records that cannot be read."""
    interrupted: bool


def measure(config: MeasureConfig, *, console: Console | None = None) -> MeasuredDump:
    """Measure a dump as the config says, into its run folder.

    Raises:
        ScoregramError: For anything that cannot work, before work is lost: no dump, an unknown format, a model that
            does not know the token ids, a folder that is taken; and, if strict, for the first record that is broken.
    """
    require_estimator(config.estimator)
    if config.threads:
        torch.set_num_threads(config.threads)
    dump = open_dump(config.rollouts, name=config.format, allow_pickle=config.allow_pickle, strict=config.strict)
    temperature = config.temperature or dumped_temperature(dump) or 1.0
    policy = load_policy(config.policy)
    measurer = Measurer(policy, temperature, config.estimator, config.reward_columns)
    groups, total = groups_of(dump, config), Tally()
    measured = held = left_out = 0
    with Bar(dump.total_bytes, console=console) as bar, stop_requests() as stop:
        bar.say(f"{dump.name}: {dump.format.about}, {len(dump.files)} files, {dump.total_bytes / 1e6:,.1f} MB")
        dump.on_broken = lambda message: bar.note("broken", f"passed over: {message}")
        first = first_of(groups, dump)
        tokenised(first.rollouts[0], policy)  # a model that does not know the tokens is refused before a run is begun
        with opened(config, dump.name, temperature) as writer, Pages(writer) as pages:
            for together in units(chain([first], groups), whole_steps=config.between_prompts):
                # leave out what is there already, and what cannot be measured
                fresh = [group for group in together if not pages.holds(group)]
                held += len(together) - len(fresh)
                pages.begin(together[0].step)
                candidates = [made for group in fresh if (made := candidate(group, policy, config, bar)) is not None]
                left_out += sum(len(group.rollouts) for group in fresh)
                left_out -= sum(len(made.rollouts) for made in candidates)

                # measure and write
                if candidates:
                    made = measurer.measure(candidates, between_prompts=config.between_prompts)
                    pages.add(made)
                    for record in made.groups:
                        total.add(record)
                    measured += len(made.groups)
                bar.update(dump.bytes_read, measured)
                if stop.asked or (config.max_groups and measured + held >= config.max_groups):
                    break
            if not stop.asked:
                pages.end_step()
        done = MeasuredDump(
            folder=config.out,
            format=dump.name,
            groups=measured,
            held=held,
            rollouts=int(total.sums["dump/rollouts"]),
            left_out=left_out,
            broken=dump.broken,
            interrupted=stop.asked,
        )
        for line in summary(done, total.scalars(), len(pages.incomplete_lines)):
            bar.say(line)
    return done


def groups_of(dump: Dump, config: MeasureConfig) -> Iterator[DumpedGroup]:
    """Groups of a dump, read as they are asked for."""
    window, size = config.window_mb << 20, config.group_size
    groups = grouped(dump, adjacent=dump.format.adjacent, window=window, size=size)
    return without_repeats(groups) if dump.format.repeats else groups


def first_of(groups: Iterator[DumpedGroup], dump: Dump) -> DumpedGroup:
    """The first group, provided that there is one."""
    first = next(groups, None)
    if first is None:
        got = f"{dump.broken} records that cannot be read" if dump.broken else "an empty one"
        fail("measure --rollouts", "a dump must hold at least one rollout", got, "Check the path and the format.")
    return first


def units(groups: Iterable[DumpedGroup], *, whole_steps: bool) -> Iterator[list[DumpedGroup]]:
    """Groups that go through the policy together: each alone, or all of a step."""
    if whole_steps:
        yield from (list(together) for _, together in groupby(groups, key=lambda group: group.step))
    else:
        yield from ([group] for group in groups)


def candidate(group: DumpedGroup, policy: Policy, config: MeasureConfig, bar: Bar) -> Candidate | None:
    """A group less the rollouts that cannot be measured; None if none can. What is left out is said."""
    if group.late:
        bar.note("late", f"{group.rollouts[0].where}: came after its group or step was closed; raise --window-mb.")
    kept = []
    for rollout in group.rollouts[: config.group_size_limit or None]:
        made = tokenised(rollout, policy, append_end=config.append_end)
        reason = unmeasurable(made, policy.context)
        if reason:
            bar.note("left out", f"left out: {rollout.where} {reason}.")
        else:
            kept.append(made)
    if len(kept) == 1:
        bar.note("of one", f"{group.rollouts[0].where}: a group of one has nothing to compare with.")
    return Candidate(group, kept, len(group.rollouts) - len(kept)) if kept else None


def opened(config: MeasureConfig, name: str, temperature: float) -> RunWriter:
    """The writer of the run folder, new or resumed."""
    require_space(config.out, 100 << 20)
    record = config.record(name, temperature)
    if not config.resume:
        return RunWriter.create(config.out, record, overwrite=config.overwrite, layers=config.layers)
    # with whole steps in one pass, a step without its line is measured again
    lines = [int(line["step"]) for line in open_run(config.out).metrics()]
    keep = max(lines, default=-1) if config.between_prompts else None
    return RunWriter.resume(config.out, keep, config=record, may_differ=MAY_DIFFER, layers=config.layers)


def dumped_temperature(dump: Dump) -> float | None:
    """The temperature that a run folder of scoregram was sampled at; None for other dumps."""
    if dump.name != "scoregram":
        return None
    for folder in dump.files[0].parents[:3]:
        if (folder / "config.yaml").is_file():
            value = open_run(folder).config.get("temperature")
            return float(value) if isinstance(value, int | float) else None
    return None


def summary(done: MeasuredDump, total: Mapping[str, Any], incomplete: int) -> Iterator[str]:
    """What a person should know in the end.

    Args:
        done: What was done.
        total: Scalars of all groups that were measured now.
        incomplete: Steps whose line in the metrics lacks groups.
    """
    held = f", {done.held} were there" if done.held else ""
    yield f"{done.folder}: {done.groups} groups of {done.rollouts} rollouts measured{held}"
    again = 1 - total.get("dump/exact", 1.0)
    if again:
        back = total.get("dump/round_trip", math.nan)
        yield f"approximate: {again:.1%} of the rollouts were tokenised again; {back:.1%} of these decode to their text"
    if "dump/count_agreement" in total:
        yield f"token counts agree for {total['dump/count_agreement']:.1%} of them"
    gap = total.get("dump/log_prob_gap")
    if gap is not None:
        doubt = "; is this the policy that drew them?" if gap > FAR else ""
        yield f"log-probabilities differ from those of the dump by {gap:.2g} on average{doubt}"
    counts = {
        "records that cannot be read were passed over": done.broken,
        "rollouts were left out": done.left_out,
        "rollouts have no reward": total.get("dump/without_reward", 0),
        "groups of one": total.get("dump/groups_of_one", 0),
        "groups came late": total.get("dump/late_groups", 0),
        "steps have groups that their line in the metrics does not tell of": incomplete,
    }
    yield from (f"{int(count)} {text}" for text, count in counts.items() if count)
    if done.interrupted:
        yield "stopped; go on with --resume"
