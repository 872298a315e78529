"""Quantities over the steps of a run: the value of each step, and a running mean with its 95 % band."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from scoregram.bootstrap import t_quantile
from scoregram.reading.group import StoredGroup, row_factors
from scoregram.reading.nulls import stacked_spectra
from scoregram.reading.run import RunReading
from scoregram.statistics import mse_curve

SHORT = 12
"""A curve with at most this many defined values is not smoothed."""
WINDOWS = 15
"""A running mean covers about one part in this many of the steps."""
MOST_POINTS = 300
"""Longer curves are shown at every k-th step; the running mean still uses every step."""


@dataclass(frozen=True)
class Curve:
    """A quantity over steps. Tuples of equal length; `nan` where undefined."""

    steps: tuple[float, ...]
    raw: tuple[float, ...]
    """The value of each step."""
    mean: tuple[float, ...]
    """Running mean; equal to `raw` for a short curve."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Ends of the 95 % band of the mean; `nan` for a short curve."""
    window: int = 1
    """Steps in the running mean."""

    @property
    def is_smoothed(self) -> bool:
        """Whether `mean` differs from `raw`."""
        return self.window > 1

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Step and running mean wherever the mean is not `nan`, in order."""
        return tuple(pair for pair in zip(self.steps, self.mean, strict=True) if not math.isnan(pair[1]))

    def __bool__(self) -> bool:
        return any(not math.isnan(value) for value in self.raw)


def running_curve(steps: Sequence[float | int], values: Sequence[float]) -> Curve:
    """The values of a run's steps with their centred running mean, and a t interval over the values in the window.

    The window is an odd number of steps, about a fifteenth of them, and is cut off at both ends. The band treats
    neighbouring steps as independent, so it is too narrow where they are not. `nan` values are left out; a window with
    fewer than two values has no band.
    """
    raw = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(raw)
    if known.sum() <= SHORT:
        undefined = (math.nan,) * len(raw)
        return Curve(tuple(map(float, steps)), tuple(raw.tolist()), tuple(raw.tolist()), undefined, undefined)
    half = max(1, round(len(raw) / WINDOWS / 2))
    first = np.clip(np.arange(len(raw)) - half, 0, None)
    last = np.clip(np.arange(len(raw)) + half + 1, None, len(raw))
    centre = raw[known].mean()  # subtracted so that sums of squares do not cancel
    shifted = np.where(known, raw - centre, 0.0)
    count, total, squares = (
        np.concatenate([[0.0], np.cumsum(terms)])[last] - np.concatenate([[0.0], np.cumsum(terms)])[first]
        for terms in (known.astype(np.float64), shifted, shifted**2)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(count > 0, total / count, math.nan)
        variance = np.where(count > 1, np.clip(squares - count * mean**2, 0, None) / (count - 1), math.nan)
        error = np.sqrt(variance / count)
    width = error * np.array([t_quantile(int(n) - 1) if n > 1 else math.nan for n in count])
    mean = mean + centre
    shown = slice(None, None, max(1, math.ceil(len(raw) / MOST_POINTS)))
    columns = (np.asarray(steps, dtype=np.float64), raw, mean, mean - width, mean + width)
    return Curve(*(tuple(column[shown].tolist()) for column in columns), window=2 * half + 1)


def scalar_curve(run: RunReading, *names: str, failed: bool = False) -> Curve:
    """The curve of the first of these scalars that the run logged; without values if it logged none of them."""
    for name in names:
        steps, values = run.series(name, failed=failed)
        if steps:
            return running_curve(steps, values)
    return running_curve((), ())


def geometric_curve(run: RunReading, name: str, *, failed: bool = False) -> Curve:
    """A positive scalar for a logarithmic axis: its running geometric mean, with the band of the logarithm.

    A band of the arithmetic mean reaches below 0 where single steps stand out, and has no place on such an axis. Values
    that are not positive are left out.
    """
    steps, values = run.series(name, failed=failed)
    logs = running_curve(steps, [math.log(value) if value > 0 else math.nan for value in values])
    raised = {end: tuple(math.exp(value) for value in getattr(logs, end)) for end in ("raw", "mean", "low", "high")}
    return replace(logs, **raised)


def bounded_band(curve: Curve, least: float, most: float) -> Curve:
    """The curve with its band cut off at values that the quantity cannot have, such as a share above 1."""
    return replace(
        curve,
        low=tuple(max(value, least) for value in curve.low),
        high=tuple(min(value, most) for value in curve.high),
    )


def complement(curve: Curve) -> Curve:
    """`1 − q` of a quantity `q`."""
    flipped = {name: tuple(1 - value for value in getattr(curve, name)) for name in ("raw", "mean")}
    return replace(
        curve, **flipped, low=tuple(1 - value for value in curve.high), high=tuple(1 - value for value in curve.low)
    )


def negative(curve: Curve) -> Curve:
    """`−q` of a quantity `q`."""
    flipped = {name: tuple(-value for value in getattr(curve, name)) for name in ("raw", "mean")}
    return replace(curve, **flipped, low=tuple(-value for value in curve.high), high=tuple(-v for v in curve.low))


def entropy_curve(run: RunReading) -> Curve:
    """Entropy per token as logged, else its estimate, the mean of `−log π` of the sampled tokens; in nats."""
    return scalar_curve(run, "entropy") or negative(scalar_curve(run, "token_log_prob"))


def live_curve(run: RunReading) -> Curve:
    """Share of live groups among those with a reward, as logged, else from the stored groups."""
    steps, shares = run.live_share
    if steps or not run.has_whole_groups:
        return running_curve(steps, shares)
    judged = [group for group in run.groups if group.outcome != "unjudged"]
    return group_curve(judged, lambda group: float(group.is_live))


def group_curve(
    groups: Iterable[StoredGroup],
    quantity: Callable[[StoredGroup], float],
    over: Callable[[StoredGroup], float] | None = None,
) -> Curve:
    """Per step, the mean of a quantity over the groups in which it is defined.

    With `over`, the ratio of two sums over the groups in which both are defined, such as rank over null.
    """
    groups = list(groups)
    steps = np.array([group.record.step for group in groups], dtype=np.int64)
    above = np.array([quantity(group) for group in groups], dtype=np.float64)
    below = np.ones(len(groups)) if over is None else np.array([over(group) for group in groups], dtype=np.float64)
    known = ~(np.isnan(above) | np.isnan(below))
    places, place_of = np.unique(steps[known], return_inverse=True)
    sums, counts = (np.bincount(place_of, weights=terms[known], minlength=len(places)) for terms in (above, below))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(counts != 0, sums / counts, math.nan)
    return running_curve(places.tolist(), means.tolist())


@dataclass(frozen=True)
class GroupSizeCurve:
    """Error of the update by group size at a fixed number of rollouts, relative to the group size used."""

    sizes: tuple[float, ...]
    errors: tuple[float, ...]
    used: int


def mse_by_group_size(run: RunReading, largest: int = 64) -> GroupSizeCurve | None:
    """`MSE(R) / MSE(R used)` from the noise components of the last third; None if unknown or not positive.

    Args:
        run: The run.
        largest: Largest group size; twice the size used if that is more. Half the rollouts of a step if that is less,
            since a step needs two prompts.
    """
    noise, used = run.summary.components, run.group_size
    if noise is None or used is None or used < 2:
        return None
    sizes = sorted({*(2**power for power in range(1, 12)), *range(2, 13), used})
    most = max(largest, 2 * used)
    if math.isfinite(run.batch_size):
        most = max(used, min(most, run.batch_size // 2))
    sizes = [size for size in sizes if size <= most]
    errors = mse_curve(noise, 1, torch.tensor(sizes))
    base = float(errors[sizes.index(used)])
    if not base > 0:
        return None
    return GroupSizeCurve(tuple(map(float, sizes)), tuple((errors / base).tolist()), used)


@dataclass(frozen=True)
class SpectrumEnergies:
    """Share of the energy in every direction of a group's stacked matrix, over steps."""

    steps: tuple[float, ...]
    """First step of each bin."""
    shares: tuple[tuple[float, ...], ...]
    """`shares[direction][bin]`: mean over live groups; the columns add up to 1."""


