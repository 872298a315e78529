"""What a run stores of a group, a batch, a rollout and an update, and how each becomes a row of a Parquet table.

Tensors of a record belong to one group, batch, rollout or update and are never padded. A table has one row per record,
arrays flattened, and one column per named scalar. The same records give the same bytes: no time, no path and no random
name enters a file.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.checks import fail
from scoregram.runs.disk import FORMAT_VERSION, require_known_version
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards

LayerPrecision = Literal["float32", "float64", "none"]
"""Precision of stored per-layer Grams; `none` leaves them out."""

STATISTIC = "statistics/"
"""Prefix of the columns that hold the statistics of a group."""
REWARD = "rewards/"
"""Prefix of the columns that hold what each reward function gave a rollout."""

Rows = Literal["scores", "loss"]
"""What the rows of a Gram are: scores `ψ_i`, or gradients of a trainer's loss, which include their weights already."""
LOSS_KIND = "loss"
"""Kind of the groups whose rows are gradients of a loss; the rows of every other kind are scores."""
FIXED_PROBE = "fixed"
"""Kind of the groups of a probe at the policy's own temperature."""
TRAINING_KINDS = ("train", LOSS_KIND)
"""Kinds of the groups and rollouts that an update was computed from."""

LAYER_COLUMNS = ("layers", "layer_grams")
_VERSION_KEY = b"scoregram.schema"
_SYMMETRY = 1e-5
"""Largest asymmetry of a stored Gram, relative to its largest entry."""


def token_hash(token_ids: Sequence[int]) -> str:
    """The sha256 of token ids, written in decimal with commas between them."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def rows_of_kind(kind: str) -> Rows:
    """What the rows of a Gram are, by the kind of its rollouts. Everything that weights rows asks here."""
    return "loss" if kind == LOSS_KIND else "scores"


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupRecord:
    """One prompt group at one step: its rewards, its advantages and, where measured, its Gram."""

    step: int
    """Step of the run; the same number as in `metrics.jsonl`."""
    prompt_id: str
    """Stable name of the prompt, such as `gsm8k/test/17`."""
    prompt: str | None = None
    """Text of the prompt; None where it may not be stored."""
    kind: str = "train"
    """What the group was sampled for: `train`, `loss` (trained on, with a Gram of loss gradients), or the name of a
    probe such as `fixed` or `held-out`."""
    rewards: GroupRewards
    """`(R,)`. `nan` for a rollout without a reward."""
    lengths: Int[Tensor, " rollouts"]
    """`(R,)`. Completion tokens of each rollout."""
    advantages: GroupAdvantages
    """`(R,)`. The advantages that the trainer used; stored as float64."""
    gram: GramMatrix | None = None
    """`(R, R)`, stored as float64. None for a group that was not measured."""
    by_layer: Mapping[str, GramMatrix] = field(default_factory=dict)
    """Module path → `(R, R)`. Stored symmetrised, in the writer's `layers` precision (float32 by default)."""
    statistics: Mapping[str, float | int] = field(default_factory=dict)
    """Scalars of this group, such as its effective rank; `nan` where undefined. One column each."""
    completion_ids: Int[Tensor, " tokens"] | None = None
    """Completion tokens of all rollouts, one rollout after another; `lengths` tells them apart. None if not kept."""
    prompt_sha256: str | None = None
    """Hash of the prompt's tokens, by `token_hash`: the prompt itself may not be stored. None if not kept."""

    @property
    def rows(self) -> Rows:
        """What the rows of `gram` are; the kind tells it."""
        return rows_of_kind(self.kind)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRecord:
    """All rollouts of one step with the Gram between them, across prompts: the source of noise and conflict metrics."""

    step: int
    kind: str = "train"
    """As in `GroupRecord`."""
    prompt_ids: tuple[str, ...]
    """One per group, in the order of the rollouts."""
    sizes: Int[Tensor, " groups"]
    """`(P,)`. Rollouts of each group; they add up to `N`."""
    rewards: Float[Tensor, " rollouts"]
    """`(N,)`. `nan` for a rollout without a reward."""
    lengths: Int[Tensor, " rollouts"]
    """`(N,)`. Completion tokens."""
    weights: Float[Tensor, " rollouts"]
    """`(N,)`. Weight of each score in the update `Σ_i w_i ψ_i`; stored as float64."""
    gram: Float[Tensor, "rollouts rollouts"]
    """`(N, N)`. Stored symmetrised, in float32: half a megabyte for 512 rollouts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutRecord:
    """One rollout at one step: text, tokens, reward, and the log-probability and advantage of each token.

    `T` counts the tokens of prompt and completion together, without padding. Arrays per token are aligned with
    `token_ids`: entry `t` belongs to token `t`, and is 0 outside the completion.
    """

    step: int
    prompt_id: str
    group: int
    """Position of its group among the groups of this step."""
    index: int
    """Position of the rollout in its group."""
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None
    """The answer that the data set expects; None where it has none, or it is not known."""
    token_ids: Int[Tensor, " tokens"]
    """`(T,)`. Prompt, then completion."""
    prompt_length: int
    """Tokens of the prompt: the completion begins at this index."""
    completion_mask: Bool[Tensor, " tokens"] | None = None
    """`(T,)`. True for tokens that the policy sampled. None means all tokens from `prompt_length` on."""
    reward: float | int
    """The reward that the advantage was computed from; `nan` without a reward."""
    rewards: Mapping[str, float | int | None] = field(default_factory=dict)
    """Name of a reward function → its value for this rollout. One column each."""
    log_probs: Float[Tensor, " tokens"]
    """`(T,)`. Log-probability of each token under the policy; stored as float32."""
    behaviour_log_probs: Float[Tensor, " tokens"] | None = None
    """`(T,)`. Log-probability under the distribution that was sampled from. None means equal to `log_probs`."""
    advantage: float | int | None = None
    """The advantage that all its tokens share; None where they differ."""
    advantages: Float[Tensor, " tokens"] | None = None
    """`(T,)`. One advantage per token, stored as float32; None where all tokens share `advantage`."""
    push: Float[Tensor, " tokens"] | None = None
    """`(T,)`. Change of each token's log-probability by the update, stored as float32; None where not measured."""
    finished: bool
    """True if a stop token ended it, False if the limit on tokens did."""
    kind: str = "train"
    """As in `GroupRecord`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateRecord:
    """A sketch of the gradient of one step: enough to compare its direction with that of every other step."""

    step: int
    sketch: Float[Tensor, " features"]
    """`(m,)`. `scoregram.gram.update_sketch` of the gradient before clipping and before the optimiser; stored as
    float32."""
    seed: int = 0
    """Seed of the sketch's map. Sketches of equal seed and length can be compared."""


