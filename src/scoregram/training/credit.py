"""From rewards to token weights: the method's estimator gives the advantages, its loss the weights."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from scoregram.advantages import ESTIMATORS, Estimator, estimate
from scoregram.checks import fail, listed, lookup
from scoregram.gram import Gram
from scoregram.objectives import (
    KL_TERMS,
    LARGEST_STRENGTH,
    LEAST_STRENGTH,
    OBJECTIVES,
    kl_penalty,
    token_coefficients,
)
from scoregram.reading import Step
from scoregram.rollouts import Rollouts
from scoregram.training.config import TrainConfig, control_option
from scoregram.training.methods import REFERENCE_STRENGTHS, Method
from scoregram.types import Advantages, BatchAdvantages, GroupGrams, LogProbs, Mask, Pairs, Rewards, TokenWeights

TRAINER_INPUTS = frozenset(
    {
        *("lengths", "outcomes", "score_energies", "greedy_rewards", "baselines", "best_of"),
        *("step_ends", "prefix_values", "segment_starts", "values", "path_energies"),
        *("outcome_rewards", "anchors", "score_grams", "token_features"),
    }
)
"""Estimator inputs, besides rewards, that the trainer can supply."""
TRAINER_LEVELS = ("group", "token", "turn")
"""Levels of credit that the trainer can apply."""
LOSS_INPUTS = frozenset(
    {
        *("log_probs", "old_log_probs", "advantages", "mask", "length"),
        *("ref_log_probs", "rewards", "pairs", "group_size", "beta"),
    }
)
"""Loss inputs that the trainer can supply."""

ClipOption = Literal["eps_low", "eps_high"]
"""Options of a loss that clips a ratio."""
PROMPT_WEIGHTS = "prompt_weights"
"""Name of the input with the weights of the prompts."""


def require_runnable(config: TrainConfig) -> None:
    """Raise before any work if the trainer cannot run the method with these settings."""
    require_method(
        config.chosen_method,
        chosen=config.estimator or config.method,
        group_size=config.starting_group_size,
        kl=config.kl,
        sampling_temperature=config.sampling_temperature,
        replaces_estimator=config.estimator is not None,
    )
    if compares_with_reference(config.chosen_method.objective):
        require_reference_strength(config)
    for control in config.controls[:1]:
        require_unequal_groups(config.chosen_method, control_option(control))


def require_method(
    method: Method,
    *,
    chosen: str,
    group_size: int,
    kl: str,
    sampling_temperature: float = 0.0,
    replaces_estimator: bool = False,
) -> None:
    """Raise before any work if the trainer cannot run this estimator or this loss.

    `chosen` is what the user named: the method, or the estimator that replaces its own.
    """
    row = lookup(ESTIMATORS, method.estimator, kind="train --estimator")
    if row.level not in TRAINER_LEVELS or not set(row.needs) <= TRAINER_INPUTS:
        rows = ESTIMATORS.items()
        able = listed(name for name, r in rows if r.level in TRAINER_LEVELS and set(r.needs) <= TRAINER_INPUTS)
        remedy = "The other estimators need more than rollouts and their rewards."
        fail("train --estimator", f"must be one of {able}", repr(method.estimator), remedy)
    if group_size < row.min_group:
        got = f"group_size {group_size}"
        fail("train --group-size", f"{chosen} needs at least {row.min_group} rollouts", got, "Raise it.")
    objective = lookup(OBJECTIVES, method.objective, kind="train --objective")
    if not set(objective.needs) <= LOSS_INPUTS:
        able = listed(name for name, r in OBJECTIVES.items() if set(r.needs) <= LOSS_INPUTS)
        remedy = "The other losses need more than rollouts and their advantages."
        fail("train --objective", f"must be one of {able}", repr(method.objective), remedy)
    if row.level != "group" and not objective.credits_tokens:
        able = listed(name for name, r in OBJECTIVES.items() if r.credits_tokens)
        fail(
            "train --objective",
            f"credit for {row.level}s needs one of {able}",
            repr(method.objective),
            "Choose another.",
        )
    if replaces_estimator and "advantages" not in objective.needs:
        got = f"estimator {method.estimator}"
        fail("train --estimator", f"{method.objective} takes rewards, not advantages", got, "Leave it out.")
    if sampling_temperature and not objective.any_sampling:
        able = listed(name for name, r in OBJECTIVES.items() if r.any_sampling)
        got = f"objective {method.objective}"
        remedy = "Leave it out: --temperature changes the policy that is sampled and trained."
        fail("train --sampling-temperature", f"needs a loss for rollouts of any policy: {able}", got, remedy)
    lookup(KL_TERMS, kl, kind="train --kl")


def require_reference_strength(config: TrainConfig) -> None:
    """Raise if the strength of the reference, for a loss that compares with it, is outside the range of the loss."""
    if not LEAST_STRENGTH <= config.reference_strength <= LARGEST_STRENGTH:
        objective = config.chosen_method.objective
        requirement = f"{objective} needs a value from {LEAST_STRENGTH:g} to {LARGEST_STRENGTH:g}"
        remedy = f"Choose one in this range, or 0 for {REFERENCE_STRENGTHS[objective]:g}."
        fail("train --beta", requirement, config.beta, remedy)


def require_unequal_groups(method: Method, option: str) -> None:
    """Raise if a method cannot train on groups of unequal size, or its Gram cannot measure the noise of a prompt."""
    row, objective = ESTIMATORS[method.estimator], OBJECTIVES[method.objective]
    if row.level != "group" or not set(row.needs) <= {"lengths", "outcomes", "score_energies"}:
        remedy = "Choose an estimator that needs rewards alone, such as rloo, grpo or dr-grpo."
        fail(option, "needs one advantage per rollout, from the rewards of its group", method.estimator, remedy)
    if objective.weighs_ties or compares_with_reference(method.objective):
        fail(option, "needs a loss that is linear in the advantages", method.objective, "Choose another objective.")


def credited_step(
    method: Method,
    number: int,
    rollouts: Rollouts,
    *,
    length: int,
    gram: Gram | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Step:
    """A step before its backward pass: the rollouts with the advantages and weights of a method.

    With one advantage per rollout the rows of its Gram are scores. With one per token or turn they are gradients of the
    loss.

    Args:
        method: Its estimator gives the advantages, its loss the weights.
        number: Number of the step.
        rollouts: Its rollouts.
        length: Longest completion, in tokens: the constant by which Dr.GRPO divides.
        gram: Gram of all rollouts, if already measured; estimators that need score norms require it.
        inputs: What sources of inputs supplied (`scoregram.training.inputs`), and the weights of the prompts.
    """
    given = dict(inputs or {})
    prompt_weights = given.pop(PROMPT_WEIGHTS, None)
    mask, level = weighted_tokens(method.objective, rollouts), ESTIMATORS[method.estimator].level
    if level != "group":
        by_token = (
            turn_advantages_of(method.estimator, rollouts)
            if level == "turn"
            else token_advantages_of(method.estimator, rollouts, given, options=estimator_options(method))
        )
        lengths = mask.sum(1).clamp(min=1).cpu()
        weights = token_weights_of(method.objective, by_token.to(mask.device), mask, length=length)
        return Step(
            number=number,
            rollouts=rollouts,
            kind="loss",
            advantages=by_token.sum(1) / lengths,
            weights=weights.sum(1).cpu() / lengths,
            token_advantages=by_token,
            token_weights=weights,
            has_whole_groups=True,
        )
    table = advantages_of(method.estimator, rollouts, gram=gram, inputs=given)
    advantages = rollouts.by_rollout(table).double() * prompt_factors(rollouts, prompt_weights)
    weights = score_weights(method.objective, advantages, mask, length=length)
    return Step(number=number, rollouts=rollouts, advantages=advantages, weights=weights.cpu(), gram=gram)


def prompt_factors(rollouts: Rollouts, weights: Tensor | None = None) -> Tensor:
    """`(N,)` factors `u_p N / (P R_p)` of the advantages: a prompt has the weight `u_p` whatever its group's size.

    Losses divide by the number of rollouts, which gives a prompt with more of them more weight. `weights` `(P,)` are
    the `u_p`, 1 by default; all factors are then 1 if the groups are of one size.
    """
    sizes = torch.tensor(rollouts.group_sizes, dtype=torch.float64)
    factors = sizes.mean() / sizes
    return (factors if weights is None else factors * weights.double().cpu())[rollouts.group_ids]


def advantages_of(
    estimator: str, rollouts: Rollouts, *, gram: Gram | None = None, inputs: Mapping[str, Tensor] | None = None
) -> Advantages:
    """`(P, R)` advantages in float64; 0 for a rollout without a reward, and where a group is smaller than the largest.

    Args:
        estimator: A group-level row of `ESTIMATORS`.
        rollouts: The rollouts of a step.
        gram: Gram of all rollouts, for the estimators that need squared score norms or the Gram of a group.
        inputs: Further inputs, such as the rewards of greedy rollouts.

    Raises:
        NotFiniteError: If an advantage is not finite.
    """
    rewards = rollouts.reward_grid
    known: dict[str, Tensor | None] = {
        "lengths": rollouts.by_group(rollouts.lengths.cpu(), fill=0.0),
        "outcomes": rewards,
        "score_energies": None if gram is None else rollouts.by_group(gram.matrix.diagonal(), fill=0.0),
        "score_grams": None if gram is None or rollouts.group_size is None else own_grams(gram, rollouts),
    }
    return estimate(estimator, rewards, **known | dict(inputs or {}))


def takes_exact_gram(method: Method) -> bool:
    """Whether the advantages of a method depend on the exact Gram of the rollouts."""
    needs = ESTIMATORS[method.estimator].needs
    return "score_energies" in needs or (method.exact_geometry and "score_grams" in needs)


def takes_values(method: Method) -> bool:
    """Whether the estimator takes values that a critic or fresh rollouts supply."""
    needs = ESTIMATORS[method.estimator].needs
    return "values" in needs or "prefix_values" in needs or ("baselines" in needs and method.learned_baseline)


def has_critic(config: TrainConfig) -> bool:
    """Whether a run learns the values of its estimator: they are neither exact nor from fresh rollouts."""
    method = config.chosen_method
    learns = takes_values(method) and "prefix_values" not in ESTIMATORS[method.estimator].needs
    return learns and not config.exact_values


def own_grams(gram: Gram, rollouts: Rollouts) -> GroupGrams:
    """`(P, R, R)` Gram of every group, where Grams between prompts need not be measured; groups must have one size."""
    return torch.stack([gram.matrix[here, here] for here in rollouts.group_slices()])


def estimator_options(method: Method) -> dict[str, float | None]:
    """Options of the estimator's function that the method sets; a comparison sets them also where none is taken."""
    is_set = method.gae_lambda is not None and takes_lambda(method.estimator)
    return {"lam": method.gae_lambda} if is_set else {}


