"""`scoregram bench trl`: what a measured step of TRL's GRPOTrainer costs beside its own optimisation step, on a CPU.

Measured and plain steps of one training take turns. Generation is left out of both: rollouts are random tokens of equal
length, so that nothing but forward pass, backward pass, update and measurement is on the clock.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scoregram.bench.record import publish
from scoregram.bench.shapes import SHAPES
from scoregram.bench.train import surroundings
from scoregram.checks import fail, lookup
from scoregram.integrations import attach
from scoregram.policy import character_tokenizer

CALLER = "bench trl"
MODES = ("scores", "loss")
WAYS = ("fused", "beside", "accumulated", "idle")
"""Gram and gradient from one backward pass; a pass of its own after the trainer's; the same where the trainer's step is
made of several micro-batches, which cannot be fused; nothing at all, at the steps between, beside a trainer to which
nothing is attached."""


@dataclass(frozen=True)
class Row:
    """One way and mode, with or without gradient checkpointing."""

    way: str
    mode: str
    checkpointing: bool
    plain_seconds: float
    """Median processor time of an optimisation step that is not measured, all its micro-batches and the update."""
    measured_seconds: float
    """The same for a measured step, the measurement included; for `idle`, of a step between, in a measured training."""
    overhead: float
    """What the measurement adds, in units of a plain step."""
    error: float | None
    """Largest relative error of the self-check; None where nothing was measured."""
    compared: tuple[int, ...]
    """Rollouts whose gradient the self-check compared, at every measured step: all, or one if it was fused."""
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    """Of every plain and of every measured step."""


@dataclass(frozen=True)
class Job:
    """One training."""

    shape: str
    rollouts: int
    group_size: int
    micro_batch_size: int
    tokens: int
    repeats: int


def run_trl_bench(
    *,
    shape: str = "llama-25m",
    rollouts: int = 16,
    group_size: int = 8,
    micro_batch_size: int = 8,
    tokens: int = 128,
    ways: Sequence[str] = WAYS,
    modes: Sequence[str] = MODES,
    checkpointing: Sequence[bool] = (False, True),
    repeats: int = 5,
    threads: int = 1,
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Measure, print a table or JSON, and write the record if asked for.

    Args:
        shape: A row of `SHAPES`; weights are random.
        rollouts: Of one update, whole groups.
        group_size: Rollouts of one prompt.
        micro_batch_size: Rollouts of one backward pass of the trainer where it accumulates.
        tokens: Completion tokens of every rollout; prompts have 32 or so.
        ways: Some of `fused`, `beside`, `accumulated` and `idle`.
        modes: `scores`, `loss` or both.
        checkpointing: Without and with gradient checkpointing, TRL's default.
        repeats: Timed steps of each kind, in turns.
        threads: Of torch.
        as_json: Print strict JSON instead of a table.
        out: Where to write the record.
    """
    refuse(shape, rollouts, group_size, micro_batch_size, tokens, ways, modes, repeats, threads)
    torch.set_num_threads(threads)
    job = Job(shape, rollouts, group_size, micro_batch_size, tokens, repeats)
    around, load_before = surroundings(), os.getloadavg()
    rows = [timed(job, way, mode, recomputed) for recomputed in checkpointing for mode in modes for way in ways]
    record = {
        "settings": {"bench": "trl", "threads": threads}
        | asdict(job)
        | {name: value for name, value in around.items() if name not in ("method", "temperature")}
        | {"trl_differs_from_its_defaults_in": "float32, rollouts of random tokens that are not on the clock"}
        | {"load_average": {"before": load_before, "after": os.getloadavg()}},
        "rows": [asdict(row) for row in rows],
    }
    publish(record, as_json=as_json, out=out, show=lambda: print_rows(rows, job))
    return 0


def refuse(
    shape: str,
    rollouts: int,
    group_size: int,
    micro_batch_size: int,
    tokens: int,
    ways: Sequence[str],
    modes: Sequence[str],
    repeats: int,
    threads: int,
) -> None:
    """Raise for the first setting that leaves nothing to measure."""
    lookup(SHAPES, shape, kind=f"{CALLER} --shape")
    counts = {"group-size": group_size - 1, "micro-batch-size": micro_batch_size, "tokens": tokens}
    for name, value in (counts | {"repeats": repeats, "threads": threads}).items():
        if value < 1:
            fail(f"{CALLER} --{name}", f"must be at least {1 + (name == 'group-size')}", value, "Choose more.")
    for name, size in (("group-size", group_size), ("micro-batch-size", micro_batch_size)):
        if rollouts % size or rollouts < 1:
            fail(f"{CALLER} --rollouts", f"must be a multiple of --{name} {size}", rollouts, "Choose another number.")
    for name, asked, known in (("modes", modes, MODES), ("ways", ways, WAYS)):
        for one in asked or ("",):
            if one not in known:
                fail(f"{CALLER} --{name}", f"must be among {', '.join(known)}", repr(one), "Check the spelling.")
    if "accumulated" in ways and micro_batch_size == rollouts:
        fail(f"{CALLER} --micro-batch-size", "must be less than --rollouts to accumulate", rollouts, "Choose less.")
    if find_spec("trl") is None:
        fail(CALLER, "trl must be installed", "no such package", "pip install 'scoregram[trl]'")


