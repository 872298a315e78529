"""Samples groups of rollouts from a fixed policy on GSM8K and measures the exact Gram of their scores.

This is what ran on the GPU, at commit e54872a, apart from layout, docstrings and comments. It imports names of that
commit, some of which have moved since: check that commit out to run it. The 1.5 B and SmolLM2 ran this version; the
0.5 B ran the version before, which does not wait when memory is short and is the same otherwise. The Parquet files of
this folder hold the chunks that it wrote, without the prompts.

Nothing is learned: there is no optimiser, `measure_gram` leaves the model as it was, and a fingerprint of every weight
is taken before and after. For each setting (temperature, top-p) the prompts are the first ones of one seeded
permutation of the training problems. The permutation is the same for all settings and models, so that settings are
paired by prompt.

A chunk of prompts is sampled at once, 16 rollouts for each prompt, then measured group by group: one forward and
backward pass per group, padded to the longest rollout of the group. Each chunk becomes one `.npz`. Scores are those of
the policy at the sampling temperature, `softmax(logits / T)`, as in scoregram's training code (`k`). With --plain-too
the tempered rollouts are scored a second time, under the policy at temperature 1 (`k_plain`). Under top-p the scores
are those of the whole policy, before truncation.

    PYTHONPATH=src python collect.py --model FILE.gguf --data gsm8k --out DIR --task 1:1:0:8 --task 0.7:1:0:2
"""
# ruff: noqa: I001  (how imports sort depends on which modules of the package exist)

import argparse
import json
import os
import platform
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import transformers

import scoregram
from scoregram.checks import NotFiniteError
from scoregram.gram import measure_gram
from scoregram.policy import PolicyConfig, SamplingConfig, load_policy
from scoregram.policy.bias import BiasedSamplingWarning
from scoregram.policy.log_probs import token_log_probs
from scoregram.tasks.table import load_task
from scoregram.training.collecting import collect, rollouts_at
from scoregram.training.order import epoch_order, generator

CHECKED, PLAIN_ROWS = 4, 3
"""Groups measured again in float32; rollouts of the first of them that also get a backward pass each."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", action="append", required=True, help="TEMPERATURE:TOP_P:FIRST_CHUNK:END_CHUNK")
    parser.add_argument("--prompt", default="chat")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a chunk")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=float, default=float("inf"), help="unix time after which no group is begun")
    parser.add_argument("--plain-too", action="store_true", help="score tempered rollouts at temperature 1 as well")
    parser.add_argument("--check", action="store_true", help="measure the first groups again in float32")
    parser.add_argument("--no-gram", action="store_true", help="only sample and reward")
    return parser.parse_args()


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of all weights."""
    total = 0
    for parameter in model.parameters():
        for piece in parameter.detach().flatten().view(torch.int32).split(1 << 26):
            odd = torch.arange(len(piece), device=piece.device) * 2 + 1
            total = (total * 31 + int((piece.long() * odd).sum())) % (1 << 64)
    return f"{total:016x}"


def inputs(rollouts):
    """The tensors that `measure_gram` takes."""
    return rollouts.input_ids, rollouts.completion_mask, rollouts.attention_mask


def parts_of(by_layer, last: str) -> dict[str, np.ndarray]:
    """Grams of the embedding, the head and the last block alone; with the rest they add up to `k`."""
    chosen = {"k_embed": "embed_tokens", "k_head": "lm_head", "k_last": last}
    zero = torch.zeros_like(next(iter(by_layer.values())))
    return {
        name: sum((gram for layer, gram in by_layer.items() if mark in f"{layer}."), zero).numpy()
        for name, mark in chosen.items()
    }


def measured_gram(policy, group, temperature: float, where: str):
    """The Gram of a group, and the attempt that gave it: 0 the first, 1 the second, 2 float32 without autocast.

    A few passes under bfloat16 autocast end in gradients that are not finite (cuDNN attention, see README.md). Such a
    group is measured again, and in float32 without autocast if the gradients are still not finite.
    """
    how = 0
    while how < 3:
        try:
            with policy.computing() if how < 2 else nullcontext():
                return measure_gram(policy.model, *inputs(group), temperature=temperature), how
        except NotFiniteError as error:
            print(f"{where}: attempt {how}: {error}", flush=True)
            how += 1
        except torch.OutOfMemoryError:  # another process holds the memory for now
            print(f"{where}: out of memory, waiting", flush=True)
            torch.cuda.empty_cache()
            time.sleep(1)
    raise SystemExit(f"{where}: not finite in float32 either")


def check(policy, group, k: np.ndarray, temperature: float, plain: bool) -> dict[str, np.ndarray]:
    """K of a group in float32; with `plain` also K of its first rollouts from one backward pass each."""
    found = {"k_float32": measure_gram(policy.model, *inputs(group), temperature=temperature).matrix.numpy()}
    if plain:
        parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        rows = []
        for row in range(PLAIN_ROWS):
            one = rollouts_at(group, torch.arange(len(group.input_ids)) == row)
            ids, completion, attention = inputs(one)
            total = token_log_probs(policy.model, ids, attention, completion, temperature=temperature).sum()
            rows.append(torch.autograd.grad(total, parameters))
        dots = [
            [sum(float((a.double() * b.double()).sum()) for a, b in zip(u, v, strict=True)) for v in rows] for u in rows
        ]
        found["k_plain_backward"] = np.array(dots)
    return found


