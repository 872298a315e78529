"""The tables of docs/performance.md, from the records in `benchmarks/results`.

python benchmarks/table.py            print them
python benchmarks/table.py --write    write them into docs/performance.md
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


COST_COLUMNS = ("time / plain", "time / chunked", "busy / chunked", "replayed / chunked", "memory / plain")


def table(results: Path = HERE / "results") -> str:
    """The Gram with the training gradient at every size: time and peak memory relative to a plain step.

    A size that was measured several times has one row, with the smallest and the largest figure.
    """
    found: dict[tuple[str, str, int, int], list[tuple[float | None, ...]]] = {}
    for about, rows in records(results, "ratio"):
        adapters = f", LoRA {about['lora']}" if about["lora"] else ""
        precision = f"{about['dtype']}{' under autocast' if about.get('autocast') else ''}"
        at = {(row["way"], row["rollouts"], row["tokens"]): row for row in rows}
        for row in rows:
            if row["way"] == "gram+gradient" and not row["skipped"]:
                size = row["rollouts"], row["tokens"]
                key = machine(about), f"{about['shape']} {precision}{adapters}", *size
                found.setdefault(key, []).append(costs(row, {way: at.get((way, *size)) for way, _, _ in at}))
    lines = [f"| machine | model | N | T | {' | '.join(COST_COLUMNS)} |", "|---" * (4 + len(COST_COLUMNS)) + "|"]
    for key in sorted(found, key=lambda key: (*key[:2], key[2] * key[3], key[3])):
        cells = [*map(str, key), *(spread(figures) for figures in zip(*found[key], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def costs(row: dict, others: dict[str, dict | None]) -> tuple[float | None, ...]:
    """The figures of `COST_COLUMNS` for one size; None where one was not measured."""
    plain, chunked, replayed = (others.get(way) for way in ("plain", "plain-chunked", "gram+gradient-replayed"))
    return (
        row["ratio"],
        row.get("chunked_ratio"),
        row["busy_seconds"] / chunked["busy_seconds"] if chunked is not None and row.get("busy_seconds") else None,
        None if replayed is None or replayed["skipped"] else replayed["chunked_ratio"],
        None if plain is None else row["peak_gib"] / plain["peak_gib"],
    )


def spread(figures: tuple[float | None, ...]) -> str:
    """One figure, or the smallest and the largest; blank if nothing was measured."""
    texts = sorted({f"{figure:.2f}" for figure in figures if figure is not None}, key=float)
    return f"{texts[0]} to {texts[-1]}" if len(texts) > 1 else "".join(texts)


def rivals_table(results: Path = HERE / "results") -> str:
    """Every way to the Gram in the records that compare it with the definition in float64."""
    lines = [
        "| machine | model | N × T | way | time / plain | busy / plain | memory / plain | error of K | leaves out |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for about, rows in records(results, "leaves_out"):
        if not about.get("definition"):
            continue
        plain = {(row["rollouts"], row["tokens"]): row for row in rows if row["way"] == "plain"}
        precision = f"{about['dtype']}{' under autocast' if about['autocast'] else ''}"
        for row in rows:
            size = row["rollouts"], row["tokens"]
            what = f"{machine(about)} | {about['shape']} {precision} | {size[0]} × {size[1]} | {row['way']}"
            if row["skipped"]:
                lines.append(f"| {what} | fails |  |  |  |  |")
            elif row["gram_error"] is not None:
                figures = row["ratio"], *(over(row, plain[size], name) for name in ("busy_seconds", "peak_gib"))
                shown = " | ".join("" if figure is None else f"{figure:.2f}" for figure in figures)
                lines.append(f"| {what} | {shown} | {row['gram_error']:.0e} | {row['leaves_out']} |")
    return "\n".join(lines)


def over(row: dict, plain: dict, name: str) -> float | None:
    """A figure of a way over that of a plain step; None where it was not measured."""
    return row[name] / plain[name] if row.get(name) and plain.get(name) else None


PASSES = {"gram-kept": "kept gradients", "gram-pairs": "pairs of passes"}


def passes_table(results: Path = HERE / "results") -> str:
    """The Gram of a batch that goes through the model in passes, beside that of one pass."""
    lines = [
        "| machine | model | N × T | way | time / plain | busy / plain | memory / plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for about, rows in records(results, "ratio"):
        at = {(row["way"], row["rollouts"], row["tokens"]): row for row in rows}
        for (way, *size), row in at.items():
            if way in PASSES and not row["skipped"]:
                whole, plain = at["gram", *size], at["plain", *size]
                precision = f"{about['dtype']}{' under autocast' if about.get('autocast') else ''}"
                what = f"{machine(about)} | {about['shape']} {precision} | {size[0]} × {size[1]}"
                for name, each in {"one pass": whole, PASSES[way]: row}.items():
                    figures = each["ratio"], *(over(each, plain, key) for key in ("busy_seconds", "peak_gib"))
                    shown = " | ".join("" if figure is None else f"{figure:.2f}" for figure in figures)
                    line = f"| {what} | {name} | {shown} |"
                    lines += [line] if line not in lines else []
    return "\n".join(lines)


def trl_table(results: Path = HERE / "results") -> str:
    """A measured optimisation step of TRL relative to its own."""
    lines = [
        "| machine | model | rollouts × tokens | step | mode | recomputed | plain step | measured / plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for about, rows in records(results, "overhead"):
        for row in rows:
            what = f"{machine(about)} | {about['shape']} {about['dtype']} | {about['rollouts']} × {about['tokens']}"
            kind = f"{trl_step(row)} | {row['mode']} | {'yes' if row['checkpointing'] else 'no'}"
            lines.append(f"| {what} | {kind} | {row['plain_seconds']:.2f} s | {1 + row['overhead']:.2f} |")
    return "\n".join(lines)


def trl_step(row: dict) -> str:
    """How a step was measured; in older records `beside` is a separate pass, and accumulated steps were not fused."""
    is_separate = row["way"] in ("beside", "separate")
    if row["way"] == "accumulated" and row["compared"][-1] > 1:
        return "separate, accumulated"
    return "separate" if is_separate else row["way"]


def training_table(results: Path = HERE / "results") -> str:
    """Steps per second of both trainers, with the mean length and reward of their rollouts."""
    lines = [
        "| machine | policy and task | N | trainer | steps/s | speedup | sampling | updating | tokens | reward |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {"trl": "TRL", "scoregram": "scoregram, measuring", "unmeasured": "scoregram, not measuring"}
    for about, rows in records(results, "steps_per_second"):
        for row in rows:
            speed = f"{row['steps_per_second']:.2f} | {row['speedup']:.2f}"
            shares = f"{row['sampling']:.0%} | {row['updating']:.0%}"
            seen = f"{row['completion_tokens']:.1f} | {row['reward']:.2f}"
            what = f"{machine(about)} | {about['model']}, {about['task']} | {row['batch_size']}"
            lines.append(f"| {what} | {names[row['way']]} | {speed} | {shares} | {seen} |")
    return "\n".join(lines)


def sampling_table(results: Path = HERE / "results") -> str:
    """Tokens per second of the sampler and of `generate`."""
    lines = [
        "| machine | model | rollouts × tokens | sampler | tokens/s | speedup |",
        "|---|---|---|---|---|---|",
    ]
    for about, rows in records(results, "tokens_per_second"):
        for row in rows:
            what = f"{machine(about)} | {about['shape']} {about['dtype']} | {about['rollouts']} × {about['tokens']}"
            lines.append(f"| {what} | {row['way']} | {row['tokens_per_second']:,.0f} | {row['speedup']:.2f} |")
    return "\n".join(lines)


def preset_table(results: Path = HERE / "results") -> str:
    """Time and memory of a replication's steps on random weights."""
    lines = [
        "| machine | preset | rollouts × tokens | per pass | plain step | measured step | sampling | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for about, rows in records(results, "probe_seconds"):
        for row in rows:
            what = f"{machine(about)} | {about['preset']} | {about['batch_size']} × {about['tokens']}"
            times = (f"{row[f'{name}_seconds']:.1f} s" for name in ("plain", "measured", "sample"))
            lines.append(f"| {what} | {row['micro_batch_size']} | {' | '.join(times)} | {row['peak_gib']:.0f} GiB |")
    return "\n".join(lines)


TABLES = {
    "performance": table,
    "rivals": rivals_table,
    "passes": passes_table,
    "trl": trl_table,
    "training": training_table,
    "sampling": sampling_table,
    "preset": preset_table,
}
"""Name of the marks around a table in the README → function that makes it."""


def records(results: Path, figure: str) -> Iterator[tuple[dict, list[dict]]]:
    """Settings and rows of every record whose rows have the field `figure`."""
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        if figure in record["rows"][0]:
            yield record["settings"], record["rows"]


def machine(about: dict) -> str:
    """The machine on which a record was measured."""
    cores = about["threads"]
    return f"{cores} CPU core{'s' * (cores > 1)}" if cores else about["device"].removeprefix("NVIDIA ")


def main() -> None:
    """Print the tables, or write them into the page."""
    text = PAGE.read_text()
    for name, made in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made()}\n{end}{rest.partition(end)[2]}"
        if "--write" not in sys.argv:
            print(f"{made()}\n")
    if "--write" in sys.argv:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
