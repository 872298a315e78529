"""Supervised training on demonstrations: the one loop behind the embedded policy and every warm start."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoregram.tasks import DemonstratedTurn

MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a written solution."""

    ids: tuple[int, ...]
    """Prompt, solution, stop token; in an episode, a stop token after every turn."""
    prompt: int
    """Tokens of the prompt."""
    observations: tuple[tuple[int, int], ...] = ()
    """Start and end of each later text that is read, not learnt: what an environment wrote."""

    @property
    def learnt(self) -> list[bool]:
        """Whether each token is learnt."""
        flags = [place >= self.prompt for place in range(len(self.ids))]
        for start, end in self.observations:
            flags[start:end] = [False] * len(flags[start:end])
        return flags


def episode_demonstration(
    turns: Sequence[DemonstratedTurn],
    *,
    prompt: Callable[[str], Sequence[int]],
    observation: Callable[[str], Sequence[int]],
    turn: Callable[[str], Sequence[int]],
) -> Demonstration:
    """A teacher's episode in tokens; the arguments turn the texts of each kind into tokens."""
    ids, spans = [*prompt(turns[0].observation)], []
    start = len(ids)
    for place, each in enumerate(turns):
        if place:
            read = observation(each.observation)
            spans.append((len(ids), len(ids) + len(read)))
            ids += read
        ids += turn(each.text)
    return Demonstration(tuple(ids), start, tuple(spans))


def padded_demonstrations(
    demonstrations: Sequence[Demonstration], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and mask of the solutions, all `(N, T)`, padded on the right."""
    longest = max(len(each.ids) for each in demonstrations)
    ids = torch.tensor([[*each.ids, *[pad_id] * (longest - len(each.ids))] for each in demonstrations], device=device)
    place = torch.arange(longest, device=device)
    lengths = torch.tensor([len(each.ids) for each in demonstrations], device=device).unsqueeze(1)
    learnt = [[*each.learnt, *[False] * (longest - len(each.ids))] for each in demonstrations]
    return ids, place < lengths, torch.tensor(learnt, device=device)


def supervised_losses(
    model: Any, optimizer: torch.optim.Optimizer, batch_loss: Callable[[int], Tensor], learning_rates: Iterable[float]
) -> Iterator[Tensor]:
    """Train `model` in place, one step per learning rate, and yield the loss before each step.

    A step clips the gradient of the loss to norm 1 and updates the weights. Training stops when the caller stops
    reading losses.

    Args:
        model: Already in the mode to train in.
        optimizer: Holds the parameters that are trained.
        batch_loss: Number of a step → loss of its batch, with a gradient.
        learning_rates: One per step.
    """
    for step, learning_rate in enumerate(learning_rates):
        loss = batch_loss(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()