def loss_options(method: Method) -> dict[str, float]:
    """Options of the loss's function that the method sets; a comparison sets them also where none is taken."""
    given: dict[ClipOption, float | None] = {"eps_low": method.clip_low, "eps_high": method.clip_high}
    return {name: value for name, value in given.items() if value is not None and takes_clip(method.objective, name)}


def takes_lambda(estimator: str) -> bool:
    """Whether an estimator of the table has the λ of generalised advantage estimation."""
    row = ESTIMATORS[estimator]
    return "values" in row.needs and "lam" in signature(row.fn).parameters


def takes_clip(objective: str, option: ClipOption) -> bool:
    """Whether a loss of the table clips its ratio on this side, at a place that can be set."""
    return option in signature(OBJECTIVES[objective].fn).parameters


def token_advantages_of(
    estimator: str, rollouts: Rollouts, inputs: Mapping[str, Tensor], *, options: Mapping[str, Any] | None = None
) -> TokenWeights:
    """`(N, T)` advantages in float64 on the CPU, 0 outside the completion.

    `inputs` are `(N, T)`, features `(N, T, F)`. The reward of a rollout is at its last completion token, unless they or
    the rollouts have `token_rewards`. A rollout without a reward is left out, and so is a group in which fewer than
    `min_group` have one.

    Raises:
        NotFiniteError: If an advantage is not finite.
    """
    mask = rollouts.completion_mask.cpu() & compared_rollouts(ESTIMATORS[estimator], rollouts).flatten()[:, None]
    given = {name: value & mask if value.dtype == torch.bool else value for name, value in inputs.items()}
    rewards = given.pop("token_rewards", rollouts.token_rewards)
    if rewards is None:
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        rewards = torch.where(is_last, rollouts.rewards.nan_to_num()[:, None], 0.0)
    groups = len(rollouts.group_sizes)
    tables = {name: value.view(groups, -1, *value.shape[1:]) for name, value in {"mask": mask, **given}.items()}
    rewards, row = rewards.view_as(tables["mask"]).double(), ESTIMATORS[estimator]
    if not options:
        return estimate(estimator, rewards, **tables).view(mask.shape)
    return row.fn(rewards, **{name: tables[name] for name in ("mask", *row.needs)}, **options).view(mask.shape)


