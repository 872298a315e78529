"""How well does the credit of every method agree with true advantages? All methods on the same rollouts, truth once.

python run.py OUT [--tasks calculator,stopping] [--seeds 3] [--steps 40] [--starts STARTS] [--workers 2]
python run.py OUT --task gsm8k:FOLDER --model MODEL [--prompt chat --autocast --seconds 200]
python run.py OUT --write

The first line measures the tasks of `TASKS` with the embedded policy, on a CPU; the reasoning-gym tasks need the
starting policies of results/methods/start.py in STARTS. The second measures one model on one task, on a CUDA machine:
128 rollouts a step, and it stops before the prompts that would take longer than `--seconds`. The third writes
runs.json from what is in OUT.

No policy is trained. A step draws the rollouts that a training run with the same seed and the learning rate 0 would
draw. Their true advantages are estimated once (`--credit-truth sampled`, or exactly), from fresh rollouts that no
method sees; then every method credits the same rollouts. Critics and running means learn from step to step. Methods of
one estimator with the same inputs are one row.

Every file in OUT has sums over the units of a step, or of a prompt with `--task`: a unit is a turn, a segment or a
token, and `summarise.py` computes correlations and errors from the sums. A file is complete after every step, so that
an interrupted measurement keeps its steps; the same command measures what is missing.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.checks import ScoregramError
from scoregram.gram import Gram, measure_gram
from scoregram.machine import threads, without_cudnn_attention
from scoregram.objectives import OBJECTIVES
from scoregram.policy import Policy, load_policy
from scoregram.reading import CreditTruth
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Task, load_task
from scoregram.training import METHODS, TrainConfig
from scoregram.training.collect import collect, drawn_problems, seeded_generator
from scoregram.training.credit import compares_with_reference, credited_step, reference_step, takes_exact_gram
from scoregram.training.input_source import InputSource
from scoregram.training.inputs import input_sources
from scoregram.training.methods import REFERENCE_STRENGTHS, Method
from scoregram.training.truth import TruthSource, truth_source

BEGAN = time.monotonic()
HERE = Path(__file__).parent
SAMPLING_INPUT = "prefix_values"
"""Input of an estimator that samples many fresh rollouts: such rows are measured prompt by prompt, like the truth."""
OTHER_ROLLOUTS = {
    "igrpo": "its rollouts refine drafts: it does not see the rollouts of the others",
    "tl-grpo": "its groups are candidates for one turn, not episodes, and it aims at the reward of that turn alone",
}
SLOW = ("optimal-token-exact", "optimal-token-loo", "delta-exact")
"""A row of a Gram for every prefix or token."""
GRAMS = ("optimal", "optimal-loo", "salt-exact", "g2rl-exact")
"""The exact Gram of all rollouts of a step."""
SHARED: Mapping[str, Any] = {"batch_size": 32, "group_size": 8, "threads": 1, "device": "cpu", "truth_rollouts": 16}


@dataclass(frozen=True)
class Setting:
    """One task: settings of its measurement, and the methods that are left out."""

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    prompts_at_once: int = 0
    """Prompts whose truth is estimated at a time, each with sums of its own; 0 for all of a step, with one sum."""


def gym_setting(name: str, settings: str = "") -> Setting:
    """A reasoning-gym task; segments of four characters."""
    options = {"model": name, "prompt": "plain", "max_new_tokens": 40, "segments": "even", "segment_tokens": 4}
    return Setting(f"reasoning-gym:{name}{settings}", {**options, "credit_truth": "sampled"}, SLOW)


TASKS = {
    "arithmetic": Setting("arithmetic", {"credit_truth": "exact"}),
    "compositions": Setting("arithmetic-compositions", {"credit_truth": "exact"}, SLOW),
    "calculator": Setting("calculator", {"credit_truth": "sampled"}, SLOW),
    "stopping": Setting("stopping", {"credit_truth": "sampled"}),
    "rotate_matrix": gym_setting("rotate_matrix", ":min_n=2,max_n=2,min_rotations=1,max_rotations=1"),
    "spell_backward": gym_setting("spell_backward"),
}


# Rows: methods that credit the same rollouts in the same way


@dataclass
class Row:
    """One way to give credit, and the methods that have it."""

    method: Method
    names: list[str]
    sources: list[InputSource]

    @property
    def samples_prefixes(self) -> bool:
        """Whether its estimator takes values from fresh rollouts of its own."""
        return SAMPLING_INPUT in ESTIMATORS[self.method.estimator].needs

    def credit(
        self,
        number: int,
        rollouts: Rollouts,
        problems: Sequence[Problem],
        *,
        length: int,
        gram: Gram | None,
    ) -> Tensor:
        """`(N, T)` advantage that the method gives to each token.

        A loss that compares with the initial policy, or that weighs ties, has no advantages: then it is `N w_i`, with
        which REINFORCE would make the same update.
        """
        if compares_with_reference(self.method.objective):
            log_probs = rollouts.log_probs
            assert log_probs is not None
            strength = REFERENCE_STRENGTHS[self.method.objective]
            return reference_step(self.method, number, rollouts, log_probs, log_probs, beta=strength).credit
        inputs: dict[str, Tensor] = {}
        for source in self.sources:
            inputs |= source.inputs(number, rollouts, problems)
        step = credited_step(self.method, number, rollouts, length=length, gram=gram, inputs=inputs)
        if OBJECTIVES[self.method.objective].weighs_ties:
            step = replace(step, advantages=step.weights.double() * rollouts.count)
        return step.credit


def method_rows(config: TrainConfig, policy: Policy, task: Task, left_out: Sequence[str]) -> tuple[list[Row], dict]:
    """The rows of a task, and why other methods are not among them."""
    rows: dict[tuple[Any, ...], Row] = {}
    reasons = dict.fromkeys(left_out, "left out for its cost") | OTHER_ROLLOUTS
    for name, method in METHODS.items():
        if name in reasons:
            continue
        if ESTIMATORS[method.estimator].level == "turn" and task.environment is None:
            reasons[name] = "a rollout is one turn"
            continue
        weighs = compares_with_reference(method.objective) or OBJECTIVES[method.objective].weighs_ties
        place = (
            *(method.estimator, method.learned_baseline, method.exact_geometry),
            method.objective if weighs else "",
        )
        if place in rows:
            rows[place].names.append(name)
            continue
        try:
            sources = input_sources(method, replace(config, method=name), policy, task)
        except ScoregramError as error:
            reasons[name] = str(error).partition(", got")[0]  # what follows may name a folder
            continue
        rows[place] = Row(method, [name], sources)
    return list(rows.values()), reasons


# Sums


def sums(truth: CreditTruth, by_row: Mapping[str, Tensor], cluster_of_row: Tensor) -> dict[str, Any]:
    """Sums over the units of every cluster of rollouts, from which correlations and errors follow.

    `truth`: `[M, Σa, Σa², Σs²]` of each cluster, for true advantages `a` with the variances `s²` of their estimates.
    `credit`: row → `[Σc, Σc², Σca]` of each cluster.
    """
    known = truth.unit_of >= 0
    rows, _ = known.nonzero(as_tuple=True)
    owner = torch.zeros(len(truth.advantages), dtype=torch.int64)
    owner[truth.unit_of[known]] = cluster_of_row[rows]
    count = int(cluster_of_row.max()) + 1
    a = truth.advantages
    noise = torch.zeros_like(a) if truth.variances is None else truth.variances

    def totals(*columns: Tensor) -> list[list[float]]:
        table = torch.zeros(count, len(columns), dtype=torch.float64)
        table.index_add_(0, owner, torch.stack(columns, dim=1))
        return [[float(f"{value:.7g}") for value in line] for line in table.tolist()]

    found: dict[str, Any] = {"truth": totals(torch.ones_like(a), a, a * a, noise), "credit": {}}
    for name, credit in by_row.items():
        c = truth.by_unit(credit)
        found["credit"][name] = totals(c, c * c, c * a)
    return found


# Measuring


@dataclass
class Measurement:
    """The measurement of one policy on one task."""

    config: TrainConfig
    policy: Policy
    task: Task
    rows: Sequence[Row]
    truth: TruthSource
    prompts_at_once: int

    @property
    def length(self) -> int:
        """Longest completion, in tokens."""
        return self.config.sampling(self.task.max_new_tokens).max_new_tokens * self.task.max_turns

    def step(self, number: int) -> Iterator[dict[str, Any]]:
        """The sums of step `number`, part by part."""
        config = self.config
        problems = drawn_problems(self.task.train, (number - 1) * config.prompts, config.prompts, config.seed)
        rollouts = collect(
            self.policy,
            self.task,
            problems,
            group_size=config.starting_group_size,
            sampling=config.sampling(self.task.max_new_tokens),
            generator=seeded_generator(config.seed, "rollouts", number),
        )
        gram = self.gram(rollouts)
        given: dict[str, Any] = {"length": self.length, "gram": gram}
        everywhere = {
            row.names[0]: row.credit(number, rollouts, problems, **given)
            for row in self.rows
            if not row.samples_prefixes
        }
        size = self.prompts_at_once or len(problems)
        for start in range(0, len(problems), size):
            chosen = (rollouts.group_ids >= start) & (rollouts.group_ids < start + size)
            yield self.part(number * 1000 + start, rollouts, problems[start : start + size], chosen, everywhere)
        for row in self.rows:
            for source in row.sources:
                source.learn(rollouts)

    def part(
        self,
        number: int,
        rollouts: Rollouts,
        problems: Sequence[Problem],
        chosen: Tensor,
        everywhere: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The sums of the rollouts of some prompts."""
        own = rollouts.select(chosen)
        truth = self.truth.truth(number, own, problems)
        by_row = {name: credit[chosen][:, : own.input_ids.shape[1]] for name, credit in everywhere.items()}
        extra = 0
        for row in self.rows:
            if row.samples_prefixes:
                by_row[row.names[0]] = row.credit(number, own, problems, length=self.length, gram=None)
                extra += sum(source.extra_rollouts or 0 for source in row.sources)
        clusters = own.group_ids if self.prompts_at_once else torch.zeros_like(own.group_ids)
        facts = {"rollouts": own.count, "reward": float(own.rewards.nansum()), "truth_rollouts": truth.rollouts}
        if truth.variances is None:
            facts["agreement"] = truth.agreement
        return sums(truth, by_row, clusters) | {"facts": facts | {"prefix_rollouts": extra}}

    def gram(self, rollouts: Rollouts) -> Gram | None:
        """The exact Gram of all rollouts, if a row takes it."""
        if not any(takes_exact_gram(row.method) for row in self.rows):
            return None
        masks = rollouts.completion_mask, rollouts.attention_mask
        with self.policy.computing():
            return measure_gram(self.policy.model, rollouts.input_ids, *masks, temperature=self.config.temperature)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all parts, one after the other."""
    names = parts[0]["credit"]
    return {
        "truth": [line for part in parts for line in part["truth"]],
        "credit": {name: [line for part in parts for line in part["credit"][name]] for name in names},
        "facts": {name: [part["facts"].get(name) for part in parts] for name in parts[0]["facts"]},
    }


def measure(name: str, setting: Setting, config: TrainConfig, steps: int, out: Path, seconds: float) -> None:
    """Measure `steps` steps, or until the time is up; the file is written after every part."""
    path = out / f"{name}-seed-{config.seed}.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8"))["steps"] >= steps:
        return
    with threads(config.threads), without_cudnn_attention():
        task = load_task(config.task, seed=config.seed, reward=config.reward)
        policy = load_policy(config.policy, task)
        rows, reasons = method_rows(config, policy, task, setting.left_out)
        source = truth_source(config, policy, task)
        assert source is not None
        measured = Measurement(config, policy, task, rows, source, setting.prompts_at_once)
        record: dict[str, Any] = {
            "task": name,
            "seed": config.seed,
            "setting": {"task": Path(config.task).name, **SHARED, **setting.options},
            "methods": {row.names[0]: row.names for row in rows},
            "left_out": reasons,
        }
        record["setting"].pop("model", None)
        parts: list[dict[str, Any]] = []
        longest = 0.0
        for number in range(1, steps + 1):
            began = time.monotonic()
            for part in measured.step(number):
                parts.append(part)
                longest = max(longest, time.monotonic() - began)
                path.write_text(json.dumps(record | {"steps": number, **joined(parts)}), encoding="utf-8")
                began = time.monotonic()
                if seconds and began - BEGAN + longest > seconds:
                    print(f"{name}: time is up after {len(parts)} parts of {number} steps", flush=True)
                    return
            print(f"{name} seed {config.seed} step {number}: {time.monotonic() - BEGAN:.0f} s", flush=True)


def embedded(given: argparse.Namespace) -> None:
    """Measure the tasks of `TASKS`, several at a time."""
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        waiting = []
        for seed in range(given.seeds):
            for name in given.tasks.split(","):
                setting = TASKS[name]
                options = {**SHARED, **setting.options}
                if "model" in options:
                    options["model"] = str(given.starts / options["model"])
                config = TrainConfig(task=setting.task, seed=seed, **options)
                waiting.append(pool.submit(measure, name, setting, config, given.steps, given.out, given.seconds))
        for one in waiting:
            one.result()


def one_model(given: argparse.Namespace) -> None:
    """Measure one model on one task."""
    setting = Setting(
        task=given.task,
        options={
            "batch_size": given.batch_size,
            "max_new_tokens": given.max_new_tokens,
            "truth_rollouts": given.truth_rollouts,
            "credit_truth": "sampled",
            "autocast": given.autocast,
            "prompt": given.prompt,
            "micro_batch_size": 16,
            "critic_learning_rate": 1e-5,
            "device": given.device,
        },
        left_out=(*SLOW, *GRAMS),
        prompts_at_once=2,
    )
    options: dict[str, Any] = {**SHARED, **setting.options, "threads": 0}
    for seed in range(given.seeds):
        config = TrainConfig(task=given.task, model=given.model, seed=seed, **options)
        measure(given.name, setting, config, given.steps, given.out, given.seconds)


def write(out: Path) -> None:
    """Write runs.json from the files in a folder."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*-seed-*.json"))]
    lines = ",\n".join(json.dumps(run) for run in runs)
    (HERE / "runs.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Measure, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--write", action="store_true", help="write runs.json, measure nothing")
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds; 3, or 1 with --task")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.0, help="time from the start of the script; 0 for no limit")
    parser.add_argument("--workers", type=int, default=1, help="tasks and seeds measured at a time")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--starts", type=Path, default=Path("starts"))
    parser.add_argument("--task", default="", help="one task for one model, in place of --tasks")
    parser.add_argument("--name", default="gsm8k-qwen", help="its name in the record")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompt", default="auto")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--truth-rollouts", type=int, default=8)
    given = parser.parse_args()
    given.seeds = given.seeds or (1 if given.task else 3)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.write:
        write(given.out)
    elif given.task:
        one_model(given)
    else:
        embedded(given)


if __name__ == "__main__":
    main()
