"""A small dump of every format, written to the layout of its framework: two groups of two rollouts at step 7.

Prompts are `1+1=` and `2+2=`, read one character a token; the ids are those of `character_tokenizer`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scoregram.policy.tiny import VOCABULARY
from scoregram.runs import RolloutRecord, RunWriter

STEP = 7
ROLLOUTS = (
    {"prompt": "1+1=", "completion": "2", "reward": 1.0, "advantage": 0.5},
    {"prompt": "1+1=", "completion": "13", "reward": 0.0, "advantage": -0.5},
    {"prompt": "2+2=", "completion": "4", "reward": 1.0, "advantage": 0.25},
    {"prompt": "2+2=", "completion": "4 .", "reward": 0.5, "advantage": -0.25},
)
"""What every dump tells, as far as its format can."""


def ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def log_probs(completion: str) -> list[float]:
    return [-0.5 - i for i in range(len(completion))]


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_scoregram(folder: Path) -> Path:
    with RunWriter.create(folder, {"seed": 0, "temperature": 1.0}, environment={}) as writer:
        writer.write_rollouts(STEP, [scoregram_row(i, one) for i, one in enumerate(ROLLOUTS)])
    return folder


def scoregram_row(i: int, one: Mapping[str, Any]) -> RolloutRecord:
    start, length = len(one["prompt"]), len(one["completion"])
    return RolloutRecord(
        step=STEP,
        prompt_id=f"sum/{i // 2}",
        group=i // 2,
        index=i % 2,
        prompt=one["prompt"],
        completion=one["completion"],
        token_ids=torch.tensor(ids(one["prompt"] + one["completion"])),
        prompt_length=start,
        reward=one["reward"],
        rewards={"right": one["reward"]},
        log_probs=torch.tensor([0.0] * start + log_probs(one["completion"])),
        advantage=one["advantage"],
        finished=length == 1,
    )


def write_trl(folder: Path) -> Path:
    table = {
        "step": [STEP] * 4,
        "prompt": [one["prompt"] for one in ROLLOUTS],
        "completion": [one["completion"] for one in ROLLOUTS],
        "accuracy_reward": [one["reward"] for one in ROLLOUTS],
        "format_reward": [0.0] * 4,
        "advantage": [one["advantage"] for one in ROLLOUTS],
    }
    path = folder / "completions" / f"completions_{STEP:05d}.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(table), path)
    return folder


def verl_record(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input": one["prompt"],
        "output": one["completion"],
        "gts": "2",
        "score": one["reward"],
        "step": STEP,
        "acc": one["reward"] == 1.0,
        "uid": f"7e1f-{i // 2}_{i % 2}_0",
    }


def write_verl(folder: Path) -> Path:
    lines(folder / f"{STEP}.jsonl", [verl_record(i, one) for i, one in enumerate(ROLLOUTS)])
    return folder


def nemo_record(i: int, one: Mapping[str, Any], width: int = 9) -> dict[str, Any]:
    start, length = len(one["prompt"]), len(one["completion"])
    pad = width - start - length
    mask = [0.0] * start + [1.0] * length + [0.0] * pad
    drawn = [0.0] * start + log_probs(one["completion"]) + [0.0] * pad
    return {
        "content": [one["prompt"] + one["completion"]],
        "rewards": [one["reward"]],
        "input_lengths": [start + length],
        "token_ids": [ids(one["prompt"] + one["completion"]) + [0] * pad],
        "token_loss_mask": [mask],
        "sample_loss_mask": [1.0],
        "advantages": [[one["advantage"]] * width],
        "generation_logprobs": [drawn],
        "prev_logprobs": [drawn],
        "idx": i,
    }


def write_nemo_rl(folder: Path) -> Path:
    path = folder / "exp_001" / f"train_data_step{STEP}.jsonl"
    lines(path, [nemo_record(i, one) for i, one in enumerate(ROLLOUTS)])
    return folder


def prime_record(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    start, length = len(one["prompt"]), len(one["completion"])
    return {
        "schema_version": 1,
        "step": STEP,
        "export_step": STEP,
        "rank": i % 2,
        "micro_step": 0,
        "micro_sequence_idx": i // 2,
        "export_sequence_idx": i // 2,
        "run_id": None,
        "env_name": "sums",
        "token_ids": ids(one["prompt"] + one["completion"]),
        "position_ids": list(range(start + length)),
        "loss_mask": [False] * start + [True] * length,
        "advantages": [one["advantage"]] * (start + length),
        "rewards": [one["reward"]] * (start + length),
        "inference_logprobs": [0.0] * start + log_probs(one["completion"]),
        "trainer_logprobs": [0.0] * start + log_probs(one["completion"]),
    }


def write_prime_rl(folder: Path) -> Path:
    """The rollouts of a group lie on different ranks."""
    for rank in range(2):
        records = [prime_record(i, one) for i, one in enumerate(ROLLOUTS) if i % 2 == rank]
        lines(folder / "token_exports" / f"step_{STEP}" / f"rank_{rank}.jsonl", records)
    return folder


def episode(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    asked, answered = ids(one["prompt"]), ids(one["completion"])
    nodes = [
        {
            "message": {"role": "user", "content": one["prompt"]},
            "sampled": False,
            "token_ids": asked[:-1],
            "mask": [False] * (len(asked) - 1),
            "logprobs": [],
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": one["completion"]},
            "sampled": True,
            "token_ids": asked[-1:] + answered,
            "mask": [False] + [True] * len(answered),
            "logprobs": log_probs(one["completion"]),
            "advantages": [one["advantage"]] * len(answered),
        },
    ]
    trace = {
        "version": 1,
        "id": f"trace-{i}",
        "task": {"type": "Sum", "data": {"prompt": one["prompt"]}, "key": f"sum/{i // 2}"},
        "agent": {"name": "solver", "trainable": True},
        "nodes": nodes,
        "rewards": {"right": {"score": 2 * one["reward"], "weight": 0.5}},
        "ok": True,
    }
    return {
        "id": f"episode-{i}",
        "env": {"id": "sums"},
        "task": trace["task"],
        "group": {"id": f"group-{i // 2}"},
        "run": {"type": "train", "id": "run", "work": {"type": "train", "step": STEP}},
        "ok": True,
        "traces": [trace],
    }


def write_verifiers(folder: Path) -> Path:
    """In the order in which episodes were completed."""
    order = (0, 2, 3, 1)
    lines(folder / f"step_{STEP}" / "train" / "all" / "traces.jsonl", [episode(i, ROLLOUTS[i]) for i in order])
    return folder


def open_instruct_record(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": STEP,
        "sample_idx": i,
        "prompt_idx": i // 2,
        "prompt_tokens": ids(one["prompt"]),
        "response_tokens": ids(one["completion"]),
        "reward": one["reward"],
        "advantage": one["advantage"],
        "finish_reason": "stop",
        "dataset": "sums",
        "ground_truth": [1],
        "request_info": None,
        "logprobs": log_probs(one["completion"]),
    }


def write_open_instruct(folder: Path) -> Path:
    lines(
        folder / "run_metadata.jsonl", [{"run_name": "run", "git_commit": "abc", "model_name": "m", "timestamp": "t"}]
    )
    lines(folder / "run_rollouts_000000.jsonl", [open_instruct_record(i, one) for i, one in enumerate(ROLLOUTS)])
    return folder


def plain_record(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: one[name] for name in ("prompt", "completion", "reward")}
    return kept | {"group": i // 2, "step": STEP, "tokens": len(one["completion"])}


def write_plain(folder: Path) -> Path:
    lines(folder / "mine.jsonl", [plain_record(i, one) for i, one in enumerate(ROLLOUTS)])
    return folder


def slime_sample(i: int, one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "group_index": i // 2,
        "index": i,
        "prompt": one["prompt"],
        "tokens": ids(one["prompt"] + one["completion"]),
        "response": one["completion"],
        "response_length": len(one["completion"]),
        "label": "2",
        "reward": one["reward"],
        "loss_mask": None,
        "weight_versions": ["1"],
        "rollout_log_probs": log_probs(one["completion"]),
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
    }


def write_slime(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"rollout_id": STEP, "samples": [slime_sample(i, one) for i, one in enumerate(ROLLOUTS)]}
    torch.save(content, folder / f"data_{STEP}.pt")
    return folder


WRITERS: MappingProxyType[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "scoregram": write_scoregram,
        "trl": write_trl,
        "nemo-rl": write_nemo_rl,
        "prime-rl": write_prime_rl,
        "verifiers": write_verifiers,
        "open-instruct": write_open_instruct,
        "verl": write_verl,
        "plain": write_plain,
        "slime": write_slime,
    }
)
"""From an empty folder to the path that a user would name."""

RECORDS: MappingProxyType[str, Callable[[int, Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "nemo-rl": nemo_record,
        "prime-rl": prime_record,
        "verifiers": episode,
        "open-instruct": open_instruct_record,
        "verl": verl_record,
        "plain": plain_record,
    }
)
"""The record of one rollout, of the formats that are lines of JSON."""
