"""`scoregram bench train`: steps per second of scoregram's trainer and of TRL's GRPOTrainer, on a CPU.

Both train the same policy on the same prompts in the same order, with the same reward, group size, batch size, longest
completion, temperature 1, advantages, loss, optimiser and learning rate. Each run has its
own process, and the trainers take turns.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scoregram.bench.harness import (
    formatted_number,
    progress_bar,
    publish_rows,
    require_at_least,
    require_trl,
    require_whole_groups,
    software_versions,
)
from scoregram.bench.trainers import TRAIN_BENCH, TRAINERS, TRL_METHOD, TimedTraining, TrainingJob
from scoregram.checks import fail, lookup
from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import Task, load_task

_REFERENCE = "trl"
"""The trainer that speedups are relative to."""


@dataclass(frozen=True)
class TrainRow:
    """One trainer at one batch size."""

    way: str
    """trl, scoregram (every step measured) or unmeasured (scoregram without measurements)."""
    batch_size: int
    steps_per_second: float
    """Median over the repeats."""
    speedup: float | None
    """Steps per second relative to TRL's, both medians; None if TRL was not run."""
    processor_speedup: float | None
    """The same in CPU time, which other processes on the machine disturb less."""
    seconds: tuple[float, ...]
    """Wall-clock time of one step, for every repeat."""
    processor_seconds: tuple[float, ...]
    """CPU time of one step, for every repeat."""
    sampling: float
    """Median share of the wall-clock time from the prompts to the rewards."""
    updating: float
    """Median share of the wall-clock time from the rewards to the new weights."""
    completion_tokens: float
    """Mean length of a completion."""
    reward: float
    """Mean reward."""


_TABLE: Mapping[str, Callable[[TrainRow], str]] = {
    "N": lambda row: str(row.batch_size),
    "way": lambda row: row.way,
    "steps/s": lambda row: f"{row.steps_per_second:.3g}",
    "speedup": lambda row: formatted_number(row.speedup, ".2f"),
    "sampling": lambda row: f"{row.sampling:.0%}",
    "updating": lambda row: f"{row.updating:.0%}",
    "tokens": lambda row: f"{row.completion_tokens:.1f}",
    "reward": lambda row: f"{row.reward:.2f}",
}


def run_train_bench(
    *,
    model: str = "tiny",
    task: str = "arithmetic",
    reward: str | None = None,
    group_size: int = 8,
    batch_sizes: Sequence[int] = (8, 64),
    max_new_tokens: int = 0,
    learning_rate: float = 1e-4,
    steps: int = 30,
    warmup: int = 10,
    ways: Sequence[str] = tuple(TRAINERS),
    repeats: int = 5,
    threads: int = 1,
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Measure, print a table or JSON, and write the record if requested; options as in `BenchTrain`."""
    require_at_least(TRAIN_BENCH, group_size=(2, group_size), batch_sizes=(1, batch_sizes), warmup=(0, warmup))
    require_at_least(TRAIN_BENCH, steps=(1, steps), repeats=(1, repeats), threads=(1, threads))
    require_at_least(TRAIN_BENCH, max_new_tokens=(0, max_new_tokens))
    if not 0 <= learning_rate < float("inf"):
        remedy = "Choose a number such as 1e-4."
        fail(f"{TRAIN_BENCH} --learning-rate", "must be finite and at least 0", learning_rate, remedy)
    for batch_size in batch_sizes:
        require_whole_groups(f"{TRAIN_BENCH} --batch-sizes", batch_size, group_size)
    for way in ways or [""]:
        lookup(TRAINERS, way, kind=f"{TRAIN_BENCH} --ways")
    if _REFERENCE in ways:
        require_trl(TRAIN_BENCH)
    loaded = load_task(task, reward=reward)
    conditions, load_before = comparison_conditions(), os.getloadavg()
    job = TrainingJob(
        model="",
        task=task,
        reward=reward,
        group_size=group_size,
        batch_size=0,
        max_new_tokens=max_new_tokens or loaded.max_new_tokens,
        learning_rate=learning_rate,
        steps=steps,
        warmup=warmup,
        threads=threads,
        seed=0,
    )
    rows: list[TrainRow] = []
    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        parameters = save_start_policy(model, loaded, Path(folder))
        bar = progress.add_task("Training", total=len(batch_sizes) * repeats * len(ways))
        for size in batch_sizes:
            runs: dict[str, list[TimedTraining]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in ways:
                    runs[way].append(train_in_own_process(way, replace(job, model=folder, batch_size=size)))
                    progress.advance(bar)
            rows += trainer_rows(runs, size)
    asked = {name: value for name, value in asdict(job).items() if name != "batch_size"} | {"model": model}
    settings = {"bench": "train", "parameters": parameters, "repeats": repeats} | asked | conditions
    settings |= {"load_average": {"before": load_before, "after": os.getloadavg()}}
    title = f"{model} on {task}, groups of {group_size}, at most {job.max_new_tokens} tokens; {threads} CPU thread(s)"
    return publish_rows(settings, rows, as_json=as_json, out=out, title=title, columns=_TABLE)


def save_start_policy(model: str, task: Task, folder: Path) -> int:
    """Save the policy and its tokenizer in the folder, for every trainer; returns its number of parameters."""
    policy = load_policy(PolicyConfig(model=model, device="cpu", prompt="plain"), task)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in policy.model.parameters())


def train_in_own_process(way: str, job: TrainingJob) -> TimedTraining:
    """Times of a training run in a fresh interpreter.

    Raises:
        ScoregramError: If the process failed, with the last line of its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(job)))
        # Not `-m`: the module would exist twice, as `__main__` and by its name, each with a clock of its own.
        start = "from scoregram.bench.trainers import train_from_files; train_from_files()"
        command = [sys.executable, "-c", start, way, str(asked), str(answer)]
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | quiet | {"OMP_NUM_THREADS": str(job.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1].rstrip(".")
            fail(TRAIN_BENCH, f"{way} must train to the end", last, "Train with it alone to see the whole error.")
        return TimedTraining(**json.loads(answer.read_text()))


def trainer_rows(runs_by_way: Mapping[str, Sequence[TimedTraining]], batch_size: int) -> list[TrainRow]:
    """One row for each trainer, medians over its repeats."""

    def median(way: str, name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs_by_way[way])

    def speedup(way: str, name: str) -> float | None:
        return median(_REFERENCE, name) / median(way, name) if _REFERENCE in runs_by_way else None

    return [
        TrainRow(
            way=way,
            batch_size=batch_size,
            steps_per_second=1 / median(way, "seconds"),
            speedup=speedup(way, "seconds"),
            processor_speedup=speedup(way, "processor_seconds"),
            seconds=tuple(run.seconds for run in runs),
            processor_seconds=tuple(run.processor_seconds for run in runs),
            sampling=median(way, "sampling"),
            updating=median(way, "updating"),
            completion_tokens=statistics.fmean(run.completion_tokens for run in runs),
            reward=statistics.fmean(run.reward for run in runs),
        )
        for way, runs in runs_by_way.items()
    ]


def comparison_conditions() -> dict[str, Any]:
    """Conditions of a comparison with TRL, for the record: method, machine, versions."""
    return {
        "method": TRL_METHOD,
        "dtype": "float32",
        "device": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "temperature": 1.0,
        "trl_differs_from_its_defaults_in": "float32, no gradient checkpointing, constant learning rate, "
        "prompts not shuffled, nothing logged or saved",
        **software_versions("torch", "transformers", "trl"),
    }
