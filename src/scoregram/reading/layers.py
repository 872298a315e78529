"""What each layer has of a run: squared score norms, energy of the update, and signal of the gradient."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scoregram.bootstrap import FEWEST
from scoregram.reading.group import row_factors
from scoregram.reading.run import RunReading
from scoregram.reading.step import layer_kinds
from scoregram.runs import TRAINING_KINDS, GroupRecord, Run
from scoregram.statistics import covariance_weights

MOST_LAYERS = 24
"""Layers that a map shows; with more, those that differ only in depth are added up."""


@dataclass(frozen=True)
class LayerShares:
    """Share of the squared score norms that each layer holds, over steps."""

    steps: tuple[float, ...]
    layers: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    """`shares[layer][step]`; the columns add up to 1."""


def layer_shares(run: Run, steps: Sequence[int]) -> LayerShares:
    """Share of `Σ_i |ψ_i|²` in every layer at some steps, `tr K_layer / Σ tr K_layer`; empty if none is stored."""
    totals: dict[int, dict[str, float]] = {}
    for record in run.groups(set(steps), layers=True):
        if record.kind in TRAINING_KINDS and record.by_layer:
            here = totals.setdefault(record.step, {})
            for name, gram in record.by_layer.items():
                here[name] = here.get(name, 0.0) + float(gram.diagonal().sum())
    names = list(dict.fromkeys(name for here in totals.values() for name in here))
    if len(names) > MOST_LAYERS:
        totals = {step: layer_kinds(here) for step, here in totals.items()}
        names = list(dict.fromkeys(name for here in totals.values() for name in here))
    whole = {step: sum(here.values()) for step, here in totals.items()}
    shown = [step for step in sorted(totals) if whole[step] > 0]
    rows = tuple(tuple(totals[step].get(name, 0.0) / whole[step] for step in shown) for name in names)
    return LayerShares(tuple(map(float, shown)), tuple(names), rows if shown else ())


def layer_energy_shares(run: RunReading, steps: int = 10) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Layers, and their shares of `Σ_groups |Σ_i A_i ψ_i|²` at the first and the last measured steps `(steps, L)`.

    Rows of a loss include their weights and are summed as they are. Steps whose self-check failed do not count. None
    without Grams of layers at `FEWEST` steps. The squared norm of an update is the sum over layers, so shares add up to
    1.
    """
    measured = run.usable_steps
    if run.folder is None or len(measured) < 2 * FEWEST:
        return None
    count = min(steps, len(measured) // 2)
    names: list[str] = []
    tables = []
    for chosen in (measured[:count], measured[-count:]):
        rows: dict[int, np.ndarray] = {}
        for record in run.folder.groups(chosen):
            if record.kind == run.groups[0].record.kind and record.by_layer:
                names = names or list(record.by_layer)
                found = update_energies(record)
                energy = [found[name] for name in names if name in found]
                rows[record.step] = rows.get(record.step, 0.0) + np.array(energy)
        shares = [row / row.sum() for row in rows.values() if len(row) == len(names) and row.sum() > 0]
        tables.append(np.array(shares))
    if not names or min(map(len, tables)) < FEWEST:
        return None
    return names, tables[0], tables[1]


def update_energies(record: GroupRecord) -> dict[str, float]:
    """`|Σ_i A_i ψ_i|²` of a group in each layer, `aᵀ K_layer a`; empty without Grams of layers."""
    a = row_factors(record.advantages.double(), record.rows)
    return {name: float(a @ gram.double() @ a) for name, gram in (record.by_layer or {}).items()}


def largest_layer(run: RunReading, step: int) -> tuple[str, float] | None:
    """The layer with the most of `Σ_groups |Σ_i A_i ψ_i|²` at a step, and its share; None without Grams of layers."""
    total: Counter[str] = Counter()
    for record in () if run.folder is None else run.folder.groups({step}):
        if record.kind == run.groups[0].record.kind:
            total.update(update_energies(record))
    whole = sum(total.values())
    if len(total) < 2 or not whole > 0:
        return None
    name = max(total, key=lambda one: total[one])
    return name, total[name] / whole


SIGNAL_STEPS = 30
"""Measured steps from which the signal of layers is estimated: more would cost time and change little."""


def layer_signals(run: RunReading) -> tuple[list[str], np.ndarray] | None:
    """Layers, and the unbiased `|g|²` of each `(steps, L)`: the mean over the complete groups of a step.

    From the last measured steps of the last third, at most `SIGNAL_STEPS`. None with fewer than `2 FEWEST` of them.
    """
    size = run.group_size or 0
    measured = sorted({group.record.step for group in run.last_measured if group.is_complete and group.size == size})
    if run.folder is None or size < 4:
        return None
    names: list[str] = []
    rows: dict[int, list[np.ndarray]] = {}
    for record in run.folder.groups(measured[-SIGNAL_STEPS:]):
        if record.kind != run.groups[0].record.kind or len(record.rewards) != size or not record.by_layer:
            continue
        names = names or list(record.by_layer)
        if list(record.by_layer) == names and bool(record.rewards.isfinite().all()):
            grams = torch.stack([gram.double() for gram in record.by_layer.values()])  # (L, R, R)
            weights = covariance_weights(record.rewards.double()[None])  # (1, R, R): those of all layers
            rows.setdefault(record.step, []).append((grams * weights).sum((1, 2)).numpy())
    if len(rows) < 2 * FEWEST:
        return None
    return names, np.array([np.mean(rows[step], axis=0) for step in sorted(rows)])
