"""Claims of five papers on methods related to GRPO: the defining statement of each, in a world of its own.

We know the papers by their abstracts only, and Lemma 1 of arXiv:2512.20576 by a published review that quotes it. The `place`
of a claim is the sentence of the abstract that makes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from scoregram.advantages import mean_centered
from scoregram.studies.grpo_rank.claims.grounds import EXACT, claim, gap
from scoregram.studies.ledger import Finding, as_printed, corrected
from scoregram.theory import (
    ALTERNATION,
    REPETITION,
    GroundTruth,
    TabularWorld,
    action_values,
    blind_policy,
    blind_stationarity,
    classes,
    conservative_iteration,
    embedding_policy,
    ground_truth,
    group_update_moments,
    listing,
    loop,
    matryoshka_gap,
    matryoshka_optimum,
    occupancy,
    output_set_update,
    pass_at_k_utility,
    pass_every_utility,
    performative_difference,
    performative_gradient,
    prompts_with_answers,
    regularised_values,
    standardized_weight,
    state_values,
    stationarity,
    tabular_advantages,
    tabular_objective,
    utility_gradient,
    weary_user,
)

REPRESENTATION_PAPER = "arXiv:2511.15256"
PERFORMATIVE_PAPER = "arXiv:2512.20576"
MATRYOSHKA_PAPER = "arXiv:2303.12785"
UTILITY_PAPER = "arXiv:2410.04108"
AGNOSTIC_PAPER = "arXiv:2507.04406"

_CLIMBED = 1e-9
"""An ascent has converged if it is at most this far from its limit."""
_TEMPERATURE = 1.0
"""Temperature of the entropy bonus. The lower it is, the slower the ascent: at 1/4 it was still 1e-3 from the optimum
after 400 steps."""
_SHARES = tuple(k / 20 for k in range(21))
_EVEN = torch.full((2, 2), 0.5, dtype=torch.float64)


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def _logits(number: int, shape: tuple[int, ...]) -> list[Tensor]:
    """Random logits, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(number)]


def _climbed(gradient: Callable[[Tensor], Tensor], logits: Tensor, *, rate: float, steps: int) -> Tensor:
    """Logits after gradient ascent with exact gradients."""
    for _ in range(steps):
        logits = logits + rate * gradient(logits)
    return logits


@lru_cache
def _classes(seed: int) -> GroundTruth:
    rows = listing(classes())
    return ground_truth(rows, embedding_policy(rows, generator=torch.Generator().manual_seed(seed)))


def _uniform_gradient(seed: int, prompt: int) -> Tensor:
    """`∇(accuracy + entropy of the classes)` of an image, by automatic differentiation through the head."""
    policy = embedding_policy(_classes(seed).listing, generator=torch.Generator().manual_seed(seed))
    theta = policy.parameters.clone().requires_grad_()
    logs = policy.log_probs(theta)[prompt]
    objective = logs.exp()[prompt % 3] - (logs.exp() * logs).sum()
    return torch.autograd.grad(objective, theta)[0]


