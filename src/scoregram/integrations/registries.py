"""Registers the group-level estimators of our table with other trainers: verl and SkyRL.

Both trainers hand an estimator `(N, T)` token rewards, a mask and a group label for each rollout; groups may differ in
size, and their rollouts need not be adjacent. The rewards are arranged as `(P, R)` with `nan` in the empty places,
which `estimate` treats as missing, and the advantages are put back in the order of the batch.

Users import `scoregram.integrations.verl` or `scoregram.integrations.skyrl`; `docs/verl.md` lists the estimators and
how they differ from the trainers' own.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, require_finite, require_same_shape

_BATCH_INPUTS = frozenset({"lengths", "outcomes"})
"""Estimator inputs, besides rewards, that a labelled batch has; outcomes are the rewards themselves."""
SERVED_ESTIMATORS = tuple(
    name for name, row in ESTIMATORS.items() if row.level == "group" and set(row.needs) <= _BATCH_INPUTS
)
"""Rows of `ESTIMATORS` that need no more than a labelled batch."""
VERL_VERSIONS = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""Versions of verl whose own registry and functions these estimators were compared with."""
SKYRL_VERSIONS = ("0.3.0",)
"""Versions of SkyRL whose own registry and functions these estimators were compared with."""

RegisteredEstimator = Callable[..., tuple[Tensor, Tensor]]


def labelled_advantages(
    name: str,
    token_rewards: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    labels: Any,
    *,
    left_out: int = 0,
) -> Float[Tensor, "batch tokens"]:
    """Token advantages: on every token of the mask the advantage of its rollout, 0 elsewhere.

    The reward of a rollout is the sum of its token rewards, its length the number of its masked tokens. A group smaller
    than the estimator needs has advantages 0 and takes no part in statistics over the batch.

    Args:
        name: One of `SERVED_ESTIMATORS`.
        token_rewards: `(N, T)`.
        mask: `(N, T)`, nonzero for the tokens that the policy chose.
        labels: `N` group labels, a list or an array; rollouts of a group need not be adjacent.
        left_out: Number of rollouts at the end that are padding: advantage 0, and no part in any statistic.

    Returns:
        `(N, T)`, dtype and device of `token_rewards`.

    Raises:
        ScoregramError: If shapes or the number of labels do not match, or a reward is not finite.

    Example:
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0], [1, 0]])
        >>> labelled_advantages("rloo", rewards, mask, ["a", "b", "a"])
        tensor([[ 1.,  1.],
                [ 0.,  0.],
                [-1., -0.]])
    """
    caller = f"scoregram-{name}"
    require_same_shape(mask, token_rewards, name="response_mask", like_name="token_level_rewards", caller=caller)
    rewards = token_rewards.detach().sum(dim=-1, dtype=torch.float64)  # (N,)
    lengths = (mask != 0).sum(dim=-1)
    places, shape = _grid_places(labels, len(rewards), rewards.device, caller=caller)
    judged = len(rewards) - left_out
    require_finite(rewards[:judged], name="rewards", caller=caller)  # NaN would count as missing below
    grid = rewards.new_full(shape, torch.nan)
    grid.view(-1)[places[:judged]] = rewards[:judged]
    length_grid = lengths.new_zeros(shape)
    length_grid.view(-1)[places] = lengths
    advantages = estimate(name, grid, lengths=length_grid, outcomes=grid)
    return advantages.view(-1)[places].to(token_rewards.dtype).unsqueeze(-1) * (mask != 0)


def _grid_places(labels: Any, count: int, device: torch.device, *, caller: str) -> tuple[Tensor, tuple[int, int]]:
    """Place of each rollout in `(P, R)`, counted row by row, and that shape; `R` is the largest group."""
    if labels is None:
        fail(caller, "every rollout needs a group label", "none", "Let the trainer pass its uid.")
    names = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(names) != count:
        fail(caller, f"there must be {count} group labels, one for each rollout", len(names), "Pass one for each.")
    rows: dict[Hashable, int] = {}
    sizes: list[int] = []
    where: list[tuple[int, int]] = []
    for name in names:
        row = rows.setdefault(name, len(rows))
        sizes += [0] * (row == len(sizes))
        where.append((row, sizes[row]))
        sizes[row] += 1
    widest = max(sizes, default=0)
    places = torch.tensor([row * widest + column for row, column in where], dtype=torch.long, device=device)
    return places, (len(sizes), widest)


