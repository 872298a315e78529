"""Peak memory while a generated dump is read and grouped; nothing is measured on the groups.

python benchmarks/dumps.py --gigabytes 1

Each format is read in a process of its own. The script prints the peak resident memory of that process, and how much of
it came after the file was opened. The third dump is the second one without steps: its groups stay open until the window
is full. `--shuffled` shuffles the rollouts of every step.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TOKENS = 1024
GROUP = 8
GROUPS_PER_STEP = 64


def records(name: str, shuffled: bool) -> Iterator[str]:
    """Lines without end: groups of `GROUP` rollouts of `TOKENS` tokens, `GROUPS_PER_STEP` groups per step."""
    draw = random.Random(0)
    pool = [draw.randrange(50_000) for _ in range(1 << 17)]

    def random_tokens(count: int) -> list[int]:
        start = draw.randrange(len(pool) - count)
        return pool[start : start + count]

    step = 0
    while True:
        lines = []
        for group in range(GROUPS_PER_STEP):
            prompt = random_tokens(TOKENS // 4)
            for i in range(GROUP):
                reply = random_tokens(TOKENS * 3 // 4)
                lines.append(json.dumps(record(name, step, group, i, prompt, reply)) + "\n")
        if shuffled:
            draw.shuffle(lines)
        yield from lines
        step += 1


def record(name: str, step: int, group: int, i: int, prompt: list[int], reply: list[int]) -> dict[str, object]:
    """One rollout in the layout of a format."""
    reward = float(i % 2)
    if name == "open-instruct":
        ids = {"prompt_tokens": prompt, "response_tokens": reply, "logprobs": [-0.5] * len(reply)}
        return {"step": step, "sample_idx": i, "prompt_idx": group, **ids, "reward": reward, "advantage": reward}
    prompt_text, completion = (" ".join(map(str, ids)) for ids in (prompt, reply))
    fields: dict[str, object] = {"prompt": prompt_text, "completion": completion, "reward": reward}
    return fields | {"step": step} if name == "plain" else fields


def write(path: Path, name: str, size: float, shuffled: bool) -> int:
    """Write at least `size` bytes; returns the number of lines."""
    written = count = 0
    with path.open("w") as file:
        for line in records(name, shuffled):
            written += file.write(line)
            count += 1
            if written >= size:
                return count
    return count


def read(path: Path, window: int) -> dict[str, float]:
    """Read and group a dump in this process; returns counts, memory and time."""
    from scoregram.integrations.dumps.grouping import rollout_groups
    from scoregram.integrations.dumps.stream import open_dump

    dump = open_dump(path)
    before, start = peak(), time.perf_counter()
    groups = [len(group.rollouts) for group in rollout_groups(dump, adjacent=dump.format.adjacent, window=window)]
    seconds = time.perf_counter() - start
    return {"groups": len(groups), "rollouts": sum(groups), "before": before, "peak": peak(), "seconds": seconds}


def peak() -> float:
    """Peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Write each format, read it in a fresh process, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--window-mb", type=int, default=256)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--read", type=Path)
    asked = parser.parse_args()
    if asked.read is not None:
        print(json.dumps(read(asked.read, asked.window_mb << 20)))
        return
    for name, shuffled in (("open-instruct", False), ("plain", asked.shuffled), ("plain-stepless", asked.shuffled)):
        path = asked.folder / f"scoregram-bench-{name}.jsonl"
        try:
            lines = write(path, name, asked.gigabytes * 1e9, shuffled)
            command = [sys.executable, __file__, "--read", str(path), "--window-mb", str(asked.window_mb)]
            read_back = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            size = path.stat().st_size
        finally:
            path.unlink(missing_ok=True)
        above = read_back["peak"] - read_back["before"]
        print(
            f"{name}: {size / 1e9:.2f} GB, {lines:,} rollouts in {read_back['groups']:,} groups, "
            f"{read_back['seconds']:.0f} s; peak {read_back['peak'] / 1e6:.0f} MB, {above / 1e6:.0f} MB above start",
            flush=True,
        )


if __name__ == "__main__":
    main()
