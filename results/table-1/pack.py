"""Copies the training groups of the record `../smollm2-gsm8k` into one file for numpy.

python pack.py    write grams.npz

For each group size R, `kR` holds the Grams `(groups, R, R)` and `rR` the rewards `(groups, R)` of all measured training
groups, the dead ones included, in the order of the runs' names and the groups in their files.
"""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

HERE = Path(__file__).parent
RUNS = HERE.parent / "smollm2-gsm8k" / "runs"
GROUP_SIZES = (2, 4, 8, 16)


def training_groups(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Grams and rewards of all measured training groups of one size, as float32."""
    grams, rewards = [], []
    for path in sorted(RUNS.glob(f"R{size}-seed*/groups/*.parquet")):
        for row in pq.read_table(path, columns=["kind", "rewards", "gram"]).to_pylist():
            if row["kind"] == "train":
                rewards.append(row["rewards"])
                grams.append(row["gram"])
    return np.array(grams, np.float32).reshape(-1, size, size), np.array(rewards, np.float32)


def arrays() -> dict[str, np.ndarray]:
    """The arrays of the file by name."""
    found = {size: training_groups(size) for size in GROUP_SIZES}
    return {f"{name}{size}": both[at] for size, both in found.items() for at, name in enumerate("kr")}


if __name__ == "__main__":
    np.savez_compressed(HERE / "grams.npz", **arrays())
