"""The policy that runs of a replication begin with, written once as a folder."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scoregram.policy import PolicyConfig, load_policy
from scoregram.replication.presets import Preset
from scoregram.runs import write_atomically
from scoregram.tasks import load_task
from scoregram.training import warm_start, write_warm_start

STAMP = "start.json"
"""Written last: a folder without it, or with other settings in it, is made again."""


def prepared(preset: Preset, folder: Path, *, seed: int, device: str, tell: Callable[[str], None]) -> Path:
    """The folder of a start, made if it is not there: the model, taught by written solutions if asked for.

    A seed is the order of those solutions.
    """
    settings: dict[str, Any] = {
        name: getattr(preset, name) for name in ("model", "task", "warm_epochs", "warm_rate", "warm_batch", "autocast")
    } | ({"seed": seed} if preset.warm_epochs else {})
    stamp = folder / STAMP
    if stamp.is_file() and json.loads(stamp.read_text()) == settings:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    task = load_task(preset.task)
    config = PolicyConfig(model=preset.model, device=device, prompt=preset.prompt, autocast=preset.autocast)
    policy = load_policy(config, task)
    if preset.warm_epochs:
        warm_start(
            policy,
            task,
            epochs=preset.warm_epochs,
            batch_size=preset.warm_batch,
            learning_rate=preset.warm_rate,
            seed=seed,
            tell=tell,
        )
    write_warm_start(policy, folder)
    write_atomically(stamp, json.dumps(settings).encode())
    del policy
    give_memory_back()
    return folder


def give_memory_back() -> None:
    """Leave a GPU to the processes that train next: torch keeps the memory of what is gone for its own process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
