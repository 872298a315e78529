"""What a step and its groups are made of, as scalars: pure algebra on the Gram, the rewards and the weights."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from scoregram.spectra import MEASURED_RTOL, SPECTRUM_METRICS, mean_pairwise_cosine, singular_values
from scoregram.statistics import (
    baseline_saving,
    group_outcomes,
    noise_components,
    noise_scale,
    optimal_group_size,
    prompt_conflict,
    rollout_shares,
    signal_to_noise,
    update_coherence,
    update_norm,
)
from scoregram.types import Advantages, BatchGram, BatchWeights, GramMatrix, GroupAdvantages, GroupRewards, Rewards

SPECTRAL = ("effective_rank", "top1_fraction", "stable_rank", "participation_ratio", "numerical_rank")
"""Metrics of a group's spectrum that are written for every group, each beside its orthogonal null."""


def group_reading(gram: GramMatrix, rewards: GroupRewards, advantages: GroupAdvantages) -> dict[str, float]:
    """Scalars of one measured group; `nan` where a group in which nobody pulls leaves them undefined.

    Every spectral metric comes with `…_orthogonal`: what scores of the same norms at right angles would give.
    """
    both = gram, torch.diag(gram.diagonal())
    spectra = torch.stack([singular_values(k, advantages, psd_rtol=MEASURED_RTOL) for k in both])  # (2, R)
    found = {name: SPECTRUM_METRICS[name].fn(spectra).tolist() for name in SPECTRAL}
    reading = {name: float(measured) for name, (measured, _) in found.items()}
    reading |= {f"{name}_orthogonal": float(null) for name, (_, null) in found.items()}
    return reading | {
        "cosine": mean_pairwise_cosine(gram, rtol=MEASURED_RTOL),
        "coherence": update_coherence(gram, advantages),
        "update_norm": update_norm(gram, advantages / len(advantages), rtol=MEASURED_RTOL),
        "score_norm": float(gram.diagonal().clamp(min=0).sqrt().mean()),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
    }


def reward_reading(rewards: Rewards, advantages: Advantages) -> dict[str, float]:
    """Scalars of a step that need no Gram."""
    outcomes = group_outcomes(rewards)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(dim=1, correction=0).mean()),
        "live_groups": int(outcomes.alive.sum()),
        "groups": len(rewards),
        "groups/all_right": float(outcomes.all_right.double().mean()),
        "groups/all_wrong": float(outcomes.all_wrong.double().mean()),
        "advantage_abs": float(advantages.abs().mean()),
    }


def step_reading(gram: BatchGram, weights: BatchWeights, rewards: Rewards) -> dict[str, float]:
    """Scalars of a measured step, from the Gram of all its rollouts and their weights in the update.

    Where the Gram is known only within passes (`nan` between them), so is nothing that needs it whole: `nan`.
    """
    size = rewards.shape[1]
    whole = bool(gram.isfinite().all())
    blocks = diagonal_blocks(gram, size)
    reading = {
        "gram/score_norm": float(blocks.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().mean()),
        "gram/baseline_saving": baseline_saving(blocks, rewards).fraction if size > 3 else math.nan,
    }
    names = (
        "update_norm",
        "coherence",
        "largest_share",
        "conflicting_prompts",
        "cancelled",
        "gradient_squared",
        "between_prompts",
        "within_prompt",
        "snr",
        "noise_scale",
        "optimal_group_size",
    )
    reading |= dict.fromkeys((f"gram/{name}" for name in names), math.nan)
    return reading | (whole_reading(gram, weights, rewards) if whole else {})


def whole_reading(gram: BatchGram, weights: BatchWeights, rewards: Rewards) -> dict[str, float]:
    """The part of `step_reading` that needs the Gram between prompts."""
    prompts, size = rewards.shape
    prompt_of = torch.arange(prompts).repeat_interleave(size)
    reading = {
        "gram/update_norm": update_norm(gram, weights, rtol=MEASURED_RTOL),
        "gram/coherence": update_coherence(gram, weights),
        "gram/largest_share": float(rollout_shares(gram, weights).max()),
    }
    if prompts < 2:
        return reading
    conflict = prompt_conflict(gram, weights, prompt_of)
    reading |= {"gram/conflicting_prompts": conflict.conflicting, "gram/cancelled": conflict.cancelled}
    if size < 4:  # the unbiased estimates compare two disjoint pairs of rollouts
        return reading
    noise = noise_components(gram, rewards)
    return reading | {
        "gram/gradient_squared": noise.gradient_squared,
        "gram/between_prompts": noise.between_prompts,
        "gram/within_prompt": noise.within_prompt,
        "gram/snr": signal_to_noise(noise, prompts, size),
        "gram/noise_scale": noise_scale(noise, size),
        "gram/optimal_group_size": optimal_group_size(noise).exact,
    }


def over_groups(readings: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the groups in which a scalar is defined, `nan` if there is none."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    made = {}
    for name in names:
        values = [reading[name] for reading in readings if not math.isnan(reading.get(name, math.nan))]
        made[f"group/{name}"] = sum(values) / len(values) if values else math.nan
    return made


def diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """The blocks `(P, R, R)` on the diagonal of `(N, N)`; everything else may be `nan`."""
    return torch.stack([gram[start : start + size, start : start + size] for start in range(0, len(gram), size)])
