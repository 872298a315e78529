"""What to type for a change, in the words of the trainer that made the run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scoregram.advice.findings import Change, RunFinding
from scoregram.reading import OWN_TRAINER, TRL_TRAINER, stored_setting, trainer_of
from scoregram.tasks import TASKS, CountedParts

PROMPTS = "difficulty of prompts"
"""What a finding about prompts changes."""
DYNAMIC_SAMPLING = "dapo"
"""The method of `scoregram train` that samples prompts until enough groups are live."""

SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "batch size": {OWN_TRAINER: "--batch-size", TRL_TRAINER: "per_device_train_batch_size"},
        "completion length": {OWN_TRAINER: "--max-new-tokens", TRL_TRAINER: "max_completion_length"},
        "estimator": {OWN_TRAINER: "--estimator", TRL_TRAINER: "attach(trainer, estimator)"},
        "exploration": {OWN_TRAINER: "--temperature", TRL_TRAINER: "temperature"},
        "gradient clipping": {OWN_TRAINER: "--max-grad-norm", TRL_TRAINER: "max_grad_norm"},
        "group size": {OWN_TRAINER: "--group-size", TRL_TRAINER: "num_generations"},
        "group size over the run": {OWN_TRAINER: "--group-size"},
        "learning rate": {OWN_TRAINER: "--learning-rate", TRL_TRAINER: "learning_rate"},
        "training steps": {OWN_TRAINER: "--steps", TRL_TRAINER: "max_steps"},
        "updates per batch": {OWN_TRAINER: "--inner-updates", TRL_TRAINER: "num_iterations"},
    }
)
"""What a finding changes → its option in `scoregram train`, and its argument of `attach` or `GRPOConfig` in TRL. A
reward function, a data loader or a seed is not among them: no other value of a setting repairs it."""

COUNT_CHANGES: Mapping[str, int] = MappingProxyType({"harder": 1, "easier": -1})
"""Problems that are wanted → change of the number of terms or turns."""

NEXT_VALUES: Mapping[tuple[str, str], Callable[[Any], Any]] = MappingProxyType(
    {
        ("completion length", "up"): lambda limit: 2 * limit,
        ("completion length", "down"): lambda limit: max(1, limit // 2),
        ("exploration", "up"): lambda temperature: round(1.2 * float(temperature), 2),
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

    Empty if no setting alone makes the change (then it has steps), if neither the finding nor the present value gives
    a value to type, or if the trainer is not known.
    """
    if change.steps:
        return ""
    if change.knob == PROMPTS:
        return _prompt_setting(change.direction, config)
    name = SETTINGS.get(change.knob, {}).get(trainer_of(config), "")
    present = stored_setting(config, name.removeprefix("--").replace("-", "_")) if name else None
    following = NEXT_VALUES.get((change.knob, change.direction))
    value = change.value
    if value is None and present and following is not None:
        value = following(present)
    if not name or value is None:
        return ""
    if name == "per_device_train_batch_size":
        value = _device_batch(int(value), config)
    return typed_option(name, value) + (f" (now {present})" if present and present != -1 else "")  # -1: not set


def _device_batch(rollouts: int, config: Mapping[str, Any]) -> int:
    """TRL's rollouts per device and pass for a number of rollouts per step; whole groups."""
    passes = int(stored_setting(config, "gradient_accumulation_steps") or 1) * int(config.get("processes") or 1)
    size = int(stored_setting(config, "num_generations", "group_size") or 1)
    return size * max(1, round(rollouts / passes / size))


