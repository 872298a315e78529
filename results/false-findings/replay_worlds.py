"""Runs whose numbers of `what_if` are known: prompts with four actions each, enumerated.

A rollout is one of four actions. Its score is `(ψ, ε)`: `ψ` belongs to the action and has mean 0 over the policy; `ε`
has a random direction in other dimensions and a norm that belongs to the action. Advantages depend on rewards, lengths
and norms alone, so sums over all multisets of actions give the mean of every product of updates. Steps may differ:
some have easier prompts than others, and all scores of a step share a factor.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import numpy as np
import torch

from scoregram.advantages import estimate
from scoregram.reading import StoredGroup
from scoregram.runs import GroupRecord
from scoregram.spectra import effective_rank, group_spectra, stable_rank, top1_fraction

ACTIONS, SHARED, OWN = 4, 6, 24
"""Actions of a prompt; dimensions of `ψ` and of `ε`."""
LENGTHS = np.array([4, 8, 6, 16])
RATES = np.linspace(0.1, 0.9, 12)
"""Success rates of the prompts, one each."""
TILT, SCALE = 2.0, 0.3
"""Steps of one kind have prompts with weights `exp(± TILT · rate)`; their scores are multiplied by `exp(± SCALE)`."""
TAKEN = "grpo"
"""Estimator that the run was trained with."""
SPECTRUM = {"effective_rank": effective_rank, "top1_fraction": top1_fraction, "stable_rank": stable_rank}


@dataclass(frozen=True)
class ReplayLaw:
    """How rewards, norms and directions depend on the action."""

    signal: float
    """Length of the part of `ψ` that all prompts share, times the reward."""
    noise: float
    """Norm of `ε`."""
    tail: float = 1.0
    """Factor of the score of the last action, a rare wrong one."""
    rewards: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0)

    @property
    def chances(self) -> np.ndarray:
        """`(prompts, actions)`."""
        right = np.stack([0.7 * RATES, 0.3 * RATES], axis=1)
        wrong = np.stack([0.8 * (1 - RATES), 0.2 * (1 - RATES)], axis=1)
        return np.concatenate([right, wrong], axis=1)

    @property
    def scores(self) -> np.ndarray:
        """`ψ`, `(prompts, actions, SHARED)`, with mean 0 over each prompt's policy."""
        rng = np.random.default_rng(5)
        raw = rng.normal(size=(len(RATES), ACTIONS, SHARED)) / math.sqrt(SHARED)
        raw[..., 0] += self.signal * np.array(self.rewards)
        raw[:, -1] *= self.tail
        return raw - np.einsum("pa,pad->pd", self.chances, raw)[:, None]

    @property
    def norms(self) -> np.ndarray:
        """Norm of `ε` of each action."""
        return self.noise * np.array([1.0, 1.0, 1.0, self.tail])


LAWS = {
    "strong signal": ReplayLaw(signal=2.0, noise=1.0),
    "weak signal": ReplayLaw(signal=1.0, noise=3.0),
    "heavy tail": ReplayLaw(signal=2.0, noise=1.0, tail=5.0),
    "graded": ReplayLaw(signal=2.0, noise=2.0, rewards=(1.0, 0.6, 0.3, 0.0)),
}


@dataclass(frozen=True)
class Steps:
    """Kind of each step: 0 for the law itself, 1 for easy and 2 for hard prompts; and the factor of its scores."""

    kinds: np.ndarray
    factors: np.ndarray

    @staticmethod
    def drawn(rng: np.random.Generator, count: int, *, share: bool) -> "Steps":
        """`count` steps that differ, with `share`, or have one law."""
        if not share:
            return Steps(np.zeros(count, dtype=int), np.ones(count))
        return Steps(rng.integers(1, 3, size=count), np.exp(SCALE * rng.choice([-1.0, 1.0], size=count)))


def prompt_weights() -> np.ndarray:
    """`(3, prompts)`: probability of each prompt in a step of each kind."""
    raw = np.exp(np.outer([0.0, TILT, -TILT], RATES))
    return raw / raw.sum(1, keepdims=True)


