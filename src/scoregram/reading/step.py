"""The metrics of one step, and its records for the run folder.

Every source of rollouts (the trainer, TRL, a dump) builds a `Step`. This file computes its metrics and its records, so
the same step gives the same numbers whatever its source.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.gram import Gram
from scoregram.objectives import kl_penalty
from scoregram.reading.credit import CreditTruth, credit_scalars, push_scalars
from scoregram.reading.group import SHARE_COLUMN, GroupReading, mean_over_groups, read_group
from scoregram.rollouts import Rollouts
from scoregram.runs import TRAINING_KINDS, BatchRecord, GroupRecord, RolloutRecord, Rows, rows_of_kind, token_hash
from scoregram.spectra import MEASURED_RTOL
from scoregram.statistics import (
    baseline_saving,
    group_moments,
    group_outcomes,
    noise_components,
    noise_scale,
    optimal_group_size,
    prompt_conflict,
    prompt_shares,
    rollout_shares,
    signal_to_noise,
    update_coherence,
    update_norm,
    update_power,
)
from scoregram.types import Advantages, BatchGram, BatchWeights, GroupGrams, PerPrompt, Rewards

LayerDetail = Literal["each", "kinds", "none"]
"""Which per-layer Grams a group record keeps: one per layer, one per kind of layer (summed over depth), or none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One update of a policy: its rollouts, their advantages and weights, and the Gram of their scores."""

    number: int
    """Step of the run."""
    rollouts: Rollouts
    advantages: Float[Tensor, " batch"]
    """`(N,)` float64 on the CPU: the advantage of each rollout; the mean over its tokens if theirs differ. 0 for a
    rollout without a reward."""
    weights: Float[Tensor, " batch"]
    """`(N,)` on the CPU: the update is `Σ_i w_i ψ_i`."""
    gram: Gram | None = None
    """Gram of all rollouts, in their order; `nan` between rollouts measured in different passes. None if the step was
    not measured."""
    kind: str = "train"
    """What the rollouts were sampled for: `train`, `loss` (trained on, rows of a loss), or the name of a probe."""
    log_probs: Float[Tensor, "batch tokens"] | None = None
    """Under the policy before the update; None if they were not computed."""
    token_advantages: Float[Tensor, "batch tokens"] | None = None
    """Advantage of every token; a row of `nan` for a rollout whose tokens share one. None if every rollout has a single
    advantage."""
    token_weights: Float[Tensor, "batch tokens"] | None = None
    """Weight of every token's score in the update; None if the tokens of each rollout share one weight."""
    truth: CreditTruth | None = None
    """True advantages of the tokens; None if they are not known."""
    push: Float[Tensor, "batch tokens"] | None = None
    """Log-probability of every token after the update minus that before it; None if it was not measured."""
    has_whole_groups: bool = False
    """For rows of a loss, whether every group is complete: a step of another trainer may hold part of a group."""
    group_marks: Sequence[Mapping[str, float]] = ()
    """Facts about each group that do not follow from its rewards and its Gram, such as whether a self-check passed;
    stored with the group."""

    @property
    def rows(self) -> Rows:
        """What the rows of the Gram are: scores `ψ_i`, or gradients of a loss, which already include the weights."""
        return rows_of_kind(self.kind)

    @property
    def credit(self) -> Float[Tensor, "batch tokens"]:
        """`(N, T)` float64 on the CPU: the advantage of every token, that of its rollout if its tokens share one."""
        shared = self.advantages[:, None].expand(self.rollouts.input_ids.shape)
        return shared if self.token_advantages is None else self.token_advantages.double().cpu().nan_to_num()

    @property
    def row_weights(self) -> Float[Tensor, " batch"]:
        """`(N,)` float64: the update is the sum of the rows of `gram` with these weights."""
        return torch.ones(len(self.weights), dtype=torch.float64) if self.rows == "loss" else self.weights.double()


@dataclass(frozen=True)
class StepReading:
    """The numbers of a step."""

    scalars: dict[str, float]
    """Name → number, as in `metrics.jsonl`."""
    groups: Sequence[GroupReading]
    """One for every group; empty if the step was not measured."""