def turn_advantages_of(estimator: str, rollouts: Rollouts) -> TokenWeights:
    """`(N, T)` advantages in float64 on the CPU: that of a turn at each of its tokens, 0 outside the completion.

    A rollout without turns is one turn. A rollout without a reward is left out, and so is a group in which fewer than
    `min_group` have one. For an estimator that takes the outcome apart, the rewards of turns do not include it. Without
    an environment a rollout is one turn, and its reward is the outcome. An environment that never gives an outcome
    leaves such an estimator with the rewards of turns.

    Raises:
        NotFiniteError: If an advantage is not finite.
    """
    row, groups = ESTIMATORS[estimator], len(rollouts.group_sizes)
    compared = compared_rollouts(row, rollouts)  # (P, R)
    rewards, mask = rollouts.turn_rewards, rollouts.turn_mask & compared.flatten()[:, None]  # (N, H)
    outcomes = rollouts.reward_parts.get("outcome", rollouts.rewards).nan_to_num()
    if "outcome_rewards" in row.needs:
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        rewards = rewards - torch.where(is_last, outcomes[:, None], 0.0)
    tables = {"mask": mask, "anchors": turn_anchors(rollouts)}
    inputs = {name: value.view(groups, -1, value.shape[1]) for name, value in tables.items()}
    by_turn = estimate(estimator, rewards.view_as(inputs["mask"]), outcome_rewards=outcomes.view(groups, -1), **inputs)
    by_token = by_turn.reshape(mask.shape).gather(1, turns_of_tokens(rollouts))  # (N, T)
    return torch.where(rollouts.completion_mask.cpu(), by_token, 0.0)


