"""The update of every training method, written from the formula of its paper in plain Python and torch.

Nothing here comes from the package. A method is a credit (the advantage of a rollout or of each of its tokens), a
surrogate of the tokens of one rollout, and an average over the batch: `L = −average_i surrogate(log π_i, log π_old_i,
A_i)`. Deviations are sample deviations, and a constant group has advantages of 0: papers leave both open, and
`docs/training.md` with the docstrings of the estimators says so.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from tests.naive import discriminative_tokens_by_hand


@dataclass(frozen=True)
class Batch:
    """The rollouts of one step in lists; rollout `i` belongs to group `i // group_size`."""

    group_size: int
    rewards: Sequence[float]
    places: Sequence[Sequence[int]]
    """Columns of the completion tokens of every rollout."""
    longest: int
    """The constant of Dr. GRPO: completion tokens allowed."""
    inputs: Mapping[str, Any]
    """What methods need besides rewards, by the name that the trainer gives it."""
    energies: Sequence[float] = ()
    """`|ψ_i|²` of every rollout."""
    grams: Sequence[Tensor] = ()
    """`⟨ψ_i, ψ_j⟩` of every group."""
    reference: Tensor | None = None
    """`(N, T)` log-probabilities of the initial policy."""
    beta: float = 0.0
    turn_rewards: Sequence[Sequence[float]] = ()
    """Reward of every turn of a rollout; the last one includes the outcome."""
    turn_lengths: Sequence[Sequence[int]] = ()
    observations: Sequence[Sequence[str]] = ()
    """What the policy read before each turn."""
    outcomes: Sequence[float] = ()

    def group(self, i: int) -> range:
        """The rollouts of the prompt of rollout `i`, itself included."""
        start = i // self.group_size * self.group_size
        return range(start, start + self.group_size)

    def others(self, i: int) -> list[int]:
        """The other rollouts of its prompt."""
        return [j for j in self.group(i) if j != i]

    def group_rewards(self, i: int) -> list[float]:
        """The rewards of its prompt, its own included."""
        return [self.rewards[j] for j in self.group(i)]

    def length(self, i: int) -> int:
        """Its completion tokens."""
        return len(self.places[i])

    def at_tokens(self, name: str, i: int) -> list[float]:
        """The values of an input `(N, T)` at its completion tokens."""
        return [float(self.inputs[name][i, t]) for t in self.places[i]]


Credit = Callable[[Batch, int], float | list[float]]
"""The advantage of rollout `i`, or one for each of its completion tokens."""
Surrogate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Values to maximise, from `log π`, `log π_old` and the advantages at the tokens of one rollout."""
Average = Callable[[list[Tensor], Batch], Tensor]
Loss = Callable[[Batch, Tensor, Tensor], Tensor]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The sample deviation."""
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def standard(value: float, among: Sequence[float], eps: float = 0.0) -> float:
    """Distance from the mean in deviations; 0 if all values are equal."""
    return 0.0 if max(among) == min(among) else (value - mean(among)) / (deviation(among) + eps)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


# Credit of a rollout


def own_reward(b: Batch, i: int) -> float:
    return b.rewards[i]


def above_prompt(name: str) -> Credit:
    """Above a number of the prompt that its rollouts did not influence."""
    return lambda b, i: b.rewards[i] - float(b.inputs[name][i // b.group_size])


def above_mean(b: Batch, i: int) -> float:
    return b.rewards[i] - mean(b.group_rewards(i))


def above_others(b: Batch, i: int) -> float:
    return b.rewards[i] - mean(b.rewards[j] for j in b.others(i))


def standardised(eps: float = 0.0) -> Credit:
    return lambda b, i: standard(b.rewards[i], b.group_rewards(i), eps)


def standardised_by_others(b: Batch, i: int) -> float:
    """NeMo-RL: mean and deviation of the other rollouts; no division if those are equal."""
    spread = deviation([b.rewards[j] for j in b.others(i)])
    return above_others(b, i) / (spread + 1e-6 if spread else 1.0)


def above_weighted(weight: Callable[[Batch, int], float], *, own: bool) -> Credit:
    """Above the mean weighted by lengths or energies, with or without the rollout's own reward."""

    def credit(b: Batch, i: int) -> float:
        rows = list(b.group(i)) if own else b.others(i)
        return b.rewards[i] - weighted_mean([b.rewards[j] for j in rows], [weight(b, j) for j in rows])

    return credit


