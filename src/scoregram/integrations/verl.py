"""Our group-level estimators in verl's registry, as `algorithm.adv_estimator=scoregram-NAME`.

Importing this module registers them where verl is installed: that is what verl's entry-point group `verl.plugins`
(0.9 and newer) and its `VERL_USE_EXTERNAL_MODULES` (0.6 and newer) do in every process. `docs/verl.md` says which
estimators there are, and how they differ from verl's own.
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.labelled_groups import SERVED, token_advantages

TESTED = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""Versions of verl whose own registry and functions these estimators were compared with."""


def advantages_and_returns(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, *, estimator: str, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages `(N, T)` and the same as returns, called as verl calls an estimator: by keyword, with extras.

    verl's `norm_adv_by_std_in_grpo`, `gamma` and `lam` are not looked at: the name says all.

    Args:
        token_level_rewards: `(N, T)`, summed over tokens.
        response_mask: `(N, T)`.
        index: `N` names of groups, verl's `uid`.
        estimator: A row of `ESTIMATORS`.

    Raises:
        ScoregramError: If there is no `uid`, shapes do not match, or a reward is not finite.
    """
    advantages = token_advantages(estimator, token_level_rewards, response_mask, index)
    return advantages, advantages.clone()


REGISTERED: MappingProxyType[str, Callable[..., tuple[Tensor, Tensor]]] = MappingProxyType(
    {f"scoregram-{name}": partial(advantages_and_returns, estimator=name) for name in SERVED}
)
"""Name in verl's config → estimator. The same objects every time: verl refuses a second function under a name."""


def register() -> str:
    """Put `REGISTERED` into verl's registry and return verl's version; again does nothing more.

    Raises:
        ScoregramError: If verl is absent, has no registry, or holds another function under one of our names.
    """
    try:
        import verl  # pyright: ignore[reportMissingImports]
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("scoregram.integrations.verl", "needs verl", missing, f"Install verl {TESTED[-1]}.")
    version = str(getattr(verl, "__version__", "of unknown version"))
    registered = getattr(core_algos, "register_adv_est", None)
    if registered is None:
        remedy = f"Install 0.5 or newer; {TESTED[-1]} was tested."
        fail("scoregram.integrations.verl", "needs core_algos.register_adv_est", f"verl {version}", remedy)
    for name, estimator in REGISTERED.items():
        try:
            registered(name)(estimator)
        except ValueError as taken:
            remedy = "Register one estimator under a name."
            fail("scoregram.integrations.verl", f"the name {name} must be free in verl", taken, remedy)
    if version not in TESTED:
        warnings.warn(f"scoregram: tested with verl {', '.join(TESTED)}, this is {version}.", stacklevel=2)
    return version


def register_on_import() -> None:
    """`register()`, but without verl nothing, and a warning where it fails: verl hides the errors of its plugins."""
    if find_spec("verl") is None:
        return
    try:
        register()
    except Exception as reason:
        warnings.warn(f"scoregram: no estimator was registered with verl. {reason}", stacklevel=2)


register_on_import()