def compared_rollouts(row: Estimator, rollouts: Rollouts) -> Bool[Tensor, "prompts rollouts"]:
    """`(P, R)` rollouts with a reward, in a group in which at least `min_group` have one."""
    judged = ~rollouts.reward_grid.isnan()
    return judged & (judged.sum(1, keepdim=True) >= row.min_group)


def turn_anchors(rollouts: Rollouts) -> Int[Tensor, "batch turns"]:
    """`(N, H)` number of the observation that each turn follows; equal numbers mean equal tokens.

    The observation of the first turn is the prompt. 0 for turns that a rollout did not reach.
    """
    anchors = torch.zeros(rollouts.turn_mask.shape, dtype=torch.int64)
    ids, turns = rollouts.input_ids.tolist(), turns_of_tokens(rollouts).tolist()
    numbers: dict[tuple[int, ...], int] = {}
    before, end = (-1, -1), 0
    for row, place in rollouts.completion_mask.nonzero().tolist():
        turn = turns[row][place]
        if (row, turn) != before:
            start = end if row == before[0] else 0
            anchors[row, turn] = numbers.setdefault(tuple(ids[row][start:place]), len(numbers) + 1)
        before, end = (row, turn), place + 1
    return anchors


def turns_of_tokens(rollouts: Rollouts) -> Int[Tensor, "batch tokens"]:
    """`(N, T)` turn of each completion token, on the CPU; 0 if rollouts have no turns."""
    return (torch.zeros_like(rollouts.input_ids) if rollouts.turn_ids is None else rollouts.turn_ids).cpu()


def score_weights(objective: str, advantages: BatchAdvantages, mask: Mask, *, length: int) -> Tensor:
    """`(N,)` weight of each rollout's score in an on-policy update: `ĝ = Σ_i w_i ψ_i`.

    At `π = π_old` every loss here gives all tokens of a rollout the same weight. 0 for a rollout without tokens.
    """
    weights = token_weights_of(objective, advantages.to(mask.device), mask, length=length)
    return weights.sum(1) / mask.sum(1).clamp(min=1)


def token_weights_of(objective: str, advantages: Tensor, mask: Mask, *, length: int) -> TokenWeights:
    """`(N, T)` weight of each token's score in an on-policy update, for advantages `(N,)` or `(N, T)`."""
    row = OBJECTIVES[objective]
    inputs: Mapping[str, Any] = {"advantages": advantages, "mask": mask, "length": length}
    return row.weight(**{name: inputs[name] for name in row.weight_needs})


def weighted_tokens(objective: str, rollouts: Rollouts) -> Mask:
    """`(N, T)` bool: completion tokens; without those of rollouts that have no reward, if a loss weighs ties.

    A rollout without a reward has the advantage 0. Most losses give it no weight; one that weighs ties would.
    """
    mask = rollouts.completion_mask
    if not OBJECTIVES[objective].weighs_ties:
        return mask
    return mask & ~rollouts.rewards.isnan().to(mask.device)[:, None]


