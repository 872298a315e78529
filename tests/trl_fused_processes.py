"""Fused steps of TRL trainers in two connected processes, and what goes wrong in the second one alone."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scoregram.distributed import Processes
from scoregram.integrations.trl import attach, fused_step, step_fusion, support
from tests.distributed_cases import PROCESSES
from tests.trl_cases import trainer_for
from tests.trl_processes import Case, forget_the_last_trainer, lora, watch_generations, watch_losses, weights_of

GROUPS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "learning_rate": 1e-3,
}
"""Two groups of four in each process, in one micro-batch."""
IN_TWO = GROUPS | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
INNER = GROUPS | {"beta": 0.1, "num_iterations": 2}
"""A KL term and two steps on the same rollouts."""
SCORES: dict[str, Case] = {
    "scores": Case(changes=GROUPS),
    "accumulated": Case(changes=IN_TWO | {"max_grad_norm": 0.05}),
    "rloo": Case(kind="RLOO", changes=GROUPS | {"gradient_checkpointing": True}),
    "untied": Case(policy="untied", changes=GROUPS | {"loss_type": "grpo"}),
    "absolute positions": Case(policy="absolute", changes=GROUPS),
}
LOSSES: dict[str, Case] = {"loss": Case(asked={"mode": "loss"}, changes=INNER)}
OTHERS: dict[str, Case] = {
    "loss, accumulated": Case(asked={"mode": "loss"}, changes=IN_TWO | {"beta": 0.1}),
    "lora": Case(lora=True, changes=GROUPS),
    "every second step": Case(asked={"every": 2}, changes=GROUPS | {"max_steps": 4}),
}
FUSED = SCORES | LOSSES | OTHERS
NOT_FUSED: dict[str, Case] = {
    "cut": Case(changes=GROUPS | {"per_device_train_batch_size": 6}),
    "between prompts": Case(asked={"between_prompts": True}, changes=GROUPS),
    "sharded": Case(sharded=True, changes=GROUPS),
}
Fault = Callable[[int, Any], Any]
"""From the rank of a process and its attachment to a context in which the second process has a fault."""


def in_second(rank: int, owner: Any, name: str, value: Any) -> Any:
    """Replaces an attribute in the second process alone."""
    return mock.patch.object(owner, name, value if rank == 1 else getattr(owner, name))


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such kernel")


def declines_second_part(rank: int, _: Any) -> Any:
    inner = fused_step.FusedStep.reason_to_decline

    def reason(self: Any, call: Any) -> str | None:
        return "it is the second part" if len(self.parts) == 2 else inner(self, call)

    return in_second(rank, fused_step.FusedStep, "reason_to_decline", reason)


def loses_the_second_generation(rank: int, attached: Any) -> Any:
    inner = attached._generation_of
    return in_second(rank, attached, "_generation_of", lambda *args: raises() if args[1] == 1 else inner(*args))


FAULTS: dict[str, tuple[Case, Fault]] = {
    "forward pass": (SCORES["scores"], lambda rank, _: in_second(rank, fused_step, "DeferredGram", raises)),
    "backward pass": (
        SCORES["scores"],
        lambda rank, _: in_second(rank, fused_step.DeferredGram, "finish", raises),
    ),
    "backward pass, accumulated": (
        SCORES["accumulated"],
        lambda rank, _: in_second(rank, fused_step.DeferredGram, "finish", raises),
    ),
    "check": (SCORES["scores"], lambda rank, _: in_second(rank, fused_step, "fused_row_error", lambda *_: 1.0)),
    "memory": (SCORES["scores"], lambda rank, _: in_second(rank, step_fusion, "bytes_of_pass", lambda *_, **__: 1e18)),
    "second part": (SCORES["accumulated"], declines_second_part),
    "uneven": (
        SCORES["accumulated"],
        lambda rank, _: in_second(rank, fused_step.FusedStep, "weighted_rows", lambda *_: None),
    ),
    "rollouts": (SCORES["scores"], loses_the_second_generation),
}


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """All that the tests look at: processes take longer to start than to do it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ |= {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES), "ACCELERATE_USE_CPU": "true"}
    gc.freeze()  # or each training would walk over everything that was imported, at its beginning
    step_fusion.CHECK_SHARE = 1e9  # every fused step is compared, whatever it costs
    found: dict[str, Any] = {name: run(case, folder, folder / "runs" / name) for name, case in FUSED.items()}
    found["plain"] = {name: run(case, folder, None) for name, case in FUSED.items()}
    found["faults"] = {name: run(*case, fault=fault) for name, case, fault in faults(folder)}
    found["not fused"] = {name: reason_at_once(case, folder) for name, case in NOT_FUSED.items()}
    found["wrappers"] = wrapper_reasons()
    found["partly used"] = partly_used(rank)
    return found


