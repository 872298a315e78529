"""`scoregram bench gram`: the cost of the exact Gram, relative to a plain training step, and of other ways to get it.

Every way takes the same model and rollouts and returns its Gram, or None if it computes none. All ways except the Gram
alone leave the training gradient `Σ_i w_i ψ_i` in `.grad`. The benchmark compares their results before it times them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.bench.gram_work import GramWork, gram_by_definition, random_work
from scoregram.bench.harness import (
    GIB,
    bench_device,
    busy_seconds,
    formatted_number,
    median_ratio,
    model_settings,
    peak_bytes,
    progress_bar,
    publish_rows,
    random_model,
    require_at_least,
    seconds_in_turns,
    write_bench_record,
)
from scoregram.bench.rivals import RIVALS, require_installed, rival_versions
from scoregram.checks import ScoregramError, fail, lookup
from scoregram.gram import PassPlan, backward_with_gram, measure_gram
from scoregram.machine import threads as torch_threads
from scoregram.runs import disk_errors

_CALLER = "bench gram"
BLOCK_SIZE = 8
"""Group size of `blocks+gradient`."""
PLOT_ENDINGS = (".svg", ".png", ".pdf")
CHUNK_OF_LOGITS = 1 << 28
"""Logits that the plain step with a chunked head holds at a time."""


def plain_step(work: GramWork) -> None:
    """The baseline: one forward and backward pass of the weighted loss, without a Gram."""
    work.weighted_loss().backward()


def plain_step_with_chunked_head(work: GramWork) -> None:
    """The same step, its head in chunks of tokens, forward and backward: it never holds all logits."""
    model = work.model.get_base_model() if hasattr(work.model, "get_base_model") else work.model
    hidden = model.get_decoder()(input_ids=work.input_ids, use_cache=False).last_hidden_state
    kept = hidden[:, work.prompt_length - 1 : -1].flatten(0, 1)
    inputs, targets = kept.detach().requires_grad_(), work.input_ids[:, work.prompt_length :].flatten()
    weights = work.weights.repeat_interleave(len(targets) // len(work.weights))
    step = max(1, CHUNK_OF_LOGITS // model.config.vocab_size)
    for start in range(0, len(targets), step):
        here = slice(start, start + step)
        logits = model.get_output_embeddings()(inputs[here]).float()
        (-F.cross_entropy(logits, targets[here], reduction="none") * weights[here]).sum().backward()
    kept.backward(inputs.grad)


def gram_only(work: GramWork) -> Tensor:
    """scoregram: the Gram alone, without a training gradient."""
    return measure_gram(work.model, work.input_ids, work.completion_mask).matrix


def gram_and_gradient(work: GramWork) -> Tensor:
    """scoregram: the Gram and the training gradient."""
    return backward_with_gram(work.model, work.input_ids, work.completion_mask, weights=work.weights).matrix


def replayed_gram_and_gradient(work: GramWork) -> Tensor:
    """scoregram: the Gram and the training gradient, replayed from a CUDA graph."""
    gram = work.graphs.backward(work.input_ids, work.completion_mask, weights=work.weights)
    if work.graphs.reason is not None:
        fail(_CALLER, "gram+gradient-replayed needs a CUDA graph", work.graphs.reason, "Leave it out of --ways.")
    return gram.matrix


def blocks_and_gradient(work: GramWork) -> Tensor:
    """scoregram: only the blocks of the Gram within groups of `BLOCK_SIZE`, and the training gradient."""
    given = (work.model, work.input_ids, work.completion_mask)
    return backward_with_gram(*given, weights=work.weights, group_size=BLOCK_SIZE).matrix


def gram_of_kept_passes(work: GramWork) -> Tensor:
    """scoregram: the Gram alone, from four passes that keep the gradients of their rollouts."""
    return gram_of_quarters(work, parts=1)


def gram_of_paired_passes(work: GramWork) -> Tensor:
    """scoregram: the Gram alone, from passes over a quarter of the rollouts in which every two of them meet."""
    return gram_of_quarters(work, parts=0)


def gram_of_quarters(work: GramWork, parts: int) -> Tensor:
    """The Gram from passes over a quarter of the rollouts."""
    plan = PassPlan(len(work.input_ids), len(work.input_ids) // 4, parts)
    return measure_gram(work.model, work.input_ids, work.completion_mask, plan=plan).matrix


GRAM_WAYS: MappingProxyType[str, Callable[[GramWork], Tensor | None]] = MappingProxyType(
    {
        "plain": plain_step,
        "plain-chunked": plain_step_with_chunked_head,
        "gram+gradient": gram_and_gradient,
        "gram+gradient-replayed": replayed_gram_and_gradient,
        "blocks+gradient": blocks_and_gradient,
        "gram": gram_only,
        "gram-kept": gram_of_kept_passes,
        "gram-pairs": gram_of_paired_passes,
    }
    | {name: rival.gram for name, rival in RIVALS.items()}
)


@dataclass(frozen=True)
class GramRow:
    """One way at one size."""

    way: str
    rollouts: int
    tokens: int
    seconds: float | None = None
    """Median over the repeats."""
    ratio: float | None = None
    """Median over the repeats of the time relative to the plain step of the same turn."""
    chunked_ratio: float | None = None
    """The same relative to the plain step with a chunked head."""
    busy_seconds: float | None = None
    """Time in which a kernel runs on the GPU, in one profiled call; None on a CPU."""
    peak_gib: float | None = None
    """Peak memory above that before the call, gradients included."""
    gram_error: float | None = None
    """Relative Frobenius distance to the definition in float64 if it was computed, otherwise to the Gram of N separate
    backward passes, where they were run."""
    gradient_error: float | None = None
    """Relative distance to the plain training gradient."""
    skipped: str = ""
    """Why it was not run."""
    leaves_out: str = ""
    """Terms of the Gram that the way does not compute."""
    unchecked: str = ""
    """Why the definition could not be computed, if it was requested."""


_TABLE: Mapping[str, Callable[[GramRow], str]] = {
    "N": lambda row: str(row.rollouts),
    "T": lambda row: str(row.tokens),
    "way": lambda row: row.way,
    "seconds": lambda row: formatted_number(row.seconds, ".4g"),
    "busy": lambda row: formatted_number(row.busy_seconds, ".4g"),
    "ratio": lambda row: formatted_number(row.ratio, ".3f"),
    "chunked": lambda row: formatted_number(row.chunked_ratio, ".3f"),
    "GiB": lambda row: formatted_number(row.peak_gib, ".2f"),
    "K error": lambda row: formatted_number(row.gram_error, ".1e"),
    "grad error": lambda row: formatted_number(row.gradient_error, ".1e"),
}


def run_gram_bench(
    *,
    shape: str,
    rollouts: Sequence[int],
    tokens: Sequence[int],
    dtype: str,
    autocast: bool,
    device: str,
    lora: int,
    ways: Sequence[str],
    repeats: int,
    threads: int,
    definition: bool,
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> int:
    """Measure, print a table or JSON, and write the record and the plot if requested; options as in `BenchGram`."""
    # A prompt is a quarter of the tokens and must not be empty, hence 4.
    sizes = {"rollouts": (1, rollouts), "tokens": (4, tokens), "repeats": (1, repeats), "threads": (1, threads)}
    require_at_least(_CALLER, **sizes, lora=(0, lora))
    if plot is not None and plot.suffix not in PLOT_ENDINGS:
        fail(f"{_CALLER} --plot", f"must end in {', '.join(PLOT_ENDINGS)}", str(plot), "Write for example ratios.svg.")
    if plot is not None and find_spec("matplotlib") is None:
        fail(f"{_CALLER} --plot", "needs matplotlib", "no such package", "Install it: pip install 'scoregram[bench]'.")
    place = bench_device(device, caller=_CALLER)
    names = list(dict.fromkeys(["plain", "plain-chunked", *ways]))
    for name in names:
        lookup(GRAM_WAYS, name, kind=f"{_CALLER} --ways")
    rows: list[GramRow] = []
    with torch_threads(threads if place.type == "cpu" else None), progress_bar() as progress:
        model = random_model(shape, dtype, place, lora, caller=_CALLER)
        settings = model_settings(shape, dtype, place, lora, repeats, model) | {"autocast": autocast}
        settings |= {"definition": definition} | rival_versions(names)
        bar = progress.add_task("Measuring", total=len(rollouts) * len(tokens))
        for length in tokens:
            for count in rollouts:
                work = random_work(model, count, length, autocast=autocast)
                rows += rows_of_one_size(work, names, repeats, definition=definition)
                write_bench_record(settings, rows, out)  # a later size that fails does not lose this one
                progress.advance(bar)
    if plot is not None:
        plot_ratios(rows, plot)
    return publish_rows(
        settings,
        rows,
        as_json=as_json,
        out=out,
        title=f"{shape}, {dtype}{' under autocast' if autocast else ''}, {settings['device']}",
        caption="Ratio: time relative to a plain forward and backward pass; chunked: to one whose head runs in chunks.",
        columns=_TABLE,
        notes=[
            f"{row.way}, N = {row.rollouts}, T = {row.tokens}: skipped. {row.skipped}" for row in rows if row.skipped
        ]
        + [f"{name} leaves out {left}." for name in names if (left := left_out(name))]
        + [f"No errors of K: {reason}" for reason in dict.fromkeys(row.unchecked for row in rows) if reason],
    )


def left_out(name: str) -> str:
    """Terms of the Gram that a way does not compute; empty if it computes all."""
    return RIVALS[name].leaves_out if name in RIVALS else ""


def rows_of_one_size(work: GramWork, names: Sequence[str], repeats: int, *, definition: bool = False) -> list[GramRow]:
    """Every way at one size: one call of each to warm up and compare results, then the repeats in turns."""
    device = work.input_ids.device
    rollouts, tokens = work.input_ids.shape
    skipped: dict[str, str] = {}
    grams: dict[str, Tensor | None] = {}
    step: list[Tensor] = []  # the plain training gradient
    gradient_errors: dict[str, float] = {}

    def run(name: str) -> Tensor | None:
        with work.precision():
            return GRAM_WAYS[name](work)

    for name in names:
        try:
            require_possible(name, work)
            for _ in range(3 if device.type == "cuda" else 1):
                work.drop_gradients()
                grams[name] = run(name)
            step = step or gradients_of(work)
            if not name.startswith("gram") or name.startswith("gram+"):
                gradient_errors[name] = gradient_distance(gradients_of(work), step)
        except (ScoregramError, ImportError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            skipped[name] = first_line(error)
    del step
    calls = {name: partial(run, name) for name in names if name not in skipped}
    times = seconds_in_turns(calls, device, repeats, prepare=work.drop_gradients)
    busy: dict[str, float | None] = {}
    peaks: dict[str, float] = {}
    for name, call in calls.items():
        work.drop_gradients()
        peaks[name] = peak_bytes(call, device)
        if name == "gram+gradient-replayed":
            peaks[name] += work.graphs.held_bytes
        work.drop_gradients()
        busy[name] = busy_seconds(call, device)
    work.drop_gradients()
    exact, unchecked = checked_definition(work) if definition else (grams.get("n-backwards"), "")
    return [
        GramRow(name, rollouts, tokens, skipped=skipped[name])
        if name in skipped
        else GramRow(
            way=name,
            rollouts=rollouts,
            tokens=tokens,
            seconds=statistics.median(times[name]),
            ratio=median_ratio(times[name], times["plain"]) if "plain" in times else None,
            chunked_ratio=median_ratio(times[name], times["plain-chunked"]) if "plain-chunked" in times else None,
            busy_seconds=busy[name],
            peak_gib=peaks[name] / GIB,
            gram_error=None if name == "blocks+gradient" else relative_distance(grams[name], exact),
            gradient_error=gradient_errors.get(name),
            leaves_out=left_out(name),
            unchecked=unchecked,
        )
        for name in names
    ]


def checked_definition(work: GramWork) -> tuple[Tensor | None, str]:
    """The Gram by its definition and an empty text, or None and the reason: measured times still stand."""
    try:
        return gram_by_definition(work), ""
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        return None, first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 160 characters; the error's type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def require_possible(name: str, work: GramWork) -> None:
    """Raise for a way whose package is not installed, or whose kept gradients do not fit into memory."""
    if name in RIVALS:
        require_installed(name)
    if name == "blocks+gradient" and len(work.input_ids) % BLOCK_SIZE:
        got = f"{len(work.input_ids)} rollouts"
        fail(_CALLER, f"{name} needs groups of {BLOCK_SIZE}", got, "Choose a multiple.")
    if name in {"gram-kept", "gram-pairs"} and len(work.input_ids) < 8:
        fail(_CALLER, f"{name} needs 8 rollouts, for passes of 2", len(work.input_ids), "Choose more.")
    if name == "gram-kept" or (name in RIVALS and RIVALS[name].keeps_gradients):
        needed = len(work.input_ids) * sum(p.numel() * p.element_size() for p in work.parameters) / GIB
        device = work.input_ids.device
        free = torch.cuda.mem_get_info(device)[0] / GIB if device.type == "cuda" else 8.0
        if 2 * needed > free:
            fail(_CALLER, "kept gradients must fit into memory", f"{needed:.0f} GiB", "Choose a smaller size.")


def gradients_of(work: GramWork) -> list[Tensor]:
    """Copies of the gradients of all parameters, zero where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in work.parameters]


