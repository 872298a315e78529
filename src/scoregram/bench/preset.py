"""`scoregram bench preset`: time and memory of a replication's steps, on random weights of the shape it is meant for.

The trainer itself runs, on the preset's own settings, from a folder with the weights; nothing ends before the longest
completion and every other rollout is rewarded, so that a step costs at least as much as in earnest.
"""

import gc
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scoregram.bench.clock import peak_bytes
from scoregram.bench.gram import GIB, settings
from scoregram.bench.record import publish
from scoregram.bench.sample import built, chosen_device
from scoregram.checks import fail
from scoregram.policy import character_tokenizer, context_of, without_bars
from scoregram.runs import METRICS, read_metrics
from scoregram.tasks import MAX_NEW_TOKENS
from scoregram.training import TrainConfig, train

CALLER = "bench preset"
REWARD = "scoregram.bench.preset:every_other"
"""In place of the task's reward, which random weights would never earn."""


@dataclass(frozen=True)
class Row:
    """One size of the passes that a step is made in."""

    micro_batch_size: int
    """Rollouts of one pass; 0 for all at once."""
    plain_seconds: float | None
    """Median step without a measurement: sampling, reward and update."""
    measured_seconds: float | None
    """Median step with the Gram of all its rollouts."""
    sample_seconds: float | None
    """Median time of sampling alone, part of both."""
    probe_seconds: float | None
    """Fixed prompts, sampled at every temperature of the preset and measured."""
    eval_seconds: float | None
    """Greedy rollouts of the test problems."""
    peak_gib: float | None
    """Highest memory of the run: weights, gradients, moments and all that a step, a probe or an evaluation adds."""
    skipped: str | None = None
    """Why there are no figures."""


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
    """Train a few steps, print a table or JSON, and write the record if asked for.

    Args:
        trained: The config of the preset's runs at the largest group size of the paper.
        preset: The name of the preset, for the record.
        shape: A name of `SHAPES`; weights are random.
        prompt_tokens: Length of every prompt.
        steps: Updates, every other one measured; the first two are not counted.
        eval_problems: Test problems of the evaluation before the first step.
        micro_batch_sizes: Rollouts of one pass, to be tried one after the other; the preset's own if not given.
        device: auto, cpu or cuda.
        as_json: Print strict JSON instead of a table.
        out: Where to write the record.
    """
    least = {"prompt_tokens": (prompt_tokens, 1), "steps": (steps, 5), "eval_problems": (eval_problems, 1)}
    for name, (value, smallest) in least.items():
        if value < smallest:
            remedy = "Choose a larger number."
            fail(f"{CALLER} --{name.replace('_', '-')}", f"must be at least {smallest}", value, remedy)
    place = chosen_device(device)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        about = settings_of(written(shape, place, where / "model"), shape, place)
        write_problems(where / "problems", prompt_tokens, eval_problems, steps * trained.batch_size)
        config = config_for(trained, where, str(place), steps, eval_problems)
        sizes = micro_batch_sizes or (trained.micro_batch_size,)
        rows = [measured(replace(config, micro_batch_size=size, out=where / f"run-{size}"), place) for size in sizes]
    asked = {"preset": preset, "group_size": config.group_size, "batch_size": config.batch_size}
    asked |= {"prompt_tokens": prompt_tokens, "tokens": config.max_new_tokens, "eval_problems": eval_problems}
    asked |= {"steps": steps, "autocast": config.autocast, "gradient_checkpointing": config.gradient_checkpointing}
    record = {"settings": about | asked, "rows": [asdict(row) for row in rows]}
    publish(record, as_json=as_json, out=out, show=lambda: print_rows(rows, record["settings"]))
    return 0


def every_other(completions: Sequence[str], **_: object) -> list[float]:
    """A reward with TRL's signature: 1 and 0 in turns."""
    return [float(place % 2 == 0) for place in range(len(completions))]


def written(shape: str, device: torch.device, folder: Path) -> Any:
    """The model, which is in the folder by now, with a tokenizer that reads one character as one token."""
    model = built(shape, "float32", device)
    with without_bars():
        model.save_pretrained(folder)
    character_tokenizer(context_of(model)).save_pretrained(folder)
    return model


def settings_of(model: Any, shape: str, device: torch.device) -> dict[str, object]:
    """What the record says of the model and the machine; the model itself is free to go then."""
    return settings(shape, "float32", device, 0, 1, model)


def write_problems(folder: Path, prompt_tokens: int, tests: int, trained: int) -> None:
    """Prompts of one length, a character a token, for both splits."""
    folder.mkdir()
    for split, count in (("train", trained), ("test", tests)):
        lines = (json.dumps({"prompt": f"{place:0{prompt_tokens}d}", "answer": "none"}) for place in range(count))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def config_for(trained: TrainConfig, folder: Path, device: str, steps: int, eval_problems: int) -> TrainConfig:
    """The preset's config on random weights, with every other step measured and one probe and one evaluation."""
    return replace(
        trained,
        model=str(folder / "model"),
        device=device,
        prompt="plain",
        task=f"jsonl:{folder / 'problems'}",
        reward=REWARD,
        max_new_tokens=trained.max_new_tokens or MAX_NEW_TOKENS,
        steps=steps,
        measure_every=2,
        batches_every=0,
        probe_every=2 * steps,  # before the first step alone
        eval_every=2 * steps,
        eval_problems=eval_problems,
    )


def measured(config: TrainConfig, device: torch.device) -> Row:
    """Train, and read where the time went; a run that does not fit into memory says so."""
    nothing = (None,) * 6
    gc.collect()
    try:
        peak = peak_bytes(lambda: train(config, console=Console(quiet=True)), device) / GIB
    except torch.OutOfMemoryError as error:
        return Row(config.micro_batch_size, *nothing, skipped=str(error).split(". ")[0])
    first, *lines = read_metrics(config.out / METRICS).lines
    counted = lines[2:-1]  # the last one is followed by an evaluation

    def median(name: str, is_measured: bool | None = None) -> float:
        chosen = [line for line in counted if is_measured is None or is_measured == (line["step"] % 2 == 0)]
        return statistics.median(line[name] for line in chosen)

    return Row(
        micro_batch_size=config.micro_batch_size,
        plain_seconds=median("time/step", False),
        measured_seconds=median("time/step", True),
        sample_seconds=median("time/sample"),
        probe_seconds=first["time/probe"],
        eval_seconds=first["time/eval"],
        peak_gib=peak,
    )


def print_rows(rows: Sequence[Row], about: dict[str, Any]) -> None:
    """A table for a terminal."""
    size = f"{about['batch_size']} rollouts × {about['tokens']} tokens in groups of {about['group_size']}"
    table = Table(title=f"{about['preset']} on {about['device']}: random {about['shape']}; {size}")
    for column in ("per pass", "plain s", "measured s", "sampling s", "probe s", "eval s", "GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (row.plain_seconds, row.measured_seconds, row.sample_seconds, row.probe_seconds, row.eval_seconds)
        shown = ["" if figure is None else f"{figure:.3g}" for figure in (*figures, row.peak_gib)]
        table.add_row(str(row.micro_batch_size or "all"), *shown)
    Console().print(table)
    for row in rows:
        if row.skipped:
            Console().print(f"{row.micro_batch_size or 'all'} per pass: skipped. {row.skipped}", style="dim")