def draw_groups(rng: np.random.Generator, law: ReplayLaw, steps: Steps, prompts: int, size: int) -> list[StoredGroup]:
    """`prompts` groups of `size` rollouts for each step, with the advantages of `TAKEN`."""
    weights = prompt_weights()
    chosen = np.concatenate([rng.choice(len(RATES), size=prompts, p=weights[kind]) for kind in steps.kinds])
    edges = law.chances.cumsum(1)[chosen]  # (P, A)
    actions = (rng.random((len(chosen), size))[..., None] > edges[:, None, :-1]).sum(-1)  # (P, R)
    noise = rng.normal(size=(*actions.shape, OWN))
    noise *= (law.norms[actions] / np.linalg.norm(noise, axis=-1))[..., None]
    factors = np.repeat(steps.factors, prompts)[:, None, None]
    rows = factors * np.concatenate([law.scores[chosen[:, None], actions], noise], axis=-1)
    rewards, lengths = torch.tensor(np.array(law.rewards)[actions]), torch.tensor(LENGTHS[actions])
    grams, advantages = torch.tensor(rows @ rows.transpose(0, 2, 1)), estimate(TAKEN, rewards)
    return [
        StoredGroup(
            GroupRecord(
                step=1 + place // prompts,
                prompt_id=str(place),
                rewards=rewards[place],
                lengths=lengths[place],
                advantages=advantages[place],
                gram=grams[place],
            )
        )
        for place in range(len(chosen))
    ]


def multisets(size: int) -> tuple[np.ndarray, np.ndarray]:
    """`(M, size)` actions, in order, and the number of orders of each."""
    found = np.array(list(combinations_with_replacement(range(ACTIONS), size)))
    counts = np.array([[math.factorial(int((row == action).sum())) for action in range(ACTIONS)] for row in found])
    return found, math.factorial(size) / counts.prod(1)


@dataclass(frozen=True)
class Products:
    """Exact means for every prompt, `(prompts,)` each, at a factor of 1."""

    signal: np.ndarray
    squared: np.ndarray
    across: np.ndarray
    reference_signal: np.ndarray
    reference_squared: np.ndarray


def weighted_advantages(law: ReplayLaw, name: str, weights: str, actions: np.ndarray, place: int) -> np.ndarray:
    """`(M, r)` advantages of groups of one prompt, times 1 over the length if `weights` says so."""
    rewards, lengths = torch.tensor(np.array(law.rewards)[actions]), torch.tensor(LENGTHS[actions])
    energies = torch.tensor((law.scores[place] ** 2).sum(1)[actions] + (law.norms**2)[actions])
    found = estimate(name, rewards, lengths=lengths, score_energies=energies, outcomes=rewards).numpy()
    return found / LENGTHS[actions] if weights == "length" else found


def part_products(law: ReplayLaw, name: str, weights: str, size: int) -> Products:
    """Moments of the update of `size` rollouts, `(1/r) Σ A_i (ψ_i, ε_i)`, whose `ε` are orthogonal on average."""
    actions, orders = multisets(size)
    own, reference = ([] for _ in range(2))
    for place, chances in enumerate(law.chances):
        odds = orders * chances[actions].prod(1)
        for kept, (which, factors) in ((own, (name, weights)), (reference, ("rloo", "uniform"))):
            scaled = weighted_advantages(law, which, factors, actions, place) / size
            updates = np.einsum("mr,mrd->md", scaled, law.scores[place][actions])
            noise = (scaled**2 * (law.norms**2)[actions]).sum(1)
            kept.append((odds @ updates, odds @ ((updates**2).sum(1) + noise)))
    ours, theirs = (np.array([mean for mean, _ in kept]) for kept in (own, reference))
    return Products(
        signal=(ours**2).sum(1),
        squared=np.array([square for _, square in own]),
        across=(ours * theirs).sum(1),
        reference_signal=(theirs**2).sum(1),
        reference_squared=np.array([square for _, square in reference]),
    )


