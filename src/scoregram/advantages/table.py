"""The table of estimators, what each one claims, and `estimate`, which calls a row by its name.

`tests/test_estimator_claims.py` checks every boolean of the table in both directions, by enumeration: a claim that is
made holds in every case listed there; for a claim that is not made, the test shows a case in which it fails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from scoregram.advantages.batch import batch_whitened, centered_batch_whitened, mixed_groups_standardized
from scoregram.advantages.comparisons import floating_rewards, require_reward_table
from scoregram.advantages.geometry import discriminative_tokens, novelty_scaled, residual_amplified
from scoregram.advantages.group import (
    best_of_contribution,
    constant_baseline,
    energy_weighted,
    energy_weighted_leave_one_out,
    greedy_baseline,
    leave_one_out,
    length_corrected_standardized,
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
from scoregram.advantages.token import (
    generalized_advantage,
    monte_carlo_critic,
    path_energy_weighted,
    path_energy_weighted_leave_one_out,
    prefix_value_differences,
    process_rewards_to_go,
    segment_value_differences,
    whitened_generalized_advantage,
)
from scoregram.advantages.turn import (
    episode_and_anchor_standardized,
    same_state_standardized,
    turn_and_outcome_standardized,
    turn_leave_one_out,
    turn_mean_centered,
)
from scoregram.checks import fail, listed, lookup, require_same_shape
from scoregram.groups import judged_rollouts

Level = Literal["group", "token", "turn"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One estimator at its default options, and its claims. A claim that a row does not state is false.

    The claims hold for on-policy, i.i.d. rollouts, every group size `R >= min_group` and every distribution of
    rewards. One prompt's update is `ĝ = (1/R) Σ_i Σ_t A_it ∇log π(a_it | s_it)`: the advantage of a rollout applies
    to all its tokens, the advantage of a turn to the tokens of that turn. `J` is the expected undiscounted return.
    """

    fn: Callable[..., Tensor]
    """`fn(rewards, *, observed=None, **needs)` for a group, `fn(rewards, *, mask, **needs)` for tokens and turns."""

    paper: str
    """Paper that introduced it."""

    level: Level
    """One advantage per rollout `(P, R)`, per token `(P, R, T)` or per turn `(P, R, H)`."""

    needs: tuple[str, ...] = ()
    """Keyword tensors that it takes besides the rewards and the mask."""

    min_group: int = 2
    """The smallest `R` the function accepts."""

    couples_prompts: bool = False
    """The rewards of one prompt change the advantages of another."""

    unbiased: bool = False
    """`E[ĝ] = ∇J`, if critics and segment cuts depend on the prefix only and prefix values come from fresh rollouts."""

    direction_exact: bool = False
    """`E[ĝ] = c ∇J` with `c > 0`; `c` may depend on the prompt, the rewards and `R`. Implied by `unbiased`."""

    row_sum_zero: bool = False
    """The advantages of a group sum to zero in every sample: `Σ_i A_i = 0`, `Σ_i Σ_t A_it = 0` over the mask."""

    uniform_credit: bool = False
    """All tokens, or turns, of a rollout get the same advantage in every sample."""

    scale_invariant: bool = False
    """`A(c r) = A(r)` for every `c > 0`, where inputs that are rewards or values are scaled too."""

    shift_invariant: bool = False
    """`A(r + b) = A(r)` if `b` is added to every rollout's last reward and to inputs that are rewards or values."""


