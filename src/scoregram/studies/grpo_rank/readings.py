"""Readings of measured groups: the spectrum of each live group beside its null models, from the stored Gram alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from scoregram.checks import fail
from scoregram.reading import StoredGroup, shuffled_means, spectrum_columns
from scoregram.runs import FIXED_PROBE, BatchRecord, GroupRecord, Run, open_run
from scoregram.studies.grpo_rank import PAPER_SIZES
from scoregram.studies.grpo_rank.presets import PAPER_METHOD
from scoregram.studies.record import RUNS

TRAIN = "train"
TEST = "test"
GREEDY_ACCURACY, SAMPLED_ACCURACY = "eval/accuracy", "eval/sampled_accuracy"
"""Metrics of test accuracy."""


@dataclass(frozen=True)
class Trial:
    """One run of the replication, with its group size, seed and method."""

    name: str
    size: int
    seed: int
    method: str
    run: Run

    def metrics(self, name: str) -> tuple[list[int], list[float]]:
        """Steps that logged a scalar, and its values."""
        lines = [line for line in self.run.metrics() if name in line]
        return [int(line["step"]) for line in lines], [float(line[name]) for line in lines]


@dataclass(frozen=True)
class Reading:
    """One live group. Its numbers describe the stack of rows `A_i ψ_i`, with `A_i` the reward minus the group mean."""

    trial: Trial
    step: int
    kind: str
    prompt_id: str
    right: int
    """`k`: rollouts with a reward of at least 1."""
    deviation: float
    """`σ_r`: standard deviation of the group's rewards."""
    lengths: Tensor
    """`(R,)`. Completion tokens."""
    gram: Tensor
    advantages: Tensor
    by_layer: Mapping[str, Tensor]
    rank: float
    """Effective rank `(Σσ)²/Σσ²`."""
    numerical_rank: int
    top: float
    """Top-1 fraction."""
    shape: float
    """Effective rank of orthogonal scores of equal norms: that of `|A|` alone."""
    orthogonal: float
    """Effective rank of orthogonal scores with the measured norms."""
    orthogonal_top: float
    alike: float
    """Effective rank of scores with the measured norms, every pair at the measured mean cosine."""
    two_kinds: float
    """The same with three mean cosines: of two right rollouts, of two wrong ones, and of one of each."""
    shuffled: float
    """Mean effective rank over permutations of the advantages; `nan` where it was not computed."""
    shuffled_top: float
    cosine: float
    """Mean cosine over pairs of rollouts."""

    @property
    def length(self) -> float:
        """Mean completion tokens."""
        return float(self.lengths.double().mean())

    @property
    def is_binary(self) -> bool:
        """Whether the rewards take two values, one apart, so that `k` fixes `σ_r` and the shape of `|A|`."""
        two = len(set(self.advantages.tolist())) == 2
        return two and math.isclose(self.deviation, math.sqrt(self.right * (self.size - self.right)) / self.size)

    @property
    def size(self) -> int:
        """`R`."""
        return len(self.advantages)

    @property
    def cluster(self) -> tuple[str, str]:
        """All groups of one prompt in one run."""
        return self.trial.name, self.prompt_id

    @property
    def nest(self) -> tuple[int, tuple[str, str]]:
        """Units of the nested bootstrap: the seed, and inside it the cluster."""
        return self.trial.seed, self.cluster


@dataclass(frozen=True)
class Census:
    """Number of live groups of one run and kind at a step."""

    trial: Trial
    step: int
    kind: str
    alive: int
    groups: int
    deviation: float
    """Mean `σ_r` over all groups, dead groups included."""
    success: float
    """Share of rollouts with a reward of at least 1, over the same groups."""


