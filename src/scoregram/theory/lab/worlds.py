"""Worlds small enough to enumerate, the list of all their rollouts, and policies on them.

A history is `(prompt, action, observation, action, observation, …)`. Decision states are histories, so a state occurs
at one turn only. A turn is one decision: a token in the single-turn world, a whole answer in the others.

All rewards are multiples of 1/2. Sums of them are exact in binary, so rollouts of equal return compare equal.

`World` → `listing` → `Listing`: `M` rollouts over `S` decision states. A `SoftmaxPolicy` gives the log-probability of
every action in every state, as a pure function of one flat parameter vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.checks import fail

History = tuple[int, ...]

ROLLOUTS_LIMIT = 20_000
"""Largest number of rollouts that `listing` enumerates."""


@dataclass(frozen=True)
class Transition:
    """One random outcome of an action."""

    probability: float
    """Given the history and the action."""
    reward: float
    """Received at this turn."""
    observation: int = 0
    """Appended to the history; distinguishes outcomes that lead to different states."""
    ends: bool = False
    """Whether the rollout ends here; otherwise there is a next decision."""


@dataclass(frozen=True)
class World:
    """Prompts, the number of actions at every history, and the random outcomes of each action."""

    name: str
    prompt_weights: tuple[float, ...]
    """Probability of each prompt; sums to one."""
    actions: Callable[[History], int]
    """Number of actions in a decision state."""
    outcomes: Callable[[History, int], tuple[Transition, ...]]
    """Every possible outcome of an action; probabilities sum to one."""

    def __post_init__(self) -> None:
        if not self.prompt_weights or min(self.prompt_weights) < 0 or abs(sum(self.prompt_weights) - 1) > 1e-12:
            fail("World", "prompt weights must sum to one and not be negative", self.prompt_weights, "Normalise them.")


def output_only(*, binary: bool = False) -> World:
    """One answer per prompt, up to three tokens, one reward at its end.

    Token 0 ends the answer, so answers have one to three tokens; there are eleven answers per prompt. The first prompt
    rewards token 1, up to twice; the second rewards token 2, most if it comes first; the third rewards different
    tokens. Rewards are `0`, `1/2` or `1`; with `binary` only `1` is right.
    """

    def marks(prompt: int, tokens: tuple[int, ...]) -> float:
        if prompt == 0:
            return min(tokens.count(1), 2) / 2
        if prompt == 1:
            return 1.0 if tokens[0] == 2 else 0.5 * (2 in tokens)
        return (len(set(tokens)) - 1) / 2

    def actions(history: History) -> int:
        return 3 if len(history) < 5 else 2

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        tokens = (*history[1::2], action)
        if action != 0 and len(tokens) < 3:
            return (Transition(1.0, 0.0),)
        reward = marks(history[0], tokens)
        return (Transition(1.0, float(reward == 1) if binary else reward, ends=True),)

    name = "output only, binary" if binary else "output only"
    return World(name, (0.5, 0.25, 0.25), actions, outcomes)


def step_rewards() -> World:
    """Three decisions between two actions, a reward of `0` or `1` after each, no randomness.

    The first prompt rewards repeating the last action, the second rewards action 1 up to two times.
    """

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        taken = history[1::2]
        if history[0] == 0:
            reward = float(action == (taken[-1] if taken else 1))
        else:
            reward = float(action == 1 and taken.count(1) < 2)
        return (Transition(1.0, reward, ends=len(taken) == 2),)

    return World("step rewards", (0.5, 0.5), lambda history: 2, outcomes)


def user_turns() -> World:
    """Three turns with a user who answers at random: 64 rollouts per prompt.

    After action 1 the user is pleased (observation 1) more often than after action 0, and more often if already
    pleased; each pleased answer pays `1`. The user of the second prompt likes alternating actions instead.
    """

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        answered = len(history) // 2
        pleased = history[-1] if answered else 0
        last = history[-2] if answered else 0
        liked = action == 1 if history[0] == 0 else action != last
        chance = (0.25 + 0.5 * liked) if not pleased else (0.375 + 0.5 * liked)
        ends = answered == 2
        return (Transition(chance, 1.0, 1, ends), Transition(1 - chance, 0.0, 0, ends))

    return World("user turns", (0.5, 0.5), lambda history: 2, outcomes)


def stopping() -> World:
    """Push your luck, up to three times: the policy decides how many turns there are.

    Action 0 stops and keeps the winnings. Action 1 continues: it wins `1/2` more, on a sunny (observation 1) or a
    cloudy (observation 0) path, or it loses everything won so far and ends. The chance of winning is higher on the
    sunny path, and higher for the first prompt than for the second.
    """

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        if action == 0:
            return (Transition(1.0, 0.0, ends=True),)
        won = len(history) // 2  # wins so far, each worth 1/2
        sunny = history[-1] if won else 1
        luck = (0.75 if sunny else 0.5) - 0.25 * history[0]
        lost = Transition(1 - luck, -won / 2, ends=True)
        if won == 2:
            return (Transition(luck, 0.5, ends=True), lost)
        return (Transition(luck / 2, 0.5, 1), Transition(luck / 2, 0.5, 0), lost)

    return World("stopping", (0.625, 0.375), lambda history: 2, outcomes)


WORLDS = MappingProxyType(
    {
        "output_only": output_only(),
        "output_only_binary": output_only(binary=True),
        "step_rewards": step_rewards(),
        "user_turns": user_turns(),
        "stopping": stopping(),
    }
)
"""The built-in worlds. Each has at most four different returns, so groups of any size can be enumerated."""


@dataclass(frozen=True)
class Listing:
    """Every rollout of a world, padded to `H` turns. Where `mask` is False, state, action and reward are 0."""

    histories: tuple[History, ...]
    """The `S` decision states, in the order of the enumeration."""
    actions: Int[Tensor, " states"]
    """Number of actions in each state."""
    prompt_weights: Float[Tensor, " prompts"]
    state: Int[Tensor, "listed turns"]
    action: Int[Tensor, "listed turns"]
    reward: Float[Tensor, "listed turns"]
    mask: Bool[Tensor, "listed turns"]
    chance: Float[Tensor, " listed"]
    """Probability of the rollout's outcomes, given the prompt and its actions."""
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
    """An unfinished rollout: `(state, action, reward)` of every turn so far."""

    prompt: int
    steps: tuple[tuple[int, int, float], ...]
    chance: float


