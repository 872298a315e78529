"""Our group-level estimators in verl's registry, as `algorithm.adv_estimator=scoregram-NAME`.

Importing this module registers them if verl is installed. verl imports it in every process, through its entry-point
group `verl.plugins` (0.9 and newer) or `VERL_USE_EXTERNAL_MODULES` (0.6 and newer). See `docs/verl.md`.
"""

import warnings
from importlib.util import find_spec

from scoregram.integrations.registries import VERL_ESTIMATORS as REGISTERED
from scoregram.integrations.registries import VERL_VERSIONS as TESTED
from scoregram.integrations.registries import advantages_and_returns
from scoregram.integrations.registries import register_with_verl as register

__all__ = ["REGISTERED", "TESTED", "advantages_and_returns", "register", "register_on_import"]


def register_on_import() -> None:
    """`register()` if verl is installed; an error becomes a warning, because verl hides the errors of its plugins."""
    if find_spec("verl") is None:
        return
    try:
        register()
    except Exception as reason:
        warnings.warn(f"scoregram: no estimator was registered with verl. {reason}", stacklevel=2)


register_on_import()
