"""Packs a finished run folder into this one: `config.yaml`, `metrics.jsonl` and one `groups.parquet`.

python collect.py RUN_FOLDER NAME

`groups.parquet` has a row per group: training groups of every measured step with their Gram as float32, and the test
problems of the evaluations with their rewards alone. Texts and tokens stay behind.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
KEPT = ("step", "kind", "prompt_id", "rewards", "lengths", "gram")


def pack(run: Path, name: str) -> None:
    """Write the three files of a run."""
    out = HERE / name
    out.mkdir(exist_ok=True)
    for file in ("config.yaml", "metrics.jsonl"):
        (out / file).write_bytes((run / file).read_bytes())
    tables = [pq.read_table(path, columns=list(KEPT)) for path in sorted((run / "groups").glob("*.parquet"))]
    table = pa.concat_tables(tables)
    grams = [None if gram is None else np.asarray(gram, dtype=np.float32) for gram in table["gram"].to_pylist()]
    rewards = [np.asarray(rewards, dtype=np.float32) for rewards in table["rewards"].to_pylist()]
    lengths = [np.asarray(lengths, dtype=np.int16) for lengths in table["lengths"].to_pylist()]
    for field, values in {"gram": grams, "rewards": rewards, "lengths": lengths}.items():
        table = table.set_column(table.schema.get_field_index(field), field, pa.array(values))
    pq.write_table(table, out / "groups.parquet", compression="zstd", use_dictionary=["kind"])


if __name__ == "__main__":
    pack(Path(sys.argv[1]), sys.argv[2])
