"""From groups of a dump to a `Step` and its records: token ids, one pass through the policy, advantages.

Token ids are those of the dump, or its text tokenised again, which is an approximation: the policy may have drawn other
tokens with the same text. Every group is stored with how far its dump agrees with the policy (`group_marks`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import ScoregramError, fail, listed
from scoregram.gram import Gram, measure_gram, sharded_modules
from scoregram.integrations.dumps.grouping import DumpedGroup, prompt_digest
from scoregram.integrations.dumps.records import DumpedRollout
from scoregram.policy import Policy, vocabulary_of
from scoregram.reading import (
    Step,
    batch_records,
    group_readings,
    group_records,
    rollout_records,
    whole_gram_scalars,
)
from scoregram.rollouts import Rollouts
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards

_DEFAULT_ESTIMATOR = "mean"
"""For groups without advantages in the dump: reward minus the mean of the group."""
_ESTIMATOR_INPUTS = frozenset({"lengths", "outcomes", "score_energies"})
"""Estimator inputs, besides rewards, that a measured group has."""


def require_dump_estimator(name: str) -> None:
    """Raise before any work if the estimator needs more than one measured group."""
    usable = {
        key
        for key, row in ESTIMATORS.items()
        if row.level == "group" and set(row.needs) <= _ESTIMATOR_INPUTS and not row.couples_prompts
    }
    if name not in {"auto", "dump"} | usable:
        remedy = "Other estimators need more than the rollouts of one group."
        fail("measure --estimator", f"must be auto, dump or one of {listed(usable)}", repr(name), remedy)


@dataclass(frozen=True, eq=False)
class TokenisedRollout:
    """A dumped rollout with the token ids that go through the policy."""

    dumped: DumpedRollout
    token_ids: Int[Tensor, " tokens"]
    """`(T,)`. Prompt, then completion."""
    prompt_length: int
    mask: Bool[Tensor, " tokens"]
    """`(T,)`. True for the tokens that the policy chose."""
    exact: bool
    """Whether these are the sampled tokens; false for text that was tokenised again."""
    round_trip: bool | None = None
    """Whether the new tokens decode to the text they were made from; None if nothing was tokenised."""
    count_agrees: bool | None = None
    """Whether there are as many tokens as the dump counted; None if it did not count."""

    def refusal(self, context: int) -> str:
        """Why it cannot be measured, as the end of a sentence; empty if it can."""
        if len(self.token_ids) > context:
            return f"has {len(self.token_ids)} tokens, more than the context of {context}"
        if len(self.mask) and bool(self.mask[0]):
            return "has no prompt token before its completion"
        return "" if len(self.token_ids) else "has no tokens"

    def prompt_text(self, policy: Policy) -> str:
        """Text of the prompt, from the dump or decoded."""
        prompt = self.dumped.prompt
        return prompt if isinstance(prompt, str) else policy.decode(self.token_ids[: self.prompt_length].tolist())


def tokenised_rollout(dumped: DumpedRollout, policy: Policy, *, append_end: bool = False) -> TokenisedRollout:
    """A dumped rollout with its token ids.

    Args:
        dumped: From any format.
        policy: Its tokenizer encodes text.
        append_end: Append the end token to text, unless the dump says that the completion was cut off.

    Raises:
        ScoregramError: If a token id is outside the vocabulary, the tokenizer has no template for a conversation, or
            the tokenizer or its template fails on this text.
    """
    if dumped.prompt_ids is not None and dumped.completion_ids is not None:
        return _with_dumped_tokens(dumped, dumped.prompt_ids, dumped.completion_ids, policy)
    try:
        return _with_new_tokens(dumped, policy, append_end)
    except ScoregramError:
        raise
    except Exception as error:  # templates raise any exception; tokenizers fail on lone surrogates
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        remedy = "Repair or remove this record."
        fail(f"measure {dumped.location}", "the tokenizer must be able to encode the text", reason, remedy)


def _with_new_tokens(dumped: DumpedRollout, policy: Policy, append_end: bool) -> TokenisedRollout:
    prompt = torch.tensor(_prompt_token_ids(dumped, policy), dtype=torch.int64)
    text = dumped.completion or ""
    ids = list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    round_trip = policy.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    count_agrees = None if dumped.tokens is None else dumped.tokens == len(ids)
    if append_end and dumped.finished is not False:
        ids.append(policy.stop_ids[0])
    whole = torch.cat([prompt, torch.tensor(ids, dtype=torch.int64)])
    _require_known_tokens(dumped, whole, policy)
    mask = torch.arange(len(whole)) >= len(prompt)
    return TokenisedRollout(dumped, whole, len(prompt), mask, False, round_trip, count_agrees)


def _with_dumped_tokens(dumped: DumpedRollout, prompt: Tensor, completion: Tensor, policy: Policy) -> TokenisedRollout:
    whole = torch.cat([prompt, completion])
    _require_known_tokens(dumped, whole, policy)
    every, given = torch.ones(len(completion), dtype=torch.bool), dumped.completion_mask
    mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), every if given is None else given])
    return TokenisedRollout(dumped, whole, len(prompt), mask, exact=True)


def _require_known_tokens(dumped: DumpedRollout, ids: Tensor, policy: Policy) -> None:
    vocabulary = vocabulary_of(policy.model)
    if len(ids) and int(ids.max()) >= vocabulary:
        requirement = f"token ids must be below {vocabulary}, the vocabulary size of the model"
        remedy = "Pass the model that the rollouts were sampled from."
        fail(f"measure {dumped.location}", requirement, int(ids.max()), remedy)


def _prompt_token_ids(dumped: DumpedRollout, policy: Policy) -> list[int]:
    if dumped.prompt_ids is not None:
        return dumped.prompt_ids.tolist()
    if isinstance(dumped.prompt, str):
        return policy.encode_prompt(dumped.prompt)
    if getattr(policy.tokenizer, "chat_template", None) is None:
        got, remedy = "a tokenizer without one", "Pass a model whose tokenizer has a chat template."
        fail(f"measure {dumped.location}", "a prompt of messages needs a chat template", got, remedy)
    messages = [dict(message) for message in dumped.prompt or ()]
    text = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class MeasurableGroup:
    """A dumped group with token ids, reduced to the rollouts that can be measured."""

    group: DumpedGroup
    rollouts: Sequence[TokenisedRollout]
    """At least one."""

    @property
    def left_out(self) -> int:
        """Rollouts of the dumped group that are not measured."""
        return len(self.group.rollouts) - len(self.rollouts)

    @property
    def prompt_name(self) -> str:
        """The name of the prompt in the dump, else a digest that equal prompts share."""
        first = self.rollouts[0].dumped
        return first.prompt_id or f"prompt/{prompt_digest(first).hex()[:16]}"

    def rewards(self, columns: Sequence[str]) -> GroupRewards:
        """`(R,)` float64; `nan` for a rollout without a finite reward.

        Args:
            columns: Reward functions to add up instead of taking the dump's own total.

        Raises:
            ScoregramError: If one of the functions gave no rollout of the group a reward.
        """
        dumped = [rollout.dumped for rollout in self.rollouts]
        require_reward_columns(dumped, columns)
        if columns:
            values = [sum(one.rewards.get(column, math.nan) for column in columns) for one in dumped]
        else:
            values = [one.reward for one in dumped]
        rewards = torch.tensor(values, dtype=torch.float64)
        return torch.where(rewards.isfinite(), rewards, torch.nan)


def padded_rollouts(groups: Sequence[MeasurableGroup], policy: Policy, reward_columns: Sequence[str] = ()) -> Rollouts:
    """Groups of one step as one batch, padded on the right, on the CPU."""
    rows = [rollout for group in groups for rollout in group.rollouts]
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.full((len(rows), longest), policy.pad_id, dtype=torch.int64)
    mask, attention = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for place, row in enumerate(rows):
        length = len(row.token_ids)
        ids[place, :length], mask[place, :length], attention[place, :length] = row.token_ids, row.mask, True
    parts = dict.fromkeys(name for row in rows for name in row.dumped.rewards)
    return Rollouts(
        input_ids=ids,
        attention_mask=attention,
        completion_mask=mask,
        prompt_lengths=torch.tensor([row.prompt_length for row in rows]),
        group_ids=torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group.rollouts) for group in groups])),
        prompt_names=[group.prompt_name for group in groups],
        prompts=[group.rollouts[0].prompt_text(policy) for group in groups],
        completions=[_completion_text(row, policy) for row in rows],
        rewards=torch.cat([group.rewards(reward_columns) for group in groups]),
        reward_parts={
            name: torch.tensor([row.dumped.rewards.get(name, math.nan) for row in rows], dtype=torch.float64)
            for name in parts
        },
        behaviour_log_probs=_padded_values(
            rows, [row.dumped.log_probs if row.exact else None for row in rows], longest
        ),
        finished=torch.tensor([_is_finished(row, policy) for row in rows]),
    )


def _completion_text(row: TokenisedRollout, policy: Policy) -> str:
    text = row.dumped.completion
    return policy.decode(row.token_ids[row.mask].tolist()) if text is None else text


def _is_finished(row: TokenisedRollout, policy: Policy) -> bool:
    """What the dump says, else whether the last token is a stop token."""
    if row.dumped.finished is not None:
        return row.dumped.finished
    return int(row.token_ids[-1]) in policy.stop_ids


def _padded_values(
    rows: Sequence[TokenisedRollout], completions: Sequence[Tensor | None], longest: int
) -> Float[Tensor, "batch tokens"] | None:
    """`(N, T)` values of completion tokens, a row of `nan` for a rollout without values. None if no rollout has any."""
    if all(values is None for values in completions):
        return None
    table = torch.zeros(len(rows), longest)
    for place, (row, values) in enumerate(zip(rows, completions, strict=True)):
        if values is None:
            table[place] = torch.nan
        else:
            table[place, row.prompt_length : row.prompt_length + len(values)] = values.float()
    return table


@dataclass(frozen=True)
class StepRecords:
    """What one pass through the policy adds to the run folder."""

    groups: list[GroupRecord]
    rollouts: list[RolloutRecord]
    batches: list[BatchRecord]
    """The Gram between prompts, if requested."""
    between_prompts: Mapping[str, float]
    """Scalars that need the Gram between prompts."""


@dataclass(frozen=True)
class GroupMeasurer:
    """How the groups of a dump are measured; the same for all of them."""

    policy: Policy
    temperature: float
    estimator: str
    """`auto`, `dump`, or a group-level row of `ESTIMATORS`."""
    reward_columns: Sequence[str] = ()

    @property
    def takes_dumped_advantages(self) -> bool:
        """Whether advantages come from the dump where it has them: those of other rewards would contradict ours."""
        return self.estimator == "dump" or (self.estimator == "auto" and not self.reward_columns)

    def records(self, groups: Sequence[MeasurableGroup], *, between_prompts: bool) -> StepRecords:
        """Records of groups of one step: of one group, or of all with the Gram between their prompts."""
        step = self.step(groups)
        batches = batch_records(step) if between_prompts else []
        scalars = {}
        if batches and step.gram is not None:
            scalars = whole_gram_scalars(step.gram.matrix, step.row_weights, step.rollouts)
        rows = [rollout for group in groups for rollout in group.rollouts]
        # a pass may hold only some groups of the step, and the prompts of a named group may differ
        rollouts = [
            replace(record, group=groups[record.group].group.position, prompt=row.prompt_text(self.policy))
            for record, row in zip(rollout_records(step), rows, strict=True)
        ]
        records = group_records(step, group_readings(step), is_whole_step=between_prompts)
        return StepRecords(records, rollouts, batches, scalars)

    def step(self, groups: Sequence[MeasurableGroup]) -> Step:
        """Groups of one step, with their Gram, their advantages, and the weights `A_i / N`."""
        rollouts = padded_rollouts(groups, self.policy, self.reward_columns)
        rows = [rollout for group in groups for rollout in group.rollouts]
        gram = self._gram(rollouts, rows[0].dumped)
        slices = list(zip(groups, rollouts.group_slices(), strict=True))
        by_group = [
            self._advantages(group.rollouts, rollouts.rewards[here], gram.matrix[here, here]) for group, here in slices
        ]
        advantages = torch.cat(by_group)
        log_probs = gram.log_probs.detach().double().cpu()
        by_token = [
            row.dumped.advantages if row.dumped.advantage is None and self.takes_dumped_advantages else None
            for row in rows
        ]
        return Step(
            number=groups[0].group.step,
            kind=rows[0].dumped.kind,
            rollouts=rollouts,
            advantages=advantages,
            weights=advantages / len(advantages),
            gram=gram,
            log_probs=gram.log_probs,
            token_advantages=_padded_values(rows, by_token, rollouts.input_ids.shape[1]),
            group_marks=[group_marks(group, log_probs[here]) for group, here in slices],
        )

    def _gram(self, rollouts: Rollouts, first: DumpedRollout) -> Gram:
        device = next(self.policy.model.parameters()).device
        batch = (rollouts.input_ids, rollouts.completion_mask, rollouts.attention_mask)
        ids, mask, attention = (tensor.to(device) for tensor in batch)
        try:
            with self.policy.computing():
                return measure_gram(
                    self.policy.model,
                    ids,
                    mask,
                    attention,
                    temperature=self.temperature,
                    # the processes of a sharded model make the same passes, whatever memory each has
                    plan=None if sharded_modules(self.policy.model) else "auto",
                )
        except torch.OutOfMemoryError:
            got = f"{rollouts.count} rollouts of up to {rollouts.input_ids.shape[1]} tokens"
            remedy = "Pass --group-size-limit, omit --between-prompts, or use a --dtype of fewer bits."
            fail(f"measure {first.location}", "one pass must fit into the memory of the device", got, remedy)

    def _advantages(self, rows: Sequence[TokenisedRollout], rewards: GroupRewards, gram: GramMatrix) -> GroupAdvantages:
        """`(R,)` float64 advantages of one group: the dump's if it has all for these rewards, or an estimator's.

        A rollout without an advantage gets 0; all get 0 if too few rollouts have a reward.
        """
        dumped = [dumped_advantage(row) for row in rows]
        if self.takes_dumped_advantages and (self.estimator == "dump" or not any(map(math.isnan, dumped))):
            return torch.tensor(dumped, dtype=torch.float64).nan_to_num(nan=0.0)
        lengths = torch.tensor([int(row.mask.sum()) for row in rows])
        inputs = {"lengths": lengths, "outcomes": rewards, "score_energies": gram.diagonal().clamp(min=0)}
        name = _DEFAULT_ESTIMATOR if self.estimator == "auto" else self.estimator
        return estimate(name, rewards[None], **{key: value[None] for key, value in inputs.items()})[0]


def require_reward_columns(rollouts: Sequence[DumpedRollout], columns: Sequence[str]) -> None:
    """Raise if one of these reward functions gave none of the rollouts a reward."""
    for column in columns:
        if not any(column in one.rewards for one in rollouts):
            names = listed({name for one in rollouts for name in one.rewards}) or "no reward functions"
            caller = f"measure {rollouts[0].location}"
            fail(caller, f"there must be a reward called {column!r}", names, "Check the spelling.")


def dumped_advantage(row: TokenisedRollout) -> float:
    """The dump's advantage of a rollout, averaged over its chosen tokens if they differ; `nan` if there is none."""
    dumped = row.dumped
    if dumped.advantage is not None:
        return dumped.advantage
    if dumped.advantages is None:
        return math.nan
    chosen = dumped.advantages[row.mask[row.prompt_length :]]
    return float(chosen.double().mean()) if len(chosen) else math.nan


