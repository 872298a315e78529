"""The full list of what can happen in a world: `M` rollouts over `S` decision states."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.checks import fail
from scoregram.theory.lab.worlds import History, World

ROLLOUTS_LIMIT = 20_000
"""Largest number of rollouts that `listing` will write down."""


@dataclass(frozen=True)
class Listing:
    """Every rollout of a world, padded to `H` turns. Where `mask` is False, state and action are 0, the reward 0."""

    histories: tuple[History, ...]
    """The `S` decision states, in the order in which they are first met."""
    actions: Int[Tensor, " states"]
    """Number of actions in each."""
    prompt_weights: Float[Tensor, " prompts"]
    state: Int[Tensor, "listed turns"]
    action: Int[Tensor, "listed turns"]
    reward: Float[Tensor, "listed turns"]
    mask: Bool[Tensor, "listed turns"]
    chance: Float[Tensor, " listed"]
    """Probability of the world's answers, given the prompt and the rollout's actions."""
    prompt: Int[Tensor, " listed"]

    @property
    def returns(self) -> Float[Tensor, " listed"]:
        """Sum of each rollout's rewards."""
        return self.reward.sum(dim=-1)

    @property
    def lengths(self) -> Int[Tensor, " listed"]:
        """Number of decisions of each rollout."""
        return self.mask.sum(dim=-1)

    @property
    def action_mask(self) -> Bool[Tensor, "states actions"]:
        """Which of the `A` padded actions exist in each state."""
        return torch.arange(int(self.actions.max())) < self.actions[:, None]  # (S, A)

    def of_prompt(self, prompt: int) -> Int[Tensor, " chosen"]:
        """Rows of the rollouts of one prompt."""
        if not 0 <= prompt < self.prompt_weights.numel():
            fail("of_prompt", f"the prompt must lie in 0…{self.prompt_weights.numel() - 1}", prompt, "Choose another.")
        return (self.prompt == prompt).nonzero()[:, 0]


@dataclass(frozen=True)
class _Path:
    """A rollout as it grows: `(state, action, reward)` of every turn so far."""

    prompt: int
    steps: tuple[tuple[int, int, float], ...]
    chance: float


def listing(world: World) -> Listing:
    """Every rollout of `world`, by walking its tree depth first.

    Raises:
        ScoregramError: If chances do not sum to one, a state offers no action, or there are more than
            `ROLLOUTS_LIMIT` rollouts.
    """
    states: dict[History, int] = {}
    actions: list[int] = []
    paths: list[_Path] = []

    def walk(history: History, path: _Path) -> None:
        state = states.setdefault(history, len(states))
        actions.append(_number_of_actions(world, history))
        for action in range(actions[state]):
            for outcome in _outcomes(world, history, action):
                steps = (*path.steps, (state, action, outcome.reward))
                longer = _Path(path.prompt, steps, path.chance * outcome.probability)
                if outcome.ends:
                    paths.append(longer)
                else:
                    walk((*history, action, outcome.observation), longer)
                if len(paths) > ROLLOUTS_LIMIT:
                    fail("listing", f"a world may have {ROLLOUTS_LIMIT} rollouts", "more", "Make the world smaller.")

    for prompt in range(len(world.prompt_weights)):
        walk((prompt,), _Path(prompt, (), 1.0))
    return _tabulated(world, tuple(states), actions, paths)


def _number_of_actions(world: World, history: History) -> int:
    number = world.actions(history)
    if number < 1:
        fail("listing", f"history {history} needs at least one action", number, "End the rollout before it.")
    return number


def _outcomes(world: World, history: History, action: int) -> tuple:
    """What may follow, without the impossible."""
    outcomes = world.outcomes(history, action)
    total = sum(outcome.probability for outcome in outcomes)
    if abs(total - 1) > 1e-12 or any(outcome.probability < 0 for outcome in outcomes):
        where = f"after action {action} in history {history}"
        fail("listing", f"the chances {where} must sum to one and not be negative", total, "Repair `outcomes`.")
    going_on = [outcome.observation for outcome in outcomes if not outcome.ends]
    if len(set(going_on)) < len(going_on):
        where = f"after action {action} in history {history}"
        fail("listing", f"observations {where} must differ, or two outcomes are one state", going_on, "Number them.")
    return tuple(outcome for outcome in outcomes if outcome.probability > 0)


def _tabulated(world: World, histories: tuple[History, ...], actions: list[int], paths: list[_Path]) -> Listing:
    turns = max(len(path.steps) for path in paths)
    padded = torch.zeros(len(paths), turns, 3, dtype=torch.float64)
    mask = torch.zeros(len(paths), turns, dtype=torch.bool)
    for row, path in enumerate(paths):
        padded[row, : len(path.steps)] = torch.tensor(path.steps, dtype=torch.float64)
        mask[row, : len(path.steps)] = True
    return Listing(
        histories=histories,
        actions=torch.tensor(actions),
        prompt_weights=torch.tensor(world.prompt_weights, dtype=torch.float64),
        state=padded[..., 0].long(),
        action=padded[..., 1].long(),
        reward=padded[..., 2],
        mask=mask,
        chance=torch.tensor([path.chance for path in paths], dtype=torch.float64),
        prompt=torch.tensor([path.prompt for path in paths]),
    )