def typed_option(name: str, value: Any) -> str:
    """`--option 4`, `field=4` or `attach(trainer, field="x")`.

    Example:
        >>> typed_option("--group-size", 4), typed_option("num_generations", 4)
        ('--group-size 4', 'num_generations=4')
        >>> typed_option("attach(trainer, estimator)", "rloo")
        'attach(trainer, estimator="rloo")'
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name.endswith(")"):
        return f'{name[:-1]}="{text}")'
    return f"{name} {text}" if name.startswith("--") else f"{name}={text}"


def _prompt_setting(direction: str, config: Mapping[str, Any]) -> str:
    """One more or one less of the terms or turns of a task; empty for any other task."""
    task = str(config.get("task") or "")
    if trainer_of(config) != OWN_TRAINER or not task:
        return ""
    wanted, name = changed_count(direction, task), task.partition(":")[0]
    return "" if wanted is None else f"--task {name}:{wanted} (now {name}:{wanted - COUNT_CHANGES[direction]})"


def changed_count(direction: str, task: str) -> int | None:
    """Terms or turns of easier or harder problems of a task; None if it has no such number, or does not allow it.

    Example:
        >>> [changed_count("harder", task) for task in ("arithmetic", "calculator:5", "gsm8k")]
        [5, None, None]
    """
    argument, parts = task.partition(":")[2], counted_parts(task)
    if parts is None or direction not in COUNT_CHANGES:
        return None
    wanted = (int(argument) if argument.isdecimal() else parts.usual) + COUNT_CHANGES[direction]
    return wanted if parts.fewest <= wanted <= parts.most else None


def counted_parts(task: str) -> CountedParts | None:
    """What a task's problems have more or fewer of; None for tasks without such a number, and unknown ones."""
    row = TASKS.get(task.partition(":")[0])
    return None if row is None else row.parts


def count_words(direction: str, task: str) -> str:
    """`, with 5 terms in place of 4`, for easier or harder problems of a task; empty if it has no such number.

    Example:
        >>> count_words("harder", "arithmetic")
        ', with 5 terms in place of 4'
    """
    wanted, parts = changed_count(direction, task), counted_parts(task)
    if wanted is None or parts is None:
        return ""
    return f", with {wanted} {parts.unit} in place of {wanted - COUNT_CHANGES[direction]}"


def reward_steps(config: Mapping[str, Any], *repairs: str, also: str = "") -> tuple[str, ...]:
    """How to repair a reward function: what is passed now, the repairs, and how to use the result.

    A reward function is code, so no setting has a value to type for it. `also` is a setting that changes with it.
    """
    changed = f"{also}, and no other change" if also else "no other change"
    trainer = trainer_of(config)
    if trainer == TRL_TRAINER:
        names = ", ".join(map(str, config.get("reward_functions") or ())) or "your reward function"
        where = f"Edit the code of `{names}`, which you pass as `reward_funcs`."
        return (where, *repairs, f"Run the script again from the beginning with {changed}.")
    if trainer == OWN_TRAINER:
        given = config.get("reward")
        where = f"Edit the code of `{given}`."
        if not given:
            where = "The reward is that of the task. Write your own as `my_rewards.py` with "
            where += "`def reward(prompts, completions, **columns): return [… for text in completions]`."
        used = f"Train again with `--reward {given or 'my_rewards:reward'}`, {changed}."
        return (where, *repairs, used if also else used.replace(", no other", " and no other"))
    return ("Edit the code of the reward function.", *repairs, f"Train again with {changed}.")


def task_name(config: Mapping[str, Any]) -> str:
    """Name of the task of a run, without its argument; empty if the config has none."""
    return str(config.get("task") or "").partition(":")[0]


def draws_problems(config: Mapping[str, Any]) -> bool:
    """Whether the task of a run makes its problems as it goes."""
    row = TASKS.get(task_name(config))
    return trainer_of(config) == OWN_TRAINER and row is not None and row.is_generated


def has_prompt_list(config: Mapping[str, Any]) -> bool:
    """Whether the prompts of a run are a list that can be shortened: files of its task, or a data set of its user."""
    return trainer_of(config) != OWN_TRAINER or not (draws_problems(config) or task_name(config) == "python")


def can_sample_dynamically(config: Mapping[str, Any]) -> bool:
    """Whether dynamic sampling is an option of the trainer that the run did not use."""
    return trainer_of(config) == OWN_TRAINER and config.get("method") != DYNAMIC_SAMPLING


def measuring_setting(config: Mapping[str, Any], every: int) -> str:
    """What to type to measure every so many steps; empty if it is unknown, or no more often than now.

    A run that measures by rollouts ignores `--measure-every`; its steps have at least the rollouts of a batch.
    """
    present = stored_setting(config, "measure_every")
    names = {OWN_TRAINER: f"--measure-every {every}", TRL_TRAINER: f"attach(trainer, every={every})"}
    name, batch, by_rollouts = names.get(trainer_of(config), ""), config.get("batch_size"), config.get("every_rollouts")
    if trainer_of(config) == OWN_TRAINER and by_rollouts and isinstance(batch, int):
        every, present = every * batch, by_rollouts
        name = f"--every-rollouts {every}"
    if not name or (isinstance(present, int) and 0 < present <= every):
        return ""
    return name + (f" (now {present})" if present else "")