def output_set() -> Finding:
    """The update of the whole output set against the gradient: outputs weighted by probability, or counted once each.

    The paper's reward has a second part for uniformity, whose formula we do not know. It is `-log π(y)` here, whose
    mean is the entropy of the classes.
    """
    exact, uniform, scaled, cosines, lengths, sampled = [], [], [], [], {}, 4
    for seed, prompt in product((0, 1), range(4)):
        truth = _classes(seed)
        rows = truth.listing.of_prompt(prompt)
        scores, rewards = truth.scores[rows], truth.listing.returns[rows]
        weighted = output_set_update(scores, rewards, truth.probability[rows])
        counted = output_set_update(scores, rewards, torch.full_like(rewards, 1 / len(rows)))
        exact.append(gap(weighted, truth.gradient[prompt]))
        spread = rewards - truth.probability[rows].log()
        uniform.append(gap(output_set_update(scores, spread, truth.probability[rows]), _uniform_gradient(seed, prompt)))
        group = group_update_moments(truth, mean_centered, prompt=prompt, group_size=sampled)
        scaled.append(gap(group.expected, (sampled - 1) / sampled * weighted))
        cosines.append(_cosine(counted, truth.gradient[prompt]))
        lengths.setdefault(prompt, []).append(float(counted.norm()))
    moved = max(abs(first - second) for first, second in lengths.values())
    return corrected(
        printed=min(cosines) > 1 - EXACT,
        truth=max(*exact, *uniform, *scaled) < EXACT and moved < EXACT and min(cosines) < 0.95,
        evidence={
            "weighted by probability: gap to the gradient": max(exact),
            "the same with -log π(y) added to the reward, to the gradient with the entropy": max(uniform),
            "gap of (R-1)/R of it to the mean update of 4 samples": max(scaled),
            "counted once each: least cosine with the gradient": min(cosines),
            "counted once each: change of its length between two policies": moved,
        },
        correction="The set replaces the sample if each output is weighted by its probability: the update is then the "
        "gradient itself, without noise, and GRPO's is (R-1)/R of it on average; a reward for uniformity of the form -log π(y) "
        "changes nothing in this. Counted once each, as rollouts are, the outputs "
        "give another direction, whose length does not depend on the policy. Which one the paper uses we could not recover.",
    )


def performative_lemma() -> Finding:
    """Both sides of Lemma 1 for pairs of random policies, in a world that changes with the policy and has `γ = 1/2`."""
    tables = [logits.softmax(dim=-1) for logits in _logits(8, (2, 2))]
    value = [float(tabular_objective(weary_user(table), table)) for table in tables]
    worst, shifts = 0.0, []
    for (one, policy), (two, other) in product(enumerate(tables), repeat=2):
        worst = max(worst, abs(value[one] - value[two] - performative_difference(weary_user, policy, other)))
        still = occupancy(weary_user(other), policy) * tabular_advantages(weary_user(other), other)
        shifts.append(abs(value[one] - value[two] - float(still.sum())))
    return as_printed(
        worst < EXACT and max(shifts) > 0.1,
        {
            "pairs of policies": len(shifts),
            "largest gap": worst,
            "largest gap without the two terms of the shift": max(shifts),
        },
    )


def _true_gradient(logits: Tensor) -> Tensor:
    """Gradient of the deployed policy's objective by automatic differentiation through world and policy."""
    theta = logits.clone().requires_grad_()
    policy = theta.softmax(dim=-1)
    return torch.autograd.grad(tabular_objective(weary_user(policy), policy), theta)[0]


@lru_cache
def _deployed_optimum() -> Tensor:
    """Logits at which the performative gradient of the weary user vanishes."""
    start = torch.zeros(2, 2, dtype=torch.float64)
    return _climbed(lambda theta: performative_gradient(weary_user, theta).total, start, rate=6.0, steps=150)


def performative_theorem() -> Finding:
    """The split gradient against automatic differentiation, and what ascent without the environment's part loses."""
    starts = _logits(20, (2, 2))
    splits = [performative_gradient(weary_user, start) for start in starts]
    worst = max(gap(split.total, _true_gradient(start)) for split, start in zip(splits, starts, strict=True))
    deaf = partial(weary_user, weariness=0.0)
    answer = max(float(performative_gradient(deaf, start).answer.abs().max()) for start in starts)
    ordinary = _climbed(lambda theta: performative_gradient(weary_user, theta).policy, starts[0], rate=6.0, steps=150)
    earned = [
        float(tabular_objective(weary_user(theta.softmax(dim=-1)), theta.softmax(dim=-1)))
        for theta in (_deployed_optimum(), ordinary)
    ]
    return as_printed(
        worst < EXACT and answer < EXACT and earned[0] > earned[1] + 0.01,
        {
            "largest gap to automatic differentiation": worst,
            "least cosine of the ordinary gradient with it": min(_cosine(s.policy, s.total) for s in splits),
            "answer of an environment that does not listen": answer,
            "objective after ascent with both parts": earned[0],
            "after ascent with the ordinary gradient": earned[1],
        },
    )