def faults(folder: Path) -> list[tuple[str, tuple[Case, Path, Path], Fault]]:
    return [(name, (case, folder, folder / "faults" / name), fault) for name, (case, fault) in FAULTS.items()]


def made_trainer(case: Case, folder: Path) -> Any:
    forget_the_last_trainer()
    return trainer_for(case.kind, folder / case.policy, peft=lora() if case.lora else None, **case.changes)


def run(case: Case, folder: Path, out: Path | None, fault: Fault | None = None) -> dict[str, Any]:
    """Train, attached if there is a folder for the run; what was measured and generated, and the weights at the end."""
    trainer = made_trainer(case, folder)
    seen: dict[str, list[Any]] = {"generations": [], "losses": []}
    watch_generations(trainer, seen["generations"])
    if case.asked.get("mode") == "loss":
        watch_losses(trainer, seen["losses"])
    torch.manual_seed(7 + trainer.accelerator.process_index)
    told: dict[str, Any] = {}
    if out is None:
        trainer.train()
    else:
        engine = fused_step.DeferredGram
        with mock.patch.object(fused_step, "DeferredGram", side_effect=engine) as passes:
            attached = attach(trainer, **({"every": 1, "out": out} | case.asked))
            if fault is None:
                trainer.train()
        if fault is not None:
            with fault(trainer.accelerator.process_index, attached):
                trainer.train()
        told = {
            "scalars": [reading.scalars for reading in attached.readings],
            "steps": [reading.step for reading in attached.readings],
            "failures": attached.failures,
            "not fused": attached.not_fused,
            "passes": passes.call_count,
        }
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return (
        told | seen | {"weights": weights_of(trainer), "logged": logged, "kind": type(trainer.model_wrapped).__name__}
    )


def reason_at_once(case: Case, folder: Path) -> str | None:
    """Why steps will not be fused, before the training begins."""
    trainer = made_trainer(case, folder)
    if case.sharded:
        from tests.trl_processes import shard

        shard(trainer)
    with attach(trainer, **case.asked) as attached:
        return attached.not_fused


def wrapper_reasons() -> dict[str, str | None]:
    """What `reason_not_fused` says of data parallel models that do more than average."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def reason(model: DistributedDataParallel, processes: int = PROCESSES, inside: Any = None) -> str | None:
        return support.reason_not_fused(model, inside or model.module, processes)

    def made(**attributes: Any) -> DistributedDataParallel:
        inside = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(inside, name, value)
        return DistributedDataParallel(inside)

    hooked, watched = made(), made()
    hooked.register_comm_hook(None, allreduce_hook)
    watched.register_forward_hook(lambda *_: None)
    return {
        "plain": reason(made()),
        "communication": reason(hooked),
        "forward hook": reason(watched),
        "ignored": reason(made(_ddp_params_and_buffers_to_ignore=["weight"])),
        "part of the processes": reason(made(), processes=3),
        "wrapped": reason(made(), inside=nn.Linear(2, 2)),
    }


def partly_used(rank: int) -> list[Any]:
    """`.grad` of parameters that both processes, the second one and none used; then if one process has no gradient."""
    both, second, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    step: Any = SimpleNamespace(parameters=[both, second, none], processes=Processes(rank, PROCESSES))
    gradient = {both: torch.tensor([1.0, 2.0]) * (rank + 1)} | ({second: torch.ones(2)} if rank == 1 else {})
    made: Any = SimpleNamespace(gradient={parameter: grad.clone() for parameter, grad in gradient.items()})
    written = fused_step.FusedStep.write_gradient(step, made)
    grads = [None if p.grad is None else p.grad.tolist() for p in step.parameters]
    both.grad = second.grad = None
    again = fused_step.FusedStep.write_gradient(step, made if rank == 0 else None)
    return [written, *grads, again, both.grad is None]
