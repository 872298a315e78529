"""The third null model: the same rewards, but every score from another prompt."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from scoregram.runs import BatchRecord
from scoregram.training import generator

DRAWS = 4
"""Groups assembled for every live group of a batch."""
FORBIDDEN = 1e6
"""Cost of a match that is none, far above that of any number of true ones."""


def unrelated_groups(batch: BatchRecord, *, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Gram and advantages of groups like the live ones of a batch, whose scores come from different prompts.

    Every rollout of a live group is replaced by one with the same reward from elsewhere in the batch. No two come from
    the same prompt as long as the batch allows it; with fewer prompts than rollouts, as few as possible do. The
    same batch and seed give the same groups.
    """
    sizes = batch.sizes.tolist()
    prompt_of = torch.arange(len(sizes)).repeat_interleave(batch.sizes)
    stream = generator(seed, "unrelated", batch.step)
    made = []
    start = 0
    for size in sizes:
        rewards = batch.rewards[start : start + size]
        start += size
        if not bool(rewards.max() > rewards.min()):
            continue
        for _ in range(DRAWS):
            places = stand_ins(rewards, batch.rewards, prompt_of, stream)
            made.append((batch.gram[places][:, places], rewards - rewards.mean()))
    return made


def stand_ins(rewards: Tensor, pool: Tensor, prompt_of: Tensor, stream: torch.Generator) -> Tensor:
    """For each reward the place of a rollout with that reward, no place twice, over as many prompts as there can be.

    Rollouts and prompts are matched at random, every prompt once a round, until nobody is left.
    """
    prompts = int(prompt_of.max()) + 1
    chosen = torch.full((len(rewards),), -1)
    while bool((chosen < 0).any()):
        left = (chosen < 0).nonzero().flatten()
        free = torch.ones(len(pool), dtype=torch.bool)
        free[chosen[chosen >= 0]] = False
        fits = (pool[None] == rewards[left, None]) & free  # (rollouts left, places)
        open_to = torch.zeros(len(left), prompts).index_add(1, prompt_of, fits.float()) > 0
        costs = torch.rand(len(left), prompts, generator=stream) + FORBIDDEN * ~open_to
        for row, prompt in zip(*linear_sum_assignment(costs.numpy()), strict=True):
            if bool(open_to[row, prompt]):
                places = (fits[row] & (prompt_of == prompt)).nonzero().flatten()
                chosen[left[row]] = places[int(torch.randint(len(places), (), generator=stream))]
    return chosen