def read_step(step: Step) -> StepReading:
    """All numbers of a step that follow from its rewards, advantages and Gram.

    Means of rewards, and the decision which groups are live, ignore rollouts without a reward. Estimates of noise and
    of baselines need every reward of a prompt, so they use only the prompts that have them all; `gram/snr` is that of
    the gradient of these prompts.
    """
    scalars = reward_scalars(step)
    if step.truth is not None:
        scalars |= credit_scalars(step.truth, step.credit)
    if step.push is not None:
        scalars |= push_scalars(step.truth, step.push, step.rollouts.completion_mask)
    if step.gram is None:
        return StepReading(scalars, ())
    groups = group_readings(step)
    scalars |= gram_scalars(step) | mean_over_groups([reading.scalars() for reading in groups], rows=step.rows)
    return StepReading(scalars, groups)


def group_readings(step: Step) -> list[GroupReading]:
    """The numbers of every group of a measured step."""
    if step.gram is None:
        return []
    matrix, rewards, advantages = step.gram.matrix, step.rollouts.rewards, step.advantages
    return [
        read_group(matrix[here, here], rewards[here], advantages[here], rows=step.rows)
        for here in step.rollouts.group_slices()
    ]


def reward_scalars(step: Step) -> dict[str, float]:
    """Scalars of a step that need no Gram."""
    rewards = step.rollouts.rewards
    advantages = step.rollouts.by_group(step.advantages, fill=0.0)
    if step.rows == "loss" and not step.has_whole_groups:  # the outcome of a part of a group is unknown
        return {"reward": _mean(rewards), "advantage_abs": float(step.advantages.abs().mean())}
    return outcome_scalars(step.rollouts.reward_grid, advantages)


def rollout_scalars(step: Step) -> dict[str, float]:
    """Share of rollouts that are masked out, share without a reward, and mean length of a rollout."""
    rollouts = step.rollouts
    return {
        "masked_out": float((~rollouts.completion_mask.any(1)).double().mean()),
        "without_reward": float(rollouts.rewards.isnan().double().mean()),
        "length": float(rollouts.lengths.double().mean()),
    }


def policy_scalars(step: Step) -> dict[str, float]:
    """Scalars of the policy's tokens, over all completion tokens of a step.

    `length`: mean tokens of a completion. `finished`: share of rollouts that ended with a stop token. `token_log_prob`:
    mean of `log π`. `sampler_gap`: `max |log π − log π_sampler|`, which is rounding if sampler and model agree. The
    last two are `nan` if no rollout has a completion token.
    """
    rollouts, log_probs = step.rollouts, step.log_probs
    assert log_probs is not None and rollouts.log_probs is not None and rollouts.finished is not None
    mask = rollouts.completion_mask
    gap = (log_probs - rollouts.log_probs)[mask].abs()
    return {
        "length": float(rollouts.lengths.double().mean()),
        "finished": float(rollouts.finished.double().mean()),
        "token_log_prob": float(log_probs[mask].double().mean()) if bool(mask.any()) else math.nan,
        "sampler_gap": float(gap.max()) if bool(mask.any()) else math.nan,
    }


def reference_scalars(step: Step, reference: Tensor | None) -> dict[str, float]:
    """`kl`: mean over tokens of the k3 estimate of the KL divergence from the reference; empty without a reference.

    `k3 = exp(−d) − 1 + d` with `d = log π − log π_ref`: never negative, 0 where both policies agree.
    """
    if reference is None or step.log_probs is None:
        return {}
    mask = step.rollouts.completion_mask
    return {"kl": float(kl_penalty(step.log_probs, reference, mask, term="k3", aggregation="token_mean"))}


def turn_scalars(rollouts: Rollouts) -> dict[str, float]:
    """Turns per rollout, reward of each turn, best turn, and the share of tokens that are the policy's.

    `turns/reward_h` is the mean over the rollouts that reached turn `h`, `turns/reached_h` their share, both counted
    from 1. `turns/policy_tokens` counts the tokens after the prompt: 1 if the environment wrote none. Empty if rollouts
    have no turns.
    """
    if rollouts.turn_ids is None:
        return {}
    mask, rewards = rollouts.turn_mask, rollouts.turn_rewards  # (N, H)
    written = int(rollouts.attention_mask.sum() - rollouts.prompt_lengths.sum())
    scalars = {
        "turns/count": float(mask.sum(1).double().mean()),
        "turns/policy_tokens": float(rollouts.completion_mask.sum()) / written,
        "turns/best_reward": _mean(torch.where(mask, rewards, -math.inf).amax(1)),
    }
    for turn in range(mask.shape[1]):
        scalars[f"turns/reached_{turn + 1}"] = float(mask[:, turn].double().mean())
        scalars[f"turns/reward_{turn + 1}"] = _mean(rewards[mask[:, turn], turn])
    return scalars


