"""`scoregram measure`: the Gram of every group in a dump of rollouts, written as a run folder.

Top to bottom: find the dump, load the policy, group the rollouts as they are read, measure group after group, write. A
group does not depend on the groups before it, so the processes of `torchrun` share them round-robin (`rank_of_group`):
every process reads the whole dump and measures its share, and the first process writes all of them in the order of the
dump. The run folder is the same as from one process.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.checks import ScoregramError, fail
from scoregram.distributed import Processes, all_processes
from scoregram.integrations.dumps.config import MAY_CHANGE_ON_RESUME, MeasureConfig
from scoregram.integrations.dumps.grouping import DumpedGroup, rank_of_group, rollout_groups, without_repeated_groups
from scoregram.integrations.dumps.steps import (
    GroupMeasurer,
    MeasurableGroup,
    StepRecords,
    require_dump_estimator,
    require_reward_columns,
    tokenised_rollout,
)
from scoregram.integrations.dumps.stream import Dump, open_dump
from scoregram.integrations.dumps.writing import PagedRun, ProgressBar
from scoregram.machine import threads
from scoregram.policy import Policy, PolicyConfig, chosen_device, load_policy, recompute_layers, vocabulary_of
from scoregram.reading import StepTally
from scoregram.runs import RunWriter, open_run, require_space
from scoregram.terminal import stop_requests

_LARGE_GAP = 0.1
"""Mean difference between log-probabilities above which the model is probably not the policy that was sampled."""
_UNIFORM_SHARE = 0.75
"""If the mean log-probability of a token is at or below this share of `-ln V`, that of a uniform guess, the model is
probably not the policy that was sampled: it hardly predicts these tokens."""
_FIRST_GROUPS = 8
"""Groups that are read before the run folder is created, and measured before the first warning about the model."""
_LONGEST_ROUND = 256
"""Most passes in a round, for each process: bounds how far processes read ahead without work to share."""


@dataclass(frozen=True)
class MeasuredDump:
    """How a measurement ended."""

    folder: Path
    format: str
    groups: int
    """Groups measured now."""
    held: int
    """Groups that the resumed run already held."""
    rollouts: int
    """Rollouts of the groups measured now."""
    left_out: int
    """Rollouts that cannot be measured, or exceed the limit of a group."""
    without_group: int
    """Those among them that belong to groups without any measurable rollout."""
    broken: int
    """Records that cannot be read."""
    interrupted: bool


def measure(config: MeasureConfig, *, console: Console | None = None) -> MeasuredDump:
    """Measure a dump as the config says, into its run folder.

    Raises:
        ScoregramError: Before any measurement, if there is no dump, its format is unknown, a token id is outside the
            model's vocabulary, or the folder holds another run; if strict, at the first broken record.
    """
    require_dump_estimator(config.estimator)
    with threads(config.threads) if config.threads else nullcontext(), all_processes() as processes:
        return measure_share(config, processes, console if processes.is_first else Console(quiet=True))


def measure_share(config: MeasureConfig, processes: Processes, console: Console | None) -> MeasuredDump:
    """Measure this process's share of a dump; the first process writes the shares of all."""
    dump = open_dump(
        config.rollouts,
        name=config.format,
        allow_pickle=config.allow_pickle,
        strict=config.strict,
        unpacked_bytes=config.unpacked_mb << 20,
    )
    temperature = config.temperature or dumped_temperature(dump) or 1.0
    policy = load_process_policy(config, processes)
    measured = measured_parameters(policy)
    measurer = GroupMeasurer(policy, temperature, config.estimator, config.reward_columns)
    groups, tally, counts = groups_of_dump(dump, config), StepTally(), ReadingCounts()
    with ProgressBar(dump.total_bytes, console=console) as bar, stop_requests() as stop, ExitStack() as folder:
        bar.print(f"{dump.name}: {dump.format.about}, {len(dump.files)} files, {dump.total_bytes / 1e6:,.1f} MB")
        if measured:
            bar.print(f"measured: {measured}")
        dump.on_broken = lambda message: bar.note("broken", f"skipped: {message}")
        first = first_groups(groups, dump, policy)
        require_dumped_inputs(first, config)
        group_lists = pass_groups(chain(first, groups), whole_steps=config.between_prompts)
        group_lists = require_room_for_first(group_lists, config)
        runs: list[PagedRun] = []  # one in the first process, none in others
        total: dict[str, float] = {}
        remarks: dict[str, str] = {}

        def store_remarks() -> None:
            total.update(whole_run_scalars(runs[0]))
            remarks.update(trust_remarks(total, policy, dump.broken, counts.without_group))
            runs[0].writer.write_remarks(remarks)

        def open_paged_run() -> Mapping[int, set[int]]:
            writer = open_run_writer(config, config.record(dump.name, temperature, measured))
            runs.append(folder.enter_context(PagedRun(folder.enter_context(writer))))
            folder.callback(store_remarks)  # also after an error
            return runs[0].groups_written

        held, stopped, is_warned = processes.from_first(open_paged_run), False, False
        passes = planned_passes(group_lists, held, policy, config, bar, counts)
        for current_round in rounds(passes, processes.count):
            share = partial(measure_round, current_round, measurer, config, processes)
            shares = iter(processes.gather(share, only_first=True))
            if runs:
                add_round(runs[0], current_round, shares, tally)
            is_time = bool(runs) and not is_warned and counts.groups >= _FIRST_GROUPS
            if is_time and (doubt := model_doubt(tally.scalars(), policy)):
                bar.print(f"warning: {doubt}")
                is_warned = True
            bar.update(dump.bytes_read, counts.groups)
            if stopped := processes.any(stop.asked):
                break
        if runs and not stopped:
            runs[0].end_step()
        folder.close()
        done = MeasuredDump(
            folder=config.out, format=dump.name, broken=dump.broken, interrupted=stopped, **asdict(counts)
        )
        for line in summary_lines(done, total, remarks, sum(len(run.incomplete_lines) for run in runs)):
            bar.print(line)
    return done


