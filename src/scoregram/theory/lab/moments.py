"""Expected update, bias, variance and error of every group estimator, at every group size, by enumeration.

The update of one group is `ĝ = (1/R) Σ_i A_i ψ_i`. An estimator reads rewards and perhaps lengths or score energies,
never the scores themselves. Rollouts with the same inputs are of one *type* and get the same advantage. Given the
types of a group its scores are independent, hence with `μ_τ = E[ψ | τ]` and `e_τ = E[|ψ - μ_τ|² | τ]`

    E[ĝ | types]      = (1/R)  Σ_i A_i  μ_τ(i)
    tr Cov[ĝ | types] = (1/R²) Σ_i A_i² e_τ(i)

and the rest is a finite sum over multisets of types. With one type per rollout this enumerates all groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations_with_replacement
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from scoregram.checks import fail, listed, require_finite
from scoregram.theory.lab.exact import GroundTruth

AdvantageFunction = Callable[..., Tensor]

PAIRS_AT_ONCE = 2_000_000
"""Pairs of rollouts held in memory at a time."""

GROUPS_LIMIT = 200_000
"""Largest number of multisets that are enumerated by default."""


@dataclass(frozen=True)
class Multisets:
    """The `C = (K+R-1 choose R)` ways to draw `R` times from `K` types, in any order."""

    members: Int[Tensor, "multisets rollouts"]
    """Type of every member, ascending."""
    counts: Int[Tensor, "multisets types"]
    """How often each type is drawn."""
    orders: Float[Tensor, " multisets"]
    """`R! / Π n_τ!`, the number of ordered groups that are this multiset."""

    def probability(self, of_type: Float[Tensor, " types"]) -> Float[Tensor, " multisets"]:
        """Multinomial probability of each multiset when types are drawn independently; sums to one."""
        return self.orders * of_type.pow(self.counts).prod(dim=-1)


@lru_cache(maxsize=16)
def multisets(types: int, group_size: int, *, limit: int = GROUPS_LIMIT) -> Multisets:
    """Every multiset of `group_size` out of `types`.

    Raises:
        ScoregramError: If there are more than `limit`, or one of the two numbers is not positive.

    Example:
        >>> multisets(2, 2).counts.tolist(), multisets(2, 2).orders.tolist()
        ([[2, 0], [1, 1], [0, 2]], [1.0, 2.0, 1.0])
    """
    if min(types, group_size) < 1:
        fail("multisets", "types and group size must be positive", (types, group_size), "Pass at least one of each.")
    number = math.comb(types + group_size - 1, group_size)
    if number > limit:
        got = f"{number} groups of {group_size} rollouts of {types} types"
        fail("multisets", f"at most {limit} groups are enumerated", got, "Use a smaller group or world.")
    flat = chain.from_iterable(combinations_with_replacement(range(types), group_size))
    members = torch.from_numpy(np.fromiter(flat, dtype=np.int64, count=number * group_size).reshape(number, group_size))
    counts = torch.zeros(number, types, dtype=torch.int64).scatter_add(1, members, torch.ones_like(members))
    # Each factorial is rounded once, so the multinomial is exact to a few ulp; logarithms would lose three digits.
    factorial = torch.tensor([float(math.factorial(n)) for n in range(group_size + 1)], dtype=torch.float64)
    orders = torch.full((number,), factorial[-1].item(), dtype=torch.float64)
    for column in counts.T:
        orders = orders / factorial[column]
    return Multisets(members, counts, orders)


@dataclass(frozen=True)
class UpdateMoments:
    """First two moments of an update, and the gradient it estimates."""

    expected: Float[Tensor, " parameters"]
    """`E ĝ`."""
    target: Float[Tensor, " parameters"]
    """The gradient."""
    variance: float
    """`E|ĝ - E ĝ|²`, the trace of the covariance."""

    @property
    def bias(self) -> Float[Tensor, " parameters"]:
        """`E ĝ` minus the gradient."""
        return self.expected - self.target

    @property
    def relative_bias(self) -> float:
        """`|bias| / |gradient|`; `nan` where the gradient is zero."""
        return _ratio(float(self.bias.norm()), float(self.target.norm()))

    @property
    def mse(self) -> float:
        """`E|ĝ - gradient|² = |bias|² + variance`."""
        return float(self.bias.square().sum()) + self.variance

    @property
    def snr_squared(self) -> float:
        """`|E ĝ|² / variance`, independent of scale; `inf` without noise, `nan` with neither noise nor signal."""
        signal = float(self.expected.square().sum())
        if self.variance == 0:
            return math.inf if signal > 0 else math.nan
        return signal / self.variance

    @property
    def cosine(self) -> float:
        """Cosine between `E ĝ` and the gradient: `1` same direction; `nan` if one of them is zero."""
        return _ratio(float(self.expected @ self.target), float(self.expected.norm() * self.target.norm()))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


@dataclass(frozen=True)
class GroupTable:
    """Every possible group of one prompt, with its probability and advantages."""

    type_of: Tensor
    """`(M',)` type of every rollout of the prompt."""
    type_probability: Float[Tensor, " types"]
    probability: Float[Tensor, " groups"]
    summed: Float[Tensor, "groups types"]
    """`Σ_{i of type τ} A_i`."""
    summed_squares: Float[Tensor, "groups types"]
    """`Σ_{i of type τ} A_i²`."""


ROLLOUT_INPUTS: MappingProxyType[str, Callable[[GroundTruth], Tensor]] = MappingProxyType(
    {
        "lengths": lambda truth: truth.listing.lengths,
        "score_energies": lambda truth: truth.score_energies,
        "outcomes": lambda truth: truth.listing.returns,
    }
)
"""Inputs of an estimator besides the rewards, one number per rollout. Rollouts of one type have equal inputs."""


def group_update_moments(
    truth: GroundTruth,
    advantage: AdvantageFunction,
    *,
    prompt: int,
    group_size: int,
    needs: tuple[str, ...] = (),
    couples_prompts: bool = False,
) -> UpdateMoments:
    """Moments of `ĝ = (1/R) Σ_i A_i ψ_i` for one prompt, exact.

    Args:
        truth: The world and the policy.
        advantage: Maps `(P, R)` rewards, and the needs as keyword arguments, to `(P, R)` advantages. Equal rollouts
            must get equal advantages, in any order.
        prompt: Row of `truth.gradient` to compare with.
        group_size: `R`.
        needs: Names among `lengths`, `score_energies`, `outcomes` (one per rollout; the outcome is the return),
            `score_grams`, `baselines` (the prompt's exact value), `best_of` (2) and `greedy_rewards` (the return of one
            more rollout that takes the likeliest action everywhere; if outcomes are random, so is this return).
        couples_prompts: Whether `advantage` mixes prompts. If so it gets one group at a time, and the result is that
            of a batch with a single prompt.

    Raises:
        ScoregramError: If there are too many groups to enumerate, a need is unknown, or advantages are not finite.
    """
    table = group_table(
        truth, advantage, prompt=prompt, group_size=group_size, needs=needs, couples_prompts=couples_prompts
    )
    rows = truth.listing.of_prompt(prompt)
    within = truth.probability[rows] / table.type_probability[table.type_of]  # given the type
    types = table.type_probability.numel()
    scores = truth.scores[rows]
    centre = _gathered(scores * within[:, None], table.type_of, types)  # (K, D): μ_τ
    spread = _gathered(within * (scores - centre[table.type_of]).square().sum(dim=-1), table.type_of, types)  # e_τ
    given_types = table.summed @ centre / group_size  # (C, D)
    noise = table.summed_squares @ spread / group_size**2  # (C,)
    expected = table.probability @ given_types
    between = (given_types - expected).square().sum(dim=-1)
    return UpdateMoments(expected, truth.gradient[prompt], float(table.probability @ (noise + between)))


def expected_advantages(
    truth: GroundTruth,
    advantage: AdvantageFunction,
    *,
    prompt: int,
    group_size: int,
) -> Float[Tensor, " chosen"]:
    """`E[A_i | rollout i]` for every rollout of the prompt: the advantage averaged over the rest of the group.

    By symmetry `E[A_i | τ_i = τ] = E[Σ_{j of type τ} A_j] / (R p_τ)`. Arguments as in `group_update_moments`;
    `advantage` takes the rewards alone.
    """
    table = group_table(truth, advantage, prompt=prompt, group_size=group_size)
    by_type = (table.probability @ table.summed) / (group_size * table.type_probability)  # (K,)
    return by_type[table.type_of]


def group_table(
    truth: GroundTruth,
    advantage: AdvantageFunction,
    *,
    prompt: int,
    group_size: int,
    needs: tuple[str, ...] = (),
    couples_prompts: bool = False,
) -> GroupTable:
    """Every group of types with its probability and advantages. Arguments as in `group_update_moments`."""
    _require_known_needs(needs)
    rows = truth.listing.of_prompt(prompt)
    split_by = {name: ROLLOUT_INPUTS[name](truth)[rows] for name in needs if name in ROLLOUT_INPUTS}
    seen = torch.stack([truth.listing.returns[rows], *(values.double() for values in split_by.values())], dim=-1)
    if "score_grams" in needs:  # a type is then one score
        seen = torch.cat([seen, truth.scores[rows]], dim=-1)
    kinds, type_of = seen.unique(dim=0, return_inverse=True)  # (K, 1 + needs)
    type_probability = _gathered(truth.probability[rows], type_of, len(kinds))
    groups = multisets(len(kinds), group_size)
    rewards = kinds[:, 0][groups.members]  # (C, R)
    inputs = {name: kinds[:, k + 1][groups.members].to(split_by[name].dtype) for k, name in enumerate(split_by)}
    if "score_grams" in needs:
        scores = kinds[:, 1 + len(split_by) :][groups.members]  # (C, R, D)
        inputs["score_grams"] = scores @ scores.mT
    chances, shared = _shared_inputs(truth, prompt, needs, len(rewards))
    parts = [in_blocks(advantage, rewards, inputs | extra, one_by_one=couples_prompts) for extra in shared]
    for part in parts:
        require_finite(part, name="advantages", caller="group_update_moments")
    probability = groups.probability(type_probability)
    return GroupTable(
        type_of=type_of,
        type_probability=type_probability,
        probability=torch.cat([chance * probability for chance in chances]),
        summed=torch.cat([_by_type(part, groups.members, len(kinds)) for part in parts]),
        summed_squares=torch.cat([_by_type(part.square(), groups.members, len(kinds)) for part in parts]),
    )


def across_prompts(truth: GroundTruth, per_prompt: Sequence[UpdateMoments], *, prompts: int) -> UpdateMoments:
    """Moments of the mean update of a batch of `prompts` groups, with prompts drawn by their weights.

    `Var = (E_x Var[ĝ | x] + E_x|E[ĝ | x] - E ĝ|²) / prompts`; the target is `∇J`.

    Args:
        truth: The world and the policy.
        per_prompt: Moments of one group of every prompt, in order.
        prompts: Number of groups in the batch.
    """
    if len(per_prompt) != truth.value.numel() or prompts < 1:
        got = f"{len(per_prompt)} for {truth.value.numel()} prompts, and a batch of {prompts}"
        fail("across_prompts", "needs moments of every prompt and a positive batch", got, "Pass one for each prompt.")
    weights = truth.listing.prompt_weights
    means = torch.stack([moments.expected for moments in per_prompt])  # (P, D)
    expected = weights @ means
    within = weights @ torch.tensor([moments.variance for moments in per_prompt], dtype=torch.float64)
    between = weights @ (means - expected).square().sum(dim=-1)
    return UpdateMoments(expected, truth.objective_gradient, float(within + between) / prompts)


def greedy_returns(truth: GroundTruth, prompt: int) -> tuple[Float[Tensor, " values"], Float[Tensor, " values"]]:
    """Returns of the rollouts that take the likeliest action everywhere, and their probabilities."""
    listing, rows = truth.listing, truth.listing.of_prompt(prompt)
    likeliest = truth.log_probs.argmax(dim=-1)[listing.state[rows]] == listing.action[rows]  # (M', H)
    greedy = rows[(likeliest | ~listing.mask[rows]).all(dim=-1)]
    values, which = listing.returns[greedy].unique(return_inverse=True)
    return values, _gathered(listing.chance[greedy], which, len(values))


def _require_known_needs(needs: tuple[str, ...]) -> None:
    known = (*ROLLOUT_INPUTS, "score_grams", "greedy_rewards", "baselines", "best_of")
    for name in needs:
        if name not in known:
            requirement = f"needs must be among {listed(known)}"
            fail("group_update_moments", requirement, repr(name), "The lab cannot supply others.")


def _shared_inputs(
    truth: GroundTruth, prompt: int, needs: tuple[str, ...], groups: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Inputs that a group shares: the probability of each case, and its keyword arguments."""
    every = {"baselines": truth.value[prompt].expand(groups), "best_of": torch.full((groups,), 2)}
    fixed = {name: value for name, value in every.items() if name in needs}
    if "greedy_rewards" not in needs:
        return [1.0], [fixed]
    values, chances = greedy_returns(truth, prompt)
    return chances.tolist(), [fixed | {"greedy_rewards": value.expand(groups)} for value in values]


def in_blocks(
    advantage: AdvantageFunction, rewards: Tensor, inputs: dict[str, Tensor], *, one_by_one: bool = False
) -> Tensor:
    """`advantage` of every group, a few groups at a time: estimators may compare all pairs of a group."""
    block = 1 if one_by_one else max(1, PAIRS_AT_ONCE // rewards[0].numel() ** 2)
    parts = [
        advantage(rewards[start : start + block], **{name: x[start : start + block] for name, x in inputs.items()})
        for start in range(0, len(rewards), block)
    ]
    return torch.cat(parts).double()


def _by_type(values: Tensor, members: Tensor, types: int) -> Tensor:
    return torch.zeros(len(values), types, dtype=torch.float64).scatter_add(1, members, values)  # (C, K)


def _gathered(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, *values.shape[1:], dtype=torch.float64).index_add(0, group, values)
