"""The scalars of a run under one set of names, whichever trainer logged them."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np

from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Estimate
from scoregram.reading import logged_live_share, stored_setting

STEP_KEYS = ("step", "global_step", "train/global_step", "training/global_step", "trainer/global_step")
"""Keys of the training step, in the order in which they are looked for."""
RECORD_KEYS = ("_step", "Step")
"""Keys under which Weights & Biases counts its records; used where no record has a training step."""


@dataclass(frozen=True)
class Spelling:
    """How a trainer spells a scalar."""

    key: str
    """The name; with `*` for any text, the mean over all scalars with such a name."""
    trainer: str
    convert: Callable[[float], float] | None = None
    """From the trainer's number to ours; None if they are the same."""


def _complement(value: float) -> float:
    return 1 - value


def _negative(value: float) -> float:
    return -value


_OWN, _TRL, _VERL, _OPENRLHF = "scoregram", "TRL", "verl", "OpenRLHF"
SPELLINGS: Mapping[str, tuple[Spelling, ...]] = MappingProxyType(
    {
        "reward": (
            Spelling("reward", f"{_OWN}, {_TRL}, {_OPENRLHF}"),
            Spelling("critic/score/mean", _VERL),
            Spelling("critic/rewards/mean", _VERL),
            Spelling("objective/scores", "TRL PPO"),
        ),
        "reward_std": (Spelling("scoregram/reward_std", _OWN), Spelling("reward_std", f"{_OWN}, {_TRL}")),
        "reward_max": (Spelling("critic/score/max", _VERL), Spelling("critic/rewards/max", _VERL)),
        "reward_min": (Spelling("critic/score/min", _VERL), Spelling("critic/rewards/min", _VERL)),
        "dead_share": (Spelling("frac_reward_zero_std", _TRL),),
        "all_right": (Spelling("groups/all_right", _OWN),),
        "all_wrong": (Spelling("groups/all_wrong", _OWN),),
        "held_out": (
            Spelling("eval/accuracy", _OWN),
            Spelling("eval_reward", _TRL),
            Spelling("eval/reward", f"{_TRL} in trackers"),
            Spelling("val/test_score", _VERL),
            Spelling("val/test_score/*", f"{_VERL}, a scalar for each data source"),
            Spelling("val-core/*/mean@*", f"{_VERL}, a scalar for each data source"),
        ),
        "entropy": (
            Spelling("entropy", _TRL),
            Spelling("actor/entropy", _VERL),
            Spelling("actor/entropy_loss", _VERL),
            Spelling("token_log_prob", f"{_OWN}, the mean of -log π of sampled tokens", _negative),
        ),
        "kl": (
            Spelling("kl", f"{_OWN}, {_TRL}, {_OPENRLHF}"),
            Spelling("actor/kl_loss", _VERL),
        ),
        "clipped_tokens": (
            Spelling("clipped_tokens", _OWN),
            Spelling("clip_ratio/region_mean", _TRL),
            Spelling("actor/pg_clipfrac", _VERL),
            Spelling("actor_clip_ratio", _OPENRLHF),
        ),
        "length": (
            Spelling("completions/mean_length", _TRL),
            Spelling("response_length/mean", _VERL),
            Spelling("response_length", _OPENRLHF),
            Spelling("length", _OWN),
        ),
        "truncated": (
            Spelling("completions/clipped_ratio", _TRL),
            Spelling("response_length/clip_ratio", _VERL),
            Spelling("truncated_rate", _OPENRLHF),
            Spelling("finished", _OWN, _complement),
        ),
        "truncated_reward": (Spelling("truncated_reward", f"{_OWN}, from stored rollouts"),),
        "finished_reward": (Spelling("finished_reward", f"{_OWN}, from stored rollouts"),),
        "repetition": (Spelling("repetition", _OWN),),
        "grad_norm": (Spelling("grad_norm", f"{_OWN}, {_TRL}"), Spelling("actor/grad_norm", _VERL)),
        "loss": (
            Spelling("loss", f"{_OWN}, {_TRL}"),
            Spelling("actor/pg_loss", _VERL),
            Spelling("policy_loss", _OPENRLHF),
        ),
        "learning_rate": (
            Spelling("learning_rate", f"{_OWN}, {_TRL}"),
            Spelling("actor/lr", _VERL),
            Spelling("actor_lr", _OPENRLHF),
        ),
        "tokens_per_second": (Spelling("time/tokens_per_second", _OWN), Spelling("perf/throughput", _VERL)),
        "step_seconds": (
            Spelling("step_time", _TRL),
            Spelling("timing_s/step", _VERL),
            Spelling("perf/time_per_step", _VERL),
            Spelling("time/step", _OWN),
        ),
    }
)
"""Our name of a scalar → how trainers spell it; the first spelling that a log has is used.

Sources: TRL 1.16 `GRPOTrainer` (the keys of its `log_history`), verl `trainer/ppo/metric_utils.py` and its actor
workers, OpenRLHF's PPO trainer, and scoregram's own `metrics.jsonl`. Prefixes `train/` and `train_` are ignored.
"""

