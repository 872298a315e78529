"""The metrics of a run: its steps and groups, read once from the folder, and its last third with intervals.

Any part of a run may be missing: steps may have no Gram, a run may have no evaluation or no groups, and its files may
still be growing.
"""

import gc
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scoregram.bootstrap import mean_of_many
from scoregram.checks import fail, listed
from scoregram.exhibits import Estimate
from scoregram.reading.group import (
    StoredGroup,
    alike_chance,
    logged_live_share,
    step_stretches,
    with_nonzero_rows,
    with_rewards,
)
from scoregram.reading.group_sizes import GROUP_SIZE
from scoregram.reading.noise import SAVING, RunNoise, phase_lines, run_noise
from scoregram.reading.replay import (
    UNWEIGHTED,
    ReplayedRun,
    RolloutAdvantages,
    RolloutFactors,
    replay_groups,
    whole_steps,
)
from scoregram.reading.run_config import rollouts_remedy, stored_setting
from scoregram.reading.step import block_scalars
from scoregram.reading.trust import Trust, trust_of
from scoregram.runs import (
    BatchNames,
    BatchRecord,
    GroupRecord,
    RolloutRecord,
    Rows,
    Run,
    needs_gram,
    open_run,
    own_name,
)
from scoregram.statistics import NoiseComponents, UpdatePower

