"""One and the same reading of rollouts with missing rewards, through every door: the trainer, and dumps.

A door is a function in `DOORS`: it takes the rollouts of `GROUPS` to a reading in its own way. The trainer's is the
reference. Another door is one more entry.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from rich.console import Console

from scoregram.advantages import estimate
from scoregram.gram import measure_gram
from scoregram.integrations import MeasureConfig, measure
from scoregram.policy import Policy, load_policy
from scoregram.reading import Step, outcomes_of, read_step, rollout_records
from scoregram.reading.step import WHOLE_GRAM
from scoregram.rollouts import Rollouts
from scoregram.runs import RunWriter, open_run
from tests.training_cases import save_policy

NAN = math.nan
REWARDS = (
    (1.0, 0.0, NAN, 0.0),
    (1.0, 1.0, 1.0, NAN),  # all right, as far as it was judged
    (1.0, 0.0, 0.0, 1.0),
    (0.0, 1.0, 0.5, 0.0),
    (NAN, NAN, NAN, NAN),
)
"""One row a group."""
OUTCOMES = ["live", "all right", "live", "live", "unjudged"]
STEP = 3


@dataclass(frozen=True)
class SampledGroup:
    """A prompt, its completions and their rewards."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: Sequence[float]


def sampled_groups() -> list[SampledGroup]:
    generator = torch.Generator().manual_seed(0)

    def tokens(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(4, 40, (count,), generator=generator).tolist()

    return [SampledGroup(tokens(2, 4), [tokens(1, 6) for _ in rewards], rewards) for rewards in REWARDS]


GROUPS = sampled_groups()


@dataclass(frozen=True)
class DoorReading:
    """What a door shows."""

    scalars: Mapping[str, float]
    groups: list[Mapping[str, float]]
    """Statistics of each group."""
    outcomes: list[Any]
    advantages: torch.Tensor
    """`(P, R)`."""


def settings(model: Path, dump: Path, out: Path, **changes: Any) -> MeasureConfig:
    return MeasureConfig(model=str(model), rollouts=dump, out=out, device="cpu", dtype="float64", **changes)


LOADED: Callable[..., Policy] = cache(load_policy)


def trained_step(model: Path) -> Step:
    """Rollouts, advantages and Gram, as the trainer puts them into a step."""
    policy = LOADED(settings(model, Path(), Path()).policy)
    rows = [(group.prompt, completion) for group in GROUPS for completion in group.completions]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    columns = torch.arange(longest)
    starts = torch.tensor([len(prompt) for prompt, _ in rows])
    ends = torch.tensor([len(prompt) + len(completion) for prompt, completion in rows])
    rollouts = Rollouts(
        input_ids=torch.tensor([[*p, *c, *[policy.pad_id] * (longest - len(p) - len(c))] for p, c in rows]),
        attention_mask=columns < ends[:, None],
        completion_mask=(columns >= starts[:, None]) & (columns < ends[:, None]),
        prompt_lengths=starts,
        group_ids=torch.arange(len(GROUPS)).repeat_interleave(len(REWARDS[0])),
        prompt_names=[f"prompt/{number}" for number in range(len(GROUPS))],
        completions=["" for _ in rows],
        rewards=torch.tensor(REWARDS, dtype=torch.float64).flatten(),
    )
    advantages = estimate("mean", rollouts.reward_grid).flatten()
    gram = measure_gram(policy.model, rollouts.input_ids, rollouts.completion_mask, rollouts.attention_mask)
    return Step(
        number=STEP,
        rollouts=rollouts,
        advantages=advantages,
        weights=advantages / len(advantages),
        gram=gram,
        log_probs=gram.log_probs,
    )


def trainer_door(model: Path, folder: Path) -> DoorReading:
    step = trained_step(model)
    reading = read_step(step)
    return DoorReading(
        reading.scalars,
        [group.scalars() for group in reading.groups],
        outcomes_of(step.rollouts.reward_grid),
        step.rollouts.by_group(step.advantages),
    )


def measured_dump(model: Path, dump: Path, out: Path, **changes: Any) -> DoorReading:
    measure(settings(model, dump, out, **changes), console=Console(file=StringIO()))
    run = open_run(out)
    groups = list(run.groups())
    (line,) = run.metrics()
    return DoorReading(
        line,
        [group.statistics for group in groups],
        outcomes_of(torch.stack([group.rewards for group in groups])),
        torch.stack([group.advantages for group in groups]),
    )


def plain_dump(folder: Path) -> Path:
    """JSONL with token ids and a null for a missing reward."""
    records = [
        {
            "prompt_ids": group.prompt,
            "completion_ids": completion,
            "reward": None if math.isnan(reward) else reward,
            "group": number,
            "step": STEP,
        }
        for number, group in enumerate(GROUPS)
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def plain_door(model: Path, folder: Path) -> DoorReading:
    return measured_dump(model, plain_dump(folder), folder / "out", between_prompts=True)


def group_after_group_door(model: Path, folder: Path) -> DoorReading:
    return measured_dump(model, plain_dump(folder), folder / "out")


def run_folder_door(model: Path, folder: Path) -> DoorReading:
    with RunWriter.create(folder / "run", {"seed": 0, "temperature": 1.0}, environment={}) as writer:
        writer.write_rollouts(STEP, rollout_records(trained_step(model)))
    return measured_dump(model, folder / "run", folder / "out", between_prompts=True)


DOORS: MappingProxyType[str, Callable[[Path, Path], DoorReading]] = MappingProxyType(
    {
        "trainer": trainer_door,
        "plain dump": plain_door,
        "plain dump, group after group": group_after_group_door,
        "run folder": run_folder_door,
    }
)
"""From a model and an empty folder to what is shown of `GROUPS`."""
WITHOUT_BETWEEN_PROMPTS = frozenset({"plain dump, group after group"})
"""Doors that measure each group alone: they know nothing that needs the Gram between prompts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory) -> DoorReading:
    return trainer_door(model, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_same_reading(door, model, reference, tmp_path):
    reading = DOORS[door](model, tmp_path)
    absent = {f"gram/{name}" for name in WHOLE_GRAM} if door in WITHOUT_BETWEEN_PROMPTS else set()
    assert not absent & reading.scalars.keys()
    for name in reference.scalars.keys() - absent:
        found = reading.scalars.get(name, NAN)
        assert found == pytest.approx(reference.scalars[name], rel=1e-9, abs=1e-12, nan_ok=True), name
    for found, expected in zip(reading.groups, reference.groups, strict=True):
        shared = {name: found[name] for name in expected}
        assert shared == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
    assert reading.outcomes == OUTCOMES
    torch.testing.assert_close(reading.advantages, reference.advantages, rtol=1e-12, atol=0)


@pytest.mark.parametrize("door", DOORS)
def test_missing_rewards_take_no_part(door, model, tmp_path):
    """Against the definition: means over the rewards that were given, and advantage 0 for the others."""
    reading = DOORS[door](model, tmp_path)
    given = [[reward for reward in rewards if not math.isnan(reward)] for rewards in REWARDS]
    means = [sum(rewards) / len(rewards) if rewards else NAN for rewards in given]
    judged = [reward for rewards in given for reward in rewards]
    assert reading.scalars["reward"] == pytest.approx(sum(judged) / len(judged))
    assert (reading.scalars["groups"], reading.scalars["live_groups"]) == (5, 3)
    assert reading.scalars["groups/all_right"] == pytest.approx(1 / 5) and reading.scalars["groups/all_wrong"] == 0
    for number, (rewards, mean) in enumerate(zip(REWARDS, means, strict=True)):
        expected = [0.0 if math.isnan(reward) else reward - mean for reward in rewards]
        assert reading.advantages[number].tolist() == pytest.approx(expected)
        assert reading.groups[number]["reward_mean"] == pytest.approx(mean, nan_ok=True)
    for number in (1, 4):  # nothing to learn from an all-right group, nor from one without rewards
        assert math.isnan(reading.groups[number]["effective_rank"]) and reading.groups[number]["update_norm"] == 0
