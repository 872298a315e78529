"""Settings of a comparison: methods with their options, seeds, and the settings that all runs share."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from scoregram.errors import ScoregramError, fail, lookup, spelling_remedy
from scoregram.training import METHODS, TrainConfig

EVALUATIONS_PER_RUN = 10
"""Evaluations and measured steps of a run by default, not counting the evaluation before the first step."""

OF_THE_COMPARISON = (
    *("out", "resume", "overwrite", "method", "seed", "steps", "rollouts", "every_rollouts"),
    *("measure_every", "eval_every", "eval_problems", "eval_samples", "lr_schedule", "task", "train_problems"),
    *("reward", "model", "prompt", "max_new_tokens", "max_turns", "threads", "keep_evidence"),
)
"""Settings that cannot be options of one method: the comparison sets them, or they must be equal for all runs."""

READERS: Mapping[Any, Callable[[str], Any]] = {
    bool: {"true": True, "false": False}.__getitem__,
    int: int,
    float: float,
    str: str,
}
"""Type of an option → the function that reads its value."""


@dataclass(frozen=True)
class MethodChoice:
    """A method with the options that apply to it alone."""

    label: str
    """As the user wrote it, such as `grpo:learning_rate=3e-4`."""
    method: str
    options: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9+.=_-]", "_", self.label)


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    """Train several methods on one task with the same number of rollouts, and compare their accuracies and updates.

    Each method and seed is an ordinary run folder under `OUT/runs`. After an interruption the same command continues:
    finished runs are kept, the others resumed. More methods, more seeds or a larger budget extend a comparison. The
    first method of a folder stays first.
    """

    methods: str = "grpo,dr-grpo,rloo"
    """Methods of `scoregram train`, separated by commas; the others are compared with the first. A method may have
    options of its own: `grpo,grpo:learning_rate=3e-4:beta=0.01`."""
    seeds: int = 3
    """Runs of each method. Seed S trains on the same problems from the same weights for every method."""
    jobs: int = 0
    """Runs at a time, one process each; they share the memory of a GPU. 0: one per core, but one on a GPU: how many fit
    into its memory depends on the completions and is not estimated. Give --jobs 2 or 3 if one run leaves room."""
    target: float | None = None
    """Accuracy (mean return, if rewards are not 0 or 1) for the column `rollouts to …`; that of the first method after
    its last step if not given. Write 0.8 for 80 %."""

    out: Path = Path("runs/compare")
    """Folder of the comparison."""
    rollouts: int = 20_000
    """Rollouts of each run, including those that a method samples on top of its batch. Training ends at the first step
    that reaches this number."""
    every_rollouts: int = 0
    """Measure and evaluate each time this many rollouts are sampled; 0 for the number that the folder already has, or a
    tenth of the budget."""
    credit_truth: Literal["none", "auto", "exact", "sampled"] = "auto"
    push: bool = True
    layers: Literal["float64", "float32", "none"] = "none"
    keep_prompts: bool = False
    keep_evidence: bool = True
    rollouts_every: int = 0
    keep_checkpoints: int = 1
    threads: int = 1
    """CPU threads of each run; 0 for all cores, and then one run at a time unless `jobs` is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rollouts", "seeds"):
            if getattr(self, name) < 1:
                fail(f"compare --{name}", "must be at least 1", getattr(self, name), "Choose a larger value.")
        if self.jobs < 0:
            fail("compare --jobs", "must be at least 0", self.jobs, "Leave it out for one per core.")
        if self.target is not None and not math.isfinite(self.target):
            fail("compare --target", "must be finite", self.target, "Leave it out for that of the first method.")
        if not self.keep_evidence:
            remedy = "Leave it out."
            fail("compare", "keep_evidence must be true: accuracies come from stored test rollouts", False, remedy)
        _ = self.choices

    @cached_property
    def choices(self) -> tuple[MethodChoice, ...]:
        """The methods, in the given order.

        Raises:
            ScoregramError: If a method or an option does not exist, or a method is given twice.
        """
        texts = [text.strip() for text in self.methods.split(",")]
        if not any(texts):
            fail("compare --methods", f"must name some of {', '.join(METHODS)}", repr(self.methods), "Separate by ,.")
        if not all(texts):
            remedy = "Leave out one comma, or name the missing method."
            fail("compare --methods", "must name a method between commas", repr(self.methods), remedy)
        chosen = tuple(map(method_choice, texts))
        runs = [replace(self.run_config(one, seed=0), out=self.out) for one in chosen]  # a default may be spelled out
        for (one, run), (other, same) in combinations(zip(chosen, runs, strict=True), 2):
            if run == same or one.folder == other.folder:
                got = f"{one.label} and {other.label}, which have the same settings"
                fail("compare --methods", "must name each method once", got, "Give one of them other options.")
        return chosen

    @property
    def evaluation_rollouts(self) -> int:
        """Rollouts between two evaluations."""
        return self.every_rollouts or max(1, self.rollouts // EVALUATIONS_PER_RUN)

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that every run of the comparison starts from, as plain values; a method's options come on top.

        Method, seed and whatever a resumed run may change are left out.
        """
        run = self.run_config(MethodChoice("", self.method, {}), seed=0)
        left_out = ("method", "seed", *run.may_differ())
        return {name: value for name, value in run.record().items() if name not in left_out}

    def run_config(self, choice: MethodChoice, seed: int) -> TrainConfig:
        """The config of the run of one method and seed."""
        shared = {field.name: getattr(self, field.name) for field in fields(TrainConfig)}
        own = {
            "method": choice.method,
            "seed": seed,
            "out": self.out / "runs" / choice.folder / f"seed-{seed}",
            "every_rollouts": self.evaluation_rollouts,
        }
        try:
            return TrainConfig(**shared | own | dict(choice.options))
        except ScoregramError as error:
            if not choice.options:
                raise
            raise ScoregramError(f"compare --methods {choice.label}: {error}") from None


def method_choice(text: str) -> MethodChoice:
    """A method and its options from `METHOD:OPTION=VALUE:…`.

    Example:
        >>> method_choice("grpo:learning_rate=3e-4:segments=even").options
        {'learning_rate': 0.0003, 'segments': 'even'}
    """
    name, colon, rest = text.partition(":")
    pairs = re.split(r":(?=[\w-]+=)", rest) if rest else []  # a value may have colons
    lookup(METHODS, name, kind="compare --methods")
    if colon and not rest:
        fail("compare --methods", "a colon must be followed by OPTION=VALUE", repr(text), f"Write {name}.")
    hints = get_type_hints(TrainConfig)
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.replace("-", "_")
        if equals and key in OF_THE_COMPARISON:
            requirement = f"{key} belongs to the whole comparison and must not be an option of {name}"
            fail("compare --methods", requirement, repr(pair), "Leave it out here.")
        if not equals or key not in hints:
            requirement = f"an option of {name} must be OPTION=VALUE with an option of scoregram train"
            remedy = spelling_remedy(key, hints) if equals else "Write for example grpo:learning_rate=3e-4."
            fail("compare --methods", requirement, repr(pair), remedy)
        if key in options:
            fail("compare --methods", f"an option of {name} must be given once", f"{key} twice", "Leave one out.")
        options[key] = option_value(f"{name}:{key}", hints[key], value)
    return MethodChoice(text, name, options)


def option_value(what: str, hint: Any, text: str) -> Any:
    """`text` as a value of the type `hint`, as the command line would read it.

    Example:
        >>> option_value("beta", float, "3e-4"), option_value("push", bool, "false"), option_value("b", int | None, "2")
        (0.0003, False, 2)
        >>> [option_value("group_size", int | Literal["auto"], text) for text in ("16", "auto")]
        [16, 'auto']
    """
    if get_origin(hint) in (Union, UnionType):
        kinds = [one for one in get_args(hint) if one is not type(None)]
        hint = next((one for one in kinds if get_origin(one) is Literal and text in get_args(one)), kinds[0])
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if text not in choices:
            requirement = f"{what} must be one of {', '.join(choices)}"
            fail("compare --methods", requirement, repr(text), spelling_remedy(text, choices))
        return text
    if hint not in READERS:
        fail("compare --methods", f"{what} must be the same for all methods", repr(text), "Give it as an option.")
    try:
        return READERS[hint](text)
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, hint.__name__)
        fail("compare --methods", f"{what} must be {kind}", repr(text), "Check the value.")
