import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.theory.lab import worlds as module
from scoregram.theory.lab.worlds import WORLDS, Transition, World, listing
from tests.lab_cases import case, walks


@pytest.mark.parametrize("name", WORLDS)
def test_listing_is_what_a_walk_through_the_world_meets(name):
    at = case(name, "tabular")
    row = 0
    for prompt in range(len(at.world.prompt_weights)):
        for walk in walks(at, prompt, at.policy.parameters):
            turns = len(walk.path)
            states = [at.listing.histories[int(state)] for state in at.listing.state[row, :turns]]
            assert list(zip(states, at.listing.action[row, :turns].tolist(), strict=True)) == walk.path
            assert at.listing.reward[row].tolist()[:turns] == walk.rewards
            assert at.listing.mask[row].tolist() == [h < turns for h in range(at.listing.mask.shape[1])]
            assert at.listing.chance[row].item() == walk.chance and at.listing.prompt[row] == prompt
            row += 1
    assert row == len(at.listing.prompt)


@pytest.mark.parametrize("name", WORLDS)
def test_each_state_is_met_at_one_turn(name):
    rows = listing(WORLDS[name])
    for state, history in enumerate(rows.histories):
        met = (rows.mask & (rows.state == state)).any(dim=0).nonzero()[:, 0].tolist()
        assert met == [len(history) // 2]


def test_lengths_differ_where_they_should():
    assert listing(WORLDS["output_only"]).lengths.unique().tolist() == [1, 2, 3]
    assert listing(WORLDS["stopping"]).lengths.unique().tolist() == [1, 2, 3]


def single(outcomes, actions=1):
    return World("x", (1.0,), lambda history: actions, lambda history, action: outcomes)


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (single((Transition(0.5, 1.0, ends=True),)), "must sum to one"),
        (single((Transition(1.5, 1.0, ends=True), Transition(-0.5, 1.0, ends=True))), "not be negative"),
        (single((Transition(1.0, 1.0, ends=True),), actions=0), "at least one action, got 0"),
        (single((Transition(0.5, 1.0), Transition(0.5, 0.0))), "observations .* must differ"),
    ],
)
def test_worlds_that_cannot_be_listed_are_refused(world, says):
    with pytest.raises(ScoregramError, match=says):
        listing(world)


def test_too_many_rollouts_are_refused(monkeypatch):
    monkeypatch.setattr(module, "ROLLOUTS_LIMIT", 10)
    with pytest.raises(ScoregramError, match="at most 10 rollouts"):
        listing(WORLDS["output_only"])


def test_impossible_outcomes_are_left_out():
    world = single((Transition(1.0, 2.0, ends=True), Transition(0.0, 5.0, ends=True)))
    assert listing(world).returns.tolist() == [2.0]


def test_a_prompt_that_does_not_exist_is_refused():
    with pytest.raises(ScoregramError, match="0…2, got 3"):
        listing(WORLDS["output_only"]).of_prompt(3)


def test_action_mask_follows_the_world():
    at = case("output_only", "tabular")
    for history, exists in zip(at.listing.histories, at.listing.action_mask, strict=True):
        torch.testing.assert_close(exists, torch.arange(3) < at.world.actions(history))
