"""Which pairs of training prompts help each other's reward, and which cost each other reward.

To first order a plain gradient step on prompt `p` changes the expected reward of prompt `q` by `η ⟨g_p, g_q⟩`. Groups
of one step are independent, so the product of their leave-one-out gradients is an unbiased estimate. The mean over the
steps that a pair shares has a t interval over these steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from scoregram.bootstrap import FEWEST, LEVEL, t_mean, t_quantile
from scoregram.exhibits import Estimate
from scoregram.reading.run import RunReading
from scoregram.runs import BatchRecord
from scoregram.statistics import group_blocks, group_moments, leave_one_out_weights

MOST_PROMPTS = 24
"""Prompts of a map: those with the most visits. A map of more cannot be read."""
MAP_SHUFFLES = 20
"""Shuffles of the rewards from which chance is estimated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InterferenceMap:
    """Inner products between the gradients of prompts, as means over the steps that two prompts share."""

    prompts: tuple[str, ...]
    """The most visited first; each shares at least `FEWEST` steps with another."""
    products: np.ndarray
    """`(P, P)`: `⟨g_p, g_q⟩`, off the diagonal from independent groups, on it the unbiased `|g_p|²`. Every step is
    divided by its mean squared score norm over the group size, so that steps count alike. `nan` for pairs with fewer
    than `FEWEST` common steps."""
    pairs: dict[tuple[str, str], Estimate]
    """Pair → its product with a 95 % t interval over steps, corrected for the number of pairs."""
    by_chance: float
    """Pairs whose interval excludes 0 if the rewards of every group are shuffled: the mean over shuffles."""

    @property
    def helping(self) -> list[tuple[str, str]]:
        """Pairs whose interval lies above 0, the largest product first."""
        return self._ordered([pair for pair, found in self.pairs.items() if found.low > 0])

    @property
    def hurting(self) -> list[tuple[str, str]]:
        """Pairs whose interval lies below 0, the most negative product first."""
        return self._ordered([pair for pair, found in self.pairs.items() if found.high < 0])[::-1]

    def _ordered(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        return sorted(pairs, key=lambda pair: -self.pairs[pair].value)


def interference_map(run: RunReading) -> InterferenceMap | None:
    """The map of the prompts of a run that come back together; None if no pair shares `FEWEST` stored batches.

    Needs whole batches (`--batches-every`) of equal groups of four rollouts or more. Steps whose self-check failed do
    not count.

    Example:
        >>> from scoregram import open_run, read_run
        >>> found = interference_map(read_run(open_run("runs/few-prompts")))  # doctest: +SKIP
        >>> found.hurting[:1], found.by_chance  # doctest: +SKIP
    """
    trained = [batch for batch in run.batch_names if batch.kind == "train" and batch.step not in run.trust.failed]
    visits = Counter(name for batch in trained for name in batch.prompt_ids)
    chosen = {name for name, count in visits.most_common(MOST_PROMPTS) if count >= FEWEST}
    steps = {batch.step for batch in trained if len(chosen.intersection(batch.prompt_ids)) > 1}
    return map_of_batches(run.batches(steps), chosen)


def map_of_batches(batches: Iterable[BatchRecord], chosen: set[str]) -> InterferenceMap | None:
    """The map of the chosen prompts; None if no pair of them shares `FEWEST` batches."""
    seen: dict[tuple[str, str], list[np.ndarray]] = {}
    squares: dict[str, list[float]] = {}
    for batch in batches:
        products = step_products(batch, chosen)
        if products is None:
            continue
        names, values, squared = products
        for name, value in zip(names, squared, strict=True):
            squares.setdefault(name, []).append(value)
        for (i, one), (j, other) in combinations(enumerate(names), 2):
            seen.setdefault((min(one, other), max(one, other)), []).append(values[:, i, j])
    enough = {
        pair: np.array(found) for pair, found in seen.items() if len(found) >= FEWEST
    }  # pair -> (steps, 1 + draws)
    if not enough:
        return None
    tests = len(enough)
    pairs = {pair: t_mean(found[:, 0].tolist(), tests=tests) for pair, found in enough.items()}
    by_chance = float(sum(_excludes_zero(found[:, 1:], tests).mean() for found in enough.values()))
    kept = {name for pair in enough for name in pair}
    prompts = tuple(sorted(kept, key=lambda name: (-len(squares[name]), name)))
    products = np.full((len(prompts), len(prompts)), np.nan)
    for (one, other), found in pairs.items():
        i, j = prompts.index(one), prompts.index(other)
        products[i, j] = products[j, i] = found.value
    products[np.diag_indices(len(prompts))] = [float(np.mean(squares[name])) for name in prompts]
    return InterferenceMap(prompts=prompts, products=products, pairs=pairs, by_chance=by_chance)


def _excludes_zero(values: np.ndarray, tests: int) -> np.ndarray:
    """`(draws,)`: whether the t interval of `t_mean` over the steps `(steps, draws)` excludes 0."""
    count = len(values)
    half = t_quantile(count - 1, 1 - (1 - LEVEL) / tests) * values.std(axis=0, ddof=1) / math.sqrt(count)
    return np.abs(values.mean(axis=0)) > half


def step_products(batch: BatchRecord, chosen: set[str]) -> tuple[list[str], np.ndarray, list[float]] | None:
    """Chosen prompts of a step, their products `(1 + MAP_SHUFFLES, P, P)` and `|g|²`; None for a batch of another form.

    The gradient of a prompt with several groups is their mean. The products after the first are those with the rewards
    of every group shuffled.
    """
    size = int(batch.sizes[0])
    places = [place for place, name in enumerate(batch.prompt_ids) if name in chosen]
    owners = [batch.prompt_ids[place] for place in places]
    names = list(dict.fromkeys(owners))
    is_even = bool((batch.sizes == size).all()) and size >= 4
    if batch.kind != "train" or not is_even or len(names) < 2:
        return None
    rows = torch.tensor([place * size + rollout for place in places for rollout in range(size)])
    gram, rewards = batch.gram.double()[rows][:, rows], batch.rewards.double()[rows].reshape(-1, size)  # (G, R)
    scale = float(batch.gram.diagonal().double().mean()) / size
    if not (bool(gram.isfinite().all()) and bool(rewards.isfinite().all()) and scale > 0):
        return None
    shares = torch.tensor([[float(owner == name) for owner in owners] for name in names], dtype=torch.float64)
    shares /= shares.sum(dim=1, keepdim=True)  # (P, G)
    squared = shares @ group_moments(group_blocks(gram, size), rewards).gradient_squared / scale
    rng = np.random.default_rng(batch.step)
    shuffled = [torch.from_numpy(rng.permuted(rewards.numpy(), axis=1)) for _ in range(MAP_SHUFFLES)]
    weights = torch.stack([leave_one_out_weights(one) for one in (rewards, *shuffled)])  # (1 + draws, G, R)
    blocks = gram.reshape(len(owners), size, len(owners), size)
    products = torch.einsum("dgi,gihj,dhj->dgh", weights, blocks, weights) / scale
    return names, (shares @ products @ shares.mT).numpy(), squared.tolist()
