"""The stored rollouts of a run by step and prompt, and what an error about them says."""

from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.reading import RunReading, read_run
from scoregram.runs import RolloutRecord, RunWriter

OWN: dict[str, Any] = {"method": "grpo"}
TRL: dict[str, Any] = {"integration": {"name": "trl", "trainer": "GRPOTrainer"}}


def stored_run(folder, config: dict[str, Any], steps: tuple[int, ...] = (3, 5)) -> RunReading:
    """A run with one rollout of `p1` and two of `p2` at some of its five steps."""
    known = {"token_ids": torch.tensor([1, 2]), "prompt_length": 1, "log_probs": torch.zeros(2), "finished": True}
    with RunWriter.create(folder, config, environment={}) as writer:
        for step in range(1, 6):
            rollouts = [
                RolloutRecord(step=step, prompt_id=name, group=group, index=index, reward=float(index), **known)
                for group, (name, count) in enumerate({"p1": 1, "p2": 2}.items())
                for index in range(count)
            ]
            writer.write_rollouts(step, rollouts if step in steps else [])
            writer.write_metrics(step, {"reward": 0.5})
    return read_run(folder)


def test_rollouts_of_a_step_and_of_one_of_its_prompts(tmp_path):
    run = stored_run(tmp_path / "run", OWN)
    assert [one.prompt_id for one in run.rollouts_of(3)] == ["p1", "p2", "p2"]
    assert [one.reward for one in run.rollouts_of(5, "p2")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (OWN, "To store rollouts: train with --rollouts-every 1."),
        (TRL, "To store rollouts: attach(trainer, keep_rollouts=True)."),
        ({}, "Store rollouts in the next run."),
    ],
    ids=["scoregram", "trl", "unknown"],
)
def test_a_step_without_rollouts_says_how_to_store_them(config, remedy, tmp_path):
    run = stored_run(tmp_path / "run", config)
    for prompt in (None, "p1"):
        with pytest.raises(ScoregramError) as told:
            run.rollouts_of(4, prompt)
        wanted = "rollouts_of: step 4 needs stored rollouts, got those of 2 other steps from 3 to 5."
        assert str(told.value) == f"{wanted} {remedy}"
    with pytest.raises(ScoregramError, match="got none of any step"):
        stored_run(tmp_path / "bare", config, ()).rollouts_of(4)
    with pytest.raises(ScoregramError, match="got none of any step"):
        RunReading(config, (), (), ()).rollouts_of(4)


def test_an_unknown_prompt_lists_the_stored_ones(tmp_path):
    with pytest.raises(ScoregramError) as told:
        stored_run(tmp_path / "run", TRL).rollouts_of(3, "p9")
    assert str(told.value) == "rollouts_of: prompt must be stored at step 3, got 'p9'. Choose one of p1, p2."