def performative_optimum() -> Finding:
    """Whether the performatively optimal policy is optimal in the world that it brings about."""
    theta = _deployed_optimum()
    policy = theta.softmax(dim=-1)
    flat = float(performative_gradient(weary_user, theta).total.abs().max())
    better = float(tabular_advantages(weary_user(policy), policy).max())
    rivals = [logits.softmax(dim=-1) for logits in _logits(200, (2, 2))]
    here = float(tabular_objective(weary_user(policy), policy))
    lead = here - max(float(tabular_objective(weary_user(rival), rival)) for rival in rivals)
    return corrected(
        printed=better < _CLIMBED,
        truth=flat < _CLIMBED and lead > 0 and better > 0.01,
        evidence={
            "performative gradient at the optimum": flat,
            "least lead over 200 other policies, each in its world": lead,
            "largest advantage of an action in the optimum's own world": better,
        },
        correction="Read word for word, a policy that is optimal under the shift it induces is a stable one, which the paper "
        "contrasts with its own goal. The performative optimum maximises J(π in the world of π), and in the world that it "
        "brings about another action pays more.",
    )


def matryoshka_unique() -> Finding:
    """The value gap of nested policies from their divergences, the gradient at the optimum, ascent from several starts."""
    world, horizon = loop(), 3
    best = matryoshka_optimum(world, horizon, temperature=_TEMPERATURE)

    def objective(logits: Tensor) -> Tensor:
        values = regularised_values(world, logits.softmax(dim=-1), temperature=_TEMPERATURE).values
        return (values @ world.start).sum()  # every horizon at once

    def slope(logits: Tensor) -> Tensor:
        theta = logits.clone().requires_grad_()
        return torch.autograd.grad(objective(theta), theta)[0]

    starts = _logits(5, (horizon, 3, 2))
    gaps = []
    for start in starts:
        policies = start.softmax(dim=-1)
        own = regularised_values(world, policies, temperature=_TEMPERATURE).values[-1]
        gaps.append(gap(best.values[-1] - own, matryoshka_gap(world, policies, temperature=_TEMPERATURE)))
    ends = [_climbed(slope, start, rate=3.0, steps=100).softmax(dim=-1) for start in starts]
    flat = float(slope(best.policies.log()).abs().max())
    arrived = max(gap(end, best.policies) for end in ends)
    return as_printed(
        max(gaps) < EXACT and flat < EXACT and arrived < _CLIMBED,
        {
            "gap of V* - V to τ E Σ γ^t KL(π ‖ π*)": max(gaps),
            "gradient at π̄ exp(Q/τ)/Z": flat,
            "starts of ascent": len(starts),
            "largest distance of an end from it": arrived,
        },
    )


def matryoshka_horizons() -> Finding:
    """Distance of the optimal policy of a finite horizon from that of the endless task, for growing horizons."""
    world = loop()
    endless = matryoshka_optimum(world, 200, temperature=_TEMPERATURE)
    sizes = (1, 5, 10, 20, 40)
    found = [matryoshka_optimum(world, size, temperature=_TEMPERATURE) for size in sizes]
    policies = [gap(each.policies[-1], endless.policies[-1]) for each in found]
    values = [gap(each.values[-1], endless.values[-1]) for each in found]
    bound = max(value / world.discount**size for size, value in zip(sizes, values, strict=True)) / values[0]
    fixed = endless.values[-1]
    scaled = (world.reward + world.discount * world.transition @ fixed) / _TEMPERATURE
    residual = gap(fixed, _TEMPERATURE * (scaled.logsumexp(dim=-1) - math.log(2)))
    return as_printed(
        residual < EXACT and policies == sorted(policies, reverse=True) and bound <= 1 / world.discount + EXACT,
        {f"largest |π*_n - π*|, n = {size}": away for size, away in zip(sizes, policies, strict=True)}
        | {"residual of the endless optimum": residual, "γ": world.discount},
    )


def _entropy(visits: Tensor) -> Tensor:
    """Entropy of the occupancy, the utility of pure exploration; concave."""
    return -(visits * visits.log()).sum()


