"""What the score Gram and the rewards say about an update: pure algebra in float64, no second pass over the model."""

from scoregram.statistics.baseline import (
    BaselineSaving,
    baseline_saving,
    excess_variance,
    norm_reward_covariance,
    optimal_baseline,
    optimal_baseline_leave_one_out,
)
from scoregram.statistics.blocks import group_blocks, prompt_update_gram
from scoregram.statistics.conflict import PromptConflict, prompt_conflict
from scoregram.statistics.group_size import (
    GroupSizeInterval,
    OptimalGroupSize,
    leave_one_out_mse,
    mean_baseline_mse,
    mse_curve,
    optimal_group_size,
    optimal_group_size_interval,
    vanilla_mse,
)
from scoregram.statistics.groups import (
    GroupOutcomes,
    effective_fraction,
    effective_fraction_bound,
    effective_probability,
    expected_success_given_mixed,
    group_outcomes,
    mixed_probability,
    right_chances,
)
from scoregram.statistics.held_out import HeldOutEffect, held_out_effect
from scoregram.statistics.moments import GroupMoments, group_moments
from scoregram.statistics.noise import (
    NoiseComponents,
    PromptEstimates,
    batch_mse,
    noise_components,
    noise_scale,
    prompt_estimates,
    signal_to_noise,
)
from scoregram.statistics.update import (
    cosine_matrix,
    prompt_shares,
    rollout_shares,
    update_cancellation,
    update_coherence,
    update_norm,
)

__all__ = [
    "BaselineSaving",
    "GroupMoments",
    "GroupOutcomes",
    "GroupSizeInterval",
    "HeldOutEffect",
    "NoiseComponents",
    "OptimalGroupSize",
    "PromptConflict",
    "PromptEstimates",
    "baseline_saving",
    "batch_mse",
    "cosine_matrix",
    "effective_fraction",
    "effective_fraction_bound",
    "effective_probability",
    "excess_variance",
    "expected_success_given_mixed",
    "group_blocks",
    "group_moments",
    "group_outcomes",
    "held_out_effect",
    "leave_one_out_mse",
    "mean_baseline_mse",
    "mixed_probability",
    "mse_curve",
    "noise_components",
    "noise_scale",
    "norm_reward_covariance",
    "optimal_baseline",
    "optimal_baseline_leave_one_out",
    "optimal_group_size",
    "optimal_group_size_interval",
    "prompt_conflict",
    "prompt_estimates",
    "prompt_shares",
    "prompt_update_gram",
    "right_chances",
    "rollout_shares",
    "signal_to_noise",
    "update_cancellation",
    "update_coherence",
    "update_norm",
    "vanilla_mse",
]
