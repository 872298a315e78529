"""TRL trainers in two connected processes, data parallel and sharded, and what each process observed."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scoregram.integrations.trl import attach, separate_pass, support
from tests.distributed_cases import PROCESSES
from tests.trl_cases import trainer_for, watch_gradients

KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


@dataclass(frozen=True)
class Case:
    """A training of two steps, three groups of four over two processes of six rollouts: the second group is cut."""

    sharded: bool = False
    kind: str = "GRPO"
    asked: dict[str, Any] = field(default_factory=dict)
    """For `attach`."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the trainer's arguments."""
    policy: str = "tied"
    lora: bool = False


UNEVEN = {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 6}
"""A KL term and a second step on the same rollouts."""
ONE_GROUP = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
AGAIN = {"gradient_checkpointing": True}
SCORES: dict[str, Case] = {
    "parallel": Case(),
    "parallel, rloo": Case(kind="RLOO", changes=AGAIN),
    "parallel, between prompts": Case(asked={"between_prompts": True}),
    "parallel, absolute positions": Case(policy="absolute"),
    "sharded": Case(sharded=True),
    "sharded, one group": Case(sharded=True, changes=ONE_GROUP | AGAIN),
    "sharded, between prompts": Case(sharded=True, asked={"between_prompts": True}),
    "sharded, several passes": Case(sharded=True, asked={"memory_gb": 5}, policy="untied"),
}
LOSSES: dict[str, Case] = {
    "parallel, loss": Case(asked={"mode": "loss"}, changes=UNEVEN),
    "sharded, loss": Case(sharded=True, asked={"mode": "loss"}, changes={**UNEVEN, "beta": 0.0}),
}
ESTIMATORS: dict[str, Case] = {
    "parallel, estimator": Case(asked={"estimator": "optimal-loo"}),
    "sharded, estimator": Case(sharded=True, asked={"estimator": "optimal-loo"}),
}
ADAPTERS: dict[str, Case] = {"sharded, lora": Case(sharded=True, lora=True)}
CASES = SCORES | LOSSES | ESTIMATORS | ADAPTERS
UNEXPLAINED: dict[str, Case] = {
    "parallel, unexplained": Case(changes={"beta": 2.0}),
    "sharded, unexplained": Case(sharded=True, changes={"beta": 2.0}),
}
"""A KL term, which the scores of the second step do not explain."""


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """All that the tests look at: processes take longer to start than to do it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ |= {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES), "ACCELERATE_USE_CPU": "true"}
    gc.freeze()  # or each training would walk over everything that was imported, at its beginning
    found: dict[str, Any] = {name: run(name, case, folder) for name, case in (CASES | UNEXPLAINED).items()}
    found["plain"] = run("plain", Case(), folder, attached=False)
    advised = Case(asked={"between_prompts": True, "advise_every": 1})
    found["advised"] = run("advised", advised, folder)
    found["failing"] = run("failing", Case(), folder, before=lambda: fails_once(rank))
    found["too large for one"] = run("too large", Case(), folder, before=lambda: is_small(rank))
    found["taken"] = refused(folder)
    return found


def run(
    name: str, case: Case, folder: Path, *, attached: bool = True, before: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Train; return what was measured, what was generated, and the weights of the model."""
    forget_the_last_trainer()
    trainer = trainer_for(
        case.kind,
        folder / case.policy,
        peft=lora() if case.lora else None,
        **({"per_device_train_batch_size": 3, "max_grad_norm": 0.0} | case.changes),
    )
    if case.sharded:
        shard(trainer)
    seen: dict[str, list[Any]] = {"generations": [], "losses": []}
    watch_generations(trainer, seen["generations"])
    if case.asked.get("mode") == "loss":
        watch_losses(trainer, seen["losses"])
    if not case.sharded:
        seen["gradients"] = watch_gradients(trainer)
    torch.manual_seed(7 + trainer.accelerator.process_index)
    kept = separate_pass.backward_with_gram, separate_pass.bytes_of_pass, support.free_bytes
    if "memory_gb" in case.asked:
        separate_pass.bytes_of_pass = lambda model, rollouts, tokens, **_: int(rollouts * 1e9)
    if before is not None:
        before()
    told: dict[str, Any] = {}
    try:
        if attached:
            asked = attach(trainer, every=1, out=folder / "runs" / name, **case.asked)
            watch_advantages(trainer, seen["generations"])
            trainer.train()
            told = {
                "scalars": [reading.scalars for reading in asked.readings],
                "errors": [reading.error for reading in asked.readings],
                "steps": [reading.step for reading in asked.readings],
                "failures": asked.failures,
                "recommended": [(one.step, one.sizes, one.sentence) for one in asked.recommendations],
                "writes": asked.folder is not None,
            }
        else:
            trainer.train()
    finally:
        separate_pass.backward_with_gram, separate_pass.bytes_of_pass, support.free_bytes = kept
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return (
        told | seen | {"weights": weights_of(trainer), "logged": logged, "kind": type(trainer.model_wrapped).__name__}
    )


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])


def forget_the_last_trainer() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def shard(trainer: Any) -> None:
    """FSDP2 by the plugin of accelerate, which looks for its plugin on other devices than a CPU only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole copies of all parameters."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }


def watch_generations(trainer: Any, seen: list[Any]) -> None:
    inner = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        output = inner(inputs)
        seen.append({name: output[name].clone() for name in KEPT} | {"weights": weights_of(trainer)})
        return output

    trainer._generate_and_score_completions = watched


def watch_advantages(trainer: Any, seen: list[Any]) -> None:
    """Record the advantages that the trainer uses after an estimator replaced its own."""
    inner = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        output = inner(inputs)
        seen[-1]["used"] = output["advantages"].clone()
        return output

    trainer._generate_and_score_completions = watched


def watch_losses(trainer: Any, seen: list[Any]) -> None:
    """The derivative by autograd on the trainer's own loss, before the mean over processes is taken."""
    inner = trainer._compute_loss

    def watched(model: Any, inputs: Any) -> Any:
        caught, weights = [], weights_of(trainer)
        log_probs_of = trainer._get_per_token_logps_and_entropies

        def catching(*args: Any, **kwargs: Any) -> Any:
            caught.append(log_probs_of(*args, **kwargs))
            return caught[-1]

        trainer._get_per_token_logps_and_entropies = catching
        loss = inner(model, inputs)
        trainer._get_per_token_logps_and_entropies = log_probs_of
        (derivative,) = torch.autograd.grad(loss, caught[0][0], retain_graph=True)
        kept = {name: inputs[name].clone() for name in KEPT}
        seen.append(kept | {"derivative": derivative / PROCESSES, "weights": weights})
        return loss

    trainer._compute_loss = watched


def fails_once(rank: int) -> None:
    """The first measurement of the second process fails."""
    inner, calls = separate_pass.backward_with_gram, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("no such kernel")
        return inner(*args, **kwargs)

    separate_pass.backward_with_gram = broken


def is_small(rank: int) -> None:
    """The second process has no memory left."""
    if rank == 1:
        support.free_bytes = lambda model, processes: 1.0


def refused(folder: Path) -> str:
    forget_the_last_trainer()
    trainer = trainer_for("GRPO", folder / "tied", per_device_train_batch_size=3)
    try:
        attach(trainer, out=folder / "runs" / "parallel")
    except ValueError as error:
        return str(error)
    return ""
