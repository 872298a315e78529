"""Records as Arrow tables and back: one row per group or rollout, arrays flattened, one column per named scalar.

The same rows give the same bytes: no time, no path and no random name enters a file.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.runs.layout import SCHEMA
from scoregram.runs.records import BatchRecord, GroupRecord, RolloutRecord

LayerPrecision = Literal["float32", "float64", "none"]
"""How per-layer Grams are stored; `none` leaves them out."""

STATISTIC = "statistics/"
REWARD = "rewards/"
"""Prefixes of the columns that hold named scalars."""

LAYER_COLUMNS = ("layers", "layer_grams")
_VERSION = b"scoregram.schema"
_SYMMETRY = 1e-5


@cache
def group_schema(layers: LayerPrecision = "float32") -> pa.Schema:
    """Columns of `groups/*.parquet`, before one `statistics/NAME` for each statistic.

    `gram` is row-major, `R²` values. `layer_grams` holds, for each of `layers` in turn, the lower triangle row by row:
    `R(R+1)/2` values.
    """
    columns = [
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("rewards", pa.list_(pa.float64())),
        ("lengths", pa.list_(pa.int64())),
        ("advantages", pa.list_(pa.float64())),
        ("gram", pa.list_(pa.float64())),
    ]
    if layers != "none":
        values = pa.float64() if layers == "float64" else pa.float32()
        columns += [("layers", pa.list_(pa.string())), ("layer_grams", pa.list_(values))]
    return pa.schema(columns)


@cache
def batch_schema() -> pa.Schema:
    """Columns of `batches/*.parquet`; `gram` is the lower triangle row by row, `N(N+1)/2` values."""
    return pa.schema(
        [
            ("step", pa.int64()),
            ("kind", pa.string()),
            ("prompt_ids", pa.list_(pa.string())),
            ("sizes", pa.list_(pa.int64())),
            ("rewards", pa.list_(pa.float64())),
            ("lengths", pa.list_(pa.int64())),
            ("weights", pa.list_(pa.float64())),
            ("gram", pa.list_(pa.float32())),
        ]
    )


@cache
def rollout_schema() -> pa.Schema:
    """Columns of `rollouts/*.parquet`, before one `rewards/NAME` for each reward function."""
    return pa.schema(
        [
            ("step", pa.int64()),
            ("kind", pa.string()),
            ("prompt_id", pa.string()),
            ("group", pa.int64()),
            ("index", pa.int64()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("token_ids", pa.list_(pa.int64())),
            ("prompt_length", pa.int64()),
            ("completion_mask", pa.list_(pa.bool_())),
            ("reward", pa.float64()),
            ("log_probs", pa.list_(pa.float32())),
            ("behaviour_log_probs", pa.list_(pa.float32())),
            ("advantage", pa.float64()),
            ("advantages", pa.list_(pa.float32())),
            ("finished", pa.bool_()),
        ]
    )


def groups_to_table(groups: Sequence[GroupRecord], layers: LayerPrecision = "float32") -> pa.Table:
    """One row per group."""
    for group in groups:
        _check_group(group)
    rows = [_group_row(group, layers) for group in groups]
    return _table(rows, group_schema(layers), STATISTIC, [group.statistics for group in groups])


def batches_to_table(batches: Sequence[BatchRecord]) -> pa.Table:
    """One row per batch."""
    for batch in batches:
        _check_batch(batch)
    return _table([_batch_row(batch) for batch in batches], batch_schema(), STATISTIC, [])


def rollouts_to_table(rollouts: Sequence[RolloutRecord]) -> pa.Table:
    """One row per rollout."""
    for rollout in rollouts:
        _check_rollout(rollout)
    rows = [_rollout_row(rollout) for rollout in rollouts]
    return _table(rows, rollout_schema(), REWARD, [rollout.rewards for rollout in rollouts])


def table_to_groups(table: pa.Table) -> Iterator[GroupRecord]:
    """The groups of a table, tensors again; a table read without its layers gives groups without them."""
    names = _named(table, STATISTIC)
    for row in _rows(table):
        size = len(row["rewards"])
        gram = row["gram"]
        yield GroupRecord(
            step=row["step"],
            kind=row["kind"],
            prompt_id=row["prompt_id"],
            prompt=row["prompt"],
            rewards=_tensor(row["rewards"]),
            lengths=_tensor(row["lengths"]),
            advantages=_tensor(row["advantages"]),
            gram=None if gram is None else _tensor(gram).reshape(size, size),
            by_layer=_unpacked(row.get("layers"), row.get("layer_grams"), size),
            statistics=_present(row, names, STATISTIC),
        )


def table_to_batches(table: pa.Table) -> Iterator[BatchRecord]:
    """The batches of a table, tensors again."""
    for row in _rows(table):
        yield BatchRecord(
            step=row["step"],
            kind=row["kind"],
            prompt_ids=tuple(row["prompt_ids"]),
            gram=_unpacked(["gram"], row["gram"], len(row["rewards"]))["gram"],
            **{name: _tensor(row[name]) for name in ("sizes", "rewards", "lengths", "weights")},
        )


def table_to_rollouts(table: pa.Table) -> Iterator[RolloutRecord]:
    """The rollouts of a table, tensors again."""
    names = _named(table, REWARD)
    plain = [name for name in rollout_schema().names if name in table.column_names]
    for row in _rows(table):
        values: dict[str, Any] = {
            name: _tensor(row[name]) if isinstance(row[name], np.ndarray) else row[name] for name in plain
        }
        yield RolloutRecord(**values, rewards=_present(row, names, REWARD))


def table_to_bytes(table: pa.Table) -> memoryview:
    """A Parquet file in memory: zstd, one row group, the version of the schema in its metadata."""
    sink = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({_VERSION: str(SCHEMA).encode()}),
        sink,
        compression="zstd",
        use_dictionary=_text_columns(table.schema),  # type: ignore[arg-type]  # measured numbers hardly ever repeat
        row_group_size=max(len(table), 1),
    )
    return sink.getbuffer()


def _text_columns(schema: pa.Schema) -> list[str]:
    text = [field.name for field in schema if pa.types.is_string(field.type)]
    lists = [field.name for field in schema if pa.types.is_list(field.type) and field.type.value_type == pa.string()]
    return text + [f"{name}.list.element" for name in lists]


def read_part(path: Path, without: Sequence[str] = ()) -> pa.Table:
    """One part file, all columns but those in `without`.

    Raises:
        ScoregramError: If it is damaged, or written by a newer scoregram.
    """
    try:
        with pq.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(_VERSION, b"0")
            require_known_schema(int(version), path)
            wanted = [name for name in file.schema_arrow.names if name not in without]
            return file.read(columns=wanted).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        return fail(
            "open_run", f"{path} must be a complete Parquet file", reason, "Restore it from a copy, or remove it."
        )


def require_known_schema(version: object, path: Path) -> None:
    """Refuse what a newer scoregram wrote, and what no scoregram wrote."""
    if not isinstance(version, int) or version < 1:
        fail("open_run", f"{path} must be written by scoregram", f"schema {version!r}", "Choose a run folder.")
    if version > SCHEMA:
        fail("open_run", f"{path} must have schema {SCHEMA} or older", version, "Update scoregram to read this run.")


def _check_group(group: GroupRecord) -> None:
    size = tuple(group.rewards.shape)
    shapes = {
        "lengths": (group.lengths, size),
        "advantages": (group.advantages, size),
        **({} if group.gram is None else {"gram": (group.gram, size * 2)}),
        **{f"by_layer[{name!r}]": (gram, size * 2) for name, gram in group.by_layer.items()},
    }
    _check_shapes("write_groups", f"group {group.prompt_id}", shapes)


def _check_batch(batch: BatchRecord) -> None:
    size = tuple(batch.rewards.shape)
    shapes = {"lengths": (batch.lengths, size), "weights": (batch.weights, size), "gram": (batch.gram, size * 2)}
    shapes |= {"sizes": (batch.sizes, (len(batch.prompt_ids),))}
    _check_shapes("write_batches", f"the batch of step {batch.step}", shapes)
    if int(batch.sizes.sum()) != size[0]:
        got = f"{int(batch.sizes.sum())} of {size[0]}"
        fail("write_batches", "the groups must hold all rollouts", got, "Record the size of every group.")


def _check_rollout(rollout: RolloutRecord) -> None:
    size = tuple(rollout.token_ids.shape)
    per_token = ("log_probs", "completion_mask", "behaviour_log_probs", "advantages")
    values = {name: getattr(rollout, name) for name in per_token}
    shapes = {name: (value, size) for name, value in values.items() if value is not None}
    _check_shapes("write_rollouts", f"rollout {rollout.index} of {rollout.prompt_id}", shapes)


def _check_shapes(caller: str, whose: str, shapes: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (value, shape) in shapes.items():
        if tuple(value.shape) != shape:
            fail(caller, f"{name} of {whose} must have shape {shape}", tuple(value.shape), "Record one value for each.")


def _group_row(group: GroupRecord, layers: LayerPrecision) -> dict[str, Any]:
    row = {
        "step": group.step,
        "kind": group.kind,
        "prompt_id": group.prompt_id,
        "prompt": group.prompt,
        "rewards": _array(group.rewards, np.float64),
        "lengths": _array(group.lengths, np.int64),
        "advantages": _array(group.advantages, np.float64),
        "gram": None if group.gram is None else _array(group.gram, np.float64),
    }
    if layers != "none":
        row |= {
            "layers": list(group.by_layer),
            "layer_grams": _packed(group.by_layer, np.dtype(layers), caller="write_groups"),
        }
    return row


def _batch_row(batch: BatchRecord) -> dict[str, Any]:
    return {
        "step": batch.step,
        "kind": batch.kind,
        "prompt_ids": list(batch.prompt_ids),
        "sizes": _array(batch.sizes, np.int64),
        "rewards": _array(batch.rewards, np.float64),
        "lengths": _array(batch.lengths, np.int64),
        "weights": _array(batch.weights, np.float64),
        "gram": _packed({"the batch": batch.gram}, np.dtype(np.float32), caller="write_batches"),
    }


def _rollout_row(rollout: RolloutRecord) -> dict[str, Any]:
    row = {name: getattr(rollout, name) for name in rollout_schema().names}
    kinds = {"token_ids": np.int64, "completion_mask": np.bool_}
    return {
        name: _array(value, kinds.get(name, np.float32)) if isinstance(value, Tensor) else value
        for name, value in row.items()
    }


def _table(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema, prefix: str, scalars: Sequence[Mapping[str, Any]]
) -> pa.Table:
    columns = [pa.array([_text(row[field.name]) for row in rows], field.type) for field in schema]
    names = sorted({name for each in scalars for name in each})
    columns += [pa.array([_number(each.get(name)) for each in scalars], pa.float64()) for name in names]
    fields = [*schema, *(pa.field(prefix + _text(name), pa.float64()) for name in names)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _text(value: Any) -> Any:
    """Lone surrogates, which UTF-8 cannot hold, are spelt out: a strange token must not cost a run."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _array(values: Tensor, dtype: Any) -> np.ndarray:
    whole = values.detach().cpu()
    widened = whole.float() if whole.dtype == torch.bfloat16 else whole  # numpy has no bfloat16
    return widened.numpy().astype(dtype).ravel()


