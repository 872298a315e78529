"""Records and whole runs for the tests of the run folder: content is a function of the step alone."""

from pathlib import Path
from typing import Any

import torch

from scoregram.runs import GroupRecord, RolloutRecord, RunWriter, UpdateRecord

CONFIG = {"seed": 7, "model": "tiny", "optimiser": {"name": "adamw", "lr": 1e-6}, "group_sizes": [2, 3]}
ENVIRONMENT = {"python": "3", "commit": None}


def make_group(step: int, size: int, seed: int = 0, *, layers: int = 2) -> GroupRecord:
    generator = torch.Generator().manual_seed(1000 * step + 10 * size + seed)
    scores = torch.randn(max(layers, 1), size, 5, generator=generator, dtype=torch.float64)
    grams = scores @ scores.mT
    return GroupRecord(
        step=step,
        prompt_id=f"p/{seed}",
        prompt=f"{seed} + {step} = ?",
        rewards=torch.randint(0, 2, (size,), generator=generator).double(),
        lengths=torch.randint(1, 9, (size,), generator=generator),
        advantages=torch.randn(size, generator=generator, dtype=torch.float64),
        gram=grams.sum(dim=0),
        by_layer={f"layers.{i}.mlp": grams[i] for i in range(layers)},
        statistics={"effective_rank": float(scores.sum()), "dead": float("nan")},
    )


def make_rollout(step: int, group: int, index: int, tokens: int = 6) -> RolloutRecord:
    generator = torch.Generator().manual_seed(1000 * step + 10 * group + index)
    return RolloutRecord(
        step=step,
        prompt_id=f"p/{group}",
        group=group,
        index=index,
        prompt="1 + 1 =",
        completion=" 2 é\n",
        token_ids=torch.randint(0, 99, (tokens,), generator=generator),
        prompt_length=2,
        reward=float(index),
        rewards={"exact": float(index), "format": None},
        log_probs=torch.randn(tokens, generator=generator),
        advantage=0.5,
        finished=index == 0,
    )


def make_update(step: int, features: int = 8, seed: int = 0) -> UpdateRecord:
    generator = torch.Generator().manual_seed(1000 * step + seed)
    return UpdateRecord(step=step, sketch=torch.randn(features, generator=generator), seed=seed)


def step_groups(step: int) -> list[GroupRecord]:
    """The groups of a step: one of two rollouts, one of three."""
    return [make_group(step, 2), make_group(step, 3, seed=1)]


def mean_reward(step: int) -> float:
    """Mean reward over the rollouts of a step."""
    return float(torch.cat([group.rewards for group in step_groups(step)]).mean())


def write_step(writer: RunWriter, step: int) -> None:
    """All that one step leaves behind; a checkpoint after every second one."""
    writer.write_groups(step, step_groups(step))
    writer.write_rollouts(step, [make_rollout(step, 0, 0), make_rollout(step, 0, 1, tokens=4)])
    writer.write_updates(step, [make_update(step)])
    writer.write_metrics(step, {"reward": mean_reward(step), "undefined": float("nan")})
    if step % 2 == 0:
        with writer.checkpoint(step) as folder:
            (folder / "state.bin").write_bytes(bytes([step % 256]) * 1000)
            (folder / "inner").mkdir()
            (folder / "inner" / "more.txt").write_text(f"step {step}")


def create(folder: Path, **options: Any) -> RunWriter:
    options = {"keep_checkpoints": 2, "environment": ENVIRONMENT, **options}
    return RunWriter.create(folder, CONFIG, **options)


def resume(folder: Path, step: int | None, **options: Any) -> RunWriter:
    options = {"keep_checkpoints": 2, "environment": ENVIRONMENT, **options}
    return RunWriter.resume(folder, step, **options)


def write(folder: Path, steps: range) -> None:
    """A whole run, never interrupted."""
    with create(folder) as writer:
        for step in steps:
            write_step(writer, step)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every name under a folder, with the content of files."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