@dataclass(frozen=True)
class WholeProducts:
    """Exact means over whole groups of every prompt: products with the update that was taken, and nulls if alive."""

    with_taken: np.ndarray
    squared: np.ndarray
    taken_squared: np.ndarray
    live: np.ndarray
    nulls: dict[str, np.ndarray]
    """Metric of orthogonal scores times being alive."""


def whole_products(law: ReplayLaw, name: str, weights: str, size: int) -> WholeProducts:
    """Moments of groups of `size` rollouts."""
    actions, orders = multisets(size)
    rows = []
    for place, chances in enumerate(law.chances):
        odds = orders * chances[actions].prod(1)
        both = [weighted_advantages(law, *one, actions, place) for one in ((name, weights), (TAKEN, "uniform"))]
        updates = [np.einsum("mr,mrd->md", advantages, law.scores[place][actions]) for advantages in both]
        energies = (law.norms**2)[actions]

        def product(i: int, j: int, both=both, updates=updates, energies=energies, odds=odds) -> float:
            return float(odds @ ((updates[i] * updates[j]).sum(1) + (both[i] * both[j] * energies).sum(1)))

        live = both[0].any(1)
        norms = energies[live] + (law.scores[place] ** 2).sum(1)[actions][live]
        spectra = group_spectra(torch.diag_embed(torch.tensor(norms)), torch.tensor(both[0][live]))
        nulls = [float(odds[live] @ metric(spectra).numpy()) for metric in SPECTRUM.values()]
        rows.append([product(0, 1), product(0, 0), product(1, 1), float(odds[live].sum()), *nulls])
    with_taken, squared, taken_squared, live, *nulls = np.array(rows).T
    return WholeProducts(with_taken, squared, taken_squared, live, dict(zip(SPECTRUM, nulls, strict=True)))


@cache
def products_of(law: str, name: str, weights: str, size: int) -> tuple[Products, WholeProducts]:
    """Both kinds of moments, for runs with groups of `size` and parts of half."""
    return part_products(LAWS[law], name, weights, size // 2), whole_products(LAWS[law], name, weights, size)


def kinds_and_factors(*, share: bool) -> Steps:
    """Every kind of step, each with the same probability."""
    if not share:
        return Steps(np.zeros(1, dtype=int), np.ones(1))
    return Steps(np.array([1, 2, 1, 2]), np.exp(SCALE * np.array([-1.0, -1.0, 1.0, 1.0])))


def truths(law: str, name: str, weights: str, size: int, steps: Steps) -> dict[str, float]:
    """What `what_if` estimates, pooled over steps: all but the measured spectrum, which is not enumerated."""
    parts, whole = products_of(law, name, weights, size)
    chances = prompt_weights()[steps.kinds] / len(steps.kinds)  # (steps, prompts)
    scaled, plain = (steps.factors[:, None] ** 2 * chances).sum(0), chances.sum(0)
    signal, squared, across, base, base_squared = (scaled @ column for column in vars(parts).values())
    noise, base_noise = squared - signal, base_squared - base
    known = {
        "variance": noise,
        "bias": (signal - 2 * across + base) / base,
        "snr": signal / noise,
        "efficiency": signal / noise * base_noise / base,
        "direction": across / math.sqrt(signal * base),
        "taken": (scaled @ whole.with_taken) / math.sqrt((scaled @ whole.squared) * (scaled @ whole.taken_squared)),
    }
    live = plain @ whole.live
    nulls = {f"{metric}_null": (plain @ null) / live for metric, null in whole.nulls.items()}
    return {name: float(value) for name, value in (known | nulls).items()}


def larger_truths(law: str, size: int, steps: Steps) -> dict[str, float]:
    """Variance and signal to noise of `rloo` from groups of `size`, pooled over steps."""
    parts = _larger_products(law, size)
    scaled = (steps.factors[:, None] ** 2 * prompt_weights()[steps.kinds] / len(steps.kinds)).sum(0)
    signal, squared = float(scaled @ parts.signal), float(scaled @ parts.squared)
    return {"variance": squared - signal, "snr": signal / (squared - signal)}


@cache
def _larger_products(law: str, size: int) -> Products:
    return part_products(LAWS[law], "rloo", "uniform", size)
