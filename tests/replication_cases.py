"""A small replication: real run folders, a table and a verdict that are computed from their Grams, and its record."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.exhibits import Estimate, Figure, Series, Table, to_plain
from scoregram.runs import BatchRecord, GroupRecord, RunWriter, open_run
from scoregram.studies.grpo_rank.presets import PAPER_METHOD
from scoregram.studies.grpo_rank.readings import Evidence, read_evidence
from scoregram.studies.record import EXHIBITS, RUNS, VERDICTS, write_record
from tests.run_cases import ENVIRONMENT, write

CREATED = date(2026, 7, 4)
SIGNED = datetime(2026, 7, 4, 12, 30, 15, tzinfo=UTC)
PAPER = "arXiv:2606.29238"


def make_key(path: Path) -> bytes:
    """Write a new ed25519 key into a PEM file; the 32 bytes of its public half."""
    from cryptography.hazmat.primitives import serialization as form  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # pyright: ignore[reportMissingImports]

    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    return key.public_key().public_bytes_raw()


def recompute(folder: Path) -> tuple[list[Any], list[Any]]:
    """A table of mean traces, a figure of them over steps, and a verdict on their sum."""
    runs = {path.name: list(open_run(path).groups()) for path in sorted((folder / RUNS).iterdir())}
    traces = {
        name: [float(torch.trace(group.gram)) for group in groups if group.gram is not None]
        for name, groups in runs.items()
    }
    rows = tuple((name, Estimate(sum(t) / len(t), min(t), max(t)), len(t)) for name, t in traces.items())
    table = Table("traces", "Traces", "Mean and range.", ("run", "trace of K", "groups"), rows)
    series = tuple(Series(name, tuple(map(float, range(len(t)))), tuple(t)) for name, t in traces.items())
    figure = Figure("over-steps", "Traces", "One point a group.", "group", "trace", series)
    verdict = {"id": "trace-positive", "verdict": "replicated", "effect": sum(map(sum, traces.values())), "σ": None}
    return to_plain([table, figure]), [verdict]


def write_parts(folder: Path, exhibits: list[Any], verdicts: list[Any]) -> None:
    for name, parts in ((EXHIBITS, exhibits), (VERDICTS, verdicts)):
        folder.joinpath(name).write_text(json.dumps({Path(name).stem: parts}, allow_nan=False))


def put_record(folder: Path, **options: Any) -> Path:
    settings = {"about": PAPER, "config": {"preset": "quick", "lr": 1e-6}, "seeds": (0, 1), "created": CREATED}
    return write_record(folder, **{"environment": ENVIRONMENT, "signed_at": SIGNED, **settings, **options})


def replication(folder: Path, **options: Any) -> Path:
    """The whole folder; returns its record."""
    for name, steps in (("a", 2), ("b", 1)):
        write(folder / RUNS / name, range(steps))
    write_parts(folder, *recompute(folder))
    (folder / "report.html").write_text("a view of the data, not data")
    (folder / RUNS / "a" / "report.html").write_text("likewise")
    return put_record(folder, **options)


PROBED = ("fixed", "fixed, sampled at 0.7, scored at 0.7", "fixed, sampled at 0.7, scored at 1")
LAYERS = ("mlp", "attention")


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_scores(size: int, generator: torch.Generator, dimensions: int = 6) -> Tensor:
    """Random scores that share a direction and differ in length."""
    scores = torch.randn(size, dimensions, generator=generator, dtype=torch.float64)
    lengths = 0.5 + torch.rand(size, 1, generator=generator, dtype=torch.float64)
    return (scores + 0.5) * lengths


def draw_group(
    step: int, size: int, generator: torch.Generator, *, rewards: Sequence[float] | Tensor | None = None, **more: Any
) -> GroupRecord:
    """A measured group with random scores, split over two layers; its rewards are right or wrong unless given."""
    scores = draw_scores(size, generator)
    drawn = torch.randint(0, 2, (size,), generator=generator).double()
    given = drawn if rewards is None else torch.as_tensor(rewards, dtype=torch.float64)
    parts = (scores[:, :3], scores[:, 3:])
    named: dict[str, Any] = {
        "prompt_id": f"p/{int(torch.randint(0, 10**6, (), generator=generator))}",
        "lengths": torch.randint(1, 9, (size,), generator=generator),
        "gram": scores @ scores.mT,
        "by_layer": {name: part @ part.mT for name, part in zip(LAYERS, parts, strict=True)},
    }
    return GroupRecord(step=step, rewards=given, advantages=given - given.mean(), **(named | more))


def draw_batch(step: int, prompts: int, size: int, generator: torch.Generator, **more: Any) -> BatchRecord:
    """A whole batch with random scores."""
    count = prompts * size
    scores = draw_scores(count, generator, dimensions=count)
    named: dict[str, Any] = {
        "prompt_ids": tuple(f"p/{place}" for place in range(prompts)),
        "sizes": torch.full((prompts,), size),
        "rewards": torch.randint(0, 2, (count,), generator=generator).double(),
        "lengths": torch.randint(1, 9, (count,), generator=generator),
        "weights": torch.zeros(count, dtype=torch.float64),
        "gram": scores @ scores.mT,
    }
    return BatchRecord(step=step, **(named | more))


def write_trial(
    folder: Path,
    *,
    size: int,
    seed: int = 0,
    method: str = PAPER_METHOD,
    groups: Sequence[GroupRecord] = (),
    batches: Sequence[BatchRecord] = (),
    metrics: Mapping[int, Mapping[str, Any]] | None = None,
    **more: Any,
) -> None:
    """A run of a replication with exactly this in it."""
    config = {"group_size": size, "seed": seed, "method": method, **more}
    with RunWriter.create(folder, config, environment=ENVIRONMENT, layers="float64") as writer:
        for step in sorted({one.step for one in (*groups, *batches)} | set(metrics or {})):
            writer.write_groups(step, [group for group in groups if group.step == step])
            writer.write_batches(step, [batch for batch in batches if batch.step == step])
            if metrics and step in metrics:
                writer.write_metrics(step, metrics[step])


def toy_metrics(steps: int, generator: torch.Generator) -> dict[int, dict[str, Any]]:
    """Something for every scalar that exhibits read; an evaluation every second step."""
    made: dict[int, dict[str, Any]] = {0: {"eval/accuracy": 0.1}}
    for step in range(1, steps + 1):
        rank, snr, reward, accuracy = torch.rand(4, generator=generator).tolist()
        made[step] = {"group/effective_rank": 1 + rank, "gram/snr": snr, "reward": reward}
        made[step] |= {"live_groups": 1 + step % 3, "groups": 4}
        made[step] |= {"eval/accuracy": accuracy} if step % 2 == 0 else {}
    return made


def toy_evidence(folder: Path, *, sizes: Sequence[int] = (2, 4, 8), seeds: int = 2, steps: int = 4) -> Evidence:
    """A replication made of random numbers, with every kind of group and batch, and one other method."""
    for seed in range(seeds):
        for size in sizes:
            generator = stream(100 * seed + size)
            groups = [draw_group(step, size, generator) for step in range(1, steps + 1) for _ in range(6)]
            groups += [draw_group(step, size, generator, kind=kind) for step in (0, 2) for kind in PROBED]
            groups += [draw_group(2, size, generator, kind="test", gram=None, by_layer={})]
            batches = [draw_batch(step, 4, size, generator) for step in (2, 4)]
            groups += [  # the groups of those batches, as a run stores both
                draw_group(batch.step, size, generator, rewards=rewards, prompt_id=name)
                for batch in batches
                for name, rewards in zip(batch.prompt_ids, batch.rewards.view(4, size), strict=True)
            ]
            batches += [draw_batch(2, 4, size, generator, kind="fixed")]
            write_trial(
                folder / RUNS / f"R{size}-seed{seed}",
                size=size,
                seed=seed,
                groups=groups,
                batches=batches,
                metrics=toy_metrics(steps, generator),
            )
        generator = stream(1000 + seed)
        rival = max(sizes)
        groups = [draw_group(1, rival, generator) for _ in range(4)]
        name = folder / RUNS / f"rloo-R{rival}-seed{seed}"
        write_trial(name, size=rival, seed=seed, method="rloo", groups=groups, metrics=toy_metrics(steps, generator))
    return read_evidence(folder)