def _domination(world: TabularWorld, utility: Callable[[Tensor], Tensor], best: float) -> float:
    """Largest `(best - F) / stationarity` over a grid of policies; `inf` where a policy is stationary and not best."""
    worst = 0.0
    for chances in product((0.0, 0.3, 0.95, 1.0), repeat=len(world.start)):
        right = torch.tensor(chances, dtype=torch.float64)
        policy = torch.stack([right, (1 - right) / 2, (1 - right) / 2], dim=-1)
        lost = best - float(utility(occupancy(world, policy)))
        if lost > EXACT:
            slope = stationarity(utility_gradient(world, policy, utility), policy)
            worst = max(worst, lost / slope if slope > EXACT else math.inf)
    return worst


def general_utilities() -> Finding:
    """Utilities of the occupancy: gradient, ascent from several starts, gaps of pass@k against stationarity."""
    world, starts, off = loop(), _logits(4, (3, 2)), []

    def slope(logits: Tensor) -> Tensor:
        theta = logits.clone().requires_grad_()
        return torch.autograd.grad(_entropy(occupancy(world, theta.softmax(dim=-1))), theta)[0]

    for start in starts:
        policy = start.softmax(dim=-1)
        direct = utility_gradient(world, policy, _entropy)
        through = policy * (direct - (policy * direct).sum(dim=-1, keepdim=True))  # from probabilities to logits
        off.append(gap(through, slope(start)))
    ends = [float(_entropy(occupancy(world, _climbed(slope, s, rate=1.0, steps=60).softmax(dim=-1)))) for s in starts]
    prompts = prompts_with_answers((0.5, 0.25, 0.25), 3)
    concave = {k: _domination(prompts, pass_at_k_utility(prompts, k), 1.0) for k in (1, 2, 8)}
    convex = _domination(prompts, pass_every_utility(prompts, 2), 1.0)
    weights = {p: 8 * (1 - p) ** 7 for p in (0.1, 0.5, 0.9)}
    return as_printed(
        max(off) < EXACT
        and max(ends) - min(ends) < _CLIMBED
        and max(concave.values()) <= 1 + EXACT
        and convex == math.inf,
        {
            "γ = 3/4, entropy of the occupancy: gap of its gradient": max(off),
            "spread of it after ascent from 4 starts": max(ends) - min(ends),
        }
        | {f"pass@{k}: largest gap / stationarity": ratio for k, ratio in concave.items()}
        | {"both of two right, a convex utility: the same": convex}
        | {f"weight of a prompt under pass@8, p = {p}": w for p, w in weights.items()}
        | {f"under standardised GRPO, R = 8, p = {p}": standardized_weight(p, 8) for p in weights},
    )


def _class_gaps(world: TabularWorld) -> tuple[float, float]:
    """Best objective of the class on a grid, and the largest ratio of a policy's gap to its stationarity in the class."""
    earned = [float(tabular_objective(world, blind_policy(q))) for q in _SHARES]
    best, worst = max(earned), 0.0
    for share, value in zip(_SHARES, earned, strict=True):
        if best - value > EXACT:
            slope = blind_stationarity(world, share)
            worst = max(worst, (best - value) / slope if slope > EXACT else math.inf)
    return best, worst


def best_in_class() -> Finding:
    """Conservative iteration inside a convex class: with gradient dominance, and where it fails."""
    best, ratio = _class_gaps(ALTERNATION)
    other_best, other_ratio = _class_gaps(REPETITION)
    ends = {
        name: [
            float(tabular_objective(world, blind_policy(conservative_iteration(world, q, rate=0.5, steps=100))))
            for q in (0.0, 0.3, 0.6, 1.0)
        ]
        for name, world in (("alternation", ALTERNATION), ("repetition", REPETITION))
    }
    unrestricted = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    outside = float(tabular_objective(ALTERNATION, unrestricted))
    return as_printed(
        ratio < math.inf == other_ratio
        and best - min(ends["alternation"]) < 1e-3
        and other_best - min(ends["repetition"]) > 0.4
        and outside > best,
        {
            "dominance holds: largest gap / stationarity in the class": ratio,
            "best of the class": best,
            "least end of 4 starts": min(ends["alternation"]),
            "best policy outside the class": outside,
            "dominance fails: best of the class": other_best,
            "least end of 4 starts there": min(ends["repetition"]),
        },
    )