@dataclass(frozen=True)
class Evidence:
    """All readings of a replication."""

    trials: tuple[Trial, ...]
    readings: tuple[Reading, ...]
    census: tuple[Census, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Group sizes trained with the paper's method."""
        return tuple(sorted({trial.size for trial in self.trials if trial.method == PAPER_METHOD}))

    @property
    def largest_paper_size(self) -> int:
        """Largest group size that is no larger than the paper's largest; 0 if there is none."""
        return max((size for size in self.sizes if size <= max(PAPER_SIZES)), default=0)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return tuple(sorted({trial.seed for trial in self.trials}))

    @property
    def accuracy(self) -> str:
        """Name of the accuracy metric: that of sampled rollouts if every run has it, else that of greedy ones."""
        has_samples = [any(SAMPLED_ACCURACY in line for line in trial.run.metrics()) for trial in self.trials]
        return SAMPLED_ACCURACY if has_samples and all(has_samples) else GREEDY_ACCURACY

    @property
    def decoding(self) -> str:
        """How the rollouts of that accuracy were decoded."""
        return "sampled as in training" if self.accuracy == SAMPLED_ACCURACY else "greedy"

    def of_paper(self, *, size: int | None = None) -> tuple[Trial, ...]:
        """Runs of the paper's method, of one group size or all."""
        return tuple(t for t in self.trials if t.method == PAPER_METHOD and size in (None, t.size))

    def live(self, *, size: int | None = None, kind: str = TRAIN, method: str = PAPER_METHOD) -> list[Reading]:
        """Live groups of the runs of one method."""
        return [
            r for r in self.readings if r.kind == kind and r.trial.method == method and size in (None, r.trial.size)
        ]

    def batches(self) -> Iterator[tuple[Trial, BatchRecord]]:
        """Whole batches of the paper's runs, one at a time: training batches, or probes if a run stores none."""
        for trial in self.of_paper():
            kind = TRAIN if trial.run.config.get("batches_every", 1) else FIXED_PROBE
            yield from ((trial, batch) for batch in trial.run.batches() if batch.kind == kind)


def read_evidence(folder: Path) -> Evidence:
    """Readings of all runs in `folder/runs`; an unfinished run contributes the steps it has written.

    Groups with a missing reward are left out.

    Raises:
        ScoregramError: If there is no run, or a folder in there is not a training run.
    """
    folders = sorted(path for path in (folder / RUNS).iterdir() if path.is_dir()) if (folder / RUNS).is_dir() else []
    if not folders:
        fail("read_evidence", f"{folder} must hold runs", "none", "Run scoregram replicate into it.")
    trials = tuple(trial_of(path) for path in folders)
    readings: list[Reading] = []
    census: list[Census] = []
    for trial in trials:
        counted: dict[tuple[int, str], list[tuple[bool, float, float]]] = {}
        live: list[GroupRecord] = []
        for group in trial.run.groups():
            if group.kind.startswith(TEST) or bool(group.rewards.isnan().any()):
                continue
            alive = StoredGroup(group).is_live
            deviation, success = float(group.rewards.std(correction=0)), float((group.rewards >= 1).double().mean())
            counted.setdefault((group.step, group.kind), []).append((alive, deviation, success))
            if alive and has_spectrum(group):
                live.append(group)
        readings += readings_of(trial, live)
        for (step, kind), seen in counted.items():
            alive, deviation, success = map(sum, zip(*seen, strict=True))
            census.append(Census(trial, step, kind, alive, len(seen), deviation / len(seen), success / len(seen)))
    return Evidence(trials, tuple(readings), tuple(census))


def trial_of(path: Path) -> Trial:
    """The run in a folder, with group size, seed and method from its config."""
    run = open_run(path)
    config: Mapping[str, Any] = run.config
    missing = [name for name in ("group_size", "seed", "method") if name not in config]
    if missing:
        fail("read_evidence", f"{path} must be a run of training", f"no {missing[0]} in its config", "Remove it.")
    return Trial(path.name, int(config["group_size"]), int(config["seed"]), str(config["method"]), run)


def has_spectrum(group: GroupRecord) -> bool:
    """Whether a group has a Gram and a rollout with a nonzero advantage and a nonzero score."""
    if group.gram is None:
        return False
    advantages = group.rewards - group.rewards.mean()
    return bool(((advantages != 0) & (group.gram.diagonal() > 0)).any())


def readings_of(trial: Trial, groups: Sequence[GroupRecord]) -> list[Reading]:
    """Readings of live groups of one run. Only training groups of the paper's method get the shuffled null."""
    if not groups:
        return []
    grams = [group.gram for group in groups if group.gram is not None]
    advantages = [group.rewards - group.rewards.mean() for group in groups]
    columns = spectrum_columns(grams, [group.rewards for group in groups])
    readings = []
    for place, (group, gram) in enumerate(zip(groups, grams, strict=True)):
        shuffled = shuffled_means(gram, advantages[place]) if is_shuffled(trial, group) else (math.nan, math.nan)
        readings.append(
            Reading(
                trial=trial,
                step=group.step,
                kind=group.kind,
                prompt_id=group.prompt_id,
                right=int((group.rewards >= 1).sum()),
                deviation=float(group.rewards.std(correction=0)),
                lengths=group.lengths,
                gram=gram,
                advantages=advantages[place],
                by_layer=group.by_layer,
                numerical_rank=int(columns["numerical_rank"][place]),
                shuffled=shuffled[0],
                shuffled_top=shuffled[1],
                **{name: values[place] for name, values in columns.items() if name != "numerical_rank"},
            )
        )
    return readings


def is_shuffled(trial: Trial, group: GroupRecord) -> bool:
    """Whether the shuffled null of a group is computed."""
    return group.kind == TRAIN and trial.method == PAPER_METHOD
