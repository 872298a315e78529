"""Advantages of the user's choice in place of the trainer's: a row of `ESTIMATORS`, or a function of the user."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, listed, lookup, require_finite
from scoregram.distributed import Processes
from scoregram.integrations.trl.generation import Generation, merged_generation
from scoregram.integrations.trl.separate_pass import score_energies
from scoregram.integrations.trl.support import Settings, is_rloo

OwnEstimator = Callable[[Generation], Tensor]
"""From a generation to `(N,)` or, one per token, `(N, C)` advantages."""
_SUPPLIED = frozenset({"lengths", "outcomes", "score_energies"})
"""Inputs of estimators, besides rewards, that a TRL trainer can supply."""


def require_trl_estimator(estimator: str | OwnEstimator, group_size: int) -> None:
    """Raise before any work if a trainer cannot supply what the estimator needs."""
    if not isinstance(estimator, str):
        if not callable(estimator):
            remedy = "Pass a name of ESTIMATORS, or a function from a Generation to advantages."
            fail("attach(estimator=…)", "must be a name or a function", repr(estimator), remedy)
        return
    row = lookup(ESTIMATORS, estimator, kind="attach(estimator=…)")
    if row.level != "group" or not set(row.needs) <= _SUPPLIED:
        able = listed(name for name, r in ESTIMATORS.items() if r.level == "group" and set(r.needs) <= _SUPPLIED)
        remedy = "Others need more than rollouts and rewards: pass a function from a Generation to advantages."
        fail("attach(estimator=…)", f"must be one of {able}", repr(estimator), remedy)
    if group_size < row.min_group:
        requirement = f"{estimator} needs at least {row.min_group} rollouts per prompt"
        fail("attach(estimator=…)", requirement, f"num_generations {group_size}", "Raise num_generations.")


def own_advantages(
    estimator: str | OwnEstimator, generation: Generation, energies: Tensor | None, *, per_token: bool = True
) -> Tensor:
    """`(N,)` or `(N, C)` advantages for the trainer, on its device and in its dtype.

    Args:
        estimator: A row of `ESTIMATORS`, or a function.
        generation: The whole generation.
        energies: `(N,)` squared norms of the scores, where the row needs them.
        per_token: Whether the trainer's loss takes one advantage for every token.

    Raises:
        ScoregramError: If the result has another shape, or is not finite. This ends the training, because the
            trainer's own advantages are not those that the user asked for.
    """
    if isinstance(estimator, str):
        shape = (-1, generation.group_size)
        rewards = generation.rewards.view(shape)
        found: Any = estimate(
            estimator,
            rewards,
            lengths=generation.rollouts.lengths.cpu().view(shape),
            outcomes=rewards,
            score_energies=None if energies is None else energies.view(shape),
        ).flatten()
    else:
        found = estimator(generation)
    shapes = [(generation.size,), tuple(generation.completion_ids.shape)][: 1 + per_token]
    if not isinstance(found, Tensor) or tuple(found.shape) not in shapes:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        requirement = f"advantages must be a tensor of shape {' or '.join(map(str, shapes))}"
        fail("attach(estimator=…)", requirement, got, "Return one number per rollout, or one per completion token.")
    require_finite(found, name="advantages", caller="attach(estimator=…)")
    return found.to(generation.advantages)


def advantages_of_process(
    trainer: Any, own_slice: Callable[[], Generation], shape: tuple[int, int], settings: Settings, processes: Processes
) -> Tensor:
    """Advantages of the rollouts of this process, by the estimator of the settings.

    All processes call it together, and each computes the advantages of the whole generation: a group may be cut between
    two of them.

    Args:
        trainer: Has the model, and the log of completions in which the advantages are shown.
        own_slice: Returns the slice of the generation that this process has.
        shape: `(n, C)` of that slice.
        settings: Has the estimator.
        processes: The processes that train together.

    Returns:
        `(n,)`, or `(n, C)` with one advantage per token.
    """
    estimator, (size, tokens) = settings.estimator, shape
    assert estimator is not None

    def sent_slice() -> Generation:
        return own_slice() if processes.count == 1 else own_slice().to("cpu")

    whole = merged_generation(processes.gather(sent_slice)).to(trainer.accelerator.device)
    needs_energies = isinstance(estimator, str) and "score_energies" in ESTIMATORS[estimator].needs
    energies = score_energies(trainer, whole, settings, processes) if needs_energies else None
    advantages = own_advantages(estimator, whole, energies, per_token=not is_rloo(trainer))
    show_advantages(trainer, advantages)
    own = advantages[size * processes.rank : size * (processes.rank + 1)]
    return own if own.ndim == 1 else own[:, :tokens]


def show_advantages(trainer: Any, advantages: Tensor) -> None:
    """Replace the trainer's advantages in its log of completions by those that it trains with."""
    shown = trainer._logs.get("advantages")
    values = advantages if advantages.ndim == 1 else advantages.mean(1)
    if shown is None or len(shown) < len(values):
        return
    kept = list(shown)[: len(shown) - len(values)]
    shown.clear()
    shown.extend([*kept, *torch.Tensor.tolist(values)])
