"""Every boolean of the table of estimators, by listing every group that can be sampled.

The world is a small softmax policy on a tree: it chooses when to stop, so rollouts have unequal lengths, and its scores
have unequal norms. A *listing* holds all `R`-tuples of rollouts with their probabilities. A claim is true of an
estimator when it holds in every listing to rounding; a denied claim must fail by a visible margin in at least one.
Nothing here shares code with the library.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, Estimator
from scoregram.checks import ScoregramError

ROUNDING, VISIBLE = 1e-10, 1e-5
TREE = {"": ("", "A", "B"), "A": ("", "AA"), "B": ("", "BB"), "AA": ("", ""), "BB": ("", "")}
TWIG = {"": ("", "A"), "A": ("", "")}
COIN = {"": ("", "")}
SEGMENT_STARTS = {"", "B", "AA"}  # cut where the prefix says so: A is two tokens then one, B one then two
PARAMETERS, STEPS = 4, 3
OUTCOMES = ((0.0, 1.0, 2.5, 0.0, 2.5, 1.0, 0.0), (1.0, 1.0, 0.0, 2.5, 0.0, 0.0, 2.5))
REWARD_LIKE = {"baselines", "greedy_rewards", "outcomes", "values", "prefix_values", "outcome_rewards"}


@dataclass(frozen=True)
class Edge:
    """One action in one state."""

    probability: float
    reward: float
    score: Tensor  # (D,)
    following: str  # the next state, "" at the end


@dataclass(frozen=True)
class World:
    """All rollouts of one prompt: `N` of them, with per-step rewards and scores."""

    probability: Tensor  # (N,)
    rewards: Tensor  # (N, T)
    scores: Tensor  # (N, T, D)
    mask: Tensor  # (N, T)
    states: Tensor  # (N, T), the index of the prefix, 0 outside the mask
    names: list[str]  # of the states
    value: Tensor  # (states,), the true value of each
    gradient: Tensor  # (D,), of the expected sum of rewards
    edges: dict[str, list[Edge]]  # by state; their rewards are those of law 2
    second: Tensor  # (N,), an outcome reward apart from the steps
    second_gradient: Tensor  # (D,), of the expected sum of rewards and second outcome


@cache
def world(law: int, *, kind: str = "tree", seed: int = 0) -> World:
    """Laws 0 and 1: three outcome values. Law 2: a reward at every step."""
    tree, draw = {"tree": TREE, "twig": TWIG, "coin": COIN}[kind], torch.Generator().manual_seed(seed)
    theta = torch.randn(PARAMETERS, generator=draw, dtype=torch.float64).requires_grad_()
    names = sorted(tree)
    features = {s: torch.randn(len(tree[s]), PARAMETERS, generator=draw, dtype=torch.float64) for s in names}
    edge = {(s, a): (-1.0, 0.0, 2.0)[(3 * i + 2 * a) % 3] for i, s in enumerate(names) for a in range(len(tree[s]))}
    log_pi = {s: torch.log_softmax(features[s] @ theta, dim=0) for s in names}
    paths = list(_paths(tree, ""))
    log_p = torch.stack([torch.stack([log_pi[s][a] for s, a in path]).sum() for path in paths])
    rewards, scores = torch.zeros(len(paths), STEPS).double(), torch.zeros(len(paths), STEPS, PARAMETERS).double()
    mask, states = torch.zeros(len(paths), STEPS).bool(), torch.zeros(len(paths), STEPS).long()
    for n, path in enumerate(paths):
        for t, (s, a) in enumerate(path):
            scores[n, t] = torch.autograd.grad(log_pi[s][a], theta, retain_graph=True)[0]
            mask[n, t], states[n, t] = True, names.index(s)
            rewards[n, t] = edge[s, a] if law == 2 else 0.0
        if law < 2:
            rewards[n, len(path) - 1] = OUTCOMES[law][n]
    second = torch.tensor([float(len(path) % 2) for path in paths]).double()
    objective = (log_p.exp() * rewards.sum(-1)).sum()
    gradient = torch.autograd.grad(objective, theta, retain_graph=True)[0]
    both = torch.autograd.grad((log_p.exp() * (rewards.sum(-1) + second)).sum(), theta, retain_graph=True)[0]
    probability = log_p.detach().exp()
    value = torch.zeros(len(names)).double()
    for k, s in enumerate(names):
        on = [(n, t) for n, path in enumerate(paths) for t, (state, _) in enumerate(path) if state == s]
        weight = torch.stack([probability[n] for n, _ in on])
        value[k] = (weight * torch.stack([rewards[n, t:].sum() for n, t in on])).sum() / weight.sum()
    edges = {
        s: [
            Edge(
                float(log_pi[s][a].detach().exp()),
                edge[s, a],
                torch.autograd.grad(log_pi[s][a], theta, retain_graph=True)[0],
                to,
            )
            for a, to in enumerate(tree[s])
        ]
        for s in names
    }
    return World(probability, rewards, scores, mask, states, names, value, gradient, edges, second, both)


def _paths(tree: dict, state: str) -> Iterator[list[tuple[str, int]]]:
    for action, following in enumerate(tree[state]):
        if following:
            yield from ([(state, action), *rest] for rest in _paths(tree, following))
        else:
            yield [(state, action)]


@dataclass(frozen=True)
class Listing:
    """Every batch of `P` prompts that can be sampled: `M` of them."""

    probability: Tensor  # (M,)
    rewards: Tensor  # (M, P, R) or (M, P, R, T)
    inputs: dict[str, Tensor]  # each (M, P, …)
    scores: Tensor  # (M, P, R, T, D)
    mask: Tensor  # (M, P, R, T)
    gradient: Tensor  # (P, D)


def rollout_listing(row: Estimator, worlds: list[World], size: int) -> Listing:
    parts = [_one_prompt(row, w, size) for w in worlds]
    chosen = torch.tensor(list(itertools.product(*[range(len(p.probability)) for p in parts])))  # (M, P)
    join = lambda pick: torch.stack([pick(p)[chosen[:, k], 0] for k, p in enumerate(parts)], dim=1)  # noqa: E731
    probability = torch.stack([p.probability[chosen[:, k]] for k, p in enumerate(parts)]).prod(dim=0)
    inputs = {key: join(lambda p, key=key: p.inputs[key]) for key in parts[0].inputs}
    gradient = torch.cat([p.gradient for p in parts])
    pieces = [join(lambda p, f=f: getattr(p, f)) for f in ("rewards", "scores", "mask")]
    return Listing(probability, pieces[0], inputs, pieces[1], pieces[2], gradient)


def _one_prompt(row: Estimator, w: World, size: int) -> Listing:
    # A draw is a rollout, and the signs of the independent errors of its prefix values where those are needed.
    signs = list(itertools.product((-1.0, 1.0), repeat=STEPS)) if "prefix_values" in row.needs else [(0.0,) * STEPS]
    # Signs beyond the end of a rollout are pinned, so that its draws share its probability evenly.
    draws = [(n, s) for n in range(len(w.mask)) for s in signs if all(x >= 0 for x in s[int(w.mask[n].sum()) :])]
    which = torch.tensor([n for n, _ in draws])
    noise = 0.7 * torch.tensor([s for _, s in draws], dtype=torch.float64)
    share = w.probability[which] / torch.bincount(which)[which]
    assert abs(float(share.sum()) - 1) < 1e-12
    index = torch.tensor(list(itertools.product(range(len(draws)), repeat=size))).unsqueeze(1)  # (M, 1, R)
    rollout = which[index]
    steps, mask, states = w.rewards[rollout], w.mask[rollout], w.states[rollout]
    total, critic = steps.sum(-1), torch.linspace(-2.0, 3.0, len(w.names)).double().cos()
    starts = torch.tensor([name in SEGMENT_STARTS for name in w.names])
    flat = torch.ones(len(index), 1).double()
    every = {
        "mask": mask,
        "lengths": mask.sum(-1),
        "score_energies": w.scores[rollout].sum(-2).square().sum(-1),
        "score_grams": torch.einsum("mprd,mpsd->mprs", *[w.scores[rollout].sum(-2)] * 2),
        "token_features": w.scores[rollout],
        "baselines": 0.3 * flat,
        "best_of": 2 * flat.long(),
        "greedy_rewards": w.rewards.sum(-1)[w.probability.argmax()] * flat,
        "outcomes": total,
        "values": critic[states],
        "prefix_values": w.value[states] + noise[index],
        "segment_starts": starts[states] & mask,
        "step_ends": mask,
        "path_energies": w.scores[rollout].cumsum(-2).square().sum(-1) * mask,
        "anchors": states,
        "outcome_rewards": w.second[rollout],
    }
    needed = {k: every[k] for k in (*row.needs, *(("mask",) if row.level != "group" else ()))}
    gradient = w.second_gradient if "outcome_rewards" in row.needs else w.gradient
    rewards = total if row.level == "group" else steps
    return Listing(share[index].prod(-1)[:, 0], rewards, needed, w.scores[rollout], mask, gradient.unsqueeze(0))


def candidate_listing(w: World, size: int) -> Listing:
    """One base rollout; at each of its turns, `size` candidates from the same history, the base following the first."""

    def grow(state: str) -> Iterator[list[tuple[Edge, ...]]]:
        for picked in itertools.product(w.edges[state], repeat=size):
            following = picked[0].following
            yield from ([picked, *rest] for rest in grow(following)) if following else ([picked],)

    runs = list(grow(""))
    shape = (len(runs), 1, size, STEPS)
    rewards, mask, scores = (
        torch.zeros(shape).double(),
        torch.zeros(shape).bool(),
        torch.zeros(*shape, PARAMETERS).double(),
    )
    for m, turns in enumerate(runs):
        for t, picked in enumerate(turns):
            for i, edge in enumerate(picked):
                rewards[m, 0, i, t], mask[m, 0, i, t], scores[m, 0, i, t] = edge.reward, True, edge.score
    probability = [math.prod(edge.probability for picked in turns for edge in picked) for turns in runs]
    return Listing(
        torch.tensor(probability, dtype=torch.float64), rewards, {"mask": mask}, scores, mask, w.gradient.unsqueeze(0)
    )


@cache
def listings(name: str) -> list[Listing]:
    row = ESTIMATORS[name]
    sizes = range(row.min_group, 4)
    if name == "same-state":
        return [candidate_listing(world(2), size) for size in sizes]
    if row.couples_prompts:
        pair = [world(0, kind="twig"), world(0, kind="coin", seed=1)]
        return [rollout_listing(row, pair, size) for size in sizes]
    return [rollout_listing(row, [world(law)], size) for law in range(3) for size in sizes]


def advantages(row: Estimator, listing: Listing, rewards: Tensor | None = None, inputs: dict | None = None) -> Tensor:
    """`(M, P, R)` or `(M, P, R, T)`. Batches are one call where prompts do not meet, one call each where they do."""
    rewards, inputs = (listing.rewards if rewards is None else rewards), (listing.inputs if inputs is None else inputs)
    if row.couples_prompts:
        return torch.stack([row.fn(rewards[m], **{k: v[m] for k, v in inputs.items()}) for m in range(len(rewards))])
    return row.fn(rewards.flatten(0, 1), **{k: v.flatten(0, 1) for k, v in inputs.items()}).view_as(rewards)


def per_step(row: Estimator, listing: Listing, a: Tensor) -> Tensor:
    return a.unsqueeze(-1) * listing.mask if row.level == "group" else a


@cache
def plain_advantages(name: str) -> list[tuple[Listing, Tensor]]:
    return [(listing, advantages(ESTIMATORS[name], listing)) for listing in listings(name)]


def thinned(name: str) -> list[tuple[Listing, Tensor]]:
    """For laws of single samples: all of them, or every fifth where each takes a call of its own."""
    if not ESTIMATORS[name].couples_prompts:
        return plain_advantages(name)
    pick = lambda v: v[::5]  # noqa: E731
    return [
        (
            Listing(
                pick(s.probability),
                pick(s.rewards),
                {k: pick(v) for k, v in s.inputs.items()},
                pick(s.scores),
                pick(s.mask),
                s.gradient,
            ),
            pick(a),
        )
        for s, a in plain_advantages(name)
    ]


@cache
def expected_updates(name: str) -> list[tuple[Tensor, Tensor]]:
    """Expected update and gradient of every prompt of every listing."""
    row, pairs = ESTIMATORS[name], []
    for listing, plain in plain_advantages(name):
        assert abs(float(listing.probability.sum()) - 1) < 1e-12
        a = per_step(row, listing, plain)
        update = torch.einsum("m,mprt,mprtd->pd", listing.probability, a, listing.scores) / a.shape[2]
        pairs += zip(update, listing.gradient, strict=True)
    return pairs


def verdict(errors: list[float]) -> bool:
    """True if every error is rounding, False if one is visible; what lies between decides nothing."""
    worst = max(errors)
    assert worst < ROUNDING or worst > VISIBLE, f"undecided: {worst}"
    return worst < ROUNDING


every_row = pytest.mark.parametrize("name", sorted(ESTIMATORS))


@every_row
def test_unbiased(name):
    errors = [float((update - gradient).norm() / gradient.norm()) for update, gradient in expected_updates(name)]
    assert verdict(errors) == ESTIMATORS[name].unbiased


@every_row
def test_direction_exact(name):
    sines = []
    for update, gradient in expected_updates(name):
        along = float(update @ gradient / gradient.square().sum())
        sines.append(float((update - along * gradient).norm() / update.norm()) if along > 0 else 1.0)
    assert verdict(sines) == ESTIMATORS[name].direction_exact
    assert ESTIMATORS[name].direction_exact or not ESTIMATORS[name].unbiased


@every_row
def test_row_sum_zero(name):
    row, sums = ESTIMATORS[name], []
    for _, a in plain_advantages(name):
        sums.append(float(a.flatten(2).sum(-1).abs().max()))
    assert verdict(sums) == row.row_sum_zero


@every_row
def test_uniform_credit(name):
    row, spreads = ESTIMATORS[name], []
    for listing, plain in plain_advantages(name):
        a = per_step(row, listing, plain)
        top = a.masked_fill(~listing.mask, -torch.inf).amax(-1)
        low = a.masked_fill(~listing.mask, torch.inf).amin(-1)
        spreads.append(float((top - low)[listing.mask.any(-1)].max()))
        assert bool((a[~listing.mask] == 0).all())
    assert verdict(spreads) == row.uniform_credit


@every_row
def test_scale_invariant(name):
    row, changes = ESTIMATORS[name], []
    for (listing, before), c in itertools.product(thinned(name), (1e-6, 1e6)):
        inputs = {k: v * c if k in REWARD_LIKE else v for k, v in listing.inputs.items()}
        after = advantages(row, listing, listing.rewards * c, inputs)
        changes.append(float((after - before).abs().max() / before.abs().max()))
    assert verdict(changes) == row.scale_invariant


@every_row
def test_shift_invariant(name):
    row, changes = ESTIMATORS[name], []
    for (listing, before), b in itertools.product(thinned(name), (0.5, -3.0)):
        inputs = {k: v + b if k in REWARD_LIKE else v for k, v in listing.inputs.items()}
        last = listing.mask & (listing.mask.cumsum(-1) == listing.mask.sum(-1, keepdim=True))
        shifted = listing.rewards + (b if row.level == "group" else b * last)
        changes.append(float((advantages(row, listing, shifted, inputs) - before).abs().max()))
    assert verdict(changes) == row.shift_invariant


@every_row
def test_couples_prompts(name):
    row, changes = ESTIMATORS[name], []
    for listing in listings(name):
        rewards = listing.rewards.flatten(0, 1)
        inputs = {k: v.flatten(0, 1) for k, v in listing.inputs.items()}
        half = len(rewards) // 2
        whole = row.fn(rewards, **inputs)[:half]
        apart = row.fn(rewards[:half], **{k: v[:half] for k, v in inputs.items()})
        changes.append(float((whole - apart).abs().max()))
    assert verdict(changes) != row.couples_prompts


@every_row
def test_min_group_is_the_smallest_accepted(name):
    row = ESTIMATORS[name]
    listing = listings(name)[0]  # of the smallest size
    rewards, inputs = listing.rewards.flatten(0, 1), {k: v.flatten(0, 1) for k, v in listing.inputs.items()}
    assert rewards.shape[1] == row.min_group and bool(row.fn(rewards, **inputs).isfinite().all())
    fewer = {k: v[:, :-1] if v.ndim > 1 else v for k, v in inputs.items()}
    if "score_grams" in fewer:
        fewer["score_grams"] = fewer["score_grams"][..., :-1]
    with pytest.raises(ScoregramError, match="needs at least"):
        row.fn(rewards[:, :-1], **fewer)


def test_two_reward_values_keep_the_direction_of_the_standardised_update():
    """Why dividing by the deviation looks harmless on right-or-wrong rewards, and only there."""
    row, w = ESTIMATORS["grpo"], world(0)
    binary = w.rewards.sum(-1).clamp(max=1.0)
    last = w.mask & (w.mask.cumsum(-1) == w.mask.sum(-1, keepdim=True))
    gradient = torch.einsum("n,n,ntd->d", w.probability, binary, w.scores)  # E[r ψ]
    two = World(**{**w.__dict__, "rewards": binary.unsqueeze(-1) * last, "gradient": gradient})
    listing = rollout_listing(row, [two], 3)
    a = per_step(row, listing, advantages(row, listing))
    update = torch.einsum("m,mprt,mprtd->d", listing.probability, a, listing.scores)
    torch.testing.assert_close(update / update.norm(), gradient / gradient.norm(), rtol=1e-10, atol=1e-12)


def test_dropping_turns_nobody_else_reached_bends_the_update():
    """The trap beside `turn-rloo`: zero instead of the raw reward-to-go for a rollout alone at its turn."""
    row = ESTIMATORS["turn-rloo"]
    listing = rollout_listing(row, [world(2)], 2)
    a = advantages(row, listing)
    dropped = torch.where(listing.mask.sum(2, keepdim=True) == 1, 0.0, a)
    update = torch.einsum("m,mprt,mprtd->d", listing.probability, dropped, listing.scores) / 2
    gradient = listing.gradient[0]
    along = update @ gradient / gradient.square().sum()
    assert float((update - along * gradient).norm() / update.norm()) > VISIBLE


@pytest.mark.parametrize("name", ["mean", "turn-mean"])
def test_the_self_including_mean_shrinks_by_one_over_the_group(name):
    """Exactly `(R − 1)/R` for a group; for turns the factor differs from turn to turn, so no single one fits."""
    row = ESTIMATORS[name]
    for size in (2, 3):
        listing = rollout_listing(row, [world(2)], size)
        a = per_step(row, listing, advantages(row, listing))
        update = torch.einsum("m,mprt,mprtd->d", listing.probability, a, listing.scores) / size
        fits = torch.allclose(update, (size - 1) / size * listing.gradient[0], rtol=1e-10, atol=1e-12)
        assert fits == (name == "mean")
