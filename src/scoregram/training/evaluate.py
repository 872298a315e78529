"""Measurements of the policy between updates: accuracy on test problems, and probes of the same few problems.

An evaluation rewards greedy rollouts and rollouts sampled as in training. A probe measures the Gram of groups of fixed
problems at intervals, which shows how the spectrum changes while the prompts stay the same.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scoregram.bootstrap import NORMAL_QUANTILE
from scoregram.checks import fail
from scoregram.errors import option_name
from scoregram.gram import adam_preconditioner, measure_gram
from scoregram.policy import BiasedSamplingWarning, Policy, SamplingConfig
from scoregram.reading import (
    TRAINED_AND_FIXED,
    TRAINED_AND_FIXED_PRECONDITIONED,
    Step,
    batch_records,
    group_readings,
    group_records,
    mean_over_groups,
    reward_scalars,
    split_kinds,
)
from scoregram.rollouts import Rollouts, concatenated_rollouts, micro_batches
from scoregram.runs import FIXED_PROBE, BatchRecord, GroupRecord, RunWriter
from scoregram.tasks import Problem, Task
from scoregram.training.collect import collect, refuse_long_prompts, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.credit import advantages_of, score_weights
from scoregram.training.update import gram_inputs

EVALUATION_BATCH = 512
"""Rollouts sampled at a time."""


@dataclass(frozen=True)
class Evaluation:
    """Rewards on test problems."""

    rewards: tuple[float, ...]
    """Reward of the greedy rollout of each problem; `nan` without a reward."""
    sampled: tuple[tuple[float, ...], ...] = ()
    """Rewards of the rollouts sampled for each problem; empty if none were sampled."""

    @property
    def accuracy(self) -> float:
        """Share of problems whose greedy rollout has a reward of 1 or more; one without a reward counts as wrong.

        `nan` if no rollout has a reward.
        """
        return share_right(self.rewards)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson interval of the accuracy `p` of `n` problems at 95 %.

        `(p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)` with `z = 1.96`. It stays within 0 and 1, and has a width
        even if all answers are right or all are wrong. `nan` without an accuracy.
        """
        n, z = len(self.rewards), NORMAL_QUANTILE
        centre = (self.accuracy + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(self.accuracy * (1 - self.accuracy) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return centre - half, centre + half

    def scalars(self, split: str = "") -> dict[str, float]:
        """The scalars `eval/…` of the metrics, `eval/SPLIT/…` for a held-out split."""
        low, high = self.interval
        drawn = [reward for group in self.sampled for reward in group]
        sampled = {"sampled_accuracy": share_right(drawn)} if drawn else {}
        rewards = [reward for reward in self.rewards if not math.isnan(reward)]
        named = {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "reward": sum(rewards) / len(rewards) if rewards else math.nan,
            "problems": len(self.rewards),
            **sampled,
        }
        return {f"eval/{split}/{name}" if split else f"eval/{name}": value for name, value in named.items()}


def share_right(rewards: Sequence[float]) -> float:
    """Share of rewards of 1 or more. A missing reward, `nan`, counts as wrong; if all are missing the share is `nan`.

    Example:
        >>> share_right([1.0, 0.0, math.nan, math.nan]), share_right([math.nan])
        (0.25, nan)
    """
    if all(map(math.isnan, rewards)):
        return math.nan
    return sum(reward >= 1 for reward in rewards) / len(rewards)


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    sampling: SamplingConfig,
    *,
    samples: int = 0,
    generator: torch.Generator | None = None,
) -> Evaluation:
    """Rewards of one greedy rollout of each problem, and of `samples` more drawn as in training."""
    greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    rewards: list[float] = []
    sampled: list[tuple[float, ...]] = []
    for rows in micro_batches(len(problems), EVALUATION_BATCH):
        here = problems[rows]
        rewards += collect(policy, task, here, group_size=1, sampling=greedy, generator=None).rewards.tolist()
        per_batch = max(1, EVALUATION_BATCH // max(samples, 1))
        for part in micro_batches(len(here) if samples else 0, per_batch):
            rollouts = collect(policy, task, here[part], group_size=samples, sampling=sampling, generator=generator)
            sampled += map(tuple, rollouts.reward_grid.tolist())
    return Evaluation(tuple(rewards), tuple(sampled))


def evaluation_records(
    step: int, problems: Sequence[Problem], evaluation: Evaluation, *, keep_greedy: bool = False, split: str = ""
) -> list[GroupRecord]:
    """Groups of kind `test` and `test, greedy` with the rewards of an evaluation; `test SPLIT` for a held-out split.

    Empty if no rollouts were sampled; with `keep_greedy`, the greedy ones even then.
    """
    sampled, greedy = split_kinds(split)
    kinds = {sampled: evaluation.sampled, greedy: tuple((reward,) for reward in evaluation.rewards)}
    return [
        GroupRecord(
            step=step,
            kind=kind,
            prompt_id=problem.id,
            rewards=torch.tensor(rewards, dtype=torch.float64),
            lengths=torch.zeros(len(rewards), dtype=torch.int64),
            advantages=torch.zeros(len(rewards), dtype=torch.float64),
        )
        for kind, each in (kinds if evaluation.sampled or keep_greedy else {}).items()
        for problem, rewards in zip(problems if each else (), each, strict=True)
    ]


@dataclass(frozen=True)
class ProbeResult:
    """Records and scalars of a probe."""

    groups: Sequence[GroupRecord]
    batches: Sequence[BatchRecord]
    scalars: Mapping[str, float]


def probe_kind(config: TrainConfig, sampled_at: float, scored_at: float) -> str:
    """Kind of the groups of a probe: `fixed`, followed by the temperatures if they are not the policy's."""
    if sampled_at == scored_at == config.temperature:
        return FIXED_PROBE
    return f"{FIXED_PROBE}, sampled at {sampled_at:g}, scored at {scored_at:g}"


def run_probe(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    step: int,
    trained: Rollouts | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> ProbeResult:
    """Sample groups of the problems and measure their Grams; the policy and its gradients stay as they are.

    Rollouts sampled at another temperature than the policy's are scored twice: at their own temperature, where the
    expected score is zero, and at the policy's, where it is not. Advantages are rewards minus the group mean, whatever
    estimator the run trains with. The scalars are those of the first temperature.

    Args:
        config: Settings of the run.
        policy: The policy after the update of the step.
        task: Rewards the rollouts.
        problems: Problems of the probe.
        step: Number of the step; 0 before the first.
        trained: Training rollouts of the step. With `probe_trained`, their Gram with the rollouts of the probe is
            stored as one batch. They were sampled before the update, so their scores are off-policy by one step.
        optimizer: Optimiser of the run, after the step. With Adam and `probe_trained`, the Gram of `trained` and the
            probe is also stored with its preconditioner: the one that the step was made with, which includes the
            gradient of these training rollouts, and the latest that is known before the next step.
    """
    groups: list[GroupRecord] = []
    batches: list[BatchRecord] = []
    scalars: dict[str, float] = {}
    for temperature in config.probe_temperatures or (config.temperature,):
        sampling = replace(config.sampling(task.max_new_tokens), temperature=temperature)
        stream = seeded_generator(config.seed, "probe", step)
        with warnings.catch_warnings():  # the rollouts are scored at both temperatures, so there is no hidden bias
            warnings.simplefilter("ignore", BiasedSamplingWarning)
            rollouts = collect(
                policy, task, problems, group_size=config.starting_group_size, sampling=sampling, generator=stream
            )
        for scored_at in dict.fromkeys((temperature, config.temperature)):
            kind = probe_kind(config, temperature, scored_at)
            is_whole = config.between_prompts and kind == FIXED_PROBE
            blocks = None if is_whole else config.starting_group_size
            probed = probe_step(policy, rollouts, number=step, kind=kind, temperature=scored_at, blocks=blocks)
            readings = group_readings(probed)
            groups += group_records(probed, readings, **config.recording(is_probe=kind == FIXED_PROBE))
            if is_whole:
                batches += batch_records(probed)
            if is_whole and config.probe_trained and trained is not None:
                parts = [replace(part, reward_parts={}) for part in (trained, rollouts)]
                joint = concatenated_rollouts(parts, policy.pad_id)
                products: dict[str, dict[Tensor, Tensor] | None] = {TRAINED_AND_FIXED: None}
                if (latest := latest_preconditioner(optimizer)) is not None:
                    products[TRAINED_AND_FIXED_PRECONDITIONED] = latest
                for name, given in products.items():
                    both = {"number": step, "kind": name, "temperature": scored_at, "preconditioner": given}
                    batches += batch_records(probe_step(policy, joint, blocks=None, **both))
            if not scalars:
                means = mean_over_groups([reading.scalars() for reading in readings]) | reward_scalars(probed)
                scalars = {f"probe/{name.removeprefix('group/')}": value for name, value in means.items()}
    return ProbeResult(groups, batches, scalars)


def latest_preconditioner(optimizer: torch.optim.Optimizer | None) -> dict[Tensor, Tensor] | None:
    """The diagonal of Adam's latest step; None for another optimiser, or if a parameter has had no step yet."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return None
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(optimizer.state.get(parameter) for parameter in trained if parameter.requires_grad):
        return None
    return adam_preconditioner(optimizer)


def probe_step(
    policy: Policy,
    rollouts: Rollouts,
    *,
    number: int,
    kind: str,
    temperature: float,
    blocks: int | None,
    preconditioner: Mapping[Tensor, Tensor] | None = None,
) -> Step:
    """Rollouts with mean-centred advantages and their Gram, measured in one pass without an update.

    Args:
        policy: The policy whose scores are measured.
        rollouts: Rollouts with rewards.
        number: Step of the run.
        kind: Kind of the records.
        temperature: Temperature of the scores.
        blocks: Measure only the blocks within groups of this size; None for the whole Gram.
        preconditioner: A diagonal `D` for the Gram `⟨ψ_i, D ψ_j⟩`; None for the plain one.
    """
    advantages = rollouts.by_rollout(advantages_of("mean", rollouts))
    mask = rollouts.completion_mask
    with policy.computing():
        options = {"temperature": temperature, "group_size": blocks, "preconditioner": preconditioner}
        gram = measure_gram(policy.model, *gram_inputs(rollouts), **options)
    return Step(
        number=number,
        rollouts=rollouts,
        advantages=advantages.double(),
        weights=score_weights("reinforce", advantages, mask, length=mask.shape[1]).cpu(),
        gram=gram,
        kind=kind,
    )


@dataclass(frozen=True)
class HeldOutProblems:
    """Problems that a run does not train on, and what it measures of the policy with them."""

    config: TrainConfig
    policy: Policy
    task: Task
    probes: Sequence[Problem]
    """Problems of a probe; empty if the run makes none."""
    optimizer: torch.optim.Optimizer
    """Optimiser of the run; probes read its state."""

    @property
    def are_evaluated(self) -> bool:
        """Whether the run makes evaluations."""
        return self.config.eval_every > 0 or self.config.every_rollouts > 0

    @property
    def tests(self) -> dict[str, Sequence[Problem]]:
        """Split → the problems of an evaluation, the test split as ""; empty if the run makes none."""
        splits = {"": self.task.test, **self.task.held_out} if self.are_evaluated else {}
        return {split: problems[: self.config.eval_problems] for split, problems in splits.items()}

    def evaluation_scalars(self, writer: RunWriter, step: int) -> dict[str, float]:
        """Evaluate on the test problems and on those of each held-out split; returns the scalars `eval/…`."""
        config, scalars = self.config, {}
        sampling = config.sampling(self.task.max_new_tokens)
        for split, tested in self.tests.items():
            stream = seeded_generator(config.seed, f"test {split}".strip(), step)
            found = evaluate(self.policy, self.task, tested, sampling, samples=config.eval_samples, generator=stream)
            kept = {"keep_greedy": config.keep_evidence, "split": split}
            writer.write_groups(step, evaluation_records(step, tested, found, **kept))
            scalars |= found.scalars(split)
        return scalars

    def probe_scalars(self, writer: RunWriter, step: int, trained: Rollouts | None = None) -> Mapping[str, float]:
        """Measure the problems of the probe and write their groups; returns the scalars `probe/…`.

        `trained` are the training rollouts of the step, as in `run_probe`.
        """
        result = run_probe(self.config, self.policy, self.task, self.probes, step, trained, self.optimizer)
        writer.write_groups(step, result.groups)
        writer.write_batches(step, result.batches)
        return result.scalars


def require_test_problems(config: TrainConfig, task: Task) -> None:
    """Raise if the run evaluates or probes, and the task has no test problems."""
    for option in ("every_rollouts" if config.every_rollouts else "eval_every", "probe_every"):
        if getattr(config, option) and not len(task.test):
            typed = option_name(option)
            remedy = "Add some." if option == "every_rollouts" else f"Add some, or {typed} 0."
            fail(f"train {typed}", f"{task.name} must have test problems", "none", remedy)


def held_out_problems(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    optimizer: torch.optim.Optimizer,
) -> HeldOutProblems:
    """The first test problems for evaluations and the last ones for probes.

    Raises:
        ScoregramError: If the prompt of one leaves no room for a whole completion.
    """
    require_test_problems(config, task)
    probes = task.test[-config.probe_problems :] if config.probe_every else []
    held_out = HeldOutProblems(config, policy, task, probes, optimizer)
    for problems in (*held_out.tests.values(), probes):
        prompts = [policy.encode_prompt(task.prompt(problem)) for problem in problems]
        refuse_long_prompts(prompts, problems, config.sampling(task.max_new_tokens), policy)
    return held_out
