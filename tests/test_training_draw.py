"""Dynamic sampling: which groups a step keeps, whose they are, and how many rounds it draws.

The reward decides which groups are live: it knows the problem, and at a live one every rollout gets a reward of its
own. It also records what it is asked, which is the order in which problems are drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from scoregram.policy import Policy, load_policy
from scoregram.tasks import Problem, Task
from scoregram.training.checkpoint import Position
from scoregram.training.control import Controller
from scoregram.training.draw import DrawnRollouts, draw_rollouts
from tests.training_cases import config_for, save_policy

PROMPTS, SIZE = 3, 4
START = Position(5, 6, 100)
PROBLEMS = [Problem(f"say/{n}", f"{'say ' * (1 + n % 3)}{n}:", str(n)) for n in range(20)]
"""Prompts of several lengths, so that rounds differ in their padding."""


@dataclass
class RecordedReward:
    """At a live problem `n` the rewards `n, n + 1/8, n + 2/8, …`, at a dead one `n` for every rollout."""

    live: set[str] = field(default_factory=set)
    rounds: list[list[str]] = field(default_factory=list)
    """Names of the problems of every round, in the order in which they were drawn."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Completions by problem."""

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """The reward of every completion, from the number of its problem."""
        names, rewards = columns["problem_id"], []
        self.rounds.append(list(dict.fromkeys(names)))
        for name, text in zip(names, completions, strict=True):
            own = self.texts.setdefault(name, [])
            rewards.append(float(name.removeprefix("say/")) + (len(own) / 8 if name in self.live else 0.0))
            own.append(text)
        return rewards

    @property
    def drawn(self) -> list[str]:
        """The problems of all rounds."""
        return [name for names in self.rounds for name in names]


def task_with(reward: RecordedReward, problems: Sequence[Problem] = PROBLEMS) -> Task:
    return Task(name="say", train=problems, test=problems, reward=reward, max_new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder) -> Policy:
    return load_policy(config_for(folder, folder).policy)


def step_with(policy: Policy, folder: Path, live: set[str], **changes: Any) -> tuple[DrawnRollouts, RecordedReward]:
    """Step 6 of a run in which the groups of these problems are live."""
    reward = RecordedReward(live)
    settings = {"method": "dapo", "batch_size": PROMPTS * SIZE, "group_size": SIZE, "dynamic_rounds": 4}
    config = config_for(folder, folder, **(settings | changes))
    return draw_rollouts(Controller(config), policy, task_with(reward), START, START.step + 1), reward


@pytest.fixture(scope="module")
def order(policy, folder) -> list[str]:
    """The problems of four rounds, in the order in which they are drawn."""
    names = step_with(policy, folder, set())[1].drawn
    assert len(set(names)) == 4 * PROMPTS
    return names


def assert_groups_of(policy: Policy, drawn: DrawnRollouts, reward: RecordedReward, names: Sequence[str]) -> None:
    """The groups are those of the problems `names`: problem, prompt tokens, texts and rewards belong together."""
    rollouts, texts = drawn.rollouts, {problem.id: problem for problem in PROBLEMS}
    assert [problem.id for problem in drawn.problems] == list(names)
    assert list(rollouts.prompt_names) == list(names) and rollouts.group_sizes == [SIZE] * len(names)
    assert list(rollouts.answers) == [texts[name].answer for name in names]
    for name, here in zip(names, rollouts.group_slices(), strict=True):
        spread = [place / 8 if name in reward.live else 0.0 for place in range(SIZE)]
        assert rollouts.rewards[here].tolist() == [float(texts[name].answer) + part for part in spread]
        assert list(rollouts.completions[here]) == reward.texts[name]
        prompt = policy.encode_prompt(texts[name].prompt)
        for row in range(here.start, here.stop):
            real = rollouts.input_ids[row][rollouts.attention_mask[row]].tolist()
            assert int(rollouts.prompt_lengths[row]) == len(prompt) and real[: len(prompt)] == prompt
            written = rollouts.input_ids[row][rollouts.completion_mask[row]].tolist()
            assert real[len(prompt) :] == written
            assert policy.decode(written) == rollouts.completions[row]


@pytest.mark.parametrize(
    ("live", "rounds", "kept"),
    [
        pytest.param(range(12), 1, [0, 1, 2], id="all live"),
        pytest.param([1, 4, 5], 2, [1, 4, 5], id="full after two rounds"),
        pytest.param([2, 3, 4, 5], 2, [2, 3, 4], id="more than fit"),
        pytest.param([0, 2, 3, 10], 2, [0, 2, 3], id="nothing is drawn once the step is full"),
        pytest.param([0, 7, 11], 4, [0, 7, 11], id="full after the last round"),
        pytest.param([8, 9], 4, [8, 9], id="rounds used up"),
        pytest.param([], 4, [0, 1, 2], id="none live"),
    ],
)
def test_a_step_keeps_the_first_live_groups_and_draws_until_it_is_full(policy, folder, order, live, rounds, kept):
    drawn, reward = step_with(policy, folder, {order[place] for place in live})
    assert reward.rounds == [order[PROMPTS * n : PROMPTS * (n + 1)] for n in range(rounds)]
    assert_groups_of(policy, drawn, reward, [order[place] for place in kept])
    sampled = rounds * PROMPTS
    assert drawn.position == Position(START.step + 1, START.problems + sampled, START.rollouts + sampled * SIZE)


@pytest.mark.parametrize(("most", "kept"), [(1, [0]), (2, [0]), (3, [0, 7])])
def test_no_more_rounds_than_the_setting(policy, folder, order, most, kept):
    drawn, reward = step_with(policy, folder, {order[place] for place in (0, 7, 11)}, dynamic_rounds=most)
    assert reward.drawn == order[: PROMPTS * most]
    assert_groups_of(policy, drawn, reward, [order[place] for place in kept])
    assert drawn.position.problems == START.problems + PROMPTS * most


def test_only_dynamic_sampling_drops_dead_groups(policy, folder, order):
    drawn, reward = step_with(policy, folder, {order[1], order[4]}, method="grpo", dynamic_rounds=1)
    assert reward.rounds == [order[:PROMPTS]]
    assert_groups_of(policy, drawn, reward, order[:PROMPTS])
    assert drawn.position.rollouts == START.rollouts + PROMPTS * SIZE


def test_every_round_of_a_step_has_random_numbers_of_its_own(policy, folder):
    """In a task of one problem, the second round would repeat the rollouts of the first."""
    reward, settings = RecordedReward(), {"method": "dapo", "batch_size": SIZE, "group_size": SIZE}
    config = config_for(folder, folder, **settings, dynamic_rounds=2)
    draw_rollouts(Controller(config), policy, task_with(reward, PROBLEMS[:1]), START, START.step + 1)
    assert reward.rounds == [["say/0"]] * 2
    assert reward.texts["say/0"][:SIZE] != reward.texts["say/0"][SIZE:]


def test_the_draw_of_a_step_is_reproducible(policy, folder, order):
    """A run that is resumed at a position draws the same groups."""
    live = {order[place] for place in (1, 4, 5)}
    first, second = (step_with(policy, folder, live)[0].rollouts for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids) and first.prompt_names == second.prompt_names