def compares_with_reference(objective: str) -> bool:
    """Whether a loss itself compares the policy with a reference, instead of having a KL term added to it."""
    return "ref_log_probs" in OBJECTIVES[objective].needs


def reference_inputs(rollouts: Rollouts, reference: LogProbs, beta: float) -> dict[str, Any]:
    """Inputs of a loss that compares with a reference; its mask leaves out rollouts without a reward."""
    device, judged = rollouts.input_ids.device, ~rollouts.rewards.isnan()
    return {
        "ref_log_probs": reference,
        "rewards": rollouts.rewards.nan_to_num().to(device),
        "pairs": best_and_worst(rollouts.reward_grid).to(device),
        "mask": rollouts.completion_mask & judged.to(device)[:, None],
        "group_size": rollouts.group_size,
        "beta": beta,
    }


def best_and_worst(rewards: Rewards) -> Pairs:
    """The best and the worst rollout of every prompt whose rewards differ, as rows of a flat batch; one pair each.

    Of equal rewards the first rollout is taken. `nan` is no reward: such a rollout is in no pair.

    Returns:
        `(M, 2)` int64, better first, possibly with `M = 0`.

    Example:
        >>> best_and_worst(torch.tensor([[0.5, 1.0, torch.nan, 0.0], [1.0, 1.0, 1.0, 1.0]])).tolist()
        [[1, 3]]
    """
    best = rewards.nan_to_num(nan=-torch.inf).argmax(dim=1)
    worst = rewards.nan_to_num(nan=torch.inf).argmin(dim=1)
    prompt = torch.arange(len(rewards), device=rewards.device)
    differ = rewards[prompt, best] > rewards[prompt, worst]  # false for nan too
    return torch.stack([prompt * rewards.shape[1] + best, prompt * rewards.shape[1] + worst], dim=-1)[differ]


def reference_step(
    method: Method, number: int, rollouts: Rollouts, log_probs: LogProbs, reference: LogProbs, *, beta: float
) -> Step:
    """A step whose weights follow from the log-probabilities of the policy and of the reference.

    The advantages are `N w_i`: with them REINFORCE would make the same update.
    """
    row, inputs = OBJECTIVES[method.objective], reference_inputs(rollouts, reference, beta) | {"log_probs": log_probs}
    by_token = row.weight(**{name: inputs[name] for name in row.weight_needs})
    weights = (by_token.sum(1) / inputs["mask"].sum(1).clamp(min=1)).double().cpu()
    return Step(number=number, rollouts=rollouts, advantages=weights * rollouts.count, weights=weights)


def loss_value(
    method: Method,
    step: Step,
    log_probs: LogProbs,
    old_log_probs: LogProbs | None = None,
    *,
    length: int,
    reference: LogProbs | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Scalar loss over all rollouts of a step; on-policy (`old_log_probs = log_probs`) if `old_log_probs` is None.

    `reference` and `beta` are for a loss that compares the policy with a reference.
    """
    row = OBJECTIVES[method.objective]
    inputs: Mapping[str, Any] = {
        "log_probs": log_probs,
        "old_log_probs": log_probs if old_log_probs is None else old_log_probs,
        "advantages": (step.advantages if step.token_advantages is None else step.token_advantages).to(log_probs),
        "mask": weighted_tokens(method.objective, step.rollouts),
        "length": length,
        **({} if reference is None else reference_inputs(step.rollouts, reference, beta)),
    }
    return row.fn(**{name: inputs[name] for name in row.needs}, **loss_options(method))


def loss_coefficients(
    log_probs: LogProbs,
    mask: Mask,
    loss: Callable[[LogProbs], Tensor],
    *,
    beta: float,
    kl: str,
    reference: Tensor | None,
) -> tuple[float, TokenWeights]:
    """Value of the whole loss, KL term included, and `c_it = ∂L/∂log π_it`, `(N, T)`.

    Args:
        log_probs: `(N, T)`; detached from their graph.
        mask: `(N, T)` completion tokens.
        loss: From log-probabilities to the method's loss.
        beta: Coefficient of the KL term.
        kl: Its estimator, a key of `KL_TERMS`.
        reference: `(N, T)` log-probabilities of the reference; None for no KL term.
    """
    leaf = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        total = loss(leaf)
        if reference is not None:
            total = total + beta * kl_penalty(leaf, reference, mask, term=kl)
    return float(total.detach()), token_coefficients(total, leaf)
