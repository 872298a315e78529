"""Language models as policies: load, sample, log-probabilities.

The names below load their module when first used, so that the settings can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` finds, for readers that do not run the code
    from scoregram.policy.bias import BiasedSamplingWarning as BiasedSamplingWarning
    from scoregram.policy.bias import score_mean_bias as score_mean_bias
    from scoregram.policy.config import PolicyConfig as PolicyConfig
    from scoregram.policy.config import SamplingConfig as SamplingConfig
    from scoregram.policy.load import Policy as Policy
    from scoregram.policy.load import load_policy as load_policy
    from scoregram.policy.log_probs import token_log_probs as token_log_probs
    from scoregram.policy.rollouts import Rollouts as Rollouts
    from scoregram.policy.sampler import sample as sample

_HOME = {
    "BiasedSamplingWarning": "bias",
    "Policy": "load",
    "PolicyConfig": "config",
    "Rollouts": "rollouts",
    "SamplingConfig": "config",
    "load_policy": "load",
    "sample": "sampler",
    "score_mean_bias": "bias",
    "token_log_probs": "log_probs",
}
"""Where each public name lives."""

__all__ = [
    "BiasedSamplingWarning",
    "Policy",
    "PolicyConfig",
    "Rollouts",
    "SamplingConfig",
    "load_policy",
    "sample",
    "score_mean_bias",
    "token_log_probs",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'scoregram.policy' has no attribute {name!r}")
    return getattr(import_module(f"scoregram.policy.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
