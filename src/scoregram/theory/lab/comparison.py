"""Comparison of estimators: the exact error of each at one rollout budget, and what each costs in rollouts."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scoregram import __version__
from scoregram.advantages import ESTIMATORS, LEVEL_INPUTS
from scoregram.checks import ScoregramError, fail, lookup
from scoregram.exhibits import json_value
from scoregram.machine import threads
from scoregram.theory.lab.exact import GroundTruth, ground_truth
from scoregram.theory.lab.moments import UpdateMoments, across_prompts, group_update_moments
from scoregram.theory.lab.turns import CREDITS, credit_moments, prefix_value_moments, turn_moments
from scoregram.theory.lab.worlds import WORLDS, listing, network_policy

PREFIX_VALUES = "vineppo"
"""The estimator whose values cost fresh rollouts from every state."""

OTHER_SAMPLING = ("same-state",)
"""Estimators that compare candidates of one turn instead of rollouts, so the budget does not apply to them."""

STEP_GROUPS_LIMIT = 10_000
"""Largest number of groups per prompt to enumerate for an estimator of turns or tokens, which is slow to call."""

EXTRA_CREDITS = ("reward_to_go", "exact_advantage")
"""Credits of the lab that are not in the table of estimators."""

EXACT_INPUTS = frozenset({"values", "prefix_values", "baselines"})
"""Inputs that the lab supplies exactly and that a trainer would have to learn or sample."""


@dataclass(frozen=True)
class ComparisonRow:
    """Exact moments of one estimator at one budget. The batch has `prompts` groups, with prompts drawn by weight."""

    estimator: str
    group_size: int
    prompts: int
    rollouts: float
    """Expected number of rollouts in the batch, including those for baselines and values."""
    relative_bias: float
    variance: float
    mse: float
    snr_squared: float
    """`|E ĝ|² / variance`. Unlike the error, it does not improve if the step is shrunk."""
    cosine: float
    """Between the expected update and `∇J`."""
    given_values: bool
    """Whether it was given exact values, which no trainer has."""


@dataclass(frozen=True)
class Comparison:
    """Rows with the least error first, and the estimators that were left out."""

    budget: int
    rows: tuple[ComparisonRow, ...]
    left_out: tuple[tuple[str, str], ...]
    """Estimator and reason."""

    @property
    def least_error(self) -> ComparisonRow:
        """The row of least mean squared error among the estimators that a trainer can use."""
        return min(self._attainable, key=lambda row: row.mse)

    @property
    def highest_snr(self) -> ComparisonRow:
        """The row of highest signal-to-noise ratio among the estimators that a trainer can use."""
        return max(self._attainable, key=lambda row: row.snr_squared)

    @property
    def _attainable(self) -> list[ComparisonRow]:
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
    """Exact error of every estimator for a step of `budget` rollouts in groups of `group_size`.

    The batch has as many groups as the budget allows: a group costs `R` rollouts, one more for a greedy baseline, and
    `rollouts_per_state` more for each visited state if values are sampled. An estimator that exceeds the budget, or
    has too many groups to enumerate, goes to `left_out` with the reason. If an estimator couples prompts, every group
    counts as a batch of its own. If it filters groups, the lab keeps them all: a filtered group has an update of zero.

    Args:
        truth: The world and the policy.
        budget: Rollouts per step.
        group_size: `R`.
        estimators: Names; `None` for the whole table and two credits of the lab.
        rollouts_per_state: `K` of the Monte-Carlo prefix values.
        step_groups_limit: Largest number of groups per prompt to enumerate for an estimator of turns or tokens.

    Raises:
        ScoregramError: If a name is unknown, or every estimator was left out; the error is the first reason.
    """
    names = [*ESTIMATORS, *EXTRA_CREDITS] if estimators is None else list(estimators)
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
    """Expected number of rollouts of one group, over prompts: `R`, `R + 1`, or `R (1 + K E[H])`."""
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

    Args as in `comparison`; `name` is a key of `ESTIMATORS` or of `CREDITS`.

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
    needs = (*row.needs, *LEVEL_INPUTS[row.level])
    if row.level == "group":
        options = {"group_size": group_size, "needs": needs, "couples_prompts": row.couples_prompts}
        return tuple(group_update_moments(truth, row.fn, prompt=p, **options) for p in every)
    if row.min_group == 1 and not row.couples_prompts:
        # An estimator that accepts a single rollout does not use the others: the rollouts' updates are independent.
        single = [turn_moments(truth, row.fn, prompt=p, group_size=1, needs=needs) for p in every]
        return tuple(replace(moments, variance=moments.variance / group_size) for moments in single)
    coupled = {"couples_prompts": row.couples_prompts, "groups_limit": step_groups_limit}
    steps = {"group_size": group_size, "needs": needs, **coupled}
    return tuple(turn_moments(truth, row.fn, prompt=p, **steps) for p in every)


def _require_a_group(prompts: int, name: str, *, cost: float, budget: int) -> None:
    if prompts < 1:
        fail("comparison", f"the budget must cover one group of {name}, {cost:g} rollouts", budget, "Raise it.")


def _row(name: str, group_size: int, prompts: int, rollouts: float, moments: UpdateMoments) -> ComparisonRow:
    return ComparisonRow(
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


READING = (
    "Exact, nothing sampled. rollouts: number the step takes, including those for baselines and values. bias: "
    "|E ĝ - ∇J| / |∇J|. error: √E|ĝ - ∇J|² / |∇J|, bias and noise together; it falls if the update is shrunk, so an "
    "estimator that only shrinks the update can win. SNR: |E ĝ|² over the variance, independent of the length of the "
    "step. cosine: between E ĝ and ∇J; below 1 the mean update has another direction. ★ least error, ☆ highest SNR, "
    "both among the estimators that a trainer can use; ° uses exact values, which no trainer has."
)


def show_comparison(*, world: str, budget: int, group_size: int, as_json: bool = False) -> int:
    """Print every estimator's exact error in one world at one rollout budget, least error first.

    The policy is the lab's small network with fixed random weights.

    Raises:
        ScoregramError: If the world is unknown or the budget is too small for one group.
    """
    rows = listing(lookup(WORLDS, world, kind="lab"))
    if group_size < 1:
        fail("lab", "a group must have at least 1 rollout", group_size, "Raise --group-size.")
    with threads(1):
        truth = ground_truth(rows, network_policy(rows, generator=torch.Generator().manual_seed(0)))
        found = comparison(truth, budget=budget, group_size=group_size)
    if as_json:
        print(json.dumps(comparison_record(world, truth, found), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        print_comparison(world, truth, found, Console())
    return 0


def comparison_record(world: str, truth: GroundTruth, found: Comparison) -> dict[str, object]:
    """The comparison as JSON values; a number that is not finite becomes null."""
    return {
        "scoregram": __version__,
        "world": world,
        "budget": found.budget,
        "objective": truth.objective,
        "gradient_norm": float(truth.objective_gradient.norm()),
        "least_error": found.least_error.estimator,
        "highest_snr": found.highest_snr.estimator,
        "rows": [json_value(asdict(row)) for row in found.rows],
        "left_out": dict(found.left_out),
    }


def print_comparison(world: str, truth: GroundTruth, found: Comparison, console: Console) -> None:
    """Print one row per estimator, then those that were left out and why."""
    group_size = found.rows[0].group_size
    title = f"{world}: a step of at most {found.budget} rollouts in groups of {group_size}"
    table = Table(title=Text(title), caption=Text(READING), title_justify="left", caption_justify="left")
    table.add_column("estimator", no_wrap=True)
    for name in ("groups", "rollouts", "bias", "error", "SNR", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = float(truth.objective_gradient.norm())
    for row in found.rows:
        error = math.sqrt(row.mse) / unit
        numbers = (row.relative_bias, error, row.snr_squared, row.cosine)
        cells = (str(row.prompts), f"{row.rollouts:.4g}", *(f"{number:.3f}" for number in numbers))
        table.add_row(marked_name(row, found), *cells, style="dim" if row.given_values else "")
    console.print(table)
    for name, reason in found.left_out:
        console.print(Text(f"left out: {name} ({reason})", style="dim"))


def marked_name(row: ComparisonRow, found: Comparison) -> Text:
    """Name of an estimator with its marks."""
    marks = "★" * (row == found.least_error) + "☆" * (row == found.highest_snr) + "°" * row.given_values
    return Text(f"{row.estimator} {marks}".strip())
