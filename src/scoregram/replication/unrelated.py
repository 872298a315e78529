"""The third null model: the same rewards, but every score from another prompt."""

import torch
from torch import Tensor

from scoregram.runs import BatchRecord
from scoregram.training.order import generator

DRAWS = 4
"""Groups assembled for every live group of a batch."""


def unrelated_groups(batch: BatchRecord, *, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Gram and advantages of groups like the live ones of a batch, whose scores come from different prompts.

    Every rollout of a live group is replaced by one with the same reward from elsewhere in the batch. No two come from
    the same prompt as long as there are prompts left; with fewer prompts than rollouts, as few as possible do. The
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
    """For each reward the place of a rollout with that reward, spread over as many prompts as there are."""
    used = torch.zeros(int(prompt_of.max()) + 1)
    chosen: list[int] = []
    for reward in rewards.tolist():
        alike = [place for place in (pool == reward).nonzero().flatten().tolist() if place not in chosen]
        alike = alike or (pool == reward).nonzero().flatten().tolist()
        least = min(float(used[prompt_of[place]]) for place in alike)
        open_to = [place for place in alike if float(used[prompt_of[place]]) == least]
        place = open_to[int(torch.randint(len(open_to), (), generator=stream))]
        used[prompt_of[place]] += 1
        chosen.append(place)
    return torch.tensor(chosen)