def timed(job: Job, way: str, mode: str, checkpointing: bool) -> Row:
    """Train for as many plain and measured steps as asked for, in turns, after two that warm up."""
    if way == "idle":
        return between(job, mode, checkpointing)
    steps: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = job.micro_batch_size if way == "accumulated" else job.rollouts
        trainer = trainer_of_random_tokens(job, folder, size, checkpointing, steps)
        attached = attach(trainer, every=2, mode="scores" if mode == "scores" else "loss", fused=way != "beside")
        trainer.train()
    if attached.failures:
        fail(CALLER, "every measurement must succeed", attached.failures[0], "Please report it.")
    warm = {step: seconds for step, seconds in steps.items() if step > 2}
    plain = tuple(seconds for step, seconds in warm.items() if step % 2)
    compared = {reading.step: int(reading.scalars["check/rollouts"]) for reading in attached.readings}
    expected = 1 if way == "fused" else job.rollouts
    measured = tuple(seconds for step, seconds in warm.items() if compared.get(step) == expected)
    if not measured:
        fail(CALLER, f"steps must be measured as asked for, {way}", attached.readings, "Please report it.")
    error = max(reading.error for reading in attached.readings)
    return row_of(way, mode, checkpointing, plain, measured, error, tuple(compared.values()))


def between(job: Job, mode: str, checkpointing: bool) -> Row:
    """Train twice, with nothing attached and with measurements at the first step alone, for the steps after it."""
    found: dict[bool, tuple[float, ...]] = {}
    for is_attached in (False, True):
        steps: dict[int, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of_random_tokens(job, folder, job.rollouts, checkpointing, steps)
            if is_attached:
                attach(trainer, every=10**6, mode="scores" if mode == "scores" else "loss")
            trainer.train()
        found[is_attached] = tuple(seconds for step, seconds in steps.items() if step > 2)
    return row_of("idle", mode, checkpointing, found[False], found[True], None, ())


def row_of(
    way: str,
    mode: str,
    checkpointing: bool,
    plain: tuple[float, ...],
    measured: tuple[float, ...],
    error: float | None,
    compared: tuple[int, ...],
) -> Row:
    """Medians, and what they say."""
    own, whole = statistics.median(plain), statistics.median(measured)
    return Row(
        way=way,
        mode=mode,
        checkpointing=checkpointing,
        plain_seconds=own,
        measured_seconds=whole,
        overhead=(whole - own) / own,
        error=error,
        compared=compared,
        seconds=(plain, measured),
    )


def trainer_of_random_tokens(job: Job, folder: str, size: int, checkpointing: bool, steps: dict[int, float]) -> Any:
    """A GRPOTrainer that need not sample, and notes the processor time of every step less that of its generation."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import PrinterCallback, TrainerCallback

    torch.manual_seed(0)
    model: Any = SHAPES[job.shape].build()
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": job.rollouts // size,
        "num_generations": job.group_size,
        "max_completion_length": job.tokens,
        "max_steps": 2 + 2 * job.repeats,
        "logging_steps": 1000,
        "gradient_checkpointing": checkpointing,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
    }
    trainer: Any = getattr(trl, "GRPOTrainer")(  # noqa: B009
        model=model,
        reward_funcs=even_sum,
        args=getattr(trl, "GRPOConfig")(**arguments),  # noqa: B009
        train_dataset=Dataset.from_dict({"prompt": [f"What is the sum of {a} and {a + 1}?" for a in range(10, 99)]}),
        processing_class=character_tokenizer(4096),
    )
    vocabulary, inner, apart = int(model.config.vocab_size), trainer._generate_and_score_completions, [0.0]

    def not_sampled(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return [torch.randint(3, vocabulary, (job.tokens,)).tolist() for _ in prompt_ids], None

    def off_the_clock(inputs: Any) -> Any:
        start = time.process_time()
        output = inner(inputs)
        apart[0] += time.process_time() - start
        return output

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start, apart[0] = time.process_time(), 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps[int(state.global_step)] = time.process_time() - self.start - apart[0]

    trainer._generate_single_turn = not_sampled
    trainer._generate_and_score_completions = off_the_clock
    trainer.remove_callback(PrinterCallback)  # the standard output is for the table, or for JSON alone
    trainer.add_callback(Watch())
    return trainer


def even_sum(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that half of all random rollouts get."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def print_rows(rows: Sequence[Row], job: Job) -> None:
    """A table for a terminal."""
    table = Table(
        title=f"{job.shape}: {job.rollouts} rollouts of {job.tokens} tokens; accumulated: {job.micro_batch_size} each",
        caption="Processor time without generation. Overhead: what a measurement adds, in units of a plain step.",
    )
    for column in ("way", "mode", "recomputed", "plain s", "measured", "overhead", "check"):
        table.add_column(column, justify="left" if column in ("way", "mode") else "right", no_wrap=True)
    for row in rows:
        times = (f"{row.plain_seconds:.3g}", f"{row.measured_seconds:.3g}", f"{row.overhead:.2f}")
        check = "" if row.error is None else f"{row.error:.1e}"
        table.add_row(row.way, row.mode, "yes" if row.checkpointing else "no", *times, check)
    Console().print(table)
