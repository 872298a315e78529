"""What is kept of a step that could not be finished, so that somebody can look at it."""

from pathlib import Path

import torch

from scoregram.policy import Policy
from scoregram.training.checkpoint import MODEL, save_policy
from scoregram.training.collecting import Collected

FOLDER = "failures"


def write_failure(run: Path, step: int, policy: Policy, collected: Collected, error: Exception) -> Path:
    """Write the rollouts, the rewards, the weights before the step and the message; return the folder."""
    folder = run / FOLDER / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    rollouts = collected.rollouts
    torch.save(
        {
            "message": str(error),
            "problems": [problem.id for problem in collected.problems],
            "completions": list(collected.completions),
            "rewards": collected.rewards,
            "observed": collected.observed,
            "input_ids": rollouts.input_ids.cpu(),
            "attention_mask": rollouts.attention_mask.cpu(),
            "completion_mask": rollouts.completion_mask.cpu(),
            "log_probs": rollouts.log_probs.cpu(),
        },
        folder / "step.pt",
    )
    save_policy(folder / MODEL, policy)
    (folder / "message.txt").write_text(f"{error}\n")
    return folder
