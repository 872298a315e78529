"""`scoregram bench sample`: tokens per second of the sampler and of transformers' `generate` on the same model.

Both sample rollouts of one length from the same prompts, in turns. The sampler returns log-probabilities as well;
`generate` does not compute them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scoregram.bench.harness import (
    GIB,
    bench_device,
    median_ratio,
    model_settings,
    peak_bytes,
    publish_rows,
    random_model,
    require_at_least,
    require_whole_groups,
    seconds,
    seconds_in_turns,
)
from scoregram.checks import fail
from scoregram.machine import threads as torch_threads
from scoregram.policy import SamplingConfig, evaluating, fastest_decoder, sample

_CALLER = "bench sample"


@dataclass(frozen=True)
class SampleRow:
    """One sampler."""

    way: str
    first_seconds: float
    """The first call, with one-time loading, compilation and trials of decoders."""
    seconds: float
    """Median over the repeats."""
    tokens_per_second: float
    """New tokens of all rollouts."""
    speedup: float
    """Median over the repeats of the time of `generate` relative to this one in the same turn."""
    peak_gib: float
    """Peak memory above that before the call."""


_TABLE: Mapping[str, Callable[[SampleRow], str]] = {
    "way": lambda row: row.way,
    "first s": lambda row: f"{row.first_seconds:.3g}",
    "seconds": lambda row: f"{row.seconds:.4g}",
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "speedup": lambda row: f"{row.speedup:.2f}",
    "GiB": lambda row: f"{row.peak_gib:.2f}",
}


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
    """Measure, print a table or JSON, and write the record if requested; options as in `BenchSample`."""
    sizes = {"group_size": group_size, "prompt_tokens": prompt_tokens, "tokens": tokens, "repeats": repeats}
    require_at_least(_CALLER, **{name: (1, size) for name, size in sizes.items()})
    require_at_least(_CALLER, rollouts=(1, rollouts), threads=(1, threads))
    require_whole_groups(_CALLER, rollouts, group_size)
    place = bench_device(device, caller=_CALLER)
    with torch_threads(threads if place.type == "cpu" else None):
        model = endless_model(shape, dtype, place, caller=_CALLER)
        rows = sampler_rows(model, rollouts, group_size, prompt_tokens, tokens, repeats)
        with evaluating(model):
            decoding = fastest_decoder(model, prompt_tokens + tokens).name
        settings = model_settings(shape, dtype, place, 0, repeats, model)
    settings |= sizes | {"rollouts": rollouts, "decoding": decoding}
    title = f"{shape}, {dtype}, {settings['device']}; {rollouts} rollouts × {tokens} tokens, {group_size} per prompt"
    title += f"; decoding: {decoding}"
    return publish_rows(settings, rows, as_json=as_json, out=out, title=title, columns=_TABLE)


def endless_model(shape: str, dtype: str, device: torch.device, *, caller: str) -> Any:
    """A random model in evaluation mode without a stop token: every completion has the full length."""
    model = random_model(shape, dtype, device, caller=caller).eval()
    model.generation_config.eos_token_id = None  # forbidding it by a logits processor would slow `generate`
    model.generation_config.bos_token_id = None
    return model


def sampler_rows(
    model: Any, rollouts: int, group_size: int, prompt_tokens: int, tokens: int, repeats: int
) -> list[SampleRow]:
    """Both samplers: one call of each to warm up, then the repeats in turns."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (rollouts // group_size, prompt_tokens)
    prompts = torch.randint(int(model.config.vocab_size), shape, generator=generator).tolist()
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: sample_by_transformers(model, prompts, group_size, tokens),
        "sample": lambda: sample_by_scoregram(model, prompts, group_size, tokens, generator),
    }
    first = {name: seconds(call, device) for name, call in calls.items()}
    times = seconds_in_turns(calls, device, repeats)
    return [
        SampleRow(
            way=name,
            first_seconds=first[name],
            seconds=statistics.median(times[name]),
            tokens_per_second=rollouts * tokens / statistics.median(times[name]),
            speedup=median_ratio(times["generate"], times[name]),
            peak_gib=peak_bytes(call, device) / GIB,
        )
        for name, call in calls.items()
    ]


def sample_by_transformers(model: Any, prompts: Sequence[Sequence[int]], group_size: int, tokens: int) -> None:
    """Sample rollouts with `generate`."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        num_return_sequences=group_size,
        max_new_tokens=tokens,
        pad_token_id=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    _require_length(sequences.shape[1] - ids.shape[1], tokens, "generate")


def sample_by_scoregram(
    model: Any, prompts: Sequence[Sequence[int]], group_size: int, tokens: int, generator: torch.Generator
) -> None:
    """Sample rollouts with the sampler of this package."""
    rollouts = sample(
        model,
        prompts,
        rollouts_per_prompt=group_size,
        sampling=SamplingConfig(tokens),
        stop_ids=(),
        pad_id=0,
        generator=generator,
    )
    _require_length(int(rollouts.lengths.min()), tokens, "sample")


def _require_length(length: int, tokens: int, way: str) -> None:
    if length != tokens:
        requirement = f"{way} must sample {tokens} tokens in every rollout"
        fail(_CALLER, requirement, length, "This is a bug; please report it.")
