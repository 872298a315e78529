"""Every measured group of a replication as one row: its spectrum beside its null models, from the stored Gram alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.replication.presets import METHOD, RUNS
from scoregram.runs import BatchRecord, GroupRecord, Run, open_run
from scoregram.spectra import (
    MEASURED_RTOL,
    effective_rank,
    mean_pairwise_cosine,
    numerical_rank,
    shuffled_null,
    singular_values,
    top1_fraction,
)
from scoregram.training import FIXED

TRAIN = "train"
TEST = "test"
GREEDY, SAMPLED = "eval/accuracy", "eval/sampled_accuracy"
"""Metrics of test accuracy."""
SHUFFLES = 200
"""Permutations drawn for groups with too many distinct ones to list."""


@dataclass(frozen=True)
class Trial:
    """One run of the replication, with what it was."""

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
    """One group whose rewards differ; numbers are of its stack of rows `A_i ψ_i`, `A` centred by the group's mean."""

    trial: Trial
    step: int
    kind: str
    prompt_id: str
    right: int
    """`k`: rollouts with the full reward."""
    deviation: float
    """`σ_r` of the group."""
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
    """Effective rank of orthogonal scores of equal norms: what `|A|` alone gives."""
    orthogonal: float
    """Of orthogonal scores with the measured norms."""
    orthogonal_top: float
    alike: float
    """Of scores with the measured norms and the measured mean cosine between all of them."""
    two_kinds: float
    """Of scores with the measured norms and mean cosines among right, among wrong, and between right and wrong ones."""
    shuffled: float
    """Mean over reassignments of the advantages; `nan` where it was not asked for."""
    shuffled_top: float
    cosine: float
    """Mean over pairs of rollouts."""

    @property
    def length(self) -> float:
        """Mean completion tokens."""
        return float(self.lengths.double().mean())

    @property
    def is_binary(self) -> bool:
        """Whether rewards are right or wrong, one apart, so that `k` fixes `σ_r` and the shape of `|A|`."""
        two = len(set(self.advantages.tolist())) == 2
        return two and math.isclose(self.deviation, math.sqrt(self.right * (self.size - self.right)) / self.size)

    @property
    def size(self) -> int:
        """`R`."""
        return len(self.advantages)

    @property
    def cluster(self) -> tuple[str, str]:
        """What belongs together when prompts are resampled."""
        return self.trial.name, self.prompt_id


@dataclass(frozen=True)
class Census:
    """How many groups of one run and kind were alive at a step."""

    trial: Trial
    step: int
    kind: str
    alive: int
    groups: int
    deviation: float
    """Mean `σ_r` over all groups, dead ones included."""


