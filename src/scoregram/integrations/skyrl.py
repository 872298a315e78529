"""Our group-level estimators in SkyRL's registry, as `trainer.algorithm.advantage_estimator=scoregram-NAME`.

Call `register()` in the script that starts the training, before Ray is initialised, as SkyRL requires of every custom
estimator. SkyRL sends them to its other processes, which need scoregram installed too. See `docs/verl.md`.
"""

from scoregram.integrations.registries import SKYRL_ESTIMATORS as REGISTERED
from scoregram.integrations.registries import SKYRL_VERSIONS as TESTED
from scoregram.integrations.registries import padded_advantages_and_returns as advantages_and_returns
from scoregram.integrations.registries import padding_count as padding
from scoregram.integrations.registries import register_with_skyrl as register

__all__ = ["REGISTERED", "TESTED", "advantages_and_returns", "padding", "register"]