def advantages_and_returns(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    *,
    estimator: str,
    left_out: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages `(N, T)`, and a copy as returns. verl and SkyRL call it by keyword, with extra arguments.

    Options of the trainers' own estimators, such as `norm_adv_by_std_in_grpo`, `grpo_norm_by_std`, `gamma` and `lam`,
    are ignored: the name of the estimator decides.

    Args:
        token_level_rewards: `(N, T)`, summed over tokens.
        response_mask: `(N, T)`.
        index: `N` group labels, the trainer's `uid`.
        estimator: A row of `ESTIMATORS`.
        left_out: Number of rollouts at the end that are padding.

    Raises:
        ScoregramError: If there are no labels, shapes do not match, or a reward is not finite.
    """
    advantages = labelled_advantages(estimator, token_level_rewards, response_mask, index, left_out=left_out)
    return advantages, advantages.clone()


def padded_advantages_and_returns(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, *, estimator: str, **extras: Any
) -> tuple[Tensor, Tensor]:
    """The same for SkyRL, which pads a batch with copies that have no loss: they get 0 and enter no statistic."""
    left_out = 0 if index is None else padding_count(index)
    return advantages_and_returns(
        token_level_rewards, response_mask, index, estimator=estimator, left_out=left_out, **extras
    )


def padding_count(index: Sequence[Any]) -> int:
    """How many rollouts at the end are SkyRL's padding, labelled `pad0`, `pad1`, … in this order.

    Example:
        >>> padding_count(["a", "pad0", "a", "pad0", "pad1"]), padding_count(["a", "pad1"])
        (2, 0)
    """
    names = [str(name) for name in index]
    last = names[-1].removeprefix("pad") if names and names[-1].startswith("pad") else ""
    count = int(last) + 1 if last.isdecimal() else 0
    return count if count and names[-count:] == [f"pad{place}" for place in range(count)] else 0


def _named_estimators(function: RegisteredEstimator) -> Mapping[str, RegisteredEstimator]:
    return MappingProxyType({f"scoregram-{name}": partial(function, estimator=name) for name in SERVED_ESTIMATORS})


VERL_ESTIMATORS = _named_estimators(advantages_and_returns)
"""Name in verl's config → estimator. The same objects in every call: verl refuses a second function under a name."""
SKYRL_ESTIMATORS = _named_estimators(padded_advantages_and_returns)
"""Name in SkyRL's config → estimator: partials of a module-level function, which Ray can send by name."""


def register_with_verl() -> str:
    """Add `VERL_ESTIMATORS` to verl's registry and return verl's version; a second call changes nothing.

    Raises:
        ScoregramError: If verl is not installed, has no registry, or has another function under one of the names.
    """
    caller = "scoregram.integrations.verl"
    try:
        import verl  # pyright: ignore[reportMissingImports]
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail(caller, "needs verl", missing, f"Install verl {VERL_VERSIONS[-1]}.")
    version = str(getattr(verl, "__version__", "of unknown version"))
    decorator = getattr(core_algos, "register_adv_est", None)
    if decorator is None:
        remedy = f"Install 0.5 or newer; {VERL_VERSIONS[-1]} is tested."
        fail(caller, "needs core_algos.register_adv_est", f"verl {version}", remedy)
    for name, estimator in VERL_ESTIMATORS.items():
        try:
            decorator(name)(estimator)
        except ValueError as taken:
            fail(caller, f"the name {name} must be free in verl", taken, "Remove the other estimator of this name.")
    _warn_untested("verl", version, VERL_VERSIONS)
    return version


def register_with_skyrl() -> str:
    """Add `SKYRL_ESTIMATORS` to SkyRL's registry and return SkyRL's version; names that it has already are kept.

    Raises:
        ScoregramError: If SkyRL is not installed or has no such registry.
    """
    caller = "scoregram.integrations.skyrl"
    try:
        import skyrl  # pyright: ignore[reportMissingImports]
        from skyrl.backends.skyrl_train.utils import ppo_utils  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        remedy = f"Install skyrl[skyrl-train] {SKYRL_VERSIONS[-1]}."
        fail(caller, "needs SkyRL and its training backend", missing, remedy)
    version = str(getattr(skyrl, "__version__", "of unknown version"))
    registry = getattr(ppo_utils, "AdvantageEstimatorRegistry", None)
    if registry is None:
        remedy = f"Install {SKYRL_VERSIONS[-1]}, which is tested."
        fail(caller, "needs AdvantageEstimatorRegistry", f"SkyRL {version}", remedy)
    present = set(registry.list_available())
    for name, estimator in SKYRL_ESTIMATORS.items():
        if name not in present:
            registry.register(name, estimator)
    _warn_untested("SkyRL", version, SKYRL_VERSIONS)
    return version


def _warn_untested(trainer: str, version: str, tested: Sequence[str]) -> None:
    if version not in tested:
        warnings.warn(f"scoregram: tested with {trainer} {', '.join(tested)}, this is {version}.", stacklevel=3)