MOST_BINS = 60
"""Columns of a map over steps; neighbouring steps share one if there are more."""
GROUPS_PER_BIN = 64
"""Groups from which a column is computed, evenly spaced among those it has."""


def spectrum_energies(live: Sequence[StoredGroup], directions: int = 16) -> SpectrumEnergies:
    """Mean energy shares `σ_k² / Σσ²` of groups, in order of step; empty without a group that has a Gram.

    Only groups of the most common size count. From bins with many groups, 64 evenly spaced ones are used.

    Args:
        live: Groups with a spectrum, in order of step.
        directions: Directions that are kept, the strongest first.
    """
    sizes = [group.size for group in live if group.record.gram is not None]
    if not sizes:
        return SpectrumEnergies((), ())
    size = max(set(sizes), key=sizes.count)
    usable = [group for group in live if group.record.gram is not None and group.size == size]
    places = sorted({group.record.step for group in usable})
    per_bin = math.ceil(len(places) / MOST_BINS)
    bin_of = {step: place // per_bin for place, step in enumerate(places)}
    members: dict[int, list[StoredGroup]] = {}
    for group in usable:
        members.setdefault(bin_of[group.record.step], []).append(group)
    columns = []
    for groups in members.values():
        drawn = groups[:: math.ceil(len(groups) / GROUPS_PER_BIN)]
        grams = [group.record.gram for group in drawn if group.record.gram is not None]
        factors = [row_factors(group.record.advantages, group.record.rows).double() for group in drawn]
        energies = stacked_spectra(grams, factors).square()  # (groups, R)
        columns.append((energies / energies.sum(dim=1, keepdim=True)).nanmean(dim=0)[:directions].tolist())
    first = tuple(float(places[place * per_bin]) for place in members)
    return SpectrumEnergies(first, tuple(zip(*columns, strict=True)))