def measured_parameters(policy: Policy) -> str:
    """Which parameters are measured, if not all of them: those of adapters on a frozen base."""
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in policy.model.parameters()]
    trained, every = sum(count for count, is_trained in parameters if is_trained), sum(count for count, _ in parameters)
    return "" if trained == every else f"the adapters, {trained:,} of {every:,} parameters; their base is frozen"


def whole_run_scalars(run: PagedRun) -> Mapping[str, float]:
    """Scalars of all groups in the run folder, also those that a resumed measurement found there."""
    run.flush()
    tally = StepTally()
    for group in open_run(run.writer.folder).groups(layers=False):
        tally.add(group)
    return tally.scalars()


def model_doubt(total: Mapping[str, float], policy: Policy) -> str:
    """Why the model is probably not the policy that sampled the rollouts; empty if nothing suggests it."""
    gap, mean = total.get("dump/log_prob_gap", math.nan), total.get("token_log_prob", math.nan)
    uniform = -math.log(vocabulary_of(policy.model))
    if gap > _LARGE_GAP:
        return (
            f"log-probabilities differ from those in the dump by {gap:.2g} on average; "
            "--model may not be the policy that sampled these rollouts"
        )
    if math.isnan(gap) and mean <= _UNIFORM_SHARE * uniform:  # if recorded ones agree, the model is right
        return (
            f"the model gives the sampled tokens a mean log-probability of {mean:.2f}, a uniform guess gives "
            f"{uniform:.2f}; it is probably another model, or the tokens are those of another tokenizer"
        )
    return ""


def trust_remarks(total: Mapping[str, float], policy: Policy, broken: int, without_group: int) -> dict[str, str]:
    """Kind → what a reader of the run must know before trusting its numbers; empty if there is nothing to say.

    Args:
        total: Scalars of all groups of the run.
        policy: The model that measured them.
        broken: Records that cannot be read.
        without_group: Rollouts of groups without any measurable rollout.
    """
    remarks = {"approximate": "", "model": model_doubt(total, policy), "skipped": ""}
    retokenised = 1 - total.get("dump/exact", 1.0)
    if retokenised:
        remarks["approximate"] = (
            f"approximate: {retokenised:.1%} of the rollouts are text that was tokenised again; "
            f"{total.get('dump/round_trip', math.nan):.1%} of these decode to the same text"
        )
    left_out = int(total.get("dump/rollouts_left_out", 0)) + without_group
    if broken or left_out:
        remarks["skipped"] = f"missing from all numbers: {broken} broken records, {left_out} rollouts left out"
    return remarks