ESTIMATORS: MappingProxyType[str, Estimator] = MappingProxyType(
    {
        "reinforce": Estimator(
            fn=no_baseline,
            paper="Williams 1992",
            level="group",
            min_group=1,
            unbiased=True,
            direction_exact=True,
            uniform_credit=True,
        ),
        "constant": Estimator(
            fn=constant_baseline,
            paper="Williams 1992",
            level="group",
            needs=("baselines",),
            min_group=1,
            unbiased=True,
            direction_exact=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "remax": Estimator(
            fn=greedy_baseline,
            paper="arXiv:2310.10505",
            level="group",
            needs=("greedy_rewards",),
            min_group=1,
            unbiased=True,
            direction_exact=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "mean": Estimator(
            fn=mean_centered,
            paper="arXiv:2503.20783",
            level="group",
            direction_exact=True,
            row_sum_zero=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "rloo": Estimator(
            fn=leave_one_out,
            paper="arXiv:2402.14740",
            level="group",
            unbiased=True,
            direction_exact=True,
            row_sum_zero=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "grpo": Estimator(
            fn=standardized,
            paper="arXiv:2402.03300",
            level="group",
            row_sum_zero=True,
            uniform_credit=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "grpo-trl": Estimator(
            fn=trl_standardized,
            paper="arXiv:2402.03300, as in TRL",
            level="group",
            row_sum_zero=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "grpo-verl": Estimator(
            fn=verl_standardized, paper="arXiv:2402.03300, as in verl", level="group", min_group=1, uniform_credit=True
        ),
        "grpo-openrlhf": Estimator(
            fn=openrlhf_standardized,
            paper="arXiv:2402.03300, as in OpenRLHF",
            level="group",
            row_sum_zero=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "grpo-nemo-rl": Estimator(
            fn=nemo_rl_standardized,
            paper="arXiv:2402.03300, as in NeMo-RL",
            level="group",
            direction_exact=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "grpo-prime-rl": Estimator(
            fn=prime_rl_centered,
            paper="arXiv:2402.03300, as in prime-rl",
            level="group",
            direction_exact=True,
            row_sum_zero=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "dapo": Estimator(
            fn=mixed_groups_standardized,
            paper="arXiv:2503.14476",
            level="group",
            needs=("outcomes",),
            row_sum_zero=True,
            uniform_credit=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "opo": Estimator(
            fn=length_weighted,
            paper="arXiv:2505.23585",
            level="group",
            needs=("lengths",),
            uniform_credit=True,
            shift_invariant=True,
        ),
        "opo-loo": Estimator(
            fn=length_weighted_leave_one_out,
            paper="arXiv:2505.23585, without its bias",
            level="group",
            needs=("lengths",),
            unbiased=True,
            direction_exact=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "tic": Estimator(
            fn=length_corrected_standardized,
            paper="arXiv:2508.02833, as one re-implementation has it",
            level="group",
            needs=("lengths",),
            row_sum_zero=True,
            uniform_credit=True,
            scale_invariant=True,
        ),
        "max-at-k": Estimator(
            fn=best_of_contribution,
            paper="arXiv:2505.15201",
            level="group",
            needs=("best_of",),
            uniform_credit=True,
            shift_invariant=True,
        ),
        "optimal": Estimator(
            fn=energy_weighted,
            paper="Weaver & Tao 2001",
            level="group",
            needs=("score_energies",),
            uniform_credit=True,
            shift_invariant=True,
        ),
        "optimal-loo": Estimator(
            fn=energy_weighted_leave_one_out,
            paper="Weaver & Tao 2001, without the bias",
            level="group",
            needs=("score_energies",),
            unbiased=True,
            direction_exact=True,
            uniform_credit=True,
            shift_invariant=True,
        ),
        "salt": Estimator(
            fn=residual_amplified,
            paper="ours, after arXiv:2606.05800",
            level="group",
            needs=("score_grams",),
            uniform_credit=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "g2rl": Estimator(
            fn=novelty_scaled,
            paper="ours, after arXiv:2512.15687",
            level="group",
            needs=("score_grams",),
            row_sum_zero=True,
            uniform_credit=True,
            scale_invariant=True,
        ),
        "reinforce++": Estimator(
            fn=batch_whitened,
            paper="arXiv:2501.03262",
            level="group",
            needs=("lengths",),
            min_group=1,
            couples_prompts=True,
            uniform_credit=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "reinforce++-baseline": Estimator(
            fn=centered_batch_whitened,
            paper="arXiv:2501.03262",
            level="group",
            needs=("lengths",),
            couples_prompts=True,
            uniform_credit=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "gae": Estimator(
            fn=generalized_advantage,
            paper="arXiv:1506.02438",
            level="token",
            needs=("values",),
            min_group=1,
            shift_invariant=True,
        ),
        "gae-whitened": Estimator(
            fn=whitened_generalized_advantage,
            paper="arXiv:1506.02438, whitened as in TRL and verl",
            level="token",
            needs=("values",),
            min_group=1,
            couples_prompts=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "gae-monte-carlo": Estimator(
            fn=monte_carlo_critic,
            paper="arXiv:1506.02438",
            level="token",
            needs=("values",),
            min_group=1,
            unbiased=True,
            direction_exact=True,
            shift_invariant=True,
        ),
        "vineppo": Estimator(
            fn=prefix_value_differences,
            paper="arXiv:2410.01679",
            level="token",
            needs=("prefix_values",),
            min_group=1,
            unbiased=True,
            direction_exact=True,
            shift_invariant=True,
        ),
        "spo-chain": Estimator(
            fn=segment_value_differences,
            paper="arXiv:2505.23564",
            level="token",
            needs=("prefix_values", "segment_starts"),
            min_group=1,
            unbiased=True,
            direction_exact=True,
            shift_invariant=True,
        ),
        "optimal-token": Estimator(
            fn=path_energy_weighted,
            paper="arXiv:2602.07078",
            level="token",
            needs=("path_energies",),
            shift_invariant=True,
        ),
        "optimal-token-loo": Estimator(
            fn=path_energy_weighted_leave_one_out,
            paper="arXiv:2602.07078, without its bias",
            level="token",
            needs=("path_energies",),
            unbiased=True,
            direction_exact=True,
        ),
        "delta": Estimator(
            fn=discriminative_tokens,
            paper="arXiv:2605.21467",
            level="token",
            needs=("token_features",),
            couples_prompts=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
        "grpo-process": Estimator(
            fn=process_rewards_to_go,
            paper="arXiv:2402.03300",
            level="token",
            needs=("step_ends",),
            scale_invariant=True,
        ),
        "turn-mean": Estimator(
            fn=turn_mean_centered, paper="common practice", level="turn", row_sum_zero=True, shift_invariant=True
        ),
        "turn-rloo": Estimator(
            fn=turn_leave_one_out,
            paper="ours, after arXiv:2402.14740",
            level="turn",
            unbiased=True,
            direction_exact=True,
        ),
        "mt-grpo": Estimator(
            fn=turn_and_outcome_standardized,
            paper="arXiv:2505.11821",
            level="turn",
            needs=("outcome_rewards",),
            scale_invariant=True,
        ),
        "gigpo": Estimator(
            fn=episode_and_anchor_standardized,
            paper="arXiv:2505.10978",
            level="turn",
            needs=("anchors",),
            scale_invariant=True,
            shift_invariant=True,
        ),
        "same-state": Estimator(
            fn=same_state_standardized,
            paper="ours, after arXiv:2601.16480",
            level="turn",
            row_sum_zero=True,
            scale_invariant=True,
            shift_invariant=True,
        ),
    }
)

LEVEL_INPUTS = MappingProxyType({"group": (), "token": ("mask",), "turn": ("mask",)})
"""Inputs that a level requires besides the rewards."""


def estimate(name: str, rewards: Tensor, **inputs: Tensor | None) -> Tensor:
    """Advantages from the estimator `name`, which takes what it needs from `inputs` and ignores the rest.

    Pass everything that is known (`lengths`, `score_energies`, `mask`, …): the same call works for every row of a
    level. `None` means not known. Options such as `eps` keep their defaults; call `ESTIMATORS[name].fn` to set them.

    **Missing rewards.** In a group-level row, NaN in `rewards` or in `outcomes` means that the rollout was not
    judged. Its advantage is 0 and the judged rollouts are compared among themselves, as if it had not been sampled. A
    group with fewer judged rollouts than the row's `min_group` gets zeros, as in TRL, and takes no part in statistics
    over the batch. If a row compares rollouts across prompts, a batch with fewer than two judged rollouts gets zeros
    too. In rows for tokens and turns an empty mask leaves a rollout out; NaN inside the mask is an error.

    Args:
        name: A row of `ESTIMATORS`.
        rewards: `(P, R)` for a group-level row, `(P, R, T)` or `(P, R, H)` for tokens and turns.
            Integers and booleans are converted to torch's default floating-point dtype.
        inputs: Tensors by name.

    Returns:
        Shape and dtype of `rewards`, always finite. Arithmetic is float64 whatever the dtype.

    Raises:
        ScoregramError: If the name is unknown, an input it needs is missing, an input has a name that no estimator
            takes, a reward is infinite, or an advantage is too large for the dtype.

    Example:
        >>> estimate("rloo", torch.tensor([[1.0, 0.0, 0.0]]), lengths=torch.tensor([[3, 5, 4]]))
        tensor([[ 1.0000, -0.5000, -0.5000]])
        >>> estimate("rloo", torch.tensor([[1.0, 0.0, torch.nan], [1.0, torch.nan, torch.nan]]))
        tensor([[ 1., -1.,  0.],
                [ 0.,  0.,  0.]])
    """
    row = lookup(ESTIMATORS, name, kind="estimate")
    known = {n for other in ESTIMATORS.values() for n in (*other.needs, *LEVEL_INPUTS[other.level])}
    given = {key: value for key, value in inputs.items() if value is not None}
    if unknown := sorted(inputs.keys() - known):
        remedy = "Set options by calling the row's fn."
        fail("estimate", f"inputs must be among {listed(known)}", listed(unknown), remedy)
    required = (*row.needs, *LEVEL_INPUTS[row.level])
    if missing := [need for need in required if need not in given]:
        fail("estimate", f"{name!r} needs {listed(required)}", listed(given) or "none", f"Pass {listed(missing)}.")
    taken = {key: given[key] for key in required}
    if row.level != "group":
        return row.fn(rewards, **taken)
    rewards = floating_rewards(rewards, caller=row.fn.__name__)
    compared = _compared_rollouts(row, rewards, taken.get("outcomes"))
    if int(compared.sum()) < (2 if row.couples_prompts else 1):
        return torch.zeros_like(rewards)
    return row.fn(rewards, **taken, observed=None if bool(compared.all()) else compared)


def _compared_rollouts(row: Estimator, rewards: Tensor, outcomes: Tensor | None) -> Tensor:
    """`(P, R)` bool: rollouts that were judged, in a group with at least `min_group` of them."""
    caller = row.fn.__name__
    require_reward_table(rewards, caller=caller)
    judged = judged_rollouts(rewards, caller=caller)
    if outcomes is not None:
        require_same_shape(outcomes, rewards, name="outcomes", like_name="rewards", caller=caller)
        judged &= judged_rollouts(torch.where(judged, outcomes, torch.nan), name="outcomes", caller=caller)
    return judged & (judged.sum(dim=-1, keepdim=True) >= row.min_group)
