"""Advantages of our table, or of the user's own, in the place of the trainer's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, listed, lookup, require_finite
from scoregram.integrations.trl.generation import Generation

OwnEstimator = Callable[[Generation], Tensor]
"""From the rollouts of a generation to `(N,)` or, one per token, `(N, C)` advantages."""
SUPPLIED = frozenset({"lengths", "outcomes", "score_energies"})
"""What a TRL trainer can give to an estimator besides rewards."""


def require_estimator(estimator: str | OwnEstimator, group_size: int) -> None:
    """Raise before any work if a trainer cannot supply what the estimator needs."""
    if not isinstance(estimator, str):
        return
    row = lookup(ESTIMATORS, estimator, kind="attach(estimator=…)")
    if row.level != "group" or not set(row.needs) <= SUPPLIED:
        able = listed(name for name, r in ESTIMATORS.items() if r.level == "group" and set(r.needs) <= SUPPLIED)
        remedy = "Others need more than rollouts and rewards: pass a function from a Generation to advantages."
        fail("attach(estimator=…)", f"must be one of {able}", repr(estimator), remedy)
    if group_size < row.min_group:
        got = f"num_generations {group_size}"
        fail("attach(estimator=…)", f"{estimator} needs at least {row.min_group} rollouts a prompt", got, "Raise it.")


def needs_energies(estimator: str | OwnEstimator | None) -> bool:
    """Whether an estimator needs the squared norms of the scores."""
    return isinstance(estimator, str) and "score_energies" in ESTIMATORS[estimator].needs


def own_advantages(
    estimator: str | OwnEstimator, generation: Generation, energies: Tensor | None, *, per_token: bool = True
) -> Tensor:
    """`(N,)` or `(N, C)` advantages for the trainer, on its device and in its dtype.

    Args:
        estimator: A row of `ESTIMATORS`, or a function.
        generation: The rollouts.
        energies: `(N,)` squared norms of the scores, where the row needs them.
        per_token: Whether the trainer's loss takes one advantage for every token.

    Raises:
        ScoregramError: If the result has another shape, or is not finite. The trainer's own advantages are no
            substitute for what was asked for, so this ends the training.
    """
    found = from_table(estimator, generation, energies) if isinstance(estimator, str) else estimator(generation)
    shapes = [(generation.size,), tuple(generation.completion_ids.shape)][: 1 + per_token]
    if not isinstance(found, Tensor) or tuple(found.shape) not in shapes:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        fail(
            "attach(estimator=…)",
            f"advantages must be a tensor of shape {' or '.join(map(str, shapes))}",
            got,
            "Check it.",
        )
    require_finite(found, name="advantages", caller="attach(estimator=…)")
    return found.to(generation.advantages)


def from_table(name: str, generation: Generation, energies: Tensor | None) -> Tensor:
    """`(N,)` by a row of `ESTIMATORS`; 0 for a rollout that no reward function judged.

    A group in which too few were judged to compare them is left out as a whole, as TRL does.
    """
    shape = (-1, generation.group_size)
    observed = ~generation.rewards.isnan().view(shape)
    observed &= observed.sum(1, keepdim=True) >= ESTIMATORS[name].min_group
    if not bool(observed.any()):
        return torch.zeros_like(generation.rewards)
    rewards = generation.rewards.nan_to_num(0.0).view(shape)
    return estimate(
        name,
        rewards,
        lengths=generation.token_lengths.view(shape),
        outcomes=rewards,
        score_energies=None if energies is None else energies.view(shape),
        observed=None if bool(observed.all()) else observed,
    ).flatten()


def show_advantages(trainer: Any, advantages: Tensor) -> None:
    """Put the advantages that are trained with where the trainer logs its own."""
    shown = trainer._logs.get("advantages")
    values = advantages if advantages.ndim == 1 else advantages.mean(1)
    if shown is None or len(shown) < len(values):
        return
    kept = list(shown)[: len(shown) - len(values)]
    shown.clear()
    shown.extend([*kept, *torch.Tensor.tolist(values)])
