"""Softmax policies over the decision states of a listing, as pure functions of one flat parameter vector."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.theory.lab.listing import Listing
from scoregram.theory.lab.worlds import History


@dataclass(frozen=True)
class Policy:
    """Parameters, and the function that turns parameters into the log-probability of every action in every state."""

    parameters: Float[Tensor, " parameters"]
    log_probs: Callable[[Tensor], Tensor]
    """`(D,)` to `(S, A)`, normalised over the actions that exist; `-inf` for those that do not."""


def tabular_policy(listing: Listing, *, generator: torch.Generator, scale: float = 1.0) -> Policy:
    """One logit per state and action, drawn from `scale · N(0, 1)`: nothing is shared between states."""
    exists = listing.action_mask
    where = exists.flatten().cumsum(dim=0).reshape(exists.shape) - 1  # (S, A): position in the flat vector
    logits = scale * torch.randn(int(exists.sum()), dtype=torch.float64, generator=generator)

    def log_probs(parameters: Tensor) -> Tensor:
        return _masked_log_softmax(parameters[where.clamp(min=0)], exists)

    return Policy(logits, log_probs)


def network_policy(listing: Listing, *, generator: torch.Generator, width: int = 3, scale: float = 0.5) -> Policy:
    """Features of the history → `width` tanh units → logits: every state shares every parameter.

    `logits = W₂ tanh(W₁ x)`, with a constant among the features `x` in the place of biases. All weights are drawn
    from `scale · N(0, 1)`.
    """
    exists = listing.action_mask
    features = _features(listing.histories)  # (S, F)
    inner, outer = (width, features.shape[1]), (exists.shape[1], width)
    first = inner[0] * inner[1]
    weights = scale * torch.randn(first + outer[0] * outer[1], dtype=torch.float64, generator=generator)

    def log_probs(parameters: Tensor) -> Tensor:
        hidden = torch.tanh(features @ parameters[:first].reshape(inner).mT)  # (S, width)
        return _masked_log_softmax(hidden @ parameters[first:].reshape(outer).mT, exists)

    return Policy(weights, log_probs)


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
