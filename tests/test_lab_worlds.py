import pytest

from scoregram.checks import ScoregramError
from scoregram.theory.lab.worlds import WORLDS, World, output_only, stopping


@pytest.mark.parametrize("name", WORLDS)
def test_rewards_are_multiples_of_a_half_so_that_sums_are_exact(name):
    world = WORLDS[name]

    def visit(history):
        for action in range(world.actions(history)):
            for outcome in world.outcomes(history, action):
                assert (2 * outcome.reward).is_integer()
                if not outcome.ends:
                    visit((*history, action, outcome.observation))

    for prompt in range(len(world.prompt_weights)):
        visit((prompt,))


def test_output_only_pays_at_the_end_alone():
    world = output_only()
    assert world.outcomes((0,), 1)[0].reward == 0 and not world.outcomes((0,), 1)[0].ends
    assert world.outcomes((0, 1, 0), 0)[0].reward == 0.5 and world.outcomes((0, 1, 0), 0)[0].ends
    assert output_only(binary=True).outcomes((0, 1, 0), 0)[0].reward == 0


def test_bad_luck_takes_back_what_was_won():
    lost = stopping().outcomes((0, 1, 1, 1, 0), 1)[-1]
    assert lost.ends and lost.reward == -1.0


def test_weights_that_are_no_distribution_are_refused():
    with pytest.raises(ScoregramError, match="World: prompt weights must sum to one"):
        World("x", (0.5, 0.4), lambda history: 2, lambda history, action: ())