def outcome_scalars(rewards: Rewards, advantages: Advantages) -> dict[str, float]:
    """Means of rewards and advantages, and how many groups are live, all right and all wrong.

    Args:
        rewards: `(P, R)`, `nan` where missing.
        advantages: `(P, R)`.
    """
    outcomes, judged = group_outcomes(rewards), ~rewards.isnan()
    return {
        "reward": _mean(rewards[judged]),
        "reward_std": _mean(reward_deviations(rewards)),
        "live_groups": int(outcomes.alive.sum()),
        "groups": len(rewards),
        "judged_groups": int((~outcomes.unjudged).sum()),
        "groups/all_right": float(outcomes.all_right.double().mean()),
        "groups/all_wrong": float(outcomes.all_wrong.double().mean()),
        "advantage_abs": _mean(advantages[judged].abs()),
    }


def reward_deviations(rewards: Rewards) -> PerPrompt:
    """`(P,)` population standard deviation of each group over its judged rollouts; `nan` where nothing was judged."""
    missing = rewards.isnan()
    if not bool(missing.any()):
        return rewards.std(dim=1, correction=0)
    judged = [row[~gap] for row, gap in zip(rewards, missing, strict=True)]
    return torch.stack([row.std(correction=0) if len(row) else row.new_tensor(math.nan) for row in judged])