Line = Mapping[str, float | int | bool]
"""The scalars of one step, from `metrics.jsonl`."""
EvaluationRewards = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Mean reward of every test problem, by kind of rollouts, step of the evaluation, and problem."""
SAMPLED_TEST, GREEDY_TEST = "test", "test, greedy"
"""Kinds of groups that hold the rewards of an evaluation."""


def split_kinds(split: str = "") -> tuple[str, str]:
    """Kinds of the sampled and of the greedy rollouts of an evaluation on a held-out split, or on the test problems.

    Example:
        >>> split_kinds("composition")
        ('test composition', 'test composition, greedy')
    """
    return (f"test {split}", f"test {split}, greedy") if split else (SAMPLED_TEST, GREEDY_TEST)


UNKNOWN_ESTIMATE = Estimate(math.nan)


@dataclass(frozen=True)
class GreedyAccuracy:
    """The accuracy of greedy rollouts on test problems at an evaluation."""

    step: int
    accuracy: Estimate
    """With its Wilson interval, if the run logged one."""
    problems: int
    """Test problems; 0 if not logged."""


@dataclass(frozen=True, eq=False)
class RunReading:
    """A run, with everything that its report, advice and table need."""

    config: Mapping[str, Any]
    notes: tuple[str, ...]
    """Remarks from reading the folder, such as a file that is still being written."""
    lines: Sequence[Line]
    groups: Sequence[StoredGroup]
    """Training groups, in order of step; if there are none, all groups but those of evaluations."""
    tests: EvaluationRewards = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Kind → a sentence that a reader must know before trusting the numbers, as stored with the run."""
    folder: Run | None = None
    """The run folder it was read from; None for a reading built in memory."""

    @cached_property
    def trust(self) -> Trust:
        """How far the numbers can be trusted; no mean includes a step in `trust.failed`."""
        return trust_of(self.lines, self.groups, self.remarks)

    @cached_property
    def rows(self) -> Rows:
        """What the rows of the measured Grams are: scores, or gradients of a loss, which include their weights."""
        return "loss" if any(group.record.rows == "loss" for group in self.groups) else "scores"

    @cached_property
    def is_graded(self) -> bool:
        """Whether some reward is neither 0 nor 1, so that a rollout is not simply right or wrong."""
        return any(group.right is None and group.has_all_rewards for group in self.groups)

    @cached_property
    def draws_evenly(self) -> bool:
        """Whether each prompt was as likely in a step as any other."""
        return self.config.get("draw", "uniform") == "uniform"

    @cached_property
    def has_whole_groups(self) -> bool:
        """Whether groups hold all rollouts of their prompt; a step of a loss may hold only some of them."""
        stated = self.config.get("group_size")
        return self.rows == "scores" or all(group.size == stated for group in self.groups)

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which the policy was trained or a group was recorded."""
        trained = {int(line["step"]) for line in self.lines if "reward" in line or "skipped" in line}
        return sorted(trained | {group.record.step for group in self.groups})

    @cached_property
    def last_third(self) -> range:
        """Range of the steps in the last third of the run; empty for a run without steps."""
        if not self.steps:
            return range(0)
        last = self.steps[-math.ceil(len(self.steps) / 3) :]
        return range(last[0], last[-1] + 1)

    @cached_property
    def last_groups(self) -> list[StoredGroup]:
        """Groups of the last third."""
        return [group for group in self.groups if group.record.step in self.last_third]

    @cached_property
    def is_withheld(self) -> bool:
        """Whether the last third has no means from the Gram, because the self-check of one of its steps failed."""
        return any(step in self.last_third for step in self.trust.failed)

    @cached_property
    def last_measured(self) -> list[StoredGroup]:
        """Groups of the last third whose Grams may be averaged; none where these means are withheld."""
        return [] if self.is_withheld else self.last_groups

    @cached_property
    def usable_steps(self) -> list[int]:
        """Steps with a Gram whose self-check did not fail, in order."""
        measured = {group.record.step for group in self.groups if group.record.gram is not None}
        return sorted(measured - self.trust.failed)

    @cached_property
    def last_lines(self) -> list[Line]:
        """Scalars of the steps in the last third."""
        return [line for line in self.lines if int(line["step"]) in self.last_third]

    @cached_property
    def group_size(self) -> int | None:
        """The most common number of rollouts per prompt, else the config's; None if neither is known.

        Where the trainer divides the rollouts of a step among its prompts, their mean, which the config has. Where it
        decides the group size, that of the last step that logged it.
        """
        stated = self.config.get("group_size")
        decided = [int(line[GROUP_SIZE]) for line in self.lines if GROUP_SIZE in line] if stated == "auto" else []
        if decided:
            return decided[-1]
        if isinstance(stated, int) and self.config.get("allocate", "uniform") != "uniform":
            return stated
        sizes = Counter(group.size for group in self.groups if self.has_whole_groups)
        if sizes:
            return sizes.most_common(1)[0][0]
        return stated if isinstance(stated, int) else None

    @cached_property
    def batch_size(self) -> float:
        """Mean number of rollouts per step in the last third; `nan` without groups."""
        per_step = Counter[int]()
        for group in self.last_groups:
            per_step[group.record.step] += group.size
        return sum(per_step.values()) / len(per_step) if per_step else math.nan

    def series(self, name: str, *, failed: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps that logged a scalar, and its values; both empty if no step did, or if it was never defined.

        A scalar from the Gram is given for the steps whose self-check did not fail, with `failed` for the others. If no
        line has the name, because another trainer uses it, `scoregram/NAME` is read.
        """
        key = name if any(name in line for line in self.lines) else own_name(name)
        pairs = [
            (float(line["step"]), float(line[key]))
            for line in self.lines
            if key in line and (needs_gram(name) and line["step"] in self.trust.failed) == failed
        ]
        if all(math.isnan(value) for _, value in pairs):
            return (), ()
        return tuple(step for step, _ in pairs), tuple(value for _, value in pairs)

    @cached_property
    def live_share(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps that logged their groups, and the share of live ones among those with a reward."""
        pairs = [(float(line["step"]), logged_live_share(line)) for line in self.lines]
        known = [(step, share) for step, share in pairs if not math.isnan(share)]
        return tuple(step for step, _ in known), tuple(share for _, share in known)

    @cached_property
    def greedy_accuracies(self) -> tuple[GreedyAccuracy, ...]:
        """The accuracy at every evaluation that logged one, in order."""
        return tuple(
            GreedyAccuracy(
                int(line["step"]),
                Estimate(*(float(line.get(f"eval/accuracy{end}", math.nan)) for end in ("", "_low", "_high"))),
                int(line.get("eval/problems", 0)),
            )
            for line in self.lines
            if not math.isnan(line.get("eval/accuracy", math.nan))
        )

    def setting(self, *names: str) -> Any:
        """The first of these settings that the config has, or the trainer's arguments in it; None if neither has one.

        Example:
            >>> RunReading({"arguments": {"beta": 0.1}}, (), (), ()).setting("kl_weight", "beta")
            0.1
        """
        return stored_setting(self.config, *names)

    def last_values(self, name: str) -> list[float]:
        """Defined values of a scalar in the last third; none where means from the Gram are withheld."""
        if needs_gram(name) and self.is_withheld:
            return []
        values = [float(line[name]) for line in self.last_lines if name in line]
        return [value for value in values if not math.isnan(value)]

    def last_mean(self, name: str) -> float:
        """Mean of a scalar over the last third, `nan` if it is never defined there."""
        values = self.last_values(name)
        return sum(values) / len(values) if values else math.nan

    def success_rates(self) -> list[float]:
        """Share of right rollouts of every prompt of the last third; empty unless all rewards are 0 or 1."""
        return [right / rollouts for right, rollouts in self.success_counts()]

    def success_counts(self) -> list[tuple[int, int]]:
        """Right rollouts and all rollouts of every prompt of the last third; empty unless all rewards are 0 or 1."""
        return _prompt_counts(self.last_groups)

    def success_stretches(self) -> list[list[tuple[int, int]]]:
        """`success_counts` within each stretch of steps; empty unless all rewards are 0 or 1."""
        return [_prompt_counts(groups) for groups in self.last_stretches] if self.success_counts() else []

    @cached_property
    def last_stretches(self) -> list[list[StoredGroup]]:
        """Groups of the last third by stretches of steps: see `step_stretches`."""
        by_step: dict[int, list[StoredGroup]] = {}
        for group in self.last_groups:
            by_step.setdefault(group.record.step, []).append(group)
        steps = [by_step[step] for step in sorted(by_step)]
        return [list(chain.from_iterable(steps[part])) for part in step_stretches([len(step) for step in steps])]

    @cached_property
    def update_power(self) -> UpdatePower:
        """Signal and noise of the run's own updates, each a mean over measured steps of the last third; `nan` if none.

        A ratio of the two means is far less noisy than a mean of ratios: the signal of one step is often below 0.
        """
        names = ("gram/update_signal", "gram/update_noise")
        lines = [] if self.is_withheld else self.last_lines
        pairs = np.array([[float(line.get(name, math.nan)) for name in names] for line in lines]).reshape(-1, 2)
        known = pairs[~np.isnan(pairs).any(axis=1)]
        return UpdatePower(*known.mean(axis=0).tolist()) if len(known) else UpdatePower(math.nan, math.nan)

    @cached_property
    def rank_means(self) -> tuple[float, float]:
        """Mean effective rank and mean of its orthogonal null, over the groups with a spectrum in the last third.

        The same as in `summary`, without its intervals; `nan` without such a group.
        """
        live = [group for group in self.last_measured if group.has_spectrum]
        names = ("effective_rank", "effective_rank_orthogonal")
        rank, null = (float(_column(live, name).mean()) if live else math.nan for name in names)
        return rank, null

    def noise(self, phase: str = "last") -> RunNoise:
        """Signal, noise scale, best group size and what `optimal-loo` would save, with intervals over steps.

        Pooled over the last third of the measured steps, or over the first. Without numbers if the run drew its prompts
        by their gradients: the formulas hold for prompts that are drawn evenly.
        """
        if phase not in self._noises:
            lines = noise_lines(self, phase) if self.draws_evenly else []
            self._noises[phase] = run_noise(lines, self.group_size, failed=self.trust.failed, phase=phase)
        return self._noises[phase]

    @cached_property
    def _noises(self) -> dict[str, RunNoise]:
        return {}

    def what_if(
        self,
        *estimators: str | RolloutAdvantages,
        group_size: int = 0,
        weights: str | RolloutFactors = UNWEIGHTED,
        keep: Callable[[StoredGroup], bool] | None = None,
    ) -> ReplayedRun:
        """What other estimators would have done with the stored rollouts; see `what_if`."""
        return what_if(self, estimators, group_size=group_size, weights=weights, keep=keep)

    def to_pandas(self) -> Any:
        """The scalars as a data frame: a row for each step, `step` as the index.

        `gram/noise_scale` is `nan` at steps whose signal is not above 0, where it is infinite. Its mean is therefore
        over a selection of steps, and too small or too large; for the scale of the run use `noise().noise_scale`.

        Raises:
            ScoregramError: If pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            return fail("to_pandas", "needs pandas", str(error), "Install it with `pip install pandas`.")
        return DataFrame([dict(line) for line in self.lines]).set_index("step") if self.lines else DataFrame()

    def rollouts_of(self, step: int, prompt: str | None = None) -> list[RolloutRecord]:
        """The stored rollouts of a step, with text, tokens and rewards, or those of one of its prompts.

        Raises:
            ScoregramError: If the run stored no rollouts of this step or prompt; the error says which it has.
        """
        stored = [] if self.folder is None else list(self.folder.rollouts([step]))
        if not stored:
            steps = [] if self.folder is None else sorted(self.folder.rollout_steps())
            got = f"those of {len(steps)} other steps from {steps[0]} to {steps[-1]}" if steps else "none of any step"
            fail("rollouts_of", f"step {step} needs stored rollouts", got, rollouts_remedy(self.config))
        found = [record for record in stored if prompt is None or record.prompt_id == prompt]
        if not found:
            names = listed({record.prompt_id for record in stored})
            fail("rollouts_of", f"prompt must be stored at step {step}", repr(prompt), f"Choose one of {names}.")
        return found

    @cached_property
    def batch_names(self) -> tuple[BatchNames, ...]:
        """Step, kind and prompts of every stored batch; reading its Gram takes far longer."""
        return () if self.folder is None else tuple(self.folder.batch_names())

    def batches(self, steps: Container[int]) -> Iterator[BatchRecord]:
        """The batches of some steps; none of a reading built in memory."""
        return iter(()) if self.folder is None else self.folder.batches(steps)

    @cached_property
    def summary(self) -> "RunSummary":
        """The numbers of the last third."""
        return run_summary(self)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the cyclic garbage collector, which would visit every record of a long run many times: none is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@paused_collection()
def read_run(run: Run | Path | str) -> RunReading:
    """Everything in a run folder, given by its path or already open, in one pass over it."""
    run = run if isinstance(run, Run) else open_run(run)
    tests: list[GroupRecord] = []
    records: list[GroupRecord] = []
    for record in run.groups(layers=False):
        (tests if record.kind.startswith(SAMPLED_TEST) else records).append(record)
    trained = [record for record in records if record.kind == "train"] or records
    return RunReading(
        config=run.config,
        notes=run.notes,
        lines=run.metrics(),
        groups=with_rewards([StoredGroup(record) for record in trained]),
        tests=evaluation_rewards(tests),
        remarks=run.remarks,
        folder=run,
    )


def what_if(
    run: RunReading,
    estimators: Sequence[str | RolloutAdvantages] | str | RolloutAdvantages = (),
    *,
    group_size: int = 0,
    weights: str | RolloutFactors = UNWEIGHTED,
    keep: Callable[[StoredGroup], bool] | None = None,
    most_groups: int = 0,
) -> ReplayedRun:
    """Variance, bias, signal, direction and spectrum of other estimators on the groups of a run's last third.

    Signal and noise come from disjoint parts of a group, so a function sees the rollouts of one part only.

    Args:
        run: From `read_run(folder)`.
        estimators: Rows of `ESTIMATORS`, or functions from rewards `(P, R)` to advantages `(P, R)` that make each row
            from its own rewards; one row of each kind by default.
        group_size: Rollouts of each part, at most half of the run's group size; 0 means exactly half. `rloo` alone may
            have any size: above half, its row follows from the components of its noise.
        weights: Row of `WEIGHTS`, or a function `(rewards, lengths, advantages) → factors`, all `(P, R)`. A mask as
            factors keeps some rollouts and gives the others an advantage of 0.
        keep: Whether a group is replayed, for a selection by step, prompt or length of the prompt. A selection by the
            rewards of the group is no sample of its prompt: signal and noise are then biased.
        most_groups: Replay about this many groups, those of evenly spaced steps; 0 means all.

    Raises:
        ScoregramError: As for `replay_groups`; or if a self-check failed in the last third.

    Example:
        >>> def centred(rewards):  # an estimator of your own
        ...     return rewards - rewards.median(dim=1, keepdim=True).values
        >>> def without_longest(rewards, lengths, advantages):  # a selection of rollouts
        ...     return lengths < lengths.amax(dim=1, keepdim=True)
        >>> run.what_if("rloo", centred, weights=without_longest)  # doctest: +SKIP
    """
    if not isinstance(run, RunReading):
        fail("whatif", "run must be the reading of a run", type(run).__name__, "Pass read_run(folder).")
    if most_groups < 0:
        fail("whatif", "most_groups must be at least 0", most_groups, "0 means all.")
    several = (estimators,) if isinstance(estimators, str) or callable(estimators) else estimators
    if run.is_withheld:
        failed = ", ".join(str(step) for step in sorted(run.trust.failed) if step in run.last_third)
        remedy = "Train without what docs/trl.md lists as its causes, such as dropout; more measurements do not help."
        fail("whatif", "every self-check in the last third must have passed", f"a failed one at step {failed}", remedy)
    kept = [group for group in run.last_measured if keep is None or keep(group)]
    groups = whole_steps(kept, most_groups) if most_groups else kept
    return replay_groups(groups, run.group_size or 0, several, group_size=group_size, weights=weights)


def evaluation_rewards(tests: Iterable[GroupRecord]) -> EvaluationRewards:
    """Rewards of evaluations, from groups whose kinds are those of `split_kinds`."""
    rewards: dict[str, dict[int, dict[str, float]]] = {SAMPLED_TEST: {}, GREEDY_TEST: {}}
    for group in tests:
        by_step = rewards.setdefault(group.kind, {})
        by_step.setdefault(group.step, {})[group.prompt_id] = float(group.rewards.nanmean())
    return rewards


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Metrics of the last third of a run with 95 % intervals; `nan` where the run lacks the data."""

    groups: int
    live: int
    """Groups with a spectrum."""
    noise_steps: int
    """Steps from which noise components were pooled."""
    reward: Estimate
    tested: Estimate
    """Mean reward on test problems at the last evaluation, sampled as in training."""
    dead: Estimate
    """Share of groups that are not live, among those in which some rollout has a reward."""
    equally_hard_dead: float
    """Probability of a dead group if all prompts of a stretch of steps were equally hard; `nan` unless rewards are 0 or
    1. A success rate that changes in time does not count as a difference between prompts."""
    effective_rank: Estimate
    effective_rank_null: Estimate
    rank_difference: Estimate
    """Measured minus null, per group."""
    least_rank: float
    most_rank: float
    top1: Estimate
    top1_null: Estimate
    cosine: Estimate
    baseline_saving: Estimate
    noise_scale: Estimate
    snr: Estimate
    best_group_size: Estimate
    components: NoiseComponents | None
    """Pooled over steps."""


def run_summary(run: RunReading) -> RunSummary:
    """The numbers of the last third: means over groups, noise components pooled over steps."""
    groups, noise = run.last_measured, run.noise()
    live = with_nonzero_rows([group for group in groups if group.has_spectrum])
    rank, null = _column(live, "effective_rank"), _column(live, "effective_rank_orthogonal")
    ends = np.array([group.possible_ranks for group in live]).reshape(-1, 2)
    return RunSummary(
        groups=len(run.last_groups),
        live=len(live),
        noise_steps=noise.steps,
        reward=_mean_reward(run),
        tested=_last_tested(run.tests),
        dead=_dead_share(run),
        equally_hard_dead=_equally_hard_dead(run),
        effective_rank=mean_of_many(rank),
        effective_rank_null=mean_of_many(null),
        rank_difference=mean_of_many(rank - null),
        least_rank=mean_of_many(ends[:, 0]).value,
        most_rank=mean_of_many(ends[:, 1]).value,
        top1=mean_of_many(_column(live, "top1_fraction")),
        top1_null=mean_of_many(_column(live, "top1_fraction_orthogonal")),
        cosine=mean_of_many(_column(groups, "cosine")),
        baseline_saving=noise.baseline_saving,
        noise_scale=noise.noise_scale,
        snr=noise.snr,
        best_group_size=noise.best_group_size,
        components=noise.components,
    )


def noise_lines(run: RunReading, phase: str = "last") -> list[Line]:
    """The scalars of every step; in one third, those that an older version did not log are computed from the Grams."""
    lines = list(run.lines)
    by_step: dict[int, list[StoredGroup]] = {
        int(line["step"]): [] for line in phase_lines(lines, phase) if SAVING[0] not in line
    }
    for group in run.groups if by_step else ():
        if group.record.step in by_step:
            by_step[group.record.step].append(group)
    for place, line in enumerate(lines):
        complete = _complete_groups(by_step.get(int(line["step"]), []), run.group_size or 0)
        if complete and line.get("gram/complete_prompts", len(complete)) == len(complete):
            logged = line if "gram/complete_prompts" in line else {}
            lines[place] = {**line, **block_scalars(*_stacked_groups(complete)), **logged}
    return lines


def _complete_groups(groups: Sequence[StoredGroup], size: int) -> list[StoredGroup]:
    """Groups of the usual size, large enough for unbiased moments, with a Gram and every reward."""
    return [group for group in groups if group.size == size and group.is_complete] if size >= 4 else []


def _stacked_groups(groups: Sequence[StoredGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    grams = [group.record.gram for group in groups if group.record.gram is not None]
    return torch.stack(grams).double(), torch.stack([group.record.rewards for group in groups]).double()


def _column(groups: Sequence[StoredGroup], name: str) -> np.ndarray:
    return np.array([getattr(group.reading, name, math.nan) for group in groups], dtype=np.float64)


def _mean_reward(run: RunReading) -> Estimate:
    return mean_of_many([group.mean_reward for group in run.last_groups] or run.last_values("reward"))


def _last_tested(tests: EvaluationRewards) -> Estimate:
    by_step = tests.get(SAMPLED_TEST)
    if not by_step:
        return UNKNOWN_ESTIMATE
    last = by_step[max(by_step)]
    return mean_of_many([last[name] for name in sorted(last)])  # in the order of `paired_gain`: the same resamples


def _dead_share(run: RunReading) -> Estimate:
    if not run.has_whole_groups:
        return UNKNOWN_ESTIMATE
    judged = [group for group in run.last_groups if group.outcome != "unjudged"]
    if judged:
        return mean_of_many([float(not group.is_live) for group in judged])
    steps, shares = run.live_share
    return mean_of_many([1 - share for step, share in zip(steps, shares, strict=True) if step in run.last_third])


def _equally_hard_dead(run: RunReading) -> float:
    if not run.has_whole_groups or not run.success_counts():
        return math.nan
    chances = 0.0
    for groups in run.last_stretches:
        rollouts, right = sum(group.size for group in groups), sum(group.right or 0 for group in groups)
        for size, count in Counter(group.size for group in groups).items():
            chances += count * sum(alike_chance(alike, rollouts, size) for alike in (right, rollouts - right))
    return chances / len(run.last_groups)


def _prompt_counts(groups: Iterable[StoredGroup]) -> list[tuple[int, int]]:
    """Right rollouts and all rollouts of every prompt; empty unless all rewards are 0 or 1."""
    seen: dict[str, list[int]] = {}
    for group in groups:
        if group.right is None:
            return []
        counts = seen.setdefault(group.record.prompt_id, [0, 0])
        counts[0] += group.right
        counts[1] += group.size
    return [(right, rollouts) for right, rollouts in seen.values()]