@dataclass(frozen=True)
class _ClassReading:
    """The two conditions on a class of policies, each the worst over some members."""

    incompleteness: float
    """Part of the best greedy improvement, any action in any state, that no policy of the class makes."""
    ratio: float
    """Gap to the best of the class over stationarity in it: the constant of dominance; `inf` without dominance."""
    bounded: float
    """The ratio over the coverage `max_s d*(s)/d(s)`, how much more the best of the class visits a state; 0 where
    the coverage is infinite."""


def _read_member(world: TabularWorld, policy: Tensor, best: Tensor, groups: Tensor) -> _ClassReading:
    """The conditions at one policy; states with a row in the same column of `groups` get the same action."""
    visits, most = (occupancy(world, table).sum(dim=-1) for table in (policy, best))
    improved = visits[:, None] * action_values(world, policy)  # (S, A)
    in_class = float((groups.mT @ improved).amax(dim=-1).sum())
    slope = in_class - float((improved * policy).sum())
    lost = float(tabular_objective(world, best) - tabular_objective(world, policy))
    ratio = 0.0 if lost <= EXACT else lost / slope if slope > EXACT else math.inf
    coverage = float((most / visits)[most > 0].max())
    bounded = ratio / coverage if coverage < math.inf else 0.0
    return _ClassReading(float(improved.amax(dim=-1).sum()) - in_class, ratio, bounded)


def _read_class(world: TabularWorld, seen: Sequence[int]) -> _ClassReading:
    """The conditions on the class of policies that see `seen[s]` in state `s`, over a grid of its members."""
    groups = torch.nn.functional.one_hot(torch.tensor(seen)).double()  # (S, Z)
    members = [
        torch.tensor([[chances[view], 1 - chances[view]] for view in seen], dtype=torch.float64)
        for chances in product(_SHARES[::5], repeat=groups.shape[1])
    ]
    best = max(members, key=lambda policy: float(tabular_objective(world, policy)))
    found = [_read_member(world, policy, best, groups) for policy in members]
    return _ClassReading(
        incompleteness=max(each.incompleteness for each in found),
        ratio=max(each.ratio for each in found),
        bounded=max(each.bounded for each in found),
    )


_TWINS = (0, 0, 1, 1)
"""What a policy sees that cannot tell the copies of `_twins` apart."""


