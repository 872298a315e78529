"""Shared by all benchmarks: model shapes, sizes and devices, timing and peak memory, the record and its table."""

import ctypes
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from scoregram import __version__
from scoregram.checks import fail, lookup
from scoregram.errors import option_name
from scoregram.policy import DTYPES
from scoregram.runs import disk_errors, source_commit

GIB = 2**30
LEFT_COLUMNS = ("way", "mode")
"""Columns of text; all others hold numbers and are right-aligned."""
_MMAP_THRESHOLD = -3
"""glibc's `M_MMAP_THRESHOLD`: `malloc` gets larger blocks from `mmap` and unmaps them when they are freed."""


@dataclass(frozen=True)
class Shape:
    """A causal language model of the transformers library, by family and sizes."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    more: Mapping[str, Any]
    """Further arguments of the config."""

    def build(self) -> nn.Module:
        """The model with random weights, on the current default device and dtype."""
        import transformers

        sizes = {name: value for name, value in vars(self).items() if name not in ("family", "more")}
        config = getattr(transformers, f"{self.family}Config")(**sizes, **self.more)
        return getattr(transformers, f"{self.family}ForCausalLM")(config)


_TIED = {"tie_word_embeddings": True}
_NEMOTRON = {"head_dim": 128, "partial_rotary_factor": 0.5}
SHAPES: MappingProxyType[str, Shape] = MappingProxyType(
    {
        "llama-tiny": Shape("Llama", 512, 64, 160, 2, 4, 2, _TIED),
        "tiny": Shape("Llama", 99, 192, 512, 2, 6, 6, _TIED),  # of the embedded policy
        "llama-25m": Shape("Llama", 16384, 512, 1376, 6, 8, 2, _TIED),
        "smollm2-135m": Shape("Llama", 49152, 576, 1536, 30, 9, 3, _TIED),
        "llama-1b": Shape("Llama", 128256, 2048, 8192, 16, 32, 8, _TIED),
        "nemotron-4b": Shape("Nemotron", 256000, 3072, 9216, 32, 24, 8, _NEMOTRON),
    }
)
"""Shapes to measure on. Weights are random: the cost of a step does not depend on their values."""


def random_model(shape: str, dtype: str, device: torch.device, lora: int = 0, *, caller: str) -> Any:
    """A model with random weights from seed 0, built on the device; `lora > 0` trains only adapters of that rank."""
    chosen, kind = lookup(SHAPES, shape, kind=f"{caller} --shape"), lookup(DTYPES, dtype, kind=f"{caller} --dtype")
    default = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        torch.set_default_dtype(kind)
        try:
            with device:
                model: Any = chosen.build()
        finally:
            torch.set_default_dtype(default)
        return _with_adapters(model, lora, kind) if lora else model


def _with_adapters(model: nn.Module, rank: int, dtype: torch.dtype) -> Any:
    """The model with LoRA on every linear layer but the head."""
    import peft

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = sorted({name.rpartition(".")[2] for name in linear if "lm_head" not in name})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets))  # pyright: ignore[reportArgumentType]
    for parameter in adapted.parameters():
        parameter.data = parameter.data.to(dtype)
    return adapted


def require_at_least(caller: str, **sizes: tuple[int, int | Sequence[int]]) -> None:
    """Raise for the first option below its minimum: `name=(minimum, value or values)`. An empty value counts as 0."""
    for name, (minimum, given) in sizes.items():
        values = [given] if isinstance(given, int) else given or [0]
        for value in values:
            if value < minimum:
                fail(f"{caller} {option_name(name)}", f"must be at least {minimum}", value, "Choose a larger number.")


def require_whole_groups(option: str, rollouts: int, group_size: int) -> None:
    """Raise unless `rollouts` is a multiple of the group size."""
    if rollouts % group_size:
        got = f"{rollouts} rollouts in groups of {group_size}"
        fail(option, "rollouts must be whole groups", got, "Choose a multiple of the group size.")


def require_trl(caller: str) -> None:
    """Raise unless TRL is installed."""
    if find_spec("trl") is None:
        fail(caller, "trl must be installed", "no such package", "Install it: pip install 'scoregram[trl]'.")


def bench_device(name: str, *, caller: str) -> torch.device:
    """The device to measure on; `auto` is a GPU if torch sees one."""
    if name not in {"auto", "cpu", "cuda"}:
        fail(f"{caller} --device", "must be auto, cpu or cuda", repr(name), "Check the spelling.")
    if name == "cuda" and not torch.cuda.is_available():
        fail(f"{caller} --device", "cuda needs a GPU that torch can see", "none", "Pass --device cpu.")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: CPU time on a CPU, which other processes disturb less; wall-clock time on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize(device)  # kernels run asynchronously: wait for them before and after
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    *,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Times of every call, in turns, so that a change in the machine's load affects all of them alike.

    `prepare` runs before each call and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            prepare()
            times[name].append(seconds(call, device))
    return times


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the repeats of the ratio of two times that were measured in the same turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def busy_seconds(call: Callable[[], object], device: torch.device) -> float | None:
    """Time during one call in which at least one kernel runs on the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    kinds = torch.profiler.ProfilerActivity
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[kinds.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    )
    total, reached = 0.0, 0.0
    for start, end in spans:  # kernels on several streams may overlap
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Peak memory during one call above that before it; `nan` where the system does not report it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with PeakResident() as peak:
        call()
    return peak.above


