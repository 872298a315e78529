"""What the next step gets: which prompts, how many rollouts of each, and which weight.

All decisions use earlier steps only, never the rollouts that they are about: a size that follows the rewards of its
own group would bias leave-one-out gradients. Their state is part of a checkpoint.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from scoregram.checks import fail
from scoregram.reading import (
    GROUP_SIZE,
    GROUP_SIZE_WINDOW,
    OF_PROMPTS,
    Step,
    group_size_scalars,
    noise_scalars,
    replayed_components,
    replayed_scalars,
)
from scoregram.runs import GroupRecord
from scoregram.statistics import (
    GroupMoments,
    GroupSizeAdvice,
    NoiseComponents,
    PromptEstimates,
    allocated_rollouts,
    allocation_error,
    components_of_estimates,
    group_moments,
    inclusion_probabilities,
    recommend_group_size,
    shrunk_weights,
    systematic_draw,
    unequal_prompt_estimates,
)
from scoregram.tasks import Problem
from scoregram.training.collect import seeded_generator
from scoregram.training.config import SMALLEST_MEASURED_GROUP, TrainConfig
from scoregram.training.credit import PROMPT_WEIGHTS

DECIDE_EVERY = 10
"""Steps between two decisions about the group size."""
PRIOR_ROLLOUTS = 8.0
"""Rollouts that the mean over all prompts counts for, in the predicted noise of one prompt."""
VISIT_DECAY = 0.5
"""Factor by which the earlier visits of a prompt count less at each new visit: the policy has changed since."""
POPULATION_DECAY = 0.95
"""The same per step, for the mean over all prompts."""


DRAW_REMARK = (
    "Prompts were drawn by their measured gradients, not evenly: means over groups are those of the prompts that were "
    "drawn, and noise, signal and best group size are not given."
)
"""What a reader of a run with `--draw measured` must know."""


def group_size_choices(batch_size: int, rollouts_per_pass: int = 0) -> tuple[int, ...]:
    """Group sizes between which `--group-size auto` moves: powers of 2 from 4 that divide a step and a pass.

    A pass holds at least two groups: the difference between prompts is measured within a pass.

    Example:
        >>> group_size_choices(96), group_size_choices(96, rollouts_per_pass=32)
        ((4, 8, 16, 32), (4, 8, 16))
    """
    one_pass = rollouts_per_pass or batch_size
    sizes = [2**power for power in range(2, 11)]
    return tuple(size for size in sizes if batch_size % size == one_pass % size == 0 and one_pass >= 2 * size)


@dataclass
class GroupSizeControl:
    """A group size that moves one choice at a time when the noise of recent steps clearly favours another."""

    choices: Sequence[int]
    seed: int
    group_size: int
    window: deque[NoiseComponents] = field(default_factory=lambda: deque(maxlen=GROUP_SIZE_WINDOW))
    since: int = 0
    """Measured steps since the last decision."""

    def learn(self, number: int, components: NoiseComponents | None) -> GroupSizeAdvice | None:
        """The decision after step `number`, if one is due; `components` is None for a step that was not measured."""
        if components is None:
            return None
        self.window.append(components)
        self.since += 1
        if self.since < DECIDE_EVERY:
            return None
        self.since = 0
        advice = self.advice(number)
        self.group_size = advice.recommended
        return advice

    def advice(self, number: int) -> GroupSizeAdvice:
        """What the noise of the recent steps recommends after step `number`; the size does not move."""
        stream = seeded_generator(self.seed, "control", number)
        return recommend_group_size(list(self.window), self.group_size, self.choices, generator=stream)

    def state(self) -> dict[str, Any]:
        """Group size, position and the noise of recent steps."""
        rows = [astuple(one) for one in self.window]
        return {"group_size": self.group_size, "since": self.since, "window": torch.tensor(rows, dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        self.group_size, self.since = int(state["group_size"]), int(state["since"])
        self.window.clear()
        self.window.extend(NoiseComponents(*row) for row in state["window"].tolist())


@dataclass
class NoiseLedger:
    """What was measured of every prompt at its earlier visits, shrunk towards the mean over all prompts.

    The prediction of a quantity is `(n₀ v̄ + Σ_visits w v̂) / (n₀ + Σ w)`: `v̂` the unbiased estimate of a visit, `w` its
    rollouts, halved at each later visit, and `v̄` the mean over the prompts of recent steps. There a prompt counts once,
    however many rollouts it got, or by its weight if it was drawn with a probability of its own. A prompt without
    visits is predicted at the mean.
    """

    quantities: int = 2
    """`tr Σ_oracle` and `σ² tr F + |g|²`, which are noise; the third is the signal `|g|²`."""
    visits: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Prompt → weight, and the weighted sum of each quantity."""
    population: tuple[float, ...] = ()
    """The same for all prompts, discounted step by step; empty before the first."""

    def predicted(self, names: Sequence[str]) -> torch.Tensor:
        """`(quantities, P)` predictions, not negative; ones before the first step."""
        if not self.population:
            return torch.ones(self.quantities, len(names), dtype=torch.float64)
        weight, *sums = self.population
        mean = torch.tensor(sums, dtype=torch.float64)[:, None] / weight  # (quantities, 1)
        unknown = (0.0,) * (1 + self.quantities)
        known = torch.tensor([self.visits.get(name, unknown) for name in names], dtype=torch.float64).mT
        return ((PRIOR_ROLLOUTS * mean + known[1:]) / (PRIOR_ROLLOUTS + known[0])).clamp(min=0)

    def learn(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        measured: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add the visits of a step.

        Args:
            names: The `P` prompts.
            sizes: Rollouts of each.
            measured: `(quantities, P)`: what was measured of each.
            weights: `(P,)`: inverse probabilities, up to a factor, with which the prompts were drawn; None if evenly.
        """
        unknown = (0.0,) * (1 + self.quantities)
        total = torch.tensor(self.population or unknown, dtype=torch.float64) * POPULATION_DECAY
        shares = [1.0] * len(names) if weights is None else weights.tolist()
        for name, size, share, values in zip(names, sizes, shares, measured.double().mT.tolist(), strict=True):
            row = torch.tensor([1.0, *values], dtype=torch.float64)
            before = torch.tensor(self.visits.get(name, unknown), dtype=torch.float64)
            self.visits[name] = tuple((VISIT_DECAY * before + size * row).tolist())
            total += share * row
        if len(names):
            self.population = tuple(total.tolist())

    def state(self) -> dict[str, Any]:
        """Names, their sums, and those of all prompts."""
        table = torch.tensor(list(self.visits.values()), dtype=torch.float64)
        return {"names": list(self.visits), "table": table, "population": list(self.population)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        rows = map(tuple, state["table"].tolist())
        self.visits = dict(zip(state["names"], rows, strict=True))
        self.population = tuple(state["population"])


class Controller:
    """Decides the group size of every step, its prompts, and the number of rollouts and the weight of each."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        size = config.starting_group_size
        self.sizes = GroupSizeControl(_choices(config) if config.group_size == "auto" else (size,), config.seed, size)
        self.ledger = NoiseLedger(3 if config.follows_signal else 2)
        self._saving: dict[str, float | int] = {}
        self._weights: torch.Tensor | None = None
        """`(P,)` of the prompts of the step that was drawn last, which keep their mean unbiased."""
        self._allocated: int | list[int] = size
        """Rollouts of each prompt of that step; one number if all got the same."""

    @property
    def is_active(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self._config.controls)

    @property
    def needs_gram(self) -> bool:
        """Whether every step must be measured, also where the config records none."""
        is_measured = self._config.group_size == "auto" or self._config.allocate == "measured"
        return is_measured or self._config.follows_signal

    @property
    def config(self) -> TrainConfig:
        """The config of the next step: with its group size, and without a division if groups of 4 leave none."""
        if not self.is_active:
            return self._config
        size = self.sizes.group_size
        allocate = self._config.allocate if size > SMALLEST_MEASURED_GROUP else "uniform"
        return replace(self._config, group_size=size, allocate=allocate)

    def drawn_problems(self, problems: Sequence[Problem], number: int) -> list[Problem]:
        """The problems of step `number`, drawn in proportion to the root of their expected squared gradient.

        A task with no more problems than a step has prompts gives all of them.
        """
        probabilities = self.draw_probabilities(problems)
        places = systematic_draw(probabilities, seeded_generator(self._config.seed, "draw", number))
        self._weights = len(places) / (len(problems) * probabilities[places])
        return [problems[place] for place in places.tolist()]

    def draw_probabilities(self, problems: Sequence[Problem]) -> torch.Tensor:
        """Probability of every problem to be in the next step."""
        moments = self._signal(problems) + self._error(problems, self.sizes.group_size)
        return inclusion_probabilities(moments, min(self.config.prompts, len(problems)))

    def inputs(self, problems: Sequence[Problem]) -> dict[str, torch.Tensor]:
        """The weights of the problems of the present step, with `--draw` or `--shrink`; else nothing."""
        if not self._config.follows_signal:
            return {}
        weights = torch.ones(len(problems), dtype=torch.float64) if self._weights is None else self._weights
        if self._config.shrink:
            weights = weights * shrunk_weights(self._signal(problems), self._error(problems, self._allocated))
        self._saving |= {
            "control/smallest_weight": float(weights.min()),
            "control/largest_weight": float(weights.max()),
        }
        return {PROMPT_WEIGHTS: weights}

    def _signal(self, problems: Sequence[Problem]) -> torch.Tensor:
        """Predicted `|g_p|²` of every problem."""
        return self.ledger.predicted([problem.id for problem in problems])[2]

    def _error(self, problems: Sequence[Problem], sizes: int | Sequence[int]) -> torch.Tensor:
        """Predicted error of the gradient of every problem, for groups of these sizes."""
        size = torch.as_tensor(sizes, dtype=torch.float64)
        single, pair = self.ledger.predicted([problem.id for problem in problems])[:2]
        return single / size + pair / (size * (size - 1))

    def rollouts_of(self, problems: Sequence[Problem]) -> int | list[int]:
        """Rollouts of each problem of the next step; one number if all get the same."""
        self._allocated = self._allocation(problems)
        return self._allocated

    def _allocation(self, problems: Sequence[Problem]) -> int | list[int]:
        """Rollouts of each problem, by its predicted noise.

        A prompt gets from half to twice the mean, but no more than fit into a pass, and at least 4 where the mean
        allows it: noise is measured from 4 on.
        """
        size = self.sizes.group_size
        self._saving = {}
        if self._config.allocate == "uniform":
            return size
        single, pair = self.ledger.predicted([problem.id for problem in problems])[:2]
        sizes = _divided_rollouts(single, pair, size, self._config.micro_batch_size)
        even = allocation_error(single, pair, torch.full_like(sizes, size))
        self._saving = {
            "control/smallest_group": int(sizes.min()),
            "control/largest_group": int(sizes.max()),
            "control/error_of_uniform": allocation_error(single, pair, sizes) / even if even > 0 else 1.0,
        }
        return size if len(sizes.unique()) == 1 else sizes.tolist()

    def learn(self, step: Step) -> tuple[dict[str, float | int], str | None]:
        """Learn from a step; returns scalars `control/…`, and the decision in words if the group size moves."""
        if not self.is_active:
            return {}, None
        scalars: dict[str, float | int] = {GROUP_SIZE: self.sizes.group_size} | self._saving
        measured_prompts = _measured_prompts(step)
        places, estimates = measured_prompts.places, measured_prompts.estimates
        if self._config.allocate == "success":
            self._learn_rewards(step)
        elif (self._config.allocate == "measured" or self._config.follows_signal) and estimates is not None:
            names, sizes = step.rollouts.prompt_names, step.rollouts.group_sizes
            weights = None if self._weights is None else self._weights[places]
            measured = _measured_noise(estimates.moments)[: self.ledger.quantities]
            self.ledger.learn([names[p] for p in places], [sizes[p] for p in places], measured, weights)
        components = measured_prompts.components
        if self._config.draw == "measured":
            scalars |= dict.fromkeys(OF_PROMPTS, math.nan)
        elif components is not None and step.rollouts.group_size is None and min(step.rollouts.group_sizes) >= 4:
            scalars |= noise_scalars(components, len(places))  # the reading leaves out groups of unequal size
        if self._config.group_size != "auto":
            return scalars, None
        if components is not None:
            scalars |= replayed_scalars(components)
        advice = self.sizes.learn(step.number, components)
        if advice is None:
            return scalars, None
        scalars |= group_size_scalars(advice)
        if advice.recommended == advice.current:
            return scalars, None
        return scalars, advice.words(is_divided=self._config.allocate != "uniform")

    def _learn_rewards(self, step: Step) -> None:
        """Take the variance of a group's rewards as its noise, in groups with at least two rewards."""
        grid, sizes = step.rollouts.reward_grid, (~step.rollouts.reward_grid.isnan()).sum(1)
        kept = (sizes > 1).nonzero().squeeze(1).tolist()
        variances = torch.tensor([float(grid[p][~grid[p].isnan()].var()) for p in kept], dtype=torch.float64)
        names: list[str] = [step.rollouts.prompt_names[p] for p in map(int, kept)]
        self.ledger.learn(names, sizes[kept].tolist(), variances.expand(2, -1))

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"sizes": self.sizes.state(), "ledger": self.ledger.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        self.sizes.load_state(state["sizes"])
        self.ledger.load_state(state["ledger"])


def replayed_advice(config: TrainConfig, lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, GroupSizeAdvice]]:
    """The decisions about the group size of a run with `--group-size auto`, computed again from `metrics.jsonl`.

    Returns:
        Step and decision, in order. They equal those of the run: the scalars are stored without rounding.
    """
    control = GroupSizeControl(_choices(config), config.seed, config.starting_group_size)
    found: list[tuple[int, GroupSizeAdvice]] = []
    for line in lines:
        advice = control.learn(int(line["step"]), replayed_components(line))
        found += [] if advice is None else [(int(line["step"]), advice)]
    return found


