"""What is relied on inside TRL, private names included: checked once, before any work is lost."""

import inspect
import re
import warnings
from types import MappingProxyType
from typing import Any

from scoregram.checks import fail, listed

OLDEST_TESTED, NEWEST_TESTED = "1.0.0", "1.16.0"
"""The versions of TRL between which the tests of this integration were run."""

METHODS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "_generate_and_score_completions": ("inputs",),
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
        "_compute_loss": ("model", "inputs"),
        "training_step": ("model", "inputs", "num_items_in_batch"),
    }
)
"""Methods that are wrapped, and the arguments that they must begin with."""
ATTRIBUTES = ("_metrics", "_logs", "accelerator", "model", "num_generations", "reward_func_names", "reward_weights")
"""Attributes that are read."""


def require_supported(trainer: Any) -> str:
    """The version of TRL, provided that `trainer` is one that can be attached to.

    Raises:
        ScoregramError: TRL is absent or too old, `trainer` is something else, or a name that is relied on has changed.
    """
    try:
        import trl  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("attach", "needs TRL", missing, "Install it: pip install 'scoregram[trl]'.")
    version = str(trl.__version__)
    known = tuple(getattr(trl, name) for name in ("GRPOTrainer", "RLOOTrainer"))
    if not isinstance(trainer, known):
        got = type(trainer).__name__
        fail("attach", "trainer must be a GRPOTrainer or an RLOOTrainer of TRL", got, "Subclasses of them will do.")
    if order(version) < order(OLDEST_TESTED):
        fail("attach", f"needs TRL {OLDEST_TESTED} or newer", version, f"Upgrade; {NEWEST_TESTED} was tested last.")
    if changed := [name for name in (*METHODS, *ATTRIBUTES) if not is_as_expected(trainer, name)]:
        tested = f"this integration was tested with {OLDEST_TESTED} to {NEWEST_TESTED}"
        fail(
            "attach",
            f"{type(trainer).__name__} must have what the measurement relies on ({tested})",
            f"TRL {version}, in which {listed(changed)} changed or is absent",
            "Install a tested version, or measure recorded rollouts.",
        )
    if order(version) > order(NEWEST_TESTED):
        warnings.warn(
            f"scoregram: TRL {version} is newer than {NEWEST_TESTED}, the last one tested; watch check/relative_error.",
            stacklevel=3,
        )
    return version


def is_as_expected(trainer: Any, name: str) -> bool:
    """Whether a name that is relied on is there, and a method takes the arguments that it took."""
    if name not in METHODS:
        return hasattr(trainer, name)
    method = getattr(trainer, name, None)
    if not callable(method):
        return False
    taken = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values()):
        return True
    return tuple(taken)[: len(METHODS[name])] == METHODS[name]


def order(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare.

    Example:
        >>> order("1.16.0") > order("1.9.2"), order("1.17.0.dev0")
        (True, (1, 17, 0))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
