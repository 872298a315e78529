"""Synthetic runs of which the truth is known: the law of rollouts, its moments in closed form, and the run folder.

A rollout of a prompt `x` is right, `r = 1`, with probability `p`. Its score is

    ψ = (r − p) u_x + τ σ_r ε        u_x = a e + b v_x

with noise `ε` of unit expected squared norm, a factor `τ` of unit mean square that depends on its length, and noise of
its own size for right and for wrong rollouts. `E ψ = 0`, as on-policy, and the gradient is `p (1 − p) u_x`. `e` is a
direction that all training prompts share, `v_x` one of the prompt; both are spread over all layers alike. Held-out
prompts have a shared direction that is orthogonal to every `u_x`, so no training prompt helps or hurts them.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scoregram.advantages import estimate
from scoregram.reading import SHARE_COLUMN, TRAINED_AND_FIXED
from scoregram.reading.noise import COMPONENTS, SAVING
from scoregram.runs import BatchNames, BatchRecord, GroupRecord, RolloutRecord, Run, RunWriter
from scoregram.statistics import baseline_saving, group_moments, prompt_shares, rollout_shares

LAYERS, WIDTH = 8, 6
"""Layers, and coordinates of each: the first half for training prompts, the second for held-out ones."""
RATES = (0.3, 0.5, 0.7)
"""Success rates of prompts, equally likely."""
EVALUATED = 5
"""Steps between evaluations."""
LENGTHS = range(12, 25)
"""Tokens of a completion, equally likely."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of prompts and rollouts."""

    shared: float = 0.0
    """`a²`, squared length of the direction that training prompts share."""
    own: float = 0.0
    """`b²`, squared length of a prompt's own direction."""
    right: float = 1.0
    """`σ²` of right rollouts; that of wrong ones is 1."""

    def moments(self, shift: float = 0.0) -> np.ndarray:
        """`|g|²`, `c1`, `c2` and `c3`, by the moments of a Bernoulli variable.

        Means over prompts whose success rates are moved by `shift` on the scale of log odds.
        """
        p = shifted(np.array(RATES), shift)
        q, whole = 1 - p, self.shared + self.own
        pq = p * q
        trace = pq * whole + p * self.right + q  # E|ψ|²
        oracle = pq * (1 - 3 * pq) * whole + pq * (q * self.right + p) - pq**2 * whole  # E(r − p)⁴ = pq (1 − 3 pq)
        squared, signal = float((pq**2).mean()) * whole, float(pq.mean()) ** 2 * self.shared
        rest = [oracle, pq * trace + pq**2 * whole]
        return np.array([signal, squared - signal, *(float(part.mean()) for part in rest)])


def shifted(rates: np.ndarray, shift: float | np.ndarray) -> np.ndarray:
    """Probabilities whose log odds are moved by `shift`."""
    return 1 / (1 + (1 / rates - 1) * np.exp(-shift))


SAVED_GROUPS = 400_000
"""Groups of a success rate from which the truth of the saving is computed."""
LOG_ODDS = np.linspace(-2.2, 2.2, 17)
"""Log odds of success at which it is computed."""