@cache
def group_schema(layers: LayerPrecision = "float32") -> pa.Schema:
    """Columns of `groups/*.parquet`; one `statistics/NAME` for each statistic follows them.

    With `train --keep-evidence` `completion_ids` and `prompt_sha256` follow as well.

    `gram` is row-major, `R²` values. `layer_grams` holds the lower triangle of each of `layers` in turn, row by row:
    `R(R+1)/2` values each.
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


BATCH_SCHEMA = pa.schema(
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
"""Columns of `batches/*.parquet`; `gram` is the lower triangle row by row, `N(N+1)/2` values."""

ROLLOUT_SCHEMA = pa.schema(
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
"""Columns of `rollouts/*.parquet`; one `rewards/NAME` for each reward function follows them, `answer` if the data has
expected answers, and `push` if it was measured."""

UPDATE_SCHEMA = pa.schema([("step", pa.int64()), ("seed", pa.int64()), ("sketch", pa.list_(pa.float32()))])
"""Columns of `updates/*.parquet`."""


def groups_to_table(groups: Sequence[GroupRecord], layers: LayerPrecision = "float32") -> pa.Table:
    """One row per group."""
    rows = [_group_row(group, layers) for group in groups]
    table = _table(rows, group_schema(layers), STATISTIC, [group.statistics for group in groups])
    if all(group.completion_ids is None for group in groups):
        return table
    ids = [None if group.completion_ids is None else group.completion_ids.tolist() for group in groups]
    table = table.append_column("completion_ids", pa.array(ids, pa.list_(pa.int32())))
    return table.append_column("prompt_sha256", pa.array([group.prompt_sha256 for group in groups], pa.string()))


def batches_to_table(batches: Sequence[BatchRecord]) -> pa.Table:
    """One row per batch."""
    return _table([_batch_row(batch) for batch in batches], BATCH_SCHEMA)


def rollouts_to_table(rollouts: Sequence[RolloutRecord]) -> pa.Table:
    """One row per rollout."""
    rows = [_rollout_row(rollout) for rollout in rollouts]
    table = _table(rows, ROLLOUT_SCHEMA, REWARD, [rollout.rewards for rollout in rollouts])
    if any(rollout.answer is not None for rollout in rollouts):
        answers = [_encodable(rollout.answer) for rollout in rollouts]
        table = table.append_column("answer", pa.array(answers, pa.string()))
    if all(rollout.push is None for rollout in rollouts):
        return table
    pushes = [None if rollout.push is None else rollout.push.tolist() for rollout in rollouts]
    return table.append_column("push", pa.array(pushes, pa.list_(pa.float32())))


def updates_to_table(updates: Sequence[UpdateRecord]) -> pa.Table:
    """One row per update."""
    return _table([_row(update, UPDATE_SCHEMA, {}) for update in updates], UPDATE_SCHEMA)


def table_to_groups(table: pa.Table) -> Iterator[GroupRecord]:
    """The groups of a table; without `by_layer` if the table was read without `LAYER_COLUMNS`."""
    for row, statistics in zip(decoded_rows(table), _named_scalars(table, STATISTIC), strict=True):
        size = row["rewards"].numel()
        yield GroupRecord(
            step=row["step"],
            kind=row["kind"],
            prompt_id=row["prompt_id"],
            prompt=row["prompt"],
            rewards=row["rewards"],
            lengths=row["lengths"],
            advantages=row["advantages"],
            gram=None if row["gram"] is None else row["gram"].view(size, size),
            by_layer=_unpacked(row.get("layers"), row.get("layer_grams"), size),
            statistics=statistics,
            completion_ids=row.get("completion_ids"),
            prompt_sha256=row.get("prompt_sha256"),
        )


def table_to_batches(table: pa.Table) -> Iterator[BatchRecord]:
    """The batches of a table."""
    for row in decoded_rows(table):
        yield BatchRecord(
            step=row["step"],
            kind=row["kind"],
            prompt_ids=tuple(row["prompt_ids"]),
            gram=_unpacked(["gram"], row["gram"], len(row["rewards"]))["gram"],
            **{name: row[name] for name in ("sizes", "rewards", "lengths", "weights")},
        )


def table_to_rollouts(table: pa.Table) -> Iterator[RolloutRecord]:
    """The rollouts of a table."""
    names = [name for name in ROLLOUT_SCHEMA.names if name in table.column_names]
    for row, rewards in zip(decoded_rows(table), _named_scalars(table, REWARD), strict=True):
        known = {name: row[name] for name in names}
        yield RolloutRecord(**known, rewards=rewards, answer=row.get("answer"), push=row.get("push"))


def table_to_updates(table: pa.Table) -> Iterator[UpdateRecord]:
    """The updates of a table."""
    for row in decoded_rows(table):
        yield UpdateRecord(**{name: row[name] for name in UPDATE_SCHEMA.names})


def table_to_bytes(table: pa.Table) -> memoryview:
    """Content of a Parquet file: zstd, one row group, the format version in its metadata."""
    sink = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({_VERSION_KEY: str(FORMAT_VERSION).encode()}),
        sink,
        compression="zstd",
        use_dictionary=_text_columns(table.schema),  # type: ignore[arg-type]  # measured numbers rarely repeat
        row_group_size=max(len(table), 1),
    )
    return sink.getbuffer()


def _text_columns(schema: pa.Schema) -> list[str]:
    text = [column.name for column in schema if pa.types.is_string(column.type)]
    lists = [c.name for c in schema if pa.types.is_list(c.type) and c.type.value_type == pa.string()]
    return text + [f"{name}.list.element" for name in lists]


def read_part(path: Path, without: Sequence[str] = (), only: Sequence[str] | None = None) -> pa.Table:
    """One part file, all columns except those in `without`, or those in `only` that it has.

    Raises:
        ScoregramError: If it is damaged, or a newer scoregram wrote it.
    """
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            require_known_version(int((schema.metadata or {}).get(_VERSION_KEY, b"0")), path)
            wanted = [name for name in schema.names if name not in without and (only is None or name in only)]
            # parts are small: starting threads for their columns takes longer than reading them
            return file.read(columns=wanted, use_threads=False).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        reason, remedy = str(error).splitlines()[0], "Restore it from a copy, or remove it."
        return fail("open_run", f"{path} must be a complete Parquet file", reason, remedy)


def _group_row(group: GroupRecord, layers: LayerPrecision) -> dict[str, Any]:
    size = tuple(group.rewards.shape)
    shapes = {
        "lengths": (group.lengths, size),
        "advantages": (group.advantages, size),
        **({} if group.gram is None else {"gram": (group.gram, size * 2)}),
        **{f"by_layer[{name!r}]": (gram, size * 2) for name, gram in group.by_layer.items()},
    }
    _require_shapes("write_groups", f"group {group.prompt_id}", shapes)
    packed = {}
    if layers != "none":
        packed["layers"] = list(group.by_layer)
        packed["layer_grams"] = _packed(group.by_layer, np.dtype(layers), caller="write_groups")
    return _row(group, group_schema(layers), packed)


def _batch_row(batch: BatchRecord) -> dict[str, Any]:
    size = tuple(batch.rewards.shape)
    shapes = {"lengths": (batch.lengths, size), "weights": (batch.weights, size), "gram": (batch.gram, size * 2)}
    shapes |= {"sizes": (batch.sizes, (len(batch.prompt_ids),))}
    _require_shapes("write_batches", f"the batch of step {batch.step}", shapes)
    if int(batch.sizes.sum()) != size[0]:
        got = f"{int(batch.sizes.sum())} of {size[0]}"
        fail("write_batches", "the groups must hold all rollouts", got, "Record the size of every group.")
    packed = _packed({"the batch": batch.gram}, np.dtype(np.float32), caller="write_batches")
    return _row(batch, BATCH_SCHEMA, {"prompt_ids": [_encodable(name) for name in batch.prompt_ids], "gram": packed})


def _rollout_row(rollout: RolloutRecord) -> dict[str, Any]:
    size = tuple(rollout.token_ids.shape)
    per_token = ("log_probs", "completion_mask", "behaviour_log_probs", "advantages", "push")
    values = {name: getattr(rollout, name) for name in per_token}
    shapes = {name: (value, size) for name, value in values.items() if value is not None}
    _require_shapes("write_rollouts", f"rollout {rollout.index} of {rollout.prompt_id}", shapes)
    return _row(rollout, ROLLOUT_SCHEMA, {})


def _require_shapes(caller: str, owner: str, shapes: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (value, shape) in shapes.items():
        if tuple(value.shape) != shape:
            fail(caller, f"{name} of {owner} must have shape {shape}", tuple(value.shape), "Record one value for each.")


def _row(record: object, schema: pa.Schema, packed: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `schema` from `packed`, else from the field of that name, tensors flattened."""
    row = {column.name: packed.get(column.name, getattr(record, column.name, None)) for column in schema}
    return {
        name: _array(value, schema.field(name).type.value_type.to_pandas_dtype())
        if isinstance(value, Tensor)
        else value
        for name, value in row.items()
    }


