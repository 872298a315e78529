"""Whether the files of a replication's runs belong together: names, steps, metrics, settings and source.

A hash shows that a file is the recorded one. It does not show that the file belongs where it is: someone who swaps two
files, or edits a metric, can hash the folder again. So every file is compared with what another file says of it.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scoregram.reading import GREEDY_TEST, SAMPLED_TEST, outcome_scalars
from scoregram.runs import BATCHES, GROUPS, ROLLOUTS, UPDATES, GroupRecord, Run, commit_tree, open_run, parts, read_part
from scoregram.spectra import MEASURED_RTOL, effective_rank, singular_values
from scoregram.studies.record import SETTING, run_folders
from scoregram.training import Evaluation

RunName = Callable[[Mapping[str, Any]], str | None]
"""Config of a run → the name that its folder must have; None if the study does not know such a run."""

NOT_SHARED = frozenset({"model", "batches_every", "about", "preset", "seeds"})
"""Settings of a replication that a run's config may hold with another meaning: a run starts from its own folder."""

RECOMPUTED_RTOL = 1e-6
"""Tolerated difference between a metric and the same number recomputed from the groups, relative to the larger one."""

COUNTS = ("reward", "live_groups", "groups")
"""Metrics that follow from the rewards of groups."""
PREFIXES = {"train": ("", "group/"), "fixed": ("probe/", "probe/")}
"""Kind of groups → prefixes of the metrics that count their rewards, and of those that average their spectra."""


@dataclass
class RunsFound:
    """What the runs of a replication say of themselves."""

    faults: list[str] = field(default_factory=list)
    runs: int = 0
    metrics: int = 0
    """Metrics that were recomputed from stored groups."""
    unsupported: int = 0
    """Evaluations whose rewards were not stored, so that their metrics cannot be recomputed."""
    commits: Counter[str | None] = field(default_factory=Counter)
    """Commit of the source → runs that name it."""
    unknown_state: int = 0
    """Runs that do not record whether their source had uncommitted changes."""
    changed_source: int = 0
    """Runs whose source had uncommitted changes."""

    def sentence(self) -> str:
        """What was compared, and what the runs do not record."""
        commits = ", ".join(commit[:7] if commit else "no commit" for commit in sorted(self.commits, key=str))
        said = [f"{self.runs} runs ({commits}) agree with their names and settings, {self.metrics} metrics with groups"]
        if self.changed_source:
            said.append(f"{self.changed_source} runs had uncommitted changes")
        if self.unknown_state:
            said.append(f"{self.unknown_state} runs do not record whether their source had uncommitted changes")
        if self.unsupported:
            said.append(f"{self.unsupported} evaluations stored no rewards to compare their metrics with")
        return "; ".join(said)


def compare_runs(folder: Path, *, config: Mapping[str, Any], run_name: RunName | None = None) -> RunsFound:
    """Compare the files of all runs in a replication with one another, one sentence for each fault.

    Args:
        folder: Folder of the replication.
        config: The settings in the record; `setting.json`, if there is one, must hold the same.
        run_name: The study's names of runs.
    """
    found = RunsFound()
    setting = folder / SETTING
    if setting.is_file() and _read_json(setting) != json.loads(json.dumps(config)):
        found.faults.append(f"{SETTING} and the settings in the record are not the same")
    for path in run_folders(folder):
        where = path.relative_to(folder).as_posix()
        try:
            run = open_run(path)
            faults = [*_name_faults(path, run, run_name), *_setting_faults(run, config), *_step_faults(path, run)]
            faults += [*_metric_faults(run, found), *_source_faults(run, found)]
        except Exception as error:  # damaged data may raise anything, and that is a fault to report
            faults = [f"cannot be read: {type(error).__name__}: {error}"]
        found.runs += 1
        found.faults += [f"{where}: {fault}" for fault in faults]
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _name_faults(path: Path, run: Run, run_name: RunName | None) -> Iterator[str]:
    written_to = re.split(r"[\\/]", str(run.config["out"]))[-1] if "out" in run.config else path.name
    if written_to != path.name:
        yield f"its config was written for a run named {written_to!a}"
    wanted = run_name(run.config) if run_name else None
    if wanted not in (None, path.name):
        yield f"its config is that of {wanted!a}"