@dataclass
class ReadingCounts:
    """What was counted while reading; the same in all processes."""

    groups: int = 0
    held: int = 0
    rollouts: int = 0
    left_out: int = 0
    without_group: int = 0


@dataclass(frozen=True)
class PlannedPass:
    """Groups that go through the policy in one pass: one group, or all groups of a step."""

    step: int
    groups: list[MeasurableGroup]
    """Empty if all of them are in the run already or cannot be measured."""


def load_process_policy(config: MeasureConfig, processes: Processes) -> Policy:
    """The policy on the device of this process, or sharded over all processes."""
    settings = config.policy
    if processes.count > 1 and settings.device in ("auto", "cuda") and torch.cuda.is_available():
        settings = replace(settings, device=f"cuda:{int(os.environ.get('LOCAL_RANK', processes.rank))}")
        torch.cuda.set_device(chosen_device(settings.device))
    policy = sharded_policy(settings, processes) if config.fsdp else load_policy(settings)
    if config.checkpointing:
        recompute_layers(policy.model, caller="measure --checkpointing")
    return policy


def sharded_policy(settings: PolicyConfig, processes: Processes) -> Policy:
    """The policy with its parameters sharded over all processes by FSDP2, layer by layer.

    Every process loads the whole model into host memory; only its shards go to the device.

    Raises:
        ScoregramError: If there is only one process.
    """
    if processes.count == 1:
        remedy = "Start it with torchrun --nproc-per-node N."
        fail("measure --fsdp", "needs several processes", "one process", remedy)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = chosen_device(settings.device)
    policy = load_policy(replace(settings, device="cpu"))
    mesh = init_device_mesh(device.type, (processes.count,))
    blocks = set(getattr(policy.model, "_no_split_modules", None) or ())
    for module in policy.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(policy.model, mesh=mesh)
    return policy


