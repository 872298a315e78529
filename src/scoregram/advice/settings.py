"""What to type for a change, in the words of the trainer that made the run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scoregram.advice.findings import Change, RunFinding

OWN_TRAINER, TRL_TRAINER = "scoregram", "trl"
"""Trainers whose settings are known: `scoregram train`, and TRL with `attach`."""
PROMPTS = "difficulty of prompts"
"""What a finding about prompts changes."""
DYNAMIC_SAMPLING = "dapo"
"""The method of `scoregram train` that samples prompts until enough groups are live."""

SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "batch size": {OWN_TRAINER: "--batch-size", TRL_TRAINER: "per_device_train_batch_size"},
        "completion length": {OWN_TRAINER: "--max-new-tokens", TRL_TRAINER: "max_completion_length"},
        "estimator": {OWN_TRAINER: "--estimator", TRL_TRAINER: "attach(trainer, estimator)"},
        "gradient clipping": {OWN_TRAINER: "--max-grad-norm", TRL_TRAINER: "max_grad_norm"},
        "group size": {OWN_TRAINER: "--group-size", TRL_TRAINER: "num_generations"},
        "group size over the run": {OWN_TRAINER: "--group-size"},
        "learning rate": {OWN_TRAINER: "--learning-rate", TRL_TRAINER: "learning_rate"},
        "reward function": {OWN_TRAINER: "--reward", TRL_TRAINER: "reward_funcs"},
        "seed": {OWN_TRAINER: "--seed", TRL_TRAINER: "seed"},
        "training steps": {OWN_TRAINER: "--steps", TRL_TRAINER: "max_steps"},
        "updates per batch": {OWN_TRAINER: "--inner-updates", TRL_TRAINER: "num_iterations"},
    }
)
"""What a finding changes → its option in `scoregram train`, and its argument of `attach`, `GRPOConfig` or `GRPOTrainer`
in TRL."""

GENERATED_TASKS: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": "TERMS",
        "arithmetic-compositions": "TERMS",
        "calculator": "TERMS",
        "forecast": "",
        "reasoning-gym": "SETTING=VALUE",
        "stopping": "TURNS",
    }
)
"""Tasks that draw their problems → what can follow their name on the command line, as in `arithmetic:TERMS`."""

COUNTED_TASKS: Mapping[str, int] = MappingProxyType(
    {"arithmetic": 4, "arithmetic-compositions": 4, "calculator": 4, "stopping": 4}
)
"""Tasks made of terms or turns → how many their problems have unless the task says."""
COUNT_CHANGES: Mapping[str, int] = MappingProxyType({"harder": 1, "easier": -1})
"""Problems that are wanted → change of the number of terms or turns."""

NEXT_VALUES: Mapping[tuple[str, str], Callable[[Any], Any]] = MappingProxyType(
    {
        ("completion length", "up"): lambda limit: 2 * limit,
        ("learning rate", "down"): lambda rate: float(rate) / 2,
        ("updates per batch", "down"): lambda _: 1,
    }
)
"""What is changed, and where to → the next value to try, from the present one."""


def with_setting(finding: RunFinding, config: Mapping[str, Any]) -> RunFinding:
    """The finding, whose change says what to type in the trainer of the run, as far as that is known."""
    change = finding.change
    return (
        finding if change is None else replace(finding, change=replace(change, setting=typed_setting(change, config)))
    )


def typed_setting(change: Change, config: Mapping[str, Any]) -> str:
    """What to type for a change in the trainer of a run: `--max-new-tokens 400 (now 200)`, in TRL with `=`.

    Without the value where neither the finding nor the present value gives one; empty if there is no such setting, or
    the trainer is not known.
    """
    trainer = trainer_of(config)
    if change.knob == PROMPTS:
        return _prompt_setting(change.direction, config)
    name = SETTINGS.get(change.knob, {}).get(trainer, "")
    if not name:
        return ""
    present = _present_value(name, config)
    following = NEXT_VALUES.get((change.knob, change.direction))
    value = change.value
    if value is None and present and following is not None:
        value = following(present)
    return assigned(name, value) + (f" (now {present})" if present else "")


def _present_value(name: str, config: Mapping[str, Any]) -> Any:
    """The value that a setting has in a run; None if it is not stored."""
    if name == "reward_funcs":
        return ", ".join(map(str, config.get("reward_functions") or ())) or None
    return stored_setting(config, name.removeprefix("--").replace("-", "_"))


def assigned(name: str, value: Any) -> str:
    """`--option 4`, `field=4` or `attach(trainer, field="x")`; the name alone without a value.

    Example:
        >>> assigned("--group-size", 4), assigned("num_generations", 4), assigned("beta", None)
        ('--group-size 4', 'num_generations=4', 'beta')
        >>> assigned("attach(trainer, estimator)", "rloo")
        'attach(trainer, estimator="rloo")'
    """
    if value is None:
        return name
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name.endswith(")"):
        return f'{name[:-1]}="{text}")'
    return f"{name} {text}" if name.startswith("--") else f"{name}={text}"


def _prompt_setting(direction: str, config: Mapping[str, Any]) -> str:
    """Where other prompts come from; for a task of terms or turns, one more or one less of them."""
    if trainer_of(config) == TRL_TRAINER:
        return "train_dataset"
    task = str(config.get("task") or "")
    if trainer_of(config) != OWN_TRAINER or not task:
        return ""
    name, _, argument = task.partition(":")
    if name in COUNTED_TASKS and direction in COUNT_CHANGES:
        count = int(argument) if argument.isdecimal() else COUNTED_TASKS[name]
        return f"--task {name}:{max(2, count + COUNT_CHANGES[direction])} (now {name}:{count})"
    written = {**GENERATED_TASKS, "gsm8k": "FOLDER"}.get(name, "FILE" if name == "jsonl" else "")
    if name == "reasoning-gym":
        written = f"{argument.partition(':')[0]}:{written}"
    return f"--task {name}:{written} (now {task})" if written else f"--task (now {task})"


def draws_problems(config: Mapping[str, Any]) -> bool:
    """Whether the task of a run makes its problems as it goes, so that there is no list of prompts to shorten."""
    return trainer_of(config) == OWN_TRAINER and str(config.get("task") or "").partition(":")[0] in GENERATED_TASKS


def can_sample_dynamically(config: Mapping[str, Any]) -> bool:
    """Whether dynamic sampling is an option of the trainer that the run did not use."""
    return trainer_of(config) == OWN_TRAINER and config.get("method") != DYNAMIC_SAMPLING


def measuring_setting(config: Mapping[str, Any], every: int) -> str:
    """What to type to measure every so many steps; empty if it is unknown, or no more often than now."""
    present = stored_setting(config, "measure_every")
    names = {OWN_TRAINER: f"--measure-every {every}", TRL_TRAINER: f"attach(trainer, every={every})"}
    name = names.get(trainer_of(config), "")
    if not name or (isinstance(present, int) and 0 < present <= every):
        return ""
    return name + (f" (now {present})" if present else "")


def stored_setting(config: Mapping[str, Any], *keys: str) -> Any:
    """The first of some settings that the config has, or the trainer's arguments in it; None if neither has one."""
    stored = config.get("arguments")
    places = (config, stored if isinstance(stored, Mapping) else {})
    return next((one[key] for one in places for key in keys if one.get(key) is not None), None)


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