def _twins(seed: int) -> TabularWorld:
    """A random world of two states in two copies each, which differ in nothing; `γ = 3/4`, no end."""
    draws = torch.randn((2, 2, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    of_copies = draws.repeat_interleave(2, dim=0)  # (S, A, 5)
    start = torch.full((4,), 0.25, dtype=torch.float64)
    return TabularWorld(of_copies[..., :4].softmax(dim=-1), of_copies[..., 4], start, 0.75)


def weaker_than_completeness() -> Finding:
    """Both halves, and completeness alone: it implies dominance only if every state is visited."""
    blind, alone = _read_class(ALTERNATION, (0, 0, 0)), _read_class(ALTERNATION, (0, 1, 2))
    complete = [_read_class(_twins(seed), _TWINS) for seed in range(8)]
    missed = max(each.incompleteness for each in (*complete, alone))
    bounded = max(each.bounded for each in complete)
    return as_printed(
        max(blind.ratio, bounded) <= 1 + EXACT
        and blind.incompleteness > 0.05
        and missed < EXACT
        and alone.ratio == math.inf,
        {
            "an incomplete class: largest gap / stationarity": blind.ratio,
            "what its best policy misses of a greedy improvement, most": blind.incompleteness,
            "complete classes in random worlds that visit every state": len(complete),
            "what they miss of a greedy improvement, most": missed,
            "largest gap / stationarity in them": max(each.ratio for each in complete),
            "the same over the coverage, which bounds it by 1": bounded,
            "a complete class whose policies miss a state: the ratio": alone.ratio,
        },
    )


def discounted_gradient() -> Finding:
    """Eq. (4) in worlds with `γ < 1`, against automatic differentiation; and with `γ^t` left out."""
    worst, cosines = 0.0, []
    for world, ends in ((loop(), False), (weary_user(_EVEN), False), (ALTERNATION, True), (REPETITION, True)):
        for logits in _logits(5, tuple(world.reward.shape)):
            theta = logits.clone().requires_grad_()
            policy = theta.softmax(dim=-1)
            true = torch.autograd.grad(tabular_objective(world, policy), theta)[0]
            table = policy.detach()
            centred = action_values(world, table) - state_values(world, table)[:, None]
            worst = max(worst, gap(occupancy(world, table) * centred, true))
            if ends:  # only then can visits be counted without a discount
                ended = TabularWorld(world.transition, world.reward, world.start, 1.0)
                cosines.append(_cosine(occupancy(ended, table) * centred, true))
    return as_printed(
        worst < EXACT,
        {"largest gap": worst, "least γ": 0.5, "γ^t left out, as most code does: least cosine": min(cosines)},
    )


DISCOUNT_CLAIMS = (
    claim(
        "eq-4",
        "section 2.2, eq. (4)",
        "The gradient of the discounted objective is the mean of Σ_t γ^t q(S_t, A_t) ∇ log π(A_t | S_t).",
        discounted_gradient,
    ),
)
"""The policy gradient theorem of Section 2.2 with its discount."""

COMPANION_CLAIMS = (
    claim(
        "rm-output-set",
        "abstract, fourth sentence",
        "A predefined set of outputs takes the place of sampling as the group that GRPO needs.",
        output_set,
        paper=REPRESENTATION_PAPER,
    ),
    claim(
        "performative-lemma",
        "Lemma 1, as a review quotes it; abstract, third sentence",
        "The difference of two policies, each in its own world, is the mean advantage plus the shifts of reward and transition.",
        performative_lemma,
        paper=PERFORMATIVE_PAPER,
    ),
    claim(
        "performative-gradient",
        "abstract, first and third sentence",
        "Standard methods ignore that a deployed policy shifts its environment; the performative gradient accounts for it.",
        performative_theorem,
        paper=PERFORMATIVE_PAPER,
    ),
    claim(
        "performative-optimum",
        "abstract, fifth sentence",
        "Performatively optimal policies are those that remain optimal under the shift that they induce themselves.",
        performative_optimum,
        paper=PERFORMATIVE_PAPER,
    ),
    claim(
        "matryoshka-optimum",
        "abstract, second sentence",
        "For softmax policies the entropy-regularised optimum is unique, and the ascent over nested horizons reaches it.",
        matryoshka_unique,
        paper=MATRYOSHKA_PAPER,
    ),
    claim(
        "matryoshka-horizon",
        "abstract, fourth sentence",
        "The optimal policy of the endless task is approximated arbitrarily well by that of a long enough horizon.",
        matryoshka_horizons,
        paper=MATRYOSHKA_PAPER,
    ),
    claim(
        "utility-global",
        "abstract, third and fourth sentence",
        "With a concave utility of the occupancy, policy gradients reach the global optimum, by gradient domination.",
        general_utilities,
        paper=UTILITY_PAPER,
    ),
    claim(
        "agnostic-best-in-class",
        "abstract, first and third sentence",
        "In a convex class with variational gradient dominance, first-order methods reach its best policy, optimal or not.",
        best_in_class,
        paper=AGNOSTIC_PAPER,
    ),
    claim(
        "agnostic-dominance",
        "abstract, third sentence",
        "Variational gradient dominance is strictly weaker than completeness of the class together with coverability.",
        weaker_than_completeness,
        paper=AGNOSTIC_PAPER,
    ),
)
"""Statements of the five papers above."""