def require_dumped_inputs(groups: Sequence[DumpedGroup], config: MeasureConfig) -> None:
    """Raise before the folder is made if the first groups lack the rewards or advantages that the config asks for.

    Without any advantage in the dump, `--estimator dump` would set all to 0, and every group would look dead.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    require_reward_columns(rollouts, config.reward_columns)
    if config.estimator == "dump" and all(
        rollout.advantage is None and rollout.advantages is None for rollout in rollouts
    ):
        got = f"none at {rollouts[0].location}"
        remedy = "Leave it out for reward minus the mean of the group, or name an estimator such as rloo."
        fail("measure --estimator", "dump needs advantages in the dump", got, remedy)


def dumped_temperature(dump: Dump) -> float | None:
    """The sampling temperature in the config of a scoregram run folder; None for other dumps."""
    if dump.name != "scoregram":
        return None
    for folder in dump.files[0].parents[:3]:
        if (folder / "config.yaml").is_file():
            value = open_run(folder).config.get("temperature")
            return float(value) if isinstance(value, int | float) else None
    return None


def groups_of_dump(dump: Dump, config: MeasureConfig) -> Iterator[DumpedGroup]:
    """Groups of a dump, read as they are consumed."""
    window, size = config.window_mb << 20, config.group_size
    groups = rollout_groups(dump, adjacent=dump.format.adjacent, window=window, size=size)
    return without_repeated_groups(groups) if dump.format.repeats else groups


def first_groups(groups: Iterator[DumpedGroup], dump: Dump, policy: Policy) -> list[DumpedGroup]:
    """The groups of a dump up to the first one with a rollout that fits the policy's tokenizer and vocabulary.

    Raises:
        ScoregramError: If the dump has no group, or no rollout of the first few groups fits.
    """
    first, refusals = [], []
    for group in islice(groups, _FIRST_GROUPS):
        first.append(group)
        for rollout in group.rollouts:
            try:
                tokenised_rollout(rollout, policy)
                return first
            except ScoregramError as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    got = f"{dump.broken} records that cannot be read" if dump.broken else "an empty one"
    return fail("measure --rollouts", "a dump must hold at least one rollout", got, "Check the path and the format.")


def open_run_writer(config: MeasureConfig, record: Mapping[str, Any]) -> RunWriter:
    """The writer of the run folder, new or resumed."""
    require_space(config.out, 100 << 20, caller="measure --out")
    if not config.resume:
        return RunWriter.create(
            config.out, record, overwrite=config.overwrite, layers=config.layers, caller="measure --out"
        )
    # with --between-prompts, an incomplete step must be measured again as a whole: cut the run after its last line
    lines = [int(line["step"]) for line in open_run(config.out).metrics()]
    keep = max(lines, default=-1) if config.between_prompts else None
    return RunWriter.resume(config.out, keep, config=record, may_differ=MAY_CHANGE_ON_RESUME, layers=config.layers)


def pass_groups(groups: Iterable[DumpedGroup], *, whole_steps: bool) -> Iterator[list[DumpedGroup]]:
    """Groups that are measured in one pass: each alone, or all of one step and kind."""
    if whole_steps:
        by_step = groupby(groups, key=lambda group: (group.step, group.rollouts[0].kind))
        yield from (list(step_groups) for _, step_groups in by_step)
    else:
        yield from ([group] for group in groups)


def require_room_for_first(
    group_lists: Iterator[list[DumpedGroup]], config: MeasureConfig
) -> Iterator[list[DumpedGroup]]:
    """The same groups, provided that those of the first pass do not exceed `max_groups`."""
    first = next(group_lists)
    if config.max_groups and len(first) > config.max_groups:
        requirement = f"must be at least {len(first)}, the groups of the first step, with --between-prompts"
        fail("measure --max-groups", requirement, config.max_groups, "Raise it, or leave out --between-prompts.")
    return chain([first], group_lists)


def planned_passes(
    group_lists: Iterable[list[DumpedGroup]],
    held: Mapping[int, set[int]],
    policy: Policy,
    config: MeasureConfig,
    bar: ProgressBar,
    counts: ReadingCounts,
) -> Iterator[PlannedPass]:
    """Passes in the order of the dump, without groups that are in the run or cannot be measured.

    The first pass that would exceed `max_groups` ends them.

    Args:
        group_lists: The groups of each pass.
        held: Step → positions of the groups that the run holds.
        policy: Its tokenizer encodes text.
        config: The settings.
        bar: Notes are printed above it.
        counts: Updated as groups are read.
    """
    for groups in group_lists:
        if config.max_groups and counts.groups + counts.held + len(groups) > config.max_groups:
            return
        new = [group for group in groups if group.position not in held.get(group.step, ())]
        measurable = [one for group in new if (one := measurable_group(group, policy, config, bar)) is not None]
        rollouts = sum(len(one.rollouts) for one in measurable)
        counts.held += len(groups) - len(new)
        counts.left_out += sum(len(group.rollouts) for group in new) - rollouts
        counts.without_group += sum(len(group.rollouts) for group in new) - sum(
            len(one.group.rollouts) for one in measurable
        )
        counts.groups += len(measurable)
        counts.rollouts += rollouts
        yield PlannedPass(groups[0].step, measurable)


def measurable_group(
    group: DumpedGroup, policy: Policy, config: MeasureConfig, bar: ProgressBar
) -> MeasurableGroup | None:
    """A group with the rollouts that can be measured, None if there are none; prints what is left out."""
    location = group.rollouts[0].location
    if group.late:
        bar.note("late", f"{location}: arrived after its group or step was closed; raise --window-mb.")
    kept = []
    for dumped in group.rollouts[: config.group_size_limit or None]:
        try:
            rollout = tokenised_rollout(dumped, policy, append_end=config.append_end)
        except ScoregramError as error:
            if config.strict:
                raise
            bar.note("left out", f"left out: {error}")
            continue
        refusal = rollout.refusal(policy.context)
        if refusal:
            bar.note("left out", f"left out: {dumped.location} {refusal}.")
        else:
            kept.append(rollout)
    if len(group.rollouts) < config.group_size:
        requirement = f"{len(group.rollouts)} rollouts, fewer than --group-size {config.group_size}"
        bar.note("short", f"{location}: a group of {requirement}.")
    if len(kept) == 1:
        bar.note("of one", f"{location}: a group of one rollout has nothing to be compared with.")
    return MeasurableGroup(group, kept) if kept else None


def rounds(passes: Iterable[PlannedPass], processes: int) -> Iterator[list[PlannedPass]]:
    """Passes in rounds that give each process one pass with groups; passes without groups come in between."""
    current: list[PlannedPass] = []
    for one in passes:
        current.append(one)
        if sum(bool(each.groups) for each in current) == processes or len(current) >= _LONGEST_ROUND * processes:
            yield current
            current = []
    if current:
        yield current


def add_round(
    run: PagedRun, current_round: Sequence[PlannedPass], shares: Iterator[StepRecords | None], tally: StepTally
) -> None:
    """Add the groups of a round to the run and to the tally.

    Args:
        run: The run of the first process.
        current_round: The passes of the round.
        shares: Records in the order of ranks, which is the order of the passes that have groups.
        tally: Means over the groups that were measured now.
    """
    for planned in current_round:
        run.begin_step(planned.step)
        records = next(shares) if planned.groups else None
        if records is not None:
            run.add(records)
            for group in records.groups:
                tally.add(group)


def measure_round(
    passes: list[PlannedPass], measurer: GroupMeasurer, config: MeasureConfig, processes: Processes
) -> StepRecords | None:
    """The records of this process's pass in a round; None if it has none."""
    work = [one for one in passes if one.groups]
    mine = [one for number, one in enumerate(work) if rank_of_group(number, processes.count) == processes.rank]
    if mine:
        try:
            return measurer.records(mine[0].groups, between_prompts=config.between_prompts)
        except ScoregramError as error:  # raised by an estimator or a measurement, which do not know the file
            location = f"measure {mine[0].groups[0].group.rollouts[0].location}"
            raise error if str(error).startswith(location) else type(error)(f"{location}: {error}") from error
    if work and config.fsdp:  # a process without a pass of its own must still take part in gathering the shards
        measurer.records(work[0].groups, between_prompts=config.between_prompts)
    return None


