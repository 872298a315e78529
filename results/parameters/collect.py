"""Samples groups from a fixed policy on GSM8K and measures Grams of the same rollouts over several sets of parameters.

    python collect.py --model FOLDER --data gsm8k --out DIR

Prompts are chosen by a first sample: those with 2 to R - 2 right rollouts of R. Their groups are then sampled anew, so
the choice does not condition the measured rewards. All Grams are measured in float32 without autocast. The file
`grams.npz` has one row per group and holds no text.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoregram.gram import Sketch, measure_gram
from scoregram.policy import Policy, PolicyConfig, SamplingConfig, load_policy
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Task, load_task
from scoregram.training.collect import collect, drawn_problems, seeded_generator

FEATURES = (1024, 256, 64, 16)
"""Lengths of the random projections. A sketch folded to a divisor of its length is a sketch of that length."""
LORA_RANK = 16
LORA_B_DEVIATION = 0.01
"""Standard deviation of the second LoRA matrix in the columns `lora_moved`; in `lora` it is zero, as LoRA starts."""
VOCABULARY_CHUNK = 4096


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--screened", type=int, default=512, help="prompts of the first sample")
    parser.add_argument("--prompts", type=int, default=96, help="prompts that are measured, at most")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of a prompt")
    parser.add_argument(
        "--fewest", type=int, default=2, help="right and wrong rollouts that the first sample must have"
    )
    parser.add_argument("--at-once", type=int, default=32, help="prompts sampled at once")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no group is begun after this time")
    return parser.parse_args()


def sampled(
    policy: Policy, task: Task, problems: Sequence[Problem], args: argparse.Namespace, purpose: str
) -> Iterator[Rollouts]:
    """The groups of some prompts, `at_once` prompts at a time."""
    sampling = SamplingConfig(args.max_new_tokens)
    for start in range(0, len(problems), args.at_once):
        some = problems[start : start + args.at_once]
        generator = seeded_generator(args.seed, purpose, start)
        yield collect(policy, task, some, group_size=args.rollouts, sampling=sampling, generator=generator)


def chosen_problems(policy: Policy, task: Task, args: argparse.Namespace) -> tuple[list[Problem], np.ndarray]:
    """The problems to measure and how many rollouts of the first sample were right, in the order they were drawn."""
    problems = drawn_problems(task.train, 0, args.screened, args.seed)
    right = torch.cat([part.reward_grid.sum(1) for part in sampled(policy, task, problems, args, "screen")])
    print(f"screened {len(problems)}, success {float(right.mean()) / args.rollouts:.3f}", flush=True)
    kept = [at for at, k in enumerate(right.tolist()) if args.fewest <= k <= args.rollouts - args.fewest]
    kept = kept[: args.prompts]
    return [problems[at] for at in kept], right[kept].numpy()


def part_grams(by_layer: dict[str, Tensor], blocks: int) -> dict[str, np.ndarray]:
    """Grams of kinds of parameters and of every block; `embedding`, the blocks and the last norm add up to `full`.

    The embedding is tied to the head, so `embedding` has both uses of the weight.
    """

    def total(*marks: str) -> np.ndarray:
        zero = torch.zeros_like(next(iter(by_layer.values())))
        return sum((gram for name, gram in by_layer.items() if any(m in f".{name}." for m in marks)), zero).numpy()

    kinds = {"attention": ".self_attn.", "mlp": ".mlp.", "embedding": ".embed_tokens."}
    found = {name: total(mark) for name, mark in kinds.items()}
    found["norms"] = total("layernorm.", ".norm.")
    return found | {f"block{index:02d}": total(f".layers.{index}.") for index in range(blocks)}


@torch.no_grad()
def head_grams(model: Any, group: Rollouts) -> dict[str, np.ndarray]:
    """Grams of what needs no backward pass: the head's own gradient, and features of a rollout.

    With the last hidden states `h_t` and logit gradients `e_t = onehot(y_t) - softmax` of the completion tokens:
    `head` is the Gram of `Σ_t e_t ⊗ h_t`, the score with respect to the head alone; `logits` of `Σ_t e_t`; `hidden` of
    the mean of `h_t`; `last_hidden` of the last `h_t`.
    """
    weight = model.get_output_embeddings().weight
    states = model.get_decoder()(input_ids=group.input_ids, attention_mask=group.attention_mask).last_hidden_state
    rows: dict[str, list[Tensor]] = {"head": [], "logits": [], "hidden": [], "last_hidden": []}
    for ids, mask, state in zip(group.input_ids, group.completion_mask, states, strict=True):
        here = mask[1:].bool()
        hidden, targets = state[:-1][here], ids[1:][here]
        gradients = -(hidden @ weight.T).softmax(-1)  # (T, V)
        gradients[torch.arange(len(targets), device=targets.device), targets] += 1
        rows["head"].append(gradients.T @ hidden)
        rows["logits"].append(gradients.sum(0))
        rows["hidden"].append(hidden.mean(0))
        rows["last_hidden"].append(hidden[-1])
    return {name: gram_of(torch.stack(vectors)) for name, vectors in rows.items()}


def gram_of(rows: Tensor) -> np.ndarray:
    """Inner products of `(N, …)` rows, added in float64 some columns at a time."""
    flat = rows.flatten(1)
    step = VOCABULARY_CHUNK * 1024
    parts = (flat[:, start : start + step].double() for start in range(0, flat.shape[1], step))
    return torch.stack([part @ part.T for part in parts]).sum(0).cpu().numpy()


def folded_grams(sketch: Tensor) -> dict[str, np.ndarray]:
    """Grams of random projections of several lengths, from one sketch `(N, m)`."""
    return {f"sketch{m:04d}": gram_of(sketch.double().unflatten(1, (-1, m)).sum(1)) for m in FEATURES}


class Adapters:
    """The policy with fresh LoRA adapters on every linear layer but the head."""

    def __init__(self, config: PolicyConfig, task: Task) -> None:
        self.model = load_policy(config, task).model
        generator = torch.Generator().manual_seed(config.seed)
        self.second = {
            p: torch.randn(p.shape, generator=generator) for n, p in self.model.named_parameters() if "lora_B" in n
        }

    def grams(self, group: Rollouts) -> dict[str, Any]:
        """Grams over the adapters at their start, and with a random second matrix, which moves the policy a little."""
        found: dict[str, Any] = {}
        log_probs = []
        for name, deviation in (("lora", 0.0), ("lora_moved", LORA_B_DEVIATION)):
            with torch.no_grad():
                for parameter, noise in self.second.items():
                    parameter.copy_(noise * deviation)
            gram = measure_gram(self.model, group)
            found[name] = gram.matrix.numpy()
            log_probs.append(gram.log_probs)
        change = (log_probs[1] - log_probs[0]).abs().sum() / group.completion_mask.sum()
        return found | {"lora_moved_change": float(change)}


def measured(policy: Policy, adapters: Adapters, group: Rollouts) -> dict[str, Any]:
    """All Grams of one group."""
    gram = measure_gram(policy.model, group, sketch=Sketch(features=FEATURES[0]))
    assert gram.sketch is not None and not gram.replayed
    return {
        "full": gram.matrix.numpy(),
        "log_prob": gram.log_probs.double().sum(1).cpu().numpy(),
        **part_grams(dict(gram.by_layer), policy.model.config.num_hidden_layers),
        **folded_grams(gram.sketch),
        **head_grams(policy.model, group),
        **adapters.grams(group),
    }


def write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows so far, Grams as float32, in place of the file before."""
    arrays = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
    arrays = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}
    np.savez_compressed(out / "partial.npz", **arrays)
    (out / "partial.npz").replace(out / "grams.npz")


