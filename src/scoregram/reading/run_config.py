"""What the stored config of a run says: its settings, its trainer, and how that trainer stores rollouts."""

from collections.abc import Mapping
from typing import Any

OWN_TRAINER, TRL_TRAINER = "scoregram", "trl"
"""Trainers whose settings are known: `scoregram train`, and TRL with `attach`."""


def stored_setting(config: Mapping[str, Any], *names: str) -> Any:
    """The first of some settings that the config has, or the trainer's arguments in it; None if neither has one.

    `scoregram train` stores its settings at the top of the config, `attach` the arguments of TRL under `arguments`.

    Example:
        >>> stored_setting({"arguments": {"beta": 0.1}}, "kl_weight", "beta")
        0.1
    """
    arguments = config.get("arguments")
    places = (config, arguments if isinstance(arguments, Mapping) else {})
    return next((one[name] for one in places for name in names if one.get(name) is not None), None)


def trainer_of(config: Mapping[str, Any]) -> str:
    """`trl` or another integration that wrote the run, `scoregram` for `scoregram train`; empty if not known.

    Example:
        >>> trainer_of({"integration": {"name": "trl"}}), trainer_of({"method": "grpo"}), trainer_of({})
        ('trl', 'scoregram', '')
    """
    integration = config.get("integration")
    if isinstance(integration, Mapping):
        return str(integration.get("name", ""))
    return OWN_TRAINER if config.get("method") else ""


def rollouts_option(config: Mapping[str, Any], every: int = 1) -> str:
    """What to type to store rollouts in the trainer of a run; empty if the trainer is not known.

    `every` is the number of steps from one stored step to the next. TRL stores the rollouts of all measured steps.

    Example:
        >>> rollouts_option({"method": "grpo"}), rollouts_option({"integration": {"name": "trl"}}), rollouts_option({})
        ('train with --rollouts-every 1', 'attach(trainer, keep_rollouts=True)', '')
    """
    options = {
        OWN_TRAINER: f"train with --rollouts-every {every}",
        TRL_TRAINER: "attach(trainer, keep_rollouts=True)",
    }
    return options.get(trainer_of(config), "")


def rollouts_remedy(config: Mapping[str, Any]) -> str:
    """The sentence that ends an error about missing rollouts."""
    option = rollouts_option(config)
    return f"To store rollouts: {option}." if option else "Store rollouts in the next run."
