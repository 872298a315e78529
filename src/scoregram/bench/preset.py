"""`scoregram bench preset`: time and memory of a replication's steps, on random weights of its model's shape.

The trainer of the replication runs with the preset's settings. Every completion has the maximum length and every other
rollout is rewarded, so that a step costs at least as much as in a real run.
"""

import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scoregram.bench.harness import (
    GIB,
    bench_device,
    formatted_number,
    model_settings,
    peak_bytes,
    publish_rows,
    require_at_least,
)
from scoregram.bench.sample import endless_model
from scoregram.policy import character_tokenizer, context_of, without_bars
from scoregram.runs import METRICS, read_metrics
from scoregram.tasks import MAX_NEW_TOKENS
from scoregram.training import TrainConfig, train

_CALLER = "bench preset"
_REWARD = "scoregram.bench.preset:every_other"
"""Replaces the task's reward, which random weights would never earn."""


@dataclass(frozen=True)
class PresetRow:
    """One micro-batch size."""

    micro_batch_size: int
    """Rollouts per forward and backward pass; 0 for all at once."""
    plain_seconds: float | None = None
    """Median time of a step without a measurement: sampling, reward and update."""
    measured_seconds: float | None = None
    """Median time of a step with the Gram of all its rollouts."""
    sample_seconds: float | None = None
    """Median time of sampling alone, which is part of both."""
    probe_seconds: float | None = None
    """Time of a probe: fixed prompts, sampled at every temperature of the preset and measured."""
    eval_seconds: float | None = None
    """Time of an evaluation: greedy rollouts of the test problems."""
    peak_gib: float | None = None
    """Peak memory of the run: weights, gradients, optimiser state and what a step, a probe or an evaluation adds."""
    skipped: str | None = None
    """Why there are no numbers."""


_TABLE: Mapping[str, Callable[[PresetRow], str]] = {
    "per pass": lambda row: str(row.micro_batch_size or "all"),
    "plain s": lambda row: formatted_number(row.plain_seconds, ".3g"),
    "measured s": lambda row: formatted_number(row.measured_seconds, ".3g"),
    "sampling s": lambda row: formatted_number(row.sample_seconds, ".3g"),
    "probe s": lambda row: formatted_number(row.probe_seconds, ".3g"),
    "eval s": lambda row: formatted_number(row.eval_seconds, ".3g"),
    "GiB": lambda row: formatted_number(row.peak_gib, ".3g"),
}


def run_preset_bench(
    trained: TrainConfig,
    *,
    preset: str = "nemotron-4b-gsm8k",
    shape: str = "nemotron-4b",
    prompt_tokens: int = 100,
    steps: int = 6,
    eval_problems: int = 512,
    micro_batch_sizes: Sequence[int] = (),
    device: str = "auto",
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Train a few steps, print a table or JSON, and write the record if requested; options as in `BenchPreset`.

    `trained` is the config of the preset's runs at the largest group size of the paper.
    """
    require_at_least(_CALLER, prompt_tokens=(1, prompt_tokens), steps=(5, steps), eval_problems=(1, eval_problems))
    sizes = micro_batch_sizes or (trained.micro_batch_size,)
    require_at_least(_CALLER, micro_batch_sizes=(0, sizes))
    place = bench_device(device, caller=_CALLER)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = save_random_model(shape, place, folder / "model")
        write_problems(folder / "problems", prompt_tokens, eval_problems, steps * trained.batch_size)
        config = config_for(trained, folder, str(place), steps, eval_problems)
        rows = [
            trained_row(replace(config, micro_batch_size=size, out=folder / f"run-{size}"), place) for size in sizes
        ]
    settings |= {"preset": preset, "group_size": config.group_size, "batch_size": config.batch_size}
    settings |= {"prompt_tokens": prompt_tokens, "tokens": config.max_new_tokens, "eval_problems": eval_problems}
    settings |= {"steps": steps, "autocast": config.autocast, "gradient_checkpointing": config.gradient_checkpointing}
    size = f"{config.batch_size} rollouts × {config.max_new_tokens} tokens in groups of {config.group_size}"
    return publish_rows(
        settings,
        rows,
        as_json=as_json,
        out=out,
        title=f"{preset} on {settings['device']}: random {shape}; {size}",
        columns=_TABLE,
        notes=[f"{row.micro_batch_size or 'all'} per pass: skipped. {row.skipped}" for row in rows if row.skipped],
    )


def every_other(completions: Sequence[str], **_: object) -> list[float]:
    """A reward with TRL's signature: 1 and 0 alternate."""
    return [float(place % 2 == 0) for place in range(len(completions))]


def save_random_model(shape: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Save a random model and a character tokenizer; returns the settings of the record.

    The model itself is not returned, so that its memory is free when the trainer loads the saved copy.
    """
    model = endless_model(shape, "float32", device, caller=_CALLER)
    with without_bars():
        model.save_pretrained(folder)
    character_tokenizer(context_of(model)).save_pretrained(folder)
    return model_settings(shape, "float32", device, 0, 1, model)


def write_problems(folder: Path, prompt_tokens: int, tests: int, trained: int) -> None:
    """Write prompts of `prompt_tokens` characters, one token each, for both splits."""
    folder.mkdir()
    for split, count in (("train", trained), ("test", tests)):
        lines = (json.dumps({"prompt": f"{place:0{prompt_tokens}d}", "answer": "none"}) for place in range(count))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def config_for(trained: TrainConfig, folder: Path, device: str, steps: int, eval_problems: int) -> TrainConfig:
    """The preset's config on random weights: every other step measured, one probe and one evaluation."""
    return replace(
        trained,
        model=str(folder / "model"),
        device=device,
        prompt="plain",
        task=f"jsonl:{folder / 'problems'}",
        reward=_REWARD,
        max_new_tokens=trained.max_new_tokens or MAX_NEW_TOKENS,
        steps=steps,
        measure_every=2,
        batches_every=0,
        probe_every=2 * steps,  # only before the first step
        eval_every=2 * steps,
        eval_problems=eval_problems,
    )


def trained_row(config: TrainConfig, device: torch.device) -> PresetRow:
    """Train and read the times from the metrics; a run that does not fit into memory is skipped."""
    gc.collect()
    try:
        peak = peak_bytes(lambda: train(config, console=Console(quiet=True)), device) / GIB
    except torch.OutOfMemoryError as error:
        return PresetRow(config.micro_batch_size, skipped=str(error).split(". ")[0])
    first, *lines = read_metrics(config.out / METRICS).lines
    counted = lines[2:-1]  # the last step includes an evaluation

    def median(name: str, is_measured: bool | None = None) -> float:
        chosen = [line for line in counted if is_measured is None or is_measured == (line["step"] % 2 == 0)]
        return statistics.median(line[name] for line in chosen)

    return PresetRow(
        micro_batch_size=config.micro_batch_size,
        plain_seconds=median("time/step", False),
        measured_seconds=median("time/step", True),
        sample_seconds=median("time/sample"),
        probe_seconds=first["time/probe"],
        eval_seconds=first["time/eval"],
        peak_gib=peak,
    )