def _mean(values: Tensor) -> float:
    """Mean of the defined values, `nan` if there is none."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else math.nan


WHOLE_GRAM = (
    "update_norm",
    "coherence",
    "largest_share",
    "largest_prompt_share",
    "conflicting_prompts",
    "cancelled",
    "update_signal",
    "update_noise",
    "gradient_squared",
    "between_prompts",
    "snr",
    "noise_scale",
    "optimal_group_size",
)
"""Scalars that need the Gram between all rollouts of a step."""
OF_WEIGHTS = WHOLE_GRAM[:8]
"""Those of them that need no rewards."""
OF_PROMPTS = tuple(f"gram/{name}" for name in WHOLE_GRAM[8:])
"""The others: scalars that take the prompts of a step for an even draw of all prompts."""


def gram_scalars(step: Step) -> dict[str, float]:
    """Scalars of a measured step, from the Gram of its rollouts and their weights in the update.

    Scalars that need the Gram between prompts are `nan` if it was not measured.
    """
    assert step.gram is not None
    matrix, rollouts = step.gram.matrix, step.rollouts
    is_whole = bool(matrix.isfinite().all())
    if step.rows == "loss":  # rows include their weights: scalars defined by scores and rewards are left out
        scalars = dict.fromkeys((f"gram/{name}" for name in OF_WEIGHTS), math.nan)
        return scalars | (update_scalars(matrix, step.row_weights, rollouts.group_ids) if is_whole else {})
    norms = matrix.diagonal().clamp(min=0).sqrt()
    scalars = {"gram/score_norm": float(norms.mean())} | _block_scalars(step)
    scalars |= dict.fromkeys((f"gram/{name}" for name in WHOLE_GRAM), math.nan)
    return scalars | (whole_gram_scalars(matrix, step.row_weights, rollouts) if is_whole else {})


def whole_gram_scalars(gram: BatchGram, weights: BatchWeights, rollouts: Rollouts) -> dict[str, float]:
    """The part of `gram_scalars` that needs the Gram between prompts."""
    scalars = update_scalars(gram, weights, rollouts.group_ids)
    size = rollouts.group_size
    if size is None or size < 4:  # the unbiased estimates compare two disjoint pairs of rollouts of a prompt
        return scalars
    rewards = rollouts.reward_grid
    complete = rewards.isfinite().all(1)
    prompts = int(complete.sum())
    if prompts < 2:
        return scalars
    rows = complete.repeat_interleave(size)
    noise = noise_components(gram[rows][:, rows], rewards[complete])
    return scalars | {
        "gram/gradient_squared": noise.gradient_squared,
        "gram/between_prompts": noise.between_prompts,
        "gram/snr": signal_to_noise(noise, prompts, size),
        "gram/noise_scale": noise_scale(noise, size),
        "gram/optimal_group_size": optimal_group_size(noise).exact,
    }


def update_scalars(gram: BatchGram, weights: BatchWeights, group_ids: Tensor) -> dict[str, float]:
    """Norm, coherence, largest shares, conflict, signal and noise of the update `Σ_i w_i ψ_i`."""
    scalars = {
        "gram/update_norm": update_norm(gram, weights, rtol=MEASURED_RTOL),
        "gram/coherence": update_coherence(gram, weights),
        "gram/largest_share": float(rollout_shares(gram, weights).max()),
    }
    if len(group_ids.unique()) > 1:
        shares = prompt_shares(gram, weights, group_ids.cpu(), rtol=MEASURED_RTOL)
        conflict = prompt_conflict(gram, weights, group_ids.cpu())
        scalars |= {"gram/largest_prompt_share": float(shares.max())}
        scalars |= {"gram/conflicting_prompts": conflict.conflicting, "gram/cancelled": conflict.cancelled}
        power = update_power(gram, weights, group_ids.cpu())
        scalars |= {"gram/update_signal": power.signal, "gram/update_noise": power.noise}
    return scalars


def _block_scalars(step: Step) -> dict[str, float]:
    """`block_scalars` of the groups that have every reward."""
    assert step.gram is not None
    size, rewards = step.rollouts.group_size, step.rollouts.reward_grid
    complete = rewards.isfinite().all(1)
    if size is None or size < 4 or not bool(complete.any()):
        return dict.fromkeys(BLOCK_SCALARS, math.nan) | {"gram/complete_prompts": 0}
    return block_scalars(diagonal_blocks(step.gram.matrix, size)[complete], rewards[complete])


BLOCK_SCALARS = (
    "gram/within_prompt",
    "gram/group_baseline",
    "gram/rloo_variance",
    "gram/optimal_loo_saved",
    "gram/baseline_saving",
)
"""Scalars of complete groups that do not need the Gram between prompts."""


def block_scalars(blocks: GroupGrams, rewards: Rewards) -> dict[str, float]:
    """Noise within prompts, and what `optimal-loo` would save of it: means over prompts.

    `gram/within_prompt` and `gram/group_baseline` are `c2` and `c3` of `NoiseComponents`. `gram/rloo_variance` is
    `R` times the variance of a prompt's gradient with `rloo`, `c2 + c3/(R-1)`, `gram/optimal_loo_saved` the part of it
    that `optimal-loo` saves, and `gram/baseline_saving` their ratio. A run pools numerators and denominators
    (`run_noise`).

    Args:
        blocks: `(P, R, R)`, `R` at least 4.
        rewards: `(P, R)`, all finite.
    """
    moments, saving = group_moments(blocks, rewards), baseline_saving(blocks, rewards)
    values = (
        moments.oracle_trace.mean(),
        (moments.variance_fisher_trace + moments.gradient_squared).mean(),
        saving.variance.mean() * rewards.shape[1],
        saving.per_prompt.mean() * rewards.shape[1],
        saving.fraction,
    )
    return dict(zip(BLOCK_SCALARS, map(float, values), strict=True)) | {"gram/complete_prompts": len(rewards)}


def diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """The blocks `(P, R, R)` on the diagonal of `(N, N)`; everything else may be `nan`."""
    return torch.stack([gram[start : start + size, start : start + size] for start in range(0, len(gram), size)])


def gram_of_passes(grams: Sequence[Gram]) -> Gram:
    """The Gram of rollouts that were measured in several passes, `nan` between rollouts of different passes."""
    if len(grams) == 1:
        return grams[0]
    layers = dict.fromkeys(layer for gram in grams for layer in gram.by_layer)
    absent = [torch.zeros_like(gram.matrix) for gram in grams]
    by_layer = {
        layer: _block_diagonal([gram.by_layer.get(layer, zero) for gram, zero in zip(grams, absent, strict=True)])
        for layer in layers
    }
    return Gram(
        matrix=_block_diagonal([gram.matrix for gram in grams]),
        by_layer=by_layer,
        log_probs=torch.cat([gram.log_probs for gram in grams]),
        replayed=tuple(dict.fromkeys(name for gram in grams for name in gram.replayed)),
        notes=tuple(dict.fromkeys(note for gram in grams for note in gram.notes)),
    )


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Square blocks on the diagonal of one matrix, `nan` elsewhere."""
    whole = blocks[0].new_full((sum(map(len, blocks)),) * 2, torch.nan)
    start = 0
    for block in blocks:
        here = slice(start, start + len(block))
        whole[here, here] = block
        start += len(block)
    return whole