@dataclass(frozen=True)
class Evidence:
    """All that was measured, read once."""

    trials: tuple[Trial, ...]
    readings: tuple[Reading, ...]
    census: tuple[Census, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Group sizes trained with the paper's method."""
        return tuple(sorted({trial.size for trial in self.trials if trial.method == METHOD}))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return tuple(sorted({trial.seed for trial in self.trials}))

    @property
    def accuracy(self) -> str:
        """Metric that stands for accuracy: of sampled rollouts where every run has them, else of greedy ones."""
        has_samples = [any(SAMPLED in line for line in trial.run.metrics()) for trial in self.trials]
        return SAMPLED if has_samples and all(has_samples) else GREEDY

    @property
    def decoding(self) -> str:
        """How the rollouts of that accuracy were decoded."""
        return "sampled as in training" if self.accuracy == SAMPLED else "greedy"

    def of_paper(self, *, size: int | None = None) -> tuple[Trial, ...]:
        """Runs of the paper's method, of one group size or all."""
        return tuple(t for t in self.trials if t.method == METHOD and size in (None, t.size))

    def live(self, *, size: int | None = None, kind: str = TRAIN, method: str = METHOD) -> list[Reading]:
        """Groups whose rewards differ, of the runs of one method."""
        return [
            r for r in self.readings if r.kind == kind and r.trial.method == method and size in (None, r.trial.size)
        ]

    def batches(self) -> Iterator[tuple[Trial, BatchRecord]]:
        """Whole batches of the paper's runs, one at a time: those trained on, or, of a run that stores none, probes."""
        for trial in self.of_paper():
            kind = TRAIN if trial.run.config.get("batches_every", 1) else FIXED
            yield from ((trial, batch) for batch in trial.run.batches() if batch.kind == kind)


def read_evidence(folder: Path) -> Evidence:
    """Everything in `folder/runs`; a run that is still being written counts with what is there.

    Groups with a rollout that nobody judged are left out.

    Raises:
        ScoregramError: If there is no run, or something in there is not a run of training.
    """
    folders = sorted(path for path in (folder / RUNS).iterdir() if path.is_dir()) if (folder / RUNS).is_dir() else []
    if not folders:
        fail("read_evidence", f"{folder} must hold runs", "none", "Run scoregram replicate into it.")
    trials = tuple(trial_of(path) for path in folders)
    readings: list[Reading] = []
    census: list[Census] = []
    for trial in trials:
        counted: dict[tuple[int, str], list[tuple[bool, float]]] = {}
        live: list[GroupRecord] = []
        for group in trial.run.groups():
            if group.kind.startswith(TEST) or bool(group.rewards.isnan().any()):
                continue
            alive = bool(group.rewards.max() > group.rewards.min())
            counted.setdefault((group.step, group.kind), []).append((alive, float(group.rewards.std(correction=0))))
            if alive and has_spectrum(group):
                live.append(group)
        readings += readings_of(trial, live)
        census += [
            Census(trial, step, kind, sum(a for a, _ in seen), len(seen), sum(d for _, d in seen) / len(seen))
            for (step, kind), seen in counted.items()
        ]
    return Evidence(trials, tuple(readings), tuple(census))


def trial_of(path: Path) -> Trial:
    """One run by its config."""
    run = open_run(path)
    config: Mapping[str, Any] = run.config
    missing = [name for name in ("group_size", "seed", "method") if name not in config]
    if missing:
        fail("read_evidence", f"{path} must be a run of training", f"no {missing[0]} in its config", "Remove it.")
    return Trial(path.name, int(config["group_size"]), int(config["seed"]), str(config["method"]), run)


def has_spectrum(group: GroupRecord) -> bool:
    """Whether a group was measured and some rollout of it pulls at something."""
    if group.gram is None:
        return False
    advantages = group.rewards - group.rewards.mean()
    return bool(((advantages != 0) & (group.gram.diagonal() > 0)).any())


def readings_of(trial: Trial, groups: Sequence[GroupRecord]) -> list[Reading]:
    """The rows of live groups of one run. Shuffles are taken for training groups of the paper's method alone."""
    if not groups:
        return []
    grams = [group.gram for group in groups if group.gram is not None]
    advantages = [group.rewards - group.rewards.mean() for group in groups]
    measured = stacked_spectra(grams, advantages)
    ranks, tops, directions = effective_rank(measured), top1_fraction(measured), numerical_rank(measured)
    rows = torch.stack(advantages).abs()
    orthogonal = (rows * torch.stack([gram.diagonal() for gram in grams]).sqrt()).sort(descending=True).values
    kinds = [two_kinds_gram(gram, group.rewards) for gram, group in zip(grams, groups, strict=True)]
    cosines = [mean_pairwise_cosine(gram, rtol=MEASURED_RTOL) for gram in grams]
    alike = [equal_cosine_gram(gram, cosine) for gram, cosine in zip(grams, cosines, strict=True)]
    columns: dict[str, list[float]] = {
        "rank": ranks.tolist(),
        "top": tops.tolist(),
        "shape": effective_rank(rows).tolist(),
        "orthogonal": effective_rank(orthogonal).tolist(),
        "orthogonal_top": top1_fraction(orthogonal).tolist(),
        "alike": effective_rank(stacked_spectra(alike, advantages)).tolist(),
        "two_kinds": effective_rank(stacked_spectra(kinds, advantages)).tolist(),
        "cosine": cosines,
    }
    made = []
    for place, (group, gram) in enumerate(zip(groups, grams, strict=True)):
        shuffled = shuffled_means(gram, advantages[place]) if is_shuffled(trial, group) else (math.nan, math.nan)
        made.append(
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
                numerical_rank=int(directions[place]),
                shuffled=shuffled[0],
                shuffled_top=shuffled[1],
                **{name: values[place] for name, values in columns.items()},
            )
        )
    return made


def stacked_spectra(grams: Sequence[Tensor], advantages: Sequence[Tensor]) -> Tensor:
    """`(n, R)` singular values of the stacks of `n` groups of one size."""
    pairs = zip(grams, advantages, strict=True)
    return torch.stack([singular_values(gram, advantage, psd_rtol=MEASURED_RTOL) for gram, advantage in pairs])


def is_shuffled(trial: Trial, group: GroupRecord) -> bool:
    """Whether the shuffled null of a group is wanted."""
    return group.kind == TRAIN and trial.method == METHOD


def shuffled_means(gram: Tensor, advantages: Tensor) -> tuple[float, float]:
    """Mean effective rank and top-1 fraction over reassignments of the advantages."""
    metrics = shuffled_null(gram, advantages, draws=SHUFFLES, exact_up_to=SHUFFLES, psd_rtol=MEASURED_RTOL).metrics
    return metrics["effective_rank"].mean, metrics["top1_fraction"].mean


def equal_cosine_gram(gram: Tensor, cosine: float) -> Tensor:
    """The Gram of scores with the same norms that all meet at one angle."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    alike = (0.0 if math.isnan(cosine) else cosine) * torch.outer(norms, norms)
    return alike + torch.diag(gram.diagonal() - alike.diagonal())


def two_kinds_gram(gram: Tensor, rewards: Tensor) -> Tensor:
    """The Gram of a group that knows of each rollout only its norm and whether its reward is above the mean.

    Cosines are replaced by their means among the rollouts above, among those below, and between the two. That is the
    average of the matrix of cosines over all orders within either kind, so it is a Gram again. Zero scores have no
    cosine and stay out of it.
    """
    norms = gram.diagonal().clamp(min=0).sqrt()
    unit = torch.where(norms > 0, 1 / norms, 0.0)
    cosines = unit[:, None] * gram * unit[None, :]
    above, below = (rewards > rewards.mean()) & (norms > 0), (rewards <= rewards.mean()) & (norms > 0)
    other = ~torch.eye(len(gram), dtype=torch.bool)
    made = torch.diag(cosines.diagonal())
    for one, two in ((above, above), (below, below), (above, below), (below, above)):
        pairs = one[:, None] & two[None, :] & other
        if bool(pairs.any()):
            made[pairs] = cosines[pairs].mean()
    return norms[:, None] * made * norms[None, :]
