"""Which problems a step sees, and with which random numbers: functions of the seed and of a position, not of history.

So a run that is resumed at a position goes on with the very problems and draws of one that was never interrupted.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from scoregram.tasks import Problem


def drawn_problems(problems: Sequence[Problem], position: int, count: int, seed: int) -> list[Problem]:
    """The problems at places `position … position + count - 1` of an endless sequence of shuffled epochs.

    Every epoch holds every problem once, in an order of its own.
    """
    size = len(problems)
    places = range(position, position + count)
    orders = {epoch: epoch_order(size, epoch, seed) for epoch in {place // size for place in places}}
    return [problems[orders[place // size][place % size]] for place in places]


@lru_cache(maxsize=4)
def epoch_order(size: int, epoch: int, seed: int) -> tuple[int, ...]:
    """A permutation of `0 … size-1`, the same for one epoch and seed."""
    return tuple(torch.randperm(size, generator=generator(seed, "order", epoch)).tolist())


def generator(seed: int, purpose: str, number: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose and one number, such as a step; no two of them share a stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