def replayed_allocation(config: TrainConfig, groups: Sequence[GroupRecord]) -> dict[int, dict[str, int]]:
    """The division of every step among its prompts, decided again from the stored groups of earlier steps.

    Args:
        config: Of a run with `--allocate measured`, a fixed group size and prompts drawn evenly.
        groups: Training groups with Grams of all steps (`--measure-every 1`), in the order of the steps.

    Returns:
        Step → prompt → rollouts. They equal those of the run, up to ties that the rounding of stored Grams decides.

    Raises:
        ScoregramError: If the run divided by something else, or a step is not stored.
    """
    caller = "replayed_allocation"
    if config.allocate != "measured" or config.group_size == "auto" or config.follows_signal:
        got = f"allocate {config.allocate}, group_size {config.group_size}, draw {config.draw}, shrink {config.shrink}"
        fail(caller, "needs --allocate measured alone", got, "Other decisions on sizes: replayed_advice.")
    by_step: dict[int, list[GroupRecord]] = {}
    for group in groups:
        by_step.setdefault(group.step, []).append(group)
    if sorted(by_step) != list(range(1, len(by_step) + 1)):
        fail(caller, "every step must be stored", f"steps {sorted(by_step)[:5]}…", "Train with --measure-every 1.")
    ledger, found = NoiseLedger(), {}
    for number, step in by_step.items():
        single, pair = ledger.predicted([group.prompt_id for group in step])
        sizes = _divided_rollouts(single, pair, config.starting_group_size, config.micro_batch_size)
        found[number] = dict(zip([group.prompt_id for group in step], sizes.tolist(), strict=True))
        kept = [g for g in step if g.gram is not None and len(g.rewards) >= 4 and bool(g.rewards.isfinite().all())]
        moments = [group_moments(g.gram.double()[None], g.rewards.double()[None]) for g in kept if g.gram is not None]
        if kept:
            noises = torch.cat([_measured_noise(one) for one in moments], dim=1)[: ledger.quantities]
            ledger.learn([g.prompt_id for g in kept], [len(g.rewards) for g in kept], noises)
    return found


