"""`scoregram bench gram`: what the exact Gram costs, against a plain step and against the other ways to get it."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from scoregram import __version__
from scoregram.bench.clock import peak_bytes, seconds
from scoregram.bench.record import publish, short_commit
from scoregram.bench.shapes import SHAPES
from scoregram.bench.ways import WAYS, Work
from scoregram.checks import ScoregramError, fail, lookup

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One way at one size."""

    way: str
    rollouts: int
    tokens: int
    seconds: float | None
    """Median over the repeats."""
    ratio: float | None
    """Median over the repeats of the time relative to the plain step timed beside it."""
    peak_gib: float | None
    """Highest memory above that before the call, gradients included."""
    gram_error: float | None
    """Relative Frobenius distance to the Gram of N separate backward passes, where both were run."""
    gradient_error: float | None
    """Relative distance to the plain training gradient."""
    skipped: str = ""
    """Why it was not run."""


def run_gram_bench(
    *,
    shape: str,
    rollouts: Sequence[int],
    tokens: Sequence[int],
    dtype: str,
    device: str,
    lora: int,
    ways: Sequence[str],
    repeats: int,
    threads: int,
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> int:
    """Measure, print a table or JSON, and write the record and the plot if asked for."""
    refuse_sizes(rollouts=rollouts, tokens=tokens, repeats=repeats, threads=threads, lora=lora)
    place = chosen_device(device)
    if place.type == "cpu":
        torch.set_num_threads(threads)
    model = build(shape, dtype, place, lora)
    names = list(dict.fromkeys(["plain", *ways]))
    for name in names:
        lookup(WAYS, name, kind="bench gram --ways")
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Measuring", total=len(rollouts) * len(tokens))
        for length in tokens:
            for count in rollouts:
                rows += compared(model, count, length, names, repeats)
                progress.advance(task)
    record = {"settings": settings(shape, dtype, place, lora, repeats, model), "rows": [asdict(row) for row in rows]}
    if plot is not None:
        from scoregram.bench.plot import plot_ratios

        plot_ratios(rows, plot)
    publish(record, as_json=as_json, out=out, show=lambda: print_rows(rows, record["settings"]))
    return 0


def refuse_sizes(*, rollouts: Sequence[int], tokens: Sequence[int], repeats: int, threads: int, lora: int) -> None:
    """Raise for the first size that leaves nothing to measure; a prompt is a quarter of the tokens, and not empty."""
    least = {"rollouts": (1, rollouts), "tokens": (4, tokens), "repeats": (1, [repeats]), "threads": (1, [threads])}
    for name, (smallest, values) in (least | {"lora": (0, [lora])}).items():
        for value in values or [0]:
            if value < smallest:
                fail(f"bench gram --{name}", f"must be at least {smallest}", value, "Choose a larger number.")


def chosen_device(device: str) -> torch.device:
    """The device to measure on; `auto` is a GPU if there is one."""
    if device not in {"auto", "cpu", "cuda"}:
        fail("bench gram --device", "must be auto, cpu or cuda", repr(device), "Check the spelling.")
    if device == "cuda" and not torch.cuda.is_available():
        fail("bench gram --device", "cuda needs a GPU that torch can see", "none", "Pass --device cpu.")
    return torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def build(shape: str, dtype: str, device: torch.device, lora: int) -> nn.Module:
    """A model with random weights, in place on the device; with `lora > 0` only adapters of that rank are trained."""
    chosen = lookup(SHAPES, shape, kind="bench gram --shape")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(lookup(kind, dtype, kind="bench gram --dtype"))
    try:
        with device:
            model = chosen.build()
    finally:
        torch.set_default_dtype(default)
    if lora:
        import peft

        targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        last = [name.rpartition(".")[2] for name in targets if "lm_head" not in name]
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules=sorted(set(last))))  # pyright: ignore[reportArgumentType]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(lookup(kind, dtype, kind="bench gram --dtype"))
    return model


