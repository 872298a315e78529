"""One advantage per token: credit inside a rollout.

Every function takes tensors of shape `(P, R, T)` and a `mask`, `True` at the tokens the policy sampled. Values outside
the mask are never read (they may be NaN), take no part in any sum, and get advantage exactly 0. To leave a rollout
out, pass an empty mask for it. Put an environment's reward on the last token of the turn that earned it. `V(s_t)` and
`v̂(s_t)` are values of the prefix *before* token `t`. Arithmetic is float64; the result has the dtype of the rewards.

The update these advantages belong to is `ĝ = (1/R) Σ_i Σ_t A_it ∇log π(a_it | s_it)`.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from scoregram.advantages.comparisons import (
    all_pairs,
    discounted_sums,
    finite_estimator,
    group_labels,
    masked_steps,
    mean_differences,
    other_pairs,
    require_spread_options,
    standard_scores,
    values_after,
    weighted_pairs,
)
from scoregram.checks import fail, require_in_range, require_same_shape
from scoregram.types import Advantages, TokenAdvantages, TokenMask, TokenValues


def spread_over_tokens(advantages: Advantages, mask: TokenMask) -> TokenAdvantages:
    """The advantage of a rollout on each of its tokens: uniform credit.

    `A_it = A_i` inside the mask, exactly 0 outside; eq. (16) of arXiv:2606.29238.

    Example:
        >>> mask = torch.tensor([[[True, True], [True, False]]])
        >>> spread_over_tokens(torch.tensor([[0.5, -0.5]]), mask)
        tensor([[[ 0.5000,  0.5000],
                 [-0.5000,  0.0000]]])
    """
    caller = "spread_over_tokens"
    require_same_shape(advantages, mask[..., 0], name="advantages", like_name="the mask's groups", caller=caller)
    return torch.where(mask, advantages.unsqueeze(-1), 0)


@finite_estimator
def generalized_advantage(
    token_rewards: TokenValues,
    *,
    mask: TokenMask,
    values: TokenValues,
    gamma: float | int = 1.0,
    lam: float | int = 0.95,
) -> TokenAdvantages:
    """Exponentially averaged temporal differences of a critic.

    `A_t = Σ_k (γλ)^k δ_{t+k}`, `δ_t = r_t + γ V(s_{t+1}) − V(s_t)`, with `V = 0` after the last token; the next token
    is the next one inside the mask. `λ = 1` gives `monte_carlo_critic`, unbiased for any critic. `λ < 1` is unbiased
    only for the true values; it trades the critic's error against variance.

    Args:
        token_rewards: `(P, R, T)`.
        mask: `(P, R, T)` bool.
        values: `(P, R, T)`. `V(s_t)` of the critic.
        gamma: Discount, in `[0, 1]`. Below 1 the update is not the gradient of the undiscounted return.
        lam: `λ`, weight of the later differences, in `[0, 1]`.

    Reference:
        GAE. Schulman et al. 2015, arXiv:1506.02438.
    """
    caller = "generalized_advantage"
    return _generalized(token_rewards, mask, values, gamma, lam, name="values", caller=caller).to(token_rewards.dtype)


@finite_estimator
def whitened_generalized_advantage(
    token_rewards: TokenValues,
    *,
    mask: TokenMask,
    values: TokenValues,
    gamma: float | int = 1.0,
    lam: float | int = 0.95,
    eps: float | int = 0.0,
    ddof: int = 1,
) -> TokenAdvantages:
    """`generalized_advantage`, minus its mean over all tokens of the batch, divided by their standard deviation.

    `A_it = (Â_it − m) / (s + eps)` with `m = Σ Â / N` and `s² = Σ (Â − m)² / (N − ddof)`; the sums are over the `N`
    tokens inside the mask, of all rollouts of all prompts. So the scale of the rewards does not matter, and the mean
    over the batch is a baseline where the critic has not learned one. Both depend on the rollout itself, so the
    expected update is not a multiple of the gradient, whatever the critic. If all `Â` are equal to rounding, or the
    batch has a single token, the result is exactly 0. If the critic predicts the rewards almost exactly, what is left
    is scaled up to deviation 1 all the same.

    Args:
        token_rewards: `(P, R, T)`.
        mask: `(P, R, T)` bool.
        values: `(P, R, T)`. `V(s_t)` of the critic.
        gamma: Discount, in `[0, 1]`.
        lam: `λ`, weight of the later differences, in `[0, 1]`.
        eps: Added to the deviation.
        ddof: 1 for the sample deviation, 0 for the population's.

    Returns:
        `(P, R, T)`, dtype of the rewards. The mean over the tokens of the batch is 0, that of a group is not.

    Reference:
        GAE, arXiv:1506.02438, whitened by `masked_whiten` of TRL and verl, which multiply by `1 / √(s² + 1e-8)`, sample
        deviation. TRL whitens the batch of each process. For a single token verl raises and TRL divides by 0.
        Stable-Baselines3 divides by `s + 1e-8` in each mini-batch.
    """
    caller = "whitened_generalized_advantage"
    require_spread_options(eps, ddof, caller=caller)
    raw = _generalized(token_rewards, mask, values, gamma, lam, name="values", caller=caller)
    sizes = token_rewards.double().abs() + values.double().abs()  # what the differences are made of
    batch = torch.zeros_like(mask, dtype=torch.long)
    scores = standard_scores(raw, batch, mask, eps=eps, ddof=ddof, dtype=token_rewards.dtype, sizes=sizes)
    return scores.to(token_rewards.dtype)


@finite_estimator
def monte_carlo_critic(token_rewards: TokenValues, *, mask: TokenMask, values: TokenValues) -> TokenAdvantages:
    """Reward-to-go minus the critic's value of the prefix.

    `A_t = Σ_{k≥t} r_k − V(s_t)`: `generalized_advantage` at `γ = λ = 1`. Unbiased for *any* critic that depends on the
    prefix only, however wrong it is; a good critic lowers the variance.

    Reference:
        Sutton et al. 1999; GAE at `λ = 1`, arXiv:1506.02438.
    """
    caller = "monte_carlo_critic"
    return _generalized(token_rewards, mask, values, 1.0, 1.0, name="values", caller=caller).to(token_rewards.dtype)


@finite_estimator
def prefix_value_differences(
    token_rewards: TokenValues, *, mask: TokenMask, prefix_values: TokenValues
) -> TokenAdvantages:
    """Change of the estimated value at each token; a value is the mean return of fresh rollouts from the prefix.

    `A_t = r_t + v̂(s_{t+1}) − v̂(s_t)`, `v̂ = 0` after the last token. Unbiased if each `v̂(s)` is the mean return of
    fresh rollouts from `s`, independent of how this rollout continues. With a critic instead, this is GAE at `λ = 0`,
    biased by the critic's error.

    Reference:
        VinePPO. Kazemnejad et al. 2024, arXiv:2410.01679.
    """
    caller = "prefix_value_differences"
    gained = _generalized(token_rewards, mask, prefix_values, 1.0, 0.0, name="prefix_values", caller=caller)
    return gained.to(token_rewards.dtype)


@finite_estimator
def segment_value_differences(
    token_rewards: TokenValues,
    *,
    mask: TokenMask,
    prefix_values: TokenValues,
    segment_starts: Bool[Tensor, "prompts rollouts tokens"],
) -> TokenAdvantages:
    """Change of the estimated value over each segment, the same for all of its tokens.

    `A_t = Σ_{k in segment} r_k + v̂(end of the segment) − v̂(its start)`. Values are read at segment starts only, so
    they cost one batch of fresh rollouts per segment instead of per token. Unbiased under the condition of
    `prefix_value_differences`, provided that a cut depends only on the tokens before it (a low-probability token, a
    line end), not on how the rollout ends.

    Args:
        token_rewards: `(P, R, T)`.
        mask: `(P, R, T)` bool.
        prefix_values: `(P, R, T)`. `v̂(s_t)`; only the entries at segment starts are read.
        segment_starts: `(P, R, T)` bool, `True` at the first token of a segment. The first token of a rollout always
            starts one.

    Raises:
        ScoregramError: If a segment starts outside the mask.

    Reference:
        SPO-chain. Guo et al. 2025, arXiv:2505.23564; without its probability mask.
    """
    caller = "segment_value_differences"
    rewards = masked_steps(token_rewards, mask, name="token_rewards", caller=caller)
    _require_inside(segment_starts, mask, name="segment_starts", caller=caller)
    starts = segment_starts | (mask & (mask.cumsum(dim=-1) == 1))
    values = masked_steps(torch.where(starts, prefix_values, 0), mask, name="prefix_values", caller=caller)
    index = (starts.cumsum(dim=-1) - 1).clamp_min(0)  # (P, R, T): which segment a token is in
    empty = torch.zeros_like(rewards)
    earned = empty.scatter_add(-1, index, rewards)  # (P, R, S): one entry per segment
    begun = empty.scatter_add(-1, index, values)
    ended = torch.cat([begun[..., 1:], torch.zeros_like(begun[..., :1])], dim=-1)
    gained = (earned + ended - begun).gather(-1, index)
    return torch.where(mask, gained, 0.0).to(token_rewards.dtype)


@finite_estimator
def process_rewards_to_go(
    token_rewards: TokenValues,
    *,
    mask: TokenMask,
    step_ends: Bool[Tensor, "prompts rollouts tokens"],
    eps: float | int = 0.0,
    ddof: int = 1,
) -> TokenAdvantages:
    """Sum of the rewards of this step and all later ones, each standardised over all steps of the group.

    `A_it = Σ_{steps of i ending at or after t} (r − mean) / (std + eps)`, with mean and deviation over every step
    reward of every rollout of the prompt. Past rewards do not enter, but a rollout with more steps sums more terms, so
    the expected update is not a multiple of the gradient. If all step rewards are equal, the result is exactly 0.

    Args:
        token_rewards: `(P, R, T)`. Step rewards, each at the last token of its step; no other entry is read.
        mask: `(P, R, T)` bool.
        step_ends: `(P, R, T)` bool, `True` at the last token of a step. A step whose reward is 0 counts like any other.
        eps: Added to the deviation.
        ddof: 1 for the sample deviation, 0 for the population's.

    Raises:
        ScoregramError: If a group has one rollout or a single step reward, or a step ends outside the mask.

    Reference:
        GRPO, process supervision. Shao et al. 2024, arXiv:2402.03300, section 4.1.3.
    """
    caller = "process_rewards_to_go"
    require_spread_options(eps, ddof, caller=caller)
    _require_inside(step_ends, mask, name="step_ends", caller=caller)
    read = torch.where(step_ends, token_rewards, 0)
    rewards = masked_steps(read, mask, name="token_rewards", caller=caller, at_least=2)
    counts = step_ends.sum(dim=(-1, -2))  # (P,)
    if bool((counts == 1).any()):
        prompt = int((counts == 1).nonzero()[0])
        remedy = "Split the rollouts into steps, or use an outcome estimator."
        fail(caller, "needs at least two step rewards in a group", f"1 in prompt {prompt}", remedy)
    scores = standard_scores(rewards, group_labels(mask), step_ends, eps=eps, ddof=ddof, dtype=token_rewards.dtype)
    return discounted_sums(scores, mask, decay=1.0).to(token_rewards.dtype)


@finite_estimator
def path_energy_weighted(token_rewards: TokenValues, *, mask: TokenMask, path_energies: TokenValues) -> TokenAdvantages:
    """Reward-to-go minus its mean over the group at the same token, weighted by the energy of the path so far.

    `A_it = G_it − Σ_j W_jt G_jt / Σ_j W_jt` over the rollouts `j` that reach token `t`, the rollout itself included.
    `W_it` is `|Σ_{s≤t} ∇log π_is|²` or a proxy of it. A path of large gradients pulls the baseline to its own reward
    and is pushed less. Tokens are counted inside the mask, so a rollout with tool output is compared at the same
    number of its own tokens. The baseline includes rollout `i`, so the expected update is not a multiple of the
    gradient (`path_energy_weighted_leave_one_out` is unbiased). Tokens that only the longest rollout reaches are
    compared with themselves alone and get 0; verl gives them the reward-to-go, see the reference.

    Args:
        token_rewards: `(P, R, T)`.
        mask: `(P, R, T)` bool.
        path_energies: `(P, R, T)`. `W_it >= 0`; if all are zero at a token, the weights are equal.

    Reference:
        Optimal token baseline. Li et al. 2026, arXiv:2602.07078, as in verl with `handle_zero_tail=False`, where
        `W_it` is `Σ_{s≤t} (1 − 2π_is + Σ_v π_isv²)`. The default of verl is `True` since its pull request 5380 (opened
        in February 2026): a baseline of 0, hence `A_it = G_it`, where the longest rollout of a group goes on beyond the
        second longest.
    """
    return _path_contrast(token_rewards, mask, path_energies, alone=False, caller="path_energy_weighted")


@finite_estimator
def path_energy_weighted_leave_one_out(
    token_rewards: TokenValues, *, mask: TokenMask, path_energies: TokenValues
) -> TokenAdvantages:
    """Reward-to-go minus the energy-weighted mean over the *other* rollouts that reach the same token.

    `A_it = G_it − Σ_{j≠i} W_jt G_jt / Σ_{j≠i} W_jt`, and `A_it = G_it` where no other rollout reaches token `t`: a
    baseline of 0 keeps the update unbiased. Because of this fallback a constant added to all rewards counts.

    Reference:
        Optimal token baseline, arXiv:2602.07078; the leave-one-out form is ours.
    """
    return _path_contrast(token_rewards, mask, path_energies, alone=True, caller="path_energy_weighted_leave_one_out")


def _path_contrast(token_rewards, mask, path_energies, *, alone: bool, caller: str) -> Tensor:
    rewards = masked_steps(token_rewards, mask, name="token_rewards", caller=caller, at_least=2)
    energies = masked_steps(path_energies, mask, name="path_energies", caller=caller)
    if bool((energies < 0).any()):
        at = tuple(int(i) for i in (energies < 0).nonzero()[0])
        fail(caller, "path_energies must not be negative", f"{float(energies[at]):g} at index {at}", "Pass 0 or more.")
    order = (mask.cumsum(dim=-1) - 1).clamp_min(0)  # (P, R, T): which of its own tokens a token is
    empty = torch.zeros_like(rewards)
    to_go = empty.scatter_add(-1, order, discounted_sums(rewards, mask, decay=1.0)).mT  # (P, T, R)
    weights = empty.scatter_add(-1, order, energies).mT
    reached = (torch.arange(mask.shape[-1], device=mask.device) < mask.sum(dim=-1, keepdim=True)).mT
    pairs = weighted_pairs((other_pairs if alone else all_pairs)(reached), weights)
    advantages = mean_differences(to_go, pairs)
    if alone:
        advantages = torch.where(reached & (reached.sum(dim=-1, keepdim=True) == 1), to_go, advantages)
    return torch.where(mask, advantages.mT.gather(-1, order), 0.0).to(token_rewards.dtype)


def _generalized(token_rewards, mask, values, gamma, lam, *, name: str, caller: str) -> Tensor:
    """`(P, R, T)` in float64."""
    require_in_range(gamma, low=0.0, high=1.0, name="gamma", caller=caller)
    require_in_range(lam, low=0.0, high=1.0, name="lam", caller=caller)
    rewards = masked_steps(token_rewards, mask, name="token_rewards", caller=caller)
    critic = masked_steps(values, mask, name=name, caller=caller)
    errors = rewards + gamma * values_after(critic, mask) - critic  # (P, R, T): δ_t
    return discounted_sums(errors, mask, decay=gamma * lam)


def _require_inside(flags: Tensor, mask: Tensor, *, name: str, caller: str) -> None:
    require_same_shape(flags, mask, name=name, like_name="mask", caller=caller)
    if bool((flags & ~mask).any()):
        at = tuple(int(i) for i in (flags & ~mask).nonzero()[0])
        fail(caller, f"{name} must lie inside the mask", f"True at index {at}", "Move it to a token inside the mask.")
