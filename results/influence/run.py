"""Predicted against realised change of held-out log-probabilities, step by step, with SGD and with AdamW.

python run.py [--steps 15] [--seeds 5] [--settings sgd:1e-3 adamw:1e-4]    adds to influence.npz beside this file

The embedded policy is trained on arithmetic with RLOO. `ψ_h` is the score of the right solution of a held-out problem,
and `ĝ = Σ_i w_i ψ_i` the ascent direction of the step. Three predictions of the change of `log π(solution)` are stored
beside the change that the step made:

- *plain*: `η ⟨ĝ, ψ_h⟩`, the train × held-out block of K times the weights, from `cross_gram`.
- *preconditioned*: `η ⟨ĝ, D ψ_h⟩` with `D = 1 / (√v̂ + ε)` from AdamW's state after the step (`adam_preconditioner`),
  from `cross_gram` with that preconditioner; plain for SGD.
- *first-order*: `⟨Δθ, ψ_h⟩` with the step `Δθ` that the optimiser took, momentum included: a directional derivative of
  `log π(solution)` by central differences, two forward passes for all held-out problems.

All are taken at the weights before the step. The state after the step is the right one: the step divides by a `√v̂` that
includes its own gradient. In the first step of a run, both predictions of `cross_gram` are compared with directional
derivatives along `ĝ` and `D ĝ`.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from scoregram.gram import adam_preconditioner, cross_gram
from scoregram.policy import Policy, load_policy, token_log_probs
from scoregram.tasks import load_task, solution
from scoregram.training import METHODS, TrainConfig, drawn_problems, seeded_generator
from scoregram.training.collect import collect
from scoregram.training.update import Updater, gram_inputs, make_optimizer

HERE = Path(__file__).parent
DISTANCE = 1e-3
"""Distance in the weights at which directional derivatives are taken. At a tenth of it the rounding of Llama's norms,
which compute in float32 in any model, would show."""


@dataclass(frozen=True)
class Plan:
    """What to train."""

    settings: tuple[str, ...] = ("sgd:1e-3", "sgd:1e-4", "adamw:1e-4", "adamw:1e-5")
    """Optimisers and their learning rates."""
    seeds: int = 5
    """Runs of each setting, with problems and rollouts of their own. All start from the policy of seed 0."""
    steps: int = 15
    """Steps of a run."""
    held_out: int = 32
    """Held-out problems."""
    out: Path = HERE / "influence.npz"
    """File to write."""


@dataclass(frozen=True)
class HeldOut:
    """The right solutions of held-out problems as one batch."""

    ids: Tensor
    completion: Tensor
    attention: Tensor

    def log_probs(self, policy: Policy) -> Tensor:
        """`(H,)` log-probability of each solution."""
        return token_log_probs(policy.model, self.ids, self.attention, self.completion).sum(1)

    @torch.no_grad()
    def slopes(self, policy: Policy, directions: list[Tensor]) -> list[Tensor]:
        """`⟨ψ_h, d⟩` `(H,)` for each direction `d` `(D,)`, at the policy's weights."""
        exact = replace(policy, model=copy.deepcopy(policy.model).double())
        weights = list(exact.model.parameters())
        start, found = flat(weights), []
        for direction in directions:
            unit = DISTANCE / direction.double().norm()
            ends = []
            for sign in (1, -1):
                torch.nn.utils.vector_to_parameters(start + sign * unit * direction, weights)
                ends.append(self.log_probs(exact))
            found.append((ends[0] - ends[1]) / (2 * unit))
        return found


def held_out_solutions(policy: Policy, task: Any, count: int) -> HeldOut:
    """Prompt and right solution of the first test problems, padded on the right."""
    rows, starts = [], []
    for problem in task.test[:count]:
        prompt = policy.encode_prompt(task.prompt(problem))
        written = policy.tokenizer(solution(problem), add_special_tokens=False)["input_ids"]
        rows.append([*prompt, *written, policy.stop_ids[0]])
        starts.append(len(prompt))
    width = max(map(len, rows))
    ids = torch.tensor([row + [policy.pad_id] * (width - len(row)) for row in rows])
    lengths, place = torch.tensor([len(row) for row in rows])[:, None], torch.arange(width)
    return HeldOut(ids, (place >= torch.tensor(starts)[:, None]) & (place < lengths), place < lengths)


