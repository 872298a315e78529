"""One step in detail: the cosines between the rollouts of a group, their texts, and how prompts interfere."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.reading.group import Outcome, StoredGroup, row_factors
from scoregram.runs import TRAINING_KINDS, BatchRecord, RolloutRecord, Run
from scoregram.spectra import MEASURED_RTOL
from scoregram.statistics import cosine_matrix, prompt_shares, prompt_update_gram, rollout_shares


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupDetail:
    """A group of one step. Rollouts are sorted: the highest reward first, those without a reward last."""

    prompt_id: str
    number: int
    """Place of the group in its step, from 1."""
    prompt: str | None
    answer: str | None
    """The expected answer, where the run stores it."""
    outcome: Outcome
    rewards: list[float]
    """`nan` for a rollout without a reward."""
    lengths: list[int]
    advantages: list[float]
    norms: list[float]
    """`|ψ_i|`, or the norm of the gradient of a loss; empty if the group was not measured."""
    cosines: list[list[float]]
    """Between the scores of two rollouts; empty if the group was not measured, `nan` for a zero score."""
    shares: list[float]
    """Share of each rollout in the squared norm of the update of `share_of`; empty if not measured."""
    share_of: str
    """`step` or `group`: the update that `shares` add up to, over all its rollouts."""
    rollouts: list[RolloutRecord | None]
    """The stored rollouts; None for one that was not stored. Empty if none was."""

    @property
    def has_text(self) -> bool:
        """Whether the text of some rollout is stored."""
        return any(one is not None and one.completion is not None for one in self.rollouts)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchDetail:
    """How the prompts of a step interfere."""

    prompts: list[str]
    """Text of each prompt, else its id; in the order of the groups of the step."""
    cosines: list[list[float]]
    """Between the updates that two prompts alone would make; `nan` for a prompt without an update."""
    shares: list[float]
    """Share of each prompt in the squared norm of the update of the step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepDetail:
    """One step in detail."""

    step: int
    groups: list[GroupDetail]
    left_out: int
    """Groups of the step that are not among `groups`."""
    batch: BatchDetail | None
    """None unless the Gram between all rollouts of the step was stored."""


def detailed_steps(run: Run, groups: Sequence[StoredGroup], most: int) -> list[int]:
    """Steps to show in detail: those with stored rollouts, else those with a Gram; evenly spaced if more than `most`.

    The first and the last are always among them.
    """
    with_text = run.rollout_steps()
    recorded = {group.record.step for group in groups}
    measured = {group.record.step for group in groups if group.record.gram is not None}
    steps = sorted((with_text & measured) or (with_text & recorded) or measured)
    if len(steps) <= most:
        return steps
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def step_detail(run: Run, groups: Sequence[StoredGroup], step: int, most_groups: int | None = None) -> StepDetail:
    """One step in detail.

    Args:
        run: The run; the rollouts and the batch of the step are read from it.
        groups: Training groups of the run.
        step: The step.
        most_groups: Keep this many groups, those with the largest updates; all if None.
    """
    here = [group for group in groups if group.record.step == step]
    batch = next((one for one in run.batches({step}) if one.kind in TRAINING_KINDS), None)
    of_step = _batch_shares(batch)
    seen: dict[str, int] = {}
    keys = []
    for group in here:
        name = group.record.prompt_id
        keys.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    kept = sorted(sorted(range(len(here)), key=lambda place: -_update_size(here[place]))[:most_groups])
    prompts = {keys[place][0] for place in kept}
    stored = _by_group([one for one in run.rollouts({step}, prompts=prompts) if one.kind in TRAINING_KINDS])
    details = [group_detail(here[at], stored.get(keys[at], {}), of_step.get(keys[at]), at + 1) for at in kept]
    texts = {group.record.prompt_id: group.record.prompt for group in here}
    texts |= {detail.prompt_id: detail.prompt for detail in details}
    return StepDetail(
        step=step,
        groups=details,
        left_out=len(here) - len(kept),
        batch=None if batch is None else batch_detail(batch, texts),
    )


