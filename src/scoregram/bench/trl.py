"""`scoregram bench trl`: the cost of a measured step of TRL's GRPOTrainer, relative to a plain one.

Measured and plain steps of one training run alternate. Rollouts are random tokens of equal length and their generation
is not timed: the times are those of forward pass, backward pass, update and measurement. On a CPU they are CPU time, on
a GPU wall-clock time, and the trainer takes products in bfloat16 (`bf16=True`, as TRL does by default).
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scoregram.bench.harness import SHAPES, bench_device, formatted_number, publish_rows, require_at_least, require_trl
from scoregram.bench.train import comparison_conditions
from scoregram.checks import fail, lookup
from scoregram.integrations import attach
from scoregram.machine import threads as torch_threads
from scoregram.policy import character_tokenizer

_CALLER = "bench trl"
_MODES = ("scores", "loss")
TRL_WAYS = ("fused", "separate", "accumulated", "idle", "replayed", "accumulated-replayed")
"""Where the Gram of a measured step comes from.

`fused`: the trainer's own backward pass. `separate`: a separate pass after it. `accumulated`: as `fused`, where the
trainer accumulates micro-batches. `idle`: nothing is measured; steps between two measurements are compared with a
trainer without an attachment. `replayed`, `accumulated-replayed`: as without the word, from CUDA graphs, on a GPU.
"""


WARMUP = 2
"""Steps before the timed ones; the second one is measured and compares one rollout's gradient."""
REPLAY_WARMUP = 8
"""The same with CUDA graphs: of the measured steps, the third is the first of its shape, and the fourth records it."""


@dataclass(frozen=True)
class TrlRow:
    """One way in one mode, with or without gradient checkpointing."""

    way: str
    mode: str
    checkpointing: bool
    plain_seconds: float
    """Median time of a plain optimisation step: all its micro-batches and the update."""
    measured_seconds: float
    """The same for a measured step, with the measurement; for `idle`, for a step between two measurements."""
    overhead: float
    """Time that the measurement adds, relative to a plain step."""
    error: float | None
    """Largest relative error of the self-check; None if nothing was measured."""
    compared: tuple[int, ...]
    """Rollouts whose gradient the self-check compared at each measured step: all; one or none if fused."""
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    """Time of every plain and of every measured step."""


@dataclass(frozen=True)
class TrlJob:
    """Sizes of one training run."""

    shape: str
    rollouts: int
    group_size: int
    micro_batch_size: int
    tokens: int
    repeats: int
    device: str

    def clock(self) -> float:
        """Seconds: CPU time on a CPU, which other processes disturb less; wall-clock time on a GPU, kernels done."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


_TABLE: Mapping[str, Callable[[TrlRow], str]] = {
    "way": lambda row: row.way,
    "mode": lambda row: row.mode,
    "recomputed": lambda row: "yes" if row.checkpointing else "no",
    "plain s": lambda row: f"{row.plain_seconds:.3g}",
    "measured": lambda row: f"{row.measured_seconds:.3g}",
    "overhead": lambda row: f"{row.overhead:.2f}",
    "check": lambda row: formatted_number(row.error, ".1e"),
}


def run_trl_bench(
    *,
    shape: str = "llama-25m",
    rollouts: int = 16,
    group_size: int = 8,
    micro_batch_size: int = 8,
    tokens: int = 128,
    ways: Sequence[str] = TRL_WAYS[:4],
    modes: Sequence[str] = _MODES,
    checkpointing: Sequence[bool] = (False, True),
    repeats: int = 5,
    device: str = "auto",
    threads: int = 1,
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Measure, print a table or JSON, and write the record if requested; options as in `BenchTrl`."""
    lookup(SHAPES, shape, kind=f"{_CALLER} --shape")
    require_at_least(_CALLER, group_size=(2, group_size), micro_batch_size=(1, micro_batch_size), tokens=(1, tokens))
    require_at_least(_CALLER, repeats=(1, repeats), threads=(1, threads))
    for name, size in (("group-size", group_size), ("micro-batch-size", micro_batch_size)):
        if rollouts % size or rollouts < 1:
            fail(f"{_CALLER} --rollouts", f"must be a multiple of --{name} {size}", rollouts, "Choose another number.")
    for name, asked, known in (("modes", modes, _MODES), ("ways", ways, TRL_WAYS)):
        for choice in asked or ("",):
            if choice not in known:
                fail(f"{_CALLER} --{name}", f"must be among {', '.join(known)}", repr(choice), "Check the spelling.")
    if not checkpointing:
        fail(f"{_CALLER} --checkpointing", "must be False, True or both", "nothing", "Leave it out for both.")
    if any(way.startswith("accumulated") for way in ways) and micro_batch_size == rollouts:
        requirement = "must be less than --rollouts to accumulate"
        fail(f"{_CALLER} --micro-batch-size", requirement, rollouts, "Choose a smaller number.")
    place = bench_device(device, caller=_CALLER)
    if place.type == "cpu" and (replayed := [way for way in ways if way.endswith("replayed")]):
        fail(f"{_CALLER} --ways", "CUDA graphs need a GPU", replayed[0], "Leave it out, or pass --device cuda.")
    require_trl(_CALLER)
    job = TrlJob(shape, rollouts, group_size, micro_batch_size, tokens, repeats, place.type)
    conditions, load_before = comparison_conditions(), os.getloadavg()
    with torch_threads(threads if place.type == "cpu" else None):
        rows = [
            timed_steps(job, way, mode, recomputed) for recomputed in checkpointing for mode in modes for way in ways
        ]
    settings = {"bench": "trl", "threads": threads} | asdict(job)
    settings |= {name: value for name, value in conditions.items() if name not in ("method", "temperature")}
    precision = "float32, " if place.type == "cpu" else ""
    settings |= {"trl_differs_from_its_defaults_in": f"{precision}rollouts of random tokens, generation is not timed"}
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        settings |= {"threads": None, "dtype": "float32 under bfloat16 autocast", "device": name}
    settings |= {"load_average": {"before": load_before, "after": os.getloadavg()}}
    return publish_rows(
        settings,
        rows,
        as_json=as_json,
        out=out,
        title=f"{shape}: {rollouts} rollouts of {tokens} tokens; accumulated: {micro_batch_size} each",
        columns=_TABLE,
        caption="Time without generation. Overhead: time that a measurement adds, relative to a plain step.",
    )