def main() -> None:
    """Choose prompts, sample them, measure their groups."""
    args = arguments()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    task = load_task(f"gsm8k:{args.data}")
    plain = {"model": args.model, "device": args.device, "prompt": "plain", "seed": args.seed}
    sampler = load_policy(PolicyConfig(**plain, autocast=True), task)
    policy = load_policy(PolicyConfig(**plain), task)
    adapters = Adapters(PolicyConfig(**plain, lora_rank=LORA_RANK), task)
    problems, screened = chosen_problems(sampler, task, args)
    device = str(next(policy.model.parameters()).device)
    setting = {
        **{name: value for name, value in vars(args).items() if name not in ("model", "data", "out")},
        "lora_rank": LORA_RANK,
        "lora_parameters": sum(p.numel() for p in adapters.model.parameters() if p.requires_grad),
        "lora_b_deviation": LORA_B_DEVIATION,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
    }
    (args.out / "setting.json").write_text(json.dumps(setting, indent=1) + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for part in sampled(sampler, task, problems, args, "measure"):
        for at, name in enumerate(part.prompt_names):
            if time.monotonic() - began > args.seconds:
                break
            group = part.select(part.group_ids == at)
            facts = {"prompt_id": name, "screened_right": int(screened[len(rows)])}
            facts |= {"rewards": group.rewards.numpy(), "lengths": group.lengths.cpu().numpy().astype(np.int16)}
            rows.append(facts | measured(policy, adapters, group))
        if rows:
            write(args.out, rows)
        print(f"{len(rows)} groups, {time.monotonic() - began:.0f} s", flush=True)
    print("parameters: done", flush=True)


if __name__ == "__main__":
    main()