def _packed(named: Mapping[str, Tensor], dtype: np.dtype, *, caller: str) -> np.ndarray:
    """Lower triangles of some Grams, one after the other."""
    if not named:
        return np.empty(0, dtype)
    grams = torch.stack(tuple(named.values())).detach().cpu().double().numpy()  # (L, R, R)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(grams).max(axis=(1, 2), keepdims=True, initial=0.0)
        uneven = np.abs(grams - grams.transpose(0, 2, 1)) > _SYMMETRY * largest
        packed = ((grams + grams.transpose(0, 2, 1)) / 2)[:, *np.tril_indices(grams.shape[1])].astype(dtype)
    if uneven.any():
        name = list(named)[int(uneven.any(axis=(1, 2)).argmax())]
        fail(caller, f"the Gram of {name} must be symmetric", "one that is not", "Pass K = ΨΨᵀ.")
    if np.isinf(packed).any() and not np.isinf(grams).any():
        remedy = 'Scale the loss; for layers, create the run with layers="float64".'
        fail(caller, f"Grams must fit {dtype}", f"{largest.max():g}", remedy)
    return packed.ravel()


def _unpacked(names: Sequence[str] | None, packed: np.ndarray | None, size: int) -> dict[str, Tensor]:
    if names is None or packed is None or not len(names):
        return {}
    rows, columns = np.tril_indices(size)
    grams = np.empty((len(names), size, size))
    grams[:, rows, columns] = grams[:, columns, rows] = packed.reshape(len(names), len(rows))
    return dict(zip(names, torch.from_numpy(grams), strict=True))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows with arrays for lists of numbers, without a Python object for each of their elements."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    for i in range(len(table)):
        yield {name: _cell(column[i]) for name, column in columns.items()}


def _cell(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ListScalar) and not pa.types.is_string(scalar.type.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.copy())  # Arrow's memory is read-only


def _named(table: pa.Table, prefix: str) -> list[str]:
    return [name for name in table.column_names if name.startswith(prefix)]


def _present(row: Mapping[str, Any], names: Sequence[str], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): row[name] for name in names if row[name] is not None}
