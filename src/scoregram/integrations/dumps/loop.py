"""`scoregram measure`: the Gram of every group in a dump of rollouts, written as a run folder.

Top to bottom: find the dump, load the policy, group the rollouts as they are read, measure group after group, write.
Nothing depends on groups that were measured before, so they are dealt out in turn to all processes that `torchrun` has
started (`rank_of_group`), and the first process writes them in the order of the dump: the same run folder as from one.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import fail
from scoregram.integrations.dumps.advantages import require_estimator
from scoregram.integrations.dumps.bar import Bar
from scoregram.integrations.dumps.config import MAY_DIFFER, MeasureConfig
from scoregram.integrations.dumps.grouping import DumpedGroup, grouped, rank_of_group, without_repeats
from scoregram.integrations.dumps.measuring import Candidate, MeasuredGroups, Measurer
from scoregram.integrations.dumps.processes import Processes, all_processes, sharded_policy
from scoregram.integrations.dumps.stream import Dump, open_dump
from scoregram.integrations.dumps.tally import Tally
from scoregram.integrations.dumps.tokens import tokenised, unmeasurable
from scoregram.integrations.dumps.writing import Pages
from scoregram.policy import Policy, load_policy, recompute_layers
from scoregram.runs import RunWriter, open_run, require_space
from scoregram.training import stop_requests

FAR = 0.1
"""A mean distance between log-probabilities beyond which the policy is hardly the one that drew the rollouts."""
LONGEST_TURN = 256
"""Units that are passed over at most, for each process, before the processes meet."""


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
    with all_processes() as processes:
        return measure_together(config, processes, console if processes.is_first else Console(quiet=True))


def measure_together(config: MeasureConfig, processes: Processes, console: Console | None) -> MeasuredDump:
    """Measure this process's share of a dump; the first process writes what all have measured."""
    dump = open_dump(config.rollouts, name=config.format, allow_pickle=config.allow_pickle, strict=config.strict)
    temperature = config.temperature or dumped_temperature(dump) or 1.0
    settings = processes.here(config.policy)
    policy = sharded_policy(load_policy, settings, processes) if config.fsdp else load_policy(settings)
    if config.checkpointing:
        recompute_layers(policy.model, caller="measure --checkpointing")
    measurer = Measurer(policy, temperature, config.estimator, config.reward_columns)
    groups, total, counts = groups_of(dump, config), Tally(), Counts()
    with Bar(dump.total_bytes, console=console) as bar, stop_requests() as stop, ExitStack() as folder:
        bar.say(f"{dump.name}: {dump.format.about}, {len(dump.files)} files, {dump.total_bytes / 1e6:,.1f} MB")
        dump.on_broken = lambda message: bar.note("broken", f"passed over: {message}")
        first = first_of(groups, dump)
        tokenised(first.rollouts[0], policy)  # a model that does not know the tokens is refused before a run is begun
        pages: list[Pages] = []

        def begin() -> Mapping[int, set[int]]:
            writer = folder.enter_context(opened(config, dump.name, temperature))
            pages.append(folder.enter_context(Pages(writer)))
            return pages[0].groups_written

        held, stopped = processes.from_first(begin), False
        together = units(chain([first], groups), whole_steps=config.between_prompts)
        for turn in turns(planned(together, held, policy, config, bar, counts), processes.count):
            # measure what falls to this process, and write what fell to all
            made = iter(processes.gathered(partial(share, turn, measurer, config, processes)))
            for unit in turn if pages else ():
                pages[0].begin(unit.step)
                measured = next(made) if unit.candidates else None
                if measured is not None:
                    pages[0].add(measured)
                    for record in measured.groups:
                        total.add(record)
            bar.update(dump.bytes_read, counts.groups)
            stopped = processes.any(stop.asked)
            if stopped:
                break
        if pages and not stopped:
            pages[0].end_step()
        folder.close()
        done = MeasuredDump(
            folder=config.out, format=dump.name, broken=dump.broken, interrupted=stopped, **asdict(counts)
        )
        for line in summary(done, total.scalars(), sum(len(page.incomplete_lines) for page in pages)):
            bar.say(line)
    return done


@dataclass
class Counts:
    """What was found while reading; the same in all processes."""

    groups: int = 0
    held: int = 0
    rollouts: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Unit:
    """What goes through the policy in one pass: a group, or all groups of a step."""

    step: int
    candidates: list[Candidate]
    """Empty where everything is there already, or cannot be measured."""


def planned(
    together: Iterable[list[DumpedGroup]],
    held: Mapping[int, set[int]],
    policy: Policy,
    config: MeasureConfig,
    bar: Bar,
    counts: Counts,
) -> Iterator[Unit]:
    """Units in the order of the dump, less what is there already and what cannot be measured, up to the limit."""
    for groups in together:
        fresh = [group for group in groups if group.position not in held.get(group.step, ())]
        candidates = [made for group in fresh if (made := candidate(group, policy, config, bar)) is not None]
        rollouts = sum(len(made.rollouts) for made in candidates)
        counts.held += len(groups) - len(fresh)
        counts.left_out += sum(len(group.rollouts) for group in fresh) - rollouts
        counts.groups += len(candidates)
        counts.rollouts += rollouts
        yield Unit(groups[0].step, candidates)
        if config.max_groups and counts.groups + counts.held >= config.max_groups:
            return


def turns(together: Iterable[Unit], processes: int) -> Iterator[list[Unit]]:
    """Units with work for each process once, and those without work between them."""
    turn: list[Unit] = []
    for unit in together:
        turn.append(unit)
        if sum(bool(one.candidates) for one in turn) == processes or len(turn) >= LONGEST_TURN * processes:
            yield turn
            turn = []
    if turn:
        yield turn


def share(turn: list[Unit], measurer: Measurer, config: MeasureConfig, processes: Processes) -> MeasuredGroups | None:
    """What falls to this process in a turn; a sharded policy needs it for the others' passes even if nothing does."""
    work = [unit for unit in turn if unit.candidates]
    mine = [unit for number, unit in enumerate(work) if rank_of_group(number, processes.count) == processes.rank]
    if mine:
        return measurer.measure(mine[0].candidates, between_prompts=config.between_prompts)
    if work and config.fsdp:
        measurer.measure(work[0].candidates, between_prompts=config.between_prompts)
    return None


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