def main() -> None:
    """Sample and measure every task of the command line."""
    args = arguments()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", BiasedSamplingWarning)
    task = load_task(f"gsm8k:{args.data}")
    policy = load_policy(PolicyConfig(model=args.model, autocast=True, prompt=args.prompt), task)
    device = next(policy.model.parameters()).device
    order = epoch_order(len(task.train), 0, args.seed)
    last = f"layers.{policy.model.config.num_hidden_layers - 1}."
    before = fingerprint(policy.model)
    name_of_device = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    setting = {
        "parameters_measured": sum(p.numel() for p in policy.model.parameters() if p.requires_grad),
        "tied_head": policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight,
        "weights_dtype": str(next(policy.model.parameters()).dtype),
        "autocast": "bfloat16",
        "weights_fingerprint": before,
        "chat_prompt": policy.chat,
        "prompt_format": task.prompt_format,
        "stop_ids": list(policy.stop_ids),
        "pad_id": policy.pad_id,
        "seed": args.seed,
        "prompts_of_a_chunk": args.prompts,
        "rollouts_of_a_prompt": args.rollouts,
        "max_new_tokens": args.max_new_tokens,
        "tasks": args.task,
        "scoregram": scoregram.__file__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        },
        "device": name_of_device,
        "load_seconds": time.time() - began,
    }
    print(json.dumps(setting), flush=True)
    (args.out / f"setting-{os.getpid()}.json").write_text(json.dumps(setting, indent=1))

    for line in args.task:
        temperature, top_p, first, end = line.split(":")
        sampling = SamplingConfig(args.max_new_tokens, temperature=float(temperature), top_p=float(top_p))
        for chunk in range(int(first), int(end)):
            if time.time() > args.until:
                break
            run_chunk(args, policy, task, order, sampling, f"t{temperature}-p{top_p}", chunk, last)
    after = fingerprint(policy.model)
    done = {"weights_unchanged": after == before, "seconds": time.time() - began}
    if device.type == "cuda":
        done["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(done), flush=True)
    (args.out / f"done-{os.getpid()}.json").write_text(json.dumps(done, indent=1))


def run_chunk(args, policy, task, order, sampling, name: str, chunk: int, last: str) -> None:
    """Sample, reward and measure one chunk of prompts, and write it to one file."""
    temperature, size = sampling.temperature, args.rollouts
    chosen = [order[place] for place in range(chunk * args.prompts, (chunk + 1) * args.prompts)]
    start = time.time()
    stream = generator(args.seed, f"fixed policy {name}", chunk)
    found = collect(policy, task, [task.train[i] for i in chosen], group_size=size, sampling=sampling, generator=stream)
    sampled = time.time()
    columns: dict[str, list] = {}

    def add(**values) -> None:
        for key, value in values.items():
            columns.setdefault(key, []).append(value)

    completions = found.rollouts.completion_ids()
    measured = 0
    for place in range(len(chosen)):
        if time.time() > args.until and not args.no_gram:
            break
        rows = torch.zeros(len(completions), dtype=torch.bool)
        rows[place * size : (place + 1) * size] = True
        group = rollouts_at(found.rollouts, rows)
        mine = completions[place * size : (place + 1) * size]
        prompt = group.input_ids[0, : int(group.prompt_lengths[0])].tolist()
        add(
            prompt_index=chosen[place],
            rewards=found.rewards[place].numpy(),
            lengths=np.array([len(ids) for ids in mine]),
            truncated=~group.finished.cpu().numpy(),
            sampled_log_prob=group.behaviour_log_probs.double().sum(1).cpu().numpy(),
            prompt_length=len(prompt),
            prompt_tokens=np.array(prompt, dtype=np.int32),
            completion_tokens=np.concatenate([np.array(ids, dtype=np.int32) for ids in mine]),
        )
        if not args.no_gram:
            gram, how = measured_gram(policy, group, temperature, f"{name}-{chunk:03d}, group {place}")
            add(k=gram.matrix.numpy(), log_prob=gram.log_probs.double().sum(1).cpu().numpy(), how=how)
            add(**parts_of(gram.by_layer, last))
            if args.plain_too and temperature != 1:
                plain, how = measured_gram(policy, group, 1.0, f"{name}-{chunk:03d}, group {place}, plain")
                add(
                    how_plain=how,
                    k_plain=plain.matrix.numpy(),
                    log_prob_plain=plain.log_probs.double().sum(1).cpu().numpy(),
                )
            if args.check and chunk == 0 and place < CHECKED and temperature == 1 and sampling.top_p == 1:
                for key, value in check(policy, group, columns["k"][-1], temperature, place == 0).items():
                    add(**{key: value})
        measured += 1
    arrays = {
        key: np.concatenate(values) if key.endswith("_tokens") else np.stack([np.asarray(v) for v in values])
        for key, values in columns.items()
        if values
    }
    path = args.out / f"{name}-{chunk:03d}.npz"
    np.savez_compressed(args.out / "partial.npz", **arrays)
    (args.out / "partial.npz").rename(path)
    now = time.time()
    print(
        f"{now:.0f} {path.name}: {measured} groups, "
        f"sampled in {sampled - start:.1f} s, measured in {now - sampled:.1f} s, "
        f"right {float(found.rewards.mean()):.3f}, cut off {float((~found.rollouts.finished).double().mean()):.3f}, "
        f"tokens {float(found.lengths.double().mean()):.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
