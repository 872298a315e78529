"""Several runs side by side: runs that differ in their seed alone form a set, and sets are compared."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from scoregram.bootstrap import difference, t_mean
from scoregram.exhibits import Estimate
from scoregram.reading.curves import Curve
from scoregram.reading.indicators import learning_indicator
from scoregram.reading.run import UNKNOWN_ESTIMATE, RunReading

NOT_SETTINGS = frozenset(
    {"out", "seed", "resume", "overwrite", "report_to", "device", "checkpoint_every", "keep_checkpoints"}
)
"""Options that do not make two runs different experiments."""


TELLING = ("method", "estimator", "objective", "group_size", "batch_size", "learning_rate", "model", "task")
"""Settings by which sets of runs are named, the first choice first."""


@dataclass(frozen=True, eq=False)
class RunSet:
    """Runs of the same settings."""

    name: str
    runs: tuple[RunReading, ...]

    @property
    def seeds(self) -> int:
        """Runs in the set."""
        return len(self.runs)

    @property
    def mark(self) -> str:
        """Suffix for every number from the Grams of the set: what is in doubt, or left out, in how many of its runs."""
        kinds = {
            "approximate": [run.trust.is_approximate for run in self.runs],
            "model in doubt": ["model" in run.trust.remarks for run in self.runs],
            "withheld after a failed self-check": [run.is_withheld for run in self.runs],
            "without steps whose self-check failed": [
                bool(run.trust.failed) and not run.is_withheld for run in self.runs
            ],
        }
        words = [_share_of_runs(kind, holds) for kind, holds in kinds.items() if any(holds)]
        return f" ({'; '.join(words)})" if words else ""


def _share_of_runs(word: str, holds: Sequence[bool]) -> str:
    """The word, and for how many runs it holds if not for all."""
    return word if all(holds) else f"{word}: {sum(holds)} of {len(holds)} runs"


def run_sets(runs: Mapping[str, RunReading]) -> list[RunSet]:
    """Runs grouped by their settings without the seed, in the order given.

    A set is named by the setting, or the two settings, that tell the sets apart, else by its first run.

    Args:
        runs: Name → run.
    """
    settings = {name: _settings(run) for name, run in runs.items()}
    grouped: dict[str, list[str]] = {}
    for name in runs:
        grouped.setdefault(repr(sorted(settings[name].items())), []).append(name)
    sets = list(grouped.values())
    firsts = [settings[names[0]] for names in sets]
    labels = _set_names(firsts) or [names[0] for names in sets]
    return [RunSet(label, tuple(runs[name] for name in names)) for label, names in zip(labels, sets, strict=True)]


def _set_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """One name for each of several settings; empty if no two of them tell all apart."""
    keys = sorted({key for setting in settings for key in setting}, key=lambda key: (_telling(key), key))
    unlike = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    for chosen in (*((key,) for key in unlike), *combinations(unlike, 2)):
        names = [", ".join(f"{key} {setting.get(key)}" for key in chosen) for setting in settings]
        if len(set(names)) == len(settings):
            return names
    return []


def _telling(key: str) -> int:
    return TELLING.index(key) if key in TELLING else len(TELLING)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Mean of the running means of several seeds, at the steps that all of them have.

    The band is a t interval over seeds. One curve is returned as it is: its band is over steps.
    """
    curves = [curve for curve in curves if curve]
    if len(curves) < 2:
        return curves[0] if curves else Curve((), (), (), (), ())
    known = [dict(zip(curve.steps, curve.mean, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in known)))
    made = [t_mean([one[step] for one in known]) for step in steps]
    columns = ([getattr(one, name) for one in made] for name in ("value", "value", "low", "high"))
    return Curve(tuple(steps), *(tuple(column) for column in columns), window=1)


FROM_GRAM = frozenset(
    {
        "noise scale, in rollouts",
        "signal to noise of a step",
        "effective rank minus its null",
        "cosine between rollouts",
        "variance saved by optimal-loo",
    }
)
"""Names of `quantities` that come from Grams."""


def quantities(run: RunReading) -> dict[str, Estimate]:
    """The numbers by which runs are compared, of the last third; `nan` where unknown."""
    summary = run.summary
    dead = summary.dead
    tile = learning_indicator(run)
    return {
        "reward": summary.reward,
        "test accuracy, last": tested[-1].accuracy if (tested := run.greedy_accuracies) else UNKNOWN_ESTIMATE,
        "gain": tile.change,
        "share of live groups": Estimate(1 - dead.value, 1 - dead.high, 1 - dead.low),
        "noise scale, in rollouts": summary.noise_scale,
        "signal to noise of a step": summary.snr,
        "effective rank minus its null": summary.rank_difference,
        "cosine between rollouts": summary.cosine,
        "variance saved by optimal-loo": summary.baseline_saving,
    }


@dataclass(frozen=True)
class QuantityRow:
    """One quantity in every set, and how each set differs from the first."""

    name: str
    values: tuple[Estimate, ...]
    differences: tuple[Estimate, ...]
    """Of every set but the first, minus the first."""


def compared_quantities(sets: Sequence[RunSet]) -> list[QuantityRow]:
    """Every quantity that some set knows.

    With two or more seeds the value is the mean over seeds with its t interval, otherwise that of the run, whose
    interval is over its groups or steps and does not include the spread between seeds.
    """
    tables = [[quantities(run) for run in one.runs] for one in sets]
    rows = []
    for name in tables[0][0] if tables else ():
        values = tuple(_over_seeds([table[name] for table in several]) for several in tables)
        if any(math.isfinite(value.value) for value in values):
            rows.append(QuantityRow(name, values, tuple(difference(value, values[0]) for value in values[1:])))
    return rows


def _over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    if len(estimates) == 1:
        return estimates[0]
    return t_mean(np.array([one.value for one in estimates if math.isfinite(one.value)], dtype=np.float64))


def _settings(run: RunReading) -> dict[str, Any]:
    """The settings of a run; the number of its seed inside a text, as in `start/seed1`, is left out."""
    mark = re.compile(rf"(seed[-_=]?){re.escape(str(run.config.get('seed')))}(?!\d)")
    return {
        name: mark.sub(r"\1*", value) if isinstance(value, str) else value
        for name, value in run.config.items()
        if name not in NOT_SETTINGS
    }