def group_records(
    step: Step,
    readings: Sequence[GroupReading],
    *,
    keep_prompts: bool = True,
    layers: LayerDetail = "each",
    keep_tokens: bool = False,
    is_whole_step: bool = True,
) -> list[GroupRecord]:
    """One record for every group of a step, with its Gram and metrics if the step was measured.

    With the Gram between all rollouts of a step that trained the policy, a record also has the share of its group in
    the update; pass `is_whole_step=False` where the groups are only some of the step. With `keep_tokens`, a record also
    has the tokens of its completions, unless they hold tokens that the policy did not sample, such as the output of a
    tool.
    """
    rollouts, lengths, advantages = step.rollouts, step.rollouts.lengths.cpu(), step.advantages.double()
    by_layer = step.gram.by_layer if step.gram is not None and layers != "none" else {}
    by_layer = layer_kinds(by_layer) if layers == "kinds" else by_layer
    shares, records = group_shares(step) if is_whole_step else [], []
    for place, here in enumerate(rollouts.group_slices()):
        marks = dict(step.group_marks[place]) if step.group_marks else {}
        marks |= {SHARE_COLUMN: shares[place]} if shares else {}
        records.append(
            GroupRecord(
                step=step.number,
                kind=step.kind,
                prompt_id=rollouts.prompt_names[place],
                prompt=rollouts.prompts[place] if keep_prompts and rollouts.prompts else None,
                rewards=rollouts.rewards[here],
                lengths=lengths[here],
                advantages=advantages[here],
                gram=None if step.gram is None else step.gram.matrix[here, here],
                by_layer={layer: gram[here, here] for layer, gram in by_layer.items()},
                statistics=({} if step.gram is None else readings[place].scalars()) | marks,
                **(_kept_tokens(rollouts, here) if keep_tokens else {}),
            )
        )
    return records


def group_shares(step: Step) -> list[float]:
    """Share of each group in the squared norm of the update, from K and the weights; they sum to one.

    Empty for rollouts that did not train the policy, and if the Gram between all of them is not known.
    """
    if step.gram is None or step.kind not in TRAINING_KINDS or not bool(step.gram.matrix.isfinite().all()):
        return []
    owners = step.rollouts.group_ids.cpu()
    return prompt_shares(step.gram.matrix, step.row_weights, owners, rtol=MEASURED_RTOL).tolist()


def _kept_tokens(rollouts: Rollouts, here: slice) -> dict[str, Any]:
    """Fields of a group's record from which its Gram can be measured again."""
    ids, starts = _unpadded_rows(rollouts, here)
    completions = [row[start:] for row, start in zip(ids, starts, strict=True)]
    if [len(row) for row in completions] != rollouts.completion_mask[here].sum(1).tolist():
        return {}
    flat = torch.tensor([token for row in completions for token in row], dtype=torch.int64)
    return {"completion_ids": flat, "prompt_sha256": token_hash(ids[0][: starts[0]])}


def _unpadded_rows(rollouts: Rollouts, here: slice) -> tuple[list[list[int]], list[int]]:
    """Tokens of some rollouts without padding, and the number of their prompt tokens."""
    pairs = zip(rollouts.input_ids[here].tolist(), rollouts.attention_mask[here].tolist(), strict=True)
    ids = [[token for token, real in zip(row, mask, strict=True) if real] for row, mask in pairs]
    return ids, rollouts.prompt_lengths[here].tolist()