def listing(world: World) -> Listing:
    """Every rollout of `world`, by depth-first search of its tree.

    Raises:
        ScoregramError: If probabilities do not sum to one, a state has no action, or there are more than
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
                    fail(
                        "listing", f"there may be at most {ROLLOUTS_LIMIT} rollouts", "more", "Make the world smaller."
                    )

    for prompt in range(len(world.prompt_weights)):
        walk((prompt,), _Path(prompt, (), 1.0))
    return _tabulated(world, tuple(states), actions, paths)


def _number_of_actions(world: World, history: History) -> int:
    number = world.actions(history)
    if number < 1:
        fail("listing", f"history {history} needs at least one action", number, "End the rollout before it.")
    return number


def _outcomes(world: World, history: History, action: int) -> tuple:
    """The outcomes of an action that have positive probability."""
    outcomes = world.outcomes(history, action)
    total = sum(outcome.probability for outcome in outcomes)
    if abs(total - 1) > 1e-12 or any(outcome.probability < 0 for outcome in outcomes):
        where = f"after action {action} in history {history}"
        fail("listing", f"the chances {where} must sum to one and not be negative", total, "Repair `outcomes`.")
    going_on = [outcome.observation for outcome in outcomes if not outcome.ends]
    if len(set(going_on)) < len(going_on):
        where = f"after action {action} in history {history}"
        requirement = f"observations {where} must differ, so that each outcome leads to its own state"
        fail("listing", requirement, going_on, "Number them.")
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


@dataclass(frozen=True)
class SoftmaxPolicy:
    """Parameters, and the function from parameters to the log-probability of every action in every state."""

    parameters: Float[Tensor, " parameters"]
    log_probs: Callable[[Tensor], Tensor]
    """`(D,)` to `(S, A)`, normalised over the actions that exist; `-inf` for those that do not."""


def tabular_policy(listing: Listing, *, generator: torch.Generator, scale: float = 1.0) -> SoftmaxPolicy:
    """One logit per state and action, drawn from `scale · N(0, 1)`: states share no parameters."""
    exists = listing.action_mask
    where = exists.flatten().cumsum(dim=0).reshape(exists.shape) - 1  # (S, A): position in the flat vector
    logits = scale * torch.randn(int(exists.sum()), dtype=torch.float64, generator=generator)

    def log_probs(parameters: Tensor) -> Tensor:
        return _masked_log_softmax(parameters[where.clamp(min=0)], exists)

    return SoftmaxPolicy(logits, log_probs)


HIDDEN_UNITS = 3
"""Hidden units of `network_policy`."""


def network_policy(listing: Listing, *, generator: torch.Generator) -> SoftmaxPolicy:
    """Features of the history → three tanh units → logits: every state shares every parameter.

    `logits = W₂ tanh(W₁ x)`, where the features `x` include a constant instead of biases. All weights are drawn from
    `N(0, 1)/2`.
    """
    exists = listing.action_mask
    features = _features(listing.histories)  # (S, F)
    inner, outer = (HIDDEN_UNITS, features.shape[1]), (exists.shape[1], HIDDEN_UNITS)
    first = inner[0] * inner[1]
    weights = 0.5 * torch.randn(first + outer[0] * outer[1], dtype=torch.float64, generator=generator)

    def log_probs(parameters: Tensor) -> Tensor:
        hidden = torch.tanh(features @ parameters[:first].reshape(inner).mT)  # (S, HIDDEN_UNITS)
        return _masked_log_softmax(hidden @ parameters[first:].reshape(outer).mT, exists)

    return SoftmaxPolicy(weights, log_probs)


def _masked_log_softmax(logits: Tensor, exists: Tensor) -> Tensor:
    return torch.where(exists, logits, -torch.inf).log_softmax(dim=-1)


def _features(histories: tuple[History, ...]) -> Tensor:
    """A constant, the prompt, the turn, and the last and the mean action and observation: `(S, 7)`."""
    rows = []
    for history in histories:
        actions, observations = history[1::2] or (0,), history[2::2] or (0,)
        last = (actions[-1], observations[-1])
        means = (sum(actions) / len(actions), sum(observations) / len(observations))
        rows.append((1, history[0], len(history) // 2, *last, *means))
    return torch.tensor(rows, dtype=torch.float64)
