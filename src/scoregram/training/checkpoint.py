"""Checkpoints, from which a killed run continues: weights, optimiser, position in the data.

Random numbers are functions of the seed and the step, so no generator state is stored. The weights are stored with
`save_pretrained`, so that `from_pretrained` loads a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from scoregram.checks import ScoregramError, fail
from scoregram.policy import Policy, without_bars
from scoregram.rollouts import Rollouts
from scoregram.runs import damaged_files, disk_errors

STATE = "state.pt"
"""File of a checkpoint: optimiser, position, and the states of the parts of the run."""
MODEL = "model"
"""Folder of a checkpoint: the weights and the tokenizer."""


@runtime_checkable
class Resumable(Protocol):
    """Part of a run whose state belongs to a checkpoint."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, plain numbers and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        ...


@dataclass(frozen=True)
class Position:
    """Progress of a run."""

    step: int
    """Steps that are done."""
    problems: int
    """Problems that were drawn."""
    rollouts: int = 0
    """Rollouts that were sampled for training, extra ones included."""


def save_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    position: Position,
    sources: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write a checkpoint into an empty folder; `sources` are the states of the parts of the run."""
    save_policy(folder / MODEL, policy)
    state = {
        "step": position.step,
        "problems": position.problems,
        "rollouts": position.rollouts,
        "optimizer": optimizer.state_dict(),
        "sources": [dict(source) for source in sources],
    }
    with (folder / STATE).open("wb") as file:  # given a path, torch.save would hide the OSError of a full disk
        torch.save(state, file)


def save_policy(folder: Path, policy: Policy) -> None:
    """Write the weights, or the adapters, and the tokenizer as transformers does, without its progress bars."""
    with without_bars():
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


def load_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, sources: Sequence[Resumable] = ()
) -> Position:
    """Load the weights and the other states of a checkpoint into the policy, the optimiser and the parts of the run.

    Raises:
        ScoregramError: If a file differs from its hash in `SHA256SUMS` or cannot be read, or if it does not fit the
            policy. A checkpoint of an older version has no hashes.
    """
    remedy = (
        "Restore it from a copy, or remove it: the run then resumes from the checkpoint before it, or from the start."
    )
    if damaged := damaged_files(folder):
        fail("train --resume", f"{folder} must match its checksums", f"missing or changed {', '.join(damaged)}", remedy)
    device = next(policy.model.parameters()).device
    try:
        load_weights(policy.model, folder / MODEL)
        state: dict[str, Any] = torch.load(folder / STATE, map_location=device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        for source, stored in zip(sources, state.get("sources", [{}] * len(sources)), strict=True):
            source.load_state(stored)
        return Position(state["step"], state["problems"], state.get("rollouts", 0))
    except (ScoregramError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged files make their readers raise almost anything
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        return fail("train --resume", f"{folder} must be a complete checkpoint", reason, remedy)


def load_weights(model: Any, folder: Path) -> None:
    """Copy saved weights, of a whole model or of its adapters, into a model of the same shape."""
    from safetensors.torch import load_file

    saved = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    if not saved:
        fail("train --resume", f"{folder} must hold safetensors", "none", "Start the run again.")
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, saved)
        return
    own: nn.Module = model
    result = own.load_state_dict(saved, strict=False)
    tied = {name for name in result.missing_keys if is_tied(own, name, saved)}
    if result.unexpected_keys or set(result.missing_keys) - tied:
        got = f"{len(result.unexpected_keys)} unknown and {len(set(result.missing_keys) - tied)} missing weights"
        fail("train --resume", f"{folder} must fit the model", got, "Resume with the model that the run began with.")


def is_tied(model: nn.Module, name: str, saved: dict[str, Any]) -> bool:
    """Whether a weight that was not saved is the same tensor as one that was."""
    everything = model.state_dict(keep_vars=True)
    return any(everything[name] is everything[other] for other in saved if other in everything)


def write_failure(run: Path, step: int, policy: Policy, rollouts: Rollouts, error: Exception) -> Path:
    """Save a step that failed: rollouts, rewards, the current weights and the message. Returns the folder."""
    folder = run / "failures" / f"step-{step}"
    assert rollouts.log_probs is not None
    kept = {
        "message": str(error),
        "problems": list(rollouts.prompt_names),
        "completions": list(rollouts.completions),
        "rewards": rollouts.reward_grid,
        "input_ids": rollouts.input_ids.cpu(),
        "attention_mask": rollouts.attention_mask.cpu(),
        "completion_mask": rollouts.completion_mask.cpu(),
        "log_probs": rollouts.log_probs.cpu(),
    }
    with disk_errors(folder, caller="train"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "step.pt").open("wb") as file:
            torch.save(kept, file)
        save_policy(folder / MODEL, policy)
        (folder / "message.txt").write_text(f"{error}\n")
    return folder
