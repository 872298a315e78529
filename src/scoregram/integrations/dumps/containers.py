"""Files as streams of raw records: a line of JSON, a row of Parquet, an entry of a torch file.

A stream goes on after a record that cannot be read; only a few records are in memory at a time, except for a torch
file, which is read whole (its trainer writes one for each step).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scoregram.checks import fail

ROWS = 16
"""Rows of a table that are Python objects at a time."""


@dataclass(frozen=True)
class Raw:
    """A record before anybody looked into it."""

    line: int
    """From 1."""
    end: int
    """Bytes of the file up to the end of this record, estimated where records are compressed."""
    record: Any = None
    reason: str = ""
    """Why it could not be read, if it could not."""


def json_lines(path: Path, *, allow_pickle: bool = False) -> Iterator[Raw]:
    """Lines of JSON; blank ones are passed over."""
    end = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            end += len(raw)
            text = raw.removeprefix(b"\xef\xbb\xbf").strip() if line == 1 else raw.strip()
            if not text:
                continue
            try:
                yield Raw(line, end, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield Raw(line, end, reason=f"no JSON ({in_short(error)})")


def parquet_rows(path: Path, *, allow_pickle: bool = False) -> Iterator[Raw]:
    """Rows of a table, a few at a time; a file that cannot be read is one broken record."""
    size, line = path.stat().st_size, 0
    try:
        with pq.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    line += 1
                    yield Raw(line, size * line // total, row)
    except (pa.ArrowException, OSError) as error:
        yield Raw(line + 1, size, reason=f"no complete Parquet file ({in_short(error)})")


def torch_samples(path: Path, *, allow_pickle: bool = False) -> Iterator[Raw]:
    """Entries of the list `samples` in a torch file, which is loaded without running code unless that is allowed.

    Raises:
        ScoregramError: If the file holds objects that only a pickle can make, and pickles are not allowed.
    """
    size = path.stat().st_size
    try:
        content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except (OSError, EOFError, RuntimeError) as error:
        yield Raw(1, size, reason=f"no torch file ({in_short(error)})")
        return
    except Exception as error:  # unpickling foreign classes can raise anything
        if allow_pickle:
            yield Raw(1, size, reason=f"no torch file ({in_short(error)})")
            return
        refuse_pickle(path, "one that holds more than tensors, numbers and text")
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        yield Raw(1, size, reason="a torch file without a list called samples")
        return
    step = content.get("rollout_id")
    for line, sample in enumerate(samples, start=1):
        record = {"rollout_step": step, **sample} if isinstance(sample, Mapping) else sample
        yield Raw(line, size * line // len(samples), record)


def in_short(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def refuse_pickle(path: Path, got: str) -> NoReturn:
    """Raise, because reading a pickle runs whatever code its writer put in."""
    remedy = "Pass --allow-pickle if you trust whoever wrote it: reading it runs their code."
    fail(f"measure {path}", "a file must be readable without a pickle", got, remedy)


CONTAINERS: MappingProxyType[str, Callable[..., Iterator[Raw]]] = MappingProxyType(
    {".jsonl": json_lines, ".parquet": parquet_rows, ".pt": torch_samples}
)
"""How a file of each suffix is read."""
