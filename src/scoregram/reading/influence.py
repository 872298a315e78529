"""Inner products between the gradients of prompts: which training prompts help held-out ones, or pull against others.

A run with `--probe-trained` stores, at each probe, one Gram of the training rollouts of that step and of rollouts of
test problems. To first order, a step along the gradient of a training prompt `p` changes the expected reward of a
held-out prompt `h` by `η ⟨g_p, g_h⟩`. Leave-one-out gradients of independent groups estimate that product unbiasedly.
A run with AdamW stores `⟨g_p, D g_h⟩` too, with the preconditioner `D` of that step: what the prompt changes by its
share of AdamW's step, momentum aside.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scoregram.bootstrap import FEWEST, t_mean
from scoregram.exhibits import Estimate
from scoregram.runs import FIXED_PROBE, BatchRecord
from scoregram.statistics import leave_one_out_weights

TRAINED_AND_FIXED = "train and fixed"
"""Kind of a batch with the training rollouts of a step, followed by those of its probe."""
TRAINED_AND_FIXED_PRECONDITIONED = f"{TRAINED_AND_FIXED}, preconditioned"
"""Kind of the batch with the same rollouts and the Gram `⟨ψ_i, D ψ_j⟩`, with AdamW's `D` after the step."""
STRICTER = 5
"""Intervals are at 99 %, five times as strict as others: at 95 %, 7 % of 200 simulated runs of noise had a finding."""
NULL_DRAWS = 20
"""Shuffles of the held-out rewards from which chance is estimated."""


@dataclass(frozen=True)
class ProbeProducts:
    """Inner products of one probe: those of each training prompt with the held-out ones."""

    prompts: tuple[str, ...]
    products: np.ndarray
    """`(P,)`: mean over held-out prompts of `⟨ĝ_p, ĝ_h⟩`, over the mean squared score and per rollout of a group.

    With a preconditioner `⟨ĝ_p, D ĝ_h⟩` and the mean of `⟨ψ_i, D ψ_i⟩`, over the training rollouts alone.
    """
    null: np.ndarray
    """`(NULL_DRAWS, P)`: the same with the rewards of every held-out group shuffled; zero on average."""


@dataclass(frozen=True, kw_only=True)
class HeldOutInfluence:
    """Training prompts that were seen at enough probes, and what their gradients do to held-out prompts."""

    effects: Mapping[str, Estimate]
    """Prompt → mean product over its visits, with a 99 % t interval corrected for the number of prompts."""
    probes: int
    """Probes with both kinds of rollouts."""
    by_chance: float
    """Prompts whose interval excludes 0 if the held-out rewards are shuffled: the mean over shuffles."""

    @property
    def helping(self) -> list[str]:
        """Prompts whose interval lies above 0, the largest effect first."""
        return self._ordered([name for name, effect in self.effects.items() if effect.low > 0])

    @property
    def hurting(self) -> list[str]:
        """Prompts whose interval lies below 0, the most harmful first."""
        return self._ordered([name for name, effect in self.effects.items() if effect.high < 0])[::-1]

    def _ordered(self, names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: -self.effects[name].value)


def held_out_influence(batches: Iterable[BatchRecord], *, preconditioned: bool = False) -> HeldOutInfluence:
    """Effects of the training prompts that were visited at `FEWEST` probes or more; none without such Grams.

    Args:
        batches: The batches of a run.
        preconditioned: Read the Grams with AdamW's preconditioner, `⟨g_p, D g_h⟩`; a run with SGD has none. `D`
            includes the gradient of the training rollouts of its step, so unbiasedness holds for given `D` and
            training rollouts: over the held-out rollouts.
    """
    probes = probe_products(batches, preconditioned=preconditioned)
    visits: dict[str, list[tuple[float, np.ndarray]]] = {}
    for probe in probes:
        for place, name in enumerate(probe.prompts):
            visits.setdefault(name, []).append((float(probe.products[place]), probe.null[:, place]))
    seen = {name: found for name, found in visits.items() if len(found) >= FEWEST}
    tests = STRICTER * len(seen)
    effects = {name: t_mean([value for value, _ in found], tests=tests) for name, found in seen.items()}
    by_chance = 0.0
    for draw in range(NULL_DRAWS):
        shuffled = [t_mean([null[draw] for _, null in found], tests=tests) for found in seen.values()]
        by_chance += sum(one.low > 0 or one.high < 0 for one in shuffled) / NULL_DRAWS
    return HeldOutInfluence(effects=effects, probes=len(probes), by_chance=by_chance)