def group_detail(
    group: StoredGroup,
    stored: dict[int, RolloutRecord] | None = None,
    shares: Tensor | None = None,
    number: int = 1,
) -> GroupDetail:
    """A group with its rollouts sorted by reward.

    Args:
        group: The group.
        stored: Position of a rollout in the group → the rollout, as far as stored.
        shares: `(R,)` shares in the update of the step; the shares in that of the group if not given.
        number: Place of the group in its step, from 1.
    """
    record = group.record
    order = sorted(range(group.size), key=lambda place: (-_known(float(record.rewards[place])), place))
    cosines, norms, own = _gram_parts(group)
    used = own if shares is None else shares
    return GroupDetail(
        prompt_id=record.prompt_id,
        number=number,
        prompt=record.prompt or next((one.prompt for one in (stored or {}).values() if one.prompt is not None), None),
        answer=next((one.answer for one in (stored or {}).values() if one.answer is not None), None),
        outcome=group.outcome,
        rewards=_ordered(record.rewards, order),
        lengths=_ordered(record.lengths, order),
        advantages=_ordered(record.advantages, order),
        norms=_ordered(norms, order),
        cosines=[] if cosines is None else cosines[order][:, order].tolist(),
        shares=_ordered(used, order),
        share_of="group" if shares is None else "step",
        rollouts=[stored.get(place) for place in order] if stored else [],
    )


def batch_detail(batch: BatchRecord, texts: Mapping[str, str | None] | None = None) -> BatchDetail | None:
    """Cosines between the updates of prompts, and their shares; None if the matrix is not a Gram.

    Args:
        batch: The batch.
        texts: Id of a prompt → its text, as far as known.
    """
    prompt_of = torch.arange(len(batch.sizes)).repeat_interleave(batch.sizes)
    gram, weights = batch.gram.double(), batch.weights.double()
    try:
        cosines = cosine_matrix(prompt_update_gram(gram, weights, prompt_of), rtol=1e-3)  # stored in float32
    except ScoregramError:
        return None
    shares = prompt_shares(gram, weights, prompt_of, rtol=MEASURED_RTOL)
    names = [(texts or {}).get(name) or name for name in batch.prompt_ids]
    return BatchDetail(prompts=names, cosines=cosines.tolist(), shares=shares.tolist())


def _gram_parts(group: StoredGroup) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cosines, norms, and shares in the group's own update; None where they are not known."""
    record = group.record
    if record.gram is None or group.reading is None:
        return None, None, None
    try:
        cosines = cosine_matrix(record.gram, rtol=MEASURED_RTOL)
    except ScoregramError:
        return None, None, None
    weights = row_factors(record.advantages, record.rows).double()
    norms = record.gram.diagonal().clamp(min=0).sqrt()
    return cosines, norms, rollout_shares(record.gram, weights, rtol=MEASURED_RTOL)


def _batch_shares(batch: BatchRecord | None) -> dict[tuple[str, int], Tensor]:
    """Prompt and its occurrence in the step → shares of its rollouts in the update of the step."""
    if batch is None:
        return {}
    shares = rollout_shares(batch.gram.double(), batch.weights.double(), rtol=MEASURED_RTOL)
    found: dict[tuple[str, int], Tensor] = {}
    for name, part in zip(batch.prompt_ids, shares.split(batch.sizes.tolist()), strict=True):
        found[name, sum(other == name for other, _ in found)] = part
    return found


def _by_group(rollouts: Iterable[RolloutRecord]) -> dict[tuple[str, int], dict[int, RolloutRecord]]:
    """Prompt and its occurrence in the step → position → rollout."""
    by_place: dict[tuple[str, int], dict[int, RolloutRecord]] = {}
    for one in rollouts:
        by_place.setdefault((one.prompt_id, one.group), {})[one.index] = one
    seen: dict[str, int] = {}
    found = {}
    for name, place in sorted(by_place, key=lambda key: key[1]):
        found[name, seen.get(name, 0)] = by_place[name, place]
        seen[name] = seen.get(name, 0) + 1
    return found


def _update_size(group: StoredGroup) -> float:
    """Size by which groups are chosen: the norm of the update, else the spread of the advantages."""
    size = math.nan if group.reading is None else group.reading.update_norm
    return float(group.record.advantages.abs().sum()) if math.isnan(size) else size


def _known(reward: float) -> float:
    return -math.inf if math.isnan(reward) else reward


def _ordered(values: Tensor | None, order: Sequence[int]) -> list[Any]:
    return [] if values is None else values[list(order)].tolist()
