"""The table of objectives, and what each claims about its gradient.

Tests check every boolean in both directions, for every sign of the advantage and size of the ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from scoregram.objectives.policy import (
    advantage_weighted,
    advantage_weights,
    clipped_ratio,
    clipped_sequence_ratio,
    exponential_advantage_weights,
    reinforce,
    stopped_ratio,
    trajectory_ratio,
)
from scoregram.objectives.reference import (
    consistency_variance,
    consistency_weights,
    pair_preference,
    pair_preference_weights,
)
from scoregram.types import Loss, TokenWeights

ON_POLICY = ("log_probs", "advantages", "mask")
OFF_POLICY = ("log_probs", "old_log_probs", "advantages", "mask")
ADVANTAGES = ("advantages", "mask")
AGRO = ("log_probs", "ref_log_probs", "rewards", "mask", "group_size", "beta")
DPO = ("log_probs", "ref_log_probs", "mask", "pairs", "beta")


@dataclass(frozen=True)
class Objective:
    """One surrogate loss with its usual settings, and its claims. A claim that a row does not state is false."""

    fn: Callable[..., Loss]
    """The loss; call it with the arguments named in `needs`."""
    needs: tuple[str, ...]
    weight: Callable[..., TokenWeights]
    """Weight `w_it` on `∇log π_it` in the update when `π = π_old`; call it with the arguments of `weight_needs`."""
    weight_needs: tuple[str, ...]
    weight_formula: str
    """The weight as a formula; `L_i` completion tokens of rollout `i`, `N` rollouts, `M` pairs."""
    paper: str
    on_policy_is_reinforce: bool = False
    """With `π = π_old = π_ref` the gradient is a multiple of leave-one-out REINFORCE's, for any rewards."""
    bounded_ratio: bool = False
    """The factor of the ratio in a token's weight is bounded by a constant, for either sign of `A`."""
    keeps_every_gradient: bool = False
    """No ratio sets the gradient of a token to zero."""
    sequence_ratio: bool = False
    """The log-ratio of one token changes the weight of the other tokens of its rollout."""
    weighs_ties: bool = False
    """A token whose advantage is zero has a weight that is not zero."""
    any_sampling: bool = False
    """Whichever distribution the rollouts are drawn from, the loss has its optimum at `π ∝ π_ref exp(r/β)`."""
    couples_rollouts: bool = False
    """The log-ratio of one rollout changes the weight of the other rollouts of its group."""
    credits_tokens: bool = False
    """Advantages may be `(N, T)`, one per token, and not only `(N,)`, one per rollout."""


OBJECTIVES = MappingProxyType(
    {
        "reinforce": Objective(
            reinforce,
            ON_POLICY,
            partial(advantage_weights, aggregation="token_sum"),
            ADVANTAGES,
            "A_i/N",
            "Williams 1992",
            on_policy_is_reinforce=True,
            bounded_ratio=True,
            keeps_every_gradient=True,
            credits_tokens=True,
        ),
        "grpo": Objective(
            clipped_ratio,
            OFF_POLICY,
            partial(advantage_weights, aggregation="sequence_mean"),
            ADVANTAGES,
            "A_i/(N L_i)",
            "arXiv:2402.03300",
            on_policy_is_reinforce=True,
            credits_tokens=True,
        ),
        "dr_grpo": Objective(
            partial(clipped_ratio, aggregation="constant"),
            (*OFF_POLICY, "length"),
            partial(advantage_weights, aggregation="constant"),
            (*ADVANTAGES, "length"),
            "A_i/(N L)",
            "arXiv:2503.20783",
            on_policy_is_reinforce=True,
            credits_tokens=True,
        ),
        "ppo": Objective(
            partial(clipped_ratio, aggregation="token_mean"),
            OFF_POLICY,
            partial(advantage_weights, aggregation="token_mean"),
            ADVANTAGES,
            "A_i/Σ_j L_j",
            "arXiv:1707.06347",
            on_policy_is_reinforce=True,
            credits_tokens=True,
        ),
        "dapo": Objective(
            partial(clipped_ratio, eps_high=0.28, aggregation="token_mean"),
            OFF_POLICY,
            partial(advantage_weights, aggregation="token_mean"),
            ADVANTAGES,
            "A_i/Σ_j L_j",
            "arXiv:2503.14476",
            on_policy_is_reinforce=True,
            credits_tokens=True,
        ),
        "dual_clip": Objective(
            partial(clipped_ratio, dual_clip=3.0, aggregation="token_mean"),
            OFF_POLICY,
            partial(advantage_weights, aggregation="token_mean"),
            ADVANTAGES,
            "A_i/Σ_j L_j",
            "arXiv:1912.09729",
            on_policy_is_reinforce=True,
            bounded_ratio=True,
            credits_tokens=True,
        ),
        "gspo": Objective(
            clipped_sequence_ratio,
            OFF_POLICY,
            partial(advantage_weights, aggregation="sequence_mean"),
            ADVANTAGES,
            "A_i/(N L_i)",
            "arXiv:2507.18071",
            on_policy_is_reinforce=True,
            sequence_ratio=True,
            credits_tokens=True,
        ),
        "cispo": Objective(
            stopped_ratio,
            OFF_POLICY,
            partial(advantage_weights, aggregation="token_mean"),
            ADVANTAGES,
            "A_i/Σ_j L_j",
            "arXiv:2506.13585",
            on_policy_is_reinforce=True,
            bounded_ratio=True,
            keeps_every_gradient=True,
            credits_tokens=True,
        ),
        "tic": Objective(
            trajectory_ratio,
            OFF_POLICY,
            partial(advantage_weights, aggregation="token_sum"),
            ADVANTAGES,
            "A_i/N",
            "arXiv:2508.02833",
            on_policy_is_reinforce=True,
            bounded_ratio=True,
            sequence_ratio=True,
        ),
        "awr": Objective(
            advantage_weighted,
            ON_POLICY,
            exponential_advantage_weights,
            ADVANTAGES,
            "min(exp(A_i), 20)/N",
            "arXiv:1910.00177",
            bounded_ratio=True,
            keeps_every_gradient=True,
            weighs_ties=True,
            credits_tokens=True,
        ),
        "agro": Objective(
            consistency_variance,
            AGRO,
            consistency_weights,
            AGRO,
            "(β/N)(v_i − v̄_{−i}), v = r − β log(π/π_ref)",
            "arXiv:2503.19612",
            on_policy_is_reinforce=True,
            any_sampling=True,
            keeps_every_gradient=True,
            sequence_ratio=True,
            couples_rollouts=True,
        ),
        "dpo": Objective(
            pair_preference,
            DPO,
            pair_preference_weights,
            DPO,
            "(β/M) Σ_pairs ± σ(−βΔ); (β/2M)(wins − losses) with π = π_ref",
            "arXiv:2305.18290",
            bounded_ratio=True,
            keeps_every_gradient=True,
            sequence_ratio=True,
            couples_rollouts=True,
        ),
    }
)