def probe_products(batches: Iterable[BatchRecord], *, preconditioned: bool = False) -> list[ProbeProducts]:
    """The products of every probe that stored training rollouts with its own, plain or preconditioned.

    Held-out prompts are those of the probe's own batch, which is stored before it. One batch is in memory at a time.
    """
    held_out: dict[int, set[str]] = {}
    wanted = TRAINED_AND_FIXED_PRECONDITIONED if preconditioned else TRAINED_AND_FIXED
    found = []
    for batch in batches:
        if batch.kind == FIXED_PROBE:
            held_out[batch.step] = set(batch.prompt_ids)
        if batch.kind == wanted and batch.step in held_out and bool(batch.rewards.isfinite().all()):
            found.append(_products(batch, held_out[batch.step]))
    return found


def _products(batch: BatchRecord, held_out: set[str]) -> ProbeProducts:
    is_held = np.array([name in held_out for name in batch.prompt_ids])
    gram, sizes = batch.gram.double().numpy(), batch.sizes.tolist()
    rewards = np.split(batch.rewards.double().numpy(), np.cumsum(sizes)[:-1])
    rng, rows = np.random.default_rng(batch.step), np.repeat(is_held, sizes)
    squares = np.diag(gram)
    if batch.kind == TRAINED_AND_FIXED_PRECONDITIONED:
        # D = 1/ε for weights without a gradient so far: one held-out rollout that uses them would set the scale
        squares = squares[~rows]
    scale = float(squares.mean()) / float(np.mean(sizes))
    held_rewards = [one for one, held in zip(rewards, is_held, strict=True) if held]
    drawn = [held_rewards] + [[rng.permutation(one) for one in held_rewards] for _ in range(NULL_DRAWS)]
    weights = np.concatenate([_gradient_weights(np.stack(one)) for one in zip(*drawn, strict=True)], axis=1)
    # (1 + draws, N_h) @ (N_h, N_t): the products with each training rollout
    products = weights @ gram[rows][:, ~rows] / len(held_rewards)
    own = [_gradient_weights(one[None])[0] for one, held in zip(rewards, is_held, strict=True) if not held]
    ends = np.cumsum([0, *(len(one) for one in own)])
    found = [products[:, start : start + len(one)] @ one for start, one in zip(ends, own, strict=False)]
    values = np.stack(found, axis=1) / scale if scale > 0 else np.zeros((1 + NULL_DRAWS, len(own)))  # (1 + draws, P)
    names = tuple(name for name, held in zip(batch.prompt_ids, is_held, strict=True) if not held)
    return ProbeProducts(names, values[0], values[1:])


def _gradient_weights(rewards: np.ndarray) -> np.ndarray:
    """`(n, R)` weights of the scores in `n` leave-one-out gradients of a prompt; 0 for `R = 1`: there are no others."""
    if rewards.shape[1] < 2:
        return np.zeros_like(rewards)
    return leave_one_out_weights(torch.from_numpy(rewards)).numpy()


def prompt_products(batches: Iterable[BatchRecord]) -> dict[str, list[float]]:
    """Prompt → for each visit, the inner product of its gradient with the mean of the other prompts of the step.

    Unbiased leave-one-out gradients of independent groups; divided by the mean squared norm of the step's scores over
    the group size, so that steps count alike. It is no cosine.
    """
    found: dict[str, list[float]] = {}
    for batch in batches:
        size = int(batch.sizes[0])
        rewards = batch.rewards.double().reshape(-1, size) if bool((batch.sizes == size).all()) else None
        if (
            rewards is None
            or size < 4
            or len(rewards) < 2
            or not bool(rewards.isfinite().all())
            or batch.kind != "train"
        ):
            continue
        others = products_with_others(batch.gram, rewards)
        if not bool(others.isfinite().all()):  # a Gram with a NaN says nothing
            continue
        scale = float(batch.gram.diagonal().double().mean()) / size
        for name, value in zip(batch.prompt_ids, others.tolist(), strict=True):
            found.setdefault(name, []).append(value / scale if scale > 0 else 0.0)
    return found


def products_with_others(gram: Tensor, rewards: Tensor) -> Tensor:
    """`(P,)`: inner product of each prompt's leave-one-out gradient with the mean of those of the other prompts.

    `⟨g_p, Σ_q g_q⟩ - |g_p|²` over `P - 1`, with `g_p = Σ_i w_i ψ_i` over the rollouts of `p`: one product of the Gram
    with the weights of all rollouts, where all products between two prompts would take many.

    Args:
        gram: `(P R, P R)`, rollouts prompt by prompt.
        rewards: `(P, R)`.
    """
    weights, k = leave_one_out_weights(rewards), gram.double()
    prompts, size = weights.shape
    with_all = (k @ weights.flatten()).view(prompts, size)  # ⟨ψ_i, Σ_q g_q⟩
    own = k.view(prompts, size, prompts, size).diagonal(dim1=0, dim2=2)  # (R, R, P)
    squared = torch.einsum("pi,ijp,pj->p", weights, own, weights)
    return ((weights * with_all).sum(1) - squared) / (prompts - 1)