def timed_steps(job: TrlJob, way: str, mode: str, checkpointing: bool) -> TrlRow:
    """Train `repeats` plain and `repeats` measured steps, alternating, after the warmup steps."""
    if way == "idle":
        return timed_idle_steps(job, mode, checkpointing)
    steps: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = job.micro_batch_size if way.startswith("accumulated") else job.rollouts
        warmup = REPLAY_WARMUP if way.endswith("replayed") else WARMUP
        trainer = trainer_of_random_tokens(job, folder, size, checkpointing, steps, warmup)
        asked: dict[str, Any] = {"fused": way != "separate", "cuda_graphs": way.endswith("replayed")}
        attached = attach(trainer, every=2, mode="scores" if mode == "scores" else "loss", **asked)
        trainer.train()
    graphs = attached._fused.graphs
    if way.endswith("replayed") and (graphs is None or not graphs.recorded):
        got = attached.not_fused if graphs is None else graphs.reason
        fail(_CALLER, f"{way} needs CUDA graphs", got, "Leave it out of --ways.")
    if attached.failures:
        fail(_CALLER, "every measurement must succeed", attached.failures[0], "This is a bug; please report it.")
    warm = {step: seconds for step, seconds in steps.items() if step > warmup}
    plain = tuple(seconds for step, seconds in warm.items() if step % 2)
    compared = {reading.step: int(reading.scalars["check/rollouts"]) for reading in attached.readings}
    expected = (job.rollouts,) if way == "separate" else (0, 1)
    measured = tuple(seconds for step, seconds in warm.items() if compared.get(step) in expected)
    if not measured:
        remedy = "This is a bug; please report it."
        fail(_CALLER, f"steps must be measured {way}", f"checks of {list(compared.values())} rollouts", remedy)
    error = max(reading.error for reading in attached.readings)
    return row_of_times(way, mode, checkpointing, (plain, measured), error, tuple(compared.values()))


def timed_idle_steps(job: TrlJob, mode: str, checkpointing: bool) -> TrlRow:
    """Train twice, without an attachment and with one that measures the first step alone, and time the later steps."""
    times: dict[bool, tuple[float, ...]] = {}
    for is_attached in (False, True):
        steps: dict[int, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of_random_tokens(job, folder, job.rollouts, checkpointing, steps, WARMUP)
            if is_attached:
                attach(trainer, every=10**6, mode="scores" if mode == "scores" else "loss")
            trainer.train()
        times[is_attached] = tuple(seconds for step, seconds in steps.items() if step > WARMUP)
    return row_of_times("idle", mode, checkpointing, (times[False], times[True]))


def row_of_times(
    way: str,
    mode: str,
    checkpointing: bool,
    times: tuple[tuple[float, ...], tuple[float, ...]],
    error: float | None = None,
    compared: tuple[int, ...] = (),
) -> TrlRow:
    """A row from the times of plain and of measured steps."""
    plain, measured = (statistics.median(of_kind) for of_kind in times)
    return TrlRow(way, mode, checkpointing, plain, measured, (measured - plain) / plain, error, compared, times)


def trainer_of_random_tokens(
    job: TrlJob, folder: str, size: int, checkpointing: bool, steps: dict[int, float], warmup: int
) -> Any:
    """A GRPOTrainer on random completions that stores the time of every step, without generation, in `steps`."""
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
        "max_steps": warmup + 2 * job.repeats,
        "logging_steps": 1000,
        "gradient_checkpointing": checkpointing,
        "use_cpu": job.device == "cpu",
        "bf16": job.device != "cpu",
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
    vocabulary, generate, untimed = int(model.config.vocab_size), trainer._generate_and_score_completions, [0.0]

    def random_completions(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return [torch.randint(3, vocabulary, (job.tokens,)).tolist() for _ in prompt_ids], None

    def generate_untimed(inputs: Any) -> Any:
        start = job.clock()
        output = generate(inputs)
        untimed[0] += job.clock() - start
        return output

    class StepWatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start, untimed[0] = job.clock(), 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps[int(state.global_step)] = job.clock() - self.start - untimed[0]

    trainer._generate_single_turn = random_completions
    trainer._generate_and_score_completions = generate_untimed
    trainer.remove_callback(PrinterCallback)  # stdout is for the table, or for JSON alone
    trainer.add_callback(StepWatch())
    return trainer


def even_sum(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that half of all random rollouts receive."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]
