"""What is read from a measured group survives the rounding of the pass, and still tells a wrong matrix from a Gram."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.reading import StoredGroup, group_cosines, read_group
from scoregram.reading.group import with_nonzero_rows, with_rewards
from scoregram.runs import GroupRecord

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
ADVANTAGES = REWARDS - REWARDS.mean()


def measured(excess: float) -> Tensor:
    """Four scores of which two short ones are one text twice; their product is off by `excess` of their norms."""
    scores = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[2] *= 0.1
    scores[3] = scores[2]
    gram = scores @ scores.mT
    gram[2, 3] *= 1 + excess
    gram[3, 2] *= 1 + excess
    return gram


@pytest.mark.parametrize("excess", [2e-5, 2e-4])
def test_rounding_of_half_precision_is_read(excess: float) -> None:
    """Equal texts whose product exceeds their norms, as bfloat16 leaves them on a GPU, change hardly a number."""
    exact, noisy = (read_group(measured(e), REWARDS, ADVANTAGES) for e in (0.0, excess))
    assert not math.isnan(noisy.effective_rank)
    assert noisy.scalars() == {
        name: pytest.approx(value, rel=excess, abs=excess) for name, value in exact.scalars().items()
    }


@pytest.mark.parametrize("excess", [5e-3, 0.05, 1.0])
def test_a_wrong_matrix_is_refused(excess: float) -> None:
    """What no precision explains is said, with how to go on."""
    with pytest.raises(ScoregramError, match=r"raise (psd_)?rtol if K was measured with that much noise"):
        read_group(measured(excess), REWARDS, ADVANTAGES)


def test_what_is_computed_for_all_groups_at_once_is_what_each_gives() -> None:
    table = [
        (torch.tensor([1.0, 0.0]), "train"),
        (torch.tensor([math.nan, 1.0]), "train"),
        (torch.tensor([math.nan, math.nan]), "train"),
        (torch.tensor([0.5, 0.5]), "loss"),
        (torch.tensor([1.0, 1.0, 1.0]), "train"),
    ]

    def stored() -> list[StoredGroup]:
        return [
            StoredGroup(
                GroupRecord(
                    step=1,
                    kind=kind,
                    prompt_id="p",
                    rewards=rewards.double(),
                    lengths=torch.ones(len(rewards), dtype=torch.int64),
                    advantages=torch.arange(len(rewards)).double(),
                    gram=torch.diag(torch.arange(len(rewards)).double() + (kind == "loss")),
                )
            )
            for rewards, kind in table
        ]

    names = ("outcome", "right", "mean_reward", "has_all_rewards", "is_complete", "nonzero_rows")
    alone = [[getattr(group, name) for name in names] for group in stored()]
    at_once = [[getattr(group, name) for name in names] for group in with_nonzero_rows(with_rewards(stored()))]
    assert str(at_once) == str(alone)  # as text: nan equals nan


def test_cosines_are_those_between_right_rollouts_and_from_right_to_wrong_ones():
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 5.0], [2.0, 0.0]], dtype=torch.float64)
    record = GroupRecord(
        step=1,
        prompt_id="a",
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
        lengths=torch.ones(4).long(),
        advantages=torch.zeros(4, dtype=torch.float64),
        gram=scores @ scores.mT,
    )
    (one,) = group_cosines([StoredGroup(record)])
    assert one.prompt == "a" and one.right_right == pytest.approx((2 / math.sqrt(2) + 1) / 3)
    assert one.right_wrong == pytest.approx((0 + 1 / math.sqrt(2) + 0) / 3)  # against the rollout along the second axis
    assert group_cosines([StoredGroup(dataclasses.replace(record, rewards=torch.ones(4, dtype=torch.float64)))]) == []