class PeakResident:
    """Peak resident memory of this process inside a `with` block, sampled every few milliseconds (Linux)."""

    def __enter__(self) -> "PeakResident":
        # By default glibc keeps freed memory, and the process looks larger than it is. With `mmap` from 64 KiB on, the
        # peak is exact but allocation is slow, so it applies inside this block only and never to a timed call.
        _map_blocks_from(1 << 16)
        self._start = self._highest = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        _map_blocks_from(1 << 25)

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self._highest = max(self._highest, _resident_bytes())

    @property
    def above(self) -> float:
        """Peak above the start of the block, in bytes."""
        return self._highest - self._start


def _resident_bytes() -> float:
    """Resident memory of this process, `nan` where there is no `/proc`."""
    statm = Path("/proc/self/statm")
    return float(statm.read_text().split()[1]) * 4096 if statm.exists() else float("nan")


def _map_blocks_from(size: int) -> None:
    """Return freed memory to the system, and allocate blocks of at least `size` bytes with `mmap` from now on."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, size)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return


def model_settings(
    shape: str, dtype: str, device: torch.device, lora: int, repeats: int, model: nn.Module
) -> dict[str, Any]:
    """Model, machine and versions, for the record."""
    on_gpu = device.type == "cuda"
    return {
        "shape": shape,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "lora": lora,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "repeats": repeats,
        **software_versions("torch", "transformers"),
    }


def software_versions(*packages: str) -> dict[str, Any]:
    """Versions of scoregram, with its short commit hash, of Python and of those `packages` that are installed."""
    commit, _ = source_commit()
    own = {"scoregram": __version__, "commit": commit[:7] if commit else None, "python": platform.python_version()}
    return own | {name: version(name) for name in packages if find_spec(name) is not None}


def progress_bar() -> Progress:
    """A progress bar on stderr, removed at the end: stdout is for the table, or for JSON alone."""
    return Progress(console=Console(stderr=True), transient=True)


def publish_rows(
    settings: dict[str, Any],
    rows: Sequence[Any],
    *,
    as_json: bool,
    out: Path | None,
    title: str,
    columns: Mapping[str, Callable[[Any], str]],
    caption: str | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Write the record to `out` if given, print it as strict JSON or as a table, and return the exit status 0.

    Args:
        settings: The first part of the record.
        rows: Dataclasses, the second part of the record.
        as_json: Print the record instead of the table.
        out: File to write the record to.
        title: Above the table.
        columns: Header → text of the cell for a row.
        caption: Below the table.
        notes: Lines after the table, such as why a row was skipped.
    """
    text = write_bench_record(settings, rows, out)
    if as_json:
        print(text)
        return 0
    table = Table(title=title, caption=caption)
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT_COLUMNS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, style="dim")
    return 0


def write_bench_record(settings: dict[str, Any], rows: Sequence[Any], out: Path | None) -> str:
    """The record as strict JSON, also written to `out` if given."""
    text = json.dumps({"settings": settings, "rows": [asdict(row) for row in rows]}, indent=1, allow_nan=False)
    if out is not None:
        with disk_errors(out, caller="bench --out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n")
    return text


def formatted_number(value: float | None, form: str) -> str:
    """A number in a format such as `.2f`; blank for None."""
    return "" if value is None else format(value, form)
