"""`scoregram bench sample`: tokens per second of the sampler, beside `generate` of transformers on the same model.

Both draw rollouts of one length from the same prompts, in turns; `generate` is not asked for log-probabilities, which
the sampler returns in any case.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scoregram.bench.clock import peak_bytes, seconds
from scoregram.bench.gram import GIB, settings
from scoregram.bench.record import publish
from scoregram.bench.shapes import SHAPES
from scoregram.checks import fail, lookup
from scoregram.policy import DTYPES, SamplingConfig, evaluating, fastest_decoder, sample

CALLER = "bench sample"


@dataclass(frozen=True)
class Row:
    """One sampler."""

    way: str
    first_seconds: float
    """The first call: what is loaded, compiled and tried out once is part of it."""
    seconds: float
    """Median over the repeats."""
    tokens_per_second: float
    """New tokens of all rollouts."""
    speedup: float
    """Median over the repeats of the time of `generate` relative to the call beside it."""
    peak_gib: float
    """Highest memory above that before the call."""


def run_sample_bench(
    *,
    shape: str = "tiny",
    rollouts: int = 64,
    group_size: int = 8,
    prompt_tokens: int = 16,
    tokens: int = 48,
    dtype: str = "float32",
    device: str = "auto",
    repeats: int = 5,
    threads: int = 1,
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Measure, print a table or JSON, and write the record if asked for.

    Args:
        shape: A name of `SHAPES`; weights are random.
        rollouts: In all, a multiple of `group_size`.
        group_size: Rollouts per prompt.
        prompt_tokens: Length of every prompt.
        tokens: New tokens of every rollout; none stops before.
        dtype: Of the weights.
        device: auto, cpu or cuda.
        repeats: Timed calls of each, in turns.
        threads: On a CPU.
        as_json: Print strict JSON instead of a table.
        out: Where to write the record.
    """
    sizes = {"group_size": group_size, "prompt_tokens": prompt_tokens, "tokens": tokens, "repeats": repeats}
    refuse_sizes(sizes | {"rollouts": rollouts, "threads": threads})
    place = chosen_device(device)
    if place.type == "cpu":
        torch.set_num_threads(threads)
    model = built(shape, dtype, place)
    rows, decoder = compared(model, rollouts, group_size, prompt_tokens, tokens, repeats)
    about = settings(shape, dtype, place, 0, repeats, model) | sizes | {"rollouts": rollouts, "decoding": decoder}
    record = {"settings": about, "rows": [asdict(row) for row in rows]}
    publish(record, as_json=as_json, out=out, show=lambda: print_rows(rows, about))
    return 0


def refuse_sizes(sizes: dict[str, int]) -> None:
    """Raise for the first size that leaves nothing to measure."""
    for name, value in sizes.items():
        if value < 1:
            fail(f"{CALLER} --{name.replace('_', '-')}", "must be at least 1", value, "Choose a larger number.")
    if sizes["rollouts"] % sizes["group_size"]:
        got = f"{sizes['rollouts']} rollouts in groups of {sizes['group_size']}"
        fail(CALLER, "rollouts must be whole groups", got, "Choose a multiple of the group size.")


def chosen_device(name: str) -> torch.device:
    """The device to measure on; `auto` is a GPU if there is one."""
    if name not in {"auto", "cpu", "cuda"}:
        fail(f"{CALLER} --device", "must be auto, cpu or cuda", repr(name), "Check the spelling.")
    if name == "cuda" and not torch.cuda.is_available():
        fail(f"{CALLER} --device", "cuda needs a GPU that torch can see", "none", "Pass --device cpu.")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def built(shape: str, dtype: str, device: torch.device) -> Any:
    """A model with random weights, in place on the device."""
    chosen, kind = lookup(SHAPES, shape, kind=f"{CALLER} --shape"), lookup(DTYPES, dtype, kind=f"{CALLER} --dtype")
    default = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.random.fork_rng(), device:
            torch.manual_seed(0)
            model: Any = chosen.build().eval()
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None  # nothing stops early, without a processor that slows `generate`
    model.generation_config.bos_token_id = None
    return model


def compared(
    model: Any, rollouts: int, group_size: int, prompt_tokens: int, tokens: int, repeats: int
) -> tuple[list[Row], str]:
    """Both samplers: one call of each to warm up, then the repeats in turns; and the decoder that the sampler used."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (rollouts // group_size, prompt_tokens)
    prompts = torch.randint(int(model.config.vocab_size), shape, generator=generator).tolist()
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: generated(model, prompts, group_size, tokens),
        "sample": lambda: drawn(model, prompts, group_size, tokens, generator),
    }
    first = {name: seconds(call, device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    with evaluating(model):
        decoder = fastest_decoder(model, prompt_tokens + tokens).name
    return [
        Row(
            way=name,
            first_seconds=first[name],
            seconds=statistics.median(times[name]),
            tokens_per_second=rollouts * tokens / statistics.median(times[name]),
            speedup=statistics.median(a / b for a, b in zip(times["generate"], times[name], strict=True)),
            peak_gib=peak_bytes(call, device) / GIB,
        )
        for name, call in calls.items()
    ], decoder


def generated(model: Any, prompts: Sequence[Sequence[int]], group_size: int, tokens: int) -> None:
    """Rollouts by transformers."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    mask, plain = torch.ones_like(ids), {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        num_return_sequences=group_size,
        max_new_tokens=tokens,
        pad_token_id=0,
        **plain,
    )
    require_length(found.shape[1] - ids.shape[1], tokens, "generate")


def drawn(
    model: Any, prompts: Sequence[Sequence[int]], group_size: int, tokens: int, generator: torch.Generator
) -> None:
    """Rollouts by the sampler."""
    found = sample(
        model,
        prompts,
        rollouts_per_prompt=group_size,
        sampling=SamplingConfig(tokens),
        stop_ids=(),
        pad_id=0,
        generator=generator,
    )
    require_length(int(found.lengths.min()), tokens, "sample")


def require_length(found: int, tokens: int, way: str) -> None:
    """Raise unless every rollout has the length that is compared."""
    if found != tokens:
        fail(CALLER, f"{way} must draw {tokens} tokens of every rollout", found, "This is a bug; please report it.")


def print_rows(rows: Sequence[Row], about: dict[str, object]) -> None:
    """A table for a terminal."""
    title = f"{about['shape']}, {about['dtype']}, {about['device']}; {about['rollouts']} rollouts × {about['tokens']}"
    table = Table(title=f"{title} tokens, {about['group_size']} per prompt; decoding: {about['decoding']}")
    for column in ("way", "first s", "seconds", "tokens/s", "speedup", "GiB"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for row in rows:
        numbers = (f"{row.first_seconds:.3g}", f"{row.seconds:.4g}", f"{row.tokens_per_second:,.0f}")
        table.add_row(row.way, *numbers, f"{row.speedup:.2f}", f"{row.peak_gib:.2f}")
    Console().print(table)