def gradient_distance(measured: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Norm of the difference of two gradients, given in parts, relative to that of the second; added up in float64."""
    apart = [torch.linalg.vector_norm(a.float() - b.float()) for a, b in zip(measured, reference, strict=True)]
    sizes = [torch.linalg.vector_norm(b.float()) for b in reference]
    return float(torch.stack(apart).double().norm() / torch.stack(sizes).double().norm())


def relative_distance(measured: Tensor | None, reference: Tensor | None) -> float | None:
    """Norm of the difference relative to that of the reference; None if one of the two is missing."""
    if measured is None or reference is None:
        return None
    measured, reference = measured.detach().double(), reference.detach().double()
    return float((measured - reference).norm() / reference.norm())


def plot_ratios(rows: Sequence[GramRow], path: Path) -> None:
    """Plot time relative to a plain step over tokens, one line per way and number of rollouts."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ran = [row for row in rows if not row.skipped and row.way != "plain"]
    for way in dict.fromkeys(row.way for row in ran):
        for count in sorted({row.rollouts for row in ran}):
            line = sorted((row.tokens, row.ratio) for row in ran if row.way == way and row.rollouts == count)
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{way}, N = {count}")
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)  # the plain step
    axes.set(xscale="log", xlabel="tokens per rollout", ylabel="time / plain forward and backward pass")
    axes.legend(fontsize=7)
    with disk_errors(path, caller=f"{_CALLER} --plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    plt.close(figure)
