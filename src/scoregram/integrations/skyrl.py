"""Our group-level estimators in SkyRL's registry, as `trainer.algorithm.advantage_estimator=scoregram-NAME`.

`register()` goes into the script that starts the training, before Ray is initialised, as SkyRL asks of every custom
estimator; SkyRL hands them on to its other processes, which need scoregram installed too. See `docs/verl.md`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.labelled_groups import SERVED, token_advantages

TESTED = ("0.3.0",)
"""Versions of SkyRL whose own registry and functions these estimators were compared with."""


def advantages_and_returns(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, *, estimator: str, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages `(N, T)` and the same as returns, called as SkyRL calls an estimator: by keyword, with extras.

    Rollouts that SkyRL appended to fill up a batch are copies without a loss: they get 0 and count nowhere. SkyRL's
    `grpo_norm_by_std`, `gamma` and `lambd` are not looked at: the name says all.

    Args:
        token_level_rewards: `(N, T)`, summed over tokens.
        response_mask: `(N, T)`.
        index: `N` names of groups, SkyRL's `uids`.
        estimator: A row of `ESTIMATORS`.

    Raises:
        ScoregramError: If there are no `uids`, shapes do not match, or a reward is not finite.
    """
    left_out = 0 if index is None else padding(index)
    advantages = token_advantages(estimator, token_level_rewards, response_mask, index, left_out=left_out)
    return advantages, advantages.clone()


def padding(index: Any) -> int:
    """How many rollouts at the end are SkyRL's padding, named `pad0`, `pad1`, … in this order.

    Example:
        >>> padding(["a", "pad0", "a", "pad0", "pad1"]), padding(["a", "pad1"])
        (2, 0)
    """
    names = [str(name) for name in index]
    last = names[-1].removeprefix("pad") if names and names[-1].startswith("pad") else ""
    count = int(last) + 1 if last.isdecimal() else 0
    return count if count and names[-count:] == [f"pad{place}" for place in range(count)] else 0


REGISTERED: MappingProxyType[str, Callable[..., tuple[Tensor, Tensor]]] = MappingProxyType(
    {f"scoregram-{name}": partial(advantages_and_returns, estimator=name) for name in SERVED}
)
"""Name in SkyRL's config → estimator; partials of a function of this module, so that Ray can send them by name."""


def register() -> str:
    """Put `REGISTERED` into SkyRL's registry and return SkyRL's version; names that are there already are left.

    Raises:
        ScoregramError: If SkyRL is absent or has no such registry.
    """
    try:
        import skyrl  # pyright: ignore[reportMissingImports]
        from skyrl.backends.skyrl_train.utils import ppo_utils  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        remedy = f"Install skyrl[skyrl-train] {TESTED[-1]}."
        fail("scoregram.integrations.skyrl", "needs SkyRL and its training backend", missing, remedy)
    version = str(getattr(skyrl, "__version__", "of unknown version"))
    registry = getattr(ppo_utils, "AdvantageEstimatorRegistry", None)
    if registry is None:
        remedy = f"{TESTED[-1]} was tested."
        fail("scoregram.integrations.skyrl", "needs AdvantageEstimatorRegistry", f"SkyRL {version}", remedy)
    there = set(registry.list_available())
    for name, estimator in REGISTERED.items():
        if name not in there:
            registry.register(name, estimator)
    if version not in TESTED:
        warnings.warn(f"scoregram: tested with SkyRL {' and '.join(TESTED)}, this is {version}.", stacklevel=2)
    return version