def energy(b: Batch, i: int) -> float:
    return b.energies[i]


def standardised_per_token(b: Batch, i: int) -> float:
    per_token = {j: b.rewards[j] / b.length(j) for j in b.group(i)}
    return standard(per_token[i], list(per_token.values()))


def adds_to_best(b: Batch, i: int) -> float:
    """PKPO: what `i` adds to the best of `k`, over all sets of `k` rollouts; a set counts `R / C(R, k)`."""
    k = int(b.inputs["best_of"][i // b.group_size])
    sets = list(combinations(b.group(i), k))
    gains = [
        max(b.rewards[j] for j in chosen) - max(b.rewards[j] for j in chosen if j != i)
        for chosen in sets
        if i in chosen
    ]
    return b.group_size / len(sets) * sum(gains)


def whitened(*, centred: bool) -> Credit:
    """REINFORCE++: standardised over all tokens of the batch, each with the reward of its rollout."""

    def credit(b: Batch, i: int) -> float:
        level = [above_mean(b, j) if centred else b.rewards[j] for j in range(len(b.rewards))]
        return standard(level[i], [level[j] for j, tokens in enumerate(b.places) for _ in tokens])

    return credit


def group_gram(b: Batch, i: int, *, exact: bool) -> Tensor:
    return b.grams[i // b.group_size] if exact else b.inputs["score_grams"][i // b.group_size]


def outside_shared_directions(*, exact: bool) -> Credit:
    """SALT: `Πa + (1 + κ)(a − Πa)`; `Π` projects on the eigenvectors with at least half the largest eigenvalue."""

    def credit(b: Batch, i: int) -> float:
        gram, rows = group_gram(b, i, exact=exact), b.group(i)
        a = torch.tensor([standard(b.rewards[j], b.group_rewards(i)) for j in rows], dtype=torch.float64)
        if not a.any():
            return 0.0
        sizes, vectors = torch.linalg.eigh(gram)
        shared = [vectors[:, d] for d in range(len(sizes)) if sizes[d] >= 0.5 * max(sizes)]
        within = sum(((v @ a) * v for v in shared), torch.zeros_like(a))
        lengths = sum(abs(float(a[j])) * math.sqrt(float(gram[j, j])) for j in range(len(a)))
        cancelled = 1 - math.sqrt(float(a @ gram @ a)) / lengths
        return float((within + (1 + cancelled) * (a - within))[i - rows.start])

    return credit


def scaled_by_novelty(*, exact: bool) -> Credit:
    """G2RL: the reward times 0.5 to 1.5 by `1 − mean cos²` with the other gradients, then standardised."""

    def credit(b: Batch, i: int) -> float:
        gram, rows = group_gram(b, i, exact=exact), range(b.group_size)
        scaled = []
        for j in rows:
            squares = [float(gram[j, k]) ** 2 / float(gram[j, j] * gram[k, k]) for k in rows if k != j]
            scaled.append(b.group_rewards(i)[j] * (0.5 + (1 - mean(squares))))
        return standard(scaled[i % b.group_size], scaled)

    return credit


# Credit of tokens


def generalised(decay: float) -> Callable[[Batch, int], list[float]]:
    """GAE: `δ_t = r_t + V_{t+1} − V_t`, `A_t = δ_t + λ A_{t+1}`, the reward at the last token."""

    def credit(b: Batch, i: int) -> list[float]:
        values, found, after = b.at_tokens("values", i), [], 0.0
        for t in reversed(range(len(values))):
            arrived = b.rewards[i] if t == len(values) - 1 else values[t + 1]
            after = arrived - values[t] + decay * after
            found.append(after)
        return found[::-1]

    return credit


def whitened_over_tokens(credit: Callable[[Batch, int], list[float]]) -> Credit:
    """PPO of TRL and verl: minus the mean over all tokens of the batch, over their deviation."""

    def whitened_credit(b: Batch, i: int) -> list[float]:
        among = [a for j in range(len(b.places)) for a in credit(b, j)]
        return [standard(a, among) for a in credit(b, i)]

    return whitened_credit


def process_rewards(b: Batch, i: int) -> list[float]:
    """GRPO with process rewards: the sum over this step and later ones, standardised over all steps of the group."""
    ends, scores = b.inputs["step_ends"], b.inputs["token_rewards"]
    among = [float(scores[j, t]) for j in b.group(i) for t in b.places[j] if ends[j, t]]
    steps = [(t, standard(float(scores[i, t]), among)) for t in b.places[i] if ends[i, t]]
    return [sum(score for end, score in steps if end >= t) for t in b.places[i]]


def segment_gains(b: Batch, i: int) -> list[float]:
    """VinePPO by segments: value at the end of the segment minus value at its start, at the last end the reward."""
    starts, values = b.inputs["segment_starts"], b.at_tokens("prefix_values", i)
    cuts = [0, *(n for n, t in enumerate(b.places[i]) if n and starts[i, t])]
    found: list[float] = []
    for start, end in zip(cuts, [*cuts[1:], None], strict=True):
        gain = (b.rewards[i] if end is None else values[end]) - values[start]
        found += [gain] * ((len(values) if end is None else end) - start)
    return found


def above_paths(*, own: bool) -> Credit:
    """Optimal token baseline: above the mean reward of the rollouts that reach the token, weighted by path energies."""

    def credit(b: Batch, i: int) -> list[float]:
        found = []
        for n in range(b.length(i)):
            rows = [j for j in b.group(i) if b.length(j) > n and (own or j != i)]
            weights = [b.at_tokens("path_energies", j)[n] for j in rows]
            level = weighted_mean([b.rewards[j] for j in rows], weights) if rows else 0.0
            found.append(b.rewards[i] - level)
        return found

    return credit


def discriminative(b: Batch, i: int) -> list[float]:
    """DelTA, see `naive.py`."""
    features = b.inputs["token_features"]
    mask, rewards = torch.zeros(features.shape[:2], dtype=torch.bool), torch.zeros(features.shape[:2]).double()
    for j, places in enumerate(b.places):
        mask[j, places] = True
        rewards[j, places[-1]] = b.rewards[j]
    groups = len(b.places) // b.group_size
    rewards, masks, features = (table.unflatten(0, (groups, b.group_size)) for table in (rewards, mask, features))
    by_hand = discriminative_tokens_by_hand(rewards, masks, features)
    return by_hand.view(mask.shape)[i, b.places[i]].tolist()


# Credit of turns, repeated on their tokens


def by_turn(rule: Callable[[Batch, int, int], float]) -> Credit:
    def credit(b: Batch, i: int) -> list[float]:
        return [rule(b, i, h) for h, length in enumerate(b.turn_lengths[i]) for _ in range(length)]

    return credit


def to_come(b: Batch, i: int, h: int) -> float:
    """The rewards of this turn and the later ones."""
    return sum(b.turn_rewards[i][h:])


def reached(b: Batch, i: int, h: int) -> list[int]:
    """The rollouts of the prompt that reached turn `h`."""
    return [j for j in b.group(i) if len(b.turn_rewards[j]) > h]


def turn_above_mean(b: Batch, i: int, h: int) -> float:
    return to_come(b, i, h) - mean(to_come(b, j, h) for j in reached(b, i, h))


def turn_above_others(b: Batch, i: int, h: int) -> float:
    others = [to_come(b, j, h) for j in reached(b, i, h) if j != i]
    return to_come(b, i, h) - (mean(others) if others else 0.0)


def turn_and_outcome(b: Batch, i: int, h: int) -> float:
    """MT-GRPO: `z(reward of the turn) + z(outcome)`."""

    def bare(j: int) -> float:
        is_last = h == len(b.turn_rewards[j]) - 1
        return b.turn_rewards[j][h] - (b.outcomes[j] if is_last else 0.0)

    outcome = standard(b.outcomes[i], [b.outcomes[j] for j in b.group(i)])
    return standard(bare(i), [bare(j) for j in reached(b, i, h)]) + outcome


def episode_and_state(b: Batch, i: int, h: int) -> float:
    """GiGPO: `z(return) + z(rewards to come)`, the second among turns of the group after the same observation."""
    returns = [sum(b.turn_rewards[j]) for j in b.group(i)]
    turns = [(j, k) for j in b.group(i) for k in range(len(b.turn_rewards[j]))]
    same = [to_come(b, j, k) for j, k in turns if b.observations[j][k] == b.observations[i][h]]
    return standard(sum(b.turn_rewards[i]), returns) + standard(to_come(b, i, h), same)


def candidates_for_turn(b: Batch, i: int, h: int) -> float:
    """TL-GRPO: the reward of the turn among the candidates for it."""
    return standard(b.turn_rewards[i][h], [b.turn_rewards[j][h] for j in reached(b, i, h)])


# Surrogates


def policy_gradient(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    return a * new


def clipped(low: float, high: float, most: float = math.inf) -> Surrogate:
    """PPO: `min(ρ A, clip(ρ, low, high) A)`, not below `most · A` where `A < 0` (dual clip)."""

    def surrogate(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
        ratio = (new - old).exp()
        pessimistic = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        return torch.where((a < 0) & (ratio > most), most * a, pessimistic)

    return surrogate


def clipped_geometric_mean(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """GSPO: one ratio `(π(y)/π_old(y))^(1/L)` for the rollout, clipped to `1 − 3e-4 … 1 + 4e-4`."""
    ratio = (new - old).mean().exp()
    return torch.minimum(ratio * a[0], ratio.clamp(1 - 3e-4, 1 + 4e-4) * a[0])[None]


def clipped_product(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """TIC-GRPO: `min(Π ρ_t, 1.28) A` for the rollout."""
    return ((new - old).sum().exp().clamp(max=1.28) * a[0])[None]


def weighted_by_clipped_ratio(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """CISPO: `sg(min(ρ, 1.2)) A log π`."""
    return (new - old).exp().clamp(max=1.2).detach() * a * new


def weighted_by_exponential(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """AWR: `min(exp A, 20) log π`."""
    return a.exp().clamp(max=20.0) * new


# Averages


def over_rollouts(parts: list[Tensor], b: Batch) -> Tensor:
    """The sum over a rollout's tokens, then the mean over rollouts."""
    return torch.stack([part.sum() for part in parts]).mean()


def over_tokens_of_a_rollout(parts: list[Tensor], b: Batch) -> Tensor:
    return torch.stack([part.mean() for part in parts]).mean()


def over_tokens_of_the_batch(parts: list[Tensor], b: Batch) -> Tensor:
    return torch.cat(parts).mean()


def over_a_constant(parts: list[Tensor], b: Batch) -> Tensor:
    return torch.cat(parts).sum() / (len(parts) * b.longest)


# Losses


def loss_of(credit: Credit, surrogate: Surrogate, average: Average) -> Loss:
    def loss(b: Batch, new: Tensor, old: Tensor) -> Tensor:
        parts = []
        for i, places in enumerate(b.places):
            a = credit(b, i)
            on_tokens = torch.tensor(a if isinstance(a, list) else [a] * len(places), dtype=torch.float64)
            parts.append(surrogate(new[i, places], old[i, places], on_tokens))
        return -average(parts, b)

    return loss


def log_ratio_to_reference(b: Batch, new: Tensor, i: int) -> Tensor:
    assert b.reference is not None
    return (new[i, b.places[i]] - b.reference[i, b.places[i]]).sum()


def variance_of_regularised_rewards(b: Batch, new: Tensor, old: Tensor) -> Tensor:
    """AGRO: half the variance of `r − β log(π/π_ref)` within a group, mean over groups."""
    v = torch.stack([b.rewards[i] - b.beta * log_ratio_to_reference(b, new, i) for i in range(len(b.rewards))])
    return torch.stack([group.var(correction=1) / 2 for group in v.split(b.group_size)]).mean()


def preference_of_best_over_worst(b: Batch, new: Tensor, old: Tensor) -> Tensor:
    """DPO: `−log σ(β (h_best − h_worst))`, `h = log(π/π_ref)`, mean over groups whose rewards differ."""
    terms = []
    for start in range(0, len(b.rewards), b.group_size):
        best = max(b.group(start), key=lambda j: b.rewards[j])  # of equals the first
        worst = min(b.group(start), key=lambda j: b.rewards[j])
        if b.rewards[best] > b.rewards[worst]:
            margin = log_ratio_to_reference(b, new, best) - log_ratio_to_reference(b, new, worst)
            terms.append(-torch.log(1 / (1 + torch.exp(-b.beta * margin))))
    return torch.stack(terms).mean()


@dataclass(frozen=True)
class Definition:
    """The loss of a method, and the inputs that the trainer hands to it besides the rollouts."""

    loss: Loss
    inputs: tuple[str, ...] = ()
    beta: float = 0.0
    """Strength of the reference, for a loss that compares with it."""
    turns: bool = field(default=False, kw_only=True)
    """Whether its rollouts have several turns."""


PG, CLIP, CLIP_HIGHER = policy_gradient, clipped(0.8, 1.2), clipped(0.8, 1.28)
SUM, PER_ROLLOUT, PER_BATCH = over_rollouts, over_tokens_of_a_rollout, over_tokens_of_the_batch

# Methods with equal lines differ elsewhere: in how a step is sampled (`igrpo`) or in the source of an input (critic or
# running mean, proxy or exact gradients). `dapo` gives 0 to groups of equal rewards, as `standardised` does
# anyway; its refill is in `test_training_draw.py`. With rollouts of one turn, `tl-grpo` has the advantages of `grpo`.
# The rows of `agro` and `dpo` name an estimator that their losses do not read.
DEFINITIONS: dict[str, Definition] = {
    "reinforce": Definition(loss_of(own_reward, PG, SUM)),
    "reinforce-baseline": Definition(loss_of(above_prompt("baselines"), PG, SUM), ("baselines",)),
    "reinforce-critic": Definition(loss_of(above_prompt("baselines"), PG, SUM), ("baselines",)),
    "remax": Definition(loss_of(above_prompt("greedy_rewards"), PG, SUM), ("greedy_rewards",)),
    "grpo-paper": Definition(loss_of(above_mean, PG, SUM)),
    "rloo": Definition(loss_of(above_others, PG, SUM)),
    "grpo": Definition(loss_of(standardised(), CLIP, PER_ROLLOUT)),
    "igrpo": Definition(loss_of(standardised(), CLIP, PER_ROLLOUT)),
    "grpo-trl": Definition(loss_of(standardised(1e-4), CLIP, PER_BATCH)),
    "grpo-verl": Definition(loss_of(standardised(1e-6), clipped(0.8, 1.2, most=3.0), PER_BATCH)),
    "grpo-openrlhf": Definition(loss_of(standardised(1e-9), CLIP, PER_ROLLOUT)),
    "grpo-nemo-rl": Definition(loss_of(standardised_by_others, CLIP, PER_BATCH)),
    "grpo-prime-rl": Definition(loss_of(above_mean, CLIP_HIGHER, PER_BATCH)),
    "dr-grpo": Definition(loss_of(above_mean, CLIP, over_a_constant)),
    "dapo": Definition(loss_of(standardised(), CLIP_HIGHER, PER_BATCH)),
    "gspo": Definition(loss_of(standardised(), clipped_geometric_mean, SUM)),
    "cispo": Definition(loss_of(standardised(), weighted_by_clipped_ratio, PER_BATCH)),
    "tic": Definition(loss_of(above_others, clipped_product, SUM)),
    "tic-length": Definition(loss_of(standardised_per_token, clipped_product, SUM)),
    "awr": Definition(loss_of(standardised(), weighted_by_exponential, SUM)),
    "agro": Definition(variance_of_regularised_rewards, beta=0.3),
    "dpo": Definition(preference_of_best_over_worst, beta=0.3),
    "opo": Definition(loss_of(above_weighted(Batch.length, own=True), PG, SUM)),
    "opo-loo": Definition(loss_of(above_weighted(Batch.length, own=False), PG, SUM)),
    "optimal": Definition(loss_of(above_weighted(energy, own=True), PG, SUM)),
    "optimal-loo": Definition(loss_of(above_weighted(energy, own=False), PG, SUM)),
    "pass-at-k": Definition(loss_of(adds_to_best, PG, SUM), ("best_of",)),
    "reinforce++": Definition(loss_of(whitened(centred=False), CLIP, PER_BATCH)),
    "reinforce++-baseline": Definition(loss_of(whitened(centred=True), CLIP, PER_BATCH)),
    "salt": Definition(loss_of(outside_shared_directions(exact=False), CLIP, PER_ROLLOUT), ("score_grams",)),
    "salt-exact": Definition(loss_of(outside_shared_directions(exact=True), CLIP, PER_ROLLOUT)),
    "g2rl": Definition(loss_of(scaled_by_novelty(exact=False), CLIP, PER_ROLLOUT), ("score_grams",)),
    "g2rl-exact": Definition(loss_of(scaled_by_novelty(exact=True), CLIP, PER_ROLLOUT)),
    "ppo": Definition(loss_of(generalised(0.95), CLIP, PER_BATCH), ("values",)),
    "ppo-whitened": Definition(loss_of(whitened_over_tokens(generalised(0.95)), CLIP, PER_BATCH), ("values",)),
    "ppo-monte-carlo": Definition(loss_of(generalised(1.0), CLIP, PER_BATCH), ("values",)),
    "grpo-process": Definition(loss_of(process_rewards, CLIP, PER_ROLLOUT), ("step_ends", "token_rewards")),
    "vineppo": Definition(loss_of(segment_gains, CLIP, PER_ROLLOUT), ("prefix_values", "segment_starts")),
    "optimal-token": Definition(loss_of(above_paths(own=True), PG, SUM), ("path_energies",)),
    "optimal-token-exact": Definition(loss_of(above_paths(own=True), PG, SUM), ("path_energies",)),
    "optimal-token-loo": Definition(loss_of(above_paths(own=False), PG, SUM), ("path_energies",)),
    "delta": Definition(loss_of(discriminative, CLIP_HIGHER, PER_BATCH), ("token_features",)),
    "delta-exact": Definition(loss_of(discriminative, CLIP_HIGHER, PER_BATCH), ("token_features",)),
    "turn-mean": Definition(loss_of(by_turn(turn_above_mean), PG, SUM), turns=True),
    "turn-rloo": Definition(loss_of(by_turn(turn_above_others), PG, SUM), turns=True),
    "mt-grpo": Definition(loss_of(by_turn(turn_and_outcome), CLIP, PER_ROLLOUT), turns=True),
    "gigpo": Definition(loss_of(by_turn(episode_and_state), CLIP, PER_ROLLOUT), turns=True),
    "tl-grpo": Definition(loss_of(by_turn(candidates_for_turn), CLIP, PER_ROLLOUT), turns=True),
}