@cache
def saved_by_rate(law: Law, size: int) -> np.polynomial.Polynomial:
    """`R (E|ĝ_rloo|² − E|ĝ_opt|²)` as a function of a prompt's log odds: what `optimal-loo` saves, by its definition.

    No closed form is known, so groups are drawn. Of a score only its part along `u_x` and its norm are drawn: given
    these, the rest of `⟨ψ_i, ψ_j⟩` has mean zero and is left out. The same random numbers serve every success rate, and
    a polynomial of degree 10 is fitted to the results.
    """
    rng, whole, width = np.random.default_rng(0), law.shared + law.own, LAYERS * WIDTH
    shape = (SAVED_GROUPS // 4, size)
    found = np.zeros((4, len(LOG_ODDS)))
    for part in range(4):
        uniform, along, across = rng.random(shape), rng.normal(size=shape), rng.chisquare(width - 1, size=shape)
        lengths = rng.choice(LENGTHS, size=shape) / np.mean(LENGTHS)
        for place, p in enumerate(1 / (1 + np.exp(-LOG_ODDS))):
            r = (uniform < p).astype(float)
            noise = np.where(r > 0, law.right, 1.0) * lengths / width
            pull = (r - p) * math.sqrt(whole) + np.sqrt(noise) * along  # the part of ψ along u
            norm = pull**2 + noise * across
            found[part, place] = np.mean(
                _squared_sum(r, pull, norm, np.ones(shape)) - _squared_sum(r, pull, norm, norm)
            )
    return np.polynomial.Polynomial.fit(LOG_ODDS, found.mean(0), 10)


def _squared_sum(rewards: np.ndarray, pull: np.ndarray, norm: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`R |ĝ|²` of groups, with the weighted mean reward of the other rollouts as baseline."""
    total, sums = weights.sum(1, keepdims=True), (weights * rewards).sum(1, keepdims=True)
    a = rewards - (sums - weights * rewards) / (total - weights)
    own = a**2 * norm
    return (own.sum(1) + (a * pull).sum(1) ** 2 - ((a * pull) ** 2).sum(1)) / rewards.shape[1]


def saved_variance(law: Law, size: int, shift: float | np.ndarray = 0.0) -> np.ndarray:
    """What `optimal-loo` saves, as `gram/optimal_loo_saved`: the mean over the success rates, moved by `shift`."""
    odds = np.log(np.array(RATES) / (1 - np.array(RATES)))[:, None] + np.atleast_1d(shift)
    return saved_by_rate(law, size)(np.clip(odds, LOG_ODDS[0], LOG_ODDS[-1])).mean(0)


def truths(moments: Sequence[float] | np.ndarray, prompts: int, size: int) -> dict[str, float]:
    """What `RunNoise` estimates, exactly.

    Args:
        moments: `Law.moments`, then `saved_variance`, or means of both over steps.
        prompts: Prompts of a step.
        size: Rollouts of a prompt.
    """
    signal, between, within, baseline, saved = map(float, moments)
    per_rollout = between * size + within + baseline / (size - 1)
    return {
        "snr": signal * prompts * size / per_rollout,
        "noise_scale": per_rollout / signal if signal else math.inf,
        "best_group_size": max(2.0, 1 + math.sqrt(baseline / between)) if between else math.inf,
        "baseline_saving": saved / (within + baseline / (size - 1)),
    }


def law_with(*, noise_scale: float, best_group_size: float, size: int, right: float = 1.0) -> Law:
    """The law with a given noise scale for groups of `size` and a given best group size, by bisection within bisection.

    More of a prompt's own direction lowers the best group size; more of the shared one lowers the noise scale.
    """

    def with_best(shared: float) -> Law:
        low, high = 0.0, 1e4
        for _ in range(100):
            own = (low + high) / 2
            found = truths([*Law(shared=shared, own=own, right=right).moments(), 0.0], 1, size)["best_group_size"]
            low, high = (own, high) if found > best_group_size else (low, own)
        return Law(shared=shared, own=low, right=right)

    low, high = 1e-9, 1e4
    for _ in range(100):
        shared = math.sqrt(low * high)
        found = truths([*with_best(shared).moments(), 0.0], 1, size)["noise_scale"]
        low, high = (shared, high) if found > noise_scale else (low, shared)
    return with_best(low)


@dataclass(frozen=True, kw_only=True)
class World:
    """A run: its law, its size, and how its steps depend on each other."""

    law: Law
    size: int = 8
    steps: int = 60
    prompts: int = 4
    """Prompts of a step."""
    pool: int = 20
    """Training prompts, visited in random order; 0 means that no prompt comes back."""
    is_uneven: bool = False
    """Whether half of the groups have 2 or 4 rollouts more."""
    memory: float = 0.0
    """Autocorrelation, from one step to the next, of success rates, of the size of scores and of everything logged."""


def drift(rng: np.random.Generator, steps: int, memory: float) -> np.ndarray:
    """A stationary series of unit variance: white noise, or an autoregression of order one."""
    values = rng.normal(size=steps)
    for place in range(1, steps):
        values[place] = memory * values[place - 1] + math.sqrt(1 - memory**2) * values[place]
    return values


def prompt_directions(rng: np.random.Generator, count: int, law: Law, *, held_out: bool = False) -> np.ndarray:
    """`(count, d)`: `u_x`, in the coordinates of training or of held-out prompts."""
    half = WIDTH // 2
    own = rng.normal(size=(count, LAYERS, half))
    own[..., 0] = 0.0  # orthogonal to the shared direction
    own *= math.sqrt(law.own) / np.linalg.norm(own, axis=(1, 2), keepdims=True)
    own[..., 0] = math.sqrt(law.shared / LAYERS)
    found = np.zeros((count, LAYERS, WIDTH))
    found[..., half:] = own if held_out else 0.0
    found[..., :half] = 0.0 if held_out else own
    return found.reshape(count, -1)


@dataclass(frozen=True)
class Prompts:
    """Prompts with their names, success rates and directions."""

    names: Sequence[str]
    rates: np.ndarray
    directions: np.ndarray

    def some(self, places: np.ndarray) -> "Prompts":
        """Those at some places."""
        return Prompts([self.names[int(place)] for place in places], self.rates[places], self.directions[places])

    def __add__(self, other: "Prompts") -> "Prompts":
        return Prompts(
            [*self.names, *other.names],
            np.concatenate([self.rates, other.rates]),
            np.concatenate([self.directions, other.directions]),
        )


def draw_prompts(rng: np.random.Generator, count: int, law: Law, name: str, *, held_out: bool = False) -> Prompts:
    """Prompts of the law, with success rates that are drawn independently."""
    directions = prompt_directions(rng, count, law, held_out=held_out)
    return Prompts([f"{name}/{place}" for place in range(count)], rng.choice(RATES, size=count), directions)


@dataclass(frozen=True)
class Sampled:
    """Rollouts of some prompts."""

    sizes: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    """`(N, d)`."""

    def part(self, prompts: slice) -> "Sampled":
        """The rollouts of neighbouring prompts."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        first, last, _ = prompts.indices(len(self.sizes))
        rows = slice(ends[first], ends[last])
        return Sampled(self.sizes[prompts], self.rewards[rows], self.lengths[rows], self.scores[rows])


def draw_rollouts(
    rng: np.random.Generator,
    prompts: Prompts,
    sizes: np.ndarray,
    law: Law,
    *,
    shift: float | np.ndarray = 0.0,
    scale: float | np.ndarray = 0.0,
) -> Sampled:
    """Rollouts of prompts, of each as many as `sizes` says.

    Success rates are moved by `shift` on the scale of log odds, and scores are multiplied by `exp(scale)`: one number
    for all prompts, or one for each.
    """
    p, u = np.repeat(shifted(prompts.rates, shift), sizes), np.repeat(prompts.directions, sizes, axis=0)
    r = (rng.random(len(p)) < p).astype(float)
    lengths = rng.choice(LENGTHS, size=len(p))
    noise = rng.normal(size=u.shape) / math.sqrt(u.shape[1])
    deviation = np.sqrt(np.where(r > 0, law.right, 1.0) * lengths / np.mean(LENGTHS))
    factors = np.repeat(np.broadcast_to(np.exp(scale), sizes.shape), sizes)
    scores = (r - p)[:, None] * u + deviation[:, None] * noise
    return Sampled(sizes, r, lengths, factors[:, None] * scores)


def group_records(step: int, prompts: Prompts, drawn: Sampled, method: str) -> list[GroupRecord]:
    """The groups of a step with the Gram of every layer. Spectra, which no rule reads, are left out."""
    records: dict[int, GroupRecord] = {}
    starts = np.cumsum(drawn.sizes) - drawn.sizes
    for size in set(drawn.sizes.tolist()):
        places = np.flatnonzero(drawn.sizes == size)
        rows = starts[places][:, None] + np.arange(size)  # (P, R)
        rewards, lengths = torch.tensor(drawn.rewards[rows]), torch.tensor(drawn.lengths[rows])
        scores = torch.tensor(drawn.scores[rows]).unflatten(2, (LAYERS, WIDTH))
        layers = torch.einsum("pild,pjld->plij", scores, scores)
        advantages, grams = estimate(method, rewards), layers.sum(1)
        for row, place in enumerate(places.tolist()):
            records[place] = GroupRecord(
                step=step,
                prompt_id=prompts.names[place],
                rewards=rewards[row],
                lengths=lengths[row],
                advantages=advantages[row],
                gram=grams[row],
                by_layer={f"layer.{layer}": gram for layer, gram in enumerate(layers[row])},
            )
    return [records[place] for place in sorted(records)]


def with_shares(groups: Sequence[GroupRecord], drawn: Sampled) -> list[GroupRecord]:
    """The groups of a whole step, each with its share of the update."""
    gram, weights = torch.tensor(drawn.scores @ drawn.scores.T), torch.cat([group.advantages for group in groups])
    owners = torch.arange(len(groups)).repeat_interleave(torch.tensor(drawn.sizes))
    shares = prompt_shares(gram, weights / len(weights), owners).tolist()
    return [replace(group, statistics={SHARE_COLUMN: share}) for group, share in zip(groups, shares, strict=True)]


def batch_record(step: int, kind: str, names: Sequence[str], drawn: Sampled) -> BatchRecord:
    """The Gram between all rollouts of a step or of its probe."""
    return BatchRecord(
        step=step,
        kind=kind,
        prompt_ids=tuple(names),
        sizes=torch.tensor(drawn.sizes),
        rewards=torch.tensor(drawn.rewards),
        lengths=torch.tensor(drawn.lengths),
        weights=torch.zeros(len(drawn.rewards), dtype=torch.float64),
        gram=torch.tensor(drawn.scores @ drawn.scores.T),
    )


def update_scalars(drawn: Sampled, groups: Sequence[GroupRecord]) -> dict[str, float]:
    """Scalars of a step that rules read, other than those of its noise."""
    live = [float(group.rewards.std()) > 0 for group in groups]
    gram, weights = torch.tensor(drawn.scores @ drawn.scores.T), torch.cat([group.advantages for group in groups])
    return {
        "reward": float(drawn.rewards.mean()),
        "reward_std": float(np.mean([float(group.rewards.std(correction=0)) for group in groups])),
        "live_groups": sum(live),
        "groups": len(groups),
        "groups/all_right": float(np.mean([bool((group.rewards == 1).all()) for group in groups])),
        "groups/all_wrong": float(np.mean([bool((group.rewards == 0).all()) for group in groups])),
        "gram/score_norm": float(gram.diagonal().sqrt().mean()),
        "gram/largest_share": float(rollout_shares(gram, weights / len(weights)).max()),
        "gram/largest_prompt_share": max(group.statistics[SHARE_COLUMN] for group in groups),
        "length": float(drawn.lengths.mean()),
    }


NOISE_SCALARS = (*COMPONENTS, *SAVING)


def noise_scalars(rewards: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """`(S, 6)`: the scalars of the noise of `S` steps at once, by `group_moments` and the gradients themselves.

    Args:
        rewards: `(S, P, R)`.
        scores: `(S, P, R, d)`.
    """
    steps, prompts, size = rewards.shape
    blocks = torch.tensor(np.einsum("spid,spjd->spij", scores, scores)).flatten(0, 1)
    flat = torch.tensor(rewards).flatten(0, 1)
    moments = group_moments(blocks, flat)
    saving = baseline_saving(blocks, flat)
    c3 = moments.variance_fisher_trace + moments.gradient_squared
    parts = (moments.gradient_squared, moments.oracle_trace, c3, saving.per_prompt * size, saving.variance * size)
    own, *rest = (part.reshape(steps, prompts).mean(1).numpy() for part in parts)
    centred = (rewards - rewards.mean(-1, keepdims=True)) / (size - 1)
    gradients = np.einsum("spi,spid->spd", centred, scores)
    pairs = np.square(gradients.sum(1)).sum(-1) - np.square(gradients).sum((1, 2))
    signal = pairs / (prompts * (prompts - 1))
    return np.stack([signal, own - signal, *rest], axis=1)


def logged_scalars(rng: np.random.Generator, world: World) -> list[dict[str, float]]:
    """What a healthy trainer logs beside rewards and Grams: noise around constants, and an evaluation every 5 steps."""

    def noise() -> np.ndarray:
        return drift(rng, world.steps, world.memory)

    series = {
        "token_log_prob": -1.0 + 0.1 * noise(),
        "kl": 0.05 * np.exp(0.3 * noise()),
        "clipped_tokens": 0.02 * np.exp(0.3 * noise()),
        "finished": 1 - 0.05 * np.exp(0.2 * noise()),
        "grad_norm": np.exp(0.4 * noise()),
        "loss": 0.01 * noise(),
        "time/tokens_per_second": 1000 * np.exp(0.1 * noise()),
        "rewards/right/mean": 0.5 + 0.05 * noise(),
        "rewards/right/std": 0.4 + 0.03 * noise(),
        "rewards/format/mean": 0.8 + 0.03 * noise(),
        "rewards/format/std": 0.3 + 0.03 * noise(),
        "eval/accuracy": 0.5 + 0.04 * noise(),
    }
    lines = [{name: float(values[place]) for name, values in series.items()} for place in range(world.steps)]
    return [
        line if place % EVALUATED == EVALUATED - 1 else without(line, "eval/accuracy")
        for place, line in enumerate(lines)
    ]


def without(line: dict[str, float], name: str) -> dict[str, float]:
    """A line without one of its scalars."""
    return {key: value for key, value in line.items() if key != name}


def visited(rng: np.random.Generator, world: World) -> Iterator[Prompts]:
    """The prompts of each step: epochs over the pool in random order, or new ones every time."""
    if not world.pool:
        for step in range(world.steps):
            yield draw_prompts(rng, world.prompts, world.law, f"p{step}")
        return
    pool = draw_prompts(rng, world.pool, world.law, "p")
    order = np.concatenate([rng.permutation(world.pool) for _ in range(world.steps * world.prompts // world.pool + 1)])
    for step in range(world.steps):
        yield pool.some(order[step * world.prompts : (step + 1) * world.prompts])


WANDERING = 1.0
"""Deviation of the log odds of success in `draw_log`."""


def draw_log(world: World, seed: int) -> list[dict[str, float]]:
    """The log of a run without Grams whose success rate wanders far, while all completions have the same length."""
    rng = np.random.default_rng(seed)
    logged, shifts = logged_scalars(rng, world), WANDERING * drift(rng, world.steps, world.memory)
    lines = []
    for place, (line, shift) in enumerate(zip(logged, shifts, strict=True)):
        rates = shifted(rng.choice(RATES, size=world.prompts), shift)
        rewards = (rng.random((world.prompts, world.size)) < rates[:, None]).astype(float)
        right = rewards.mean(1)
        own = {
            "step": place + 1,
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(1).mean()),
            "live_groups": int(((right > 0) & (right < 1)).sum()),
            "groups": world.prompts,
            "groups/all_right": float((right == 1).mean()),
            "groups/all_wrong": float((right == 0).mean()),
            "length": float(max(LENGTHS)),
        }
        lines.append(own | line)
    return lines


HELD_OUT, TESTED, TEST_SIZE = 2, 32, 4
"""Prompts of a probe; test problems and their rollouts."""
STORED_BATCHES, STORED_ROLLOUTS = 40, 12
"""Steps of a run, about, whose Grams between prompts and whose rollouts are stored."""


@dataclass(frozen=True)
class RunInMemory(Run):
    """A run that was not written to disk; `read_run` reads it as it reads a folder."""

    lines: Sequence[dict[str, float]] = ()
    records: Sequence[GroupRecord] = ()
    stored: Sequence[BatchRecord] = ()
    tokens: Mapping[int, list[torch.Tensor]] = field(default_factory=dict)
    """Completions of the steps whose rollouts are stored."""

    def metrics(self) -> list[dict[str, Any]]:  # noqa: D102
        return list(self.lines)

    def groups(self, steps: Container[int] | None = None, *, layers: bool = True) -> Iterator[GroupRecord]:  # noqa: D102
        return (record for record in self.records if steps is None or record.step in steps)

    def batches(self, steps: Container[int] | None = None) -> Iterator[BatchRecord]:  # noqa: D102
        return (record for record in self.stored if steps is None or record.step in steps)

    def batch_names(self) -> Iterator[BatchNames]:  # noqa: D102
        return (BatchNames(record.step, record.kind, record.prompt_ids) for record in self.stored)

    def rollout_steps(self) -> set[int]:  # noqa: D102
        return set(self.tokens)

    def completion_ids(self, step: int, kind: str = "train") -> list[torch.Tensor]:  # noqa: D102
        return self.tokens[step] if kind == "train" else []

    def write(self, folder: Path) -> None:
        """The same run as a folder on disk."""
        with RunWriter.create(folder, self.config, environment={}, layers="float64") as writer:
            for line in self.lines:
                step = int(line["step"])
                writer.write_groups(step, list(self.groups([step])))
                writer.write_batches(step, list(self.batches([step])))
                if step in self.tokens:
                    writer.write_rollouts(step, [plain_rollout(step, *one) for one in enumerate(self.tokens[step])])
                writer.write_metrics(step, {name: value for name, value in line.items() if name != "step"})


def plain_rollout(step: int, place: int, tokens: torch.Tensor) -> RolloutRecord:
    """A stored rollout of which only the tokens matter, behind a prompt of none."""
    return RolloutRecord(
        step=step,
        prompt_id="p",
        group=0,
        index=place,
        token_ids=tokens,
        prompt_length=0,
        reward=0.0,
        log_probs=torch.zeros(len(tokens)),
        finished=True,
    )


def draw_run(world: World, seed: int, method: str = "rloo") -> RunInMemory:
    """A run with everything that a rule may read: groups, layers, batches, probes, tests, rollouts, scalars."""
    rng, law = np.random.default_rng(seed), world.law
    logged = logged_scalars(rng, world)
    shifts, scales = (0.3 * drift(rng, world.steps, world.memory) * bool(world.memory) for _ in range(2))
    held = draw_prompts(rng, HELD_OUT, law, "held", held_out=True)
    tested = draw_prompts(rng, TESTED, law, "test")
    lines, records, batches, tokens = [], [], [], {}
    steps: list[Sampled] = []
    for place, trained in enumerate(visited(rng, world)):
        number, both = place + 1, trained + held
        sizes = np.full(world.prompts + HELD_OUT, world.size)
        if world.is_uneven:
            sizes[: world.prompts] += rng.choice([0, 0, 2, 4], size=world.prompts)
        drawn = draw_rollouts(rng, both, sizes, law, shift=shifts[place], scale=scales[place])
        own, probe = drawn.part(slice(0, world.prompts)), drawn.part(slice(world.prompts, None))
        groups = with_shares(group_records(number, trained, own, method), own)
        lines.append({"step": number, **update_scalars(own, groups), **logged[place]})
        records += groups
        steps.append(own)
        if place % max(1, world.steps // STORED_BATCHES) == 0:
            parts = {"train": (trained, own), "fixed": (held, probe), TRAINED_AND_FIXED: (both, drawn)}
            batches += [batch_record(number, kind, some.names, part) for kind, (some, part) in parts.items()]
        if place % max(1, world.steps // STORED_ROLLOUTS) == 0:
            tokens[number] = [torch.tensor(rng.integers(100, size=length)) for length in own.lengths]
    tests = np.random.default_rng([seed, 1])
    for place in range(EVALUATED - 1, world.steps, EVALUATED):
        if 3 * place >= 2 * world.steps:
            records += test_records(tests, tested, law, place + 1, shifts[place])
    config = {"group_size": world.size, "method": method, "inner_updates": 2}
    return RunInMemory(
        Path("memory"), config, {}, (), (), {}, _with_noise(lines, steps, world), records, batches, tokens
    )


def _with_noise(lines: list[dict[str, float]], steps: Sequence[Sampled], world: World) -> list[dict[str, float]]:
    """The lines with the scalars of the noise; those are not defined for unequal groups."""
    shape = (world.prompts, world.size)
    even = [place for place, drawn in enumerate(steps) if (drawn.sizes == world.size).all()]
    if even:
        rewards = np.array([steps[place].rewards.reshape(shape) for place in even])
        scores = np.array([steps[place].scores.reshape(*shape, -1) for place in even])
        for place, row in zip(even, noise_scalars(rewards, scores).tolist(), strict=True):
            lines[place] |= dict(zip(NOISE_SCALARS, row, strict=True))
    return [line | {"gram/complete_prompts": world.prompts * (SAVING[0] in line)} for line in lines]


def test_records(rng: np.random.Generator, tested: Prompts, law: Law, step: int, shift: float) -> list[GroupRecord]:
    """Rewards of the test problems, which have the law of the training prompts."""
    drawn = draw_rollouts(rng, tested, np.full(len(tested.names), TEST_SIZE), law, shift=shift)
    return [
        GroupRecord(
            step=step,
            kind="test",
            prompt_id=name,
            rewards=torch.tensor(rewards),
            lengths=torch.tensor(lengths),
            advantages=torch.zeros(TEST_SIZE, dtype=torch.float64),
        )
        for name, rewards, lengths in zip(
            tested.names,
            np.split(drawn.rewards, len(tested.names)),
            np.split(drawn.lengths, len(tested.names)),
            strict=True,
        )
    ]
