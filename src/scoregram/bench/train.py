"""`scoregram bench train`: steps per second of scoregram's trainer beside TRL's GRPOTrainer, on a CPU.

Both train the same policy on the same prompts in the same order, with the same reward, group size, batch, longest
completion, temperature 1, advantages, loss, optimiser and learning rate, each in a process of its own, in turns.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scoregram import __version__
from scoregram.bench.laps import CALLER, Timed
from scoregram.bench.record import publish, short_commit
from scoregram.bench.trainers import METHOD, TRAINERS, Job
from scoregram.checks import fail, lookup
from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import Task, load_task

BESIDE = "trl"
"""The trainer that the others are compared with."""


@dataclass(frozen=True)
class Row:
    """One trainer at one batch size."""

    way: str
    """trl, scoregram with every step measured, or scoregram unmeasured."""
    batch_size: int
    steps_per_second: float
    """Median over the repeats."""
    speedup: float | None
    """Steps per second relative to TRL's, medians both; None if TRL was not run."""
    processor_speedup: float | None
    """The same by the time on the processor, which others on the machine take less from."""
    seconds: tuple[float, ...]
    """Of one step, on the clock of the wall, for every repeat."""
    processor_seconds: tuple[float, ...]
    """Of one step, on the processor, for every repeat."""
    sampling: float
    """Median share of the time from the prompts to the rewards."""
    updating: float
    """Median share of the time from the rewards to the new weights."""
    completion_tokens: float
    """Mean length of a completion."""
    reward: float
    """Mean reward."""


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
    """Measure, print a table or JSON, and write the record if asked for.

    Args:
        model: Hub id, folder, `.gguf` file or `tiny`.
        task: What is trained on; prompts are plain text, without a chat template.
        reward: `module:function` in place of the task's reward.
        group_size: Rollouts of one prompt.
        batch_sizes: Rollouts of one update.
        max_new_tokens: Longest completion; 0 for what the task suggests.
        learning_rate: Of AdamW, constant.
        steps: Updates that are timed.
        warmup: Updates before them; by default as many as it takes until everything was written once.
        ways: Keys of `TRAINERS`.
        repeats: Processes of each trainer, in turns.
        threads: Of torch, in every process.
        as_json: Print strict JSON instead of a table.
        out: Where to write the record.
    """
    refuse_sizes(group_size, batch_sizes, {"steps": steps, "repeats": repeats, "threads": threads}, warmup)
    refuse_ways(ways)
    loaded = load_task(task, reward=reward)
    around, load_before = surroundings(), os.getloadavg()
    job = Job(
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
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, progress() as shown:
        parameters = saved(model, loaded, Path(folder))
        bar = shown.add_task("Training", total=len(batch_sizes) * repeats * len(ways))
        for size in batch_sizes:
            found: dict[str, list[Timed]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in ways:
                    found[way].append(in_own_process(way, replace(job, model=folder, batch_size=size)))
                    shown.advance(bar)
            rows += compared(found, size)
    asked = {name: value for name, value in asdict(job).items() if name != "batch_size"} | {"model": model}
    record = {
        "settings": {"bench": "train", "parameters": parameters, "repeats": repeats}
        | asked
        | around
        | {"load_average": {"before": load_before, "after": os.getloadavg()}},
        "rows": [asdict(row) for row in rows],
    }
    publish(record, as_json=as_json, out=out, show=lambda: print_rows(rows, asked))
    return 0


def refuse_sizes(group_size: int, batch_sizes: Sequence[int], counts: dict[str, int], warmup: int) -> None:
    """Raise for the first size that leaves nothing to measure."""
    least = {"group-size": (2, [group_size]), "batch-sizes": (1, batch_sizes), "warmup": (0, [warmup])}
    for name, (smallest, values) in (least | {name: (1, [value]) for name, value in counts.items()}).items():
        for value in values or [smallest - 1]:
            if value < smallest:
                fail(f"{CALLER} --{name}", f"must be at least {smallest}", value, "Choose a larger number.")
    for batch_size in batch_sizes:
        if batch_size % group_size:
            got = f"{batch_size} rollouts in groups of {group_size}"
            fail(f"{CALLER} --batch-sizes", "a batch must hold whole groups", got, "Choose multiples of --group-size.")


def refuse_ways(ways: Sequence[str]) -> None:
    """Raise for a trainer that is not known, or not installed."""
    for way in ways or [""]:
        lookup(TRAINERS, way, kind=f"{CALLER} --ways")
    if BESIDE in ways and find_spec("trl") is None:
        remedy = "pip install 'scoregram[trl]', or choose other --ways."
        fail(CALLER, "trl must be installed", "no such package", remedy)


def saved(model: str, task: Task, folder: Path) -> int:
    """Number of parameters of the policy, which is now in the folder, where both trainers find the same."""
    policy = load_policy(PolicyConfig(model=model, device="cpu", prompt="plain"), task)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in policy.model.parameters())


def in_own_process(way: str, job: Job) -> Timed:
    """What the clock saw in a fresh interpreter.

    Raises:
        ScoregramError: With the last line that the process wrote, if it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "scoregram.bench.trainers", way, str(asked), str(answer)]
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = os.environ | quiet | {"OMP_NUM_THREADS": str(job.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing said"])[-1].rstrip(".")
            fail(CALLER, f"{way} must train to the end", last, "Train by it alone to see more.")
        return Timed(**json.loads(answer.read_text()))


def compared(found: dict[str, list[Timed]], batch_size: int) -> list[Row]:
    """One row for each trainer, medians over its repeats."""

    def median(way: str, name: str) -> float:
        return statistics.median(getattr(run, name) for run in found[way])

    def faster(way: str, name: str) -> float | None:
        return median(BESIDE, name) / median(way, name) if BESIDE in found else None

    return [
        Row(
            way=way,
            batch_size=batch_size,
            steps_per_second=1 / median(way, "seconds"),
            speedup=faster(way, "seconds"),
            processor_speedup=faster(way, "processor_seconds"),
            seconds=tuple(run.seconds for run in runs),
            processor_seconds=tuple(run.processor_seconds for run in runs),
            sampling=median(way, "sampling"),
            updating=median(way, "updating"),
            completion_tokens=statistics.fmean(run.completion_tokens for run in runs),
            reward=statistics.fmean(run.reward for run in runs),
        )
        for way, runs in found.items()
    ]


def surroundings() -> dict[str, Any]:
    """Everything else that is needed to read the numbers: machine, versions, commit."""
    packages = [name for name in ("torch", "transformers", "trl") if find_spec(name) is not None]
    return {
        "method": METHOD,
        "dtype": "float32",
        "device": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "temperature": 1.0,
        "trl_differs_from_its_defaults_in": "float32, no gradient checkpointing, constant learning rate, "
        "prompts not shuffled, nothing logged or saved",
        "scoregram": __version__,
        "commit": short_commit(),
        "python": platform.python_version(),
    } | {name: version(name) for name in packages}


def progress() -> Progress:
    """A bar on the standard error, gone at the end."""
    return Progress(console=Console(stderr=True), transient=True)


def print_rows(rows: Sequence[Row], about: Mapping[str, object]) -> None:
    """A table for a terminal."""
    title = f"{about['model']} on {about['task']}, groups of {about['group_size']}, at most {about['max_new_tokens']}"
    table = Table(title=f"{title} tokens; {about['threads']} CPU thread(s)")
    for column in ("N", "way", "steps/s", "speedup", "sampling", "updating", "tokens", "reward"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for row in rows:
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
        shares = (f"{row.sampling:.0%}", f"{row.updating:.0%}")
        seen = (f"{row.completion_tokens:.1f}", f"{row.reward:.2f}")
        table.add_row(str(row.batch_size), row.way, f"{row.steps_per_second:.3g}", speedup, *shares, *seen)
    Console().print(table)
