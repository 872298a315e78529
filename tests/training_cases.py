"""A policy small enough to train in a test, a task, and configs for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scoregram.policy.tiny import WarmStart, character_tokenizer, untrained
from scoregram.training.config import TrainConfig

SMALL = WarmStart(hidden_size=16, intermediate_size=24, layers=2, heads=2)
JUDGE = "tests.training_cases:judge"


def save_policy(folder: Path, seed: int = 0, fill: Mapping[str, float] | None = None) -> Path:
    """A random Llama that reads characters, as a folder that transformers can load."""
    model = untrained(SMALL, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform, so that rollouts differ
        for name, value in (fill or {}).items():
            model.get_parameter(name).fill_(value)
    model.save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return folder


def judge(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that random text gets now and then: whether its characters have an even sum."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def config_for(model: Path, out: Path, **changes: Any) -> TrainConfig:
    """A run of a few steps that takes a second."""
    settings: dict[str, Any] = {
        "out": out,
        "model": str(model),
        "reward": JUDGE,
        "task": "arithmetic:3",
        "prompt": "plain",
        "device": "cpu",
        "steps": 3,
        "batch_size": 12,
        "group_size": 4,
        "max_new_tokens": 6,
        "learning_rate": 1e-3,
        "eval_every": 2,
        "eval_problems": 6,
        "rollouts_every": 2,
        "checkpoint_every": 1,
        "threads": 1,
    }
    return TrainConfig(**(settings | changes))


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock says."""
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in metrics]