def batch_records(step: Step) -> list[BatchRecord]:
    """One record of the whole step; an empty list if its Gram is not known between all rollouts."""
    if step.gram is None or not bool(step.gram.matrix.isfinite().all()):
        return []
    rollouts = step.rollouts
    return [
        BatchRecord(
            step=step.number,
            kind=step.kind,
            prompt_ids=tuple(rollouts.prompt_names),
            sizes=torch.tensor(rollouts.group_sizes),
            rewards=rollouts.rewards,
            lengths=rollouts.lengths.cpu(),
            weights=step.row_weights,
            gram=step.gram.matrix,
        )
    ]


def rollout_records(step: Step, decode: Callable[[list[int]], str] | None = None) -> list[RolloutRecord]:
    """One record for every rollout of a step. Per-token values are aligned with its tokens; padding is left out.

    Args:
        step: Its log-probabilities must be known.
        decode: Turns token ids into text, to store prompts as the policy saw them; default: `rollouts.prompts`.
    """
    rollouts = step.rollouts
    assert step.log_probs is not None
    log_probs = step.log_probs.detach().float().cpu()
    columns = {
        "behaviour_log_probs": None
        if rollouts.behaviour_log_probs is None
        else rollouts.behaviour_log_probs.float().cpu(),
        "advantages": None if step.token_advantages is None else step.token_advantages.float().cpu(),
        "push": None if step.push is None else step.push.detach().float().cpu(),
    }
    ids, real, credited = (t.cpu() for t in (rollouts.input_ids, rollouts.attention_mask, rollouts.completion_mask))
    prompt_lengths, rewards, advantages = rollouts.prompt_lengths.tolist(), rollouts.rewards, step.advantages.tolist()
    records: list[RolloutRecord] = []
    for group, here in enumerate(rollouts.group_slices()):
        prompt = rollouts.prompts[group] if rollouts.prompts else None
        if decode is not None:
            prompt = decode(ids[here.start][real[here.start]][: prompt_lengths[here.start]].tolist())
        for row in range(here.start, here.stop):
            tokens, mask = real[row], credited[row][real[row]]
            is_plain = bool(mask[prompt_lengths[row] :].all())
            per_token = {name: _known_values(value, row, tokens) for name, value in columns.items()}
            records.append(
                RolloutRecord(
                    step=step.number,
                    kind=step.kind,
                    prompt_id=rollouts.prompt_names[group],
                    group=group,
                    index=row - here.start,
                    prompt=prompt,
                    completion=rollouts.completions[row] if rollouts.completions else None,
                    answer=rollouts.answers[group] if rollouts.answers else None,
                    token_ids=ids[row][tokens],
                    prompt_length=prompt_lengths[row],
                    completion_mask=None if is_plain else mask,
                    reward=float(rewards[row]),
                    rewards={name: _given_reward(values[row]) for name, values in rollouts.reward_parts.items()},
                    log_probs=log_probs[row][tokens],
                    advantage=None if per_token["advantages"] is not None else advantages[row],
                    finished=bool(rollouts.finished[row]) if rollouts.finished is not None else True,
                    **per_token,  # type: ignore[arg-type]
                )
            )
    return records


def _known_values(values: Tensor | None, row: int, tokens: Tensor) -> Tensor | None:
    """Values of the tokens of one rollout; None if all of them are `nan`, which means that it has none."""
    if values is None or bool(values[row][tokens].isnan().all()):
        return None
    return values[row][tokens]


def _given_reward(reward: Tensor) -> float | None:
    return None if bool(reward.isnan()) else float(reward)


LayerValue = TypeVar("LayerValue", Tensor, float)
"""The Gram of a layer, or a number of it."""


def layer_kinds(by_layer: Mapping[str, LayerValue]) -> dict[str, LayerValue]:
    """Values of layers that differ only in depth, summed: that of `layers.3.mlp` is added to `layers.*.mlp`."""
    merged: dict[str, LayerValue] = {}
    for name, value in by_layer.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        merged[kind] = merged[kind] + value if kind in merged else value
    return merged
