"""The presets of the replication: the same experiment in three sizes, the runs of each, and the settings file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from scoregram.checks import fail, lookup
from scoregram.runs import CONFIG_FILE, disk_errors, require_own_folder, write_atomically
from scoregram.studies.grpo_rank import PAPER_SIZES
from scoregram.studies.record import RUNS, SETTING, START
from scoregram.training import TrainConfig

PAPER_METHOD = "grpo-paper"
"""Group mean as baseline, output-only reward; no clipping, no KL term, no division by the standard deviation."""


@dataclass(frozen=True)
class Preset:
    """One experiment: a policy, a task, and the same number of rollouts per step for every group size."""

    about: str
    model: str
    """As `scoregram train --model` takes it."""
    task: str
    sizes: tuple[int, ...]
    """Group sizes `R`."""
    seeds: int
    """Runs for each group size and method, unless the command asks for another number."""
    steps: int
    batch_size: int
    """Rollouts per step, the same for every group size."""
    learning_rate: float
    max_new_tokens: int
    measure_every: int
    batches_every: int
    """Steps between Grams of whole batches, and between probes of fixed prompts; a multiple of `measure_every`."""
    eval_every: int
    eval_problems: int
    eval_samples: int = 0
    """Rollouts sampled for each test problem besides the greedy one."""
    micro_batch_size: int = 0
    """Rollouts per forward pass; 0 for all at once."""
    rivals: tuple[str, ...] = ()
    """Other methods, also trained at the largest group size of the paper."""
    warm_epochs: float = 0.0
    """Epochs of supervised training on reference solutions before the first step; 0 for none."""
    warm_rate: float = 3e-4
    warm_batch: int = 32
    warmup_steps: int = 0
    autocast: bool = False
    gradient_checkpointing: bool = False
    prompt: Literal["auto", "plain", "chat"] = "plain"
    temperatures: tuple[float, ...] = (1.0, 0.7)
    """Sampling temperatures of the probes of fixed prompts; the first is the training temperature."""
    workers: int = 1
    """Processes that train in parallel."""
    reward: str | None = None
    """`module:function` that replaces the task's reward."""

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
class PlannedRun:
    """One run of a replication."""

    name: str
    size: int
    seed: int
    method: str
    config: TrainConfig


def start_of(preset: Preset, folder: Path, seed: int) -> Path:
    """Folder of the policy that the runs of a seed start from: one for all seeds, or one per seed after a warm start.

    With a warm start per seed the spread over seeds is that of the whole experiment, and seeds can run on different
    machines.
    """
    return folder / START / f"seed{seed}" if preset.warm_epochs else folder / START


def plan(preset: Preset, folder: Path, *, seeds: int, device: str) -> tuple[PlannedRun, ...]:
    """All runs, seed by seed, so that an interrupted replication has complete seeds.

    Args:
        preset: The experiment.
        folder: The folder of the replication; runs go to `runs/NAME` inside.
        seeds: Seeds 0, 1, ….
        device: As in `TrainConfig`.
    """
    largest = _largest_paper_size(preset)
    runs = []
    for seed in range(seeds):
        wanted = [(size, PAPER_METHOD) for size in preset.sizes] + [(largest, rival) for rival in preset.rivals]
        for size, method in wanted:
            name = _name(size, seed, method)
            sized = _sized_config(preset, size, model=str(start_of(preset, folder, seed)), device=device)
            config = replace(sized, out=folder / RUNS / name, method=method, seed=seed)
            runs.append(PlannedRun(name, size, seed, method, config))
    return tuple(runs)


def run_name(config: Mapping[str, Any]) -> str | None:
    """Name of a run of this study, from the group size, seed and method in its config; None if it lacks one of them.

    Example:
        >>> run_name({"group_size": 8, "seed": 1, "method": "rloo"})
        'rloo-R8-seed1'
    """
    known = [config.get(key) for key in ("group_size", "seed", "method")]
    return None if None in known else _name(*known)


def _name(size: Any, seed: Any, method: Any) -> str:
    return f"R{size}-seed{seed}" if method == PAPER_METHOD else f"{method}-R{size}-seed{seed}"


def largest_config(preset: str) -> TrainConfig:
    """Config of a preset's runs at the largest group size of the paper, on the preset's own model.

    Raises:
        ScoregramError: If there is no such preset.
    """
    chosen = lookup(PRESETS, preset, kind="bench preset --preset")
    return _sized_config(chosen, _largest_paper_size(chosen), model=chosen.model, device="auto")


def _largest_paper_size(preset: Preset) -> int:
    return max((size for size in preset.sizes if size <= max(PAPER_SIZES)), default=min(preset.sizes))


def _sized_config(preset: Preset, size: int, *, model: str, device: str) -> TrainConfig:
    """Settings that all runs of one group size share."""
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
        group_size=size,
        micro_batch_size=preset.micro_batch_size,
        max_new_tokens=preset.max_new_tokens,
        learning_rate=preset.learning_rate,
        warmup_steps=preset.warmup_steps,
        measure_every=preset.measure_every,
        layers="float32",
        layer_detail="probes",
        keep_prompts=False,
        keep_evidence=True,
        batches_every=0 if preset.micro_batch_size else preset.batches_every,
        probe_every=preset.batches_every,
        probe_problems=preset.batch_size // size,
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
    """Write the settings of a replication into its folder, unless the folder already holds another replication.

    Settings of which no run has begun, such as those of a command with a misspelt model, are replaced.

    Raises:
        ScoregramError: If the folder holds runs with other settings, of which only the number of seeds may grow, or
            holds something that is not a replication.
    """
    require_own_folder(folder, SETTING, caller="replicate --out")
    path = folder / SETTING
    setting = {"preset": name, **preset.record(), "seeds": seeds}
    if path.is_file() and any(folder.glob(f"{RUNS}/*/{CONFIG_FILE}")):
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in setting if before.get(key) != setting[key] and key != "seeds"]
        if other:
            got = ", ".join(f"{key} {before.get(key)!r}" for key in other)
            fail("replicate", f"{folder} must hold the same replication", got, "Choose another folder for this one.")
        if before["seeds"] > seeds:
            there = before["seeds"]
            fail("replicate --seeds", f"{folder} has runs of {there} seeds", seeds, f"Ask for {there} or more.")
    with disk_errors(folder, caller="replicate --out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(setting, indent=1) + "\n").encode())
    return setting


def read_setting(folder: Path) -> Mapping[str, Any]:
    """Settings of the replication in a folder.

    Raises:
        ScoregramError: If the folder holds none.
    """
    path = folder / SETTING
    if not path.is_file():
        fail("replicate", f"{folder} must be the folder of a replication", f"no {SETTING}", "Check the path.")
    return json.loads(path.read_text(encoding="utf-8"))