def flat(tensors: list[Tensor]) -> Tensor:
    """All entries in one vector, a copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).clone()


def preconditioned_by(optimizer: torch.optim.Optimizer, unmoved: Any, policy: Policy) -> dict[Tensor, Tensor]:
    """`D` of AdamW's latest step for the parameters of a copy of the policy; ones for SGD."""
    copies = list(zip(policy.model.parameters(), unmoved.parameters(), strict=True))
    if not isinstance(optimizer, torch.optim.AdamW):
        return {copied: torch.ones_like(copied) for _, copied in copies}
    diagonals = adam_preconditioner(optimizer)
    return {copied: diagonals[parameter] for parameter, copied in copies}


def trained_run(plan: Plan, setting: str, seed: int) -> dict[str, np.ndarray]:
    """Predictions and changes `(steps, H)` of one run, and the largest differences from central differences."""
    name, rate = setting.split(":")
    config = TrainConfig(method="rloo", optimizer=name, learning_rate=float(rate), seed=seed)  # pyright: ignore[reportArgumentType]
    task = load_task(config.task, seed=seed)
    policy = load_policy(replace(config.policy, seed=0), load_task(config.task, seed=0))
    optimizer, weights = make_optimizer(policy.model, config), list(policy.model.parameters())
    sampling = config.sampling(task.max_new_tokens)
    updater = Updater(policy.model, METHODS["rloo"], 1.0, sampling.max_new_tokens, 0, policy.computing, 0.0, "k3")
    held = held_out_solutions(policy, task, plan.held_out)
    found: dict[str, list[Tensor]] = {n: [] for n in ("plain", "preconditioned", "first_order", "realised", "start")}
    gaps: dict[str, Tensor] = {}
    for number in range(1, plan.steps + 1):
        problems = drawn_problems(task.train, (number - 1) * config.prompts, config.prompts, seed)
        stream = seeded_generator(seed, "rollouts", number)
        size = config.starting_group_size
        rollouts = collect(policy, task, problems, group_size=size, sampling=sampling, generator=stream)
        before, unmoved = flat(weights), replace(policy, model=copy.deepcopy(policy.model))
        optimizer.zero_grad()
        step, _ = updater.first(number, rollouts, measure=False)
        ascent = -flat([weight.grad for weight in weights if weight.grad is not None])
        optimizer.step()
        diagonal = preconditioned_by(optimizer, unmoved.model, policy)
        parts = gram_inputs(rollouts), (held.ids, held.completion, held.attention)
        for key, given in {"plain": None, "preconditioned": diagonal}.items():
            block = cross_gram(unmoved.model, *parts, preconditioner=given).cross
            found[key].append(float(rate) * step.weights.double() @ block)
        directions = [flat(weights) - before]
        if number == 1:
            directions += [ascent, flat(list(diagonal.values())) * ascent]
        with torch.no_grad():
            start = held.log_probs(unmoved)
            first_order, *checks = held.slopes(unmoved, directions)
            found["realised"].append(held.log_probs(policy) - start)
        for key, check in zip(("plain", "preconditioned"), checks, strict=False):  # none after the first step
            gaps[key] = (found[key][0] / float(rate) - check).abs().max() / check.abs().max()
        found["first_order"].append(first_order)
        found["start"].append(start)
        print(
            f"{setting} seed {seed} step {number}/{plan.steps} · held-out log π {float(start.mean()):.3f}", flush=True
        )
    arrays = {name: torch.stack(rows).numpy().astype(np.float32) for name, rows in found.items()}
    return arrays | {f"gap_{key}": gap.numpy().astype(np.float32) for key, gap in gaps.items()}


def main() -> None:
    """Train every setting and seed that the file does not have, and write all arrays after each run."""
    plan = tyro.cli(Plan)
    stored: dict[str, np.ndarray] = {}
    if plan.out.exists():
        with np.load(plan.out) as file:
            stored = {name: file[name] for name in file.files}
    for seed in range(plan.seeds):
        for setting in plan.settings:
            name = f"{setting}/seed-{seed}"
            if f"{name}/gap_preconditioned" in stored:
                continue
            arrays = trained_run(plan, setting, seed)
            stored |= {f"{name}/{key}": values for key, values in arrays.items()}
            np.savez_compressed(plan.out, **stored)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