def summary_lines(
    done: MeasuredDump, total: Mapping[str, float], remarks: Mapping[str, str], incomplete: int
) -> Iterator[str]:
    """The last lines of the output.

    Args:
        done: How the measurement ended.
        total: Scalars of all groups of the run.
        remarks: From `trust_remarks`.
        incomplete: Steps whose line in the metrics lacks groups.
    """
    held = f", groups already in the run: {done.held}" if done.held else ""
    yield f"{done.folder}: groups measured: {done.groups}, rollouts: {done.rollouts}{held}"
    if remarks.get("approximate"):
        yield remarks["approximate"]
    if "dump/count_agreement" in total:
        yield f"token counts in the dump that match the tokenizer: {total['dump/count_agreement']:.1%}"
    if remarks.get("model"):
        yield f"warning: {remarks['model']}"
    elif "dump/log_prob_gap" in total:
        yield f"log-probabilities differ from those in the dump by {total['dump/log_prob_gap']:.2g} on average"
    counts = {
        "broken records skipped": done.broken,
        "rollouts left out": done.left_out,
        "rollouts without a reward": total.get("dump/without_reward", 0),
        "groups of one rollout": total.get("dump/groups_of_one", 0),
        "groups that arrived late": total.get("dump/late_groups", 0),
        "steps whose line in metrics.jsonl lacks groups": incomplete,
    }
    yield from (f"{text}: {int(count)}" for text, count in counts.items() if count)
    if done.interrupted:
        yield "interrupted; continue with --resume"