def _setting_faults(run: Run, setting: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted((setting.keys() & run.config.keys()) - NOT_SHARED):
        if setting[name] != run.config[name]:
            yield f"{name} is {run.config[name]!a} in its config and {setting[name]!a} in the settings"


def _step_faults(path: Path, run: Run) -> Iterator[str]:
    """Rows whose step is not the one in their file's name, or whose group has another size."""
    size = run.config.get("group_size")
    for table in (GROUPS, BATCHES, ROLLOUTS, UPDATES):
        for step, part in parts(path / table):
            name = part.relative_to(path).as_posix()
            rows = _columns(part, ("step", "kind", "rewards", "sizes"))
            for other in sorted({row["step"] for row in rows} - {step}):
                yield f"{name} holds rows of step {other}"
            if table in (ROLLOUTS, UPDATES) or not isinstance(size, int) or "allocate" in run.config:
                continue
            sizes = {n for row in rows if row["kind"] in PREFIXES for n in row.get("sizes") or [len(row["rewards"])]}
            if sizes - {size}:
                yield f"{name} holds groups of {', '.join(map(str, sorted(sizes)))}, not of {size}"


def _columns(part: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a part file, with those of the named columns that it has."""
    table = read_part(part)
    return table.select([name for name in names if name in table.column_names]).to_pylist()


def _metric_faults(run: Run, found: RunsFound) -> Iterator[str]:
    """Metrics that differ from the same number computed from the stored groups of their step."""
    groups: defaultdict[int, defaultdict[str, list[GroupRecord]]] = defaultdict(lambda: defaultdict(list))
    for group in run.groups(layers=False):
        groups[group.step][group.kind].append(group)
    lines = {int(line["step"]): line for line in run.metrics()}
    for step, kinds in groups.items():
        if step not in lines:
            yield f"metrics.jsonl has no line for step {step}, which has groups"
            continue
        computed = _evaluation_scalars(kinds[GREEDY_TEST], kinds[SAMPLED_TEST])
        for kind in PREFIXES:
            computed |= _group_scalars(kind, kinds[kind]) if kinds[kind] else {}
        for name, value in computed.items():
            if name in lines[step]:
                found.metrics += 1
                if not _same(float(lines[step][name]), float(value)):
                    yield f"metrics.jsonl, step {step}: {name} is {lines[step][name]}, but the groups give {value}"
    for step, line in lines.items():
        if "eval/accuracy" in line and not groups[step][GREEDY_TEST]:
            found.unsupported += 1


def _evaluation_scalars(greedy: Sequence[GroupRecord], sampled: Sequence[GroupRecord]) -> dict[str, float]:
    """The metrics `eval/…` that follow from the stored rewards on the test problems."""
    rewards = tuple(float(reward) for group in greedy for reward in group.rewards)
    drawn = tuple(tuple(group.rewards.tolist()) for group in sampled)
    return Evaluation(rewards, drawn).scalars() if rewards else {}


def _group_scalars(kind: str, groups: Sequence[GroupRecord]) -> dict[str, float]:
    """The metrics that follow from the rewards and Grams of groups that were trained on or probed."""
    counts, means = PREFIXES[kind]
    width = max(len(group.rewards) for group in groups)
    rewards, advantages = torch.full((2, len(groups), width), math.nan, dtype=torch.float64)
    for place, group in enumerate(groups):
        rewards[place, : len(group.rewards)] = group.rewards
        advantages[place, : len(group.rewards)] = group.advantages
    found = {f"{counts}{name}": value for name, value in outcome_scalars(rewards, advantages).items() if name in COUNTS}
    ranks = [
        float(effective_rank(singular_values(group.gram, group.advantages, psd_rtol=MEASURED_RTOL)))
        for group in groups
        if group.gram is not None and bool(group.advantages.isfinite().all())
    ]
    known = [rank for rank in ranks if not math.isnan(rank)]
    return found | ({f"{means}effective_rank": sum(known) / len(known)} if known else {})


def _same(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=RECOMPUTED_RTOL, abs_tol=1e-12)


def _source_faults(run: Run, found: RunsFound) -> Iterator[str]:
    """A fault if the source of a run differs from the commit that it names; counts what the run does not record."""
    for environment in (run.environment, *(one["environment"] for one in run.resumed)):
        commit, dirty, tree = (environment.get(name) for name in ("commit", "dirty", "tree"))
        committed = commit_tree(commit) if commit and tree else None
        if committed is not None:
            dirty = committed != tree
            if environment.get("dirty") is False and dirty:
                yield f"its source was not that of commit {commit}, which it names: tree {tree}, not {committed}"
        found.commits[commit] += 1
        found.unknown_state += dirty is None
        found.changed_source += bool(dirty)
