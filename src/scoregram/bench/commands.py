"""The commands of `scoregram bench`, one frozen dataclass each. Imports neither torch nor transformers."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from scoregram.errors import fail


@dataclass(frozen=True)
class Benchmark:
    """Options of every benchmark. `BenchNAME` calls `run_NAME_bench` of `scoregram.bench.NAME` with its fields."""

    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """File to write the JSON to as well."""

    def run(self, **inputs: object) -> int:
        """Measure and print; `inputs` are arguments of the benchmark that no option sets."""
        for option in ("out", "plot"):
            path: Path | None = getattr(self, option, None)
            if path is not None and path.is_dir():  # an error now, not after the measurement
                example = path / "bench.json"
                fail(f"bench --{option}", "must be a file to write", f"the folder {path}", f"Pass {example} or so.")
        name = type(self).__name__.removeprefix("Bench").lower()
        options = {"as_json" if option == "json" else option: value for option, value in vars(self).items()}
        return getattr(import_module(f"scoregram.bench.{name}"), f"run_{name}_bench")(**inputs, **options)


@dataclass(frozen=True)
class BenchGram(Benchmark):
    """Time and memory of the exact Gram, relative to a plain training step, and of other ways to compute it."""

    shape: str = "llama-25m"
    """llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: tuple[int, ...] = (8,)
    """Numbers of rollouts in the batch."""
    tokens: tuple[int, ...] = (128, 512)
    """Tokens per rollout; the first quarter is the prompt."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    autocast: bool = False
    """Take products in bfloat16 by autocast, as mixed-precision training does."""
    device: str = "auto"
    """auto, cpu or cuda."""
    lora: int = 0
    """Train only LoRA adapters of this rank; 0 trains all parameters."""
    ways: tuple[str, ...] = ("gram+gradient", "gram", "n-backwards", "vmap", "opacus")
    """What to time besides the plain step, which runs with and without a chunked head; also blocks+gradient,
    gram-kept and gram-pairs (passes over a quarter of the rollouts), dattri, dattri-llm, dattri-llm-tied, bergson and
    bergson-projected (other libraries) and, on a GPU, gram+gradient-replayed from a CUDA graph."""
    repeats: int = 5
    """Timed calls of each way, in turns."""
    threads: int = 1
    """CPU threads of torch; ignored on a GPU."""
    definition: bool = False
    """Compare every Gram with the definition in float64: one backward pass per rollout of a float64 copy of the
    model."""
    plot: Path | None = None
    """File to plot the ratios to, such as ratios.svg."""


@dataclass(frozen=True)
class BenchTrain(Benchmark):
    """Steps per second of scoregram's trainer and of TRL's GRPOTrainer, each in a process of its own, on a CPU."""

    model: str = "tiny"
    """Hub id, folder, `.gguf` file or `tiny`."""
    task: str = "arithmetic"
    """arithmetic[:TERMS], gsm8k[:FOLDER], reasoning-gym:NAME or jsonl:FILE; prompts are plain text."""
    reward: str | None = None
    """`module:function` with TRL's signature; replaces the task's reward."""
    group_size: int = 8
    """Rollouts per prompt."""
    batch_sizes: tuple[int, ...] = (8, 64)
    """Rollouts per update."""
    max_new_tokens: int = 0
    """Longest completion, in tokens; 0 for the task's default."""
    learning_rate: float = 1e-4
    """Constant learning rate of AdamW."""
    steps: int = 30
    """Timed updates."""
    warmup: int = 10
    """Updates before the timed ones."""
    ways: tuple[str, ...] = ("trl", "scoregram", "unmeasured")
    """Trainers: trl; scoregram, which measures every step; unmeasured, which is scoregram without measurements."""
    repeats: int = 5
    """Processes of each trainer, in turns."""
    threads: int = 1
    """CPU threads of torch."""


@dataclass(frozen=True)
class BenchSample(Benchmark):
    """Tokens per second of the sampler and of transformers' `generate`, in one process."""

    shape: str = "tiny"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 64
    """All rollouts; a multiple of the group size."""
    group_size: int = 8
    """Rollouts per prompt."""
    prompt_tokens: int = 16
    """Tokens of every prompt."""
    tokens: int = 48
    """New tokens of every rollout; no stop token ends one early."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    repeats: int = 5
    """Timed calls of each way, in turns."""
    threads: int = 1
    """CPU threads of torch; ignored on a GPU."""


@dataclass(frozen=True)
class BenchTrl(Benchmark):
    """Cost of a measured optimisation step of TRL's GRPOTrainer, relative to a plain one."""

    shape: str = "llama-25m"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 16
    """Rollouts per update; a multiple of the group size and of the micro-batch size."""
    group_size: int = 8
    """Rollouts per prompt."""
    micro_batch_size: int = 8
    """Rollouts per backward pass of the trainer in the way `accumulated`."""
    tokens: int = 128
    """Completion tokens of every rollout."""
    ways: tuple[str, ...] = ("fused", "separate", "accumulated", "idle")
    """fused: the Gram from the trainer's backward pass; separate: from a pass of its own; accumulated: fused where the
    trainer accumulates micro-batches; idle: steps between two measurements; on a GPU also replayed and
    accumulated-replayed, from CUDA graphs."""
    modes: tuple[str, ...] = ("scores", "loss")
    """What is measured: scores, loss or both."""
    checkpointing: tuple[bool, ...] = (False, True)
    """Without and with gradient checkpointing."""
    repeats: int = 5
    """Timed plain steps and timed measured steps, alternating."""
    device: str = "auto"
    """auto, cpu or cuda; on a GPU the trainer computes under bfloat16 autocast."""
    threads: int = 1
    """CPU threads of torch; ignored on a GPU."""


@dataclass(frozen=True)
class BenchPreset(Benchmark):
    """Time and memory of a replication's steps, with its own trainer on random weights of its model's shape."""

    preset: str = "nemotron-4b-gsm8k"
    """A preset of `scoregram replicate`, trained at the largest of the paper's group sizes."""
    shape: str = "nemotron-4b"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    prompt_tokens: int = 100
    """Tokens of every prompt."""
    steps: int = 6
    """Updates, every other one measured; the first two are warmup."""
    eval_problems: int = 512
    """Test problems in the evaluation."""
    micro_batch_sizes: tuple[int, ...] = ()
    """Micro-batch sizes to measure one after the other, 0 for all rollouts at once; by default the preset's own."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Bench:
    """Measure the cost of the Gram, the speed of training and sampling, and the cost of measured steps in TRL."""

    what: Annotated[
        Annotated[BenchGram, tyro.conf.subcommand("gram", prefix_name=False)]
        | Annotated[BenchTrain, tyro.conf.subcommand("train", prefix_name=False)]
        | Annotated[BenchSample, tyro.conf.subcommand("sample", prefix_name=False)]
        | Annotated[BenchTrl, tyro.conf.subcommand("trl", prefix_name=False)]
        | Annotated[BenchPreset, tyro.conf.subcommand("preset", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]
