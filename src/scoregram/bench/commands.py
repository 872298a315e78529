"""The commands of `scoregram bench`, one frozen dataclass each. Nothing heavy is imported here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from scoregram.training import TrainConfig


def options(command: object) -> dict[str, Any]:
    """The fields of a command as arguments of the function that it runs."""
    return {"as_json" if name == "json" else name: value for name, value in vars(command).items()}


@dataclass(frozen=True)
class BenchGram:
    """Measure what the exact Gram costs, beside a plain step and the other ways to get it, in one process."""

    shape: str = "llama-25m"
    """llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: tuple[int, ...] = (8,)
    """Numbers of rollouts."""
    tokens: tuple[int, ...] = (128, 512)
    """Tokens per rollout, a quarter of them prompt."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    lora: int = 0
    """Train adapters of this rank only; 0 trains everything."""
    ways: tuple[str, ...] = ("gram+gradient", "gram", "n-backwards", "vmap", "opacus")
    """What to time beside the plain step."""
    repeats: int = 5
    """Timed calls of each, in turns."""
    threads: int = 1
    """Threads on a CPU."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""
    plot: Path | None = None
    """Also plot the ratios here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.gram import run_gram_bench

        return run_gram_bench(**options(self))


@dataclass(frozen=True)
class BenchTrain:
    """Compare the steps per second of the trainer with those of TRL's GRPOTrainer, in a process each, on a CPU."""

    model: str = "tiny"
    """Hub id, folder, `.gguf` file or `tiny`."""
    task: str = "arithmetic"
    """arithmetic[:TERMS], gsm8k[:FOLDER], reasoning-gym:NAME or jsonl:FILE; prompts are plain text."""
    reward: str | None = None
    """`module:function` with TRL's signature, in place of the task's reward."""
    group_size: int = 8
    """Rollouts of one prompt."""
    batch_sizes: tuple[int, ...] = (8, 64)
    """Rollouts of one update."""
    max_new_tokens: int = 0
    """Longest completion; 0 for what the task suggests."""
    learning_rate: float = 1e-4
    """Of AdamW, constant."""
    steps: int = 30
    """Updates that are timed."""
    warmup: int = 10
    """Updates before them."""
    ways: tuple[str, ...] = ("trl", "scoregram", "unmeasured")
    """Trainers: TRL's, and scoregram's with every step measured and with none."""
    repeats: int = 5
    """Processes of each, in turns."""
    threads: int = 1
    """Threads of torch."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.train import run_train_bench

        return run_train_bench(**options(self))


@dataclass(frozen=True)
class BenchSample:
    """Compare the tokens per second of the sampler with those of transformers' `generate`, in one process."""

    shape: str = "tiny"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 64
    """Rollouts in all, whole groups."""
    group_size: int = 8
    """Rollouts of one prompt."""
    prompt_tokens: int = 16
    """Length of every prompt."""
    tokens: int = 48
    """New tokens of every rollout; none stops before."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    repeats: int = 5
    """Timed calls of each, in turns."""
    threads: int = 1
    """Threads on a CPU."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.sample import run_sample_bench

        return run_sample_bench(**options(self))


@dataclass(frozen=True)
class BenchTrl:
    """Compare measured with plain optimisation steps of TRL's GRPOTrainer, in turns, on a CPU."""

    shape: str = "llama-25m"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    rollouts: int = 16
    """Rollouts of one update, whole groups."""
    group_size: int = 8
    """Rollouts of one prompt."""
    micro_batch_size: int = 8
    """Rollouts of one backward pass of the trainer where it accumulates."""
    tokens: int = 128
    """Completion tokens of every rollout."""
    ways: tuple[str, ...] = ("fused", "beside", "accumulated", "idle")
    """In one backward pass, in one of its own, in one of its own where the trainer accumulates, at steps between."""
    modes: tuple[str, ...] = ("scores", "loss")
    """What is measured."""
    checkpointing: tuple[bool, ...] = (False, True)
    """Without and with gradient checkpointing."""
    repeats: int = 5
    """Timed steps of each kind, in turns."""
    threads: int = 1
    """Threads of torch."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> int:
        """Measure and print."""
        from scoregram.bench.trl import run_trl_bench

        return run_trl_bench(**options(self))


@dataclass(frozen=True)
class BenchPreset:
    """Time and memory of a replication's steps, by its own trainer on random weights of the shape it is meant for."""

    preset: str = "nemotron-4b-gsm8k"
    """A preset of `scoregram replicate`; its largest group size of the paper is trained."""
    shape: str = "nemotron-4b"
    """tiny, llama-tiny, llama-25m, smollm2-135m, llama-1b or nemotron-4b; weights are random."""
    prompt_tokens: int = 100
    """Length of every prompt."""
    steps: int = 6
    """Updates, every other one measured; the first two are not counted."""
    eval_problems: int = 512
    """Test problems of the evaluation."""
    micro_batch_sizes: tuple[int, ...] = ()
    """Rollouts of one pass, tried one after the other; the preset's own if not given."""
    device: str = "auto"
    """auto, cpu or cuda."""
    json: bool = False
    """Print strict JSON instead of a table."""
    out: Path | None = None
    """Also write the JSON here."""

    def run(self, config: TrainConfig) -> int:
        """Measure the preset's config and print."""
        from scoregram.bench.preset import run_preset_bench

        return run_preset_bench(config, **options(self))


@dataclass(frozen=True)
class Bench:
    """Measure what the Gram costs, how fast training and sampling are, and what measured steps cost elsewhere."""

    what: Annotated[
        Annotated[BenchGram, tyro.conf.subcommand("gram", prefix_name=False)]
        | Annotated[BenchTrain, tyro.conf.subcommand("train", prefix_name=False)]
        | Annotated[BenchSample, tyro.conf.subcommand("sample", prefix_name=False)]
        | Annotated[BenchTrl, tyro.conf.subcommand("trl", prefix_name=False)]
        | Annotated[BenchPreset, tyro.conf.subcommand("preset", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]
