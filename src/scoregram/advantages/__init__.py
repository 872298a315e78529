"""Every advantage estimator as a pure function, and the table of what each one claims.

`group` one number per rollout · `batch` whitening and selection over prompts · `token`, `turn` credit inside a
rollout · `table` the claims, and `estimate` by name.
"""

from scoregram.advantages.batch import (
    batch_whitened,
    centered_batch_whitened,
    mixed_groups,
    mixed_groups_standardized,
    overlong_penalty,
)
from scoregram.advantages.group import (
    constant_baseline,
    energy_weighted,
    energy_weighted_leave_one_out,
    greedy_baseline,
    leave_one_out,
    length_weighted,
    length_weighted_leave_one_out,
    mean_centered,
    nemo_rl_standardized,
    no_baseline,
    openrlhf_standardized,
    prime_rl_centered,
    standardized,
    trl_standardized,
    verl_standardized,
)
from scoregram.advantages.table import ALWAYS, ESTIMATORS, Estimator, estimate
from scoregram.advantages.token import (
    generalized_advantage,
    monte_carlo_critic,
    prefix_value_differences,
    process_rewards_to_go,
    segment_value_differences,
    spread_over_tokens,
)
from scoregram.advantages.turn import (
    episode_and_anchor_standardized,
    same_state_standardized,
    turn_and_outcome_standardized,
    turn_leave_one_out,
    turn_mean_centered,
)

__all__ = [
    "ALWAYS",
    "ESTIMATORS",
    "Estimator",
    "batch_whitened",
    "centered_batch_whitened",
    "constant_baseline",
    "energy_weighted",
    "energy_weighted_leave_one_out",
    "episode_and_anchor_standardized",
    "estimate",
    "generalized_advantage",
    "greedy_baseline",
    "leave_one_out",
    "length_weighted",
    "length_weighted_leave_one_out",
    "mean_centered",
    "mixed_groups",
    "mixed_groups_standardized",
    "monte_carlo_critic",
    "nemo_rl_standardized",
    "no_baseline",
    "openrlhf_standardized",
    "overlong_penalty",
    "prefix_value_differences",
    "prime_rl_centered",
    "process_rewards_to_go",
    "same_state_standardized",
    "segment_value_differences",
    "spread_over_tokens",
    "standardized",
    "trl_standardized",
    "turn_and_outcome_standardized",
    "turn_leave_one_out",
    "turn_mean_centered",
    "verl_standardized",
]