def group_marks(group: MeasurableGroup, log_probs: Float[Tensor, "rollouts tokens"]) -> dict[str, float]:
    """Facts about a dumped group that do not follow from its rewards and its Gram; unknown ones are absent.

    `group`: position in its step. `late`: it arrived late. `rollouts_left_out`: not measured. `exact`: share of its
    rollouts with the sampled tokens. `round_trip`: share of the other rollouts whose new tokens decode to their text.
    `count_agreement`: share with as many tokens as the dump counted. `finished`: share that finished. Means over
    rollouts: `token_log_prob`, log-probability of a chosen token under the policy; `log_prob_gap`, its difference
    from the log-probability in the dump. `log_prob_gap_max`: the largest difference.
    """
    rows = list(zip(group.rollouts, log_probs, strict=True))
    flags = {
        "exact": [row.exact for row in group.rollouts],
        "round_trip": [row.round_trip for row in group.rollouts],
        "count_agreement": [row.count_agrees for row in group.rollouts],
        "finished": [row.dumped.finished for row in group.rollouts],
    }
    gaps = [gap for row, found in rows if len(gap := log_prob_gaps(row, found))]
    means = {name: _mean([float(flag) for flag in each if flag is not None]) for name, each in flags.items()}
    means |= {
        "token_log_prob": _mean(
            [float(found[: len(row.mask)][row.mask].mean()) for row, found in rows if bool(row.mask.any())]
        ),
        "log_prob_gap": _mean([float(gap.mean()) for gap in gaps]),
        "log_prob_gap_max": max((float(gap.max()) for gap in gaps), default=math.nan),
    }
    known = {name: value for name, value in means.items() if not math.isnan(value)}
    return known | {"group": group.group.position, "late": int(group.group.late), "rollouts_left_out": group.left_out}


def log_prob_gaps(row: TokenisedRollout, log_probs: Float[Tensor, " tokens"]) -> Tensor:
    """Absolute differences between log-probabilities of dump and policy, over chosen tokens; empty if none is known."""
    dumped, start = row.dumped.log_probs, row.prompt_length
    if dumped is None or not row.exact:
        return torch.zeros(0)
    gaps = (dumped.double() - log_probs[start : start + len(dumped)]).abs()[row.mask[start:]]
    return gaps[gaps.isfinite()]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
