"""Words of the field that a page explains where they stand, and once in a list."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from markupsafe import Markup, escape

from scoregram.advice import Change

WORDS = MappingProxyType(
    {
        "score": "The gradient of a rollout's log-probability, summed over its completion tokens. An update is a "
        "weighted sum of scores.",
        "Gram": "The matrix of inner products between the scores of rollouts. With the rewards it is enough for every "
        "number on this page.",
        "null": "What would be measured if the scores of a group were orthogonal, with the same norms. It is always "
        "the grey dashed line: a value on it says nothing about similarity.",
        "live group": "A group whose rewards differ. In any other group every advantage is 0, so it adds nothing to "
        "the update.",
        "dead group": "A group whose rollouts all have the same reward: all right, all wrong, or tied.",
        "effective rank": "Over how many directions the gradients of a group's rollouts spread: 1 if all are parallel, "
        "at most the number of rollouts. Unequal advantages and norms lower it too, hence the null.",
        "top-1 fraction": "Share of a group's gradient energy, the sum of squared norms, that lies in one direction.",
        "R": "Rollouts per prompt: the group size.",
        "σ_r": "Standard deviation of the rewards of a group.",
        "noise scale": "The number of rollouts at which signal and error of a step have equal power.",
        "signal to noise": "Power of the true gradient over the power of a step's error; power is the squared norm.",
        "coherence": "Share of the rollouts' gradient energy that survives being summed: 1 if all agree, 0 if they "
        "cancel.",
        "share of the update": "Part of the squared update that one rollout or prompt accounts for. Shares add up to "
        "1; a negative one pulls against the rest.",
        "self-check": "The gradient of the update is computed once more from the Gram and compared with the trainer's "
        "own.",
    }
)
"""Word → what it is, in one or two sentences."""

PROMPTS = "difficulty of prompts"
"""What a card about prompts changes."""
DYNAMIC_SAMPLING = "dapo"
"""The method of `scoregram train` that samples prompts until enough groups are live."""

SETTINGS = MappingProxyType(
    {
        "batch size": ("--batch-size", "per_device_train_batch_size"),
        "completion length": ("--max-new-tokens", "max_completion_length"),
        "estimator": ("--estimator", ""),
        "gradient clipping": ("--max-grad-norm", "max_grad_norm"),
        "group size": ("--group-size", "num_generations"),
        "learning rate": ("--learning-rate", "learning_rate"),
        "reward function": ("--reward", "reward_funcs"),
        "seed": ("--seed", "seed"),
        "updates per batch": ("--inner-updates", "num_iterations"),
    }
)
"""What a finding changes → its option in `scoregram train`, and its field in TRL's `GRPOConfig` or `GRPOTrainer`."""

NEXT_VALUES: Mapping[tuple[str, str], Callable[[Any], Any]] = MappingProxyType(
    {
        ("completion length", "up"): lambda limit: 2 * limit,
        ("learning rate", "down"): lambda rate: float(rate) / 2,
        ("updates per batch", "down"): lambda _: 1,
    }
)
"""What is changed, and where to → the next value to try, from the present one."""


def typed_setting(change: Change, config: Mapping[str, Any]) -> str:
    """What to type for a change in the trainer of a run: `--max-new-tokens 400 (now 200)`, in TRL with `=`.

    Without the value where neither the finding nor the present value gives one; empty if there is no such setting.
    """
    trainer = trainer_of(config)
    if change.knob == PROMPTS:
        return _prompt_setting(config)
    names = SETTINGS.get(change.knob, ("", ""))
    name = names[("", "trl").index(trainer)] if trainer in ("", "trl") else ""
    present = stored_setting(config, name.removeprefix("--").replace("-", "_"))
    following = NEXT_VALUES.get((change.knob, change.direction))
    value = change.value
    if value is None and present and following is not None:
        value = following(present)
    if not name:
        return ""
    return assigned(name, value) + (f" (now {present})" if present else "")


def assigned(name: str, value: Any) -> str:
    """`--option 4` or `field=4`; the name alone without a value.

    Example:
        >>> assigned("--group-size", 4), assigned("num_generations", 4), assigned("beta", None)
        ('--group-size 4', 'num_generations=4', 'beta')
    """
    if value is None:
        return name
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name} {text}" if name.startswith("--") else f"{name}={text}"


def _prompt_setting(config: Mapping[str, Any]) -> str:
    """How to get prompts that teach: dynamic sampling, which TRL does not have, or a filter by success rates."""
    trainer = trainer_of(config)
    if trainer == "trl":
        return "train_dataset, filtered by success rate; TRL has no dynamic sampling"
    if trainer or config.get("method") == DYNAMIC_SAMPLING:
        return ""
    present = config.get("method")
    return f"--method {DYNAMIC_SAMPLING}" + (f" (now {present})" if present else "") + ", for dynamic sampling"


def measuring_setting(config: Mapping[str, Any], every: int) -> str:
    """What to type to measure every so many steps; empty if it is unknown, or no more often than now."""
    present = stored_setting(config, "measure_every")
    names = {"": f"--measure-every {every}", "trl": f"attach(trainer, every={every})"}
    name = names.get(trainer_of(config), "")
    if not name or (isinstance(present, int) and 0 < present <= every):
        return ""
    return name + (f" (now {present})" if present else "")


def stored_setting(config: Mapping[str, Any], key: str) -> Any:
    """A setting of the config, or of the trainer's arguments in it; None if neither has it."""
    stored = config.get("arguments")
    places = (config, stored if isinstance(stored, Mapping) else {})
    return next((one[key] for one in places if one.get(key) is not None), None)


def trainer_of(config: Mapping[str, Any]) -> str:
    """`trl` or another integration that wrote the run; empty for `scoregram train`."""
    integration = config.get("integration")
    return str(integration.get("name", "")) if isinstance(integration, Mapping) else ""


_PATTERN = re.compile(
    r"(?<![\w-])("
    + "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True) if len(word) > 3)
    + r")s?(?![\w-])"
)


def marked_terms(text: str) -> Markup:
    """Plain text, escaped, in which the first occurrence of every known word shows its definition on hover.

    Single letters and other words of up to three characters are left out.

    Example:
        >>> print(marked_terms("a < b"))
        a &lt; b
    """
    pieces, seen, end = [], set(), 0
    for found in _PATTERN.finditer(text):
        word = found.group(1)
        if word in seen:
            continue
        seen.add(word)
        pieces.append(escape(text[end : found.start()]))
        pieces.append(
            Markup('<dfn class="term" tabindex="0" data-tip="{}">{}</dfn>').format(WORDS[word], found.group())
        )
        end = found.end()
    pieces.append(escape(text[end:]))
    return Markup("").join(pieces)
