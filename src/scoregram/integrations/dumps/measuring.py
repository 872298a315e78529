"""From groups of a dump to the records of a run: one pass through the policy, and what follows from its Gram."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.gram import Gram, measure_gram
from scoregram.integrations.dumps.advantages import group_advantages, group_rewards
from scoregram.integrations.dumps.grouping import DumpedGroup, prompt_digest
from scoregram.integrations.dumps.tokens import Tokenised, padded
from scoregram.policy import Policy
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord
from scoregram.training import group_reading, whole_reading


@dataclass(frozen=True)
class Candidate:
    """A group that can be measured."""

    group: DumpedGroup
    rollouts: Sequence[Tokenised]
    """Those of its rollouts that can be; at least one."""
    left_out: int = 0
    """Those that cannot."""

    @property
    def prompt_id(self) -> str:
        """The name that the dump gives the prompt; else one that equal prompts share."""
        first = self.rollouts[0].rollout
        return first.prompt_id or f"prompt/{prompt_digest(first).hex()[:16]}"


@dataclass(frozen=True)
class MeasuredGroups:
    """What one pass gave."""

    groups: list[GroupRecord]
    rollouts: list[RolloutRecord]
    batch: BatchRecord | None = None
    """All of it with the Gram between prompts, where that was asked for."""
    whole: Mapping[str, float] | None = None
    """Readings that need the Gram between prompts."""


@dataclass(frozen=True)
class Measurer:
    """How the groups of a dump are measured; the same for all of them."""

    policy: Policy
    temperature: float
    estimator: str
    reward_columns: Sequence[str] = ()

    def measure(self, candidates: Sequence[Candidate], *, between_prompts: bool) -> MeasuredGroups:
        """Records of groups of one step that go through the policy together."""
        rollouts = [made for candidate in candidates for made in candidate.rollouts]
        gram = self.gram(rollouts)
        groups: list[GroupRecord] = []
        written: list[RolloutRecord] = []
        start = 0
        for candidate in candidates:
            here = slice(start, start + len(candidate.rollouts))
            record = self.group_record(candidate, gram, here)
            groups.append(record)
            written += self.rollout_records(candidate, record, gram.log_probs[here].detach().float().cpu())
            start = here.stop
        if not between_prompts:
            return MeasuredGroups(groups, written)
        batch = batch_of(groups, gram.matrix)
        return MeasuredGroups(groups, written, batch, whole_of(batch, groups))

    def gram(self, rollouts: Sequence[Tokenised]) -> Gram:
        """The Gram of some rollouts."""
        ids, mask, attention = padded(rollouts, self.policy.pad_id, next(self.policy.model.parameters()).device)
        try:
            with self.policy.computing():
                return measure_gram(self.policy.model, ids, mask, attention, temperature=self.temperature)
        except torch.OutOfMemoryError:
            got = f"{ids.shape[0]} rollouts of up to {ids.shape[1]} tokens"
            remedy = "Pass --group-size-limit, leave out --between-prompts, or use a narrower --dtype."
            fail(f"measure {rollouts[0].rollout.where}", "a pass must fit into the memory of the device", got, remedy)

    def group_record(self, candidate: Candidate, gram: Gram, here: slice) -> GroupRecord:
        """One group with its Gram, its readings, and how far the dump can be trusted."""
        group, rollouts, matrix = candidate.group, candidate.rollouts, gram.matrix[here, here]
        rewards = group_rewards(rollouts, self.reward_columns)
        advantages = group_advantages(rollouts, rewards, matrix, self.estimator)
        known = rewards[rewards.isfinite()]
        reading = group_reading(matrix, rewards.nan_to_num(nan=0.0), advantages)
        reading["reward_mean"] = float(known.mean()) if len(known) else math.nan
        reading["reward_std"] = float(known.std(correction=0)) if len(known) else math.nan
        marks = {"group": group.position, "late": int(group.late), "rollouts_left_out": candidate.left_out}
        return GroupRecord(
            step=group.step,
            prompt_id=candidate.prompt_id,
            prompt=self.prompt_text(rollouts[0]),
            kind=rollouts[0].rollout.kind,
            rewards=rewards,
            lengths=torch.tensor([int(made.mask.sum()) for made in rollouts]),
            advantages=advantages,
            gram=matrix,
            by_layer={layer: whole[here, here] for layer, whole in gram.by_layer.items()},
            statistics=reading | agreement(rollouts, gram.log_probs[here].detach().double().cpu()) | marks,
        )

    def rollout_records(self, candidate: Candidate, record: GroupRecord, log_probs: Tensor) -> list[RolloutRecord]:
        """One record for every rollout of a group."""
        rows = zip(candidate.rollouts, record.rewards.tolist(), record.advantages.tolist(), log_probs, strict=True)
        return [
            self.rollout_record(candidate, index, made, reward, advantage, found[: len(made.token_ids)])
            for index, (made, reward, advantage, found) in enumerate(rows)
        ]

    def rollout_record(
        self, candidate: Candidate, index: int, made: Tokenised, reward: float, advantage: float, found: Tensor
    ) -> RolloutRecord:
        """One rollout as a run remembers it; everything per token aligned with its tokens."""
        rollout, start = made.rollout, made.prompt_length
        by_token = rollout.advantages if rollout.advantage is None and self.estimator in ("auto", "dump") else None
        completion = rollout.completion
        if completion is None:
            completion = self.policy.decode(made.token_ids[made.mask].tolist())
        ends = bool(len(made.token_ids)) and int(made.token_ids[-1]) in self.policy.stop_ids
        return RolloutRecord(
            step=candidate.group.step,
            prompt_id=candidate.prompt_id,
            group=candidate.group.position,
            index=index,
            prompt=self.prompt_text(made),
            completion=completion,
            token_ids=made.token_ids,
            prompt_length=start,
            completion_mask=None if bool(made.mask[start:].all()) else made.mask,
            reward=reward,
            rewards=rollout.rewards,
            log_probs=found,
            behaviour_log_probs=after(start, rollout.log_probs) if made.exact else None,
            advantage=advantage if by_token is None else None,
            advantages=after(start, by_token) if made.exact else None,
            finished=ends if rollout.finished is None else rollout.finished,
            kind=rollout.kind,
        )

    def prompt_text(self, made: Tokenised) -> str:
        """Text of a prompt, as the dump has it or as the tokenizer reads it."""
        written = made.rollout.prompt
        return (
            written if isinstance(written, str) else self.policy.decode(made.token_ids[: made.prompt_length].tolist())
        )


def after(start: int, values: Tensor | None) -> Tensor | None:
    """Values of the completion behind zeros for the prompt; None stays None."""
    return None if values is None else torch.cat([values.new_zeros(start), values]).float()


def agreement(rollouts: Sequence[Tokenised], log_probs: Tensor) -> dict[str, float]:
    """How well the tokens and the policy agree with what the dump says, as means over the rollouts of a group.

    `exact` share of rollouts whose very tokens were written; `round_trip` share of the others whose new tokens decode
    to their text; `count_agreement` share with as many tokens as the dump counted; `log_prob_gap` mean distance of the
    log-probabilities in the dump from those found now, `log_prob_gap_max` the largest. What cannot be told is absent.
    """
    made: dict[str, float] = {"exact": mean([float(one.exact) for one in rollouts])}
    shares = {
        "round_trip": [one.round_trip for one in rollouts],
        "count_agreement": [one.count_agrees for one in rollouts],
        "finished": [one.rollout.finished for one in rollouts],
    }
    made |= {name: mean([float(flag) for flag in flags if flag is not None]) for name, flags in shares.items()}
    pairs = list(zip(rollouts, log_probs, strict=True))
    found = [float(row[: len(one.mask)][one.mask].mean()) for one, row in pairs if bool(one.mask.any())]
    gaps = [gap for one, row in pairs if len(gap := log_prob_gaps(one, row))]
    made["token_log_prob"] = mean(found)
    made["log_prob_gap"] = mean([float(gap.mean()) for gap in gaps])
    made["log_prob_gap_max"] = max((float(gap.max()) for gap in gaps), default=math.nan)
    return {name: value for name, value in made.items() if not math.isnan(value)}


def log_prob_gaps(made: Tokenised, found: Tensor) -> Tensor:
    """Distances of the dumped log-probabilities of chosen tokens from those found; empty where none are known."""
    dumped, start = made.rollout.log_probs, made.prompt_length
    if dumped is None or not made.exact:
        return torch.zeros(0)
    gaps = (dumped.double() - found[start : start + len(dumped)]).abs()[made.mask[start:]]
    return gaps[gaps.isfinite()]


def mean(values: Sequence[float]) -> float:
    """Mean, `nan` of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def batch_of(groups: Sequence[GroupRecord], gram: Tensor) -> BatchRecord:
    """All groups of a step in one record, weighted as an update that averages over rollouts weights them."""
    advantages = torch.cat([group.advantages for group in groups])
    return BatchRecord(
        step=groups[0].step,
        kind=groups[0].kind,
        prompt_ids=tuple(group.prompt_id for group in groups),
        sizes=torch.tensor([len(group.rewards) for group in groups]),
        rewards=torch.cat([group.rewards for group in groups]),
        lengths=torch.cat([group.lengths for group in groups]),
        weights=advantages / len(advantages),
        gram=gram,
    )


def whole_of(batch: BatchRecord, groups: Sequence[GroupRecord]) -> Mapping[str, Any]:
    """Readings of a step that need the Gram between prompts; none where groups differ in size or lack a reward."""
    if len(set(batch.sizes.tolist())) > 1 or not bool(batch.rewards.isfinite().all()):
        return {}
    return whole_reading(batch.gram, batch.weights, batch.rewards.view(len(groups), -1))
