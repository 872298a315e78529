"""One table: which estimator has the least error at a rollout budget, and what each costs in rollouts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scoregram.advantages import ALWAYS, ESTIMATORS
from scoregram.checks import ScoregramError, fail, lookup
from scoregram.theory.lab.exact import GroundTruth
from scoregram.theory.lab.moments import UpdateMoments, across_prompts, group_moments
from scoregram.theory.lab.turns import CREDITS, credit_moments, prefix_value_moments, turn_moments

PREFIX_VALUES = "vineppo"
"""The estimator that pays for values with fresh rollouts from every state."""

OTHER_SAMPLING = ("same-state",)
"""Estimators whose groups are not groups of rollouts, so the budget here does not describe them."""

STEP_GROUPS_LIMIT = 10_000
"""Most groups of a prompt enumerated for an estimator that credits turns or tokens: those are slow to call."""

BESIDE_THE_TABLE = ("reward_to_go", "exact_advantage")
"""Credits of the lab that the table of estimators does not have."""

EXACT_INPUTS = frozenset({"values", "prefix_values", "baselines"})
"""Inputs that the lab supplies exactly and a trainer would have to learn or to sample."""


@dataclass(frozen=True)
class Row:
    """One estimator at one budget, exact. The batch holds `prompts` groups, their prompts drawn by weight."""

    estimator: str
    group_size: int
    prompts: int
    rollouts: float
    """Expected number of rollouts the batch takes, those for baselines and values included."""
    relative_bias: float
    variance: float
    mse: float
    snr_squared: float
    """`|E ĝ|² / variance`. Unlike the error it does not reward a small step."""
    cosine: float
    """Between the expected update and `∇J`."""
    given_values: bool
    """Whether it was given exact values, which no trainer has."""


@dataclass(frozen=True)
class Comparison:
    """Rows of least error first, and what had to be left out."""

    budget: int
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    """Estimator and reason."""

    @property
    def least_error(self) -> Row:
        """The row of least mean squared error among those a trainer can have."""
        return min(self._attainable, key=lambda row: row.mse)

    @property
    def highest_snr(self) -> Row:
        """The row of highest signal to noise among those a trainer can have; blind to the scale of the update."""
        return max(self._attainable, key=lambda row: row.snr_squared)

    @property
    def _attainable(self) -> list[Row]:
        rows = [row for row in self.rows if not row.given_values]
        if not rows:
            fail("Comparison", "needs a row without exact values", len(self.rows), "Compare more estimators.")
        return rows


def comparison(
    truth: GroundTruth,
    *,
    budget: int,
    group_size: int = 4,
    estimators: Iterable[str] | None = None,
    rollouts_per_state: int = 2,
    step_groups_limit: int = STEP_GROUPS_LIMIT,
) -> Comparison:
    """Every estimator's exact error when a step may take `budget` rollouts in groups of `group_size`.

    The batch has as many groups as the budget pays for: a group costs `R` rollouts, one more for a greedy baseline,
    and `rollouts_per_state` more for each state met when values are sampled. An estimator too dear for the budget, or
    with too many groups to enumerate, is left out, and said to be. One that couples prompts is computed as if every
    group were a batch of its own. One that selects groups is shown without selection: what it would drop is an update
    of zero.

    Args:
        truth: The world and the policy.
        budget: Rollouts per step.
        group_size: `R`.
        estimators: Names; `None` for all of the table and two credits of the lab.
        rollouts_per_state: `K` of the Monte-Carlo prefix values.
        step_groups_limit: As in `moments_of`.

    Raises:
        ScoregramError: If a name is unknown, or every estimator had to be left out; the error is the first reason.
    """
    names = [*ESTIMATORS, *BESIDE_THE_TABLE] if estimators is None else list(estimators)
    rows, left_out = [], []
    for name in names:
        cost = rollouts_of_group(truth, name, group_size=group_size, rollouts_per_state=rollouts_per_state)
        prompts = math.floor(budget / cost)
        try:
            _require_a_group(prompts, name, cost=cost, budget=budget)
            moments = moments_of(
                truth,
                name,
                group_size=group_size,
                rollouts_per_state=rollouts_per_state,
                step_groups_limit=step_groups_limit,
            )
        except ScoregramError as error:
            left_out.append((name, str(error)))
            continue
        rows.append(_row(name, group_size, prompts, prompts * cost, across_prompts(truth, moments, prompts=prompts)))
    if not rows:
        raise ScoregramError(left_out[0][1])
    return Comparison(budget, tuple(sorted(rows, key=lambda row: row.mse)), tuple(left_out))


def rollouts_of_group(truth: GroundTruth, name: str, *, group_size: int, rollouts_per_state: int = 2) -> float:
    """Expected rollouts that one group takes, over prompts: `R`, `R + 1`, or `R (1 + K E[H])`."""
    if name == PREFIX_VALUES:
        weight = truth.listing.prompt_weights[truth.listing.prompt] * truth.probability
        decisions = float(weight @ truth.listing.lengths.double())
        return group_size * (1 + rollouts_per_state * decisions)
    if name in CREDITS:
        return float(group_size)
    return float(group_size + ("greedy_rewards" in lookup(ESTIMATORS, name, kind="comparison").needs))


def moments_of(
    truth: GroundTruth,
    name: str,
    *,
    group_size: int,
    rollouts_per_state: int = 2,
    step_groups_limit: int = STEP_GROUPS_LIMIT,
) -> tuple[UpdateMoments, ...]:
    """Exact moments of one group of every prompt, for an estimator of the table or a credit of the lab.

    Args:
        truth: The world and the policy.
        name: Key of `ESTIMATORS` or of `CREDITS`.
        group_size: `R`.
        rollouts_per_state: `K` of the Monte-Carlo prefix values.
        step_groups_limit: Most groups of a prompt to enumerate for an estimator that credits turns or tokens.

    Raises:
        ScoregramError: If the name is unknown, its groups are not groups of rollouts, or there are too many of them.
    """
    if name in OTHER_SAMPLING:
        fail("moments_of", "groups must be rollouts of one prompt", name, "It compares candidates of one turn.")
    every = range(truth.value.numel())
    if name in CREDITS:
        credit = CREDITS[name].fn(truth)
        return tuple(credit_moments(truth, credit, prompt=p, group_size=group_size) for p in every)
    if name == PREFIX_VALUES:
        return tuple(
            prefix_value_moments(truth, prompt=p, group_size=group_size, rollouts_per_state=rollouts_per_state)
            for p in every
        )
    row = lookup(ESTIMATORS, name, kind="moments_of")
    needs = (*row.needs, *ALWAYS[row.level])
    if row.level == "group":
        options = {"group_size": group_size, "needs": needs, "couples_prompts": row.couples_prompts}
        return tuple(group_moments(truth, row.fn, prompt=p, **options) for p in every)
    if row.min_group == 1:
        # Credit inside a rollout that works on a single one does not look at the others: their updates are independent.
        single = [turn_moments(truth, row.fn, prompt=p, group_size=1, needs=needs) for p in every]
        return tuple(replace(moments, variance=moments.variance / group_size) for moments in single)
    steps = {"group_size": group_size, "needs": needs, "groups_limit": step_groups_limit}
    return tuple(turn_moments(truth, row.fn, prompt=p, **steps) for p in every)


def _require_a_group(prompts: int, name: str, *, cost: float, budget: int) -> None:
    if prompts < 1:
        fail("comparison", f"the budget must pay for one group of {name}, {cost:g} rollouts", budget, "Raise it.")


def _row(name: str, group_size: int, prompts: int, rollouts: float, moments: UpdateMoments) -> Row:
    return Row(
        estimator=name,
        group_size=group_size,
        prompts=prompts,
        rollouts=rollouts,
        relative_bias=moments.relative_bias,
        variance=moments.variance,
        mse=moments.mse,
        snr_squared=moments.snr_squared,
        cosine=moments.cosine,
        given_values=_given_values(name),
    )


def _given_values(name: str) -> bool:
    if name in CREDITS:
        return CREDITS[name].needs_values
    return name != PREFIX_VALUES and not EXACT_INPUTS.isdisjoint(ESTIMATORS[name].needs)
