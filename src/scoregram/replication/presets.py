"""What a replication trains and measures: three sizes of the same experiment. Nothing heavy is imported here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from scoregram.checks import fail
from scoregram.training import TrainConfig

RUNS = "runs"
"""Folder of the runs inside that of a replication."""
START = "start"
"""Folder of the policies that runs begin with."""
SETTING = "setting.json"
"""What a replication is: its preset and seeds."""
METHOD = "grpo-paper"
"""Mean of the group as baseline, output-only reward, no clip, no KL, no standard deviation."""


@dataclass(frozen=True)
class Preset:
    """One experiment: a policy, a task, and the same number of rollouts for every group size."""

    about: str
    model: str
    """As `scoregram train --model` takes it."""
    task: str
    sizes: tuple[int, ...]
    """Group sizes `R`."""
    seeds: int
    """Runs for each of them, if not asked for otherwise."""
    steps: int
    batch_size: int
    """Rollouts of a step, whatever the group size."""
    learning_rate: float
    max_new_tokens: int
    measure_every: int
    batches_every: int
    """Steps between two Grams of whole batches, and between two probes of fixed prompts; a multiple of the former."""
    eval_every: int
    eval_problems: int
    eval_samples: int = 0
    """Rollouts sampled for each test problem besides the greedy one."""
    micro_batch_size: int = 0
    """Rollouts in one pass; 0 for all at once."""
    rivals: tuple[str, ...] = ()
    """Other methods, trained at the largest group size of the paper beside GRPO."""
    warm_epochs: float = 0.0
    """Passes over written solutions before the first step; 0 takes the model as it is."""
    warm_rate: float = 3e-4
    warm_batch: int = 32
    warmup_steps: int = 0
    autocast: bool = False
    gradient_checkpointing: bool = False
    prompt: Literal["auto", "plain", "chat"] = "plain"
    temperatures: tuple[float, ...] = (1.0, 0.7)
    """Temperatures that fixed prompts are probed at; the first is the policy's own."""
    workers: int = 1
    """Processes that train side by side."""
    reward: str | None = None
    """`module:function` in place of the task's reward."""

    def record(self) -> dict[str, Any]:
        """The preset as plain values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


PRESETS: MappingProxyType[str, Preset] = MappingProxyType(
    {
        "quick": Preset(
            about="the embedded policy on arithmetic: minutes on two cores",
            model="tiny",
            task="arithmetic",
            sizes=(2, 4, 8),
            seeds=2,
            steps=30,
            batch_size=64,
            learning_rate=3e-5,
            max_new_tokens=0,
            measure_every=2,
            batches_every=10,
            eval_every=10,
            eval_problems=200,
            rivals=("grpo", "optimal"),
            workers=2,
        ),
        "smollm2-gsm8k": Preset(
            about="SmolLM2-135M on GSM8K, taught its format first: one GPU",
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            task="gsm8k",
            sizes=(2, 4, 8, 16),
            seeds=3,
            steps=60,
            batch_size=128,
            learning_rate=2e-5,
            max_new_tokens=200,
            measure_every=5,
            batches_every=20,
            eval_every=30,
            eval_problems=1319,
            eval_samples=2,
            warm_epochs=3.0,
            warm_rate=4e-4,
            warm_batch=64,
            warmup_steps=5,
            autocast=True,
            gradient_checkpointing=True,
        ),
        "nemotron-4b-gsm8k": Preset(
            about="the paper's own scale: one GPU with 140 GB, and the weights",
            model="nvidia/Nemotron-Mini-4B-Instruct",
            task="gsm8k",
            sizes=(2, 4, 8),
            seeds=3,
            steps=200,
            batch_size=64,
            micro_batch_size=32,
            learning_rate=1e-6,
            max_new_tokens=320,
            measure_every=10,
            batches_every=50,
            eval_every=50,
            eval_problems=1319,
            warmup_steps=10,
            autocast=True,
            gradient_checkpointing=True,
            prompt="chat",
        ),
    }
)


@dataclass(frozen=True)
class Planned:
    """One run of a replication."""

    name: str
    size: int
    seed: int
    method: str
    config: TrainConfig


def start_of(preset: Preset, folder: Path, seed: int) -> Path:
    """Where the policy is that the runs of a seed begin with: one for all seeds, or, where it is taught, one for each.

    So the spread over seeds is that of the whole experiment, and seeds may come from different machines.
    """
    return folder / START / f"seed{seed}" if preset.warm_epochs else folder / START


def plan(preset: Preset, folder: Path, *, seeds: int, device: str) -> tuple[Planned, ...]:
    """All runs, seed by seed, so that an interrupted replication has whole seeds.

    Args:
        preset: What to train.
        folder: Of the replication; runs go to `runs/NAME` inside.
        seeds: Seeds 0, 1, ….
        device: As in `TrainConfig`.
    """
    largest = max((size for size in preset.sizes if size <= 8), default=min(preset.sizes))
    runs = []
    for seed in range(seeds):
        wanted = [(size, METHOD) for size in preset.sizes] + [(largest, rival) for rival in preset.rivals]
        for size, method in wanted:
            name = f"R{size}-seed{seed}" if method == METHOD else f"{method}-R{size}-seed{seed}"
            common = config_of(preset, str(start_of(preset, folder, seed)), device)
            config = replace(
                common,
                out=folder / RUNS / name,
                group_size=size,
                probe_problems=preset.batch_size // size,
                method=method,
                seed=seed,
            )
            runs.append(Planned(name, size, seed, method, config))
    return tuple(runs)


def config_of(preset: Preset, model: str, device: str) -> TrainConfig:
    """What all runs have in common."""
    return TrainConfig(
        model=model,
        device=device,
        prompt=preset.prompt,
        task=preset.task,
        reward=preset.reward,
        autocast=preset.autocast,
        gradient_checkpointing=preset.gradient_checkpointing,
        steps=preset.steps,
        batch_size=preset.batch_size,
        micro_batch_size=preset.micro_batch_size,
        max_new_tokens=preset.max_new_tokens,
        learning_rate=preset.learning_rate,
        warmup_steps=preset.warmup_steps,
        measure_every=preset.measure_every,
        layers="float32",
        layer_detail="probes",
        keep_prompts=False,
        batches_every=0 if preset.micro_batch_size else preset.batches_every,
        probe_every=preset.batches_every,
        probe_temperatures=preset.temperatures,
        rollouts_every=0,
        eval_every=preset.eval_every,
        eval_problems=preset.eval_problems,
        eval_samples=preset.eval_samples,
        checkpoint_every=0,
        final_checkpoint=False,
        threads=1 if preset.workers > 1 else 0,
    )


def write_setting(folder: Path, name: str, preset: Preset, *, seeds: int) -> Mapping[str, Any]:
    """Write what a replication is into its folder, or see that the same one is there.

    Raises:
        ScoregramError: If the folder holds another replication; only the number of seeds may have grown.
    """
    from scoregram.runs import write_atomically  # its room loads torch

    path = folder / SETTING
    setting = {"preset": name, **preset.record(), "seeds": seeds}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in setting if before.get(key) != setting[key] and key != "seeds"]
        if other:
            got = ", ".join(f"{key} {before.get(key)!r}" for key in other)
            fail("replicate", f"{folder} must hold the same replication", got, "Choose another folder for this one.")
        if before["seeds"] > seeds:
            there = before["seeds"]
            fail("replicate --seeds", f"{folder} has runs of {there} seeds", seeds, f"Ask for {there} or more.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(setting, indent=1) + "\n").encode())
    return setting


def read_setting(folder: Path) -> Mapping[str, Any]:
    """What the replication in a folder is.

    Raises:
        ScoregramError: If there is none.
    """
    path = folder / SETTING
    if not path.is_file():
        fail("replicate", f"{folder} must be the folder of a replication", f"no {SETTING}", "Check the path.")
    return json.loads(path.read_text(encoding="utf-8"))
