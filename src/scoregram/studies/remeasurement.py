"""Grams measured again from stored tokens: the one check of a record that needs the model.

A run that keeps evidence stores the completion tokens of every measured group, the hash of each prompt's tokens, and
the hash of the weights that it started from. The groups that a run probed before its first step are of those weights.
Anyone who has them can measure their Grams again. Groups of later steps would need the weights of their step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
import torch

from scoregram.policy import Policy, load_policy, weights_sha256
from scoregram.rollouts import Rollouts
from scoregram.runs import FIXED_PROBE, GroupRecord, open_run, token_hash
from scoregram.studies.record import START, run_folders
from scoregram.tasks import Task, load_task
from scoregram.training import START_HASH, TrainConfig, probe_step

TOLERANCE, AUTOCAST_TOLERANCE = 1e-3, 5e-2
"""Largest `|K' - K|_F / |K|_F` that rounding explains: in the model's own dtype, and with products in bfloat16."""


@dataclass(frozen=True)
class Remeasured:
    """Result of measuring some groups again."""

    faults: tuple[str, ...]
    groups: int
    """Groups that were measured."""
    candidates: int
    """Groups that could be measured."""
    largest: float
    """Largest relative difference of a Gram."""

    def sentence(self) -> str:
        """What was measured."""
        return f"{self.groups} of {self.candidates} groups measured again, largest difference {self.largest:.1e} of |K|"


def remeasure(folder: Path, count: int, *, start: Path | None = None, device: str = "cpu") -> Remeasured:
    """Measure the Grams of up to `count` groups of a replication again, drawn from those of the starting policies.

    The same groups are drawn at every call.

    Args:
        folder: Folder of the replication.
        count: Groups to measure.
        start: Folder of the starting policy; that in the folder of the replication if not given.
        device: Where to measure.
    """
    runs = [run for path in run_folders(folder) if START_HASH in (run := open_run(path)).environment]
    found = [(run, group) for run in runs for group in run.groups([0], layers=False) if _is_measurable(group)]
    drawn = np.random.default_rng(0).permutation(len(found))[:count]
    faults, largest = [], 0.0
    for run in runs:
        wanted = [group for place in sorted(drawn) for owner, group in (found[place],) if owner is run]
        if not wanted:
            continue
        config = replace(TrainConfig.of_run(run.folder), device=device)
        weights = start or _start_folder(folder, config)
        if not weights.is_dir():
            faults.append(f"{run.folder.name}: its starting policy must be in {weights}")
            continue
        task = load_task(config.task, seed=config.seed)
        policy = load_policy(replace(config, model=str(weights)).policy, task)
        if weights_sha256(policy.model) != run.environment[START_HASH]:
            faults.append(f"{run.folder.name}: the weights in {weights} are not those that the run started from")
            continue
        for group in wanted:
            off, fault = _difference(policy, task, config, group)
            largest = max(largest, off)
            faults += [f"{run.folder.name}, {group.prompt_id}: {fault}"] if fault else []
    return Remeasured(tuple(faults), len(drawn), len(found), largest)


def _is_measurable(group: GroupRecord) -> bool:
    return group.kind == FIXED_PROBE and group.gram is not None and group.completion_ids is not None


def _start_folder(folder: Path, config: TrainConfig) -> Path:
    """Where `replicate` put the starting policy of a run: its path from `start` on, inside the replication."""
    names = PurePath(config.model).parts
    return folder.joinpath(*names[names.index(START) :]) if START in names else Path(config.model)


def _difference(policy: Policy, task: Task, config: TrainConfig, group: GroupRecord) -> tuple[float, str]:
    """`|K' - K|_F / |K|_F` of one group, and a sentence if it is more than rounding."""
    problems = [problem for problem in task.test if problem.id == group.prompt_id]
    prompt = policy.encode_prompt(task.prompt(problems[0])) if problems else []
    if token_hash(prompt) != group.prompt_sha256:
        return 0.0, "the task has another prompt of this name"
    assert group.completion_ids is not None
    completions = [part.tolist() for part in group.completion_ids.split(group.lengths.tolist())]
    rollouts = replace(rollouts_of_prompt(prompt, completions, policy.pad_id), rewards=group.rewards)
    rollouts = rollouts.to(next(policy.model.parameters()).device)
    step = probe_step(policy, rollouts, number=0, kind=FIXED_PROBE, temperature=config.temperature, blocks=None)
    assert step.gram is not None and group.gram is not None
    off = float(torch.linalg.norm(step.gram.matrix - group.gram) / torch.linalg.norm(group.gram))
    limit = AUTOCAST_TOLERANCE if config.autocast else TOLERANCE
    return off, "" if off <= limit else f"its Gram differs by {off:.1e} of |K|, more than rounding ({limit:g})"


def rollouts_of_prompt(prompt: Sequence[int], completions: Sequence[Sequence[int]], pad_id: int) -> Rollouts:
    """Rollouts without rewards from the token ids of a prompt and of its completions, padded on the right."""
    rows = [torch.tensor([*prompt, *completion]) for completion in completions]
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(int(lengths.max()))
    attention = places[None] < lengths[:, None]
    return Rollouts(
        input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id),
        attention_mask=attention,
        completion_mask=attention & (places[None] >= len(prompt)),
        prompt_lengths=torch.full((len(rows),), len(prompt)),
        group_ids=torch.zeros(len(rows), dtype=torch.int64),
    )
