"""Worlds small enough to list: every decision, every chance, every reward.

A history is `(prompt, action, observation, action, observation, …)`; decision states are histories, so a state is
met at one turn only. A turn is one decision: a token in the single-turn world, a whole answer in the others.

All rewards are multiples of 1/2. Sums of them are exact in binary, so rollouts of equal return compare equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from scoregram.checks import fail

History = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What chance answers to an action."""

    probability: float
    """Given the history and the action."""
    reward: float
    """Received at once."""
    observation: int = 0
    """Appended to the history; tells outcomes apart that lead to different states."""
    ends: bool = False
    """Whether the rollout is over; otherwise there is a next decision."""


@dataclass(frozen=True)
class World:
    """Prompts, the number of actions at every history, and what chance answers to each action."""

    name: str
    prompt_weights: tuple[float, ...]
    """How often each prompt is drawn; sums to one."""
    actions: Callable[[History], int]
    """Number of actions in a decision state."""
    outcomes: Callable[[History, int], tuple[Outcome, ...]]
    """Everything that may follow an action; probabilities sum to one."""

    def __post_init__(self) -> None:
        if not self.prompt_weights or min(self.prompt_weights) < 0 or abs(sum(self.prompt_weights) - 1) > 1e-12:
            fail("World", "prompt weights must sum to one and not be negative", self.prompt_weights, "Normalise them.")


def output_only(*, binary: bool = False) -> World:
    """One answer per prompt, up to three tokens, one reward at its end.

    Token 0 ends the answer, so answers have one to three tokens; eleven answers per prompt. The first prompt wants
    token 1 and rewards longer answers, the second wants token 2 early, the third wants any two different tokens.
    Rewards are `0`, `1/2` or `1`; with `binary` the half marks count as wrong.
    """

    def marks(prompt: int, tokens: tuple[int, ...]) -> float:
        if prompt == 0:
            return min(tokens.count(1), 2) / 2
        if prompt == 1:
            return 1.0 if tokens[0] == 2 else 0.5 * (2 in tokens)
        return (len(set(tokens)) - 1) / 2

    def actions(history: History) -> int:
        return 3 if len(history) < 5 else 2

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        tokens = (*history[1::2], action)
        if action != 0 and len(tokens) < 3:
            return (Outcome(1.0, 0.0),)
        reward = marks(history[0], tokens)
        return (Outcome(1.0, float(reward == 1) if binary else reward, ends=True),)

    name = "output only, binary" if binary else "output only"
    return World(name, (0.5, 0.25, 0.25), actions, outcomes)


def step_rewards() -> World:
    """Three decisions between two actions, a reward of `0` or `1` after each, no chance.

    The first prompt pays for repeating the last action, the second for action 1 until it was paid twice.
    """

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        taken = history[1::2]
        if history[0] == 0:
            reward = float(action == (taken[-1] if taken else 1))
        else:
            reward = float(action == 1 and taken.count(1) < 2)
        return (Outcome(1.0, reward, ends=len(taken) == 2),)

    return World("step rewards", (0.5, 0.5), lambda history: 2, outcomes)


def user_turns() -> World:
    """Three turns with a user who answers by chance: 64 rollouts per prompt.

    After action 1 the user is pleased (observation 1) more often than after action 0, more so when already pleased;
    each pleased answer pays `1`. The second prompt has a user who likes alternation instead.
    """

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        answered = len(history) // 2
        pleased = history[-1] if answered else 0
        last = history[-2] if answered else 0
        liked = action == 1 if history[0] == 0 else action != last
        chance = (0.25 + 0.5 * liked) if not pleased else (0.375 + 0.5 * liked)
        ends = answered == 2
        return (Outcome(chance, 1.0, 1, ends), Outcome(1 - chance, 0.0, 0, ends))

    return World("user turns", (0.5, 0.5), lambda history: 2, outcomes)


def stopping() -> World:
    """Push your luck, up to three times: the policy decides how many turns there are.

    Action 0 stops and keeps what was won. Action 1 goes on: `1/2` more, on a sunny (observation 1) or a cloudy
    (observation 0) path, or the loss of everything won so far and the end. Luck is better on the sunny path and
    better for the first prompt than for the second.
    """

    def outcomes(history: History, action: int) -> tuple[Outcome, ...]:
        if action == 0:
            return (Outcome(1.0, 0.0, ends=True),)
        won = len(history) // 2  # how often luck has held, each worth 1/2
        sunny = history[-1] if won else 1
        luck = (0.75 if sunny else 0.5) - 0.25 * history[0]
        lost = Outcome(1 - luck, -won / 2, ends=True)
        if won == 2:
            return (Outcome(luck, 0.5, ends=True), lost)
        return (Outcome(luck / 2, 0.5, 1), Outcome(luck / 2, 0.5, 0), lost)

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
"""The built-in worlds; each has at most four different returns, so groups of any size can be enumerated."""