def _divided_rollouts(single: torch.Tensor, pair: torch.Tensor, size: int, rollouts_per_pass: int) -> torch.Tensor:
    """`(P,)` rollouts of prompts with these predicted noises, `size` on average."""
    least, most = max(2, size // 2, min(size, SMALLEST_MEASURED_GROUP)), min(2 * size, rollouts_per_pass or 2 * size)
    return allocated_rollouts(single, pair, size * len(single), least=least, most=most)


def _measured_noise(moments: GroupMoments) -> torch.Tensor:
    """`(3, P)`: what the ledger learns of prompts, `s`, `k` and `|g|²`."""
    pair = moments.variance_fisher_trace + moments.gradient_squared
    return torch.stack([moments.oracle_trace, pair, moments.gradient_squared])


def _choices(config: TrainConfig) -> tuple[int, ...]:
    """Group sizes that a run with `--group-size auto` can take."""
    return group_size_choices(config.batch_size, config.micro_batch_size)


@dataclass(frozen=True)
class _MeasuredPrompts:
    """The prompts of a step whose noise was measured."""

    places: Sequence[int] = ()
    """Their numbers in the step: those with 4 rollouts or more and all rewards."""
    estimates: PromptEstimates | None = None
    """None if there are no such prompts."""
    same_pass: torch.Tensor | None = None
    """`(P, P)`: whether two prompts were in the same pass, so that the Gram between them is known."""

    @property
    def components(self) -> NoiseComponents | None:
        """Noise of the step; None without two prompts in a pass."""
        if self.estimates is None or self.same_pass is None or not bool(self.same_pass.triu(1).any()):
            return None
        return components_of_estimates(self.estimates, same_pass=self.same_pass)


def _measured_prompts(step: Step) -> _MeasuredPrompts:
    """The prompts of a step whose noise was measured, from one pass or several."""
    rollouts = step.rollouts
    if step.gram is None or step.rows != "scores":
        return _MeasuredPrompts()
    gram, sizes = step.gram.matrix.cpu(), torch.tensor(rollouts.group_sizes)
    known = gram.isfinite()
    missing = torch.zeros(len(sizes)).index_add(0, rollouts.group_ids, rollouts.rewards.isnan().float())
    is_measured = torch.tensor([bool(known[here, here].all()) for here in rollouts.group_slices()])
    places = ((sizes >= 4) & (missing == 0) & is_measured).nonzero().squeeze(1)
    if not len(places):
        return _MeasuredPrompts()
    rows = torch.isin(rollouts.group_ids, places)
    prompt_of = torch.arange(len(places)).repeat_interleave(sizes[places])
    firsts = (sizes.cumsum(0) - sizes)[places]
    # A pair of passes has no Gram; zeros stand for it, and `same_pass` leaves it out of every mean over pairs.
    filled = gram.masked_fill(~known, 0)[rows][:, rows]
    estimates = unequal_prompt_estimates(filled, rollouts.rewards[rows], prompt_of)
    return _MeasuredPrompts(places.tolist(), estimates, known[firsts][:, firsts])