def _table(
    rows: Sequence[Mapping[str, Any]],
    schema: pa.Schema,
    prefix: str = "",
    scalars: Sequence[Mapping[str, Any]] = (),
) -> pa.Table:
    columns = [pa.array([_encodable(row[column.name]) for row in rows], column.type) for column in schema]
    names = sorted({name for named in scalars for name in named})
    columns += [
        pa.array([None if (value := named.get(name)) is None else float(value) for named in scalars], pa.float64())
        for name in names
    ]
    fields = [*schema, *(pa.field(prefix + _encodable(name), pa.float64()) for name in names)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _encodable(value: Any) -> Any:
    """A string with lone surrogates escaped, which UTF-8 cannot encode: one odd token must not end a run."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _array(values: Tensor, dtype: Any) -> np.ndarray:
    on_cpu = values.detach().cpu()
    widened = on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu  # numpy has no bfloat16
    return widened.numpy().astype(dtype).ravel()


def _packed(named: Mapping[str, Tensor], dtype: np.dtype, *, caller: str) -> np.ndarray:
    """Lower triangles of the Grams, one after the other."""
    if not named:
        return np.empty(0, dtype)
    grams = torch.stack(tuple(named.values())).detach().cpu().double().numpy()  # (L, R, R)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(grams).max(axis=(1, 2), keepdims=True, initial=0.0)
        uneven = np.abs(grams - grams.transpose(0, 2, 1)) > _SYMMETRY * largest
        packed = ((grams + grams.transpose(0, 2, 1)) / 2)[:, *np.tril_indices(grams.shape[1])].astype(dtype)
    if uneven.any():
        name = list(named)[int(uneven.any(axis=(1, 2)).argmax())]
        fail(caller, f"the Gram of {name} must be symmetric", "an asymmetric matrix", "Pass K = ΨΨᵀ.")
    if np.isinf(packed).any() and not np.isinf(grams).any():
        remedy = 'Scale the loss; for layers, create the run with layers="float64".'
        fail(caller, f"Grams must fit {dtype}", f"{largest.max():g}", remedy)
    return packed.ravel()


def _unpacked(names: Sequence[str] | None, packed: Tensor | None, size: int) -> dict[str, Tensor]:
    if names is None or packed is None or not len(names):
        return {}
    triangles = packed.numpy().reshape(len(names), size * (size + 1) // 2)
    grams = triangles[:, _places_in_triangle(size)].astype(np.float64)  # (L, R, R)
    return dict(zip(names, torch.from_numpy(grams), strict=True))


@lru_cache(maxsize=16)
def _places_in_triangle(size: int) -> np.ndarray:
    """`(R, R)`: where entry `i, j` of a symmetric matrix stands in its lower triangle, stored row by row."""
    row, column = np.indices((size, size))
    larger, smaller = np.maximum(row, column), np.minimum(row, column)
    return larger * (larger + 1) // 2 + smaller


def decoded_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows with a tensor for each list of numbers, without the columns of named scalars."""
    names = [name for name in table.column_names if not name.startswith((STATISTIC, REWARD))]
    columns = [_column_cells(table.column(name).combine_chunks()) for name in names]
    for cells in zip(*columns, strict=True):
        yield dict(zip(names, cells, strict=True))


def _column_cells(column: pa.Array) -> Sequence[Any]:
    """The cells of a column: for lists of numbers, tensors that share the memory of one copy; else Python values."""
    if not isinstance(column, pa.ListArray) or pa.types.is_string(column.type.value_type):
        return column.to_pylist()
    ends = _numbers(column.offsets)
    numbers = _numbers(column.values)[ends[0] : ends[-1]]
    cells = torch.from_numpy(numbers.copy()).split(np.diff(ends).tolist())  # Arrow's memory is read-only
    if not column.null_count:
        return cells
    return [cell if known else None for cell, known in zip(cells, column.is_valid().to_pylist(), strict=True)]


def _numbers(values: pa.Array) -> np.ndarray:
    """The numbers of an array, which `to_numpy` would give too, but it imports pandas: most of a second."""
    if values.null_count:
        return values.to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(values.type):
        return np.from_dlpack(values.cast(pa.uint8())).astype(bool)
    return np.from_dlpack(values)


def _named_scalars(table: pa.Table, prefix: str) -> Iterator[dict[str, float]]:
    """For each row, the numbers in the columns that begin with a prefix, by the rest of their names."""
    full = [name for name in table.column_names if name.startswith(prefix)]
    names = [name.removeprefix(prefix) for name in full]
    columns = [table.column(name) for name in full]
    has_gaps = any(column.null_count for column in columns)
    cells = zip(*(column.to_pylist() for column in columns), strict=True) if full else ((),) * len(table)
    for row in cells:
        named = zip(names, row, strict=True)
        yield {name: value for name, value in named if value is not None} if has_gaps else dict(named)