_PART_ENDS = ("/mean", "/std")
"""TRL logs `rewards/FUNCTION/mean` and `…/std` for each reward function."""


@dataclass(frozen=True, eq=False)
class ScalarSeries:
    """A scalar over steps, defined values only."""

    steps: np.ndarray
    values: np.ndarray
    last_steps: range = range(0)
    """The last third of the run, so that all scalars are averaged over the same steps; empty if not known."""

    def __len__(self) -> int:
        return len(self.values)

    def _third(self) -> int:
        return math.ceil(len(self) / 3)

    @property
    def first(self) -> np.ndarray:
        """Values of the first third."""
        return self.values[: self._third()]

    @property
    def last(self) -> np.ndarray:
        """Values of the run's last third; the last third of the values if that has none or is not known."""
        within = (self.steps >= self.last_steps.start) & (self.steps < self.last_steps.stop)
        return self.values[within] if within.any() else self.values[-self._third() :]

    @property
    def start(self) -> float:
        """Median of the first tenth, at least three values."""
        return float(np.median(self.values[: max(3, len(self) // 10)]))

    @property
    def end(self) -> float:
        """Median of the last tenth, at least three values."""
        return float(np.median(self.values[-max(3, len(self) // 10) :]))

    def last_mean(self) -> Estimate:
        """Mean of the last third with its interval over steps."""
        return mean_estimate(self.last)

    def by_step(self) -> dict[int, float]:
        """Step → value."""
        return dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))

    def since(self, holds: np.ndarray) -> int:
        """First step from which on `holds` is true for most of the rest: at the start of the longest such tail.

        Args:
            holds: One boolean for each value. Where it is false up to the last third, the onset lies in that third: at
                the largest excess of true over false values in what follows, the first of several; at the start of the
                third if nothing has an excess.
        """
        head = len(self) - self._third()
        wrong = np.flatnonzero(~holds[:head])
        # a single value on the other side does not reset the onset
        runs = wrong[np.isin(wrong + 1, wrong) | np.isin(wrong - 1, wrong) | (wrong == 0)]
        place = int(runs[-1]) + 1 if len(runs) else 0
        if place == head and place < len(self):
            excess = np.cumsum(np.where(holds[head:], 1, -1)[::-1])[::-1]
            place += int(excess.argmax()) if excess.max() > 0 else 0
        return int(self.steps[min(place, len(self) - 1)])


@dataclass(frozen=True, eq=False)
class RunLog:
    """The scalars of a run, by our names and as logged."""

    source: str
    lines: tuple[Mapping[str, Any], ...]
    """One mapping per logged step, with `step`, under the trainer's own names."""
    config: Mapping[str, Any] = field(default_factory=dict)
    last_steps: range = range(0)
    """The last third of the run; empty if only the log is known."""
    remarks: tuple[str, ...] = ()
    """What of the log could not be read, a sentence each."""
    _cache: dict[str, ScalarSeries] = field(default_factory=dict, repr=False)

    def series(self, name: str) -> ScalarSeries:
        """A scalar by our name; empty if the log does not have it."""
        if name not in self._cache:
            self._cache[name] = self._found(name)
        return self._cache[name]

    def has(self, *names: str, least: int) -> bool:
        """Whether every scalar has at least so many values."""
        return all(len(self.series(name)) >= least for name in names)

    def raw(self, key: str, convert: Callable[[float], float] | None = None) -> ScalarSeries:
        """A scalar by the trainer's own name; undefined values are left out."""
        pairs = [(line["step"], float(line[key])) for line in self.lines if _is_number(line.get(key))]
        values = [value if convert is None else convert(value) for _, value in pairs]
        return self._series([step for step, _ in pairs], values)

    def bad_steps(self, *names: str) -> list[int]:
        """Steps at which one of these scalars was logged as NaN or infinite; null and other text are missing values."""
        keys = {spelling.key for name in names for spelling in SPELLINGS[name]}
        return [int(line["step"]) for line in self.lines if any(_is_not_finite(line.get(key)) for key in keys)]

    def infinite_steps(self, name: str) -> list[int]:
        """Those of `bad_steps` whose value is infinite and not NaN."""
        keys = {spelling.key for spelling in SPELLINGS[name]}
        return [int(line["step"]) for line in self.lines if any(_is_infinite(line.get(key)) for key in keys)]

    def reward_parts(self) -> dict[str, tuple[ScalarSeries, ScalarSeries]]:
        """Name of a reward function → its mean and its standard deviation over steps."""
        keys = {key for line in self.lines for key in line if key.startswith("rewards/") and key.endswith(_PART_ENDS)}
        names = sorted({key.removeprefix("rewards/").rpartition("/")[0] for key in keys})
        return {name: (self.raw(f"rewards/{name}/mean"), self.raw(f"rewards/{name}/std")) for name in names}

    @property
    def is_of_verl(self) -> bool:
        """Whether verl wrote the log: no other trainer names scalars so."""
        return any(key.startswith(("actor/", "critic/")) for line in self.lines for key in line)

    def columns(self) -> list[str]:
        """Names of all scalars of the log, without the step."""
        return sorted({key for line in self.lines for key, value in line.items() if _is_number(value)} - {"step"})

    def setting(self, *names: str) -> Any:
        """The first of these settings that the config or the arguments in it have, as `stored_setting`; else None."""
        return stored_setting(self.config, *names)

    def _found(self, name: str) -> ScalarSeries:
        if name == "dead_share" and any("live_groups" in line for line in self.lines):
            return self._own_dead_share()
        for spelling in SPELLINGS[name]:
            found = self._mean_of(spelling) if "*" in spelling.key else self.raw(spelling.key, spelling.convert)
            if len(found):
                return found
        return self._series([], [])

    def _mean_of(self, spelling: Spelling) -> ScalarSeries:
        """Mean over all scalars whose names match, at the steps that have every one of them."""
        keys = sorted({key for line in self.lines for key in line if fnmatchcase(key, spelling.key)})
        lines = [line for line in self.lines if keys and all(_is_number(line.get(key)) for key in keys)]
        means = [sum(float(line[key]) for key in keys) / len(keys) for line in lines]
        values = means if spelling.convert is None else list(map(spelling.convert, means))
        return self._series([line["step"] for line in lines], values)

    def _own_dead_share(self) -> ScalarSeries:
        pairs = [
            (line["step"], 1.0 - logged_live_share(line))
            for line in self.lines
            if _is_number(line.get("live_groups")) and not math.isnan(logged_live_share(line))
        ]
        return self._series([step for step, _ in pairs], [share for _, share in pairs])

    def _series(self, steps: Sequence[int], values: Sequence[float]) -> ScalarSeries:
        return ScalarSeries(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64), self.last_steps)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and bool(abs(value) <= sys.float_info.max)  # NumPy compares to a bool of its own


_NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
"""How JSON without numbers for them spells NaN and the infinities, in lower case."""


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in _NOT_FINITE
    return isinstance(value, float) and not math.isfinite(value)


def _is_infinite(value: Any) -> bool:
    text = value.strip().lower() if isinstance(value, str) else ""
    return text in _NOT_FINITE - {"nan"} or (isinstance(value, float) and math.isinf(value))


SHOWN_COLUMNS = 12
"""How many columns of a log a message lists."""


def listed_columns(names: Sequence[str]) -> str:
    """The first `SHOWN_COLUMNS` names in one line."""
    return ", ".join(names[:SHOWN_COLUMNS]) + ", …" * (len(names) > SHOWN_COLUMNS)


def is_known_column(name: str) -> bool:
    """Whether some rule reads a scalar of this name."""
    spelled = (spelling.key for spellings in SPELLINGS.values() for spelling in spellings)
    own = name in ("live_groups", "groups", "skipped")
    return own or name.startswith("rewards/") or any(fnmatchcase(name, key) for key in spelled)


def closest_column(name: str) -> str:
    """The known name that an unknown one resembles most, letters and digits compared; empty if none is close.

    Example:
        >>> closest_column("GradNorm"), closest_column("Reward Mean"), closest_column("x")
        ('grad_norm', 'reward', '')
    """
    known: dict[str, str] = {}
    for spellings in SPELLINGS.values():
        for spelling in spellings:
            if "*" not in spelling.key:
                known.setdefault(_letters(spelling.key), spelling.key)
    found = get_close_matches(_letters(name), known, n=1, cutoff=0.7)
    return known[found[0]] if found else ""


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def run_log(
    source: str,
    lines: Iterable[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    last_steps: range = range(0),
) -> RunLog:
    """A log from mappings of scalars: steps in order, lines of one step merged, prefixes of trackers removed.

    Records of Weights & Biases are counted on another scale than training steps. If some lines have a training step, a
    record without one belongs to the step before it.
    """
    merged: dict[int, dict[str, Any]] = {}
    for step, line in _with_steps(list(lines)):
        if step is not None:
            known = {_bare(key): value for key, value in line.items() if key not in (*STEP_KEYS, *RECORD_KEYS)}
            merged.setdefault(step, {"step": step}).update(known)
    return RunLog(source, tuple(merged[step] for step in sorted(merged)), config or {}, last_steps)


def _with_steps(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    """Each line with its step, None if it has none."""
    trained = [_step_of(line, STEP_KEYS) for line in lines]
    has_steps, before = any(step is not None for step in trained), None
    for step, line in zip(trained, lines, strict=True):
        before = before if step is None else step
        record = _step_of(line, RECORD_KEYS)
        yield (step if record is None or step is not None else before if has_steps else record), line


def _bare(key: str) -> str:
    if key in ("train_loss", "train_runtime"):  # the summary of transformers at the end of a run, not of its last step
        return key
    for prefix in ("train/", "train_", "training/"):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key


def _step_of(line: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    for key in keys:
        value = line.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:  # an int64
            return int(value)
    return None
