"""Measures some stored Grams again, from the tokens in this folder, the weights and GSM8K.

python remeasure.py qwen2.5-coder-0.5b FILE.gguf DATA [--setting t1-p1] [--groups 2] [--device cpu]

FILE.gguf must have the sha256 that MODEL/setting.json names, DATA holds GSM8K's train.jsonl. The prompts are rebuilt
and must have the stored hashes. Groups are measured in float32, those with the fewest tokens first, so that a processor
can do it. The stored Grams are of passes in bfloat16, whose error README.md gives under *Checks*; the difference is
`|K' - K|_F / |K|_F`.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from scoregram.gram import measure_gram
from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.studies.remeasurement import rollouts_of_prompt
from scoregram.tasks import Task, load_task

HERE = Path(__file__).parent


def prompt_hash(tokens: Sequence[int]) -> str:
    """sha256 of token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def difference(policy: Policy, task: Task, group: dict[str, Any], temperature: float) -> float:
    """`|K' - K|_F / |K|_F` of one stored group."""
    prompt = policy.encode_prompt(task.prompt(task.train[group["prompt_index"]]))
    if prompt_hash(prompt) != group["prompt_sha256"]:
        raise SystemExit(
            f"prompt {group['prompt_index']} has other tokens than the stored one: other data or tokenizer"
        )
    device = next(policy.model.parameters()).device
    rollouts = rollouts_of_prompt(prompt, group["completion_tokens"], policy.pad_id).to(device)
    found = measure_gram(policy.model, rollouts, temperature=temperature).matrix.double().numpy()
    stored = np.array(group["k"], dtype=float).reshape(found.shape)
    return float(np.linalg.norm(found - stored) / np.linalg.norm(stored))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder here: qwen2.5-coder-0.5b or qwen2.5-coder-1.5b")
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--setting", default="t1-p1")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    setting = json.loads((HERE / given.model / "setting.json").read_text(encoding="utf-8"))
    with given.weights.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) not in setting["weights"]:
            raise SystemExit(f"{given.weights} has sha256 {found}; {given.model} was measured on: {setting['weights']}")
    task = load_task(f"gsm8k:{given.data}")
    policy = load_policy(PolicyConfig(model=str(given.weights), device=given.device, prompt="chat"), task)
    groups = pq.read_table(HERE / given.model / f"{given.setting}.parquet").to_pylist()
    for group in sorted(groups, key=lambda group: max(group["lengths"]))[: given.groups]:
        off = difference(policy, task, group, setting["settings"][given.setting]["temperature"])
        rows = f"{len(group['lengths'])} rollouts of up to {max(group['lengths'])} tokens"
        print(f"prompt {group['prompt_index']}, {rows}: |K' - K| is {off:.1e} of |K|", flush=True)


if __name__ == "__main__":
    main()