def compared(model: nn.Module, rollouts: int, tokens: int, names: Sequence[str], repeats: int) -> list[Row]:
    """Every way at one size: one call of each to warm up and compare answers, then the repeats in turns."""
    work = make_work(model, rollouts, tokens)
    device = work.input_ids.device
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    skipped: dict[str, str] = {}
    grams, gradients = {}, {}
    for name in names:
        try:
            refuse_impossible(name, work)
            for _ in range(3 if device.type == "cuda" else 1):
                work.forget()
                grams[name] = WAYS[name](work)
            gradients[name] = flat_gradient(work) if name != "gram" else None
        except (ScoregramError, ImportError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            skipped[name] = str(error).splitlines()[0][:160]
    ran = [name for name in names if name not in skipped]
    for _ in range(repeats):
        for name in ran:
            work.forget()
            times[name].append(seconds(lambda name=name: WAYS[name](work), device))
    for name in ran:
        work.forget()
        peaks[name] = peak_bytes(lambda name=name: WAYS[name](work), device)
    work.forget()
    exact, step = grams.get("n-backwards"), gradients.get("plain")
    return [
        Row(name, rollouts, tokens, None, None, None, None, None, skipped[name])
        if name in skipped
        else Row(
            way=name,
            rollouts=rollouts,
            tokens=tokens,
            seconds=statistics.median(times[name]),
            ratio=statistics.median(own / floor for own, floor in zip(times[name], times["plain"], strict=True)),
            peak_gib=peaks[name] / GIB,
            gram_error=distance(grams[name], exact),
            gradient_error=distance(gradients[name], step),
        )
        for name in names
    ]


def make_work(model: nn.Module, rollouts: int, tokens: int) -> Work:
    """Random rollouts with token frequencies that fall off, and random weights."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    ids = (vocabulary * torch.rand(rollouts, tokens, generator=generator) ** 3).long().to(device)
    mask = torch.zeros(rollouts, tokens, dtype=torch.bool, device=device)
    mask[:, tokens // 4 :] = True
    return Work(model, ids, mask, torch.randn(rollouts, generator=generator).to(device))


def refuse_impossible(name: str, work: Work) -> None:
    """Raise for a way that is absent here, or that would keep more gradients than there is memory."""
    if name == "opacus" and find_spec("opacus") is None:
        fail("bench gram", "opacus must be installed", "no such package", "pip install opacus.")
    if name in {"n-backwards", "vmap", "opacus"}:
        needed = len(work.input_ids) * sum(p.numel() * p.element_size() for p in work.parameters) / GIB
        device = work.input_ids.device
        free = torch.cuda.mem_get_info(device)[0] / GIB if device.type == "cuda" else 8.0
        if 2 * needed > free:
            fail("bench gram", "kept gradients must fit into memory", f"{needed:.0f} GiB", "Choose a smaller size.")


def flat_gradient(work: Work) -> torch.Tensor:
    """All gradients in one vector, in float32 on the CPU."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.parameters]
    return torch.cat([part.detach().flatten().float().cpu() for part in parts])


def distance(found: torch.Tensor | None, reference: torch.Tensor | None) -> float | None:
    """Relative distance, None if one of the two is missing."""
    if found is None or reference is None:
        return None
    return float((found.detach() - reference.detach()).norm() / reference.detach().norm())


def settings(
    shape: str, dtype: str, device: torch.device, lora: int, repeats: int, model: nn.Module
) -> dict[str, object]:
    """Everything needed to read the numbers: machine, versions, commit."""
    return {
        "shape": shape,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "lora": lora,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "repeats": repeats,
        "scoregram": __version__,
        "commit": short_commit(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def print_rows(rows: Sequence[Row], about: dict[str, object]) -> None:
    """A table for a terminal."""
    console = Console()
    title = f"{about['shape']}, {about['dtype']}, {about['device']}; time relative to a plain forward and backward pass"
    table = Table(title=title)
    for column in ("N", "T", "way", "seconds", "ratio", "GiB", "K error", "grad error"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=column == "way")
    for row in rows:
        if row.seconds is None or row.ratio is None or row.peak_gib is None:
            continue
        errors = ["" if error is None else f"{error:.1e}" for error in (row.gram_error, row.gradient_error)]
        numbers = (f"{row.seconds:.4g}", f"{row.ratio:.3f}", f"{row.peak_gib:.2f}")
        table.add_row(str(row.rollouts), str(row.tokens), row.way, *numbers, *errors)
    console.print(table)
    for row in rows:
        if row.skipped:
            console.print(f"{row.way}, N = {row.rollouts}, T = {row.tokens}: skipped. {row.skipped}", style="dim")
