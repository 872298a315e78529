"""A training with TRL that is really killed (SIGKILL) at operations of scoregram on the disk, and goes on."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from scoregram.integrations.trl import attach
from scoregram.runs import Run, open_run
from tests.kill_cases import ended_well, forked, kill_at, numbers_reached
from tests.trl_cases import trainer_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

STEPS = 3


def train_or_resume(folder: Path, operation: int = 0) -> None:
    """Train from the last checkpoint of TRL, or from the beginning; die at an operation on the disk.

    A training that has its last checkpoint is done: transformers would take a step more.
    """
    warnings.simplefilter("ignore")
    states = checkpoint_states(folder)
    if len(states) == STEPS:
        return
    trainer = trainer_for("GRPO", folder, max_steps=STEPS, save_strategy="steps", save_steps=1)
    begun = (folder / "run" / "config.yaml").exists()
    attach(trainer, every=1, out=folder / "run", resume=begun and bool(states), overwrite=begun and not states)
    if operation:
        kill_at(operation)
    trainer.train(resume_from_checkpoint=str(states[-1].parent) if states else None)


def checkpoint_states(folder: Path) -> list[Path]:
    """The state files of TRL's checkpoints, in order."""
    return sorted((folder / "trainer").glob("checkpoint-*/trainer_state.json"))


def require_same(found: Run, whole: Run, resumed_after: int) -> None:
    """Raise AssertionError unless all groups and rewards are the same, and every Gram up to float32 rounding.

    TRL's own resumption is not bit-equal: a loaded checkpoint lies elsewhere in memory. The line of the step of the
    checkpoint may be missing: it is written when the next step begins, after TRL has written the checkpoint.
    """
    lines, others = found.metrics(), whole.metrics()
    lost = {line["step"] for line in others} - {line["step"] for line in lines}
    assert lost <= {resumed_after}
    others = [line for line in others if line["step"] not in lost]
    assert [set(line) for line in lines] == [set(line) for line in others]
    for name in ("step", "reward", "length", "check/passed", "num_tokens"):
        assert [line[name] for line in lines] == [line[name] for line in others], name
    # a rollout of one near-certain token has a score near 0, the rest of a cancellation
    largest = max(float(group.gram.abs().max()) for group in whole.groups() if group.gram is not None)
    for one, other in zip(found.groups(), whole.groups(), strict=True):
        assert (one.step, one.prompt_id) == (other.step, other.prompt_id) and torch.equal(one.rewards, other.rewards)
        assert one.gram is not None and other.gram is not None
        torch.testing.assert_close(one.gram, other.gram, rtol=1e-4, atol=1e-6 * largest)


def kill_trainings(work: Path, operations: Iterable[int]) -> None:
    """Kill a training at each operation, then let it go on; print the kills and the last operation tried."""
    torch.set_num_threads(1)
    assert ended_well(forked(lambda: train_or_resume(work / "whole")))
    whole, kills, operation = open_run(work / "whole" / "run"), 0, 0
    for operation in operations:
        folder = work / str(operation)
        if ended_well(forked(lambda: train_or_resume(folder, operation))):  # noqa: B023
            break
        kills += 1
        resumed_after = len(checkpoint_states(folder))  # one checkpoint a step
        assert ended_well(forked(lambda: train_or_resume(folder)))  # noqa: B023
        require_same(open_run(folder / "run"), whole, resumed_after)
    print("reached", kills, operation)


def test_a_training_killed_at_some_operations_goes_on_to_the_same_numbers(tmp_path):
    kills, _ = numbers_reached(kill_trainings, tmp_path, (12, 40))
    assert kills == 2


@pytest.mark.slow
def test_a_training_killed_at_every_third_operation_goes_on_to_the_same_numbers(tmp_path):
    kills, last = numbers_reached(kill_trainings, tmp_path, range(1, 10_000, 3))
    assert 3 * kills == last - 1 and kills > 20
